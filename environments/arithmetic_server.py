"""The environment asks arithmetic word problems, generated or read from a data set; the demo trains on it.

    python environments/arithmetic_server.py serve --env.task chain --env.tokenizer_name MODEL_FOLDER

A rollout earns 1 for the right number after `####` and 0 otherwise. Evaluation is greedy, on `eval_problems` problems
at most, none of which is trained on.

Data: problems are generated on demand from `seed` and never run out; `data_path` or `dataset_name` replaces them, those
of evaluations too: its test data, or else `held_out_share` of it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import Field

from atropos_api.common import metric_names as names
from atropos_api.common.concurrency import run_all, run_blocking
from environments.rewards.gold_check import GoldItem
from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup, scored_group
from environments.tasks.arithmetic import (
    Problem,
    TaskName,
    extract_answer,
    final_line,
    grade,
    held_out_problems,
    problem_stream,
    whole_number,
)
from environments.tasks.data import ROW, DataFields, Question, ShuffledEpochs
from environments.tasks.records import DataUnusable


class ArithmeticEnvConfig(DataFields, BaseEnvConfig):
    """The configuration adds these settings to those of every environment."""

    task: TaskName = Field("chain", description="chain: three events to follow; add: one two-digit operation.")
    eval_problems: int = Field(200, ge=1, description="Held-out problems in an evaluation.")
    max_new_tokens: int = Field(34, ge=1, description="Longest answer.")

    @property
    def has_data(self) -> bool:
        """True if questions are read instead of generated."""
        return self.data_path is not None or self.dataset_name is not None


@dataclass(frozen=True, slots=True)
class WordProblem:
    """A word problem is a question whose answer is a whole number."""

    question: str
    answer: int


class ArithmeticEnv(BaseEnv):
    """Small arithmetic word problems that a tiny model can learn to solve."""

    name = "arithmetic"
    env_config_cls = ArithmeticEnvConfig
    config: ArithmeticEnvConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig]:
        config = ArithmeticEnvConfig(
            group_size=8,
            max_num_workers=64,
            max_token_length=128,
            max_batches_offpolicy=2,
            steps_per_eval=0,
            # A group that is all right or all wrong counts in the mean reward, though it gives no learning signal.
            ensure_scores_are_not_same=False,
            use_wandb=False,
            eval_at_start=True,
            eval_at_end=True,
        )
        return config, APIServerConfig(server_type="vllm", num_requests_for_eval=256)

    async def setup(self) -> None:
        config = self.config
        will_evaluate = not self.process_mode and config.will_evaluate
        self.problems: Iterator[Problem | WordProblem] = problem_stream(config.task, seed=config.seed)
        self.held_out: Sequence[Problem | WordProblem] = ()
        if config.has_data and not self.evaluation_only:
            load = partial(config.training_questions, hold_out=will_evaluate)
            questions = await run_blocking(load, about="the training questions")
            self.problems = endless_draws(as_word_problems(questions), config.seed)
        if self.evaluation_only or will_evaluate:
            self.held_out = await run_blocking(self.load_held_out, about="the evaluation questions")

    def load_held_out(self) -> Sequence[Problem | WordProblem]:
        config = self.config
        if not config.has_data and config.val_data_path is None:
            return held_out_problems(config.task, config.eval_problems)
        questions = config.evaluation_questions(trains=not self.evaluation_only)
        return as_word_problems(questions)[: config.eval_problems]

    async def get_next_item(self) -> Problem | WordProblem:
        return next(self.problems)

    async def collect_trajectories(self, item: Problem | WordProblem) -> tuple[ScoredDataGroup, list[Any]]:
        async with self.server.managed_server() as session:
            completion = await session.chat_completion(
                messages=[{"role": "user", "content": item.question}],
                n=self.config.group_size,
                max_tokens=self.config.max_new_tokens,
                temperature=1.0,
            )
            scores = [await self.score_answer(item, choice.message.content or "") for choice in completion.choices]
            group = scored_group(session.nodes, scores)
        group["group_overrides"] = {ROW: {"answer": item.answer}}
        return group, []

    async def score_answer(self, item: Problem | WordProblem, text: str) -> float:
        return grade(text, item.answer)

    def gold_items(self) -> Iterable[GoldItem]:
        for problem in self.held_out or self.load_held_out():
            wrong = (final_line(problem.answer + 1), str(problem.answer), "")
            yield GoldItem(problem, final_line(problem.answer), wrong, name=problem.question)

    async def evaluate(self, *_: Any, **__: Any) -> None:
        started = time.time()
        samples = await run_all([partial(self._greedy_answer, problem) for problem in self.held_out])
        count = len(samples)
        metrics = {
            names.EVAL_ACCURACY: sum(sample["score"] for sample in samples) / count,
            names.EVAL_FORMAT_REWARD: sum(sample["answer"] is not None for sample in samples) / count,
            names.EVAL_LENGTH_MEAN: sum(sample["tokens"] for sample in samples) / count,
        }
        await self.evaluate_log(
            metrics,
            task_name=f"arithmetic_{self.config.task}",
            start_time=started,
            generation_parameters={"temperature": 0.0, "max_new_tokens": self.config.max_new_tokens},
            samples=samples,
        )

    async def _greedy_answer(self, problem: Problem | WordProblem) -> dict[str, Any]:
        async with self.server.managed_server() as session:
            completion = await session.chat_completion(
                messages=[{"role": "user", "content": problem.question}],
                max_tokens=self.config.max_new_tokens,
                temperature=0.0,
                split="eval",
            )
            text = completion.choices[0].message.content or ""
            return {
                "question": problem.question,
                "gold": problem.answer,
                "text": text,
                "answer": extract_answer(text),
                "score": grade(text, problem.answer),
                "finish_reason": completion.choices[0].finish_reason,
                "tokens": session.nodes[0].sampled_count,
            }


def as_word_problems(questions: Sequence[Question]) -> list[WordProblem]:
    """Convert questions whose answers are whole numbers, alone or after the last `####`."""
    return [WordProblem(item.question, _whole_number(item.answer)) for item in questions]


def endless_draws(problems: Sequence[WordProblem], seed: int) -> Iterator[WordProblem]:
    draws = ShuffledEpochs(problems, seed)
    return (draws[number] for number in itertools.count())


def _whole_number(answer: str) -> int:
    found = extract_answer(answer)
    if found is None:
        found = whole_number(answer)
    if found is None:
        raise DataUnusable(f"the answer {answer[:80]!r} holds no whole number, which --env.task needs")
    return found


if __name__ == "__main__":
    ArithmeticEnv.cli()
