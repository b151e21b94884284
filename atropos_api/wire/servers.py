"""The messages of the registry of inference servers: a server's report, its lease, and the set that others follow."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from atropos_api.wire.groups import DEFAULT_POLICY
from atropos_api.wire.messages import Name, NotNegative

ServerState = Literal["starting", "joining", "serving", "draining", "gone"]
ServerMode = Literal["adapters", "weights", "fixed"]
"""The policies that a server takes: adapters, whole weights, or none but the one that it was started with."""

SERVER_ID: Final = r"[A-Za-z0-9][A-Za-z0-9._:~-]{0,199}"
LeaseId = Annotated[str, msgspec.Meta(min_length=8, max_length=64)]


class ServerReport(msgspec.Struct, kw_only=True):
    """Register an inference server, or renew its lease: its identity, and its state as it sees it."""

    lease_id: LeaseId
    """Random id of the lease, made by the server. Once a lease has ended its id is refused; the server makes another.
    """
    boot_id: Name
    """Id of the server process."""
    mode: ServerMode
    policy: Name = DEFAULT_POLICY
    url: Annotated[str, msgspec.Meta(max_length=2000)] | None = None
    """Address for clients; None: the host that the broker sees the call come from, with `scheme` and `port`."""
    scheme: Literal["http", "https"] = "http"
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    ready: bool = True
    """False while the model is loading: such a lease lasts long, since the server cannot renew it meanwhile."""
    draining: bool = False
    """True if the server is ending by itself, or because it was told to."""
    version: NotNegative | None = None
    """The policy version that it has."""
    running: NotNegative = 0
    """Requests that it computes."""
    waiting: NotNegative = 0
    """Requests that wait inside it."""
    kv_free: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    """Share of its KV cache that is free."""


class ServerLease(msgspec.Struct, kw_only=True):
    """The answer to a registration or renewal."""

    state: ServerState
    """The state of the server: it answers requests for tokens only while this is `serving`."""
    lease_seconds: float
    """Time until the lease ends unless it is renewed, from the moment at which the broker took the call."""
    epoch: int


class InferenceServer(msgspec.Struct, kw_only=True):
    """One registered server."""

    server_id: str
    state: ServerState
    policy: str
    url: str
    mode: ServerMode
    lease_id: str
    boot_id: str
    version: int | None
    running: int
    waiting: int
    kv_free: float | None
    silent_seconds: float
    """Time since its last renewal."""
    reason: str | None = None
    """The reason why it is gone."""


class ServerSet(msgspec.Struct, kw_only=True):
    """All servers, or those that were asked for: always the whole set, so that a follower needs no history."""

    epoch: int
    """A number that changes with every change of the set: a server that comes, goes, or changes its state."""
    complete: bool
    """False for one lease after the broker's start, in which servers register again: none is missing for good yet."""
    lease_seconds: float
    servers: list[InferenceServer]
