"""Training data of supervised fine-tuning: rows of a data set as token ids, in an order that the seed decides.

`read_samples` tokenizes all rows at the start, so that bad and overlong ones are known before the first step.
`SampleOrder` says which samples a step learns; `make_batch` turns them into the batch that the learner trains on, in
which every learned token has advantage 1 and temperature 1, so that the loss is the mean of -log p. Files and chats
are read by the environments' `tasks.records` and `tasks.chat_dataset`.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from atropos_api.common.cliconfig import ConfigError
from environments.tasks.chat_dataset import ChatDataset, ChatSample, PromptEmpty
from environments.tasks.data import ShuffledEpochs
from environments.tasks.records import DataUnusable, Split
from example_trainer.data import TrainingBatch
from example_trainer.errors import ModelNotFound
from example_trainer.modeling.micro_batches import Row
from example_trainer.objective.losses import Targets

if TYPE_CHECKING:
    from example_trainer.sft.config import SftConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One tokenized row."""

    tokens: NDArray[np.int32]
    """[L] token ids."""
    targets: NDArray[np.int32]
    """[N] ascending positions of the learned tokens, each at least 1."""


def load_tokenizer(config: SftConfig) -> Any:
    """Return the model's tokenizer, with the template of `--chat-template` if that is given."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    except Exception as error:  # the library tokenizers raises plain `Exception` for a file that it cannot read
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelNotFound(
            f"--model-name {config.model_name}: it has no tokenizer that can be loaded ({cause})"
        ) from error
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = config.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {config.chat_template}: cannot be read ({error})") from error
    return tokenizer


def read_samples(source: str, split: Split, tokenizer: Any, config: SftConfig) -> list[Sample]:
    """Return all rows of `source` as token ids; raise `DataUnusable` for a bad row, or if nothing can be learned."""
    dataset = ChatDataset(
        source,
        tokenizer,
        split=split,
        # A text column that is named comes before any prompt.
        prompt_column=config.prompt_column
        or (config.text_column if "text_column" in config.model_fields_set else None),
        prompt_form=config.prompt_form,
        system_prompt=config.system_prompt,
        turns=config.turns,
        text_column=config.text_column,
    )
    kept: list[Sample] = []
    left_out: Counter[str] = Counter()
    ends = False
    for index in range(len(dataset)):
        try:
            row = dataset[index]
        except PromptEmpty:
            left_out["empty"] += 1
            continue
        sample = _sample_of(row, config)
        ends = ends or tokenizer.eos_token_id in sample.tokens[sample.targets]
        cause = _why_left_out(row, sample, config)
        if cause is None:
            kept.append(sample)
        else:
            left_out[cause] += 1
    _report(source, left_out, len(dataset), config)
    if not ends:
        logger.warning(
            "%s: no learned token is the tokenizer's end token %s, so a model that learned this will not stop; use a "
            "chat template that ends the assistant's turns with it",
            source,
            tokenizer.eos_token,
        )
    return kept


def _sample_of(row: ChatSample, config: SftConfig) -> Sample:
    tokens = np.asarray(row["token_ids"], dtype=np.int32)
    mask = np.asarray(row["loss_mask"], dtype=np.bool_)
    if not config.assistant_only_loss:
        mask = np.ones_like(mask)
    if config.overlong == "mask":
        tokens, mask = tokens[: config.seq_len], mask[: config.seq_len]
    positions = np.flatnonzero(mask)
    return Sample(tokens, positions[positions > 0].astype(np.int32))  # nothing precedes and predicts the first token


def _why_left_out(row: ChatSample, sample: Sample, config: SftConfig) -> str | None:
    if len(row["token_ids"]) > config.seq_len and config.overlong == "drop":
        return "overlong"
    return None if len(sample.targets) else "no_trained_token"


def _report(source: str, left_out: Counter[str], rows: int, config: SftConfig) -> None:
    """Log which rows are left out and why; raise `DataUnusable` if none is left."""
    wording = {
        "overlong": f"are longer than --seq-len {config.seq_len} tokens (raise it, or add --overlong mask)",
        "no_trained_token": "have no token to learn: no completion and no assistant's turn in the column of the prompt "
        "(--prompt-column names another)",
        "empty": "have an empty prompt",
    }
    causes = ", ".join(f"{count} {wording[cause]}" for cause, count in left_out.most_common())
    if left_out.total() == rows:
        raise DataUnusable(f"{source}: nothing of its {rows} rows can be learned: {causes}")
    if causes:
        logger.warning("%s: of %d rows %s; these are left out", source, rows, causes)


def hold_out(samples: Sequence[Sample], share: float) -> tuple[list[Sample], list[Sample]]:
    """Return the samples to learn and those held out; the seed of the order does not change the split."""
    count = min(len(samples) - 1, max(1, round(len(samples) * share)))
    if count < 1:
        raise DataUnusable(f"--eval-split {share}: the data set has one row, too few to hold one out")
    chosen = set(random.Random("held out").sample(range(len(samples)), count))
    kept = [sample for index, sample in enumerate(samples) if index not in chosen]
    return kept, [samples[index] for index in sorted(chosen)]


class SampleOrder:
    """The order in which samples are learned: each once an epoch, in a new order that depends on the seed alone."""

    def __init__(self, samples: Sequence[Sample], *, seed: int, per_step: int, total: int) -> None:
        """Keep the arguments; the last step learns what is left of `total` samples."""
        self._draws = ShuffledEpochs(samples, seed)
        self._per_step = per_step
        self._total = total
        self._rows = len(samples)

    def at(self, step: int) -> list[Sample]:
        """Return the samples of a step, the first of which is 1."""
        first = (step - 1) * self._per_step
        return [self._draws[number] for number in range(first, min(first + self._per_step, self._total))]

    def epoch_after(self, step: int) -> float:
        """Return the number of passes over the data after a step."""
        return min(step * self._per_step, self._total) / self._rows


def make_batch(number: int, samples: Sequence[Sample]) -> TrainingBatch:
    """Return samples as a batch of the learner; they may be none, on a rank that has no share of a small step."""
    counts = [len(sample.targets) for sample in samples]
    firsts = np.cumsum([0, *counts])
    rows = [
        Row(
            tokens=sample.tokens.astype(np.int64),
            targets=sample.targets.astype(np.int64),
            first_target=int(first),
            group=index,
        )
        for index, (sample, first) in enumerate(zip(samples, firsts, strict=False))
    ]
    labels = np.concatenate([row.tokens[row.targets] for row in rows]) if rows else np.zeros(0, dtype=np.int64)
    size = len(labels)
    unknown = torch.full((size,), -1, dtype=torch.long)
    targets = Targets(
        labels=torch.from_numpy(labels),
        rollout_logprobs=torch.zeros(size),
        advantages=torch.ones(size),
        temperatures=torch.ones(size),
        sequences=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
        versions=unknown,
        version_bounds=unknown,
    )
    return TrainingBatch(number=number, rows=rows, targets=targets, rewards=[], advantages=[], response_lengths=counts)
