"""Error answers to clients: problem+json with a stable type, the reason and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.responses import Response

PROBLEM_PREFIX = "urn:atropos:problem:"


@dataclass(slots=True)
class Problem(Exception):
    """Raised anywhere below a route to end the request with this answer."""

    status: int
    kind: str
    detail: str
    retry_after_seconds: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    allow: str | None = None
    """The methods that the route takes, for a request with another method."""
    hang_up: bool = False
    """Close the connection after the answer, so that the client's next request opens a new connection."""

    def response(self) -> Response:
        body = {
            "type": PROBLEM_PREFIX + self.kind,
            "title": self.kind.replace("-", " "),
            "status": self.status,
            "detail": self.detail,
            **self.more,
        }
        headers = {} if self.retry_after_seconds is None else {"Retry-After": str(self.retry_after_seconds)}
        if self.allow is not None:
            headers["Allow"] = self.allow
        if self.hang_up:
            headers["Connection"] = "close"
        return Response(orjson.dumps(body), self.status, headers, media_type="application/problem+json")


def no_policy() -> Problem:
    detail = "no trainer has published weights to this server yet; it serves nothing until the first publish"
    return Problem(503, "no-policy", detail, retry_after_seconds=1)


def weights_torn() -> Problem:
    detail = (
        "a change of the weights has not come to its end; they are served again after a trainer's next complete publish"
    )
    return Problem(503, "weights-torn", detail, retry_after_seconds=5)


def paused() -> Problem:
    return Problem(503, "paused", "generation is paused; POST /bridge/resume ends that", retry_after_seconds=1)


def starting() -> Problem:
    detail = "the server is still loading its model; ask again"
    return Problem(503, "starting", detail, retry_after_seconds=1, hang_up=True)


def stopping() -> Problem:
    return Problem(503, "stopping", "the server is stopping", retry_after_seconds=1, hang_up=True)


def engine_dead() -> Problem:
    return Problem(
        503, "engine-dead", "vLLM's engine has died; the server is stopping, see its log", retry_after_seconds=5
    )


def nothing_to_sample(*, limited: bool) -> Problem:
    """Return the problem for an output with a token that had no probability."""
    if limited:
        detail = "the request's own limits left no token to sample; allow more tokens, or forbid fewer"
        return Problem(422, "nothing-to-sample", detail)
    detail = "a sampled token's logprob is no finite number, so the weights served hold some that are none"
    return Problem(500, "not-finite", detail)


@contextmanager
def engine_problems() -> Iterator[None]:
    """Convert vLLM's errors into answers for the client."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise engine_dead() from error
    except (VLLMClientError, UnicodeEncodeError, OverflowError) as error:
        raise Problem(422, "bad-request", " ".join(str(error).split())) from error
