"""The module has the verbs of `atropos env` and finds the environments that installed packages offer.

`atropos env init NAME` writes a new environment (`scaffold`). `atropos env convert-data FILE` rewrites a data file
into the `question`/`answer` form; other columns are kept, and where a record has only a worked solution, its last box
gives the answer. FILE.backup holds the original: `convert-data --restore FILE` or `mv FILE.backup FILE` restores it.

    python -m environments.commands stories serve --env.group_size 8

runs an installed environment by its name, an entry point of the group `atropos.environments`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from atropos_api.common.cliconfig import ConfigError, nearest, run_cli
from atropos_api.common.files import write_whole
from environments.rewards.answers import last_boxed
from environments.tasks.data import form_of, read_cell
from environments.tasks.records import DataUnusable, read_records

if TYPE_CHECKING:
    from environments.sdk.base_env import BaseEnv

USAGE = """usage: atropos env VERB [arguments]

  init NAME                    write a new environment with its tests, as a package in a folder of that name
  convert-data FILE            rewrite a JSON Lines or JSON file as question and answer; FILE.backup keeps what it was
  convert-data --restore FILE  put FILE back as it was
"""


def run(argv: Sequence[str]) -> int:
    """Run the verb that the first argument names."""
    if not argv or argv[0] in {"-h", "--help"} or argv[1:2] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    verb, *rest = argv
    if verb not in VERBS:
        raise ConfigError(f"unknown verb {verb!r}{nearest(verb, VERBS)} (verbs of atropos env: {', '.join(VERBS)})")
    return VERBS[verb](rest)


def _convert_data(rest: Sequence[str]) -> int:

    restore = "--restore" in rest
    files = [word for word in rest if word != "--restore"]
    if len(files) != 1 or files[0].startswith("-"):
        raise ConfigError(
            f"atropos env convert-data takes one file and maybe --restore, got {' '.join(rest) or 'none'}"
        )
    path = Path(files[0])
    if restore:
        sys.stdout.write(f"{restore_data(path)} is restored\n")
        return 0
    done = convert_data(path)
    if done.backup is None:
        sys.stdout.write(f"{path}: all {done.records} records have question and answer already; nothing was changed\n")
    else:
        sys.stdout.write(f"{path}: {done.records} records converted; the original is {done.backup}\n")
    return 0


def _init(rest: Sequence[str]) -> int:
    from environments.scaffold import run as write

    return write(rest)


VERBS: Mapping[str, Callable[[Sequence[str]], int]] = {"init": _init, "convert-data": _convert_data}
ENTRY_POINT_GROUP = "atropos.environments"


def environment_names() -> list[str]:
    """Return the names of all environments that installed packages offer."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def load_environment(name: str) -> type[BaseEnv]:
    """Return the class of the environment called `name`."""
    from importlib.metadata import entry_points

    found = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        known = environment_names()
        listed = f"installed are {', '.join(known)}" if known else "none is installed"
        raise ConfigError(f"no environment {name!r}{nearest(name, known)}; {listed}")
    try:
        loaded: type[BaseEnv] = found[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"environment {name!r} cannot be loaded from {found[0].value}: {error}") from error
    return loaded


def main() -> NoReturn:
    sys.argv[0] = "environments.commands"
    run_cli(run_installed)


def run_installed(argv: list[str]) -> int:
    """Run `NAME VERB [flags]`."""
    if not argv or argv[0].startswith("-"):
        listed = "".join(f"  {name}\n" for name in environment_names()) or "  none\n"
        sys.stdout.write(f"usage: python -m environments.commands NAME VERB [flags]\n\ninstalled:\n{listed}")
        return 0
    from environments.sdk.runtime.cli import run_verb

    return run_verb(load_environment(argv[0]), argv[1:])


BACKUP_SUFFIX = ".backup"


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of a conversion; `backup` is None if the file had the form already and was not changed."""

    path: Path
    records: int
    backup: Path | None


def backup_of(path: Path) -> Path:
    return path.with_name(path.name + BACKUP_SUFFIX)


def convert_data(path: Path) -> Conversion:
    """Rewrite `path` in place as records of question and answer; an interruption leaves the whole old or new file."""
    if path.suffix not in {".jsonl", ".json"}:
        raise DataUnusable(f"{path}: only .jsonl and .json files are converted; a .parquet file is read as it is")
    records = [
        (number, _converted(record, f"{path}:{number}")) for number, record in read_records(path, columns=form_of)
    ]
    if all(not changed for _, (_, changed) in records):
        return Conversion(path, len(records), None)
    backup = backup_of(path)
    if backup.exists():
        raise DataUnusable(
            f"{backup} exists already: it is the original of an earlier conversion; restore it or move it away"
        )
    _keep(path, backup)
    write_whole(path, _as_text([record for _, (record, _) in records], path))
    return Conversion(path, len(records), backup)


def restore_data(path: Path) -> Path:
    """Restore the file as it was before its conversion."""
    backup = backup_of(path)
    if not backup.is_file():
        raise DataUnusable(f"{backup}: there is no such file, so no conversion of {path.name} can be restored")
    if path.exists() and path.read_bytes() != _conversion_of(backup, path):
        raise DataUnusable(f"{path} has been changed since it was converted; move it away, then restore")
    return backup.replace(path)


def _keep(path: Path, backup: Path) -> None:
    """Keep the original as `backup`: a hard link, or a copy if the file system has no links; never overwrite a file."""
    try:
        os.link(path, backup)
    except FileExistsError:
        raise DataUnusable(f"{backup} was created meanwhile; restore it or move it away") from None
    except OSError:
        write_whole(backup, path.read_bytes())


def _conversion_of(backup: Path, path: Path) -> bytes:
    """Return the bytes that converting `backup` wrote to `path`, whose suffix says how the file is read."""
    records = [
        _converted(record, f"{path}:{number}")[0]
        for number, record in read_records(backup, path.suffix, columns=form_of)
    ]
    return _as_text(records, path).encode()


def _converted(record: Any, where: str) -> tuple[dict[str, Any], bool]:
    """Return the record in question/answer form, these keys first, and True if its form was changed."""
    form = form_of(record) if isinstance(record, Mapping) else None
    if form is None:
        shown = ", ".join(map(str, record)) if isinstance(record, Mapping) else repr(record)[:80]
        raise DataUnusable(f"{where}: it has no question and answer, only {shown}")
    if form == ("question", "answer"):
        return dict(record), False
    question, answer = (read_cell(record[column]) for column in form)
    if form[1] == "solution":
        answer = last_boxed(answer) or answer
    rest = {key: value for key, value in record.items() if key not in form or key == "solution"}
    return {"question": question, "answer": answer, **rest}, True


def _as_text(records: list[dict[str, Any]], path: Path) -> str:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    if path.suffix == ".jsonl":
        return "\n".join(lines) + "\n"
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    main()
