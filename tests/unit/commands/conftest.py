"""A healthy run on a tiny model, into whose files the tests of `atropos doctor` put faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.commands.doctor_harness import DoctorHarness


@pytest.fixture(scope="session")
def untrained_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a tiny base model with random weights: those of the recipe without its warm-up."""
    import torch

    from example_trainer.tiny.model import CONTEXT_LENGTH, make_model
    from example_trainer.tiny.tokenizer import make_tokenizer

    folder = tmp_path_factory.mktemp("untrained")
    torch.manual_seed(0)
    tokenizer = make_tokenizer(context_length=CONTEXT_LENGTH)
    make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def harness(untrained_base: Path, tmp_path: Path) -> DoctorHarness:
    return DoctorHarness.make(untrained_base, tmp_path)
