"""The options of `run-api`: one pydantic model declares flags, keys and help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from atropos_api.broker import BrokerSettings
from atropos_api.common.files import named_path
from atropos_api.common.observability import LogForm, TracesEndpoint
from atropos_api.common.secrets import SECRET


def check_token(token: str) -> str:
    """Return a token that fits in a header and between two slashes of a path; raise `ValueError` for any other."""
    if not re.fullmatch(r"[A-Za-z0-9._~+=-]{8,}", token):
        raise ValueError("a token has 8 characters or more, of letters, digits and . _ ~ + = -")
    return token


class AddressOptions(BaseModel):
    """The broker's address, store and token."""

    host: str = Field("127.0.0.1", description="Address to listen on; any but loopback requires a token.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    reload: bool = Field(False, description="Restart when the source changes (for work on the broker itself).")
    store: str = Field(
        "./atropos-data",
        description="Directory for groups and runs, the word memory, or redis://host:port/database; on Redis, a "
        "second broker stands by and takes over if the first one fails.",
    )
    lease: float = Field(
        10.0, ge=0.5, description="Seconds without a renewal of its lease on Redis after which a standby takes over."
    )
    fsync: Literal["always", "interval", "never"] = Field(
        "interval",
        description="When to force data to the disk: before each answer, once a second, or never. A killed broker "
        "loses nothing with any of them; a power failure may lose the last second with interval, and all that the "
        "system has not yet written with never.",
    )
    fresh: bool = Field(False, description="Delete the contents of the store at start.")
    token: str | None = Field(
        None,
        description="Bearer token that callers must send; default: $ATROPOS_TOKEN, or a new one if --host needs one.",
        json_schema_extra=SECRET,
    )
    token_file: Path | None = Field(
        None, description="File that contains the token; it is read again on SIGHUP; default: $ATROPOS_TOKEN_FILE."
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Host names, in addition to loopback and IP addresses, by which callers may address the broker; "
        "none by default.",
    )
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="Origins of web pages that may call this broker, such as https://page.example; none by default.",
    )
    log_format: LogForm = "text"
    otlp_traces_endpoint: TracesEndpoint = None

    @field_validator("store")
    @classmethod
    def _check_store(cls, value: str) -> str:
        scheme, found, _ = value.partition("://")
        is_url = found or scheme.startswith(("redis:", "rediss:"))  # else redis:/host would name a directory
        if not value or "\0" in value or (is_url and scheme not in {"redis", "rediss"}):
            raise ValueError("name a directory, say memory, or give the URL of a Redis (redis://host:port/database)")
        return value if found else str(named_path(value))

    @field_validator("token")
    @classmethod
    def _check_token(cls, value: str | None) -> str | None:
        return None if value is None else check_token(value)


class ConnectionOptions(BaseModel):
    """Limits on bodies and connections, and the log."""

    max_body_bytes: int = Field(256 * 2**20, ge=1024, description="Largest request body, as sent.")
    max_inflated_bytes: int = Field(512 * 2**20, ge=1024, description="Largest request body, decompressed.")
    max_connections: int = Field(4096, ge=1, description="Connections open at once; a further one is answered 503.")
    header_timeout: float = Field(
        10.0, gt=0, description="Seconds within which a connection must send a whole request head, or it is closed."
    )
    stall_timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds over which a body must arrive, and an answer must be read, at 1 KiB a second; else the "
        "connection is closed.",
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        "info", description="Level from which on log records are written to stderr."
    )


class BrokerConfig(ConnectionOptions, BrokerSettings, AddressOptions):
    """All options of the broker; field names are flags, descriptions their help, in the reverse order of the bases."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
