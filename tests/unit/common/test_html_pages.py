"""Every page of the project has one style, and shows what a model wrote as text alone."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from atropos_api.common.html_pages import STYLE_FILE, as_html, make_page
from atropos_api.testing import served_broker
from environments.sdk.evaluation_page import render_evaluation
from environments.sdk.group_files import render as render_groups
from example_trainer.launcher.run_report import read_run, render
from tests.unit.launcher.test_run_report import write_run

HOSTILE = "<script>x</script>\u202e\x1b[31m&"
RULE = ".card { background: var(--card)"


def group_page(_: Path) -> str:
    chat = [{"role": HOSTILE, "content": HOSTILE}]
    return render_groups([{"scores": [1.0], "messages": [chat]}], title=HOSTILE)


def evaluation_page(_: Path) -> str:
    return render_evaluation(HOSTILE, {HOSTILE: 0.5}, [{"score": 0.0, "question": HOSTILE, "answer": HOSTILE}])


def run_page(folder: Path) -> str:
    return render([read_run(write_run(folder / "run", [0.1, 0.5], name=HOSTILE))])


def api_page(_: Path) -> str:
    with served_broker() as url:
        return httpx.get(f"{url}/docs").text


def live_style(_: Path) -> str:
    with served_broker() as url:
        page = httpx.get(url, headers={"Accept": "text/html"}).text
        assert f'href="page/{STYLE_FILE.name}"' in page
        return httpx.get(f"{url}/page/{STYLE_FILE.name}").text


@pytest.mark.parametrize(
    "page", [group_page, evaluation_page, run_page, api_page, live_style], ids=lambda page: page.__name__
)
def test_all_pages_have_the_style_of_the_live_page(page, tmp_path: Path) -> None:
    source = page(tmp_path)
    assert RULE in source
    assert "prefers-color-scheme: dark" in source


@pytest.mark.parametrize("page", [group_page, evaluation_page, run_page], ids=lambda page: page.__name__)
def test_what_came_from_elsewhere_is_text_and_hidden_characters_are_seen(page, tmp_path: Path) -> None:
    source = page(tmp_path)
    assert "<script" not in source
    assert as_html(HOSTILE) in source
    assert not any(character in source for character in "\u202e\x1b")


def test_hidden_characters_have_their_numbers() -> None:
    assert as_html("a\u202e<b>\n") == "a⟨U+202E⟩&lt;b&gt;\n"
    assert as_html("4\xad2\U000e0041") == "4⟨U+00AD⟩2⟨U+E0041⟩", "as on the live page: without width"


def test_a_page_asks_for_nothing_and_is_read_again_only_if_told() -> None:
    source = make_page("t", "")
    assert "default-src 'none'" in source
    assert "url(" not in source
    assert "refresh" not in source
    assert 'http-equiv="refresh" content="5"' in make_page("t", "", refresh_seconds=5)
