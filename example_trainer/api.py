"""Batches in files, as `--save-batches` writes them and `atropos replay` reads them.

A file is the batch in the columns form (docs/reference/columns.md), or as JSON where columns cannot say it.

The trainer's side of the broker: one run, its numbered batches, its policy versions and commits.

`BrokerSession` holds what every call of a run needs (run id, epoch) and says in one line each ten seconds what it
waits for. `BatchFeed` fetches batch n + 1 in a thread while batch n trains, and no further: what lies here is older
by the time it trains, and hidden from the pacing of the environments.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from atropos_api.client import BrokerClient
from atropos_api.client.calls import BrokerUnreachable
from atropos_api.client.events import explain_drops
from atropos_api.common.errors import AtroposError
from atropos_api.wire import Batch, PolicyUpdate, RunInfo, RunRequest
from atropos_api.wire.columns import MAGIC, pack_body
from atropos_api.wire.columns_groups import NotColumnar, decode_batch, encode_group
from example_trainer.errors import BadBatch, BatchTimeout, TrainerError

SUFFIX = ".atb"


def batch_path(directory: Path, number: int, *, rank: int = 0, world_size: int = 1) -> Path:
    """Where batch `number` lies; each rank of a trainer has its own slice of it."""
    slice_name = f".rank-{rank}" if world_size > 1 else ""
    return directory / f"batch-{number}{slice_name}{SUFFIX}"


def write_batch(path: Path, batch: Batch) -> None:
    """Write beside its place and rename, so that a file of that name is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    beside.write_bytes(encode_batch(batch))
    os.replace(beside, path)  # noqa: PTH105 - the atomic one, by its name


def read_batch(path: Path) -> Batch:
    """The batch in `path`; raises `BadBatch` with what is wrong with the file."""
    try:
        body = path.read_bytes()
    except OSError as error:
        raise BadBatch(f"{path} cannot be read: {error.strerror}; --save-batches writes such files") from error
    try:
        return decode_batch(body, arrays=True) if body.startswith(MAGIC) else msgspec.json.decode(body, type=Batch)
    except (AtroposError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadBatch(f"{path} holds no batch ({error}); --save-batches writes such files") from error


def encode_batch(batch: Batch) -> bytes:
    """The batch as one body."""
    head = msgspec.json.encode({"number": batch.number, "run_id": batch.run_id})
    try:
        return pack_body(head, [encode_group(group) for group in batch.groups])
    except NotColumnar:
        return msgspec.json.encode(batch)


logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

WAIT_LINE_SECONDS = 10.0

LONG_POLL_SECONDS = 10.0

IDLE_SECONDS = 2.0

POLL_SECONDS = 0.2


class BrokerSession:
    """One run at the broker, from `begin` to `finish`."""

    def __init__(self, client: BrokerClient, *, rank: int = 0, world_size: int = 1) -> None:
        self._client = client
        self._rank = rank
        self._world_size = world_size
        self._info: RunInfo | None = None

    @property
    def info(self) -> RunInfo:
        if self._info is None:
            raise TrainerError("no run has been begun at the broker; call begin() first")
        return self._info

    def refuse_unknown_host(self) -> None:
        """Tell a mistyped broker host at once; one that is merely not up yet is waited for later."""
        try:
            self._client.wait_until_ready(timeout_seconds=0.0)
        except BrokerUnreachable as error:
            logger.debug("%s", error)

    def wait_until_ready(self, timeout_seconds: float) -> None:
        self._client.wait_until_ready(timeout_seconds, on_wait=lambda line: logger.info("%s", line))

    def begin(self, request: RunRequest) -> RunInfo:
        """Begin the run, or take it over from the batch after `request.resume_from_batch`."""
        self._info = self._client.begin_run(request)
        logger.info("run %s begun: next batch %d", self._info.run_id, self._info.next_batch)
        if self._info.leftover_groups:
            logger.info("%d groups of other runs stay behind at the broker", self._info.leftover_groups)
        return self._info

    def get_batch(self, number: int) -> Batch | None:
        """Batch `number`, or None when it has not filled within one long poll; its rows of numbers may be arrays."""
        return self._client.get_batch(
            number,
            run_id=self.info.run_id,
            epoch=self.info.epoch,
            wait_seconds=LONG_POLL_SECONDS,
            rank=self._rank,
            world_size=self._world_size,
            arrays=True,
        )

    def whole_batch(self, batch: Batch) -> Batch:
        """The batch that `batch` is the part of that this process trains on."""
        return batch

    def explain_wait(self) -> list[str]:
        """What environments say of the groups they dropped; nothing where the broker does not tell."""
        try:
            return list(explain_drops(self._client.status()))
        except AtroposError as error:
            logger.debug("the broker's status is not to be had: %s", error)
            return []

    def announce_policy(self, version: int, step: int, policy_name: str | None = None) -> None:
        """Tell the broker that servers now sample under `version`, made by `step`, and by which name if by another."""
        self._client.update_policy(
            PolicyUpdate(
                run_id=self.info.run_id,
                version=version,
                step=step,
                published_at=time.time(),
                epoch=self.info.epoch,
                policy_name=policy_name,
            )
        )

    def held_seconds(self, wait_seconds: float = 0.0) -> float:
        """For how long evaluations ask that no other policy be published; waits for their end up to `wait_seconds`."""
        state = self._client.get_policy(run_id=self.info.run_id, epoch=self.info.epoch, wait_seconds=wait_seconds)
        return state.held_seconds

    def commit(self, number: int) -> None:
        """Everything up to batch `number` is covered by a checkpoint, or none are kept."""
        self._client.commit(number, run_id=self.info.run_id, epoch=self.info.epoch)

    def finish(self) -> None:
        """End the run: environments are told to stop."""
        self._client.finish_run(self.info.run_id, epoch=self.info.epoch)

    def close(self) -> None:
        self._client.close()


class BackgroundCall(Generic[ResultT]):
    """One call in a daemon thread; `result` hands over what it returned or raised.

    The thread is a daemon because a long poll must not keep a process alive that has decided to exit.
    """

    def __init__(self, call: Callable[[], ResultT], *, name: str) -> None:
        self._call = call
        self._value: ResultT | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether the call has ended, waiting up to `seconds` for it."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> ResultT:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            self._error = error


class BatchFeed(Generic[ResultT]):
    """Batches in order, each made ready by `prepare`; the next one is fetched while the last one is in use."""

    def __init__(
        self,
        get_batch: Callable[[int], Batch | None],
        prepare: Callable[[Batch], ResultT],
        *,
        last: int,
        prefetch: bool,
        timeout_seconds: float,
        should_stop: Callable[[], bool],
        on_idle: Callable[[], None],
        explain: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`explain` says, after a long poll in vain, why nothing may have come."""
        self._get_batch = get_batch
        self._prepare = prepare
        self._last = last
        self._prefetch = prefetch
        self._timeout_seconds = timeout_seconds
        self._should_stop = should_stop
        self._on_idle = on_idle
        self._explain = explain
        self._hints: Sequence[str] = ()
        self._closed = threading.Event()
        self._pending: tuple[int, BackgroundCall[ResultT | None]] | None = None

    def take(self, number: int) -> ResultT | None:
        """Batch `number`, made ready; None when the run is to stop. `on_idle` is called now and then meanwhile."""
        call = self._begin(number)
        started = time.monotonic()
        next_idle, next_line = started + IDLE_SECONDS, started + WAIT_LINE_SECONDS
        while not call.wait(POLL_SECONDS):
            if self._should_stop():
                return None
            now = time.monotonic()
            if now - started > self._timeout_seconds:
                raise BatchTimeout(
                    f"no environment filled batch {number} within {self._timeout_seconds:.0f} s; is one running and "
                    f"registered? (--batch-timeout sets the limit){''.join(f'; {hint}' for hint in self._hints)}"
                )
            if now >= next_idle:
                self._on_idle()
                next_idle = now + IDLE_SECONDS
            if now >= next_line:
                logger.info("waiting for batch %d (%.0f s)", number, now - started)
                for hint in self._hints:
                    logger.warning("%s", hint)
                next_line += WAIT_LINE_SECONDS
        self._pending = None
        batch = call.result()
        if self._prefetch and number < self._last:
            self._begin(number + 1)
        return batch

    def close(self) -> None:
        """Fetch nothing more; a long poll under way is abandoned."""
        self._closed.set()

    def _begin(self, number: int) -> BackgroundCall[ResultT | None]:
        if self._pending is None or self._pending[0] != number:
            self._pending = (number, BackgroundCall(lambda: self._fetch(number), name=f"fetch-batch-{number}"))
        return self._pending[1]

    def _fetch(self, number: int) -> ResultT | None:
        while not self._closed.is_set():
            batch = self._get_batch(number)
            if batch is not None:
                return self._prepare(batch)
            self._hints = self._explain()
        return None
