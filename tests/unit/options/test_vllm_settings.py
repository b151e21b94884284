"""Further options of the vLLM server: which of them a run may set, in which form, and who refuses which."""

from __future__ import annotations

import pytest

from atropos_api.common.cliconfig import ConfigError, load_config
from example_trainer.config import TrainingConfig
from example_trainer.options import vllm_settings
from example_trainer.options.server import with_vllm_section
from example_trainer.options.vllm_settings import (
    DECIDED,
    SERVERS_OWN,
    TRAINER_FIELDS,
    as_arguments,
    refuse_unknown,
    vllm_options,
)
from example_trainer.serving.config import ServerConfig


def parsed(*argv: str) -> TrainingConfig:
    return load_config(TrainingConfig, ["--model-name", "m", *argv], prog="p", description="d")


@pytest.mark.parametrize(
    "argv",
    [
        ["max_num_seqs=64", "enable-prefix-caching=false", 'compilation_config={"level": 3}'],
        ['{"max_num_seqs": 64, "enable_prefix_caching": false, "compilation_config": {"level": 3}}'],
    ],
)
def test_settings_are_words_or_json_and_become_options_of_the_server(argv: list[str]) -> None:
    settings = parsed("--vllm-settings", *argv).vllm_settings
    assert settings == {"max_num_seqs": 64, "enable_prefix_caching": False, "compilation_config": {"level": 3}}
    assert as_arguments({**settings, "allowed_origins": ["a"], "cudagraph_capture_sizes": [1, 2]}) == [
        *("--max-num-seqs", "64", "--no-enable-prefix-caching", "--compilation-config", '{"level": 3}'),
        *("--allowed-origins", '["a"]', "--cudagraph-capture-sizes", "1", "2"),
    ]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("max_model_len=3", "use --max-model-len"),
        ("tensor-parallel-size=2", "use --vllm-tensor-parallel-size"),
        ("dtype=half", "follows from --dtype"),
        ("enable_lora=true", "follows from --weight-bridge-mode"),
        ("api_key=hidden", "VLLM_API_KEY"),
        ("max_num_seqs", "write NAME=VALUE, or one JSON object"),
    ],
)
def test_an_option_with_a_flag_of_its_own_is_refused_with_that_flag(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match="--vllm-settings") as refused:
        parsed("--vllm-settings", setting)
    assert said in str(refused.value)
    assert "hidden" not in str(refused.value)


def test_options_of_engine_and_server_and_those_added_by_hand_are_found_without_importing_vllm() -> None:
    found = vllm_options()
    if found is None:
        pytest.skip("vLLM is not installed")
    assert {"max_num_seqs", "enable_log_requests", "enable_auto_tool_choice", "api_key", "headless"} <= found
    assert not {"help", "max_num_seq", "model_tag"} & found


def test_a_name_that_vllm_does_not_know_is_refused_with_the_nearest_that_it_knows() -> None:
    if vllm_options() is None:
        pytest.skip("vLLM is not installed")
    refuse_unknown(["max_num_seqs", "compilation-config.level", "no_enable_prefix_caching", "model"], where="vllm")
    with pytest.raises(ConfigError, match=r"vllm max_num_seq: the installed vLLM .* did you mean max_num_seqs\?"):
        refuse_unknown(["max_num_seq"], where="vllm")


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl-certfile", "uds", "headless", "config"])
def test_options_with_which_the_trainer_would_not_find_its_server_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"vllm: {name.replace('-', '_')}: .*by HTTP at its own port"):
        refuse_unknown([name], where="vllm:")


def test_without_vllm_on_this_machine_no_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_settings, "vllm_options", lambda: None)
    refuse_unknown(["max_num_seq"], where="vllm")


def test_every_option_of_our_server_is_the_trainers_follows_from_it_or_is_vllms() -> None:
    options = vllm_options()
    if options is None:
        pytest.skip("vLLM is not installed")
    assert set(ServerConfig.model_fields) - {*TRAINER_FIELDS, *DECIDED, *SERVERS_OWN, *options} == set()


def test_a_section_sets_the_trainers_options_of_the_same_meaning_and_passes_on_the_rest() -> None:
    config = parsed("--weight-bridge-mode", "none", "--vllm-settings", "max_num_seqs=8")
    section = {"max_model_len": 77, "max_num_seqs": 4, "block_size": 16, "served_model_name": "other"}
    config, remarks = with_vllm_section(config, section)
    assert config.max_model_len == 77
    assert config.vllm_settings == {"max_num_seqs": 8, "block_size": 16}, "the flag wins"
    assert [remark.partition(":")[0] for remark in remarks] == [
        "vllm.served_model_name other has no effect in mode none"
    ]
