"""The command line of every environment: its verbs are `serve`, `process`, `evaluate` and `validate`.

`read_command` merges flags, files and defaults. `run` runs one verb in an event loop: it handles signals, closes what
was opened, and raises one error of several. `collect_rarely` tunes garbage collection for a server whose objects are
mostly long lists of numbers, which hold no cycles.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import anyio
from pydantic import BaseModel, ConfigDict, Field, create_model

from atropos_api.common.cliconfig import ConfigError, load_config, nearest
from atropos_api.common.errors import AtroposError, Outage
from atropos_api.common.identity import server_stem
from atropos_api.common.logs import setup_logging
from atropos_api.common.secrets import TokenSource
from atropos_api.common.tracing import open_tracing
from environments.sdk.config import APIServerConfig, BaseEnvConfig, ServerBaseline, as_server_list, slurm_servers
from environments.sdk.environment import Environment
from environments.sdk.errors import InferenceUnavailable, innermost
from environments.sdk.runtime.stopping import StopRequest, listen_for_stop
from environments.sdk.server_manager import MAX_N_COMPLETIONS

if TYPE_CHECKING:
    from atropos_api.client import AsyncBrokerClient

logger = logging.getLogger(__name__)

VERBS: dict[Verb, str] = {
    "serve": "generate rollouts for a trainer, through the broker",
    "process": "collect groups into a file, without a trainer",
    "evaluate": "measure the model once",
    "validate": "check the rewards on gold answers, without a model",
}

PRESETS: dict[Verb, dict[str, Any]] = {
    "serve": {},
    "process": {"ensure_scores_are_not_same": False, "include_messages": True},
    "evaluate": {},
    "validate": {},
}


class EnvironmentCommand(BaseModel):
    """Configuration of one command: the sections of an environment's file, and the flags outside them."""

    model_config = ConfigDict(extra="forbid")

    env: BaseEnvConfig
    openai: APIServerConfig | list[APIServerConfig]
    slurm: bool = Field(False, description="Find the inference servers of this Slurm job.")
    testing: bool = Field(False, description="Refused: environments.sdk.testing has a server for tests.")
    overwrite: bool = Field(False, description="Let `evaluate` replace the results in data_dir_to_save_evals.")
    max_n_completions: int = Field(MAX_N_COMPLETIONS, ge=1, description="Samples in one request at most.")
    proxy_url: str | None = Field(None, description="Refused: sessions need no proxy.")

    @property
    def servers(self) -> list[APIServerConfig]:
        return as_server_list(self.openai)

    @property
    def teachers(self) -> list[APIServerConfig] | None:
        """The servers of the teacher; None for environments without one."""
        teacher = getattr(self, "teacher", None)
        return None if teacher is None else as_server_list(teacher)


class LenientCommand(EnvironmentCommand):
    """Configuration of a command for environments of the original Atropos: their files may hold unknown keys."""

    model_config = ConfigDict(extra="ignore")


def run_verb(env_cls: type[Environment], argv: Sequence[str]) -> int:
    """Run `VERB [flags]` and return the process's exit code."""
    verb = _read_verb(env_cls, argv)
    _require_complete(env_cls, verb)
    name = env_cls.name or env_cls.__name__
    setup_logging(name)  # warnings about the configuration come before its format is known
    command = read_command(env_cls, verb, argv[1:])
    logs = setup_logging(name, form=command.env.log_format)
    _refuse_unsupported(command)
    servers = slurm_servers(command.servers[0]) if command.slurm else command.servers
    if verb == "serve" and not (env_cls.lenient or command.env.allow_estimated_tokens):
        _require_trainable(servers)

    def make_env() -> Environment:
        env = env_cls(command.env, servers, slurm=command.slurm, testing=command.testing)
        logs.describe(lambda: {"environment": env.registered_name, **(env.worker.log_fields() if env.worker else {})})
        env.overwrite_results = command.overwrite
        if verb == "serve":
            env.tracing = open_tracing(command.env.otlp_traces_endpoint, service="atropos-environment")
        env.server.pool.max_n_completions = command.max_n_completions
        if command.teachers is not None:
            env.set_teacher(command.teachers)
        return env

    try:
        return run(verb, make_env)
    except AtroposError as error:
        if verb == "serve" and _is_outage(error):
            raise Outage(str(error)) from error
        raise


def _is_outage(error: AtroposError) -> bool:
    """Return True if broker or inference server have not answered for as long as the environment waits for them."""
    from atropos_api.client import is_outage

    return isinstance(error, InferenceUnavailable) or is_outage(error)


def read_command(env_cls: type[Environment], verb: Verb, argv: Sequence[str]) -> EnvironmentCommand:
    """Read the configuration: flags override files, and files the environment's own defaults."""
    env_config, server_configs = env_cls.config_init()
    server = env_cls.server_config_cls | list[env_cls.server_config_cls]  # type: ignore[name-defined]
    fields: dict[str, Any] = {"env": (type(env_config), ...), "openai": (server, ...)}
    defaults = {"env": {**env_config.model_dump(), **PRESETS[verb]}, "openai": _as_default(server_configs)}
    teacher_configs = env_cls.teacher_config_init()
    if teacher_configs is not None:
        fields["teacher"] = (server, ...)
        defaults["teacher"] = _as_default(teacher_configs)
    base: type[EnvironmentCommand] = LenientCommand if env_cls.lenient else EnvironmentCommand
    model = cast("type[EnvironmentCommand]", create_model("EnvironmentCommand", __base__=base, **fields))
    prog = f"{_program()} {verb}"
    command: EnvironmentCommand = load_config(
        model,
        argv,
        prog=prog,
        description=f"{VERBS[verb]}.".capitalize(),
        defaults=defaults,
        adapt=partial(drop_foreign_keys, env_cls, type(env_config)),
    )
    return command


def drop_foreign_keys(
    env_cls: type[Environment], config: type[BaseModel], content: dict[str, Any], path: str
) -> dict[str, Any]:
    """Return a run file's content; from a file for another environment, drop the settings that this one lacks."""
    section = content.get("env")
    written_for = section.get("server") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or written_for is None or server_stem(str(written_for)) in _own_names(env_cls):
        return content
    known = {name for name in section if str(name).replace("-", "_") in config.model_fields}
    if unknown := [str(name) for name in section if name not in known]:
        logger.warning(
            "%s is written for %s: ignored the keys that %s does not have: %s",
            path,
            written_for,
            env_cls.__name__,
            ", ".join(unknown),
        )
    return {**content, "env": {name: value for name, value in section.items() if name in known}}


def _own_names(env_cls: type[Environment]) -> set[str]:
    """Return the names by which a run file may call this environment: its file, its module, its own name."""
    return {server_stem(name) for name in (_program(), env_cls.__module__, env_cls.name or env_cls.__name__)}


def _read_verb(env_cls: type[Environment], argv: Sequence[str]) -> Verb:
    for verb in VERBS:
        if argv and argv[0] == verb:
            return verb
    if argv and argv[0] in {"-h", "--help"}:
        sys.stdout.write(_overview(env_cls))
        raise SystemExit(0)
    given = f"no verb {argv[0]!r}{nearest(argv[0], VERBS)}" if argv else "a verb is missing"
    raise ConfigError(f"{given}; verbs are {', '.join(VERBS)}")


def _require_complete(env_cls: type[Environment], verb: Verb) -> None:
    """Raise if the class lacks methods that the verb needs; `--help` works even for an unfinished class."""
    missing = sorted(getattr(env_cls, "__abstractmethods__", ()))
    collects = any(
        getattr(env_cls, name) is not getattr(Environment, name)
        for name in ("collect_trajectories", "collect_trajectory")
    )
    if verb in {"serve", "process"} and not collects:
        missing.append("collect_trajectories")
    if missing:
        raise ConfigError(f"{env_cls.__name__} has no {' and no '.join(missing)}; {verb} needs it")


def _overview(env_cls: type[Environment]) -> str:
    purpose = (env_cls.__doc__ or "").strip().splitlines()
    lines = [f"usage: {_program()} VERB [--help] [flags]", "", *purpose[:1], "", "verbs:"]
    return "\n".join([*lines, *(f"  {verb:<10}{text}" for verb, text in VERBS.items()), ""])


def _program() -> str:
    return os.path.basename(sys.argv[0])  # noqa: PTH119 - a name, not a path


def _as_default(configs: ServerBaseline | APIServerConfig | list[APIServerConfig]) -> Any:
    servers = [server.as_defaults() for server in as_server_list(configs)]
    return servers[0] if len(servers) == 1 else servers


def _refuse_unsupported(command: EnvironmentCommand) -> None:
    if command.testing:
        raise ConfigError(
            "--testing is not supported: Atropos' stand-in servers never worked; leave it out and "
            "use environments.sdk.testing.FakeInference, an inference server for tests"
        )
    if command.proxy_url is not None:
        raise ConfigError(
            f"--proxy_url {command.proxy_url}: sessions use the inference servers directly; "
            "leave it out and name the servers with --openai.base_url"
        )


def _require_trainable(servers: Sequence[APIServerConfig]) -> None:
    from environments.sdk.inference.server import refuse_for_training

    for server in servers:
        if server.server_type == "openai":
            refuse_for_training(server)


Verb = Literal["serve", "process", "evaluate", "validate"]

OPEN_FILES = 65_536
"""Files and connections that an environment may have open, where the system allows so many."""
CLOSING_SECONDS = 10.0
"""Time that closing files and writing the page of `process` may take after a signal."""


def run(verb: Verb, make_env: Callable[[], Environment]) -> int:
    """Make the environment, run the verb and return the exit code. If there are several errors, raise the first."""
    with listen_for_stop() as stop:
        allow_open_files()
        env = make_env()

        async def run_and_close() -> int:
            try:
                return await _do(verb, env, stop)
            finally:
                await env.aclose()
                env.tracing.close()

        collect_rarely()
        try:
            return anyio.run(run_and_close, backend_options={"use_uvloop": True})
        except BaseExceptionGroup as errors:
            known = errors.subgroup(AtroposError)
            if known is None:
                raise
            raise innermost(known) from errors


async def _do(verb: Verb, env: Environment, stop: StopRequest) -> int:
    from environments.sdk.runtime.commands import evaluate_alone, process, validate

    if verb == "serve":
        await _serve(env, stop)
        return 0
    work = {"process": process, "evaluate": evaluate_alone, "validate": validate}[verb]
    if verb == "validate" or not _follows_registry(env):
        return await _unless_stopped(work(env), stop)
    async with _broker_client(env) as client, following_registry(env, client):
        return await _unless_stopped(work(env), stop)


async def _serve(env: Environment, stop: StopRequest) -> None:
    from atropos_api.common.prometheus import serving_metrics
    from environments.sdk.runtime.worker import EnvironmentWorker

    config = env.config
    async with _broker_client(env) as client, following_registry(env, client):
        worker = EnvironmentWorker(env, client, stop)
        with serving_metrics(worker.metrics.collect, config.metrics_host, config.metrics_port):
            await worker.serve()


def _broker_client(env: Environment) -> AsyncBrokerClient:
    from atropos_api.client import AsyncBrokerClient

    config = env.config
    token = TokenSource.settle(
        config.rollout_server_token,
        config.rollout_server_token_file,
        os.environ,
        flag="--env.rollout_server_token_file",
    )
    return AsyncBrokerClient(config.rollout_server_url, token=token)


def _follows_registry(env: Environment) -> bool:
    return any(manager.registered is not None for manager in env.server_managers)


@asynccontextmanager
async def following_registry(env: Environment, client: AsyncBrokerClient) -> AsyncIterator[None]:
    """Follow the broker's registry inside the block, for those of the environment's servers that are not named."""
    followed = [manager.registered for manager in env.server_managers if manager.registered is not None]
    if not followed:
        yield
        return
    async with anyio.create_task_group() as group:
        for servers in followed:
            group.start_soon(servers.follow, client)
        yield
        group.cancel_scope.cancel()


async def _unless_stopped(work: Coroutine[Any, Any, int | None], stop: StopRequest) -> int:
    """Run `work` and return its exit code; a signal cancels it and leaves a little time to close its files.

    It has ended when this returns or raises: what it works with is closed after that.
    """
    stop.grace_seconds = CLOSING_SECONDS
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait_for(1))
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return (task.result() or 0) if task.done() else stop.exit_code
    finally:
        stopped.cancel()
        task.cancel()
        with anyio.CancelScope(shield=True):  # this is cancelled if following the registry has failed
            await asyncio.wait({task})


GC_THRESHOLD = 50_000  # more objects than the rollouts in flight have: at 700 they would be scanned all the time


def allow_open_files() -> None:
    """Raise the soft limit on open files, usually 1,024: at each inference server 512 requests may be in flight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def collect_rarely() -> None:
    """Exclude all loaded objects from garbage collection, and collect new ones less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)
