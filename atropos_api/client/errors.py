"""What a caller of the broker may have to handle."""

from __future__ import annotations

from typing import Any

from atropos_api.common.errors import AtroposError


class BrokerUnreachable(AtroposError):
    """Nobody answers at the broker's address, within the time allowed."""


class BrokerHostUnknown(AtroposError):
    """The host in the broker's URL cannot be resolved: a mistyped name, which no waiting mends."""


class BrokerRefused(AtroposError):
    """The broker answered with a problem; `problem` is its body, `status` the HTTP status."""

    def __init__(self, problem: dict[str, Any], status: int) -> None:
        detail = problem.get("detail") or problem.get("title") or problem
        super().__init__(f"the broker refused ({status}): {detail}")
        self.problem = problem
        self.status = status

    @property
    def kind(self) -> str:
        """The stable end of the problem's `type`, such as `run-superseded`."""
        return str(self.problem.get("type", "")).rpartition("/")[2]


class RunSuperseded(BrokerRefused):
    """Another trainer began a run or took this one over; this one must stop."""


class BatchCommitted(BrokerRefused):
    """The batch asked for is already covered by a checkpoint and gone."""
