"""The settings of a placement: the run file's `placement:` section, without the sizes of its layout."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator

from atropos_api.common.cliconfig import ConfigError, check_keys, validate
from example_trainer.options.layout import BadLayout, DistributedLayout
from example_trainer.processes.ports import LAST_PORT

PlacementKind = Literal["local", "ray"]
DEFAULT_TIMEOUT_SECONDS = 180.0

_DIGITS = 4

_FLAGS = {"kind": "placement", "address": "placement_address", "timeout": "placement_timeout"}
"""The keys of the section that have a flag, and the flag's name."""

_HOST_AND_PORT = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\]):(?P<port>\d+)")
_REFUSED_ADDRESSES = {
    "auto": "it joins whichever cluster it finds, and an old one may be left on this machine",
    "local": "it starts a cluster of its own, which no other node joins",
}


class SeatResources(BaseModel):
    """The resources of each seat of a role."""

    model_config = ConfigDict(extra="forbid")

    cpus: float = Field(1.0, ge=0.0, allow_inf_nan=False, description="CPUs that the cluster counts for a seat.")
    gpus: float | None = Field(
        None,
        ge=0.0,
        allow_inf_nan=False,
        description="GPUs of a seat, also a part of one; unset: those of one process, where there are GPUs.",
    )

    @field_validator("cpus", "gpus")
    @classmethod
    def _check_parts(cls, amount: float | None, info: ValidationInfo) -> float | None:
        """Refuse what Ray does not count: part of several GPUs, and parts below a ten-thousandth."""
        if amount is None:
            return None
        if info.field_name == "gpus" and amount > 1.0 and not amount.is_integer():
            raise ValueError("above 1 it must be a whole number of GPUs")
        if round(amount, _DIGITS) != amount:
            raise ValueError(f"it has more than {_DIGITS} digits after the point")
        return amount


class PlacementSettings(BaseModel):
    """The settings of the `placement:` section besides the sizes of a layout."""

    model_config = ConfigDict(extra="forbid")

    kind: PlacementKind = Field("local", description="Where programs run: beside the launcher, or on a Ray cluster.")
    address: str | None = Field(None, description="HOST:PORT of the Ray head (ray).")
    timeout: float = Field(DEFAULT_TIMEOUT_SECONDS, gt=0.0, description="Seconds within which every role has a place.")
    variables: tuple[str, ...] = Field(
        (), description="Names of environment variables of the launcher that programs on other nodes are given."
    )
    vllm: SeatResources = Field(default_factory=SeatResources, description="The resources of one inference server.")
    trainer: SeatResources = Field(default_factory=SeatResources, description="The resources of one trainer process.")
    environment: SeatResources = Field(default_factory=SeatResources, description="The resources of one environment.")

    _own_token: str = PrivateAttr(default_factory=lambda: secrets.token_hex(16))

    @property
    def own_token(self) -> str:
        """A token for this launch's broker, which other machines can reach; it is used if no other is given."""
        return self._own_token

    @property
    def is_ray(self) -> bool:
        return self.kind == "ray"

    @property
    def head(self) -> tuple[str, int]:
        """The host and port of the Ray head."""
        host, _, port = (self.address or "").rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def gives_whole_gpus(self) -> bool:
        """True if no two programs are on one GPU: a cluster gives each its own, unless a part of one is asked for."""
        return self.is_ray and not any(0 < (seat.gpus or 0) < 1 for seat in (self.vllm, self.trainer))

    def describe(self) -> str:
        return f"placement: {self.kind}" + (f" at {self.address}" if self.is_ray else "")


def split_section(section: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sizes of a layout in a `placement:` section, and its other settings; refuse unknown keys."""
    sizes, others = tuple(DistributedLayout.__dataclass_fields__), tuple(PlacementSettings.model_fields)
    unknown = [key for key in section if key not in {*sizes, *others}]
    if unknown:
        raise BadLayout(f"unknown key {unknown[0]!r}; the keys are {', '.join([*sizes, *others])}")
    return (
        {key: value for key, value in section.items() if key in sizes},
        {key: value for key, value in section.items() if key in others},
    )


def launchers_own(section: Mapping[str, Any], layout: DistributedLayout | None) -> dict[str, Any]:
    """Return, by their flags, the launcher's settings that follow from the section unless they are given."""
    found = {flag: section[key] for key, flag in _FLAGS.items() if key in section}
    if layout is not None and section.get("kind") == "ray":
        found["num_inference_nodes"] = layout.rollout_replicas
    return found


def read_placement(section: Mapping[str, Any], flags: Mapping[str, Any]) -> PlacementSettings:
    """Return the settings of the section and the launcher's flags; raise `ConfigError` for unusable values."""
    given = {**section, **{key: flags[flag] for key, flag in _FLAGS.items()}}
    checked = check_keys(PlacementSettings, given, where="placement")
    try:
        settings = validate(PlacementSettings, checked)
    except ConfigError as error:
        raise ConfigError(f"placement: {error}") from error
    if settings.is_ray:
        _check_address(settings.address)
    return settings


def _check_address(address: str | None) -> None:
    flag = "--placement-address"
    if address is None:
        raise ConfigError(
            f"--placement ray needs {flag} HOST:PORT, the address that `ray start --head` printed; without one a run "
            "could join another cluster"
        )
    if address in _REFUSED_ADDRESSES:
        raise ConfigError(f"{flag} {address}: {_REFUSED_ADDRESSES[address]}; name the head as HOST:PORT")
    if address.startswith("ray://"):
        raise ConfigError(
            f"{flag} {address}: Ray Client ends every program when its connection breaks; start the launcher on a node "
            "of the cluster, and name the head as HOST:PORT"
        )
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None or not 1 <= int(found["port"]) <= LAST_PORT:
        raise ConfigError(f"{flag} {address}: not an address; name the head as HOST:PORT")
