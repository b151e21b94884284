"""The oracle of a simulation: it sees what the broker does and clients are told, and raises if a promise is broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


class PromiseBroken(AssertionError):
    """Broker or launcher did what it promises never to do; the seed of the simulation repeats it."""


@dataclass
class Oracle:
    """The oracle knows what all runs were told so far. A group is known by its ident."""

    batches: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    """Idents of each batch handed out that no checkpoint has passed over since."""
    epochs: dict[str, int] = field(default_factory=dict)
    """The newest epoch granted, by run."""
    versions: dict[int, int] = field(default_factory=dict)
    """The step of each version published."""
    runs_finished: int = 0
    ended_at: float = 0.0
    """Time at which the last run ended."""
    groups_trained: int = 0

    def require(self, holds: bool, promise: str) -> None:
        if not holds:
            raise PromiseBroken(promise)

    def granted(self, run_id: str, epoch: int) -> None:
        self.require(epoch > self.epochs.get(run_id, 0), f"epoch {epoch} of {run_id} was granted twice")
        self.epochs[run_id] = epoch

    def acted(self, run_id: str, epoch: int, what: str) -> None:
        newest = self.epochs[run_id]
        self.require(epoch == newest, f"{what} of epoch {epoch} was taken, although {newest} has taken {run_id} over")

    def handed_out(self, run_id: str, number: int, idents: tuple[int, ...]) -> None:
        before = self.batches.setdefault((run_id, number), idents)
        self.require(before == idents, f"batch {number} of {run_id} changed from {before} to {idents}")

    def published(self, version: int, step: int) -> None:
        known = self.versions.setdefault(version, step)
        self.require(known == step, f"version {version} is that of step {known}, and was published for step {step}")

    def finished(
        self,
        run_id: str,
        trained: dict[int, tuple[int, ...]],
        *,
        steps: int,
        items: int | None,
        counted: int,
        at: float,
    ) -> None:
        """Check a whole run: `trained` has the batches of the checkpoints that led to its last one.

        `items` is the number of items of an epoch, all of which the run has used; `counted` is how many groups the
        broker counts as trained.
        """
        self.require(sorted(trained) == list(range(1, steps + 1)), f"{run_id} trained batches {sorted(trained)}")
        counts = Counter(ident for idents in trained.values() for ident in idents)
        doubled = [ident for ident, number in counts.items() if number > 1]
        self.require(not doubled, f"{run_id} trained items {doubled} twice")
        self.require(items is None or len(counts) == items, f"{run_id} trained {len(counts)} of {items} items")
        self.require(len(counts) == counted, f"{run_id} trained {len(counts)} groups, and the broker counts {counted}")
        for key in [key for key in self.batches if key[0] == run_id]:
            del self.batches[key]
        self.runs_finished += 1
        self.ended_at = at
        self.groups_trained += len(counts)
