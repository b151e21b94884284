"""In this environment another model scores the answers (RLAIF): it compares them in pairs or gives each a mark.

    python environments/judge_server.py serve --env.data_path requests.jsonl --env.judge_base_url http://localhost:9002/v1

The judge is any server of the chat completions API; without `judge_base_url` the model judges itself. The judge's API
key, where it needs one, is read from $ATROPOS_JUDGE_API_KEY. Evaluations compare each answer with the reference
answer of the data.

Data: `data_path` or `dataset_name`; one of them is needed, and its answers are the references.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from atropos_api.common import metric_names as names
from atropos_api.common.concurrency import run_all
from environments.rewards.gold_check import GoldItem
from environments.rewards.pairwise import PairwiseReward
from environments.sdk import APIServerConfig, BaseEnvConfig, EnvironmentsError, ScoredDataGroup, scored_group
from environments.sdk.config import Address, ServerType
from environments.sdk.errors import GoldMissing
from environments.sdk.server_manager import ServerManager
from environments.tasks.data import Question
from environments.tasks.question_env import QuestionEnv, QuestionEnvConfig, mean

KEY_VARIABLE = "ATROPOS_JUDGE_API_KEY"
COMPARE = """A request was answered twice. Decide which answer serves it better, going by this: {rubric}
Where they stand and how long they are must not count.

Request:
{request}

Answer A:
{first}

Answer B:
{second}

Give your reasons in a few sentences. End with [[A]], [[B]] or, if neither is better, [[tie]]."""
MARK = """Judge how well an answer serves a request, going by this: {rubric}

Request:
{request}

Answer:
{first}

Give your reasons in a few sentences. End with a mark from 1 (useless) to 10 (could not be better), like [[5]]."""
SHARES = {"a": 1.0, "b": 0.0, "tie": 0.5}
_VERDICT = re.compile(r"\[\[\s*(A|B|tie|\d+)\s*\]\]", re.IGNORECASE)


class VerdictUnreadable(EnvironmentsError):
    """The judge gave no mark; the rollout is tried again and is not given a low score."""

    ends_server = False


class JudgeEnvConfig(QuestionEnvConfig):
    """The configuration adds these settings to those of every environment with questions."""

    judge_method: Literal["pairwise", "marks"] = Field(
        "pairwise", description="Compare all pairs of a group, or give each answer a mark."
    )
    judge_base_url: Address | None = Field(None, description="Server of the judge; default: the model judges itself.")
    judge_model_name: str = Field("default", description="The judge's name there.")
    judge_server_type: ServerType = Field("openai", description="Kind of server at judge_base_url.")
    judge_max_tokens: int = Field(512, ge=1, description="Longest verdict in tokens, its reasons included.")
    judge_both_orders: bool = Field(
        True, description="Judge each pair in both orders, since judges prefer one position."
    )
    rubric: str = Field(
        "It is correct, complete, clear, and no longer than it needs to be.",
        description="Criteria by which answers are judged.",
    )
    max_new_tokens: int = Field(512, ge=1, description="Longest answer.")


class JudgeEnv(QuestionEnv):
    """Requests whose answers another model judges."""

    name = "judge"
    env_config_cls = JudgeEnvConfig
    config: JudgeEnvConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig]:
        return JudgeEnvConfig(group_size=4), APIServerConfig(server_type="vllm", num_requests_for_eval=256)

    async def setup(self) -> None:
        await super().setup()
        self.judge = self._judge_server()
        self.compare = PairwiseReward(self._prefers, both_orders=self.config.judge_both_orders)

    async def aclose(self) -> None:
        if getattr(self, "judge", self.server) is not self.server:
            await self.judge.aclose()
        await super().aclose()

    async def collect(self, question: Question) -> ScoredDataGroup:
        async with self.server.managed_server() as session:
            messages = self.chat(question)
            room = self.longest_answer(self.chat_length(messages))
            completion = await session.chat_completion(
                messages=messages,
                n=self.config.group_size,
                max_tokens=min(room, self.config.max_new_tokens),
                temperature=1.0,
            )
            answers = [choice.message.content or "" for choice in completion.choices]
            return scored_group(session.nodes, await self.score(question, answers))

    async def score(self, question: Question, answers: Sequence[str]) -> list[float]:
        """Return the judge's score of each answer, from 0 to 1: the share of comparisons won, or the mark."""
        if self.config.judge_method == "pairwise":
            return await self.compare([{"prompt": question.question, "completion": answer} for answer in answers])
        return await run_all([partial(self.mark, question, answer) for answer in answers])

    async def mark(self, question: Question, answer: str) -> float:
        verdict = await self._ask(MARK, question.question, answer)
        if verdict is None or not verdict.isdigit() or not 1 <= int(verdict) <= 10:
            raise VerdictUnreadable(
                f"the judge gave no mark from 1 to 10 but {verdict!r}; is it a chat model, and judge_max_tokens enough?"
            )
        return (int(verdict) - 1) / 9

    async def score_answer(self, item: Question, text: str) -> float:
        """Judge one answer: by its mark, or in comparison with the reference answer of the data."""
        if self.config.judge_method == "marks":
            return await self.mark(item, text)
        return (
            await self.compare([{"completion": text, **_about(item)}, {"completion": item.answer, **_about(item)}])
        )[0]

    def write_answer(self, answer: str) -> str:
        return answer

    def gold_items(self) -> Iterable[GoldItem]:
        raise GoldMissing("its rewards are another model's opinion, so no gold answer can check them without a model")

    @property
    def longest_evaluated(self) -> int:
        return self.config.max_new_tokens

    async def attempt(self, question: Question) -> dict[str, Any]:
        async with self.server.managed_server() as session:
            completion = await session.chat_completion(
                messages=self.chat(question),
                max_tokens=self.config.max_new_tokens,
                temperature=self.config.eval_temperature,
            )
            text = completion.choices[0].message.content or ""
            return {
                "question": question.question,
                "gold": question.answer,
                "text": text,
                "judged": await self.score_answer(question, text),
                "tokens": session.nodes[0].sampled_count,
            }

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        return {
            names.EVAL_JUDGED: mean(sample["judged"] for sample in samples),
            names.EVAL_LENGTH_MEAN: mean(sample["tokens"] for sample in samples),
        }

    def chat(self, question: Question) -> list[dict[str, str]]:
        return [{"role": "user", "content": question.question}]

    async def _prefers(self, left: Mapping[str, Any], right: Mapping[str, Any]) -> float:
        """Return the share, 0 to 1, with which `left` is preferred; a verdict that cannot be read is a tie."""
        verdict = await self._ask(COMPARE, left["prompt"], left["completion"], right["completion"])
        return SHARES.get((verdict or "tie").lower(), 0.5)

    async def _ask(self, form: str, request: str, first: str, second: str = "") -> str | None:
        """Ask the judge and return the last verdict in its answer; None when there is none.

        An answer that was cut off has none: what stands in its reasons may be quoted from the question.
        """
        text = form.format(rubric=self.config.rubric, request=request, first=first, second=second)
        completion = await self.judge.chat_completion(
            messages=[{"role": "user", "content": text}], max_tokens=self.config.judge_max_tokens, temperature=0.0
        )
        choice = completion.choices[0]
        found = _VERDICT.findall(choice.message.content or "") if choice.finish_reason != "length" else []
        return found[-1] if found else None

    def _judge_server(self) -> ServerManager:
        config = self.config
        if config.judge_base_url is None:
            return self.server
        server = APIServerConfig(
            base_url=config.judge_base_url,
            model_name=config.judge_model_name,
            server_type=config.judge_server_type,
            api_key=os.environ.get(KEY_VARIABLE, ""),
        )
        return ServerManager([server], load_tokenizer=lambda: self.tokenizer, wait_timeout_seconds=config.wait_timeout)


def _about(item: Question) -> dict[str, str]:
    return {"prompt": item.question}


if __name__ == "__main__":
    JudgeEnv.cli()
