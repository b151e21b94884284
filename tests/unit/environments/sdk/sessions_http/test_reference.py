"""The reference page of sessions has the tables of the code."""

import json
from pathlib import Path

from environments.sdk.config import KEY_VARIABLE, BaseEnvConfig
from environments.sdk.inference.sampling import TRUNCATING
from environments.sdk.session.openai_requests import REFUSED, SUPPORTED
from environments.sdk.session.openai_routes import SPLIT_HEADER
from environments.sdk.session.served import IDLE_SECONDS
from environments.sdk.session.turns import PIECE_TOKENS

PAGE = Path(__file__).parents[5] / "docs" / "reference" / "sessions.md"
ROUTES = {("chat",): "chat", ("text",): "completions", ("chat", "text"): "both"}


def tables(text):
    """Return the rows of each table, without its head."""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    found = [lines[2:] for lines in blocks if len(lines) > 2 and lines[1].startswith("|---")]
    return [[[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows] for rows in found]


def test_the_tables_of_fields_are_the_codes_own():
    flags, taken, refused = tables(PAGE.read_text())
    assert taken == [[f"`{field.name}`", ROUTES[field.routes], field.meaning] for field in SUPPORTED]
    assert refused == [
        [f"`{name}`", ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral), rule.reason]
        for name, rule in REFUSED.items()
    ]
    known = [name for name in BaseEnvConfig.model_fields if name.startswith("session_")]
    assert [row[0] for row in flags] == [f"`--env.{name}`" for name in known]


def test_what_the_page_says_in_words_is_so():
    page = " ".join(PAGE.read_text().split())
    for name in TRUNCATING:
        assert f"`{name}`" in page
    assert f"`{SPLIT_HEADER}: eval`" in page
    assert f"`{KEY_VARIABLE}`" in page
    assert (PIECE_TOKENS, IDLE_SECONDS) == (8, 1800)
    assert "pieces of eight tokens" in page
    assert "half an hour" in page
