"""The file system as code in the sandbox sees it: the interpreter, its packages, programs and libraries, read-only.

Nothing else of the machine is there: no home, no `/run`, `/var` or `/sys`, no project, and of `/dev` what is harmless.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

WORK_FOLDER = "/tmp"  # noqa: S108 - the sandbox's own
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")
# What the dynamic linker and Debian's choices between programs read.
_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache")
_ROOTS = ("/", "/usr", "/usr/local")
# Whole prefixes would show what else is kept there: a project in its own environment, sources in /usr/src.
_PARTS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec", "share", "pyvenv.cfg")
_STORES = ("/nix/store", "/gnu/store")


@dataclass(frozen=True, slots=True)
class View:
    """All that is shown: `folders` and files are pairs of a source and the path inside, `links` of target and path."""

    python: str
    packages: tuple[str, ...]
    folders: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, str], ...]

    @property
    def top(self) -> set[str]:
        """The names in the root folder."""
        paths = [path for _, path in (*self.folders, *self.links)]
        return {Path(path).parts[1] for path in (*paths, WORK_FOLDER, "/dev", "/proc")}


def view_of_this_python() -> View:
    """The view for code that this process's interpreter is to run, with the packages that it finds here."""
    packages = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    roots = dict.fromkeys((*_ROOTS, sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix))
    wanted = [*(f"{root.rstrip('/')}/{part}" for root in roots for part in _PARTS), *_STORES, *_SETTINGS, *packages]
    # The interpreter's own path may lead through links to a folder that is none of its prefixes.
    wanted += [str(link) for link in _followed(Path(sys.executable))]
    folders: dict[str, str] = {}
    links: dict[str, str] = {}
    for path in sorted(dict.fromkeys(filter(os.path.exists, wanted)), key=len):
        if _is_below(path, folders) or _is_below(path, links):
            continue
        source = os.path.realpath(path)
        if Path(path).is_symlink() and _is_below(source, [*folders, *wanted]):
            links[path] = source
        else:
            folders[path] = source
    return View(
        python=sys.executable,
        packages=tuple(packages),
        folders=tuple((source, path) for path, source in folders.items()),
        links=tuple((source, path) for path, source in links.items()),
    )


def _followed(path: Path) -> Iterator[Path]:
    """Each step from a path that may be a link to the file itself."""
    while path.is_symlink():
        yield path
        path = path.parent / path.readlink()
    yield path


def _is_below(path: str, others: Iterable[str]) -> bool:
    return any(path == other or path.startswith(f"{other}/") for other in others)
