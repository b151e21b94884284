"""The tiny model's tokenizer: a byte-level BPE trained on generated problems, with Qwen2's splitting rule.

A model folder whose `config.json` says qwen2 makes `AutoTokenizer` rebuild the tokenizer as Qwen2 would have it,
whatever the folder says. So this one is built exactly that way (normaliser, splitting rule, byte alphabet, no token of
its own for the unknown), and every loader sees the same ids.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from environments.tasks.arithmetic import TASK_NAMES, problem_stream

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL_TOKENS = (PAD, END, USER, ASSISTANT, SYSTEM)
VOCABULARY_SIZE = 370
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRAINING_TEXTS = 3000
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def render_prompt(question: str) -> str:
    """Return the text that the chat template gives for one user message and a generation prompt."""
    return f"{USER}{question}{END}{ASSISTANT}"


def make_tokenizer(*, context_length: int) -> PreTrainedTokenizerFast:
    """Return the trained tokenizer in transformers' form."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(),
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        model_max_length=context_length,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(folder: Path) -> Tokenizer:
    """Train the tokenizer and write it into `folder` as a model's files hold it, without loading transformers."""
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD, "unk_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tokenizer


def train_tokenizer() -> Tokenizer:
    """Train the tokenizer; it is the same on every machine, because the stream of problems is fixed."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(), trainer)
    return tokenizer


def _training_texts() -> list[str]:
    each = TRAINING_TEXTS // len(TASK_NAMES)
    problems = (problem for task in TASK_NAMES for problem in islice(problem_stream(task, seed="tokenizer"), each))
    return [f"{problem.question}\n{problem.worked}" for problem in problems]
