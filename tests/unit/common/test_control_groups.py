"""The kernel's kills for lack of memory: those of this process's own control group count, a sandbox's do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_api.common.control_groups import count_kernel_kills, own_groups

MOUNTS = {
    "memory.events.local": "31 1 0:28 / {folder} rw,nosuid - cgroup2 cgroup2 rw\n",
    "memory.oom_control": "31 1 0:28 / {folder} rw,nosuid - cgroup cgroup rw,memory\n",
}
OWN = {"memory.events.local": "0::/run\n", "memory.oom_control": "4:memory:/run\n3:cpuset:/\n"}


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "vmstat").write_text("nr_free_pages 12\noom_kill 15\nswap_ra 1\n")
    return tmp_path / "proc"


@pytest.mark.parametrize("name", MOUNTS, ids=["version 2", "version 1"])
def test_kills_of_the_own_group_count_and_those_of_a_sandbox_or_elsewhere_do_not(proc: Path, name: str) -> None:
    groups = proc.parent / "groups"
    (groups / "run" / "sandbox").mkdir(parents=True)
    (proc / "self" / "mountinfo").write_text(MOUNTS[name].format(folder=groups))
    (proc / "self" / "cgroup").write_text(OWN[name])
    (groups / "run" / "sandbox" / name).write_text("oom 3\noom_kill 3\n")
    (groups / "run" / name).write_text("low 0\noom_kill_disable 0\noom_kill 2\n")
    assert own_groups(proc) == {"" if name.endswith("local") else "memory": groups / "run"}
    assert count_kernel_kills(proc) == 2


def test_without_a_count_of_the_group_the_machines_is_read_and_without_that_nothing_counts(proc: Path) -> None:
    assert count_kernel_kills(proc) == 15
    (proc / "vmstat").unlink()
    assert count_kernel_kills(proc) == 0


def test_the_count_of_this_machine_is_read() -> None:
    assert count_kernel_kills() >= 0
