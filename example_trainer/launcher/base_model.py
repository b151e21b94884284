"""The base model that a run begins with: it is a directory, a Hugging Face id, or a tiny model, shipped or made here.

A Hugging Face id is looked up once here, in the local cache and then on the hub, before four programs ask for it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from atropos_api.common.cliconfig import nearest
from atropos_api.common.files import expand_home
from environments.tasks.arithmetic import TASK_NAMES
from example_trainer.errors import ModelNotFound
from example_trainer.memory.shapes import local_shape
from example_trainer.options.layer_indices import TRAIN_FLAG, parse_layer_indices
from example_trainer.options.training_options import TrainingOptions
from example_trainer.processes.child import ChildSpec
from example_trainer.processes.tree import python_path
from example_trainer.weight_protocol.base_record import BASE_DIRECTORY, read_base_record

BASE_MODEL = "base-model"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBase:
    """A base model that is made on this machine: `tiny/chain`, or `tiny/chain:1` for another seed."""

    task: str
    seed: int

    @property
    def spec(self) -> ChildSpec:
        command = (sys.executable, "-m", "example_trainer.tiny", "--task", self.task, "--seed", str(self.seed))
        # Two threads, because the recipe was measured with two; no other program of the launcher runs now.
        return ChildSpec(
            name=BASE_MODEL,
            command=command,
            environment={"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "2"},
            ends_by_itself=True,
            watch_descendants=False,
        )


def local_base(model_name: str) -> LocalBase | None:
    """Return the locally made base that `model_name` means, or None if it means none."""
    match = re.fullmatch(r"tiny/([a-z]+)(?::(\d+))?", model_name)
    if match is None or Path(model_name).exists():
        return None
    return LocalBase(task=match[1], seed=int(match[2] or 0))


def refuse_unknown_task(model_name: str, flag: str = "--model-name") -> None:
    """Raise `ModelNotFound` for a tiny model of a task that there is not."""
    base = local_base(model_name)
    if base is not None and base.task not in TASK_NAMES:
        known = " and ".join(f"tiny/{task}" for task in TASK_NAMES)
        proposal = nearest(base.task, TASK_NAMES) or ";"
        raise ModelNotFound(
            f"{flag} {model_name}: no tiny model has the task {base.task!r}{proposal} there are {known}"
        )


def discard_other_base(run_dir: Path, model: str, dtype: str) -> None:
    """Remove the values of a 4-bit base of another model or dtype that an earlier run left, or those not copied whole.

    A server that starts before the trainer would load them in place of those that the trainer is about to write.
    """
    directory = run_dir / BASE_DIRECTORY
    record = read_base_record(directory)
    is_of_this_run = record is not None and record.model == model and dtype in {"auto", record.dtype}
    if directory.exists() and not is_of_this_run:
        shutil.rmtree(directory)


def require_model(model_name: str, flag: str = "--model-name") -> str:
    """Return `model_name`, made absolute if it is a directory; raise `ModelNotFound` for a path without a model."""
    path = expand_home(model_name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{flag} {model_name}: the directory has no config.json, so it is not a model")
        return str(path.absolute())
    if model_name.startswith(("/", ".", "~")) or model_name.count("/") > 1:
        raise ModelNotFound(f"{flag} {model_name}: no such directory, and not a valid Hugging Face id")
    return model_name


def require_available(name: str, flag: str) -> str:
    """Return a model's name or absolute path; raise `ModelNotFound` if there is none."""
    if local_base(name) is not None:
        return name
    model = require_model(name, flag)
    if not Path(model).is_dir():
        require_on_hub(model, flag)
    return model


def refuse_missing_layers(config: TrainingOptions) -> None:
    """Raise `BadLayerFilter` for layers that the model does not have, if its config.json is on this machine."""
    filters = {TRAIN_FLAG: config.train_layer_indices, "--lora-layer-indices": config.lora_layer_indices}
    if any(filters.values()) and (shape := local_shape(config.model_name)) is not None:
        for flag, text in filters.items():
            if text is not None:
                parse_layer_indices(text, shape.layers, flag=flag)


ANSWER_SECONDS = 5.0


def require_on_hub(name: str, flag: str = "--model-name") -> None:
    """Return if `name` is in the local cache or on the hub; else raise `ModelNotFound`, which says what failed."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    except HFValidationError as error:
        raise ModelNotFound(f"{flag} {name}: not a directory and not a Hugging Face id: {error}") from None
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFound(
            f"{flag} {name}: not in the local Hugging Face cache, and HF_HUB_OFFLINE forbids downloading it"
        )
    _query_hub(name, flag)


def _query_hub(name: str, flag: str) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=ANSWER_SECONDS)
    except HFValidationError as error:
        raise ModelNotFound(f"{flag} {name}: not a directory and not a Hugging Face id: {error}") from None
    except RepositoryNotFoundError:
        raise ModelNotFound(
            f"{flag} {name}: no such model on {_endpoint()}, or a private one (then set HF_TOKEN)"
        ) from None
    except HfHubHTTPError:
        return  # the model exists; if these credentials may not have it, the program that downloads it says so
    except Exception as error:  # noqa: BLE001 - the hub's client has changed its HTTP library, and with it the errors
        raise ModelNotFound(
            f"{flag} {name}: not a directory, not in the local cache, and {_endpoint()} does not answer ({error})"
        ) from None


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "huggingface.co")
