"""The policy under training: a Hugging Face causal language model and the master weights that the optimizer steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from example_trainer.errors import CheckpointError
from example_trainer.modeling.layer_filter import trained_parameters
from example_trainer.modeling.loading import (
    ModuleTensors,
    PolicyOptions,
    Sharding,
    cast_floating,
    checkpoint_names,
    dequantised,
    is_quantised,
    move_buffers,
    persistent_buffers,
    places_by_name,
    to_checkpoint_layout,
)
from example_trainer.modeling.lora import Adapter, AdapterOptions, describe_left_out, inject
from example_trainer.modeling.side_streams import HostGradients

ResultT = TypeVar("ResultT")


class Policy:
    """A causal language model with its master weights: `example_trainer.model` explains the layouts."""

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
        self.chat_template: str | None = None
        """A chat template that checkpoints get in place of the tokenizer's own; None keeps that."""
        self.forwards_from_masters = True
        self.served: Mapping[str, torch.Tensor] = {}
        self.changing: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context in which masters may change; a bridge whose server reads the masters sets its fence here."""
        self._has_no_other_masters = options.master_weights == "none" and options.adapter is None
        self._copies: dict[str, nn.Parameter] = {}
        self._holds_masters = False
        self._replacing = threading.RLock()
        """Held while a thread runs forwards of the one module on other weights than the policy's own."""
        quantised = any(is_quantised(parameter) for parameter in module.parameters())
        self._names = {n: n for n, _ in module.named_parameters()} if quantised else checkpoint_names(module)
        self._places = places_by_name(module, self._names)
        self._adapter: Adapter | None = None
        self._host_gradients = HostGradients(device) if options.master_weights == "host" else None
        self.masters: dict[str, nn.Parameter] = {}
        if options.adapter is None:
            self._train_weights(options.train_layer_indices)
        else:
            self._adapter = inject(module, options.adapter)
            self._train_adapter(self._adapter, options)

    def _train_weights(self, layer_indices: str | None) -> None:
        trained = trained_parameters(self._names, layer_indices)
        for parameter_name, parameter in self.module.named_parameters():
            parameter.requires_grad_(parameter_name in trained)
            if parameter_name in trained:
                self.masters[self._names[parameter_name]] = parameter

    def _train_adapter(self, adapter: Adapter, options: PolicyOptions) -> None:
        dtype = self.dtype if options.master_weights == "none" else torch.float32
        device = torch.device("cpu") if options.master_weights == "host" else self.device
        for name, (owner, attribute) in adapter.places().items():
            self._places[name] = [(owner, attribute)]
            parameter = nn.Parameter(getattr(owner, attribute).detach().to(device=device, dtype=dtype))
            setattr(owner, attribute, parameter)
            self.masters[name] = parameter

    @property
    def parameter_names(self) -> Mapping[str, str]:
        """Map from module parameter name (of the base, before adapters) to checkpoint name, tied parameters once."""
        return self._names

    @property
    def has_adapter(self) -> bool:
        return self._adapter is not None

    @property
    def has_dropout(self) -> bool:
        """True if forwards with gradients differ by dropout from those without; only the latter match the sampler."""
        return self._adapter is not None and self._adapter.has_dropout

    @property
    def sharding(self) -> Sharding | None:
        """The settings with which weights are sharded over several ranks; None if this process holds them whole."""
        return None

    @property
    def is_sharded(self) -> bool:
        """True if weights are sharded over several ranks, so that all ranks must take part in a forward."""
        return self.sharding is not None

    def compute(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Run `function(module, *arguments)` as one forward of the module and return its result."""
        with self.autocast():
            return function(self.module, *arguments)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Give rank 0 access to whole weights during the context; all ranks enter together. Here they already are."""
        yield

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Update the served-dtype copies from the current masters; every forward runs in this context."""
        if not self._holds_masters:
            self._update_copies()
        yield

    @contextmanager
    def holding_masters(self) -> Iterator[None]:
        """Update the served-dtype copies once for all forwards of the block, in which no master may change.

        Masters in host memory would otherwise cross the bus, 4 bytes a parameter, for each micro-batch.
        """
        self._update_copies()
        self._holds_masters = True
        try:
            yield
        finally:
            self._holds_masters = False

    @torch.no_grad()
    def _update_copies(self) -> None:
        for name, copy in self._copies.items():
            # Through .data: the graph of an earlier micro-batch may still use the copy, with these same values.
            copy.data.copy_(self.masters[name], non_blocking=True)

    @contextmanager
    def own_weights(self) -> Iterator[None]:
        """Run forwards on the policy's own weights, while another thread may want `with_weights`: it has to wait.

        The parity check of an overlapped publish needs it: the next batch scores older versions at that time.
        """
        with self._replacing:
            yield

    def compute_in_served_dtype(self) -> None:
        """Give the module copies of the weights in the served dtype and on its device, where the masters differ."""
        for name in self._places:
            weight = self._current(name)
            differs = weight.dtype != self.dtype or weight.device.type != self.device.type
            if weight.is_floating_point() and differs:
                copy = self._install(name, weight.detach().to(device=self.device, dtype=self.dtype))
                if name in self.masters:
                    self._copies[name] = copy
        move_buffers(self.module, self.device)

    def attach(self, served: Mapping[str, torch.Tensor], *, forwards_from_masters: bool) -> None:
        """Attach the server's tensors, by checkpoint name; called again after the server has restarted.

        Untrained weights exist only once, at the server. Trained ones are read from there only if the forward does not
        run from the masters. If the served tensors are to be the masters, each becomes one here if its values are equal
        and otherwise in `write_served`.
        """
        self.served = served
        self.forwards_from_masters = forwards_from_masters
        for name in self._places:
            if name not in self.masters or not (forwards_from_masters or self.steps_served):
                self._install(name, served[name])
        if self.steps_served:
            for name, master in self.masters.items():
                if torch.equal(master.to(served[name].device), served[name]):
                    master.data = served[name]
        move_buffers(self.module, self.device)

    @property
    def steps_served(self) -> bool:
        """True if the optimizer steps the same tensors that the server reads."""
        return self._has_no_other_masters and bool(self.served) and not self.forwards_from_masters

    @property
    def is_served(self) -> bool:
        """True if every master is already the server's own tensor."""
        return all(master.data_ptr() == self.served[name].data_ptr() for name, master in self.masters.items())

    @torch.no_grad()
    def write_served(self) -> None:
        """Copy the masters into the served tensors, inside a publish; these become the masters if `steps_served`."""
        for name, master in self.masters.items():
            view = self.served[name]
            if view.data_ptr() == master.data_ptr():
                continue
            view.copy_(master.to(view.device, non_blocking=True))  # pinned memory is copied as is, cast on the device
            if self.steps_served:
                master.data = view

    def collect_gradients(self) -> None:
        """Move gradients from the module's parameters to the masters, if they are different tensors.

        Hooks begin it during backward, in the masters' precision, so that many micro-batches add up without rounding.
        """
        for name, master in self.masters.items():
            if (parameter := self._current(name)) is not master:
                self._collect(name, parameter)
        if self._host_gradients is not None:
            self._host_gradients.add_all(self.masters)

    def drop_gradients(self) -> None:
        """Forget gradients, those of masters and those on their way to them."""
        for master in self.masters.values():
            master.grad = None
        if self._host_gradients is not None:
            self._host_gradients.drop()

    def _current(self, name: str) -> nn.Parameter:
        owner, attribute = self._places[name][0]
        parameter: nn.Parameter = getattr(owner, attribute)
        return parameter

    def _install(self, name: str, weight: torch.Tensor) -> nn.Parameter:
        """Make the forward read `weight`, and add its gradients to the master."""
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
        if self._host_gradients is not None:
            self._host_gradients.take(name, gradient, master)
        elif master.grad is None:
            master.grad = gradient.to(device=master.device, dtype=master.dtype)
        else:
            master.grad.add_(gradient.to(device=master.device))

    @torch.no_grad()
    def stale_weights(self) -> list[str]:
        """Return the names of trained weights whose values in the forward differ from the masters."""
        forwarded = {name: self._current(name) for name in self.masters}
        return [
            name
            for name, weight in forwarded.items()
            if not torch.equal(weight, self.masters[name].to(device=weight.device, dtype=weight.dtype))
        ]

    @torch.no_grad()
    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return a copy of the trained weights as a publish would write them now."""
        return {
            name: master.detach().to(device=self.device, dtype=self.dtype, copy=True)
            for name, master in self.masters.items()
        }

    @contextmanager
    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Run forwards on other weights, such as a snapshot, without gradients.

        Masters and served tensors do not change, so a publish may run at the same time.
        """
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        with self._replacing:
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

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Run forwards on the base alone, without gradients: the reference policy of an adapter run."""
        with self._replacing, self._required_adapter().disabled(), torch.no_grad():
            yield

    @torch.no_grad()
    def adapter_tensors(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors for `adapter_model.safetensors`: contiguous, under PEFT's names.

        They are in `dtype`, or else in the masters' dtype; tensors that needed no cast share the masters' memory.
        """
        self._required_adapter()
        return {name: master.detach().to(dtype or master.dtype).contiguous() for name, master in self.masters.items()}

    def adapter_config(self) -> dict[str, Any]:
        """Return the content of the adapter's `adapter_config.json`."""
        return self._required_adapter().config(self.tokenizer_name)

    def describe_left_out(self, options: AdapterOptions) -> list[str]:
        """Return sentences about matrices that the adapter's options name but that cannot have an adapter."""
        return describe_left_out(self.module, self._required_adapter(), options)

    def _required_adapter(self) -> Adapter:
        if self._adapter is None:
            raise TypeError("this policy trains full weights; it has no adapter")
        return self._adapter

    def by_own_names(self, stored: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return a checkpoint's tensors under the masters' names, also those masters that it stores in parts."""
        return stored if self._adapter is not None else ModuleTensors(self.module, stored)

    @torch.no_grad()
    def load_masters(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the masters with tensors given by checkpoint name, for instance when a run is resumed."""
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
        with self.changing():
            for name, master in self.masters.items():
                self._assign(master, tensors[name])

    def _assign(self, master: nn.Parameter, weight: torch.Tensor) -> None:
        master.copy_(weight)

    @torch.no_grad()
    def checkpoint_tensors(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return all weights in the layout of a Hugging Face checkpoint: contiguous, unfused, tied ones once.

        Trained weights come from the masters, in their precision unless `dtype` says otherwise. An adapter is merged
        into the base, and a quantised base is returned as the values it computes with. Tensors that needed no cast
        share the policy's memory: write them before the next step.
        """
        return self._as_checkpoint({place: self._stored(place, name) for place, name in self._names.items()}, dtype)

    @torch.no_grad()
    def whole_weight(self, parameter_name: str, dtype: torch.dtype, *, keep: bool) -> torch.Tensor | None:
        """Return one weight as it is now, cast to `dtype`, on its own device; None without `keep`.

        If weights are sharded, all ranks call this together: each casts its shard, then they are gathered.
        """
        weight = self._stored(parameter_name, self._names[parameter_name])
        return cast_floating(weight.detach(), dtype) if keep else None

    @torch.no_grad()
    def base_tensors(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors of `checkpoint_tensors` without the adapter: the base that an adapter is served on.

        They are in host memory, because a device that holds the base in 4 bits may have no room for it in 16.
        """
        values = {place: dequantised(self._current(name)).cpu() for place, name in self._names.items()}
        return self._as_checkpoint(values, dtype)

    def _as_checkpoint(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        cast = {name: cast_floating(tensor.detach(), dtype) for name, tensor in tensors.items()}
        cast |= persistent_buffers(self.module)  # forwards compute with them as they are, such as a router's bias
        return {name: tensor.contiguous() for name, tensor in to_checkpoint_layout(self.module, cast).items()}

    def _stored(self, parameter_name: str, name: str) -> torch.Tensor:
        if (master := self.masters.get(name)) is not None:
            return master
        base = dequantised(self._current(name))
        return base if self._adapter is None else self._adapter.merged(parameter_name, base, self.masters)
