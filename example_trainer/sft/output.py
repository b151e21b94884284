"""The folder that supervised fine-tuning writes: checkpoints, metrics, `summary.json` and `final_model`.

`final_model` is what the next program loads: a link to the last checkpoint, or with an adapter a merged model.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from atropos_api.common.cliconfig import ConfigError
from atropos_api.common.files import expand_home, move_link, read_json_object, sync_path, write_directory
from example_trainer.checkpoint_model_files import raising_os_errors, write_merged_model
from example_trainer.checkpointing import LATEST, PREFIX
from example_trainer.errors import CheckpointError
from example_trainer.launcher.run_dir import require_writable
from example_trainer.launcher.run_lock import LOCK_NAME
from example_trainer.monitoring.trackers import EVENTS_FILE, METRICS_FILE

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy
    from example_trainer.sft.config import SftConfig

FINAL_MODEL = "final_model"
SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.json"
RECORD_KEY = "sft"
"""The key of the settings in that file, by which a fine-tuning's folder is known."""


def settle_folder(config: SftConfig) -> Path:
    """Return the folder of the run: `--save-path`, or a new one under `runs/`."""
    return config.save_path or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def refuse_used_folder(directory: Path) -> None:
    """Raise `ConfigError` if the folder has files already."""
    if directory.is_dir() and any(path.name != LOCK_NAME for path in directory.iterdir()):
        raise ConfigError(
            f"--save-path {directory}: the folder is not empty; name another, add --resume auto to continue the run in "
            "it, or --overwrite to delete that run"
        )


def claim_folder(directory: Path, *, model_name: str, will_delete: bool) -> None:
    """Make the folder; it can be written after this.

    Raises `ConfigError` if an earlier run's files will be deleted, and the folder is not a fine-tuning's (by its
    `config.json` it is a model, or another run), or if the model to begin with is one of those files.
    """
    if will_delete:
        record = directory / CONFIG_FILE
        if record.exists() and RECORD_KEY not in read_json_object(record):
            raise ConfigError(
                f"--overwrite: --save-path {directory} has a {CONFIG_FILE} that atropos-sft did not write, so it may "
                "be a model; name another folder"
            )
        model = expand_home(model_name).resolve()
        if any(model.is_relative_to(path.resolve()) for path in _files_of_a_run(directory)):
            raise ConfigError(f"--overwrite would delete --model-name {model_name}; name another --save-path")
    require_writable(directory, "--save-path")


def delete_earlier_run(directory: Path) -> None:
    """Delete an earlier run's files from a folder that is claimed."""
    for path in list(_files_of_a_run(directory)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _files_of_a_run(directory: Path) -> Iterator[Path]:
    """Yield what an earlier run wrote; files of the user's own stay."""
    yield from directory.glob(f"{PREFIX}*")
    for name in (LATEST, FINAL_MODEL, METRICS_FILE, EVENTS_FILE, SUMMARY_FILE, CONFIG_FILE):
        path = directory / name
        if path.exists() or path.is_symlink():
            yield path


def finish_model(directory: Path, policy: Policy, *, step: int, merges: bool) -> Path | None:
    """Make `final_model`: a link to the checkpoint of `step`, a merged model, or nothing for an adapter alone."""
    final = directory / FINAL_MODEL
    try:
        if not policy.has_adapter:
            move_link(final, f"{PREFIX}{step}")
            return final
        if not merges:
            return None
        with raising_os_errors(), write_directory(final, synced=True) as partial:
            write_merged_model(partial, policy)
        sync_path(directory)
        return final
    except OSError as error:
        raise CheckpointError(
            f"cannot write {final}: {error}; free the space, or remove a directory of that name, as a copy that "
            "follows links makes it, and add --resume auto"
        ) from error
