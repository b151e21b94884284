"""Fakes for tests: inference servers with the protocols of SGLang, TRL and OpenAI, and small chat tokenizers.

Like `FakeInference` the servers answer with a function from prompt to tokens, and `problem` makes them refuse. The
tokenizers have the bytes as their vocabulary and small chat templates of the families that models use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from environments.sdk.testing import Receive, Responder, Scope, Send, logprob_of, read_body, send_json, write_tokenizer
from environments.sdk.tokenizer import FastTokenizer


@dataclass(slots=True, kw_only=True)
class FakeProvider:
    """Base class of the fake servers: an ASGI application that records its requests with their paths."""

    problem: tuple[int, str] | None = None
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = await read_body(receive)
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        self.requests.append((scope["path"], msgspec.json.decode(body) if body else {}))
        if self.problem is not None:
            await send_json(send, self.problem[0], {"error": {"message": self.problem[1]}})
            return
        found = self.answer(*self.requests[-1])
        await send_json(send, *((404, {"detail": scope["path"]}) if found is None else (200, found)))

    def answer(self, path: str, request: dict[str, Any]) -> Any:
        """Return the body of the answer; None if there is no such route."""
        raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class FakeSglang(FakeProvider):
    """A fake of SGLang's `/generate`: it returns an object for one sample, a list for several."""

    respond: Responder
    end: int
    weight_version: str = "default"

    def answer(self, path: str, request: dict[str, Any]) -> Any:
        if path != "/generate":
            return None
        parameters = request["sampling_params"]
        outputs = [self._output(request, index) for index in range(parameters.get("n", 1))]
        return outputs[0] if len(outputs) == 1 else outputs

    def _output(self, request: dict[str, Any], index: int) -> dict[str, Any]:
        prompt, limit = request["input_ids"], request["sampling_params"].get("max_new_tokens", 128)
        tokens = self.respond(prompt, index)[:limit]
        finish: dict[str, Any] = {"type": "length", "length": limit}
        if tokens[-1:] == [self.end]:
            finish = {"type": "stop", "matched": self.end}
        info: dict[str, Any] = {"finish_reason": finish, "weight_version": self.weight_version, "id": "x"}
        if request.get("return_logprob"):
            info["output_token_logprobs"] = [[logprob_of(token, i), token, None] for i, token in enumerate(tokens)]
        if request.get("logprob_start_len") == 0:
            known = [[logprob_of(token, i) if i else None, token, None] for i, token in enumerate(prompt)]
            info["input_token_logprobs"] = known
            best = request.get("top_logprobs_num", 0)
            info["input_top_logprobs"] = [None, *([[-0.1 * (k + 1), k, None] for k in range(best)] for _ in prompt[1:])]
        return {"text": "", "output_ids": tokens, "meta_info": info}


@dataclass(slots=True, kw_only=True)
class FakeTrl(FakeProvider):
    """A fake of TRL's `/generate/`: texts in, ids out; `returns_logprobs` adds `prompt_ids` and `logprobs`, as newer
    releases do.
    """

    respond: Responder
    encode: Callable[[str], list[int]]
    returns_logprobs: bool = False

    def answer(self, path: str, request: dict[str, Any]) -> Any:
        if not path.endswith("/generate/"):
            return None
        (prompt,) = request["prompts"]
        ids = self.encode(prompt)
        outputs = [self.respond(ids, index)[: request["max_tokens"]] for index in range(request["n"])]
        reply: dict[str, Any] = {"completion_ids": outputs}
        if self.returns_logprobs:
            reply["prompt_ids"] = [ids]
            reply["logprobs"] = [[logprob_of(token, i) for i, token in enumerate(tokens)] for tokens in outputs]
        return reply


@dataclass(slots=True, kw_only=True)
class FakeOpenAI(FakeProvider):
    """A fake provider of chat and text completions: with `ignores_n` it returns one choice whatever `n` is."""

    replies: Sequence[str] = ("Hello.",)
    ignores_n: bool = False
    most_n: int = 128
    sent_count: int = 0

    def answer(self, path: str, request: dict[str, Any]) -> Any:
        count = 1 if self.ignores_n else int(request.get("n") or 1)
        if count > self.most_n:
            raise ValueError(f"n is {count}; it must be at most {self.most_n}")
        if path.endswith("/chat/completions"):
            return self._completion(count, lambda text: {"message": {"role": "assistant", "content": text}})
        if path.endswith("/completions"):
            return self._completion(count, lambda text: {"text": text})
        return None

    def _completion(self, count: int, choice_of: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        texts = [self.replies[(self.sent_count + index) % len(self.replies)] for index in range(count)]
        self.sent_count += count
        choices = [{"index": i, "finish_reason": "stop", **choice_of(text)} for i, text in enumerate(texts)]
        usage = {"prompt_tokens": 3, "completion_tokens": 2 * count, "total_tokens": 3 + 2 * count}
        return {"id": "x", "object": "chat.completion", "model": "fake", "choices": choices, "usage": usage}


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Begins with a bos token and trims each message's content.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|header|>\n\n{{ m.content | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|header|>\n\n{% endif %}"
)

# Drops the thoughts of all answers before the last user message; writes tool calls and results in its own tags.
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
    """Write a tokenizer of all bytes, a few merged pairs and the special tokens, with a family's chat template; return
    it.
    """
    config = {"eos_token": "<|im_end|>", "bos_token": "<|bos|>"}
    write_tokenizer(folder, config, TEMPLATES[family], special=SPECIAL, merges=MERGES)
    return FastTokenizer(folder)
