"""The `vllm:` section, `--vllm.*` and `--vllm-settings` reach the server in every mode, however it is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from atropos_api.common.cliconfig import ConfigError
from example_trainer import cli
from example_trainer.config import TrainingConfig
from example_trainer.launcher.endpoints import Endpoints
from example_trainer.launcher.preflight import plan_launch
from example_trainer.launcher.run_file import read_settings
from example_trainer.testing import make_tiny_model
from example_trainer.vllm_manager import VllmOptions

from .test_plan import OWN_ENVIRONMENT, names, plan

ASKED = {"max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 4096}
MODES = ("shared_vllm", "lora_only", "lora_restart", "none")


def run_file(directory: Path) -> str:
    path = directory / "run.yaml"
    path.write_text("trainer: {max_model_len: 512}\nvllm: {max_num_seqs: 8, block_size: 8, max_model_len: 256}\n")
    return str(path)


@pytest.mark.parametrize("mode", MODES)
def test_the_section_and_its_flags_reach_the_server_in_every_mode(tmp_path: Path, mode: str) -> None:
    flags = ("--vllm-settings", "block_size=16", "--vllm.max_num_batched_tokens", "4096")
    made = plan(tmp_path, "--config", run_file(tmp_path), *OWN_ENVIRONMENT, "--weight-bridge-mode", mode, *flags)
    served: Mapping[str, Any]
    if "vllm" in names(made):
        child = made.child("vllm")
        assert child is not None
        typed = zip(child.command[-2::2], child.command[-1::2], strict=True)
        served = made.settings_of("vllm")["vllm"] | {flag.removeprefix("--"): int(text) for flag, text in typed}
    else:
        served = VllmOptions.of(TrainingConfig(**made.settings_of("trainer")["trainer"])).settings
        assert (
            ASKED.items()
            <= {k: int(v) for k, v in made.settings_of("vllm-final")["vllm"].items() if k in ASKED}.items()
        )
    assert {name: int(served[name]) for name in ASKED} == ASKED
    assert served["max_model_len"] == 256, "the section is about the server alone"


@pytest.mark.parametrize("mode", MODES)
def test_a_typed_flag_wins_over_the_section_of_a_file(tmp_path: Path, mode: str) -> None:
    typed = ("--max-model-len", "128", "--weight-bridge-mode", mode)
    made = plan(tmp_path, "--config", run_file(tmp_path), *OWN_ENVIRONMENT, *typed)
    server = made.settings_of("vllm") or {"vllm": made.settings_of("trainer")["trainer"]}
    assert server["vllm"]["max_model_len"] == 128


@pytest.mark.parametrize("mode", ["lora_only", "lora_restart", "none"])
def test_a_trainer_without_launcher_starts_its_server_with_the_section_too(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make_tiny_model(tmp_path / "model"))
    own = ["--config", run_file(tmp_path), "--model-name", model, "--weight-bridge-mode", mode, "--dry-run"]
    assert cli.run(own) == 0
    config = json.loads(capsys.readouterr().out)
    assert config["vllm_settings"] == {"max_num_seqs": 8, "block_size": 8}
    assert config["max_model_len"] == 256


@pytest.mark.parametrize("mode", ["lora_only", "lora_restart", "none"])
def test_a_value_of_another_type_is_reported_before_a_model_is_loaded(mode: str) -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs: Input should be a valid integer"):
        cli.run(
            ["--model-name", "m", "--weight-bridge-mode", mode, "--vllm-settings", "max_num_seqs=many", "--dry-run"]
        )


@pytest.mark.parametrize("mode", MODES)
def test_sections_of_what_is_not_started_are_remarked_on(mode: str) -> None:
    flags = ("--weight-bridge-mode", mode, "--vllm.model", "other/model")
    alone = ("--atropos-url", "http://b:8000", "--api.store", "memory", "--openai.temperature", "1")
    remarks = read_settings(["--model-name", "m", *flags, *alone]).remarks
    assert "api.store: no effect, since with --atropos-url no broker is started" in remarks
    assert "openai.temperature: no effect, since no environment is started here" in remarks
    assert any(remark.startswith("vllm.model other/model has no effect") for remark in remarks)
    assert not [
        remark for remark in read_settings(["--model-name", "m", *OWN_ENVIRONMENT]).remarks if "effect" in remark
    ]


@pytest.mark.parametrize("flags", [("--vllm.max_num_seq", "3"), ("--vllm-settings", "max_num_seq=3")])
@pytest.mark.parametrize("mode", MODES)
def test_a_misspelt_option_of_vllm_is_refused_before_anything_starts(mode: str, flags: tuple[str, str]) -> None:
    settings = read_settings(["--model-name", "m", "--weight-bridge-mode", mode, *OWN_ENVIRONMENT, *flags])
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        plan_launch(settings)


def test_an_ipv6_address_of_a_server_has_brackets_in_its_url() -> None:
    told, url = TrainingConfig(model_name="m", vllm_host="::1", vllm_port=9009), "http://[::1]:9009"
    assert (told.vllm_url, told.server_urls) == (url, (url,))
    started = Endpoints(broker_url="http://127.0.0.1:1", broker_port=1, vllm_ports=(9009,), server_host="::1")
    assert started.vllm_urls == (url,)


def test_lora_only_uses_a_server_on_another_machine_and_starts_none(tmp_path: Path) -> None:
    flags = ("--weight-bridge-mode", "lora_only", "--vllm-host", "gpu7.invalid", "--vllm-port", "9009")
    made = plan(tmp_path, *OWN_ENVIRONMENT, *flags)
    assert names(made) == ["broker", "environment", "trainer"]
    assert made.settings_of("environment")["openai"]["base_url"] == "http://gpu7.invalid:9009/v1"
    told = TrainingConfig(**made.settings_of("trainer")["trainer"])
    assert told.server_urls == ("http://gpu7.invalid:9009",)
    assert not told.may_start_server
    remarks = read_settings(["--model-name", "m", *OWN_ENVIRONMENT, *flags, "--vllm.max_num_seqs", "3"]).remarks
    assert any("vllm.max_num_seqs: no effect" in remark for remark in remarks)


@pytest.mark.parametrize("mode", ["shared_vllm", "lora_restart", "none"])
def test_other_modes_refuse_a_server_on_another_machine_and_name_what_works(mode: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--vllm-host gpu7\.invalid: .*lora_only"):
        plan(tmp_path, *OWN_ENVIRONMENT, "--weight-bridge-mode", mode, "--vllm-host", "gpu7.invalid")
    with pytest.raises(ConfigError, match=r"--vllm-host 192\.0\.2\.1: .*lora_only"):
        cli.run(["--model-name", "m", "--weight-bridge-mode", mode, "--vllm-host", "192.0.2.1", "--dry-run"])


@pytest.mark.parametrize("mode", MODES)
def test_servers_listen_at_the_address_of_this_machine_that_is_asked_for(mode: str, tmp_path: Path) -> None:
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--weight-bridge-mode", mode, "--vllm-host", "0.0.0.0")
    server = made.settings_of("vllm")
    host = server["vllm"]["host"] if server else made.settings_of("trainer")["trainer"]["vllm_host"]
    assert host == "0.0.0.0"
    assert made.settings_of("environment")["openai"]["base_url"].startswith("http://127.0.0.1:")
