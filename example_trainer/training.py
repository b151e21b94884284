"""Training on one batch: forward and backward over micro-batches, optimizer steps, and metrics.

Denominators are those of the whole optimizer step, so that splitting it into micro-batches, or over ranks, changes
nothing. A step whose loss or gradient is not finite leaves the weights unchanged and is counted; one whose gradient is
0 leaves them unchanged too. A batch from which nothing can be learnt is skipped without forward or backward. In float16
the loss is scaled (`modeling.loss_scale`): a step whose gradient overflows lowers the scale instead, and is counted
separately.

With several ranks each trains the groups it was given. If the weights are sharded over the ranks, every forward and
backward needs all ranks: a rank that has run out of micro-batches takes part with an empty one.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atropos_api.common import metric_names as names
from example_trainer.data import TrainingBatch
from example_trainer.distributed.rank_shares import (
    FirstPass,
    gather_first_pass,
    plan_mini_batches,
    step_weights,
    sum_by_name,
)
from example_trainer.distributed.ranks import Ranks
from example_trainer.errors import TrainingDiverged
from example_trainer.modeling.attention import uses_varlen
from example_trainer.modeling.logprobs import HeadPasses, head_of, token_logprobs
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
from example_trainer.modeling.optimizers import learning_rate, set_lr
from example_trainer.objective.losses import Targets
from example_trainer.objective.objective import Objective
from example_trainer.objective.sampling_masks import labels_with_masks, over_masks
from example_trainer.options.training_options import TrainingOptions

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy

logger = logging.getLogger(__name__)


class StopRequestedError(Exception):
    """A stop was requested: raised between micro-batches; the weights are those of the step before."""


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

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.norm) and math.isfinite(self.loss)


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

    def first_values(self) -> tuple[Tensor, Tensor]:
        """Return `[N]` logprobs and entropies of this rank's trained tokens in its first pass over the batch."""
        first = self.done[: self.in_an_epoch]
        return _merge([each.logprobs for each in first]), _merge([each.entropies for each in first])


class Learner:
    """The learner: it owns the optimizer and its count of updates, and trains the policy one batch at a time."""

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        config: TrainingOptions,
        *,
        objective: Objective,
        layout: LayoutKind,
        ranks: Ranks | None = None,
        head_passes: HeadPasses | None = None,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.config = config
        self.learning_rate = learning_rate(config)
        self.objective = objective
        self.layout = layout
        self.ranks = ranks or Ranks()
        self._head_passes = head_passes
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
        parts = plan_mini_batches(batch.rows, self.config.mini_batches, self.ranks.data)
        targets = None
        if parts:
            own = batch.targets.to(self.policy.device)
            targets = self.objective.prepare(batch.rows, own, self.score, self.ranks.data.gather)
        return BatchTraining(
            batch=batch,
            targets=targets,
            mini_batches=parts * self.config.epochs_per_batch,
            in_an_epoch=len(parts),
            should_stop=should_stop,
        )

    def accumulate(self, training: BatchTraining, rows: Sequence[Row]) -> Gradients:
        """Run forward and backward over one mini-batch; sum gradients over ranks and clip them. No weight changes."""
        assert training.targets is not None
        # A stop takes effect only before the first update, because a checkpoint cannot hold a half-trained batch.
        should_stop = (lambda: False) if training.done else training.should_stop
        self.policy.drop_gradients()
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
        """Take one optimizer step, unless the loss or the gradients are not finite, or the gradients are 0."""
        if not gradients.is_finite:
            self._leave_out(gradients)
            return
        self._nonfinite_in_a_row = 0
        if gradients.norm == 0.0:
            if self.loss_scale is not None:
                self.loss_scale.stepped()  # a scale at which all gradients round to 0 must grow
            logger.warning(
                "left out an optimizer step whose gradient is 0, so that only momentum and weight decay would move the "
                "weights: each of its tokens has an advantage of 0 or is clipped or masked (--staleness-mask, "
                "--off-policy-mask, --mismatch-correction)"
            )
            return
        with self.policy.changing():  # a stop may end this wait for the server, so nothing changes before it
            if self.loss_scale is not None:
                self.loss_scale.stepped()
            self.updates += 1
            set_lr(self.optimizer, self.learning_rate.at(self.updates))
            self.optimizer.step()
        gradients.moved = True

    def finish(self, training: BatchTraining) -> StepResult:
        """Return the batch's metrics, and the values of its first forwards at each token."""
        done, targets = training.done, training.targets
        result = StepResult(metrics={names.TRAIN_SKIPPED: float(all(each.norm == 0.0 for each in done))})
        if targets is not None:
            self._report(result, training, targets)
        self.objective.after_batch(training.batch.number, result.metrics)
        return result

    def score(self, rows: Sequence[Row], targets: Targets) -> Tensor:
        """Return logprobs of all trained tokens of `rows` under the current weights, NaN elsewhere; no gradients."""
        scored = torch.full((len(targets),), math.nan, device=self.policy.device)
        with torch.no_grad(), self.policy.holding_masters():
            for micro in self._micro_batches(rows):
                at = micro.target_index
                logprobs, _ = self._forward(micro, targets, labels_with_masks(targets, at))
                scored[at] = over_masks(logprobs, targets, at)
        return scored

    def _accumulate(self, rows: Sequence[Row], targets: Targets, should_stop: Callable[[], bool]) -> Gradients:
        unknown = torch.full((len(targets),), math.nan, device=self.policy.device)
        passed = Gradients(unknown, unknown.clone())
        weights = step_weights(
            rows, len(targets), self.config.loss_aggregation, self.config.aggregation_length, self.ranks.data
        ).to(self.policy.device)
        with self.policy.holding_masters():
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
        own, teachers = self.objective.split(targets, at, logprobs)
        terms = {
            name: (losses * weights[at]).sum()
            for name, losses in self.objective.terms(targets, at, own, teachers, entropies).items()
        }
        loss = torch.stack(list(terms.values())).sum()
        if self.loss_scale is not None:
            loss = loss * self.loss_scale.scale
        loss.backward()  # type: ignore[no-untyped-call]
        passed.logprobs[at] = own.detach()
        passed.entropies[at] = entropies.detach()
        for name, term in terms.items():
            passed.totals[name] += term.item()
        passed.totals[_USEFUL] += micro.useful_tokens
        passed.totals[_COMPUTED] += micro.computed_tokens

    def _forward(self, micro: PackedBatch, targets: Targets, labels: Tensor) -> tuple[Tensor, Tensor]:
        temperatures = targets.temperatures[micro.target_index]
        return self.policy.compute(
            _logprobs, micro, labels, temperatures, self.config.logprob_chunk_tokens, self._head_passes
        )

    def _micro_batches(self, rows: Sequence[Row]) -> list[PackedBatch]:
        """Return the packed `rows`, padded with empty micro-batches to the same number on every rank.

        Forwards of sharded weights need all ranks, and the check for a stop must come equally often on each.
        """
        device = self.policy.device
        varlen = uses_varlen(device, self.policy.dtype)
        packed = pack_rows(
            rows,
            self.config.micro_batch_tokens,
            device=device,
            layout=self.layout,
            varlen=varlen,
            pad_to=self.config.pad_to or ROW_MULTIPLE,
            pairs_per_token=6 * self.policy.hf_config.get_text_config().hidden_size,
        )
        missing = self.ranks.max(len(packed)) - len(packed)
        return packed + [empty_micro_batch(device, layout=self.layout, varlen=varlen)] * missing

    def _clip_gradients(self) -> float:
        """Clip the gradients and return their global norm before clipping."""
        limit = self.config.max_grad_norm or math.inf
        norm: Any = torch.nn.utils.clip_grad_norm_(self.policy.masters.values(), limit)
        return float(norm.full_tensor() if self.policy.is_sharded else norm)

    def _report(self, result: StepResult, training: BatchTraining, targets: Targets) -> None:
        """Fill in `result`: per-token values from the first pass over the batch, means over all optimizer steps."""
        done = training.done
        logprobs, entropies = training.first_values()
        own = FirstPass(targets=targets, logprobs=logprobs, entropies=entropies, first_logprobs=done[0].logprobs)
        everywhere = gather_first_pass(own, self.ranks.data)
        result.updates = sum(each.moved for each in done)
        result.targets, result.logprobs = everywhere.targets, everywhere.first_logprobs
        result.metrics |= self.objective.metrics(everywhere.targets, everywhere.logprobs, everywhere.entropies)
        computed = sum(each.totals[_COMPUTED] for each in done)
        result.metrics |= {
            names.TRAIN_LOSS: sum(each.loss for each in done) / len(done),
            names.TRAIN_LR: self.optimizer.param_groups[0]["lr"],
            names.TRAIN_NONFINITE: float(sum(not (each.is_finite or each.overflowed) for each in done)),
            names.PADDED_FRACTION: 1 - sum(each.totals[_USEFUL] for each in done) / computed,
            names.FORWARD_TOKENS: computed,
        }
        norms = [each.norm for each in done if not each.overflowed]
        if norms:
            result.metrics[names.TRAIN_GRAD_NORM] = sum(norms) / len(norms)
        if self.loss_scale is not None:
            result.metrics[names.TRAIN_SKIPPED_STEPS] = float(sum(each.overflowed for each in done))
            result.metrics[names.TRAIN_LOSS_SCALE] = self.loss_scale.scale
        for term in {name for each in done for name in each.totals} - _COUNTS:
            mean = sum(each.totals.get(term, 0.0) for each in done) / len(done)
            result.metrics[names.TRAIN_LOSS_TERM.format(term=term)] = mean

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
        if self._nonfinite_in_a_row >= self.config.max_nonfinite_steps:
            raise TrainingDiverged(
                f"{self._nonfinite_in_a_row} optimizer steps in a row had no finite gradient (loss {loss}, gradient "
                f"norm {norm}); {self._remedy()}"
            )

    def _remedy(self) -> str:
        if self.loss_scale is not None:
            return "the model may exceed the range of float16, so use --dtype bfloat16; or lower --lr"
        return "lower --lr, or look at the rewards and logprobs of the last batches"


def _logprobs(
    module: Any,
    micro: PackedBatch,
    labels: Tensor,
    temperatures: Tensor,
    chunk_tokens: int,
    passes: HeadPasses | None,
) -> tuple[Tensor, Tensor]:
    """Run a forward of `module`; return logprobs of `labels` and entropies at a micro-batch's trained tokens."""
    weight, bias = head_of(module)
    hidden = forward_hidden(module, micro)
    index = micro.hidden_index
    return token_logprobs(
        hidden, weight, index, labels, temperatures, bias=bias, chunk_tokens=chunk_tokens, passes=passes
    )


def _merge(pieces: Sequence[Tensor]) -> Tensor:
    """Merge arrays that are NaN outside their own mini-batch into one."""
    merged = pieces[0]
    for piece in pieces[1:]:
        merged = torch.where(merged.isnan(), piece, merged)
    return merged
