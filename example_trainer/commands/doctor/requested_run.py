"""The run as a run file asks for it, gathered for the checks: settings, server options, model files, environments.

Settings are read and planned by the same code as in a launch, and each environment's by its own process
(`environments.facts`), so that a check sees what the programs would see. Nothing is started or written, apart from
files in a temporary directory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from atropos_api.common.cliconfig import ConfigError
from example_trainer.commands.doctor.findings import Finding, error, warning
from example_trainer.commands.doctor.model_files import ModelFiles
from example_trainer.errors import ModelNotFound, TrainerError
from example_trainer.launcher.base_model import local_base, require_model
from example_trainer.launcher.endpoints import Endpoints
from example_trainer.launcher.environment_check import ask_environment
from example_trainer.launcher.environment_settings import EnvironmentNotFound, EnvironmentSettings, program_of
from example_trainer.launcher.plan import Plan, make_plan
from example_trainer.launcher.programs import VLLM
from example_trainer.launcher.run_dir import RunDir, as_plain_data, plan_run_dir
from example_trainer.launcher.run_file import RunConfig, RunSettings, read_settings
from example_trainer.launcher.run_lock import refuse_foreign_directory
from example_trainer.launcher.teacher import TEACHER, TEACHER_SERVER, own_teacher
from example_trainer.memory.shapes import CONFIG_FILE, find_file
from example_trainer.processes.gpus import count_gpus
from example_trainer.processes.ports import LOOPBACK
from example_trainer.serving.config import ServerConfig, read_config

PLANNED_BROKER_PORT, PLANNED_TEACHER_PORT = 8000, 8001


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """One environment of the run, with the answer of `environments.facts`; None if it gave none."""

    entry: EnvironmentSettings
    facts: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        return self.entry.server


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedRun:
    """Everything that the checks look at."""

    settings: RunSettings
    run: RunDir
    model: ModelFiles | None
    """None if the model is not on this machine."""
    teacher: ModelFiles | None = None
    """The teacher's model; None if the launcher starts no teacher, or the model is not on this machine."""
    server: ServerConfig | None
    """The options of our vLLM servers; None if they are invalid, or if the servers run elsewhere."""
    server_extras: Mapping[str, Any] = field(default_factory=dict)
    """Options that are vLLM's own, in snake case."""
    teacher_server: ServerConfig | None = None
    """The options of the teacher's server; None if they are invalid, or if the launcher starts no teacher."""
    teacher_extras: Mapping[str, Any] = field(default_factory=dict)
    environments: tuple[Environment, ...] = ()
    gpus: int = 0
    """Number of GPUs that CUDA_VISIBLE_DEVICES leaves visible; `device` and `vllm_gpu` count among these."""

    @property
    def config(self) -> RunConfig:
        return self.settings.trainer

    @property
    def on_gpu(self) -> bool:
        """True if trainer and server would compute on a GPU."""
        return self.config.device.startswith("cuda") or (self.config.device == "auto" and self.gpus > 0)

    @property
    def max_model_len(self) -> int:
        """The server's longest sequence."""
        own = None if self.server is None else self.server.max_model_len
        return own or self.config.max_model_len


def gather(argv: Sequence[str]) -> tuple[RequestedRun, list[Finding]]:
    """Read what `argv` asks; return it with the faults that are found while reading.

    Raises `ConfigError` for arguments and files that the launcher itself would refuse.
    """
    settings = read_settings(argv)
    found: list[Finding] = []
    run = _run_dir(settings.trainer, found)
    name, model = _find_model(settings.trainer.model_name, found)
    usable = replace(settings, environments=tuple(_usable_environments(settings, found)))
    own = own_teacher(settings)
    teacher_name, teacher = (None, None) if own is None else _find_model(own.model_name, found, "teacher.model_name")
    plan = make_plan(usable, run, _planned_endpoints(usable), model=name, teacher_model=teacher_name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        asking = [ask_environment(entry, plan, folder) for entry in usable.environments]
        server, extras = _server_options(usable, plan, folder, found)
        teacher_server, teacher_extras = _teacher_options(usable, plan, folder, found)
        environments = tuple(Environment(entry=asked.entry, facts=asked.facts()) for asked in asking)
    requested = RequestedRun(
        settings=settings,
        run=run,
        model=model,
        teacher=teacher,
        server=server,
        server_extras=extras,
        teacher_server=teacher_server,
        teacher_extras=teacher_extras,
        environments=environments,
        gpus=count_gpus(os.environ),
    )
    return requested, found


def _run_dir(config: RunConfig, found: list[Finding]) -> RunDir:
    try:
        run = plan_run_dir(config.run_dir, name=config.name, log_dir=config.log_dir, resume=config.resume is not None)
        refuse_foreign_directory(run)
        return run
    except TrainerError as refused:
        text, _, advice = str(refused).partition("; ")
        found.append(error("run directory", text, advice))
    root = (config.run_dir or Path("runs")).absolute()
    return RunDir(root=root, log_root=root / "logs", attempt=1)


def _find_model(name: str, found: list[Finding], setting: str = "model_name") -> tuple[str, ModelFiles | None]:
    """Return the model's name as the programs would get it, and its files if they are on this machine."""
    base = local_base(name)
    if base is not None:
        from environments.tasks.arithmetic import TASK_NAMES
        from example_trainer.tiny.cache import find_base

        task = next((known for known in TASK_NAMES if known == base.task), None)
        if task is None:
            known = ", ".join(f"tiny/{each}" for each in TASK_NAMES)
            found.append(error("model", f"{setting} {name}: no such model can be made here", f"name one of {known}"))
            return name, None
        made = find_base(task, base.seed)
        if made is None:
            found.append(Finding("note", "model", f"{name} is made at the first launch, so it is not examined"))
        return (name, None) if made is None else (str(made), ModelFiles(made))
    try:
        model = require_model(name, setting)
    except ModelNotFound as missing:
        advice = "name a directory with config.json, weights and tokenizer, or a Hugging Face id"
        found.append(error("model", str(missing), advice))
        return name, None
    if Path(model).is_dir():
        return model, ModelFiles(Path(model))
    cached = find_file(model, CONFIG_FILE)
    if cached is None:
        found.append(not_here(name, "not on this machine, so its files are not examined", setting))
        return model, None
    files = ModelFiles(cached.parent, hub_name=model)
    # Environments then render its chat template as well, which they do for a directory only.
    return str(files.folder) if files.has_tokenizer else model, files


def not_here(name: str, what: str, setting: str = "model_name") -> Finding:
    """Return the finding about files of a hub model that the run would have to download."""
    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in {"1", "true", "yes", "on"}
    report = error if offline else warning
    more = ", and HF_HUB_OFFLINE forbids downloading it" if offline else "; the run would download it first"
    return report("model", f"{setting} {name}: {what}{more}", f"hf download {name}")


def _usable_environments(settings: RunSettings, found: list[Finding]) -> list[EnvironmentSettings]:
    """Return the environments whose program exists."""
    usable = []
    for entry in settings.environments:
        try:
            program_of(entry.server)
        except EnvironmentNotFound as missing:
            advice = "give the path of a file that exists from here, or the name of one in environments/"
            found.append(error("environment", str(missing).replace("--env.server", "env.server"), advice))
        else:
            usable.append(entry)
    return usable


def _planned_endpoints(settings: RunSettings) -> Endpoints:
    """Return addresses that make a plan possible; ports are checked elsewhere, all of them."""
    config = settings.trainer
    remote = config.remote_servers
    ports = () if remote else tuple(config.vllm_port + index for index in range(config.local_servers))
    ours = "atropos_url" not in config.model_fields_set
    url = f"http://{LOOPBACK}:{PLANNED_BROKER_PORT}" if ours else config.atropos_url
    return Endpoints(
        broker_url=url,
        broker_port=PLANNED_BROKER_PORT if ours else None,
        vllm_ports=ports,
        remote_urls=remote,
        teacher_port=None if own_teacher(settings) is None else PLANNED_TEACHER_PORT,
    )


def _server_options(
    settings: RunSettings, plan: Plan, folder: Path, found: list[Finding]
) -> tuple[ServerConfig | None, Mapping[str, Any]]:
    """Read the options of our servers as the server's own program would."""
    if plan.endpoints.remote_urls:
        return None, {}
    config = settings.trainer
    own = {"model": plan.model, "dtype": config.dtype, "max_model_len": config.max_model_len}
    content = plan.settings_of(VLLM).get(VLLM) or own | dict(settings.sections[VLLM])
    flags = settings.flags[VLLM].without("port", "model").without_secrets().unprefixed(VLLM)
    return _read_options(VLLM, content, flags, folder, found)


def _teacher_options(
    settings: RunSettings, plan: Plan, folder: Path, found: list[Finding]
) -> tuple[ServerConfig | None, Mapping[str, Any]]:
    """Read the options of the teacher's server, if the launcher would start one."""
    content = plan.settings_of(TEACHER).get(VLLM)
    if content is None:
        return None, {}
    flags = settings.flags[TEACHER_SERVER].without("port", "model").without_secrets().unprefixed(TEACHER_SERVER)
    return _read_options(TEACHER_SERVER, content, flags, folder, found)


def _read_options(
    section: str, content: Mapping[str, Any], flags: Sequence[str], folder: Path, found: list[Finding]
) -> tuple[ServerConfig | None, Mapping[str, Any]]:
    """Read a server's options from the file and the flags that its program would get."""
    path = folder / f"{section}-options.yaml"
    path.write_text(yaml.safe_dump(as_plain_data({VLLM: content})), encoding="utf-8")
    try:
        server, rest = read_config(["--config", str(path), *flags])
    except ConfigError as refused:
        text = str(refused).replace(f"--config {path}", f"section {section}")
        found.append(error("server", f"{section}: {text}", f"correct the section {section} or the flag --{section}.*"))
        return None, {}
    extras = {**(server.model_extra or {}), **_as_mapping(rest)}
    return server, {name.replace("-", "_"): value for name, value in extras.items()}


def _as_mapping(flags: Sequence[str]) -> dict[str, Any]:
    """Return vLLM's own flags as settings: `--hf-overrides {...}` as `hf_overrides`."""
    settings: dict[str, Any] = {}
    name = ""
    for word in flags:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            settings[name] = value if equals else True
        elif name:
            settings[name] = word
    return settings
