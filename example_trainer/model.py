"""The policy under training: a Hugging Face causal language model and the weights the optimizer steps.

A `Policy` keeps two things apart that most trainers mix: the *module* that the forward runs on and
the *masters* that the optimizer changes. What the module's trained parameters are is the layout:

- plain: the masters themselves where these have the served dtype, else a copy of them in the served
  dtype, cast anew for each forward. The sampler computes in that dtype throughout, so this agrees
  with it more closely than autocast over fp32 weights would (its residual stream stays fp32);
- shared, forward from masters: the same, and `served` holds views into the tensors vLLM reads, which
  only a publish writes;
- shared, forward from views: those views.

Gradients always end up with the masters, in their precision.

The module is always built by transformers' own loading, so that buffers (rotary frequencies with
their scaling above all) are never rebuilt by hand.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from example_trainer.errors import CheckpointError, ModelNotFound
from example_trainer.weights.checkpoint_names import checkpoint_names, to_checkpoint_layout
from example_trainer.weights.layer_filter import trained_parameters

logger = logging.getLogger(__name__)

MasterWeights = Literal["fp32", "host", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptions:
    """How a policy is loaded; a torch-level extract of the trainer's configuration."""

    model_name: str
    dtype: str = "bfloat16"
    """Dtype the policy is served in: float32, bfloat16, or auto for that of the checkpoint."""
    device: str = "auto"
    master_weights: MasterWeights = "fp32"
    train_layer_indices: str | None = None
    attention: str = "sdpa"
    gradient_checkpointing: bool = False
    debug_loading: bool = False


class Policy:
    """A causal language model with its master weights; see the module's docstring for the layouts."""

    def __init__(
        self,
        module: nn.Module,
        *,
        hf_config: Any,
        served_dtype: torch.dtype,
        device: torch.device,
        options: PolicyOptions,
    ) -> None:
        self.module = module
        self.dtype = served_dtype
        self.device = device
        self.hf_config = hf_config
        self.tokenizer_name = options.model_name
        self.forwards_from_masters = True
        self.served: Mapping[str, torch.Tensor] = {}
        self._copies: dict[str, nn.Parameter] = {}
        self._names = checkpoint_names(module)
        self._places = _places_by_name(module, self._names)
        trained = trained_parameters(self._names, options.train_layer_indices)
        self.masters: dict[str, nn.Parameter] = {}
        for parameter_name, parameter in module.named_parameters():
            parameter.requires_grad_(parameter_name in trained)
            if parameter_name in trained:
                self.masters[self._names[parameter_name]] = parameter

    @property
    def parameter_names(self) -> Mapping[str, str]:
        """Module parameter name to checkpoint name, tied parameters once."""
        return self._names

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The context of every forward: the module computes in the served dtype from the masters as they are now."""
        with torch.no_grad():
            for name, copy in self._copies.items():
                # Through .data: a graph of an earlier micro-batch may still hold the copy, with these values.
                copy.data.copy_(self.masters[name])
        yield

    def compute_in_served_dtype(self) -> None:
        """Give the module weights of its own in the served dtype, where the masters have another."""
        for name in self._places:
            weight = self._current(name)
            if weight.dtype != self.dtype:
                copy = self._install(name, weight.detach().to(device=self.device, dtype=self.dtype))
                if name in self.masters:
                    self._copies[name] = copy
        self.module.to(self.device)  # what is left: buffers

    def attach(self, served: Mapping[str, torch.Tensor], *, forwards_from_masters: bool) -> None:
        """Take the server's tensors, by checkpoint name; called again after the server has restarted.

        Weights that are not trained exist once, at the server. Trained ones are read from there only
        when the forward does not run from the masters.
        """
        self.served = served
        self.forwards_from_masters = forwards_from_masters
        for name in self._places:
            if name not in self.masters or not forwards_from_masters:
                self._install(name, served[name])
        self.module.to(self.device)

    def collect_gradients(self) -> None:
        """Move gradients from the module's parameters to the masters; nothing to do where they are the same.

        Hooks do it already during backward, in the masters' precision, so that many micro-batches
        add up without rounding. This sweeps up gradients that were assigned rather than accumulated.
        """
        for name, master in self.masters.items():
            if (parameter := self._current(name)) is not master:
                self._collect(name, parameter)

    def _current(self, name: str) -> nn.Parameter:
        owner, attribute = self._places[name][0]
        parameter: nn.Parameter = getattr(owner, attribute)
        return parameter

    def _install(self, name: str, weight: torch.Tensor) -> nn.Parameter:
        """Let the forward read `weight`, and send its gradients to the master."""
        parameter = nn.Parameter(weight, requires_grad=name in self.masters)
        if parameter.requires_grad:
            register: Any = parameter.register_post_accumulate_grad_hook
            register(partial(self._collect, name))
        for owner, attribute in self._places[name]:
            setattr(owner, attribute, parameter)
        return parameter

    def _collect(self, name: str, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        master = self.masters[name]
        if master.grad is None:
            master.grad = gradient.to(device=master.device, dtype=master.dtype)
        else:
            master.grad.add_(gradient.to(device=master.device))

    @torch.no_grad()
    def stale_weights(self) -> list[str]:
        """Trained weights that the forward would read with other values than the masters have."""
        return [
            name
            for name, master in self.masters.items()
            if not torch.equal(self._current(name), master.to(device=self.device, dtype=self.dtype))
        ]

    @torch.no_grad()
    def snapshot(self) -> dict[str, torch.Tensor]:
        """A copy of the trained weights as a publish would write them now."""
        return {
            name: master.detach().to(device=self.device, dtype=self.dtype, copy=True)
            for name, master in self.masters.items()
        }

    @contextmanager
    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Run forwards on other weights, a snapshot for instance, without gradients.

        Masters and served tensors are not touched, so a publish may go on meanwhile.
        """
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for name, weight in weights.items():
                self._replace(name, weight, replaced)
            with torch.no_grad():
                yield
        finally:
            for owner, attribute, parameter in replaced:
                setattr(owner, attribute, parameter)

    def _replace(self, name: str, weight: torch.Tensor, replaced: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
        current = self._current(name)
        substitute = nn.Parameter(weight.to(device=self.device, dtype=current.dtype), requires_grad=False)
        for owner, attribute in self._places[name]:
            replaced.append((owner, attribute, current))
            setattr(owner, attribute, substitute)

    @torch.no_grad()
    def load_masters(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the masters, by checkpoint name, for instance when a run is resumed."""
        missing = sorted(self.masters.keys() - tensors.keys())
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} trained tensors ({', '.join(missing[:3])}, ...); "
                "resume with the model and --train-layer-indices that it was written with"
            )
        for name, master in self.masters.items():
            if tensors[name].shape != master.shape:
                raise CheckpointError(
                    f"the checkpoint's {name} has shape {tuple(tensors[name].shape)}, the model's "
                    f"{tuple(master.shape)}; resume with the model that it was written with"
                )
            master.copy_(tensors[name])

    @torch.no_grad()
    def checkpoint_tensors(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """All weights as a Hugging Face checkpoint holds them: contiguous, unfused, tied ones once.

        Trained weights come from the masters, in their precision unless `dtype` says otherwise.
        They are the live tensors where no cast was needed: write them before the next step.
        """
        tensors: dict[str, torch.Tensor] = {}
        for parameter_name, name in self._names.items():
            weight = self.masters.get(name)
            tensors[parameter_name] = self._current(name) if weight is None else weight
        tensors.update(_persistent_buffers(self.module))
        stored = to_checkpoint_layout(self.module, {name: tensor.detach() for name, tensor in tensors.items()})
        cast = {name: _cast_floating(tensor, dtype) for name, tensor in stored.items()}
        return {name: tensor.contiguous() for name, tensor in cast.items()}


def load_policy(options: PolicyOptions, *, forwards_from_masters: bool = True) -> Policy:
    """Load a policy from a local directory or by name.

    Without `forwards_from_masters` the caller attaches served tensors before the first forward.
    """
    device = resolve_device(options.device)
    stored = _load_config(options)
    served_dtype = resolve_dtype(options.dtype, stored)
    load_dtype = served_dtype if options.master_weights == "none" else torch.float32
    module = _load_module(options, _for_training(stored), load_dtype)
    if options.master_weights != "host":
        module = module.to(device)
    policy = Policy(module, hf_config=stored, served_dtype=served_dtype, device=device, options=options)
    if forwards_from_masters:
        policy.compute_in_served_dtype()
    logger.info(
        "loaded %s: %.1fM parameters, %.1fM of them trained, served as %s on %s",
        options.model_name,
        sum(parameter.numel() for parameter in module.parameters()) / 1e6,
        sum(master.numel() for master in policy.masters.values()) / 1e6,
        str(served_dtype).removeprefix("torch."),
        device,
    )
    return policy


def resolve_device(name: str) -> torch.device:
    """The torch device that `auto`, `cpu`, `cuda` or `cuda:N` means on this machine."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return torch.device(name)


def resolve_dtype(name: str, hf_config: Any) -> torch.dtype:
    """The dtype a name means; `auto` is the checkpoint's, and float32 where it does not say."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    stored = getattr(hf_config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.float32


def _load_config(options: PolicyOptions) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(options.model_name)
    except (OSError, ValueError) as error:
        raise ModelNotFound(_not_found(options.model_name, error)) from error


def _for_training(stored: Any) -> Any:
    """The checkpoint's configuration without what has no place in training; checkpoints keep the original."""
    config = deepcopy(stored)
    config.use_cache = False
    for name, value in vars(config).items():
        # The server samples without dropout; with it here, ratios to the sampled logprobs mean nothing.
        if name.endswith(("dropout", "_pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _load_module(options: PolicyOptions, config: Any, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not options.debug_loading:
        transformers_logging.disable_progress_bar()
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(
            options.model_name, config=config, dtype=dtype, attn_implementation=options.attention
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelNotFound(_not_found(options.model_name, error)) from error
    if options.gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained: nn.Module = module.train()
    return trained


def _not_found(model_name: str, error: Exception) -> str:
    place = "directory" if Path(model_name).exists() else "name"
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"--model-name {model_name}: no causal language model can be loaded from this {place} ({cause})"


def _places_by_name(module: nn.Module, names: Mapping[str, str]) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where each parameter hangs in the module; tied ones hang in several places."""
    name_of = {id(parameter): names[name] for name, parameter in module.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, attribute = path.rpartition(".")
        places.setdefault(name_of[id(parameter)], []).append((module.get_submodule(owner), attribute))
    return places


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    stored = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name in stored}


def _cast_floating(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
