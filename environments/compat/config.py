"""Configuration as Atropos takes it: what it does not know is passed over, here with a word about it.

Values that Atropos gives a meaning of their own become what they mean: an `inference_weight` of -1 is the usual one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from environments.sdk import config as sdk

logger = logging.getLogger(__name__)


def known_fields(model: type[BaseModel], values: Any) -> Any:
    """`values` without the keys that the model has no field for; they are told once each time."""
    if not isinstance(values, Mapping):
        return values
    unknown = sorted(str(key) for key in values if key not in model.model_fields)
    if unknown:
        logger.warning("%s: passed over what it has no field for: %s", model.__name__, ", ".join(unknown))
    return {key: value for key, value in values.items() if key in model.model_fields}


class BaseEnvConfig(sdk.BaseEnvConfig):
    """The configuration of environments written for Atropos."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), arbitrary_types_allowed=True)

    allow_truncated_sampling: bool = Field(True, description="train on top-p or top-k samples; their groups are marked")

    @model_validator(mode="before")
    @classmethod
    def _lenient(cls, values: Any) -> Any:
        values = known_fields(cls, values)
        if isinstance(values, dict):
            if values.get("inference_weight") == -1:
                values["inference_weight"] = 1.0
            if "max_batches_offpolicy" in values and int(values["max_batches_offpolicy"]) < 1:
                values["max_batches_offpolicy"] = 1
            if "min_items_sent_before_logging" in values and int(values["min_items_sent_before_logging"]) < 1:
                values["min_items_sent_before_logging"] = 1
        return values


class ServerBaseline(sdk.ServerBaseline):
    """What inference servers have in common."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _lenient(cls, values: Any) -> Any:
        return known_fields(cls, values)


class APIServerConfig(sdk.APIServerConfig):
    """One inference server; None stands for the default, as in Atropos."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _lenient(cls, values: Any) -> Any:
        values = known_fields(cls, values)
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values
