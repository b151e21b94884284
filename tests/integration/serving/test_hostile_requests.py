"""Requests of other clients are answered correctly or refused with the reason, and leave nothing behind."""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from .random_requests import HALF_A_CHARACTER, HUGE, MALFORMED

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7]
EIGHT = 25
"""The token "8"; with a bias of 100 nothing else is sampled."""
ONLY_EIGHT = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logit_bias": {str(EIGHT): 100}}
INSIDE_A_CHARACTER = [EIGHT, EIGHT, EIGHT, 126]


def post_escaped(server, path, body):
    """Post a body with half a character, which can be sent as an escape only."""
    return server.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def completion(server, **fields):
    answer = server.post("/v1/completions", {"model": str(server.model), "prompt": PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def streamed_text(server, prompt, **fields):
    body = {"prompt": prompt, "stream": True, **fields}
    with server.client.stream("POST", "/generate", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return "".join(json.loads(line)["text"] for line in lines[:-1])


def texts(server, prompt, **fields):
    """Return the texts of each route."""
    whole = server.generate(prompt, **fields)["text"][0]
    (choice,) = completion(server, prompt=prompt, **fields)
    return {whole, streamed_text(server, prompt, **fields), choice["text"]}


def test_neighbours_with_other_logprobs_are_all_answered_in_their_own_width(plain_server):
    """Two widths in one batch crashed the engine, and so ended every run on it."""
    asked = {"max_tokens": 120, "temperature": 0, "ignore_eos": True}

    def ours(count):
        (positions,) = plain_server.generate(PROMPT, logprobs=count, **asked)["logprobs"]
        return {len(position) for position in positions}

    def theirs(count):
        (choice,) = completion(plain_server, logprobs=count, return_tokens_as_token_ids=True, **asked)
        return {len(position) for position in choice["logprobs"]["top_logprobs"]}

    with ThreadPoolExecutor(8) as pool:
        widths = {count: pool.submit(ours, count) for count in (0, 1, 2, 7, 20)}
        others = {count: pool.submit(theirs, count) for count in (2, 5)}
        for count, found in widths.items():
            assert found.result() == {max(1, count)}, "greedy, so the sampled token is one of the most likely"
        for count, found in others.items():
            assert found.result() == {count}


def test_tokens_that_one_request_names_are_not_its_neighbours_alternatives(plain_server):
    named = {"logprobs": 2, "logprob_token_ids": [40, 41], "return_tokens_as_token_ids": True}

    def others():
        asked = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}
        return plain_server.generate(PROMPT, logprobs=3, **asked)["logprobs"][0]

    alone = others()
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(others)
        (choice,) = completion(plain_server, max_tokens=60, temperature=0, ignore_eos=True, **named)
        for mine, theirs in zip(alone, beside.result(), strict=True):
            assert [next(iter(entry)) for entry in mine] == [next(iter(entry)) for entry in theirs]
            for a, b in zip(mine, theirs, strict=True):
                assert next(iter(a.values())) == pytest.approx(next(iter(b.values())), abs=1e-4)
    for position in choice["logprobs"]["top_logprobs"]:
        assert {"token_id:40", "token_id:41"} <= position.keys()


def test_scoring_by_named_tokens_works_beside_others(plain_server):
    body = {"model": str(plain_server.model), "query": "a", "items": ["b", "c"], "label_token_ids": [40, 41]}
    alone = plain_server.post("/generative_scoring", body).json()["data"]
    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(plain_server.generate, PROMPT, max_tokens=80, logprobs=5) for _ in range(3)]
        found = plain_server.post("/generative_scoring", body).json()["data"]
        assert all(each.result() for each in beside)
    assert [each["score"] for each in found] == pytest.approx([each["score"] for each in alone], abs=1e-4)


def test_each_grammar_is_compiled_by_the_library_that_takes_it_whichever_came_first(plain_server):
    """VLLM compiled all by the first request's choice, which silently ignored what it does not know."""
    (first,) = completion(plain_server, structured_outputs={"choice": ["yes", "no"]})
    assert first["text"] in {"yes", "no"}
    four_letters = {"json": {"type": "string", "pattern": "^[ab]+$", "minLength": 4, "maxLength": 4}}
    found = [completion(plain_server, structured_outputs=four_letters, seed=seed)[0]["text"] for seed in range(4)]
    assert [len(json.loads(text)) for text in found] == [4] * 4
    assert len(set(found)) > 1


@pytest.mark.parametrize(("path", "body"), MALFORMED)
def test_a_clients_mistake_is_never_the_servers_error(plain_server, path, body):
    named = {} if path == "/generate" else {"model": str(plain_server.model)}
    answer = post_escaped(plain_server, path, named | body)
    if answer.status_code == 200 and body.get("stream"):
        assert '"code": 400' in answer.text
    else:
        assert 400 <= answer.status_code < 500, answer.text
    wait_for_nothing_left(plain_server)


def wait_for_nothing_left(server):
    deadline = time.monotonic() + 10
    while (debug := server.debug())["requests_known"] or debug["requests_running"] or debug["requests_inside"]:
        assert time.monotonic() < deadline, debug
        time.sleep(0.02)


def test_what_cannot_be_sent_to_the_engine_is_forgotten(plain_server):
    """VLLM kept a record of such a request, and its adapter, for ever."""
    bad_id = {"request_id": HALF_A_CHARACTER}
    for fields in ({"top_k": HUGE}, {"stop": HALF_A_CHARACTER}, bad_id, bad_id | {"n": 2}):
        body = {"model": str(plain_server.model), "prompt": PROMPT, **fields}
        refused = post_escaped(plain_server, "/v1/completions", body)
        assert refused.status_code == 400, refused.text
        assert "cannot be passed to the engine" in refused.json()["error"]["message"]
    assert plain_server.debug()["requests_known"] == 0


@pytest.mark.parametrize(
    "limits",
    [
        {"allowed_token_ids": [0], "min_tokens": 3},
        {"allowed_token_ids": [EIGHT], "bad_words": ["8"]},
        {"allowed_token_ids": [EIGHT], "stop_token_ids": [EIGHT], "min_tokens": 2},
    ],
)
def test_limits_that_leave_nothing_to_sample_are_refused_by_every_route(plain_server, limits):
    """VLLM answered token 0, which had no probability."""
    refused = plain_server.post("/generate", {"prompt": PROMPT, "max_tokens": 4, **limits})
    assert (refused.status_code, refused.json()["type"].rpartition(":")[2]) == (422, "bad-request")
    body = {"model": str(plain_server.model), "prompt": PROMPT, "max_tokens": 4, **limits}
    assert plain_server.post("/v1/completions", body).status_code == 400


def test_limits_that_leave_nothing_later_on_end_the_answer_with_the_reason(plain_server):
    limits = {"prompt": PROMPT, "max_tokens": 4, "allowed_token_ids": [EIGHT], "bad_words": ["88"]}
    refused = plain_server.post("/generate", limits)
    assert (refused.status_code, refused.json()["type"].rpartition(":")[2]) == (422, "nothing-to-sample")
    streamed = plain_server.post("/generate", limits | {"stream": True})
    begun = streamed.headers["content-type"].startswith("text/event-stream")  # not where both tokens came at once
    assert (streamed.status_code, "event: error" in streamed.text) == ((200, True) if begun else (422, False))
    assert "nothing-to-sample" in streamed.text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": "8"}, ""),
        ({"stop": "88"}, ""),
        ({"stop": "888", "include_stop_str_in_output": True}, "888"),
        ({"stop_token_ids": [EIGHT]}, ""),
        ({"stop_token_ids": [EIGHT], "include_stop_str_in_output": True}, "8"),
        ({"bad_words": ["q"]}, "8888"),
    ],
)
def test_every_way_to_ask_gives_the_same_text(plain_server, fields, text):
    assert texts(plain_server, PROMPT, **ONLY_EIGHT | fields) == {text}


def test_a_prompt_that_ends_inside_a_character_does_not_come_back_in_the_text(plain_server):
    assert texts(plain_server, INSIDE_A_CHARACTER, **ONLY_EIGHT) == {"8888"}
    assert texts(plain_server, INSIDE_A_CHARACTER, **ONLY_EIGHT, stop="zzz") == {"8888"}
    reply = plain_server.generate(INSIDE_A_CHARACTER, **ONLY_EIGHT | {"max_tokens": 2}, stop="888")
    assert reply["finish_reasons"] == ["length"], "stop strings are looked for in the output alone"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(plain_server):
    """Tokenising 10 MB took 17 s of a core."""
    plain_server.generate(PROMPT, max_tokens=1)
    fitting, seconds = [], []
    for text in ("a" * 3000, "a" * 10_000_000):
        for _ in range(3):
            began = time.monotonic()
            status = plain_server.post("/generate", {"prompt": text, "max_tokens": 1}).status_code
            (fitting if len(text) == 3000 else seconds).append(time.monotonic() - began)
        assert status == (200 if len(text) == 3000 else 422)
    assert statistics.median(seconds) < 20 * statistics.median(fitting) + 0.5


def test_a_model_that_is_not_served_is_answered_with_those_that_are(plain_server):
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"):
        body = {"model": "nobody", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        body = {name: body[name] for name in ("model", "messages" if "chat" in path else "prompt")}
        answer = plain_server.post(path, body)
        assert answer.status_code == 404
        assert f"'nobody' is not served here; there are {plain_server.model}" in answer.text


def test_a_route_that_is_not_served_is_answered_with_the_list_of_those_that_are(plain_server):
    answer = plain_server.post("/v1/embeddings", {"model": "a", "input": "b"})
    assert answer.status_code == 404
    assert (
        answer.json()["detail"] == "POST /v1/embeddings is not served here; GET /bridge/list_endpoints lists the routes"
    )


@pytest.mark.parametrize("origin", ["http://[::1", "null", "http://evil.example", "http://localhost:3000"])
def test_another_sites_page_is_refused_by_vllms_routes_too(plain_server, origin):
    body = {"model": str(plain_server.model), "prompt": PROMPT, "max_tokens": 1}
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/inference/v1/generate"):
        assert plain_server.post(path, body, Origin=origin).status_code == 403
    assert plain_server.client.get("/bridge/debug", headers={"Origin": origin}).status_code == 403
    shown = plain_server.client.get("/v1/models", headers={"Origin": origin})
    assert "access-control-allow-origin" not in shown.headers, "so the page cannot read it"


def test_a_name_pointed_at_this_machine_reads_nothing_and_a_containers_name_for_it_works(plain_server):
    body = {"model": str(plain_server.model), "prompt": PROMPT, "max_tokens": 1}
    for host in ("evil.example:9001", "[::1"):
        assert plain_server.client.get("/v1/models", headers={"Host": host}).status_code == 403
        assert plain_server.post("/v1/completions", body, Host=host).status_code == 403
    for host in ("vllm:9001", "host.docker.internal:9001", "localhost"):
        assert plain_server.post("/v1/completions", body, Host=host).status_code == 200
