"""The memory of the loss stage at a real vocabulary, measured in processes of their own."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.head_memory import measure_apart

VOCABULARY, HIDDEN_SIZE = 150_000, 16


def test_the_loss_stage_takes_a_tenth_of_full_logits_and_no_more_for_more_tokens() -> None:
    few, many = (measure_apart("chunked", tokens, VOCABULARY, HIDDEN_SIZE) for tokens in (256, 1024))
    assert many < 1.2 * few
    assert many < measure_apart("full logits", 1024, VOCABULARY, HIDDEN_SIZE) / 10


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang")), reason="no C++ compiler to compile with")
def test_the_compiled_loss_stage_takes_no_more_than_plain_operations() -> None:
    compiled, plain = (measure_apart(form, 256, VOCABULARY, HIDDEN_SIZE) for form in ("compiled", "chunked"))
    assert compiled <= 1.02 * plain
