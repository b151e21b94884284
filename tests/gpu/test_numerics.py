"""The precision of products on a GPU: Triton's of fp32 matrices, as in a fp32 server's attention, and the head's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from example_trainer.modeling.logprobs import token_logprobs

PROGRAM = Path(__file__).with_name("programs") / "triton_dot.py"
CHUNK = 64


@pytest.mark.parametrize("precision", ["default", "ieee"])
def test_triton_multiplies_fp32_matrices_in_fp32_if_it_is_told_to(precision, tmp_path, record_claim):
    """The value is recorded for both settings, and promised for `ieee` only, which the server sets."""
    pytest.importorskip("triton")
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environ.pop("TRITON_F32_DEFAULT", None)
    if precision == "ieee":
        environ["TRITON_F32_DEFAULT"] = "ieee"
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.splitlines()[-1:]
    record_claim(f"triton-fp32-{precision}", float(done.stdout))


@torch.no_grad()
def test_the_heads_logprobs_in_bf16_are_those_of_fp64_and_a_plain_linear_layers_are_not(record_claim):
    ours, plain = head_errors(tokens=512, vocabulary=151_936, width=1536, device="cuda")
    record_claim("head-fp32-logprobs", ours)
    record_claim("head-bf16-logprobs", plain)


def head_errors(tokens, vocabulary, width, device):
    """Return the largest errors of logprobs: of `token_logprobs`, and of logits rounded to bf16 by `nn.Linear`.

    Logits have a standard deviation of 6, so that the largest are near 30, as a trained model's are.
    """
    torch.manual_seed(0)
    weight = (torch.randn(vocabulary, width, device=device) * 6 / width**0.5).to(torch.bfloat16)
    hidden = torch.randn(tokens, width, device=device).to(torch.bfloat16)
    index, ones = torch.arange(tokens, device=device), torch.ones(tokens, device=device)
    exact = torch.cat([(part.double() @ weight.double().t()).log_softmax(-1) for part in hidden.split(CHUNK)])
    labels = exact.exp().multinomial(1)[:, 0]
    exact = exact.gather(-1, labels[:, None])[:, 0]
    ours = token_logprobs(hidden, weight, index, labels, ones)[0]
    logits = torch.nn.functional.linear(hidden, weight).float()
    plain = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return tuple(float((found.double() - exact).abs().max()) for found in (ours, plain))
