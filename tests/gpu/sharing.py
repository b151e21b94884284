"""Trainer and server on one card: each function runs both and returns how they affect each other.

A second process (`exporter.py`) stands for the server: it owns fused weights and computes with them. The device is an
argument, so that a CPU runs the same code. `python -m tests.gpu.sharing RUN [SCALE]` prints what a run finds, one JSON
object a line: a process of its own can have its own CUDA settings, and what ends it ends no other check.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from example_trainer.model import load_policy
from example_trainer.modeling.attention import install
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.policy import Policy
from example_trainer.modeling.side_streams import SideStream
from example_trainer.weight_protocol.segment import SharedSegment, make_segment
from example_trainer.weight_protocol.shm_header import sweep_stale_files
from example_trainer.weights.tensor_map import StridedRegion, view_at
from tests.gpu.modes import memory_taken
from tests.gpu.page import ROOT
from tests.gpu.training import make_model, make_rows, run_step
from tests.gpu.variables import with_repository

SMALL = (2, 256, 512)
LARGE = (28, 1536, 8960)  # the shape of a 1.5B model
PUBLISHES = 5
BEGUN_SECONDS = 0.05
"""Time after which a step has enqueued kernels: a real publish first asks the server to stop sampling."""
SETTLE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The sizes of a run, and its device."""

    device: str
    served: tuple[int, int, int]
    """Layers, hidden size and inner size of the server."""
    layers: int
    vocabulary: int
    rows: int
    seconds: float
    shape: Mapping[str, int] = field(default_factory=dict)


SCALES = {
    "full": Scale(device="cuda", served=LARGE, layers=12, vocabulary=32_768, rows=64, seconds=2.0),
    "1.5B": Scale(device="cuda", served=LARGE, layers=28, vocabulary=151_936, rows=32, seconds=2.0),
    "tiny": Scale(
        device="cpu",
        served=(1, 64, 128),
        layers=1,
        vocabulary=512,
        rows=2,
        seconds=0.2,
        shape={"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    ),
}


class ExporterProcess:
    """The process that stands for the server, and the commands to it."""

    def __init__(self, shape: tuple[int, int, int], device: str = "cuda", **environment: str) -> None:
        self._device = device
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("exporter.py")), device, *map(str, shape)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=with_repository(os.environ, **environment),
        )

    def ask(self, command: str) -> Any:
        self.tell(command)
        return self.hear(command)

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def hear(self, command: str) -> Any:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer:
            self.process.wait(30)
            self.errors.seek(0)
            lines = [line for line in self.errors.read().splitlines() if line.strip()]
            raise RuntimeError(f"the exporter ended when asked to {command}: {lines[-1] if lines else 'no error'}")
        return json.loads(answer)

    def attach(self) -> tuple[SharedSegment, dict[str, torch.Tensor]]:
        exported = self.ask("export")
        segment = make_segment(self._device)
        storages = {each["id"]: segment.attach(each["handle"]) for each in exported["storages"]}
        return segment, {
            name: view_at(
                storages[storage], StridedRegion(storage, offset, tuple(shape), tuple(stride)), torch.bfloat16
            )
            for name, (storage, offset, shape, stride) in exported["placements"].items()
        }

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(30)
        self.errors.close()


def publish(views: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor], segment: SharedSegment) -> None:
    for name, master in masters.items():
        views[name].copy_(master, non_blocking=True)
    segment.synchronise()


def random_masters(views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(view.shape, device=view.device) * view.shape[-1] ** -0.5 for name, view in views.items()}


def policy_of(scale: Scale, directory: Path, **options: Any) -> Policy:
    """Return a policy of this scale; its model is written to the directory once."""
    if not directory.exists():
        make_model(directory, scale.layers, scale.vocabulary, **scale.shape)
    policy = load_policy(PolicyOptions(model_name=str(directory), dtype="bfloat16", device=scale.device, **options))
    install(policy.module)
    return policy


def rows_of(scale: Scale) -> list[Any]:
    return make_rows(scale.rows, min(scale.vocabulary, 30_000))


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_beside_server(scale: Scale) -> Iterator[dict[str, float]]:
    """Yield how much a training step and the server's forward are slowed down by each other."""
    with tempfile.TemporaryDirectory() as directory:
        policy = policy_of(scale, Path(directory) / "model")
        server = ExporterProcess(scale.served, scale.device)
        try:
            _step_seconds(policy, scale, scale.seconds)  # warms up
            alone = _step_seconds(policy, scale, scale.seconds)
            rate = server.ask(f"replays {scale.seconds}")["replays"] / scale.seconds
            server.tell(f"replays {3 * scale.seconds}")
            together = _step_seconds(policy, scale, 3 * scale.seconds)
            rate_together = server.hear("replays")["replays"] / (3 * scale.seconds)
        finally:
            server.close()
    yield {"step": together / alone, "replay": rate / rate_together}


def _step_seconds(policy: Policy, scale: Scale, seconds: float) -> float:
    rows = rows_of(scale)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        wait_for(policy.device)
        started = time.perf_counter()
        run_step(policy, rows, "packed")
        wait_for(policy.device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def publish_beside_step(scale: Scale) -> Iterator[dict[str, float]]:
    """Yield the seconds of a publish during a step's kernels: on the stream that trains, then on one of its own."""
    with tempfile.TemporaryDirectory() as directory:
        policy = policy_of(scale, Path(directory) / "model")
        segment = make_segment(scale.device, os.urandom(8).hex())
        served = {name: master.to(policy.dtype, copy=True).detach() for name, master in policy.masters.items()}
        segment.export(served)
        policy.attach(served, forwards_from_masters=True)
        try:
            found = {
                kind: _publish_seconds(policy, segment, scale, aside=kind == "aside") for kind in ("same", "aside")
            }
        finally:
            segment.close()
    yield found | {"gigabytes": sum(each.nbytes for each in served.values()) / 1e9}


def _publish_seconds(policy: Policy, segment: SharedSegment, scale: Scale, *, aside: bool) -> float:
    stream, rows, times = SideStream(policy.device), rows_of(scale), []

    def write(context: Any) -> float:
        time.sleep(BEGUN_SECONDS)
        started = time.perf_counter()
        with context:
            policy.write_served()
            segment.synchronise()
        return time.perf_counter() - started

    with ThreadPoolExecutor(1) as pool:
        for _ in range(PUBLISHES + 1):
            wait_for(policy.device)
            written = pool.submit(write, stream.after_present_work() if aside else nullcontext())
            run_step(policy, rows, "packed")
            times.append(written.result())
    return statistics.median(times[1:])


def gradients_to_host(scale: Scale) -> Iterator[dict[str, float]]:
    """Yield the time of a step's micro-batches with masters in host memory, to the time with masters on the card."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for place in ("fp32", "host"):
            policy = policy_of(scale, Path(directory) / "model", master_weights=place)
            found[place] = _step_seconds(policy, scale, scale.seconds)
            del policy
    yield {"host": found["host"] / found["fp32"]}


def killed_server(scale: Scale) -> Iterator[dict[str, float]]:
    """Yield what memory a killed server leaves taken while it is mapped, if another takes its place, and a read of it.

    The read comes last, in a finding of its own: CUDA promises nothing about memory whose owner has ended.
    """
    before = memory_taken()
    server = ExporterProcess(scale.served, scale.device)
    successor = None
    try:
        _, views = server.attach()
        size = sum(view.nbytes for view in views.values())
        total = sum(float(view.float().sum()) for view in views.values())
        server.kill()
        time.sleep(min(SETTLE_SECONDS, scale.seconds))
        yield {"kept": (memory_taken() - before) / size}
        successor = ExporterProcess(scale.served, scale.device)
        segment, fresh = successor.attach()
        publish(fresh, random_masters(fresh), segment)
        answer = successor.ask("replay")
        yield {"successor": float(answer["replayed"] == answer["eager"])}
        again = sum(float(view.float().sum()) for view in views.values())
        yield {"read": float(again == total)}
    finally:
        for each in (server, successor):
            if each is not None:
                each.close()
        sweep_stale_files()  # on a CPU the killed server has left one


class MpsUnavailable(Exception):
    """CUDA's Multi-Process Service cannot be started here; the message says why."""


@contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """Run a Multi-Process Service of its own; yield the variables by which programs become its clients."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise MpsUnavailable("nvidia-cuda-mps-control is not installed")
    with tempfile.TemporaryDirectory(prefix="mps-") as directory:
        own = {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        started = subprocess.run(
            [control, "-d"], env=os.environ | own, capture_output=True, text=True, timeout=60, check=False
        )
        if started.returncode != 0:
            said = (started.stderr + started.stdout).strip().splitlines() or [f"code {started.returncode}"]
            raise MpsUnavailable(f"nvidia-cuda-mps-control -d failed: {said[-1]}")
        try:
            yield own
        finally:
            subprocess.run([control], input="quit\n", env=os.environ | own, text=True, timeout=60, check=False)


RUNS = {each.__name__: each for each in (step_beside_server, publish_beside_step, gradients_to_host, killed_server)}


def find(run: str, scale: str = "full", *, seconds: float = 120.0, **environment: str) -> dict[str, float]:
    """Run `python -m tests.gpu.sharing` and return all that it found before it ended or was ended, in one mapping.

    Raises `RuntimeError` if it found nothing.
    """
    command = [sys.executable, "-m", "tests.gpu.sharing", run, scale]
    variables = with_repository(os.environ, **environment)
    try:
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, timeout=seconds, check=False)
        output, errors, end = done.stdout, done.stderr, f"ended with code {done.returncode}"
    except subprocess.TimeoutExpired as ran:
        output, errors, end = ran.stdout or b"", ran.stderr or b"", f"ran longer than {seconds:g} s"
    found = {name: value for line in output.splitlines() for name, value in json.loads(line).items()}
    if not found:
        raise RuntimeError((errors.decode(errors="replace").strip().splitlines() or [f"{run} {end}"])[-1])
    return found


def main() -> None:
    run, scale = sys.argv[1], SCALES[sys.argv[2] if len(sys.argv) > 2 else "full"]
    for found in RUNS[run](scale):
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
