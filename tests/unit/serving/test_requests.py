"""Requests and replies of `/generate` without an engine, and who may ask."""

from __future__ import annotations

from types import SimpleNamespace

import orjson
import pytest

from example_trainer.serving.guard import bearer, refuse_foreign_host, refuse_foreign_page, refuse_without_key
from example_trainer.serving.problems import Problem
from example_trainer.serving.replies import Replies, all_logprobs, chosen_logprobs, version_spans
from example_trainer.serving.sampling import RequestParser, TokenPrompt


def parse(**body):
    return RequestParser().parse(orjson.dumps(body))


def flat(*positions):
    """Logprobs as vLLM gives them: for each position the sampled token first."""
    made = SimpleNamespace(start_indices=[], end_indices=[], token_ids=[], logprobs=[])
    for position in positions:
        made.start_indices.append(len(made.token_ids))
        for token, value in position:
            made.token_ids.append(token)
            made.logprobs.append(value)
        made.end_indices.append(len(made.token_ids))
    return made


def output(tokens, *, versions=None, logprobs=None, text="", index=0, reason="length"):
    spans = None if versions is None else [SimpleNamespace(start=s, end=e, version=v) for s, e, v in versions]
    return SimpleNamespace(
        token_ids=tokens, weight_versions=spans, logprobs=logprobs, text=text, index=index, finish_reason=reason
    )


@pytest.mark.parametrize(("given", "count"), [(True, 0), (False, None), (0, 0), (3, 3), (None, None)])
def test_logprobs_by_word_and_number(given, count):
    assert parse(prompt="a", logprobs=given).logprob_count == count


def test_logprobs_are_there_unless_null():
    assert parse(prompt="a").logprob_count == 0


def test_text_is_made_unless_compact_or_refused():
    assert parse(prompt="a").wants_text
    assert not parse(prompt="a", compact=True).wants_text
    assert parse(prompt="a", compact=True, detokenize=True).wants_text
    assert not parse(prompt="a", detokenize=False).wants_text


def test_prompts_are_text_tokens_or_named_tokens():
    assert parse(prompt="a").prompt == "a"
    assert parse(prompt=[1, 2]).prompt == [1, 2]
    assert parse(prompt={"prompt_token_ids": [1]}).prompt == TokenPrompt([1])


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not JSON"),
        (b"[]", 422, "object"),
        (b'{"prompt": "a", "temprature": 1}', 422, "did you mean temperature"),
        (b'{"prompt": "a", "zzz": 1}', 422, "unknown field 'zzz'"),
        (b'{"prompt": "a", "n": "two"}', 422, "`n`"),
    ],
)
def test_mistakes_name_the_field(body, status, said):
    with pytest.raises(Problem) as caught:
        RequestParser().parse(body)
    assert caught.value.status == status
    assert said in caught.value.detail


def test_spans_cover_the_tokens_and_unlabelled_weights_are_null():
    assert version_spans(output([1, 2, 3], versions=[(0, 2, "4"), (2, 3, "5")])) == [[0, 2, 4], [2, 3, 5]]
    assert version_spans(output([1, 2], versions=[(0, 2, "default")])) == [[0, 2, None]]
    assert version_spans(output([1, 2])) == [[0, 2, None]]
    assert version_spans(output([])) == []


def test_the_sampled_tokens_logprob_is_the_first_of_its_position():
    wide = flat([(5, -1.0), (6, -0.5)], [(7, -2.0), (8, -0.1)])
    assert chosen_logprobs(wide) == [-1.0, -2.0]
    assert all_logprobs(wide) == [[{"5": -1.0}, {"6": -0.5}], [{"7": -2.0}, {"8": -0.1}]]
    assert chosen_logprobs(flat([(5, -1.0)])) == [-1.0]
    assert chosen_logprobs(None) is all_logprobs(None) is None


def test_inexact_versions_are_said_only_when_there_is_something_to_say():
    replies = Replies(boot_id="b", tokenizer=None)
    final = SimpleNamespace(outputs=[output([1], versions=[(0, 1, "2")])])
    request = parse(prompt=[1], compact=True, logprobs=None)
    assert "exact_versions" not in orjson.loads(replies.whole(request, [1], final, None))
    assert orjson.loads(replies.whole(request, [1], final, False))["exact_versions"] is False


def test_problems_are_problem_json_with_retry_after():
    response = Problem(503, "no-policy", "why", retry_after_seconds=2).response()
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["retry-after"] == "2"
    assert orjson.loads(response.body) == {
        "type": "urn:atropos:problem:no-policy",
        "title": "no policy",
        "status": 503,
        "detail": "why",
    }


@pytest.mark.parametrize("host", ["127.0.0.1:9001", "localhost:9001", "[::1]:9001", "10.0.0.4", "gpu-3:9001"])
def test_r28_names_and_addresses_of_this_machine_are_its_own(host):
    refuse_foreign_host(host, ["gpu-3"])


@pytest.mark.parametrize("host", ["attacker.example", "gpu-4:9001", ""])
def test_r28_other_names_may_have_been_pointed_here_by_anybody(host):
    with pytest.raises(Problem, match="403"):
        refuse_foreign_host(host, ["gpu-3"])


def test_r28_pages_of_other_sites_are_refused():
    refuse_foreign_page([(b"host", b"h:1"), (b"origin", b"http://h:1")])
    for headers in ([(b"sec-fetch-site", b"cross-site")], [(b"host", b"h:1"), (b"origin", b"http://h:2")]):
        with pytest.raises(Problem):
            refuse_foreign_page(headers)


def test_a_key_is_asked_for_only_where_one_is_set():
    refuse_without_key([], [])
    refuse_without_key([(b"authorization", b"Bearer k")], [b"j", b"k"])
    for given in ([], [(b"authorization", b"Basic k")], [(b"authorization", b"Bearer x")]):
        with pytest.raises(Problem):
            refuse_without_key(given, [b"k"])
    assert bearer([(b"authorization", b"bearer k")]) == b"k"
