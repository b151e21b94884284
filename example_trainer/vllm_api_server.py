"""`python -m example_trainer.vllm_api_server`: the inference server. see `--help`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def _find_packages() -> None:
    """Started by path, Python looks in this file's folder first, where our modules would hide others of their names."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    if str(here.parent) not in sys.path:
        sys.path.insert(0, str(here.parent))


def main(argv: list[str] | None = None) -> int:
    """Run the server with these arguments; returns the exit code."""
    from example_trainer.serving.start import run

    return run(sys.argv[1:] if argv is None else argv)


def _leave_at_once(argv: list[str]) -> NoReturn:
    """Serve, then end without taking all of vLLM apart first: that takes seconds and frees nothing more."""
    code = main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _find_packages()
    from atropos_api.common.cliconfig import run_cli

    run_cli(_leave_at_once)
