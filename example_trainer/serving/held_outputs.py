"""Tokens of a request that is answered only at its end are sent to the API process at its end, not one by one.

vLLM sends each token of each request in every step and unpacks it on the other side, which on cores shared with the
decoding costs as much as a good part of the decoding. Where nobody looks at a token before the last one, the engine
core keeps them and sends all in one piece. A pause sends what is kept, because a message has one weight version.

vLLM's logprob rows are as wide as the widest request of a step wants them, so one request's rows change their width
with its neighbours. Each is cut to what its own request asked for before it is kept; rows of two widths cannot be
joined, and an exception here ends the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Held:
    """What has been sampled for one request since anything was sent: its outputs in order.

    `columns` is the width of its own logprob rows, None where it asked for none.
    """

    client_index: int
    columns: int | None
    outputs: list[Any] = field(default_factory=list)

    def add(self, output: Any) -> None:
        if self.columns is not None and output.new_logprobs is not None:
            output.new_logprobs = fit_columns(output.new_logprobs, self.columns)
        self.outputs.append(output)


class HeldOutputs:
    """The held outputs of one scheduler's requests."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def pass_on(self, scheduler: Any, outputs: list[Any]) -> list[Any]:
        """Of a step's outputs, those to be sent now, each with what had been kept of its request."""
        return [sent for output in outputs if (sent := self._hold_or_merge(scheduler, output)) is not None]

    def forget(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def take_all(self) -> dict[int, list[Any]]:
        """Everything kept, by client, merged; nothing is kept after that."""
        taken: dict[int, list[Any]] = {}
        for held in self._held.values():
            taken.setdefault(held.client_index, []).append(merge(held.outputs))
        self._held.clear()
        return taken

    def _hold_or_merge(self, scheduler: Any, output: Any) -> Any:
        held = self._held.get(output.request_id)
        if output.finish_reason is not None:
            if held is None:
                return output
            del self._held[output.request_id]
            held.add(output)
            return merge(held.outputs)
        if held is None:
            request = scheduler.requests.get(output.request_id)
            if request is None or not (is_plain(output) and may_wait(request.sampling_params)):
                return output
            columns = logprob_columns(request.sampling_params)
            held = self._held[output.request_id] = Held(request.client_index, columns)
        held.add(output)
        return None


def may_wait(params: Any) -> bool:
    """Whether nobody looks at this request's tokens before the last: no stream, no text to search for stop strings."""
    from vllm.sampling_params import RequestOutputKind

    return params is not None and not params.detokenize and params.output_kind == RequestOutputKind.FINAL_ONLY


def logprob_columns(params: Any) -> int | None:
    """The sampled token's own logprob and as many alternatives as were asked for; -1 asks for the whole vocabulary."""
    asked = params.num_logprobs
    return None if asked is None or asked < 0 else asked + 1


def fit_columns(logprobs: Any, columns: int) -> Any:
    """`logprobs` with rows of just that width; alternatives that a row lacks have the probability 0."""
    import numpy as np

    tokens, values = logprobs[0], logprobs[1]
    width = tokens.shape[1]
    if width == columns:
        return logprobs
    if width > columns:
        tokens, values = tokens[:, :columns], values[:, :columns]
    else:
        missing = ((0, 0), (0, columns - width))
        tokens, values = np.pad(tokens, missing), np.pad(values, missing, constant_values=-np.inf)
    return type(logprobs)(tokens, values, *logprobs[2:])


def is_plain(output: Any) -> bool:
    """Whether an output says no more than `merge` can join."""
    return output.new_sampling_mask is None and output.routed_experts is None and output.pooling_output is None


def merge(outputs: list[Any]) -> Any:
    """One output that says what these say one after the other."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    parts = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    last.new_logprobs = _join_logprobs(parts) if parts else None
    last.events = [event for output in outputs for event in output.events or ()] or None
    for name in ("prefill_stats", "new_prompt_logprobs_tensors", "prompt_token_id_logprobs"):
        setattr(last, name, next((told for output in outputs if (told := getattr(output, name)) is not None), None))
    return last


def _join_logprobs(parts: list[Any]) -> Any:
    import numpy as np

    kind = type(parts[0])
    return kind(*(np.concatenate([part[column] for part in parts]) for column in range(3)))
