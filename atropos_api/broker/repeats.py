"""Submissions without a key whose answer may not have arrived: the same bytes again, soon, are no news.

What is expected is also in the ledger, so that it outlives any number of crashes: `news` says what changed there. A
repeat that was recognised stays expected there until its own answer has left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from blake3 import blake3

from atropos_api.wire.payload import CheckedGroup


class Repeats:
    """How many groups of which environment and bytes may come again, and until when."""

    def __init__(self, window_seconds: float, clock: Callable[[], float]) -> None:
        self._window_seconds = window_seconds
        self._clock = clock
        self._counts: Counter[bytes] = Counter()
        self._until: dict[bytes, float] = {}
        self._recognised: Counter[bytes] = Counter()
        """Repeats whose own answer is under way."""
        self._changed: set[bytes] = set()

    def adopt(self, counts: Mapping[bytes, int]) -> None:
        """What the ledger expects, at start: the window begins anew, for nobody could repeat while no broker was up."""
        for print_, count in counts.items():
            self._expect(print_, count)

    def expect(self, env_id: int | None, *parts: bytes | memoryview) -> None:
        """A group of this environment may come again; `parts` are its bytes."""
        self._expect(_fingerprint(env_id, parts), 1)

    def split(self, groups: Sequence[CheckedGroup]) -> tuple[list[CheckedGroup], list[CheckedGroup]]:
        """The groups that are new, and those that are such repeats; `settle` is told how their answer fared.

        Each repeat is recognised once, so equal groups that follow are taken.
        """
        if not self._until:
            return list(groups), []
        self._forget_before(self._clock())
        fresh: list[CheckedGroup] = []
        repeated: list[CheckedGroup] = []
        for group in groups:
            print_ = _fingerprint_of(group)
            if print_ in self._until:
                self._take_one(print_)
                self._recognised[print_] += 1
                repeated.append(group)
            else:
                fresh.append(group)
        return fresh, repeated

    def settle(self, repeated: Iterable[CheckedGroup], lost: Iterable[CheckedGroup]) -> None:
        """The answer for these repeats is under way no more; what it did not get through for may come again."""
        for group in repeated:
            print_ = _fingerprint_of(group)
            if self._recognised[print_] > 1:
                self._recognised[print_] -= 1
            elif not self._recognised.pop(print_, 0) and print_ in self._until:
                # The broker has read its store again meanwhile, and expects it as the ledger does.
                self._take_one(print_)
            self._changed.add(print_)
        for group in lost:
            self._expect(_fingerprint_of(group), 1)

    def news(self) -> list[tuple[bytes, int]]:
        """What the ledger has to expect now, where that changed since `forget_news`."""
        if not self._changed:
            return []
        return [(print_, self._counts[print_] + self._recognised[print_]) for print_ in self._changed]

    def forget_news(self) -> None:
        self._changed.clear()

    def _expect(self, print_: bytes, count: int) -> None:
        self._changed.add(print_)
        if self._window_seconds > 0:
            self._counts[print_] += count
            self._until[print_] = self._clock() + self._window_seconds

    def _take_one(self, print_: bytes) -> None:
        self._counts[print_] -= 1
        if not self._counts[print_]:
            self._forget(print_)

    def _forget_before(self, now: float) -> None:
        for print_ in [print_ for print_, until in self._until.items() if until < now]:
            self._forget(print_)

    def _forget(self, print_: bytes) -> None:
        del self._counts[print_], self._until[print_]
        self._changed.add(print_)


def _fingerprint_of(group: CheckedGroup) -> bytes:
    parts = (group.text,) if group.columns is None else (group.text, group.columns)
    return _fingerprint(group.env_id, parts)


def _fingerprint(env_id: int | None, parts: Iterable[bytes | memoryview]) -> bytes:
    hasher = blake3(f"{env_id}:".encode())
    for part in parts:
        hasher.update(part)
    return hasher.digest()
