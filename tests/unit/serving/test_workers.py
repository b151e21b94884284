"""A call to the workers of a server has the replies of all its ranks, and fails if one of them has failed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from example_trainer.errors import WorkerFailed
from example_trainer.serving.engine import EngineAdapter, worker_replies
from example_trainer.serving.vllm.failure_cause import ask_for_cause

RUN_PLUGINS = """
import json, multiprocessing
from multiprocessing import get_context


def look(pipe):
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.structured_output import StructuredOutputManager

    load_general_plugins()
    pipe.send([hasattr(EngineCore, "atropos_counters"), hasattr(StructuredOutputManager, "atropos_installed")])


if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    child = get_context("spawn").Process(target=look, args=(there,))
    child.start()
    print(json.dumps(here.recv()))
    child.join()
"""


def reply(value):
    return {"reply": json.dumps(value), "error": None}


def failure(text):
    return {"reply": None, "error": text}


def engine_of(call_utility_all_async):
    engine = object.__new__(EngineAdapter)
    engine.async_llm = SimpleNamespace(engine_core=SimpleNamespace(call_utility_all_async=call_utility_all_async))
    return engine


def calling(*engines):
    """Return the adapter of engines whose workers give these answers."""

    async def call(*called):
        assert called == ("collective_rpc", "atropos_call", None, ("atropos_checksum", 1), None)
        return list(engines)

    return engine_of(call)


def test_the_replies_of_all_ranks_are_returned_in_their_order():
    engine = calling([reply({"rank": 0}), reply({"rank": 1})])
    assert asyncio.run(engine.call_workers("atropos_checksum", 1)) == [{"rank": 0}, {"rank": 1}]
    assert asyncio.run(engine.call_worker("atropos_checksum", 1)) == {"rank": 0}


def test_a_worker_that_fails_in_another_engine_than_the_first_fails_the_call():
    """With --data-parallel-size an adapter was served that the second engine had not loaded."""
    with pytest.raises(WorkerFailed, match=r"^rank 1: no room$"):
        asyncio.run(calling([reply({})], [failure("no room")]).call_workers("atropos_checksum", 1))


def test_the_counts_are_those_of_all_engines_together():
    """A drain ended when the first engine had no requests, while others still computed."""
    idle = {"generated_tokens_total": 5, "requests_running": 0, "requests_waiting": 0, "kv_used_per_mille": 100}
    busy = {"generated_tokens_total": 7, "requests_running": 3, "requests_waiting": 1, "kv_used_per_mille": 300}

    async def call(method):
        assert method == "atropos_counters"
        return [idle, busy]

    counters = asyncio.run(engine_of(call).counters())
    assert counters == {
        "generated_tokens_total": 12,
        "requests_running": 3,
        "requests_waiting": 1,
        "kv_used_per_mille": 200,
    }


@pytest.mark.parametrize("failed", [0, 1])
def test_an_error_of_any_rank_fails_the_call_and_names_the_rank(failed):
    answers = [reply({}), reply({})]
    answers[failed] = failure("nothing has been received")
    with pytest.raises(WorkerFailed, match=f"^rank {failed}: nothing has been received$"):
        asyncio.run(calling(answers).call_worker("atropos_checksum", 1))


def test_the_error_of_the_only_worker_names_no_rank():
    with pytest.raises(WorkerFailed, match=r"^no room$"):
        worker_replies([failure("no room")])


@pytest.mark.parametrize("is_server", [True, False])
def test_a_spawned_process_of_the_server_gets_its_additions_and_one_of_another_vllm_does_not(
    is_server, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environ = dict(os.environ)
    environ.pop("ATROPOS_ENGINE_CAUSE", None)
    if is_server:
        ask_for_cause(environ, "00")
    script = tmp_path / "spawning.py"
    script.write_text(RUN_PLUGINS)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, script], env=environ, capture_output=True, text=True, timeout=250, check=False
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [is_server, is_server], done.stderr[-2000:]
