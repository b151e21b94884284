"""8-bit Adam and Adafactor, with the same result for any number of ranks that the weights are sharded over.

Both need more than each weight's own gradient. 8-bit Adam has one scale for a block of 256 states: here a block never
crosses the end of a row, so that shards of whole rows have the blocks of the whole matrix. Adafactor needs means over
rows, columns and the whole matrix: their sums are added up over the ranks. AdamW works weight by weight and is torch's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

import torch
from torch import Tensor

from example_trainer.modeling.shards import StateShards, local_part, sum_over_shards

BLOCK_STATES: Final = 256
"""Number of 8-bit states with one scale, as bitsandbytes' kernels have it."""

SMALLEST_8BIT_SIZE: Final = 4096
"""A matrix of fewer elements has 32-bit states, as in bitsandbytes."""

PADDED_ELEMENTS = 1 << 22
"""Number of weights copied at one time (16 MiB, and as much for gradients) where rows do not fill their blocks."""


class ShardedOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer whose states are sharded with their parameters; checkpoints hold them whole."""

    @abstractmethod
    def _layouts(self, parameter: Tensor) -> dict[str, tuple[StateShards, torch.dtype]]:
        """Return layout and dtype of each of the parameter's states."""

    @abstractmethod
    def _row_length(self, parameter: Tensor) -> int | None:
        """Return the length of the rows that the states are laid out for; None if that has no effect on them."""

    @abstractmethod
    def _update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Step one parameter; `state["step"]` counts this step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient; the ranks of sharded parameters step together."""
        if closure is not None:
            raise ValueError("compute the gradients before the step; a closure is not supported")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    layouts = self._layouts(parameter).items()
                    state |= {name: layout.zeros(parameter, dtype) for name, (layout, dtype) in layouts}
                    state |= self._counts(parameter)
                state["step"] += 1
                self._update(parameter, group, state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load whole states; raise `ValueError` for those of another layout."""
        super().load_state_dict({**state_dict, "state": {}})  # torch would cast 8-bit states to the parameter's dtype
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            layouts = self._layouts(parameter)
            counts = self._counts(parameter)
            if saved.keys() != layouts.keys() | counts.keys():
                raise ValueError(f"{type(self).__name__} has no states {', '.join(sorted(saved))}")
            if (length := saved.get("row_length")) != counts.get("row_length"):
                raise ValueError(f"its states are for rows of {length} elements; here they have {counts['row_length']}")
            held = {name: layout.held(saved[name], parameter) for name, (layout, _) in layouts.items()}
            self.state[parameter] = {**held, **counts, "step": saved["step"]}

    def _counts(self, parameter: Tensor) -> dict[str, int]:
        length = self._row_length(parameter)
        return {"step": 0} if length is None else {"step": 0, "row_length": length}


class BlockwiseAdamW(ShardedOptimizer):
    """AdamW with 8-bit states in blocks of 256, by bitsandbytes' kernels.

    Matrices with rows of at least a block have 8-bit states. Vectors and narrow matrices (an adapter's second one) keep
    32 bits: a row of less than a block would waste the rest of its block.
    """

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        from bitsandbytes import functional

        self._kernels: Any = functional
        self._maps: dict[torch.device, tuple[Tensor, Tensor]] = {}
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def _layouts(self, parameter: Tensor) -> dict[str, tuple[StateShards, torch.dtype]]:
        kept = tuple(range(parameter.ndim))
        if not _has_8bit_states(parameter):
            return dict.fromkeys(("state1", "state2"), (StateShards(kept), torch.float32))
        blocks = -(-local_part(parameter).shape[-1] // BLOCK_STATES)
        states = (StateShards(kept, last_length=blocks * BLOCK_STATES), torch.uint8)
        scales = (StateShards(kept, last_length=blocks), torch.float32)
        return {"state1": states, "state2": states, "absmax1": scales, "absmax2": scales}

    def _row_length(self, parameter: Tensor) -> int | None:
        if not _has_8bit_states(parameter):
            return None
        part = local_part(parameter).shape[-1]
        return part if part % BLOCK_STATES else parameter.shape[-1]  # parts of whole blocks keep the row's blocks

    def _update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        assert parameter.grad is not None
        weights, gradient = local_part(parameter), local_part(parameter.grad).contiguous()
        if not weights.numel():
            return
        values = weights.contiguous()
        if "absmax1" in state:
            self._update_8bit(values, gradient, group, state)
        else:
            self._kernels.optimizer_update_32bit(
                "adam",
                gradient,
                values,
                local_part(state["state1"]),
                group["betas"][0],
                group["eps"],
                state["step"],
                group["lr"],
                local_part(state["state2"]),
                group["betas"][1],
                weight_decay=group["weight_decay"],
            )
        if values is not weights:
            weights.copy_(values)

    def _update_8bit(self, values: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        names = ("state1", "state2", "absmax1", "absmax2")
        arrays = [_rows(each) for each in (values, gradient, *(local_part(state[name]) for name in names))]
        rows, length = arrays[0].shape
        padding = arrays[2].shape[1] - length
        at_once = max(1, PADDED_ELEMENTS // length) if padding else rows
        for pieces in zip(*(torch.split(array, at_once) for array in arrays), strict=True):
            if not padding:
                self._step_blocks(pieces, group, state["step"])
                continue
            # Padding has gradients of zero and so states of zero, which are never the largest of a block.
            padded = torch.nn.functional.pad(pieces[0], (0, padding))
            self._step_blocks(
                (padded, torch.nn.functional.pad(pieces[1], (0, padding)), *pieces[2:]), group, state["step"]
            )
            pieces[0].copy_(padded[:, :length])

    def _step_blocks(self, pieces: tuple[Tensor, ...], group: dict[str, Any], step: int) -> None:
        values, gradient, first, second, first_scale, second_scale = pieces
        signed, unsigned = self._maps_on(values.device)
        self._kernels.optimizer_update_8bit_blockwise(
            "adam",
            gradient,
            values,
            first,
            second,
            *group["betas"],
            0.0,
            0.0,
            group["eps"],
            step,
            group["lr"],
            signed,
            unsigned,
            first_scale.view(-1),
            second_scale.view(-1),
            group["weight_decay"],
        )

    def _maps_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the values of the 256 codes, for the first (signed) and for the second moment."""
        if device not in self._maps:
            signed, unsigned = (self._kernels.create_dynamic_map(signed=signed) for signed in (True, False))
            self._maps[device] = (signed.to(device), unsigned.to(device))
        return self._maps[device]


def _has_8bit_states(parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and parameter.shape[-1] >= BLOCK_STATES and parameter.numel() >= SMALLEST_8BIT_SIZE


def _rows(tensor: Tensor) -> Tensor:
    """Return a view of shape `[rows, length of a row]`."""
    return tensor.view(-1, tensor.shape[-1])


class Adafactor(ShardedOptimizer):
    """Adafactor (Shazeer and Stern 2018) with an absolute rate, as Hugging Face's `Trainer` sets it up.

    In torch's and the paper's forms the rate is relative to each tensor's own scale, which leaves an adapter's zero
    matrices unchanged. There is no first moment. The second moment of a matrix is the product of its row and column
    means; that of a vector is kept whole.
    """

    DECAY_POWER = -0.8
    LEAST_SQUARE = 1e-30
    LARGEST_RMS = 1.0

    def __init__(self, groups: Any, *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    def _layouts(self, parameter: Tensor) -> dict[str, tuple[StateShards, torch.dtype]]:
        dims = tuple(range(parameter.ndim))
        if parameter.ndim < 2:
            return {"exp_avg_sq": (StateShards(dims), torch.float32)}
        return {
            "exp_avg_sq_row": (StateShards(dims[:-1]), torch.float32),
            "exp_avg_sq_col": (StateShards((*dims[:-2], dims[-1])), torch.float32),
        }

    def _row_length(self, parameter: Tensor) -> None:  # noqa: ARG002 - its states are means, for rows of any length
        return None

    def _update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        assert parameter.grad is not None
        weights, gradient = local_part(parameter), local_part(parameter.grad)
        decay = 1.0 - state["step"] ** self.DECAY_POWER
        squares = gradient.square() + self.LEAST_SQUARE
        if parameter.ndim < 2:
            average = local_part(state["exp_avg_sq"])
            average.mul_(decay).add_(squares, alpha=1.0 - decay)
            update = average.rsqrt().mul_(gradient)
        else:
            update = self._factored(parameter, squares, decay, state).mul_(gradient)
        total = sum_over_shards(update.square().sum(), parameter, range(parameter.ndim))
        update.div_(((total / parameter.numel()).sqrt() / self.LARGEST_RMS).clamp_(min=1.0))
        weights.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _factored(self, parameter: Tensor, squares: Tensor, decay: float, state: dict[str, Any]) -> Tensor:
        """Return the inverse root of the factored second moment, after adding a step's `squares` to it."""
        rows, columns = local_part(state["exp_avg_sq_row"]), local_part(state["exp_avg_sq_col"])
        height, width = parameter.shape[-2:]
        own_rows, own_columns = squares.sum(-1), squares.sum(-2)
        rows.mul_(decay).add_(sum_over_shards(own_rows, parameter, [parameter.ndim - 1]) / width, alpha=1.0 - decay)
        columns.mul_(decay).add_(
            sum_over_shards(own_columns, parameter, [parameter.ndim - 2]) / height, alpha=1.0 - decay
        )
        mean = sum_over_shards(rows.sum(-1, keepdim=True), parameter, [parameter.ndim - 2]) / height
        return (rows / mean).rsqrt_().unsqueeze(-1) * columns.rsqrt().unsqueeze(-2)
