"""`atropos doctor --memory`: what fits a GPU follows from the arithmetic that is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from example_trainer.commands import main
from example_trainer.commands.memory import (
    REFERENCE_SHAPES,
    SETTINGS,
    Load,
    MemoryOptions,
    Setting,
    advise,
    budget,
    find_shape,
    fits,
    nearest_fit,
    shape_of,
)
from example_trainer.errors import ModelNotFound

LOAD = Load()
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
}


@pytest.mark.parametrize(("size", "billions"), [("8B", 8.03), ("14B", 14.77), ("24B", 23.57)])
def test_reference_shapes_have_the_published_number_of_parameters(size: str, billions: float) -> None:
    assert REFERENCE_SHAPES[size].parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_models_parameters_are_counted_as_torch_counts_them() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**TINY, tie_word_embeddings=True)
    counted = sum(parameter.numel() for parameter in transformers.LlamaForCausalLM(config).parameters())
    assert shape_of("tiny", config.to_dict()).parameters == counted


def test_full_fine_tuning_takes_18_bytes_a_parameter_with_fp32_masters_and_adamw() -> None:
    shape = REFERENCE_SHAPES["8B"]
    needed = budget(shape, Setting(optimizer="adamw"), LOAD)
    weights = needed.served + needed.masters + needed.gradients + needed.states
    assert weights / shape.parameters == pytest.approx(18.0)


def test_without_masters_there_is_one_copy_of_the_weights_and_the_step_needs_room_for_the_largest_tensor() -> None:
    shape = REFERENCE_SHAPES["8B"]
    needed = budget(shape, Setting(optimizer="adamw_8bit", master_weights="none"), LOAD)
    assert (needed.served, needed.masters, needed.base_copy) == (2 * shape.parameters, 0.0, 0.0)
    assert needed.gradients + needed.states == pytest.approx(4 * shape.parameters)
    assert needed.activations >= 8 * shape.vocabulary * shape.hidden  # in fp32 with its gradient


@pytest.mark.parametrize(("size", "gpu_gb"), [("8B", 80.0), ("14B", 80.0), ("24B", 192.0)])
def test_a_documented_row_that_does_not_fit_names_one_that_does(size: str, gpu_gb: float) -> None:
    shape = REFERENCE_SHAPES[size]
    best = nearest_fit(shape, gpu_gb, LOAD)
    assert best is not None
    assert fits(budget(shape, best, LOAD), gpu_gb)
    cheaper_and_exact = SETTINGS[: SETTINGS.index(best)]
    assert not any(fits(budget(shape, setting, LOAD), gpu_gb) for setting in cheaper_and_exact)
    report = "\n".join(advise(MemoryOptions(memory="table")))
    assert "with fp32 masters for all layers it is 80 GB over" in report


@pytest.mark.parametrize("field", ["num_hidden_layers", "n_layer"])
def test_the_doctor_prints_the_range_that_layer_filters_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({field: 32}), encoding="utf-8")
    assert main.run(["doctor", "--layers", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "take 0-31" in printed
    assert "top-25% is 24-31" in printed
    assert "top-50% is 16-31" in printed
    assert "last-12 is 20-31" in printed
    with pytest.raises(ModelNotFound, match="--layers nobody/nothing-here: not a directory"):
        main.run(["doctor", "--layers", "nobody/nothing-here"])


def test_a_directory_is_read_and_a_name_that_is_nowhere_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    assert find_shape(str(tmp_path)).layers == 2
    with pytest.raises(ModelNotFound, match=r"not one of the sizes 8B, 14B, 24B"):
        find_shape("nobody/nothing-here")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelNotFound, match="does not describe a decoder"):
        find_shape(str(tmp_path))


def test_nothing_is_promised_where_nothing_fits() -> None:
    assert nearest_fit(REFERENCE_SHAPES["24B"], 40.0, LOAD) is None
    assert "nothing fits" in "\n".join(advise(MemoryOptions(memory="24B", gpu_gb=40.0)))
