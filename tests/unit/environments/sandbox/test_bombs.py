"""Code that takes more than its limits is refused or ended, by any counter, and nothing of it is left.

ATROPOS_SANDBOX=all tries every user and every counter; the default tries the first of each.
"""

from __future__ import annotations

import os
import time

import pytest

from .bombs import GREEDY, LASTING

EVERY = os.environ.get("ATROPOS_SANDBOX", "") == "all"
LONG = pytest.mark.skipif(not EVERY, reason="ATROPOS_SANDBOX=all runs it")
USERS = ("root", "nobody") if os.geteuid() == 0 else ("",)
LIMITS = {"wall_seconds": 20.0, "cpu_seconds": 15, "memory_bytes": 256 << 20, "file_bytes": 128 << 20, "at_once": 3}
BRIEF = LIMITS | {"wall_seconds": 1.5, "cpu_seconds": 1, "at_once": len(LASTING)}

pytestmark = pytest.mark.timeout(300)


def require_contained(drive, bombs, limits, *, is_counted=False, **how):
    """Check that each program is refused or ended.

    With `is_counted`, a supervisor counts instead of the kernel, and may be late: with eight busy processes a program
    made 400 children before it was ended.
    """
    answer = drive({name: bomb.code for name, bomb in bombs.items()}, **limits, **how)
    assert "refused" not in answer, answer
    wrong = {
        name: result
        for name, result in answer["results"].items()
        if result["ended_by"] not in bombs[name].ended_by
        or ("REACHED" in result["output"] and not (is_counted and result["ended_by"]))
        or not (result["ended_by"] or bombs[name].prints in result["output"])
    }
    assert wrong == {}
    assert answer["left"] == []


@pytest.fixture
def counting(mechanism):
    """The tool with the kernel's limits by one mechanism, and the supervisor's by the other."""
    return {"mechanisms": [mechanism], "use_cgroups": mechanism == "bubblewrap"}


def test_what_takes_too_much_is_refused_it_or_ended(drive, counting):
    require_contained(drive, GREEDY, LIMITS, **counting)


def test_what_would_last_for_ever_ends_in_time(drive, counting):
    started = time.monotonic()
    require_contained(drive, LASTING, BRIEF, **counting)
    assert time.monotonic() - started < 20


@LONG
@pytest.mark.parametrize("bombs", [GREEDY, LASTING], ids=["greedy", "lasting"])
@pytest.mark.parametrize("use_cgroups", [True, False], ids=["cgroups", "counted"])
@pytest.mark.parametrize("user", USERS)
def test_it_is_so_for_every_user(drive, mechanism, user, use_cgroups, bombs):
    limits = BRIEF if bombs is LASTING else LIMITS
    how = {"mechanisms": [mechanism], "use_cgroups": use_cgroups, "user": user}
    require_contained(drive, bombs, limits, is_counted=not use_cgroups, **how)


@LONG
@pytest.mark.parametrize("user", USERS)
def test_limits_alone_hold_too_but_for_files(drive, user):
    """Resource limits work even if nothing can be isolated and the user asked for that."""
    how = {"forbid": "namespaces", "require_isolation": False, "user": user}
    greedy = {name: bomb for name, bomb in GREEDY.items() if name not in {"files", "many files", "memory of files"}}
    require_contained(drive, greedy, LIMITS, is_counted=True, **how)
    require_contained(drive, LASTING, BRIEF, **how)
