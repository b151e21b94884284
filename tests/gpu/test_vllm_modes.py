"""The four weight sync modes through vLLM on a GPU; skipped where CUDA vLLM is not installed."""

from __future__ import annotations

import importlib.util

import pytest

from tests.gpu.modes import PUBLISHES, run_mode
from tests.gpu.training import make_model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), layers=28, vocabulary=151_936)


@pytest.fixture(scope="module")
def rates():
    return {}


@pytest.mark.parametrize("mode", PUBLISHES)
def test_a_mode_publishes_proves_and_decodes(mode, model, rates, tmp_path, report, record_claim):
    figures = run_mode(mode, model, tmp_path, dtype="bfloat16")
    rates[mode] = figures.tokens_per_second
    report(f"{mode}: decoding", f"{figures.tokens_per_second:,.0f} tokens/s")
    record_claim(f"vllm-{mode}-publishes", figures.served)
    record_claim(f"vllm-{mode}-proof", figures.largest_difference)
    if "shared_vllm" in rates:
        record_claim(f"vllm-{mode}-decoding", rates[mode] / rates["shared_vllm"])
    if mode == "shared_vllm":
        record_claim("vllm-one-copy", figures.copies)


def test_a_server_of_lora_only_decodes_as_fast_as_one_of_lora_restart(rates, record_claim):
    if not {"lora_only", "lora_restart"} <= rates.keys():
        pytest.skip("needs the rates of lora_only and lora_restart of the same run")
    record_claim("vllm-adapter-decoding", rates["lora_only"] / rates["lora_restart"])
