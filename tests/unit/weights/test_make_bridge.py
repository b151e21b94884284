"""One configuration, one bridge: what each mode is made of, and what does not exist yet."""

from __future__ import annotations

import pytest

from example_trainer.config import TrainingConfig
from example_trainer.weights.bridge import make_bridge
from example_trainer.weights.errors import ModeNotAvailable
from example_trainer.weights.restart import RestartBridge
from example_trainer.weights.shared import SharedVllmBridge


def config(tmp_path, **changes):
    return TrainingConfig(**{"model_name": "some/model", "run_dir": tmp_path, **changes})


def test_shared_mode_takes_its_settings_from_the_configuration(tmp_path):
    bridge = make_bridge(
        config(
            tmp_path,
            weight_bridge_mode="shared_vllm",
            vllm_port=9123,
            drain_seconds=0.25,
            in_flight="recompute",
            sync_budget=0.1,
            max_staleness=3,
            wait_timeout=7,
            overlap_publish=True,
            train_layer_indices="1-2",
        )
    )
    assert isinstance(bridge, SharedVllmBridge)
    options = bridge._options
    assert options.server_url == "http://127.0.0.1:9123"
    assert (options.drain_seconds, options.in_flight) == (0.25, "recompute")
    assert (options.sync_budget, options.max_staleness, options.wait_timeout_seconds) == (0.1, 3, 7)
    assert options.forwards_from_masters
    assert options.policy.train_layer_indices == "1-2"


def test_mode_none_starts_its_own_server_in_the_run_directory(tmp_path):
    bridge = make_bridge(
        config(tmp_path, vllm_port=9124, vllm_restart_interval=5, vllm_quantization="fp8", vllm_tensor_parallel_size=2)
    )
    assert isinstance(bridge, RestartBridge)
    options = bridge._options
    assert (options.weights_dir, options.vllm.log_path) == (tmp_path / "served", tmp_path / "logs" / "vllm.log")
    assert options.vllm.served_model_name == options.vllm.tokenizer == "some/model"
    assert list(options.vllm.extra_arguments) == ["--tensor-parallel-size", "2", "--quantization", "fp8"]
    assert [bridge.should_publish(steps) for steps in (1, 4, 5)] == [False, False, True]


@pytest.mark.parametrize("mode", ["lora_only", "lora_restart"])
def test_adapter_modes_are_refused_with_one_line(tmp_path, mode):
    with pytest.raises(
        ModeNotAvailable, match=rf"--weight-bridge-mode {mode} is not available.*use shared_vllm"
    ) as caught:
        make_bridge(config(tmp_path, weight_bridge_mode=mode))
    assert "\n" not in str(caught.value)
