"""Flags of the trainer that its weight bridge uses, observed at a server."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from example_trainer.config import TrainingConfig
from example_trainer.errors import WaitTimedOut
from example_trainer.weights.base import PublishReport
from example_trainer.weights.factory import make_bridge
from example_trainer.weights.shared_vllm import SharedVllmBridge
from example_trainer.weights.testing import ServedFake, served_fake


def bridge_to(fake: ServedFake, model: Path, directory: Path, **settings: object) -> SharedVllmBridge:
    values = {
        "model_name": str(model),
        "weight_bridge_mode": "shared_vllm",
        "run_dir": directory,
        "dtype": "float32",
        "device": "cpu",
        "optimizer": "adamw",
        "vllm_port": urlsplit(fake.url).port,
        "vllm_config_path": str(fake.server.manifest_path),
        "wait_timeout": 1.0,
    }
    bridge = make_bridge(TrainingConfig.model_validate(values | settings))
    assert isinstance(bridge, SharedVllmBridge)
    return bridge


def shown_token(bridge: SharedVllmBridge) -> str:
    attached = bridge._attached
    assert attached is not None
    return str(attached.client._http.headers["Authorization"])


def test_the_bridge_token_that_is_given_is_shown_instead_of_the_manifests(tiny_family, tmp_path):
    model = tiny_family("qwen2")
    with served_fake(model, tmp_path / "manifest") as fake:
        for given, shown in ((None, fake.server.manifest.bridge_token), ("of-the-operator", "of-the-operator")):
            bridge = bridge_to(fake, model, tmp_path, bridge_token=given)
            bridge.prepare()
            assert shown_token(bridge) == f"Bearer {shown}"
            bridge.close()


def test_the_manifest_that_is_named_is_read_and_no_other(tiny_family, tmp_path, monkeypatch):
    model = tiny_family("qwen2")
    with served_fake(model, tmp_path / "one") as one, served_fake(model, tmp_path / "two") as two:
        monkeypatch.setenv("LOGDIR", str(tmp_path / "two"))
        bridge = bridge_to(one, model, tmp_path)
        bridge.prepare()
        assert bridge._attached is not None
        assert bridge._attached.manifest.boot_id == one.server.boot_id
        bridge.close()
        missing = bridge_to(two, model, tmp_path, vllm_config_path=str(tmp_path / "nowhere.json"))
        with pytest.raises(WaitTimedOut, match=r"looked at .*nowhere\.json\."):
            missing.prepare()


def test_two_runs_that_name_one_manifest_do_not_share_a_server(tiny_family, tmp_path):
    """The second run's trainer found the first one's server there, and published into it."""
    model = tiny_family("qwen2")
    with served_fake(model, tmp_path / "one") as one, served_fake(model, tmp_path / "two") as two:
        bridge = bridge_to(two, model, tmp_path, vllm_config_path=str(one.server.manifest_path))
        with pytest.raises(WaitTimedOut, match=f"belongs to the server at {one.url}, not to the one at {two.url}"):
            bridge.prepare()
        without_port = TrainingConfig.model_validate(
            bridge._config.model_dump(include=bridge._config.model_fields_set - {"vllm_port"})
        )
        named = make_bridge(without_port)
        named.prepare()
        named.close()


def test_a_smaller_sync_budget_publishes_less_often(tiny_family, tmp_path):
    model = tiny_family("qwen2")
    with served_fake(model, tmp_path / "manifest") as fake:
        allowed = {}
        for budget in (0.5, 0.05):
            options = {"sync_budget": budget, "forward_weights": "masters", "in_flight": "drain"}
            bridge = bridge_to(fake, model, tmp_path, **options)
            bridge._budget.note(
                PublishReport(version=1, seconds=0.1, recomputed_tokens=100, generated_tokens=1000, paused_requests=1)
            )
            allowed[budget] = bridge.should_publish(1)
    assert allowed == {0.5: True, 0.05: False}
