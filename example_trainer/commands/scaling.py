"""The verbs `atropos scale`, which changes the number of a run's inference servers, and `atropos drain` (ends some).

`scale` asks the broker, and the launcher that reports there carries the request out; `drain` tells one registered
server, or all of a node, to end their requests and to leave.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final, Protocol, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from atropos_api.client import BrokerClient
from atropos_api.common.cliconfig import ConfigError, load_config_with_rest, refuse_unknown_option
from atropos_api.common.identity import Address
from atropos_api.common.secrets import SECRET, TokenSource
from atropos_api.wire import Fleet, FleetSet, InferenceServer, ServerSet

SCALED: Final = "vllm"
"""The only program of a run whose number can change."""

LONGEST_WAIT_SECONDS: Final = 50.0
PAUSE_SECONDS: Final = 0.5

SCALE_DESCRIPTION = """Change how many inference servers a run has: atropos scale vllm=3.

The launcher of the run starts more of them, or lets the newest ones end their requests and leave."""

DRAIN_DESCRIPTION = """Let an inference server end its requests, take no new one, and leave: atropos drain SERVER.

SERVER is its id or its address, as GET /v1/servers of the broker lists them, or the host of such an address: then all
servers of that node leave. Its launcher does not start it again."""

OptionsT = TypeVar("OptionsT", bound="BrokerOptions")


class BrokerOptions(BaseModel):
    """The options by which a verb finds the broker."""

    model_config = ConfigDict(extra="forbid")

    broker: Address = Field("http://127.0.0.1:8000", description="Address of the broker.")
    token: str | None = Field(
        None, description="Bearer token of the broker; default: $ATROPOS_TOKEN.", json_schema_extra=SECRET
    )
    token_file: Path | None = Field(
        None, description="File with that token, read again if the broker refuses it; default: $ATROPOS_TOKEN_FILE."
    )

    def client(self) -> BrokerClient:
        token = TokenSource.settle(self.token, self.token_file, os.environ)
        return BrokerClient(self.broker, token=token, retry_seconds=5.0)


class ScaleOptions(BrokerOptions):
    """The options of `atropos scale`."""

    fleet: str | None = Field(None, description="The launcher's fleet, if several launchers report to the broker.")
    wait: float = Field(
        20.0, ge=0.0, le=LONGEST_WAIT_SECONDS, description="Seconds in which the launcher has to take the number over."
    )


class DrainOptions(BrokerOptions):
    """The options of `atropos drain`."""

    wait: float = Field(600.0, ge=0.0, description="Seconds to wait until the server has left; 0: do not wait.")


class ScaleClient(Protocol):
    """The broker's calls about fleets."""

    def get_fleets(self) -> FleetSet: ...

    def scale_fleet(self, fleet_id: str, wanted: int, *, wait_seconds: float = 0.0) -> Fleet: ...


class DrainClient(Protocol):
    """The broker's calls about registered servers."""

    def get_servers(self, *, since: int | None = None, wait_seconds: float = 0.0) -> ServerSet: ...

    def drain_server(self, server_id: str) -> InferenceServer: ...


def run_scale(argv: Sequence[str], out: IO[str] = sys.stdout) -> int:
    """Ask for a number of servers, and print the launcher's answer."""
    options, operand = _read(ScaleOptions, argv, "atropos scale", SCALE_DESCRIPTION, f"{SCALED}=3")
    wanted = _read_number(operand)
    with options.client() as broker:
        out.write(f"{scale(broker, wanted, fleet_id=options.fleet, wait_seconds=options.wait)}\n")
    return 0


def run_drain(argv: Sequence[str], out: IO[str] = sys.stdout) -> int:
    """Drain a server, or those of a node, and wait until they have left."""
    options, operand = _read(DrainOptions, argv, "atropos drain", DRAIN_DESCRIPTION, "a server's id, address or host")

    def say(line: str) -> None:
        out.write(f"{line}\n")
        out.flush()

    with options.client() as broker:
        drain(broker, operand, wait_seconds=options.wait, say=say)
    return 0


def scale(broker: ScaleClient, wanted: int, *, fleet_id: str | None = None, wait_seconds: float) -> str:
    """Ask a fleet's launcher for `wanted` servers; return a line about what it does, or raise `ConfigError`."""
    before = _choose(_reported(broker), fleet_id)
    after = broker.scale_fleet(before.fleet_id, wanted, wait_seconds=wait_seconds)
    if not after.followed:
        raise ConfigError(
            f"the launcher of {after.fleet_id} has not taken {wanted} over within {wait_seconds:g} s, and was last "
            f"heard {after.silent_seconds:.0f} s ago; it may still do so"
        )
    if after.wanted != wanted:
        reason = after.note or "another caller has asked for it"
        raise ConfigError(f"{after.fleet_id}: {after.wanted} servers are wanted, not {wanted}: {reason}")
    return f"{after.fleet_id}: {after.running} of {after.wanted} inference servers run"


def drain(broker: DrainClient, named: str, *, wait_seconds: float, say: Callable[[str], None]) -> None:
    """Drain the servers with this id, address or host; raise `ConfigError` if one does not leave in time."""
    ends_at = time.monotonic() + wait_seconds
    leaving: dict[str, InferenceServer] = {}
    for found in _find_servers(broker, named):
        server = broker.drain_server(found.server_id)
        leaving[server.lease_id] = server
        requests = server.running + server.waiting
        say(f"{server.server_id} at {server.url} drains: {requests} requests when it last reported")
    epoch: int | None = None
    while leaving and wait_seconds:
        left = ends_at - time.monotonic()
        now = broker.get_servers(since=epoch, wait_seconds=max(0.0, min(left, LONGEST_WAIT_SECONDS)))
        epoch = now.epoch
        _say_who_has_left(now, leaving, say)
        if leaving and left <= 0:
            names = ", ".join(server.server_id for server in leaving.values())
            raise ConfigError(f"requests are left at {names} after {wait_seconds:g} s; draining goes on")


def _say_who_has_left(now: ServerSet, leaving: dict[str, InferenceServer], say: Callable[[str], None]) -> None:
    """Take the servers that are not there any more out of `leaving`."""
    rows = {row.lease_id: row for row in now.servers}
    for lease_id, server in list(leaving.items()):
        row = rows.get(lease_id)
        if row is None and now.complete:
            say(f"{server.server_id} has left")
        elif row is not None and row.state == "gone":
            say(f"{server.server_id} is gone: {row.reason}")
        else:
            continue
        del leaving[lease_id]


def _read(
    model: type[OptionsT], argv: Sequence[str], prog: str, description: str, expected: str
) -> tuple[OptionsT, str]:
    """Return the options, and the one operand."""
    options, rest = load_config_with_rest(model, argv, prog=prog, description=description)
    refuse_unknown_option(model, rest)
    if len(rest) != 1:
        given = " ".join(rest) or "nothing"
        raise ConfigError(f"{prog} takes {expected} and its options (--help lists them); got {given}")
    return options, rest[0]


def _read_number(operand: str) -> int:
    program, equals, number = operand.partition("=")
    if program != SCALED or not equals:
        raise ConfigError(f"atropos scale {operand}: only the inference servers can be scaled: atropos scale vllm=3")
    if not number.isdecimal():
        raise ConfigError(f"atropos scale {operand}: {number!r} is not a number of servers")
    return int(number)


def _reported(broker: ScaleClient) -> list[Fleet]:
    """Return the fleets; after the broker's start, launchers get a lease's time to report again."""
    while True:
        found = broker.get_fleets()
        if found.fleets or found.complete:
            return found.fleets
        time.sleep(PAUSE_SECONDS)


def _choose(fleets: Sequence[Fleet], fleet_id: str | None) -> Fleet:
    known = ", ".join(fleet.fleet_id for fleet in fleets)
    if fleet_id is not None:
        named = next((fleet for fleet in fleets if fleet.fleet_id == fleet_id), None)
        if named is None:
            raise ConfigError(f"--fleet {fleet_id}: no launcher reports on it (known: {known or 'none'})")
        return named
    if not fleets:
        raise ConfigError(
            "no launcher reports to this broker, so none would start or drain servers; they can be started by "
            "vllm_api_server --broker-url, and drained by atropos drain"
        )
    if len(fleets) > 1:
        raise ConfigError(f"{len(fleets)} launchers report to this broker; name one's fleet with --fleet: {known}")
    return fleets[0]


def _find_servers(broker: DrainClient, named: str) -> list[InferenceServer]:
    """Return the server with this id or address, else those of this host; after the broker's start, servers get time
    to register again.
    """
    while True:
        found = broker.get_servers()
        alive = [row for row in found.servers if row.state != "gone"]
        for row in alive:
            if row.server_id == named or row.url.rstrip("/") == named.rstrip("/"):
                return [row]
        if not found.complete:
            time.sleep(PAUSE_SECONDS)
            continue
        if on_host := [row for row in alive if urlsplit(row.url).hostname == named.strip("[]").lower()]:
            return on_host
        known = ", ".join(f"{row.server_id} ({row.url})" for row in alive) or "none"
        raise ConfigError(f"no registered server has the id, address or host {named!r} (registered: {known})")
