"""A pool of real children for all tests that compare mathematics."""

import pytest

from environments.rewards import MathVerifier


@pytest.fixture(scope="session")
def verifier():
    with MathVerifier(workers=1, time_limit_seconds=1.0) as shared:
        yield shared
