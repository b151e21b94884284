"""The `placement` section: it becomes a layout, which sets sizes and is printed by a dry run."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError
from example_trainer import run
from example_trainer.launcher.run_file import read_settings

LARGE = "{n_nodes: 2, n_gpus_per_node: 4, actor_tp_size: 2, rollout_tp_size: 4}"


@pytest.fixture
def run_file(tmp_path: Path):
    """A function that writes a run file with this placement and returns its flags."""

    def write(placement: str, trainer: str = "") -> list[str]:
        path = tmp_path / "run.yaml"
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        own = f"model_name: {model}, atropos_url: 'http://127.0.0.1:9', run_dir: {tmp_path / 'run'}{trainer}"
        mode = "registered_servers: true, weight_bridge_mode: none, restart_method: reload"
        path.write_text(f"trainer: {{{own}, {mode}}}\nplacement: {placement}\n")
        return ["--config", str(path)]

    return write


def test_a_placement_sets_the_sizes_of_trainer_and_servers(run_file) -> None:
    settings = read_settings(run_file(LARGE))
    assert settings.layout is not None
    assert settings.layout.world_size == 8
    assert (settings.trainer.world_size, settings.trainer.trainer_tensor_parallel_size) == (8, 2)
    assert settings.trainer.vllm_tensor_parallel_size == 4


def test_without_a_placement_there_is_no_layout() -> None:
    assert read_settings(["--model-name", "m"]).layout is None


@pytest.mark.parametrize(
    ("placement", "trainer", "told"),
    [
        ("{n_nodes: 2, actor_tp_size: 3}", "", "placement: actor_tp_size 3 does not divide the 2 GPUs"),
        ("{gpus: 2}", "", "unknown key 'gpus'; the keys are n_nodes"),
        (LARGE, ", vllm_tensor_parallel_size: 2", "a size of 4 for trainer.vllm_tensor_parallel_size, which is 2"),
    ],
)
def test_a_placement_that_contradicts_itself_or_the_trainer_is_refused(run_file, placement, trainer, told) -> None:
    with pytest.raises(ConfigError, match=told):
        read_settings(run_file(placement, trainer))


def test_a_dry_run_prints_what_follows_and_a_run_of_several_workers_is_refused(run_file, capsys, monkeypatch) -> None:
    monkeypatch.setattr("example_trainer.launcher.endpoints.fit_to_gpu", lambda settings: (settings, None))
    flags = run_file("{n_nodes: 2, n_gpus_per_node: 2}")
    assert run.run([*flags, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "world size 4, actor data parallel 4 x tensor parallel 1, 4 rollout replicas" in printed
    assert "workers: worker-0-0, worker-0-1, worker-1-0, worker-1-1" in printed
    with pytest.raises(ConfigError, match="the layout has 4 workers, and atropos-grpo-run starts one trainer process"):
        run.run(flags)
