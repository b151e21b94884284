"""The module has the base class of environments with a list of questions, and their prompt templates.

`QuestionEnv` loads and draws the questions, continues their order after a resume, and evaluates on all held-out
questions. A subclass defines how a question is put to the model and how an answer is scored; see `gsm8k_server` for a
short one. A prompt template is a text file in which `{question}` is replaced by the question.
"""

from __future__ import annotations

import logging
import sys
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from atropos_api.common import metric_names as names
from atropos_api.common.concurrency import run_all, run_blocking
from atropos_api.common.errors import AtroposError
from atropos_api.common.files import expand_home
from environments.rewards.gold_check import GoldItem
from environments.rewards.math import reference
from environments.rewards.protocol import GoldUnparsable
from environments.sdk import BaseEnv, BaseEnvConfig, ItemDropped, ScoredDataGroup, SequenceNode
from environments.sdk.session.tokens_and_masks import current_split
from environments.sdk.tools import with_parsed_arguments
from environments.tasks.data import ROW, DataFields, Question, ShuffledEpochs, shown_row
from environments.tasks.records import ENCODING

SHIPPED = Path(__file__).resolve().parent.parent / "prompts"
PLACE = "{question}"


class PromptTemplateUnusable(AtroposError):
    """The template file does not exist or has no `{question}`."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A text with one placeholder, `{question}`. Other braces are kept, so LaTeX needs no escaping."""

    text: str

    def fill(self, question: str) -> str:
        return self.text.replace(PLACE, question)


def load_template(name: str) -> PromptTemplate:
    """Load a template by its path, or one shipped here by its name (`r1_zero` or `r1_zero.prompt`)."""
    shipped = {path.stem: path for path in SHIPPED.glob("*.prompt")}
    path = expand_home(name)
    if not path.is_file():
        path = shipped.get(name.removesuffix(".prompt"), path)
    try:
        text = path.read_text(encoding=ENCODING)
    except (OSError, UnicodeDecodeError) as error:
        raise PromptTemplateUnusable(
            f"prompt template {name}: cannot be read ({error}); give a file, or one of {', '.join(sorted(shipped))}"
        ) from error
    if PLACE not in text:
        raise PromptTemplateUnusable(f"prompt template {name}: it has no {PLACE}; put it where the question belongs")
    return PromptTemplate(text)


logger = logging.getLogger(__name__)


class QuestionTooLong(ItemDropped):
    """The prompt leaves no room for an answer within the longest sequence."""


class QuestionEnvConfig(DataFields, BaseEnvConfig):
    """The settings of an environment with questions: their source and their evaluation."""

    eval_problems: int = Field(0, ge=0, description="Questions in an evaluation; 0: all there are.")
    eval_temperature: float = Field(0.0, ge=0, description="Temperature of evaluations; 0: greedy.")


class QuestionEnv(BaseEnv):
    """The environment draws each question once per epoch, in an order that a resumed run continues."""

    env_config_cls = QuestionEnvConfig
    config: QuestionEnvConfig

    async def setup(self) -> None:
        self.items_taken = 0
        self.held_out: Sequence[Question] = ()
        if not self.evaluation_only:
            load = partial(self.config.training_questions, hold_out=self._will_evaluate())
            questions = await run_blocking(load, about="the training questions")
            self.training = ShuffledEpochs(questions, self.config.seed)
        if self.evaluation_only or self._will_evaluate():
            self.held_out = await run_blocking(self.load_held_out, about="the evaluation questions")

    def load_held_out(self) -> Sequence[Question]:
        questions = self.config.evaluation_questions(trains=not self.evaluation_only)
        return questions[: self.config.eval_problems] if self.config.eval_problems else questions

    @abstractmethod
    def write_answer(self, answer: str) -> str:
        """Return a completion that gives this answer in the required form."""

    def gold_items(self) -> Iterable[GoldItem]:
        for item in self.held_out or self.load_held_out():
            gold = reference(item.answer)
            wrong = (self.write_answer(f"({gold}) + 1"), "")
            yield GoldItem(item, self.write_answer(gold), wrong, name=item.question[:80])

    async def collect_trajectories(self, item: Question) -> tuple[ScoredDataGroup | None, list[Any]]:
        try:
            group = await self.collect(item)
        except GoldUnparsable as error:
            raise ItemDropped(str(error)) from error
        group["group_overrides"] = {**(group.get("group_overrides") or {}), ROW: shown_row(self.given_columns(item))}
        return group, []

    def given_columns(self, item: Question) -> Mapping[str, Any]:
        """Return what the data says of an item besides its question, which the live page shows with its group."""
        return {"answer": item.answer}

    @abstractmethod
    async def collect(self, question: Question) -> ScoredDataGroup:
        """Sample `group_size` answers to a question and score them."""

    async def item_at(self, number: int) -> Question:
        return self.training[number]

    async def get_next_item(self) -> Question:
        self.items_taken += 1
        return self.training[self.items_taken - 1]

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {"items_taken": self.items_taken, **(data or {})})

    @abstractmethod
    async def attempt(self, question: Question) -> dict[str, Any]:
        """Return one evaluated answer as a sample: format_reward, answer_reward, tokens, and more to log."""

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        """Return the metrics of all samples. `percent_correct` is a share from 0 to 1 too: the name is Atropos'."""
        accuracy = mean(sample["answer_reward"] for sample in samples)
        return {
            names.EVAL_ACCURACY: accuracy,
            names.EVAL_PERCENT_CORRECT: accuracy,
            names.EVAL_FORMAT_REWARD: mean(sample["format_reward"] for sample in samples),
            names.EVAL_ANSWER_REWARD: accuracy,
            names.EVAL_LENGTH_MEAN: mean(sample["tokens"] for sample in samples),
        }

    async def evaluate(self, *_: Any, **__: Any) -> None:
        started = time.time()
        samples = await self.attempt_all(self.held_out)
        if not samples:  # a mean over nothing would say that the model can do nothing
            logger.warning("none of the evaluation's %d questions could be judged: no result", len(self.held_out))
            return
        await self.evaluate_log(
            self.evaluation_metrics(samples),
            start_time=started,
            generation_parameters={
                "temperature": self.config.eval_temperature,
                "max_new_tokens": self.longest_evaluated,
            },
            samples=samples,
        )

    async def attempt_all(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """Attempt each question once, as many at once as the inference servers accept; unjudgeable questions are left
        out.
        """
        attempts = await run_all([partial(self._attempt, question) for question in questions])
        return [sample for sample in attempts if sample is not None]

    async def _attempt(self, question: Question) -> dict[str, Any] | None:
        """Return a sample; None where the reference is not readable mathematics, which says nothing about the model."""
        try:
            return await self.attempt(question)
        except GoldUnparsable as error:
            logger.warning("a question is left out of the evaluation: %s", error)
            return None

    @property
    def longest_evaluated(self) -> int:
        """The most tokens that an answer of an evaluation may have, as its results record it."""
        return self.config.max_token_length

    def longest_answer(self, prompt_tokens: int) -> int:
        """Return the token limit of an answer, so that the trainer accepts the whole sequence."""
        return require_room(min(self.config.max_token_length, self.longest_sequence - prompt_tokens), prompt_tokens)

    def chat_length(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> int:
        """Return the tokens of a chat's prompt; its template already writes the tokens that begin a text."""
        render = partial(self.tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
        return len(render(with_parsed_arguments([dict(message) for message in messages]), tools=tools))

    @property
    def longest_sequence(self) -> int:
        """The length of the longest sequence that the trainer accepts, in tokens; an evaluation has no such limit."""
        limited = self.max_token_len > 0 and current_split() == "train"
        return self.max_token_len - 1 if limited else sys.maxsize

    def _will_evaluate(self) -> bool:
        return not self.process_mode and self.config.will_evaluate


def require_room(longest: int, prompt_tokens: int) -> int:
    """Return `longest`; raise `QuestionTooLong` in training if it is below 1, since no token is left for an answer."""
    if longest < 1 and current_split() == "train":
        raise QuestionTooLong(f"its prompt of {prompt_tokens} tokens leaves no room for an answer")
    return max(1, longest)


def answer_of(node: SequenceNode, prompt: str, *, stop: str) -> str:
    """Return the text sampled after `prompt`, without an end token; `stop` is put back where the server cut it off."""
    text = node.texts[0][len(prompt) :]
    cut = node.finish_reason == "stop" and not node.ended and stop not in text
    return text + stop if cut else text


def mean(values: Any) -> float:
    """Return the mean; 0 for no values."""
    collected = [float(value) for value in values]
    return sum(collected) / len(collected) if collected else 0.0
