"""The log of bodies in Redis: one hash, numbered bodies. They are written together with the rows that point at them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from atropos_api.errors import StoreDamaged
from atropos_api.store.base import BodyRef
from atropos_api.store.redis_session import RedisTerm

BODIES: Final = "atropos:bodies"


class RedisBodyLog:
    """Bodies by number, which is the offset of a `BodyRef`. What `append` stages is kept with the next transaction."""

    def __init__(self, term: RedisTerm) -> None:
        self._term = term
        self._next_number = max(self._numbers(), default=0) + 1
        self._size_bytes = 0

    def append(self, bodies: Sequence[bytes]) -> list[BodyRef]:
        refs = []
        for body in bodies:
            self._term.stage_body("HSET", BODIES, self._next_number, body)
            refs.append(BodyRef(0, self._next_number, len(body)))
            self._next_number += 1
            self._size_bytes += len(body)
        return refs

    def read(self, refs: Sequence[BodyRef]) -> list[bytes]:
        if not refs:
            return []
        bodies = self._term.ask("HMGET", BODIES, *[ref.offset for ref in refs])
        missing = [ref for ref, body in zip(refs, bodies, strict=True) if body is None or len(body) != ref.length]
        if missing:
            raise StoreDamaged(f"{self._term.place}: body {missing[0].offset} is gone", refs=missing)
        return list(bodies)

    def discard(self, refs: Iterable[BodyRef]) -> None:
        """Deleted with the next transaction; should there be none, the next start does it."""
        gone = list(refs)
        self._size_bytes -= sum(ref.length for ref in gone)
        self._term.stage_removal(BODIES, [ref.offset for ref in gone])

    def adopt(self, refs: Iterable[BodyRef]) -> list[BodyRef]:
        alive = list(refs)
        known = self._numbers()
        lost = [ref for ref in alive if ref.offset not in known]
        orphans = known - {ref.offset for ref in alive}
        self._term.stage_removal(BODIES, sorted(orphans))
        self._size_bytes = sum(ref.length for ref in alive) - sum(ref.length for ref in lost)
        return lost

    def sparse_segments(self) -> list[int]:
        return []

    def sync(self) -> None:
        """Redis forces each write to its disk before it answers."""

    def is_safe(self, refs: Iterable[BodyRef]) -> bool:  # noqa: ARG002 - the protocol's form
        return True

    def size_bytes(self) -> int:
        return self._size_bytes

    def close(self) -> None:
        """The ledger ends the term that both share."""

    def _numbers(self) -> set[int]:
        return {int(number) for number in self._term.ask("HKEYS", BODIES)}
