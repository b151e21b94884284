"""Environments in Atropos' style run unmodified: in a process of their own, against a served inference server."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from environments.sdk.testing import FakeInference, served
from environments.sdk.tokenizer import load_tokenizer

QUIZ = '''
    """Trains on text that it tokenises itself, as old environments do; its constructor is of the old kind too."""
    from typing import List, Optional, Tuple

    from atroposlib.envs.base import (
        APIServerConfig, BaseEnv, BaseEnvConfig, EvalHandlingEnum, Item, OpenaiConfig, ScoredDataGroup, ServerBaseline,
    )
    from atroposlib.envs.server_handling.server_manager import ServerManager
    from atroposlib.type_definitions import GameHistory, number
    from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer


    class QuizConfig(BaseEnvConfig):
        bonus: float = 0.0


    class QuizEnv(BaseEnv):
        name = "quiz"
        env_config_cls = QuizConfig

        def __init__(self, config: QuizConfig, server_configs: List[APIServerConfig], slurm=True, testing=False):
            super().__init__(config, server_configs, slurm, testing)
            self.rollouts_for_wandb = list()
            self.completion_lengths = []

        @classmethod
        def config_init(cls):
            config = QuizConfig(group_size=2, use_wandb=False, eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
                                score_buffer_size=7, inference_weight=-1)
            return config, APIServerConfig(model_name="m", api_key=None, server_type="vllm", colour="red")

        async def setup(self):
            self.number = 0

        async def get_next_item(self) -> Item:
            self.number += 1
            return self.number

        async def collect_trajectories(self, item) -> Tuple[Optional[ScoredDataGroup], list]:
            chat = [{"role": "user", "content": f"Count to {item}"}]
            answer = await self.server.chat_completion(messages=chat, n=self.config.group_size, max_tokens=9, top_p=0.9)
            group = ScoredDataGroup()
            group["tokens"], group["masks"], group["scores"] = list(), list(), list()
            for choice in answer.choices:
                turns = chat + [{"role": "assistant", "content": choice.message.content}]
                out = tokenize_for_trainer(self.tokenizer, turns, finish_reason=choice.finish_reason)
                group["tokens"].append(out["tokens"])
                group["masks"].append(out["masks"])
                group["scores"].append(1.0 + self.config.bonus)
            return group, []

        async def add_rollouts_for_wandb(self, scored_data, item=None):
            self.rollouts_for_wandb.append([("text", 1.0, item)])

        async def create_rollout_table(self, wandb_metrics):
            wandb_metrics["rows"] = len(self.rollouts_for_wandb)
            return wandb_metrics

        async def evaluate(self, *args, **kwargs):
            answer = await self.server.servers[0].completion(prompt="Say", split="eval", temperature=0.0)
            await self.evaluate_log({"eval/letters": len(answer.choices[0].text)})

        async def wandb_log(self, wandb_metrics=None):
            await super().wandb_log({"quiz": self.number})


    if __name__ == "__main__":
        QuizEnv.cli()
'''


@pytest.fixture(scope="module")
def inference(tokenizer_folder):
    tokenizer = load_tokenizer(str(tokenizer_folder))
    fake = FakeInference(lambda prompt, index: [*tokenizer.encode("one two" if index else "one"), 1], end=1)
    with served(fake) as url:
        yield url, fake


def run_compat(path, *arguments, cwd):
    command = [sys.executable, "-m", "environments.compat", str(path), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}  # noqa: PTH109
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=environment)


def test_an_environment_of_the_old_kind_collects_groups_unmodified(inference, tokenizer_folder, tmp_path):
    file = tmp_path / "quiz_server.py"
    file.write_text(textwrap.dedent(QUIZ))
    config = tmp_path / "run.yaml"
    config.write_text("env: {total_steps: 2, bonus: 0.5, start_tok_length: 9}\nextra: 1\n")
    url, _ = inference
    flags = ("--env.tokenizer_name", str(tokenizer_folder), "--openai.base_url", f"{url}/v1")
    done = run_compat(file, "process", "--config", str(config), *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    groups = [json.loads(line) for line in (tmp_path / "data" / "quiz.jsonl").read_text().splitlines()]
    assert [group["scores"] for group in groups] == [[1.5, 1.5]] * 2
    for group in groups:
        for tokens, mask in zip(group["tokens"], group["masks"], strict=True):
            trained = [value for value in mask if value != -100]
            assert trained
            assert tokens[-len(trained) :] == trained
    for unknown in ("score_buffer_size", "start_tok_length", "colour"):
        assert unknown in done.stderr, f"no message names {unknown}"


def test_it_evaluates_and_takes_the_server_it_is_told(inference, tokenizer_folder, tmp_path):
    file = tmp_path / "quiz_server.py"
    file.write_text(textwrap.dedent(QUIZ.replace("QuizEnv.cli()", "pass")))
    url, fake = inference
    fake.requests.clear()
    flags = ("--env.tokenizer_name", str(tokenizer_folder), "--openai.base_url", f"{url}/v1")
    done = run_compat(file, "evaluate", *flags, "--env.data_dir_to_save_evals", "evals", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "evals" / "metrics.json").read_text())["results"]["all"]["eval/letters"] == 3
    assert [request["temperature"] for request in fake.requests] == [0.0]


def test_a_name_that_atropos_does_not_have_is_said_in_one_line(tmp_path):
    file = tmp_path / "old.py"
    file.write_text("from atroposlib.envs.nowhere import Thing\n")
    done = run_compat(file, "serve", cwd=tmp_path)
    assert done.returncode != 0
    assert "atroposlib.envs.nowhere is not provided" in done.stderr.splitlines()[-1]
