"""The programs of a run, each planned from the launch's settings: its command line, variables and settings file.

Nothing here starts or writes anything. The command line of each vLLM server that the launcher starts is made here;
`vllm_manager` makes that of a server of the trainer's own, and `serving.start` runs in the process itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atropos_api.common import wandb_run
from atropos_api.common.cliconfig import merge
from atropos_api.common.secrets import redact
from example_trainer.launcher.endpoints import Endpoints, differing, servers_on_one_gpu
from example_trainer.launcher.environment_settings import EnvironmentSettings, program_of, with_secrets
from example_trainer.launcher.fleet_plan import AddedServer, server_id
from example_trainer.launcher.run_dir import RunDir, as_plain_data
from example_trainer.launcher.run_file import LAUNCHER_FIELDS, RunSettings
from example_trainer.launcher.section_flags import SectionFlags
from example_trainer.launcher.teacher import LAUNCHERS_OWN, TEACHER, TEACHER_SERVER, OwnTeacher, for_environment
from example_trainer.memory.fit import with_changes
from example_trainer.memory.preflight import cache_on_shared_gpu
from example_trainer.memory.shapes import local_shape
from example_trainer.options.server import server_settings
from example_trainer.options.training_options import TrainingOptions
from example_trainer.options.vllm_settings import MEMORY_SETTINGS
from example_trainer.options.without_effect import SERVER_FIELDS
from example_trainer.processes.child import ChildSpec, thread_limit
from example_trainer.processes.gpus import gpu_names
from example_trainer.processes.ports import LOOPBACK
from example_trainer.processes.tree import python_path
from example_trainer.weight_protocol.base_record import BASE_DIRECTORY
from example_trainer.weight_protocol.manifest import MANIFEST_NAME

BROKER, VLLM, TRAINER, FINAL_SERVER = "broker", "vllm", "trainer", "vllm-final"

LATEST_CHECKPOINT = "latest"
SERVED_DTYPE_NAMES = ("float32", "bfloat16", "float16")

_AS_TEACHER = {"weight_bridge_mode": "none", "vllm_tensor_parallel_size": 1, "vllm_quantization": None}

# Newest groups of each environment that are kept in the run directory.
GROUPS_TO_READ = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """The arguments with which Python starts each program; tests replace them with small stand-ins."""

    broker: tuple[str, ...] = ("-m", "atropos_api")
    vllm: tuple[str, ...] = ("-m", "example_trainer.vllm_api_server")
    trainer: tuple[str, ...] = ("-m", "example_trainer.grpo")


def server_name(index: int) -> str:
    """Return the name of the inference server with this index: `vllm`, `vllm-2`, `vllm-3`."""
    return VLLM if index == 0 else f"{VLLM}-{index + 1}"


@dataclass(kw_only=True, slots=True)
class ProgramBuilder:
    """Plans one program after another, and collects their settings files."""

    settings: RunSettings
    run: RunDir
    endpoints: Endpoints
    model: str
    programs: Programs
    teacher: OwnTeacher | None = None
    files: dict[Path, Mapping[str, Any]] = field(default_factory=dict)
    broker_token: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that pass the broker's token to every program."""
    bridge_token: str = ""
    wandb_run_id: str = ""
    secret_settings: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of each program that may not be written to any file of the run directory."""

    def broker(self) -> ChildSpec:
        flags = self.settings.flags["api"].without("port")
        content = self._observability() | {"host": self.endpoints.broker_host, "store": str(self.run.broker_store)}
        content |= self.settings.sections["api"]
        content = merge(content, flags.secret_values) | {"port": self.endpoints.broker_port}
        path, given = self._write("api", {"api": content}), self.settings.section("api")
        command = self._command(self.programs.broker, path, flags.without_secrets().unprefixed("api"))
        in_memory = given.get("store") == "memory"
        return self._child(
            BROKER,
            command,
            settings="api",
            environment=self._environment(),
            may_restart=not in_memory,
            restart_flags=("--no-fresh",) if "fresh" in given else (),  # else the run's own store would be deleted
            why_final="its store was memory, so the groups and batches of the run are gone" if in_memory else "",
        )

    def vllm(self, index: int) -> ChildSpec:
        name, flags = server_name(index), self.settings.flags[VLLM].without("port", "model", "server_id")
        given = {**self.settings.sections[VLLM], **self.settings.trainer.vllm_settings}
        content = merge(self._vllm_defaults(index) | given, flags.secret_values)
        own: dict[str, Any] = {"model": self._base, "port": self.endpoints.vllm_ports[index]}
        if self.settings.trainer.load_in_4bit:
            own["await_model"] = True  # the trainer writes the base once it has loaded the model
        if registered := self.settings.trainer.registered_servers:
            own |= {"broker_url": self.endpoints.broker_url, "policy": self.settings.trainer.policy}
            own["server_id"] = server_id(self.settings, self.run, index)
        path = self._write(name, {VLLM: content | own})
        command = self._command(self.programs.vllm, path, flags.without_secrets().unprefixed(VLLM))
        # A restarted server serves nothing until the trainer has published the current policy to it.
        environment = self._server_environment(index)
        # A registered server that is drained ends by itself.
        return self._child(name, command, environment=environment, ends_by_itself=registered, may_restart=True)

    def added_server(self, index: int, port: int) -> AddedServer:
        """Plan the server with this index on a port that is settled only now."""
        later = replace(self, endpoints=replace(self.endpoints, vllm_ports=(port,) * (index + 1)), files={})
        return later.vllm(index), later.files

    def teacher_servers(self) -> list[ChildSpec]:
        """Plan the teacher's server, if the launcher starts one: a plain server of a model that stays as it is."""
        teacher = self.teacher
        if teacher is None:
            return []
        config, flags = self.settings.trainer, self.settings.flags[TEACHER_SERVER].without("port", "model")
        share = config.gpu_memory_utilization if teacher.gpu is not None else self._memory_share()
        content: dict[str, Any] = {"host": LOOPBACK, "dtype": config.dtype, "max_model_len": config.max_model_len}
        # Said explicitly: VLLM_ENABLE_SHARED_WEIGHTS is meant for the policy's server.
        content |= {"gpu_memory_utilization": share, "seed": config.seed, "share_weights": False}
        if teacher.gpu is None:
            as_served = with_changes(config, _AS_TEACHER | {"model_name": teacher.model_name})
            content |= self._cache(as_served, share, {**teacher.vllm, **flags.values})
        content |= self._observability()
        content = merge(content | dict(teacher.vllm), flags.secret_values)
        content |= {"model": teacher.model_name, "port": self.endpoints.teacher_port}
        path = self._write(TEACHER, {VLLM: content})
        command = self._command(self.programs.vllm, path, flags.without_secrets().unprefixed(TEACHER_SERVER))
        own = {"LOGDIR": str(self.run.bridge / TEACHER)}
        if (gpu := teacher.gpu_beside(config.vllm_gpu)) is not None:
            own["CUDA_VISIBLE_DEVICES"] = gpu_names(gpu, os.environ, "--teacher.gpu")
        return [self._child(TEACHER, command, environment=self._environment() | own, may_restart=True)]

    def final_server(self) -> ChildSpec:
        """Plan a plain server of the last checkpoint, under the name by which the environments know the model."""
        config = self.settings.trainer
        checkpoint = (config.save_path or self.run.root).absolute() / LATEST_CHECKPOINT
        own: dict[str, Any] = {"model": str(checkpoint), "port": self.endpoints.vllm_ports[0]}
        own |= {"served_model_name": [self.model], "share_weights": False}  # whatever the environment says
        if config.trains_adapter:
            own |= {"model": self._base, "adapter": str(checkpoint)}
        # The trainer's settings have those of the section already.
        path = self._write(FINAL_SERVER, {VLLM: self._vllm_defaults(0) | own})
        command = self._command(self.programs.vllm, path)
        return self._child(FINAL_SERVER, command, environment=self._server_environment(0), may_restart=True)

    def _server_environment(self, index: int) -> dict[str, str]:
        own = {"LOGDIR": str(self._manifest.parent / server_name(index) if index else self._manifest.parent)}
        if (gpus := self.settings.trainer.server_gpus(index)) is not None:
            own["CUDA_VISIBLE_DEVICES"] = gpu_names(gpus, os.environ, "--vllm-gpu")
        return self._environment() | own

    def environment(self, entry: EnvironmentSettings) -> ChildSpec:
        env = self._environment_defaults(entry) | self._rollouts_to_read(entry) | dict(entry.env)
        if entry.written_for is not None:
            env["server"] = entry.written_for
        if self.settings.reseeded and "seed" in env:
            env["seed"] = self.settings.trainer.seed
        env_flags, typed = self.settings.flags["env"].without("server"), self.settings.flags["openai"]
        servers = self._openai(entry.openai)
        if isinstance(servers, list) and not isinstance(entry.openai, list):
            # A flag cannot name one of several servers, so it applies to each.
            servers, typed = [server | dict(typed.values) for server in servers], SectionFlags()
        env = merge(env, env_flags.secret_values)
        content = {"env": env, "openai": with_secrets(servers, typed.secret_values)}
        flags = [*env_flags.without_secrets().arguments, *typed.without_secrets().arguments]
        if entry.teacher is not None:
            content[TEACHER], more = self._teacher_of(entry)
            flags += more
        path = self._write(entry.name, content)
        command = self._command((*program_of(entry.server), "serve"), path, flags)
        variables = self._environment() | self.wandb(entry.name)
        variables.pop("HF_HUB_OFFLINE", None)  # the model is on this machine; some of the questions may not be
        return self._child(entry.name, command, environment=variables, ends_by_itself=True, may_restart=True)

    def _teacher_of(self, entry: EnvironmentSettings) -> tuple[Any, list[str]]:
        """Return an environment's `teacher` section and flags.

        The address is a flag too, unless it has a password: an environment without a teacher would ignore the section.
        """
        given, typed = entry.teacher, self.settings.flags[TEACHER].without(*LAUNCHERS_OWN)
        if isinstance(given, list):
            return given, []
        if self.teacher is not None and "base_url" not in given:
            typed = typed.without("model_name")
            given = for_environment(given, port=self.endpoints.teacher_port, model=self.teacher.model_name)
        leaves_out = "base_url" in typed.values or redact(url := str(given["base_url"])) != url
        address = () if leaves_out else ("--teacher.base_url", url)
        return merge(given, typed.secret_values), [*address, *typed.without_secrets().arguments]

    def trainer(self) -> ChildSpec:
        config = self.settings.trainer
        outlives = config.servers_outlive_publish
        # The launcher has used them, or said that they have no effect; the trainer would warn about each.
        given = {*SERVER_FIELDS} if outlives else set[str]()
        if config.registered_servers:
            given |= {"vllm_host", "vllm_port", "start_vllm"}  # the servers' addresses are the broker's
        asked = config.model_dump(mode="json", exclude_unset=True, exclude={*LAUNCHER_FIELDS, *given})
        settled: dict[str, Any] = {
            "model_name": self.model,
            "weight_bridge_mode": config.weight_bridge_mode,
            "atropos_url": self.endpoints.broker_url,
            "run_dir": str(self.run.root),
            # The launcher has made this check already, with the server's settings, which the trainer is not given.
            "fit": "off",
        }
        if not config.registered_servers:
            settled |= self._server_addresses()
        if not outlives and self._shares_with_teacher:
            settled["gpu_memory_utilization"] = self._memory_share()
        if config.mode.awaits_policy and not config.num_inference_nodes and not config.registered_servers:
            settled["start_vllm"] = "never"
        path = self._write(TRAINER, {TRAINER: asked | settled})
        return self._child(
            TRAINER,
            self._command(self.programs.trainer, path),
            environment=self._environment() | self.wandb(TRAINER),
            ends_by_itself=True,
            may_restart=config.checkpoint_interval > 0,
            why_final="" if config.checkpoint_interval else "with --checkpoint-interval 0 it is not started again",
            # Not a failure: in other modes the trainer replaces its server, and W&B's service exits before the trainer.
            watch_descendants=outlives and not config.use_wandb,
        )

    def _server_addresses(self) -> dict[str, Any]:
        config, found = self.settings.trainer, dict[str, Any]()
        if self.endpoints.vllm_ports:
            found["vllm_port"] = self.endpoints.vllm_ports[0]
        if config.broadcasts or len(self.endpoints.remote_urls) > 1:
            found["inference_urls"] = list(self.endpoints.vllm_urls)
        elif config.shares_memory:
            found["vllm_config_path"] = str(self._manifest)
        return found

    @property
    def _manifest(self) -> Path:
        named = self.settings.trainer.vllm_config_path
        if named != "auto" and self.settings.trainer.shares_memory:
            return Path(named).absolute()
        return self.run.bridge.absolute() / MANIFEST_NAME  # not in $LOGDIR, which another launch may have as well

    @property
    def _base(self) -> str:
        """The model that servers load: a base in 4 bits is served as the values that the trainer computes with."""
        return str((self.run.root / BASE_DIRECTORY).absolute()) if self.settings.trainer.load_in_4bit else self.model

    def _vllm_defaults(self, index: int) -> dict[str, Any]:
        config = with_changes(self.settings.trainer, {"model_name": self.model})
        own: dict[str, Any] = {"dtype": self._served_dtype(), "gpu_memory_utilization": self._memory_share()}
        given = {**self.settings.section(VLLM), **config.vllm_settings}
        own |= self._cache(config, self._memory_share(), given)
        if self.settings.trainer.load_in_4bit:
            own |= {"tokenizer": self.model, "served_model_name": [self.model]}
        asked = server_settings(self.settings.trainer, index)
        return {"host": self.endpoints.server_host} | asked | own | self._observability()

    def _served_dtype(self) -> str:
        """Return `--dtype`, or for `auto` the checkpoint's if it is known: vLLM's own lowers float32 to bfloat16."""
        asked = self.settings.trainer.dtype
        shape = local_shape(self.model) if asked == "auto" else None
        return shape.stored_dtype if shape is not None and shape.stored_dtype in SERVED_DTYPE_NAMES else asked

    @property
    def _shares_with_teacher(self) -> bool:
        """True if the teacher's server is on the policy server's GPU, and no share of its memory is given for it."""
        return self.teacher is not None and not self.teacher.has_own_share

    def _memory_share(self) -> float:
        """Return each server's part of `--gpu-memory-utilization`, which those on one GPU divide."""
        config = self.settings.trainer
        return config.gpu_memory_utilization / (servers_on_one_gpu(config) + self._shares_with_teacher)

    def _cache(self, config: TrainingOptions, share: float, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the size of a server's cache if its GPU is not its own, unless the server's own settings decide."""
        if not MEMORY_SETTINGS.isdisjoint(given) or self.settings.placement.gives_whole_gpus:
            return {}
        beside_teacher = self.teacher is not None and self.teacher.gpu is None
        beside_server = beside_teacher or servers_on_one_gpu(self.settings.trainer) > 1
        found = cache_on_shared_gpu(config, share=share, beside_server=beside_server)
        return {} if found is None else {"kv_cache_memory_bytes": found}

    def _observability(self) -> dict[str, Any]:
        """Return what the launcher was told about logs and traces, which holds for every program."""
        return self.settings.trainer.model_dump(include={"log_format", "otlp_traces_endpoint"}, exclude_unset=True)

    def _environment_defaults(self, entry: EnvironmentSettings) -> dict[str, Any]:
        config = self.settings.trainer
        own, is_alone = self._observability(), len(self.settings.environments) == 1
        if config.metrics_port is not None:
            # The trainer has this port, the environments those after it; 0 is any free port for each of them.
            after = config.metrics_port and config.metrics_port + 1 + self.settings.environments.index(entry)
            own |= {"metrics_port": after, "metrics_host": config.metrics_host}
        return own | {
            "rollout_server_url": self.endpoints.broker_url,
            "tokenizer_name": self.model,
            "total_steps": config.training_steps,
            "data_dir_to_save_evals": str(self.run.evals if is_alone else self.run.evals / entry.name),
            "use_wandb": config.use_wandb,
            "use_trackio": config.use_trackio,
            **({"trackio_name": f"{self.run.root.name}-{entry.name}"} if config.use_trackio else {}),
        }

    def _rollouts_to_read(self, entry: EnvironmentSettings) -> dict[str, Any]:
        """Return settings that keep the newest groups in the run directory; none if the user names a file for them."""
        if "data_path_to_save_groups" in {*entry.env, *self.settings.flags["env"].values}:
            return {}
        path = self.run.rollouts / f"{entry.name}.jsonl"
        return {"data_path_to_save_groups": str(path), "groups_to_keep": GROUPS_TO_READ}

    def _openai(self, given: Any) -> Any:
        if isinstance(given, list):
            return [self._openai(server) for server in given]
        ours = {"model_name": self.model, "api_key": "none", "server_type": "vllm"}
        is_named = "base_url" in {*given, *self.settings.flags["openai"].values}
        if self.settings.trainer.registered_servers and not is_named:
            return ours | {"policy": self.settings.trainer.policy} | dict(given)
        servers = [{"base_url": f"{url}/v1"} | ours | dict(given) for url in self.endpoints.vllm_urls]
        return servers[0] if is_named or len(servers) == 1 else servers

    def _environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": python_path(), "ATROPOS_BRIDGE_TOKEN": self.bridge_token, **self.broker_token}
        if not self.settings.placement.is_ray:  # else the cores of each program's node decide, in its seat
            own |= thread_limit()
        teacher = None if self.teacher is None else self.teacher.model_name
        models = (self.model, teacher, self.settings.trainer.ref_model)
        if all(Path(model).is_dir() for model in models if model is not None):
            own["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE", "1")
        return own

    def wandb(self, program: str) -> dict[str, str]:
        """Return the variables by which trainer and environments write one W&B run, if there is one and it has both."""
        if not (self.settings.trainer.use_wandb and self.settings.environments):
            return {}
        is_primary = program == TRAINER
        return wandb_run.variables(
            self.wandb_run_id,
            project=self.settings.trainer.wandb_project,
            label=program,
            is_primary=is_primary,
            directory=self.run.root if is_primary else self.run.logs / program,
        )

    def _command(self, program: tuple[str, ...], path: str, flags: Sequence[str] = ()) -> tuple[str, ...]:
        return (sys.executable, *program, "--config", path, *flags)

    def _write(self, name: str, content: Mapping[str, Any]) -> str:
        path = self.run.configs / f"{name}.yaml"
        plain = as_plain_data(content)
        self.files[path] = redact(plain)
        self.secret_settings[name] = differing(plain, self.files[path])
        return str(path)

    def _child(self, name: str, command: tuple[str, ...], *, settings: str | None = None, **rest: Any) -> ChildSpec:
        secret, log_bytes = self.secret_settings[settings or name], self.settings.trainer.max_log_mib * 2**20
        return ChildSpec(name=name, command=command, secret_settings=secret, largest_log_bytes=log_bytes, **rest)
