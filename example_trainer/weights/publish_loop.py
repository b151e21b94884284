"""The parts of a publish that are the same in every mode: attempts, the fence, parity checks, the budget of publishes.

`publish_with_retries` repeats an attempt that failed for a reason that passes. `OpenPublish` holds a server's fence
under a lease: it begins the publish, and ends or aborts it. `ParityCheck` proves the first publish
to each server process, and later ones as often as `--sync-check` says. `SyncBudget` limits how often to publish, so
that publishes do not take most of the generation.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, Self, TypeVar

from example_trainer.errors import ProofFailed, PublishFailed, ServerRefused, ServerUnavailable, WaitStopped
from example_trainer.modeling.policy import Policy
from example_trainer.options.publish import InFlight
from example_trainer.options.training_options import TrainingOptions
from example_trainer.weight_protocol.client import Fence, ServerClient, ShouldStop, never
from example_trainer.weights.base import PublishReport
from example_trainer.weights.logprob_parity import Agreement, Compare, Difference, prove

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
ATTEMPTS: Final = 4
FIRST_PAUSE_SECONDS: Final = 0.2
CHECKED_SHARE: Final = 0.01
"""Largest share of the time that parity checks take under `--sync-check auto`."""
_RETRY_SECONDS: Final = 0.5
_GIVE_UP_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 10.0
"""Time limit of one call that waits for running requests to end, under `--in-flight finish`; it is repeated."""
PASSING_STATUSES: Final = frozenset({404, 409, 410, 500, 503})
"""Statuses worth a retry; a server may answer 500 while its engine is failing."""


def is_lasting(error: Exception) -> bool:
    """Return True if another attempt would fail too: the server has refused, with a status that does not pass."""
    return isinstance(error, ServerRefused) and error.status not in PASSING_STATUSES


def publish_with_retries(
    attempt: Callable[[], ResultT], failed: str, *, also: tuple[type[Exception], ...] = ()
) -> ResultT:
    """Repeat the attempt if the server fails or restarts in the middle: it gets the same masters once it is back.

    `also` are failures that pass, besides the server's. Raises `PublishFailed`, which begins with `failed`.
    """
    passing: tuple[type[Exception], ...] = (ServerUnavailable, ServerRefused, *also)
    for number in range(ATTEMPTS):
        try:
            return attempt()
        except passing as error:
            if is_lasting(error) or number == ATTEMPTS - 1:
                raise PublishFailed(f"{failed}: {error}") from error
            logger.warning("%s; trying again: %s", failed, error)
            time.sleep(FIRST_PAUSE_SECONDS * 2**number)
    raise AssertionError("unreachable")


class OpenPublish:
    """A fence that a server has set; its lease is renewed until this object is closed, however long the write takes."""

    def __init__(
        self,
        client: ServerClient,
        *,
        lease_seconds: float,
        drain_seconds: float,
        in_flight: InFlight,
        should_stop: ShouldStop = never,
    ) -> None:
        """Begin the publish; raise `WaitStopped` if `should_stop` returns True while requests still run."""
        self.began = time.monotonic()
        self.publish_id = uuid.uuid4().hex
        self._client = client
        self._lease = ExitStack()
        self._lease.enter_context(client.lease(self.publish_id, lease_seconds))
        try:
            self.fence = begin_after_others(
                client,
                self.publish_id,
                lease_seconds=lease_seconds,
                drain_seconds=drain_seconds,
                in_flight=in_flight,
                should_stop=should_stop,
            )
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def end(self, version: int, *, within_seconds: float | None = None) -> dict[str, Any]:
        """Make the server resume under this version, once the weights are complete."""
        return self._client.end_publish(self.publish_id, version, within_seconds=within_seconds)

    def abort(self, *, timeout_seconds: float = _GIVE_UP_SECONDS) -> None:
        """Make the server resume with its previous weights now, instead of pausing until the lease lapses."""
        self.close()
        try:
            self._client.abort_publish(self.publish_id, timeout_seconds=timeout_seconds)
        except (ServerRefused, ServerUnavailable) as error:
            has_ended = isinstance(error, ServerRefused) and error.kind == "publish-lapsed"
            level = logging.DEBUG if has_ended else logging.WARNING
            logger.log(level, "publish %s could not be aborted, so its lease has to lapse: %s", self.publish_id, error)

    def close(self) -> None:
        """Stop renewing the lease; the fence stays until the publish is ended or the lease lapses."""
        self._lease.close()


def begin_after_others(
    client: ServerClient,
    publish_id: str,
    *,
    lease_seconds: float,
    drain_seconds: float,
    in_flight: InFlight,
    should_stop: ShouldStop = never,
) -> Fence:
    """Begin a publish once no other is under way; the publish of a killed trainer lapses after its lease.

    Raises `ServerRefused` if another publish is still renewed after both leases would have lapsed.
    """
    deadline: float | None = None
    while True:
        try:
            return _begin(
                client,
                publish_id,
                should_stop,
                lease_seconds=lease_seconds,
                drain_seconds=drain_seconds,
                in_flight=in_flight,
            )
        except ServerRefused as error:
            if error.kind != "publish-in-progress":
                raise
            now = time.monotonic()
            if deadline is None:
                deadline = now + lease_seconds + (error.retry_after_seconds or lease_seconds)
                logger.info("waiting for an earlier publish to end or to lapse: %s", error)
            if now >= deadline:
                raise
            time.sleep(_RETRY_SECONDS)


def _begin(
    client: ServerClient, publish_id: str, should_stop: ShouldStop, *, in_flight: InFlight, **settings: float
) -> Fence:
    """Begin a publish; where it waits for running requests to end, it does so for as long as the server answers.

    Long outputs take longer than any call may, and a publish that was given up each time failed the run.
    """
    if in_flight != "finish":
        return client.begin_publish(publish_id, in_flight=in_flight, **settings)
    while True:
        asked = time.monotonic()
        try:
            return client.begin_publish(publish_id, in_flight=in_flight, timeout_seconds=_LOOK_SECONDS, **settings)
        except ServerUnavailable:
            if time.monotonic() - asked < _LOOK_SECONDS:
                raise
        if should_stop():
            raise WaitStopped(f"told to stop while {client.url} lets its running requests end (--in-flight finish)")
        client.info()  # raises an error if the server does not answer at all


class ParityCheck:
    """Decides which publishes to prove, and proves them: trainer and server compute the same logprobs."""

    def __init__(
        self, *, every: int | None, share: float = CHECKED_SHARE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.every = every
        """Number of publishes from one check to the next; 0: only the first to each server process is checked.

        None: as many as take at most `share` of the time, by the duration of the last check.
        """
        self._share = share
        self._clock = clock
        self._since = 0
        self._began = self._ended = clock()
        self._seconds: float | None = None
        """Duration of the last check."""
        self.limit: Difference | None = None
        self.proven: set[str] = set()
        """Boot ids of the server processes to which a publish has been proven."""

    def is_due(self) -> bool:
        """Return True if the publish just made is to be checked on every server; call it once per publish."""
        self._began = self._clock()
        if self.every is None:
            return self._seconds is not None and self._seconds <= self._share * (self._began - self._ended)
        self._since += 1
        if self.every == 0 or self._since < self.every:
            return False
        self._since = 0
        return True

    def run(
        self,
        policy: Policy,
        generate: Callable[[dict[str, Any]], dict[str, Any]],
        *,
        version: int,
        boot_id: str,
        max_model_len: int,
        compare_with: Compare | None = None,
    ) -> None:
        """Compare the logprobs of both sides; raise `ProofFailed` if they differ twice, see `prove` for the rest."""

        def attempt(limit: Difference | None) -> Agreement:
            return prove(
                policy,
                generate,
                version=version,
                boot_id=boot_id,
                max_model_len=max_model_len,
                limit=limit,
                compare_with=compare_with,
            )

        try:
            agreement = attempt(self.limit)
        except ProofFailed as error:
            # Rounding grows with the logits, and one of 2,048 sampled tokens may be ill-conditioned: one sound run was
            # off by 2.2e-4 at most where the first weights' limit was 1.4e-4, and one demo of hundreds ended at its
            # first publish with 1.14e-4 for 1.0e-4. Under `auto` the limit is measured again, with the module, which
            # nothing else uses then (`auto` excludes --overlap-publish); otherwise the check is repeated with new
            # tokens. Wrong weights fail again.
            logger.warning("the check is repeated with other tokens: %s", error)
            agreement = attempt(None if self.every is None else self.limit)
        self.limit = agreement.limit
        self.proven.add(boot_id)
        self._ended = self._clock()
        self._seconds = self._ended - self._began


class SyncBudget:
    """The rule of `--sync-budget` over the publishes of the last seconds.

    Each publish makes the server compute the KV entries of its paused requests again. While those tokens exceed `share`
    of the tokens generated in the window, the next publish waits, but never for more than `most_steps` optimizer steps
    (the staleness bound, where there is one). A server that chooses between draining and recomputing (`--in-flight
    auto`) reports the time that it lost by either, and that time counts instead, as a share of the window.
    """

    def __init__(
        self,
        share: float,
        *,
        most_steps: int | None = None,
        counts_time: bool = False,
        window_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`counts_time`: the servers report their losses, several servers the sum."""
        self._share = share
        self._most_steps = most_steps
        self._counts_time = counts_time
        self._window_seconds = window_seconds
        self._clock = clock
        self._publishes: deque[tuple[float, PublishReport]] = deque()

    @classmethod
    def from_config(cls, config: TrainingOptions) -> Self:
        return cls(config.sync_budget, most_steps=config.max_staleness, counts_time=config.in_flight == "auto")

    def note(self, report: PublishReport) -> None:
        self._forget_old()  # a run that publishes at each step in any case never asks for the share
        self._publishes.append((self._clock(), report))

    def used_share(self) -> float:
        """Return the share of the window's generation that its publishes took."""
        self._forget_old()
        reports = [report for _, report in self._publishes]
        if self._counts_time:
            return sum(report.loss_seconds / report.server_count for report in reports) / self._window_seconds
        recomputed = sum(report.recomputed_tokens for report in reports)
        return recomputed / max(1, sum(report.generated_tokens for report in reports)) if recomputed else 0.0

    def allows(self, steps_since_publish: int) -> bool:
        """Return True if a publish may happen now, that many optimizer steps after the last one."""
        if steps_since_publish < 1:
            return False
        if self._most_steps is not None and steps_since_publish >= max(1, self._most_steps):
            return True
        return self.used_share() <= self._share

    def _forget_old(self) -> None:
        """Forget the publishes from before the window."""
        oldest = self._clock() - self._window_seconds
        while self._publishes and self._publishes[0][0] < oldest:
            self._publishes.popleft()
