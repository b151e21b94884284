"""Files of groups: reading them, writing them, keeping a small file of the newest, and showing them as a web page.

`read_groups` and `groups_from_broker` give exports their groups, from JSON lines or from a broker whose batches they
take as a trainer would. `GroupFile` writes every group. `RecentGroups` keeps the newest groups of a run in a file that
stays small, for people to read: writing all of them would cost a busy environment time, so at most ten a second are
kept, fewer if they are long. `write_page` makes one HTML file without scripts, fonts or images that loads nothing from
anywhere; every character that a model wrote is escaped, and the page's policy forbids scripts.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import FileIO
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any

import msgspec

from atropos_api.common.errors import AtroposError
from atropos_api.common.files import RecentLines, free_path, write_whole
from atropos_api.common.html_pages import as_html, make_page
from atropos_api.wire.groups import Group, as_plain

UNLIMITED_STEPS = 1_000_000_000


class GroupsUnreadable(AtroposError):
    """A file of groups is missing, or one of its lines is not a group."""


def read_groups(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the groups of a file, one per line, as the original Atropos and our environments write them.

    An incomplete last line without a line break is skipped: its writer is still writing it, or was killed.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise GroupsUnreadable(
            f"{path}: cannot be read ({error.strerror}); name a file that `process` wrote"
        ) from error
    with file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    group = _read_line(line, f"{path}:{number}")
                except GroupsUnreadable:
                    if line.endswith(b"\n") or number == 1:
                        raise
                    return
                yield group


def groups_from_broker(
    url: str, *, group_size: int, tasks_per_step: int, max_token_length: int, token: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield groups as they arrive, batch after batch, until the caller stops; then finish the run."""
    from atropos_api.client import BrokerClient
    from atropos_api.wire.messages import RunRequest

    request = RunRequest(
        name="export",
        batch_size=group_size * tasks_per_step,
        max_token_length=max_token_length,
        num_steps=UNLIMITED_STEPS,
    )
    with BrokerClient(url, token=token) as client:
        run = client.begin_run(request)
        number = run.next_batch
        try:
            while True:
                batch = None
                while batch is None:
                    batch = client.get_batch(number, run_id=run.run_id, epoch=run.epoch, wait_seconds=10)
                yield from (msgspec.to_builtins(group) for group in batch.groups)
                client.commit(number, run_id=run.run_id, epoch=run.epoch)  # only after the caller has written them
                number += 1
        finally:
            try:
                client.finish_run(run.run_id, epoch=run.epoch)
            except AtroposError as error:  # the groups are written all the same
                logger.warning("%s did not end the run that took the groups (%s); the next run does", url, error)


def trained_text(tokenizer: Any, tokens: list[int], mask: list[int]) -> tuple[str, str]:
    """Return the text before the first trained token, and the text from there on."""
    start = next((index for index, value in enumerate(mask) if value != -100), len(tokens))
    return _divided_text(tokenizer, tokens, start)


def trained_turns(tokenizer: Any, tokens: list[int], mask: list[int]) -> Iterator[tuple[str, str]]:
    """Yield for each run of trained tokens the text before it, earlier turns included, and its own text."""
    position = 0
    for is_trained, values in groupby(value != -100 for value in mask):
        start, position = position, position + len(list(values))
        if is_trained:
            yield _divided_text(tokenizer, tokens[:position], start)


def _divided_text(tokenizer: Any, tokens: list[int], start: int) -> tuple[str, str]:
    """Return the text of the tokens before `start`, and that of the others."""
    prefix = str(tokenizer.decode(tokens[:start])) if start else ""
    whole = str(tokenizer.decode(tokens))
    # Some tokenizers decode the parts differently from the whole; then the parts are decoded one by one.
    rest = whole[len(prefix) :] if whole.startswith(prefix) else str(tokenizer.decode(tokens[start:]))
    return prefix, rest


class _Shape(msgspec.Struct):
    """The fields of a group that exports and pages use; files of other programs may lack some, and have others."""

    scores: list[float]
    tokens: list[list[Annotated[int, msgspec.Meta(ge=0)]]] | None = None
    masks: list[list[int]] | None = None
    messages: list[Any] | None = None


def _read_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        # Python's own reader also takes NaN and Infinity, which Python's writer, and so the original Atropos, writes.
        group = json.loads(line) if b"NaN" in line or b"Infinity" in line else msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise GroupsUnreadable(f"{where}: not JSON ({error})") from error
    if not isinstance(group, dict) or "scores" not in group:
        raise GroupsUnreadable(f"{where}: not a group, since it has no scores")
    try:
        shape = msgspec.convert(group, _Shape)
    except msgspec.ValidationError as error:
        raise GroupsUnreadable(f"{where}: not a group ({error})") from error
    for name in ("tokens", "masks", "messages"):
        rows = getattr(shape, name)
        if rows and len(rows) != len(shape.scores):
            raise GroupsUnreadable(
                f"{where}: not a group, since {name} has {len(rows)} rows for {len(shape.scores)} scores"
            )
    return group


LEAST_INTERVAL_SECONDS = 0.1

# Share of the event loop's time: writing 16 sequences of 4,096 tokens takes 30 ms; ten times a second would be 30 %.
MOST_SHARE_OF_TIME = 0.01
MOST_BYTES = 16 << 20

Chats = list[list[dict[str, Any]]]

logger = logging.getLogger(__name__)


class RecentGroups:
    """A file of the newest groups as JSON lines: at most twice `keep` groups while open, the newest `keep` once closed.

    Fewer groups are kept if they are long: the file has at most twice `most_bytes`. A resumed run continues its file.
    If a write fails, for example on a full disk, no more groups are kept; the environment goes on.
    """

    def __init__(
        self, path: Path, keep: int, *, clock: Callable[[], float] = time.monotonic, most_bytes: int = MOST_BYTES
    ) -> None:
        self.path = path
        self._clock = clock
        self._lines = RecentLines(path, keep=keep, most_bytes=most_bytes)
        self._due_at = float("-inf")
        self._is_open = False

    def offer(self, group: Group, chats: Callable[[], Chats]) -> None:
        """Write the group and its chats if enough time has passed since the last write; the line is flushed."""
        started = self._clock()
        if started < self._due_at:
            return
        try:
            shown = msgspec.structs.replace(group, messages=group.messages or chats())
            self._lines.append(msgspec.json.encode(shown, enc_hook=as_plain))
        except OSError as error:
            logger.warning("%s: no more groups are saved to it (%s)", self.path, error.strerror)
            self._due_at = float("inf")
            return
        self._is_open = True
        ended = self._clock()
        self._due_at = max(started + LEAST_INTERVAL_SECONDS, ended + (ended - started) / MOST_SHARE_OF_TIME)

    def close(self) -> None:
        """Close the file and trim it to the newest groups; the next group opens it again."""
        if not self._is_open:
            return
        self._is_open = False
        self._lines.close()
        try:
            self._lines.trim()
        except OSError as error:
            logger.warning("%s: the oldest groups could not be removed from it (%s)", self.path, error.strerror)


class GroupFile:
    """A new file of groups as JSON lines, created with the first group: it never overwrites a file."""

    def __init__(self, wanted: Path) -> None:
        self.path = wanted
        self.count = 0
        self._file: FileIO | None = None

    def append(self, *groups: Group) -> None:
        """Add groups as a line each; after an error, as of a full disk, nothing of any of them is in the file."""
        lines = b"".join(msgspec.json.encode(group, enc_hook=as_plain) + b"\n" for group in groups)
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path = free_path(self.path)
            self._file = self.path.open("xb", buffering=0)
        begin, rest = self._file.tell(), memoryview(lines)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:  # the rollout has failed then, and its item is tried again
            self._file.truncate(begin)
            self._file.seek(begin)
            raise
        self.count += len(groups)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


MOST_GROUPS = 2000


def write_page(source: Path, page: Path | None = None) -> Path:
    """Write the web page of a file of groups and return its path: `page`, or a free name next to the source file."""
    place = page or free_path(source.with_suffix(".html"))
    write_whole(place, render(islice(read_groups(source), MOST_GROUPS), title=source.name))
    return place


def render(groups: Iterable[Mapping[str, Any]], *, title: str, refresh_seconds: int | None = None) -> str:
    """Return the whole page as HTML; with `refresh_seconds` the browser reloads it at that interval."""
    shown = "".join(render_group(number, group) for number, group in enumerate(groups, 1))
    body = f'<section class="card">{shown}</section>' if shown else '<p class="note">No groups yet.</p>'
    return make_page(title, body, refresh_seconds=refresh_seconds)


def render_group(number: int, group: Mapping[str, Any]) -> str:
    scores = list(group["scores"])
    mean = sum(scores) / max(len(scores), 1)
    chats = group.get("messages") or [None] * len(scores)
    shared = _shared_beginning([chat for chat in chats if isinstance(chat, list)])
    rest = [chat[len(shared) :] if isinstance(chat, list) else chat for chat in chats]
    rollouts = "".join(_rollout(i, score, chat) for i, (score, chat) in enumerate(zip(scores, rest, strict=False), 1))
    badges = " ".join(render_badge(score) for score in scores)
    prompt = render_turns(shared)
    return f"<details><summary>Group {number}, mean {mean:.3g}: {badges}</summary>{prompt}{rollouts}</details>"


def _shared_beginning(chats: Sequence[list[Any]]) -> list[Any]:
    """Return the turns that all rollouts share before the model's first: the prompt, which is shown once."""
    shared: list[Any] = []
    for turns in zip(*(chat[:-1] for chat in chats), strict=False):
        first = turns[0]
        if any(turn != first for turn in turns) or _is_sampled(first):
            break
        shared.append(first)
    return shared


def _is_sampled(turn: Any) -> bool:
    return isinstance(turn, Mapping) and turn.get("role") == "assistant"


def _rollout(number: int, score: float, chat: Any) -> str:
    return f"<details><summary>Rollout {number} {render_badge(score)}</summary>{_chat(chat)}</details>"


def _chat(chat: Any) -> str:
    if chat is None:
        return '<p class="role">no messages were saved; set --env.include_messages true</p>'
    return render_turns(chat if isinstance(chat, list) else [chat])


def render_turns(chat: Sequence[Any]) -> str:
    return "".join(_turn(turn) for turn in chat)


def _turn(turn: Any) -> str:
    if not isinstance(turn, Mapping):
        return f'<pre class="turn">{as_html(_text(turn))}</pre>'
    kind = "turn sampled" if _is_sampled(turn) else "turn"
    role = as_html(str(turn.get("role", "")).capitalize())
    return f'<div class="role">{role}</div><pre class="{kind}">{as_html(_content(turn))}</pre>'


def _content(turn: Mapping[str, Any]) -> str:
    calls = turn.get("tool_calls")
    text = _text(turn.get("content"))
    return f"{text}\n{json.dumps(calls, indent=1, default=_plain)}" if calls else text


def _plain(value: Any) -> Any:
    """Return a call of a session, which is an object that is read like a mapping, as JSON shows it."""
    return dict(value) if isinstance(value, Mapping) else str(value)


def _text(content: Any) -> str:
    """Return content as text; of OpenAI's content parts the text, and of other parts only the type."""
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, list):
        return "\n".join(_text(part) for part in content)
    if isinstance(content, Mapping):
        return str(content["text"]) if "text" in content else f"[{content.get('type', 'object')}]"
    return str(content)


def render_badge(score: float) -> str:
    """Return a score as HTML, coloured by its sign."""
    kind = "positive" if score > 0 else "negative" if score < 0 else "zero"
    return f'<span class="score {kind}">{score:.3g}</span>'
