"""`atropos env VERB`: what can be done for environments beside running them. A verb is loaded when it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atropos_api.common.cliconfig import ConfigError, nearest

USAGE = """usage: atropos env VERB [arguments]

  init NAME                    write a new environment with its tests, as a package in a folder of that name
  convert-data FILE            rewrite a JSON Lines or JSON file as question and answer; FILE.backup keeps what it was
  convert-data --restore FILE  put FILE back as it was
"""


def run(argv: Sequence[str]) -> int:
    """Hand the arguments to their verb."""
    if not argv or argv[0] in {"-h", "--help"} or argv[1:2] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    verb, *rest = argv
    if verb not in VERBS:
        raise ConfigError(f"unknown verb {verb!r}{nearest(verb, VERBS)} (verbs of atropos env: {', '.join(VERBS)})")
    return VERBS[verb](rest)


def _convert_data(rest: Sequence[str]) -> int:
    from environments.tasks.convert import convert_data, restore_data

    restore = "--restore" in rest
    files = [word for word in rest if word != "--restore"]
    if len(files) != 1 or files[0].startswith("-"):
        raise ConfigError(
            f"atropos env convert-data takes one file and maybe --restore, got {' '.join(rest) or 'none'}"
        )
    path = Path(files[0])
    if restore:
        sys.stdout.write(f"{restore_data(path)} is as it was\n")
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
