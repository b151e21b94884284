"""A CUDA stream for work in parallel with training: it starts after what is enqueued now and waits for nothing later.

Kernels of one stream run in the order in which they were enqueued. A publish in the default stream would therefore wait
for the micro-batch that the next step has enqueued before it, and the fence with it. On a CPU, where work is done when
its call returns, everything here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_FIRST_IN_LINE = -1
"""CUDA's priority of a stream whose kernels are scheduled before those that wait in streams of the usual priority."""


class SideStream:
    """One stream of high priority on one device, kept because each stream has a pool of cached memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def after_present_work(self) -> AbstractContextManager[None]:
        """Return a context, for any thread, whose kernels run in this stream once the work enqueued by now is done.

        The present is that of this call, not of the context's begin. At its end all of its kernels have completed, so
        that the tensors they read may change.
        """
        if self._device.type != "cuda":
            return nullcontext()
        present = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        present.record(torch.cuda.current_stream(self._device))
        if self._stream is None:
            self._stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]  # untyped in torch
                self._device, priority=_FIRST_IN_LINE
            )
        return _in_stream(self._stream, present)


@contextmanager
def _in_stream(stream: torch.cuda.Stream, present: torch.cuda.Event) -> Iterator[None]:
    with torch.cuda.stream(stream):
        stream.wait_event(present)
        try:
            yield
        finally:
            stream.synchronize()
