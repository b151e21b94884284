"""A stand-in for Trackio, which is not locked: it records the calls that trainer and environments make."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class RecordedTrackio(ModuleType):
    """Trackio's calls that we make, with their arguments, as version 0.43 takes them; the package is not locked."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def init(self, **given: Any) -> RecordedTrackio:
        self.calls.append(("init", given))
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("log", {**metrics, "step": step}))

    def alert(self, title: str, text: str | None = None, *, step: int | None = None) -> None:
        self.calls.append(("alert", {"title": title, "text": text, "step": step}))

    def finish(self) -> None:
        self.calls.append(("finish", {}))
