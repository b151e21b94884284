"""The answers of `/generate`: Atropos' format, the compact format, and the events of a stream."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import orjson

Spans = list[list[int | None]]

UNLABELLED = "default"  # vLLM's name for weights without a version


def version_spans(output: Any, adapter: Any = None) -> Spans:
    """Return `[start, end, version]` spans over the output's tokens: the adapter's version, or the engine's stamps."""
    tokens = len(output.token_ids)
    if adapter is not None and output.weight_versions is not None:
        tokens = max((span.end for span in output.weight_versions), default=0)  # a stream's last chunk is not all
        return [[0, tokens, adapter.version]] if tokens else []
    if output.weight_versions is None:
        return [[0, tokens, None]] if tokens else []
    return [
        [span.start, span.end, None if span.version == UNLABELLED else int(span.version)]
        for span in output.weight_versions
    ]


def chosen_logprobs(logprobs: Any) -> list[float] | None:
    """Return the sampled tokens' own logprobs, which vLLM lists first at each position."""
    if logprobs is None:
        return None
    if len(logprobs.logprobs) == len(logprobs.start_indices):
        return list(logprobs.logprobs)
    return [logprobs.logprobs[start] for start in logprobs.start_indices]


def all_logprobs(logprobs: Any, *, sampled_alone: bool = False) -> list[list[dict[str, float]]] | None:
    """Return for each position a list of `{token id: logprob}`, the sampled token first, then the other likely ones.

    If the sampled token is among the most likely, vLLM may list it a second time, depending on how the pieces of a
    stream were joined; and it pads with tokens of probability 0. Neither is returned.
    """
    if logprobs is None:
        return None
    ids, values = logprobs.token_ids, logprobs.logprobs
    if sampled_alone or len(values) == len(logprobs.start_indices):
        return [[{str(ids[start]): values[start]}] for start in logprobs.start_indices]
    listed = []
    for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True):
        sampled = ids[start]
        others = [
            {str(ids[i]): values[i]} for i in range(start + 1, end) if ids[i] != sampled and values[i] > -math.inf
        ]
        listed.append([{str(sampled): values[start]}, *others])
    return listed


def sampling_masks(logprobs: Any, limit: int) -> list[list[int]]:
    """Return for each position the tokens that the draw could choose from; none if they are more than `limit`.

    They are those with a probability after temperature and truncation. The engine was asked for one more alternative
    than `limit`, so what it left out of a row of at most `limit` tokens had none.
    """
    ids, values = logprobs.token_ids, logprobs.logprobs
    masks: list[list[int]] = []
    for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True):
        if end - start > limit + 1 and values[end - 1] > -math.inf:  # too wide, as most rows without truncation are
            masks.append([])
            continue
        kept = dict.fromkeys(ids[i] for i in range(start, end) if values[i] > -math.inf)
        masks.append(list(kept) if len(kept) <= limit else [])
    return masks


def all_finite(outputs: Iterable[Any]) -> bool:
    """Return True if every sampled token had a probability: if no token can be sampled, vLLM still takes token 0."""
    sums = (output.cumulative_logprob for output in outputs)
    return all(total is None or math.isfinite(total) for total in sums)


def prompt_logprobs(logprobs: Any) -> list[dict[str, float] | None]:
    """Return `{token id: logprob}` for each prompt position, its own token first; None if no token precedes it."""
    ids, values = logprobs.token_ids, logprobs.logprobs
    return [
        {str(ids[i]): values[i] for i in range(start, end)} if end > start else None
        for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    ]


def _logprobs_for(request: Any, output: Any) -> Any:
    """Return an output's logprobs in the form that was asked for."""
    if request.compact:
        return chosen_logprobs(output.logprobs)
    return all_logprobs(output.logprobs, sampled_alone=not request.logprob_count)


class Replies:
    """Builds answers.

    `exact` is True if each token was computed under its version alone. It is None, and omitted, until some publish has
    kept the KV cache of running requests: before that every answer is exact.
    """

    def __init__(self, *, boot_id: str, tokenizer: Any) -> None:
        self._boot_id = boot_id
        self._tokenizer = tokenizer

    def whole(
        self, request: Any, prompt_token_ids: list[int], final: Any, exact: bool | None, adapter: Any = None
    ) -> bytes:
        """Return the answer to a request that does not stream."""
        outputs = final.outputs
        spans = [version_spans(output, adapter) for output in outputs]
        answer: dict[str, Any] = {
            "token_ids": [list(output.token_ids) for output in outputs],
            "finish_reasons": [output.finish_reason for output in outputs],
            "policy_versions": spans,
            "boot_id": self._boot_id,
            **self.of_prompt(request, prompt_token_ids, final),
        }
        answer["logprobs"] = (
            [_logprobs_for(request, output) for output in outputs] if request.logprob_count is not None else None
        )
        if limit := request.sampling_mask_limit:
            answer["sampling_masks"] = [sampling_masks(output.logprobs, limit) for output in outputs]
        if request.wants_text:
            answer["text"] = [self.text(request, output) for output in outputs]
        if not request.compact:
            answer["prompt"] = self._prompt_text(request.prompt, prompt_token_ids)
        if exact is not None:
            answer["exact_versions"] = exact
        return orjson.dumps(answer)

    def of_prompt(self, request: Any, prompt_token_ids: list[int], output: Any) -> dict[str, Any]:
        """Return the fields about the prompt in an answer, or in the first event of a stream."""
        fields: dict[str, Any] = {"prompt_token_ids": prompt_token_ids}
        if request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return fields

    def event(
        self, request: Any, output: Any, exact: bool | None, adapter: Any = None, head: dict[str, Any] | None = None
    ) -> bytes:
        """Return one event of a stream: the new tokens of one output, and at its end the finish reason and versions."""
        body: dict[str, Any] = {"index": output.index, "token_ids": list(output.token_ids), **(head or {})}
        if request.wants_text:
            body["text"] = output.text
        if request.logprob_count is not None:
            body["logprobs"] = _logprobs_for(request, output)
        if limit := request.sampling_mask_limit:
            body["sampling_masks"] = sampling_masks(output.logprobs, limit)
        if output.finish_reason is not None:
            body["finish_reason"] = output.finish_reason
            body["policy_versions"] = version_spans(output, adapter)
            if exact is not None:
                body["exact_versions"] = exact
            body["boot_id"] = self._boot_id
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def _prompt_text(self, prompt: Any, prompt_token_ids: list[int]) -> str | None:
        """Return the prompt as text; None if it came as tokens and the server has no tokenizer."""
        if isinstance(prompt, str):
            return prompt
        return None if self._tokenizer is None else str(self._tokenizer.decode(prompt_token_ids))

    def text(self, request: Any, output: Any) -> str:
        """Return vLLM's text if it made one (stop strings are cut off there), else the tokens decoded at once."""
        if request.detokenized_by_engine or self._tokenizer is None:
            return str(output.text)
        tokens = list(output.token_ids)
        if output.finish_reason == "stop" and not request.include_stop_str_in_output:
            del tokens[-1:]  # the stop token is not part of the text, just as a stop string is not
        return str(self._tokenizer.decode(tokens, skip_special_tokens=request.skip_special_tokens))
