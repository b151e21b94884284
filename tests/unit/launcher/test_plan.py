"""The plan of a launch follows from its settings: programs, ports, addresses, settings files."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError
from example_trainer.launcher.endpoints import Endpoints, settle_endpoints
from example_trainer.launcher.environment_settings import EnvironmentNotFound, program_of
from example_trainer.launcher.launch import Launch
from example_trainer.launcher.plan import Plan, make_plan
from example_trainer.launcher.preflight import plan_launch
from example_trainer.launcher.run_dir import plan_run_dir
from example_trainer.launcher.run_file import read_settings
from example_trainer.processes.ports import PortTaken
from example_trainer.serving.config import ServerConfig
from example_trainer.testing import make_tiny_model

OWN_ENVIRONMENT = ("--env.server", __file__)


def plan(tmp_path: Path, *argv: str) -> Plan:
    settings = read_settings(["--model-name", "some/model", "--run-dir", str(tmp_path / "run"), *argv])
    run = plan_run_dir(settings.trainer.run_dir, name="x", log_dir=None, resume=False)
    return make_plan(settings, run, settle_endpoints(settings), model="some/model")


def names(made: Plan) -> list[str]:
    return [spec.name for spec in made.children]


def test_a_whole_run_has_four_programs(tmp_path: Path) -> None:
    assert names(plan(tmp_path, *OWN_ENVIRONMENT)) == ["broker", "vllm", "environment", "trainer"]


@pytest.mark.parametrize("flags", [(), ("--weight-bridge-mode", "lora_restart"), ("--num-inference-nodes", "2")])
def test_every_program_may_be_started_again(tmp_path: Path, flags: tuple[str, ...]) -> None:
    made = plan(tmp_path, *OWN_ENVIRONMENT, *flags)
    assert [spec.name for spec in made.children if not spec.may_restart] == []


def test_a_trainer_without_checkpoints_and_a_broker_in_memory_cannot_go_on_and_the_plan_says_why(
    tmp_path: Path,
) -> None:
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--checkpoint-interval", "0", "--api.store", "memory")
    final = {spec.name: spec.why_final for spec in made.children if not spec.may_restart}
    assert final.keys() == {"broker", "trainer"}
    assert "memory" in final["broker"]
    assert "--checkpoint-interval 0" in final["trainer"]


def test_with_a_broker_elsewhere_only_vllm_and_trainer_start(tmp_path: Path) -> None:
    made = plan(tmp_path, "--atropos-url", "http://broker:8000", "--vllm-port", str(_free_port()))
    assert names(made) == ["vllm", "trainer"]
    assert made.settings_of("trainer")["trainer"]["atropos_url"] == "http://broker:8000"


def test_only_programs_that_need_nothing_of_the_hub_are_kept_off_it(tmp_path: Path) -> None:
    """An environment may take questions from the hub by default, and those of an evaluation beside a local file."""

    def offline(program: str, *argv: str) -> bool:
        child = made_with(tmp_path, *argv).child(program)
        assert child is not None
        return child.environment.get("HF_HUB_OFFLINE") == "1"

    assert offline("trainer")
    assert not offline("environment")
    assert not offline("environment", "--env.data_path", "questions.jsonl")
    assert not offline("trainer", "--kl-coef", "1e-3", "--ref-model", "some/reference")


def made_with(directory: Path, *argv: str) -> Plan:
    """Return the plan of a run of a model that is a directory."""
    settings = read_settings(
        ["--model-name", str(directory), "--run-dir", str(directory / "run"), *OWN_ENVIRONMENT, *argv]
    )
    run = plan_run_dir(settings.trainer.run_dir, name="x", log_dir=None, resume=False)
    return make_plan(settings, run, settle_endpoints(settings), model=str(directory))


@pytest.mark.parametrize(
    ("stored", "served"), [("float32", "float32"), ("float16", "float16"), ("float8_e4m3fn", "auto")]
)
def test_a_server_takes_the_dtype_that_the_trainer_takes_for_auto(tmp_path: Path, stored: str, served: str) -> None:
    """vLLM's own `auto` serves a float32 checkpoint in bfloat16, and the trainer would refuse that server."""
    model = make_tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": stored}))
    for asked, expected in (("auto", served), ("bfloat16", "bfloat16")):
        made = made_with(model, "--weight-bridge-mode", "lora_only", "--dtype", asked)
        assert made.settings_of("vllm")["vllm"]["dtype"] == expected


def test_the_trainers_option_reaches_the_head_of_every_server_that_the_launcher_starts(tmp_path: Path) -> None:
    adapter = ("--weight-bridge-mode", "lora_only")
    assert "head_dtype" not in plan(tmp_path, *OWN_ENVIRONMENT, *adapter).settings_of("vllm")["vllm"]
    made = plan(tmp_path, *OWN_ENVIRONMENT, *adapter, "--vllm-head-dtype", "auto")
    assert made.settings_of("vllm")["vllm"]["head_dtype"] == "auto"


def test_the_server_of_the_final_evaluation_is_divided_as_the_trainers_own(tmp_path: Path) -> None:
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--weight-bridge-mode", "none", "--vllm-tensor-parallel-size", "2")
    assert made.settings_of("vllm-final")["vllm"]["tensor_parallel_size"] == 2


def test_a_launched_trainer_leaves_the_question_of_memory_to_the_launcher(tmp_path: Path) -> None:
    """It does not get the server's context length, so its own result could differ."""
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--weight-bridge-mode", "shared_vllm", "--max-model-len", "512")
    trainer, server = made.settings_of("trainer")["trainer"], made.settings_of("vllm")["vllm"]
    assert (trainer["fit"], "max_model_len" in trainer, server["max_model_len"]) == ("off", False, 512)


@pytest.mark.parametrize("mode", ["none", "lora_restart"])
def test_a_trainer_that_restarts_its_server_starts_it_as_well(tmp_path: Path, mode: str) -> None:
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--weight-bridge-mode", mode)
    assert names(made) == ["broker", "environment", "trainer"]
    trainer = made.child("trainer")
    assert trainer is not None
    assert not trainer.watch_descendants


def test_the_final_evaluation_is_served_the_last_checkpoint_where_the_trainers_server_ends_with_it(
    tmp_path: Path,
) -> None:
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--weight-bridge-mode", "none")
    settings = made.settings_of("vllm-final")["vllm"]
    assert settings["model"] == str(tmp_path / "run/latest")
    assert settings["served_model_name"] == ["some/model"]
    assert f":{settings['port']}/v1" in made.settings_of("environment")["openai"]["base_url"]
    assert plan(tmp_path, *OWN_ENVIRONMENT).final_server is None


@pytest.mark.parametrize("mode", ["none", "lora_restart"])
def test_the_server_of_the_final_evaluation_shares_no_weights_whatever_variables_it_inherits(
    tmp_path: Path, mode: str
) -> None:
    """With VLLM_ENABLE_SHARED_WEIGHTS=1 it refused to start, and a run that had been trained to its end failed."""
    settings = plan(tmp_path, *OWN_ENVIRONMENT, "--weight-bridge-mode", mode).settings_of("vllm-final")["vllm"]
    inherited = {"VLLM_ENABLE_SHARED_WEIGHTS": "1", "NUM_INFERENCE_NODES": "0"}
    assert not ServerConfig.model_validate(settings).shares(inherited)


def test_an_adapter_run_ends_on_the_models_own_weights_with_the_last_adapter(tmp_path: Path) -> None:
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--weight-bridge-mode", "lora_restart")
    settings = made.settings_of("vllm-final")["vllm"]
    assert (settings["model"], settings["adapter"]) == ("some/model", str(tmp_path / "run/latest"))
    assert settings["enable_lora"] is True


def test_lora_only_has_a_server_that_waits_for_the_trainers_adapter_and_a_trainer_that_starts_none(
    tmp_path: Path,
) -> None:
    flags = ("--weight-bridge-mode", "lora_only", "--lora-r", "20", "--max-staleness", "3")
    made = plan(tmp_path, *OWN_ENVIRONMENT, *flags)
    assert names(made) == ["broker", "vllm", "environment", "trainer"]
    server = made.settings_of("vllm")["vllm"]
    assert (server["await_policy"], server["max_lora_rank"], server["max_loras"]) == (True, 32, 5)
    assert made.settings_of("trainer")["trainer"]["start_vllm"] == "never"
    assert made.final_server is None


def test_a_base_in_four_bits_is_served_as_the_values_that_the_trainer_writes(tmp_path: Path) -> None:
    base = str(tmp_path / "run/served/base")
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--weight-bridge-mode", "lora_only", "--load-in-4bit")
    server = made.settings_of("vllm")["vllm"]
    assert (server["model"], server["await_model"], server["await_policy"]) == (base, True, True)
    assert (server["tokenizer"], server["served_model_name"]) == ("some/model", ["some/model"])
    assert made.settings_of("trainer")["trainer"]["model_name"] == "some/model"
    assert made.settings_of("environment")["openai"]["model_name"] == "some/model"
    by_restart = plan(tmp_path, *OWN_ENVIRONMENT, "--weight-bridge-mode", "lora_restart", "--load-in-4bit")
    final = by_restart.settings_of("vllm-final")["vllm"]
    assert (final["model"], final["adapter"]) == (base, str(tmp_path / "run/latest"))
    assert (final["tokenizer"], final["served_model_name"]) == ("some/model", ["some/model"])


def test_all_programs_agree_on_addresses_and_model(tmp_path: Path) -> None:
    made = plan(tmp_path, *OWN_ENVIRONMENT)
    broker, vllm = made.settings_of("broker")["api"], made.settings_of("vllm")["vllm"]
    environment, trainer = made.settings_of("environment"), made.settings_of("trainer")["trainer"]
    assert trainer["atropos_url"] == environment["env"]["rollout_server_url"] == f"http://127.0.0.1:{broker['port']}"
    assert trainer["vllm_port"] == vllm["port"]
    assert environment["openai"]["base_url"] == f"http://127.0.0.1:{vllm['port']}/v1"
    assert trainer["model_name"] == vllm["model"] == environment["openai"]["model_name"] == "some/model"
    assert trainer["vllm_config_path"] == str(tmp_path / "run/bridge/vllm_bridge_config.json")
    child = made.child("vllm")
    assert child is not None
    assert child.environment["LOGDIR"] == str(tmp_path / "run/bridge")


def test_launches_that_inherit_one_logdir_have_manifests_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer attached to whichever server had written its manifest last, and wrote the other run's weights."""
    monkeypatch.setenv("LOGDIR", str(tmp_path / "logs"))
    made = [plan(tmp_path / name, *OWN_ENVIRONMENT) for name in ("one", "two")]
    read = [each.settings_of("trainer")["trainer"]["vllm_config_path"] for each in made]
    written = [spec.environment["LOGDIR"] for each in made if (spec := each.child("vllm")) is not None]
    assert read == [str(Path(folder) / "vllm_bridge_config.json") for folder in written]
    assert len(set(read)) == 2


@pytest.mark.parametrize(
    ("host", "reached"),
    [("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "127.0.0.1"), ("localhost", "127.0.0.1")],
)
def test_programs_reach_the_broker_where_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, reached: str
) -> None:
    monkeypatch.setenv("ATROPOS_TOKEN", "abcdefgh")
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--api.host", host)
    url = f"http://{reached}:{made.settings_of('broker')['api']['port']}"
    assert made.endpoints.broker_url == url
    assert made.settings_of("trainer")["trainer"]["atropos_url"] == url


@pytest.mark.parametrize(
    ("host", "told"),
    [("0.0.0.0", "callers need a token; set ATROPOS_TOKEN"), ("203.0.113.7", "name an address of this machine")],
)
def test_an_address_at_which_no_program_would_get_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, told: str
) -> None:
    if told.startswith("name"):
        monkeypatch.setenv("ATROPOS_TOKEN", "abcdefgh")
    with pytest.raises(ConfigError, match=rf"--api.host {host}: .*{told}"):
        plan(tmp_path, *OWN_ENVIRONMENT, "--api.host", host)


def test_the_ports_of_a_launch_are_its_own_for_as_long_as_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []

    def go(_: Launch, endpoints: Endpoints) -> None:
        chosen.extend([endpoints.broker_port or 0, *endpoints.vllm_ports])
        assert [_is_held(port) for port in chosen] == [True] * 3

    monkeypatch.setattr(Launch, "_go", go)
    argv = ["--model-name", "some/model", "--run-dir", str(tmp_path), *OWN_ENVIRONMENT, "--num-inference-nodes", "2"]
    plan_launch(read_settings(argv)).go()
    assert [_is_held(port) for port in chosen] == [False] * 3


def test_the_broker_stores_under_the_run_directory(tmp_path: Path) -> None:
    """R10: groups that an earlier run left queued elsewhere are never trained."""
    assert plan(tmp_path, *OWN_ENVIRONMENT).settings_of("broker")["api"]["store"] == str(tmp_path / "run/broker")


def test_the_newest_groups_are_kept_to_be_read_unless_a_file_of_ones_own_is_named(tmp_path: Path) -> None:
    env = plan(tmp_path, *OWN_ENVIRONMENT).settings_of("environment")["env"]
    assert env["data_path_to_save_groups"] == str(tmp_path / "run/rollouts/environment.jsonl")
    assert env["groups_to_keep"] == 200
    for own in ("groups.jsonl", "None"):
        asked = plan(tmp_path, *OWN_ENVIRONMENT, "--env.data_path_to_save_groups", own)
        assert not {"data_path_to_save_groups", "groups_to_keep"} & asked.settings_of("environment")["env"].keys()


def test_environments_log_to_trackio_beside_the_trainer_s_run(tmp_path: Path) -> None:
    kept = plan(tmp_path, *OWN_ENVIRONMENT, "--use-trackio").settings_of("environment")["env"]
    assert (kept["use_trackio"], kept["trackio_name"]) == (True, "run-environment")
    without = plan(tmp_path, *OWN_ENVIRONMENT).settings_of("environment")["env"]
    assert not without["use_trackio"]


def test_the_trainer_gets_what_was_set_and_nothing_else(tmp_path: Path) -> None:
    given = plan(tmp_path, *OWN_ENVIRONMENT, "--lr", "1e-4", "--dry-run").settings_of("trainer")["trainer"]
    assert given["lr"] == 1e-4
    assert "clip_eps" not in given
    assert "dry_run" not in given


def test_flags_of_a_section_reach_their_program_as_typed(tmp_path: Path) -> None:
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--env.group_size", "4", "--vllm.enforce-eager", "--api.max-staleness", "2")
    environment, vllm, broker = made.child("environment"), made.child("vllm"), made.child("broker")
    assert environment is not None
    assert vllm is not None
    assert broker is not None
    assert environment.command[-2:] == ("--env.group_size", "4")
    assert vllm.command[-1] == "--enforce-eager"
    assert broker.command[-2:] == ("--max-staleness", "2")


def test_the_run_file_of_an_environment_wins_over_what_the_launcher_fills_in(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"env: {{server: {__file__}, total_steps: 99}}\nopenai: {{server_type: sglang}}\n")
    given = plan(tmp_path, "--config", str(path)).settings_of("environment")
    assert given["env"]["total_steps"] == 99
    assert given["openai"]["server_type"] == "sglang"
    assert "server" not in given["env"]


def test_another_environment_than_the_files_is_told_for_which_one_the_settings_are(tmp_path: Path) -> None:
    mine, file = tmp_path / "my_env.py", tmp_path / "run.yaml"
    mine.touch()
    file.write_text("env: {server: arithmetic_server.py, task: chain}\n")
    for flags, told in (
        (("--env", str(mine)), "arithmetic_server.py"),
        (("--env", "environments.arithmetic_server"), None),
        ((), None),
    ):
        made = plan(tmp_path, "--config", str(file), *flags)
        assert made.settings_of("environment")["env"].get("server") == told


def test_a_seed_on_the_command_line_reaches_the_stream_of_problems(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"trainer: {{seed: 1}}\nenv: {{server: {__file__}, seed: 7}}\n")
    as_written = plan(tmp_path, "--config", str(path))
    reseeded = plan(tmp_path, "--config", str(path), "--seed", "3")
    assert as_written.settings_of("environment")["env"]["seed"] == 7
    assert reseeded.settings_of("environment")["env"]["seed"] == reseeded.settings_of("trainer")["trainer"]["seed"] == 3
    assert "seed" not in plan(tmp_path, *OWN_ENVIRONMENT, "--seed", "3").settings_of("environment")["env"]


def test_a_port_that_is_taken_is_reported_with_its_holder_and_the_flag(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"port {port} is taken by pid \d+ .*--api\.port"):
            plan(tmp_path, *OWN_ENVIRONMENT, "--api.port", str(port))
        with pytest.raises(PortTaken, match="--vllm-port"):
            plan(tmp_path, *OWN_ENVIRONMENT, "--vllm-port", str(port))


def test_environment_servers_are_files_or_modules() -> None:
    assert program_of(__file__) == (__file__,)
    assert program_of("environments.gsm8k_server") == ("-m", "environments.gsm8k_server")
    with pytest.raises(EnvironmentNotFound, match=r"nowhere\.py"):
        program_of("nowhere.py")


def test_an_environment_may_be_a_module_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_env.py").touch()
    assert program_of("my_own_env") == ("-m", "my_own_env")


@pytest.mark.parametrize("misspelt", ["gsm8k", "gsm8k_server", "environments/gsm8k_server", "gsm8k_servr.py"])
def test_a_misspelt_environment_is_refused_with_the_one_that_may_be_meant(misspelt: str) -> None:
    with pytest.raises(EnvironmentNotFound, match=r"did you mean gsm8k_server\.py\?"):
        program_of(misspelt)


def _is_held(port: int) -> bool:
    """Return True if the port is bound, listening or not."""
    with socket.socket() as anybody:
        try:
            anybody.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_several_environments_keep_their_evaluations_apart(tmp_path: Path) -> None:
    both = tmp_path / "two.yaml"
    both.write_text(f"environments: [{{file: {__file__}}}, {{file: {__file__}}}]\n")
    made = plan(tmp_path, "--config", str(both))
    found = [made.settings_of(name)["env"]["data_dir_to_save_evals"] for name in made.environments]
    assert found == [str(tmp_path / "run" / "evals" / name) for name in ("environment-1", "environment-2")]
    alone = plan(tmp_path, *OWN_ENVIRONMENT).settings_of("environment")["env"]
    assert alone["data_dir_to_save_evals"] == str(tmp_path / "run" / "evals")


def test_every_program_is_observed_as_the_launcher_is_told(tmp_path: Path) -> None:
    """The trainer's metrics have the port that is named, those of each environment one of the ports after it."""
    both = tmp_path / "two.yaml"
    both.write_text(f"environments: [{{file: {__file__}}}, {{file: {__file__}, env: {{metrics_port: 7}}}}]\n")
    flags = ("--log-format", "json", "--otlp-traces-endpoint", "http://c:4317", "--metrics-port", "9100")
    made = plan(tmp_path, "--config", str(both), *flags)
    sections = {
        "broker": made.settings_of("broker")["api"],
        "vllm": made.settings_of("vllm")["vllm"],
        "trainer": made.settings_of("trainer")["trainer"],
        "environment-1": made.settings_of("environment-1")["env"],
    }
    for program, settings in sections.items():
        assert (settings["log_format"], settings["otlp_traces_endpoint"]) == ("json", "http://c:4317"), program
    assert [sections[name]["metrics_port"] for name in ("trainer", "environment-1")] == [9100, 9101]
    assert made.settings_of("environment-2")["env"]["metrics_port"] == 7
    assert "metrics_port" not in {*sections["broker"], *sections["vllm"]}
    quiet = plan(tmp_path, *OWN_ENVIRONMENT)
    for name, section in (("broker", "api"), ("vllm", "vllm"), ("environment", "env"), ("trainer", "trainer")):
        assert not {"log_format", "otlp_traces_endpoint", "metrics_port"} & set(quiet.settings_of(name)[section]), name
