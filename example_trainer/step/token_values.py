"""Values of tokens for people to look at: advantage, logprob and entropy of some of a batch's trained tokens.

All groups of a small batch are recorded. From a large one whole groups are chosen until they have as many trained
tokens as `--recorded-tokens` allows: alternately the group with the lowest reward and the one with the highest.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from atropos_api.wire.groups import Group
from atropos_api.wire.reports import GroupValues, SampleValues
from example_trainer.modeling.micro_batches import Row
from example_trainer.monitoring.broker_reports import RecordedBatch
from example_trainer.step.train_step import StepTraining

logger = logging.getLogger(__name__)

DIGITS = 5


def record_batch(
    training: StepTraining, texts: TokenTexts, *, most_tokens: int, rank: int = 0, world_size: int = 1
) -> RecordedBatch | None:
    """Return what is recorded of a batch that was trained; None if nothing of it was."""
    batch, targets, groups = training.batch.batch, training.batch.targets, training.prepared.groups
    chosen = choose_groups(groups, batch.rows, most_tokens)
    if not chosen or targets is None or not training.batch.done:
        return None
    logprobs, entropies = (values.float().cpu().numpy() for values in training.batch.first_values())
    advantages = targets.advantages.float().cpu().numpy()  # the loss's own, with the credits of `--distill reverse_kl`
    by_group: dict[int, list[SampleValues | None]] = {
        index: [None] * len(groups[index].tokens) for index in sorted(chosen)
    }
    for row in batch.rows:
        if row.group in by_group:
            at = slice(row.first_target, row.first_target + len(row.targets))
            by_group[row.group][row.sample] = SampleValues(
                positions=row.targets.tolist(),
                advantages=_rounded(advantages[at], fill=0.0),
                logprobs=_rounded(logprobs[at]),
                entropies=_rounded(entropies[at]),
            )
    kept = [groups[index] for index in by_group]
    return RecordedBatch(
        number=batch.number,
        values=[GroupValues(group=index, samples=samples) for index, samples in by_group.items()],
        groups=kept,
        places=[training.prepared.places[index] for index in by_group],
        texts=texts.of(int(token) for group in kept for tokens in group.tokens for token in tokens),
        rank=rank,
        world_size=world_size,
    )


def choose_groups(groups: Sequence[Group], rows: Iterable[Row], most_tokens: int) -> set[int]:
    """Return the indices of the groups to record, which together have at most `most_tokens` trained tokens."""
    trained: dict[int, int] = defaultdict(int)
    for row in rows:
        trained[row.group] += len(row.targets)
    ranked = sorted(trained, key=lambda index: float(np.mean(groups[index].scores)))
    in_turn = [index for pair in zip(ranked, reversed(ranked), strict=True) for index in pair]
    chosen: set[int] = set()
    left = most_tokens
    for index in dict.fromkeys(in_turn):
        if trained[index] <= left:
            chosen.add(index)
            left -= trained[index]
    return chosen


class TokenTexts:
    """The texts of tokens, by the tokenizer of a model; without one there are none."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._tokenizer: Any = None
        self._texts: dict[int, str] = {}
        self._failed = False

    def of(self, tokens: Iterable[int]) -> Mapping[str, str]:
        """Return the text of each of these tokens, by its id."""
        wanted = set(tokens)
        for token in wanted - self._texts.keys():
            text = self._decode(token)
            if text is None:
                return {}
            self._texts[token] = text
        return {str(token): self._texts[token] for token in sorted(wanted)}

    def _decode(self, token: int) -> str | None:
        """Return the text that a token adds after another: alone, some tokenizers drop the space before a word."""
        tokenizer = self._load()
        if tokenizer is None:
            return None
        alone, twice = (str(tokenizer.decode([token] * count, skip_special_tokens=False)) for count in (1, 2))
        return twice[len(alone) :] if twice.startswith(alone) else alone

    def _load(self) -> Any:
        if self._tokenizer is None and not self._failed:
            from transformers import AutoTokenizer

            try:
                # The model is on this disk by now; nothing may wait for a hub.
                self._tokenizer = AutoTokenizer.from_pretrained(self._model_name, local_files_only=True)
            except Exception as error:  # noqa: BLE001 - tokenizers fail in many ways, and the page shows ids then
                logger.debug("no tokenizer for the page: %s", error)
                self._failed = True
        return self._tokenizer


def _rounded(values: Any, *, fill: float | None = None) -> list[Any]:
    """Return the values with `DIGITS` decimals; those that are not finite become `fill`."""
    return [round(value, DIGITS) if np.isfinite(value) else fill for value in values.tolist()]
