"""The documentation site is built whole: every page, every link and anchor, and nothing from another host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Links(HTMLParser):
    """The links, anchors, loaded files and tables of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.tables = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found["id"]} if "id" in found else set()
        self.tables += tag == "table"
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif LOADED.get(tag, "") in found and found.get("rel") != "canonical":
            self.loaded.append(found[LOADED[tag]])


def build(directory: Path, configuration: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    places = ["--config-file", str(configuration), "--site-dir", str(directory)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [*command, *places], capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=240
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Links]:
    """The pages of the built site by their files."""
    directory = tmp_path_factory.mktemp("site")
    built = build(directory)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    return {path: Links(path.read_text(encoding="utf-8")) for path in directory.rglob("*.html")}


def test_each_page_of_the_repository_is_a_page_of_the_site_and_in_its_navigation(site: dict[Path, Links]) -> None:
    (root,) = {path.parent for path in site if path.name == "404.html"}
    expected = {root / path.relative_to(ROOT / "docs").with_suffix("") / "index.html" for path in PAGES}
    expected |= {root / "index.html", root / "contributing/index.html", root / "changelog/index.html"}
    assert set(site) - {root / "404.html"} == expected
    linked = {(root / link.partition("#")[0]).resolve() / "index.html" for link in site[root / "index.html"].links}
    assert expected - linked == set()


def test_each_link_leads_to_a_file_and_a_heading_of_the_site(site: dict[Path, Links]) -> None:
    broken = []
    for page, found in site.items():
        if page.name == "404.html":
            continue
        for link in found.links:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = path / "index.html" if path.is_dir() else path
            known = target in site and (not parts.fragment or parts.fragment in site[target].anchors | {"__skip"})
            if not (known or (target.is_file() and target not in site)):
                broken.append(f"{page}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_another_host(site: dict[Path, Links]) -> None:
    assert [(page, place) for page, found in site.items() for place in found.loaded if "//" in place] == []


def test_tables_are_tables(site: dict[Path, Links]) -> None:
    (root,) = {path.parent for path in site if path.name == "404.html"}
    for path in PAGES:
        rules = re.findall(r"^\|[:-][-| :]+\|$", path.read_text(encoding="utf-8"), re.MULTILINE)
        built = site[root / path.relative_to(ROOT / "docs").with_suffix("") / "index.html"]
        assert built.tables >= len(rules), path


def test_a_broken_link_breaks_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(
        "# One\n\n[gone](nowhere.md) and [none](#no-such-heading)\n", encoding="utf-8"
    )
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace("hooks: [docs/hooks.py]\n", "")
    (tmp_path / "mkdocs.yml").write_text(text, encoding="utf-8")
    built = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert built.returncode != 0
    assert "nowhere.md" in built.stdout + built.stderr
    assert "no-such-heading" in built.stdout + built.stderr
