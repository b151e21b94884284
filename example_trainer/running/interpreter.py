"""How a child finds the code that this process runs, from whatever folder and however this process was started."""

from __future__ import annotations

import os
from pathlib import Path

import example_trainer

PACKAGE_ROOT = Path(example_trainer.__file__).resolve().parents[1]


def python_path() -> str:
    """`PYTHONPATH` for children: the folder of our packages first, then what was there."""
    return os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
