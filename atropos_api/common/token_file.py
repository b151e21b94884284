"""A token in a file of its own: it is in no command line and no environment, and can be replaced while programs run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from atropos_api.common.errors import AtroposError

LONGEST_TOKEN_BYTES: Final = 64 * 1024
_FORM: Final = "a token is one line of letters, digits and . _ ~ + = -"
TOKEN_VARIABLE: Final = "ATROPOS_TOKEN"  # noqa: S105 - the name of a variable


class TokenUnreadable(AtroposError):
    """The file that should hold a token cannot be read, or holds none."""


class TokenAmbiguous(AtroposError):
    """A token and a file with a token were both given."""


class TokenSource:
    """The token that a program shows, from a value or from a file; that of a file can be read again.

    `flag` is the option that named the file, for messages; they never hold what the file holds.
    """

    def __init__(self, token: str | None = None, *, file: Path | None = None, flag: str = "--token-file") -> None:
        self.file = file
        self._flag = flag
        if token and not _is_token(token):
            raise TokenUnreadable(f"{flag[: -len('-file')]}: is no token; {_FORM}")
        self.value = token if file is None else read_token_file(file, flag=flag)

    @classmethod
    def settle(
        cls,
        token: str | None,
        file: Path | None,
        environ: Mapping[str, str],
        *,
        flag: str = "--token-file",
        variable: str = TOKEN_VARIABLE,
    ) -> Self:
        """What was given, else the value of `variable`, else the file that `variable`_FILE names, else no token."""
        if token is not None and file is not None:
            raise TokenAmbiguous(f"{flag} {file} and {flag[: -len('-file')]} are both given; leave one out")
        if token is not None or file is not None:
            return cls(token, file=file, flag=flag)
        if value := environ.get(variable):
            return cls(value, flag=f"${variable}-file")
        named = environ.get(f"{variable}_FILE")
        return cls(file=Path(named), flag=f"${variable}_FILE") if named else cls()

    def reload(self) -> bool:
        """Read the file again; whether it now holds another token."""
        if self.file is None:
            return False
        before = self.value
        try:
            self.value = read_token_file(self.file, flag=self._flag)
        except TokenUnreadable:
            # It may be in the middle of being replaced: the old token stays until there is a new one.
            return False
        return self.value != before


def read_token_file(path: Path, *, flag: str = "--token-file") -> str:
    """The token in `path`, without the line's end; messages name `flag` and never what the file holds."""
    try:
        with path.expanduser().open("rb") as file:
            content = file.read(LONGEST_TOKEN_BYTES + 1)
    except OSError as error:
        raise TokenUnreadable(f"{flag} {path}: cannot be read ({error.strerror}); name a file with a token") from error
    token = content.strip().decode("ascii", errors="replace")
    if not _is_token(token) or len(content) > LONGEST_TOKEN_BYTES:
        raise TokenUnreadable(f"{flag} {path}: holds no token; {_FORM}")
    return token


def _is_token(text: str) -> bool:
    """Whether a header can carry it."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text
