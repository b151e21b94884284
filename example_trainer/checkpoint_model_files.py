"""The model files of a checkpoint, and the sizes and checksums by which damage to its files is found.

The model is written in Hugging Face's layout, or PEFT's for an adapter, with tokenizer and model card. A checkpoint
gets its name by a rename, so on its own disk it is either complete or absent. `file_checksums` and `damaged_file` find
what happens to it after that: an interrupted copy, a full disk, a changed byte.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from example_trainer.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from example_trainer.modeling.policy import Policy
    from example_trainer.state import TrainerState


def file_checksums(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the size and checksum of each file in a directory, as `{file: {bytes, blake3}}`."""
    return {
        path.name: {"bytes": path.stat().st_size, "blake3": _checksum(path)}
        for path in sorted(directory.iterdir())
        if path.is_file()
    }


def damaged_file(directory: Path, checksums: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the first fault in the files of a directory, or None; sizes are compared before any file is read."""
    for name, expected in checksums.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size} of {expected['bytes']} bytes"
    for name, expected in checksums.items():
        if _checksum(directory / name) != expected["blake3"]:
            return f"{name} has changed since it was written"
    return None


def _checksum(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


@contextmanager
def raising_os_errors() -> Iterator[None]:
    """Raise `OSError` for a write that the disk refuses; safetensors and torch raise errors of their own for it."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error
    except RuntimeError as error:
        # Torch's message names only a line of its source; if Python opened the file, the context is the true error.
        if isinstance(cause := error.__context__, OSError):
            raise OSError(*cause.args) from error
        raise


ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"

CHAT_TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "vocab.txt",
    "spiece.model",
    CHAT_TEMPLATE_FILE,
)

METHODS = {
    "grpo": ("reinforcement learning", "grpo, reinforcement-learning"),
    "sft": ("supervised fine-tuning", "sft, supervised-fine-tuning"),
}
"""The name of each method in a model card, and its tags."""

CARD_SETTINGS = (
    "dataset",
    "loss_type",
    "importance_sampling",
    "advantage_norm",
    "batch_size",
    "gradient_accumulation_steps",
    "training_steps",
    "optimizer",
    "lr",
    "lr_schedule",
    "master_weights",
    "dtype",
    "weight_bridge_mode",
)

CARD_ADAPTER_SETTINGS = ("lora_r", "lora_alpha", "lora_dropout", "load_in_4bit")


def write_model(directory: Path, policy: Policy) -> None:
    """Write the weights or the adapter (without its base model), the configuration and the tokenizer."""
    if policy.has_adapter:
        write_adapter(directory, policy)
    else:
        _write_weights(directory, policy)
    _copy_tokenizer(policy, directory)


def write_merged_model(directory: Path, policy: Policy) -> None:
    """Write a policy with an adapter as a model of its own: adapter and base merged, in the served dtype."""
    _write_weights(directory, policy, policy.dtype)
    _copy_tokenizer(policy, directory)


def write_adapter(directory: Path, policy: Policy) -> None:
    """Write the two files of an adapter that PEFT and vLLM load, in the master weights' dtype."""
    from safetensors.torch import save_file

    save_file(policy.adapter_tensors(), directory / ADAPTER_FILE, metadata={"format": "pt"})
    _write_json(directory / ADAPTER_CONFIG_FILE, policy.adapter_config())


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint's safetensors files, by name."""
    return dict(StoredTensors(checkpoint))


class StoredTensors(Mapping[str, "torch.Tensor"]):
    """The tensors of a checkpoint by name: each is read on access, so that only one need be in memory."""

    def __init__(self, checkpoint: Path) -> None:
        """Open the safetensors files; raise `CheckpointError` if there are none."""
        from safetensors import safe_open

        files: list[Any] = [safe_open(path, framework="pt") for path in sorted(checkpoint.glob("*.safetensors"))]
        if not files:
            raise CheckpointError(f"{checkpoint} holds no safetensors file; resume from another checkpoint")
        self._file_of: dict[str, Any] = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def model_card(state: TrainerState, base_model: str, *, adapter: bool) -> str:
    """Return the text of a checkpoint's README.md: base model, step, settings of the training and loading code."""
    settings = [*CARD_SETTINGS, *(CARD_ADAPTER_SETTINGS if adapter else ())]
    rows = [f"| {name} | {state.config[name]} |" for name in settings if name in state.config]
    kind = "LoRA adapter" if adapter else "Full weights"
    method, tags = METHODS[state.method]
    what = (
        f"{kind} of {base_model} after {state.step} steps ({state.updates} optimizer updates) of {method} with seed "
        f"{state.seed}{_version_of(state)}."
    )
    return "\n".join(
        [
            "---",
            f"base_model: {json.dumps(base_model)}",
            f"library_name: {'peft' if adapter else 'transformers'}",
            "pipeline_tag: text-generation",
            f"tags: [{tags}{', lora' if adapter else ''}]",
            "---",
            "",
            f"# {state.run_name}, step {state.step}",
            "",
            what,
            "",
            "| setting | value |",
            "|---|---|",
            *rows,
            "",
            "## Loading",
            "",
            "```python",
            *_loading_lines(base_model, adapter=adapter),
            "```",
            "",
            "`trainer_state.json` holds all settings; the training goes on from here with `--resume PATH`.",
            "",
        ]
    )


def _version_of(state: TrainerState) -> str:
    if state.method != "grpo":
        return ""
    return f"; served as policy version {'none' if state.policy_version is None else state.policy_version}"


def _loading_lines(base_model: str, *, adapter: bool) -> list[str]:
    if not adapter:
        return [
            "from transformers import AutoModelForCausalLM",
            "",
            "model = AutoModelForCausalLM.from_pretrained(PATH)",
        ]
    return [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f"base = AutoModelForCausalLM.from_pretrained({json.dumps(base_model)})",
        "model = PeftModel.from_pretrained(base, PATH)",
    ]


def _write_weights(directory: Path, policy: Policy, dtype: torch.dtype | None = None) -> None:
    tensors = policy.checkpoint_tensors(dtype)
    write_tensors(directory, tensors)
    config = policy.hf_config.to_dict()
    trained = next(iter(policy.masters))
    config["dtype"] = str(tensors.get(trained, next(iter(tensors.values()))).dtype).removeprefix("torch.")
    _write_json(directory / "config.json", config)


def write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one safetensors file, or several with an index if the model is large."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(dict(tensors))
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
    if split.is_sharded:
        size = sum(tensor.nbytes for tensor in tensors.values())  # the sum in `split` includes shared memory
        index = {"metadata": {"total_size": size}, "weight_map": split.tensor_to_filename}
        _write_json(directory / "model.safetensors.index.json", index)


def _copy_tokenizer(policy: Policy, directory: Path) -> None:
    name = policy.tokenizer_name
    source = Path(name)
    if source.is_dir():
        for file in TOKENIZER_FILES:
            if (source / file).exists():
                shutil.copyfile(source / file, directory / file)
    else:
        _hub_tokenizer(name).save_pretrained(directory)
    copy_generation_file(name, directory)
    if policy.chat_template is not None:  # transformers prefers this file to a template in tokenizer_config.json
        (directory / CHAT_TEMPLATE_FILE).write_text(policy.chat_template, encoding="utf-8")


@cache
def _hub_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model on the hub, which is asked once: no later checkpoint needs it to answer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def copy_generation_file(model_name: str, directory: Path) -> None:
    """Copy the model's generation_config.json, if it has one: config.json may name only one of several end tokens."""
    from transformers.utils import cached_file

    try:
        source = cached_file(model_name, GENERATION_FILE, local_files_only=True)
    except OSError:  # there is none
        return
    if source is not None:
        shutil.copyfile(source, directory / GENERATION_FILE)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
