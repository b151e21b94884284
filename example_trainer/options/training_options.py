"""`TrainingOptions`: all sections of the trainer's options in one flat model, and what follows from them.

`conflicts.py` judges these options; `config.TrainingConfig` is this model with that judgement. It loads no torch.
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
    """All options of one trainer process, flat; the combinations that cannot work are still in it.

    Bases come in the order in which they look at what was given; options are listed in the opposite one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @property
    def sequences_per_batch(self) -> int:
        """Sequences the broker is asked for per step."""
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
        """Whether an adapter is trained beside a frozen base, not the weights themselves."""
        return self.mode.trains_adapter

    @property
    def publish_interval(self) -> int:
        """Steps between publishes, before `sync_budget` spaces them further."""
        return 1 if self.mode.server_outlives_publish else self.vllm_restart_interval

    @property
    def forwards_from_masters(self) -> bool:
        """Whether the forward reads the masters and never the served tensors."""
        if not self.shares_memory:
            return True
        if self.forward_weights == "auto":
            return self.overlap_publish or self.optimizer_steps_per_batch > 1
        return self.forward_weights == "masters"

    @property
    def steps_served_weights(self) -> bool:
        """Whether the optimizer steps the very tensors that the server reads, so that a step is part of a publish."""
        return self.shares_memory and self.master_weights == "none"

    @property
    def required_run_dir(self) -> Path:
        """The run directory, once the command has settled it."""
        if self.run_dir is None:
            raise ValueError("run_dir is not settled; call cli.settle_run_dir first")
        return self.run_dir

    @property
    def checkpoint_root(self) -> Path:
        """Where `checkpoint-N/` directories are written."""
        return self.save_path or self.required_run_dir

    def warnings(self) -> list[str]:
        """Settings that work but are often a mistake, one sentence each."""
        full = not self.trains_adapter
        # Not at the documented default: a warning that stands in every log is read in none.
        if full and self.master_weights != "none" and self.lr > type(self).model_fields["lr"].default:
            text = (
                f"--lr {self.lr:g} is high for full fine-tuning with fp32 masters (rounded bf16 weights used to "
                f"hide that); large models do better at {USUAL_LR_OF_LARGE_MODELS:g} or below"
            )
            return [text]
        return []
