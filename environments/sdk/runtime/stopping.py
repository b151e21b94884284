"""Stop requests: SIGTERM and SIGINT become a request that every wait of an environment notices.

The handlers are Python's own, not the event loop's: they also run while an environment's code blocks the loop. They
start a timer that ends the process if the stop takes too long.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_SECONDS = 3.0
SECOND_SIGNAL_GRACE_SECONDS = 2.0
SHUTDOWN_SECONDS = 5.0
"""Time that a stop may take in addition to the drains of rollouts and of groups."""
WANDB_FINISH_SECONDS = 30.0
"""Time that W&B may take to send its data."""


class StopRequest:
    """The stop signals that the process received: `wait_for` waits for a number of them."""

    def __init__(self) -> None:
        self.count = 0
        self.signal: signal.Signals | None = None
        self.grace_seconds = GRACE_SECONDS
        """Time that the stop may take, from the first signal on; code that has work to save increases it."""
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._limit: object | None = None
        """The limit that applies, as an object of its own: a timer of an earlier limit has no effect."""

    @property
    def exit_code(self) -> int:
        """The exit code 128 + the number of the first signal, as a shell counts it; 1 without a signal."""
        return 1 if self.signal is None else 128 + self.signal

    async def wait_for(self, count: int) -> None:
        """Wait until the process has received this number of signals."""
        while self.count < count:
            event = asyncio.Event()
            entry = (asyncio.get_running_loop(), event)
            self._waiting.append(entry)
            try:
                if self.count < count:  # a signal before the entry was in the list has set no event
                    await event.wait()
            finally:
                self._waiting.remove(entry)

    def handle_signal(self, number: int, frame: FrameType | None = None) -> None:  # noqa: ARG002 - the form of a signal handler
        self.count += 1
        self.signal = self.signal or signal.Signals(number)
        self.set_grace(self.grace_seconds if self.count == 1 else SECOND_SIGNAL_GRACE_SECONDS)
        self._wake()

    def _wake(self) -> None:
        for loop, event in list(self._waiting):
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def request(self, begin: str) -> None:
        """Ask for a stop as a first signal does; `begin` names the reason. The exit code is 1."""
        if not self.count:
            self.count = 1
            self.set_grace(self.grace_seconds, begin)
            self._wake()

    def set_grace(self, seconds: float, begin: str = "signal") -> None:
        """Limit the time for the end, counted from now: `begin` names this event. Then the process exits at once."""
        # An earlier timer is not cancelled: a signal in the middle of that would wait for ever for its lock.
        self._limit = limit = object()
        timer = threading.Timer(seconds, self._exit_now, (limit, seconds, begin))
        timer.daemon = True
        timer.start()

    def lift_grace(self) -> None:
        """End a limit that no signal has set."""
        if not self.count:
            self._limit = None

    def _exit_now(self, limit: object, seconds: float, begin: str) -> None:
        if limit is not self._limit:
            return
        # Not through logging: the blocked thread may hold its lock.
        os.write(
            2,
            f"work in progress did not finish within {seconds:.0f} s of the {begin}; exiting now\n".encode(),
        )
        os._exit(self.exit_code)


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Handle SIGTERM and SIGINT inside the block; a running limit continues after it, since threads can also block the
    exit.
    """
    request = StopRequest()
    before = {number: signal.signal(number, request.handle_signal) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
