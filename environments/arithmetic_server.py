"""Arithmetic word problems, made on the spot: the environment of the demo, which needs no data set.

    python environments/arithmetic_server.py serve --env.task chain --env.tokenizer_name MODEL_FOLDER

A rollout earns 1 for the right number after `####` and 0 otherwise. Evaluation is greedy, on 200 held-out problems.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anyio
from pydantic import Field

from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup, scored_group
from environments.tasks.arithmetic import Problem, TaskName, extract_answer, grade, held_out_problems, problem_stream


class ArithmeticEnvConfig(BaseEnvConfig):
    """What can be set beyond what every environment has."""

    task: TaskName = Field("chain", description="chain: three events to follow; add: one two-digit operation")
    seed: int = Field(0, description="seed of the stream of training problems")
    eval_problems: int = Field(200, ge=1, description="held-out problems in an evaluation")
    max_new_tokens: int = Field(34, ge=1, description="longest answer")


class ArithmeticEnv(BaseEnv):
    """Small arithmetic stories that a tiny model learns to work out."""

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
            # A group that is all right or all wrong counts in the mean reward, though nothing is learnt from it.
            ensure_scores_are_not_same=False,
            use_wandb=False,
            eval_at_start=True,
            eval_at_end=True,
        )
        return config, APIServerConfig(server_type="vllm", num_requests_for_eval=256)

    async def setup(self) -> None:
        self.problems: Iterator[Problem] = problem_stream(self.config.task, seed=self.config.seed)

    async def get_next_item(self) -> Problem:
        return next(self.problems)

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup, list[Problem]]:
        async with self.server.managed_server() as session:
            completion = await session.chat_completion(
                messages=[{"role": "user", "content": item.question}],
                n=self.config.group_size,
                max_tokens=self.config.max_new_tokens,
                temperature=1.0,
            )
            scores = [grade(choice.message.content, item.answer) for choice in completion.choices]
            return scored_group(session.nodes, scores), []

    async def evaluate(self, *_: Any, **__: Any) -> None:
        started = time.time()
        problems = held_out_problems(self.config.task, self.config.eval_problems)
        samples: list[dict[str, Any]] = [{} for _ in problems]

        async def answer(index: int, problem: Problem) -> None:
            samples[index] = await self._greedy_answer(problem)

        async with anyio.create_task_group() as answers:
            for index, problem in enumerate(problems):
                answers.start_soon(answer, index, problem)
        count = len(samples)
        metrics = {
            "eval/accuracy": sum(sample["score"] for sample in samples) / count,
            "eval/format_reward": sum(sample["answer"] is not None for sample in samples) / count,
            "eval/length_mean": sum(sample["tokens"] for sample in samples) / count,
        }
        await self.evaluate_log(
            metrics,
            task_name=f"arithmetic_{self.config.task}",
            start_time=started,
            generation_parameters={"temperature": 0.0, "max_new_tokens": self.config.max_new_tokens},
            samples=samples,
        )

    async def _greedy_answer(self, problem: Problem) -> dict[str, Any]:
        async with self.server.managed_server() as session:
            completion = await session.chat_completion(
                messages=[{"role": "user", "content": problem.question}],
                max_tokens=self.config.max_new_tokens,
                temperature=0.0,
                split="eval",
            )
            text = completion.choices[0].message.content
            return {
                "question": problem.question,
                "gold": problem.answer,
                "text": text,
                "answer": extract_answer(text),
                "score": grade(text, problem.answer),
                "finish_reason": completion.choices[0].finish_reason,
                "tokens": session.nodes[0].sampled_count,
            }


if __name__ == "__main__":
    ArithmeticEnv.cli()
