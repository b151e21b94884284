"""Adapters: the active one answers for the model, each request keeps the version it was admitted with."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vllm

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
    return start_server(
        "--enable-lora", "--max-lora-rank", "16", "--max-loras", "4", environ={"ATROPOS_BRIDGE_TOKEN": "known"}
    )


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


def test_names_are_not_reused_and_mistakes_are_told(lora_server, adapters, tmp_path):
    again = post(lora_server, "/lora/load", name="policy-v1", path=str(adapters[1][0]))
    assert (again.status_code, again.json()["type"].rsplit(":", 1)[1]) == (409, "name-used")
    assert post(lora_server, "/lora/load", name="x", path=str(tmp_path)).status_code == 422
    assert post(lora_server, "/lora/unload", name="x").status_code == 404
    assert lora_server.post("/lora/unload", {"name": "policy-v1"}).status_code == 401


def test_unloading_the_active_adapter_brings_the_model_back(lora_server):
    assert post(lora_server, "/lora/unload", name="policy-v2").json()["active"] is None
    assert lora_server.generate(PROMPT, max_tokens=2, compact=True)["policy_versions"] == [[[0, 2, None]]]
