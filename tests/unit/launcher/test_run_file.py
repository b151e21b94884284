"""Run files and flags reach the program they belong to, and mistakes in them are reported in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError
from atropos_api.config import BrokerConfig
from environments.export import ExportOptions
from environments.sdk.config import BaseEnvConfig
from example_trainer.launcher.environment_settings import OF_ONE_ENVIRONMENT, program_of
from example_trainer.launcher.run_file import read_settings, trainer_settings
from example_trainer.launcher.section_flags import split_section_flags
from example_trainer.serving.config import ServerConfig
from example_trainer.sft.config import SftConfig

RUN_FILE = """
trainer: {model_name: m, training_steps: 5, lr: 1.0e-4}
api: {port: 8100}
env: {server: arithmetic_server.py, group_size: 8}
openai: {server_type: vllm}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE)
    return str(path)


def test_sections_of_a_run_file_reach_their_programs(run_file: str) -> None:
    settings = read_settings(["--config", run_file])
    assert settings.trainer.training_steps == 5
    assert settings.section("api") == {"port": 8100}
    (environment,) = settings.environments
    assert environment.server == "arithmetic_server.py"
    assert environment.env == {"group_size": 8}
    assert environment.openai == {"server_type": "vllm"}


def test_the_launcher_knows_a_setting_of_a_section_by_either_spelling(run_file: str, tmp_path: Path) -> None:
    """A token's file was not found under `token-file`, and a file for all groups was cut to the newest ones."""
    text = RUN_FILE.replace("port: 8100", "token-file: /t").replace("group_size: 8", "group-size: 7, val-data-path: v")
    Path(run_file).write_text(text.replace("server_type", "server-type"))
    settings = read_settings(["--config", run_file])
    assert settings.section("api") == {"token_file": "/t"}
    assert settings.environments[0].env == {"group_size": 7, "val_data_path": "v"}
    assert settings.environments[0].openai == {"server_type": "vllm"}
    Path(run_file).write_text(
        text.replace(
            "trainer: {", "teacher: {model-name: t, vllm: {max-model-len: 8}}\ntrainer: {distill: forward_kl, "
        )
    )
    assert read_settings(["--config", run_file]).teachers == {"model_name": "t", "vllm": {"max_model_len": 8}}
    listed = tmp_path / "listed.yaml"
    listed.write_text(
        "trainer: {model_name: m}\nenvironments: [{file: a.py, env: {group-size: 2}, openai: [{api-key: k}]}]"
    )
    (environment,) = read_settings(["--config", str(listed)]).environments
    assert (environment.env, environment.openai) == ({"group_size": 2}, [{"api_key": "k"}])
    listed.write_text("trainer: {model_name: m}\nenv: {server: a.py, group-size: 2, group_size: 3}")
    with pytest.raises(ConfigError, match="env: group_size is given with - and with _; leave one of them out"):
        read_settings(["--config", str(listed)])


def test_the_help_says_where_the_options_of_the_other_programs_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        read_settings(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "run-api --help lists those of --api.*, python ENV.py serve --help those of --env.* and --openai.*." in told


def test_settings_that_have_no_effect_in_this_launch_are_remarked_on(tmp_path: Path) -> None:
    idle = ("--vllm-gpu", "3", "--vllm-tensor-parallel-size", "2")
    elsewhere = ("--weight-bridge-mode", "lora_only", "--num-inference-nodes", "2", "--vllm-host", "other")
    settings = read_settings(["--model-name", "m", *elsewhere, *idle, "--log-dir", str(tmp_path)])
    assert [remark.split(" has no effect")[0] for remark in settings.remarks] == [
        "--vllm-gpu 3",
        "--vllm-tensor-parallel-size 2",
    ]
    assert read_settings(["--model-name", "m", "--weight-bridge-mode", "lora_only", *idle]).remarks == ()


def test_a_home_directory_is_found_in_every_place_for_a_file_and_none_is_made_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run_dir: ~/runs/x` made a folder `~` in the present one: no shell sees what a run file holds."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text(
        "trainer: {model_name: m, run_dir: ~/runs/x, save_path: ~/kept, log_dir: ~/logs, vllm_config_path: ~/bridge}"
    )
    config = read_settings(["--config", str(tmp_path / "run.yaml"), "--resume=~/kept/checkpoint-3"]).trainer
    assert (config.run_dir, config.save_path) == (tmp_path / "runs/x", tmp_path / "kept")
    assert (config.log_dir, config.resume) == (tmp_path / "logs", str(tmp_path / "kept/checkpoint-3"))
    assert config.vllm_config_path == str(tmp_path / "bridge")
    learned = SftConfig(model_name="m", dataset="d", save_path=Path("~/sft"), chat_template=Path("~/chat.jinja"))
    assert (learned.save_path, learned.chat_template) == (tmp_path / "sft", tmp_path / "chat.jinja")
    server = ServerConfig(model="~/m", tokenizer="~/t", adapter=Path("~/a"), bridge_dir=Path("~/b"))
    assert (server.model, server.tokenizer) == (str(tmp_path / "m"), str(tmp_path / "t"))
    assert (server.adapter, server.bridge_dir) == (tmp_path / "a", tmp_path / "b")
    assert ServerConfig(model="./m").model == "./m"
    assert ExportOptions(groups=Path("~/groups.jsonl")).groups == tmp_path / "groups.jsonl"
    assert BrokerConfig(store="~/store").store == str(tmp_path / "store")
    assert BrokerConfig(store="redis://~/0").store == "redis://~/0"
    environment = BaseEnvConfig(data_path_to_save_groups="~/groups.jsonl", data_dir_to_save_evals="~/evals")
    assert environment.data_path_to_save_groups == str(tmp_path / "groups.jsonl")
    assert environment.data_dir_to_save_evals == str(tmp_path / "evals")
    (tmp_path / "my_env.py").touch()
    assert program_of("~/my_env.py") == (str(tmp_path / "my_env.py"),)


def test_a_directory_is_not_taken_for_the_word_that_stands_for_something_else() -> None:
    """The store of `--store ./memory` was in memory: nothing of it was on the disk."""
    for directory in ("./memory", "memory/"):
        assert BrokerConfig(store=directory).store == directory
    trainer = read_settings(["--model-name", "m", "--run-dir", "r", "--resume", "./auto"]).trainer
    assert trainer.resume == "./auto"


def test_flags_lie_over_files_and_later_files_over_earlier_ones(run_file: str, tmp_path: Path) -> None:
    second = tmp_path / "second.yaml"
    second.write_text("trainer: {training_steps: 7}\nenv: {max_token_length: 32}\n")
    third = tmp_path / "third.yaml"
    third.write_text("env: {max_token_length: 64}\n")
    files = ["--config", run_file, f"--config={second}", "--config", str(third)]
    settings = read_settings([*files, "--lr", "2e-4", "--api.port", "8101"])
    assert (settings.trainer.training_steps, settings.trainer.lr) == (7, 2e-4)
    assert settings.section("api")["port"] == "8101"
    assert settings.environments[0].env == {"group_size": 8, "max_token_length": 64}


def test_the_launcher_trains_with_shared_weights_unless_told_otherwise(run_file: str) -> None:
    assert read_settings(["--config", run_file]).trainer.weight_bridge_mode == "shared_vllm"
    asked = read_settings(["--config", run_file, "--weight-bridge-mode", "none"])
    assert asked.trainer.weight_bridge_mode == "none"


def test_without_an_env_section_no_environment_is_started() -> None:
    settings = read_settings(["--model-name", "m", "--atropos-url", "http://localhost:8000", "--training-steps", "30"])
    assert settings.environments == ()


def test_an_environment_file_is_a_run_file_with_env_and_openai_alone(tmp_path: Path) -> None:
    """R30: one file serves the environment server and the launcher."""
    path = tmp_path / "env.yaml"
    path.write_text("env: {group_size: 4}\nopenai:\n  - {base_url: 'http://a/v1'}\n  - {base_url: 'http://b/v1'}\n")
    settings = read_settings(["--config", str(path), "--model-name", "m", "--env.server", "gsm8k_server.py"])
    assert settings.environments[0].server == "gsm8k_server.py"
    assert len(settings.environments[0].openai) == 2


def test_several_environments_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("environments:\n  - {file: a.py, env: {group_size: 4}}\n  - {file: b.py}\n")
    settings = read_settings(["--config", str(path), "--model-name", "m"])
    names = [(entry.name, entry.server) for entry in settings.environments]
    assert names == [("environment-1", "a.py"), ("environment-2", "b.py")]


@pytest.mark.parametrize("flag", OF_ONE_ENVIRONMENT)
def test_a_port_or_file_for_one_environment_is_refused_for_several(tmp_path: Path, flag: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("environments: [{file: a.py}, {file: b.py}]\n")
    argv = ["--config", str(path), "--model-name", "m"]
    with pytest.raises(ConfigError, match=rf"--env\.{flag} 9100: the run file has 2 environments"):
        read_settings([*argv, f"--env.{flag}", "9100"])
    assert len(read_settings([*argv, "--env.metrics_port", "0", "--env.group_size", "4"]).environments) == 2


def test_environments_of_one_server_have_names_of_their_own_at_the_broker(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    entries = (
        "{file: math_server.py}, {file: b.py}, {file: ./math_server.py}, {file: math_server.py, env: {wandb_name: m}}"
    )
    path.write_text(f"trainer: {{model_name: m}}\nenvironments: [{entries}, {{file: math_server.py}}]\n")
    settings = read_settings(["--config", str(path)])
    assert [entry.env.get("wandb_name") for entry in settings.environments] == [None, None, "math-2", "m", "math-4"]
    path.write_text(
        "trainer: {model_name: m}\n"
        "environments: [{file: a.py, env: {wandb_name: same}}, {file: b.py, env: {wandb_name: same}}]\n"
    )
    with pytest.raises(ConfigError, match=r"env\.wandb_name same is given twice"):
        read_settings(["--config", str(path)])


def test_sections_of_one_environment_beside_a_list_of_them_are_remarked_on(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "trainer: {model_name: m}\nenv: {server: a.py}\nopenai: {timeout: 3}\nenvironments: [{file: b.py}]\n"
    )
    settings = read_settings(["--config", str(path)])
    assert [entry.server for entry in settings.environments] == ["b.py"]
    assert "env and openai: no effect, since each entry of environments has its own" in settings.remarks


def test_section_flags_keep_the_form_in_which_they_were_typed() -> None:
    own, flags = split_section_flags(
        [
            "--lr",
            "1",
            "--env.group-size=8",
            "--env.use_wandb",
            "--seed",
            "3",
            "--openai.base_url",
            "a",
            "b",
            "--env.x",
            "-1",
        ]
    )
    assert own == ["--lr", "1", "--seed", "3"]
    assert flags["env"].arguments == ("--env.group-size=8", "--env.use_wandb", "--env.x", "-1")
    assert flags["env"].values == {"group_size": "8", "use_wandb": True, "x": "-1"}
    assert flags["openai"].values == {"base_url": ["a", "b"]}
    assert flags["env"].without("group_size").arguments == ("--env.use_wandb", "--env.x", "-1")
    assert flags["env"].unprefixed("env")[0] == "--group-size=8"


def test_section_flags_may_be_negated() -> None:
    own, flags = split_section_flags(["--no-prefetch", "--no-env.allow-truncated-sampling", "--no-vllm.enable-lora"])
    assert own == ["--no-prefetch"]
    assert flags["env"].values == {"allow_truncated_sampling": False}
    assert flags["env"].arguments == ("--no-env.allow-truncated-sampling",)
    assert flags["vllm"].unprefixed("vllm") == ("--no-enable-lora",)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["--model-name", "m", "--trainig-steps", "3"],
            "unknown option --trainig-steps, did you mean --training-steps?",
        ),
        (["--model-name", "m", "--opneai.x", "1"], "unknown option --opneai.x, did you mean openai?"),
        (["--config"], "--config needs the path"),
        (["run.yaml"], "unexpected argument 'run.yaml'; a file of settings is named by --config run.yaml"),
        (
            ["--model-name", "m", "--trainer.atropos_token=x"],
            "unknown option --trainer.atropos_token: the trainer's options have no prefix; write --atropos_token",
        ),
        (
            ["--model-name", "m", "--num-generations", "8"],
            "environment names no environment server for the settings group_size (--env.*, env:); name its file",
        ),
        (
            ["--model-name", "m", "--env", "a_server.py", "run.yaml"],
            "takes one name, got a_server.py run.yaml; a run file",
        ),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
    ],
)
def test_mistakes_on_the_command_line_are_reported_with_the_remedy(argv: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_settings(argv)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("trainer: {model_name: m}\nenvv: {}\n", "unknown section 'envv', did you mean env?"),
        ("trainer: {model_name: m, lrr: 1}\n", "unknown key 'lrr', did you mean lr?"),
        ("trainer: {model_name: m}\nenv: 3\n", "section 'env' takes settings, got 3"),
        ("trainer: [1]\n", "section 'trainer' takes settings, got [1]"),
        ("trainer: {model_name: m}\napi: [1]\n", "section 'api' takes settings, got [1]"),
        ("trainer: {model_name: m}\napi: {max_inflated_byte: 1}\n", ", api: unknown key 'max_inflated_byte', did you"),
        ("trainer: {model_name: m}\nopenai: [{}, 3]\n", "section 'openai' takes settings, or a list of them, got"),
        ("trainer: {model_name: m}\nenvironments: [1]\n", "section 'environments' takes a list of settings, each"),
        ("environments: [{env: 3}]\ntrainer: {model_name: m}\n", "section 'environments' takes a list of settings"),
        ("environments: [{file: f.py, openai: 7}]\ntrainer: {model_name: m}\n", "section 'environments' takes"),
        ("trainer: {model_name: m}\nmodes: {shared_vllm: [1]}\n", "section 'modes' takes settings by weight bridge"),
        ("trainer: {model_name: m}\nmodes: [1]\n", "section 'modes' takes settings by weight bridge mode, got [1]"),
        (
            "trainer: {model_name: m}\nenv: {group_size: 3}\n",
            "for the settings group_size (--env.*, env:); name its file",
        ),
        ("environments: [{file: f.py, evn: {}}]\ntrainer: {model_name: m}\n", "'evn' in entry 1, did you mean env?"),
        ("environments: [{file: f.py}, {group_size: 4}]\ntrainer: {model_name: m}\n", "belong under env"),
        ("trainer: {model_name: m}\nmodes: {lora_onli: {lr: 1}}\n", "mode 'lora_onli', did you mean lora_only?"),
        ("trainer: {model_name: m}\nmodes: {lora_only: {lrr: 1}}\n", "modes.lora_only: unknown key 'lrr'"),
        ("trainer: {model_name: m}\nmodes_on_gpu: {none: {lrr: 1}}\n", "modes_on_gpu.none: unknown key 'lrr'"),
        ("trainer: {model_name: m}\nenv: {server: a.py}\nenv: {server: b.py}\n", "YAML: 'env' twice"),
        ("trainer: {model_name: m}\nenv:\n  seed: 1\n  seed: 2\n", "YAML: 'seed' twice in"),
    ],
)
def test_mistakes_in_a_run_file_are_reported_with_the_remedy(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^\S") as error:
        read_settings(["--config", str(path)])
    assert told in str(error.value)


MODES = """
trainer: {model_name: m, lr: 1.0e-4, weight_bridge_mode: shared_vllm}
modes: {lora_only: {lr: 2.0e-3, lora_r: 64}}
"""


@pytest.mark.parametrize("spelling", [["--weight-bridge-mode", "lora_only"], ["--weight_bridge_mode=lora_only"]])
def test_a_mode_brings_what_differs_in_it_for_launcher_and_trainer_alike(tmp_path: Path, spelling: list[str]) -> None:
    path = tmp_path / "modes.yaml"
    path.write_text(MODES)
    assert read_settings(["--config", str(path)]).trainer.lr == 1e-4
    config = read_settings(["--config", str(path), *spelling]).trainer
    assert (config.lr, config.lora_r) == (2e-3, 64)
    assert read_settings(["--config", str(path), *spelling, "--lr", "3e-3"]).trainer.lr == 3e-3, "flags win"
    assert trainer_settings(["--config", str(path), *spelling])[0]["lora_r"] == 64


def test_a_misspelt_setting_of_a_mode_is_reported_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "modes.yaml"
    path.write_text(MODES.replace("lora_r", "lora_rank"))
    with pytest.raises(ConfigError, match=r"modes.lora_only.*lora_rank"):
        read_settings(["--config", str(path), "--weight-bridge-mode", "lora_only"])


@pytest.mark.parametrize("flags", [["--env", "my_env.py"], ["--env=my_env.py"], ["--env.server", "my_env.py"]])
def test_an_environment_is_named_by_its_file_alone(flags: list[str]) -> None:
    own, taken = split_section_flags([*flags, "--env.seed", "7", "--seed", "3"])
    assert own == ["--seed", "3"]
    assert taken["env"].values == {"server": "my_env.py", "seed": "7"}


@pytest.mark.parametrize("mode", ["lora_only", "lora_restart", "shared_vllm"])
def test_the_demo_serves_adapters_in_sixteen_bits_on_a_gpu_alone(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = ["--config", str(Path(__file__).parents[3] / "configs" / "demo.yaml"), "--weight-bridge-mode", mode]
    monkeypatch.setattr("example_trainer.launcher.run_file.serves_from_gpu", lambda _: False)
    assert read_settings(demo).trainer.dtype == "float32"
    monkeypatch.setattr("example_trainer.launcher.run_file.serves_from_gpu", lambda _: True)
    assert read_settings(demo).trainer.dtype == ("float32" if mode == "shared_vllm" else "bfloat16")
