"""What `/generate` accepts: the request's form, and how it becomes vLLM's sampling parameters."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from atropos_api.common.cliconfig import nearest
from example_trainer.serving.problems import Problem

_LARGEST_BIAS = 100
_LARGEST_SEED = 2**64 - 1
_INTEGERS = ("n", "max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs")
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[^`]*)`(?: - at `(?P<where>[^`]*)`)?")


class TokenPrompt(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt that is tokens already, so that nothing is tokenised a second time."""

    prompt_token_ids: list[int]


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /generate`; sampling fields have vLLM's names, meanings and defaults."""

    prompt: str | list[int] | TokenPrompt
    stream: bool = False
    compact: bool = False
    model: str | None = None
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: bool | int | None = 0
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @property
    def wants_text(self) -> bool:
        """The compact form carries text only when asked."""
        return self.detokenize if self.detokenize is not None else not self.compact

    @property
    def detokenized_by_engine(self) -> bool:
        """Text is made token by token only where stop strings or a stream need it."""
        return bool(self.stop) or (self.stream and self.wants_text)

    @property
    def limits_sampling(self) -> bool:
        """Whether it forbids tokens, and so may leave none to sample."""
        return bool(self.allowed_token_ids or self.bad_words or self.logit_bias or self.min_tokens) or (
            self.repetition_penalty != 1
        )

    @property
    def logprob_count(self) -> int | None:
        """`true` means the sampled token's own, as 0 does; `false` none, as null does."""
        if isinstance(self.logprobs, bool):
            return 0 if self.logprobs else None
        return self.logprobs


_OUR_FIELDS = frozenset({"prompt", "stream", "compact", "model", "logprobs", "detokenize"})
_SAMPLING_FIELDS = tuple(name for name in GenerateRequest.__struct_fields__ if name not in _OUR_FIELDS)


class RequestParser:
    """Reads bodies of `/generate`; mistakes are answered with 422, the field and the value."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(GenerateRequest)

    def parse(self, body: bytes) -> GenerateRequest:
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise Problem(422, "bad-request", _explain(str(error))) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Problem(400, "bad-json", f"the body is not JSON: {error}") from None


def sampling_params(request: GenerateRequest) -> Any:
    """VLLM's sampling parameters."""
    _check_bias(request.logit_bias)
    _check_integers(request)
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    fields = {name: getattr(request, name) for name in _SAMPLING_FIELDS}
    try:
        return SamplingParams(
            **fields,
            logprobs=request.logprob_count,
            flat_logprobs=True,
            detokenize=request.detokenized_by_engine,
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
    except (TypeError, ValueError, VLLMClientError) as error:
        raise Problem(422, "bad-request", " ".join(str(error).split())) from error


def _check_bias(logit_bias: dict[int, float] | None) -> None:
    """Beyond OpenAI's limits a logit may overflow, and the logprobs with it."""
    for token, bias in (logit_bias or {}).items():
        if abs(bias) > _LARGEST_BIAS:
            limits = f"between -{_LARGEST_BIAS} and {_LARGEST_BIAS}"
            raise Problem(422, "bad-request", f"logit_bias: {bias} for token {token} is not {limits}")


def _check_integers(request: GenerateRequest) -> None:
    """Nothing beyond 64 bits can be passed to the engine, and a seed of -1 would mean none to vLLM."""
    for name in _INTEGERS:
        value = getattr(request, name)
        if value is not None and not -(2**63) <= value < 2**63:
            raise Problem(422, "bad-request", f"{name}: {value} has more than 64 bits")
    seed = request.seed
    if seed is not None and not 0 <= seed <= _LARGEST_SEED - max(0, request.n - 1):
        limit = f"{_LARGEST_SEED}" if request.n <= 1 else f"{_LARGEST_SEED} less the other {request.n - 1} outputs"
        raise Problem(422, "bad-request", f"seed: {seed} is not between 0 and {limit}")


def _explain(message: str) -> str:
    found = _UNKNOWN_FIELD.search(message)
    if found is None:
        return message.replace(" - at `$.", " at `")
    known = TokenPrompt.__struct_fields__ if found["where"] == "$.prompt" else GenerateRequest.__struct_fields__
    return f"unknown field {found['name']!r}{nearest(found['name'], known)}"
