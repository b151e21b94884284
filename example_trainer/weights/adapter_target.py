"""Servers that take adapters while they run: the interface that `lora_only` needs, and its two implementations.

`AtroposServer` keeps an uploaded adapter in the server's memory. `StockServer` writes adapters as files, under a name
that holds the version. A stock vLLM (started with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`) loads an
adapter by path at `/v1/load_lora_adapter`. There the model's own name cannot stand for the adapter, so clients have to
send the adapter's name: the trainer reports it to the broker, and the broker to environments. Atropos' old server takes
a path at `/lora/load` and serves that adapter under any name.

Loading in place under one name is never used: vLLM would read such an adapter from its file again on every step, and
keep cached prefixes of the old one.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from atropos_api.common.files import write_directory
from atropos_api.common.sampling_values import WHOLE_DISTRIBUTION
from example_trainer.errors import ProofFailed, PublishFailed, ServerRefused, ServerUnavailable
from example_trainer.weight_protocol.client import ServerClient
from example_trainer.weight_protocol.transfer import AdapterPayload

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """The identity of a server process (`boot_id`), and the version it serves."""

    boot_id: str
    policy_version: int | None
    max_model_len: int
    dtype: str | None = None
    """Dtype in which it computes; None if it does not say."""
    head_dtype: str | None = None
    """Dtype in which its output head computes logits; None if it does not say."""
    highest_version: int | None = None
    """The highest version that it has had; None if it does not say, and the served one is the highest known."""


class AdapterServer(Protocol):
    """A server that takes adapters: the Atropos server or a stock vLLM server."""

    def identify(self) -> ServerIdentity: ...

    def send(self, version: int, payload: AdapterPayload) -> str:
        """Make the adapter the policy, and return the boot id of the server process that took it.

        Raises `ServerRefused` if the old adapter stays served.
        """

    def policy_name(self, version: int) -> str | None:
        """Return the model name to request for this version; None if the model's own name means the newest."""

    def check(self, version: int, payload: AdapterPayload) -> None:
        """Raise `ProofFailed` unless the server computes with exactly these tensors."""

    def restore(self, bad_version: int, good_version: int) -> bool:
        """Serve an older version again in place of a bad one; return True if that succeeded."""

    def generate(self, request: dict[str, Any]) -> dict[str, Any]: ...

    def close(self) -> None: ...


class AtroposServer:
    """The Atropos server: adapters are sent into its memory."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self.generate = client.generate
        self.close = client.close

    def identify(self) -> ServerIdentity:
        info = self._client.info()
        known = info.dtype, info.head_dtype, info.highest_version
        return ServerIdentity(info.boot_id, info.policy_version, info.max_model_len, *known)

    def send(self, version: int, payload: AdapterPayload) -> str:
        answer = self._client.upload_adapter(adapter_name(version), version, payload.body)
        if answer["digest"] != payload.digest():
            raise ProofFailed(f"version {version} arrived with checksum {answer['digest']}, not {payload.digest()}")
        return str(answer["boot_id"])

    def policy_name(self, version: int) -> str | None:  # noqa: ARG002 - every version has the model's own name
        return None

    def check(self, version: int, payload: AdapterPayload) -> None:
        answer = self._client.check_adapter(adapter_name(version))
        if answer["digest"] != payload.digest() or answer["misplaced"]:
            raise ProofFailed(
                f"the server computes with other tensors than were sent as version {version}: "
                f"{', '.join(answer['misplaced'][:3]) or 'the checksum differs'}"
            )

    def restore(self, bad_version: int, good_version: int) -> bool:
        try:
            self._client.activate_adapter(adapter_name(good_version))
            self._client.unload_adapter(adapter_name(bad_version))
        except (ServerRefused, ServerUnavailable) as error:
            logger.warning("version %d could not be restored: %s", good_version, error)
            return False
        return True


def adapter_name(version: int) -> str:
    """Return the name under which the server knows the adapter of a version; it is never used twice."""
    return f"policy-v{version}"


_UNKNOWN_ROUTE = frozenset({404, 405})
_VERSIONED_NAME = re.compile(r"policy-v(\d+)")


class StockServer:
    """Implements `AdapterServer` over files."""

    def __init__(self, client: ServerClient, directory: Path, *, model: str, keep: int) -> None:
        self._client = client
        self._directory = directory
        self._model = model
        self._keep = keep
        self._versions: list[int] = []
        self._by_name = True
        self.close = client.close

    def identify(self) -> ServerIdentity:
        """Return the newest version that is loaded, also one that an earlier run has left there.

        vLLM does not replace an adapter whose name is in use, so new versions must be higher.
        """
        listed = self._listed()
        names = (_VERSIONED_NAME.fullmatch(str(entry.get("id"))) for entry in listed)
        version = max((int(name[1]) for name in names if name is not None), default=None)
        return ServerIdentity("", version, int(listed[0].get("max_model_len") or 0))

    def send(self, version: int, payload: AdapterPayload) -> str:
        name = adapter_name(version)
        path = str(write_adapter(payload, self._directory / name).absolute())
        try:
            self._client.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except (ServerRefused, ServerUnavailable) as error:
            if isinstance(error, ServerRefused) and error.status in _UNKNOWN_ROUTE:
                self._client.call("POST", "/lora/load", {"adapter_path": path, "adapter_name": name})
                self._by_name = False
            elif name not in {entry.get("id") for entry in self._listed()}:
                raise
            else:  # names are never used twice, so this adapter was loaded and only the answer was lost
                logger.debug("%s; but %s is loaded", error, name)
        self._versions.append(version)
        logger.info("loaded %s; clients of this server ask for it by that name", name)
        while len(self._versions) > self._keep:
            self._unload(self._versions.pop(0))
        return ""

    def policy_name(self, version: int) -> str | None:
        """Return the name that clients have to send, if the model's own name does not mean the newest adapter."""
        return adapter_name(version) if self._by_name else None

    def check(self, version: int, payload: AdapterPayload) -> None:
        """Do nothing: such a server reports nothing about its tensors, so only the logprobs are compared."""

    def restore(self, bad_version: int, good_version: int) -> bool:
        self._versions.remove(bad_version)
        self._unload(bad_version)
        return good_version in self._versions

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request in the format of `/generate` through `/v1/completions`."""
        version = self._versions[-1]
        fields = {name: request[name] for name in ("n", "max_tokens", "temperature", "ignore_eos")}
        prompt = request["prompt"]["prompt_token_ids"]
        request_body = fields | {
            **WHOLE_DISTRIBUTION,
            "model": adapter_name(version),
            "prompt": prompt,
            "logprobs": 0,
            "return_token_ids": True,
        }
        choices = self._client.call("POST", "/v1/completions", request_body)["choices"]
        return {
            "token_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [choice["logprobs"]["token_logprobs"] for choice in choices],
            "policy_versions": [[[0, len(choice["token_ids"]), version]] for choice in choices],
            "boot_id": "",
        }

    def _listed(self) -> list[dict[str, Any]]:
        return list(self._client.call("GET", "/v1/models").get("data") or [{}])

    def _unload(self, version: int) -> None:
        try:
            self._client.call("POST", "/v1/unload_lora_adapter", {"lora_name": adapter_name(version)})
        except (ServerRefused, ServerUnavailable) as error:
            logger.warning("%s stays loaded: %s", adapter_name(version), error)
        shutil.rmtree(self._directory / adapter_name(version), ignore_errors=True)


def write_adapter(payload: AdapterPayload, directory: Path) -> Path:
    """Write the adapter as PEFT does; the directory is complete or does not exist."""
    try:
        with write_directory(directory) as partial:
            (partial / "adapter_model.safetensors").write_bytes(payload.body)
            config = json.dumps(payload.config, indent=2)
            (partial / "adapter_config.json").write_text(f"{config}\n", encoding="utf-8")
    except OSError as error:
        raise PublishFailed(f"cannot write {directory}: {error}; free the space or set --run-dir elsewhere") from error
    return directory
