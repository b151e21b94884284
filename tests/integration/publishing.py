"""Publishes into decoding servers, in any mode, and checks each token."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

PUBLISHES = int(os.environ.get("ATROPOS_PUBLISHES", "3"))
"""Publishes in each cell of the matrices; the long form has a hundred."""


def publish_under(server, publish, load, *others):
    """Publish again and again into servers with one kind of load; return the replies and the publishes' answers.

    idle: one request after each publish. decoding: 64 requests are always running. long shared prompts: twelve, whose
    prompts have two blocks of the prefix cache in common.
    """
    servers = [server, *others]
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
            asked = servers[number % len(servers)]
            replies.append(asked.generate(prompt, max_tokens=length, ignore_eos=True, compact=True))

    if load == "idle":
        for _ in range(PUBLISHES):
            answers.append(publish())
            replies += [each.generate(shared, max_tokens=120, ignore_eos=True, compact=True) for each in servers]
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


def wait_until(condition, limit_seconds=120.0):
    """Wait for a condition; the limit is for one that never holds.

    Two servers whose workers are processes of their own, on two cores with 20,000 requests beside them, needed more
    than 30 s until nine requests were inside.
    """
    deadline = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def errors_of(reference, weights_by_version, reply):
    """Return |logprob given - logprob under the stamped version| of each token of one reply."""
    output, said, prompt = reply["token_ids"][0], reply["logprobs"][0], reply["prompt_token_ids"]
    found = []
    for start, end, version in reply["policy_versions"][0]:
        expected = reference.logprobs(weights_by_version[version], prompt, output[:end])
        found += [abs(said[position] - expected[position]) for position in range(start, end)]
    assert len(found) == len(output)
    return found
