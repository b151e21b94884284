"""The end of the process, for certain: a thread that hangs is named and left behind, exit code kept."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback

PATIENCE_SECONDS = 20.0


def ensure_exit(code: int, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """If Python has not ended the process so long after its main thread has ended, list what holds it and end it.

    Call it when all is done. Python waits for every thread that is no daemon, and runs what was registered for the
    exit, without any limit. A main thread that goes on has a caller that needs the process: nothing is ended then.
    """
    watch = threading.Thread(target=_end_after, args=(code, patience_seconds), name="exit-watch", daemon=True)
    watch.start()


def describe_threads() -> list[str]:
    """A line for each thread that keeps a process alive: its name, and where it stands."""
    frames = sys._current_frames()  # noqa: SLF001 - there is no other way to them
    holding = [thread for thread in threading.enumerate() if not thread.daemon]
    lines = []
    for thread in holding:
        frame = frames.get(thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        place = f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else "nowhere"
        lines.append(f"{thread.name}: {place}")
    return lines


def _end_after(code: int, patience_seconds: float) -> None:
    threading.main_thread().join()
    time.sleep(patience_seconds)
    lines = "".join(f"  {line}\n" for line in describe_threads())
    sys.stderr.write(
        f"not ended {patience_seconds:g} s after the last line; ending now. Threads that held on:\n{lines}"
    )
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
