"""`atropos doctor RUN.yaml` finds faults of tokenizer, chat template, end of turn, sampling and logprobs."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.unit.launcher.doctor_bench import Bench

OWN_ENVIRONMENT = """
from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig, scored_group

class OwnEnv(BaseEnv):
    name = "own"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(steps_per_eval=0), APIServerConfig(server_type="vllm")

    async def setup(self):
        pass

    async def get_next_item(self):
        return 1

    async def collect_trajectories(self, item):
        IMPORT
        async with self.server.managed_server() as session:
            reply = await session.chat_completion(messages=[{"role": "user", "content": "Hello"}], SAMPLING)
            return scored_group(session.nodes, [1.0]), []

    async def evaluate(self):
        await self.server.chat_completion(messages=[{"role": "user", "content": "Hello"}], temperature=0.0, top_p=0.5)
"""


def own(sampling: str = "n=2", imported: str = "pass") -> str:
    return OWN_ENVIRONMENT.replace("SAMPLING", sampling).replace("IMPORT", imported)


def test_a_model_without_a_tokenizer_is_found(bench: Bench) -> None:
    (bench.model / "tokenizer.json").unlink()
    bench.find_one("tokenizer", "no tokenizer.json")


def test_a_tokenizer_that_cannot_be_loaded_is_found(bench: Bench) -> None:
    path = bench.model / "tokenizer.json"
    path.write_text(path.read_text()[:1000])
    bench.find_one("tokenizer", "cannot be loaded")


def test_a_token_beyond_the_embedding_is_found(bench: Bench) -> None:
    path = bench.model / "tokenizer.json"
    content = json.loads(path.read_text())
    last = len(content["model"]["vocab"]) - 1
    for index in range(last + 1, 400):
        content["added_tokens"].append({**content["added_tokens"][0], "id": index, "content": f"<|extra {index}|>"})
    path.write_text(json.dumps(content))
    bench.find_one("tokenizer", "'<|extra 399|>'", "id 399", "384 rows")


def test_an_environment_with_another_tokenizer_is_found(bench: Bench) -> None:
    other = bench.folder / "other"
    shutil.copytree(bench.model, other)
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[100:102]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(content))
    bench.chat(tokenizer_name=str(other))
    assert "leave env.tokenizer_name out" in bench.find_one("tokenizer", str(other), "not the tokenizer").advice
    bench.chat(tokenizer_name=str(bench.model))
    assert bench.find() == []


def test_a_server_with_another_tokenizer_is_found(bench: Bench) -> None:
    bench.sections["vllm"]["tokenizer"] = "/no/such/tokenizer"
    bench.find_one("tokenizer", "vllm.tokenizer", "/no/such/tokenizer")


def test_a_chat_without_a_template_is_found_with_a_hint_for_base_models(bench: Bench) -> None:
    (bench.model / "chat_template.jinja").unlink()
    bench.chat()
    assert "base model" in bench.find_one("chat template", "arithmetic_server.py chats").advice
    bench.sections["env"] = {"server": "math_server_zero.py", "max_token_length": 64, "data_path": str(bench.model)}
    assert bench.find() == [], "a text to continue needs no template"


def test_a_template_that_fails_is_found(bench: Bench) -> None:
    (bench.model / "chat_template.jinja").write_text("{{ messages[0].rolle | upper }}{% endif %}")
    bench.chat()
    bench.find_one("chat template", "fails", "TemplateSyntaxError")


def test_a_template_without_the_question_is_found(bench: Bench) -> None:
    (bench.model / "chat_template.jinja").write_text("<|user|>{{ messages[0].text }}<|end|><|assistant|>")
    bench.chat()
    bench.find_one("chat template", "leaves out the user's message")


def test_a_turn_that_ends_with_another_token_than_the_server_stops_at_is_found(bench: Bench) -> None:
    bench.edit("tokenizer_config.json", eos_token="<|pad|>")
    bench.edit("generation_config.json", eos_token_id=0)
    bench.edit("config.json", eos_token_id=0)
    bench.chat()
    found = bench.find_one("end of turn", "ends a turn with '<|end|>' (1)", "stops at '<|pad|>'")
    assert "generation_config.json" in found.advice
    bench.edit("generation_config.json", eos_token_id=[0, 1])
    assert bench.find() == []


def test_a_stop_text_ends_a_turn_too(bench: Bench) -> None:
    bench.edit("tokenizer_config.json", eos_token="<|pad|>")
    bench.edit("generation_config.json", eos_token_id=0)
    bench.write_environment(own('n=2, stop=["<|end|>"]'))
    assert bench.find() == []


def test_end_tokens_that_disagree_are_found(bench: Bench) -> None:
    bench.edit("config.json", eos_token_id=3)
    bench.edit("generation_config.json", eos_token_id=3)
    bench.find_one("end of turn", "'<|end|>' is 1", "end at 3")


def test_a_tokenizer_without_an_end_token_is_found(bench: Bench) -> None:
    bench.edit("tokenizer_config.json", eos_token="<|im_end|>")
    bench.find_one("end of turn", "'<|im_end|>'", "no token of its vocabulary")
    bench.edit("tokenizer_config.json", eos_token=None)
    assert bench.find() == [], "the server ends at generation_config.json's"
    bench.edit("generation_config.json", eos_token_id=None)
    bench.edit("config.json", eos_token_id=None)
    bench.find_one("end of turn", "names no eos_token")


@pytest.mark.parametrize("flags", [(), ("--vllm.logprobs_mode", "raw_logprobs")])
def test_other_logprobs_than_the_trainer_recomputes_are_found(bench: Bench, flags: tuple[str, ...]) -> None:
    if not flags:
        bench.sections["vllm"]["logprobs_mode"] = "raw_logprobs"
    assert "processed_logprobs" in bench.find_one("logprobs", "raw_logprobs", flags=flags).advice


def test_options_of_the_server_that_make_logprobs_inexact_are_found(bench: Bench) -> None:
    bench.sections["vllm"]["kv_cache_dtype"] = "fp8"
    bench.find_one("logprobs", "vllm.kv_cache_dtype fp8", verdict="warning")


def test_a_server_of_another_dtype_is_an_error_only_where_the_trainer_has_weights_of_its_own(bench: Bench) -> None:
    """In shared memory the server's tensors decide, and the trainer follows them with a warning."""
    bench.sections["vllm"]["dtype"] = "bfloat16"
    bench.find_one("logprobs", "vllm.dtype bfloat16", "trainer.dtype float32", verdict="warning")
    bench.sections["trainer"]["weight_bridge_mode"] = "lora_only"
    bench.find_one("logprobs", "vllm.dtype bfloat16", "trainer.dtype float32")


def test_a_server_option_that_cannot_share_weights_is_found(bench: Bench) -> None:
    bench.find_one("server", "--quantization fp8", flags=("--vllm.quantization", "fp8"))


def test_a_misspelt_option_of_the_server_is_found(bench: Bench) -> None:
    bench.sections["vllm"]["max_num_seq"] = 8
    assert "max_num_seqs" in bench.find_one("server", "vllm.max_num_seq").advice
    bench.sections["vllm"] = {"port": bench.sections["vllm"]["port"], "max_num_batched_tokens": 4096}
    assert bench.find() == [], "vLLM's own options are accepted"


def test_greedy_rollouts_are_found_and_greedy_evaluations_are_none(bench: Bench) -> None:
    bench.write_environment(own("n=2, temperature=0"))
    assert "own_env.py:20" in bench.find_one("temperature", "temperature 0", "greedy").text
    bench.write_environment(own("n=2, temperature=0.7"))
    assert bench.find() == [], "a session tells the trainer its temperature"


def test_truncated_rollouts_are_found_by_the_line_that_asks_for_them(bench: Bench) -> None:
    bench.write_environment(own("n=2, top_p=0.9, extra_body={'top_k': 20}"))
    found = bench.find()
    assert [(one.subject, one.verdict) for one in found] == [("sampling", "error")] * 2
    told = " ".join(one.text for one in found)
    assert "top_p 0.9 (own_env.py:20)" in told
    assert "top_k 20 (own_env.py:20)" in told
    bench.sections["env"]["allow_truncated_sampling"] = True
    assert {one.verdict for one in bench.find()} == {"warning"}


def test_defaults_that_the_server_would_apply_to_plain_requests_are_found(bench: Bench) -> None:
    bench.sections["vllm"]["override_generation_config"] = {"temperature": 1.0, "top_p": 0.8}
    bench.find_one("sampling", "top_p 0.8", verdict="warning")


def test_defaults_of_the_model_are_found_where_the_servers_are_not_ours(bench: Bench) -> None:
    bench.edit("generation_config.json", top_p=0.8)
    assert bench.find() == [], "our own server does not apply them"
    bench.sections["trainer"] |= {
        "weight_bridge_mode": "lora_only",
        "num_inference_nodes": 1,
        "inference_urls": ["http://elsewhere:9001"],
    }
    bench.find_one("sampling", "generation_config.json sets top_p 0.8", verdict="warning")


def test_text_alone_is_found_to_be_untrainable(bench: Bench) -> None:
    bench.chat()
    bench.sections["openai"]["server_type"] = "openai"
    bench.find_one("environment", "server_type", "openai")


def test_a_missing_environment_is_found(bench: Bench) -> None:
    bench.chat(server="arithmetik_server.py")
    bench.find_one("environment", "arithmetik_server.py", "no such file")


def test_a_misspelt_setting_of_the_environment_is_found(bench: Bench) -> None:
    bench.chat(group_siz=4)
    bench.find_one("environment", "'group_siz', did you mean group_size?")


def test_a_package_that_the_environment_imports_at_work_is_found(bench: Bench) -> None:
    bench.write_environment(own(imported="import no_such_package_here"))
    assert "pip install" in bench.find_one("environment", "no_such_package_here").advice


def test_an_environment_that_cannot_be_imported_is_found(bench: Bench) -> None:
    bench.write_environment("raise ValueError('not today')")
    bench.find_one("environment", "ValueError: not today")


def test_a_file_without_an_environment_class_is_only_noted(bench: Bench) -> None:
    bench.write_environment("print('no class')")
    assert [(one.verdict, one.subject) for one in bench.find()] == [("note", "environment")]


def test_groups_that_never_fill_a_batch_are_found(bench: Bench) -> None:
    bench.chat(group_size=6)
    bench.find_one("batch", "groups of env.group_size 6", "batch of 64")
    chat = {"env": {"server": "arithmetic_server.py", "group_size": 4, "max_token_length": 64}}
    other = {"env": {**chat["env"], "group_size": 6}}
    del bench.sections["env"]
    bench.sections["environments"] = [chat, other]  # type: ignore[assignment]
    assert bench.find() == [], "10 groups of 6 and one of 4 do"


def test_missing_data_are_found(bench: Bench) -> None:
    bench.chat(data_path="/no/such/data.jsonl")
    bench.find_one("environment", "env.data_path", "/no/such/data.jsonl")
