"""`--vllm-settings`, further options of the vLLM server: their names, and the options that are not allowed here.

Options that have a flag of the trainer are refused here with that flag, because the trainer decides by them too. All
others are passed on unchanged; their names are checked with vLLM's own before anything starts. vLLM is not imported for
that: it takes seconds, and its options can be read from two of its files.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atropos_api.common.cliconfig import ConfigError, nearest
from atropos_api.common.option_flags import flag
from atropos_api.common.secrets import names_secret

TRAINER_FIELDS: Mapping[str, str] = {
    "host": "vllm_host",
    "port": "vllm_port",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_model_len": "max_model_len",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "quantization": "vllm_quantization",
    "head_dtype": "vllm_head_dtype",
    "enable_sleep_mode": "vllm_enable_sleep_mode",
    "drain_seconds": "drain_seconds",
    "bridge_token": "bridge_token",
}
"""Options of the server that a `vllm:` section may have, and the trainer's field of the same meaning."""

DECIDED: Mapping[str, str] = {
    "model": "--model-name",
    "model_name": "--model-name",
    "tokenizer": "--model-name",
    "served_model_name": "--model-name",
    "dtype": "--dtype",
    "seed": "--seed",
    "enable_lora": "--weight-bridge-mode",
    "max_lora_rank": "--lora-r",
    "max_loras": "--max-staleness",
    "adapter": "--weight-bridge-mode",
    "policy_version": "--weight-bridge-mode",
    "share_weights": "--weight-bridge-mode",
    "await_policy": "--weight-bridge-mode",
    "await_model": "--load-in-4bit",
    "bridge_dir": "--log-dir",
    "broker_url": "--registered-servers",
    "server_id": "--registered-servers",
    "advertise_url": "--registered-servers",
    "policy": "--policy",
    "broker_token": "--atropos-token",
    "broker_token_file": "--atropos-token-file",
    "worker_extension_cls": "--weight-bridge-mode",
}
"""Options that the trainer sets itself for its servers, and the trainer's flag from which each follows."""

SERVERS_OWN = frozenset({"max_adapter_mib", "allowed_hosts", "log_format"})
"""Options of the server that are neither vLLM's nor the trainer's."""

_UNREACHABLE = frozenset({"uds", "root_path", "headless", "grpc", "api_server_count", "config"})
"""Options, besides those of TLS, with which trainer and environments could not reach the server at its own port."""

MEMORY_SETTINGS = frozenset(
    {"kv_cache_memory_bytes", "gpu_memory_utilization", "dtype", "quantization", "tensor_parallel_size", "max_loras"}
)
"""Options of the server that make its memory differ from what the trainer's options say."""

_JSON_LISTS = frozenset({"allowed_origins", "allowed_methods", "allowed_headers"})
"""Lists that vLLM's parser takes as JSON; it takes others as words."""

_DECLARATIONS: Mapping[str, tuple[str, ...]] = {
    "engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs"),
    "entrypoints/launchers/cli_args.py": ("BaseFrontendArgs", "FrontendArgs"),
}
"""Files of vLLM, and their classes of which each field is an option."""


def checked_settings(given: object) -> object:
    """Return the settings with names in snake case; `ValueError` names an option that has a flag of the trainer."""
    if not isinstance(given, Mapping):
        return given
    settings = {str(name).removeprefix("--").replace("-", "_"): value for name, value in given.items()}
    for name in settings:
        if field := TRAINER_FIELDS.get(name):
            raise ValueError(f"{name}: the trainer needs this value too; use {flag(field)}")
        if owner := DECIDED.get(name):
            raise ValueError(f"{name}: this follows from {owner}; set that instead")
        if names_secret(name):
            variables = "$VLLM_API_KEY, $HF_TOKEN"
            raise ValueError(f"{name}: a command line would show it; use vLLM's environment variable ({variables})")
    return settings


def refuse_unknown(names: Iterable[str], *, where: str) -> None:
    """Raise `ConfigError` for a name that cannot be used, or that is not an option of the installed vLLM."""
    given = [name.replace("-", "_").partition(".")[0] for name in names]
    for name in given:
        if name in _UNREACHABLE or name.startswith("ssl_"):
            raise ConfigError(
                f"{where} {name}: trainer and environments reach the server by HTTP at its own port; leave it out"
            )
    own = {*TRAINER_FIELDS, *DECIDED, *SERVERS_OWN}
    if all(name in own for name in given) or (options := vllm_options()) is None:
        return
    known = own | options
    for name in given:
        if name not in known and name.removeprefix("no_") not in known:
            raise ConfigError(
                f"{where} {name}: the installed vLLM has no such option{nearest(name, sorted(known))} "
                "(vllm serve --help=all lists them)"
            )


def as_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as command-line arguments of the server; those that are None are left out."""
    arguments: list[str] = []
    for name, value in settings.items():
        if value is True:
            arguments.append(flag(name))
        elif value is False:
            arguments.append(flag(f"no_{name}"))
        elif isinstance(value, Mapping) or name in _JSON_LISTS:
            arguments += [flag(name), json.dumps(value)]
        elif isinstance(value, list | tuple):
            arguments += [flag(name), *map(str, value)]
        elif value is not None:
            arguments += [flag(name), str(value)]
    return arguments


@cache
def vllm_options() -> frozenset[str] | None:
    """Return the names of vLLM's options in snake case; None if it is not installed or its files cannot be read so."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    root, found = Path(next(iter(spec.submodule_search_locations))), set[str]()
    for name, classes in _DECLARATIONS.items():
        try:
            tree = ast.parse((root / name).read_text(encoding="utf-8"))
        except (OSError, SyntaxError):
            return None
        declared = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
        if len(declared) < len(classes):
            return None
        found.update(_fields(declared), _added_options(tree))
    return frozenset(found)


def _fields(classes: Iterable[ast.ClassDef]) -> Iterator[str]:
    for declared in classes:
        for statement in declared.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                yield statement.target.id


def _added_options(tree: ast.Module) -> Iterator[str]:
    """Yield the names of options that are added by hand, as `parser.add_argument("--headless")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for word in node.args:
                if isinstance(word, ast.Constant) and isinstance(word.value, str) and word.value.startswith("--"):
                    yield word.value.removeprefix("--").replace("-", "_")
