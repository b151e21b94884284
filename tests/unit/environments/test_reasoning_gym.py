"""reasoning-gym as an environment. The package is an extra: without it, its absence and a stand-in are tested."""

from __future__ import annotations

import importlib.util
import re

import pytest

from atropos_api.common.cliconfig import ConfigError
from environments import reasoning_gym_server
from environments.reasoning_gym_server import ReasoningGymEnv, ReasoningGymEnvConfig, ReasoningGymMissing
from environments.sdk.config import APIServerConfig
from environments.sdk.runtime.cli import read_command
from environments.sdk.runtime.commands import validate
from environments.sdk.server_manager import ServerManager
from environments.sdk.testing import FakeInference, InProcess

pytestmark = pytest.mark.anyio

installed = importlib.util.find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not installed, reason="reasoning-gym is not installed")
SERVER = APIServerConfig(server_type="vllm", base_url="http://fake/v1")


async def make(tokenizer_folder, respond, **settings):
    config = ReasoningGymEnvConfig(tokenizer_name=str(tokenizer_folder), group_size=2, eval_problems=5, **settings)
    env = ReasoningGymEnv(config, SERVER)
    fake = FakeInference(
        lambda prompt, index: [*env.tokenizer.encode(respond(env.tokenizer.decode(prompt), index)), 1], end=1
    )
    env.server = ServerManager([SERVER], load_tokenizer=lambda: env.tokenizer, transport=InProcess(fake))
    await env.setup()
    return env


def solve(prompt, index):
    terms = re.search(r"problem: (.*) =", prompt)[1]
    return f"<think>so</think><answer>{eval(terms) + index}</answer>"


class Sums:
    """A data set of reasoning-gym's form, without the package."""

    def __getitem__(self, number):
        return {"question": f"problem: {number} + 1 =", "answer": str(number + 1)}


async def test_the_broker_can_lease_the_problems_by_number(tokenizer_folder, monkeypatch):
    monkeypatch.setattr(reasoning_gym_server, "create_dataset", lambda *_, **__: Sums())
    env = await make(tokenizer_folder, solve)
    assert env.numbers_items
    assert (await env.item_at(7)).answer == "8"
    assert [await env.get_next_item() for _ in range(3)] == [await env.item_at(number) for number in range(3)]


@pytest.mark.parametrize("flag", ["--env.dataset_name", "--env.data_path"])
async def test_data_is_refused_because_the_library_makes_the_problems(flag):
    with pytest.raises(ConfigError, match=rf"unknown option {flag}, did you mean --env\.data"):
        read_command(ReasoningGymEnv, "serve", [flag, "leg_counting"])


@pytest.mark.skipif(installed, reason="reasoning-gym is installed")
async def test_without_the_package_the_pip_line_is_reported(tokenizer_folder):
    with pytest.raises(ReasoningGymMissing, match="pip install reasoning-gym"):
        await make(tokenizer_folder, solve)


@needs_package
async def test_the_task_itself_scores_and_no_problem_of_the_evaluation_is_trained_on(tokenizer_folder, capsys):
    env = await make(tokenizer_folder, solve)
    items = [await env.get_next_item() for _ in range(20)]
    group, _ = await env.collect_trajectories(items[0])
    assert group["scores"] == [1.0, 0.0]
    assert {item.question for item in items}.isdisjoint(item.question for item in env.held_out)
    assert await validate(env) == 0


@needs_package
@pytest.mark.parametrize(
    ("settings", "words"),
    [({"dataset": "chain_sums"}, "did you mean.*chain_sum"), ({"dataset_options": '{"nonsense": 1}'}, "nonsense")],
)
async def test_what_the_package_does_not_have_is_reported(tokenizer_folder, settings, words):
    with pytest.raises(ReasoningGymMissing, match=words):
        await make(tokenizer_folder, solve, **settings)
