"""A run that has ended, in a real browser: its page from the run's directory, and its report, which loads nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atropos_api.client import BrokerClient
from atropos_api.testing import serve_in_thread, served_broker
from atropos_api.view import opened_view
from example_trainer.commands.view import read_recorded
from example_trainer.launcher.run_report import read_run, write_report
from tests.unit.commands.test_view import broker_over, write_files
from tests.unit.launcher.test_run_report import HOSTILE, write_run

from .chromium import Page
from .demo_run import begin_demo

READY = "document.documentElement.dataset.ready"


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    with broker_over(root / "broker") as url, BrokerClient(url) as client:
        demo = begin_demo(client, 12)
        client.finish_run(demo.run.run_id, epoch=demo.run.epoch)
    write_files(root, demo.run.run_id)
    return root


def test_the_page_of_an_ended_run_shows_its_curves_and_a_group_by_its_tokens(
    page: Page, ended: Path, tmp_path: Path
) -> None:
    store, recorded = read_recorded(ended)
    with opened_view(store, recorded, tmp_path / "scratch") as app, serve_in_thread(app) as url:
        page.open(f"{url}/")
        page.wait(READY)
        page.wait("document.body.innerText.includes('The run is finished')")
        page.wait("document.querySelectorAll('.uplot').length > 3")
        page.wait("document.getElementById('connection').dataset.state === 'ended'")
        assert page.run("document.getElementById('connection').innerText").endswith("ended")
        page.open(f"{url}/#batch=4&group=2")
        page.wait("document.querySelectorAll('.sibling .token').length > 3")
        page.wait("document.body.textContent.includes('What was said.')")
        page.open("about:blank")


def test_a_run_that_finishes_while_its_page_is_open_is_told_as_ended_until_another_begins(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        demo = begin_demo(client, 1)
        page.open(f"{own}/")
        page.wait(READY)
        state = "document.getElementById('connection').dataset.state"
        page.wait(f"{state} === 'live'")
        client.finish_run(demo.run.run_id, epoch=demo.run.epoch)
        page.wait(f"{state} === 'ended'", seconds=20)
        begin_demo(client, 1, name="second")
        page.wait(f"{state} === 'live'", seconds=20)
        page.open("about:blank")


def test_a_report_shows_its_curves_without_a_request_and_runs_nothing(page: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.5, 0.9], name=HOSTILE)
    report = write_report([read_run(run)], tmp_path / "report.html")
    page.open(report.as_uri())
    page.wait("document.querySelectorAll('.chart svg polyline').length > 5")
    assert page.wait("document.querySelector('h1').innerText") == HOSTILE
    assert page.wait("document.querySelectorAll('img, script').length + 1") == 1
    widths = page.run("[...document.querySelectorAll('.chart svg')].map((one) => one.getBoundingClientRect().width)")
    assert min(widths) > 200, json.dumps(widths)
    assert page.wait("getComputedStyle(document.querySelector('.chart svg polyline')).stroke") != "none"
    assert page.requests == [report.as_uri()]


LONG_WORD = "A" * 300


def write_run_with_long_words(root: Path) -> Path:
    write_run(root, [0.1, 0.5, 0.9], name=LONG_WORD)
    sign = {"step": 2, "sign": "kl", "metric": "train/kl", "value": 9.0, "message": LONG_WORD, "advice": LONG_WORD}
    (root / "events.jsonl").write_text(json.dumps(sign) + "\n")
    return root


def show_without_scrolling_sideways(page: Page, address: str) -> None:
    for width in (400, 1400):
        page.open("about:blank")
        page.size(width, 800)
        page.open(address)
        page.wait(f"document.querySelector('main').innerText.includes('{LONG_WORD}')")
        assert page.run("document.documentElement.scrollWidth") <= width


def test_a_long_word_in_a_name_or_a_sign_makes_no_report_wider(page: Page, tmp_path: Path) -> None:
    root = write_run_with_long_words(tmp_path / "run")
    show_without_scrolling_sideways(page, write_report([read_run(root)], tmp_path / "report.html").as_uri())


def test_a_long_word_makes_the_page_of_an_ended_run_no_wider(page: Page, tmp_path: Path) -> None:
    store, recorded = read_recorded(write_run_with_long_words(tmp_path / "run"))
    with opened_view(store, recorded, tmp_path / "scratch") as app, serve_in_thread(app) as url:
        show_without_scrolling_sideways(page, f"{url}/")
        assert "not published yet" not in page.text(), "its directory does not tell when it was"
        page.open("about:blank")
