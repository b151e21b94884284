"""Import of a user's own module by its name or its file; by name the working directory is searched last, as with
`python -m`.

A console script does not search it, so a file next to the run file would not be found.
It is a file of its own, apart from the options, because rewards, losses and optimizers are found by it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


def import_own(module: str) -> ModuleType:
    """Import a module; the working directory is searched after all other places. Raises what the module raises."""
    with searched(Path.cwd()):
        return importlib.import_module(module)


def import_file(path: Path, name: str | None = None) -> ModuleType:
    """Import a Python file as a module of this name, by default the file's own."""
    name = name or path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up there
    spec.loader.exec_module(module)
    return module


@contextmanager
def searched(folder: Path) -> Iterator[None]:
    """Let imports search a folder too, after all other places, unless it is among them already.

    A module may change the list of places while it is loaded: what it adds stays where it is.
    """
    place = str(folder)
    if place in sys.path:
        yield
        return
    sys.path.append(place)
    try:
        yield
    finally:
        if place in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(place)]
