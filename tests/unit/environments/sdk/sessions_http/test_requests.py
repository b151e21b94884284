"""A session honours each field of OpenAI's requests, or refuses it by name with the reason."""

import pytest

from environments.sdk.config import SessionSettings
from environments.sdk.errors import RequestRefused, SamplingNotTrainable
from environments.sdk.inference.sampling import TRUNCATING
from environments.sdk.session.openai_client import ManagedServerAdapter
from environments.sdk.session.openai_requests import FIELDS, REFUSED, read_request
from environments.sdk.session.tokens_and_masks import record_samples

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "How many now?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"q": 1}'}}

REFUSED_VALUES = {
    "chat": {
        "n": [0, -1, 1.5, True, "2", 4096],
        "messages": ["hi", {"role": "user"}],
        "max_tokens": [0, -5, "9"],
        "max_completion_tokens": [0],
        "temperature": ["hot", -1, True],
        "stop": [[""], "", [1], 3],
        "stop_token_ids": [[-1], 3],
        "seed": [1.5, 2**70, "x"],
        "logprobs": [1, "yes"],
        "top_logprobs": [1, 5],
        "tools": [[{"type": "search"}], [{"type": "function", "function": {}}], "search"],
        "tool_choice": ["required", {"type": "function", "function": {"name": "search"}}, "any"],
        "parallel_tool_calls": ["no"],
        "stream": ["yes"],
        "stream_options": [{"colour": 1}, "usage"],
        "store": [True],
        "service_tier": ["flex"],
        "modalities": [["text", "audio"]],
        "audio": [{"voice": "x"}],
        "prediction": [{"type": "content"}],
        "web_search_options": [{}],
        "functions": [[{"name": "search"}]],
        "function_call": ["auto"],
        "echo": [True],
        "tempereture": [1.0],
        "colour": ["red"],
    },
    "text": {
        "n": [0],
        "prompt": [["two", "texts"], 3, [], [[1, 2]]],
        "logprobs": [1, 5, True],
        "echo": [True],
        "best_of": [4],
        "suffix": ["end"],
        "messages": [[USER]],
        "tools": [[SEARCH]],
    },
}
CASES = [
    (route, name, value)
    for route, fields in REFUSED_VALUES.items()
    for name, values in fields.items()
    for value in values
]


@pytest.mark.parametrize(("route", "name", "value"), CASES)
def test_what_a_session_does_not_do_is_refused_by_name(route, name, value):
    fields = {"messages": [USER], "stream": True} if route == "chat" else {"prompt": "1"}
    with pytest.raises(RequestRefused, match=name) as refused:
        read_request(route, {**fields, name: value})
    assert refused.value.param == name


def test_the_answer_to_a_mistyped_field_names_the_nearest_one():
    with pytest.raises(RequestRefused, match="did you mean temperature"):
        read_request("chat", {"messages": [USER], "temprature": 1.0})


@pytest.mark.parametrize(("route", "name"), [(route, name) for route in FIELDS for name in REFUSED])
def test_a_refused_field_is_taken_where_its_value_asks_for_nothing(route, name):
    base = {"messages": [USER]} if route == "chat" else {"prompt": "1"}
    for value in (None, *REFUSED[name].neutral):
        assert name not in read_request(route, {**base, name: value}).arguments


def test_every_field_that_changes_the_distribution_reaches_the_sampling():
    given = dict.fromkeys(TRUNCATING, 0.5)
    assert given.items() <= read_request("chat", {"messages": [USER], **given}).arguments.items()


def test_a_request_is_read_into_what_the_session_is_called_with():
    chat = read_request(
        "chat",
        {
            "model": "any",
            "messages": [USER],
            "n": 2,
            "max_completion_tokens": 9,
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": "me",
            "metadata": {"run": 3},
            "store": False,
            "reasoning_effort": "low",
            "tool_choice": None,
        },
    )
    assert chat.arguments == {"messages": [USER], "n": 2, "max_completion_tokens": 9}
    assert (chat.stream, chat.include_usage, chat.labels) == (True, True, {"user": "me", "metadata": {"run": 3}})
    assert chat.template_variables == {"reasoning_effort": "low"}
    text = read_request("text", {"prompt": [5, 6], "logprobs": 0})
    assert text.arguments == {"input_ids": [5, 6], "logprobs": True}


async def post(http, **fields):
    answer = await http.post("chat/completions", json={"messages": [USER], **fields})
    return answer.status_code, answer.json()


async def test_text_parts_are_flattened_as_vllm_does(make_manager, inside, tokenizer):
    manager = make_manager("1", "2")
    parts = [{"type": "text", "text": "How many"}, {"type": "text", "text": "now?"}]
    async with inside(manager) as (_session, http):
        status, _ = await post(http, messages=[{"role": "user", "content": parts}])
        assert status == 200
        flat = [{"role": "user", "content": "How many\nnow?"}]
        await post(http, messages=flat)
    asked = [request["prompt"]["prompt_token_ids"] for request in manager.fake.requests]
    assert asked == [tokenizer.apply_chat_template(flat, add_generation_prompt=True)] * 2


async def test_an_answer_that_comes_back_in_parts_continues_its_sequence(make_manager, inside):
    manager = make_manager("1", "2")
    async with inside(manager) as (session, http):
        await post(http)
        said = {"role": "assistant", "content": [{"type": "text", "text": "1"}]}
        await post(http, messages=[USER, said, USER])
        assert len(session.nodes) == 1


async def test_content_of_null_beside_tool_calls_is_empty(make_manager, inside):
    """OpenAI's own clients send it so; the chat template would add null to a text."""
    manager = make_manager("1")
    chat = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "found"},
    ]
    async with inside(manager) as (_session, http):
        assert (await post(http, messages=chat))[0] == 200


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages"),
        ([USER, {"role": "user", "content": [IMAGE]}], r"messages[1]"),
        ([USER, {"role": "user", "content": [{"type": "text"}]}], r"messages[1]"),
        ([USER, {"role": "user", "content": 3}], r"messages[1]"),
        ([USER, {"content": "x"}], r"messages[1]"),
        ([USER, "x"], r"messages[1]"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}], r"messages[1]"),
    ],
)
async def test_a_message_that_cannot_be_taken_is_named(make_manager, messages, words):
    manager = make_manager()
    async with manager.managed_server() as session:
        with pytest.raises(RequestRefused) as refused:
            await session.chat_completion(messages=messages)
    assert words in str(refused.value)
    assert refused.value.param == words


async def test_a_chat_that_the_template_fails_at_is_refused_with_the_message(
    make_manager, inside, tokenizer, monkeypatch
):
    manager = make_manager("1")
    template = (
        "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    monkeypatch.setattr(tokenizer, "_template", None)
    async with inside(manager) as (_session, http):
        status, answer = await post(http, messages=[USER, {"role": "critic", "content": "x"}, USER])
    assert status == 400
    assert answer["error"]["param"] == "messages[1]"
    assert "no critics" in answer["error"]["message"]
    monkeypatch.undo()
    tokenizer._template = None


async def test_logprobs_are_those_of_the_sequence(make_manager, inside):
    manager = make_manager("12", "34")
    async with inside(manager) as (session, http):
        _, answer = await post(http, logprobs=True)
        text = (await http.post("completions", json={"prompt": "2+2=", "logprobs": 0})).json()
        chat, completion = session.nodes
    told = answer["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in told] == [value for value in chat.logprobs if value != 1.0]
    assert [entry["token"] for entry in told] == ["1", "2", "<|end|>"]
    assert told[0] == {"token": "1", "logprob": told[0]["logprob"], "bytes": [49], "top_logprobs": []}
    told = text["choices"][0]["logprobs"]
    assert told["token_logprobs"] == [value for value in completion.logprobs if value != 1.0]
    assert (told["tokens"], told["text_offset"]) == (["3", "4", "<|end|>"], [0, 1, 2])


async def test_logprobs_that_were_not_requested_are_not_returned(manager, inside):
    async with inside(manager) as (_session, http):
        assert (await post(http, logprobs=False))[1]["choices"][0]["logprobs"] is None


async def test_further_calls_are_left_out_where_one_was_asked_for(make_manager, inside):
    calls = "".join(f'<tool_call>{{"name": "search", "arguments": {{"q": {n}}}}}</tool_call>' for n in range(2))
    manager = make_manager(calls, calls, "3")
    async with inside(manager) as (session, http):
        both = (await post(http, tools=[SEARCH]))[1]["choices"][0]["message"]
        one = (await post(http, tools=[SEARCH], parallel_tool_calls=False, n=1))[1]["choices"][0]["message"]
        assert (len(both["tool_calls"]), len(one["tool_calls"])) == (2, 1)
        result = {"role": "tool", "tool_call_id": one["tool_calls"][0]["id"], "content": "found"}
        await post(http, messages=[USER, one, result], tools=[SEARCH])
        assert len(session.nodes) == 2, "the answer with one call was not recognised"


async def test_labels_of_a_request_are_kept_with_its_sequences(manager, inside):
    async with inside(manager) as (session, http):
        await post(http, user="me", metadata={"turn": "1"})
        assert session.nodes[0].metadata["labels"] == {"user": "me", "metadata": {"turn": "1"}}


async def test_reasoning_effort_is_for_templates_that_read_it(make_manager, inside, tokenizer, monkeypatch):
    manager = make_manager("1", "2")
    async with inside(manager) as (session, http):
        status, answer = await post(http, reasoning_effort="low")
        assert (status, answer["error"]["param"]) == (400, "reasoning_effort")
        monkeypatch.setattr(tokenizer, "chat_template", "{{ reasoning_effort }}:{{ messages[0].content }}")
        monkeypatch.setattr(tokenizer, "_template", None)
        assert (await post(http, reasoning_effort="low"))[0] == 200
        assert session.nodes[0].full_text.startswith("low:How many")
    monkeypatch.undo()
    tokenizer._template = None


async def test_the_prompt_of_a_chat_is_shown_and_nothing_sampled(manager, inside, tokenizer):
    async with inside(manager) as (session, http):
        shown = (await http.post("chat/completions/render", json={"messages": [USER]})).json()
        prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True)
        assert shown == {"prompt_text": tokenizer.decode(prompt), "token_ids": prompt, "num_tokens": len(prompt)}
        assert session.nodes == manager.fake.requests == []


async def test_a_greedy_request_in_training_is_told_the_ways_there_are(manager, inside):
    async with inside(manager) as (_session, http):
        status, answer = await post(http, temperature=0)
    assert status == 400
    assert "X-Atropos-Split: eval" in answer["error"]["message"]
    assert "--env.session_temperature" in answer["error"]["message"]


async def test_a_request_marked_as_evaluation_may_be_greedy_and_leaves_no_sequence(manager, inside):
    with record_samples("train") as sample_log:
        async with inside(manager) as (session, http):
            aside = {"X-Atropos-Split": "eval"}
            body = {"messages": [USER], "temperature": 0, "top_p": 0.5}
            assert (await http.post("chat/completions", json=body, headers=aside)).status_code == 200
            assert manager.fake.requests[0]["temperature"] == 0.0
            assert session.nodes == sample_log.nodes == []
            assert (await post(http))[0] == 200
            assert len(session.nodes) == len(sample_log.nodes) == 1
            wrong = await http.post("chat/completions", json=body, headers={"X-Atropos-Split": "test"})
            assert wrong.status_code == 400


async def test_the_environments_temperature_replaces_that_of_agents_in_training(make_manager, inside):
    manager = make_manager("1", "2", "3", settings=SessionSettings(temperature=0.7))
    async with inside(manager) as (session, http):
        await post(http, temperature=0)
        await post(http)
        await http.post(
            "chat/completions", json={"messages": [USER], "temperature": 0}, headers={"X-Atropos-Split": "eval"}
        )
        assert [node.metadata["generation_params"] for node in session.nodes] == [{"temperature": 0.7}] * 2
    assert [request["temperature"] for request in manager.fake.requests] == [0.7, 0.7, 0.0]


async def test_the_look_alike_of_openais_client_reads_requests_by_the_same_tables(make_manager):
    openai = pytest.importorskip("openai")
    manager = make_manager("1")
    async with manager.managed_server() as session:
        client = ManagedServerAdapter(session)
        for refused in ({"stream": True}, {"tool_choice": "required"}, {"top_logprobs": 3}, {"n": 0}, {"colour": 1}):
            with pytest.raises(RequestRefused) as error:
                await client.chat.completions.create(model="any", messages=[USER], **refused)
            assert error.value.param in refused
        answer = await client.chat.completions.create(
            model="any",
            messages=(USER,),
            logprobs=True,
            stop=openai.NOT_GIVEN,
            timeout=3.0,
            extra_body={"stop_token_ids": [7]},
        )
    assert len(answer.choices[0].logprobs.content) == 2
    assert manager.fake.requests[0]["stop_token_ids"] == [7]


async def test_code_in_process_is_refused_alike(make_manager):
    manager = make_manager()
    async with manager.managed_server() as session:
        for call in (session.chat_completion, manager.chat_completion):
            with pytest.raises(RequestRefused, match="n is 0"):
                await call(messages=[USER], n=0)
            with pytest.raises(RequestRefused, match="messages is empty"):
                await call(messages=[])
        with pytest.raises(SamplingNotTrainable):
            await session.chat_completion(messages=[USER], temperature=0.0)
    assert manager.fake.requests == []


@pytest.mark.parametrize("body", [b"{", b'{"model": "\xff"}', b"[]", b'{"messages": ' + b"[" * 100_000], ids=range(4))
async def test_a_body_that_is_no_json_object_is_refused_as_the_clients_mistake(make_manager, inside, body):
    async with inside(make_manager()) as (_session, http):
        answer = await http.post("chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "not a JSON object" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "", "tool_calls": 5},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": []}]},
        {"role": "tool", "content": "2", "tool_call_id": {}},
        {"role": "user", "content": [{"type": [], "text": "hi"}]},
    ],
    ids=range(4),
)
async def test_a_malformed_message_is_refused_as_the_clients_mistake(make_manager, inside, message):
    async with inside(make_manager("1")) as (_session, http):
        status, body = await post(http, messages=[USER, message])
    assert status == 400
    assert body["error"]["param"].startswith("messages[1]")
