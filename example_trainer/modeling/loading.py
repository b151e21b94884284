"""Loading of a Hugging Face model for training: device, dtype, quantisation, tensor places and checkpoint names.

The model is loaded without dropout, without jitter of its routers and without a cache, and with one of LongRoPE's two
factors (`rotary_factors`). For QLoRA the frozen base has four bits (nf4, bitsandbytes): a quantised weight is a packed
uint8 tensor with separate scales. The forward dequantises it into the served dtype; `dequantised` returns exactly the
matrix that the forward multiplies with, so a server that loads those values computes the same as the trainer.

The server's manifest, safetensors files and the masters use the tensor names of the checkpoint on disk. Transformers
renames some tensors while loading (Mixtral's `block_sparse_moe` is `mlp` in the module) and merges others (per-expert
matrices into one). Only this module handles the difference: it gets the names by running transformers' own save
conversion over tensors without data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from example_trainer.errors import (
    AdapterUnavailable,
    CheckpointError,
    ModelNotFound,
    NonfiniteWeights,
    NoSuchDevice,
    WrongDtype,
)
from example_trainer.modeling.activation_offloading import offload_layer_inputs
from example_trainer.modeling.lora import AdapterOptions, adapter_options
from example_trainer.modeling.rotary_factors import use_one_factor

if TYPE_CHECKING:
    from example_trainer.options.training_options import TrainingOptions

logger = logging.getLogger(__name__)


SERVED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def resolve_device(name: str) -> torch.device:
    """Return the torch device that `auto`, `cpu`, `cuda` or `cuda:N` means on this machine."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise NoSuchDevice(f"--device {name}: name cpu, cuda, cuda:N or auto") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NoSuchDevice(f"--device {name}: this machine has no GPU that torch can use; take cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise NoSuchDevice(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs, numbered from 0")
    return device


def resolve_dtype(name: str, hf_config: Any) -> torch.dtype:
    """Return the dtype for a name; `auto` is the checkpoint's dtype, or float32 if its configuration has none."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    stored = getattr(hf_config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.float32


def served_dtype_of(options: PolicyOptions, hf_config: Any) -> torch.dtype:
    """Return the dtype in which the policy is served and computes; raise `WrongDtype` if it cannot be trained."""
    dtype = resolve_dtype(options.dtype, hf_config)
    if dtype not in SERVED_DTYPES:
        raise WrongDtype(
            f"--dtype {options.dtype}: {options.model_name} is stored as {name_of(dtype)}, which is not served; "
            "use --dtype bfloat16, or float32 on a CPU"
        )
    if dtype == torch.float16 and options.master_weights == "none":
        raise WrongDtype(
            f"--dtype {options.dtype}: {options.model_name} is served as float16, whose scaled gradients need fp32 "
            "masters; use --master-weights fp32, or --dtype bfloat16"
        )
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name as the flags and vLLM spell it."""
    return str(dtype).removeprefix("torch.")


def stored_config(options: PolicyOptions) -> Any:
    """Return the configuration of the checkpoint as it is on disk; raise `ModelNotFound` if it cannot be read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(options.model_name)
    except (OSError, ValueError) as error:
        raise ModelNotFound(_not_found(options, error)) from error


def load_module(options: PolicyOptions, stored: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Load the model with transformers and return it in training mode; raise `ModelNotFound` if that fails.

    The model is on the CPU, but a quantised one is made on `device`; on the device `meta` it has no values.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not options.debug_loading:
        transformers_logging.disable_progress_bar()
    more: dict[str, Any] = {"device_map": {"": device}} if device.type == "meta" else {}
    if options.quantises_base:
        more = {"quantization_config": quantisation_config(dtype), "device_map": {"": device}}
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(
            options.model_name,
            config=_for_training(stored, options.context_length),
            dtype=dtype,
            attn_implementation=options.attention,
            **more,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:  # the last for a file that was copied in part
        raise ModelNotFound(_not_found(options, error)) from error
    if options.debug_loading:
        for name, tensor in module.named_parameters():
            logger.info("loaded %s %s %s on %s", name, list(tensor.shape), tensor.dtype, tensor.device)
    if options.gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if options.activation_offloading:
            offload_layer_inputs(module)
    if not options.quantises_base and device.type != "meta":
        refuse_nonfinite(module.named_parameters(), f"{options.flag} {options.model_name}")
    trained: nn.Module = module.train()
    return trained


def _for_training(stored: Any, context_length: int | None = None) -> Any:
    """Return the configuration that forwards have: no cache or noise, one rotary factor; checkpoints keep `stored`."""
    config = deepcopy(stored)
    config.use_cache = False
    use_one_factor(config, context_length)
    _turn_noise_off(config)
    return config


def _turn_noise_off(config: PreTrainedConfig) -> None:
    """Set each dropout and each jitter of a router, of a configuration and of those within it, to 0.

    The server samples without them; with them here, ratios to the sampled logprobs would be meaningless.
    """
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _turn_noise_off(value)
        elif ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)


def refuse_nonfinite(tensors: Iterable[tuple[str, torch.Tensor]], place: str) -> None:
    """Raise `NonfiniteWeights` for the first tensor with a value that is not finite; `place` says where it is from."""
    for name, tensor in tensors:
        # The extremes are not finite if any value is not, and need no mask of the weight's size.
        if tensor.numel() and tensor.is_floating_point():
            lowest, highest = torch.aminmax(tensor.detach())
            if not bool(lowest.isfinite() & highest.isfinite()):
                raise NonfiniteWeights(
                    f"{place}: {name} has values that are NaN or infinite, from which every loss would be NaN; use an "
                    "undamaged checkpoint, or one from before the run diverged"
                )


def _not_found(options: PolicyOptions, error: Exception) -> str:
    model_name = options.model_name
    place = "directory" if Path(model_name).exists() else "name"
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"{options.flag} {model_name}: no causal language model can be loaded from this {place} ({cause})"


def quantisation_config(served_dtype: torch.dtype) -> Any:
    """Return transformers' quantisation settings for an nf4 base that computes in `served_dtype`.

    Raises `AdapterUnavailable` if bitsandbytes cannot be imported or has no kernels for this machine.
    """
    try:
        import bitsandbytes
        from transformers import BitsAndBytesConfig

        packed, state = bitsandbytes.functional.quantize_4bit(torch.ones(64, 1), quant_type="nf4")
        bitsandbytes.functional.dequantize_4bit(packed, state)
    except Exception as error:
        raise AdapterUnavailable(
            f"--load-in-4bit needs bitsandbytes with 4-bit kernels for this machine ({error}); "
            "pip install 'bitsandbytes>=0.48', or leave the flag out"
        ) from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=served_dtype,
    )


def is_quantised(weight: torch.Tensor) -> bool:
    """Return True if a parameter is packed 4-bit data."""
    return getattr(weight, "quant_state", None) is not None


@torch.no_grad()
def dequantised(weight: torch.Tensor) -> torch.Tensor:
    """Return the matrix that forwards multiply with, in the dtype they compute in; a plain weight unchanged."""
    if not is_quantised(weight):
        return weight
    import bitsandbytes

    packed: Any = weight
    matrix: torch.Tensor = bitsandbytes.functional.dequantize_4bit(packed.data, packed.quant_state)
    return matrix


def places_by_name(module: nn.Module, names: Mapping[str, str]) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return by checkpoint name the modules and attributes that hold each parameter; tied ones have several."""
    name_of = {id(parameter): names[name] for name, parameter in module.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, attribute = path.rpartition(".")
        places.setdefault(name_of[id(parameter)], []).append((module.get_submodule(owner), attribute))
    return places


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers to the forward's device; `Module.to` would also move masters that must stay in host memory."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.device.type != device.type:
                setattr(owner, name, buffer.to(device))


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a checkpoint holds."""
    stored = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name in stored}


def cast_floating(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the tensor in `dtype`, if one is given and the tensor is floating-point; else unchanged."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def checkpoint_name(model: Any, parameter_name: str, shape: torch.Size) -> str | None:
    """Return a parameter's name in the checkpoint; None if it is not stored as one tensor of this shape."""
    empty = torch.empty(shape, device="meta")
    stored: dict[str, torch.Tensor] = revert_weight_conversion(model, {parameter_name: empty})
    if len(stored) != 1:
        return None
    name, tensor = next(iter(stored.items()))
    return name if tensor.shape == shape else None


def checkpoint_names(model: Any) -> dict[str, str]:
    """Map module parameter names to checkpoint names, tied parameters once; merged ones keep their own name."""
    return {name: checkpoint_name(model, name, parameter.shape) or name for name, parameter in model.named_parameters()}


def merged_parameters(model: Any) -> frozenset[str]:
    """Return the parameters that a checkpoint stores as several tensors, or in another shape."""
    return frozenset(
        name for name, parameter in model.named_parameters() if checkpoint_name(model, name, parameter.shape) is None
    )


def to_checkpoint_layout(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert the tensors of a state dict to the names and shapes of a checkpoint."""
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted


class ModuleTensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint, also under the names of parameters that it stores in parts, joined on access."""

    def __init__(self, model: Any, stored: Mapping[str, torch.Tensor]) -> None:
        self._stored = stored
        self._model = model
        merged = merged_parameters(model)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters() if name in merged}
        self._shapes = {name: shape for name, shape in shapes.items() if self._has_parts(name, shape)}

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes.get(name)
        return self._stored[name] if shape is None else self._joined(name, shape)

    def __iter__(self) -> Iterator[str]:
        yield from {**dict.fromkeys(self._stored), **self._shapes}

    def __len__(self) -> int:
        return len(self._stored.keys() | self._shapes.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._shapes or name in self._stored

    def _has_parts(self, name: str, shape: torch.Size) -> bool:
        parts = to_checkpoint_layout(self._model, {name: torch.empty(shape, device="meta")})
        complete = sum(part.numel() for part in parts.values()) == shape.numel()
        return complete and all(part in self._stored for part in parts)

    def _joined(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Return a parameter: the conversion only moves elements, so converting numbers shows each element's origin."""
        numbers = torch.arange(shape.numel()).view(shape)
        places = to_checkpoint_layout(self._model, {name: numbers})
        parts = {part: self._stored[part] for part in places}
        if wrong := next((part for part, place in places.items() if parts[part].shape != place.shape), None):
            raise CheckpointError(
                f"the checkpoint's {wrong} has shape {tuple(parts[wrong].shape)}, the model's "
                f"{tuple(places[wrong].shape)}; resume with the model that it was written with"
            )
        joined = torch.empty(shape.numel(), dtype=next(iter(parts.values())).dtype)
        for part, place in places.items():
            joined[place.reshape(-1)] = parts[part].reshape(-1)
        return joined.view(shape)


MasterWeights = Literal["fp32", "host", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """The settings for sharding weights over several ranks."""

    reshard_after_forward: bool = True
    """True frees a layer's gathered weights between forward and backward: less memory, one more gather."""
    tensor_parallel_size: int = 1
    """Number of consecutive ranks that divide each layer and train the same rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptions:
    """The options for loading a policy, extracted from the trainer's configuration."""

    model_name: str
    dtype: str = "bfloat16"
    """Dtype of the served weights: float32, bfloat16, float16, or auto for that of the checkpoint."""
    device: str = "auto"
    master_weights: MasterWeights = "fp32"
    train_layer_indices: str | None = None
    adapter: AdapterOptions | None = None
    """Options of the adapter to train on the frozen weights; None trains the weights themselves."""
    context_length: int | None = None
    """Context of the server that samples from the policy, in tokens; None stands for all that the model has."""
    attention: str = "sdpa"
    gradient_checkpointing: bool = False
    activation_offloading: bool = False
    sharding: Sharding | None = None
    """Settings for sharding over the ranks of the default process group; None keeps the weights whole."""
    debug_loading: bool = False
    flag: str = "--model-name"
    """The option that names the model, for messages."""

    @property
    def quantises_base(self) -> bool:
        """True if the frozen base under the adapter is stored in 4 bits."""
        return self.adapter is not None and self.adapter.quantise is not None


def policy_options(config: TrainingOptions) -> PolicyOptions:
    """Return the part of the trainer's configuration that concerns loading the model."""
    # An adapter is small and its base is frozen, so every rank holds both unsharded; only gradients are summed.
    sharding = None
    if config.world_size > 1 and not config.trains_adapter:
        sharding = Sharding(
            reshard_after_forward=config.reshard_after_forward,
            tensor_parallel_size=config.trainer_tensor_parallel_size,
        )
    return PolicyOptions(
        model_name=config.model_name,
        dtype=config.dtype,
        device=config.device,
        master_weights=config.master_weights,
        train_layer_indices=config.train_layer_indices,
        adapter=adapter_options(config),
        context_length=config.max_model_len,
        gradient_checkpointing=config.gradient_checkpointing,
        activation_offloading=config.activation_offloading,
        sharding=sharding,
        debug_loading=config.debug_loading,
    )
