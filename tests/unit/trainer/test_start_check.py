"""A choice that cannot work on this machine is refused before the broker is asked, or a model or server is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from atropos_api.common.cliconfig import ConfigError
from example_trainer import cli
from example_trainer.config import TrainingConfig
from example_trainer.errors import BadLayerFilter, TrainerError
from example_trainer.launcher.preflight import plan_launch
from example_trainer.launcher.run_file import read_settings
from example_trainer.step.start_check import refuse_unusable
from example_trainer.testing import make_tiny_model
from example_trainer.trainers import Trainer

WHOLE_RUN = ("--env.server", __file__)


class NothingIsAsked:
    """Stands in for broker and weight bridge: the check comes before any use of them."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used before the check")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": "tpu"}, "--device tpu"),
        ({"device": "cuda:99"}, "--device cuda:99"),
        ({"kernels": "liger", "device": "cpu"}, "--kernels liger"),
        ({"optimizer": "nowhere:thing", "device": "cpu"}, "--optimizer nowhere:thing cannot be imported"),
        ({"loss_type": "nowhere:thing", "device": "cpu"}, "--loss-type nowhere:thing cannot be imported"),
    ],
)
def test_what_this_machine_lacks_is_reported_before_anything_is_loaded(settings: dict[str, Any], said: str) -> None:
    untouched = cast("Any", NothingIsAsked())
    trainer = Trainer(
        TrainingConfig(model_name="m", **settings), session=untouched, bridge=untouched, trackers=untouched
    )
    with pytest.raises(TrainerError) as refused:
        trainer.set_up()
    assert str(refused.value).startswith(said)


def test_modules_that_the_model_does_not_have_are_reported_before_it_is_loaded(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"weight_bridge_mode": "lora_only", "lora_target_modules": ["nonsense"], "device": "cpu"}
    config = TrainingConfig(model_name=str(make_tiny_model(tmp_path / "model")), **settings)
    untouched = cast("Any", NothingIsAsked())
    drawn = torch.random.get_rng_state()
    with pytest.raises(TrainerError, match="nonsense"):
        Trainer(config, session=untouched, bridge=untouched, trackers=untouched).set_up()
    refuse_unusable(config.model_copy(update={"lora_target_modules": ["all-linear"]}))
    assert torch.equal(torch.random.get_rng_state(), drawn), "the run's first random numbers are unchanged"


@pytest.mark.parametrize("flag", ["--train-layer-indices", "--lora-layer-indices"])
@pytest.mark.parametrize("layers", ["99", "last-99", "0-x"])
def test_layers_that_the_model_does_not_have_are_reported_by_trainer_and_launcher(
    tmp_path: Path, flag: str, layers: str
) -> None:
    mode = "none" if flag == "--train-layer-indices" else "lora_only"
    argv = ["--model-name", str(make_tiny_model(tmp_path / "model")), "--weight-bridge-mode", mode, flag, layers]
    with pytest.raises(BadLayerFilter, match="the valid range is 0-1"):
        plan_launch(read_settings([*argv, *WHOLE_RUN]))
    with pytest.raises(BadLayerFilter, match="the valid range is 0-1"):
        cli.run([*argv, "--run-dir", str(tmp_path / "run")])


def test_a_checkpoint_that_is_not_there_is_reported_before_the_launcher_starts_anything() -> None:
    settings = read_settings(["--model-name", "m", "--resume", "/nowhere/checkpoint-3", *WHOLE_RUN])
    with pytest.raises(ConfigError, match=r"--resume /nowhere/checkpoint-3: no such directory"):
        plan_launch(settings)


@pytest.mark.parametrize("mode", ["shared_vllm", "lora_only", "lora_restart", "none"])
def test_the_launcher_is_not_started_once_for_each_process_of_torchrun(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"\$WORLD_SIZE is 2: .*every program once for each process"):
        read_settings(["--model-name", "m", "--weight-bridge-mode", mode, *WHOLE_RUN])


def test_the_launcher_serves_in_the_precision_of_accelerate_in_which_its_trainer_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert read_settings(["--model-name", "m", *WHOLE_RUN]).trainer.dtype == "float16"
    assert read_settings(["--model-name", "m", "--dtype", "float32", *WHOLE_RUN]).trainer.dtype == "float32"


@pytest.mark.parametrize("engine", ["DEEPSPEED", "MEGATRON_LM"])
def test_an_engine_of_accelerate_that_is_not_used_is_refused(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(ConfigError, match=rf"\$ACCELERATE_USE_{engine}: it is not used here"):
        cli.run(["--model-name", "m", "--dry-run"])
    with pytest.raises(ConfigError, match=rf"\$ACCELERATE_USE_{engine}"):
        read_settings(["--model-name", "m", *WHOLE_RUN])
