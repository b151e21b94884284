"""Chat tokenizers for tests: small templates of the families that models use, over the bytes as vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

from environments.sdk.tokenizer import FastTokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Begins with a token of its own and trims what it is given.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|header|>\n\n{{ m.content | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|header|>\n\n{% endif %}"
)

# Drops the thoughts of all answers but those after the last question, writes calls and results in tags of its own.
QWEN = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% set content = m.content if m.content is string else '' %}"
    "{% if m.role == 'assistant' %}"
    "{% if '</think>' in content and loop.index0 <= ns.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{{ content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "qwen": QWEN}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|bos|>", "<|start|>", "<|header|>")
MERGES = (("a", "b"), ("ab", "ab"), ("1", "2"), ("l", "l"), ("e", "ll"))


def make_chat_tokenizer(folder: Path, family: str) -> FastTokenizer:
    """A tokenizer of every byte, a few merged pairs and the special tokens, with the template of a family."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *dict.fromkeys("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<|bos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATES[family])
    return FastTokenizer(folder)
