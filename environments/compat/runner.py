"""Runs an environment's file as its author would: as a script, from its folder's point of view."""

from __future__ import annotations

import importlib
import multiprocessing
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from atropos_api.common.cliconfig import ConfigError, run_cli
from environments.compat.finder import install
from environments.sdk.env import BaseEnv

USAGE = "usage: atropos-compat FILE {serve,process,evaluate,validate} [flags]"


def main() -> NoReturn:
    """The command `atropos-compat`; a folder `environments` where it is started does not stand in its way."""
    sys.argv[0] = "atropos-compat"  # until the environment's own name is known
    run_cli(run)


def run(argv: list[str]) -> int:
    """Run `FILE VERB [flags]`; a file that calls no `cli()` itself has its one environment run."""
    if not argv or argv[0] in {"-h", "--help"}:
        sys.stdout.write(f"{USAGE}\n\nFILE is an environment written for Atropos; flags follow the verb.\n")
        return 0
    path = Path(argv[0])
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; {USAGE}")
    install()
    # Worker processes must know the aliases too, and only a fork inherits them.
    multiprocessing.set_start_method("fork", force=True)
    with _as_script(path, argv[1:]):
        names = _execute(path)
        _only_environment(names, path).cli()
    return 0


def _execute(path: Path) -> dict[str, Any]:
    package = _package_of(path)
    if package is None or not _imports_relatively(path):
        return runpy.run_path(str(path), run_name="__main__")
    return runpy.run_module(package, run_name="__main__", alter_sys=True)


@contextmanager
def _as_script(path: Path, arguments: list[str]) -> Iterator[None]:
    """`sys.argv` and `sys.path` as a script finds them; a folder `environments` above it joins ours of that name."""
    folder = path.resolve().parent
    argv, places = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(folder))
    ours = importlib.import_module("environments").__path__
    known = list(ours)
    for parent in folder, *folder.parents:
        if parent.name == "environments" and str(parent) not in known:
            ours.insert(0, str(parent))  # their file of a name wins over ours
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, places
        ours[:] = known


def _imports_relatively(path: Path) -> bool:
    return any(line.startswith("from .") for line in path.read_text(encoding="utf-8").splitlines())


def _package_of(path: Path) -> str | None:
    """The dotted name of a file inside packages, with the folder of the outermost one on the path."""
    parts = [path.stem]
    folder = path.resolve().parent
    while (folder / "__init__.py").is_file():
        parts.append(folder.name)
        folder = folder.parent
    if len(parts) == 1:
        return None
    sys.path.insert(0, str(folder))
    return ".".join(reversed(parts))


def _only_environment(names: dict[str, Any], path: Path) -> type[BaseEnv]:
    found = [
        value
        for value in names.values()
        if isinstance(value, type)
        and issubclass(value, BaseEnv)
        and value.__module__ in {"__main__", names["__name__"]}
    ]
    leaves = [cls for cls in found if not any(other is not cls and issubclass(other, cls) for other in found)]
    if len(leaves) != 1:
        listed = ", ".join(cls.__name__ for cls in leaves) or "none"
        raise ConfigError(f"{path}: it calls no cli() and defines not one environment but {listed}")
    return leaves[0]
