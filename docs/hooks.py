"""The documentation site, built by MkDocs (`mkdocs.yml`), apart from the packages: what these pages need beyond MkDocs.

The pages are written to be read in the repository: they link to files by their paths, and README.md leads to all of
them. Here README.md becomes the first page, linked files outside `docs/` come along, and the navigation is README's
lists, in their order.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages outside `docs/`, and their places in the site."""

SECTIONS: Final = {"Start": "tutorial", "Do": "howto", "Understand": "explanation", "Look up": "reference"}
"""The tabs of the site, and the folders of their pages."""

LINK: Final = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")
README_LINK: Final = re.compile(r"\]\(docs/([\w/-]+\.md)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation: README's links by section, then the pages of the section that it does not name."""
    named = README_LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    nav: list[dict[str, list[str]] | str] = ["index.md"]
    for title, folder in SECTIONS.items():
        there = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / folder).glob("*.md"))
        listed = [page for page in dict.fromkeys(named) if page in there]
        nav.append({title: [*listed, *(page for page in there if page not in listed)]})
    config.nav = [*nav, {"Project": ["contributing.md", "changelog.md"]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside `docs/`, and each other file of the repository that a page links to."""
    for source, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    texts = {file.src_uri: file.content_string for file in files if file.is_documentation_page()}
    for place, text in texts.items():
        for _, target, _ in LINK.findall(text):
            path = in_repository(place, target)
            if path is not None and place_of(path) == path and path not in files.src_uris:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - MkDocs' form
    """Rewrite the page's links to files of the repository as links to their places in the site."""
    here = page.file.src_uri

    def rewrite(found: re.Match[str]) -> str:
        path = in_repository(here, found[2])
        if path is None:
            return found[0]
        return f"{found[1]}{posixpath.relpath(place_of(path), posixpath.dirname(here) or '.')}{found[3]}"

    return LINK.sub(rewrite, markdown)


def in_repository(place: str, target: str) -> str | None:
    """Return the path, from the root of the repository, of the file to which the page at `place` links."""
    written_at = next((source for source, there in PAGES.items() if there == place), f"docs/{place}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(written_at), target))
    return path if (ROOT / path).is_file() else None


def place_of(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    return PAGES.get(path, path.removeprefix("docs/"))
