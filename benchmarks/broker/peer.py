"""The reference server: Atropos' own, as published, in an environment of its own under the cache directory.

Its web stack is pinned to the versions that this project runs on, so that the two differ in their own code alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

REFERENCE = "atroposlib==0.4.0"
WEB_STACK = ("fastapi", "starlette", "pydantic", "uvicorn", "uvloop", "httptools")


def peer_python(cache: Path) -> Path:
    """Return the interpreter of an environment that holds the reference, created on the first call."""
    environment = cache / "bench-atroposlib-0.4.0"
    python = environment / "bin" / "python"
    pins = [f"{name}=={version(name)}" for name in WEB_STACK]
    complete = environment / ".complete"
    if not complete.exists() or complete.read_text().split() != pins:
        shutil.rmtree(environment, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", REFERENCE], check=True)
        complete.write_text("\n".join(pins))
    return python
