"""Pages that are one file, in the style of the live page: reports, groups of rollouts, the description of the API.

They have no script, and their Content-Security-Policy lets a browser load nothing, so they can be kept, sent and opened
anywhere. Text of a model, an environment or a run file goes through `as_html`.
"""

from __future__ import annotations

import functools
import re
from html import escape
from pathlib import Path
from typing import Final

STYLE_FILE: Final = Path(__file__).with_name("html_pages.css")
"""The style that all pages share; the live page loads the same file."""

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"

HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def make_page(title: str, body: str, *, style: str = "", refresh_seconds: int | None = None) -> str:
    """Return a whole page; `body` is HTML, and with `refresh_seconds` the browser reloads the page at that interval."""
    again = f'<meta http-equiv="refresh" content="{refresh_seconds}">' if refresh_seconds else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{again}'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{as_html(title)}</title><style>\n{_shared_style()}{style}</style></head>\n"
        f"<body><main><h1>{as_html(title)}</h1>\n{body}</main></body></html>\n"
    )


def is_page(path: Path) -> bool:
    """Return True if a file begins as the pages of `make_page` do, so that it can be replaced without a loss.

    A file that cannot be read is none.
    """
    try:
        with path.open(errors="replace") as file:
            return f'content="{POLICY}"' in file.read(1000)
    except OSError:
        return False


def as_html(text: object) -> str:
    """Return text as HTML that shows it and nothing else."""
    return escape(visible(text))


def visible(text: object) -> str:
    """Return text with the numbers of characters that a reader could not see: control characters, those without width,
    those that change the direction of text, and halves of surrogate pairs.
    """
    return HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", str(text))


@functools.cache
def _shared_style() -> str:
    return STYLE_FILE.read_text(encoding="utf-8")
