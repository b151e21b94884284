"""The loop of supervised fine-tuning: batch, learner, metrics, evaluation, checkpoint, one after the other.

Everything that a step depends on is in its checkpoint or follows from seed and step number, so a run that was killed
and resumed ends with the weights of one that was not.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atropos_api.common import metric_names as names
from atropos_api.common.secrets import public_settings
from environments.tasks.records import DataUnusable
from example_trainer.checkpointing import continue_at, find_checkpoint, read_state
from example_trainer.config import TrainingConfig
from example_trainer.distributed.ranks import Ranks
from example_trainer.errors import CheckpointError
from example_trainer.launcher.run_dir import provenance, write_json
from example_trainer.model import load_policy
from example_trainer.modeling.loading import policy_options
from example_trainer.monitoring.trackers import METRICS_FILE, RunTrackers, Tracker, read_metrics
from example_trainer.resume_settings import refuse_changed_settings
from example_trainer.sft.batches import Sample, SampleOrder, make_batch
from example_trainer.sft.config import SftConfig
from example_trainer.sft.output import CONFIG_FILE, RECORD_KEY, SUMMARY_FILE, delete_earlier_run, finish_model
from example_trainer.state import TrainerState, random_state
from example_trainer.step.metrics import memory_metrics
from example_trainer.step.save import save_from_all_ranks
from example_trainer.step.train_step import TrainStep, make_train_step
from example_trainer.training import StepResult

logger = logging.getLogger(__name__)

EVALUATED_AT_ONCE = 256
"""Samples of one forward pass of the evaluation, over all ranks; they are packed into micro-batches."""

LEARNER_METRICS = (
    names.TRAIN_LOSS,
    names.TRAIN_LR,
    names.TRAIN_GRAD_NORM,
    names.TRAIN_ENTROPY,
    names.TRAIN_NONFINITE,
    names.TRAIN_SKIPPED_STEPS,
    names.TRAIN_LOSS_SCALE,
    names.FORWARD_TOKENS,
    names.PADDED_FRACTION,
)
"""Metrics of the learner that have a meaning if no policy has sampled."""

DATA_SETTINGS = ("dataset", "seed", "sequences_per_step", "rows")
"""Settings that a resume must not change: the order of the data depends on them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FineTuningData:
    """The samples to learn and to evaluate on."""

    samples: Sequence[Sample]
    evaluation: Sequence[Sample] = ()
    chat_template: str | None = None
    """A chat template that the tokenizer does not have by itself."""


class FineTuning:
    """One run of supervised fine-tuning; `train` learns from the first or the resumed step to the last."""

    def __init__(
        self,
        config: SftConfig,
        directory: Path,
        data: FineTuningData,
        *,
        trackers: Callable[[TrainingConfig], RunTrackers],
        should_stop: Callable[[], bool] = lambda: False,
        ranks: Ranks | None = None,
    ) -> None:
        """Keep the arguments; `trackers` makes the trackers of the run, which need its settings."""
        rows = len(data.samples)
        self.training = config.training_config(directory, config.steps_for(rows))
        self._config = config
        self._directory = directory
        self._data = data
        self._ranks = ranks or Ranks()
        self._should_stop = should_stop
        self._trackers = trackers(self.training)
        per_step = config.sequences_per_step
        total = config.training_steps * per_step if config.training_steps else rows * config.num_epochs
        self._order = SampleOrder(data.samples, seed=config.seed, per_step=per_step, total=total)
        self._record = public_settings(config) | {"sequences_per_step": per_step, "rows": rows}
        self._train_step: TrainStep
        self._tracker: Tracker
        self._losses: dict[str, float] = {}
        self._tokens = 0
        self._earlier_seconds = 0.0
        """Time of the steps before the resume."""
        self._began = 0.0

    def train(self) -> bool:
        """Train to the last step; return False if the run was stopped earlier, after writing a checkpoint."""
        self._set_up()
        progress, last = self._train_step.progress, self.training.training_steps
        self._began = time.monotonic()
        try:
            finished = all(self._step(step) for step in range(progress.step + 1, last + 1))
            if progress.step and progress.checkpointed != progress.step:
                self._save(progress.step)
        finally:
            self._tracker.close()
        if finished:
            self._finish(last)
        else:
            logger.info("stopped after step %d; continue with --resume auto", progress.step)
        return finished

    def _set_up(self) -> None:
        """Load or resume the policy, and open the trackers."""
        checkpoint = self._ranks.on_main(lambda: find_checkpoint(self._config.resume, self._directory))
        state = None if checkpoint is None else read_state(checkpoint)
        if state is not None:
            refuse_changed_settings(state, self.training, "sft")
            self._refuse_other_data(state)
        self._ranks.on_main(self._trackers.open)
        try:
            options = replace(policy_options(self.training), context_length=self._config.seq_len)
            policy = load_policy(options)
            policy.chat_template = self._data.chat_template
            if policy.has_adapter:
                self._ranks.copy_from_main(policy.masters.values())
            self._refuse_long_samples(policy.hf_config)
            self._train_step = make_train_step(self.training, policy, self._ranks)
            if checkpoint is not None and state is not None:
                self._train_step.resume(checkpoint, state)
                self._ranks.on_main(partial(continue_at, self._directory, checkpoint))
            self._ranks.on_main(self._take_folder)  # nothing is left that could refuse the run
        except BaseException:
            self._trackers.close()
            raise
        self._tracker = self._trackers.at(None if state is None else state.step)
        if state is not None and self._ranks.is_main:
            self._note_earlier_steps()

    def _take_folder(self) -> None:
        """Record the run in its folder; `--overwrite` deletes the earlier run there first."""
        if self._config.overwrite:
            delete_earlier_run(self._directory)
        record = {RECORD_KEY: public_settings(self._config), **provenance()}
        write_json(self._directory / CONFIG_FILE, record)

    def _note_earlier_steps(self) -> None:
        """Take the steps before the resume into the summary, from their lines of metrics."""
        for line in read_metrics(self.training.required_run_dir / METRICS_FILE):
            self._note(line)
            self._earlier_seconds += line.get(names.TIME_STEP, 0.0)

    def _refuse_other_data(self, state: TrainerState) -> None:
        """Raise `CheckpointError` if the data's order is not that of the checkpoint: rows would be learned twice."""
        for name in DATA_SETTINGS:
            before, now = state.config.get(name), self._record[name]
            if before != now:
                raise CheckpointError(
                    f"the checkpoint of step {state.step} was written with {name} {before}, this run has {now}, so its "
                    "steps would learn other rows; resume with the same data, or start from its weights with "
                    "--model-name"
                )

    def _refuse_long_samples(self, hf_config: Any) -> None:
        limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
        longest = max(len(sample.tokens) for sample in (*self._data.samples, *self._data.evaluation))
        if limit is not None and longest > limit:
            raise DataUnusable(f"a sequence has {longest} tokens and the model takes {limit}; use --seq-len {limit}")

    def _step(self, step: int) -> bool:
        """Learn one step's samples and log them; if a stop was requested, return False without learning."""
        if self._ranks.any(self._should_stop()):
            return False
        began = time.monotonic()
        samples = self._order.at(step)
        result = self._train_step.learner.train(make_batch(step, self._share(samples)))
        progress = self._train_step.progress
        progress.step = progress.weights_step = step
        metrics = self._metrics(step, len(samples), result, time.monotonic() - began)
        every, last = self._config.eval_steps, step == self.training.training_steps
        if self._data.evaluation and (last or (every and step % every == 0)):
            metrics[names.SFT_EVAL_LOSS] = self._evaluate()
        self._log(step, metrics)
        interval = self._config.checkpoint_interval
        if interval and step % interval == 0:
            self._save(step)
        return True

    def _share(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return this rank's part of samples that all ranks learn or evaluate together."""
        return samples[self._ranks.rank :: self._ranks.world_size]

    def _metrics(self, step: int, sequences: int, result: StepResult, seconds: float) -> dict[str, float]:
        tokens = 0 if result.targets is None else len(result.targets)
        return {
            **{name: result.metrics[name] for name in LEARNER_METRICS if name in result.metrics},
            names.SFT_EPOCH: self._order.epoch_after(step),
            names.SEQUENCES: float(sequences),
            names.TRAINED_TOKENS: float(tokens),
            names.TRAINED_TOKENS_PER_SECOND: tokens / max(seconds, 1e-9),
            names.TIME_STEP: seconds,
            **memory_metrics(self._train_step.learner.policy.device),
        }

    def _evaluate(self) -> float:
        """Return the mean of -log p over the learned tokens of the evaluation data."""
        learner = self._train_step.learner
        total = torch.zeros(2, dtype=torch.float64)
        for first in range(0, len(self._data.evaluation), EVALUATED_AT_ONCE):
            batch = make_batch(0, self._share(self._data.evaluation[first : first + EVALUATED_AT_ONCE]))
            scored = learner.score(batch.rows, batch.targets.to(learner.policy.device))
            total += torch.tensor([-float(scored.double().sum()), float(len(scored))], dtype=torch.float64)
        loss, tokens = self._ranks.sum(total).tolist()
        return float(loss / tokens)

    def _note(self, metrics: Mapping[str, float]) -> None:
        """Count a step in the summary."""
        loss = metrics.get(names.TRAIN_LOSS, math.nan)
        self._losses = {"first_loss": loss, **self._losses, "last_loss": loss}
        if names.SFT_EVAL_LOSS in metrics:
            self._losses["eval_loss"] = metrics[names.SFT_EVAL_LOSS]
        self._tokens += int(metrics.get(names.TRAINED_TOKENS, 0))

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self._ranks.on_main(partial(self._tracker.log, step, metrics))
        self._note(metrics)
        evaluated = metrics.get(names.SFT_EVAL_LOSS)
        logger.info(
            "step %d/%d: loss %.4f%s, %d tokens in %.2f s",
            step,
            self.training.training_steps,
            self._losses["last_loss"],
            "" if evaluated is None else f", eval loss {evaluated:.4f}",
            metrics[names.TRAINED_TOKENS],
            metrics[names.TIME_STEP],
        )

    def _save(self, step: int) -> None:
        learner = self._train_step.learner
        state = TrainerState(
            step=step,
            updates=learner.updates,
            policy_version=None,
            highest_version=0,
            run_id="",
            run_name=self._config.name,
            seed=self._config.seed,
            loss_scale=None if learner.loss_scale is None else learner.loss_scale.state(),
            config=self._record,
            base=self._train_step.progress.base,
            method="sft",
        )
        save_from_all_ranks(self.training, learner, state, random_state(), learner.objective.state())
        self._train_step.progress.checkpointed = step

    def _finish(self, step: int) -> None:
        """Make `final_model` and write the run's summary."""
        policy = self._train_step.learner.policy
        with policy.gathered():
            final = self._ranks.on_main(
                partial(finish_model, self._directory, policy, step=step, merges=self._config.merge_adapter)
            )
        seconds = self._earlier_seconds + time.monotonic() - self._began
        summary = {
            "steps": step,
            "epochs": self._order.epoch_after(step),
            "rows": len(self._data.samples),
            **{name: value for name, value in self._losses.items() if math.isfinite(value)},
            "trained_tokens": self._tokens,
            "seconds": seconds,
            "final_model": None if final is None else str(final),
        }
        self._ranks.on_main(partial(write_json, self._directory / SUMMARY_FILE, summary))
        logger.info("the model is in %s", final or self._directory / "latest")
