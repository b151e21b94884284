"""Requests of OpenAI's API as sessions read them: every field is accepted or refused, and none is silently ignored.

The code and the reference page of sessions both follow the tables below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from atropos_api.common.cliconfig import nearest
from environments.sdk.errors import RequestRefused
from environments.sdk.inference.sampling import TRUNCATING

Route = Literal["chat", "text"]

MOST_CHOICES = 1024
TEMPLATE_VARIABLES = ("reasoning_effort",)
LABELS = ("user", "safety_identifier", "metadata")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A supported field: what it means in a session, and which values it may have."""

    name: str
    meaning: str
    wanted: str
    valid: Callable[[Any], bool]
    routes: tuple[Route, ...] = ("chat", "text")


@dataclass(frozen=True, slots=True)
class Refused:
    """An unsupported field: only the values in `neutral`, which ask for nothing, and null are accepted."""

    reason: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """A parsed request: the session's arguments, and how the client wants its answer."""

    arguments: dict[str, Any]
    stream: bool = False
    include_usage: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Fields that have an effect only if the chat template reads a variable of that name."""
    labels: Mapping[str, Any] = field(default_factory=dict)


def _is_int(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (_is_ids(value) and bool(value))


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_int(0, 1 << 31)(token) for token in value)


def _is_tools(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(tool, dict)
        and tool.get("type") == "function"
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in value
    )


def _is_stream_options(value: Any) -> bool:
    known = {"include_usage", "include_obfuscation"}
    return isinstance(value, dict) and set(value) <= known and not value.get("include_obfuscation")


_64_BITS = (-(1 << 63), (1 << 63) - 1)
_WHOLE = "a whole number of 1 or more"
_FLAG = "true or false"
CHAT: tuple[Route, ...] = ("chat",)
TEXT: tuple[Route, ...] = ("text",)

SUPPORTED: tuple[Parameter, ...] = (
    Parameter("messages", "the chat; content is text or a list of text parts", "a list of messages", _is(list), CHAT),
    Parameter("prompt", "a text, or the ids of its tokens", "a text or a list of token ids", _is_prompt, TEXT),
    Parameter("model", "any name: a session has one model, which the answer names", "a name", _is(str)),
    Parameter(
        "n", "number of answers, each a sequence", f"a whole number from 1 to {MOST_CHOICES}", _is_int(1, MOST_CHOICES)
    ),
    Parameter("max_tokens", "most tokens to sample", _WHOLE, _is_int(1, 1 << 31)),
    Parameter("max_completion_tokens", "the same, under its newer name", _WHOLE, _is_int(1, 1 << 31), CHAT),
    Parameter("temperature", "above 0 in training, see below", "a number from 0 to 100", _is_number(0, 100)),
    Parameter("stop", "texts that end the answer", "a text that is not empty, or a list of such", _is_stop),
    Parameter("stop_token_ids", "tokens that end it", "a list of token ids", _is_ids),
    Parameter("include_stop_str_in_output", "keep the stop text in the answer", _FLAG, _is(bool)),
    Parameter("ignore_eos", "continue after the end token", _FLAG, _is(bool)),
    Parameter("seed", "repeats the tokens under the same weights", "a whole number of 64 bits", _is_int(*_64_BITS)),
    Parameter(
        "logprobs",
        "true: logprobs of the sampled tokens",
        f"{_FLAG}: a session keeps no other logprobs",
        _is(bool),
        CHAT,
    ),
    Parameter(
        "logprobs", "0: logprobs of the sampled tokens", "0: a session keeps no other logprobs", _is_int(0, 0), TEXT
    ),
    Parameter(
        "tools", "passed to the chat template; `--env.tool_parser` parses calls", "function tools", _is_tools, CHAT
    ),
    Parameter(
        "tool_choice",
        "auto, or none: calls stay in the text",
        "auto or none: a call can only be forced by constrained sampling, which changes what is trained",
        lambda value: value in ("auto", "none"),
        CHAT,
    ),
    Parameter("parallel_tool_calls", "false: only the first call is returned", _FLAG, _is(bool), CHAT),
    Parameter("reasoning_effort", "passed to a chat template that has this variable", "a text", _is(str), CHAT),
    Parameter("chat_template_kwargs", "variables of the chat template", "an object", _is(dict), CHAT),
    Parameter("stream", "send the answer piece by piece", _FLAG, _is(bool)),
    Parameter("stream_options", "`include_usage`", "an object with include_usage", _is_stream_options),
    Parameter("user", "kept with the sequence: `node.metadata['labels']`", "a text", _is(str)),
    Parameter("safety_identifier", "the same", "a text", _is(str), CHAT),
    Parameter("metadata", "the same", "an object", _is(dict), CHAT),
    Parameter("prompt_cache_key", "a session stays with one server in any case", "a text", _is(str), CHAT),
)

REFUSED: Mapping[str, Refused] = {
    "top_logprobs": Refused("a session keeps only the logprob of the sampled token", (0,)),
    "echo": Refused("the prompt is not repeated", (False,)),
    "best_of": Refused("every sample is returned", (1,)),
    "suffix": Refused("a session does not insert text", ("",)),
    "store": Refused("no answer is stored", (False,)),
    "service_tier": Refused("a session has one tier", ("auto", "default")),
    "verbosity": Refused("the model has no such setting", ("medium",)),
    "modalities": Refused("a session returns text", (["text"],)),
    "audio": Refused("a session returns text"),
    "prediction": Refused("a session uses no predicted output"),
    "web_search_options": Refused("a session has no web search"),
    "functions": Refused("use tools"),
    "function_call": Refused("use tool_choice"),
}

FIELDS: Mapping[Route, Mapping[str, Parameter]] = {
    route: {parameter.name: parameter for parameter in SUPPORTED if route in parameter.routes}
    for route in (*CHAT, *TEXT)
}

CHECKED_ONLY = frozenset(REFUSED) | {"model", "prompt_cache_key"}
"""Fields that are only checked and then need no action."""


def read_request(route: Route, body: Mapping[str, Any]) -> SessionRequest:
    """Parse a request for a session; an unknown, malformed or refused field raises an error that names it."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        _check(route, name, value)
    required = "messages" if route == "chat" else "prompt"
    if required not in given:
        raise RequestRefused(f"{required} is missing", param=required)
    if route == "text":
        given = _read_text_fields(given)
    if "stream_options" in given and not given.get("stream"):
        raise RequestRefused("stream_options need a stream; set stream to true", param="stream_options")
    variables = {name: given.pop(name) for name in TEMPLATE_VARIABLES if name in given}
    more = given.pop("stream_options", {})
    labels = {name: given.pop(name) for name in LABELS if name in given}
    stream = given.pop("stream", False)
    return SessionRequest(
        arguments={name: value for name, value in given.items() if name not in CHECKED_ONLY},
        stream=stream,
        include_usage=bool(more.get("include_usage")),
        template_variables=variables,
        labels=labels,
    )


def _check(route: Route, name: str, value: Any) -> None:
    parameter = FIELDS[route].get(name)
    if parameter is not None:
        if not parameter.valid(value):
            raise RequestRefused(f"{name} must be {parameter.wanted}; got {value!r:.80}", param=name)
    elif name in REFUSED:
        _refuse_unless_neutral(name, value, REFUSED[name])
    elif name not in TRUNCATING:  # `Sampling` refuses those that may not be trained on
        raise RequestRefused(f"unknown field {name!r}{nearest(name, [*FIELDS[route], *TRUNCATING])}", param=name)


def _refuse_unless_neutral(name: str, value: Any, rule: Refused) -> None:
    if not any(type(value) is type(neutral) and value == neutral for neutral in rule.neutral):
        raise RequestRefused(f"{name} {value!r:.80} is not supported: {rule.reason}; leave it out", param=name)


def _read_text_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with a prompt of tokens as `input_ids`, and `logprobs` as on the chat route."""
    fields = {name: value for name, value in given.items() if name not in {"prompt", "logprobs"}}
    fields["prompt" if isinstance(given["prompt"], str) else "input_ids"] = given["prompt"]
    return {**fields, "logprobs": True} if "logprobs" in given else fields
