r"""The environment trains on any data set, with rewards named on the command line: no class is written.

    python environments/dataset_server.py serve --env.data_path prompts.jsonl --env.reward rewards.py:polite
    python environments/dataset_server.py serve --env.dataset_name trl-lib/tldr --env.reward length_target
    python environments/dataset_server.py serve --env.data_path sums.jsonl \
        --env.reward gsm8k '{"name": "repetition", "weight": 0.2}'

A row is a prompt, or a chat with or without a system prompt. A row may have a reference: the first column of
`chat_dataset.REFERENCES` that it has, else the chat's last message if it is the assistant's. Other columns reach the
reward. A reward is a name of the registry, `module:function` or `file.py:function`; the function takes samples, or has
TRL's signature. Each part's mean is logged as `reward/NAME`.

Data: `data_path` or `dataset_name`; one of them is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from atropos_api.common import metric_names as names
from atropos_api.common.errors import AtroposError
from atropos_api.common.files import expand_home
from environments.rewards import RewardManager, combine
from environments.rewards.combine import CombinedReward, Normalization, RewardSpec
from environments.rewards.gold_check import GoldItem
from environments.sdk import (
    APIServerConfig,
    BaseEnvConfig,
    ManagedSession,
    ScoredDataGroup,
    SequenceNode,
    scored_group,
)
from environments.sdk.errors import GoldMissing, TokenizerUnavailable
from environments.tasks.chat_dataset import REFERENCES, PromptForm, Row, load_rows
from environments.tasks.data import Question, is_missing
from environments.tasks.question_env import QuestionEnv, QuestionEnvConfig, answer_of, mean
from environments.tasks.records import DataUnusable, Split

logger = logging.getLogger(__name__)

LONGEST_PATH = 255
"""A longer text names no file; the system even refuses to look for one."""
TEXT_SUFFIXES = (".txt", ".md", ".prompt", ".jinja")


class SystemPromptUnusable(AtroposError):
    """The system prompt names a file that does not exist or is not text."""


class DatasetEnvConfig(QuestionEnvConfig):
    """The configuration adds these settings to those of every environment with questions."""

    reward: list[RewardSpec] = Field(
        ["accuracy"],
        min_length=1,
        validate_default=True,
        description="Rewards whose weighted sum is the score: names, module:function, file.py:function, or JSON "
        "objects with name, weight, params and label.",
    )
    reward_normalization: Normalization = Field(
        "none",
        description="none: weight * score; weights: divided by the weights' sum; range: each score first to 0..1.",
    )
    prompt_column: str | None = Field(
        None, description="Column of the prompt; default: prompt, messages, question, ..."
    )
    system_prompt: str | None = Field(
        None, description="System prompt of chats that have none: the text, or a file with it; default: none."
    )
    prompt_form: PromptForm = Field(
        "auto",
        description="How a prompt that is text is put to the model: as a user's message, or as text to continue; auto: "
        "a message if the tokenizer has a chat template.",
    )
    max_new_tokens: int | None = Field(None, ge=1, description="Longest answer; default: what max_token_length leaves.")
    stop: list[str] = Field([], description="Texts that end an answer.")

    @field_validator("reward", mode="before")
    @classmethod
    def _accept_one(cls, value: Any) -> Any:
        """Accept one reward for a list of one."""
        return value if isinstance(value, list | tuple) else [value]

    def check_names(self) -> None:
        self.make_reward()
        read_system_prompt(self.system_prompt)

    def load(self, source: str | Path, split: Split) -> list[Question]:
        rows = load_rows(source, split, prompt_column=self.prompt_column)
        comparing = ", ".join(spec.name for spec in self.reward if spec.needs_reference)
        kept = [row for row in rows if row.answer] if comparing else rows
        if not kept:
            raise DataUnusable(
                f"{source}: no row has a reference, with which the reward {comparing} compares; the columns for it are "
                f"{', '.join(REFERENCES)}. Name another reward with --env.reward"
            )
        if len(kept) < len(rows):
            left_out = len(rows) - len(kept)
            logger.warning("%s: %d rows without a reference for %s are left out", source, left_out, comparing)
        return kept

    def make_reward(self) -> CombinedReward:
        """Return the reward; raise if a name is unknown or its parameters do not fit."""
        return combine(self.reward, normalization=self.reward_normalization)


class DatasetEnv(QuestionEnv):
    """Prompts of a data set, whose answers are scored by rewards that are named in the configuration."""

    name = "dataset"
    env_config_cls = DatasetEnvConfig
    config: DatasetEnvConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig]:
        return DatasetEnvConfig(group_size=8), APIServerConfig(server_type="vllm", num_requests_for_eval=256)

    async def setup(self) -> None:
        # A misspelt name ends the start before any data is read.
        self.rewards = RewardManager(self.config.make_reward())
        self.system_prompt = read_system_prompt(self.config.system_prompt)
        await super().setup()
        await self.rewards.reward.try_on(self._empty_sample())

    def _empty_sample(self) -> dict[str, Any]:
        """Return the sample of an empty completion for the first row; `validate` needs no tokenizer for it."""
        row = _row(self.held_out[0] if self.evaluation_only else self.training[0])
        try:
            shown: Any = self.messages(row) or row.question
        except TokenizerUnavailable:
            shown = list(row.messages) or row.question
        return {**_given(row), "prompt": shown, "completion": "", "completion_ids": [], "token_count": 0}

    async def collect(self, question: Question) -> ScoredDataGroup:
        async with self.server.managed_server() as session:
            samples = await self.sample(session, _row(question), count=self.config.group_size, temperature=1.0)
            return scored_group(session.nodes, await self.rewards.score(samples))

    def given_columns(self, item: Question) -> Mapping[str, Any]:
        return _given(_row(item))

    @property
    def longest_evaluated(self) -> int:
        return min(self.config.max_token_length, self.config.max_new_tokens or self.config.max_token_length)

    async def sample(
        self, session: ManagedSession, row: Row, *, count: int, temperature: float
    ) -> list[Mapping[str, Any]]:
        """Sample answers to a row, and return them as the rewards take them."""
        messages = self.messages(row)
        prompt = row.question
        room = self.longest_answer(self.chat_length(messages) if messages else len(self.tokenizer.encode(prompt)))
        options: dict[str, Any] = {
            "n": count,
            "max_tokens": min(room, self.config.max_new_tokens or room),
            "temperature": temperature,
            **({"stop": self.config.stop} if self.config.stop else {}),
        }
        if messages:
            completion = await session.chat_completion(messages=messages, **options)
            texts = [choice.message.content or "" for choice in completion.choices]
        else:
            await session.completion(prompt=prompt, **options)
            texts = [answer_of(node, prompt, stop="") for node in session.nodes]
        shown = messages or prompt
        return [_sample(row, shown, text, node) for text, node in zip(texts, session.nodes, strict=True)]

    def messages(self, row: Row) -> list[Mapping[str, Any]]:
        """Return the chat that a row becomes; none if the model continues its prompt as text."""
        return row.chat(
            form=self.config.prompt_form,
            has_template=bool(self.tokenizer.chat_template),
            system_prompt=self.system_prompt,
        )

    async def attempt(self, question: Question) -> dict[str, Any]:
        row = _row(question)
        async with self.server.managed_server() as session:
            samples = await self.sample(session, row, count=1, temperature=self.config.eval_temperature)
            scored = await self.rewards.reward.score(samples)
            return {
                "question": row.question,
                "gold": row.answer,
                "text": samples[0]["completion"],
                "reward": scored.totals[0],
                "parts": {name: scores[0] for name, scores in scored.components.items()},
                "finish_reason": session.nodes[0].finish_reason,
                "tokens": session.nodes[0].sampled_count,
            }

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        parts = samples[0]["parts"] if samples else {}
        return {
            names.EVAL_REWARD: mean(sample["reward"] for sample in samples),
            **{
                names.EVAL_REWARD_PART.format(name=name): mean(sample["parts"][name] for sample in samples)
                for name in parts
            },
            names.EVAL_LENGTH_MEAN: mean(sample["tokens"] for sample in samples),
        }

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        await super().wandb_log({**(wandb_metrics or {}), **self.rewards.metrics()})

    async def score_answer(self, item: Question, text: str) -> float:
        row = _row(item)
        tokens = self.tokenizer.encode(text)
        shown = self.messages(row) or row.question
        sample = {**_given(row), "prompt": shown, "completion": text, "completion_ids": tokens}
        return (await self.rewards.reward([sample | {"token_count": len(tokens)}]))[0]

    def write_answer(self, answer: str) -> str:
        return answer

    def gold_items(self) -> Iterable[GoldItem]:
        raise GoldMissing(
            "the data says nothing about which answers its rewards have to find right or wrong; each reward was called "
            "once, with an empty completion, and no mistake was found"
        )


def _sample(row: Row, prompt: Any, text: str, node: SequenceNode) -> Mapping[str, Any]:
    sampled = list(node.tokens[-node.sampled_count :]) if node.sampled_count else []
    own = {"prompt": prompt, "completion": text, "completion_ids": sampled, "token_count": node.sampled_count}
    return {**_given(row), **own}


def _given(row: Row) -> dict[str, Any]:
    """Return the data's part of a sample: the columns, and the reference at `answer` if that column has no value."""
    if not row.answer or not is_missing(row.columns.get("answer")):
        return dict(row.columns)
    return {"answer": row.answer, **{name: value for name, value in row.columns.items() if name != "answer"}}


def _row(question: Question) -> Row:
    assert isinstance(question, Row)
    return question


def read_system_prompt(value: str | None) -> str | None:
    """Return the text, or that of the file it names; raise `SystemPromptUnusable` for a path without a text file."""
    if not value or len(value) > LONGEST_PATH or "\n" in value:
        return value
    path = expand_home(value)
    if not path.is_file():
        if value.startswith(("/", "./", "../", "~")) or (path.suffix in TEXT_SUFFIXES and " " not in value):
            raise SystemPromptUnusable(
                f"system prompt {value}: there is no such file; give the path of a text file, or the text itself"
            )
        return value
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SystemPromptUnusable(f"system prompt {value}: cannot be read ({error}); give a UTF-8 file") from error
    if not text:
        raise SystemPromptUnusable(f"system prompt {value}: the file is empty; leave the option out for no prompt")
    return text


if __name__ == "__main__":
    DatasetEnv.cli()
