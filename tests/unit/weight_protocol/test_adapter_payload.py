"""An adapter in transit: one complete body, whose checksum depends on its content only."""

from __future__ import annotations

import pytest
import torch

from example_trainer.weight_protocol.transfer import AdapterPayload

CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": {"v_proj", "q_proj"}}


def tensors(value=1.0):
    return {f"base_model.model.x.{half}.weight": torch.full((4, 3), value) for half in ("lora_A", "lora_B")}


def test_what_is_written_is_read_again():
    payload = AdapterPayload.read(AdapterPayload.write(tensors(), CONFIG).body)
    assert payload.config == {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    assert all(torch.equal(tensor, tensors()[name]) for name, tensor in payload.tensors().items())
    assert set(payload.tensors()) == set(tensors())


def test_the_checksum_is_that_of_the_content():
    digests = {AdapterPayload.write(tensors(), CONFIG).digest() for _ in range(20)}
    assert len(digests) == 1
    assert AdapterPayload.write(tensors(1.5), CONFIG).digest() not in digests
    assert AdapterPayload.write(tensors(), {**CONFIG, "lora_alpha": 9}).digest() not in digests


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "header is longer"),
        (b"\xff" * 40, "header is longer"),
        (b"\x02" + bytes(7) + b"{}", "lack adapter_config"),
        (b"\x02" + bytes(7) + b"no", "not an adapter in safetensors format"),
    ],
)
def test_a_body_that_is_not_an_adapter_is_told_apart_with_the_reason(body, told):
    with pytest.raises(ValueError, match=told):
        AdapterPayload.read(body)
