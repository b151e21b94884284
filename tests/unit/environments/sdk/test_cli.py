"""The command line of an environment: verbs, precedence, and one line for every mistake."""

import resource
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from atropos_api.client import BrokerHostUnknown, BrokerRefused, BrokerUnreachable
from atropos_api.common.cliconfig import ConfigError
from atropos_api.common.errors import Outage
from environments.arithmetic_server import ArithmeticEnv
from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig, ServerBaseline
from environments.sdk.errors import InferenceUnavailable, TokensUnavailable
from environments.sdk.runtime import cli
from environments.sdk.runtime.cli import OPEN_FILES, read_command, run_verb
from environments.sdk.runtime.commands import NoEvaluation, PathUnusable

SERVER = Path(__file__).parents[4] / "environments" / "arithmetic_server.py"


def run(*arguments):
    command = [sys.executable, str(SERVER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_flags_win_over_files_and_files_over_the_environments_own(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {lr: 1}\nenv: {task: add, group_size: 4}\nopenai: {base_url: 'http://other:1/v1'}\n")
    command = read_command(ArithmeticEnv, "serve", ["--config", str(file), "--env.group_size", "16"])
    assert (command.env.task, command.env.group_size) == ("add", 16)
    assert command.env.eval_at_start is True
    assert command.servers[0].base_url == "http://other:1/v1"
    assert command.servers[0].server_type == "vllm"


class Stories(ArithmeticEnv):
    """An environment that lacks the settings of the demo's file, which is for another one."""

    name = "stories"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(), APIServerConfig(server_type="vllm")


def test_a_run_file_for_another_environment_gives_what_is_known_and_a_line_for_the_rest(caplog):
    demo = str(SERVER.parents[1] / "configs" / "demo.yaml")
    command = read_command(Stories, "serve", ["--config", demo])
    assert command.env.group_size == 8
    assert "written for arithmetic_server.py: ignored the keys that Stories does not have: task" in caplog.text


@pytest.mark.parametrize("name", ["data_path_to_save_groups", "data_dir_to_save_evals"])
def test_an_empty_text_is_no_place_for_results(name):
    """The first group of a run ended it in a traceback."""
    with pytest.raises(ConfigError, match=rf"--env.{name.replace('_', '-')}: an empty text is not a path"):
        read_command(ArithmeticEnv, "process", [f"--env.{name}="])
    assert getattr(read_command(ArithmeticEnv, "process", [f"--env.{name}=~/x"]).env, name) == str(Path.home() / "x")


def test_a_key_that_the_files_own_environment_does_not_know_is_refused(tmp_path):
    file = tmp_path / "run.yaml"
    for server in ("stories", "./stories.py", f"{__name__.rpartition('.')[2]}.py", None):
        file.write_text(yaml.safe_dump({"env": {"server": server, "taks": "chain"}}))
        with pytest.raises(ConfigError, match="unknown key 'taks'"):
            read_command(Stories, "serve", ["--config", str(file)])


def test_a_misspelt_flag_is_refused_whatever_the_file_is_for():
    demo = str(SERVER.parents[1] / "configs" / "demo.yaml")
    with pytest.raises(ConfigError, match=r"unknown option --env\.task"):
        read_command(Stories, "serve", ["--config", demo, "--env.task", "chain"])


def test_booleans_go_both_ways_and_negative_numbers_are_numbers():
    command = read_command(
        ArithmeticEnv, "serve", ["--no-env.eval_at_end", "--env.eval_at_start=false", "--env.total_steps", "-1"]
    )
    assert (command.env.eval_at_end, command.env.eval_at_start, command.env.total_steps) == (False, False, -1)


class Plain(ArithmeticEnv):
    servers = ServerBaseline(server_type="vllm", timeout=7)

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(), list(cls.servers) if isinstance(cls.servers, tuple) else cls.servers


@pytest.mark.parametrize(
    "servers",
    [
        ServerBaseline(server_type="vllm", timeout=7),
        APIServerConfig(server_type="vllm", timeout=7),
        [APIServerConfig(server_type="vllm", timeout=7)],
    ],
)
def test_flags_reach_a_server_however_it_was_declared(servers):
    class Declared(Plain):
        pass

    Declared.servers = servers
    for verb in ("serve", "process", "evaluate"):
        command = read_command(Declared, verb, ["--openai.base_url", "http://mine:9/v1"])
        assert [(s.base_url, s.timeout) for s in command.servers] == [("http://mine:9/v1", 7)]


def test_several_servers_stay_several():
    class Several(Plain):
        servers = tuple(APIServerConfig(base_url=f"http://s{n}:9/v1", server_type="vllm") for n in range(3))

    assert len(read_command(Several, "serve", []).servers) == 3


def test_process_keeps_equal_scores_and_messages():
    config = read_command(ArithmeticEnv, "process", []).env
    assert (config.ensure_scores_are_not_same, config.include_messages) == (False, True)


def test_training_from_an_openai_server_is_refused_with_what_to_set():
    with pytest.raises(TokensUnavailable, match=r"set --openai\.server_type vllm"):
        run_verb(ArithmeticEnv, ["serve", "--openai.server_type", "openai"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "a verb is missing"),
        (["serv"], "did you mean serve?"),
        (["serve", "--env.taks", "add"], "did you mean --env.task?"),
        (["serve", "--env.task", "poetry"], "poetry"),
        (["serve", "--env.group_size", "none"], "--env.group-size"),
        (["serve", "--env.max_token_length", "0"], "--env.max-token-length"),
        (["serve", "--env.rollout_server_url", "localhost:8000"], "begins with http:// or https://"),
        (["serve", "--openai.base_url", "localhost:9001/v1"], "--openai.base-url: an address begins with http://"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("arithmetic_server.py: error: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_loads_nothing_heavy():
    probe = (
        "import sys; from environments.arithmetic_server import ArithmeticEnv\n"
        "try: ArithmeticEnv.cli()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'vllm', 'fastapi', 'httpx', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe, "serve", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--env.task" in done.stdout


def test_every_environment_needs_only_three_methods():
    assert BaseEnv.__abstractmethods__ == {"setup", "get_next_item"}

    class Unfinished(BaseEnv):
        async def setup(self):
            pass

    with pytest.raises(ConfigError, match="Unfinished has no get_next_item and no collect_trajectories; serve needs"):
        run_verb(Unfinished, ["serve"])


class Trained(BaseEnv):
    """An environment that only trains."""

    async def setup(self):
        pass

    async def get_next_item(self):
        return None

    async def collect_trajectories(self, item):
        return None, []


VLLM = ["--openai.server_type", "vllm", "--env.use_wandb=false"]


def test_an_environment_may_go_without_evaluate_which_the_verb_says_in_one_line():
    with pytest.raises(NoEvaluation, match=r"Trained has no evaluate; write one that calls self\.evaluate_log"):
        run_verb(Trained, ["evaluate", *VLLM])


@pytest.mark.parametrize(
    ("verb", "flag"),
    [
        ("serve", "--env.data_path_to_save_groups"),
        ("serve", "--env.data_dir_to_save_evals"),
        ("process", "--env.data_path_to_save_groups"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_reported_before_anything_is_collected(verb, flag):
    with pytest.raises(PathUnusable, match=f"{flag}: /proc/no"):
        run_verb(Trained, [verb, *VLLM, flag, "/proc/no/such"])


@pytest.mark.parametrize("error", [BrokerUnreachable("gone"), InferenceUnavailable("gone")])
def test_a_server_that_lost_broker_or_inference_server_ends_with_a_code_after_which_it_is_started_again(
    monkeypatch, error
):
    """It ended with 2, after which neither systemd nor a launcher starts it again."""
    monkeypatch.setattr("environments.sdk.runtime.cli.run", Mock(side_effect=error))
    with pytest.raises(Outage, match=r"^gone$"):
        run_verb(Trained, ["serve", *VLLM])
    with pytest.raises(type(error)):
        run_verb(Trained, ["process", *VLLM])


@pytest.mark.parametrize("error", [BrokerHostUnknown("no such host"), BrokerRefused({}, 403)])
def test_a_broker_that_a_new_start_would_not_find_either_is_a_refusal(monkeypatch, error):
    monkeypatch.setattr("environments.sdk.runtime.cli.run", Mock(side_effect=error))
    with pytest.raises(type(error)):
        run_verb(Trained, ["serve", *VLLM])


def test_an_environment_may_have_more_connections_than_a_process_begins_with():
    """With three inference servers the soft limit of 1,024 open files is below the requests that may be in flight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = []

    def make_env():
        allowed.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        raise ConfigError("no environment")

    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with pytest.raises(ConfigError):
            cli.run("serve", make_env)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert allowed == [min(OPEN_FILES, hard)]
