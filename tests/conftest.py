"""Settings that every test relies on: one thread per process, no hub, no trackers, asyncio as the event loop."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Generator, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Set before any test imports torch: on two cores more threads only compete for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# No limit for one example of a property: Hypothesis' default of 200 ms fails on a busy core.
settings.register_profile("any_time", deadline=None)
settings.load_profile("any_time")


def pytest_configure(config: pytest.Config) -> None:
    """Register the observer of promised tests; under xdist each worker sees its own, the controller sees all."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A background job of a shell ignores it, and so would the programs that a test starts and interrupts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    spec = spec_from_file_location("promises", Path(__file__).with_name("promises.py"))
    assert spec is not None
    assert spec.loader is not None
    promises = module_from_spec(spec)
    spec.loader.exec_module(promises)
    config.pluginmanager.register(promises.Observer(promises.promised_tests()), "promises")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write halves of surrogate pairs in captured output as `\\ud800`: a worker of xdist dies of them."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True)
def leaves_no_signal_handler() -> Iterator[None]:
    """Fail a test that leaves a signal handler behind: it would answer the signals of every later test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    left = {number: found for number in before if (found := signal.getsignal(number)) != before[number]}
    for number in left:
        signal.signal(number, before[number])
    assert not left


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def no_such_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the look-up of a name in .invalid fail as that of a mistyped one, also without a name server."""
    look_up = socket.getaddrinfo

    def looking_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        if ".invalid" in str(host):  # a client may give the name as bytes
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", looking_up)
