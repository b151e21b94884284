"""`SftConfig`: every setting of `atropos-sft`, under the names of the trainer's flags and of TRL's `SFTConfig`.

`training_config` gives the settings of the learner that follow: full weights are those of mode `none`, an adapter is
that of mode `lora_restart`, and the loss is the mean over tokens of -log p. This module loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from atropos_api.common.cliconfig import validate
from atropos_api.common.files import named_path
from atropos_api.common.observability import LogForm
from atropos_api.common.option_flags import aliases, flag
from example_trainer.config import TrainingConfig
from example_trainer.options.conflicts import ADAPTER_SETTINGS
from example_trainer.options.model import FitOptions, LoadingOptions, LoraOptions, MicroBatchOptions, OptimizerOptions
from example_trainer.options.names_elsewhere import FINE_TUNING_NAMES
from example_trainer.options.training_options import LARGEST_SEED, LoggingOptions, ProcessOptions

ROW_MULTIPLE_WITHOUT_PACKING = 8


class DataOptions(BaseModel):
    """The data to learn."""

    _find_template = field_validator("chat_template", mode="before")(named_path)

    dataset: str = Field(
        description="Data to learn: a .jsonl, .json or .parquet file, a folder of them, or a Hugging Face data set as "
        "NAME, NAME:CONFIGURATION or NAME:CONFIGURATION:SPLIT.",
        json_schema_extra=aliases("dataset_name", "data_path"),
    )
    eval_dataset: str | None = Field(
        None,
        description="Data to evaluate on, in the same forms; if it has several splits, its test split is used.",
    )
    eval_split: float | None = Field(
        None, gt=0.0, lt=1.0, description="Share of the rows of --dataset that is evaluated on and not learned."
    )
    eval_steps: int = Field(0, ge=0, description="Evaluate every N steps; 0: after the last one only.")
    prompt_column: str | None = Field(
        None, description="Column of the prompt or chat; unset: the first of prompt, messages, question and the like."
    )
    text_column: str = Field(
        "text",
        description="Column of a text that is learned whole, in rows without a prompt.",
        json_schema_extra=aliases("dataset_text_field"),
    )
    prompt_form: Literal["auto", "chat", "text"] = Field(
        "auto",
        description="Form of prompts that are text: a user's message under the chat template, or text that the "
        "completion continues. auto: chat if the tokenizer has a template, as dataset_server.py does.",
    )
    system_prompt: str | None = Field(None, description="System message of chats that have none.")
    chat_template: Path | None = Field(
        None,
        description="File with a Jinja chat template in place of the tokenizer's; checkpoints get it.",
        json_schema_extra=aliases("chat_template_path"),
    )
    assistant_only_loss: bool = Field(
        True,
        description="Learn the assistant's turns, or the completion; false: learn every token after the first.",
        json_schema_extra=aliases("completion_only_loss"),
    )
    turns: Literal["all", "last"] = Field(
        "all",
        description="The assistant's turns that are learned: all, or the reply at the end alone, for templates that "
        "write earlier turns differently.",
    )


class StepOptions(MicroBatchOptions):
    """The number and size of training steps."""

    training_steps: int | None = Field(
        None, ge=1, description="Training steps; unset: --num-epochs.", json_schema_extra=aliases("max_steps")
    )
    num_epochs: int = Field(
        1,
        ge=1,
        description="Passes over the data, each in a new order that --seed decides.",
        json_schema_extra=aliases("num_train_epochs"),
    )
    seq_len: int = Field(
        2048,
        ge=2,
        description="Maximum sequence length in tokens.",
        json_schema_extra=aliases("max_seq_length", "max_length"),
    )
    overlong: Literal["drop", "mask"] = Field(
        "drop",
        description="Treatment of a longer sequence: drop leaves it out, mask learns its first --seq-len tokens.",
    )
    packing: bool = Field(
        True,
        description="Compute sequences one after the other without padding, each attending to itself alone; false: in "
        "padded rows.",
    )


class OutputOptions(ProcessOptions):
    """The run: its folder, checkpoints and processes."""

    name: str = Field("sft", min_length=1, description="Name of the run.")
    save_path: Path | None = Field(
        None,
        description="Folder for checkpoints, metrics and final_model; unset: runs/<name>-<time>.",
        json_schema_extra=aliases("output_dir", "save_dir"),
    )
    overwrite: bool = Field(
        False, description="Delete an earlier run's checkpoints and metrics in --save-path, and begin anew."
    )
    resume: str | None = Field(None, description="auto (newest checkpoint, if any) or the path of a checkpoint.")
    checkpoint_interval: int = Field(
        500,
        ge=0,
        description="Checkpoint every N steps, besides the last; 0: at the end only.",
        json_schema_extra=aliases("save_steps"),
    )
    keep_last: int = Field(
        0, ge=0, description="Keep the last K checkpoints; 0 keeps all.", json_schema_extra=aliases("save_total_limit")
    )
    merge_adapter: bool = Field(
        True, description="With --use-lora: write base and adapter merged as final_model after the last step."
    )
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="Seed of the order of the data, and of dropout.")
    log_format: LogForm = "text"

    _find_directories = field_validator("save_path", "resume", mode="before")(named_path)


class SftConfig(
    LoggingOptions, OutputOptions, OptimizerOptions, StepOptions, LoraOptions, DataOptions, FitOptions, LoadingOptions
):
    """All settings of supervised fine-tuning, flat, validated together."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
    names_elsewhere: ClassVar[Mapping[str, str]] = FINE_TUNING_NAMES

    use_lora: bool = Field(False, description="Train a LoRA adapter on the frozen model instead of its weights.")

    @model_validator(mode="after")
    def _refuse_what_cannot_work(self) -> SftConfig:
        if reason := _reason_to_refuse(self):
            raise ValueError(reason)
        return self

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    def steps_for(self, rows: int) -> int:
        """Return the number of steps over a data set of `rows` rows."""
        return self.training_steps or math.ceil(rows * self.num_epochs / self.sequences_per_step)

    def training_config(self, directory: Path, steps: int) -> TrainingConfig:
        """Return the trainer's settings under which its learner does this fine-tuning."""
        shared = {name: value for name, value in self.model_dump().items() if name in TrainingConfig.model_fields}
        own = {
            "run_dir": directory,
            "save_path": None,
            "training_steps": steps,
            "pad_to": self.pad_to or (None if self.packing else ROW_MULTIPLE_WITHOUT_PACKING),
            "weight_bridge_mode": "lora_restart" if self.use_lora else "none",
            "loss_type": "no_baseline",
            "loss_aggregation": "token",
        }
        return validate(TrainingConfig, shared | own)


def _reason_to_refuse(config: SftConfig) -> str | None:
    """Return the first reason why these settings cannot work together, or None."""
    if not config.use_lora:
        for name in (*ADAPTER_SETTINGS, "merge_adapter"):
            if getattr(config, name) != SftConfig.model_fields[name].default:
                return f"{flag(name)} {getattr(config, name)} is a setting of an adapter; add --use-lora"
    elif config.train_layer_indices is not None:
        return f"--train-layer-indices {config.train_layer_indices}: --use-lora freezes all; use --lora-layer-indices"
    rules = (
        (
            config.training_steps is not None and "num_epochs" in config.model_fields_set,
            f"--training-steps {config.training_steps} and --num-epochs {config.num_epochs} both end the run; give one",
        ),
        (
            config.eval_dataset is not None and config.eval_split is not None,
            f"--eval-dataset {config.eval_dataset} and --eval-split {config.eval_split} both name data; give one",
        ),
        (
            bool(config.eval_steps) and config.eval_dataset is None and config.eval_split is None,
            f"--eval-steps {config.eval_steps} needs data to evaluate on; add --eval-dataset, or --eval-split 0.05",
        ),
        (
            config.overwrite and config.resume is not None,
            f"--overwrite deletes what --resume {config.resume} would continue; give one",
        ),
    )
    return next((reason for holds, reason in rules if holds), None)
