"""`make gpu` runs with torch, transformers and peft alone; a CPU runs what it can of its checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from example_trainer.modeling.loading import Sharding
from example_trainer.testing import make_tiny_model
from tests.gpu import sharing, test_fsdp_step, test_layouts, test_numerics, test_one_card, test_sharing_time
from tests.gpu.sharing import SCALES, MpsUnavailable, find, multi_process_service
from tests.gpu.training import make_model

REPOSITORY = Path(__file__).resolve().parents[3]
ABSENT = (
    "aiohttp",
    "blake3",
    "fastapi",
    "msgspec",
    "orjson",
    "prometheus_client",
    "pydantic",
    "uvicorn",
    "vllm",
    "wandb",
)
IMPORT_ALL = f"""
import importlib, sys
from pathlib import Path
for name in {ABSENT}:
    sys.modules[name] = None  # an import of it fails as if it were not installed
for path in sorted(Path("tests/gpu").glob("*.py")):
    importlib.import_module(f"tests.gpu.{{path.stem}}")
from example_trainer.model import PolicyOptions, load_policy
load_policy(PolicyOptions(model_name=sys.argv[1], dtype="bfloat16", device="cpu"))
"""


def test_the_checks_for_a_gpu_need_nothing_beyond_torch_transformers_and_peft(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORT_ALL, str(make_tiny_model(tmp_path))]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_trainer_and_server_do_to_each_other_is_measured_on_a_cpu_by_the_same_code() -> None:
    """All runs in one process, small: the figures mean nothing, but each has a value."""
    found = {name: [*run(sharing.SCALES["tiny"])] for name, run in sharing.RUNS.items()}
    sharing_alone, publish, gradients, killed = (found[name] for name in sharing.RUNS)
    assert min(sharing_alone[0].values()) > 0
    assert min(publish[0].values()) > 0
    assert gradients[0]["host"] > 0
    assert [*killed[0], *killed[1], *killed[2]] == ["kept", "successor", "read"]
    assert (killed[1]["successor"], killed[2]["read"]) == (1.0, 1.0)


process_group = test_fsdp_step.process_group


@pytest.mark.usefixtures("process_group")
def test_values_that_must_agree_on_a_gpu_agree_on_a_cpu_by_the_same_code(tmp_path: Path) -> None:
    """Packed and padded rows, one rank and a whole policy, logprobs of the head and those of fp64."""
    shape = test_layouts.SHAPES["window"]
    policy = test_layouts.make_policy(tmp_path / "window", "cpu", "float32", **shape)
    assert test_layouts.largest_difference([policy], varlen=False) <= 1e-4
    model = make_model(tmp_path / "model", layers=1, vocabulary=test_fsdp_step.VOCABULARY, **SCALES["tiny"].shape)
    wanted, found = (
        test_fsdp_step.weight_changes(model, sharding, "cpu", varlen=False) for sharding in (None, Sharding())
    )
    assert wanted.norm() > 0
    assert (found - wanted).norm() <= 1e-3 * wanted.norm()
    ours, rounded = test_numerics.head_errors(tokens=32, vocabulary=4000, width=256, device="cpu")
    assert ours <= 1e-3 < rounded


def test_a_run_that_ends_on_the_way_leaves_what_it_found_and_one_without_findings_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing.sys, "executable", str(tmp_path / "python"))
    write_program(tmp_path / "python", """echo '{"kept": 0.5}'; kill -9 $$""")
    assert find("killed_server") == {"kept": 0.5}
    write_program(tmp_path / "python", """echo '{"kept": 0.5}'; exec sleep 60""")
    assert find("killed_server", seconds=3.0) == {"kept": 0.5}, "CUDA may answer a read of dead memory never"
    write_program(tmp_path / "python", "exec sleep 60")
    with pytest.raises(RuntimeError, match="killed_server ran longer than"):
        find("killed_server", seconds=0.1)
    write_program(tmp_path / "python", "echo 'torch: no such card' >&2; exit 1")
    with pytest.raises(RuntimeError, match="no such card"):
        find("killed_server")


def test_the_checks_record_what_the_runs_find(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, float] = {}

    def record(claim: str, value: float | None, *, reason: str = "") -> None:
        recorded[claim] = -1.0 if value is None else value

    def pretend(run: str, *_: str, **environment: str) -> dict[str, float]:
        if run == "step_beside_server":
            return {"step": 3.0, "replay": 4.0} if environment else {"step": 1.0, "replay": 2.0}
        if run == "publish_beside_step":
            return {"same": 0.3, "aside": 0.006, "gigabytes": 3.1}
        return {"host": 1.5} if run == "gradients_to_host" else {"kept": 0.9, "successor": 1.0}

    for checks in (test_one_card, test_sharing_time):
        monkeypatch.setattr(checks, "find", pretend)
    monkeypatch.setattr(sharing.shutil, "which", lambda _: None)
    said: list[tuple[str, ...]] = []
    test_sharing_time.test_a_step_and_decoding_share_the_gpu(record)
    test_sharing_time.test_a_step_and_decoding_share_the_gpu_by_the_multi_process_service(record)
    test_one_card.test_a_publish_on_its_own_stream_does_not_wait_for_the_step(lambda *words: said.append(words), record)
    test_one_card.test_gradients_get_to_masters_in_host_memory_beside_the_backward(record)
    test_one_card.test_a_killed_server_leaves_room_for_the_next(lambda *words: said.append(words), record)
    assert recorded == {
        "step-beside-replay": 1.0,
        "replay-beside-step": 2.0,
        "step-beside-replay-mps": -1.0,
        "replay-beside-step-mps": -1.0,
        "publish-side-stream": pytest.approx(0.02),
        "publish-milliseconds": 6.0,
        "host-masters-step": 1.5,
        "memory-after-server-death": 0.9,
        "successor-beside-mapping": True,
    }
    assert said[-1] == ("reading the memory of a server that was killed", "ends the process")


def write_program(path: Path, lines: str) -> None:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


def test_the_multi_process_service_is_started_for_its_clients_and_ended_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = tmp_path / "nvidia-cuda-mps-control"
    write_program(program, f'echo "$1$([ -z "$1" ] && cat) $CUDA_MPS_PIPE_DIRECTORY" >> {asked}')
    with multi_process_service() as variables:
        where = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(where).is_dir()
        assert asked.read_text().split() == ["-d", where]
    assert asked.read_text().split() == ["-d", where, "quit", where]
    write_program(program, "echo 'no GPU here' >&2; exit 1")
    with pytest.raises(MpsUnavailable, match="no GPU here"), multi_process_service():
        raise AssertionError
