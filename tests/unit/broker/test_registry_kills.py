"""A broker killed between any two lines of an announcement: servers that serve have either all been proven for the old
version, or for the new one, and the repeated announcement ends in the same state.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from atropos_api.broker import Broker, BrokerSettings
from atropos_api.store.directory import open_directory
from atropos_api.wire import PolicyUpdate, RunRequest, ServerReport

TRACED = {"broker.py", "runs.py", "inference_servers.py", "state.py", "sqlite_ledger.py"}


class Killed(BaseException):
    """Raised to end the broker between two lines."""


def killing(number):
    """Return a trace function that ends the program before the given line of the traced modules."""
    left = [number]

    def trace(frame, event, _):
        if Path(frame.f_code.co_filename).name not in TRACED:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise Killed
        return trace

    return trace


class Scene:
    """A broker over one directory, and two servers that register at it."""

    def __init__(self, directory):
        self.directory = directory
        self.ledger, self.bodies = open_directory(directory, fsync="never", fresh=False)
        self.broker = Broker(self.ledger, self.bodies, settings=BrokerSettings())

    def renew(self):
        """Return the state that each server learns when it renews."""
        servers = self.broker.state.servers
        reports = {name: ServerReport(lease_id=f"lease-{name}", boot_id=name, mode="adapters", port=1) for name in "ab"}
        return {name: servers.renew(name, report, "10.0.0.7").state for name, report in reports.items()}

    def announce(self, version, *names):
        run = self.broker.state.runs.require_open()
        servers = [f"lease-{name}" for name in names]
        update = PolicyUpdate(run_id=run.run_id, version=version, step=version, published_at=1.0, servers=servers)
        self.broker.update_policy(update)

    @property
    def version(self):
        return self.broker.state.runs.require_open().policy_version

    def close(self):
        self.bodies.close()
        self.ledger.close()


@pytest.fixture
def begun(tmp_path):
    """A store whose broker has a run with both servers proven for version 1."""
    scene = Scene(tmp_path / "begun")
    scene.broker.begin_run(RunRequest(name="r", batch_size=4, max_token_length=9, num_steps=9))
    scene.renew()
    scene.announce(1, "a", "b")
    scene.close()
    return tmp_path / "begun"


def test_a_kill_in_the_middle_of_an_announcement_leaves_the_old_or_the_new_set(begun, tmp_path):
    before, after = {"a": "serving", "b": "serving"}, {"a": "serving", "b": "joining"}
    seen = []
    for number in range(1, 10_000):
        directory = tmp_path / f"killed-{number}"
        shutil.copytree(begun, directory)
        scene = Scene(directory)
        scene.renew()
        sys.settrace(killing(number))
        try:
            scene.announce(2, "a")
            killed = False
        except Killed:
            killed = True
        finally:
            sys.settrace(None)
        left = tmp_path / f"left-{number}"
        shutil.copytree(directory, left)
        scene.close()
        again = Scene(left)
        seen.append((again.version, again.renew()))
        again.announce(2, "a")
        assert (again.version, again.renew()) == (2, after), number
        again.close()
        shutil.rmtree(directory)
        shutil.rmtree(left)
        if not killed:
            break
    assert len(seen) > 20
    assert all(found in [(1, before), (2, after)] for found in seen), seen
    assert seen[0] == (1, before)
    assert seen[-1] == (2, after)
