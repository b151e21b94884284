"""Where exports get their groups: a file of JSON lines, or a broker whose batches they take in a trainer's place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from atropos_api.common.errors import AtroposError

NEVER_ENDING = 1_000_000_000


class GroupsUnreadable(AtroposError):
    """A file of groups that is not there, or a line of it that is no group."""


def read_groups(path: Path) -> Iterator[dict[str, Any]]:
    """The groups of a file, one a line, as Atropos' and our environments write them.

    A last line without an end is passed over unless it is whole: its writer is still at it, or was killed.
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
    """Groups as they come in, batch after batch, until the caller has enough; then the run is finished."""
    from atropos_api.client import BrokerClient
    from atropos_api.wire.messages import RunRequest

    request = RunRequest(
        name="export", batch_size=group_size * tasks_per_step, max_token_length=max_token_length, num_steps=NEVER_ENDING
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
                client.commit(number, run_id=run.run_id, epoch=run.epoch)  # not before they are written
                number += 1
        finally:
            client.finish_run(run.run_id, epoch=run.epoch)


def trained_text(tokenizer: Any, tokens: list[int], mask: list[int]) -> tuple[str, str]:
    """The text before the first trained token, and the text from there on."""
    start = next((index for index, value in enumerate(mask) if value != -100), len(tokens))
    prefix = str(tokenizer.decode(tokens[:start])) if start else ""
    whole = str(tokenizer.decode(tokens))
    # Some tokenizers decode the parts otherwise than the whole; then the parts are what there is.
    rest = whole[len(prefix) :] if whole.startswith(prefix) else str(tokenizer.decode(tokens[start:]))
    return prefix, rest


def _read_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        group = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise GroupsUnreadable(f"{where}: no JSON ({error})") from error
    if not isinstance(group, dict) or "scores" not in group:
        raise GroupsUnreadable(f"{where}: not a group: it has no scores")
    return group
