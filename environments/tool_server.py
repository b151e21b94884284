r"""The environment offers a Python tool for word problems: the model may run code before it answers in `\boxed{}`.

    python environments/tool_server.py serve --env.data_path problems.jsonl --openai.base_url http://localhost:9001/v1

Each rollout is a chat of at most `max_turns` turns and is trained on as one sequence: all that the model wrote, but
not what the tool printed. A right final answer earns 1, any other -1. The code runs in a sandbox
(`docs/explanation/sandbox.md`); where code cannot be isolated, the environment refuses to start.

Data: `openai/gsm8k:main` from the hub, or files in `data_path`.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from pydantic import Field

from atropos_api.common.concurrency import run_all
from environments.rewards.answers import after_thinking, last_boxed, without_percent
from environments.rewards.math import AccuracyReward
from environments.sandbox.python_tool import PythonTool
from environments.sdk import (
    APIServerConfig,
    BaseEnvConfig,
    ManagedSession,
    ScoredDataGroup,
    ScoredDataItem,
    scored_item,
)
from environments.sdk.groups import group_items
from environments.sdk.progress import note_event
from environments.sdk.tools import NO_JSON
from environments.tasks.data import Question
from environments.tasks.question_env import QuestionEnv, QuestionEnvConfig, require_room

TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code. What it prints comes back, and the value of a last expression.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
SYSTEM_PROMPT = (
    "You solve problems that need calculating. You may call the tool `python` as often as you like and will be given "
    "what your code printed. When you are sure, give the final answer alone, as \\boxed{the answer}."
)
CALL_FORM = (
    " To call it, write one line of JSON between tags:\n"
    '<tool_call>\n{"name": "python", "arguments": {"code": "print(2 + 2)"}}\n</tool_call>'
)
TOKENS_AROUND_MESSAGE = 32


class ToolEnvConfig(QuestionEnvConfig):
    """The configuration adds these settings to those of every environment with questions."""

    max_turns: int = Field(4, ge=1, description="Model turns in one chat; code in the last turn is not run.")
    max_new_tokens: int = Field(512, ge=1, description="Longest single answer.")
    tool_seconds: float = Field(10, gt=0, description="Time that one run of code may take.")
    tool_memory_mb: int = Field(
        512, ge=64, description="Memory that its processes and files may take together, in MiB."
    )
    tool_processes: int = Field(8, ge=1, description="Runs of code at once.")
    require_isolation: bool = Field(
        True,
        description="Refuse to start where code cannot be isolated; if false, a model's code may there read and "
        "change everything that this user may, send it anywhere, and end this user's programs.",
    )


class ToolEnv(QuestionEnv):
    """Problems that the model solves over several turns with a sandboxed Python."""

    name = "python_tool"
    env_config_cls = ToolEnvConfig
    config: ToolEnvConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig]:
        config = ToolEnvConfig(dataset_name="openai/gsm8k:main", group_size=8, max_token_length=2048)
        return config, APIServerConfig(server_type="vllm", num_requests_for_eval=256)

    async def setup(self) -> None:
        await super().setup()
        self.python.probe()
        self.grader = AccuracyReward(correct=1.0, wrong=-1.0)

    async def aclose(self) -> None:
        self.python.close()
        await super().aclose()

    @cached_property
    def python(self) -> PythonTool:
        config = self.config
        return PythonTool(
            wall_seconds=config.tool_seconds,
            cpu_seconds=max(1, round(config.tool_seconds)),
            memory_bytes=config.tool_memory_mb << 20,
            at_once=config.tool_processes,
            require_isolation=config.require_isolation,
        )

    @cached_property
    def system_prompt(self) -> str:
        """The instructions; they explain the form of a tool call where the model's chat template does not."""
        return SYSTEM_PROMPT if self._template_shows_tools() else SYSTEM_PROMPT + CALL_FORM

    async def collect(self, question: Question) -> ScoredDataGroup:
        async def one() -> ScoredDataItem:
            async with self.server.managed_server() as session:
                messages = await self.converse(session, question, temperature=1.0)
                score = await self.score_answer(question, answer_in(messages))
                kept = messages if self.config.include_messages else None
                return scored_item(session.nodes[-1], score, messages=kept)

        return group_items(await run_all([one] * self.config.group_size))

    async def converse(self, session: ManagedSession, question: Question, *, temperature: float) -> list[Any]:
        """Run the chat and return its messages, up to an answer without a call or the last one within the limits."""
        messages: list[Any] = [
            {"role": "system", "content": self.system_prompt},
            {"role": "user", "content": question.question},
        ]
        used = self.chat_length(messages, tools=[TOOL])
        for turn in range(self.config.max_turns):
            room = self.room_after(used, first=turn == 0)
            if room < 1:
                break
            completion = await session.chat_completion(
                messages=messages, tools=[TOOL], max_tokens=room, temperature=temperature
            )
            message = completion.choices[0].message
            messages.append(message.model_dump())
            if not message.tool_calls or turn == self.config.max_turns - 1:
                break
            results = [await self.call(made) for made in message.tool_calls]
            messages += results
            used = len(session.nodes[-1].tokens) + sum(self._tokens_of(result) for result in results)
        return messages

    async def call(self, made: Any) -> dict[str, Any]:
        """Run one tool call and return its output as a message; for an invalid call the message says why."""
        try:
            code = json.loads(made.function.arguments)["code"] if made.function.name == "python" else None
        except (KeyError, TypeError, *NO_JSON):
            code = None
        if isinstance(code, str):
            note_event("tool python: running")
            text = (await self.python.run(code)).as_text()
            note_event("tool python: done")
        else:
            text = 'Error: the only tool is python, its arguments are {"code": "..."}'
        return {"role": "tool", "tool_call_id": made.id, "name": made.function.name, "content": text}

    async def score_answer(self, item: Question, text: str) -> float:
        answer = last_boxed(after_thinking(without_percent(text, item.answer)))
        (verdict,) = await self.grader.judge_answers([item.answer], [answer])
        return 1.0 if verdict.correct else -1.0

    def write_answer(self, answer: str) -> str:
        return f"\\boxed{{{answer}}}"

    async def attempt(self, question: Question) -> dict[str, Any]:
        async with self.server.managed_server() as session:
            messages = await self.converse(session, question, temperature=self.config.eval_temperature)
            text = answer_in(messages)
            return {
                "question": question.question,
                "gold": question.answer,
                "messages": messages,
                "format_reward": float(last_boxed(after_thinking(text)) is not None),
                "answer_reward": float(await self.score_answer(question, text) > 0),
                "tool_calls": sum(message["role"] == "tool" for message in messages),
                "tokens": session.nodes[-1].sampled_count,
            }

    @property
    def longest_evaluated(self) -> int:
        return min(self.config.max_new_tokens, self.config.max_token_length)

    def room_after(self, used: int, *, first: bool) -> int:
        """Return how many tokens the next answer may have, below 1 where the chat is full.

        Raises `QuestionTooLong` for a training question whose prompt leaves no room for a first answer.
        """
        left = min(self.config.max_token_length, self.longest_sequence) - used
        return min(self.config.max_new_tokens, require_room(left, used) if first else left)

    def _tokens_of(self, result: dict[str, Any]) -> int:
        """Return an upper estimate of the tokens that a tool's message adds to the chat."""
        return len(self.tokenizer.encode(result["content"], add_special_tokens=False)) + TOKENS_AROUND_MESSAGE

    def _render(self, messages: list[Any]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False))

    def _template_shows_tools(self) -> bool:
        asked = [{"role": "user", "content": "?"}]
        return self._render(asked) != str(self.tokenizer.apply_chat_template(asked, tokenize=False))


def answer_in(messages: list[Any]) -> str:
    """Return the model's final answer; an answer that only calls a tool counts as empty."""
    last = messages[-1]
    return last["content"] or "" if last["role"] == "assistant" else ""


if __name__ == "__main__":
    ToolEnv.cli()
