"""The check of each environment's settings by its own module, before any program of the run is started.

`environments.facts` imports the module in a process of its own, without torch or vLLM, and reads the settings as the
environment would when it serves. A launch goes on meanwhile: it waits for places and looks for the base model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from atropos_api.common.cliconfig import ConfigError
from atropos_api.common.secrets import names_secret
from example_trainer.launcher.environment_settings import EnvironmentSettings, program_of
from example_trainer.launcher.plan import Plan
from example_trainer.launcher.run_dir import as_plain_data
from example_trainer.launcher.run_file import RunSettings
from example_trainer.processes import die_with_parent

FACTS_PROGRAM = "environments.facts"
FACTS_SECONDS = 20.0
"""Time that one environment's module may take to be imported before its facts are given up."""
LAUNCH_SECONDS = 5.0
"""Time that a launch, ready otherwise, waits for the answers of all environments; each checks its settings again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedEnvironment:
    """A process that answers about one environment."""

    entry: EnvironmentSettings
    process: subprocess.Popen[bytes]
    path: Path
    """The file of its settings."""

    def facts(self, limit_seconds: float = FACTS_SECONDS) -> Mapping[str, Any] | None:
        """Return the answer, an object of `environments.facts`; None if it takes too long or is none."""
        try:
            output, _ = self.process.communicate(timeout=limit_seconds)
            answer = json.loads(output.replace(f"--config {self.path}: ".encode(), b""))
        except (subprocess.TimeoutExpired, ValueError):
            self.end()
            return None
        return answer if isinstance(answer, Mapping) else None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()  # not read to its end: a process that the module has started may hold it open


def ask_environment(entry: EnvironmentSettings, plan: Plan, folder: Path) -> AskedEnvironment:
    """Start the process that answers about an environment, with the settings that a launch would give it."""
    spec = plan.child(entry.name)
    if spec is None:
        raise ConfigError(f"{entry.name} is not part of the plan")
    at = spec.command.index("--config")
    path = folder / f"{entry.name}.yaml"
    path.write_text(yaml.safe_dump(as_plain_data(plan.settings_of(entry.name))), encoding="utf-8")
    program = program_of(entry.server)
    server = entry.server if program[0] == "-m" else program[0]
    command = [sys.executable, "-m", FACTS_PROGRAM, server, "--config", str(path), *spec.command[at + 2 :]]
    process = subprocess.Popen(
        # A module may hang while it is imported: a killed launcher leaves none of these behind.
        [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **spec.environment},
    )
    return AskedEnvironment(entry=entry, process=process, path=path)


class EnvironmentCheck:
    """The environments of one launch, asked from now on; leaving the context ends what has not answered."""

    def __init__(
        self, settings: RunSettings, plan: Plan, *, scratch: Path | None = None, starts_here: bool = False
    ) -> None:
        """`scratch` is a directory for temporary files, which the caller removes.

        With `starts_here` the environments are about to start on this machine: names and files count as well.
        """
        self._environments = settings.environments
        self._starts_here = starts_here
        self._ignored: dict[str, list[str]] = {}
        self._held = ExitStack()
        self._waiting: list[AskedEnvironment] = []
        with suppress(OSError):  # no temporary directory, or a full disk: a dry run needs none
            folder = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="check-", dir=scratch)))
            for entry in settings.environments:
                self._waiting.append(ask_environment(entry, plan, folder))  # at once: if the next fails, it is ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for asked in self._waiting:
            asked.end()
        self._held.close()

    def refuse_unusable(self, *, limit_seconds: float = 0.0) -> None:
        """Raise `ConfigError` for what an environment would end with, as far as it has answered within the limit."""
        ends_at = time.monotonic() + limit_seconds
        for asked in list(self._waiting):
            left = ends_at - time.monotonic()
            if left <= 0 and asked.process.poll() is None:
                continue
            self._waiting.remove(asked)
            facts = asked.facts(max(1.0, left))
            if facts is not None and facts.get("refuses_settings"):
                raise ConfigError(f"{asked.entry.name} ({asked.entry.server}): {facts['error']}")
            if facts is not None and self._starts_here and facts.get("unusable_here"):
                raise ConfigError(f"{asked.entry.name} ({asked.entry.server}): {facts['unusable_here']}")
            if facts is not None and facts.get("env"):
                self._ignored[asked.entry.name] = ignored_settings(asked.entry, facts["env"])

    def remarks(self, logs: Path) -> list[str]:
        """Return a sentence on each environment whose settings in the file are written for another server."""
        lines = []
        for entry in self._environments:
            if entry.written_for is not None:
                ignored = f"{logs / entry.name}.log names those that it ignored"
                if entry.name in self._ignored:
                    ignored = f"ignored: {', '.join(self._ignored[entry.name]) or 'none'}"
                lines.append(f"{entry.server} used settings written for {entry.written_for}; {ignored}")
        return lines


def ignored_settings(entry: EnvironmentSettings, known: Mapping[str, Any]) -> list[str]:
    """Return the names of an entry's settings that its environment does not have, by the settings that it has.

    Secrets are left out: an environment's answer does not name them.
    """
    return [name for name in entry.env if name not in known and not names_secret(name)]
