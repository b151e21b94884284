"""The secrets of a launch: which tokens its programs share, and what of their settings may stand in no record."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_api.common.token_file import TOKEN_VARIABLE, TokenSource
from example_trainer.running.run_file import RunSettings


def broker_token(settings: RunSettings) -> TokenSource:
    """The token by which the programs of this launch, and the launcher itself, speak to the broker."""
    config, api = settings.trainer, settings.section("api")
    if (
        config.atropos_token is None
        and config.atropos_token_file is None
        and (api.get("token") or api.get("token_file"))
    ):
        file = api.get("token_file")
        return TokenSource.settle(api.get("token"), Path(str(file)) if file else None, {}, flag="--api.token-file")
    return TokenSource.settle(config.atropos_token, config.atropos_token_file, os.environ, flag="--atropos-token-file")


def token_variables(token: TokenSource) -> dict[str, str]:
    """Either variable, the other one emptied: what this process inherited must not contradict it."""
    if token.file is not None:
        return {TOKEN_VARIABLE: "", f"{TOKEN_VARIABLE}_FILE": str(token.file.expanduser().absolute())}
    return {TOKEN_VARIABLE: token.value, f"{TOKEN_VARIABLE}_FILE": ""} if token.value else {}


def bridge_token(settings: RunSettings) -> str:
    """One token for all servers and the trainer: the one given to either, else the one inherited, else a new one."""
    given = settings.trainer.bridge_token or settings.section("vllm").get("bridge_token")
    return str(given or os.environ.get("ATROPOS_BRIDGE_TOKEN") or secrets.token_hex(16))


def differing(whole: Mapping[str, Any], public: Mapping[str, Any]) -> dict[str, Any]:
    """What of `whole` is not in `public` or is another there, so that it can be laid over it; lists are whole."""
    found: dict[str, Any] = {}
    for key, value in whole.items():
        shown = public.get(key)
        if isinstance(value, Mapping) and isinstance(shown, Mapping):
            if deeper := differing(value, shown):
                found[key] = deeper
        elif key not in public or value != shown:
            found[key] = value
    return found
