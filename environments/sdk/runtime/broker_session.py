"""An environment server's broker connection: registration, pacing, and submissions that lose and duplicate no group."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from atropos_api.common.concurrency import Condition, Wait
from atropos_api.common.errors import AtroposError
from atropos_api.wire.groups import Group
from atropos_api.wire.messages import EnvironmentInfo, EnvironmentRequest, ItemLease, ItemRequest, Pacing
from atropos_api.wire.reports import EnvironmentActivity
from environments.sdk.reporting import DroppedGroups
from environments.sdk.runtime.items import GroupKey, LeasedItem

if TYPE_CHECKING:
    from atropos_api.client import AsyncBrokerClient, BrokerRefused

logger = logging.getLogger(__name__)

HEARTBEAT_WAIT_SECONDS = 10.0
MOST_GROUPS_A_POST = 64
PAUSE_SECONDS = 0.5
DEREGISTER_SECONDS = 1.0
REPORT_SECONDS = 1.0
ACTIVITY_SECONDS = 2.0
NO_SUCH_ROUTE = frozenset({404, 405})
GROUP_REFUSALS = frozenset({400, 413, 422})  # caused by the groups sent, not by the sender
FORGOTTEN_RUN = "unknown-run"
"""The refusal of a group for a run that the broker does not know any more, because it lost its state."""


class BrokerConnection:
    """Connection to the broker: it keeps `pacing` current, submits groups, and notifies `changed` when either changes.

    `pending_sequences` and `pending_groups` count what was handed in and is not yet acknowledged.
    """

    def __init__(self, client: AsyncBrokerClient, request: EnvironmentRequest, *, wait_timeout_seconds: float) -> None:
        self.changed = Condition()
        self.pacing: Pacing | None = None
        self.info: EnvironmentInfo | None = None
        self.pending_sequences = self.pending_groups = 0
        self.on_step: Callable[[Pacing], None] = lambda _: None
        self.on_policy: Callable[[Pacing], None] = lambda _: None
        self.on_refused: Callable[[Group, Exception], None] = lambda _, __: None
        self.on_item_group: Callable[[LeasedItem], None] = lambda _: None
        """Called with an item when one of its groups is acknowledged or refused."""
        self.on_acknowledged: Callable[[Group], None] = lambda _: None
        self._client = client
        self._request = request
        self._wait_timeout_seconds = wait_timeout_seconds
        self._queue: deque[tuple[Group, GroupKey | None, str | None]] = deque()
        self._adoptions = 0

    async def register(self, group_size: int | None = None) -> EnvironmentInfo:
        """Wait for the broker and register, or register again after the broker has forgotten this environment.

        Without `group_size` it is the last one again.
        """
        from atropos_api.client import is_outage

        self._request.group_size = group_size or self._request.group_size
        wait = Wait(self._wait_timeout_seconds)
        while True:
            await self._client.wait_until_ready(self._wait_timeout_seconds, logger.info)
            try:
                self.info = await self._client.register_environment(self._request)
            except AtroposError as error:  # a broker that has just become ready may end again
                if wait.is_over or not is_outage(error):
                    raise
                logger.warning("%s; waiting for the broker", error)
                await anyio.sleep(PAUSE_SECONDS)
            else:
                self._adopt(self.info.pacing, authoritative=True)
                return self.info

    def stays_paused(self, group_size: int) -> bool:
        """Return True if the broker has paused this environment, and would also with groups of this size.

        A schedule may have another size at the first step of a run than at the step at which it registered.
        """
        pacing = self.pacing
        if pacing is None or pacing.paused_because is None:
            return False
        return group_size == self._request.group_size or group_size > pacing.batch_size

    def hand_in(self, group: Group, key: GroupKey | None = None, run_id: str | None = None) -> None:
        """Queue a group for submission, under the key of its item if it has one; `run_id` None: for the open run."""
        self._queue.append((group, key, run_id))
        self.pending_sequences += len(group.tokens)
        self.pending_groups += 1
        self.changed.notify()

    async def keep_pacing(self) -> None:
        """Poll the broker's pacing for ever: each request returns when the pacing changes, or after ten seconds."""
        while True:
            assert self.info is not None
            seen = self._adoptions
            try:
                pacing = await self._client.heartbeat(
                    self.info.environment_id,
                    revision=self.pacing.revision if self.pacing is not None else None,
                    wait_seconds=HEARTBEAT_WAIT_SECONDS,
                    process=self._request.process,
                )
            except AtroposError as error:
                await self._recover(error)
                continue
            # A submission answered during this heartbeat may have brought newer pacing than the heartbeat's answer.
            self._adopt(pacing, authoritative=seen == self._adoptions)

    async def keep_submitting(self) -> None:
        """Submit what is handed in, for ever; up to 64 waiting groups of a run without keys go in one request."""
        while True:
            while not self._queue:
                await self.changed.wait()
            group, key, run_id = self._queue.popleft()
            if key is not None:
                await self._submit([group], key.item.run_id, key=key.key)
                self.on_item_group(key.item)
                continue
            groups = [group]
            while self._queue and self._queue[0][1:] == (None, run_id) and len(groups) < MOST_GROUPS_A_POST:
                groups.append(self._queue.popleft()[0])
            await self._submit(groups, run_id)

    async def lease_items(self, request: ItemRequest) -> ItemLease | None:
        """Report items and lease others, through outages too; None if the broker has no route for items."""
        from atropos_api.client import BrokerRefused

        while True:
            assert self.info is not None
            try:
                return await self._client.lease_items(self.info.environment_id, request)
            except AtroposError as error:
                if isinstance(error, BrokerRefused) and _lacks_route(error):
                    return None
                await self._recover(error)

    async def keep_reporting(self, dropped: DroppedGroups) -> None:
        """Report dropped groups to the broker, at most one report a second; return if it has no route for them."""
        from atropos_api.client import BrokerRefused

        reported = 0
        while True:
            while dropped.total == reported:
                await dropped.changed.wait()
            assert self.info is not None
            total = dropped.total
            try:
                await self._client.report_dropped(self.info.environment_id, dropped.report())
                reported = total
            except AtroposError as error:
                if isinstance(error, BrokerRefused) and _lacks_route(error):
                    logger.debug("this broker accepts no reports of dropped groups: %s", error)
                    return
                logger.debug("dropped groups could not be reported; the next report includes them: %s", error)
            await anyio.sleep(REPORT_SECONDS)

    async def keep_reporting_activity(self, describe: Callable[[], EnvironmentActivity]) -> None:
        """Report what the environment is doing, for the page: every 2 s while that changes, else every 10 s.

        Return if the broker has no route for it.
        """
        from atropos_api.client import BrokerRefused

        reported, reported_at = None, float("-inf")
        while True:
            activity = describe()
            state, now = _state_of(activity), time.monotonic()
            if state != reported or now - reported_at >= HEARTBEAT_WAIT_SECONDS:
                assert self.info is not None
                reported, reported_at = state, now
                try:
                    await self._client.report_activity(self.info.environment_id, activity)
                except BrokerRefused as error:
                    if _lacks_route(error):
                        logger.debug("this broker accepts no reports of activity: %s", error)
                        return
                except AtroposError as error:
                    logger.debug("the activity could not be reported: %s", error)
            await anyio.sleep(ACTIVITY_SECONDS)

    async def deregister(self) -> None:
        """Deregister, so that the broker does not wait for this environment; an unreachable broker is ignored."""
        if self.info is not None:
            with anyio.move_on_after(DEREGISTER_SECONDS, shield=True), contextlib.suppress(AtroposError):
                await self._client.leave(self.info.environment_id)

    async def flush(self) -> None:
        """Wait until everything handed in is acknowledged."""
        while self.pending_sequences:
            await self.changed.wait()

    async def _submit(self, groups: list[Group], run_id: str | None, *, key: str | None = None) -> None:
        key = uuid.uuid4().hex if key is None else key
        response = None
        while response is None:
            assert self.info is not None
            try:
                response = await self._client.submit(
                    self.info.environment_id, groups, idempotency_key=key, run_id=run_id
                )
            except AtroposError as error:
                if self._is_refusal(error):
                    await self._find_refused(groups, run_id, error)
                    return
                await self._recover(error)
        self._acknowledge(groups)
        if response.pacing is not None:
            self._adopt(response.pacing, authoritative=False)
        self.changed.notify()

    async def _find_refused(self, groups: list[Group], run_id: str | None, error: Exception) -> None:
        """Find the group that the broker refuses: the groups are sent again one by one."""
        if len(groups) > 1:
            for group in groups:
                await self._submit([group], run_id)
            return
        logger.error("a group was refused and is dropped: %s", error)
        self.on_refused(groups[0], error)
        self._acknowledge(groups)
        self.changed.notify()

    async def _recover(self, error: Exception) -> None:
        """Wait and register again after an outage or a broker that lost its state; raise any other error."""
        from atropos_api.client import BrokerRefused, is_outage

        if is_outage(error):
            logger.warning("%s; waiting for the broker", error)
            await anyio.sleep(PAUSE_SECONDS)
        elif not (isinstance(error, BrokerRefused) and error.kind == "unknown-environment"):
            raise error
        await self.register()

    @staticmethod
    def _is_refusal(error: Exception) -> bool:
        from atropos_api.client import BrokerRefused, GroupNotEncodable

        if isinstance(error, BrokerRefused):
            return error.status in GROUP_REFUSALS or error.kind == FORGOTTEN_RUN
        return isinstance(error, GroupNotEncodable)

    def _acknowledge(self, groups: list[Group]) -> None:
        self.pending_sequences -= sum(len(group.tokens) for group in groups)
        self.pending_groups -= len(groups)
        for group in groups:
            self.on_acknowledged(group)

    def _adopt(self, pacing: Pacing, *, authoritative: bool) -> None:
        """Adopt newer pacing. Only an answer during which nothing else was adopted may lower the revision (a restarted
        broker).
        """
        known = self.pacing
        if known is not None and pacing.revision < known.revision and not authoritative:
            return
        self.pacing = pacing
        self._adoptions += 1
        if known is None or known.policy_version != pacing.policy_version:
            self.on_policy(pacing)
        if known is not None and known.current_step != pacing.current_step:
            self.on_step(pacing)
        if pacing.paused_because and (known is None or known.paused_because != pacing.paused_because):
            logger.warning("paused by the broker: %s", pacing.paused_because)
        if known != pacing:
            self.changed.notify()


def _lacks_route(error: BrokerRefused) -> bool:
    """Return True if this broker does not know the route that was asked for: it is older than this package."""
    return error.status in NO_SUCH_ROUTE and error.kind != "unknown-environment"


def _state_of(activity: EnvironmentActivity) -> tuple[object, ...]:
    """Return what a report says besides times: the broker adds the time that has passed since."""
    slowest = tuple((one.name, one.done, one.last_event) for one in activity.slowest)
    busy = (activity.open_rollouts, activity.open_requests > 0, activity.finished_rollouts, activity.evaluating)
    return (*busy, slowest, tuple(server.available for server in activity.servers))
