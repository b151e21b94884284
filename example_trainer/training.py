"""One batch's training: micro-batches forward and backward, one optimizer step each pass, and what it measured.

Denominators are those of the whole optimizer step, so that splitting it into micro-batches changes nothing. A
step whose loss or gradient is not finite leaves the weights alone and is counted. A batch in which nothing can be
learnt passes without forward, backward or optimizer step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from atropos_api.common import metric_names as names
from example_trainer.config import TrainingConfig
from example_trainer.data import Targets, TrainingBatch
from example_trainer.errors import TrainingDiverged
from example_trainer.learning.objective import Objective
from example_trainer.objective.logprobs import head_of, token_logprobs
from example_trainer.objective.losses import token_weights
from example_trainer.objective.packing import LayoutKind, PackedMicroBatch, Row, forward_hidden, pack_rows
from example_trainer.running.optimizers import LearningRate, learning_rate, set_lr

if TYPE_CHECKING:
    from example_trainer.model import Policy

logger = logging.getLogger(__name__)


class StopRequestedError(Exception):
    """Raised between micro-batches when the run is to end; the weights are those of the step before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSettings:
    """What of the configuration concerns a training step."""

    aggregation: Literal["token", "sequence", "constant"]
    constant_length: int
    token_budget: int
    chunk_tokens: int
    epochs: int
    mini_batches: int
    learning_rate: LearningRate
    max_grad_norm: float
    max_nonfinite_steps: int


def learner_settings(config: TrainingConfig) -> LearnerSettings:
    return LearnerSettings(
        aggregation=config.loss_aggregation,
        constant_length=config.max_response_tokens or config.seq_len,
        token_budget=config.micro_batch_tokens,
        chunk_tokens=config.logprob_chunk_tokens,
        epochs=config.epochs_per_batch,
        mini_batches=config.mini_batches,
        learning_rate=learning_rate(config),
        max_grad_norm=config.max_grad_norm,
        max_nonfinite_steps=config.max_nonfinite_steps,
    )


@dataclass(kw_only=True, slots=True, eq=False)
class StepResult:
    """What one batch did."""

    updates: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    logprobs: Tensor | None = None
    """Of the tokens forwarded before any weight moved; NaN for the others."""


@dataclass(slots=True, eq=False)
class _Pass:
    """Results of one forward over some rows: values at each trained token, and token counts."""

    logprobs: Tensor
    entropies: Tensor
    loss: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    useful_tokens: int = 0
    computed_tokens: int = 0


class Learner:
    """Owns the optimizer and its count of updates; trains the policy one batch at a time."""

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        settings: LearnerSettings,
        *,
        objective: Objective,
        layout: LayoutKind,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.settings = settings
        self.objective = objective
        self.layout = layout
        self.updates = 0
        """Optimizer steps taken in the whole run, over resumes; the schedule depends on it."""
        self._nonfinite_in_a_row = 0

    def train(
        self,
        batch: TrainingBatch,
        *,
        before_update: Callable[[], None] = lambda: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> StepResult:
        """Train one batch. `before_update` is called before the weights change; it may wait for a publish."""
        result = StepResult(metrics={names.TRAIN_SKIPPED: 0.0 if batch.rows else 1.0})
        if not batch.rows:
            self.objective.after_batch(batch.number, result.metrics)
            return result
        targets = self.objective.prepare(batch.rows, batch.targets.to(self.policy.device), self.score)
        parts = [part for _ in range(self.settings.epochs) for part in _split(batch.rows, self.settings.mini_batches)]
        # A stop is honoured before the first update only: half a batch trained would be in no checkpoint's terms.
        done = [self._update(parts[0], targets, before_update, should_stop)]
        done += [self._update(part, targets, lambda: None, lambda: False) for part in parts[1:]]
        first = done[: min(self.settings.mini_batches, len(batch.rows))]
        result.updates = sum(stepped for _, _, stepped in done)
        result.logprobs = done[0][0].logprobs
        result.metrics |= self.objective.metrics(
            targets, _merge([each.logprobs for each, _, _ in first]), _merge([each.entropies for each, _, _ in first])
        )
        result.metrics |= {
            names.TRAIN_LOSS: sum(each.loss for each, _, _ in done) / len(done),
            names.TRAIN_GRAD_NORM: sum(norm for _, norm, _ in done) / len(done),
            names.TRAIN_LR: self.optimizer.param_groups[0]["lr"],
            names.TRAIN_NONFINITE: float(len(done) - result.updates),
            names.PADDED_FRACTION: 1
            - sum(p.useful_tokens for p, _, _ in done) / sum(p.computed_tokens for p, _, _ in done),
            names.FORWARD_TOKENS: float(sum(each.computed_tokens for each, _, _ in done)),
        }
        for term in done[0][0].terms:
            result.metrics[f"train/loss_{term}"] = sum(each.terms[term] for each, _, _ in done) / len(done)
        self.objective.after_batch(batch.number, result.metrics)
        return result

    def score(self, rows: Sequence[Row], targets: Targets) -> Tensor:
        """Logprobs of all trained tokens of `rows` under the weights in place, NaN elsewhere; no gradients."""
        scored = torch.full((len(targets),), math.nan, device=self.policy.device)
        with torch.no_grad():
            for micro in self._pack(rows):
                logprobs, _ = self._forward(micro, targets, targets.labels[micro.target_index])
                scored[micro.target_index] = logprobs
        return scored

    def _update(
        self, rows: Sequence[Row], targets: Targets, before_update: Callable[[], None], should_stop: Callable[[], bool]
    ) -> tuple[_Pass, float, bool]:
        """One optimizer step over `rows`: results, gradient norm, and whether the weights moved."""
        self.optimizer.zero_grad(set_to_none=True)
        passed = self._accumulate(rows, targets, should_stop)
        self.policy.collect_gradients()
        norm = self._clip_gradients()
        if not (math.isfinite(norm) and math.isfinite(passed.loss)):
            self._count_nonfinite(passed.loss, norm)
            return passed, norm, False
        self._nonfinite_in_a_row = 0
        before_update()
        self.updates += 1
        set_lr(self.optimizer, self.settings.learning_rate.at(self.updates))
        self.optimizer.step()
        return passed, norm, True

    def _accumulate(self, rows: Sequence[Row], targets: Targets, should_stop: Callable[[], bool]) -> _Pass:
        unknown = torch.full((len(targets),), math.nan, device=self.policy.device)
        passed = _Pass(unknown, unknown.clone())
        weights = self._weights(rows, len(targets))
        for micro in self._pack(rows):
            if should_stop():
                raise StopRequestedError
            at = micro.target_index
            logprobs, entropies = self._forward(micro, targets, self.objective.labels(targets, at))
            terms = {
                name: (losses * weights[at]).sum()
                for name, losses in self.objective.terms(targets, at, logprobs, entropies).items()
            }
            loss = torch.stack(list(terms.values())).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            passed.logprobs[at] = logprobs.detach().view(len(at), -1)[:, 0]
            passed.entropies[at] = entropies.detach()
            passed.loss += loss.item()
            for name, term in terms.items():
                passed.terms[name] = passed.terms.get(name, 0.0) + term.item()
            passed.useful_tokens += micro.useful_tokens
            passed.computed_tokens += micro.computed_tokens
        return passed

    def _forward(self, micro: PackedMicroBatch, targets: Targets, labels: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = head_of(self.policy.module)
        with self.policy.autocast():
            return token_logprobs(
                forward_hidden(self.policy.module, micro),
                weight,
                micro.hidden_index,
                labels,
                targets.temperatures[micro.target_index],
                bias=bias,
                chunk_tokens=self.settings.chunk_tokens,
            )

    def _pack(self, rows: Sequence[Row]) -> list[PackedMicroBatch]:
        device = self.policy.device
        varlen = device.type == "cuda" and self.policy.dtype in {torch.bfloat16, torch.float16}
        return pack_rows(rows, self.settings.token_budget, device=device, layout=self.layout, varlen=varlen)

    def _weights(self, rows: Sequence[Row], total: int) -> Tensor:
        """The loss weight of each trained token of this optimizer step; zero for tokens of other mini-batches."""
        counts = torch.tensor([len(row.targets) for row in rows])
        own = token_weights(counts, self.settings.aggregation, self.settings.constant_length)
        weights = torch.zeros(total)
        for row, values in zip(rows, torch.split(own, counts.tolist()), strict=True):
            weights[row.first_target : row.first_target + len(row.targets)] = values
        return weights.to(self.policy.device)

    def _clip_gradients(self) -> float:
        """The global gradient norm before clipping."""
        limit = self.settings.max_grad_norm or math.inf
        return float(torch.nn.utils.clip_grad_norm_(self.policy.masters.values(), limit))

    def _count_nonfinite(self, loss: float, norm: float) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._nonfinite_in_a_row += 1
        logger.warning("skipped an optimizer step: loss %s, gradient norm %s", loss, norm)
        if self._nonfinite_in_a_row >= self.settings.max_nonfinite_steps:
            raise TrainingDiverged(
                f"{self._nonfinite_in_a_row} optimizer steps in a row had no finite gradient (loss {loss}, gradient "
                f"norm {norm}); lower --lr, or look at the rewards and logprobs of the last batches"
            )


def _split(rows: Sequence[Row], parts: int) -> Iterator[Sequence[Row]]:
    """`parts` runs of whole groups where possible, in batch order; never an empty one."""
    parts = min(parts, len(rows))
    for part in range(parts):
        yield rows[len(rows) * part // parts : len(rows) * (part + 1) // parts]


def _merge(pieces: Sequence[Tensor]) -> Tensor:
    """Arrays that are NaN outside their own mini-batch, joined into one."""
    merged = pieces[0]
    for piece in pieces[1:]:
        merged = torch.where(merged.isnan(), piece, merged)
    return merged
