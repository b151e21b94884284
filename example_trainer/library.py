"""The public parts of the trainer for programs of your own, under one import line.

    from example_trainer.library import ChatDataset, ChatDataCollator, PackedBatch, pack_rows

`ChatDataCollator` pads samples of a `ChatDataset` to tensors, and `rows_of` turns them into rows that `pack_rows` packs
without padding, the form in which the trainer itself computes. The other names are defined in the modules that the
trainer uses them from. docs/reference/library.md has an example that runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from environments.tasks.chat_dataset import ChatDataset, ChatSample
from example_trainer.model import load_policy
from example_trainer.modeling.layout_choice import choose_layout
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.logprobs import head_of, token_logprobs
from example_trainer.modeling.micro_batches import PackedBatch, Row, forward_hidden, pack_rows
from example_trainer.modeling.optimizers import LearningRate, OptimizerSettings, make_optimizer
from example_trainer.modeling.policy import Policy
from example_trainer.objective.advantages import AdvantageSettings, compute_advantages
from example_trainer.objective.losses import LossInputs, LossSettings, token_losses, token_weights
from example_trainer.options.layout import DistributedLayout

__all__ = [
    "AdvantageSettings",
    "ChatBatch",
    "ChatDataCollator",
    "ChatDataset",
    "ChatSample",
    "DistributedLayout",
    "LearningRate",
    "LossInputs",
    "LossSettings",
    "OptimizerSettings",
    "PackedBatch",
    "Policy",
    "PolicyOptions",
    "Row",
    "choose_layout",
    "compute_advantages",
    "forward_hidden",
    "head_of",
    "load_policy",
    "make_optimizer",
    "pack_rows",
    "rows_of",
    "token_logprobs",
    "token_losses",
    "token_weights",
]

IGNORED_LABEL = -100
"""The label that torch's cross entropy leaves out."""


class ChatBatch(TypedDict):
    """A padded batch of B chats: P is the longest prompt and L the longest chat, both rounded up to `multiple_of`."""

    prompt_ids: Tensor
    """[B, P] prompts, padded on the left, so that sampling continues at the right end."""
    prompt_mask: Tensor
    """[B, P] 1 at tokens of the prompt, 0 at padding."""
    input_ids: Tensor
    """[B, L] chats with their replies, padded on the right."""
    attention_mask: Tensor
    """[B, L] 1 at tokens of the chat, 0 at padding."""
    labels: Tensor
    """[B, L] the token at trained positions and -100 elsewhere, not shifted, as transformers' models take them."""
    ground_truth: list[str]
    """B references for a reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatDataCollator:
    """A collator for torch's `DataLoader`: it pads samples of a `ChatDataset` to one length.

    DataLoader(dataset, batch_size=8, collate_fn=ChatDataCollator(pad_token_id=tokenizer.pad_token_id))
    """

    pad_token_id: int
    multiple_of: int = 1
    """Lengths are rounded up to a multiple of this."""

    def __call__(self, samples: Sequence[ChatSample]) -> ChatBatch:
        """Return `[B, P]` and `[B, L]` tensors of dtype int64 for B samples."""
        tokens = [sample["token_ids"] for sample in samples]
        labels = [
            [token if trained else IGNORED_LABEL for token, trained in zip(row, sample["loss_mask"], strict=True)]
            for row, sample in zip(tokens, samples, strict=True)
        ]
        prompts = [sample["prompt_token_ids"] for sample in samples]
        return ChatBatch(
            prompt_ids=self._pad(prompts, self.pad_token_id, left=True),
            prompt_mask=self._pad([[1] * len(row) for row in prompts], 0, left=True),
            input_ids=self._pad(tokens, self.pad_token_id),
            attention_mask=self._pad([[1] * len(row) for row in tokens], 0),
            labels=self._pad(labels, IGNORED_LABEL),
            ground_truth=[sample["ground_truth"] for sample in samples],
        )

    def _pad(self, rows: Sequence[Sequence[int]], filler: int, *, left: bool = False) -> Tensor:
        longest = max(map(len, rows))
        width = -(-longest // self.multiple_of) * self.multiple_of
        padded = torch.full((len(rows), width), filler, dtype=torch.long)
        for at, row in enumerate(rows):
            start = width - len(row) if left else 0
            padded[at, start : start + len(row)] = torch.tensor(row, dtype=torch.long)
        return padded


def rows_of(samples: Iterable[ChatSample]) -> list[Row]:
    """Return a row for each sample that has a trained token, each in a group of its own, for `pack_rows`."""
    rows: list[Row] = []
    first = 0
    for group, sample in enumerate(samples):
        positions = np.flatnonzero(np.asarray(sample["loss_mask"]))
        targets = positions[positions > 0]  # nothing precedes the first token, so nothing predicts it
        if len(targets):
            tokens = np.asarray(sample["token_ids"], dtype=np.int64)
            rows.append(Row(tokens=tokens, targets=targets, first_target=first, group=group))
            first += len(targets)
    return rows
