"""Entry point of the inference server: it runs as `python -m example_trainer.vllm_api_server`; see `--help`.

It is a file of its own because it can also be started by path and must then repair `sys.path` before other imports.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def _find_packages() -> None:
    """Replace this file's folder in `sys.path` by its parent: when started by path, our modules hide other packages."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    if str(here.parent) not in sys.path:
        sys.path.insert(0, str(here.parent))


def main(argv: list[str] | None = None) -> int:
    """Run the server with these arguments and return the exit code."""
    from example_trainer.serving.start import run

    return run(sys.argv[1:] if argv is None else argv)


def _leave_at_once(argv: list[str]) -> NoReturn:
    """Serve, then exit without vLLM's shutdown in Python, which takes seconds and frees nothing more."""
    code = main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _find_packages()
    from atropos_api.common.cliconfig import run_cli

    run_cli(_leave_at_once)
