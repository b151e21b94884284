"""The servers of one policy as they are registered at the broker: they come and go while requests run.

A server whose lease has ended gets no request from then on, and those that it had not answered go to another one: it
may be stopped, or cut off for long. A draining server gets no new request and ends those that it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from atropos_api.common.concurrency import Condition, Wait
from atropos_api.wire import InferenceServer, ServerSet
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import InferenceUnavailable
from environments.sdk.inference.server import HttpServer

if TYPE_CHECKING:
    from atropos_api.client import AsyncBrokerClient

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 50.0
"""Time that the broker may wait for a change before it answers."""

PAUSE_SECONDS = 0.5
LINE_SECONDS = 10.0


class RegisteredServers:
    """The registered servers of one policy; `servers` is the list that a pool uses, changed in place."""

    def __init__(self, template: APIServerConfig, make: Callable[[APIServerConfig], HttpServer]) -> None:
        """Keep the arguments: each server has the settings of `template`, except for its address."""
        self.template = template
        self.servers: list[HttpServer] = []
        self.changed = Condition()
        """Notified when a server comes or goes."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a server comes or goes."""
        self._make = make
        self._by_lease: dict[str, HttpServer] = {}
        self._leaving: list[HttpServer] = []
        self._next_line = 0.0

    @property
    def policy(self) -> str:
        return self.template.policy

    async def follow(self, broker: AsyncBrokerClient) -> None:
        """Follow the broker's registry for ever; while the broker does not answer, the servers stay as they are."""
        from atropos_api.client import BrokerRefused, BrokerUnreachable

        epoch: int | None = None
        while True:
            try:
                found = await broker.get_servers(
                    self.policy, answering=True, since=epoch, wait_seconds=0.0 if epoch is None else FOLLOW_SECONDS
                )
            except (BrokerUnreachable, BrokerRefused) as error:
                if isinstance(error, BrokerRefused) and not error.is_passing:
                    raise
                logger.warning("%s; the inference servers stay as they are", error)
                await anyio.sleep(PAUSE_SECONDS)
                continue
            epoch = found.epoch
            self.adopt(found)
            await self._close_left()

    def adopt(self, found: ServerSet) -> None:
        """Take over a set of servers. One that an incomplete set lacks is kept: it may still have to register again."""
        listed = {row.lease_id: row for row in found.servers}
        for lease_id, row in listed.items():
            if row.state == "serving" and lease_id not in self._by_lease:
                self._add(row)
        for lease_id, server in list(self._by_lease.items()):
            if lease_id not in listed:
                if found.complete:
                    self._remove(lease_id, server)
            elif listed[lease_id].state != "serving" and server in self.servers:
                self.servers.remove(server)
                logger.info("the inference server at %s drains and gets no new request", server.config.root_url)
        self.changed.notify()
        self.on_change()

    async def wait(self, timeout_seconds: float) -> None:
        """Return once there is a server; raise `InferenceUnavailable` after the time allowed."""
        wait = Wait(timeout_seconds)
        while not self.servers:
            if wait.is_over:
                raise InferenceUnavailable(
                    f"no inference server of the policy {self.policy!r} has served for {timeout_seconds:.0f} s; start "
                    "one with --broker-url, and a trainer with --registered-servers"
                )
            # All rollouts of an environment wait here, and 32 of them logged the same line at once.
            if wait.has_line() and time.monotonic() >= self._next_line:
                self._next_line = time.monotonic() + LINE_SECONDS / 2
                logger.info("waiting for an inference server of the policy %s (%.0f s)", self.policy, wait.seconds)
            with anyio.move_on_after(min(LINE_SECONDS, timeout_seconds)):
                await self.changed.wait()

    async def aclose(self) -> None:
        for server in {*self._by_lease.values(), *self._leaving}:
            await server.aclose()

    def _add(self, row: InferenceServer) -> None:
        # A server with a new lease was away, so what was known of it under the old lease no longer holds.
        base_url = f"{row.url.rstrip('/')}/v1"
        server = self._make(self.template.model_copy(update={"base_url": base_url}))
        server.channel.host_is_known = True  # the trainer has reached it; DNS may learn a new name late
        self._by_lease[row.lease_id] = server
        self.servers.append(server)
        logger.info("the inference server %s at %s serves the policy %s", row.server_id, row.url, row.policy)

    def _remove(self, lease_id: str, server: HttpServer) -> None:
        del self._by_lease[lease_id]
        if server in self.servers:
            self.servers.remove(server)
        self._leaving.append(server)
        server.leave()
        logger.info("the inference server at %s is gone", server.config.root_url)

    async def _close_left(self) -> None:
        """Close the connections to servers that have left, once no request uses them."""
        for server in [each for each in self._leaving if not each.in_flight]:
            self._leaving.remove(server)
            await server.aclose()
