"""A tiny model with tokenizer and chat template, chats to learn, and a function that runs `atropos-sft` on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

Rows = Sequence[Mapping[str, Any]]


def chat(question: str, *turns: str) -> dict[str, Any]:
    roles = ["assistant", "user"]
    messages = [{"role": roles[at % 2], "content": turn} for at, turn in enumerate(turns)]
    return {"messages": [{"role": "user", "content": question}, *messages]}


CHATS = [chat(f"{a} + {b}", str(a + b)) for a in range(5) for b in range(4)]


def write_rows(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def sft(chat_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Run `atropos-sft` with the given flags on `rows` and return the folder that it wrote."""
    from example_trainer.sft.cli import run

    def start(*argv: str, rows: Rows = CHATS, folder: str = "out", model: Path = chat_model, code: int = 0) -> Path:
        data = write_rows(tmp_path / f"{folder}.jsonl", rows)
        usual = (
            f"--dtype float32 --device cpu --optimizer adamw --lr 1e-2 --batch-size 2 --save-path {tmp_path / folder}"
        )
        named = ["--model-name", str(model), "--dataset", str(data), "--gradient-accumulation-steps", "2"]
        assert run([*named, *usual.split(), *argv]) == code
        return tmp_path / folder

    return start
