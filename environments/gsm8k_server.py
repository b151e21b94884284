r"""The environment asks grade-school word problems (GSM8K): the model reasons, then gives a number in `\boxed{}`.

    python environments/gsm8k_server.py serve --openai.base_url http://localhost:9001/v1 --openai.server_type vllm
    python environments/gsm8k_server.py evaluate --env.val_data_path test.jsonl --env.prompt_template r1_zero

A right answer earns 1 and a wrong one -1. Where all answers of a group are right, the shorter ones are worth more. With
a prompt template the model continues plain text instead of a chat and is graded as R1-zero: 1 for a right answer inside
`<answer>` after `</think>`, else 0.

Data: `openai/gsm8k:main` from the hub, 7,473 questions to train on and 1,319 to evaluate on, or files in `data_path`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from environments.rewards.answers import after_thinking, last_boxed, without_percent
from environments.rewards.math import AccuracyReward, R1ZeroReward, R1ZeroScore
from environments.rewards.text import LinearLengthReward
from environments.sdk import APIServerConfig, BaseEnvConfig, ManagedSession, ScoredDataGroup, scored_group
from environments.tasks.data import Question
from environments.tasks.question_env import PromptTemplate, QuestionEnv, QuestionEnvConfig, answer_of, load_template

STOP = "</answer>"
SYSTEM_PROMPT = (
    "You solve word problems. Reason inside <think> </think> first: take the problem apart, calculate step by step and "
    "check the result. You have at most {max_tokens} tokens for everything. After the reasoning give the final number "
    "alone, as \\boxed{{the number}}."
)


class GSM8kEnvConfig(QuestionEnvConfig):
    """The configuration adds these settings to those of every environment with questions."""

    prompt_template: str | None = Field(
        None, description="File with {question} in it, or r1_zero; default: a chat with a system prompt."
    )
    format_score: float = Field(0.0, description="With a template: score of a wrong answer in the right form.")

    def check_names(self) -> None:
        if self.prompt_template:
            load_template(self.prompt_template)


class GSM8kEnv(QuestionEnv):
    """Grade-school word problems, each of which has one number as its answer."""

    name = "gsm8k"
    env_config_cls = GSM8kEnvConfig
    config: GSM8kEnvConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig]:
        config = GSM8kEnvConfig(
            dataset_name="openai/gsm8k:main",
            group_size=8,
            max_token_length=2048,
            steps_per_eval=100,
            eval_temperature=0.6,
        )
        return config, APIServerConfig(server_type="vllm", num_requests_for_eval=256)

    async def setup(self) -> None:
        await super().setup()
        template = self.config.prompt_template
        self.template: PromptTemplate | None = load_template(template) if template else None
        self.chat_grader = AccuracyReward(correct=1.0, wrong=-1.0)
        self.template_grader = R1ZeroReward(self.config.format_score, verifier=self.chat_grader.verifier)

    async def collect(self, question: Question) -> ScoredDataGroup:
        async with self.server.managed_server() as session:
            texts = await self._answers(session, question, count=self.config.group_size, temperature=1.0)
            scores = [graded.score for graded in await self.grade(texts, question.answer)]
            nodes = session.nodes
            if self.template is None and min(scores) == 1.0:
                longest = LinearLengthReward(self.config.max_token_length)
                scores = longest([{"completion": "", "token_count": len(node.tokens)} for node in nodes])
            return scored_group(nodes, scores)

    async def grade(self, texts: Sequence[str], gold: str) -> list[R1ZeroScore]:
        """Return the format reward, the answer reward and the score of each answer."""
        texts = [without_percent(text, gold) for text in texts]
        if self.template is not None:
            return await self.template_grader.grade([{"completion": text, "answer": gold} for text in texts])
        answers = [last_boxed(after_thinking(text)) for text in texts]
        judged = await self.chat_grader.judge_answers([gold] * len(texts), answers)
        return [
            R1ZeroScore(float(answer is not None), float(verdict.correct), 1.0 if verdict.correct else -1.0)
            for answer, verdict in zip(answers, judged, strict=True)
        ]

    async def score_answer(self, item: Question, text: str) -> float:
        return (await self.grade([text], item.answer))[0].score

    def write_answer(self, answer: str) -> str:
        return f"</think> <answer>{answer}</answer>" if self.template else f"\\boxed{{{answer}}}"

    async def attempt(self, question: Question) -> dict[str, Any]:
        async with self.server.managed_server() as session:
            (text,) = await self._answers(session, question, count=1, temperature=self.config.eval_temperature)
            (graded,) = await self.grade([text], question.answer)
            return {
                "question": question.question,
                "gold": question.answer,
                "text": text,
                "score": graded.score,
                "format_reward": graded.format_reward,
                "answer_reward": graded.answer_reward,
                "finish_reason": session.nodes[0].finish_reason,
                "tokens": session.nodes[0].sampled_count,
            }

    async def _answers(
        self, session: ManagedSession, question: Question, *, count: int, temperature: float
    ) -> list[str]:
        """Sample `count` answers of the model to the question."""
        if self.template is not None:
            prompt = self.template.fill(question.question)
            await session.completion(
                prompt=prompt,
                n=count,
                stop=[STOP],
                max_tokens=self.longest_answer(len(self.tokenizer.encode(prompt))),
                temperature=temperature,
            )
            return [answer_of(node, prompt, stop=STOP) for node in session.nodes]
        messages = self.chat(question)
        room = self.longest_answer(self.chat_length(messages))
        completion = await session.chat_completion(messages=messages, n=count, max_tokens=room, temperature=temperature)
        return [choice.message.content or "" for choice in completion.choices]

    def chat(self, question: Question) -> list[dict[str, str]]:
        system = SYSTEM_PROMPT.format(max_tokens=self.config.max_token_length)
        return [{"role": "system", "content": system}, {"role": "user", "content": question.question}]


if __name__ == "__main__":
    GSM8kEnv.cli()
