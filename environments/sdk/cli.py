"""The command line every environment has: `serve`, `process`, `evaluate` and `validate`, with flags from its config."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model

from atropos_api.common.cliconfig import ConfigError, load_config, nearest
from atropos_api.common.logs import setup_logging
from environments.sdk.config import APIServerConfig, BaseEnvConfig, as_server_list
from environments.sdk.env import BaseEnv

Verb = Literal["serve", "process", "evaluate", "validate"]

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
    """The sections of an environment's file, and the flags beside them."""

    model_config = ConfigDict(extra="forbid")

    env: BaseEnvConfig
    openai: APIServerConfig | list[APIServerConfig]
    slurm: bool = False
    testing: bool = False

    @property
    def servers(self) -> list[APIServerConfig]:
        return self.openai if isinstance(self.openai, list) else [self.openai]


def run_verb(env_cls: type[BaseEnv], argv: Sequence[str]) -> int:
    """Run `VERB [flags]`; the process's exit code."""
    verb = _read_verb(env_cls, argv)
    command = read_command(env_cls, verb, argv[1:])
    if verb == "serve":
        _require_trainable(command.servers)
    setup_logging(env_cls.name or env_cls.__name__)
    env = env_cls(command.env, command.servers, slurm=command.slurm, testing=command.testing)
    return _run(_main_of(verb), env)


def read_command(env_cls: type[BaseEnv], verb: Verb, argv: Sequence[str]) -> EnvironmentCommand:
    """Flags over files over the environment's own defaults."""
    env_config, server_configs = env_cls.config_init()
    servers = [server.model_dump() for server in as_server_list(server_configs)]
    defaults = {
        "env": {**env_config.model_dump(), **PRESETS[verb]},
        "openai": servers[0] if len(servers) == 1 else servers,
    }
    model = create_model("EnvironmentCommand", __base__=EnvironmentCommand, env=(type(env_config), ...))
    prog = f"{_program()} {verb}"
    return load_config(model, argv, prog=prog, description=f"{VERBS[verb]}.".capitalize(), defaults=defaults)


def _read_verb(env_cls: type[BaseEnv], argv: Sequence[str]) -> Verb:
    for verb in VERBS:
        if argv and argv[0] == verb:
            return verb
    if argv and argv[0] in {"-h", "--help"}:
        sys.stdout.write(_overview(env_cls))
        raise SystemExit(0)
    given = f"no verb {argv[0]!r}{nearest(argv[0], VERBS)}" if argv else "a verb is missing"
    raise ConfigError(f"{given}; verbs are {', '.join(VERBS)}")


def _overview(env_cls: type[BaseEnv]) -> str:
    purpose = (env_cls.__doc__ or "").strip().splitlines()
    lines = [f"usage: {_program()} VERB [--help] [flags]", "", *purpose[:1], "", "verbs:"]
    return "\n".join([*lines, *(f"  {verb:<10}{text}" for verb, text in VERBS.items()), ""])


def _program() -> str:
    return os.path.basename(sys.argv[0])  # noqa: PTH119 - a name, not a path


def _require_trainable(servers: Sequence[APIServerConfig]) -> None:
    from environments.sdk.inference.openai import refuse_for_training

    for server in servers:
        if server.server_type == "openai":
            refuse_for_training(server)


def _main_of(verb: Verb) -> Callable[[BaseEnv], Awaitable[int | None]]:
    from environments.sdk.evaluate import evaluate_alone
    from environments.sdk.process import process
    from environments.sdk.validate import validate

    verbs: dict[Verb, Callable[[BaseEnv], Awaitable[int | None]]] = {
        "serve": _serve,
        "process": process,
        "evaluate": evaluate_alone,
        "validate": validate,
    }
    return verbs[verb]


async def _serve(env: BaseEnv) -> None:
    from atropos_api.client import AsyncBrokerClient
    from environments.sdk.worker import EnvironmentWorker

    token = env.config.rollout_server_token or os.environ.get("ATROPOS_TOKEN")
    async with AsyncBrokerClient(env.config.rollout_server_url, token=token) as client:
        await EnvironmentWorker(env, client).serve()


def _run(main: Callable[[BaseEnv], Awaitable[int | None]], env: BaseEnv) -> int:
    """Run in an event loop; the exit code. Of errors that happened together the first one is reported."""
    import anyio

    from atropos_api.common.errors import AtroposError

    async def run_and_close() -> int:
        try:
            return await main(env) or 0
        finally:
            await env.server.aclose()

    try:
        return anyio.run(run_and_close, backend_options={"use_uvloop": True})
    except BaseExceptionGroup as errors:
        known = errors.subgroup(AtroposError)
        while known is not None:
            first = known.exceptions[0]
            if not isinstance(first, BaseExceptionGroup):
                raise first from errors
            known = first
        raise
