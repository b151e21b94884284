"""The base model is found before anything starts, and what an earlier run left of another is not served."""

from __future__ import annotations

from pathlib import Path

import pytest

from example_trainer.errors import ModelNotFound
from example_trainer.launcher.base_model import LocalBase, discard_other_base, local_base, require_model, require_on_hub
from example_trainer.weight_protocol.base_record import BASE_DIRECTORY, BaseRecord


def test_a_missing_model_is_reported_before_anything_starts(tmp_path: Path) -> None:
    for name in ("/nowhere/model", "./nowhere", "~/nowhere/at/all"):
        with pytest.raises(ModelNotFound, match="no such directory"):
            require_model(name)
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        require_model(str(tmp_path))
    assert require_model("org/model") == "org/model"


def test_a_model_that_no_hub_has_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="not in the local Hugging Face cache"):
        require_on_hub("nobody/nothing")
    with pytest.raises(ModelNotFound, match="not a Hugging Face id"):
        require_on_hub("no id at all!")


def test_local_bases_are_named_by_task_and_seed() -> None:
    assert local_base("tiny/chain") == LocalBase(task="chain", seed=0)
    assert local_base("tiny/add:3") == LocalBase(task="add", seed=3)
    assert local_base("org/chain") is None


@pytest.mark.parametrize(
    ("model", "dtype", "kept"),
    [("m", "float32", True), ("m", "auto", True), ("m", "bfloat16", False), ("n", "auto", False)],
)
def test_a_base_that_another_run_wrote_is_not_served(tmp_path: Path, model: str, dtype: str, kept: bool) -> None:
    base = tmp_path / BASE_DIRECTORY
    base.mkdir(parents=True)
    BaseRecord(digest="d", model="m", dtype="float32").write(base)
    discard_other_base(tmp_path, model, dtype)
    assert base.exists() == kept
    discard_other_base(tmp_path / "none", model, dtype)


def test_a_base_that_was_copied_in_part_is_not_served(tmp_path: Path) -> None:
    """A server that starts before the trainer failed on it, at each start."""
    base = tmp_path / BASE_DIRECTORY
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    BaseRecord(digest="d", model="m", dtype="float32").write(base)
    discard_other_base(tmp_path, "m", "float32")
    assert base.exists()
    (base / "config.json").write_text("")
    discard_other_base(tmp_path, "m", "float32")
    assert not base.exists()
