"""What a rollout or an evaluation has sampled, kept beside the code that does it.

Environments assemble groups by hand, often from token lists alone. Each rollout runs with a journal of the sequences
that its sessions produced, so that versions and sampling parameters can be added to the group afterwards. Code inside
an evaluation gets `split="eval"` without saying so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from environments.sdk.inference.generation import Split
from environments.sdk.session.nodes import SequenceNode


@dataclass(slots=True)
class Journal:
    """The sequences sampled by one rollout, or the versions met by one evaluation."""

    split: Split
    nodes: list[SequenceNode] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)

    def find(self, tokens: Sequence[int]) -> SequenceNode | None:
        """The sequence with these tokens; the last one, should several be equal."""
        for node in reversed(self.nodes):
            if node.tokens is tokens or node.tokens == tokens:
                return node
        return None


_journal: ContextVar[Journal | None] = ContextVar("journal", default=None)


@contextmanager
def keep_journal(split: Split) -> Iterator[Journal]:
    """Collect what is sampled inside, in this task and those it starts."""
    journal = Journal(split)
    token = _journal.set(journal)
    try:
        yield journal
    finally:
        _journal.reset(token)


def current_split() -> Split:
    journal = _journal.get()
    return journal.split if journal is not None else "train"


def current_journal() -> Journal | None:
    return _journal.get()


def record(nodes: Sequence[SequenceNode], split: Split) -> None:
    """Note new sequences; an evaluation keeps their policy versions alone."""
    journal = _journal.get()
    if journal is None:
        return
    journal.versions.update(v for node in nodes for _, _, v in node.policy_versions if v is not None)
    if split == "train":
        journal.nodes.extend(nodes)
