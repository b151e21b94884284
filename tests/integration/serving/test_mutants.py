"""The exactness tests can fail: they do on a server without fence, clearing of caches, or right stamps."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import psutil
import pytest

from example_trainer.errors import ProofFailed
from example_trainer.weights.shared_vllm import SharedVllmBridge
from example_trainer.weights.testing import config_of

pytestmark = pytest.mark.vllm

CLEARLY_WRONG = 1e-2

MUTANT = """
import sys
from pathlib import Path
from example_trainer.serving.engine import EngineAdapter

pause, resume = EngineAdapter.pause, EngineAdapter.resume
mutation = Path(sys.argv.pop(1))

async def broken_pause(self, *, discard):
    kind = mutation.read_text()
    if kind == "no fence":
        return await self.counters() | {"paused_requests": 0, "discarded_tokens": 0}
    return await pause(self, discard=discard and kind != "no clearing")

async def broken_resume(self, version):
    late = version is not None and mutation.read_text() == "stamp off by one"
    return await resume(self, str(int(version) - 1) if late else version)

EngineAdapter.pause, EngineAdapter.resume = broken_pause, broken_resume
from example_trainer.vllm_api_server import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def mutation(tmp_path_factory):
    path = tmp_path_factory.mktemp("mutant") / "kind"
    path.write_text("none")
    return path


@pytest.fixture(scope="module")
def mutant_server(start_server, mutation):
    server = start_server("--share-weights", launcher=[sys.executable, "-c", MUTANT, str(mutation)])
    server.publish()
    return server


def worst_under_publishes(server, decode_under_publishes, errors_of):
    replies, _, weights = decode_under_publishes(server, publishes=6, output_tokens=400, in_flight="recompute")
    return max(error for reply in replies for error in errors_of(weights, reply))


def worst_after_publish(server, reference, errors_of):
    prompt = [random.Random(3).randrange(2, 250) for _ in range(300)]
    server.generate(prompt, max_tokens=2)
    new = reference.variant(50)
    version = server.publish(lambda: server.write(new))["version"]
    reply = server.generate(prompt, max_tokens=20, compact=True, ignore_eos=True)
    return max(errors_of({version: new}, reply))


def test_r1_without_the_fence_tokens_come_from_mixtures(mutant_server, mutation, decode_under_publishes, errors_of):
    mutation.write_text("no fence")
    assert worst_under_publishes(mutant_server, decode_under_publishes, errors_of) > CLEARLY_WRONG


def test_r1_without_clearing_running_requests_read_old_kv(mutant_server, mutation, decode_under_publishes, errors_of):
    mutation.write_text("no clearing")
    assert worst_under_publishes(mutant_server, decode_under_publishes, errors_of) > CLEARLY_WRONG


def test_r37_without_clearing_a_prefix_of_the_old_policy_is_read(mutant_server, reference, mutation, errors_of):
    mutation.write_text("no clearing")
    assert worst_after_publish(mutant_server, reference, errors_of) > CLEARLY_WRONG


def test_r5_a_stamp_off_by_one_shows_in_the_tokens_and_in_the_sync_proof(mutant_server, reference, mutation, errors_of):
    mutation.write_text("none")
    old, new = reference.variant(60), reference.variant(61)
    weights = {mutant_server.publish(lambda: mutant_server.write(old))["version"]: old}
    mutation.write_text("stamp off by one")
    weights[mutant_server.publish(lambda: mutant_server.write(new))["version"]] = new
    reply = mutant_server.generate([5, 6, 7], max_tokens=20, compact=True, ignore_eos=True)
    assert max(errors_of(weights, reply)) > CLEARLY_WRONG
    manifest = str(mutant_server.manifest_path)
    bridge = SharedVllmBridge(config_of(mutant_server.url, mutant_server.model, vllm_config_path=manifest))
    bridge.prepare()
    with pytest.raises(ProofFailed, match="answered the probe from version"):
        bridge.publish(bridge.highest_version() + 1)
    bridge.close()


def test_unbroken_the_same_server_passes(mutant_server, reference, mutation, errors_of):
    mutation.write_text("none")
    assert worst_after_publish(mutant_server, reference, errors_of) < 1e-4


def test_kill_dash_nine_of_the_server_takes_its_engine_along(mutant_server):
    """The test is the last in this file, as it ends the server."""
    from example_trainer.weight_protocol.shm_header import sweep_stale_files

    family = psutil.Process(mutant_server.process.pid).children(recursive=True)
    boot_id = mutant_server.info()["boot_id"]
    assert family
    mutant_server.process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert list(Path("/dev/shm").glob(f"atropos-{boot_id}-*"))  # no process was left to remove them
    sweep_stale_files()
    assert not list(Path("/dev/shm").glob(f"atropos-{boot_id}-*"))
