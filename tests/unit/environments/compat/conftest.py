"""Atropos' module names, which a test imports as an environment written for it does."""

import sys

import pytest

from environments.compat.runner import install


@pytest.fixture
def hooked():
    places = list(sys.meta_path)
    install()
    yield
    sys.meta_path[:] = places
    for name in [name for name in sys.modules if name.partition(".")[0] == "atroposlib"]:
        del sys.modules[name]
