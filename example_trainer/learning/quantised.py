"""A frozen base in four bits (nf4, bitsandbytes), for QLoRA: how it is loaded and read back.

A quantised weight is a packed uint8 tensor with its scales beside it. The forward dequantises it
into the served dtype; `dequantised` gives exactly what the forward multiplies with, so a server that
loads those values computes what the trainer does.
"""

from __future__ import annotations

from typing import Any

import torch

from example_trainer.errors import AdapterUnavailable


def quantisation_config(served_dtype: torch.dtype) -> Any:
    """What transformers' loading takes for an nf4 base that computes in `served_dtype`.

    Raises `AdapterUnavailable` where bitsandbytes cannot be imported or has no kernels for this machine.
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
    """Whether a parameter is packed 4-bit data."""
    return getattr(weight, "quant_state", None) is not None


@torch.no_grad()
def dequantised(weight: torch.Tensor) -> torch.Tensor:
    """The matrix that forwards multiply with, in the dtype they compute in; a plain weight as it is."""
    if not is_quantised(weight):
        return weight
    import bitsandbytes

    packed: Any = weight
    matrix: torch.Tensor = bitsandbytes.functional.dequantize_4bit(packed.data, packed.quant_state)
    return matrix
