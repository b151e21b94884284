"""One sequence of a session: its tokens, and for each whether, how likely and by which policy it was sampled.

What a rollout or an evaluation has sampled, kept beside the code that does it.

Environments assemble groups by hand, often from token lists alone. Each rollout runs with a journal of the sequences
that its sessions produced, so that versions and sampling parameters can be added to the group afterwards. Code inside
an evaluation gets `split="eval"` without saying so.

A rollout as messages to read: the chat that its session held, or its text cut where the model began to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from atropos_api.wire.groups import Span
from environments.sdk.inference.sampling import Sample, Split
from environments.sdk.session.messages import Conversation

NOT_TRAINED = -100

NO_LOGPROB = 1.0

ESTIMATED = "estimated_tokens"
"""In a group's `generation_params`: its tokens are a tokenizer's reading of text, not what was sampled."""


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceNode:
    """A sequence as it grew over one or more turns; all lists are as long as `tokens`.

    `masked_tokens` holds the token where it was sampled and -100 elsewhere, `logprobs` its logprob and 1.0 elsewhere.
    `policy_versions` are spans over the sampled tokens, in positions of the whole sequence.
    """

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    policy_versions: list[Span]
    metadata: dict[str, Any] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    """The sequence as text without its end token: as sampled, and as a client sees it. What a next turn begins with."""
    ended: bool = False
    """Whether the last token is an end token, which `texts` leaves out."""
    recall: Callable[[], Conversation] | None = None
    """Makes `conversation`, which most sequences are never asked for."""

    _conversation: Conversation | None = None

    @property
    def conversation(self) -> Conversation | None:
        """The chat that the sequence holds; None after a completion of plain text."""
        if self._conversation is None and self.recall is not None:
            self._conversation = self.recall()
        return self._conversation

    @property
    def finish_reason(self) -> str:
        return str(self.metadata.get("finish_reason", ""))

    @property
    def sampled_count(self) -> int:
        return len(self.masked_tokens) - self.masked_tokens.count(NOT_TRAINED)

    def tail_after(self, text: str) -> str | None:
        """What `text` adds to this sequence, from its end token on; None if it does not continue it."""
        for known in self.texts:
            if text.startswith(known):
                return text[len(known) :]
        return None


def grow(base: SequenceNode | None, prompt_tokens: Sequence[int], sample: Sample) -> SequenceNode:
    """The sequence after a turn: `base` as it was, then the new part of the prompt untrained, then the sample."""
    kept = len(base.tokens) if base is not None else 0
    start = len(prompt_tokens)
    new = start - kept
    node = SequenceNode(
        full_text="",
        tokens=[*prompt_tokens, *sample.tokens],
        masked_tokens=[NOT_TRAINED] * new + sample.tokens,
        logprobs=[NO_LOGPROB] * new + (sample.logprobs or [NO_LOGPROB] * len(sample.tokens)),
        policy_versions=[(first + start, last + start, version) for first, last, version in sample.versions],
        metadata={"finish_reason": sample.finish_reason},
    )
    if base is not None:
        node.masked_tokens = base.masked_tokens + node.masked_tokens
        node.logprobs = base.logprobs + node.logprobs
        node.policy_versions = base.policy_versions + node.policy_versions
    return node


@dataclass(slots=True)
class SampleLog:
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


_journal: ContextVar[SampleLog | None] = ContextVar("journal", default=None)


@contextmanager
def keep_journal(split: Split) -> Iterator[SampleLog]:
    """Collect what is sampled inside, in this task and those it starts."""
    journal = SampleLog(split)
    token = _journal.set(journal)
    try:
        yield journal
    finally:
        _journal.reset(token)


def current_split() -> Split:
    journal = _journal.get()
    return journal.split if journal is not None else "train"


def current_journal() -> SampleLog | None:
    return _journal.get()


def record(nodes: Sequence[SequenceNode], split: Split) -> None:
    """Note new sequences; an evaluation keeps their policy versions alone."""
    journal = _journal.get()
    if journal is None:
        return
    journal.versions.update(v for node in nodes for _, _, v in node.policy_versions if v is not None)
    if split == "train":
        journal.nodes.extend(nodes)


Decode = Callable[[list[int]], str]


def messages_of(
    node: SequenceNode | None, tokens: Sequence[int], mask: Sequence[int], decode: Decode
) -> list[dict[str, Any]]:
    """The messages of one rollout; what was sampled is the assistant's, all else the user's where no chat tells."""
    chat = node.conversation if node is not None else None
    if chat is not None:
        return [dict(message) for message in chat.messages]
    parts = groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1] != NOT_TRAINED)
    turns = (("assistant" if trained else "user", [token for token, _ in pairs]) for trained, pairs in parts)
    return [{"role": role, "content": decode(ids)} for role, ids in turns]
