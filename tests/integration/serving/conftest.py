"""Fixture of the publishing tests: it publishes into a decoding server and returns all that the checks need."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

SEQUENCES = 40


@pytest.fixture(scope="session")
def decode_under_publishes(reference, wait_until):
    """Replies to many sequences that decode while versions are published, the publishes' answers, and all weights."""

    def decode(server, *, publishes, output_tokens, inside=32, **publish_fields):
        rng = random.Random(7)
        prompts = [[rng.randrange(2, 250) for _ in range(rng.randrange(4, 40))] for _ in range(SEQUENCES)]
        weights = {}

        def publish():
            new = reference.variant((server.version or 0) + 1)
            answer = server.publish(lambda: server.write(new), **publish_fields)
            weights[answer["version"]] = new
            return answer

        published = threading.Event()

        def ask(number):
            """Repeat the request until the last publish, so that 32 run together."""
            replies = []
            while not (published.is_set() and replies):
                length = lengths[number]
                reply = server.generate(prompts[number], max_tokens=length, ignore_eos=True, compact=True)
                replies.append(reply)
            return replies

        publish()
        lengths = [rng.randrange(output_tokens // 2, output_tokens) for _ in prompts]
        with ThreadPoolExecutor(SEQUENCES) as pool:
            pending = [pool.submit(ask, number) for number in range(SEQUENCES)]
            try:
                wait_until(lambda: server.debug()["requests_inside"] >= inside, 120)
                answers = []
                for _ in range(publishes):
                    answers.append(publish())
                    time.sleep(0.05)
            finally:
                published.set()
            return [reply for future in pending for reply in future.result()], answers, weights

    return decode
