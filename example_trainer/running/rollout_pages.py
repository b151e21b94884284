"""The rollouts of a run as pages for a browser, one for each environment, beside the groups that it kept."""

from __future__ import annotations

from pathlib import Path

from atropos_api.common.errors import AtroposError
from environments.export.page import write_page
from example_trainer.running.run_dir import ROLLOUTS


def write_rollout_pages(run_dir: Path) -> list[str]:
    """Write the page of each file of groups in the run directory; a line about each, also where there can be none."""
    lines: list[str] = []
    for groups in sorted((run_dir / ROLLOUTS).glob("*.jsonl")):
        try:
            lines.append(f"rollouts: {write_page(groups, groups.with_suffix('.html'))}")
        except (AtroposError, OSError) as error:
            lines.append(f"rollouts: no page of {groups} ({error})")
    return lines
