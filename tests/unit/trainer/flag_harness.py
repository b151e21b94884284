"""Runs `atropos-grpo` itself on recorded batches of a tiny model, and keeps its observable results.

Only other processes are replaced: the broker by a session that gives out recorded batches and records its calls, the
inference server by nothing, or in shared mode by tensors in shared memory and answers in its form. The rollouts come
from weights different from the model's, so that ratios differ from 1 and every clip, mask and correction has an effect.
"""

from __future__ import annotations

import io
import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import pytest
import torch
import wandb
from safetensors.torch import load_file

from atropos_api.wire import Batch, Group, RunInfo, RunRequest
from example_trainer import api, cli
from example_trainer.config import TrainingConfig
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions, policy_options
from example_trainer.modeling.policy import Policy
from example_trainer.monitoring.trackers import read_metrics
from example_trainer.testing import LocalBridge, Sampler
from example_trainer.weights.base import WeightBridge
from example_trainer.weights.testing import served_fake

Tensors = dict[str, torch.Tensor]

USUAL = shlex.split(
    "--dtype float32 --device cpu --torch-threads 1 --training-steps 1 --batch-size 4 --gradient-accumulation-steps 4 "
    "--seq-len 64 --optimizer adamw --lr 1e-3 --checkpoint-interval 0 --vllm-restart-interval 1"
)


SIZES_OF_THE_COURSE = {"--rollout-batch-size", "--train-batch-size"}


def without_batch_size(usual: Sequence[str]) -> list[str]:
    """Return the usual flags without the one that the course's sizes replace."""
    place = usual.index("--batch-size")
    return [*usual[:place], *usual[place + 2 :]]


WANDB_SECONDS = 20.0
WANDB_BYTES = 4000
"""Size that the file of a complete run exceeds."""
VOCABULARY = 32
"""Tokens of the tiny model."""


@dataclass
class Recorded:
    """Batches 1, 2, ... and all calls of the trainer to the broker, in order."""

    batches: Sequence[Batch]
    calls: list[tuple[str, Any]] = field(default_factory=list)
    url: str = ""
    token: str | None = None
    served: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Path and body of each request to the inference server, in shared mode."""

    def of(self, name: str) -> list[Any]:
        return [value for call, value in self.calls if call == name]


@dataclass
class TrainedRun:
    """The observable results of one run."""

    code: int
    directory: Path
    recorded: Recorded
    policy: Policy | None
    log: str
    layer_calls: int
    """Number of forward calls of the first block, recomputation included."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics rows of the steps; empty if the run wrote to another directory."""
        path = self.directory / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    @property
    def first(self) -> dict[str, Any]:
        return self.rows[0]

    @property
    def last(self) -> dict[str, Any]:
        return self.rows[-1]

    @property
    def request(self) -> RunRequest:
        (request,) = self.recorded.of("begin")
        assert isinstance(request, RunRequest)
        return request

    @property
    def weights(self) -> Tensors:
        """Return the weights of the newest checkpoint."""
        (file,) = (self.directory / "latest").glob("*.safetensors")
        tensors: Tensors = load_file(file)
        return tensors

    def moved_from(self, other: Tensors) -> float:
        """Return the largest difference of a weight."""
        return max(float((self.weights[name].float() - other[name].float()).abs().max()) for name in other)

    def same_weights(self, other: Self) -> bool:
        mine, theirs = self.weights, other.weights
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


class FlagHarness:
    """Runs the command with flags in addition to the usual ones."""

    def __init__(
        self,
        model: Path,
        other_model: Path,
        directory: Path,
        *,
        usual: Sequence[str] = USUAL,
        batches: int = 2,
        served_dtype: str = "float32",
    ) -> None:
        self.model = model
        self.other_model = other_model
        self.start = load_file(model / "model.safetensors")
        self._usual, self._served_dtype = usual, served_dtype
        self._directory = directory
        self._batches = record_batches(model, batches)
        self._known: dict[tuple[str, ...], TrainedRun] = {}
        self._runs = 0
        self.recorded = Recorded(self._batches)
        """The calls to the broker of the last run that was started, even if it failed."""

    def run(self, *argv: str) -> TrainedRun:
        """Run the command with these flags; the same flags are run only once."""
        if argv not in self._known:
            self._known[argv] = self._run(argv)
        return self._known[argv]

    @property
    def runs(self) -> list[TrainedRun]:
        """Return all runs so far."""
        return list(self._known.values())

    def _run(self, argv: Sequence[str]) -> TrainedRun:
        self._runs += 1
        directory = self._directory / f"run-{self._runs}"
        self.recorded = recorded = Recorded(self._batches)
        errors = io.StringIO()
        watched: list[_WatchedBridge] = []
        make_bridge = cli._bridge

        def bridge(config: TrainingConfig, ranks: Any, session: Any, **more: Any) -> _WatchedBridge:
            shared = config.weight_bridge_mode == "shared_vllm"
            made = make_bridge(config, ranks, session, **more) if shared else LocalBridge(policy_options(config))
            watched.append(_WatchedBridge(made))
            return watched[-1]

        threads = torch.get_num_threads()
        given = [text.format(directory=directory, other=self.other_model) for text in argv]
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(errors), ExitStack() as stack:
            patch.setattr(cli, "_bridge", bridge)
            patch.setattr(api, "BrokerSession", lambda client, **_: _RecordedSession(recorded, client))
            patch.setenv("WANDB_MODE", "offline")
            patch.setenv("WANDB_SILENT", "true")
            if "--use-wandb" in argv:
                wandb.teardown()  # it reads the environment once a process, and another test may have been first
            if "shared_vllm" in argv:
                fake = stack.enter_context(served_fake(self.model, directory, dtype=self._served_dtype))
                recorded.served = fake.server.requests
                given += [
                    "--vllm-port",
                    str(urlsplit(fake.url).port),
                    "--vllm-config-path",
                    str(fake.server.manifest_path),
                ]
            usual = without_batch_size(self._usual) if SIZES_OF_THE_COURSE.intersection(given) else self._usual
            code = cli.run(["--model-name", str(self.model), "--run-dir", str(directory), *usual, *given])
        recorded.calls.append(("threads", torch.get_num_threads()))
        torch.set_num_threads(threads)
        return TrainedRun(code, directory, recorded, watched[-1].policy, errors.getvalue(), watched[-1].layer_calls)


class _WatchedBridge:
    """A bridge whose policy can be inspected afterwards."""

    def __init__(self, bridge: WeightBridge) -> None:
        self._bridge = bridge
        self.policy: Policy | None = None
        self.layer_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bridge, name)

    def prepare(self) -> Policy:
        self.policy = self._bridge.prepare()
        module: Any = self.policy.module
        module.model.layers[0].mlp.register_forward_pre_hook(self._count)
        return self.policy

    def _count(self, *_: object) -> None:
        self.layer_calls += 1


class _RecordedSession(api.BrokerSession):
    """A session that answers from `Recorded`, and records its calls there."""

    def __init__(self, recorded: Recorded, client: Any) -> None:
        super().__init__(client)
        self._recorded = recorded
        recorded.url = str(client._http.base_url)
        recorded.token = next(client._auth.auth_flow(httpx.Request("GET", recorded.url))).headers.get("Authorization")

    def _note(self, name: str, value: Any) -> None:
        self._recorded.calls.append((name, value))

    def refuse_unknown_host(self) -> None:
        return None

    def wait_until_ready(self, timeout_seconds: float) -> None:
        self._note("wait", timeout_seconds)

    def begin(self, request: RunRequest) -> RunInfo:
        self._note("begin", request)
        self._info = RunInfo(
            run_id="r",
            epoch=1,
            next_batch=request.resume_from_batch + 1,
            highest_policy_version=0,
            committed_batch=request.resume_from_batch,
            leftover_groups=0,
        )
        return self._info

    def get_batch(self, number: int) -> Batch | None:
        self._note("batch", number)
        return self._recorded.batches[number - 1] if number <= len(self._recorded.batches) else None

    def announce_policy(
        self, version: int, step: int, policy_name: str | None = None, servers: Sequence[str] | None = None
    ) -> None:
        self._note("announce", (version, step))

    def held_seconds(self, wait_seconds: float = 0.0) -> float:
        return 0.0

    def commit(self, number: int) -> None:
        self._note("commit", number)

    def finish(self) -> None:
        self._note("finish", None)


def record_batches(model: Path, count: int = 2) -> list[Batch]:
    """Record batches of four groups, sampled from weights different from the model's, with a teacher's logprobs."""
    torch.manual_seed(0)
    weights = load_policy(PolicyOptions(model_name=str(model), dtype="float32", device="cpu")).snapshot()
    off = {name: tensor + 0.08 * torch.randn_like(tensor) for name, tensor in weights.items()}
    sampler = Sampler(model, seed=0)

    def group() -> Group:
        sampled = sampler.sample(off, 1, _reward, group_size=4, response_tokens=(3, 12))
        sampled.distill_token_ids = [[[token % 32, (token + 5) % 32] for token in row] for row in sampled.tokens]
        sampled.distill_logprobs = [[[-0.2, -2.0] for _ in row] for row in sampled.tokens]
        sampled.sampling_masks = [[list(range(VOCABULARY)) for _ in row] for row in sampled.tokens]  # changes nothing
        return sampled

    return [Batch(number=number, run_id="r", groups=[group() for _ in range(4)]) for number in range(1, count + 1)]


def _reward(answer: Sequence[int]) -> float:
    return sum(token % 2 == 0 for token in answer) / len(answer) + 0.01 * len(answer)


def wandb_file(seen: TrainedRun) -> bytes:
    """Return the recorded W&B run; its own process may still be writing after the run."""
    (path,) = seen.directory.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + WANDB_SECONDS
    while path.stat().st_size < WANDB_BYTES and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.read_bytes()
