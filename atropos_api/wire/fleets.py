"""The messages about fleets: a launcher's report on its inference servers, and the number that is wanted of them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from atropos_api.wire.groups import DEFAULT_POLICY
from atropos_api.wire.messages import Name, NotNegative
from atropos_api.wire.servers import SERVER_ID

FLEET_ID = SERVER_ID
"""Pattern of a fleet's id, with which the ids of its servers begin."""

Text = Annotated[str, msgspec.Meta(max_length=1000)]


class FleetReport(msgspec.Struct, kw_only=True):
    """Register the inference servers of one launcher, or renew the lease: how many there are, and what they can be."""

    launcher_id: Annotated[str, msgspec.Meta(min_length=8, max_length=64)]
    """Random id of the launcher's process: while the lease lasts, no other may report on the fleet."""
    policy: Name = DEFAULT_POLICY
    wanted: NotNegative
    """The number of servers that the launcher aims at."""
    running: NotNegative
    """The number that it has, those that start included and those that drain left out."""
    least: NotNegative
    most: NotNegative
    request: NotNegative = 0
    """The number of the newest request that `wanted` takes account of; 0: none yet."""
    limit: Text = ""
    """The reason why there cannot be more than `most`."""
    fixed: Text = ""
    """The reason why the number cannot change at all; empty if it can."""
    note: Text = ""
    """The last thing that kept the launcher from the number that was asked for."""


class FleetLease(msgspec.Struct, kw_only=True):
    """The answer to a report: the number to aim at, and the request that it comes from."""

    lease_seconds: float
    wanted: int
    request: int


class ScaleRequest(msgspec.Struct, kw_only=True):
    """Ask for another number of servers."""

    wanted: NotNegative


class Fleet(msgspec.Struct, kw_only=True):
    """The inference servers that one launcher starts."""

    fleet_id: str
    policy: str
    wanted: int
    """The number that was asked for last."""
    running: int
    least: int
    most: int
    request: int
    """The number of the request that asked for it."""
    followed: bool
    """True once the launcher aims at `wanted`, and keeps it over its own restart."""
    silent_seconds: float
    """Time since the launcher's last report."""
    limit: str
    fixed: str
    note: str


class FleetSet(msgspec.Struct, kw_only=True):
    """All fleets."""

    complete: bool
    """False for one lease after the broker's start, in which launchers report again."""
    fleets: list[Fleet]
