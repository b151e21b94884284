"""Servers that take adapters while they run: what the hot-swap bridge asks of one, and ours."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

from example_trainer.weights.adapter_payload import AdapterPayload
from example_trainer.weights.errors import ProofFailed, ServerRefused, ServerUnavailable
from example_trainer.weights.server_client import ServerClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SwapServer:
    """Who answers: this start of this server, and the version it serves."""

    boot_id: str
    policy_version: int | None
    max_model_len: int


class Swappable(Protocol):
    """A server that takes adapters, of ours or not."""

    def identify(self) -> SwapServer: ...

    def send(self, version: int, payload: AdapterPayload) -> str:
        """Make the adapter the policy, and tell which start of the server took it.

        Raises `ServerRefused` where the old one goes on serving.
        """
        ...

    def policy_name(self, version: int) -> str | None:
        """The model to ask for to get this version; None where the model's own name means the newest."""
        ...

    def check(self, version: int, payload: AdapterPayload) -> None:
        """Raise `ProofFailed` unless the server computes with just these tensors."""
        ...

    def restore(self, bad_version: int, good_version: int) -> bool:
        """Serve an older version again in place of a bad one; whether it could."""
        ...

    def generate(self, request: dict[str, Any]) -> dict[str, Any]: ...

    def close(self) -> None: ...


class OwnServer:
    """Our server: adapters go into its memory."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self.generate = client.generate
        self.close = client.close

    def identify(self) -> SwapServer:
        info = self._client.info()
        return SwapServer(info.boot_id, info.policy_version, info.max_model_len)

    def send(self, version: int, payload: AdapterPayload) -> str:
        told = self._client.upload_adapter(adapter_name(version), version, payload.body)
        if told["digest"] != payload.digest():
            raise ProofFailed(f"version {version} arrived with checksum {told['digest']}, not {payload.digest()}")
        return str(told["boot_id"])

    def policy_name(self, version: int) -> str | None:  # noqa: ARG002 - all of them by the model's own name
        return None

    def check(self, version: int, payload: AdapterPayload) -> None:
        told = self._client.check_adapter(adapter_name(version))
        if told["digest"] != payload.digest() or told["misplaced"]:
            raise ProofFailed(
                f"the server computes with other tensors than were sent as version {version}: "
                f"{', '.join(told['misplaced'][:3]) or 'the checksum differs'}"
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
    """Under which the server knows the adapter of a version; never used twice."""
    return f"policy-v{version}"
