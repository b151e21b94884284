"""The pictures of the live page in the documentation: `python -m tests.browser.pictures URL` draws them.

URL is the page of a run at work, such as the demo's. The overview is drawn as it is at that moment; the tokens are
those of a group with some right answers and more wrong ones, if there is one whose values the trainer has reported.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.request import urlopen

from .chromium import Page, running_browser

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDE, NARROW = (1400, 900), (400, 860)
WANTED_MEAN = 0.25
READY = "document.documentElement.dataset.ready"
CURVES = "[...document.querySelectorAll('.chart')].some((one) => one.querySelector('.keys b'))"


def draw(url: str, folder: Path) -> None:
    """Write the pictures into a folder."""
    with tempfile.TemporaryDirectory() as scratch, running_browser(Path(scratch) / "profile") as browser:
        page = browser.page(window=True)
        for name, theme, size in (
            ("overview", "light", WIDE),
            ("dark", "dark", WIDE),
            ("narrow", "light", NARROW),
        ):
            show(page, url, theme=theme, size=size)
            if size == WIDE:
                page.wait(CURVES)  # on a phone they are further down
            page.screenshot(folder / f"live-page-{name}.png")
        show(page, f"{url}#{group_to_show(url)}", theme="light", size=WIDE)
        page.wait("document.querySelectorAll('.sibling .token').length > 20")
        page.screenshot(folder / "live-page-tokens.png")
        page.close()


def show(page: Page, url: str, *, theme: str, size: tuple[int, int]) -> None:
    page.open("about:blank")
    page.theme(theme)
    page.size(*size)
    page.open(url)
    page.wait(READY)


def group_to_show(url: str) -> str:
    """Return the part of the address that opens a group."""
    (run, *_) = read(f"{url}v1/runs")["runs"]
    groups = read(f"{url}v1/runs/{run['run_id']}/groups?limit=1000")["groups"]
    told = [one for one in groups if one["has_values"]] or groups
    group = min(told, key=lambda one: abs(fmean(one["rewards"]) - WANTED_MEAN))
    return f"batch={group['batch']}&group={group['group']}"


def read(url: str) -> dict[str, list[dict[str, Any]]]:
    with urlopen(url) as answer:
        found: dict[str, list[dict[str, Any]]] = json.load(answer)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    options = parser.parse_args()
    draw(options.url.rstrip("/") + "/", options.folder)


if __name__ == "__main__":
    main()
