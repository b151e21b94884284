"""A browser for each file, a tab for each test, and a broker with a run to look at."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from atropos_api.client import BrokerClient
from atropos_api.server.app import BrokerApp
from atropos_api.testing import make_memory_app, serve_in_thread

from .chromium import Browser, Page, find_browser, running_browser
from .demo_run import DemoRun, begin_demo


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_browser() is None:
        pytest.skip("no Chromium is installed here")
    with running_browser(tmp_path_factory.mktemp("browser") / "profile") as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab; in the end, nothing failed in it and none of its requests left the origin."""
    page = browser.page(window=True)
    page.theme("light")
    yield page
    origins = {urlsplit(url).netloc for url in page.requests if not url.startswith(("data:", "about:", "blob:"))}
    page.close()
    assert page.errors == []
    assert len(origins) <= 1, origins


@pytest.fixture(scope="module")
def app() -> BrokerApp:
    return make_memory_app()


@pytest.fixture(scope="module")
def url(app: BrokerApp) -> Iterator[str]:
    with serve_in_thread(app) as url:
        yield url


@pytest.fixture(scope="module")
def demo(url: str) -> Iterator[DemoRun]:
    """A broker with a run of 60 steps."""
    with BrokerClient(url) as client:
        yield begin_demo(client, 60, batches_dir="/runs/demo/rollouts")
