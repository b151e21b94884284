"""A data set of chats as token ids: prompts, loss masks of the assistant's turns, lazy and eager reading."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from environments.sdk.tokenizer import Codec, FastTokenizer
from environments.tasks import chat_dataset
from environments.tasks.chat_dataset import ChatDataset
from environments.tasks.question_env import QuestionEnv
from environments.tasks.records import DataUnusable

TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "u2"},
    {"role": "assistant", "content": "a2"},
]
NEWLINES = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FORGETS = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{{ message['content'] if loop.last or message['role'] != 'assistant' else '-' }}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture
def with_template(tokenizer_folder, tmp_path):
    """Return a function that gives the tokenizer another chat template."""

    def build(template):
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        for file in tokenizer_folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "chat_template.jinja").write_text(template or "")
        return FastTokenizer(folder)

    return build


def learned(tokenizer, sample):
    """Return the trained pieces of the text, joined by bars."""
    pieces, previous = [], 0
    for token, trained in zip(sample["token_ids"], sample["loss_mask"], strict=True):
        if trained and not previous:
            pieces.append([])
        if trained:
            pieces[-1].append(token)
        previous = trained
    return "|".join(map(tokenizer.decode, pieces))


def write(path: Path, rows):
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_the_mask_covers_each_turn_of_the_assistant_with_its_end_token_and_nothing_else(tokenizer):
    sample = ChatDataset([{"messages": TURNS}], tokenizer)[0]
    assert learned(tokenizer, sample) == "a1<|end|>|a2<|end|>"
    assert tokenizer.decode(sample["token_ids"]) == tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert tokenizer.decode(sample["prompt_token_ids"]).endswith("u2<|end|><|assistant|>")
    assert sample["token_ids"][: len(sample["prompt_token_ids"])] == sample["prompt_token_ids"]
    assert sample["ground_truth"] == "a2"


def test_a_chat_of_sharegpts_form_is_the_same_chat(tokenizer):
    speakers = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": speakers[turn["role"]], "value": turn["content"], "weight": None} for turn in TURNS]
    sample = ChatDataset([{"conversations": turns, "id": "x"}], tokenizer)[0]
    assert sample == ChatDataset([{"messages": TURNS, "id": "x"}], tokenizer)[0]


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"from": "function_call", "value": "{}"}, "record 1, column conversations: a message is from 'function_call'"),
        ({"from": ["human"], "value": "u"}, r"a message is from \['human'\]"),
        ({"from": "human", "value": None}, "a list of messages with role and content"),
    ],
)
def test_a_message_of_sharegpts_form_without_a_known_speaker_or_a_text_is_refused(tokenizer, turn, reason):
    with pytest.raises(DataUnusable, match=reason):
        ChatDataset([{"conversations": [turn, {"from": "gpt", "value": "a"}]}], tokenizer)[0]


def test_a_chat_without_a_reply_is_its_prompt_and_earlier_answers_are_still_learned(tokenizer):
    sample = ChatDataset([{"messages": TURNS[:4], "topic": "t"}], tokenizer)[0]
    assert sample["token_ids"] == sample["prompt_token_ids"]
    assert learned(tokenizer, sample) == "a1<|end|>"
    assert (sample["ground_truth"], sample["columns"]) == ("", {"topic": "t"})


def test_text_that_the_template_puts_after_the_end_token_is_not_learned(with_template):
    tokenizer = with_template(NEWLINES)
    sample = ChatDataset([{"messages": TURNS}], tokenizer)[0]
    assert learned(tokenizer, sample) == "a1<|end|>|a2<|end|>"
    assert tokenizer.decode(sample["token_ids"]).endswith("<|end|>\n")


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_only_the_last_is_learned(with_template):
    tokenizer = with_template(FORGETS)
    with pytest.raises(DataUnusable, match=r"record 1, message 4: the chat template writes.*use turns='last'"):
        ChatDataset([{"messages": TURNS}], tokenizer)[0]
    sample = ChatDataset([{"messages": TURNS}], tokenizer, turns="last")[0]
    assert learned(tokenizer, sample) == "a2<|end|>"
    assert "<|assistant|>-<|end|>" in tokenizer.decode(sample["token_ids"])
    with pytest.raises(DataUnusable, match="record 1: the chat template writes"):
        ChatDataset([{"messages": TURNS[:4]}], tokenizer)[0]
    unanswered = ChatDataset([{"messages": TURNS[:4]}], tokenizer, turns="last")[0]
    assert (sum(unanswered["loss_mask"]), unanswered["token_ids"]) == (0, unanswered["prompt_token_ids"])


@pytest.mark.parametrize("form", ["auto", "text"])
def test_a_prompt_that_is_text_becomes_a_message_where_there_is_a_template_and_else_is_continued(
    with_template, tokenizer, form
):
    row = {"prompt": "p", "completion": "c"}
    plain = ChatDataset([row], with_template(None) if form == "auto" else tokenizer, prompt_form=form)[0]
    assert tokenizer.decode(plain["token_ids"]) == "pc<|end|>"
    assert learned(tokenizer, plain) == "c<|end|>"
    chat = ChatDataset([row], tokenizer, system_prompt="s")[0]
    assert tokenizer.decode(chat["token_ids"]) == "<|system|>s<|end|><|user|>p<|end|><|assistant|>c<|end|>"


def test_a_chat_needs_a_template(with_template):
    with pytest.raises(DataUnusable, match="record 1: it is a chat, and the tokenizer has no chat template"):
        ChatDataset([{"messages": TURNS}], with_template(None))[0]


def test_the_longest_sequence_is_cut_and_the_prompt_is_not(tokenizer):
    whole = ChatDataset([{"messages": TURNS}], tokenizer)[0]
    cut = ChatDataset([{"messages": TURNS}], tokenizer, max_tokens=9)[0]
    assert cut["token_ids"] == whole["token_ids"][:9]
    assert cut["loss_mask"] == whole["loss_mask"][:9]
    assert cut["prompt_token_ids"] == whole["prompt_token_ids"]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder"])
def test_lazy_and_eager_give_the_same_samples_in_any_order(tokenizer, tmp_path, kind):
    rows = [{"prompt": f"p{number}", "answer": f"ä{number}"} for number in range(25)]
    path = tmp_path / f"data.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
    elif kind == "folder":
        path.mkdir()
        write(path / "a.jsonl", rows[:12])
        pq.write_table(pa.Table.from_pylist(rows[12:]), path / "b.parquet", row_group_size=4)
    else:
        write(path, rows)
    lazy, eager = ChatDataset(path, tokenizer), ChatDataset(path, tokenizer, lazy=False)
    assert len(lazy) == len(eager) == 25
    assert [lazy[index]["ground_truth"] for index in (24, 0, 11, 12, -1)] == ["ä24", "ä0", "ä11", "ä12", "ä24"]
    assert list(lazy) == list(eager)
    with pytest.raises(IndexError):
        lazy[25]


def test_a_lazy_data_set_tokenizes_only_what_is_asked_for_and_an_eager_one_finds_a_bad_row_at_once(
    tokenizer, tmp_path, monkeypatch
):
    made = []
    original = chat_dataset.make_row

    def watched(record, where, column=None):
        made.append(where)
        return original(record, where, column)

    monkeypatch.setattr(chat_dataset, "make_row", watched)
    path = write(tmp_path / "data.jsonl", [{"prompt": "fine"}, {"text": "x"}, {"prompt": "fine"}])
    dataset = ChatDataset(path, tokenizer)
    assert (len(dataset), made) == (3, [])
    dataset[2]
    assert made == [f"{path}:5"], "lines are counted as an editor counts them"
    with pytest.raises(DataUnusable, match=r"data\.jsonl:3: it has no prompt"):
        ChatDataset(path, tokenizer, lazy=False)


def test_a_data_set_without_rows_is_refused(tokenizer, tmp_path):
    with pytest.raises(DataUnusable, match="it has no row"):
        ChatDataset(write(tmp_path / "data.jsonl", []), tokenizer)


def test_a_lazy_file_may_begin_with_a_byte_order_mark_and_hold_line_separators(tokenizer_folder, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False).encode())
    (sample,) = ChatDataset(path, FastTokenizer(tokenizer_folder), prompt_form="text")
    assert len(sample["prompt_token_ids"]) > 0


@pytest.mark.parametrize(
    "empty",
    [
        {"prompt": "", "answer": "1"},
        {"prompt": None},
        {"prompt": " \n"},
        {"prompt": float("nan")},
        {"messages": []},
        {"messages": [{"role": "user", "content": " "}]},
    ],
)
def test_rows_with_an_empty_prompt_are_left_out_and_counted(tmp_path, caplog, empty):
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"prompt": "fine"}, empty])))
    assert [row.question for row in chat_dataset.load_rows(path, "train")] == ["fine"]
    assert "1 rows whose prompt is empty are left out" in caplog.text
    path.write_text(json.dumps(empty))
    with pytest.raises(DataUnusable, match=r"no row with a prompt.*\(1 are empty\)"):
        chat_dataset.load_rows(path, "train")
    with pytest.raises(DataUnusable, match="is empty; fill it in"):
        chat_dataset.make_row(empty, "here")


def test_keys_that_are_null_in_a_message_are_not_keys_of_it(tmp_path):
    """A column of Parquet gives each message the keys of all, and a template asks only which keys a message has."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    rows = [
        {"messages": [{"role": "user", "content": "1+1?"}]},
        {"messages": [{"role": "user", "content": "2?", "name": "ann"}, {"role": "assistant", "content": "3"}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2"}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    read = chat_dataset.load_rows(tmp_path / "chats.parquet", "train")
    assert [list(row.messages) for row in read] == [rows[0]["messages"], rows[1]["messages"][:1], rows[2]["messages"]]


def test_a_number_that_is_missing_is_no_reference():
    """Pandas writes NaN for it, in Parquet as in JSON."""
    rows = [{"prompt": "p", "answer": float("nan"), "solution": "7"}, {"prompt": "p", "answer": float("nan")}]
    assert [chat_dataset.make_row(row, "here").answer for row in rows] == ["7", ""]


@pytest.mark.parametrize("line", ['{"prompt": ' + "[" * 100_000, '{"prompt": "p", "n": ' + "9" * 5000 + "}", "{"])
def test_a_line_that_python_cannot_read_is_named(tmp_path, line):
    path = tmp_path / "d.jsonl"
    path.write_text(line)
    with pytest.raises(DataUnusable, match=r"d\.jsonl:1: not a JSON object"):
        chat_dataset.load_rows(path, "train")


TOOLS = (
    "{% for tool in tools or [] %}{{ '[' + tool['name'] + ']' }}{% endfor %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '(' + call['function']['name'] + ')' }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CALLS = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "a"},
]


@pytest.mark.parametrize("tools", [[{"name": "add"}], '[{"name": "add"}]'])
def test_a_chat_that_calls_tools_is_learned_with_its_calls_and_shows_its_tools(with_template, tools):
    tokenizer = with_template(TOOLS)
    sample = ChatDataset([{"messages": CALLS, "tools": tools}], tokenizer)[0]
    assert tokenizer.decode(sample["token_ids"]).startswith("[add]<|user|>u<|end|>")
    assert learned(tokenizer, sample) == "(add)<|end|>|a<|end|>"
    only_call = ChatDataset([{"messages": CALLS[:2]}], tokenizer)[0]
    assert learned(tokenizer, only_call) == "(add)<|end|>"


ARGUMENTS = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function']['arguments'] | tojson }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ASK = {"role": "user", "content": "u"}


def adds(arguments, content="c"):
    """Return an assistant's message that calls a tool."""
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_arguments_of_a_call_are_learned_as_an_object_in_either_form(with_template, arguments):
    tokenizer = with_template(ARGUMENTS)
    sample = ChatDataset([{"messages": [ASK, adds(arguments)]}], tokenizer)[0]
    assert learned(tokenizer, sample) == 'c{"x": 1}<|end|>'


def test_the_length_of_a_prompt_is_that_of_the_chat_that_a_session_renders(with_template):
    """Some templates write each argument of a call, which is text in OpenAI's form and has none."""
    tokenizer = with_template(ARGUMENTS.replace("| tojson", "| items | list | tojson"))
    env, chat = SimpleNamespace(tokenizer=tokenizer), [ASK, adds('{"x": 1}'), {"role": "tool", "content": "3"}]
    rendered = Codec(tokenizer).render(chat, options={}, add_generation_prompt=True)
    assert QuestionEnv.chat_length(env, chat) == len(tokenizer.encode(rendered, add_special_tokens=False))


@pytest.mark.parametrize("content", ["c", "", None])
@pytest.mark.parametrize("prompt", [[ASK], "u"])
@pytest.mark.parametrize("as_list", [True, False])
def test_a_completion_that_is_a_message_is_learned_with_its_calls(with_template, prompt, content, as_list):
    tokenizer, message = with_template(ARGUMENTS), adds('{"x": 1}', content)
    sample = ChatDataset([{"prompt": prompt, "completion": [message] if as_list else message}], tokenizer)[0]
    assert learned(tokenizer, sample) == (content or "") + '{"x": 1}<|end|>'
    assert sample["ground_truth"] == (content or "")


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ([{"from": "gpt", "value": "a"}], "a"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}]}], "a"),
        ({"score": 1}, "{'score': 1}"),
        ({"role": "nurse", "value": 1}, "{'role': 'nurse', 'value': 1}"),
    ],
)
def test_a_completion_is_learned_as_its_text(tokenizer, reply, text):
    sample = ChatDataset([{"prompt": "p", "completion": reply}], tokenizer)[0]
    assert (learned(tokenizer, sample), sample["ground_truth"]) == (f"{text}<|end|>", text)


@pytest.mark.parametrize("completion", ["a2", [TURNS[4]]])
def test_answers_in_a_prompt_are_not_learned_with_its_completion(tokenizer, completion):
    sample = ChatDataset([{"prompt": TURNS[:4], "completion": completion}], tokenizer)[0]
    assert learned(tokenizer, sample) == "a2<|end|>"
    whole = ChatDataset([{"messages": TURNS}], tokenizer)[0]
    assert tokenizer.decode(sample["token_ids"]) == tokenizer.decode(whole["token_ids"])


def test_a_completion_that_is_missing_leaves_the_reply_to_the_next_column():
    row = {"prompt": "p", "completion": float("nan"), "response": "r"}
    assert chat_dataset.make_row(row, "here").reply == "r"


def test_content_in_parts_is_a_reference_and_a_question_by_its_text():
    turns = [{"role": role, "content": [{"type": "text", "text": role}]} for role in ("user", "assistant")]
    row = chat_dataset.make_row({"messages": turns}, "here")
    assert (row.question, row.answer) == ("user", "assistant")


@pytest.mark.parametrize("tools", ["[add", {"name": "add"}])
def test_tools_that_are_no_list_are_refused_with_their_place(with_template, tools):
    with pytest.raises(DataUnusable, match="record 1, column tools: it is"):
        ChatDataset([{"messages": CALLS, "tools": tools}], with_template(TOOLS))[0]


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{{ raise_exception('roles must alternate') }}", "roles must alternate"), (NEWLINES, "can only concatenate str")],
)
def test_a_chat_that_the_template_does_not_write_is_refused_with_its_place(with_template, template, reason):
    parts = [{"role": "user", "content": [{"type": "text", "text": "u"}]}, {"role": "assistant", "content": "a"}]
    with pytest.raises(DataUnusable, match=rf"record 1: the chat template cannot write this chat \({reason}"):
        ChatDataset([{"messages": parts}], with_template(template))[0]
