"""From what was asked for to what will run: ports, paths, and the command line and settings of each program.

Nothing here starts or writes anything, so that `--dry-run` shows exactly what a launch would do.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments.installed import environment_names
from example_trainer.errors import ModelNotFound, TrainerError
from example_trainer.options.publish import LORA_MODES, served_rank, versions_kept
from example_trainer.running.interpreter import PACKAGE_ROOT, python_path
from example_trainer.running.ports import LOOPBACK, free_port, require_free
from example_trainer.running.run_dir import RunDir
from example_trainer.running.run_file import LAUNCHER_FIELDS, EnvironmentSettings, RunConfig, RunSettings
from example_trainer.running.supervisor import ChildSpec

BROKER, VLLM, TRAINER, BASE_MODEL, FINAL_SERVER = "broker", "vllm", "trainer", "base-model", "vllm-final"
LATEST_CHECKPOINT = "latest"
MANIFEST_NAME = "vllm_bridge_config.json"
MANY_CORES = 8
# Modes in which the server lives through the whole run; in the others the trainer starts and restarts its own.
SERVER_OUTLIVES_PUBLISH = frozenset({"shared_vllm", "lora_only"})


class EnvironmentNotFound(TrainerError):
    """The environment server named is neither a file nor a module here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """What Python is told to run for each part; tests put small stand-ins here."""

    broker: tuple[str, ...] = ("-m", "atropos_api")
    vllm: tuple[str, ...] = ("-m", "example_trainer.vllm_api_server")
    trainer: tuple[str, ...] = ("-m", "example_trainer.grpo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Addresses and ports, settled before any program starts."""

    broker_url: str
    broker_port: int | None
    """None: the broker is somebody else's."""
    vllm_port: int

    @property
    def vllm_url(self) -> str:
        return f"http://{LOOPBACK}:{self.vllm_port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a launch does, in the order in which it starts."""

    model: str
    places: Places
    children: tuple[ChildSpec, ...]
    files: Mapping[Path, Mapping[str, Any]]
    """Settings of each program, by the path they are written to."""
    environments: tuple[str, ...] = ()
    final_server: ChildSpec | None = None
    """Serves the last checkpoint to the final evaluation where the trainer's own server ends with the trainer."""

    def settings_of(self, name: str) -> Mapping[str, Any]:
        """What the program's settings file holds."""
        stem = "api" if name == BROKER else name
        return next((content for path, content in self.files.items() if path.stem == stem), {})

    def child(self, name: str) -> ChildSpec | None:
        return next((spec for spec in self.children if spec.name == name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBase:
    """A base model that is made on this machine: `tiny/chain`, or `tiny/chain:1` for another seed."""

    task: str
    seed: int

    @property
    def spec(self) -> ChildSpec:
        command = (sys.executable, "-m", "example_trainer.tiny", "--task", self.task, "--seed", str(self.seed))
        # Two threads, as the recipe was measured; nothing else runs meanwhile.
        return ChildSpec(
            name=BASE_MODEL,
            command=command,
            environment={"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "2"},
            ends_by_itself=True,
            watch_descendants=False,
        )


def local_base(model_name: str) -> LocalBase | None:
    """The locally made base that `model_name` means, if it means one."""
    match = re.fullmatch(r"tiny/([a-z]+)(?::(\d+))?", model_name)
    if match is None or Path(model_name).exists():
        return None
    return LocalBase(task=match[1], seed=int(match[2] or 0))


def require_model(model_name: str) -> str:
    """`model_name`, made absolute if it is a directory; refuses a path at which there is no model."""
    path = Path(model_name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"--model-name {model_name}: the directory holds no config.json, so it is no model")
        return str(path.absolute())
    if model_name.startswith(("/", ".", "~")) or model_name.count("/") > 1:
        raise ModelNotFound(f"--model-name {model_name}: no such directory, and not the form of a Hugging Face id")
    return model_name


def settle_places(settings: RunSettings) -> Places:
    """Ports for the programs we start: those asked for, if they are free, else free ones."""
    config = settings.trainer
    given = config.model_fields_set
    broker_port = None if "atropos_url" in given else _broker_port(settings)
    broker_url = config.atropos_url if broker_port is None else f"http://{LOOPBACK}:{broker_port}"
    return Places(broker_url=broker_url, broker_port=broker_port, vllm_port=_vllm_port(settings))


def make_plan(
    settings: RunSettings, run: RunDir, places: Places, *, model: str, programs: Programs | None = None
) -> Plan:
    """Every program of the run with its command line and its settings."""
    builder = _Builder(settings=settings, run=run, places=places, model=model, programs=programs or Programs())
    children = []
    if places.broker_port is not None:
        children.append(builder.broker())
    if starts_server(settings.trainer):
        children.append(builder.vllm())
    children += [builder.environment(entry) for entry in settings.environments]
    children.append(builder.trainer())
    ends_with_trainer = not starts_server(settings.trainer) and settings.environments
    return Plan(
        model=model,
        places=places,
        children=tuple(children),
        files=builder.files,
        environments=tuple(entry.name for entry in settings.environments),
        final_server=builder.final_server() if ends_with_trainer else None,
    )


def starts_server(config: RunConfig) -> bool:
    return config.weight_bridge_mode in SERVER_OUTLIVES_PUBLISH


@dataclass(kw_only=True, slots=True)
class _Builder:
    settings: RunSettings
    run: RunDir
    places: Places
    model: str
    programs: Programs
    files: dict[Path, Mapping[str, Any]] = field(default_factory=dict)
    bridge_token: str = field(default_factory=lambda: secrets.token_hex(16))

    def broker(self) -> ChildSpec:
        flags = self.settings.flags["api"]
        content = {"host": LOOPBACK, "store": str(self.run.broker_store), **self.settings.sections["api"]}
        path = self._write("api", {"api": content | {"port": self.places.broker_port}})
        command = self._command(self.programs.broker, path, flags.without("port").unprefixed("api"))
        return ChildSpec(name=BROKER, command=command, environment=self._environment())

    def vllm(self) -> ChildSpec:
        flags = self.settings.flags["vllm"].without("port", "model")
        content = self._vllm_defaults() | dict(self.settings.sections["vllm"])
        path = self._write(VLLM, {VLLM: content | {"model": self.model, "port": self.places.vllm_port}})
        command = self._command(self.programs.vllm, path, flags.unprefixed(VLLM))
        return ChildSpec(name=VLLM, command=command, environment=self._server_environment())

    def final_server(self) -> ChildSpec:
        """A plain server of the last checkpoint, under the names by which the environments know the model."""
        config = self.settings.trainer
        checkpoint = (config.save_path or self.run.root).absolute() / LATEST_CHECKPOINT
        own: dict[str, Any] = {"model": str(checkpoint), "port": self.places.vllm_port}
        own["served_model_name"] = [self.model]
        if config.weight_bridge_mode in LORA_MODES:
            own |= {"model": self.model, "adapter": str(checkpoint)}
        path = self._write(FINAL_SERVER, {VLLM: self._vllm_defaults() | self.settings.section(VLLM) | own})
        command = self._command(self.programs.vllm, path)
        return ChildSpec(name=FINAL_SERVER, command=command, environment=self._server_environment())

    def _server_environment(self) -> dict[str, str]:
        own = {"LOGDIR": str(self._manifest.parent)}
        if self.settings.trainer.vllm_gpu is not None:
            own["CUDA_VISIBLE_DEVICES"] = str(self.settings.trainer.vllm_gpu)
        return self._environment() | own

    def environment(self, entry: EnvironmentSettings) -> ChildSpec:
        env = self._environment_defaults() | dict(entry.env)
        if self.settings.reseeded and "seed" in env:
            env["seed"] = self.settings.trainer.seed
        content = {"env": env, "openai": self._openai(entry.openai)}
        path = self._write(entry.name, content)
        flags = [*self.settings.flags["env"].without("server").arguments, *self.settings.flags["openai"].arguments]
        command = self._command((*program_of(entry.server), "serve"), path, flags)
        return ChildSpec(name=entry.name, command=command, environment=self._environment(), ends_by_itself=True)

    def trainer(self) -> ChildSpec:
        config = self.settings.trainer
        asked = config.model_dump(mode="json", exclude_unset=True, exclude=set(LAUNCHER_FIELDS))
        settled = {
            "model_name": self.model,
            "weight_bridge_mode": config.weight_bridge_mode,
            "atropos_url": self.places.broker_url,
            "vllm_port": self.places.vllm_port,
            "run_dir": str(self.run.root),
        }
        if config.weight_bridge_mode == "shared_vllm":
            settled["vllm_config_path"] = str(self._manifest)
        if starts_server(config):
            settled["start_vllm"] = "never"
        path = self._write(TRAINER, {TRAINER: asked | settled})
        return ChildSpec(
            name=TRAINER,
            command=self._command(self.programs.trainer, path),
            environment=self._environment(),
            ends_by_itself=True,
            # In the other modes it replaces its server by design, and W&B's service ends before it does.
            watch_descendants=starts_server(config) and not config.use_wandb,
        )

    @property
    def _manifest(self) -> Path:
        named = self.settings.trainer.vllm_config_path
        if named != "auto":
            return Path(named).absolute()
        return Path(os.environ.get("LOGDIR") or self.run.bridge).absolute() / MANIFEST_NAME

    def _vllm_defaults(self) -> dict[str, Any]:
        config = self.settings.trainer
        options: dict[str, Any] = {
            "host": LOOPBACK,
            "dtype": config.dtype,
            "max_model_len": config.max_model_len,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "seed": config.seed,
        }
        if config.weight_bridge_mode == "shared_vllm":
            options["share_weights"] = True
        if config.weight_bridge_mode in LORA_MODES:
            options |= {"enable_lora": True, "max_lora_rank": served_rank(config.lora_r)}
            options["max_loras"] = versions_kept(config.max_staleness)
        if config.weight_bridge_mode == "lora_only":
            options["await_policy"] = True
        return options

    def _environment_defaults(self) -> dict[str, Any]:
        config = self.settings.trainer
        return {
            "rollout_server_url": self.places.broker_url,
            "tokenizer_name": self.model,
            "total_steps": config.training_steps,
            "data_dir_to_save_evals": str(self.run.evals),
            "use_wandb": config.use_wandb,
        }

    def _openai(self, given: Any) -> Any:
        if isinstance(given, list):
            return [self._openai(server) for server in given]
        ours = {"base_url": f"{self.places.vllm_url}/v1", "model_name": self.model, "api_key": "none"}
        return ours | {"server_type": "vllm"} | dict(given)

    def _environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": python_path(), "ATROPOS_BRIDGE_TOKEN": self.bridge_token}
        if token := self.settings.trainer.atropos_token or self.settings.section("api").get("token"):
            own["ATROPOS_TOKEN"] = str(token)
        if (os.cpu_count() or 1) <= MANY_CORES:
            # OpenMP threads of several programs spin against each other when cores are few.
            own["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        if Path(self.model).is_dir():
            own["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE", "1")
        return own

    def _command(self, program: tuple[str, ...], path: str, flags: Sequence[str] = ()) -> tuple[str, ...]:
        return (sys.executable, *program, "--config", path, *flags)

    def _write(self, name: str, content: Mapping[str, Any]) -> str:
        path = self.run.configs / f"{name}.yaml"
        self.files[path] = content
        return str(path)


def program_of(server: str) -> tuple[str, ...]:
    """How to start an environment server: its file where it lies (`arithmetic_server.py` is ours), the name under
    which an installed package offers it, or a module.
    """
    if not server.endswith(".py"):
        return ("-m", "environments.installed", server) if server in environment_names() else ("-m", server)
    for path in (Path(server), PACKAGE_ROOT / "environments" / server):
        if path.is_file():
            return (str(path.absolute()),)
    raise EnvironmentNotFound(f"--env.server {server}: no such file here or among the environments of this package")


def _broker_port(settings: RunSettings) -> int:
    asked = settings.section("api").get("port")
    return free_port() if asked is None else require_free(int(asked), flag="--api.port")


def _vllm_port(settings: RunSettings) -> int:
    config = settings.trainer
    asked = settings.section("vllm").get("port")
    if asked is not None:
        return require_free(int(asked), flag="--vllm.port")
    # Somebody else's environments were told the documented port.
    if "vllm_port" in config.model_fields_set or not settings.environments:
        return require_free(config.vllm_port, flag="--vllm-port")
    return free_port()
