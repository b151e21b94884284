"""Data sets of chats: rows with a prompt and columns for rewards, and the same rows as token ids with a loss mask.

`load_rows` gives the rows that an environment samples answers for. `ChatDataset` tokenizes each row with the chat
template: its prompt to sample from, and the whole chat with a mask of the assistant's tokens to learn from. A row is a
prompt that is text, or a chat with or without a system prompt; the assistant's message at its end, or the columns
`completion` and `response`, are its reply: text, or a message. A message has role and content, or `from` and `value` as
in ShareGPT's data. The column `tools`, a list or its JSON, goes to the chat template: the functions that may be called.
This module needs no torch; `example_trainer.library` has the collator.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

from environments.sdk.tools import with_parsed_arguments
from environments.tasks.chat_messages import read_chat, reply_message, without_nulls
from environments.tasks.data import Question, is_blank, is_missing, parts_in, read_cell, warn_of_parts
from environments.tasks.records import DataUnusable, Split, load_records, records_of

logger = logging.getLogger(__name__)

PROMPTS = ("prompt", "messages", "conversation", "conversations", "question", "problem", "instruction")
"""Columns in which a prompt is looked for, in this order."""
REFERENCES = ("answer", "ground_truth", "solution", "final_answer", "completion", "response", "truth")
"""Columns in which a reference is looked for, in this order."""
REPLIES = ("completion", "response")
"""Columns in which the assistant's reply is looked for if the chat does not end with it."""

PromptForm = Literal["auto", "chat", "text"]
Chat = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Row(Question):
    """A row: `question` is its prompt as text and `answer` its reference, or "" if it has none."""

    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat that is to be answered; empty for a prompt that is text."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All columns except the prompt's."""
    reply: str = ""
    """The assistant's reply in the data, which a model may learn; "" if there is none."""
    reply_message: Mapping[str, Any] | None = None
    """The message of that reply if the data has one, with all that the chat template may use of it."""
    ends_chat: bool = False
    """True if the reply was the chat's last message: else the chat is a prompt alone, whose turns are not learned."""

    def chat(
        self, *, form: PromptForm, has_template: bool, system_prompt: str | None = None
    ) -> list[Mapping[str, Any]]:
        """Return the chat to answer; an empty list if the model continues the prompt as text."""
        if not self.messages and (form == "text" or (form == "auto" and not has_template)):
            return []
        messages = list(self.messages) or [{"role": "user", "content": self.question}]
        if system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        return messages


class PromptEmpty(DataUnusable):
    """A row has a column for the prompt and nothing in it."""


def load_rows(source: str | Path, split: Split, *, prompt_column: str | None = None) -> list[Question]:
    """Return all rows of `source` in its order: a path, or the name of a Hugging Face data set."""
    rows: list[Row] = []
    empty = 0
    for where, records in load_records(source, split, columns=lambda _: None):
        for number, record in records:
            try:
                rows.append(make_row(record, f"{where}{number}", prompt_column))
            except PromptEmpty:
                empty += 1
    if not rows:
        raise DataUnusable(f"{source}: it has no row with a prompt; each line or row needs one ({empty} are empty)")
    if empty:
        logger.warning("%s: %d rows whose prompt is empty are left out", source, empty)
    warn_of_parts(source, set().union(*(parts_in(row.columns) for row in rows)))
    return list(rows)


def make_row(record: Any, where: str, prompt_column: str | None = None) -> Row:
    """Convert one record; raise `DataUnusable`, with its place, if it has no prompt, `PromptEmpty` if that is empty."""
    if not isinstance(record, Mapping):
        raise DataUnusable(f"{where}: a row is an object with columns, not {str(record)[:80]!r}")
    names = (prompt_column,) if prompt_column else PROMPTS
    column = next((name for name in names if not is_blank(record.get(name))), None)
    if column is None and (blank := next((name for name in names if name in record), None)):
        raise PromptEmpty(f"{where}: its prompt under {blank} is empty; fill it in, or leave the row out")
    if column is None:
        raise DataUnusable(
            f"{where}: it has no prompt under {', '.join(names)}; its columns are {', '.join(map(str, record))}. "
            "Name the prompt's with --env.prompt_column; of atropos-sft with --prompt-column, or --text-column for text"
        )
    columns = {str(name): value for name, value in record.items() if name != column}
    reference = next((_text_in(columns[name], where) for name in REFERENCES if not is_missing(columns.get(name))), "")
    replies = (columns[name] for name in REPLIES if columns.get(name))
    cell = next((cell for cell in replies if not is_missing(cell)), "")
    message, reply = reply_message(cell, where), _text_in(cell, where)
    prompt = record[column]
    if isinstance(prompt, str):
        return Row(prompt, reference, (), columns, reply, message)
    messages = read_chat(prompt, f"{where}, column {column}")
    ends_chat = messages[-1]["role"] == "assistant"
    if ends_chat:
        message, reply = messages[-1], read_cell(messages[-1:])
        messages = messages[:-1]
    if not messages:
        raise DataUnusable(f"{where}, column {column}: the chat has nothing to answer before the assistant's message")
    if is_blank(messages[-1]["content"]):
        raise PromptEmpty(f"{where}, column {column}: the message to answer is empty; fill it in, or leave the row out")
    asked = read_cell(messages[-1:])
    return Row(asked, reference or reply, tuple(messages), columns, reply, message, ends_chat)


def _text_in(cell: Any, where: str) -> str:
    """Return the text of a cell, which is that of its message if it has one."""
    message = reply_message(cell, where)
    return read_cell(cell if message is None else [message])


class ChatSample(TypedDict):
    """One tokenized row. P is the length of its prompt, L that of the whole chat."""

    prompt_token_ids: list[int]
    """[P] the prompt, up to where the assistant answers."""
    ground_truth: str
    """The reference for a reward; "" if the row has none."""
    token_ids: list[int]
    """[L] the chat with its reply; without a reply the prompt."""
    loss_mask: list[int]
    """[L] 1 at tokens of the assistant's turns, up to and with the end token, and 0 elsewhere."""
    messages: list[Mapping[str, Any]]
    """The chat to answer; empty for a prompt that is text."""
    columns: Mapping[str, Any]
    """All other columns of the row."""


class ChatDataset:
    """A data set of chats as token ids, indexed by row: `dataset[0]["prompt_token_ids"]`.

        dataset = ChatDataset("chats.jsonl", tokenizer)

    `source` is a `.jsonl`, `.json` or `.parquet` file, a folder of them, the name of a Hugging Face data set, or a
    sequence of records. `lazy` reads and tokenizes a row whenever it is asked for, so that a file larger than memory
    can be used; else all rows are read at once, and a bad one is found at once. Lazy Parquet is read by whole row
    groups, so read it in order; `.json` files and data sets of the hub are always read at once.

    `tokenizer` is transformers' or `environments.sdk.tokenizer.load_tokenizer`'s. `turns` says which of the assistant's
    turns are in the loss mask: all, or a reply at the end alone, for templates that write earlier turns differently.
    Of a row whose reply has a column of its own that is the reply alone: the chat is then its prompt.
    `max_tokens` cuts `token_ids` and `loss_mask` there, but no prompt. A row without a prompt that has a text under
    `text_column` is that text and an end token: it has no prompt, and the mask has every token but the first.
    """

    def __init__(
        self,
        source: str | Path | Sequence[Mapping[str, Any]],
        tokenizer: Any,
        *,
        split: Split = "train",
        lazy: bool = True,
        prompt_column: str | None = None,
        prompt_form: PromptForm = "auto",
        system_prompt: str | None = None,
        turns: Literal["all", "last"] = "all",
        max_tokens: int | None = None,
        text_column: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_column = prompt_column
        self._text_column = text_column
        self._prompt_form: PromptForm = prompt_form
        self._system_prompt = system_prompt
        self._turns = turns
        self._max_tokens = max_tokens
        self._records = records_of(source, split)
        if not len(self._records):
            raise DataUnusable(f"{source}: it has no row; each line or row needs a prompt")
        self._samples = None if lazy else [self._sample(index) for index in range(len(self._records))]
        if not lazy:
            self._records = []

    def __len__(self) -> int:
        return len(self._records) if self._samples is None else len(self._samples)

    def __getitem__(self, index: int) -> ChatSample:
        return self._sample(index) if self._samples is None else self._samples[index]

    def __iter__(self) -> Iterator[ChatSample]:
        return (self[index] for index in range(len(self)))

    def _sample(self, index: int) -> ChatSample:
        where, record = self._records[index]
        if (text := self._text_of(record)) is not None:
            return self._text_sample(text, record)
        row = make_row(record, where, self._prompt_column)
        _refuse_long_reply(row, where)
        has_template = bool(getattr(self._tokenizer, "chat_template", None))
        chat = row.chat(form=self._prompt_form, has_template=has_template, system_prompt=self._system_prompt)
        if chat and not has_template:
            raise DataUnusable(
                f"{where}: it is a chat, and the tokenizer has no chat template; use another tokenizer, or give "
                "atropos-sft a --chat-template"
            )
        prompt, tokens, mask = self._encode_chat(chat, row, where) if chat else self._encode_text(row)
        return ChatSample(
            prompt_token_ids=prompt,
            ground_truth=row.answer,
            token_ids=tokens[: self._max_tokens],
            loss_mask=mask[: self._max_tokens],
            messages=chat,
            columns=row.columns,
        )

    def _text_of(self, record: Any) -> str | None:
        """Return the text of a row that has no prompt; None for other rows."""
        column = self._text_column
        if column is None or not isinstance(record, Mapping) or not isinstance(record.get(column), str):
            return None
        prompts = (self._prompt_column,) if self._prompt_column else PROMPTS
        return None if any(name in record for name in prompts if name != column) else str(record[column])

    def _text_sample(self, text: str, record: Mapping[str, Any]) -> ChatSample:
        tokens = list(self._tokenizer.encode(text))
        end = self._tokenizer.eos_token_id
        if end is not None and tokens[-1:] != [end]:
            tokens.append(end)
        tokens = tokens[: self._max_tokens]
        return ChatSample(
            prompt_token_ids=[],
            ground_truth="",
            token_ids=tokens,
            loss_mask=[int(at > 0) for at in range(len(tokens))],
            messages=[],
            columns={str(name): value for name, value in record.items() if name != self._text_column},
        )

    def _encode_text(self, row: Row) -> tuple[list[int], list[int], list[int]]:
        """Return the ids of a prompt that is text, and ids and mask with the reply and an end token after it."""
        begin, end = getattr(self._tokenizer, "bos_token", None), self._tokenizer.eos_token_id
        is_rendered = bool(begin) and row.question.startswith(str(begin))
        prompt = self._encode(row.question) if is_rendered else list(self._tokenizer.encode(row.question))
        reply = self._encode(row.reply)
        if reply and end is not None and reply[-1] != end:
            reply.append(end)
        return prompt, prompt + reply, [0] * len(prompt) + [1] * len(reply)

    def _encode_chat(self, chat: Chat, row: Row, where: str) -> tuple[list[int], list[int], list[int]]:
        """Return the ids of the prompt, and ids and mask of the whole chat.

        Each turn is tokenized on its own, as it is when the model samples it, so that no token spans two turns.
        """
        reply = row.reply_message or ({"role": "assistant", "content": row.reply} if row.reply else None)
        whole = [*chat, reply] if reply else list(chat)
        answers = [at for at, message in enumerate(whole) if at and message["role"] == "assistant"]
        if self._turns == "last" or (reply and not row.ends_chat):
            answers = [len(chat)] if reply else []
        render = partial(self._render, where=where, tools=_tools_of(row, where))
        tokens: list[int] = []
        mask: list[int] = []
        prompt: list[int] = []
        done = ""
        for at in answers:
            before = render(whole[:at], open_turn=True)
            after = render(whole[: at + 1], open_turn=False)
            if not before.startswith(done) or not after.startswith(before):
                raise self._rewritten(f"{where}, message {at}")
            context, answer = self._encode(before[len(done) :]), self._encode(after[len(before) :])
            prompt = tokens + context
            tokens = prompt + answer
            mask += [0] * len(context) + self._trained(answer)
            done = after
        if reply:
            return prompt, tokens, mask
        rendered = render(whole, open_turn=True)
        if not rendered.startswith(done):
            raise self._rewritten(where)
        rest = self._encode(rendered[len(done) :])
        return tokens + rest, tokens + rest, mask + [0] * len(rest)

    def _rewritten(self, where: str) -> DataUnusable:
        advice = "turns='last'" if self._turns == "all" else "another chat template"
        return DataUnusable(
            f"{where}: the chat template writes a turn differently once others follow it, so the assistant's tokens "
            f"cannot be found with turns={self._turns!r}; use {advice}"
        )

    def _trained(self, answer: Sequence[int]) -> list[int]:
        """Return the mask of one answer; the template's text after the end token is never sampled, so not trained."""
        end = self._tokenizer.eos_token_id
        kept = len(answer) - answer[::-1].index(end) if end in answer else len(answer)
        return [1] * kept + [0] * (len(answer) - kept)

    def _render(self, messages: Chat, *, where: str, tools: Sequence[Any] | None, open_turn: bool) -> str:
        shown = {"add_generation_prompt": open_turn, **({} if tools is None else {"tools": tools})}
        try:
            chat = with_parsed_arguments([dict(message) for message in messages])  # as a session renders them
            return str(self._tokenizer.apply_chat_template(chat, tokenize=False, **shown))
        except Exception as error:  # templates refuse what they do not expect in ways of their own
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataUnusable(
                f"{where}: the chat template cannot write this chat ({reason}); mend the row, or use another template"
            ) from error

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a part of a rendered chat, in which the template has put all special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []


def _tools_of(row: Row, where: str) -> Sequence[Any] | None:
    """Return the functions that a row's chat may call, from its column `tools`; None if it has none."""
    tools = row.columns.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise DataUnusable(f"{where}, column tools: it is not JSON ({error}); give a list of functions") from error
    if not tools:
        return None
    if not isinstance(tools, Sequence):
        raise DataUnusable(f"{where}, column tools: it is a list of functions, or its JSON, not {tools!r:.80}")
    return [without_nulls(tool) for tool in tools]


def _refuse_long_reply(row: Row, where: str) -> None:
    """Raise `DataUnusable` for a completion of several messages, of which `make_row` would take only the last."""
    for name in REPLIES:
        messages = row.columns.get(name)
        if isinstance(messages, list) and len(messages) > 1:
            raise DataUnusable(
                f"{where}: its {name} has {len(messages)} messages, and a reply is one; put the chat under messages"
            )
