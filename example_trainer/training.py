"""Training on one batch: forward and backward over micro-batches, optimizer steps, and metrics.

Denominators are those of the whole optimizer step, so that splitting it into micro-batches, or over ranks, changes
nothing. A step whose loss or gradient is not finite leaves the weights unchanged and is counted. A batch from which
nothing can be learnt is skipped without forward, backward or optimizer step. In float16 the loss is scaled
(`modeling.loss_scale`): a step whose gradient overflows lowers the scale instead, and is counted separately.

With several ranks each trains the groups it was given. If the weights are sharded over the ranks, every forward and
backward needs all ranks: a rank that has run out of micro-batches takes part with an empty one.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from atropos_api.common import metric_names as names
from example_trainer.config import TrainingConfig
from example_trainer.data import TrainingBatch
from example_trainer.distributed.rank_shares import Seen, plan_mini_batches, seen_by_all, step_weights, sum_by_name
from example_trainer.distributed.ranks import Ranks
from example_trainer.errors import TrainingDiverged
from example_trainer.modeling.logprobs import head_of, token_logprobs
from example_trainer.modeling.loss_scale import LossScale
from example_trainer.modeling.micro_batches import (
    ROW_MULTIPLE,
    LayoutKind,
    PackedBatch,
    Row,
    empty_micro_batch,
    forward_hidden,
    pack_rows,
)
from example_trainer.modeling.optimizers import LearningRate, learning_rate, set_lr
from example_trainer.objective.losses import Targets
from example_trainer.objective.objective import Objective

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy

logger = logging.getLogger(__name__)


class StopRequestedError(Exception):
    """A stop was requested: raised between micro-batches; the weights are those of the step before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSettings:
    """The settings of a training step."""

    aggregation: Literal["token", "sequence", "constant"]
    constant_length: int
    token_budget: int
    pad_to: int | None
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
        pad_to=config.pad_to,
        chunk_tokens=config.logprob_chunk_tokens,
        epochs=config.epochs_per_batch,
        mini_batches=config.mini_batches,
        learning_rate=learning_rate(config),
        max_grad_norm=config.max_grad_norm,
        max_nonfinite_steps=config.max_nonfinite_steps,
    )


@dataclass(kw_only=True, slots=True, eq=False)
class StepResult:
    """The result of training on one batch."""

    updates: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    targets: Targets | None = None
    """Targets of all ranks; None if nothing was trained."""
    logprobs: Tensor | None = None
    """Logprobs of these tokens if they were computed before any weight changed; NaN for the others."""


@dataclass(slots=True, eq=False)
class Gradients:
    """The gradients of one mini-batch, accumulated in the policy, and the results of its forwards.

    `logprobs` and `entropies` are `[N]` over this rank's trained tokens, NaN outside the mini-batch; sums are over all
    ranks.
    """

    logprobs: Tensor
    entropies: Tensor
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The loss terms by name, and the token counts named in `_COUNTS`."""
    norm: float = 0.0
    """The global norm before clipping."""
    moved: bool = False
    """True once an optimizer step has applied them."""
    overflowed: bool = False
    """True if they were left out because the loss scale was too large."""

    @property
    def loss(self) -> float:
        return sum(value for name, value in self.totals.items() if name not in _COUNTS)


_USEFUL, _COMPUTED = "useful tokens", "computed tokens"
_COUNTS = frozenset({_USEFUL, _COMPUTED})


@dataclass(kw_only=True, slots=True, eq=False)
class BatchTraining:
    """One batch under training: the mini-batches of all its epochs in order, and the gradients of those done."""

    batch: TrainingBatch
    targets: Targets | None
    """None if nothing of the batch is trained."""
    mini_batches: list[list[Row]]
    in_an_epoch: int
    should_stop: Callable[[], bool]
    done: list[Gradients] = field(default_factory=list)


class Learner:
    """The learner: it owns the optimizer and its count of updates, and trains the policy one batch at a time."""

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        settings: LearnerSettings,
        *,
        objective: Objective,
        layout: LayoutKind,
        ranks: Ranks | None = None,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.settings = settings
        self.objective = objective
        self.layout = layout
        self.ranks = ranks or Ranks()
        self.updates = 0
        """Optimizer steps taken in the whole run, including before a resume; the schedule depends on it."""
        self.loss_scale = LossScale.of(policy.dtype)
        self._nonfinite_in_a_row = 0

    def train(self, batch: TrainingBatch) -> StepResult:
        """Train one batch: each mini-batch is accumulated and stepped, as many times as there are epochs."""
        training = self.begin(batch)
        for mini_batch in training.mini_batches:
            self.apply(self.accumulate(training, mini_batch))
        return self.finish(training)

    def begin(self, batch: TrainingBatch, should_stop: Callable[[], bool] = lambda: False) -> BatchTraining:
        """Divide the batch into mini-batches, and score what the objective compares with before any weight changes."""
        parts = plan_mini_batches(batch.rows, self.settings.mini_batches, self.ranks.data)
        targets = None
        if parts:
            targets = self.objective.prepare(batch.rows, batch.targets.to(self.policy.device), self.score)
        return BatchTraining(
            batch=batch,
            targets=targets,
            mini_batches=parts * self.settings.epochs,
            in_an_epoch=len(parts),
            should_stop=should_stop,
        )

    def accumulate(self, training: BatchTraining, rows: Sequence[Row]) -> Gradients:
        """Run forward and backward over one mini-batch; sum gradients over ranks and clip them. No weight changes."""
        assert training.targets is not None
        # A stop is honoured before the first update only: half a batch trained would be in no checkpoint's terms.
        should_stop = (lambda: False) if training.done else training.should_stop
        self.optimizer.zero_grad(set_to_none=True)
        gradients = self._accumulate(rows, training.targets, should_stop)
        self.policy.collect_gradients()
        if not self.policy.is_sharded:
            self.ranks.sum_gradients(self.policy.masters.values())
        if self.loss_scale is not None:
            self.loss_scale.unscale(self.policy.masters.values())
        gradients.norm = self._clip_gradients()
        training.done.append(gradients)
        return gradients

    def apply(self, gradients: Gradients) -> None:
        """Take one optimizer step, unless the loss or the gradients are not finite."""
        if not (math.isfinite(gradients.norm) and math.isfinite(gradients.loss)):
            self._leave_out(gradients)
            return
        self._nonfinite_in_a_row = 0
        if self.loss_scale is not None:
            self.loss_scale.stepped()
        self.updates += 1
        set_lr(self.optimizer, self.settings.learning_rate.at(self.updates))
        with self.policy.changing():
            self.optimizer.step()
        gradients.moved = True

    def finish(self, training: BatchTraining) -> StepResult:
        """Return the batch's metrics, and the values of its first forwards at each token."""
        done, targets = training.done, training.targets
        result = StepResult(metrics={names.TRAIN_SKIPPED: 0.0 if done else 1.0})
        if targets is not None:
            self._report(result, done, targets, first=done[: training.in_an_epoch])
        self.objective.after_batch(training.batch.number, result.metrics)
        return result

    def score(self, rows: Sequence[Row], targets: Targets) -> Tensor:
        """Return logprobs of all trained tokens of `rows` under the current weights, NaN elsewhere; no gradients."""
        scored = torch.full((len(targets),), math.nan, device=self.policy.device)
        with torch.no_grad():
            for micro in self._micro_batches(rows):
                logprobs, _ = self._forward(micro, targets, targets.labels[micro.target_index])
                scored[micro.target_index] = logprobs
        return scored

    def _accumulate(self, rows: Sequence[Row], targets: Targets, should_stop: Callable[[], bool]) -> Gradients:
        unknown = torch.full((len(targets),), math.nan, device=self.policy.device)
        passed = Gradients(unknown, unknown.clone())
        weights = step_weights(
            rows, len(targets), self.settings.aggregation, self.settings.constant_length, self.ranks.data
        ).to(self.policy.device)
        for micro in self._micro_batches(rows):
            if should_stop():
                raise StopRequestedError
            self._backward(micro, targets, weights, passed)
        passed.totals = sum_by_name(self.ranks.data.gather(dict(passed.totals)))
        return passed

    def _backward(self, micro: PackedBatch, targets: Targets, weights: Tensor, passed: Gradients) -> None:
        """Run forward and backward of one micro-batch; add the results to `passed` and to the gradients."""
        at = micro.target_index
        logprobs, entropies = self._forward(micro, targets, self.objective.labels(targets, at))
        if not len(at):
            logprobs.sum().backward()  # type: ignore[no-untyped-call]
            return
        terms = {
            name: (losses * weights[at]).sum()
            for name, losses in self.objective.terms(targets, at, logprobs, entropies).items()
        }
        loss = torch.stack(list(terms.values())).sum()
        if self.loss_scale is not None:
            loss = loss * self.loss_scale.scale
        loss.backward()  # type: ignore[no-untyped-call]
        passed.logprobs[at] = logprobs.detach().view(len(at), -1)[:, 0]
        passed.entropies[at] = entropies.detach()
        for name, term in terms.items():
            passed.totals[name] += term.item()
        passed.totals[_USEFUL] += micro.useful_tokens
        passed.totals[_COMPUTED] += micro.computed_tokens

    def _forward(self, micro: PackedBatch, targets: Targets, labels: Tensor) -> tuple[Tensor, Tensor]:
        temperatures = targets.temperatures[micro.target_index]
        return self.policy.compute(_logprobs, micro, labels, temperatures, self.settings.chunk_tokens)

    def _micro_batches(self, rows: Sequence[Row]) -> list[PackedBatch]:
        """Return the packed `rows`, padded with empty micro-batches to the same number on every rank.

        Forwards of sharded weights need all ranks, and the check for a stop must come equally often on each.
        """
        device = self.policy.device
        varlen = device.type == "cuda" and self.policy.dtype in {torch.bfloat16, torch.float16}
        packed = pack_rows(
            rows,
            self.settings.token_budget,
            device=device,
            layout=self.layout,
            varlen=varlen,
            pad_to=self.settings.pad_to or ROW_MULTIPLE,
            pairs_per_token=6 * self.policy.hf_config.get_text_config().hidden_size,
        )
        missing = self.ranks.max(len(packed)) - len(packed)
        return packed + [empty_micro_batch(device, layout=self.layout, varlen=varlen)] * missing

    def _clip_gradients(self) -> float:
        """Clip the gradients and return their global norm before clipping."""
        limit = self.settings.max_grad_norm or math.inf
        norm: Any = torch.nn.utils.clip_grad_norm_(self.policy.masters.values(), limit)
        return float(norm.full_tensor() if self.policy.is_sharded else norm)

    def _report(
        self, result: StepResult, done: Sequence[Gradients], targets: Targets, *, first: Sequence[Gradients]
    ) -> None:
        """Fill in `result`: per-token values from the first pass over the batch, means over all optimizer steps."""
        logprobs, entropies = _merge([each.logprobs for each in first]), _merge([each.entropies for each in first])
        own = Seen(targets=targets, logprobs=logprobs, entropies=entropies, first_logprobs=done[0].logprobs)
        seen = seen_by_all(own, self.ranks.data)
        result.updates = sum(each.moved for each in done)
        result.targets, result.logprobs = seen.targets, seen.first_logprobs
        result.metrics |= self.objective.metrics(seen.targets, seen.logprobs, seen.entropies)
        computed = sum(each.totals[_COMPUTED] for each in done)
        result.metrics |= {
            names.TRAIN_LOSS: sum(each.loss for each in done) / len(done),
            names.TRAIN_LR: self.optimizer.param_groups[0]["lr"],
            names.TRAIN_NONFINITE: float(sum(not (each.moved or each.overflowed) for each in done)),
            names.PADDED_FRACTION: 1 - sum(each.totals[_USEFUL] for each in done) / computed,
            names.FORWARD_TOKENS: computed,
        }
        norms = [each.norm for each in done if not each.overflowed]
        if norms:
            result.metrics[names.TRAIN_GRAD_NORM] = sum(norms) / len(norms)
        if self.loss_scale is not None:
            result.metrics[names.TRAIN_SKIPPED_STEPS] = float(sum(each.overflowed for each in done))
            result.metrics[names.TRAIN_LOSS_SCALE] = self.loss_scale.scale
        for term in done[0].totals.keys() - _COUNTS:
            result.metrics[f"train/loss_{term}"] = sum(each.totals.get(term, 0.0) for each in done) / len(done)

    def _leave_out(self, gradients: Gradients) -> None:
        """Leave out an optimizer step: because of the loss scale, or because loss or gradient are not finite."""
        self.optimizer.zero_grad(set_to_none=True)
        scale = self.loss_scale
        if scale is not None and math.isfinite(gradients.loss) and scale.overflowed():
            gradients.overflowed = True
            logger.info("left out an optimizer step whose gradient overflowed; the loss scale is now %g", scale.scale)
            return
        self._count_nonfinite(gradients.loss, gradients.norm)

    def _count_nonfinite(self, loss: float, norm: float) -> None:
        self._nonfinite_in_a_row += 1
        logger.warning("skipped an optimizer step: loss %s, gradient norm %s", loss, norm)
        if self._nonfinite_in_a_row >= self.settings.max_nonfinite_steps:
            raise TrainingDiverged(
                f"{self._nonfinite_in_a_row} optimizer steps in a row had no finite gradient (loss {loss}, gradient "
                f"norm {norm}); {self._remedy()}"
            )

    def _remedy(self) -> str:
        if self.loss_scale is not None:
            return "the model may exceed the range of float16, so use --dtype bfloat16; or lower --lr"
        return "lower --lr, or look at the rewards and logprobs of the last batches"


def _logprobs(
    module: Any, micro: PackedBatch, labels: Tensor, temperatures: Tensor, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Run a forward of `module`; return logprobs of `labels` and entropies at a micro-batch's trained tokens."""
    weight, bias = head_of(module)
    hidden = forward_hidden(module, micro)
    return token_logprobs(
        hidden, weight, micro.hidden_index, labels, temperatures, bias=bias, chunk_tokens=chunk_tokens
    )


def _merge(pieces: Sequence[Tensor]) -> Tensor:
    """Merge arrays that are NaN outside their own mini-batch into one."""
    merged = pieces[0]
    for piece in pieces[1:]:
        merged = torch.where(merged.isnan(), piece, merged)
    return merged
