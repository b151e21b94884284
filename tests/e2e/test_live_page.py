"""The live page of the demo at work, in a real browser: it is quick, it is live, and a restart of the broker passes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from example_trainer.processes.ports import free_ports
from tests.browser.chromium import find_browser, running_browser

from .conftest import ROOT, Launched

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif("ATROPOS_LIVE_PAGE" not in os.environ, reason="a minute; ATROPOS_LIVE_PAGE=1 runs it"),
    pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed here"),
]

READY = "document.documentElement.dataset.ready"
CONNECTION = "document.getElementById('connection').dataset.state"
STEP = "Number(document.querySelectorAll('.stage')[3].querySelector('.big').innerText.split('/')[0].replace(/,/g, ''))"


def test_the_page_of_a_run_at_work_is_there_within_a_second_live_and_survives_reload_and_restart(
    start_launcher: Callable[..., Launched], tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    demo = (sys.executable, "-m", "example_trainer.run", "--config", str(ROOT / "configs/demo.yaml"))
    evaluations = ("--env.eval_at_start", "false", "--env.eval_at_end", "false")
    checkpoints = ("--checkpoint-interval", "1", "--keep-last", "2")
    launched = start_launcher(*demo, "--training-steps", "400", "--api.port", str(port), *evaluations, *checkpoints)
    launched.wait_for_steps(5)
    with running_browser(tmp_path / "profile") as browser:
        page = browser.page(window=True)
        seconds = []
        for _ in range(6):
            page.open("about:blank")
            page.open(f"http://127.0.0.1:{port}/")
            page.wait(READY)
            seconds.append(page.wait("performance.now() / 1000"))
        assert min(seconds) < 1.0, seconds
        step = page.run(STEP)
        page.wait(f"{STEP} > {step} + 2", seconds=30)
        page.call("Page.reload")
        page.wait(READY)
        page.wait(f"{STEP} > {step} + 2")
        assert page.errors == []
        launched.child("atropos_api").kill()
        page.wait(f"{CONNECTION} === 'lost'", seconds=20)
        page.wait(f"{CONNECTION} === 'live'", seconds=60)
        step = page.run(STEP)
        page.wait(f"{STEP} > {step}", seconds=60)
