"""The memory model: each option counts, the nearest setting that fits is named, and the page says the same.

Its numbers are compared with torch's where torch needs no GPU: parameters, and the tensors that a layer keeps for its
backward.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from example_trainer.commands import main
from example_trainer.commands.memory import (
    DOCUMENTED_ROWS,
    FOUR_BIT_CLAIM,
    MODELS_OF_RUN_FILES,
    MemoryOptions,
    Row,
    advise,
    find_shape,
    memory_page,
    run_file_row,
)
from example_trainer.config import TrainingConfig
from example_trainer.errors import ModelNotFound
from example_trainer.memory.budget import WORKING_SET, Budget, budget, server_needs
from example_trainer.memory.fit import (
    Gpu,
    as_flags,
    explain,
    fits,
    nearest,
    with_changes,
)
from example_trainer.memory.shapes import REFERENCE_SHAPES, local_shape, shape_of

ROOT = Path(__file__).parents[3]
RUN_FILES = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if "tiny/" not in path.read_text()]
LARGEST_CARD_GB = {"math_zero_shared": 141.0}
EIGHT = REFERENCE_SHAPES["8B"]
SHARED: dict[str, Any] = {"weight_bridge_mode": "shared_vllm"}
ADAPTER: dict[str, Any] = {"weight_bridge_mode": "lora_restart"}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
}


def config_of(**flags: Any) -> TrainingConfig:
    return TrainingConfig(model_name="m", **flags)


def needs(**flags: Any) -> Budget:
    """Return the needs of an 8B model with a server on another GPU."""
    return budget(EIGHT, config_of(**flags), server_bytes=0.0)


def gpu(gigabytes: float, share: float = 0.45, **more: Any) -> Gpu:
    return Gpu(total_bytes=gigabytes * 1e9, share=share, **more)


@pytest.mark.parametrize(
    ("size", "billions"), [("3B", 3.21), ("4B", 4.02), ("7B", 7.62), ("8B", 8.03), ("14B", 14.77), ("24B", 23.57)]
)
def test_reference_shapes_have_the_published_number_of_parameters(size: str, billions: float) -> None:
    assert REFERENCE_SHAPES[size].parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_models_parameters_are_counted_as_torch_counts_them() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**TINY, tie_word_embeddings=True)
    counted = sum(parameter.numel() for parameter in transformers.LlamaForCausalLM(config).parameters())
    assert shape_of("tiny", config.to_dict()).parameters == counted
    mixture = transformers.MixtralConfig(**TINY, num_local_experts=4)
    counted = sum(parameter.numel() for parameter in transformers.MixtralForCausalLM(mixture).parameters())
    assert shape_of("tiny", mixture.to_dict()).parameters == counted


def test_an_adapters_parameters_are_counted_as_peft_counts_them() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(**TINY)
    for targets, names in ((None, ["q_proj", "v_proj"]), (["all-linear"], "all-linear")):
        model = peft.get_peft_model(
            transformers.LlamaForCausalLM(config), peft.LoraConfig(r=8, target_modules=names, task_type="CAUSAL_LM")
        )
        counted, _ = model.get_nb_trainable_parameters()
        options = config_of(**ADAPTER, lora_r=8, lora_target_modules=targets)
        needed = budget(shape_of("tiny", config.to_dict()), options, server_bytes=0.0)
        assert needed.masters == 4 * counted


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_layer_keeps_no_more_for_its_backward_than_is_counted(family: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    hidden, intermediate, tokens, kept = 256, 896, 64, []
    for layers in (1, 2):
        config = getattr(transformers, f"{family}Config")(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=100,
            use_cache=False,
        )
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        found: dict[int, Any] = {}  # held until they are counted, so that no memory is used twice

        def note(tensor: Any, found: dict[int, Any] = found) -> Any:
            found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = model.model(torch.zeros(1, tokens, dtype=torch.long))
        kept.append(sum(each.untyped_storage().nbytes() for place, each in found.items() if place not in weights))
        del output
    per_token = (kept[1] - kept[0]) / tokens / 2
    counted = WORKING_SET[0] * hidden + WORKING_SET[1] * intermediate
    assert 0.8 * counted < per_token <= counted


def test_full_fine_tuning_takes_16_bytes_a_parameter_beside_the_served_weights() -> None:
    needed = needs(**SHARED, optimizer="adamw", gradient_checkpointing=True)
    assert (needed.masters + needed.gradients + needed.states) / EIGHT.parameters == pytest.approx(16.0)
    assert needed.weights == 0.0
    assert server_needs(EIGHT, config_of(**SHARED), cached_tokens=0) > 2 * EIGHT.parameters


def test_without_masters_there_is_one_copy_of_the_weights_and_the_step_needs_room_for_the_largest_tensor() -> None:
    needed = needs(**SHARED, optimizer="adamw_8bit", master_weights="none", gradient_checkpointing=True)
    assert (needed.masters, needed.weights) == (0.0, 0.0)
    assert needed.gradients + needed.states == pytest.approx(4 * EIGHT.parameters)
    assert needed.working >= 8 * EIGHT.vocabulary * EIGHT.hidden  # in fp32 with its gradient


LESS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "checkpointing": ({}, {"gradient_checkpointing": True}),
    "smaller micro-batches": ({}, {"token_budget": 2048}),
    "fewer sequences": ({"batch_size": 4}, {"batch_size": 2}),
    "8-bit states": ({"optimizer": "adamw"}, {"optimizer": "adamw_8bit"}),
    "no second moment": ({"optimizer": "adamw_8bit"}, {"optimizer": "adafactor"}),
    "masters on the host": ({}, {"master_weights": "host"}),
    "no masters": ({}, {"master_weights": "none"}),
    "a layer filter": ({}, {"train_layer_indices": "last-12"}),
    "shared weights": ({"weight_bridge_mode": "none"}, SHARED),
    "a forward from the served weights": ({**SHARED, "forward_weights": "masters"}, SHARED),
    "an adapter": (SHARED, ADAPTER),
    "a smaller rank": ({**ADAPTER, "lora_r": 64}, {**ADAPTER, "lora_r": 8}),
    "fewer adapted modules": ({**ADAPTER, "lora_target_modules": ["all-linear"]}, ADAPTER),
    "an adapter on the last layers": (ADAPTER, {**ADAPTER, "lora_layer_indices": "last-12"}),
    "a base in 4 bits": (ADAPTER, {**ADAPTER, "load_in_4bit": True}),
    "no reference": ({"kl_coef": 0.1}, {}),
    "no older versions": ({"keep_versions": 2}, {}),
    "half the bytes of a weight": ({"dtype": "float32", **ADAPTER}, {"dtype": "bfloat16", **ADAPTER}),
    "ranks": ({"optimizer": "adamw"}, {"optimizer": "adamw", "world_size": 4}),
    "freed layers": (
        {"optimizer": "adamw", "world_size": 4, "reshard_after_forward": False},
        {"optimizer": "adamw", "world_size": 4},
    ),
    "divided layers": (
        {"optimizer": "adamw", "world_size": 4},
        {"optimizer": "adamw", "world_size": 4, "trainer_tensor_parallel_size": 2},
    ),
}


@pytest.mark.parametrize("means", LESS)
def test_an_option_that_saves_memory_is_counted(means: str) -> None:
    usual, less = LESS[means]
    assert needs(**less).total < 0.999 * needs(**usual).total


def test_a_trained_head_needs_its_gradient_in_fp32_and_room_for_what_a_chunk_adds() -> None:
    few: dict[str, Any] = {"gradient_checkpointing": True, "batch_size": 1, "seq_len": 64}
    whole, layers_alone = needs(**few), needs(**few, train_layer_indices="0-31")
    assert whole.working - layers_alone.working == 2 * 4 * EIGHT.vocabulary * EIGHT.hidden


def test_tensor_parallelism_divides_layers_and_ends_and_holds_the_whole_head_beside_them() -> None:
    ranks: dict[str, Any] = {"optimizer": "adamw", "world_size": 4, "gradient_checkpointing": False}
    whole, divided = needs(**ranks), needs(**ranks, trainer_tensor_parallel_size=4)
    assert divided.weights == pytest.approx(whole.weights / 4 + 2 * EIGHT.vocabulary * EIGHT.hidden)
    assert (divided.masters, divided.states) == (whole.masters, whole.states), "the states are divided among all ranks"
    in_hidden, in_intermediate = (WORKING_SET[0] * EIGHT.hidden, WORKING_SET[1] * EIGHT.intermediate)
    kept = 2 * config_of(**ranks).micro_batch_tokens * EIGHT.layers
    assert whole.working - divided.working == pytest.approx(kept * in_intermediate * 3 / 4)
    assert divided.working > kept * in_hidden


def test_the_server_needs_room_for_what_it_serves() -> None:
    def least(tokens: int = 4096, **flags: Any) -> float:
        return server_needs(EIGHT, config_of(**flags), cached_tokens=tokens)

    assert least(tokens=8192) - least() == 4096 * EIGHT.cache_bytes_per_token()
    assert least(vllm_tensor_parallel_size=2) < least()
    assert least(vllm_quantization="fp8") < least()
    assert least(dtype="float32") > least()
    assert least(weight_bridge_mode="lora_only", max_staleness=8) > least(weight_bridge_mode="lora_only")
    assert least(**SHARED, num_inference_nodes=2) == 2 * least()


def test_the_nearest_setting_alters_results_only_where_it_must() -> None:
    asked = config_of(**SHARED, optimizer="adamw")
    nearest_by_size: dict[int, dict[str, Any]] = {
        300: {},
        190: {"gradient_checkpointing": True},
        130: {"optimizer": "adamw_8bit", "gradient_checkpointing": True},
        80: {"optimizer": "adamw_8bit", "master_weights": "none", "gradient_checkpointing": True},
        40: {"master_weights": "host", "gradient_checkpointing": True},
    }
    for gigabytes, changes in nearest_by_size.items():
        on = gpu(gigabytes, share=0.2, share_can_change=False)
        assert nearest(EIGHT, asked, on) == changes
        assert fits(EIGHT, with_changes(asked, changes), on)


def test_micro_batches_get_smaller_before_the_servers_share_does_and_never_smaller_than_a_sequence() -> None:
    asked = config_of(**ADAPTER, batch_size=16, gradient_checkpointing=True)
    assert nearest(EIGHT, asked, gpu(60)) == {"token_budget": 16384}
    tight = nearest(EIGHT, asked, gpu(48, share=0.6))
    assert tight is not None
    assert (tight["token_budget"] >= asked.seq_len, tight["gpu_memory_utilization"] < 0.6) == (True, True)


def test_a_share_that_cannot_hold_the_served_weights_is_raised() -> None:
    asked = config_of(**ADAPTER, gradient_checkpointing=True)
    reason = explain(EIGHT, asked, gpu(80, share=0.1))
    assert reason is not None
    assert "--gpu-memory-utilization 0.1 on a GPU of 80.0 GB lacks 8." in reason
    assert "--gpu-memory-utilization 0.29 fits" in reason


def test_host_memory_is_counted_where_it_is_known() -> None:
    asked = config_of(**SHARED)
    assert nearest(EIGHT, asked, gpu(48)) == {"master_weights": "host", "gradient_checkpointing": True}
    assert nearest(EIGHT, asked, gpu(48, host_bytes=64e9)) != nearest(EIGHT, asked, gpu(48))


def test_another_training_is_named_only_where_no_flag_is_enough_for_this_one() -> None:
    small = gpu(40, share=0.6, host_bytes=32e9)
    assert nearest(EIGHT, config_of(**SHARED), small) is None
    reason = explain(EIGHT, config_of(**SHARED), small)
    assert reason is not None
    assert "no flag makes this training fit, but --weight-bridge-mode lora_restart" in reason
    assert "nothing that this trainer can change fits" in (explain(EIGHT, config_of(**SHARED), gpu(12)) or "")


def test_a_model_of_few_layers_is_not_told_to_train_its_last_twelve() -> None:
    few = replace(EIGHT, layers=8, hidden=16384, intermediate=65536)
    reason = explain(few, config_of(**SHARED), gpu(60, share=0.2, host_bytes=1e9))
    assert reason is not None
    assert "last-12" not in reason


def test_an_optimizer_of_the_users_own_is_not_replaced() -> None:
    own = config_of(**SHARED).model_copy(update={"optimizer": "my_package:Optimizer"})
    assert nearest(EIGHT, own, gpu(80)) == {"master_weights": "host"}


def test_a_setting_that_another_option_forbids_is_not_proposed() -> None:
    asked = config_of(**SHARED, overlap_publish=True)
    assert all("master_weights" not in (nearest(EIGHT, asked, gpu(size)) or {}) for size in (48, 80, 120))


def test_weights_stored_in_float16_keep_the_masters_that_its_scaled_gradients_need() -> None:
    asked, dtype = config_of(**SHARED, dtype="auto"), shape_of("m", TINY | {"torch_dtype": "float16"}).stored_dtype
    assert nearest(EIGHT, asked, gpu(110, share=0.2)) == {"master_weights": "none"}
    assert nearest(replace(EIGHT, stored_dtype=dtype), asked, gpu(110, share=0.2)) == {"master_weights": "host"}
    assert "--master-weights host" in (explain(replace(EIGHT, stored_dtype=dtype), asked, gpu(110)) or "")


@pytest.mark.parametrize("row", DOCUMENTED_ROWS, ids=lambda row: row.model)
def test_a_documented_row_that_does_not_fit_names_one_that_does(row: Row) -> None:
    shape = REFERENCE_SHAPES[row.model]
    assert not fits(shape, row.config, row.gpu)
    changes = nearest(shape, row.config, row.gpu)
    assert changes is not None
    assert f"{as_flags(changes)} fits" in (explain(shape, row.config, row.gpu) or "")
    assert f"`{as_flags(changes)}`" in memory_page()


def test_a_7b_model_in_four_bits_trains_in_less_than_9_gb_with_the_server_elsewhere() -> None:
    shape = REFERENCE_SHAPES["7B"]
    changes = nearest(shape, FOUR_BIT_CLAIM.config, FOUR_BIT_CLAIM.gpu)
    assert changes == {"gradient_checkpointing": True, "token_budget": 2048}
    assert budget(shape, with_changes(FOUR_BIT_CLAIM.config, changes), server_bytes=0.0).total < 9e9


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_a_run_file_fits_the_gpu_that_it_names(path: Path) -> None:
    row = run_file_row(path)
    assert row is not None, "say in a comment which GPU the file is for: 'for one GPU of 80 GB'"
    assert row.gpu_gb <= LARGEST_CARD_GB.get(path.stem, 80.0)
    assert explain(REFERENCE_SHAPES[row.model], row.config, row.gpu) is None
    model = yaml.safe_load(path.read_text())["trainer"]["model_name"]
    assert row.model == MODELS_OF_RUN_FILES[model]
    assert re.search(rf"\| `{path.name}` \|.*\| {row.gpu_gb:g} GB \|.*\| fits \|", memory_page())


def test_the_report_names_the_first_setting_that_fits() -> None:
    lines = list(advise(MemoryOptions(memory="8B")))
    first = next(line for line in lines if "  fits: " in line)
    assert lines[-1].startswith(f"take: {first.partition('fits: ')[2]} --gradient-checkpointing")
    assert any("  does not fit: --weight-bridge-mode shared_vllm --optimizer adamw" in line for line in lines)
    assert "nothing fits" in "\n".join(advise(MemoryOptions(memory="24B", gpu_gb=40.0)))
    assert len(list(advise(MemoryOptions(memory="table")))) > len(DOCUMENTED_ROWS)


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
    for flag in ("--layers", "--memory"):
        with pytest.raises(ModelNotFound, match=f"{flag} /no/such/model: no directory with a config.json"):
            main.run(["doctor", flag, "/no/such/model"])


def test_a_directory_is_read_and_a_name_that_is_nowhere_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    assert find_shape(str(tmp_path)).layers == 2
    with pytest.raises(ModelNotFound, match=r"not one of the sizes 8B, 14B, 24B"):
        find_shape("nobody/nothing-here")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelNotFound, match="does not describe a decoder"):
        find_shape(str(tmp_path))
    assert local_shape(str(tmp_path)) is None


def test_experts_are_not_counted_as_packed_into_4_bits() -> None:
    """Transformers keeps them in one tensor a layer, and bitsandbytes packs linear modules."""
    dense = REFERENCE_SHAPES["8B"]
    sparse = replace(dense, experts=8, active_experts=2)
    config = config_of(weight_bridge_mode="lora_restart", load_in_4bit=True)
    experts = 2 * sparse.layers * 8 * 3 * sparse.hidden * sparse.intermediate
    assert budget(sparse, config, server_bytes=0.0).weights > experts
    assert budget(dense, config, server_bytes=0.0).weights < dense.parameters
