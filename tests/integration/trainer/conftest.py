"""A real broker, a tiny model, and recorded rollouts for the trainer's loop."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_api.client import BrokerClient
from atropos_api.testing import served_broker
from atropos_api.wire import EnvironmentRequest, Group, Hold
from example_trainer.api import BrokerSession
from example_trainer.cli import run_trackers
from example_trainer.config import TrainingConfig
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.monitoring.trackers import read_metrics
from example_trainer.testing import Reward, Sampler, ServingBridge, make_tiny_model
from example_trainer.trainers import Trainer

GROUP_SIZE = 4


def even_tokens(answer: Any) -> float:
    """Return the share of even tokens, a reward that training can raise."""
    return sum(token % 2 == 0 for token in answer) / len(answer)


@dataclass
class Workbench:
    """All that a test needs to start trainers on one broker."""

    url: str
    model: Path
    directory: Path
    sessions: list[BrokerSession] = field(default_factory=list)

    def close(self) -> None:
        for session in self.sessions:
            session.close()

    @property
    def options(self) -> PolicyOptions:
        return PolicyOptions(model_name=str(self.model), dtype="float32", device="cpu")

    def config(self, **settings: Any) -> TrainingConfig:
        values: dict[str, Any] = {
            "model_name": str(self.model),
            "dtype": "float32",
            "device": "cpu",
            "run_dir": self.directory / "run",
            "training_steps": 4,
            "batch_size": 8,
            "gradient_accumulation_steps": 1,
            "seq_len": 64,
            "optimizer": "adamw",
            "lr": 1e-3,
            "vllm_restart_interval": 1,
            "checkpoint_interval": 0,
            "atropos_url": self.url,
            "batch_timeout": 60,
        }
        return TrainingConfig.model_validate(values | settings)

    def bridge(self, **settings: Any) -> ServingBridge:
        return ServingBridge(self.options, **settings)

    def trainer(self, config: TrainingConfig, bridge: ServingBridge, **settings: Any) -> Trainer:
        torch.manual_seed(config.seed)
        self.sessions.append(BrokerSession(BrokerClient(self.url)))
        return Trainer(
            config,
            session=self.sessions[-1],
            bridge=bridge,
            trackers=run_trackers(config),
            **settings,
        )

    def record_groups(
        self, count: int, reward: Reward = even_tokens, *, seed: int = 0, version: int | None = 1
    ) -> list[Group]:
        """Sample groups from the base model, stamped with `version`."""
        sampler, weights = Sampler(self.model, seed=seed), load_policy(self.options).snapshot()
        return [sampler.sample(weights, version, reward, group_size=GROUP_SIZE) for _ in range(count)]

    def submit(self, groups: list[Group]) -> None:
        with BrokerClient(self.url) as client:
            info = client.register_environment(
                EnvironmentRequest(name="recorded", group_size=GROUP_SIZE, max_token_length=64)
            )
            for group in groups:
                client.submit(info.environment_id, [group], idempotency_key=uuid.uuid4().hex)

    def metrics(self, config: TrainingConfig) -> list[dict[str, Any]]:
        return read_metrics(config.required_run_dir / "metrics.jsonl")

    def status(self) -> dict[str, Any]:
        with BrokerClient(self.url) as client:
            return client.status()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def bench(tiny_model: Path, tmp_path: Path) -> Iterator[Workbench]:
    torch.set_num_threads(1)
    with served_broker() as url:
        workbench = Workbench(url=url, model=tiny_model, directory=tmp_path)
        yield workbench
        workbench.close()


def hold_version_2(bench: Workbench, monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> list[Hold]:
    """Hold policy version 2 for this long from its publish on, as an evaluation does; return the list of holds."""
    held: list[Hold] = []
    publish = ServingBridge.publish

    def publish_and_hold(self: ServingBridge, version: int) -> Any:
        report = publish(self, version)
        if version == 2:
            with BrokerClient(bench.url) as evaluation:
                held.append(evaluation.hold_policy(seconds))
        return report

    monkeypatch.setattr(ServingBridge, "publish", publish_and_hold)
    return held
