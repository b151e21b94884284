"""The library page's programs run, and its collator and rows give the stated tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from environments.sdk.tokenizer import load_tokenizer
from example_trainer import library
from example_trainer.library import ChatDataCollator, ChatDataset, pack_rows, rows_of
from example_trainer.testing import make_tiny_model
from example_trainer.tiny.model import PADDED_VOCABULARY_SIZE
from example_trainer.tiny.tokenizer import make_tokenizer

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "library.md"
CHATS: list[Mapping[str, Any]] = [
    {"messages": [{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": "7"}]},
    {"prompt": "2 + 2", "answer": "4"},
    {"prompt": "What is 20 + 20?", "response": "It is 40."},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), vocabulary=PADDED_VOCABULARY_SIZE)
    make_tokenizer(context_length=128).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dataset(model: Path) -> ChatDataset:
    return ChatDataset(CHATS, load_tokenizer(str(model)))


def test_the_programs_of_the_page_run_one_after_the_other(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict[str, Any] = {"MODEL": str(model)}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
    assert len(blocks) == 3
    momentum = scope["momentum"](
        [{"params": [torch.nn.Parameter(torch.zeros(1))]}], library.OptimizerSettings(name="m", lr=1.0)
    )
    assert momentum.defaults["momentum"] == 0.9


def test_every_public_name_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    kinds = {"ChatBatch", "ChatSample"}
    assert [name for name in library.__all__ if name not in page and name not in kinds] == []


def test_prompts_are_padded_left_and_chats_right_with_labels_only_where_the_assistant_speaks(
    dataset: ChatDataset,
) -> None:
    batch = ChatDataCollator(pad_token_id=0, multiple_of=4)([dataset[index] for index in range(3)])
    assert batch["prompt_ids"].shape[1] % 4 == batch["input_ids"].shape[1] % 4 == 0
    assert batch["ground_truth"] == ["7", "4", "It is 40."]
    for index, sample in enumerate(dataset):
        prompt, tokens = sample["prompt_token_ids"], sample["token_ids"]
        assert batch["prompt_ids"][index, -len(prompt) :].tolist() == prompt
        assert batch["prompt_mask"][index].tolist() == [0] * (batch["prompt_ids"].shape[1] - len(prompt)) + [1] * len(
            prompt
        )
        assert batch["input_ids"][index, : len(tokens)].tolist() == tokens
        assert int(batch["attention_mask"][index].sum()) == len(tokens)
        learned = [token for token, trained in zip(tokens, sample["loss_mask"], strict=True) if trained]
        labels = batch["labels"][index]
        assert labels[labels != -100].tolist() == learned
        assert bool((labels == -100).all()) == (index == 1), "a reference alone is not learned"


def test_packed_rows_predict_the_same_tokens_as_the_labels_of_the_padded_batch(dataset: ChatDataset) -> None:
    samples = list(dataset)
    rows = rows_of(samples)
    assert [row.group for row in rows] == [0, 2]
    batch = ChatDataCollator(pad_token_id=0)(samples)
    labels = batch["labels"][batch["labels"] != -100]
    (packed,) = pack_rows(rows, 1000, device=torch.device("cpu"))
    trained = torch.cat([torch.from_numpy(row.tokens[row.targets]) for row in rows])
    assert trained.tolist() == labels.tolist()
    assert packed.hidden_index.shape == packed.target_index.shape == labels.shape
    assert packed.tokens.numel() == sum(row.forward_length for row in rows), "nothing is padded"
