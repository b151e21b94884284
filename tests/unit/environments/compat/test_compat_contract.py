"""The contract with code written for Atropos, beyond methods: attributes, arrays, signatures, messages."""

import importlib
import inspect
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from atropos_api.common.cliconfig import ConfigError
from environments.compat import servers, utils
from environments.compat.envs import BaseEnv, EvalHandlingEnum
from environments.compat.runner import main
from environments.compat.servers import (
    APIServer,
    APIServerConfig,
    BaseEnvConfig,
    ManagedServer,
    ReasoningConfig,
    ServerClassUnused,
    ServerManager,
)
from environments.compat.utils import create_html_for_group
from environments.sdk.runtime.cli import read_command
from environments.sdk.server_manager import ServerManager as OurManager
from environments.sdk.session.tokens_and_masks import NOT_TRAINED
from environments.sdk.testing import FakeInference, InProcess
from environments.sdk.tools import FunctionCall, ToolCall

ROOT = Path(__file__).parents[4]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
USER = [{"role": "user", "content": "hi"}]
OPENROUTER, OPENAI = "https://openrouter.ai/api/v1", "https://api.openai.com/v1"


class Env(BaseEnv):
    async def get_next_item(self):
        """Do nothing."""

    async def evaluate(self, *_, **__):
        """Do nothing."""


def manager_over(fake, tokenizer, **options):
    config = APIServerConfig(server_type="vllm", base_url="http://fake/v1", model_name="m")
    return OurManager([config], load_tokenizer=lambda: tokenizer, transport=InProcess(fake), **options)


@pytest.mark.anyio
async def test_the_tool_calls_of_a_session_are_read_by_name_and_as_attributes(tokenizer):
    text = '<tool_call>{"name": "search", "arguments": {"q": 1}}</tool_call>'
    fake = FakeInference(lambda *_: [*tokenizer.encode(text), 1], end=1)
    async with manager_over(fake, tokenizer).managed_server() as session:
        answer = await session.chat_completion(messages=USER, tools=TOOLS)
        (call,) = answer.choices[0].message.tool_calls
        assert call["function"]["name"] == call.function.name == "search"
        assert call["function"]["arguments"] == '{"q": 1}'
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "found"}
        await session.chat_completion(messages=[*USER, said, result], tools=TOOLS)
        assert len(session.nodes) == 1


def test_a_tool_call_is_a_mapping_of_its_fields():
    call = ToolCall(FunctionCall("f", "{}"), id="1")
    assert dict(call) == {"function": FunctionCall("f", "{}"), "id": "1", "type": "function"}
    assert call.get("type") == "function"
    assert call.get("colour", "red") == "red"
    assert "name" in call.function
    with pytest.raises(KeyError):
        call["colour"]


@pytest.mark.parametrize(
    ("given", "elsewhere", "at_openai"),
    [
        ({}, None, None),
        ({"enabled": True}, {"enabled": True}, "medium"),
        ({"effort": "high"}, {"enabled": True, "effort": "high"}, "high"),
        ({"max_tokens": 4096}, {"enabled": True, "max_tokens": 4096}, "medium"),
        ({"effort": "xhigh", "max_tokens": 9}, {"enabled": True, "effort": "xhigh"}, "xhigh"),
    ],
)
def test_reasoning_is_asked_for_in_the_providers_words(given, elsewhere, at_openai):
    config = ReasoningConfig(**given)
    assert config.enabled is config.is_reasoning_kwargs_active() is bool(given)
    assert config.build_extra_body(OPENROUTER) == (elsewhere and {"reasoning": elsewhere})
    assert config.build_extra_body(OPENAI) == (at_openai and {"reasoning_effort": at_openai})


def test_an_effort_may_be_asked_for_as_tokens_and_no_unknown_one_at_all():
    asked = ReasoningConfig(effort="low").build_extra_body(OPENROUTER, use_max_tokens=True)
    assert asked == {"reasoning": {"enabled": True, "max_tokens": 6400}}
    with pytest.raises(ValueError, match="Invalid reasoning_effort"):
        ReasoningConfig(effort="invalid")


def test_an_environments_configuration_says_how_much_to_think():
    config = BaseEnvConfig(tokenizer_name="none", max_reasoning_tokens=8000)
    assert ReasoningConfig.from_env_config(config) == ReasoningConfig(True, None, 8000)
    assert not ReasoningConfig.from_env_config(BaseEnvConfig(tokenizer_name="none")).enabled


def test_a_manager_hands_reasoning_to_its_servers_and_swallows_nothing():
    config = APIServerConfig(server_type="openai", base_url="http://x/v1")
    manager = ServerManager([config], reasoning_config=ReasoningConfig(effort="high"), tool_parser="json")
    assert manager.servers[0].reasoning.effort == "high"
    assert manager.servers[0].reasoning.enabled
    assert manager.tool_parser == "json"
    with pytest.raises(TypeError):
        ServerManager([config], reasonin_config=None)
    for refused in ({"testing": True}, {"proxy_url": "http://proxy:9100"}, {"use_proxy": True}):
        with pytest.raises(NotImplementedError):
            ServerManager([config], **refused)


def test_a_proxy_that_the_environment_variable_names_is_refused_too(monkeypatch):
    monkeypatch.setenv("ATROPOS_PROXY_URL", "http://proxy:9100")
    with pytest.raises(NotImplementedError, match="http://proxy:9100"):
        ServerManager([APIServerConfig(base_url="http://x/v1")])


def test_servers_of_an_environments_own_class_are_refused_and_not_replaced_in_silence():
    class MyServer(APIServer):
        """A server class of the user, which would get no requests."""

    config = APIServerConfig(base_url="http://x/v1")
    with pytest.raises(ServerClassUnused, match="MyServer"):
        ServerManager([config], MyServer)
    own = type("Own", (Env,), {"server_cls": MyServer})
    with pytest.raises(ServerClassUnused, match="MyServer"):
        own(BaseEnvConfig(tokenizer_name="none"), config)
    type("Named", (Env,), {"server_cls": servers.VLLMServer})(BaseEnvConfig(tokenizer_name="none"), config)


def test_a_server_without_an_address_is_openais_with_the_key_of_its_client(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-client")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    judge = APIServerConfig(model_name="gpt-4o-mini", base_url=None, api_key=None)
    assert (judge.base_url, judge.api_key) == (OPENAI, "of-the-client")
    assert APIServerConfig(base_url=None, api_key="own").api_key == "own"
    monkeypatch.setenv("OPENAI_BASE_URL", OPENROUTER)
    assert APIServerConfig(base_url=None).base_url == OPENROUTER
    for local in ({}, {"api_key": None}, {"base_url": None, "server_type": "vllm"}):
        config = APIServerConfig(**local)
        assert (config.base_url, config.api_key) == ("http://localhost:9001/v1", "")


def test_an_address_that_replaces_openais_gets_no_key_of_openai(monkeypatch):
    """The key stayed in the settings, and was sent to the server that the flag named."""
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-client")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    given = {"base_url": None}
    judged = type("Judged", (Env,), {"config_init": classmethod(lambda _: (BaseEnvConfig(), APIServerConfig(**given)))})

    def server_of(*flags):
        (server,) = read_command(judged, "process", flags).servers
        return server.base_url, server.api_key

    assert server_of() == (OPENAI, "of-the-client")
    assert server_of("--openai.api_key", "other") == (OPENAI, "other")
    assert server_of("--openai.base_url", "http://x/v1") == ("http://x/v1", "")
    given["api_key"] = "own"
    assert server_of("--openai.base_url", "http://x/v1") == ("http://x/v1", "own")


@pytest.mark.parametrize(
    ("field", "flag", "wanted"),
    [("inference_weight", "-1", 1.0), ("max_batches_offpolicy", "-1", 1), ("min_items_sent_before_logging", "0", 1)],
)
def test_values_with_a_meaning_in_atropos_have_it_in_a_flag_too(field, flag, wanted):
    """A flag is text, so `--env.inference_weight -1` was refused, which a file may hold."""
    command = read_command(Env, "process", [f"--env.{field}", flag, "--openai.num_requests_for_eval", "0"])
    assert getattr(command.env, field) == wanted
    assert command.servers[0].num_requests_for_eval == 64


@pytest.mark.parametrize("value", ["null", "[1]", ".inf", "many"])
def test_a_setting_that_is_no_number_is_refused_by_its_name(value, tmp_path):
    """The first three ended with a traceback."""
    (tmp_path / "run.yaml").write_text(f"env:\n  max_batches_offpolicy: {value}\n")
    with pytest.raises(ConfigError, match=r"--env\.max-batches-offpolicy: "):
        read_command(Env, "process", ["--config", str(tmp_path / "run.yaml")])


def test_settings_of_an_environment_that_never_evaluates_are_accepted():
    assert BaseEnvConfig(eval_handling=EvalHandlingEnum.NONE, eval_limit_ratio=0.0).eval_limit_ratio == 0
    assert APIServerConfig(num_requests_for_eval=0).num_requests_for_eval == 64


@pytest.mark.anyio
async def test_the_timings_of_a_server_are_asked_for_by_a_name():
    env = Env(BaseEnvConfig(tokenizer_name="none"), APIServerConfig(base_url="http://x/v1"))
    (server,) = env.server.servers
    server.channel.timings["train"].record(2.0, 1)
    found = await server.wandb_metrics({"own": 1}, "server_0")
    assert (found["own"], found["server/server_0_request_time_avg"]) == (1, 2.0)
    assert "server/judge_average_num_attempts" in await server.wandb_metrics({}, "judge")


def test_advantages_are_arrays():
    returns = utils.compute_discounted_returns([1.0, 0.0, 2.0], 0.5)
    assert (returns * 2).tolist() == [3.0, 2.0, 4.0]
    assert utils.compute_discounted_returns(np.array([1, 1]), 0.5).tolist() == [1.5, 1.0]
    assert utils.allclose_to_first([[1.0, 2.0], [1.0, 2.0 + 1e-12]]) is True
    assert utils.allclose_to_first([1.0, 1.1], return_vector=True).tolist() == [True, False]
    assert utils.allclose_to_first([float("nan")] * 2) is False
    assert utils.allclose_to_first([float("nan")] * 2, equal_nan=True) is True


def test_advantages_of_steps_are_what_is_still_to_come_against_the_group():
    first, second = utils.compute_grpo_process_supervision_advantages([[1, 2, 3], [4, 5]])
    assert first == pytest.approx(np.array([-3, -1, 0]) / np.sqrt(2))
    assert second == pytest.approx(np.array([3, 2]) / np.sqrt(2))
    first, _ = utils.compute_grpo_process_supervision_advantages([[1, 2, 3], [4, 5]], gamma=0.9)
    assert first == pytest.approx(np.array([-2.9, -1, 0]) / np.sqrt(2))
    with pytest.raises(ValueError, match="none is better"):
        utils.compute_grpo_process_supervision_advantages([[1, 1, 1]])


class FourMethods:
    """A tokenizer of letters, with the four methods that Atropos needs."""

    eos_token_id = 2

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(token) for token in tokens if token > 31)

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=True):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


@pytest.mark.anyio
async def test_a_session_takes_the_tokenizer_of_its_server_which_needs_four_methods_only():
    fake = FakeInference(lambda *_: [ord("4"), 2], end=2)
    server = manager_over(fake, None).servers[0]
    server.tokenizer = FourMethods()
    session = ManagedServer(server)
    assert session.tokenizer is server.tokenizer
    answer = await session.chat_completion(messages=USER)
    assert answer.choices[0].message.content == "4"
    (node,) = session.nodes
    assert [token for token in node.masked_tokens if token != NOT_TRAINED] == [ord("4"), 2]
    del server.tokenizer
    with pytest.raises(ValueError, match="needs a tokenizer"):
        ManagedServer(server)


def test_a_tree_of_sequences_is_refused_by_the_name_that_clients_look_for():
    assert {"server", "tokenizer", "track_tree", "tool_call_parser"} <= {*inspect.signature(ManagedServer).parameters}
    assert "tool_call_parser" in inspect.signature(ServerManager.managed_server).parameters
    with pytest.raises(ValueError, match="track_tree"):
        ManagedServer(object(), FourMethods(), track_tree=True)
    with pytest.raises(TypeError):
        ManagedServer(object(), FourMethods(), trak_tree=True)


@pytest.mark.anyio
async def test_a_session_is_opened_on_the_server_that_is_named(tokenizer):
    fakes = [FakeInference(lambda *_: [1], end=1) for _ in range(2)]
    manager = manager_over(fakes[0], tokenizer)
    other = manager_over(fakes[1], tokenizer).servers[0]
    other.config = APIServerConfig(server_type="vllm", base_url="http://other/v1/")
    manager.servers.append(other)
    for _ in range(3):
        async with manager.managed_server(base_url="http://other/v1") as session:
            await session.chat_completion(messages=USER)
    assert [len(fake.requests) for fake in fakes] == [0, 3]


def test_one_group_can_be_made_html_of(caplog):
    chat = [{"role": "system", "content": "Be <brief>."}, {"role": "assistant", "content": "4"}]
    page = create_html_for_group({"messages": [chat, "as text"], "scores": [1.0, 0.5]}, 3)
    for shown in ("System", "Assistant", "Be &lt;brief&gt;.", "as text", "0.5", "Group 3"):
        assert shown in page
    assert create_html_for_group({"messages": [], "scores": []}, 0) == ""
    with caplog.at_level(logging.WARNING):
        short = create_html_for_group({"messages": ["one", "two"], "scores": [0.5]}, 0)
    assert ("one" in short, "two" in short) == (True, False)
    assert "2 messages and 1 scores" in caplog.text


def test_the_logger_comes_along_with_the_environment(hooked):
    assert isinstance(importlib.import_module("atroposlib.envs.base").logger, logging.Logger)


@pytest.mark.parametrize("name", ["atroposlib.api.server", "atroposlib.envs.other", "atroposlib.other"])
def test_a_module_that_is_not_supplied_is_reported_with_what_there_is(hooked, name):
    with pytest.raises(ModuleNotFoundError, match=rf"{name} is not provided; there are .*atroposlib\.envs\.base"):
        importlib.import_module(name)


THEIRS = """
    from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
    from environments.helper import ANSWER

    class Env(BaseEnv):
        @classmethod
        def config_init(cls):
            return BaseEnvConfig(use_wandb=False, total_steps=1), APIServerConfig()

        async def setup(self):
            print("the answer is", ANSWER)

        async def get_next_item(self):
            return None

        async def collect_trajectories(self, item):
            return None, []

        async def evaluate(self, *_, **__):
            pass
"""


def test_a_file_runs_from_a_repository_with_a_package_environments_of_its_own(tmp_path, tokenizer_folder):
    """`python -m` looks first into the folder where it is started, a command does not."""
    package = tmp_path / "environments"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('theirs')\n")
    (package / "helper.py").write_text("ANSWER = 42\n")
    (package / "their_env.py").write_text(textwrap.dedent(THEIRS))
    command = tmp_path / "bin" / "atropos-compat"  # as pip writes it
    command.parent.mkdir()
    command.write_text("from environments.compat.runner import main\nmain()\n")
    done = subprocess.run(
        [
            sys.executable,
            command,
            "environments/their_env.py",
            "process",
            "--env.tokenizer_name",
            str(tokenizer_folder),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "the answer is 42" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_the_command_is_installed_under_its_name():
    import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["atropos-compat"] == f"{main.__module__}:{main.__name__}"
