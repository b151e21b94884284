r"""The environment trains a base model on competition mathematics: it continues plain text, reasons, then answers.

    python environments/math_server_zero.py serve --config configs/math_zero_shared.yaml
    python environments/math_server_zero.py evaluate --env.math_500 data/math_500.jsonl --env.eval_sets math_500

The answer is in a `\boxed{}` inside `<answer>`. A right one earns 1 and any other -1. An answer cut off by the length
limit counts as wrong and is, by default, not trained on. The length limit can grow during the run, from
`start_tok_length` to `max_token_length`.

Data: `zwhe99/DeepMath-103K` from the hub, or files in `data_path`, to train on; the sets of `eval_sets` to evaluate on,
each from the hub or from a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_validator

from atropos_api.common import metric_names as names
from environments.rewards.answers import last_boxed
from environments.rewards.math import AccuracyReward
from environments.sdk import (
    APIServerConfig,
    BaseEnvConfig,
    EvalHandlingEnum,
    ScoredDataGroup,
    SequenceNode,
    scored_group,
)
from environments.tasks.data import Question, load_questions
from environments.tasks.question_env import QuestionEnv, QuestionEnvConfig, answer_of, load_template, mean, require_room

OPENING, CLOSING = "<answer>", "</answer>"
STOPS = ("User:", "Human:", "Assistant:", CLOSING)
EVAL_SETS: Mapping[str, str] = {
    "aime_2024": "HuggingFaceH4/aime_2024",
    "math_500": "HuggingFaceH4/MATH-500",
    "amc23": "math-ai/amc23",
    "minervamath": "math-ai/minervamath",
    "olympiadbench": "math-ai/olympiadbench",
}


class MathZeroEnvConfig(QuestionEnvConfig):
    """The configuration adds these settings to those of every environment with questions."""

    prompt_template: str = Field("math_zero", description="File with {question} in it, or math_zero or r1_zero.")
    start_tok_length: int = Field(
        32000, ge=1, description="Longest answer at the first step; grows to max_token_length."
    )
    mask_too_long_completions: bool = Field(True, description="Do not train on answers cut off by the length limit.")
    percent_length_penalty: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Penalty on a right answer as long as the limit; a shorter one is penalised in proportion.",
    )
    run_evaluation: bool = Field(True, description="false: load no evaluation set and report none.")
    eval_sets: list[str] = Field(list(EVAL_SETS), description="Which of the evaluation sets are used.")
    aime_2024: str = Field(EVAL_SETS["aime_2024"], description="A file, a folder or a Hugging Face name.")
    math_500: str = Field(EVAL_SETS["math_500"], description="The same.")
    amc23: str = Field(EVAL_SETS["amc23"], description="The same.")
    minervamath: str = Field(EVAL_SETS["minervamath"], description="The same.")
    olympiadbench: str = Field(EVAL_SETS["olympiadbench"], description="The same.")

    def check_names(self) -> None:
        load_template(self.prompt_template)

    def _has_no_test_data(self) -> bool:
        return False  # the evaluation sets are the test data, so that no share of the training data is held out

    @field_validator("held_out_share")
    @classmethod
    def _holds_out_nothing(cls, share: float) -> float:
        if share != cls.model_fields["held_out_share"].default:
            raise ValueError("the evaluation sets are the test data, and nothing is held out; leave it out")
        return share

    @field_validator("eval_sets")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        unknown = [name for name in names if name not in EVAL_SETS]
        if unknown:
            raise ValueError(f"unknown evaluation sets: {', '.join(unknown)}; known are {', '.join(EVAL_SETS)}")
        return names


@dataclass(frozen=True, slots=True)
class SetQuestion(Question):
    """A question of an evaluation carries the name of its set."""

    subset: str


class MathZeroEnv(QuestionEnv):
    """Mathematics problems with verifiable answers, which train a base model."""

    name = "math"
    env_config_cls = MathZeroEnvConfig
    config: MathZeroEnvConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig]:
        config = MathZeroEnvConfig(
            dataset_name="zwhe99/DeepMath-103K",
            group_size=8,
            max_token_length=32000,
            total_steps=120,
            steps_per_eval=20,
            eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
            eval_limit_ratio=0.1,
            worker_timeout=1500,
        )
        server = APIServerConfig(server_type="vllm", model_name="Qwen/Qwen3-4B-Instruct-2507")
        return config, server

    async def setup(self) -> None:
        self.template = load_template(self.config.prompt_template)
        self.grader = AccuracyReward(correct=1.0, wrong=-1.0)
        await super().setup()

    def load_held_out(self) -> Sequence[Question]:
        """Return the questions of all evaluation sets, one set after another; `val_data_path` replaces them all."""
        if self.config.val_data_path is not None or not self.config.run_evaluation:
            return super().load_held_out() if self.config.run_evaluation else []
        return [
            SetQuestion(item.question, item.answer, name)
            for name in self.config.eval_sets
            for item in load_questions(getattr(self.config, name), "test")[: self.config.eval_problems or None]
        ]

    async def collect(self, question: Question) -> ScoredDataGroup:
        prompt = self.template.fill(question.question)
        nodes = await self.sample(prompt, count=self.config.group_size, temperature=1.0)
        right = await self.are_right(nodes, prompt, question.answer)
        scores = [self.score(node, correct=correct) for node, correct in zip(nodes, right, strict=True)]
        group = scored_group(nodes, scores)
        if self.config.mask_too_long_completions:
            group["overrides"] = [{"set_advantage_to_zero": True} if cut_off(node) else {} for node in nodes]
        if self.config.include_messages:
            group["messages"] = [self.as_messages(node, prompt) for node in nodes]
        return group

    async def sample(self, prompt: str, *, count: int, temperature: float) -> list[SequenceNode]:
        async with self.server.managed_server() as session:
            await session.completion(
                prompt=prompt,
                n=count,
                stop=list(STOPS),
                max_tokens=self.answer_limit(len(self.tokenizer.encode(prompt))),
                temperature=temperature,
            )
            return session.nodes

    def answer_limit(self, prompt_tokens: int) -> int:
        """Return the token limit for an answer: the length curriculum, capped by the space that the sequence has
        left.
        """
        room = min(self.longest_answer(prompt_tokens), self.config.max_token_length - prompt_tokens)
        return min(require_room(room, prompt_tokens), self.longest_evaluated)

    @property
    def longest_evaluated(self) -> int:
        """The length curriculum's limit at this step, which holds for rollouts too; outside a run there is no step."""
        config = self.config
        in_a_run = config.total_steps > 0 and not self.evaluation_only
        progress = min(1.0, self.curr_step / config.total_steps) if in_a_run else 1.0
        start = min(config.start_tok_length, config.max_token_length)
        return start + int((config.max_token_length - start) * progress)

    async def are_right(self, nodes: Sequence[SequenceNode], prompt: str, gold: str) -> list[bool]:
        """Return for each answer True if it is right; an answer that was cut off never is."""
        answers = [None if cut_off(node) else boxed_answer(completed(node, prompt)) for node in nodes]
        return [verdict.correct for verdict in await self.grader.judge_answers([gold] * len(nodes), answers)]

    async def score_answer(self, item: Question, text: str) -> float:
        (verdict,) = await self.grader.judge_answers([item.answer], [boxed_answer(text)])
        return 1.0 if verdict.correct else -1.0

    def write_answer(self, answer: str) -> str:
        return f"</think> <answer>\\boxed{{{answer}}}</answer>"

    def score(self, node: SequenceNode, *, correct: bool) -> float:
        if not correct:
            return -1.0
        return 1.0 - self.config.percent_length_penalty * node.sampled_count / self.config.max_token_length

    def as_messages(self, node: SequenceNode, prompt: str) -> list[Any]:
        """Return the prompt and the answer as a chat; the answer begins with the prompt's last `<think>`."""
        asked, tag, _ = prompt.rpartition("<think>")
        answer = tag + completed(node, prompt)
        return [{"role": "user", "content": asked or prompt}, {"role": "assistant", "content": answer}]

    async def attempt(self, question: Question) -> dict[str, Any]:
        prompt = self.template.fill(question.question)
        (node,) = await self.sample(prompt, count=1, temperature=self.config.eval_temperature)
        text = completed(node, prompt)
        (correct,) = await self.are_right([node], prompt, question.answer)
        return {
            "subset": getattr(question, "subset", "validation"),
            "question": question.question,
            "gold": question.answer,
            "text": text,
            "answer_reward": float(correct),
            "format_reward": float(boxed_answer(text) is not None),
            "finish_reason": node.finish_reason,
            "tokens": node.sampled_count,
        }

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        """Return the metrics over all questions, and the accuracy of each evaluation set."""
        subsets = dict.fromkeys(sample["subset"] for sample in samples)
        by_set = {
            names.EVAL_ACCURACY_OF_SET.format(set=name): mean(
                s["answer_reward"] for s in samples if s["subset"] == name
            )
            for name in subsets
        }
        return {**super().evaluation_metrics(samples), **by_set}

    async def evaluate(self, *_: Any, **__: Any) -> None:
        if self.config.run_evaluation:
            await super().evaluate()


def boxed_answer(text: str) -> str | None:
    r"""Return the content of `\boxed{}` in the last `<answer>`; None when there is none."""
    answer, place = None, 0
    while (start := text.find(OPENING, place)) >= 0 and (end := text.find(CLOSING, start)) >= 0:
        answer, place = text[start + len(OPENING) : end], end + len(CLOSING)
    return None if answer is None else last_boxed(answer)


def completed(node: SequenceNode, prompt: str) -> str:
    """Return the answer, with its closing tag put back where the server cut that off: not where another text of `STOPS`
    ended it.
    """
    text = answer_of(node, prompt, stop="")
    return text if any(stop in text for stop in STOPS) else answer_of(node, prompt, stop=CLOSING)


def cut_off(node: SequenceNode) -> bool:
    return node.finish_reason == "length"


if __name__ == "__main__":
    MathZeroEnv.cli()
