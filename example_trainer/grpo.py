"""Entry point of the trainer: it runs as `python -m example_trainer.grpo` and `python example_trainer/grpo.py`.

It is a file of its own because the second form must repair `sys.path` before the package can be imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in {None, ""}:  # started by path: import the package from its parent, not from its own folder
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    sys.path.insert(0, str(here.parent))

from example_trainer.cli import main

if __name__ == "__main__":
    main()
