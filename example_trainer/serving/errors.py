"""Why the server does not start, or does not do what it was asked."""

from __future__ import annotations

from example_trainer.errors import TrainerError


class CannotServe(TrainerError):
    """The server cannot start as asked."""
