"""Loses one exchange between trainer and server: the request on its way, or the answer on its way back."""

from __future__ import annotations

from contextlib import contextmanager

from example_trainer.errors import ServerUnavailable
from example_trainer.weight_protocol.client import ServerClient


@contextmanager
def losing(monkeypatch, what, moment, *, client=None):
    """Lose the next exchange whose path ends in `what`; yield the list of lost ones."""
    call, lost = ServerClient._call, []

    def unreliable(self, method, path, *arguments, **settings):
        concerned = path.partition("?")[0].endswith(what) and client in (None, self) and not lost
        if concerned:
            lost.append(path)
            if moment == "answer":
                call(self, method, path, *arguments, **settings)
            raise ServerUnavailable(f"{path}: the {moment} was lost")
        return call(self, method, path, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(ServerClient, "_call", unreliable)
        yield lost
