"""SIGTERM and SIGINT as a wish that every wait of an environment hears, and a limit for whatever does not.

The handlers are Python's own and not the event loop's: they run too while an environment's code blocks the loop, and
start a timer that ends the process if the orderly way out takes too long.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGINT)

PATIENCE_SECONDS = 3.0

SECOND_PATIENCE_SECONDS = 2.0


class StopRequest:
    """How often the process was told to stop; `wait_for` returns when it was."""

    def __init__(self) -> None:
        self.count = 0
        self.number: signal.Signals | None = None
        self.patience_seconds = PATIENCE_SECONDS
        """How long the orderly end may take, from the first signal on; whoever has work to save raises it."""
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._timer: threading.Timer | None = None

    @property
    def exit_code(self) -> int:
        """128 + the number of the first signal, as a shell counts it."""
        return 128 + (self.number or 0)

    async def wait_for(self, count: int) -> None:
        """Until the process has been told to stop so many times."""
        while self.count < count:
            event = asyncio.Event()
            entry = (asyncio.get_running_loop(), event)
            self._waiting.append(entry)
            try:
                if self.count < count:  # a signal between the two lines above has rung for nobody
                    await event.wait()
            finally:
                self._waiting.remove(entry)

    def note(self, number: int, frame: FrameType | None = None) -> None:  # noqa: ARG002 - the form of a signal handler
        self.count += 1
        self.number = self.number or signal.Signals(number)
        self.allow(self.patience_seconds if self.count == 1 else SECOND_PATIENCE_SECONDS)
        for loop, event in list(self._waiting):
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def allow(self, seconds: float) -> None:
        """From now on the end may take so long; later the process is ended as it stands."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, self._end, (seconds,))
        self._timer.daemon = True
        self._timer.start()

    def _end(self, seconds: float) -> None:
        # Not by way of logging: the thread that hangs may hold its lock.
        os.write(
            2, f"what is under way did not end within {seconds:.0f} s of the signal; ended as it stands\n".encode()
        )
        os._exit(self.exit_code)


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Take over SIGTERM and SIGINT; a limit that runs goes on after the block, for threads hold a process up too."""
    request = StopRequest()
    before = {number: signal.signal(number, request.note) for number in NUMBERS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
