"""The fence around a change of weights: no token is ever sampled from a mixture of two versions.

A publish closes the door, gives running requests a moment to end, pauses the rest and drops what they have computed;
then the trainer writes, and the end of the publish stamps the new version, resumes and opens the door. The pause is a
lease. Should the trainer fall silent, the header of the shared tensors tells whether the weights are whole, and the
server goes on, or torn, and it refuses to serve until a trainer has published them completely.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from typing import Literal, Protocol

from example_trainer.serving import problems
from example_trainer.serving.door import Door
from example_trainer.serving.problems import Problem
from example_trainer.weights.versions import PolicyVersion, SegmentHeader

logger = logging.getLogger(__name__)

InFlight = Literal["drain", "recompute", "finish", "keep_kv"]
Counters = dict[str, int]


class Engine(Protocol):
    """What the fence asks of vLLM."""

    async def pause(self, *, discard: bool) -> Counters:
        """Stop after the current step; with `discard` drop all computed KV and every cached prefix."""

    async def resume(self, version: str | None) -> Counters:
        """Stamp what is sampled from now on with `version`, if given, and go on."""

    async def stamp(self, version: str) -> None:
        """Stamp what is sampled from now on, without resuming."""

    def salt_prefixes(self, salt: str) -> None:
        """Keep the cached prefixes of requests admitted from now on apart from all earlier ones."""


class Change(Protocol):
    """New weights that the server itself has put in place of the old ones, which it can still put back."""

    async def keep(self) -> None:
        """The new weights are served: let go of the old ones."""

    async def take_back(self) -> bool:
        """Put the old weights back; whether they are whole again."""


@dataclass(slots=True)
class Publish:
    """One publish under way."""

    publish_id: str
    in_flight: InFlight
    lease_seconds: float
    door_closed_at: float
    recomputed_tokens: int = 0
    lapse: asyncio.TimerHandle | None = None
    change: Change | None = None
    was_torn: bool = False
    """Whether the weights that `change` can put back are torn as well."""
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The last publish that ended, remembered so that a repeated `end` gets the same answer."""

    publish_id: str
    answer: dict[str, float]


class Fence:
    """Which version is served and whether anything may be. `header` is None where no weights are shared."""

    def __init__(
        self, engine: Engine, door: Door, *, header: SegmentHeader | None, awaits_adapter: bool = False
    ) -> None:
        self._engine = engine
        self._door = door
        self._header = header
        self._awaits_adapter = awaits_adapter
        self._allow_writes(False)
        self._publish: Publish | None = None
        self._finished: Finished | None = None
        self._held = False
        self._overwriting = False
        self._busy = asyncio.Lock()
        self.policy_version: PolicyVersion | None = None
        self.torn = False
        self.publishes_keeping_kv = 0
        self._refresh_door()

    @property
    def paused(self) -> bool:
        return self._held or self._publish is not None or self.torn

    @property
    def publishing(self) -> bool:
        return self._publish is not None

    async def serve_fixed(self, version: PolicyVersion) -> None:
        """A server whose weights do not change: stamp the version it was started with."""
        await self._engine.stamp(str(version))
        self.policy_version = version
        self._refresh_door()

    def serve_adapters(self) -> None:
        """The first adapter is there; from here on requests bring their version with their adapter."""
        self._awaits_adapter = False
        self._refresh_door()

    async def begin(self, *, lease_seconds: float, drain_seconds: float, in_flight: InFlight) -> dict[str, object]:
        """Close the door, drain, pause. When this returns nothing is being computed."""
        if self._publish is not None:
            raise Problem(
                409, "publish-in-progress", f"publish {self._publish.publish_id} has not ended or lapsed yet", 1
            )
        publish = Publish(uuid.uuid4().hex, in_flight, lease_seconds, time.monotonic())
        self._publish = publish
        self._refresh_door()
        try:
            limits = {"drain": drain_seconds, "finish": None}
            drained = await self._door.wait_until_empty(limits.get(in_flight, 0.0))
            pause_began = time.monotonic()
            async with self._busy:
                counters = await self._engine.pause(discard=in_flight != "keep_kv")
        except BaseException:
            self._publish = None
            await self._go_on()
            raise
        self._allow_writes(True)
        publish.recomputed_tokens = counters["discarded_tokens"]
        self._start_lease(publish)
        return {
            "publish_id": publish.publish_id,
            "drained": drained,
            "paused_requests": counters["paused_requests"],
            "pause_seconds": time.monotonic() - pause_began,
            "generated_tokens_total": counters["generated_tokens_total"],
            "recomputed_tokens_total": counters["recomputed_tokens_total"],
        }

    def overwrite(self, publish_id: str, version: PolicyVersion, change: Change | None = None) -> None:
        """The server itself is about to change the weights: until the publish ends they are torn.

        An abort takes `change` back. A lapse does not: where several servers change together, the others may have
        gone on under the new version by then.
        """
        publish = self._current(publish_id)
        self._check_new(version)
        publish.change, publish.was_torn = change, self._overwriting
        self._overwriting = True

    def renew(self, publish_id: str) -> dict[str, object]:
        publish = self._current(publish_id)
        self._start_lease(publish)
        return {"publish_id": publish_id, "lease_seconds": publish.lease_seconds}

    async def end(self, publish_id: str, version: PolicyVersion) -> dict[str, float]:
        """The weights are whole: stamp `version`, resume, open the door. Repeating it gives the same answer."""
        if self._finished is not None and self._finished.publish_id == publish_id:
            return self._finished.answer
        publish = self._current(publish_id)
        self._check_complete(version)
        self._stop_lease(publish)
        self._allow_writes(False)
        async with self._busy:
            if publish.in_flight == "keep_kv":
                self.publishes_keeping_kv += 1
                self._engine.salt_prefixes(f"policy-{version}")
            if self._held:
                await self._engine.stamp(str(version))
            else:
                await self._engine.resume(str(version))
            self.policy_version, self.torn, self._publish = version, False, None
            self._overwriting = False
            self._refresh_door()
        answer = {
            "version": version,
            "recomputed_tokens": publish.recomputed_tokens,
            "fence_seconds": time.monotonic() - publish.door_closed_at,
        }
        self._finished = Finished(publish_id, answer)
        if publish.change is not None:
            await publish.change.keep()
        return answer

    async def abort(self, publish_id: str) -> dict[str, object]:
        """Go on under the old version, if nothing was written or it can be taken back; else the weights are torn."""
        publish = self._current(publish_id)
        self._stop_lease(publish)
        publish.given_up = True
        if publish.change is not None and not publish.was_torn and await publish.change.take_back():
            self._overwriting = False
        await self._give_up(publish)
        return {"publish_id": publish_id, "torn": self.torn, "policy_version": self.policy_version}

    async def hold(self) -> None:
        """Pause by hand: requests are refused, running ones stand still, until `release`."""
        self._held = True
        self._refresh_door()
        async with self._busy:
            await self._engine.pause(discard=False)

    async def release(self) -> None:
        self._held = False
        await self._go_on()

    def stop(self) -> None:
        """Refuse everything from here on: the server is stopping."""
        if self._publish is not None:
            self._stop_lease(self._publish)
        self._door.refuse(problems.stopping())

    def _current(self, publish_id: str) -> Publish:
        if self._publish is None or self._publish.publish_id != publish_id or self._publish.given_up:
            detail = f"publish {publish_id} is not under way: its lease lapsed, or it has ended; begin a new one"
            raise Problem(409, "publish-lapsed", detail)
        return self._publish

    def _check_new(self, version: PolicyVersion) -> None:
        served = self.policy_version
        if served is not None and version <= served:
            detail = f"version {version} is not above {served}, which is served now; versions are never reused"
            raise Problem(409, "version-not-new", detail)

    def _check_complete(self, version: PolicyVersion) -> None:
        self._check_new(version)
        if self._header is None:
            return
        header = self._header.state()
        if header.torn or header.version != version:
            detail = (
                f"the header of the shared weights says version {header.version}, write_begin {header.write_begin}, "
                f"write_end {header.write_end}; all three must be {version} before the publish ends"
            )
            raise Problem(409, "write-incomplete", detail)

    def _allow_writes(self, allowed: bool) -> None:
        if self._header is not None:
            self._header.allow_writes(allowed)

    def _start_lease(self, publish: Publish) -> None:
        self._stop_lease(publish)
        loop = asyncio.get_running_loop()
        publish.lapse = loop.call_later(publish.lease_seconds, self._on_lapse, publish)

    def _stop_lease(self, publish: Publish) -> None:
        if publish.lapse is not None:
            publish.lapse.cancel()
            publish.lapse = None

    def _on_lapse(self, publish: Publish) -> None:
        if self._publish is publish:
            logger.warning(
                "publish %s lapsed after %g s without a sign of its trainer", publish.publish_id, publish.lease_seconds
            )
            self._task = asyncio.ensure_future(self._give_up(publish))

    async def _give_up(self, publish: Publish) -> None:
        if self._publish is not publish:
            return
        self._publish = None
        await self._go_on()

    async def _go_on(self) -> None:
        """Resume if the weights are whole and nobody holds the server; in any case set the door to what holds now."""
        self._allow_writes(False)
        self.torn = self._overwriting or (self._header is not None and self._header.state().torn)
        if self.torn:
            logger.error("the weights are torn: nothing is served until a trainer publishes them completely")
        self._refresh_door()
        if not self.paused:
            async with self._busy:
                if not self.paused:
                    await self._engine.resume(None)

    def _refresh_door(self) -> None:
        if self.torn:
            self._door.refuse(problems.weights_torn())
        elif self.policy_version is None and (self._awaits_adapter or self._header is not None):
            self._door.refuse(problems.no_policy())
        elif self._held:
            self._door.refuse(problems.paused())
        elif self._publish is not None:
            self._door.close()
        else:
            self._door.open()
