"""What can go wrong between the trainer's weights and the server's, as flat children of `TrainerError`."""

from __future__ import annotations

from example_trainer.errors import TrainerError


class BadLayerFilter(TrainerError):
    """`--train-layer-indices` or `--lora-layer-indices` names layers that the model does not have."""


class CannotShare(TrainerError):
    """The model or the server cannot be trained through shared tensors."""


class CannotSwap(TrainerError):
    """The server does not take adapters."""


class ServerUnavailable(TrainerError):
    """The vLLM server does not answer."""


class WaitTimedOut(TrainerError):
    """What was waited for did not come within `--wait-timeout`."""


class ServerRefused(TrainerError):
    """The vLLM server answered a bridge request with an error."""

    def __init__(self, message: str, status: int, *, kind: str = "", retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        """The problem's name, such as `publish-in-progress`; empty where the server is not ours."""
        self.retry_after_seconds = retry_after_seconds


class ServerExited(TrainerError):
    """The vLLM server that was started here ended by itself."""


class ProofFailed(TrainerError):
    """Trainer and server do not compute the same logprobs from what should be the same weights."""
