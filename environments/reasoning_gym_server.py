r"""The environment runs any of reasoning-gym's generated tasks; the task itself scores the answers.

    pip install reasoning-gym
    python environments/reasoning_gym_server.py serve --env.dataset chain_sum --env.dataset_options '{"min_terms": 2}'

Problems are generated on demand and never repeat; evaluation problems come from a separate seed. The answer is the
text in the last `<answer>`. Its score is the task's own, from 0 to 1; many tasks give partial credit.

Data: the library generates it; nothing is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import anyio
from pydantic import Field

from atropos_api.common.cliconfig import nearest
from atropos_api.common.concurrency import run_all
from environments.rewards.answers import after_thinking, inside_tag
from environments.rewards.gold_check import GoldItem
from environments.sdk import (
    APIServerConfig,
    BaseEnvConfig,
    EnvironmentsError,
    ManagedSession,
    ScoredDataGroup,
    scored_group,
)
from environments.sdk.config import JsonObject
from environments.tasks.data import Question
from environments.tasks.question_env import QuestionEnv

SYSTEM_PROMPT = (
    "You solve puzzles. Reason inside <think> </think> first, then give the solution alone inside <answer> </answer>, "
    "in exactly the form that is asked for."
)
MANY = 1_000_000_000
EVALUATION_SEED = 2_000_000_000  # far above the seed of any training problem; some tasks take at most 32 bits


class ReasoningGymMissing(EnvironmentsError):
    """The package is not installed, or has no such task with such settings."""


class ReasoningGymEnvConfig(BaseEnvConfig):
    """The configuration adds these settings. It has none for data: `--env.dataset_name TASK`, typed in place of
    `--env.dataset`, would be accepted, and another task would be trained.
    """

    dataset: str = Field("chain_sum", description="Name of a task of reasoning-gym.")
    dataset_options: JsonObject = Field("{}", description="The task's own settings, as JSON.")
    eval_problems: int = Field(200, ge=1, description="Problems in an evaluation.")
    eval_temperature: float = Field(0.0, ge=0, description="Temperature of evaluations; 0: greedy.")
    seed: int = Field(0, description="Seed of the training problems.")


@dataclass(frozen=True, slots=True)
class Puzzle(Question):
    """A puzzle is a problem together with the data that its task needs to score an answer."""

    entry: Mapping[str, Any]


class ReasoningGymEnv(QuestionEnv):
    """Puzzles of one kind, which reasoning-gym generates."""

    name = "reasoning_gym"
    env_config_cls = ReasoningGymEnvConfig  # type: ignore[assignment] # what reads settings for data is overridden
    config: ReasoningGymEnvConfig  # type: ignore[assignment] # the same

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig]:
        return ReasoningGymEnvConfig(group_size=8), APIServerConfig(server_type="vllm", num_requests_for_eval=256)

    async def setup(self) -> None:
        self.items_taken = 0
        self.puzzles = create_dataset(self.config, seed=self.config.seed, size=MANY)
        self.held_out = self.load_held_out()

    def load_held_out(self) -> list[Question]:
        puzzles = create_dataset(self.config, seed=EVALUATION_SEED, size=self.config.eval_problems)
        return [as_puzzle(puzzles[index]) for index in range(self.config.eval_problems)]

    async def item_at(self, number: int) -> Question:
        return as_puzzle(self.puzzles[number])

    async def get_next_item(self) -> Question:
        self.items_taken += 1
        return await self.item_at(self.items_taken - 1)

    async def collect(self, question: Question) -> ScoredDataGroup:
        async with self.server.managed_server() as session:
            texts = await self._answers(session, question, count=self.config.group_size, temperature=1.0)
            scores = await run_all([partial(self.score_answer, question, text) for text in texts])
            return scored_group(session.nodes, scores)

    async def score_answer(self, item: Question, text: str) -> float:
        assert isinstance(item, Puzzle)
        answer = inside_tag(after_thinking(text), "answer")
        # In a thread: some tasks take a while to score an answer, by search.
        return float(await anyio.to_thread.run_sync(self.puzzles.score_answer, answer, item.entry))

    def write_answer(self, answer: str) -> str:
        return f"<answer>{answer}</answer>"

    def gold_items(self) -> Iterable[GoldItem]:
        for item in self.held_out:
            yield GoldItem(item, self.write_answer(item.answer), name=item.question[:80])

    async def attempt(self, question: Question) -> dict[str, Any]:
        async with self.server.managed_server() as session:
            (text,) = await self._answers(session, question, count=1, temperature=self.config.eval_temperature)
            return {
                "question": question.question,
                "gold": question.answer,
                "text": text,
                "format_reward": float(inside_tag(after_thinking(text), "answer") is not None),
                "answer_reward": await self.score_answer(question, text),
                "tokens": session.nodes[0].sampled_count,
            }

    async def _answers(
        self, session: ManagedSession, question: Question, *, count: int, temperature: float
    ) -> list[str]:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.question}]
        room = self.longest_answer(self.chat_length(messages))
        completion = await session.chat_completion(messages=messages, n=count, max_tokens=room, temperature=temperature)
        return [choice.message.content or "" for choice in completion.choices]


def as_puzzle(entry: Mapping[str, Any]) -> Puzzle:
    return Puzzle(str(entry["question"]), str(entry["answer"]), entry)


def create_dataset(config: ReasoningGymEnvConfig, *, seed: int, size: int) -> Any:
    """Return the task's data set; its problems are generated on access."""
    try:
        package, factory = import_module("reasoning_gym"), import_module("reasoning_gym.factory")
    except ImportError as error:
        raise ReasoningGymMissing("this environment needs reasoning-gym: pip install reasoning-gym") from error
    if config.dataset not in factory.DATASETS:
        raise ReasoningGymMissing(
            f"unknown task {config.dataset!r}{nearest(config.dataset, factory.DATASETS)}; set --env.dataset"
        )
    try:
        return package.create_dataset(config.dataset, seed=seed, size=size, **json.loads(config.dataset_options))
    except (TypeError, ValueError, AssertionError) as error:
        raise ReasoningGymMissing(f"--env.dataset_options do not suit the task {config.dataset}: {error}") from error


if __name__ == "__main__":
    ReasoningGymEnv.cli()
