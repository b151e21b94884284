"""`TrainingOptions`: all sections of the trainer's options in one flat model, and the values derived from them.

`conflicts.py` checks these options; `config.TrainingConfig` is this model with that check. It loads no torch.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ConfigDict

from example_trainer.options.model import BatchOptions, LoraOptions, ModelOptions, OptimizerOptions
from example_trainer.options.objective import ObjectiveOptions
from example_trainer.options.presets import CourseOptions, PresetOptions
from example_trainer.options.publish import PublishOptions
from example_trainer.options.run import RunOptions, TrackingOptions

USUAL_LR_OF_LARGE_MODELS = 6e-6


class TrainingOptions(
    PresetOptions,
    CourseOptions,
    TrackingOptions,
    RunOptions,
    PublishOptions,
    OptimizerOptions,
    ObjectiveOptions,
    BatchOptions,
    LoraOptions,
    ModelOptions,
):
    """All options of one trainer process, flat: combinations that cannot work are not refused yet.

    Base classes are in the order in which they process the given values; options are listed in the reverse order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @property
    def sequences_per_batch(self) -> int:
        """Number of sequences requested from the broker per step."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def optimizer_steps_per_batch(self) -> int:
        return self.epochs_per_batch * self.mini_batches

    @property
    def micro_batch_tokens(self) -> int:
        """Token budget of one packed micro-batch."""
        return self.token_budget or self.batch_size * self.seq_len

    @property
    def broadcasts(self) -> bool:
        """True if weights are sent to several servers, which share no memory with the trainer."""
        return self.mode.shares_memory and self.num_inference_nodes > 0

    @property
    def shares_memory(self) -> bool:
        """True if the served weights are one copy, in memory that trainer and server both map."""
        return self.mode.shares_memory and not self.broadcasts

    @property
    def trains_adapter(self) -> bool:
        """True if an adapter on a frozen base is trained, not the weights themselves."""
        return self.mode.trains_adapter

    @property
    def publish_interval(self) -> int:
        """Number of steps between publishes, which `sync_budget` may increase."""
        return 1 if self.mode.server_outlives_publish else self.vllm_restart_interval

    @property
    def forwards_from_masters(self) -> bool:
        """True if the forward reads the masters and never the served tensors."""
        if not self.shares_memory:
            return True
        if self.forward_weights == "auto":
            return self.overlap_publish or self.optimizer_steps_per_batch > 1
        return self.forward_weights == "masters"

    @property
    def steps_served_weights(self) -> bool:
        """True if the optimizer steps the same tensors that the server reads, so that a step is part of a publish."""
        return self.shares_memory and self.master_weights == "none"

    @property
    def required_run_dir(self) -> Path:
        """The run directory; raises if the command has not set it yet."""
        if self.run_dir is None:
            raise ValueError("run_dir is not settled; call cli.settle_run_dir first")
        return self.run_dir

    @property
    def checkpoint_root(self) -> Path:
        """The directory in which `checkpoint-N/` directories are written."""
        return self.save_path or self.required_run_dir

    def warnings(self) -> list[str]:
        """Return a sentence for each setting that works but is often a mistake."""
        full = not self.trains_adapter
        # Not at the documented default: a warning that stands in every log is read in none.
        if full and self.master_weights != "none" and self.lr > type(self).model_fields["lr"].default:
            text = (
                f"--lr {self.lr:g} is high for full fine-tuning with fp32 masters (rounded bf16 weights used to "
                f"hide that); large models do better at {USUAL_LR_OF_LARGE_MODELS:g} or below"
            )
            return [text]
        return []
