"""A stream sends an answer token by token; its parts add up to the answer that is not streamed."""

import json
import time
from urllib.parse import urlsplit

import anyio
import pytest

from environments.sdk.config import APIServerConfig
from environments.sdk.errors import InferenceUnavailable
from environments.sdk.server_manager import ServerManager
from environments.sdk.testing import served
from environments.sdk.tools import HermesParser, JsonParser

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "How many now?"}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "search", "arguments": {"q": 1}}</tool_call>'


async def stream(http, path="chat/completions", **fields):
    """Return the documents of a stream's events, and whether its end was marked."""
    body = {"messages": [USER]} if path.startswith("chat") else {"prompt": "2+2="}
    answer = await http.post(path, json={**body, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    return [json.loads(event) for event in events if event != "[DONE]"], events[-1] == "[DONE]"


def put_together(chunks, index=0):
    """Return the message and finish reason that a client assembles from the chunks of one choice."""
    message = {"role": "", "content": "", "calls": {}}
    reasons = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        message["role"] += delta.get("role", "")
        message["content"] += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            call = message["calls"].setdefault(part["index"], {"name": "", "arguments": "", "id": ""})
            call["id"] += part.get("id", "")
            for name, value in part["function"].items():
                call[name] += value
        reasons += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
    return message, reasons


async def test_text_comes_in_pieces_and_ends_with_the_reason(make_manager, inside):
    manager = make_manager("twelve and more")
    async with inside(manager) as (session, http):
        chunks, done = await stream(http)
    message, reasons = put_together(chunks)
    assert (message["role"], message["content"], reasons, done) == ("assistant", "twelve and more", ["stop"], True)
    pieces = [chunk for chunk in chunks if chunk["choices"][0]["delta"].get("content")]
    assert len(pieces) > 5
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert len(session.nodes) == 1


async def test_pieces_arrive_while_the_server_goes_on_sampling(make_manager, reach):
    manager = make_manager("0123456789")
    manager.fake.event_seconds = 0.05
    with served(manager.fake) as url:
        over_http = ServerManager(
            [APIServerConfig(server_type="vllm", base_url=f"{url}/v1")],
            load_tokenizer=lambda: manager.open_session().tokenizer,
        )
        async with over_http.managed_server(use_proxy=True) as session, reach(session) as http:
            times = []
            body = {"messages": [USER], "stream": True}
            async with http.stream("POST", "chat/completions", json=body) as answer:
                times = [time.monotonic() async for line in answer.aiter_lines() if line]
        await over_http.aclose()
    assert times[-1] - times[0] > 0.3, "the answer came in one go"
    assert len(session.nodes) == 1


async def test_each_choice_has_its_own_pieces(make_manager, inside):
    manager = make_manager("one", "another")
    async with inside(manager) as (session, http):
        chunks, _ = await stream(http, n=2)
    assert [put_together(chunks, index)[0]["content"] for index in range(2)] == ["one", "another"]
    assert len(session.nodes) == 2


async def test_more_samples_than_one_request_takes_keep_their_numbers(make_manager, inside):
    manager = make_manager(*"0123456789")
    async with inside(manager) as (_session, http):
        chunks, _ = await stream(http, n=10)
    assert [put_together(chunks, index)[0]["content"] for index in range(10)] == [*"0123456789"]


@pytest.mark.parametrize(
    "text", [f"Let me see. {CALL}", CALL, f"\n {CALL}{CALL}", f"{CALL} and so on", "a < b, <tool", "<tool_call>{"]
)
async def test_calls_come_whole_and_the_text_before_them_at_once(make_manager, inside, text):
    manager = make_manager(text, text)
    async with inside(manager) as (_session, http):
        chunks, _ = await stream(http, tools=[SEARCH])
        body = {"messages": [USER, USER], "tools": [SEARCH]}
        whole = (await http.post("chat/completions", json=body)).json()["choices"][0]
        streamed, reasons = put_together(chunks)
        assert streamed["content"] == (whole["message"]["content"] or "")
        assert reasons == [whole["finish_reason"]]
        calls = whole["message"]["tool_calls"] or []
        assert [(call["name"], call["arguments"]) for call in streamed["calls"].values()] == [
            (call["function"]["name"], call["function"]["arguments"]) for call in calls
        ]
        assert all(call["id"].startswith("call_") for call in streamed["calls"].values())


async def test_a_streamed_answer_is_recognised_when_it_comes_back(make_manager, inside):
    manager = make_manager(f"Let me see. {CALL}", "4")
    async with inside(manager) as (session, http):
        message, _ = put_together((await stream(http, tools=[SEARCH]))[0])
        (call,) = message["calls"].values()
        function = {"name": call["name"], "arguments": call["arguments"]}
        said = {
            "role": "assistant",
            "content": message["content"],
            "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
        }
        result = {"role": "tool", "tool_call_id": call["id"], "content": "found"}
        await stream(http, messages=[USER, said, result], tools=[SEARCH])
        assert len(session.nodes) == 1


async def test_a_stop_text_and_its_beginning_are_never_sent(make_manager, inside):
    manager = make_manager("one STOP", "one STO")
    async with inside(manager) as (_session, http):
        assert put_together((await stream(http, stop=["STOP"]))[0])[0]["content"] == "one "
        assert put_together((await stream(http, stop=["STOP"]))[0])[0]["content"] == "one STO"


async def test_letters_of_several_tokens_are_sent_whole(make_manager, inside):
    manager = make_manager("naïve 数字 🙂 end")
    async with inside(manager) as (_session, http):
        chunks, _ = await stream(http)
    assert put_together(chunks)[0]["content"] == "naïve 数字 🙂 end"
    assert not any("\ufffd" in (chunk["choices"][0]["delta"].get("content") or "") for chunk in chunks)


async def test_logprobs_come_with_the_pieces(make_manager, inside):
    manager = make_manager("12", "34")
    async with inside(manager) as (session, http):
        chunks, _ = await stream(http, logprobs=True)
        texts, _ = await stream(http, "completions", logprobs=0)
        chat, text = session.nodes
    told = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["logprob"] for entry in told] == [value for value in chat.logprobs if value != 1.0]
    told = [chunk["choices"][0]["logprobs"] for chunk in texts if chunk["choices"][0]["logprobs"]]
    assert [value for part in told for value in part["token_logprobs"]] == [v for v in text.logprobs if v != 1.0]
    assert [value for part in told for value in part["text_offset"]] == [0, 1, 2]


async def test_the_usage_is_sent_after_the_last_piece_if_it_was_requested(make_manager, inside):
    manager = make_manager("12", "34")
    async with inside(manager) as (_session, http):
        chunks, _ = await stream(http, stream_options={"include_usage": True})
        texts, _ = await stream(http, "completions", stream_options={"include_usage": True})
    for events in (chunks, texts):
        assert (events[-1]["choices"], events[-1]["usage"]["completion_tokens"]) == ([], 3)
        assert all(event["usage"] is None for event in events[:-1])


async def test_a_text_completion_streams_too(make_manager, inside):
    manager = make_manager("four")
    async with inside(manager) as (_session, http):
        chunks, done = await stream(http, "completions")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "four"
    assert (chunks[-1]["choices"][0]["finish_reason"], done) == ("stop", True)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_an_answer_that_is_not_streamed_is_sent_in_pieces_too(make_manager, inside):
    manager = make_manager("a text of more than some tokens")
    manager.fake.ours = False
    async with inside(manager) as (_session, http):
        chunks, _ = await stream(http)
    assert put_together(chunks)[0]["content"] == "a text of more than some tokens"
    assert len([chunk for chunk in chunks if chunk["choices"][0]["delta"].get("content")]) > 2


async def test_what_fails_before_the_first_token_has_a_status_of_its_own(make_manager, inside):
    manager = make_manager()
    manager.fake.problem = (400, "no such thing")
    async with inside(manager) as (_session, http):
        answer = await http.post("chat/completions", json={"messages": [USER], "stream": True})
        assert answer.status_code == 400
        assert "no such thing" in answer.json()["error"]["message"]


@pytest.mark.parametrize("streams", [True, False])
async def test_what_fails_in_several_requests_for_one_has_the_status_of_their_error(make_manager, inside, streams):
    """As the group of their errors it was a 500, which clients repeat."""
    manager = make_manager()
    manager.fake.problem = (400, "no such thing")
    async with inside(manager) as (_session, http):
        body = {"messages": [USER], "n": manager.pool.max_n_completions + 1, "stream": streams}
        answer = await http.post("chat/completions", json=body)
        assert answer.status_code == 400
        assert "no such thing" in answer.json()["error"]["message"]


async def test_a_stream_that_breaks_off_ends_with_the_problem_and_leaves_no_sequence(make_manager, reach):
    """A repeated request would sample something else than the client has read."""
    manager = make_manager("twelve and more")
    manager.fake.broken_after, manager.fake.event_seconds = 3, 0.02
    async with manager.managed_server(use_proxy=True) as session, reach(session) as http:
        chunks, done = await stream(http)
        assert not done
        assert "ended early" in chunks[-1]["error"]["message"]
        assert len(manager.fake.requests) == 1
        assert session.nodes == []
    await manager.aclose()


async def test_a_client_that_leaves_in_the_middle_ends_its_request(make_manager, reach):
    manager = make_manager("0123456789" * 20)
    manager.fake.event_seconds = 0.02
    async with manager.managed_server(use_proxy=True) as session, reach(session) as http:
        body = {"messages": [USER], "stream": True}
        async with http.stream("POST", "chat/completions", json=body) as answer:
            await anext(answer.aiter_lines())
        with anyio.fail_after(5):
            while manager.fake.in_flight:  # noqa: ASYNC110 - nothing tells when a server lets go of a request
                await anyio.sleep(0.01)
        assert session.nodes == []
    await manager.aclose()


async def test_a_client_that_leaves_before_the_first_piece_is_sent_ends_the_sampling(make_manager, monkeypatch):
    """Starlette called `Task.cancel` in a thread, where asyncio does not notice it, or breaks."""
    manager = make_manager("0123456789" * 50)
    manager.fake.event_seconds = 0.02
    body = json.dumps({"messages": [USER], "stream": True}).encode()
    received = iter([{"type": "http.request", "body": body}, None, {"type": "http.disconnect"}])

    async def receive():
        message = next(received)
        return message or await anyio.sleep_forever()  # it is cancelled once the answer has begun

    async def send(_):
        await anyio.sleep_forever()  # its connection takes no byte any more

    async def refuse(call, *_):
        raise AssertionError(f"{call} is called in a thread")

    monkeypatch.setattr("starlette.background.run_in_threadpool", refuse)
    session = manager.open_session()
    with manager.proxy.serve(session):
        key = (b"authorization", f"Bearer {session.api_key}".encode())
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "POST",
            "path": f"{urlsplit(session.get_url()).path}/chat/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), key],
        }
        await manager.proxy(scope, receive, send)
        with anyio.fail_after(2):
            while manager.fake.in_flight:  # noqa: ASYNC110 - the fake server has no event for it
                await anyio.sleep(0.01)
    await manager.aclose()


async def test_code_in_process_gets_the_pieces_and_the_answer(make_manager):
    manager = make_manager("twelve", "thirteen")
    pieces = []
    async with manager.managed_server() as session:
        answer = await session.chat_completion(messages=[USER], on_delta=pieces.append)
    assert "".join(piece.text for piece in pieces) == answer.choices[0].message.content == "twelve"
    manager.fake.broken_after = 1
    async with manager.managed_server() as session:
        with pytest.raises(InferenceUnavailable):
            await session.chat_completion(messages=[USER], on_delta=pieces.append)


@pytest.mark.parametrize("parser", [HermesParser(), JsonParser()])
@pytest.mark.parametrize(
    "text", ["a {b", '{"name": "f"}', "[]", "```json", " x", f"say {CALL}", "<", "<|python_tag|>{"]
)
def test_what_a_parser_calls_certain_is_how_the_content_begins(parser, text):
    content = parser.parse(text).content
    for end in range(len(text) + 1):
        assert content.startswith(text[: parser.certain_length(text[:end])])
