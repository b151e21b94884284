"""Test doubles for the trainer without vLLM: tiny models, bridges without a server, and rollouts.

`LocalBridge` publishes to nothing, for training on recorded batches and tests of the loop. `ServingBridge` fully
implements `WeightBridge`: a publish copies the masters into the weights that a `Sampler` reads, under the given
version, so that rollouts carry true logprobs and versions and the measured staleness is real.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from atropos_api.client import BrokerClient
from atropos_api.wire import EnvironmentRequest, Group
from example_trainer.api import BrokerSession
from example_trainer.cli import ranked_session, run_trackers
from example_trainer.config import TrainingConfig
from example_trainer.distributed.rank0_proxy import RankedBridge
from example_trainer.distributed.ranks import Ranks, joined_ranks
from example_trainer.group_sequences import MASKED, PLACEHOLDER_LOGPROB
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions, policy_options
from example_trainer.modeling.lora import AdapterOptions
from example_trainer.modeling.policy import Policy
from example_trainer.trainers import Trainer
from example_trainer.weights.base import PublishReport, WeightBridge

Reward = Callable[[Sequence[int]], float]


def make_tiny_model(
    directory: Path, *, seed: int = 0, vocabulary: int = 32, layers: int = 2, tied: bool = False
) -> Path:
    """Write a randomly initialised Qwen2 of a few thousand parameters in Hugging Face layout."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


class LocalBridge(WeightBridge):
    """Implements `WeightBridge` without a server; a publish only records its version."""

    def __init__(self, options: PolicyOptions) -> None:
        self._options = options
        self.published_versions: list[int] = []

    def prepare(self) -> Policy:
        return load_policy(self._options)

    def publish(self, version: int) -> PublishReport:
        self.published_versions.append(version)
        return PublishReport(version=version, seconds=0.0)

    def highest_version(self) -> int:
        return max(self.published_versions, default=0)

    def needs_publish(self) -> bool:
        return False

    def close(self) -> None:
        return None


class ServingBridge(WeightBridge):
    """A weight bridge that loads a local policy: it serves a copy of it to a `Sampler` for each published version."""

    def __init__(self, options: PolicyOptions, *, publish_seconds: float = 0.0) -> None:
        self._options = options
        self._publish_seconds = publish_seconds
        self._policy: Policy | None = None
        self._served: tuple[int, dict[str, Tensor]] | None = None
        self.published: list[tuple[int, float]] = []
        """Version and monotonic time of each completed publish."""
        self.closed = False

    @property
    def served(self) -> tuple[int, dict[str, Tensor]] | None:
        """The current version and its weights; None before the first publish."""
        return self._served

    def prepare(self) -> Policy:
        self._policy = load_policy(self._options)
        return self._policy

    def publish(self, version: int) -> PublishReport:
        assert self._policy is not None, "prepare() comes first"
        if version <= self.highest_version():
            raise AssertionError(f"version {version} was published before")
        started = time.monotonic()
        weights = self._policy.snapshot()
        time.sleep(self._publish_seconds)
        self._served = (version, weights)
        self.published.append((version, time.monotonic()))
        return PublishReport(version=version, seconds=time.monotonic() - started)

    def lose_server(self) -> None:
        """Simulate a server restart: nothing is served until the next publish."""
        self._served = None

    def highest_version(self) -> int:
        return self.published[-1][0] if self.published else 0

    def needs_publish(self) -> bool:
        return self._served is None

    def close(self) -> None:
        self.closed = True


class Sampler:
    """A sampler: it draws groups from given weights, with the logprob under which each token was drawn."""

    def __init__(
        self, model: Path, *, seed: int = 0, temperature: float = 1.0, adapter: AdapterOptions | None = None
    ) -> None:
        self._policy = load_policy(PolicyOptions(model_name=str(model), dtype="float32", device="cpu", adapter=adapter))
        self._generator = torch.Generator().manual_seed(seed)
        self._temperature = temperature
        self._vocabulary = int(self._policy.hf_config.vocab_size)

    def sample(
        self,
        weights: dict[str, Tensor],
        version: int | None,
        reward: Reward,
        *,
        group_size: int,
        prompt_tokens: int = 6,
        response_tokens: tuple[int, int] = (3, 8),
    ) -> Group:
        """Return one group: a random prompt, answers of random lengths within `response_tokens`, and their rewards."""
        prompt = torch.randint(self._vocabulary, (prompt_tokens,), generator=self._generator).tolist()
        lengths = torch.randint(response_tokens[0], response_tokens[1] + 1, (group_size,), generator=self._generator)
        with self._policy.with_weights(weights):
            answers, logprobs = self._answers(prompt, group_size, int(lengths.max()))
        cut = [
            (answer[:length], logs[:length])
            for answer, logs, length in zip(answers, logprobs, lengths.tolist(), strict=True)
        ]
        return Group(
            tokens=[prompt + answer for answer, _ in cut],
            masks=[[MASKED] * len(prompt) + answer for answer, _ in cut],
            scores=[reward(answer) for answer, _ in cut],
            inference_logprobs=[[PLACEHOLDER_LOGPROB] * len(prompt) + logs for _, logs in cut],
            generation_params={"temperature": self._temperature},
            policy_versions=[[(len(prompt), len(prompt) + len(answer), version)] for answer, _ in cut],
        )

    def _answers(self, prompt: list[int], group_size: int, length: int) -> tuple[list[list[int]], list[list[float]]]:
        module: Any = self._policy.module
        rows = torch.tensor([prompt] * group_size)
        drawn: list[Tensor] = []
        for _ in range(length):
            logs = (module(rows).logits[:, -1].float() / self._temperature).log_softmax(-1)
            token = torch.multinomial(logs.exp(), 1, generator=self._generator)
            drawn.append(logs.gather(1, token))
            rows = torch.cat([rows, token], dim=1)
        return rows[:, len(prompt) :].tolist(), torch.cat(drawn, dim=1).tolist()


def train_recorded(settings: dict[str, Any]) -> None:
    """Run a complete trainer on the groups that a broker holds, without a server; meant for a process of its own.

    `settings` are those of `TrainingConfig`: with a world size above 1 this is one rank of several. Tests kill the
    process and start it again.
    """
    config = TrainingConfig.model_validate(settings)
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    with joined_ranks(
        config.trainer_rank,
        config.world_size,
        config.init_method,
        device=config.device,
        timeout_seconds=60.0,
        tensor_parallel_size=config.trainer_tensor_parallel_size,
    ) as ranks:
        _train_recorded(config, ranks)


def _train_recorded(config: TrainingConfig, ranks: Ranks) -> None:
    client, local = BrokerClient(config.atropos_url), LocalBridge(policy_options(config))
    alone = ranks.world_size == 1
    trainer = Trainer(
        config,
        session=BrokerSession(client) if alone else ranked_session(config, client, ranks),
        bridge=local if alone else RankedBridge(local if ranks.is_main else None, policy_options(config), ranks),
        trackers=run_trackers(config, writes=ranks.is_main),
        ranks=ranks,
    )
    try:
        trainer.run()
    finally:
        client.close()


class RolloutThread:
    """An environment in a thread: it samples from the bridge's weights and submits groups while the broker has room.

    With `groups_per_version` it samples that many groups from each version and then waits for the next, so that the
    training data do not depend on timing.
    """

    def __init__(
        self,
        url: str,
        bridge: ServingBridge,
        sampler: Sampler,
        reward: Reward,
        *,
        group_size: int,
        batches_ahead: int = 2,
        groups_per_version: int | None = None,
    ) -> None:
        self._client = BrokerClient(url)
        self._bridge = bridge
        self._sampler = sampler
        self._reward = reward
        self._group_size = group_size
        self._batches_ahead = batches_ahead
        self._groups_per_version = groups_per_version
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(timeout=10.0)
        self._client.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - the test that owns the thread checks `error`
            self.error = error

    def _serve(self) -> None:
        info = self._client.register_environment(
            EnvironmentRequest(
                name="rollouts",
                group_size=self._group_size,
                max_token_length=128,
                max_batches_offpolicy=self._batches_ahead,
            )
        )
        sampled: Counter[int] = Counter()
        while not self._stopped.is_set():
            pacing = self._client.heartbeat(info.environment_id, wait_seconds=0.0)
            served = self._bridge.served
            if pacing.state == "finished":
                return
            has_enough = served is not None and sampled[served[0]] == self._groups_per_version
            if pacing.state == "wait" or pacing.room_sequences <= 0 or served is None or has_enough:
                time.sleep(0.01)
                continue
            group = self._sampler.sample(served[1], served[0], self._reward, group_size=self._group_size)
            sampled[served[0]] += 1
            self._client.submit(info.environment_id, [group], idempotency_key=uuid.uuid4().hex)
