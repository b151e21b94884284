"""Comparison of trainer and sampler logprobs, each token under the weights it was sampled with."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from example_trainer.data import TrainingBatch, generator_for
from example_trainer.modeling.micro_batches import Row
from example_trainer.objective.losses import Targets
from example_trainer.objective.metrics import alignment_metrics
from example_trainer.training import Learner, StepResult


class Alignment:
    """The alignment check: it compares trainer and sampler logprobs of tokens under the weights they were sampled with.

    Tokens of the newest version are covered by the training forward itself. For older ones the last `keep` versions
    are kept as snapshots, and a sample of sequences is scored again under its own version. If the training forward
    has dropout, which the sampler does not have, tokens of the newest version are scored in the same way. A token of
    top-p or top-k sampling without its mask has no logprob to compare with.
    """

    def __init__(self, learner: Learner, *, keep: int, sample_sequences: int, seed: int) -> None:
        self._learner = learner
        self._keep = keep
        self._sample_sequences = sample_sequences
        self._seed = seed
        self._snapshots: dict[int, dict[str, Tensor]] = {}
        self._current: int | None = None

    def published(self, version: int) -> None:
        """Record that the current masters are served under `version`, and take a snapshot if versions are kept."""
        self._current = version
        if self._keep:
            self._snapshots[version] = self._learner.policy.snapshot()
            for old in sorted(self._snapshots)[: -self._keep - 1]:
                del self._snapshots[old]

    def moved(self) -> None:
        """Record that the masters have changed since the last publish, so that no version stands for them."""
        self._current = None

    def score_older(self, batch: TrainingBatch) -> Tensor:
        """Return logprob differences for a sample of sequences that the training forward does not cover.

        Call it before that forward. A score needs all ranks, so each takes part in those of the others' versions.
        """
        policy = self._learner.policy
        targets = batch.targets.to(policy.device)
        sample = self._sample(batch)
        found = []
        for version in sorted(set().union(*self._learner.ranks.data.gather(list(sample)))):
            older = version != self._current
            with policy.with_weights(self._snapshots[version]) if older else nullcontext():
                scored = self._learner.score(sample.get(version, []), targets)
            chosen = _comparable(targets, version) & ~scored.isnan()
            found.append(scored[chosen] - targets.rollout_logprobs[chosen])
        return torch.cat(found) if found else torch.empty(0)

    def measure(self, result: StepResult, older: Tensor) -> dict[str, float]:
        """Return the alignment metrics of a step, from its own forward and from the result of `score_older`."""
        exact = [older.cpu()]
        current = None if self._learner.policy.has_dropout else self._current
        if result.targets is not None and result.logprobs is not None and current is not None:
            targets, logprobs = result.targets.to(torch.device("cpu")), result.logprobs.cpu()
            same = _comparable(targets, current) & ~logprobs.isnan()
            exact.append(logprobs[same] - targets.rollout_logprobs[same])
        return alignment_metrics(torch.cat(exact))

    def _sample(self, batch: TrainingBatch) -> dict[int, list[Row]]:
        """Return a random sample of rows whose tokens all come from one scorable version, grouped by that version."""
        by_version: dict[int, list[Row]] = {}
        scorable = set(self._snapshots) - {self._current}
        if self._current is not None and self._learner.policy.has_dropout:
            scorable.add(self._current)
        if not batch.rows or not self._sample_sequences or not scorable:
            return by_version
        generator = generator_for(self._seed, batch.number)
        taken = 0
        for index in torch.randperm(len(batch.rows), generator=generator).tolist():
            row = batch.rows[index]
            versions = set(batch.targets.versions[row.first_target : row.first_target + len(row.targets)].tolist())
            version = versions.pop()
            if versions or version not in scorable:
                continue
            by_version.setdefault(version, []).append(row)
            taken += 1
            if taken == self._sample_sequences:
                break
        return by_version


def _comparable(targets: Targets, version: int) -> Tensor:
    """Return a mask of the tokens of a version, without those drawn from an unknown part of the distribution."""
    same = targets.versions == version
    return same if targets.truncated_sampling is None else same & ~targets.truncated_sampling
