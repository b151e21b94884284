"""What the tests of publishing share: publishes into a decoding server, and the judgement of each token."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

SEQUENCES = 40
PUBLISHES = int(os.environ.get("ATROPOS_PUBLISHES", "3"))
"""In each cell of the matrices; a hundred are the long form."""


@pytest.fixture(scope="session")
def publishes_under(wait_until):
    """Publish again and again into a server with one kind of load; the replies and the publishes' answers.

    idle: one request after each publish. decoding: 64 requests are always running. long shared prompts: twelve, whose
    prompts have two blocks of the prefix cache in common.
    """

    def run(server, publish, load):
        rng = random.Random(11)
        shared = [rng.randrange(2, 250) for _ in range(280)]
        replies, answers = [], []
        workers = {"idle": 1, "decoding": 64, "long shared prompts": 12}[load]
        done = threading.Event()

        def ask(number):
            chooser = random.Random(number)
            while not done.is_set():
                prompt = [chooser.randrange(2, 250) for _ in range(chooser.randrange(4, 40))]
                prompt = shared + prompt if load == "long shared prompts" else prompt
                length = chooser.randrange(40, 160)
                replies.append(server.generate(prompt, max_tokens=length, ignore_eos=True, compact=True))

        if load == "idle":
            for _ in range(PUBLISHES):
                answers.append(publish())
                replies.append(server.generate(shared, max_tokens=120, ignore_eos=True, compact=True))
            return replies, answers
        with ThreadPoolExecutor(workers) as pool:
            asking = [pool.submit(ask, number) for number in range(workers)]
            for _ in range(PUBLISHES + 1):
                seen = len(replies)
                wait_until(lambda seen=seen: len(replies) >= seen + workers // 2, 120)
                answers.append(publish())
            done.set()
            for each in asking:
                each.result()
        return replies, answers

    return run


@pytest.fixture(scope="session")
def wait_until():
    def wait(condition, limit_seconds=30.0):
        deadline = time.monotonic() + limit_seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def errors_of(reference):
    """|logprob said - logprob under the stamped version| of each token of one reply."""

    def judge(weights_by_version, reply):
        output, said, prompt = reply["token_ids"][0], reply["logprobs"][0], reply["prompt_token_ids"]
        found = []
        for start, end, version in reply["policy_versions"][0]:
            expected = reference.logprobs(weights_by_version[version], prompt, output[:end])
            found += [abs(said[position] - expected[position]) for position in range(start, end)]
        assert len(found) == len(output)
        return found

    return judge


@pytest.fixture(scope="session")
def decode_under_publishes(reference, wait_until):
    """Publish while many sequences decode; the replies, the publishes' answers and the weights by version."""

    def decode(server, *, publishes, output_tokens, inside=32, **publish_fields):
        rng = random.Random(7)
        prompts = [[rng.randrange(2, 250) for _ in range(rng.randrange(4, 40))] for _ in range(SEQUENCES)]
        weights = {}

        def publish():
            new = reference.variant((server.version or 0) + 1)
            answer = server.publish(lambda: server.write(new), **publish_fields)
            weights[answer["version"]] = new
            return answer

        publish()
        with ThreadPoolExecutor(SEQUENCES) as pool:
            lengths = [rng.randrange(output_tokens // 2, output_tokens) for _ in prompts]
            pending = [
                pool.submit(server.generate, prompt, max_tokens=length, ignore_eos=True, compact=True)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            wait_until(lambda: server.debug()["requests_inside"] >= inside)
            answers = []
            for _ in range(publishes):
                answers.append(publish())
                time.sleep(0.05)
            return [future.result() for future in pending], answers, weights

    return decode
