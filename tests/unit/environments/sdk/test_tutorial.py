"""The tutorial in `BaseEnv`'s docstring is a working environment."""

import inspect
import json
import textwrap

import pytest

from environments.sdk import BaseEnv
from environments.sdk.config import as_server_list
from environments.sdk.runtime.commands import evaluate_alone, process
from environments.sdk.server_manager import ServerManager
from environments.sdk.testing import FakeInference, InProcess

pytestmark = pytest.mark.anyio


def tutorial_class():
    """Return the class that the docstring's code defines."""
    text = inspect.getdoc(BaseEnv)
    start = text.index("    from environments.sdk import")
    end = text.index('    if __name__ == "__main__"')
    scope = {}
    exec(textwrap.dedent(text[start:end]), scope)
    return scope["ColoursEnv"]


def make(tokenizer_folder, **overrides):
    cls = tutorial_class()
    config, server = cls.config_init()
    config = config.model_copy(update={"tokenizer_name": str(tokenizer_folder), "use_wandb": False, **overrides})
    env = cls(config, server)
    fake = FakeInference(lambda prompt, index: [*env.tokenizer.encode("red" if index % 2 else "a sky"), 1], end=1)
    env.server = ServerManager(as_server_list(server), load_tokenizer=lambda: env.tokenizer, transport=InProcess(fake))
    return env, fake


async def test_it_collects_groups(tokenizer_folder, tmp_path):
    path = tmp_path / "groups.jsonl"
    env, _ = make(tokenizer_folder, total_steps=6, data_path_to_save_groups=str(path), ensure_scores_are_not_same=False)
    await process(env)
    groups = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(groups) == 6
    assert all(len(group["tokens"]) == 8 for group in groups)
    assert {tuple(group["scores"]) for group in groups} == {(1.0, 0.0) * 4, (1.0,) * 8}


async def test_it_evaluates_with_evaluation_requests(tokenizer_folder, tmp_path):
    env, fake = make(tokenizer_folder, data_dir_to_save_evals=str(tmp_path))
    await evaluate_alone(env)
    document = json.loads((tmp_path / "metrics.json").read_text())
    assert document["results"]["all"]["eval/accuracy"] == 1.0
    assert fake.requests[0]["temperature"] == 0.0


async def test_nothing_is_overwritten_by_a_second_process(tokenizer_folder, tmp_path):
    path = tmp_path / "groups.jsonl"
    for _ in range(2):
        env, _ = make(tokenizer_folder, total_steps=1, data_path_to_save_groups=str(path))
        await process(env)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "groups.html",
        "groups.jsonl",
        "groups_1.html",
        "groups_1.jsonl",
    ]


async def test_training_samples_of_an_evaluation_never_reach_a_group(tokenizer_folder):
    env, _ = make(tokenizer_folder)
    await env.setup()
    async with env.server.managed_server() as session:
        with pytest.raises(Exception, match="temperature 0"):
            await session.chat_completion(messages=[{"role": "user", "content": "?"}], temperature=0.0)
