"""The fence around a change of weights: no token is ever sampled from a mixture of two versions.

A publish closes the gate, gives running requests some time to end (by `drain.py`, unless the trainer says how long),
pauses the rest and drops their computed KV; then the trainer writes, and the end of the publish stamps the new version,
resumes the engine and opens the gate. The pause is a lease. If the trainer stops renewing it, the header of the shared
tensors shows the state of the weights: if they are whole, the server resumes under the version in the header; if they
are torn, it refuses to serve until a trainer has published them completely. A publish is over only once the engine has
resumed; until then its lease runs, and the server tries again each time the lease lapses.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from example_trainer.options.publish import InFlight
from example_trainer.serving import problems
from example_trainer.serving.admission import AdmissionGate
from example_trainer.serving.drain import NOTHING_RUNS, DrainPlan, Running, plan_drain
from example_trainer.serving.engine import Counters
from example_trainer.serving.problems import Problem
from example_trainer.serving.publish import Answer, Lease, PastPublishes, Publish, ReversibleUpdate, lapsed
from example_trainer.weight_protocol.shm_header import NO_VERSION, PolicyVersion, SegmentHeader

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
QUIET_SECONDS = 10.0
"""Time without work in the engine after which a drain ends: the open requests then only wait for their clients. It is
longer than a tool call that a request makes between two generations."""


class Engine(Protocol):
    """The calls that the fence makes to vLLM."""

    async def pause(self, *, discard: bool) -> Counters:
        """Stop after the current step; with `discard` drop all computed KV and every cached prefix."""

    async def resume(self, version: str | None) -> Counters:
        """Stamp tokens sampled from now on with `version`, if given, and resume."""

    async def stamp(self, version: str) -> None:
        """Stamp tokens sampled from now on, without resuming."""

    async def counters(self) -> Counters:
        """Return the numbers of running and waiting requests, and of all tokens generated so far."""

    async def running(self) -> Running:
        """Return the requests that are computed now, and what the engine's steps cost."""

    def salt_prefixes(self, salt: str) -> None:
        """Separate the cached prefixes of requests admitted from now on from all earlier ones."""


class Fence:
    """The served version and the publish under way. `header` is None if no weights are shared."""

    def __init__(
        self, engine: Engine, gate: AdmissionGate, *, header: SegmentHeader | None, awaits_adapter: bool = False
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._header = header
        self._awaits_adapter = awaits_adapter
        self._allow_writes(False)
        self._publish: Publish | None = None
        self._past = PastPublishes()
        self._held = False
        self._overwriting = False
        self._engine_paused = False
        """True from the pause for a publish until the engine resumes: under that one, or one that has replaced it."""
        self._stopped = False
        self._busy = asyncio.Lock()
        self.policy_version: PolicyVersion | None = None
        self.torn = False
        self.publishes_keeping_kv = 0
        self.publishes = 0
        self.fence_seconds = 0.0
        """Time for which publishes have held new requests since the start."""
        self.expected_loss_seconds = self.loss_seconds = 0.0
        """Generation time that publishes under `auto` have cost since the start, as planned and as measured."""
        self._update_gate()

    @property
    def paused(self) -> bool:
        return self._held or self._publish is not None or self.torn

    @property
    def publishing(self) -> bool:
        return self._publish is not None

    async def serve_fixed(self, version: PolicyVersion) -> None:
        """Stamp the version that a server with unchanging weights was started with."""
        await self._engine.stamp(str(version))
        self.policy_version = version
        self._update_gate()

    def serve_adapters(self) -> None:
        """Open the gate once the first adapter is loaded; from then on requests have their adapter's version."""
        self._awaits_adapter = False
        self._update_gate()

    async def begin(
        self, *, lease_seconds: float, drain_seconds: float, in_flight: InFlight, publish_id: str | None = None
    ) -> dict[str, object]:
        """Close the gate, drain, pause. When this returns nothing is being computed.

        A trainer that names its publish itself can repeat the call if the answer was lost, and renew the lease while
        the server still drains. A publish whose lease has run out is replaced by the next one.
        """
        current = self._publish
        if current is not None and current.publish_id == publish_id:
            return await asyncio.shield(self._current(publish_id).begun)
        if publish_id is not None and publish_id in self._past:
            raise lapsed(publish_id)
        if current is not None and (current.restoring or not current.abandoned):
            raise current.refusal_of_others()
        if current is not None:
            self._close(current, None)
        new_id = publish_id or uuid.uuid4().hex
        publish = Publish(new_id, in_flight, Lease(lease_seconds, partial(self._on_lapse, new_id)), time.monotonic())
        self._publish = publish
        self._update_gate()
        if publish_id is not None:
            publish.lease.begin()
        publish.begun = asyncio.ensure_future(self._drain_and_pause(publish, drain_seconds))
        return await asyncio.shield(publish.begun)

    def overwrite(self, publish_id: str, version: PolicyVersion, update: ReversibleUpdate | None = None) -> None:
        """Mark the weights as torn until the publish ends, because the server itself is about to change them.

        An abort restores the old weights through `update`. A lapse does not: if several servers change together, the
        others may have resumed under the new version by then.
        """
        publish = self._paused_publish(publish_id)
        self._check_new(version)
        publish.update, publish.was_torn = update, self._overwriting
        self._overwriting = True

    def renew(self, publish_id: str) -> dict[str, object]:
        publish = self._current(publish_id)
        publish.lease.begin()
        return {"publish_id": publish_id, "lease_seconds": publish.lease.seconds}

    async def end(self, publish_id: str, version: PolicyVersion) -> Answer:
        """Stamp `version`, resume, open the gate: the weights are whole. Repeating it gives the same answer."""
        async with self._busy:
            past = self._past.answer(publish_id)
            if past is not None and past["version"] == version:
                return past
            publish = self._paused_publish(publish_id)
            self._check_complete(version)
            self._allow_writes(False)
            answer = await self._resume_under(publish, version)
        if publish.update is not None:
            await publish.update.keep()
        return answer

    async def abort(self, publish_id: str) -> dict[str, object]:
        """Resume with the present weights; if they are partly changed and cannot be restored they are torn.

        For a publish that is over already it only returns the state served now.
        """
        async with self._busy:  # an `end` under way resumes with the new weights: nothing is restored then
            publish = None if publish_id in self._past else self._current(publish_id)
            if publish is not None:
                await self._restore(publish)
        if publish is not None:
            await self._settle(publish)
        return {"publish_id": publish_id, "torn": self.torn, "policy_version": self.policy_version}

    async def _restore(self, publish: Publish) -> None:
        publish.abandoned = publish.restoring = True
        publish.lease.stop()  # restoring weights may take longer than the lease
        try:
            if publish.update is not None and not publish.was_torn and await publish.update.restore():
                self._overwriting = False
        finally:
            publish.restoring = False
            publish.lease.begin()

    async def hold(self) -> None:
        """Pause by hand: new requests are refused and running ones are paused, until `release`."""
        self._held = True
        self._update_gate()
        async with self._busy:
            self._held = True  # again: a `release` that was under way has ended an earlier hold
            self._update_gate()
            await self._engine.pause(discard=False)

    async def release(self) -> None:
        """End `hold`. A publish under way is not touched, and torn weights stay refused."""
        async with self._busy:
            if not self._engine_paused:
                await self._engine.resume(None)
            self._held = False
            self._update_gate()

    def stop(self, *, refuse: bool = True) -> None:
        """Admit no request from now on: new ones are refused, or wait for the next server."""
        self._stopped = True
        if self._publish is not None:
            self._publish.lease.stop()
        if refuse:
            self._gate.refuse(problems.stopping())
        else:
            self._gate.close()

    async def _drain_and_pause(self, publish: Publish, drain_seconds: float) -> dict[str, object]:
        """Drain and pause the engine; the result is the answer of `begin`."""
        inside, request_seconds = self._gate.inside, self._gate.request_seconds()
        with self._abandoning_on_error(publish):
            plan = await self._drain(publish.in_flight, drain_seconds)
        drained = self._gate.inside == 0
        pause_began = time.monotonic()
        async with self._busy:
            self._current(publish.publish_id)
            self._engine_paused = True  # a call that fails may have paused it
            with self._abandoning_on_error(publish):
                counters = await self._engine.pause(discard=publish.in_flight != "keep_kv")
            self._current(publish.publish_id)  # the lease may have run out while the engine paused
            busy_seconds = (self._gate.request_seconds() - request_seconds) / max(1, inside)
            idle_seconds = time.monotonic() - publish.gate_closed_at - busy_seconds if inside else 0.0
            publish.note_pause(counters["discarded_tokens"], plan, idle_seconds)
            publish.lease.begin()
            self._allow_writes(True)
        return {
            "publish_id": publish.publish_id,
            "drained": drained,
            "paused_requests": counters["paused_requests"],
            "pause_seconds": time.monotonic() - pause_began,
            "generated_tokens_total": counters["generated_tokens_total"],
            "recomputed_tokens_total": counters["recomputed_tokens_total"],
        }

    async def _drain(self, in_flight: InFlight, limit_seconds: float) -> DrainPlan | None:
        """Wait for running requests; return the plan by which it began, or None if the trainer has said how long.

        Under torn weights the engine is paused since the publish that tore them, and no request can end.
        """
        async with self._busy:  # the engine may be resuming after a publish that lapsed
            if self._engine_paused:
                return None
        if in_flight != "auto":
            limits = {"drain": limit_seconds, "finish": math.inf}
            await self.wait_for_running(limits.get(in_flight, 0.0), quiet_seconds=QUIET_SECONDS)
            return None
        if not self._gate.inside:
            return NOTHING_RUNS
        end = time.monotonic() + limit_seconds
        first = plan = plan_drain(await self._engine.running(), limit_seconds)
        # Steps may take longer than expected, and outputs of one length end together: a wait that stopped just before
        # their end would have cost its time and all of their tokens.
        while plan.seconds > 0 and not await self._gate.wait_until_empty(plan.seconds):
            plan = plan_drain(await self._engine.running(), end - time.monotonic(), places=first.places)
        return first

    async def wait_for_running(self, limit_seconds: float, *, quiet_seconds: float) -> None:
        """Wait until the requests inside have ended, the engine is paused, or it has done nothing for `quiet_seconds`.

        In the last case they wait for their clients: a client that stops reading its stream, or never sends the body
        that it has announced, would hold up a publish under `finish` for ever. Or they are paused by hand: the drain of
        a server that its operator has paused would wait until the same operator resumes it.
        """
        now = quiet_since = time.monotonic()
        end, generated = now + limit_seconds, -1
        while not await self._gate.wait_until_empty(min(max(0.0, end - now), _LOOK_SECONDS)):
            now = time.monotonic()
            if self._engine_paused or now >= end:
                return
            counters = await self._engine.counters()
            before, generated = generated, counters["generated_tokens_total"]
            computes = not self._held and (counters["requests_running"] or counters["requests_waiting"])
            if computes or generated != before:
                quiet_since = now
            elif now - quiet_since >= quiet_seconds:
                return

    @contextmanager
    def _abandoning_on_error(self, publish: Publish) -> Iterator[None]:
        """Abandon the publish, so that the engine resumes, if a call of the engine fails."""
        try:
            yield
        except BaseException:
            publish.abandoned = True
            self._settle_soon(publish)
            raise

    def _current(self, publish_id: str) -> Publish:
        if self._publish is None or self._publish.publish_id != publish_id or self._publish.abandoned:
            raise lapsed(publish_id)
        return self._publish

    def _paused_publish(self, publish_id: str) -> Publish:
        publish = self._current(publish_id)
        if not publish.engine_paused:
            raise Problem(409, "publish-not-begun", f"publish {publish_id} still waits for running requests to end", 1)
        return publish

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

    def _on_lapse(self, publish_id: str) -> None:
        publish = self._publish
        if publish is not None and publish.publish_id == publish_id:
            seconds = publish.lease.seconds
            logger.warning("publish %s lapsed: its trainer did not renew it for %g s", publish_id, seconds)
            publish.abandoned = True
            self._settle_soon(publish)

    def _settle_soon(self, publish: Publish) -> None:
        self._task = asyncio.ensure_future(self._settle_or_try_again(publish))

    async def _settle_or_try_again(self, publish: Publish) -> None:
        try:
            await self._settle(publish)
        except Exception:
            logger.exception("the engine has not resumed after publish %s; trying again", publish.publish_id)
            publish.lease.begin()

    async def _settle(self, publish: Publish) -> None:
        """End a publish that its trainer does not end: resume with whole weights, refuse torn ones."""
        async with self._busy:
            if self._publish is not publish:
                return
            self._allow_writes(False)  # before the header is read: see `SegmentHeader.begin_write`
            header = self._header.state() if self._header is not None else None
            self.torn = self._overwriting or (header is not None and header.torn)
            if self.torn:
                logger.error("the weights are torn: nothing is served until a trainer publishes them completely")
                self._close(publish, None)
            elif header is not None and header.version not in {NO_VERSION, self.policy_version}:
                logger.warning("the weights are whole as version %d, which is served from now on", header.version)
                await self._resume_under(publish, header.version)
            else:
                if not self._held:
                    await self._engine.resume(None)
                self._engine_paused = False
                self._close(publish, None)

    async def _resume_under(self, publish: Publish, version: PolicyVersion) -> Answer:
        """Resume the engine under a new version; the publish is over after that."""
        if publish.in_flight == "keep_kv":
            self.publishes_keeping_kv += 1
            self._engine.salt_prefixes(f"policy-{version}")
        if self._held:
            await self._engine.stamp(str(version))
        else:
            await self._engine.resume(str(version))
        self.policy_version, self.torn, self._overwriting, self._engine_paused = version, False, False, False
        answer = publish.answer(version)
        self.publishes += 1
        self.fence_seconds += answer["fence_seconds"]
        self.expected_loss_seconds += publish.expected_loss_seconds
        self.loss_seconds += publish.loss_seconds
        self._close(publish, answer)
        return answer

    def _close(self, publish: Publish, outcome: Answer | None) -> None:
        publish.lease.stop()
        self._past.remember(publish.publish_id, outcome)
        if self._publish is publish:
            self._publish = None
        self._update_gate()

    def _update_gate(self) -> None:
        if self._stopped:
            return
        if self.torn:
            self._gate.refuse(problems.weights_torn())
        elif self.policy_version is None and (self._awaits_adapter or self._header is not None):
            self._gate.refuse(problems.no_policy())
        elif self._held:
            self._gate.refuse(problems.paused())
        elif self._publish is not None:
            self._gate.close()
        else:
            self._gate.open()
