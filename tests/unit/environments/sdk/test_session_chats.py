"""Sessions over templates, tools, branches and clients that change history: one test for each known fault."""

import sys
import time
from types import SimpleNamespace

import anyio
import pytest

from environments.compat import utils
from environments.math_server_zero import boxed_answer
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import RequestRefused, ToolParserUnknown
from environments.sdk.inference.vllm import VllmServer
from environments.sdk.session.openai_client import ManagedServerAdapter
from environments.sdk.session.prompt_tokens import DriftLog
from environments.sdk.session.session import ManagedSession
from environments.sdk.session.tokens_and_masks import NOT_TRAINED
from environments.sdk.testing import FakeInference, InProcess
from environments.sdk.testing_servers import TEMPLATES, make_chat_tokenizer
from environments.sdk.tools import HermesParser, JsonParser, ToolCall, tool_parser, with_parsed_arguments

pytestmark = pytest.mark.anyio

QUESTION = {"role": "user", "content": "How many?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"text": "it\'s 1"}}\n</tool_call>'
LONG_NUMBER = '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>"
"""Python refuses to read such a number, and a model that repeats itself writes one."""


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    return {family: make_chat_tokenizer(folder / family, family) for family in TEMPLATES}


def scripted(tokenizer, *texts):
    """Return a fake server that gives these texts in turn, each with an end token unless it ends with `…`."""
    said = iter(texts)

    def respond(_prompt, _index):
        text = next(said)
        return tokenizer.encode(text.removesuffix("…")) + ([] if text.endswith("…") else [tokenizer.eos_token_id])

    return FakeInference(respond, end=tokenizer.eos_token_id, version=3)


def session_of(fake, tokenizer, **options):
    return ManagedSession(
        VllmServer(APIServerConfig(server_type="vllm"), transport=InProcess(fake)), tokenizer, **options
    )


def assistant(content):
    return {"role": "assistant", "content": content}


def trained(node):
    return [token for token in node.masked_tokens if token != NOT_TRAINED]


@pytest.mark.parametrize("family", sorted(TEMPLATES))
async def test_the_end_of_a_turn_is_in_the_sequence_once(tokenizers, family):
    """Fault (b): the sampled end token and the template's are the same one."""
    tokenizer = tokenizers[family]
    fake = scripted(tokenizer, "ab", "12", "ell")
    session = session_of(fake, tokenizer)
    chat = [QUESTION]
    for text in ("ab", "12", "ell"):
        await session.chat_completion(messages=chat)
        chat = [*chat, assistant(text), QUESTION]
    (node,) = session.nodes
    assert tokenizer.decode(node.tokens) == tokenizer.apply_chat_template(chat[:-1], tokenize=False).rstrip("\n")
    end = tokenizer.eos_token_id
    assert all(pair != (end, end) for pair in zip(node.tokens, node.tokens[1:], strict=False))


async def test_a_completion_that_goes_on_keeps_masks_and_logprobs(tokenizers):
    """Fault (a): continuing a text must not mask the tokens sampled before."""
    tokenizer = tokenizers["chatml"]
    session = session_of(scripted(tokenizer, "ab…", "12…", "ell"), tokenizer)
    text = "x"
    for said in ("ab", "12", "ell"):
        await session.completion(prompt=text)
        text += said
    (node,) = session.nodes
    sampled = [token for said in ("ab", "12", "ell") for token in tokenizer.encode(said)]
    assert trained(node) == [*sampled, tokenizer.eos_token_id]
    assert [value == 1.0 for value in node.logprobs] == [mask == NOT_TRAINED for mask in node.masked_tokens]


async def test_a_template_that_trims_answers_does_not_break_a_chat_in_two(tokenizers):
    tokenizer = tokenizers["llama"]
    session = session_of(scripted(tokenizer, " ab \n", "12"), tokenizer)
    first = await session.chat_completion(messages=[QUESTION])
    await session.chat_completion(messages=[QUESTION, assistant(first.choices[0].message.content), QUESTION])
    (node,) = session.nodes
    assert trained(node)[: len(tokenizer.encode(" ab \n"))] == tokenizer.encode(" ab \n")
    assert node.tokens.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("change", [str.strip, str.upper])
async def test_a_client_that_changes_an_answer_forks_and_the_place_is_logged_once(tokenizers, caplog, change):
    """Fault (c): history that differs, if only by white space, starts a sequence of its own, with a warning."""
    tokenizer, drift = tokenizers["chatml"], DriftLog()
    for _ in range(3):
        session = session_of(scripted(tokenizer, "abab \n", "12"), tokenizer, drift=drift)
        await session.chat_completion(messages=[QUESTION])
        await session.chat_completion(messages=[QUESTION, assistant(change("abab \n")), QUESTION])
        assert [len(trained(node)) for node in session.nodes] == [
            len(tokenizer.encode("abab \n")) + 1,
            len(tokenizer.encode("12")) + 1,
        ]
    assert drift.count == 3
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"from character {4 if change is str.strip else 0} on" in told
    assert "'abab \\n' was sampled" in told


async def test_calls_at_the_same_time_keep_the_order_in_which_they_began(tokenizers):
    """Fault (d): the order in which calls end does not matter."""
    tokenizer = tokenizers["chatml"]
    fake = FakeInference(lambda prompt, _: [prompt[-20], tokenizer.eos_token_id], end=tokenizer.eos_token_id)
    delays = {0: 0.03, 1: 0.0, 2: 0.015}
    session = session_of(fake, tokenizer)
    chats = {number: [{"role": "user", "content": str(number) * 30}] for number in delays}

    async def talk(number):
        for _ in range(2):
            answer = await session.chat_completion(messages=chats[number])
            await anyio.sleep(delays[number])
            chats[number] += [assistant(answer.choices[0].message.content), {"role": "user", "content": "z" * 30}]

    async with anyio.create_task_group() as group:
        for number in delays:
            group.start_soon(talk, number)
    assert len(session.nodes) == 3
    assert [node.full_text.count(str(number)) >= 30 for number, node in enumerate(session.nodes)] == [True] * 3
    assert {node.sampled_count for node in session.nodes} == {4}


async def test_two_calls_that_go_on_from_one_place_are_two_branches(tokenizers):
    tokenizer = tokenizers["chatml"]
    odd = [*tokenizer.encode("a"), *tokenizer.encode("b")]  # no encoder writes "ab" like this
    answers = iter([[*odd, tokenizer.eos_token_id], *([5 + i, tokenizer.eos_token_id] for i in range(3))])
    fake = FakeInference(lambda *_: next(answers), end=tokenizer.eos_token_id, delay_seconds=0.005)
    session = session_of(fake, tokenizer)
    await session.chat_completion(messages=[QUESTION])
    chat = [QUESTION, assistant("ab"), QUESTION]
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(lambda: session.chat_completion(messages=chat))
    await session.chat_completion(messages=chat)  # and one more, after both
    assert len(session.nodes) == 3
    for node in session.nodes:
        assert trained(node)[:3] == [*odd, tokenizer.eos_token_id]
    assert len({node.tokens[-2] for node in session.nodes}) == 3


async def test_an_answer_without_a_finish_reason_is_still_an_answer(tokenizers):
    """Fault (e): a server that returns no finish reason does not break the reply."""
    tokenizer = tokenizers["chatml"]
    fake = scripted(tokenizer, "ab")
    reply = fake._reply
    type_with_none = lambda request: {**reply(request), "finish_reasons": [None]}  # noqa: E731

    class Reasonless(FakeInference):
        def _reply(self, request):
            return type_with_none(request)

    silent = Reasonless(fake.respond, end=fake.end)
    answer = await session_of(silent, tokenizer).chat_completion(messages=[QUESTION])
    assert answer.choices[0].finish_reason == "stop"


async def test_a_call_that_was_cut_off_still_says_length(tokenizers):
    """Fault (f): tool calls do not hide that the limit stopped the model."""
    tokenizer = tokenizers["qwen"]
    session = session_of(scripted(tokenizer, CALL + "…", CALL), tokenizer)
    cut = (await session.chat_completion(messages=[QUESTION], tools=TOOLS)).choices[0]
    whole = (await session.chat_completion(messages=[{**QUESTION, "content": "x"}], tools=TOOLS)).choices[0]
    assert (cut.finish_reason, whole.finish_reason) == ("length", "tool_calls")
    assert [node.finish_reason for node in session.nodes] == ["length", "stop"]
    assert cut.message.tool_calls[0].function.name == "add"


@pytest.mark.parametrize("keeps", ["everything", "calls only", "no ids"])
async def test_tool_calls_come_back_as_the_tokens_they_were_sampled_as(tokenizers, keeps):
    tokenizer = tokenizers["qwen"]
    session = session_of(scripted(tokenizer, "<think>\nab\n</think>\n" + CALL, "12"), tokenizer)
    message = (await session.chat_completion(messages=[QUESTION], tools=TOOLS)).choices[0].message
    call = message.tool_calls[0]
    assert call.function.arguments == '{"text": "it\'s 1"}'  # apostrophes survive
    back = message.model_dump()
    if keeps == "calls only":
        back = {"role": "assistant", "tool_calls": back["tool_calls"]}
    if keeps == "no ids":
        back["tool_calls"] = [{"type": "function", "function": back["tool_calls"][0]["function"], "id": "other"}]
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    await session.chat_completion(messages=[QUESTION, back, result], tools=TOOLS)
    (node,) = session.nodes
    assert tokenizer.decode(node.tokens).count("<tool_call>") == 1
    end = [tokenizer.eos_token_id]
    assert trained(node) == tokenizer.encode("<think>\nab\n</think>\n" + CALL) + end + tokenizer.encode("12") + end
    assert "<tool_response>\n2" in node.full_text


@pytest.mark.parametrize("keeps", ["ids", "text"])
async def test_of_samples_with_the_same_call_the_one_that_was_answered_is_continued(tokenizers, keeps):
    tokenizer = tokenizers["qwen"]
    session = session_of(scripted(tokenizer, "1" + CALL, "2" + CALL, "done"), tokenizer)
    asked = await session.chat_completion(messages=[QUESTION], tools=TOOLS, n=2)
    message = asked.choices[1].message.model_dump()
    if keeps == "ids":
        del message["content"]
    else:
        message["tool_calls"][0]["id"] = "other"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    await session.chat_completion(messages=[QUESTION, message, result], tools=TOOLS)
    first, second = session.nodes
    end = [tokenizer.eos_token_id]
    assert trained(first) == tokenizer.encode("1" + CALL) + end
    assert trained(second) == tokenizer.encode("2" + CALL) + end + tokenizer.encode("done") + end


async def test_a_template_that_refuses_a_result_without_its_call_gets_the_chat_as_it_is(tokenizers, monkeypatch):
    """Sampled messages are rendered as placeholders, which call no tool."""
    tokenizer = tokenizers["qwen"]
    strict = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call before this result') }}{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", strict + TEMPLATES["qwen"])
    monkeypatch.setattr(tokenizer, "_template", None)
    session = session_of(scripted(tokenizer, CALL, "done"), tokenizer)
    message = (await session.chat_completion(messages=[QUESTION], tools=TOOLS)).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
    answer = await session.chat_completion(messages=[QUESTION, message.model_dump(), result], tools=TOOLS)
    assert answer.choices[0].message.content == "done"
    assert [trained(node)[-1:] for node in session.nodes] == [[tokenizer.eos_token_id]] * len(session.nodes)
    with pytest.raises(RequestRefused, match=r"messages\[1\] \(tool\)"):
        await session.chat_completion(messages=[QUESTION, result], tools=TOOLS)


async def test_tool_choice_none_leaves_the_text_and_required_reads_bare_json(tokenizers):
    tokenizer = tokenizers["qwen"]
    bare = '{"name": "add", "parameters": {"a": 1}}'
    session = session_of(scripted(tokenizer, CALL, bare, bare), tokenizer)

    async def ask(choice):
        answer = await session.chat_completion(messages=[QUESTION], tools=TOOLS, tool_choice=choice)
        return answer.choices[0].message

    assert (await ask("none")).content == CALL
    assert (await ask("auto")).tool_calls is None
    assert (await ask("required")).tool_calls[0].function.arguments == '{"a": 1}'


@pytest.mark.parametrize(
    ("parser", "text", "content", "names"),
    [
        (HermesParser(), "Let me see." + CALL + CALL, "Let me see.", ["add", "add"]),
        (HermesParser(), "<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        (HermesParser(), '<tool_call>{"name": "add"}', "", ["add"]),
        (JsonParser(), '```json\n[{"name": "a", "arguments": {}}, {"name": "b"}]\n```', "", ["a", "b"]),
        (JsonParser(), '<|python_tag|>{"name": "a"}; {"name": "b"}', "", ["a", "b"]),
        (JsonParser(), 'The answer is {"name": "a"}', 'The answer is {"name": "a"}', []),
        (JsonParser(), '{"title": "no call"}', '{"title": "no call"}', []),
        (HermesParser(), LONG_NUMBER, LONG_NUMBER, []),
    ],
)
def test_tool_parsers(parser, text, content, names):
    found = parser.parse(text)
    assert found.content == content
    assert [call.function.name for call in found.calls] == names


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (HermesParser().parse, "<tool_call>{" + " " * 50_000 + "?"),
        (JsonParser().parse, "```json\n{" + "\n" * 50_000 + "?```"),
        (JsonParser().parse, "```json\n{" + "\n" * 50_000 + "?"),
        (utils.extract_tool_call, "<tool_call>" * 10_000),
        (boxed_answer, "<answer>" * 10_000),
        (boxed_answer, "<answer></answer>" * 10_000),
    ],
)
def test_a_model_that_repeats_itself_without_end_is_read_in_no_time(parse, text):
    """The event loop stands still meanwhile: for twenty seconds once."""
    began = time.thread_time()
    parse(text)
    assert time.thread_time() - began < 1.0


def test_half_a_surrogate_pair_in_a_call_can_be_sent_and_rendered():
    """JSON can express it, UTF-8 and tokens cannot."""
    (found,) = HermesParser().parse('<tool_call>{"name": "say", "arguments": {"text": "\\ud83d"}}</tool_call>').calls
    assert found.function.arguments.encode() == rb'{"text": "\ud83d"}'
    (message,) = with_parsed_arguments([{"role": "assistant", "tool_calls": [found]}])
    assert message["tool_calls"][0]["function"]["arguments"] == found.function.arguments


class KnownParser:
    """A parser like vLLM's, whose package takes many seconds to import."""

    def __init__(self, tokenizer):
        assert tokenizer.eos_token

    def extract_tool_calls(self, text, request):
        called = SimpleNamespace(function=SimpleNamespace(name=text, arguments="{}"))
        tools = [called] if request.tool_choice == "auto" else []
        return SimpleNamespace(tools_called=True, tool_calls=tools, content=None)


def test_other_parsers_are_vllms_by_name(tokenizers, monkeypatch):
    known = SimpleNamespace(get_tool_parser={"known": KnownParser}.__getitem__)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.tool_parsers", SimpleNamespace(ToolParserManager=known))
    found = tool_parser("known", tokenizers["qwen"]).parse("add")
    assert (found.content, [call.function.name for call in found.calls]) == ("", ["add"])
    with pytest.raises(
        ToolParserUnknown, match=r"'hermez'.*no parser of that name.*--env\.tool_parser to hermes or json"
    ):
        tool_parser("hermez", tokenizers["qwen"])


def test_without_vllm_a_name_of_its_parsers_says_so(tokenizers, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.tool_parsers", None)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    with pytest.raises(ToolParserUnknown, match="not installed here"):
        tool_parser("mistral", tokenizers["qwen"])


async def test_a_foreign_parser_object_is_used(tokenizers):
    class Shouting:
        def parse(self, text):
            return text.upper(), [{"id": "call_x", "function": {"name": "shout", "arguments": "{}"}}]

    tokenizer = tokenizers["qwen"]
    session = session_of(scripted(tokenizer, "ab"), tokenizer, tool_call_parser=Shouting(), track_tree=False)
    message = (await session.chat_completion(messages=[QUESTION], tools=TOOLS)).choices[0].message
    assert message.content == "AB"
    assert isinstance(message.tool_calls[0], ToolCall)
    assert message.tool_calls[0].id == "call_x"


@pytest.mark.parametrize("preserve", [True, False])
async def test_thoughts_stay_in_the_sequence_unless_the_template_may_drop_them(tokenizers, preserve, caplog):
    tokenizer = tokenizers["qwen"]
    answer = "<think>\nab\n</think>\n\n12"
    session = session_of(scripted(tokenizer, answer, "ell"), tokenizer, preserve_think_blocks=preserve)
    await session.chat_completion(messages=[QUESTION])
    await session.chat_completion(messages=[QUESTION, assistant(answer), QUESTION])
    assert len(session.nodes) == (1 if preserve else 2)
    assert ("<think>" in session.nodes[-1].full_text) == preserve
    assert ("does not continue" in caplog.text) == (not preserve)


async def test_an_answer_with_thoughts_that_is_to_go_on_after_its_end_is_no_drift(tokenizers, caplog):
    tokenizer = tokenizers["chatml"]
    answer = "<think>a</think>12"
    session = session_of(scripted(tokenizer, answer, "ell"), tokenizer, preserve_think_blocks=False)
    await session.chat_completion(messages=[QUESTION])
    await session.chat_completion(messages=[QUESTION, assistant(answer)])
    assert len(session.nodes) == 2
    assert "does not continue" not in caplog.text


async def test_an_empty_thought_that_was_prompted_stays_where_it_was(tokenizers):
    """Templates begin an answer with an empty thought and leave it out of history; the sequence keeps it."""
    tokenizer = tokenizers["qwen"]
    session = session_of(scripted(tokenizer, "ab", "12"), tokenizer)
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    await session.chat_completion(messages=[QUESTION], **options)
    await session.chat_completion(messages=[QUESTION, assistant("ab"), QUESTION], **options)
    (node,) = session.nodes
    assert node.full_text.count("<think>\n\n</think>") == 2
    assert node.full_text == tokenizer.decode(node.tokens)


async def test_an_answer_that_was_begun_for_the_model_is_gone_on_with(tokenizers):
    tokenizer = tokenizers["chatml"]
    session = session_of(scripted(tokenizer, "ab…", "12"), tokenizer)
    await session.chat_completion(messages=[QUESTION, assistant("ell")])
    await session.chat_completion(messages=[QUESTION, assistant("ellab")])
    (node,) = session.nodes
    assert node.full_text.endswith("<|im_start|>assistant\nellab12<|im_end|>")
    assert trained(node) == [*tokenizer.encode("ab"), *tokenizer.encode("12"), tokenizer.eos_token_id]


async def test_tokens_given_as_a_prompt_continue_the_sequence_they_begin_with(tokenizers):
    tokenizer = tokenizers["chatml"]
    session = session_of(scripted(tokenizer, "ab", "12"), tokenizer)
    await session.completion(input_ids=[5, 6])
    await session.completion(input_ids=[*session.nodes[0].tokens, 7])
    (node,) = session.nodes
    end = [tokenizer.eos_token_id]
    assert trained(node) == tokenizer.encode("ab") + end + tokenizer.encode("12") + end


async def test_the_client_look_alike_gives_openais_objects(tokenizers):
    openai_types = pytest.importorskip("openai.types.chat")
    tokenizer = tokenizers["qwen"]
    session = session_of(scripted(tokenizer, CALL, "12"), tokenizer)
    client = ManagedServerAdapter(session, "http://x/v1")
    answer = await client.chat.completions.create(model="m", messages=[QUESTION], tools=TOOLS, max_tokens=99)
    assert isinstance(answer, openai_types.ChatCompletion)
    result = {"role": "tool", "tool_call_id": answer.choices[0].message.tool_calls[0].id, "content": "2"}
    await client.chat.completions.create(model="m", messages=[QUESTION, answer.choices[0].message, result], tools=TOOLS)
    assert len(session.nodes) == 1
    with pytest.raises(NotImplementedError):
        client.copy()


async def test_a_session_that_was_reset_knows_nothing_of_before(tokenizers):
    tokenizer = tokenizers["chatml"]
    session = session_of(scripted(tokenizer, "ab", "12"), tokenizer)
    await session.chat_completion(messages=[QUESTION])
    session.reset()
    assert session.get_state() == {"nodes": []}
    await session.chat_completion(messages=[QUESTION, assistant("ab"), QUESTION])
    assert [len(trained(node)) for node in session.nodes] == [len(tokenizer.encode("12")) + 1]
