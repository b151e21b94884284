"""Rows that the unit tests of modeling share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from example_trainer.modeling.micro_batches import Row


@pytest.fixture
def rows() -> list[Row]:
    return make_rows(seed=0)


def make_rows(*, seed: int, groups: int = 5, vocabulary: int = 32, longest: int = 20) -> list[Row]:
    """Return groups of one to five answers of mixed lengths to prompts of mixed lengths, some with masked gaps."""
    generator = np.random.default_rng(seed)
    rows: list[Row] = []
    first = 0
    for group in range(groups):
        prompt = generator.integers(0, vocabulary, size=generator.integers(2, 15))
        for _ in range(generator.integers(1, 6)):
            answer = generator.integers(0, vocabulary, size=generator.integers(1, longest))
            targets = len(prompt) + np.flatnonzero(generator.random(len(answer)) < 0.8)
            if not len(targets):
                targets = np.array([len(prompt)])
            rows.append(Row(tokens=np.concatenate([prompt, answer]), targets=targets, first_target=first, group=group))
            first += len(targets)
    return rows


def labels_of(rows: list[Row]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([row.tokens[row.targets] for row in rows]))
