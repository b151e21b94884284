"""The errors of the trainer, of weight synchronisation and of the vLLM server, as direct subclasses of `TrainerError`.

Every command turns a `TrainerError` into one line on standard error and exit code 2, so a message
names the cause, the offending value and the next step.
"""

from __future__ import annotations

from typing import Final

from atropos_api.common.errors import AtroposError

STOPPED_BY_HEALTH: Final = 3
"""Exit code of a run that `--stop-on` ended."""


class TrainerError(AtroposError):
    """The trainer cannot go on."""


class ModelNotFound(TrainerError):
    """The model named by the user is neither a directory here nor loadable by name."""


class NoSuchDevice(TrainerError):
    """The device named by the user is not on this machine."""


class DoesNotFit(TrainerError):
    """The run needs more memory than its GPU has."""


class UnsupportedModel(TrainerError):
    """The model computes something that the trainer does not support."""


class NonfiniteWeights(TrainerError):
    """A model or checkpoint has weights that are NaN or infinite."""


class WrongDtype(TrainerError):
    """Weights of this dtype cannot be trained with these settings, or the server computes in another one."""


class NotWritten(TrainerError):
    """A file of metrics, events or batches cannot be written."""


class MissingLogprobs(TrainerError):
    """A trained token came without the logprob under which it was sampled."""


class BadBatch(TrainerError):
    """A batch from the broker cannot be turned into training data."""


class UnusableLoss(TrainerError):
    """A user-defined loss cannot be imported, or does not return one value per token."""


class OptimizerUnavailable(TrainerError):
    """The optimizer asked for needs a package that is not installed, or is the user's own and does not work."""


class KernelsUnusable(TrainerError):
    """The requested kernels are not available here, or do not compute what plain operations compute."""


class CheckpointError(TrainerError):
    """A checkpoint cannot be written, found or read."""


class TrainingDiverged(TrainerError):
    """Several optimizer steps in a row had a loss or gradient that was not finite."""


class BatchTimeout(TrainerError):
    """No environment delivered a batch in the time allowed."""


class PublishFailed(TrainerError):
    """The new weights did not reach the inference server."""


class AdapterUnavailable(TrainerError):
    """An adapter or a quantised base cannot be made: a package is missing, or the model lacks the modules named."""


class RanksFailed(TrainerError):
    """The ranks of a run could not connect to each other, or rank 0 has failed."""

    def __init__(self, message: str, *, ends_batches: bool = False) -> None:
        super().__init__(message)
        self.ends_batches = ends_batches
        """True if rank 0 has failed with an error that came in place of a batch (`api.ends_batches`)."""


class BadLayerFilter(TrainerError):
    """`--train-layer-indices` or `--lora-layer-indices` names layers that the model does not have."""


class CannotShare(TrainerError):
    """The model or the server cannot be trained through shared tensors."""


class CannotSwap(TrainerError):
    """The server does not take adapters."""


class ServerUnavailable(TrainerError):
    """The vLLM server does not answer."""


class WaitTimedOut(TrainerError):
    """Something that the trainer waited for did not happen within `--wait-timeout`."""


class WaitStopped(TrainerError):
    """The trainer was told to stop while it waited for a vLLM server."""


class ServerRefused(TrainerError):
    """The vLLM server answered a bridge request with an error."""

    def __init__(self, message: str, status: int, *, kind: str = "", retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        """The problem's name, such as `publish-in-progress`; empty if it is not an Atropos server."""
        self.retry_after_seconds = retry_after_seconds


class ServerExited(TrainerError):
    """A vLLM server started by the trainer exited unexpectedly."""

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """Negative: the number of the signal that killed it."""


class ProofFailed(TrainerError):
    """The logprob parity check failed: trainer and server compute different logprobs from supposedly equal weights."""


class CannotServe(TrainerError):
    """The server cannot start with the given settings."""


class WorkerFailed(TrainerError):
    """A worker process of vLLM could not do as the server asked."""
