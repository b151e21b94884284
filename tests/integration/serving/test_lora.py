"""Adapters: the active one answers requests for the model; each request keeps the version it was admitted with."""

from __future__ import annotations

import logging
import random
import re
import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest

from example_trainer.weight_protocol.transfer import AdapterPayload

pytestmark = pytest.mark.vllm

logger = logging.getLogger(__name__)

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def adapters(tiny_qwen2, tmp_path_factory):
    """Two random adapters on disk."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2ForCausalLM

    made = {}
    for number in (1, 2):
        torch.manual_seed(number)
        config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        path = tmp_path_factory.mktemp("adapter")
        model = get_peft_model(Qwen2ForCausalLM.from_pretrained(tiny_qwen2), config).eval()
        model.save_pretrained(path)
        made[number] = (path, model)
    return made


@pytest.fixture(scope="module")
def lora_server(start_server):
    flags = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "3", "--max-adapter-mib", "1")
    flags += ("--chat-template", "{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return start_server(*flags, environ={"ATROPOS_BRIDGE_TOKEN": "known"})


def post(server, route, **body):
    return server.post(route, body, Authorization="Bearer known")


def expected_logprobs(model, tokens):
    import torch

    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([PROMPT + tokens])).logits[0], dim=-1)
    return [float(scores[len(PROMPT) - 1 + index, token]) for index, token in enumerate(tokens)]


def test_without_the_flag_the_server_says_so(plain_server):
    status = plain_server.get("/lora/status")
    assert status["enabled"] is False
    assert "--enable-lora" in status["how_to_enable"]
    assert plain_server.post("/lora/load", {"name": "a", "path": "/"}).status_code == 401


def test_an_active_adapter_answers_for_the_model_under_its_own_version(lora_server, adapters):
    assert lora_server.generate(PROMPT, max_tokens=2, compact=True)["policy_versions"] == [[[0, 2, None]]]
    for number, (path, model) in adapters.items():
        loaded = post(lora_server, "/lora/load", name=f"policy-v{number}", path=str(path), version=number)
        assert loaded.status_code == 200, loaded.text
        assert lora_server.info()["policy_version"] == number
        reply = lora_server.generate(PROMPT, max_tokens=8, compact=True, ignore_eos=True)
        assert reply["policy_versions"] == [[[0, 8, number]]]
        assert reply["logprobs"][0] == pytest.approx(expected_logprobs(model, reply["token_ids"][0]), abs=1e-4)
    body = {"model": str(lora_server.model), "prompt": PROMPT, "max_tokens": 2}
    assert lora_server.post("/v1/completions", body).status_code == 200


def test_an_adapter_can_be_asked_for_by_name(lora_server):
    reply = lora_server.generate(PROMPT, max_tokens=2, compact=True, model="policy-v1")
    assert reply["policy_versions"] == [[[0, 2, 1]]]
    assert lora_server.post("/generate", {"prompt": PROMPT, "model": "policy-v9"}).status_code == 404


def test_names_are_not_reused_and_mistakes_are_reported(lora_server, adapters, tmp_path):
    again = post(lora_server, "/lora/load", name="policy-v1", path=str(adapters[1][0]))
    assert (again.status_code, again.json()["type"].rsplit(":", 1)[1]) == (409, "name-used")
    assert post(lora_server, "/lora/load", name="x", path=str(tmp_path)).status_code == 422
    assert post(lora_server, "/lora/unload", name="x").status_code == 404
    assert lora_server.post("/lora/unload", {"name": "policy-v1"}).status_code == 401


def test_vllms_own_routes_load_under_a_name_of_its_own_and_read_the_file_once(lora_server, adapters):
    """R28: they require a token. Loading in place under one name would read the file again in each step."""
    before = lora_server.debug()["adapter_disk_loads_total"]
    body = {"lora_name": "mine", "lora_path": str(adapters[1][0]), "load_inplace": True}
    assert lora_server.post("/v1/load_lora_adapter", body).status_code == 401
    loaded = post(lora_server, "/v1/load_lora_adapter", **body)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    asked = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "model": "mine", "return_token_ids": True}
    completion = lora_server.post("/v1/completions", asked).json()
    reply = lora_server.generate(PROMPT, max_tokens=20, temperature=0, compact=True, model="policy-v1")
    assert completion["choices"][0]["token_ids"] == reply["token_ids"][0]
    assert lora_server.info()["policy_version"] == 2, "the model's own name still means the newest policy"
    assert lora_server.debug()["adapter_disk_loads_total"] == before + 1
    listed = [model["id"] for model in lora_server.get("/v1/models")["data"]]
    assert listed == [str(lora_server.model), "policy-v1", "policy-v2", "mine"]
    assert post(lora_server, "/v1/unload_lora_adapter", lora_name="mine").status_code == 200
    assert lora_server.post("/v1/completions", asked).status_code == 404


def test_unloading_the_active_adapter_brings_the_model_back(lora_server):
    assert post(lora_server, "/lora/unload", name="policy-v2").json()["active"] is None
    assert lora_server.generate(PROMPT, max_tokens=2, compact=True)["policy_versions"] == [[[0, 2, None]]]


class Sender:
    """A trainer of `lora_only` that only publishes random adapters."""

    def __init__(self, server, tiny_qwen2):
        import torch
        from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
        from transformers import Qwen2ForCausalLM

        self.server, self.torch = server, torch
        base = Qwen2ForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float32)
        config = LoraConfig(r=8, lora_alpha=24, target_modules="all-linear", init_lora_weights=False)
        self.model = get_peft_model(base, config).eval()
        self.state = lambda: get_peft_model_state_dict(self.model)
        self.config = {**config.to_dict(), "target_modules": sorted(config.target_modules)}
        self.version, self.loaded = 10, None
        self.tensors = {}

    def send(self, change=lambda tensors: tensors, **query):
        """Send the next version, clearly different from all others; return the server's answer."""
        body = AdapterPayload.write(change(dict(self.make())), self.config).body
        return self.post_body(body, version=self.version, **query)

    def save(self, path):
        """Write the next version as a directory."""
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.model, self.make())
        self.model.save_pretrained(path)
        self.loaded = self.version

    def make(self):
        """Return the tensors of the next version."""
        self.version += 1
        noise = self.torch.Generator().manual_seed(self.version)
        tensors = {
            name: self.torch.randn(tensor.shape, generator=noise) * (0.1 if "lora_A" in name else 0.05)
            for name, tensor in self.state().items()
        }
        self.tensors[self.version] = tensors
        return tensors

    def post_body(self, body, **query):
        headers = {"Authorization": "Bearer known"}
        return self.server.client.post("/lora/upload", content=body, params=query, headers=headers)

    def logprobs(self, version, prompt, tokens):
        from peft import set_peft_model_state_dict

        if version != self.loaded:
            set_peft_model_state_dict(self.model, self.tensors[version])
            self.loaded = version
        with self.torch.no_grad():
            logits = self.model(self.torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = self.torch.tensor(tokens)[:, None]
        return self.torch.log_softmax(logits, dim=-1).gather(-1, chosen).squeeze(-1).tolist()

    def errors(self, reply):
        """Return |given - expected| logprob of each token of one reply, under the single version stamped on it."""
        ((start, end, version),) = reply["policy_versions"][0]
        tokens = reply["token_ids"][0]
        assert (start, end) == (0, len(tokens))
        expected = self.logprobs(version, reply["prompt_token_ids"], tokens)
        return [abs(said - told) for said, told in zip(reply["logprobs"][0], expected, strict=True)]


@pytest.fixture(scope="module")
def sender(lora_server, tiny_qwen2):
    return Sender(lora_server, tiny_qwen2)


def test_r5_successive_adapters_differ_clearly_so_that_exactness_is_decided(sender):
    assert sender.send().status_code == sender.send().status_code == 200
    output = [random.Random(1).randrange(2, 250) for _ in range(200)]
    first, second = (sender.logprobs(sender.version - back, [5, 6], output) for back in (1, 0))
    assert statistics.fmean(abs(a - b) >= 1e-2 for a, b in zip(first, second, strict=True)) >= 0.9


def test_the_model_itself_is_computed_without_an_adapter_whatever_runs_beside_it(lora_server, sender, reference):
    """On a CPU vLLM took its mark of no adapter, -1, for the last slot; here all slots hold adapters in use."""
    post(lora_server, "/lora/unload", name=lora_server.get("/lora/status")["active"])
    names = []
    for _ in range(3):
        assert sender.send(activate=False).status_code == 200
        names.append(f"policy-v{sender.version}")
    asked = {"max_tokens": 60, "ignore_eos": True, "compact": True}
    with ThreadPoolExecutor(9) as pool:
        beside = [pool.submit(lora_server.generate, PROMPT, model=name, **asked) for name in names]
        plain = [pool.submit(lora_server.generate, PROMPT, **asked) for _ in range(6)]
        replies = [each.result() for each in plain]
        errors = [error for each in beside for error in sender.errors(each.result())]
    for reply in replies:
        (tokens,), (said,) = reply["token_ids"], reply["logprobs"]
        assert reply["policy_versions"] == [[[0, 60, None]]]
        expected = reference.logprobs(reference.base, PROMPT, tokens)
        errors += [abs(a - b) for a, b in zip(said, expected, strict=True)]
    assert max(errors) <= 1e-4


def in_metrics(server):
    """Return the names of all adapters in `/metrics`."""
    rows = re.findall(r"^vllm:lora_requests_info{(.*)}", server.client.get("/metrics").text, re.MULTILINE)
    return {name for row in rows for names in re.findall(r'_lora_adapters="(.*?)"', row) for name in names.split(",")}


def loaded(server):
    return [adapter["name"] for adapter in server.get("/lora/status")["adapters"]]


def test_r23_an_adapter_sent_as_tensors_is_the_policy_under_the_models_name_on_every_route(lora_server, sender):
    answer = sender.send()
    assert answer.status_code == 200, answer.text
    version = sender.version
    assert lora_server.info()["policy_version"] == version
    reply = lora_server.generate(PROMPT, max_tokens=40, compact=True, ignore_eos=True)
    assert reply["policy_versions"] == [[[0, 40, version]]]
    assert max(sender.errors(reply)) <= 1e-4
    named = {"model": str(lora_server.model), "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    greedy = lora_server.generate(PROMPT, max_tokens=12, temperature=0, compact=True)["token_ids"][0]
    completion = lora_server.post("/v1/completions", {**named, "prompt": PROMPT}).json()
    assert completion["choices"][0]["token_ids"] == greedy
    chat = {**named, "messages": [{"role": "user", "content": "abcdef"}]}
    said = lora_server.post("/v1/chat/completions", chat).json()
    assert said["model"] == f"policy-v{version}"
    same = lora_server.generate(said["prompt_token_ids"], max_tokens=12, temperature=0, compact=True)
    assert said["choices"][0]["token_ids"] == same["token_ids"][0]


def send_while_running(server, sender, wait_until, prompts):
    """Send four adapters while requests run; return the replies to them and to a later one, and what is retired then.

    The last is None if a request ended before the others were inside, or while it was asked: with its workers as
    processes, vLLM's engine waits in a busy loop, and this process got no time for up to 3 s on two cores.
    """
    sender.send()
    oldest = sender.version
    length = {"n": 12, "max_tokens": 700, "ignore_eos": True}
    with ThreadPoolExecutor(12) as pool:
        pending = [pool.submit(server.generate, prompt, compact=True, **length) for prompt in prompts]
        other = {"model": str(server.model), "prompt": PROMPT, **length}
        told = pool.submit(server.post, "/v1/completions", other)

        def some_ended():
            return told.done() or any(each.done() for each in pending)

        wait_until(lambda: server.debug()["requests_inside"] == len(pending) + 1 or some_ended())
        wait_until(lambda: f"policy-v{oldest}" in in_metrics(server) or some_ended())
        for _ in range(0 if some_ended() else 4):
            assert sender.send().status_code == 200
        later = server.generate(prompts[-1], max_tokens=30, ignore_eos=True, compact=True)
        # A later adapter that nobody uses is dropped after two looks.
        wait_until(lambda: len(server.get("/lora/status")["retired"]) <= 1)
        status = server.get("/lora/status")
        kept = None if some_ended() else (status["retired"], [adapter["name"] for adapter in status["adapters"]])
        replies = [each.result() for each in pending]
        assert told.result().json()["model"] == f"policy-v{oldest}"
    assert {version for reply in replies for ((_, _, version),) in reply["policy_versions"]} == {oldest}
    return replies, later, kept, f"policy-v{oldest}"


def test_r23_running_requests_end_on_the_adapter_they_began_with_and_old_ones_go_with_their_last(
    lora_server, sender, wait_until
):
    shared = [random.Random(5).randrange(2, 250) for _ in range(280)]
    lora_server.generate(shared, max_tokens=2)
    for _ in range(10):
        replies, later, kept, oldest = send_while_running(lora_server, sender, wait_until, [PROMPT, shared] * 4)
        if kept is not None:
            break
    assert kept is not None, "in ten tries no requests outlived four adapters"
    retired, names = kept
    assert retired == [oldest], "it is kept for the requests that run with it"
    assert oldest not in names
    assert later["policy_versions"][0][0][2] == sender.version, "the prefix of the old adapter is not reused"
    errors = [error for reply in [*replies, later] for error in sender.errors(reply)]
    assert len(errors) >= 2000
    assert max(errors) <= 1e-4
    assert statistics.fmean(errors) <= 5e-6
    wait_until(lambda: lora_server.get("/lora/status")["retired"] == [])
    counters = lora_server.debug()
    assert counters["adapters_in_memory"] == len(loaded(lora_server)) == 3
    assert counters["adapter_disk_loads_total"] == 3, "each adapter that was loaded by path is listed once"
    assert in_metrics(lora_server) <= {"", *loaded(lora_server)}, "rows of adapters that are gone would accumulate"
    assert lora_server.post("/generate", {"prompt": PROMPT, "model": oldest}).status_code == 404


def without_one_half(tensors):
    del tensors[next(name for name in tensors if "lora_B" in name)]
    return tensors


def of_a_wrong_size(tensors):
    name = next(iter(tensors))
    return tensors | {name: tensors[name][:, :-1].contiguous()}


def with_a_nan(tensors):
    next(iter(tensors.values()))[0, 0] = float("nan")
    return tensors


def for_another_model(tensors):
    return {name.replace("self_attn", "linear_attn"): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("change", [without_one_half, of_a_wrong_size, with_a_nan, for_another_model])
def test_a_rejected_adapter_leaves_the_old_one_serving(lora_server, sender, change):
    before = lora_server.get("/lora/status")
    refused = sender.send(change)
    assert refused.status_code == 422, refused.text
    assert refused.json()["type"].endswith("bad-adapter")
    assert lora_server.get("/lora/status") == before
    reply = lora_server.generate(PROMPT, max_tokens=30, ignore_eos=True, compact=True)
    assert max(sender.errors(reply)) <= 1e-4


def test_an_upload_is_limited_guarded_and_taken_once(lora_server, sender):
    assert sender.post_body(b"x" * (2 << 20), version=900).status_code == 413
    assert sender.post_body(b"no safetensors", version=900).status_code == 422
    assert lora_server.client.post("/lora/upload", content=b"", params={"version": 900}).status_code == 401
    sender.send()
    again = AdapterPayload.write(sender.tensors[sender.version], sender.config).body
    assert sender.post_body(again, version=sender.version).status_code == 200, "only its answer was lost"
    older = sender.post_body(again, version=sender.version - 1, name="older")
    assert (older.status_code, older.json()["type"].rsplit(":", 1)[1]) == (409, "version-not-new")


def test_a_check_tells_the_checksum_and_that_the_engine_computes_with_what_was_sent(lora_server, sender):
    assert sender.send().status_code == 200
    name = f"policy-v{sender.version}"
    told = post(lora_server, "/lora/check", name=name).json()
    payload = AdapterPayload.write(sender.tensors[sender.version], sender.config)
    assert told == {"digest": payload.digest(), "misplaced": []}
    assert post(lora_server, "/lora/check", name="policy-v1").status_code == 404


@pytest.mark.parametrize("load", ["idle", "decoding", "long shared prompts"])
def test_r5_under_any_load_each_token_is_of_the_adapter_stamped_on_it(lora_server, sender, publishes_under, load):
    assert sender.send().status_code == 200
    replies, answers = publishes_under(lora_server, sender.send, load)
    assert all(answer.status_code == 200 for answer in answers)
    replies.sort(key=lambda reply: reply["policy_versions"][0][0][2])
    errors = [error for reply in replies for error in sender.errors(reply)]
    logger.info("%s: %d publishes, %d tokens, max %.1e", load, len(answers), len(errors), max(errors))
    assert len({reply["policy_versions"][0][0][2] for reply in replies}) >= len(answers) / 2
    assert max(errors) <= 1e-4
    assert statistics.fmean(errors) <= 5e-6
