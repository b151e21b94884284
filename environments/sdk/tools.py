"""Tool calls in sampled text: parsers of our own or vLLM's turn texts into calls.

Parsing changes only what a client sees; the sequence that is trained on keeps the text as it was sampled.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from environments.sdk.errors import ToolParserUnknown
from environments.sdk.progress import encodable


class CallObject(Mapping[str, Any]):
    """Base class of call objects: fields are read as attributes, like OpenAI's objects, or by name, like JSON."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        if name not in getattr(self, "__dataclass_fields__", ()):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(getattr(self, "__dataclass_fields__", ()))

    def __len__(self) -> int:
        return len(getattr(self, "__dataclass_fields__", ()))


@dataclass(slots=True)
class FunctionCall(CallObject):
    """A function's name and its arguments: the arguments are JSON text, as in OpenAI's objects."""

    name: str
    arguments: str


@dataclass(slots=True)
class ToolCall(CallObject):
    """One tool call: its result refers to it by `id`."""

    function: FunctionCall
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    type: str = "function"

    def model_dump(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class ParsedText:
    """A parsed text: `content` is the text outside all calls, `calls` the calls in order."""

    content: str
    calls: list[ToolCall]


class ToolParser(Protocol):
    """Interface of a tool parser: it reads tool calls out of a sampled text."""

    def parse(self, text: str) -> ParsedText: ...

    def certain_length(self, text: str) -> int:
        """Return how many characters of an unfinished text are certain to be content, whatever follows."""
        ...


class HermesParser:
    """Parser of `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes and Qwen models write calls so."""

    _opening = "<tool_call>"
    # The pattern has no part for spaces, so its time is linear in the text, even for thousands of line breaks.
    _block = re.compile(r"<tool_call>(?P<body>.*?)(?:</tool_call>|\Z)", re.DOTALL)

    def parse(self, text: str) -> ParsedText:
        calls: list[ToolCall] = []

        def take(block: re.Match[str]) -> str:
            found = read_calls(block["body"].strip())
            calls.extend(found)
            return "" if found else block[0]  # a block that cannot be parsed stays in the text

        content = self._block.sub(take, text)
        return ParsedText(content.rstrip() if calls else text, calls)

    def certain_length(self, text: str) -> int:
        found = text.find(self._opening)
        end = found if found >= 0 else len(text) - overlap(text, self._opening)
        return len(text[:end].rstrip())  # the space before a call is not content


class JsonParser:
    """Parser of a text that is one call or a list of calls in JSON, with or without a code fence: Llama models write
    so.
    """

    _fence = re.compile(r"\A```(?:json)?(?P<body>.*)```\Z", re.DOTALL)

    def parse(self, text: str) -> ParsedText:
        body = text.strip().removeprefix("<|python_tag|>").strip()
        fenced = self._fence.match(body)
        calls = read_calls(fenced["body"].strip() if fenced else body)
        return ParsedText("" if calls else text, calls)

    def certain_length(self, text: str) -> int:
        begun = text.lstrip()
        may_be_call = not begun or begun[0] in "{[`<"
        return 0 if may_be_call else len(text)


class VllmParser:
    """Adapter for one of vLLM's own parsers: it passes the text on and converts the result."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser

    def parse(self, text: str) -> ParsedText:
        # Parsers read only these fields of the request; vLLM's own class would load its whole web server.
        request = SimpleNamespace(messages=[], tools=None, tool_choice="auto")
        found = self._parser.extract_tool_calls(text, request)
        if not found.tools_called:
            return ParsedText(text, [])
        calls = [ToolCall(FunctionCall(call.function.name, call.function.arguments)) for call in found.tool_calls]
        return ParsedText(found.content or "", calls)

    def certain_length(self, text: str) -> int:  # noqa: ARG002 - only that parser knows where a call begins
        return 0


class ForeignParser:
    """Adapter for a parser object that an environment supplies: its `parse(text)` returns content and calls."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser

    def parse(self, text: str) -> ParsedText:
        content, calls = self._parser.parse(text)
        return ParsedText(content or "", [_as_call(call) for call in calls or []])

    def certain_length(self, text: str) -> int:  # noqa: ARG002 - only that parser knows where a call begins
        return 0


NO_JSON = (ValueError, RecursionError)
"""Errors of Python's JSON decoder for what a model writes: a number of thousands of digits is a `ValueError`."""

OWN_PARSERS: Mapping[str, type[HermesParser | JsonParser]] = {"hermes": HermesParser, "json": JsonParser}


def tool_parser(wanted: Any, tokenizer: Any) -> ToolParser:
    """Return a parser by name, ours before vLLM's, or an adapter around an object that parses."""
    if isinstance(wanted, HermesParser | JsonParser | VllmParser):
        return wanted
    if not isinstance(wanted, str):
        return ForeignParser(wanted)
    if wanted in OWN_PARSERS:
        return OWN_PARSERS[wanted]()
    try:
        from vllm.tool_parsers import ToolParserManager

        return VllmParser(ToolParserManager.get_tool_parser(wanted)(tokenizer))
    except ImportError:
        reason = "parsers of other names are vLLM's, which is not installed here"
    except KeyError:
        reason = "vLLM has no parser of that name either"
    raise ToolParserUnknown(f"no tool parser {wanted!r}: {reason}; set --env.tool_parser to {' or '.join(OWN_PARSERS)}")


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of the text may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def read_calls(text: str) -> list[ToolCall]:
    """Return the calls in a JSON text: one, several in a row, or a list; an empty list if it holds anything else."""
    decoder = json.JSONDecoder()
    position, values = 0, []
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except NO_JSON:
            return []
        values.extend(value if isinstance(value, list) else [value])
        while position < len(text) and text[position] in " \t\r\n;,":
            position += 1
    calls = [_read_call(value) for value in values]
    return [call for call in calls if call is not None] if None not in calls else []


def _read_call(value: Any) -> ToolCall | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(FunctionCall(encodable(value["name"]), encodable(text)))


def _as_call(call: Any) -> ToolCall:
    """Convert a call of any library: ours, a mapping, or an object with the attributes of OpenAI's."""
    if isinstance(call, ToolCall):
        return call
    if isinstance(call, Mapping):
        function = call["function"]
        given = ToolCall(FunctionCall(function["name"], function["arguments"]))
        call_id = call.get("id")
    else:
        given = ToolCall(FunctionCall(call.function.name, call.function.arguments))
        call_id = getattr(call, "id", None)
    if call_id:
        given.id = str(call_id)
    return given


def expected_call(tool_choice: Any) -> bool:
    """Return True if the client insists on a call: "required", or a named function."""
    return tool_choice == "required" or isinstance(tool_choice, Mapping)


def with_parsed_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for chat templates, which take call arguments as objects; OpenAI's form has them as text."""
    return [
        {**message, "tool_calls": [_for_template(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _for_template(call: Any) -> dict[str, Any]:
    as_dict = call.model_dump() if hasattr(call, "model_dump") else dict(call)
    function = dict(as_dict.get("function") or {})
    try:
        arguments = json.loads(function["arguments"])
        json.dumps(arguments, ensure_ascii=False).encode()  # half a surrogate pair has no tokens
    except (KeyError, TypeError, *NO_JSON):
        return as_dict
    return {**as_dict, "function": {**function, "arguments": arguments}}
