"""The trainer's broker connection for one run: numbered batches, policy versions and commits; and batches in files.

`BrokerSession` holds the run id and epoch that every call needs. `BatchFeed` fetches batch n + 1 in a thread while
batch n trains, and logs a line every ten seconds while it waits. It fetches no further ahead: a batch waiting in the
trainer grows stale, and the broker cannot count it when it paces the environments.

`write_batch` and `read_batch` handle the files of `--save-batches`, which `atropos replay` reads: a batch in the
columns form (docs/reference/columns.md), or as JSON where columns cannot represent it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from atropos_api.client import BrokerClient, BrokerRefused, is_outage
from atropos_api.client.calls import BrokerUnreachable
from atropos_api.client.events import explain_drops
from atropos_api.common.concurrency import Wait
from atropos_api.common.errors import AtroposError
from atropos_api.common.files import write_whole
from atropos_api.wire import Batch, PolicyUpdate, RunInfo, RunRequest, ServerSet
from atropos_api.wire.columns import MAGIC, pack_body
from atropos_api.wire.columns_groups import NotColumnar, decode_batch, encode_group
from example_trainer.errors import (
    BadBatch,
    BatchTimeout,
    MissingLogprobs,
    NotWritten,
    PublishFailed,
    RanksFailed,
    ServerExited,
    TrainerError,
    WaitTimedOut,
)

SUFFIX = ".atb"


def batch_path(directory: Path, number: int, *, rank: int = 0, world_size: int = 1) -> Path:
    """Return the path of the file for batch `number`; each rank of a trainer has its own slice of it."""
    slice_name = f".rank-{rank}" if world_size > 1 else ""
    return directory / f"batch-{number}{slice_name}{SUFFIX}"


def write_batch(path: Path, batch: Batch) -> None:
    """Write a temporary file in the same directory and rename it, so that a file named `path` is always complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, encode_batch(batch))
    except OSError as error:
        raise NotWritten(
            f"{path} cannot be written ({error.strerror}); free the space, or leave --save-batches out, and go on with "
            "--resume auto"
        ) from error


def read_batch(path: Path) -> Batch:
    """Return the batch stored in `path`; raise `BadBatch`, which names the fault, if the file cannot be read."""
    try:
        body = path.read_bytes()
    except OSError as error:
        raise BadBatch(f"{path} cannot be read: {error.strerror}; name a file that --save-batches wrote") from error
    try:
        return decode_batch(body, arrays=True) if body.startswith(MAGIC) else msgspec.json.decode(body, type=Batch)
    except (AtroposError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadBatch(f"{path} is not a saved batch ({error}); name a file that --save-batches wrote") from error


def encode_batch(batch: Batch) -> bytes:
    """Return the batch as bytes, in the columns form if possible and else as JSON."""
    head = msgspec.json.encode({"number": batch.number, "run_id": batch.run_id, "policy": batch.policy})
    try:
        return pack_body(head, [encode_group(group) for group in batch.groups])
    except NotColumnar:
        return msgspec.json.encode(batch)


logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
LONG_POLL_SECONDS = 10.0
IDLE_SECONDS = 2.0
POLL_SECONDS = 0.2


class BrokerSession:
    """The broker connection of one run: it makes all of the run's calls, from `begin` to `finish`."""

    def __init__(self, client: BrokerClient, *, rank: int = 0, world_size: int = 1) -> None:
        self._client = client
        self._rank = rank
        self._world_size = world_size
        self._info: RunInfo | None = None

    @property
    def begun(self) -> RunInfo | None:
        """The run, once it has been begun."""
        return self._info

    @property
    def info(self) -> RunInfo:
        if self._info is None:
            raise TrainerError("no run has been begun at the broker; call begin() first")
        return self._info

    def refuse_unknown_host(self) -> None:
        """Raise at once for a broker host that does not exist; a broker that is not up yet is waited for later."""
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
            logger.info("%d groups of other runs remain at the broker", self._info.leftover_groups)
        return self._info

    def get_batch(self, number: int) -> Batch | None:
        """Return batch `number`, or None if it did not fill within one long poll; its number rows may be arrays."""
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
        """Return the whole batch of which `batch` is this process's share; with one process that is `batch`."""
        return batch

    def explain_wait(self) -> list[str]:
        """Return the reasons that environments gave for dropped groups; none if the broker's status is unavailable."""
        try:
            return list(explain_drops(self._client.status()))
        except AtroposError as error:
            logger.debug("the broker's status is unavailable: %s", error)
            return []

    def get_servers(self, policy: str | None = None) -> ServerSet:
        """Return the inference servers that are registered at the broker, of one policy or of all."""
        return self._client.get_servers(policy)

    def announce_policy(
        self, version: int, step: int, policy_name: str | None = None, servers: Sequence[str] | None = None
    ) -> None:
        """Tell the broker that servers now sample under `version`, made by `step`.

        `policy_name` is the model name that clients must request for it, None if the name does not change. `servers`
        are the leases of the registered servers that have been proven to serve it.
        """
        self._client.update_policy(
            PolicyUpdate(
                run_id=self.info.run_id,
                version=version,
                step=step,
                published_at=time.time(),
                epoch=self.info.epoch,
                policy_name=policy_name,
                servers=None if servers is None else list(servers),
            )
        )

    def held_seconds(self, wait_seconds: float = 0.0) -> float:
        """Return how many seconds of policy holds by evaluations remain, after waiting up to `wait_seconds` for them.

        While a hold lasts, no other policy should be published.
        """
        state = self._client.get_policy(run_id=self.info.run_id, epoch=self.info.epoch, wait_seconds=wait_seconds)
        return state.held_seconds

    def is_held(self) -> bool:
        """Return True while an evaluation holds the policy; called on rank 0 only, while other ranks may be waiting."""
        return BrokerSession.held_seconds(self) > 0

    def commit(self, number: int) -> None:
        """Commit all batches up to `number`: a checkpoint covers them, or the run keeps no checkpoints."""
        self._client.commit(number, run_id=self.info.run_id, epoch=self.info.epoch)

    def finish(self) -> None:
        """End the run at the broker, which then tells the environments to stop."""
        self._client.finish_run(self.info.run_id, epoch=self.info.epoch)

    def close(self) -> None:
        self._client.close()


class BackgroundCall(Generic[ResultT]):
    """One call that runs in a daemon thread: `result` returns its value or raises its error.

    The thread is a daemon because a long poll must not keep a process alive that is to exit.
    """

    def __init__(self, call: Callable[[], ResultT], *, name: str) -> None:
        self._call = call
        self._value: ResultT | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait up to `seconds` for the call to end and return True if it has."""
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
        except BaseException as error:  # noqa: BLE001 - `result` raises it in the calling thread
            self._error = error


class BatchFeed(Generic[ResultT]):
    """A feed of batches in order: `prepare` converts each one, and the next is fetched while the last is in use."""

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
        """Keep the arguments; `explain` is called after a long poll without a batch and returns possible causes."""
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
        """Return batch `number`, prepared, or None if the run is to stop; call `on_idle` every 2 s of the wait."""
        call = self._begin(number)
        wait = Wait(self._timeout_seconds)
        next_idle = IDLE_SECONDS
        while not call.wait(POLL_SECONDS):
            if self._should_stop():
                return None
            if wait.is_over:
                raise BatchTimeout(
                    f"no environment filled batch {number} within {self._timeout_seconds:.0f} s; is one running and "
                    f"registered? (--batch-timeout sets the limit){''.join(f'; {hint}' for hint in self._hints)}"
                )
            if wait.seconds >= next_idle:
                self._on_idle()
                next_idle = wait.seconds + IDLE_SECONDS
            if wait.has_line():
                logger.info("waiting for batch %d (%.0f s)", number, wait.seconds)
                for hint in self._hints:
                    logger.warning("%s", hint)
        self._pending = None
        batch = call.result()
        if self._prefetch and number < self._last:
            self._begin(number + 1)
        return batch

    def close(self) -> None:
        """Stop fetching; a long poll in progress is abandoned."""
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


def ends_batches(error: Exception) -> bool:
    """Return True for an error that comes in place of a batch or of a publish, between two changes of the weights.

    The batches since the last checkpoint may be gone with their broker; with --checkpoint-interval 0 the batches of all
    steps are. A broker that has lost its store does not know the run.
    """
    if isinstance(error, RanksFailed):
        return error.ends_batches
    is_forgotten = isinstance(error, BrokerRefused) and error.kind == "unknown-run"
    no_publish = isinstance(error, PublishFailed | ServerExited | WaitTimedOut)
    return (
        is_forgotten or no_publish or is_outage(error) or isinstance(error, BadBatch | BatchTimeout | MissingLogprobs)
    )
