"""The plan of a launch: the programs that it starts, in their order, with all settings that follow from its own.

Nothing here starts or writes anything, so that `--dry-run` shows exactly what a launch would do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atropos_api.common.secrets import public_settings
from example_trainer.launcher.endpoints import Endpoints, bridge_token, broker_token, token_variables
from example_trainer.launcher.fleet_plan import AddedServer
from example_trainer.launcher.programs import BROKER, TRAINER, ProgramBuilder, Programs
from example_trainer.launcher.run_dir import RunDir
from example_trainer.launcher.run_file import LAUNCHER_FIELDS, RunSettings
from example_trainer.launcher.teacher import own_teacher
from example_trainer.processes.child import ChildSpec

SETTLED_HERE = ("model_name", "atropos_url", "vllm_port", "inference_urls")
"""Settings of the trainer whose values the launcher determines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of a launch: it lists the programs, in the order in which they start, and their settings."""

    model: str
    endpoints: Endpoints
    children: tuple[ChildSpec, ...]
    files: Mapping[Path, Mapping[str, Any]]
    """Settings of each program, by the path of the file they are written to."""
    environments: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    """Names of the inference servers among the children."""
    wandb_run_id: str | None = None
    """Id of the W&B run of trainer and environments; None if there is none, or if each has its own."""
    final_server: ChildSpec | None = None
    """Server of the last checkpoint for the final evaluation, in modes whose own server ends with the trainer."""
    add_server: Callable[[int, int], AddedServer] | None = field(default=None, compare=False, repr=False)
    """Plans one more inference server, with its index and port; None if the servers do not outlive a publish."""

    def settings_of(self, name: str) -> Mapping[str, Any]:
        """Return the content of the program's settings file."""
        stem = "api" if name == BROKER else name
        return next((content for path, content in self.files.items() if path.stem == stem), {})

    def child(self, name: str) -> ChildSpec | None:
        return next((spec for spec in self.children if spec.name == name), None)


def make_plan(
    settings: RunSettings,
    run: RunDir,
    endpoints: Endpoints,
    *,
    model: str,
    teacher_model: str | None = None,
    programs: Programs | None = None,
) -> Plan:
    """Plan every program of the run, with its command line and its settings; `teacher_model` is the teacher's path."""
    teacher = own_teacher(settings)
    builder = ProgramBuilder(
        settings=settings,
        run=run,
        endpoints=endpoints,
        model=model,
        teacher=teacher if teacher is None or teacher_model is None else replace(teacher, model_name=teacher_model),
        programs=programs or Programs(),
        broker_token=token_variables(broker_token(settings)),
        bridge_token=bridge_token(settings),
        wandb_run_id=run.wandb_run_id(resumes=settings.trainer.resume is not None),
    )
    outlives = settings.trainer.servers_outlive_publish
    servers = [builder.vllm(index) for index in range(len(endpoints.vllm_ports) if outlives else 0)]
    broker = [builder.broker()] if endpoints.broker_port is not None else []
    environments = [builder.environment(entry) for entry in settings.environments]
    return Plan(
        model=model,
        endpoints=endpoints,
        children=(*broker, *servers, *builder.teacher_servers(), *environments, builder.trainer()),
        files=builder.files,
        environments=tuple(entry.name for entry in settings.environments),
        servers=tuple(server.name for server in servers),
        wandb_run_id=builder.wandb_run_id if builder.wandb(TRAINER) else None,
        final_server=builder.final_server() if environments and not outlives else None,
        add_server=builder.added_server if outlives else None,
    )


def resolved(settings: RunSettings, plan: Plan) -> dict[str, object]:
    """Return all settled settings and commands for `config.json`, without secrets."""
    trainer = public_settings(settings.trainer, exclude=set(LAUNCHER_FIELDS))
    settled = plan.settings_of(TRAINER)[TRAINER]
    joined = {} if plan.wandb_run_id is None else {"wandb_run_id": plan.wandb_run_id}
    return {
        **joined,
        "trainer": trainer | {name: settled[name] for name in SETTLED_HERE if name in settled},
        "programs": {
            spec.name: {"command": list(spec.command), "settings": plan.settings_of(spec.name)}
            for spec in plan.children
        },
    }
