"""The model that a server loads: written checkpoints, the frozen base under adapters, and start options that fit it.

Adapters are served on the base that the trainer computes with. With `--load-in-4bit` that is not the model: its values
are written once into the run directory (`prepare_base`), and found there again by their digest when a run is resumed.
A server that the trainer has not started reports its base's digest; a server of another base is refused, because its
logprobs would be those of other weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atropos_api.common.files import move_link, write_directory
from example_trainer.checkpoint_model_files import copy_generation_file, raising_os_errors, write_tensors
from example_trainer.errors import CannotSwap, PublishFailed
from example_trainer.memory.preflight import cache_on_shared_gpu
from example_trainer.model import load_policy
from example_trainer.modeling.loading import MasterWeights, PolicyOptions, name_of
from example_trainer.modeling.policy import Policy
from example_trainer.options.training_options import TrainingOptions
from example_trainer.options.vllm_settings import MEMORY_SETTINGS
from example_trainer.vllm_manager import VllmOptions
from example_trainer.weight_protocol.base_record import BaseRecord, read_base_record

logger = logging.getLogger(__name__)

LINK = "policy"
"""Name of the link to the checkpoint that is served."""
_PARTIAL_LINK = f".{LINK}.part"
_GIBIBYTE = 1 << 30


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The frozen base on which adapters are served: the model itself, or the written values of a quantised one."""

    model: str | Path
    digest: str | None = None
    """Digest of the quantised base; None if the model itself is served."""
    name: str = ""
    """The model name that clients request."""

    def check(self, server_digest: str | None, url: str) -> None:
        """Raise `CannotSwap` if the server at `url` is known to compute with another base than a quantised one."""
        if self.digest is None or server_digest == self.digest:
            return
        other = "the unquantised model" if server_digest is None else "values of another run or dtype"
        raise CannotSwap(
            f"the server at {url} computes with {other}, not with the base that --load-in-4bit trains on: stop it, "
            f"and start it with {self.flags} or let the trainer start one (--start-vllm auto)"
        )

    @property
    def flags(self) -> str:
        """The flags of a server of this base."""
        return f"--model {self.model} --tokenizer {self.name} --served-model-name {self.name}"


def prepare_base(policy: Policy, directory: Path) -> ServedBase:
    """Return the base for servers of this policy, which is quantised, after writing its values to `directory`.

    A base of the same digest that is there already is kept.
    """
    name, digest = policy.tokenizer_name, base_digest(policy)
    base = ServedBase(directory.absolute(), digest, name)
    written = read_base_record(directory)
    if written is None or written.digest != digest:
        record = BaseRecord(digest=digest, model=name, dtype=name_of(policy.dtype))
        _write(policy, policy.base_tensors(policy.dtype), directory, record)
    logger.info("the values of the 4-bit base are in %s; start a server of your own with %s", directory, base.flags)
    return base


@torch.no_grad()
def base_digest(policy: Policy) -> str:
    """Return a checksum of the frozen base in the form in which it is stored: packed weights with their scales.

    It is equal for two adapters on one base, and a quarter of the work of a checksum of the values.
    """
    stored = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in policy.module.state_dict().items()
        if ".lora_" not in name
    }
    total = hashlib.blake2b(name_of(policy.dtype).encode(), digest_size=16)
    for name in sorted(stored):
        tensor = stored[name].detach().cpu().contiguous()
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def write_served_checkpoint(policy: Policy, directory: Path) -> Path:
    """Write the weights in the served dtype; the directory is complete or does not exist."""
    return _write(policy, policy.checkpoint_tensors(policy.dtype), directory)


def whole_policy(policy: Policy, options: PolicyOptions, directory: Path) -> Policy:
    """Return the policy, or load its checkpoint just written if it is sharded: a forward would need all ranks."""
    if not policy.is_sharded:
        return policy
    # Nothing is trained here, and masters in fp32 beside a served copy take 6 bytes a parameter of the first rank's
    # GPU, 48 GB at 8B. Without masters float16 is refused, so that its masters stay in host memory.
    masters: MasterWeights = "host" if policy.dtype == torch.float16 else "none"
    return load_policy(replace(options, model_name=str(directory), sharding=None, master_weights=masters))


def link_served(directory: Path) -> Path:
    """Make the link beside a complete checkpoint lead to it, in one rename, and return the link.

    vLLM's cache of compiled graphs counts the model's path as part of the model: under a new name each server would
    compile again, 20 to 60 s. Where no link can be made the checkpoint's own path is returned.
    """
    link = directory.with_name(LINK)
    try:
        move_link(link, directory.name)
    except OSError as error:
        logger.warning("no link to %s can be made, so each server compiles its graphs anew: %s", directory, error)
        unlink_served(directory.parent)
        return directory
    return link


def unlink_served(parent: Path, directory: Path | None = None) -> None:
    """Remove the links in `parent` that lead to this checkpoint, or all of them, before they would lead nowhere."""
    for link in (parent / LINK, parent / _PARTIAL_LINK):
        with contextlib.suppress(OSError):
            if link.is_symlink() and (directory is None or link.readlink().name == directory.name):
                link.unlink()


def _write(
    policy: Policy, tensors: Mapping[str, torch.Tensor], directory: Path, record: BaseRecord | None = None
) -> Path:
    needed_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    try:
        unlink_served(directory.parent, directory)
        shutil.rmtree(directory, ignore_errors=True)
        # A resumed run relies on the record, so the files must be on the disk even after a power cut.
        with raising_os_errors(), write_directory(directory, synced=record is not None) as partial:
            _check_space(partial, needed_bytes)
            write_tensors(partial, tensors)
            config = policy.hf_config.to_dict() | {"dtype": name_of(policy.dtype)}
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            copy_generation_file(policy.tokenizer_name, partial)
            if record is not None:
                record.write(partial)
    except OSError as error:
        raise PublishFailed(f"cannot write {directory}: {error}; free the space or set --run-dir elsewhere") from error
    return directory


def _check_space(directory: Path, needed_bytes: int) -> None:
    """Raise `PublishFailed` before anything is written if the disk has less space than the tensors need."""
    if (free_bytes := shutil.disk_usage(directory).free) < needed_bytes:
        needed, free = needed_bytes / _GIBIBYTE, free_bytes / _GIBIBYTE
        raise PublishFailed(
            f"cannot write {directory.parent}: the weights need {needed:.1f} GiB and its disk has {free:.1f} GiB "
            "free; free the space or set --run-dir elsewhere"
        )


def own_server(config: TrainingOptions) -> VllmOptions:
    """Return the options of a server that the trainer starts, with the cache that leaves it room on a shared GPU."""
    own = VllmOptions.of(config)
    if not MEMORY_SETTINGS.isdisjoint(config.vllm_settings):
        return own
    cache = cache_on_shared_gpu(config, share=config.gpu_memory_utilization, beside_server=False)
    return own.with_settings(kv_cache_memory_bytes=cache)


def fitted(vllm: VllmOptions, policy: Policy) -> VllmOptions:
    """Return the server's options, limited to the model's context length and in the policy's precision."""
    settings: dict[str, Any] = {"dtype": name_of(policy.dtype)}
    longest, asked = getattr(policy.hf_config, "max_position_embeddings", None), vllm.settings.get("max_model_len")
    if longest and asked and asked > longest:
        settings["max_model_len"] = int(longest)
    return vllm.with_settings(**settings)
