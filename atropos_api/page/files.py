"""The page's own files in `static/`: HTML, styles and modules, with the headers that they are sent with.

The style sheet comes from `common.html_pages`, whose pages (reports and the like) have the same style.

The policy lets the page load nothing but these files, run no script that is inside of HTML, and be shown in no frame.
Text from a model reaches the page only as JSON.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atropos_api.common.html_pages import STYLE_FILE

FOLDER: Final = Path(__file__).with_name("static")
INDEX: Final = "index.html"

MEDIA_TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # The token may be part of the address.
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked for again each time with its ETag, so that a page is never made of two releases' files.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str
    etag: str


@functools.cache
def page_files() -> Mapping[str, PageFile]:
    """Return every file of the page by its path below `static/`, and the shared style by its name."""
    own = {
        path.relative_to(FOLDER).as_posix(): _read(path)
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in MEDIA_TYPES
    }
    return own | {STYLE_FILE.name: _read(STYLE_FILE)}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:16]
    return PageFile(content, MEDIA_TYPES[path.suffix], f'"{digest}"')


def wants_page(accept: str) -> bool:
    """Return True if a browser asks: `Accept` names HTML, which no client of the API does."""
    return "text/html" in accept.lower()
