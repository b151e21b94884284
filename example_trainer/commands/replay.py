"""`atropos replay BATCH_FILE` trains one saved batch again, without broker, server or environment.

The settings are those in the `config.json` of the file's run, overridden by the flags that are given; the weights are
those of the checkpoint before the batch. It prints the step's metrics without times and rates, so that two replays of
one batch print the same bytes, and a replay prints the values that the run itself logged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from atropos_api.common import metric_names as names
from atropos_api.common.cliconfig import ConfigError, load_config
from atropos_api.common.files import read_json_object
from example_trainer.config import TrainingConfig
from example_trainer.errors import BadBatch

if TYPE_CHECKING:
    from atropos_api.wire import Batch
    from example_trainer.step.train_step import TrainStep

PROG = "atropos replay BATCH_FILE"

DESCRIPTION = (
    "Repeat the training of one saved batch (--save-batches) from the checkpoint before it; print the step's metrics. "
    "All of the trainer's options are accepted; they override those of the run that the file belongs to."
)

VARYING = ("time/", "perf/")
"""Prefixes of the metrics that are not a function of batch, weights and settings."""

NOT_A_REPLAY_S = frozenset(
    {"run_dir", "save_path", "log_dir", "resume", "rollout_batch_size", "train_batch_size"}
    | {"world_size", "trainer_rank", "init_method", "trainer_tensor_parallel_size"}
)
"""Recorded settings that a replay ignores: where the run wrote, `resume`, two batch sizes, recorded as computed, and
the ranks, since a replay is one process.
"""


class ReplayOptions(TrainingConfig):
    """The trainer's settings and the checkpoint to begin with."""

    checkpoint: str | None = Field(
        None,
        description="Checkpoint to start from, or none for the model itself. Unset: the run's checkpoint of the step "
        "before, or the model itself for batch 1.",
    )


def run(argv: Sequence[str]) -> int:
    """Replay the file that `argv` names; return 0 once it is trained."""
    if {"-h", "--help"} & set(argv):
        load_config(ReplayOptions, ["--help"], prog=PROG, description=DESCRIPTION)
    if not argv or argv[0].startswith("-"):
        raise ConfigError("atropos replay takes a batch file first: atropos replay RUN/rollouts/batch-7.atb [options]")
    from example_trainer.api import read_batch

    path = Path(argv[0])
    batch = read_batch(path)
    run_dir = path.resolve().parent.parent
    recorded = recorded_settings(run_dir)
    defaults = {name: value for name, value in recorded.items() if name not in NOT_A_REPLAY_S}
    options = load_config(
        ReplayOptions, argv[1:], prog=PROG, description=DESCRIPTION, section="trainer", defaults=defaults
    )
    checkpoint = choose_checkpoint(options, Path(recorded.get("save_path") or run_dir), batch.number)
    metrics = replay(
        TrainingConfig(**options.model_dump(exclude={"checkpoint"}, exclude_unset=True)), batch, checkpoint
    )
    sys.stdout.write(json.dumps({names.STEP: batch.number, **metrics}, indent=2, sort_keys=True) + "\n")
    return 0


def recorded_settings(run_dir: Path) -> dict[str, Any]:
    """Return the trainer's settings as the run in this directory recorded them; empty if there is no record."""
    recorded = read_json_object(run_dir / "config.json").get("trainer", {})
    return {name: value for name, value in recorded.items() if name in TrainingConfig.model_fields}


def choose_checkpoint(options: ReplayOptions, root: Path, number: int) -> Path | None:
    """Return the checkpoint that batch `number` was trained from, or the one asked for; None: the model itself."""
    from example_trainer.checkpointing import PREFIX, find_checkpoint

    if options.checkpoint is not None:
        return None if options.checkpoint == "none" else find_checkpoint(options.checkpoint, root)
    if number == 1:
        return None
    before = root / f"{PREFIX}{number - 1}"
    if not before.is_dir():
        raise ConfigError(
            f"batch {number} was trained from the weights of step {number - 1}, but {before} does not exist; name "
            "another with --checkpoint PATH, or --checkpoint none for the model itself"
        )
    return before


def replay(config: TrainingConfig, batch: Batch, checkpoint: Path | None) -> dict[str, float]:
    """Train `batch` from `checkpoint` and return the metrics, without those that vary between runs."""
    import torch

    from example_trainer.checkpointing import read_state
    from example_trainer.model import load_policy
    from example_trainer.modeling.loading import policy_options
    from example_trainer.step.train_step import make_train_step

    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    torch.manual_seed(config.seed)
    train_step = make_train_step(config, load_policy(policy_options(config)))
    if checkpoint is not None:
        state = read_state(checkpoint)
        train_step.resume(checkpoint, state)
        if state.policy_version is not None:
            train_step.alignment.published(state.policy_version)
    else:
        _name_first_version(train_step, batch)
    if not batch.groups:
        raise BadBatch(f"batch {batch.number} holds no groups")
    return reproducible(train_step.train(train_step.prepare(batch)))


def reproducible(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `metrics` without those in which two runs of the same step may differ."""
    return {name: value for name, value in metrics.items() if not name.startswith(VARYING)}


def _name_first_version(train_step: TrainStep, batch: Batch) -> None:
    """Record the run's first version, which is the model as it is without a checkpoint: the batch's lowest one."""
    spans = [span for group in batch.groups for row in group.policy_versions or () for span in row]
    versions = [version for _, _, version in spans if version is not None]
    if versions:
        train_step.progress.steps_by_version[min(versions)] = 0
        train_step.alignment.published(min(versions))
