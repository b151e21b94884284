"""Many clients at once on one server: their answers are recorded and compared with those to a client alone."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .random_requests import RandomRequest

NEGLIGIBLE = -60.0
"""Logprob below which a token is never sampled, so that it counts as equal to the -inf of a neighbour's top_p."""


@dataclass
class Output:
    """One text of an answer, in the same form for every route. Alternatives are `{token id: logprob}` by position."""

    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    reason: str | None = None
    logprobs: list[float] | None = None
    alternatives: list[dict[int, float]] | None = None
    masks: list[set[int]] | None = None
    versions: list[list[Any]] | None = None


@dataclass
class Said:
    """One answer; `status` is 0 if the client disconnected before it came."""

    status: int
    outputs: list[Output] = field(default_factory=list)
    prompt: list[dict[int, float] | None] | None = None
    body: str = ""
    versions: tuple[int, int] = (0, 0)
    """The oldest and the newest version that the server may have used for it."""


class Crowd:
    """Sends requests to one server; `versions` returns the policy version served now and the one being published."""

    def __init__(self, url: str, versions: Callable[[], tuple[int, int]] = lambda: (0, 0)) -> None:
        self._url = url
        self._versions = versions
        self.answered = 0

    def alone(self, requests: list[RandomRequest]) -> list[Said]:
        """Return the answers to the requests one after the other."""
        return asyncio.run(self._send_all(requests, clients=1))

    def together(self, requests: list[RandomRequest], clients: int) -> list[Said]:
        """Return the answers to the requests of a number of clients at a time."""
        return asyncio.run(self._send_all(requests, clients))

    async def _send_all(self, requests: list[RandomRequest], clients: int) -> list[Said]:
        found: list[Said | None] = [None] * len(requests)
        numbers = iter(range(len(requests)))
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(
            self._url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        ) as session:

            async def work() -> None:
                for number in numbers:
                    found[number] = await self._send(session, requests[number])

            await asyncio.gather(*(work() for _ in range(clients)))
        return found

    async def _send(self, session: aiohttp.ClientSession, request: RandomRequest) -> Said:
        oldest, _ = self._versions()
        try:
            async with asyncio.timeout(request.leave_after_seconds):
                async with session.post(request.path, json=request.body) as answer:
                    status, text = answer.status, (await answer.read()).decode()
        except TimeoutError:
            return Said(0)
        finally:
            self.answered += 1
        if status != 200:
            return Said(status, body=text)
        said = read_stream(request, text) if request.streams else read_whole(request, json.loads(text))
        said.versions = (oldest, self._versions()[1])
        return said


def read_whole(request: RandomRequest, answer: dict[str, Any]) -> Said:
    if request.path == "/generate":
        outputs = [Output() for _ in answer["token_ids"]]
        for number, output in enumerate(outputs):
            part = {
                key: (answer[key] or [None] * 9)[number]
                for key in ("token_ids", "logprobs", "text", "sampling_masks")
                if key in answer
            }
            add_generated(output, part)
            output.reason, output.versions = answer["finish_reasons"][number], answer["policy_versions"][number]
        return Said(200, outputs, read_prompt(answer.get("prompt_logprobs")), json.dumps(answer))
    outputs = [Output() for _ in answer["choices"]]
    for choice in answer["choices"]:
        add_choice(request, outputs[choice["index"]], choice)
    first = answer["choices"][0]
    told = first.get("prompt_logprobs") if request.path == "/v1/completions" else answer.get("prompt_logprobs")
    return Said(200, outputs, read_prompt(told), json.dumps(answer))


def read_stream(request: RandomRequest, text: str) -> Said:
    said = Said(200, [Output() for _ in range(request.outputs)], body=text)
    for line in text.splitlines():
        if line.startswith("event: error"):
            return Said(500, body=text)
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            return Said(int(event["error"].get("code") or 500), body=text)
        if request.path == "/generate":
            output = said.outputs[event["index"]]
            add_generated(output, event)
            output.reason = event.get("finish_reason", output.reason)
            output.versions = event.get("policy_versions", output.versions)
            said.prompt = said.prompt or read_prompt(event.get("prompt_logprobs"))
        else:
            for choice in event["choices"]:
                add_choice(request, said.outputs[choice["index"]], choice)
    return said


def add_generated(output: Output, part: dict[str, Any]) -> None:
    output.tokens += part["token_ids"]
    if part.get("text") is not None:
        output.text = (output.text or "") + part["text"]
    if part.get("sampling_masks") is not None:
        output.masks = (output.masks or []) + [set(mask) for mask in part["sampling_masks"]]
    rows = part.get("logprobs")
    if rows is None:
        return
    output.logprobs = output.logprobs or []
    if rows and isinstance(rows[0], list):
        output.alternatives = output.alternatives or []
        assert all(len(row) == len({key for entry in row for key in entry}) for row in rows), "no token twice"
        output.alternatives += [{int(key): value for entry in row for key, value in entry.items()} for row in rows]
        output.logprobs += [next(iter(row[0].values())) for row in rows]
    else:
        output.logprobs += rows


def add_choice(request: RandomRequest, output: Output, choice: dict[str, Any]) -> None:
    output.tokens += choice.get("token_ids") or []
    if request.path == "/v1/completions":
        text, told = choice["text"], choice.get("logprobs")
        rows = [] if told is None else list(zip(told["token_logprobs"], told["top_logprobs"] or [], strict=False))
        rows = [(value, {} if top is None else by_id(top)) for value, top in rows]
    else:
        part = choice.get("message") or choice.get("delta") or {}
        text, told = part.get("content"), choice.get("logprobs")
        rows = [
            (row["logprob"], by_id({top["token"]: top["logprob"] for top in row["top_logprobs"]}))
            for row in (told or {}).get("content") or []
        ]
    output.text = (output.text or "") + (text or "")
    output.reason = choice.get("finish_reason") or output.reason
    if told is not None:
        output.logprobs = (output.logprobs or []) + [value for value, _ in rows]
        output.alternatives = (output.alternatives or []) + [top for _, top in rows]


def by_id(told: dict[str, float]) -> dict[int, float]:
    return {int(key.removeprefix("token_id:")): value for key, value in told.items()}


def read_prompt(told: list[Any] | None) -> list[dict[int, float] | None] | None:
    if told is None:
        return None
    return [
        None
        if row is None
        else {int(key): value["logprob"] if isinstance(value, dict) else value for key, value in row.items()}
        for row in told
    ]


def difference(lone: Said, other: Said, tolerance: float) -> str | None:
    """Describe the first difference between an answer and the one to the same request alone; None if there is none."""
    if (lone.status, len(lone.outputs)) != (other.status, len(other.outputs)):
        return f"alone {lone.status} with {len(lone.outputs)} outputs, here {other.status}: {other.body[:300]}"
    for mine, theirs in zip(lone.outputs, other.outputs, strict=True):
        for name in ("tokens", "text", "reason", "masks"):
            if getattr(mine, name) != getattr(theirs, name):
                return f"{name}: alone {getattr(mine, name)!r}, here {getattr(theirs, name)!r}"
        found = differing_numbers(mine.logprobs, theirs.logprobs, tolerance)
        found = found or differing_rows(mine.alternatives, theirs.alternatives, tolerance)
        if found:
            return found
    return differing_rows(lone.prompt, other.prompt, tolerance, what="prompt_logprobs")


def differing_numbers(mine: list[Any] | None, theirs: list[Any] | None, tolerance: float) -> str | None:
    if (mine is None) != (theirs is None) or len(mine or []) != len(theirs or []):
        return f"logprobs: alone {mine!r}, here {theirs!r}"
    for position, (a, b) in enumerate(zip(mine or [], theirs or [], strict=True)):
        if not close(a, b, tolerance):
            return f"logprob at {position}: alone {a}, here {b}"
    return None


def differing_rows(mine: Any, theirs: Any, tolerance: float, what: str = "alternatives") -> str | None:
    if (mine is None) != (theirs is None) or len(mine or []) != len(theirs or []):
        return f"{what}: alone {mine!r}, here {theirs!r}"
    for position, (a, b) in enumerate(zip(mine or [], theirs or [], strict=True)):
        if (a is None) != (b is None) or (a and not same_row(a, b, tolerance)):
            return f"{what} at {position}: alone {a}, here {b}"
    return None


def same_row(mine: dict[int, float], theirs: dict[int, float], tolerance: float) -> bool:
    """Return True if the alternatives are the same, except for the choice among equally unlikely ones at the end."""
    mine, theirs = worth_telling(mine), worth_telling(theirs)
    if any(token in theirs and not close(value, theirs[token], tolerance) for token, value in mine.items()):
        return False
    if mine.keys() == theirs.keys():
        return True
    last = min([*mine.values(), *theirs.values()])
    values = [*(mine[token] for token in mine.keys() - theirs), *(theirs[token] for token in theirs.keys() - mine)]
    return len(mine) == len(theirs) and all(close(value, last, tolerance) for value in values)


def worth_telling(row: dict[int, float]) -> dict[int, float]:
    return {token: value for token, value in row.items() if value is not None and value > NEGLIGIBLE}


def close(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None:
        return a is b
    if max(a, b) < NEGLIGIBLE:
        return True
    return math.isclose(a, b, abs_tol=tolerance)


def until_difference(lone: list[Said], said: Said, numbers: Callable[[int], int], tolerance: float) -> str | None:
    """Describe how an answer's tokens of its first version differ from the answer alone under its weights, or None."""
    for position, output in enumerate(said.outputs):
        spans = output.versions or []
        if not spans:
            continue
        number = numbers(spans[0][2])
        end = next((start for start, _, version in spans if numbers(version) != number), len(output.tokens))
        expected = lone[number].outputs[position]
        if output.tokens[:end] != expected.tokens[:end]:
            return f"tokens before {end}: alone {expected.tokens}, here {output.tokens}"
        if output.logprobs is not None and (
            found := differing_numbers((expected.logprobs or [])[:end], output.logprobs[:end], tolerance)
        ):
            return found
    return None
