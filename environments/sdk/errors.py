"""The module has the errors of an environment server. Users' code raises plain Python errors and, of these, only
`ItemDropped`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import anyio

from atropos_api.common.errors import AtroposError


class EnvironmentsError(AtroposError):
    """Root of the errors: with `ends_server` True every other rollout would fail too, so the first ends the server."""

    ends_server: ClassVar[bool] = True


class InferenceUnavailable(EnvironmentsError):
    """The inference server gave no usable answer within the time allowed."""


class InferenceAborted(InferenceUnavailable):
    """The inference server ended an answer that was not complete, as when its weights change; it can be asked again."""

    ends_server = False


class InferenceHostUnknown(EnvironmentsError):
    """The host of an inference server cannot be resolved: the name is mistyped, so waiting does not help."""


class InferenceRefused(EnvironmentsError):
    """The inference server refuses the request; another prompt may be accepted."""

    ends_server = False


class RequestRefused(EnvironmentsError):
    """A client of a session asked for something that sessions do not support; `param` is the field of its request."""

    ends_server = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TokensUnavailable(EnvironmentsError):
    """The inference servers are of a kind that returns no token ids and logprobs, which training needs."""


class SamplingNotTrainable(EnvironmentsError):
    """The requested sampling has a distribution that the trainer does not recompute."""


class ToolParserUnknown(EnvironmentsError):
    """No parser of tool calls has the name that was asked for."""


class TokenizerUnavailable(EnvironmentsError):
    """The tokenizer named in the configuration cannot be loaded, or none is named."""


class TokenizerMismatch(EnvironmentsError, ValueError):
    """The tokenizer is not the one of the sampled model."""


class ItemDropped(EnvironmentsError):
    """The item is unusable: an environment that raises this has it dropped, counted and not tried again."""

    ends_server = False


class RolloutTimedOut(EnvironmentsError):
    """A rollout was cancelled at `--env.worker_timeout`; a timeout in the environment's own code is another error."""

    ends_server = False


class OwnCodeEnded(EnvironmentsError):
    """An environment's own code asked for the end of the process, or awaited something that others had cancelled."""

    ends_server = False


@contextmanager
def contained() -> Iterator[None]:
    """Turn what would end the server silently into an error: `sys.exit`, and a cancellation that is not its own.

    A library may cancel a request that a task waits for. The task group would take this for its own cancellation: all
    rollouts would end, and the server would exit with code 0.
    """
    try:
        yield
    except SystemExit as error:
        raise OwnCodeEnded(f"it called sys.exit({error.code!r}); raise an error instead") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if anyio.current_effective_deadline() == -math.inf or (task is not None and task.cancelling()):
            raise
        raise OwnCodeEnded("it raised CancelledError without having been cancelled") from error


class RolloutsKeepFailing(EnvironmentsError):
    """Many rollouts in a row failed; the last error says why."""


class EvaluationFailed(EnvironmentsError):
    """An evaluation that was explicitly requested failed."""


def innermost(error: BaseException) -> BaseException:
    """Return the first error inside nested exception groups that is not a group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_error(error: BaseException) -> str:
    """Return an error's type and text; the type alone if it has no text, or one that cannot be made."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an environment's own errors may raise anything
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class GoldMissing(EnvironmentsError):
    """The environment has no gold items or no scoring function to check its rewards with."""
