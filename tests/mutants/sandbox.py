"""One-line faults of the sandbox (a missing limit, wall or check) and of the child that compares answers.

None removes the mount namespace: its mounts would then be made on this machine.
"""

from __future__ import annotations

import os

from environments.sandbox import control_groups

from .mutant import Mutant

_PROGRAM = "bwrap"
_BUBBLEWRAP = "environments/sandbox/isolation.py"
_NAMESPACES = "environments/sandbox/isolation.py"
_SUPERVISOR = "environments/sandbox/supervisor.py"
_RUNNER = "environments/sandbox/runner.py"
_LAUNCH = "environments/sandbox/launch.py"
_CALLS = "environments/sandbox/system_calls.py"
_GROUPS = "environments/sandbox/control_groups.py"
_MATH = "environments/rewards/math_worker.py"

_TESTS = "unit/environments/sandbox/"
_TOOL = "unit/environments/sandbox/test_python_tool.py::"
_ESCAPES = f"{_TESTS}test_escapes.py::test_no_attempt_to_leave_the_sandbox_succeeds"
_GREEDY = f"{_TESTS}test_bombs.py::test_what_takes_too_much_is_refused_it_or_ended"
_OF_PROCESSES = f"{_TESTS}test_limits.py::test_every_process_has_its_limits"
_MOUNTS = f"{_TESTS}test_limits.py::test_every_mount_is_read_only_but_the_working_folder_of_limited_size"
_OWN = f"{_TESTS}test_limits.py::test_every_namespace_is_its_own"
_KILLED = f"{_TESTS}test_lifetime.py::test_a_killed_supervisor_takes_its_run_along_and_is_replaced"
_HIDING = f"{_TESTS}test_lifetime.py::test_processes_that_hide_end_with_the_code"
_COUNTED = f"{_TESTS}test_limits.py::test_"
_ANSWERS = "unit/environments/rewards/test_math_worker.py::test_"
_CHILDREN = "unit/environments/rewards/test_math_verifier.py::test_"
_LIMITED = "if value >= 0:"

_EVERYWHERE = (
    # Limits of each process
    *(
        Mutant(f"no limit {name}", _RUNNER, _LIMITED, f'if value >= 0 and name != "{name}":', _OF_PROCESSES)
        for name in ("CPU", "AS", "FSIZE", "NOFILE", "NPROC", "CORE")
    ),
    # System calls, namespaces and mounts
    Mutant("no filter in namespaces", _NAMESPACES, "system_calls.install(denied)", "pass", f"{_ESCAPES}[namespaces]"),
    Mutant(
        "no filter in bubblewrap", _BUBBLEWRAP, ', "--seccomp", str(FILTER)]', "]", f"{_ESCAPES}[bubblewrap]", _PROGRAM
    ),
    Mutant("files in memory", _CALLS, '"memfd_create": (319, 279),', "", f"{_ESCAPES}[namespaces]"),
    Mutant("new namespaces", _CALLS, "_NEW_NAMESPACES = 0x7E020000", "_NEW_NAMESPACES = 0", f"{_ESCAPES}[namespaces]"),
    Mutant("datagrams", _CALLS, "(_IF_EQUAL, 1, 0, _SOCK_STREAM)", "(_IF_EQUAL, 1, 1, 0)", f"{_ESCAPES}[namespaces]"),
    Mutant(
        "all of /etc",
        "environments/sandbox/launch.py",
        '("/etc/alternatives", "/etc/ld.so.cache")',
        '("/etc",)',
        _ESCAPES,
    ),
    Mutant("input that can be changed", _LAUNCH, "fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)", "del seals", _ESCAPES),
    Mutant("a shared network", _BUBBLEWRAP, '"--unshare-net", ', "", _OWN, _PROGRAM),
    Mutant("shared IPC", _BUBBLEWRAP, '"--unshare-ipc", ', "", _OWN, _PROGRAM),
    Mutant("the machine's network", _NAMESPACES, " | CLONE_NEWNET\n", "\n", _OWN),
    Mutant(
        "the machine's IPC",
        _NAMESPACES,
        "CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID",
        "CLONE_NEWUTS | CLONE_NEWPID",
        _OWN,
    ),
    Mutant(
        "a writable root folder",
        _NAMESPACES,
        'self._change_mount("/new", MOUNT_ATTR_RDONLY, recursive=False)',
        "pass",
        _MOUNTS,
    ),
    Mutant("a writable root folder in bubblewrap", _BUBBLEWRAP, '"--remount-ro", "/", ', "", _MOUNTS, _PROGRAM),
    Mutant(
        "writable programs", _NAMESPACES, "MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)", "0)", _MOUNTS
    ),
    Mutant("a working folder of any size", _NAMESPACES, "size={launch.file_bytes},", "", _MOUNTS),
    Mutant("any size in bubblewrap", _BUBBLEWRAP, '"--size", str(launch.file_bytes), ', "", _MOUNTS, _PROGRAM),
    Mutant("any number of files", _NAMESPACES, "nr_inodes={MOST_FILES},mode", "mode", _MOUNTS),
    # Limits that the supervisor enforces
    Mutant(
        "files are not counted",
        _SUPERVISOR,
        "if folder.f_files - folder.f_ffree > MOST_FILES:",
        "if False:",
        f"{_GREEDY}[bubblewrap]",
        _PROGRAM,
    ),
    Mutant(
        "memory is not counted",
        _SUPERVISOR,
        "if usage.memory_bytes + in_files > self.launch.memory_bytes:",
        "if False:",
        f"{_COUNTED}the_supervisor_counts_memory_of_all_processes_together",
    ),
    Mutant(
        "files are not memory",
        _SUPERVISOR,
        "usage.memory_bytes + in_files >",
        "usage.memory_bytes >",
        f"{_GREEDY}[namespaces]",
    ),
    Mutant(
        "shared pages count for each",
        "environments/sandbox/control_groups.py",
        "if memory > enough_bytes:",
        "if False:",
        f"{_COUNTED}memory_that_processes_share_is_counted_once",
    ),
    Mutant("memory without a process", _CALLS, "if not shared_memory:", "if False:", f"{_GREEDY}[namespaces]"),
    Mutant(
        "processes are not counted",
        _SUPERVISOR,
        "if usage.threads > MOST_PROCESSES + OWN_PROCESSES else",
        "if False else",
        f"{_COUNTED}without_a_limit_of_the_kernels_the_supervisor_counts_processes",
    ),
    Mutant(
        "time of children is not counted",
        _SUPERVISOR,
        "if usage.cpu_seconds > self.launch.cpu_seconds:",
        "if False:",
        f"{_COUNTED}the_supervisor_counts_the_time_of_all_processes_together",
    ),
    Mutant(
        "ten times the time",
        _SUPERVISOR,
        "time.monotonic() + self.launch.wall_seconds",
        "time.monotonic() + 10 * self.launch.wall_seconds",
        f"{_TOOL}test_time_memory_files_and_output_are_limited",
    ),
    Mutant(
        "all output is kept",
        _SUPERVISOR,
        "piece[: max(0, self.launch.output_bytes - len(self._output))]",
        "piece",
        f"{_TOOL}test_a_flood_of_output_fills_no_memory",
    ),
    Mutant(
        "the code does not wait",
        _RUNNER,
        'if os.read(ready, 1) != b"g":',
        "if False:",
        f"{_TESTS}test_lifetime.py::test_a_supervisor_that_comes_late_finds_the_code_waiting",
    ),
    Mutant(
        "calls of 32 bits",
        _CALLS,
        "yield _RETURN, 0, 0, _KILL",
        "yield _RETURN, 0, 0, _ALLOW",
        f"{_TESTS}test_escapes.py::test_a_call_in_the_form_of_32_bits_ends_the_code",
    ),
    # Processes that outlive a run
    Mutant("no subreaper", _SUPERVISOR, "_PR_SET_CHILD_SUBREAPER, 1,", "_PR_SET_CHILD_SUBREAPER, 0,", _HIDING),
    Mutant(
        "a dead supervisor's run goes on",
        _NAMESPACES,
        "PR_SET_PDEATHSIG, signal.SIGKILL",
        "PR_SET_PDEATHSIG, 0",
        _KILLED,
    ),
    Mutant("it goes on in bubblewrap", _BUBBLEWRAP, '"--die-with-parent", ', "", _KILLED, _PROGRAM),
    Mutant(
        "a dead environment's run goes on",
        _SUPERVISOR,
        "raise ParentDisconnected",
        "waiting.unregister(self.channel)",
        f"{_TESTS}test_lifetime.py::test_a_killed_environment_takes_all_along",
    ),
    # The isolation that is required
    Mutant(
        "open by default",
        "environments/sandbox/python_tool.py",
        "require_isolation: bool = True",
        "require_isolation: bool = False",
        f"{_TOOL}test_where_isolation_is_impossible_the_tool_does_not_run_unless_told_to",
    ),
    Mutant(
        "the environment is open by default",
        "environments/tool_server.py",
        "require_isolation: bool = Field(\n        True,",
        "require_isolation: bool = Field(\n        False,",
        f"{_TOOL}test_where_isolation_is_impossible_the_tool_does_not_run_unless_told_to",
    ),
    Mutant(
        "a supervisor with secrets",
        "environments/sandbox/python_tool.py",
        "env=environment,",
        "env=None,",
        f"{_TOOL}test_the_environment_of_the_tool_is_not_the_codes",
    ),
    # Comparing answers
    Mutant(
        "answers may fill the memory",
        _MATH,
        "resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))",
        "pass",
        f"{_CHILDREN}a_child_may_hold_two_gibibytes_and_no_more",
    ),
    Mutant(
        "answers may take the clock's time",
        _MATH,
        "signal.setitimer(signal.ITIMER_PROF, seconds)",
        "pass",
        f"{_CHILDREN}an_expression_that_makes_sympy_hang_is_given_up_and_its_child_replaced_while_the_loop_runs_on",
    ),
    Mutant(
        "any last side counts",
        _MATH,
        "and sides_agree(parsed)",
        "",
        f"{_ANSWERS}other_values_and_lists_of_guesses_are_wrong",
    ),
    Mutant(
        "any percentage counts",
        _MATH,
        "and percentage_is_meant(wanted, parsed)",
        "",
        f"{_ANSWERS}a_percentage_is_no_other_number",
    ),
    Mutant(
        "the last number counts",
        _MATH,
        "if not _PROSE.fullmatch(text):",
        "if not text:",
        f"{_ANSWERS}what_denies_the_gold_is_not_the_gold",
    ),
)

_AS_ROOT = (
    Mutant(
        "root's code stays root",
        _RUNNER,
        "if user >= 0:",
        "if user > 1 << 40:",
        f"{_TESTS}test_limits.py::test_the_code_runs_as_nobody_without_rights_and_under_the_filter",
    ),
    Mutant(
        "one user for all runs",
        _LAUNCH,
        "return first + os.getpid() % count",
        "return first",
        f"{_COUNTED}runs_do_not_take_each_others_processes",
    ),
)

_WITH_GROUPS = (
    Mutant(
        "no group is entered",
        _SUPERVISOR,
        "            group.enter()",
        "            pass",
        f"{_GREEDY}[bubblewrap]",
        _PROGRAM,
    ),
    Mutant(
        "any memory in a group",
        _GROUPS,
        'else "memory.limit_in_bytes"), memory_bytes)',
        'else "memory.limit_in_bytes"), 1 << 40)',
        f"{_COUNTED}a_group_ends_what_holds_too_much_memory",
    ),
    Mutant(
        "any processes in a group",
        _GROUPS,
        '_write(self.folders["pids"] / "pids.max", processes)',
        "pass",
        f"{_COUNTED}a_group_holds_its_processes_together",
    ),
)

SANDBOX: tuple[Mutant, ...] = (
    *_EVERYWHERE,
    *(_AS_ROOT if os.geteuid() == 0 else ()),
    *(_WITH_GROUPS if control_groups.find() is not None else ()),
)
