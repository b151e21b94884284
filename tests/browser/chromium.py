"""A headless Chromium over its own DevTools protocol: pages, clicks, keys, requests and screenshots."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)
START_SECONDS = 60.0
WAIT_SECONDS = 20.0


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Failed(AssertionError):
    """A page did not do what was waited for, or threw an error."""


class Page:
    """One tab. `requests` are the addresses that it asked for, `errors` what it threw or wrote as an error."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser = browser
        self.target = target
        self._session = session
        self.requests: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, parameters, session=self._session)

    def note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description") or details.get("text")))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.errors.append(" ".join(str(one.get("description") or one.get("value")) for one in parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Evaluate an expression, awaiting it if it is a promise; return its value."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise Failed(found["exceptionDetails"].get("exception", {}).get("description", script))
        return found["result"].get("value")

    def wait(self, script: str, *, seconds: float = WAIT_SECONDS) -> Any:
        """Return the value of an expression as soon as it is true."""
        deadline = time.monotonic() + seconds
        while True:
            # Before a page has loaded, what it asks for may not be there; an element counts as true.
            value = (
                f"try {{ const found = {script}; return found instanceof Node ? true : found }} catch {{ return null }}"
            )
            found = self.run(f"(() => {{ {value} }})()")
            if found:
                return found
            if time.monotonic() > deadline:
                raise Failed(f"not true within {seconds} s: {script}\n{self.text()[:600]}\n{self.errors}")
            time.sleep(0.03)

    def text(self) -> str:
        return str(self.run("document.body ? document.body.innerText : ''"))

    def click(self, selector: str) -> None:
        self.wait(f"document.querySelector({json.dumps(selector)})")
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def theme(self, name: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def show(self) -> None:
        """Bring the tab to the front, as a reader does who looks at it."""
        self.call("Page.bringToFront")

    def close(self) -> None:
        self._browser.call("Target.closeTarget", {"targetId": self.target})


class Browser:
    """A running browser; calls are answered in order, events go to the page that they belong to."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._pages: dict[str, Page] = {}
        self._early: deque[tuple[str, str, dict[str, Any]]] = deque(maxlen=1000)

    def call(self, method: str, parameters: dict[str, Any] | None = None, *, session: str | None = None) -> Any:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters or {}}
        if session is not None:
            message["sessionId"] = session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == number:
                if "error" in answer:
                    raise Failed(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._take(answer)

    def page(self, *, window: bool = False) -> Page:
        """Open a tab; with `window`, a window of its own, which stays visible next to others."""
        target = self.call("Target.createTarget", {"url": "about:blank", "newWindow": window})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page.__new__(Page)
        self._pages[session] = page
        page.__init__(self, target, session)  # type: ignore[misc]
        page.size(1400, 1000)
        return page

    def _take(self, message: dict[str, Any]) -> None:
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.note(message["method"], message["params"])


@contextmanager
def running_browser(directory: Path, *, on_start: Callable[[], None] = lambda: None) -> Iterator[Browser]:
    """Run a browser with a new profile in `directory` until the block ends."""
    name = find_browser()
    assert name is not None
    command = [name, *FLAGS, f"--user-data-dir={directory}", "about:blank"]
    log = (directory.parent / "chromium.log").open("wb")
    environment = {**os.environ, "HOME": str(directory)}
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        url = _address(directory, process)
        on_start()
        # No pings: their thread draws from the global `random`, which failed a hypothesis test elsewhere.
        with connect(url, max_size=None, open_timeout=START_SECONDS, ping_interval=None) as socket:
            yield Browser(socket)
    finally:
        _stop(process)
        log.close()


def _address(directory: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the address of the browser's DevTools, which it writes into its profile."""
    deadline = time.monotonic() + START_SECONDS
    path = directory / "DevToolsActivePort"
    while time.monotonic() < deadline:
        if path.exists() and len(lines := path.read_text().splitlines()) == 2:
            with urlopen(f"http://127.0.0.1:{lines[0]}/json/version") as answer:
                return str(json.load(answer)["webSocketDebuggerUrl"])
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise Failed(f"the browser did not start (exit code {process.poll()})")


def _stop(process: subprocess.Popen[bytes]) -> None:
    import signal

    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
