"""New weights are published into a decoding server: every token was sampled under the version stamped on it."""

from __future__ import annotations

import json
import logging
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.vllm

logger = logging.getLogger(__name__)

MAX_ERROR = 1e-4
MEAN_ERROR = 5e-6


def test_successive_versions_differ_clearly_so_that_exactness_is_decided(reference):
    output = [random.Random(1).randrange(2, 250) for _ in range(200)]
    first, second = (reference.logprobs(reference.variant(number), [5, 6], output) for number in (3, 4))
    differing = [abs(a - b) >= 1e-2 for a, b in zip(first, second, strict=True)]
    assert statistics.fmean(differing) >= 0.9


def test_r1_no_token_is_sampled_from_a_mixture(shared_server, reference, decode_under_publishes, errors_of):
    replies, answers, weights = decode_under_publishes(
        shared_server, publishes=6, output_tokens=400, in_flight="recompute"
    )
    errors = [error for reply in replies for error in errors_of(weights, reply)]
    spanning = sum(len(reply["policy_versions"][0]) > 1 for reply in replies)
    assert len(errors) >= 2000
    assert spanning >= len(replies) / 4
    assert max(errors) <= MAX_ERROR
    assert statistics.fmean(errors) <= MEAN_ERROR
    assert sum(answer["paused_requests"] for answer in answers) >= 6 * 16


def test_a_publish_that_chooses_how_long_to_drain_expects_about_the_loss_that_comes(
    shared_server, decode_under_publishes, errors_of
):
    replies, answers, weights = decode_under_publishes(
        shared_server, publishes=6, output_tokens=400, in_flight="auto", drain_seconds=0.5
    )
    errors = [error for reply in replies for error in errors_of(weights, reply)]
    assert max(errors) <= MAX_ERROR
    expected, came = (sum(answer[name] for answer in answers) for name in ("expected_loss_seconds", "loss_seconds"))
    assert expected > 0
    assert expected / 4 <= came <= 4 * expected, (expected, came)


def test_r1_recomputed_tokens_are_counted_exactly(shared_server, reference, decode_under_publishes):
    before = shared_server.debug()
    replies, answers, _ = decode_under_publishes(shared_server, publishes=3, output_tokens=200, in_flight="recompute")
    after = shared_server.debug()
    said = sum(answer["recomputed_tokens"] for answer in answers)
    assert said > 0
    assert after["recomputed_tokens_total"] - before["recomputed_tokens_total"] <= said
    generated = sum(len(reply["token_ids"][0]) for reply in replies)
    assert after["generated_tokens_total"] - before["generated_tokens_total"] == generated


def test_r1_a_lone_sequence_recomputes_just_what_it_had(shared_server, wait_until):
    before = shared_server.debug()["recomputed_tokens_total"]
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(shared_server.generate, [5] * 10, max_tokens=3000, ignore_eos=True, compact=True)
        wait_until(lambda: shared_server.debug()["requests_inside"] == 1)
        answer = shared_server.publish(in_flight="recompute")
        reply = pending.result()
    (_, boundary, _), _ = reply["policy_versions"][0]
    assert answer["paused_requests"] == 1
    assert answer["recomputed_tokens"] == 10 + boundary - 1  # the last token sampled has not been computed on
    assert shared_server.debug()["recomputed_tokens_total"] - before == answer["recomputed_tokens"]


def test_r6_the_spans_of_a_crossing_request_are_the_same_in_each_form_of_the_answer(shared_server, wait_until):
    """The answer, whole, compact or streamed, has two versions, and every token belongs to one of them."""
    body = {"prompt": [5, 6], "max_tokens": 1000, "ignore_eos": True}

    def streamed():
        with shared_server.client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        last = json.loads(lines[-2])
        return {"policy_versions": [last["policy_versions"]], "streamed": len(lines) - 1}

    with ThreadPoolExecutor(3) as pool:
        pending = [
            pool.submit(streamed),
            *(pool.submit(shared_server.generate, **body, compact=compact) for compact in (False, True)),
        ]
        wait_until(lambda: shared_server.debug()["requests_running"] == 3)
        old, new = shared_server.version, shared_server.publish(in_flight="recompute")["version"]
        answers = [each.result() for each in pending]
    for answer in answers:
        ((first, boundary, before), (again, end, after)) = answer["policy_versions"][0]
        assert (first, again, end, before, after) == (0, boundary, 1000, old, new)
    assert answers[0]["streamed"] > 100, "the stream sent its tokens as they were sampled"


def test_r1_short_outputs_drain_and_recompute_nothing(shared_server, reference, decode_under_publishes, errors_of):
    replies, answers, weights = decode_under_publishes(
        shared_server, publishes=1, output_tokens=100, inside=1, in_flight="drain", drain_seconds=60
    )
    assert [answer["drained"] for answer in answers] == [True]
    assert [answer["recomputed_tokens"] for answer in answers] == [0]
    assert all(len(reply["policy_versions"][0]) == 1 for reply in replies)
    errors = [error for reply in replies for error in errors_of(weights, reply)]
    assert max(errors) <= MAX_ERROR


def test_r1_draining_stops_at_its_limit(shared_server, wait_until):
    with ThreadPoolExecutor(4) as pool:
        pending = [
            pool.submit(shared_server.generate, [5, 6], max_tokens=3000, ignore_eos=True, compact=True)
            for _ in range(4)
        ]
        wait_until(lambda: shared_server.debug()["requests_inside"] == 4)
        began = time.monotonic()
        answer = shared_server.publish(in_flight="drain", drain_seconds=0.1)
        assert time.monotonic() - began < 5
        assert answer["drained"] is False
        assert answer["paused_requests"] == 4
        assert all(len(future.result()["policy_versions"][0]) == 2 for future in pending)


def test_requests_wait_at_the_admission_gate_while_a_publish_lasts(shared_server):
    publish = shared_server.begin(drain_seconds=0)
    version = (shared_server.version or 0) + 1
    got = []
    waiting = threading.Thread(target=lambda: got.append(shared_server.generate([5], max_tokens=2, compact=True)))
    waiting.start()
    time.sleep(0.3)
    assert got == []
    header = shared_server.header()
    header.begin_write(version)
    header.end_write(version)
    ended = shared_server.bridge("publish/end", {"publish_id": publish["publish_id"], "version": version})
    waiting.join(20)
    assert ended.status_code == 200
    assert got[0]["policy_versions"] == [[[0, 2, version]]]


def test_r37_a_cached_prefix_of_the_old_policy_is_never_read(shared_server, reference, errors_of):
    prompt = [random.Random(3).randrange(2, 250) for _ in range(300)]
    shared_server.generate(prompt, max_tokens=2)
    hits = shared_server.debug()["prefix_hit_tokens_total"]
    shared_server.generate(prompt, max_tokens=2)
    assert shared_server.debug()["prefix_hit_tokens_total"] - hits >= 256

    new = reference.variant(50)
    version = shared_server.publish(lambda: shared_server.write(new))["version"]
    reply = shared_server.generate(prompt, max_tokens=20, compact=True, ignore_eos=True)
    assert max(errors_of({version: new}, reply)) <= MAX_ERROR


def test_r37_kept_kv_is_called_inexact_and_not_read_by_later_requests(shared_server, reference, errors_of, wait_until):
    prompt = [random.Random(4).randrange(2, 250) for _ in range(300)]
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(shared_server.generate, prompt, max_tokens=3000, ignore_eos=True, compact=True)
        wait_until(lambda: shared_server.debug()["requests_inside"] == 1)
        new = reference.variant(51)
        answer = shared_server.publish(lambda: shared_server.write(new), in_flight="keep_kv")
        crossing = pending.result()
    assert answer["recomputed_tokens"] == 0
    assert crossing["exact_versions"] is False
    later = shared_server.generate(prompt, max_tokens=20, compact=True, ignore_eos=True)
    assert later["exact_versions"] is True
    assert max(errors_of({answer["version"]: new}, later)) <= MAX_ERROR


@pytest.mark.parametrize("load", ["idle", "decoding", "long shared prompts"])
def test_r1_under_any_load_each_token_is_of_the_version_stamped_on_it(
    shared_server, reference, publishes_under, errors_of, load
):
    weights = {}

    def publish():
        new = reference.variant(100 + (shared_server.version or 0))
        answer = shared_server.publish(lambda: shared_server.write(new), drain_seconds=0)
        weights[answer["version"]] = new
        return answer

    publish()
    replies, answers = publishes_under(shared_server, publish, load)
    errors = [error for reply in replies for error in errors_of(weights, reply)]
    logger.info("%s: %d publishes, %d tokens, max %.1e", load, len(answers), len(errors), max(errors))
    assert len({span[2] for reply in replies for span in reply["policy_versions"][0]}) >= len(answers) / 2
    assert max(errors) <= MAX_ERROR
    assert statistics.fmean(errors) <= MEAN_ERROR
