"""Where sessions are served, and the address and key by which one of them is reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from environments.sdk.config import BaseEnvConfig

KEY_PREFIX = "/t/"
KEY_VARIABLE = "ATROPOS_SESSION_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How an environment serves its sessions."""

    host: str = "127.0.0.1"
    port: int = 0
    url: str = ""
    """What agents reach this host and port by, where that is not what it is called here."""
    temperature: float | None = None
    """Replaces the temperature of agents' requests that are trained on."""
    key_in_url: bool = False
    """Whether addresses carry the key, for agents that are handed an address alone."""

    @classmethod
    def from_config(cls, config: BaseEnvConfig, *, key_in_url: bool = False) -> SessionSettings:
        return cls(
            host=config.session_host,
            port=config.session_port,
            url=config.session_url,
            temperature=config.session_temperature,
            key_in_url=key_in_url,
        )


@dataclass(frozen=True, slots=True)
class SessionAddress:
    """One session's way in: a base URL for clients of OpenAI's API, and the key that they send."""

    root_url: str
    name: str
    key: str = field(repr=False)
    key_in_url: bool

    def url(self, *, with_key: bool | None = None) -> str:
        prefix = f"{KEY_PREFIX}{self.key}" if (self.key_in_url if with_key is None else with_key) else ""
        return f"{self.root_url}{prefix}/{self.name}/v1"
