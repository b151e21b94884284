"""The control groups of this process: kills in a sandbox below do not count, and limits of all above do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atropos_api.common.control_groups import (
    count_kernel_kills,
    free_memory_bytes,
    memory_limit_bytes,
    own_groups,
    usable_cores,
)

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


def write_all(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).write_text(content)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_the_cores_and_the_memory_that_its_groups_allow(
    proc: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the machine were taken: a second server was started beside the first, and the kernel ended one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    groups = proc.parent / "groups"
    (groups / "pod" / "run").mkdir(parents=True)
    kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,cpu,memory")
    (proc / "self" / "mountinfo").write_text(f"31 1 0:28 / {groups} rw,nosuid - {kind} {kind} {options}\n")
    (proc / "self" / "cgroup").write_text("0::/pod/run\n" if version == 2 else "4:cpu,memory:/pod/run\n")
    assert (usable_cores(proc), memory_limit_bytes(900, proc), free_memory_bytes(700, proc)) == (64, 900, 700)
    if version == 2:
        write_all(
            groups / "pod" / "run", {"cpu.max": "150000 100000\n", "memory.max": "max\n", "memory.current": "9\n"}
        )
        write_all(groups / "pod", {"cpu.max": "max 100000\n", "memory.max": "200\n", "memory.current": "150\n"})
        (groups / "pod" / "memory.stat").write_text("inactive_file 30\nactive_file 10\n")
    else:
        memory = {"memory.limit_in_bytes": "200\n", "memory.usage_in_bytes": "150\n"}
        write_all(groups / "pod" / "run", {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"} | memory)
        write_all(groups / "pod", {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"})
        (groups / "pod" / "run" / "memory.stat").write_text("total_inactive_file 30\ntotal_active_file 10\n")
    assert (usable_cores(proc), memory_limit_bytes(900, proc), free_memory_bytes(700, proc)) == (2, 200, 90)
    assert (memory_limit_bytes(100, proc), free_memory_bytes(50, proc)) == (100, 50)


def test_where_there_are_no_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert memory_limit_bytes(900, tmp_path) == free_memory_bytes(900, tmp_path) == 900
    assert 1 <= usable_cores(tmp_path) <= (os.cpu_count() or 1)
