r"""The environment trains on any data set, with rewards named on the command line: no class is written.

    python environments/dataset_server.py serve --env.data_path prompts.jsonl --env.reward rewards.py:polite
    python environments/dataset_server.py serve --env.dataset_name trl-lib/tldr --env.reward length_target
    python environments/dataset_server.py serve --env.data_path sums.jsonl \
        --env.reward gsm8k '{"name": "repetition", "weight": 0.2}'

A row is a prompt, or a chat with or without a system prompt, whose last message may be the assistant's: a reference, as
is the first of the columns in `chat_dataset.REFERENCES`; a row needs none. Other columns reach the reward. A reward is
a name of the registry, `module:function` or `file.py:function`; the function takes samples, or has TRL's signature.
Each part's mean is logged as `reward/NAME`.

Data: `data_path` or `dataset_name`; one of them is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from environments.rewards import RewardManager, combine
from environments.rewards.combine import CombinedReward, Normalization
from environments.rewards.gold_check import GoldItem
from environments.sdk import (
    APIServerConfig,
    BaseEnvConfig,
    ManagedSession,
    ScoredDataGroup,
    SequenceNode,
    scored_group,
)
from environments.sdk.errors import GoldMissing
from environments.tasks.chat_dataset import PromptForm, Row, load_rows
from environments.tasks.data import Question, Split
from environments.tasks.question_env import QuestionEnv, QuestionEnvConfig, answer_of, mean


class DatasetEnvConfig(QuestionEnvConfig):
    """The configuration adds these settings to those of every environment with questions."""

    reward: list[str | dict[str, Any]] = Field(
        ["accuracy"],
        min_length=1,
        description="rewards whose weighted sum is the score: names, module:function, file.py:function, or JSON "
        "objects with name, weight, params and label",
    )
    reward_normalization: Normalization = Field(
        "none",
        description="none: weight * score; weights: divided by the weights' sum; range: each score first to 0..1",
    )
    prompt_column: str | None = Field(
        None, description="column of the prompt; default: prompt, messages, question, ..."
    )
    system_prompt: str | None = Field(
        None, description="system prompt of chats that have none: the text, or a file with it; default: none"
    )
    prompt_form: PromptForm = Field(
        "auto",
        description="how a prompt that is text is put to the model: as a user's message, or as text to continue; auto: "
        "a message if the tokenizer has a chat template",
    )
    max_new_tokens: int | None = Field(None, ge=1, description="longest answer; default: what max_token_length leaves")
    stop: list[str] = Field([], description="texts that end an answer")

    @field_validator("reward", mode="before")
    @classmethod
    def _parse_reward(cls, value: Any) -> Any:
        """Accept one reward for a list of one, and JSON objects as text, as a command line gives them."""
        given = value if isinstance(value, list | tuple) else [value]
        return [json.loads(one) if isinstance(one, str) and one.lstrip().startswith("{") else one for one in given]

    def load(self, source: str | Path, split: Split) -> list[Question]:
        return load_rows(source, split, prompt_column=self.prompt_column)

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
        self.rewards = RewardManager(
            self.config.make_reward()
        )  # a misspelt name ends the start before any data is read
        self.system_prompt = _text_or_file(self.config.system_prompt)
        await super().setup()

    async def collect(self, question: Question) -> ScoredDataGroup:
        async with self.server.managed_server() as session:
            samples = await self.sample(session, _row(question), count=self.config.group_size, temperature=1.0)
            return scored_group(session.nodes, await self.rewards.score(samples))

    async def sample(
        self, session: ManagedSession, row: Row, *, count: int, temperature: float
    ) -> list[Mapping[str, Any]]:
        """Sample answers to a row, and return them as the rewards take them."""
        messages = self.messages(row)
        prompt = self.template(messages) if messages else row.question
        room = self.longest_answer(len(self.tokenizer.encode(prompt)))
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

    def template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        text: str = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return text

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
            "eval/reward": mean(sample["reward"] for sample in samples),
            **{f"eval/reward/{name}": mean(sample["parts"][name] for sample in samples) for name in parts},
            "eval/length_mean": mean(sample["tokens"] for sample in samples),
        }

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        await super().wandb_log({**(wandb_metrics or {}), **self.rewards.metrics()})

    def write_answer(self, answer: str) -> str:
        return answer

    def gold_items(self) -> Iterable[GoldItem]:
        raise GoldMissing("the data says nothing about which answers its rewards have to find right or wrong")


def _sample(row: Row, prompt: Any, text: str, node: SequenceNode) -> Mapping[str, Any]:
    sampled = list(node.tokens[-node.sampled_count :]) if node.sampled_count else []
    reference = {"answer": row.answer} if row.answer else {}
    own = {"prompt": prompt, "completion": text, "completion_ids": sampled, "token_count": node.sampled_count}
    return {**reference, **row.columns, **own}


def _row(question: Question) -> Row:
    assert isinstance(question, Row)
    return question


def _text_or_file(value: str | None) -> str | None:
    """Return the text, or that of the file it names."""
    try:
        return value and Path(value).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):  # it names no file: a long text is even refused as a name
        return value


if __name__ == "__main__":
    DatasetEnv.cli()
