"""Fixture of the publishing tests: it publishes into a decoding server and returns what each token is checked with."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

SEQUENCES = 40


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
