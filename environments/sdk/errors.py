"""What can go wrong in an environment server. Users' code raises plain Python errors and never builds these."""

from __future__ import annotations

from typing import ClassVar

from atropos_api.common.errors import AtroposError


class EnvironmentsError(AtroposError):
    """The root. `ends_server`: no other rollout would fare better, so the first one that raises it ends the server."""

    ends_server: ClassVar[bool] = True


class InferenceUnavailable(EnvironmentsError):
    """The inference server gave no usable answer within the time allowed."""


class InferenceHostUnknown(EnvironmentsError):
    """The host of an inference server cannot be resolved: a mistyped name, which no waiting mends."""


class InferenceRefused(EnvironmentsError):
    """The inference server will not do what was asked; another prompt may fare better."""

    ends_server = False


class RequestRefused(EnvironmentsError):
    """A client of a session asked for what a session does not do; `param` is the field of its request."""

    ends_server = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TokensUnavailable(EnvironmentsError):
    """Inference servers of that kind return no token ids and logprobs, which training needs."""


class SamplingNotTrainable(EnvironmentsError):
    """The sampling asked for has a distribution that the trainer does not recompute."""


class ToolParserUnknown(EnvironmentsError):
    """No parser of tool calls has the name that was asked for."""


class TokenizerUnavailable(EnvironmentsError):
    """The tokenizer named in the configuration cannot be loaded, or none is named."""


class TokenizerMismatch(EnvironmentsError, ValueError):
    """The tokenizer is not that of the model that is sampled from."""


class ItemDropped(EnvironmentsError):
    """Nothing can be made of the item: an environment that raises this has it dropped, counted and not tried again."""

    ends_server = False


class RolloutsKeepFailing(EnvironmentsError):
    """Many rollouts in a row failed; the last error says why."""


class EvaluationFailed(EnvironmentsError):
    """An evaluation that was asked for by name could not be done."""


def innermost(error: BaseException) -> BaseException:
    """The first real error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class GoldMissing(EnvironmentsError):
    """The environment offers nothing to check its rewards on."""
