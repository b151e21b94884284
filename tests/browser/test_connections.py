"""However many tabs there are, one reads the stream; restarts, prefixes and tokens are survived by all."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from atropos_api.broker import Broker
from atropos_api.client import BrokerClient
from atropos_api.config import BrokerConfig
from atropos_api.routes import ops
from atropos_api.server.app import create_app
from atropos_api.server.serve import BrokerServer
from atropos_api.store.factory import open_store
from atropos_api.testing import served_broker

from .chromium import Browser, Page
from .demo_run import begin_demo
from .proxy import prefix_proxy
from .test_page import READY, show

TABS = 20


class Streams:
    """Counts the event streams that are open at the broker."""

    def __init__(self) -> None:
        self.open = 0

    def wait_for(self, count: int, *, seconds: float = 20.0) -> None:
        """Wait until so many are open, and still are a moment later."""
        deadline = time.monotonic() + seconds
        steady = 0
        while steady < 5:
            steady = steady + 1 if self.open == count else 0
            assert time.monotonic() < deadline, self.open
            time.sleep(0.1)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    counted = Streams()
    stream = ops._stream

    async def counting(*arguments: object) -> object:
        counted.open += 1
        try:
            async for piece in stream(*arguments):  # type: ignore[arg-type]
                yield piece
        finally:
            counted.open -= 1

    monkeypatch.setattr(ops, "_stream", counting)
    return counted


@contextmanager
def tabs(browser: Browser, count: int) -> Iterator[list[Page]]:
    """Windows that are all visible, each with the page in it."""
    pages = [browser.page(window=True) for _ in range(count)]
    try:
        yield pages
    finally:
        for page in pages:
            page.close()


def test_twenty_visible_tabs_are_live_over_one_stream(browser: Browser, streams: Streams) -> None:
    with served_broker() as url, BrokerClient(url) as client, tabs(browser, TABS) as pages:
        run = begin_demo(client, 2)
        for page in pages:
            page.open(f"{url}/")
        for page in pages:
            page.wait(f"{READY} && document.body.innerText.includes('v2')", seconds=60)
        run.step(3)
        for page in pages:
            page.wait("document.body.innerText.includes('v3')", seconds=30)
            assert page.errors == []
        streams.wait_for(1)


def test_the_next_tab_takes_over_when_the_one_with_the_stream_is_closed(browser: Browser, streams: Streams) -> None:
    with served_broker() as url, BrokerClient(url) as client, tabs(browser, 1) as (second,):
        run = begin_demo(client, 1)
        first = browser.page(window=True)
        show(first, url)
        first.wait("document.getElementById('connection').dataset.state === 'live'")
        show(second, url)
        time.sleep(1.5)
        streams.wait_for(1)
        first.close()
        time.sleep(1.0)
        run.step(2)
        second.wait("document.body.innerText.includes('v2')", seconds=15)
        streams.wait_for(1)


def test_a_tab_that_takes_over_continues_after_the_last_event_that_it_was_told(browser: Browser) -> None:
    with served_broker() as url, BrokerClient(url) as client, tabs(browser, 1) as (second,):
        run = begin_demo(client, 1)
        first = browser.page(window=True)
        show(first, url)
        first.wait("document.getElementById('connection').dataset.state === 'live'")
        show(second, url)
        time.sleep(1.5)
        run.step(2)
        second.wait("document.body.innerText.includes('v2')", seconds=15)
        known = max(event["id"] for event in httpx.get(f"{url}/v1/events/recent").json()["events"])
        first.close()
        deadline = time.monotonic() + 15
        while not (asked := [one for one in second.requests if "/v1/events?" in one]):
            assert time.monotonic() < deadline
            second.run("0")
            time.sleep(0.1)
        assert int(parse_qs(urlsplit(asked[0]).query)["after"][0]) >= known


def test_a_hidden_tab_reads_no_stream_keeps_its_title_and_is_up_to_date_when_it_is_looked_at(
    browser: Browser, streams: Streams
) -> None:
    with served_broker() as url, BrokerClient(url) as client:
        run = begin_demo(client, 1)
        page = browser.page(window=True)
        show(page, url)
        page.wait("document.getElementById('connection').dataset.state === 'live'")
        hide = "Object.defineProperty(document, 'hidden', {get: () => HIDDEN, configurable: true}); "
        changed = "document.dispatchEvent(new Event('visibilitychange'))"
        page.run(hide.replace("HIDDEN", "true") + changed)
        streams.wait_for(0)
        run.step(2)
        time.sleep(2.0)
        assert "v2" not in page.text()
        page.run("{ const now = Date.now; Date.now = () => now() + 31000 }")
        page.wait("document.title.startsWith('2 ')", seconds=30)
        assert streams.open == 0
        page.run(hide.replace("HIDDEN", "false") + changed)
        page.wait("document.body.innerText.includes('v2')", seconds=8)
        page.close()


@contextmanager
def broker_at(listener: socket.socket, directory: Path) -> Iterator[None]:
    """Serve a broker over the store in `directory` on a port that stays the same."""
    import threading

    config = BrokerConfig(store=str(directory))
    ledger, bodies = open_store(config.store)
    broker = Broker(ledger, bodies, settings=config)
    app = create_app(config, broker)
    server = BrokerServer(app, config, app.context.stop)
    own = listener.dup()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [own]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield
    finally:
        app.context.stop()
        server.should_exit = server.force_exit = True
        thread.join(10)
        own.close()
        broker.close()


def test_a_restart_of_the_broker_is_reported_and_survived(browser: Browser, tmp_path: Path) -> None:
    page = browser.page(window=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with broker_at(listener, tmp_path / "store"), BrokerClient(url) as client:
            run = begin_demo(client, 3)
            show(page, url)
            page.wait("document.querySelector('.keys b')")
            page.wait("document.getElementById('connection').dataset.state === 'live'")
        page.wait("document.getElementById('connection').dataset.state === 'lost'", seconds=15)
        with broker_at(listener, tmp_path / "store"), BrokerClient(url) as client:
            page.wait("document.getElementById('connection').dataset.state === 'live'", seconds=40)
            run.client = client
            run.step(4)
            page.wait("document.body.innerText.includes('v4')", seconds=10)
            page.wait("document.querySelector('.chart').chart.lines[0].steps.length === 4", seconds=10)
            page.call("Page.reload")
            page.wait(READY)
            page.wait("document.querySelector('.chart').chart.lines[0].steps.length === 4", seconds=10)
            page.open("about:blank")
    page.close()


def test_behind_a_prefix_and_a_token_everything_works(page: Page) -> None:
    with served_broker(token="secret-token") as broker, BrokerClient(broker, token="secret-token") as client:
        run = begin_demo(client, 3)
        with prefix_proxy(broker, "/team/atropos") as url:
            page.open(f"{url}/t/secret-token")
            page.wait(READY)
            assert page.run("location.pathname") == "/team/atropos/t/secret-token/"
            page.wait("document.querySelector('.keys b')")
            page.wait("document.getElementById('connection').dataset.state === 'live'")
            run.step(4)
            page.wait("document.body.innerText.includes('v4')", seconds=10)
            page.run("location.hash = '#batch=4&group=0&sample=0&token=30'")
            page.wait("document.querySelector('.token[aria-selected=true]')")
            paths = {urlsplit(one).path for one in page.requests}
            assert all(path.startswith("/team/atropos/t/secret-token") for path in paths), paths
            page.open("about:blank")


def test_without_the_token_a_browser_is_told_what_to_do(browser: Browser) -> None:
    page = browser.page(window=True)
    with served_broker(token="secret-token") as url:
        page.open(f"{url}/")
        page.wait("document.body.innerText.includes('this broker asks for a token')")
    page.close()
