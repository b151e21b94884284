"""The files and commands that the tutorial prints, for the tests that follow it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = ROOT / "docs/tutorial/from-the-demo-to-your-own.md"


def files() -> dict[str, str]:
    """Return the text of each file that the page tells to save, by its name."""
    text = TUTORIAL.read_text(encoding="utf-8")
    found = re.findall(
        r"[Ss]ave [^`]* as `(\w+\.py)`[^`]*(?:`[^`]*`[^`]*)?\n```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    )
    return dict(found)


def commands() -> list[str]:
    """Return the commands of the page in their order, continued lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
