"""Secrets are kept out of everything that is written down: records, logs, error lines and command lines.

Options declared by a model are secret if declared so, with `Field(..., json_schema_extra=SECRET)`. Keys that no model
here declares, because they are passed on to vLLM or to an environment, are recognised by their names, and those in
texts by their form. The key is removed from settings; texts show `***` in place of the value. `TokenSource` can read a
token from a file of its own: it is then in no command line and no environment variable, and can be replaced while
programs run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from atropos_api.common.errors import AtroposError
from atropos_api.common.files import expand_home

MASK: Final = "***"
PLACEHOLDERS: Final = frozenset({"", "none", "null", "empty", "dummy", "x", "true", "false"})
"""Values given where a key is required but not checked; they are not masked."""

_SECRET_NAME: Final = re.compile(
    r"(^|[_.-])((api|access|secret|private|auth)[_-]?keys?|token|secrets?|passwords?|passwd|passphrase|credentials?"
    r"|authorization)$",
    re.IGNORECASE,
)

_IN_TEXT: Final = (
    # The password of an address, or all that precedes its @.
    (re.compile(r"(?<=://)([^/\s:@'\"]*):[^/\s@'\"]*(?=@)"), rf"\1:{MASK}"),
    (re.compile(r"(?<=://)[^/\s:@'\"]+(?=@)"), MASK),
    # A token as the first part of a broker's path, for clients that accept only a base URL.
    (re.compile(r"(://[^/\s'\"]+/t/)[^/\s'\"?#]+"), rf"\1{MASK}"),
    (re.compile(r"([?&](?:access_token|api_key|token)=)[^&\s'\"]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"(\bBearer )[^\s'\"<,]{8,}", re.IGNORECASE), rf"\1{MASK}"),
)


def names_secret(key: str) -> bool:
    """Return True if an undeclared key names a secret: `api_key`, `hf_token`, but not `max_tokens`."""
    return _SECRET_NAME.search(key) is not None


def redact(value: Any) -> Any:
    """Return plain data without the keys that name secrets, and with the secrets inside its texts masked."""
    if isinstance(value, Mapping):
        return {key: redact(inner) for key, inner in value.items() if not _is_secret(str(key), inner)}
    if isinstance(value, list | tuple):
        return [redact(inner) for inner in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Return `text` with every secret masked that its form reveals: in addresses and in authorization headers."""
    for pattern, masked in _IN_TEXT:
        text = pattern.sub(masked, text)
    return text


def redact_arguments(arguments: Iterable[str], *, secret_flags: Iterable[str] = ()) -> list[str]:
    """Return a command line with secrets masked: values of `secret_flags` and of flags that name a secret."""
    declared = frozenset(secret_flags)
    shown: list[str] = []
    hidden = False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            shown.append(MASK if hidden and not _is_placeholder(argument) else _redact_argument(argument))
            continue
        hidden = flag in declared or names_secret(flag.lstrip("-"))
        if not equals:
            shown.append(argument)
        else:
            shown.append(f"{flag}={MASK if hidden and not _is_placeholder(value) else _redact_argument(value)}")
            hidden = False
    return shown


def program_words(command: Sequence[str]) -> str:
    """Return the program of another process's command line, without arguments, because those may hold secrets."""
    words = list(command[:1])
    if words and Path(words[0]).name.startswith("python"):
        rest = command[1:]
        words += rest[:2] if rest[:1] == ["-m"] else [word for word in rest[:1] if not word.startswith("-")]
    return " ".join(words)


def _is_secret(key: str, value: Any) -> bool:
    """Return True if `key` names a secret and `value` holds one, as a text or in a list."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(_is_secret(key, inner) for inner in value)
    return isinstance(value, str) and names_secret(key) and not _is_placeholder(value)


def _is_placeholder(value: str) -> bool:
    return value.strip().lower() in PLACEHOLDERS


def _redact_argument(value: str) -> str:
    """Redact a value as it was typed; one that is JSON may hold keys of its own."""
    if value[:1] in {"{", "["}:
        try:
            content = json.loads(value)
        except ValueError:
            return redact_text(value)
        public = redact(content)
        return value if public == content else json.dumps(public)
    return redact_text(value)


SECRET: Final[dict[str, Any]] = {"secret": True}
"""The mark of a secret field, given as its `json_schema_extra`."""


def is_secret_field(field: FieldInfo) -> bool:
    """Return True if a field was declared secret."""
    extra = field.json_schema_extra
    return isinstance(extra, Mapping) and bool(extra.get("secret"))


def public_settings(config: BaseModel, *, exclude: set[str] | None = None) -> dict[str, Any]:
    """Return all settings of `config` as JSON holds them, without its secrets; for every record of a run."""
    shown: dict[str, Any] = redact(_without_declared(config, config.model_dump(mode="json", exclude=exclude)))
    return shown


def _without_declared(config: BaseModel, dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dump of `config` without the fields declared secret in it or in any model inside it."""
    declared = {name for name, field in type(config).model_fields.items() if is_secret_field(field)}
    return {
        name: _without_declared_inside(getattr(config, name, None), value)
        for name, value in dumped.items()
        if name not in declared
    }


def _without_declared_inside(value: Any, dumped: Any) -> Any:
    if isinstance(value, BaseModel) and isinstance(dumped, Mapping):
        return _without_declared(value, dumped)
    if isinstance(value, Mapping) and isinstance(dumped, Mapping):
        known = {str(key): inner for key, inner in value.items()}
        return {key: _without_declared_inside(known.get(str(key)), inner) for key, inner in dumped.items()}
    if isinstance(value, list | tuple) and isinstance(dumped, list) and len(value) == len(dumped):
        return [_without_declared_inside(*pair) for pair in zip(value, dumped, strict=True)]
    return dumped


LONGEST_TOKEN_BYTES: Final = 64 * 1024
_FORM: Final = "a token is one line of letters, digits and . _ ~ + = -"
TOKEN_VARIABLE: Final = "ATROPOS_TOKEN"  # noqa: S105 - the name of a variable


class TokenUnreadable(AtroposError):
    """A given token is invalid, or the file that should hold one cannot be read or holds none."""


class TokenAmbiguous(AtroposError):
    """A token and a file with a token were both given."""


class TokenSource:
    """The token by which a program proves its rights: from a value, or from a file that can be read again.

    `flag` is the option that named the file, for messages; they never show what the file holds.
    """

    def __init__(self, token: str | None = None, *, file: Path | None = None, flag: str = "--token-file") -> None:
        self.file = file
        self._flag = flag
        if token and not _is_token(token):
            raise TokenUnreadable(f"{self.origin}: not a token; {_FORM}")
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
        """Use the given token or file, else `variable`, else the file that `variable`_FILE names, else no token."""
        if token is not None and file is not None:
            raise TokenAmbiguous(f"{flag} {file} and {flag[: -len('-file')]} are both given; leave one out")
        if token is not None or file is not None:
            return cls(token, file=file, flag=flag)
        if value := environ.get(variable):
            return cls(value, flag=f"${variable}-file")
        named = environ.get(f"{variable}_FILE")
        return cls(file=Path(named), flag=f"${variable}_FILE") if named else cls()

    @property
    def origin(self) -> str:
        """The option, or the variable with a dollar sign, that gave the token itself."""
        return self._flag.removesuffix("-file")

    def reload(self) -> bool:
        """Read the file again; return True if it now holds another token."""
        if self.file is None:
            return False
        before = self.value
        try:
            self.value = read_token_file(self.file, flag=self._flag)
        except TokenUnreadable:
            # The file may be in the middle of being replaced: the old token stays until there is a new one.
            return False
        return self.value != before


def read_token_file(path: Path, *, flag: str = "--token-file") -> str:
    """Return the token in `path`, without the line end; messages name `flag` and never what the file holds."""
    try:
        with expand_home(path).open("rb") as file:
            content = file.read(LONGEST_TOKEN_BYTES + 1)
    except OSError as error:
        raise TokenUnreadable(f"{flag} {path}: cannot be read ({error.strerror}); name a file with a token") from error
    token = content.strip().decode("ascii", errors="replace")
    if not _is_token(token) or len(content) > LONGEST_TOKEN_BYTES:
        raise TokenUnreadable(f"{flag} {path}: holds no token; {_FORM}")
    return token


def _is_token(text: str) -> bool:
    """Return True if an HTTP header can carry the text as a token."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text
