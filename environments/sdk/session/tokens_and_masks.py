"""Sequences of a session: they are built here, and logged for the rollout or evaluation that sampled them.

A chat's prompt becomes tokens in `prompt_tokens`, a row of a data set in `tasks.chat_dataset`.

A `SequenceNode` holds a sequence's tokens with masks, logprobs and policy versions. Environments assemble groups by
hand, often from token lists alone, so each rollout runs with a `SampleLog` of the sequences that its sessions produced:
policy versions and sampling parameters are added to the group from it. Code inside an evaluation gets `split="eval"`
from it. `messages_of` returns a rollout as readable messages.
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
"""The key in a group's `generation_params` that marks its tokens as re-tokenised text, not as the sampled tokens."""


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceNode:
    """A sequence grown over one or more turns: all lists are as long as `tokens`.

    `masked_tokens` holds the token where it was sampled and -100 elsewhere, `logprobs` its logprob and 1.0 elsewhere.
    `policy_versions` are spans over the sampled tokens, in positions of the whole sequence.
    """

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    policy_versions: list[Span]
    sampling_masks: list[list[int]] | None = None
    """For each sampled token, the tokens that could be drawn; empty where they are unknown. None if all are unknown."""
    metadata: dict[str, Any] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    """The sequence as text without its end token: as sampled, and as a client sees it. A next turn begins with one of
    them.
    """
    ended: bool = False
    """True if the last token is an end token, which `texts` leaves out."""
    recall: Callable[[], Conversation] | None = None
    """Builds `conversation` on demand: most sequences never need it."""

    _conversation: Conversation | None = None

    @property
    def conversation(self) -> Conversation | None:
        """The chat of the sequence; None after a completion of plain text."""
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
        """Return what `text` adds to this sequence, from its end token on; None if it does not continue it.

        Nothing that is sampled after an end token continues the answer before it, so the text has to add something.
        """
        if self.ended and text in self.texts:
            return None
        for known in self.texts:
            if text.startswith(known):
                return text[len(known) :]
        return None


def extend_sequence(
    base: SequenceNode | None, prompt_tokens: Sequence[int], sample: Sample, *, keeps_masks: bool = True
) -> SequenceNode:
    """Return the sequence after a turn: `base` unchanged, then the prompt's new part untrained, then the sample.

    Without `keeps_masks` the sampling masks of `base` are left out.
    """
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
    known = base.sampling_masks if base is not None and keeps_masks else None
    if known is not None or sample.sampling_masks is not None:
        own = sample.sampling_masks or [[] for _ in sample.tokens]
        node.sampling_masks = [*(known or [[] for _ in range(kept)]), *([] for _ in range(new)), *own]
    return node


@dataclass(slots=True)
class SampleLog:
    """Sample log: it holds the sequences sampled by one rollout, or the policy versions used by one evaluation."""

    split: Split
    nodes: list[SequenceNode] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)

    def find(self, tokens: Sequence[int]) -> SequenceNode | None:
        """Return the sequence with these tokens; the last one if several are equal."""
        for node in reversed(self.nodes):
            if node.tokens is tokens or node.tokens == tokens:
                return node
        return None


_sample_log: ContextVar[SampleLog | None] = ContextVar("sample_log", default=None)


@contextmanager
def record_samples(split: Split) -> Iterator[SampleLog]:
    """Log what is sampled inside the block, in this task and those it starts."""
    sample_log = SampleLog(split)
    token = _sample_log.set(sample_log)
    try:
        yield sample_log
    finally:
        _sample_log.reset(token)


def current_split() -> Split:
    sample_log = _sample_log.get()
    return sample_log.split if sample_log is not None else "train"


def current_sample_log() -> SampleLog | None:
    return _sample_log.get()


def log_nodes(nodes: Sequence[SequenceNode], split: Split) -> None:
    """Log new sequences; in an evaluation only their policy versions are kept."""
    sample_log = _sample_log.get()
    if sample_log is None:
        return
    sample_log.versions.update(v for node in nodes for _, _, v in node.policy_versions if v is not None)
    if split == "train":
        sample_log.nodes.extend(nodes)


Decode = Callable[[list[int]], str]


def messages_of(
    node: SequenceNode | None, tokens: Sequence[int], mask: Sequence[int], decode: Decode
) -> list[dict[str, Any]]:
    """Return the messages of one rollout; without a chat the sampled text is the assistant's, all else the user's."""
    chat = node.conversation if node is not None else None
    if chat is not None:
        return [dict(message) for message in chat.messages]
    parts = groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1] != NOT_TRAINED)
    turns = (("assistant" if trained else "user", [token for token, _ in pairs]) for trained, pairs in parts)
    return [{"role": role, "content": decode(ids)} for role, ids in turns]
