"""The token that callers of the broker must show: given once, or in a file that a SIGHUP has read again."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from atropos_api.common.errors import AtroposError
from atropos_api.common.token_file import TokenUnreadable, read_token_file
from atropos_api.config import check_token

logger = logging.getLogger(__name__)


class AcceptedToken:
    """The token as it is now; `value` is None where callers need none."""

    def __init__(self, token: str | None = None, *, file: Path | None = None) -> None:
        self._file = file
        text = token if file is None else _read(file)
        self.value = text.encode() if text is not None else None

    def reload(self) -> None:
        """Take what the file holds now. One that cannot be used changes nothing: no caller is locked out by a typo."""
        if self._file is None:
            return
        try:
            value = _read(self._file).encode()
        except AtroposError as error:
            logger.error("the token stays as it was: %s", error)  # noqa: TRY400 - the line says all there is to say
            return
        logger.info("%s was read again: %s", self._file, "the same token" if value == self.value else "a new token")
        self.value = value


@contextmanager
def reloaded_on_hangup(token: AcceptedToken, *, file: Path | None) -> Iterator[None]:
    """While the block runs SIGHUP has the file read again; without a file that signal ends the process as ever."""
    if file is None:
        yield
        return

    def reload(_: int, __: FrameType | None) -> None:
        token.reload()

    former = signal.signal(signal.SIGHUP, reload)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, former)


def _read(file: Path) -> str:
    try:
        return check_token(read_token_file(file))
    except ValueError as error:
        raise TokenUnreadable(f"--token-file {file}: {error}") from None
