"""The activity of an environment server, as it is reported to the broker for the page.

It is a module on its own because the worker, which is read for how rollouts are admitted, needs none of it.
"""

from __future__ import annotations

import time
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from atropos_api.wire.reports import EnvironmentActivity, OpenRollout, ServerUse, WaitingMember
from environments.sdk.inference.server import HttpServer
from environments.sdk.progress import GroupProgress, OpenGroups
from environments.sdk.server_manager import ServerManager

MOST_SLOWEST: Final = 5
MOST_WAITING: Final = 4


def describe_activity(groups: OpenGroups, server: ServerManager, *, evaluating: bool) -> EnvironmentActivity:
    """Return what the environment is doing now."""
    now = time.monotonic()
    servers = server.servers
    return EnvironmentActivity(
        open_rollouts=len(groups),
        open_requests=sum(one.in_flight for one in servers),
        idle_seconds=max(
            0.0, min((now - one.idle_since for one in servers if one.idle_since is not None), default=0.0)
        ),
        finished_rollouts=groups.finished,
        usual_seconds=groups.usual_seconds(),
        slowest=[_describe_group(one, now) for one in groups.slowest(MOST_SLOWEST)],
        servers=[_describe_server(one) for one in servers],
        evaluating=evaluating,
    )


def _describe_group(progress: GroupProgress, now: float) -> OpenRollout:
    return OpenRollout(
        name=progress.name,
        seconds=max(0.0, now - progress.began_at),
        done=progress.done,
        wanted=progress.wanted,
        last_event=progress.event,
        last_event_seconds=max(0.0, now - progress.event_at) if progress.event else 0.0,
        waiting=_describe_waiting(progress, now),
    )


def _describe_waiting(progress: GroupProgress, now: float) -> list[WaitingMember]:
    members = sorted(progress.members.values(), key=lambda one: one.event_at)
    return [
        WaitingMember(member=one.index, last_event=one.event, seconds=max(0.0, now - one.event_at))
        for one in members[:MOST_WAITING]
    ]


def _describe_server(server: HttpServer) -> ServerUse:
    return ServerUse(
        url=public_url(server.config.base_url)[:200],
        open_requests=server.in_flight,
        requests=server.answered,
        available=server.channel.up,
        policy_version=None if server.policy is None else server.policy.version,
    )


def public_url(url: str) -> str:
    """Return an address without a user's name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
