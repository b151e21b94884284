"""LoRA adapters: small trained matrices added to a frozen base, built and named as PEFT does.

`inject` puts adapter layers into a loaded module and returns an `Adapter`, which gives the location of their
parameters, their PEFT names in `adapter_model.safetensors`, and the content of `adapter_config.json`, so that PEFT and
vLLM can load the written files. Dropout acts only on forwards with gradients: logprobs that are compared with the
sampler's (alignment, logprob parity checks, references) are computed without it.

Formula: y = W x + (alpha / r) B A dropout(x), A is r x in, B is out x r and starts at zero (Hu et al. 2021).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from example_trainer.errors import AdapterUnavailable
from example_trainer.memory.shapes import ADAPTED_BY_DEFAULT, ADAPTER_PRESETS
from example_trainer.modeling.layer_filter import block_index, block_list_name, chosen_blocks

if TYPE_CHECKING:
    from example_trainer.options.training_options import TrainingOptions

ADAPTER_NAME = "default"

LAYER_FLAG = "--lora-layer-indices"
_PREFIX = "base_model.model."
_MATRICES = ("lora_A", "lora_B")
_BLOCK = re.compile(r"^.*?\.\d+\.")
"""The beginning of a parameter's name, up to its layer's number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptions:
    """The options of an adapter: its size and the modules it is added to."""

    r: int = 16
    alpha: float = 32
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ADAPTED_BY_DEFAULT
    """Module names (`q_proj`), path endings (`attn.c_proj`), or presets."""
    layer_indices: str | None = None
    quantise: Literal["nf4"] | None = None
    """Quantisation of the frozen base to 4 bits (QLoRA, Dettmers et al. 2023); None keeps the served dtype."""


def adapter_options(config: TrainingOptions) -> AdapterOptions | None:
    """Return the adapter options of the trainer's configuration; None in modes that train full weights."""
    if not config.trains_adapter:
        return None
    return AdapterOptions(
        r=config.lora_r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=tuple(config.lora_target_modules or ADAPTED_BY_DEFAULT),
        layer_indices=config.lora_layer_indices,
        quantise="nf4" if config.load_in_4bit else None,
    )


class Adapter:
    """The adapter layers inside one module: `inject` makes this object."""

    def __init__(self, module: nn.Module, peft_config: Any) -> None:
        self._peft_config = peft_config
        self._layers: dict[str, Any] = {
            path: layer for path, layer in module.named_modules() if hasattr(layer, "lora_A") and layer.lora_A
        }
        for layer in self._layers.values():
            if peft_config.lora_dropout:
                layer.lora_dropout[ADAPTER_NAME] = _DropoutWithGradients(peft_config.lora_dropout)

    @property
    def has_dropout(self) -> bool:
        """True if dropout makes forwards with gradients differ from those without."""
        return bool(self._peft_config.lora_dropout)

    @property
    def targets(self) -> list[str]:
        """The names of the modules that are adapted."""
        return sorted({path.rpartition(".")[2] for path in self._layers})

    def places(self) -> dict[str, tuple[nn.Module, str]]:
        """Return PEFT's checkpoint name of each trained matrix, with the module and attribute that hold it."""
        return {
            f"{_PREFIX}{path}.{matrix}.weight": (getattr(layer, matrix)[ADAPTER_NAME], "weight")
            for path, layer in self._layers.items()
            for matrix in _MATRICES
        }

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapter during the context, so that forwards compute the base alone."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def config(self, base_model: str) -> dict[str, Any]:
        """Return the content of `adapter_config.json`, for inference on `base_model`."""
        written = self._peft_config.to_dict() | {"base_model_name_or_path": base_model, "inference_mode": True}
        readable: dict[str, Any] = json.loads(json.dumps(written, default=_as_json))
        return readable

    @torch.no_grad()
    def merged(self, weight_name: str, base: torch.Tensor, masters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the base weight plus its adapter, in fp32; the base weight itself if it has no adapter."""
        path, _, attribute = weight_name.rpartition(".")
        if attribute != "weight" or path not in self._layers:
            return base
        down, up = (masters[f"{_PREFIX}{path}.{matrix}.weight"].float().to(base.device) for matrix in _MATRICES)
        delta: torch.Tensor = (up @ down) * self._layers[path].scaling[ADAPTER_NAME]
        transposed: bool = self._peft_config.fan_in_fan_out
        return base.float() + (delta.T if transposed else delta)


def inject(module: nn.Module, options: AdapterOptions) -> Adapter:
    """Freeze `module` and put adapter layers into it.

    Raises `AdapterUnavailable` if peft is not installed or the model lacks the targets (the message
    lists those it has), and `BadLayerFilter` for layers that the model does not have.
    """
    peft = _import_peft()
    linear = _linear_modules(module)
    chosen = set(linear)
    layers: dict[str, Any] = {}
    where = ""
    if options.layer_indices is not None:
        blocks = chosen_blocks([f"{path}." for path in linear], options.layer_indices, flag=LAYER_FLAG)
        chosen = {path for path in linear if block_index(path + ".") in blocks}
        pattern = block_list_name(next(iter(chosen)) + ".")
        layers = {"layers_to_transform": sorted(blocks), "layers_pattern": pattern}
        where = f" in {LAYER_FLAG} {options.layer_indices}"
    module.requires_grad_(False)
    config = peft.LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=resolve_targets(options.target_modules, sorted(chosen), where),
        fan_in_fan_out=any(type(layer).__name__ == "Conv1D" for layer in linear.values()),
        task_type="CAUSAL_LM",
        **layers,
    )
    peft.inject_adapter_in_model(config, module, adapter_name=ADAPTER_NAME)
    return Adapter(module, config)


def resolve_targets(wanted: Sequence[str], linear: Sequence[str], where: str = "") -> list[str]:
    """Return the path endings of the linear modules that `wanted` (names, endings, presets) selects.

    `where` says for messages which part of the model has these modules.
    """
    endings: set[str] = set()
    for target in wanted:
        if target in ADAPTER_PRESETS:
            found = {path for path in linear if _has_role(path, target)}
            endings |= {_shortest_ending(path, found, linear) for path in found}
        else:
            found = {path for path in linear if path == target or path.endswith("." + target)}
            endings.add(target)
        if not found:
            names = ", ".join(sorted({path.rpartition(".")[2] for path in linear}))
            raise AdapterUnavailable(
                f"--lora-target-modules {target}: this model has no such linear module{where}; it has {names}, and "
                f"the presets are {', '.join(ADAPTER_PRESETS)}; experts that a layer keeps in one tensor take no "
                "adapter"
            )
    return sorted(endings)


def describe_left_out(module: nn.Module, adapter: Adapter, options: AdapterOptions) -> list[str]:
    """Return sentences about matrices that the options name and that take no adapter, or are not packed into 4 bits.

    Transformers keeps all experts of a layer in one parameter, which is no linear module.
    """
    linear = {id(part) for layer in _linear_modules(module).values() for part in layer.parameters()}
    others: dict[str, int] = {}
    for path, parameter in module.named_parameters():
        if block_index(path) is not None and parameter.ndim > 1 and id(parameter) not in linear:
            place = _BLOCK.sub("", path)
            others[place] = others.get(place, 0) + parameter.numel()
    wanted = options.target_modules
    meant = [place for place in others if {"all-linear", "mlp", place.rpartition(".")[2]} & set(wanted)]
    said = []
    if meant:
        said.append(
            f"--lora-target-modules {' '.join(wanted)} adapts {', '.join(adapter.targets)}; {', '.join(sorted(meant))} "
            "take no adapter and stay frozen; full weights train them (--weight-bridge-mode shared_vllm)"
        )
    if others and options.quantise is not None:
        millions = sum(others.values()) / 1e6
        said.append(
            f"--load-in-4bit packs linear modules alone; {', '.join(sorted(others))} ({millions:.1f}M parameters) keep "
            "the dtype of --dtype"
        )
    return said


class _DropoutWithGradients(nn.Dropout):
    """Dropout that acts only on forwards with gradients: torch's per-thread gradient mode decides.

    The check is per thread because a publish may score in another thread meanwhile. A forward that is recomputed for
    its gradients draws the same mask, since torch restores the generator for it.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        return nn.functional.dropout(input, self.p, self.training and torch.is_grad_enabled())


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise AdapterUnavailable(
            f"PEFT library not available ({error}); pip install peft, or train full weights with "
            "--weight-bridge-mode shared_vllm"
        ) from error
    return peft


def _linear_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the linear modules inside the blocks by path: plain, quantised, and GPT-2's transposed ones."""
    return {
        path: layer
        for path, layer in module.named_modules()
        if block_index(path + ".") is not None and (isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D")
    }


def _has_role(path: str, preset: str) -> bool:
    in_attention = "attn" in path or "attention" in path
    return preset == "all-linear" or (preset == "attention") == in_attention


def _shortest_ending(path: str, chosen: set[str], linear: Sequence[str]) -> str:
    """Return the module's name, with its parent's if modules of that name outside `chosen` exist too."""
    parts = path.split(".")
    alike = {other for other in linear if other.endswith("." + parts[-1])}
    return parts[-1] if alike <= chosen else ".".join(parts[-2:])


def _as_json(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
