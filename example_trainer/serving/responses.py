"""The answers of `/generate`: Atropos' form, the compact one, and the events of a stream."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import orjson

Spans = list[list[int | None]]

UNLABELLED = "default"  # what vLLM calls weights that nobody has given a version


def version_spans(output: Any, adapter: Any = None) -> Spans:
    """`[start, end, version]` over the output's tokens: its adapter's, or what the engine stamped on each step."""
    tokens = len(output.token_ids)
    if adapter is not None and output.weight_versions is not None:
        tokens = max((span.end for span in output.weight_versions), default=0)  # a stream's last piece is a part
        return [[0, tokens, adapter.version]] if tokens else []
    if output.weight_versions is None:
        return [[0, tokens, None]] if tokens else []
    return [
        [span.start, span.end, None if span.version == UNLABELLED else int(span.version)]
        for span in output.weight_versions
    ]


def chosen_logprobs(logprobs: Any) -> list[float] | None:
    """The sampled tokens' own logprobs: vLLM lists them first at each position."""
    if logprobs is None:
        return None
    if len(logprobs.logprobs) == len(logprobs.start_indices):
        return list(logprobs.logprobs)
    return [logprobs.logprobs[start] for start in logprobs.start_indices]


def all_logprobs(logprobs: Any) -> list[list[dict[str, float]]] | None:
    """For each position a list of `{token id: logprob}`, the sampled token first, then the other likely ones.

    vLLM mentions a sampled token that is among the most likely a second time, or does not, by how the pieces of a
    stream came together; and it fills up with tokens of the probability 0. Neither is told.
    """
    if logprobs is None:
        return None
    ids, values = logprobs.token_ids, logprobs.logprobs
    if len(values) == len(logprobs.start_indices):
        return [[{str(token): value}] for token, value in zip(ids, values, strict=True)]
    told = []
    for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True):
        sampled = ids[start]
        others = [
            {str(ids[i]): values[i]} for i in range(start + 1, end) if ids[i] != sampled and values[i] > -math.inf
        ]
        told.append([{str(sampled): values[start]}, *others])
    return told


def all_finite(outputs: Iterable[Any]) -> bool:
    """Whether every sampled token had a probability: where nothing is left to sample vLLM still takes token 0."""
    sums = (output.cumulative_logprob for output in outputs)
    return all(total is None or math.isfinite(total) for total in sums)


def prompt_logprobs(logprobs: Any) -> list[dict[str, float] | None]:
    """For each position of the prompt `{token id: logprob}`, its own token first; null where nothing comes before."""
    ids, values = logprobs.token_ids, logprobs.logprobs
    return [
        {str(ids[i]): values[i] for i in range(start, end)} if end > start else None
        for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    ]


class Replies:
    """Builds answers.

    `exact` says whether each token was computed under its version alone; it is None, and left out, where that goes
    without saying because no publish has let running requests keep what they had computed.
    """

    def __init__(self, *, boot_id: str, tokenizer: Any) -> None:
        self._boot_id = boot_id
        self._tokenizer = tokenizer

    def whole(
        self, request: Any, prompt_token_ids: list[int], final: Any, exact: bool | None, adapter: Any = None
    ) -> bytes:
        """The answer to a request that does not stream."""
        outputs = final.outputs
        spans = [version_spans(output, adapter) for output in outputs]
        answer: dict[str, Any] = {
            "token_ids": [list(output.token_ids) for output in outputs],
            "finish_reasons": [output.finish_reason for output in outputs],
            "policy_versions": spans,
            "boot_id": self._boot_id,
            **self.of_prompt(request, prompt_token_ids, final),
        }
        read = chosen_logprobs if request.compact else all_logprobs
        answer["logprobs"] = (
            [read(output.logprobs) for output in outputs] if request.logprob_count is not None else None
        )
        if request.wants_text:
            answer["text"] = [self.text(request, output) for output in outputs]
        if not request.compact:
            answer["prompt"] = (
                request.prompt if isinstance(request.prompt, str) else self._tokenizer.decode(prompt_token_ids)
            )
        if exact is not None:
            answer["exact_versions"] = exact
        return orjson.dumps(answer)

    def of_prompt(self, request: Any, prompt_token_ids: list[int], told: Any) -> dict[str, Any]:
        """What an answer, or the first event of a stream, says of the prompt."""
        said: dict[str, Any] = {"prompt_token_ids": prompt_token_ids}
        if request.prompt_logprobs is not None:
            said["prompt_logprobs"] = prompt_logprobs(told.prompt_logprobs)
        return said

    def event(
        self, request: Any, output: Any, exact: bool | None, adapter: Any = None, head: dict[str, Any] | None = None
    ) -> bytes:
        """One event of a stream: what is new in one output, and at its end why and under which versions."""
        read = chosen_logprobs if request.compact else all_logprobs
        body: dict[str, Any] = {"index": output.index, "token_ids": list(output.token_ids), **(head or {})}
        if request.wants_text:
            body["text"] = output.text
        if request.logprob_count is not None:
            body["logprobs"] = read(output.logprobs)
        if output.finish_reason is not None:
            body["finish_reason"] = output.finish_reason
            body["policy_versions"] = version_spans(output, adapter)
            if exact is not None:
                body["exact_versions"] = exact
            body["boot_id"] = self._boot_id
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def text(self, request: Any, output: Any) -> str:
        """VLLM's text where it made one (stop strings are cut off there), else the tokens decoded at once."""
        if request.detokenized_by_engine or self._tokenizer is None:
            return str(output.text)
        tokens = list(output.token_ids)
        if output.finish_reason == "stop" and not request.include_stop_str_in_output:
            del tokens[-1:]  # the token that ended it is no more part of the text than a stop string
        return str(self._tokenizer.decode(tokens, skip_special_tokens=request.skip_special_tokens))
