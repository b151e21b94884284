"""The short form of the other ways to run vLLM's engine: asynchronous scheduling, and workers as processes.

`ATROPOS_EXECUTORS=all` runs every test of `serving` and `weights` in each of these ways.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.integration.executors import ASYNCHRONOUS, PROCESSES, environment

from .crowd import Crowd
from .random_requests import RequestMaker
from .test_crowd import Policy, Verdict, alone, mixed
from .test_publish import MAX_ERROR, MEAN_ERROR

pytestmark = pytest.mark.vllm

KINDS = 40
CLIENTS = 12


@pytest.fixture(scope="module", params=[ASYNCHRONOUS, PROCESSES])
def executor_name(request):
    return request.param


@pytest.fixture(scope="module")
def server(executor_name, start_server):
    started = start_server("--share-weights", environ=environment(executor_name))
    started.publish()
    yield started
    started.stop()


def test_the_engine_runs_in_the_way_that_was_asked_for(server, executor_name):
    (engine,) = psutil.Process(server.process.pid).children()
    workers = [child for child in engine.children() if "resource_tracker" not in " ".join(child.cmdline())]
    assert len(workers) == (executor_name == PROCESSES)
    assert ("asynchronous scheduler" in server.log_path.read_text()) == (executor_name == ASYNCHRONOUS)


def test_every_token_is_of_the_version_stamped_on_it(server, decode_under_publishes, errors_of):
    before, checksum = server.debug(), server.checksum()
    replies, answers, weights = decode_under_publishes(server, publishes=3, output_tokens=160, in_flight="recompute")
    errors = [error for reply in replies for error in errors_of(weights, reply)]
    assert any(len(reply["policy_versions"][0]) > 1 for reply in replies)
    assert max(errors) <= MAX_ERROR
    assert statistics.fmean(errors) <= MEAN_ERROR
    after = server.debug()
    assert sum(answer["recomputed_tokens"] for answer in answers) > 0
    generated = after["generated_tokens_total"] - before["generated_tokens_total"]
    assert generated == sum(len(reply["token_ids"][0]) for reply in replies)
    assert server.checksum() != checksum


def test_a_paused_request_recomputes_just_what_it_had(server, wait_until):
    before = server.debug()["recomputed_tokens_total"]
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(server.generate, [5] * 10, max_tokens=2000, ignore_eos=True, compact=True)
        wait_until(lambda: pending.done() or server.debug()["requests_inside"] == 1)
        assert not pending.done(), pending.result()
        answer = server.publish(in_flight="recompute")
        reply = pending.result()
    (_, boundary, _), _ = reply["policy_versions"][0]
    assert answer["recomputed_tokens"] == 10 + boundary - 1  # the last token sampled has not been computed on
    assert server.debug()["recomputed_tokens_total"] - before == answer["recomputed_tokens"]


def test_requests_of_all_kinds_are_answered_beside_others_and_a_publish_as_alone(server, reference):
    policy = Policy(server, reference)
    requests = RequestMaker(7, str(server.model)).make(KINDS)
    crowd = Crowd(server.url, lambda: policy.versions)
    policy.publish(0)
    lone = alone(crowd, requests)
    sent = mixed(KINDS, KINDS, requests, RequestMaker(7, str(server.model)).mistakes())
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(crowd.together, [ask for ask, _ in sent], CLIENTS)
        policy.publish(0, in_flight="recompute")  # the same weights, so one answer is right
        said = pending.result()
    verdict = Verdict()
    for (_, number), (ask, _), each in zip(sent, sent, said, strict=True):
        verdict.judge(ask, [] if number is None else [lone[number]], each, policy.numbers.__getitem__)
    assert verdict.wrong == []
    assert verdict.counts["as alone"] > 0.8 * KINDS


def test_the_end_of_a_process_of_the_engine_ends_the_server_with_its_cause(server, executor_name):
    family = psutil.Process(server.process.pid).children(recursive=True)
    family[-1].kill()  # with workers as processes one of them, else the engine itself
    assert server.process.wait(60) == 1
    assert "error: vLLM's engine has failed:" in server.log_path.read_text()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
