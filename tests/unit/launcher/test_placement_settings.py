"""`--placement ray`: its addresses, the settings that do not fit it, and the roles and files that follow from it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from atropos_api.common.cliconfig import ConfigError
from example_trainer.launcher.endpoints import (
    EVERY_ADDRESS,
    broker_token,
    fit_to_gpu,
    save_own_token,
    settle_endpoints,
)
from example_trainer.launcher.placement.choice import open_placement, passed_variables, roles_of
from example_trainer.launcher.placement.settings import PlacementSettings
from example_trainer.launcher.plan import make_plan
from example_trainer.launcher.preflight import plan_launch
from example_trainer.launcher.run_dir import RunDir
from example_trainer.launcher.run_file import RunSettings, read_settings
from example_trainer.memory.preflight import Choice, serves_on

FITS = ("--registered-servers", "--weight-bridge-mode", "lora_only", "--device", "cpu")
RAY = ("--placement", "ray", "--placement-address", "127.0.0.1:6379")
ENVIRONMENT = ("--env", "arithmetic_server.py")


def settings_of(*flags: str) -> RunSettings:
    return read_settings(["--model-name", "m", *FITS, *ENVIRONMENT, *flags])


@pytest.mark.parametrize(
    ("address", "told"),
    [
        (None, "--placement ray needs --placement-address HOST:PORT"),
        ("auto", "it joins whichever cluster it finds"),
        ("local", "starts a cluster of its own"),
        ("ray://10.0.0.5:10001", "Ray Client ends every program when its connection breaks"),
        ("10.0.0.5", "not an address"),
        ("10.0.0.5:99999", "not an address"),
    ],
)
def test_an_address_that_may_name_another_cluster_is_refused_with_the_reason(address, told) -> None:
    with pytest.raises(ConfigError, match=told):
        settings_of("--placement", "ray", *(() if address is None else ("--placement-address", address)))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--no-registered-servers",), "needs --registered-servers"),
        (("--teacher.model_name", "t", "--distill", "forward_kl"), "start the teacher's server by itself"),
        (("--vllm-gpu", "1"), "numbers the GPUs of one machine"),
        (("--vllm-port", "9001"), "name a port of one machine"),
        (("--vllm.port", "9001"), "name a port of one machine"),
        (("--api.host", "127.0.0.1"), "which other nodes do not reach"),
        (("--vllm.host", "localhost"), "which other nodes do not reach"),
        (("--atropos-url", "http://localhost:8000"), "programs on other nodes find no broker"),
    ],
)
def test_settings_of_one_machine_are_refused_as_soon_as_by_the_dry_run(flags, told) -> None:
    with pytest.raises(ConfigError, match=told):
        plan_launch(settings_of(*RAY, *flags))


@pytest.mark.parametrize(
    ("resources", "told"),
    [
        ("vllm: {gpus: 1.5}", "placement: .*gpus: .*whole number of GPUs"),
        ("trainer: {cpus: 0.00001}", "placement: .*cpus: .*more than 4 digits"),
        ("vllm: {cpus: .inf}", "placement: .*cpus: .*finite number"),
        ("environment: {cpus: 0}", "placement: environment has no CPU and no GPU"),
    ],
)
def test_resources_that_ray_does_not_count_are_refused_as_soon_as_by_the_dry_run(tmp_path, resources, told) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"trainer: {{}}\nplacement: {{{resources}}}\n")
    with pytest.raises(ConfigError, match=told):
        plan_launch(settings_of(*RAY, "--config", str(path)))


def test_without_ray_installed_it_is_one_line_with_the_command_that_installs_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "example_trainer.launcher.placement.ray_placement", raising=False)
    run = RunDir(root=tmp_path, log_root=tmp_path, attempt=1)
    with pytest.raises(ConfigError, match=r"pip install 'atropos-grpo\[ray\]'"):
        open_placement(settings_of(*RAY), run)


def test_the_section_decides_and_a_flag_overrides_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "trainer: {model_name: m, registered_servers: true, weight_bridge_mode: none, restart_method: reload}\n"
        "env: {server: arithmetic_server.py}\n"
        "placement: {kind: ray, address: '10.0.0.5:6379', timeout: 30, n_nodes: 2, n_gpus_per_node: 2,"
        " rollout_tp_size: 2, vllm: {cpus: 4, gpus: 0.5}}\n"
    )
    settings = read_settings(["--config", str(path), "--placement-timeout", "9"])
    assert (settings.placement.kind, settings.placement.head) == ("ray", ("10.0.0.5", 6379))
    assert settings.placement.timeout == 9.0
    roles = {role.name: role for role in roles_of(settings, has_gpus=True)}
    assert set(roles) == {"trainer", "vllm", "vllm-2", "environment"}
    assert (roles["trainer"].seats, roles["trainer"].gpus) == (4, 1.0)
    assert (roles["vllm-2"].cpus, roles["vllm-2"].gpus) == (4.0, 0.5)
    assert roles["environment"].gpus == 0.0
    assert {role.gpus for role in roles_of(settings, has_gpus=False)} == {0.0, 0.5}
    assert roles_of(read_settings(["--config", str(path), "--placement", "local"])) == []
    path.write_text("trainer: {model_name: m}\nplacement: {vllm: {gpu: 1}}\n")
    with pytest.raises(ConfigError, match="placement: vllm: unknown key 'gpu'"):
        read_settings(["--config", str(path)])


def test_only_listed_variables_are_passed() -> None:
    environ = {"HF_HOME": "/models", "HF_TOKEN": "secret", "WANDB_API_KEY": "k"}
    assert passed_variables(PlacementSettings(), environ) == {"HF_HOME": "/models"}
    listed = PlacementSettings(variables=("WANDB_API_KEY",))
    assert passed_variables(listed, environ) == {"HF_HOME": "/models", "WANDB_API_KEY": "k"}
    with pytest.raises(ConfigError, match="variables: WANDB_API_KEY is not set"):
        passed_variables(listed, {})


def test_the_programs_are_those_of_a_local_run_but_for_addresses(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("example_trainer.launcher.endpoints.secrets.token_hex", lambda _: "0" * 32)
    run = RunDir(root=tmp_path, log_root=tmp_path, attempt=1)
    plans = []
    for flags in ((), RAY):
        settings = settings_of("--num-inference-nodes", "2", *flags)
        plans.append(make_plan(settings, run, settle_endpoints(settings), model="m"))
    here, there = plans
    assert [spec.command for spec in here.children] == [spec.command for spec in there.children]
    addresses = {
        "host",
        "port",
        "broker_url",
        "atropos_url",
        "rollout_server_url",
        "kv_cache_memory_bytes",
    }
    shares = {"gpu_memory_utilization"}  # two servers on one machine divide its memory
    for path, content in here.files.items():
        for section, held in content.items():
            other = there.files[path][section]
            assert {key for key in held | other if held.get(key) != other.get(key)} <= addresses | shares, path
    served = there.settings_of("vllm-2")["vllm"]
    assert (served["host"], served["port"]) == (EVERY_ADDRESS, 0)
    assert not any("OMP_NUM_THREADS" in spec.environment for spec in there.children), "each node has its own cores"


@pytest.mark.parametrize(
    ("placed", "has_its_own"), [(None, False), ("{vllm: {gpus: 2}}", True), ("{vllm: {gpus: 0.5}}", False)]
)
def test_a_server_that_is_placed_on_gpus_of_its_own_takes_nothing_of_the_trainers(
    tmp_path: Path, monkeypatch, placed: str | None, has_its_own: bool
) -> None:
    """A run that fitted its nodes was refused, as if the server were on the trainer's GPU."""
    checked = []
    monkeypatch.setattr(
        "example_trainer.launcher.endpoints.preflight", lambda config, **_: checked.append(config) or Choice()
    )
    monkeypatch.setattr("example_trainer.launcher.programs.cache_on_shared_gpu", lambda *_, **__: 2**30)
    path = tmp_path / "run.yaml"
    path.write_text(f"trainer: {{}}\nplacement: {placed or '{}'}\n")
    flags = ["--model-name", "m", "--registered-servers", "--weight-bridge-mode", "lora_only", "--config", str(path)]
    settings, _ = fit_to_gpu(read_settings([*flags, *(RAY if placed else ())]))
    assert serves_on(0, checked[0], {}) is not has_its_own
    assert settings.trainer.start_vllm == "auto", "the server is started all the same"
    run = RunDir(root=tmp_path, log_root=tmp_path, attempt=1)
    served = make_plan(settings, run, settle_endpoints(settings), model="m").settings_of("vllm")["vllm"]
    assert ("kv_cache_memory_bytes" in served) is not has_its_own


def test_a_broker_that_other_machines_reach_has_a_token() -> None:
    settings = settings_of(*RAY)
    assert broker_token(settings).value == settings.placement.own_token != ""
    assert broker_token(settings_of(*RAY, "--atropos-token", "given-by-the-user")).value == "given-by-the-user"
    assert not broker_token(settings_of()).value
    assert settings.placement.own_token not in yaml.safe_dump(settings.placement.model_dump(mode="json"))


def test_the_token_that_the_launcher_made_is_in_a_file_for_this_user_alone(tmp_path: Path) -> None:
    settings, path = settings_of(*RAY), tmp_path / "broker-token"
    assert save_own_token(settings, path) == path
    assert (path.read_text(), path.stat().st_mode & 0o777) == (settings.placement.own_token + "\n", 0o600)
    path.unlink()
    for given in (settings_of(), settings_of(*RAY, "--atropos-token", "given-by-the-user")):
        assert save_own_token(given, path) is None
    assert not path.exists()
