"""`/generate` keeps its promises on a real vLLM."""

from __future__ import annotations

import concurrent.futures
import json
import socket

import pytest

PROMPT = [5, 6, 7, 8]

pytestmark = pytest.mark.vllm


def test_a_reply_has_the_form_atropos_clients_read(plain_server):
    reply = plain_server.generate("Hello", max_tokens=5, n=2, ignore_eos=True)
    assert reply["prompt"] == "Hello"
    assert reply["prompt_token_ids"] == [41, 70, 77, 77, 80]
    assert [len(tokens) for tokens in reply["token_ids"]] == [5, 5]
    assert reply["finish_reasons"] == ["length", "length"]
    assert len(reply["text"]) == 2
    for tokens, positions in zip(reply["token_ids"], reply["logprobs"], strict=True):
        assert [list(position[0]) for position in positions] == [[str(token)] for token in tokens]
        assert all(position[0][str(token)] <= 0 for token, position in zip(tokens, positions, strict=True))


def test_the_seeds_curl_example_shows_logprobs(plain_server):
    assert plain_server.generate("Hello", max_tokens=5)["logprobs"]


@pytest.mark.parametrize(("asked", "entries"), [(True, 1), (0, 1), (2, 2)])
def test_logprobs_true_means_the_sampled_tokens_own(plain_server, asked, entries):
    (positions,) = plain_server.generate(PROMPT, max_tokens=4, logprobs=asked)["logprobs"]
    assert all(len(position) >= entries for position in positions)


def test_logprobs_are_left_out_only_when_null_is_asked(plain_server):
    assert plain_server.generate(PROMPT, max_tokens=4, logprobs=None)["logprobs"] is None


def test_the_compact_form_carries_one_number_a_token_and_no_text(plain_server):
    reply = plain_server.generate(PROMPT, max_tokens=6, compact=True)
    assert set(reply) == {
        "token_ids",
        "finish_reasons",
        "policy_versions",
        "prompt_token_ids",
        "boot_id",
        "logprobs",
    }
    assert [type(value) for value in reply["logprobs"][0]] == [float] * 6
    assert plain_server.generate(PROMPT, compact=True, detokenize=True)["text"][0]


def test_tokens_given_as_a_prompt_are_not_tokenised_again(plain_server):
    reply = plain_server.generate({"prompt_token_ids": PROMPT}, max_tokens=2)
    assert reply["prompt_token_ids"] == PROMPT


def test_every_token_has_the_version_the_server_was_started_with(plain_server):
    reply = plain_server.generate(PROMPT, max_tokens=5, n=3, ignore_eos=True)
    assert reply["policy_versions"] == [[[0, 5, 7]]] * 3
    assert reply["boot_id"] == plain_server.info()["boot_id"]


def test_logprobs_are_those_after_temperature(plain_server, reference):
    import torch

    reply = plain_server.generate(PROMPT, max_tokens=1, temperature=0.5, compact=True)
    reference.model.load_state_dict(reference.base)
    with torch.no_grad():
        scores = torch.log_softmax(reference.model(torch.tensor([PROMPT])).logits[0, -1] / 0.5, dim=-1)
    assert reply["logprobs"][0][0] == pytest.approx(float(scores[reply["token_ids"][0][0]]), abs=1e-4)


@pytest.mark.parametrize("compact", [False, True])
def test_prompt_logprobs_are_the_models_own_for_each_token_given(plain_server, reference, compact):
    """A teacher returns the given tokens' logprobs and those of the most likely tokens at each position."""
    import torch

    asked = {"prompt_logprobs": 3, "max_tokens": 1, "temperature": 0.0, "compact": compact}
    first, *rest = plain_server.generate({"prompt_token_ids": PROMPT}, **asked)["prompt_logprobs"]
    reference.model.load_state_dict(reference.base)
    with torch.no_grad():
        scores = torch.log_softmax(reference.model(torch.tensor([PROMPT])).logits[0], dim=-1)
    assert first is None
    assert len(rest) == len(PROMPT) - 1
    for position, found in enumerate(rest):
        assert next(iter(found)) == str(PROMPT[position + 1])
        assert set(map(int, found)) >= set(scores[position].topk(3).indices.tolist())
        for token, value in found.items():
            assert value == pytest.approx(float(scores[position, int(token)]), abs=1e-4)


def test_prompt_logprobs_are_returned_only_on_request(plain_server):
    assert "prompt_logprobs" not in plain_server.generate(PROMPT, max_tokens=1)


def test_a_stop_string_ends_the_output_and_is_cut_from_the_text(plain_server):
    whole = plain_server.generate(PROMPT, max_tokens=40, temperature=0.0)["text"][0]
    stop = next(letter for letter in whole[1:] if letter.isascii() and letter.isprintable())
    reply = plain_server.generate(PROMPT, max_tokens=40, temperature=0.0, stop=stop)
    assert reply["text"][0] == whole[: whole.index(stop)]
    assert reply["finish_reasons"] == ["stop"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "a", "max_token": 5}, "did you mean max_tokens"),
        ({"prompt": {"prompt_token_id": [1]}}, "did you mean prompt_token_ids"),
        ({"prompt": "a", "temperature": "warm"}, "temperature"),
        ({"prompt": "a", "top_p": 7}, "top_p"),
        ({"prompt": [5, 7000]}, "7000"),
        ({"prompt": [5, -6]}, "-6"),
        ({"prompt": []}, "empty"),
        ({"prompt": [1] * 5000}, "5000"),
        ({"max_tokens": 5}, "prompt"),
        ({"prompt": [5], "n": 0}, "n must be at least 1, got 0"),
        ({"prompt": [5], "min_p": 2}, "min_p"),
        ({"prompt": [5], "top_k": -7}, "-7"),
        ({"prompt": [5], "stop": ""}, "stop"),
        ({"prompt": [5], "logprobs": 900}, "900"),
        ({"prompt": [5], "logit_bias": {"5": 1e308}}, "logit_bias: 1e+308 for token 5"),
        ({"prompt": [99999], "stream": True}, "99999"),
    ],
)
def test_a_mistake_is_answered_with_422_the_field_and_the_value(plain_server, body, said):
    answer = plain_server.post("/generate", body)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert said in answer.json()["detail"]


@pytest.mark.parametrize("body", [b"", b"no JSON", b'{"prompt": "\xff"}'])
def test_a_body_that_is_not_json_is_answered_with_400(plain_server, body):
    answer = plain_server.client.post("/generate", content=body)
    assert (answer.status_code, answer.json()["type"].rpartition(":")[2]) == (400, "bad-json")


def test_another_method_is_answered_with_405_and_the_right_one(plain_server):
    answer = plain_server.client.get("/generate")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_one_seed_gives_the_same_tokens_however_the_prompt_was_cut_into_parts(plain_server):
    """On a CPU vLLM's engine crashed here: it reads 256 tokens per step (of all requests), the prompt has 700."""
    prompt = [5 + number % 290 for number in range(700)]

    def tokens(seed):
        return plain_server.generate(prompt, max_tokens=12, seed=seed, compact=True)["token_ids"][0]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        others = [pool.submit(plain_server.generate, [*prompt[:90], n], max_tokens=20) for n in range(5)]
        together, alone, another = pool.submit(tokens, 3).result(), tokens(3), tokens(4)
        assert all(other.result() for other in others)
    assert together == alone != another


def events_of(server, **fields):
    """Return the events of a stream, read to its end."""
    with server.client.stream("POST", "/generate", json={"prompt": PROMPT, "stream": True, **fields}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_sends_each_token_once_and_ends_with_the_versions(plain_server):
    events = events_of(plain_server, max_tokens=6)
    assert sum(len(event["token_ids"]) for event in events) == 6
    assert sum(len(event["logprobs"]) for event in events) == 6
    assert events[-1]["finish_reason"] == "length"
    assert events[-1]["policy_versions"] == [[0, 6, 7]]


@pytest.mark.parametrize("compact", [False, True])
def test_a_stream_says_of_the_prompt_what_a_whole_answer_says_and_each_output_has_its_versions(plain_server, compact):
    asked = {"prompt": "Hello", "prompt_logprobs": 1, "n": 2, "max_tokens": 4, "ignore_eos": True, "compact": compact}
    whole = plain_server.generate(**asked)
    first, *rest = events_of(plain_server, **asked)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [place and list(place) for place in first["prompt_logprobs"]] == [
        place and list(place) for place in whole["prompt_logprobs"]
    ]
    assert not any("prompt_logprobs" in event for event in rest)
    ends = {event["index"]: event["policy_versions"] for event in [first, *rest] if "finish_reason" in event}
    assert ends == {0: [[0, 4, 7]], 1: [[0, 4, 7]]}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_requests_in_the_engine(plain_server, wait_until, stream):
    def running():
        return plain_server.debug()["requests_running"]

    before = plain_server.debug()["generated_tokens_total"]
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": stream, "n": 4}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    url = plain_server.client.base_url
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(head + body)
        wait_until(lambda: running() == 4)
    wait_until(lambda: running() == 0)
    debug = plain_server.debug()
    assert debug["requests_inside"] == 0
    assert plain_server.debug()["generated_tokens_total"] == debug["generated_tokens_total"]
    assert debug["generated_tokens_total"] - before < 4 * 3000


def test_openai_routes_work_as_vllm_made_them(plain_server):
    model = str(plain_server.model)
    assert plain_server.get("/v1/models")["data"][0]["id"] == model
    answer = plain_server.post("/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_a_plain_server_says_how_to_share_and_needs_a_token_for_changes(plain_server):
    info = plain_server.info()
    assert (info["sharing"], info["policy_version"], info["manifest_path"]) == (False, 7, None)
    assert "--share-weights" in info["how_to_share"]
    assert plain_server.post("/bridge/pause", {}).status_code == 401


def test_another_sites_page_gets_nothing_generated(plain_server):
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert plain_server.post("/generate", {"prompt": PROMPT}, **headers).status_code == 403


def test_health_generate_samples_a_token(plain_server):
    assert plain_server.client.get("/health_generate").status_code == 200


def test_a_sampling_mask_holds_the_tokens_that_a_draw_could_choose_from(plain_server, reference):
    """With it the logprob is repeated from the model's own: over these tokens alone."""
    import torch

    asked = {"max_tokens": 1, "temperature": 0.7, "seed": 3, "sampling_mask_limit": 64}
    reference.model.load_state_dict(reference.base)
    with torch.no_grad():
        logits = reference.model(torch.tensor([PROMPT])).logits[0, -1].float() / 0.7
    best = logits.topk(40).indices.tolist()
    for truncation, size in (({"top_k": 5}, 5), ({"top_p": 0.3}, None), ({"min_p": 0.8}, None), ({"top_k": 64}, 64)):
        reply = plain_server.generate(PROMPT, compact=True, **asked, **truncation)
        ((mask,),) = reply["sampling_masks"]
        assert size is None or len(mask) == size
        assert set(mask) >= set(best[: min(len(mask), 40)]), truncation
        over_mask = logits[reply["token_ids"][0][0]] - logits[mask].logsumexp(0)
        assert reply["logprobs"][0][0] == pytest.approx(float(over_mask), abs=1e-4)
    for truncation in ({"top_k": 65}, {}):
        assert plain_server.generate(PROMPT, compact=True, **asked, **truncation)["sampling_masks"] == [[[]]]


def test_a_stream_sends_the_same_sampling_masks_as_a_whole_answer(plain_server):
    asked = {"max_tokens": 12, "n": 2, "seed": 5, "top_p": 0.5, "sampling_mask_limit": 200, "compact": True}
    whole = plain_server.generate(PROMPT, **asked)["sampling_masks"]
    parts = [[], []]
    for event in events_of(plain_server, **asked):
        parts[event["index"]] += event["sampling_masks"]
    assert [[set(mask) for mask in masks] for masks in parts] == [[set(mask) for mask in masks] for masks in whole]
    assert any(len(mask) > 1 for masks in whole for mask in masks)
