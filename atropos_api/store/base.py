"""The store's protocols and rows: small rows in a ledger, bodies in a log. The rows are also the broker's own state.

A submission is stored once both have it: bodies are written first, then the rows that point at them, all of them or
none. A body without a row was never acknowledged and is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from atropos_api.store.backup import OpenSegment
from atropos_api.wire.groups import DEFAULT_POLICY, Form

KEPT_EVENTS: Final = 2000
NO_RUN = ""
"""The `run_id` of groups that came while no run was open; the next run takes them over."""


class BodyRef(NamedTuple):
    """The position of a body in the log."""

    segment: int
    offset: int
    length: int


LOST: Final = BodyRef(-1, 0, 0)
"""Position of a body that was damaged after its batch was handed out: the row stays in the batch, without bytes."""


class HoldRow(msgspec.Struct, kw_only=True, frozen=True):
    """An evaluation's lease on the published policy."""

    hold_id: str
    until: float
    version: int | None
    reason: str
    since: float = 0.0


class RunRow(msgspec.Struct, kw_only=True):
    """A run. `handed_batch` counts batches handed out; the last one may not have reached its trainer (`delivered`)."""

    run_id: str
    name: str
    legacy: bool
    state: Literal["open", "closed", "finished"]
    epoch: int
    batch_size: int
    max_token_length: int
    num_steps: int
    starting_step: int
    checkpoint_dir: str
    checkpoint_interval: int
    wandb_project: str
    wandb_group: str
    max_staleness: int | None
    began_at: float
    committed_batch: int = 0
    formed_batch: int = 0
    handed_batch: int = 0
    delivered: bool = True
    started: bool = True
    policy_version: int | None = None
    policy_step: int | None = None
    published_at: float | None = None
    """The time at which this broker was told of the newest version; the trainer's clock may differ."""
    unit: Literal["sequences", "groups"] = "sequences"
    """The unit of `batch_size`."""
    holds: tuple[HoldRow, ...] = ()
    policy_name: str | None = None
    """The model name that requests the published policy from a server; None: any."""
    policy: str = DEFAULT_POLICY
    """Name of the policy that it trains."""
    policy_servers: tuple[str, ...] = ()
    """Lease ids of the registered servers that were proven to serve the published policy."""
    trainer_seen_at: float = 0.0
    """Time of its trainer's last registration or call; kept in memory, and written now and then."""
    batches_dir: str = ""
    """The directory in which its trainer saves batches; empty if it saves none."""
    longest_silence_seconds: float = 0.0
    """The longest interval between two calls of its trainer."""


class ItemsRow(msgspec.Struct, kw_only=True):
    """An environment's items in one run: which are leased, and what happened to the others."""

    run_id: str
    process: str
    """The process that holds the leases."""
    call: int = 0
    """Number of its last call; `answer` is the answer to that call."""
    answer: tuple[int, ...] = ()
    next_item: int = 0
    leased: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    """Items whose process ended before they were finished; they are leased first."""
    finished: int = 0
    dropped: dict[str, int] = {}
    sampled_sequences: int = 0
    sampled_tokens: int = 0


class OutcomesRow(msgspec.Struct, kw_only=True, frozen=True):
    """The groups of an environment in one run that were trained or dropped by the broker, by outcome."""

    run_id: str = NO_RUN
    groups: dict[str, int] = {}


class EnvironmentRow(msgspec.Struct, kw_only=True):
    """A registered environment. `seen_at` is kept in memory and written with the next other change."""

    environment_id: int
    name: str
    display_name: str
    group_size: int
    max_token_length: int
    weight: float
    min_batch_allocation: float | None
    max_batches_offpolicy: int
    connected: bool
    registered_at: float
    seen_at: float
    run_id: str | None = None
    """The run it last took part in: when that run finishes, the environment does too."""
    legacy: bool = False
    process: str = ""
    """Its process, if that names itself: after a restart of the broker each process gets its own environment back."""
    items: ItemsRow | None = None
    """Its items, if it leases them."""
    former_items: tuple[ItemsRow, ...] = ()
    """Its items in earlier runs, the newest last: a run that is resumed goes on with them."""
    outcomes: OutcomesRow = OutcomesRow()
    former_outcomes: tuple[OutcomesRow, ...] = ()
    """The outcomes in earlier runs, as with items."""

    def items_in(self, run_id: str | None) -> ItemsRow | None:
        """Return its items in a run, if it leases them."""
        known = (one for one in (self.items, *self.former_items) if one is not None)
        return next((one for one in known if one.run_id == run_id), None)

    def outcomes_in(self, run_id: str | None) -> dict[str, int]:
        """Return the number of its groups in a run by outcome."""
        known = (self.outcomes, *self.former_outcomes)
        return next((one.groups for one in known if one.run_id == run_id), {})


class GroupRow(msgspec.Struct, kw_only=True, gc=False):
    """A queued or batched group; `seq` is its place in the order of arrival."""

    seq: int
    run_id: str
    env_id: int | None
    size: int
    token_count: int
    body: BodyRef
    received_version: int | None
    oldest_version: int | None
    arrived_at: float
    batch: int = 0
    """Number of the batch that holds it; 0 while it is queued."""
    key_id: int = 0
    """The idempotency key it came under; 0 for none."""
    form: Form = "json"
    """The form in which its body is stored: the one it came in."""
    policy: str | None = None
    """Name of the policy that sampled it; None: the one that its run trains."""


class KeyRow(msgspec.Struct, kw_only=True, gc=False):
    """An idempotency key that was used: repeating it changes nothing while it is remembered."""

    key_id: int
    owner: str
    key: str
    group_count: int
    used_at: float
    done_at: float | None = None
    """Time at which the last of its groups was committed or dropped."""


class PolicyRow(msgspec.Struct, kw_only=True, gc=False):
    """A published policy version. `orphaned`: made after the checkpoint that its run was later resumed from."""

    run_id: str
    version: int
    step: int
    published_at: float
    orphaned: bool = False


class MetricsRow(NamedTuple):
    """The metrics of one step; `numbers` are little-endian float64, in the order of the run's names, NaN if unknown."""

    step: int
    time: float
    numbers: bytes


class Event(msgspec.Struct, kw_only=True):
    """An event for watchers of the broker. Ids increase, also across restarts and takeovers."""

    id: int
    type: str
    time: float
    data: dict[str, Any]


class Answers(NamedTuple):
    """New outcomes, since the last record, of answers to submissions without a key."""

    answered: Sequence[int] = ()
    """Seqs of groups whose answer was sent, or that are in `expected` now because it could not be sent."""
    expected: Sequence[tuple[bytes, int]] = ()
    """Fingerprints, each with the number of groups that may still come again (0: none any more)."""


NO_CHANGES: Final = Answers()


class Snapshot(msgspec.Struct, kw_only=True):
    """All stored state that a broker starts from.

    `unanswered`: seqs of groups without a key whose answer is not known to have been sent. `expected`: fingerprints,
    each with the number of groups that may come again because their answer was lost.
    """

    runs: list[RunRow]
    environments: list[EnvironmentRow]
    groups: list[GroupRow]
    keys: list[KeyRow]
    policies: list[PolicyRow]
    events: list[Event]
    next_seq: int
    unanswered: list[int]
    expected: dict[bytes, int]


class Ledger(Protocol):
    """A store of small rows: all calls inside a `transaction` are kept, or none; a call outside is its own."""

    def load(self) -> Snapshot: ...

    def transaction(self) -> AbstractContextManager[None]: ...

    def put_run(self, row: RunRow) -> None: ...

    def put_environment(self, row: EnvironmentRow) -> None: ...

    def put_policy(self, row: PolicyRow) -> None: ...

    def put_key(self, row: KeyRow) -> None: ...

    def forget_keys(self, key_ids: Sequence[int]) -> None: ...

    def add_event(self, event: Event) -> None:
        """Record an event; the last `KEPT_EVENTS` are kept. A slow ledger writes it with its next transaction."""

    def add_groups(self, rows: Sequence[GroupRow], *, answers: Answers = NO_CHANGES) -> None:
        """Store groups.

        A group without a key counts as unanswered until `answers` of this or a later call say otherwise.
        """

    def add_submission(self, rows: Sequence[GroupRow], key: KeyRow | None, *, answers: Answers = NO_CHANGES) -> None:
        """Store groups and the key they came under, all or none of them."""

    def put_answers(self, answers: Answers) -> None:
        """Record `answers` as `add_groups` does, where there is no group to store with them."""

    def probe(self) -> None:
        """Write a probe that changes nothing; raise if no writes are taken."""

    def assign_batch(self, seqs: Sequence[int], batch: int) -> None:
        """Record the batch of these groups: batch 0 puts them back into the queue."""

    def adopt_groups(self, run_id: str) -> None:
        """Assign the groups without a run to `run_id`."""

    def move_groups(self, places: Iterable[tuple[int, BodyRef]]) -> None:
        """Record new positions of bodies, by seq."""

    def drop_groups(self, seqs: Sequence[int]) -> None: ...

    def metric_names(self) -> dict[str, list[str]]:
        """Return the names of metrics of each run that has any, in the order of `MetricsRow.numbers`."""

    def put_metric_names(self, run_id: str, names: Sequence[str]) -> None: ...

    def put_metrics(self, run_id: str, rows: Sequence[MetricsRow]) -> None:
        """Store rows, each in place of an earlier row of the same step."""

    def metrics_after(self, run_id: str, step: int, limit: int) -> list[MetricsRow]:
        """Return the rows of the first `limit` steps after `step`, in the order of the steps."""

    def drop_metrics(self, run_id: str, first: int, last: int) -> None:
        """Delete the rows from step `first` to step `last`."""

    def forget_metrics(self, run_id: str) -> None:
        """Delete all rows and the names of a run."""

    def sync(self) -> None:
        """Make everything recorded so far survive a power failure."""

    def dump(self) -> bytes:
        """Return the file of the whole ledger; raise `NoBackup` if it is not in a file."""

    def close(self) -> None: ...


class BodyLog(Protocol):
    """An append-only store of bodies: `discard` marks those that are not needed any more; space is freed later."""

    def append(self, bodies: Sequence[bytes]) -> list[BodyRef]: ...

    def read(self, refs: Sequence[BodyRef]) -> list[bytes]: ...

    def discard(self, refs: Iterable[BodyRef]) -> None: ...

    def adopt(self, refs: Iterable[BodyRef]) -> list[BodyRef]:
        """Tell the log at start which bodies are alive; return those it does not have (lost in a power failure)."""

    def sparse_segments(self) -> list[int]:
        """Return the segments worth rewriting: no longer written to, and mostly dead."""

    def sync(self) -> None: ...

    def is_safe(self, refs: Iterable[BodyRef]) -> bool:
        """Return True if these bodies are as safe as this log can make them: on the disk, if it syncs."""

    def size_bytes(self) -> int: ...

    def open_all(self) -> list[OpenSegment]:
        """Open all files with living bodies, for a backup; the caller closes them."""

    def close(self) -> None: ...
