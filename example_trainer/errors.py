"""What can go wrong in the trainer, as one flat family.

Every command turns a `TrainerError` into one line on standard error and exit code 2, so a message
names the cause, the offending value and the next step.
"""

from __future__ import annotations

from atropos_api.common.errors import AtroposError


class TrainerError(AtroposError):
    """The trainer cannot go on."""


class ModelNotFound(TrainerError):
    """The model named by the user is neither a directory here nor loadable by name."""


class NoSuchDevice(TrainerError):
    """The device named by the user is not on this machine."""


class UnsupportedModel(TrainerError):
    """The model computes something that the trainer does not."""


class MissingLogprobs(TrainerError):
    """A trained token came without the logprob under which it was sampled."""


class BadBatch(TrainerError):
    """A batch from the broker cannot be turned into training data."""


class UnusableLoss(TrainerError):
    """A loss of the user's own cannot be imported, or does not give one value a token."""


class OptimizerUnavailable(TrainerError):
    """The optimizer asked for needs a package that is not installed."""


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
    """The processes of a run with several ranks did not find each other, or another one of them has ended."""
