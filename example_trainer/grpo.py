"""Entry point of the trainer: `python -m example_trainer.grpo`, `python example_trainer/grpo.py`, `atropos-grpo`."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in {None, ""}:  # started by path: make the package importable and keep its folder out of the way
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    sys.path.insert(0, str(here.parent))

from example_trainer.cli import main

if __name__ == "__main__":
    main()
