"""A server of two workers that split each layer: each gets its part of an adapter, and every rank's reply counts."""

from __future__ import annotations

import psutil
import pytest

from .test_lora import PROMPT, Sender

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def server(start_server):
    flags = ("--tensor-parallel-size", "2", "--enable-lora", "--max-lora-rank", "16", "--await-policy")
    started = start_server(*flags, environ={"ATROPOS_BRIDGE_TOKEN": "known"})
    yield started
    started.stop()


@pytest.fixture(scope="module")
def sender(server, tiny_qwen2):
    return Sender(server, tiny_qwen2)


def check(server, name):
    return server.post("/lora/check", {"name": name}, Authorization="Bearer known").json()


def test_each_sent_adapter_is_served_under_its_version_from_the_parts_of_both_ranks(server, sender):
    (engine,) = psutil.Process(server.process.pid).children()
    assert len([child for child in engine.children() if "resource_tracker" not in " ".join(child.cmdline())]) == 2
    for _ in range(2):
        answer = sender.send()
        assert answer.status_code == 200, answer.text
        reply = server.generate(PROMPT, max_tokens=40, compact=True, ignore_eos=True)
        assert reply["policy_versions"] == [[[0, 40, sender.version]]]
        assert max(sender.errors(reply)) <= 1e-4
        assert check(server, f"policy-v{sender.version}")["misplaced"] == []
    assert server.debug()["generated_tokens_total"] > 0


def test_an_adapter_that_does_not_fit_one_rank_alone_is_refused_and_no_rank_keeps_it(server, sender):
    """Rows beyond the layer's belong to no rank, so only the last one can detect them."""
    before = server.debug()

    def too_long(tensors):
        name = next(name for name in tensors if "q_proj.lora_B" in name)
        tensors[name] = sender.torch.cat([tensors[name], tensors[name][:4]])
        return tensors

    answer = sender.send(too_long)
    assert (answer.status_code, answer.json()["type"].rsplit(":", 1)[1]) == (422, "bad-adapter")
    assert "rank 1:" in answer.json()["detail"]
    assert "rank 0:" not in answer.json()["detail"]
    after = server.debug()
    for name in ("adapters_in_memory", "adapters_registered"):
        assert after[name] == before[name]
    assert sender.send().status_code == 200
    reply = server.generate(PROMPT, max_tokens=20, compact=True, ignore_eos=True)
    assert reply["policy_versions"] == [[[0, 20, sender.version]]]
    assert max(sender.errors(reply)) <= 1e-4


def test_an_adapter_from_a_directory_is_split_too_and_a_failure_of_both_ranks_is_one_error(server, sender, tmp_path):
    sender.save(tmp_path / "saved")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("{}")
    answers = [
        server.post("/lora/load", {"name": name, "path": str(tmp_path / name)}, Authorization="Bearer known")
        for name in ("broken", "saved")
    ]
    assert [answer.status_code for answer in answers] == [422, 200], [answer.text for answer in answers]
    assert set(server.debug()) >= {"adapter_disk_loads_total", "adapters_registered"}, "replies match requests again"
    reply = server.generate(PROMPT, max_tokens=20, compact=True, ignore_eos=True)
    said, expected = reply["logprobs"][0], sender.logprobs(sender.version, PROMPT, reply["token_ids"][0])
    assert said == pytest.approx(expected, abs=1e-4)
