"""A fake server with a bridge to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from example_trainer.weights.shared_vllm import SharedVllmBridge
from example_trainer.weights.testing import ServedFake, config_of, served_fake


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the manifests of other servers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGDIR", raising=False)


@pytest.fixture
def shared(
    tiny_family: Callable[[str], Path], tmp_path: Path
) -> Iterator[Callable[..., tuple[ServedFake, SharedVllmBridge]]]:
    """A function that starts a fake server and a bridge to it."""
    open_things: list[tuple[Any, SharedVllmBridge]] = []

    def start(
        family: str = "qwen2",
        *,
        dtype: str = "float32",
        server_model: str | None = None,
        policy: dict[str, Any] | None = None,
        lease_seconds: float = 30.0,
        **settings: Any,
    ) -> tuple[ServedFake, SharedVllmBridge]:
        context = served_fake(tiny_family(server_model or family), tmp_path / "manifest", dtype=dtype)
        fake = context.__enter__()
        changes = {"wait_timeout": 5.0, "drain_seconds": 0.0} | (policy or {}) | settings
        bridge = SharedVllmBridge(config_of(fake.url, tiny_family(family), **changes), lease_seconds=lease_seconds)
        open_things.append((context, bridge))
        return fake, bridge

    yield start
    for context, bridge in open_things:
        bridge.close()
        context.__exit__(None, None, None)
