"""The environment SDK: subclass `BaseEnv`, whose docstring is the tutorial, and call `cli()`."""

from environments.rewards.gold import GoldItem
from environments.sdk.config import APIServerConfig, BaseEnvConfig, EvalHandlingEnum, ServerBaseline
from environments.sdk.env import BaseEnv
from environments.sdk.errors import EnvironmentsError, ItemDropped
from environments.sdk.groups import scored_group, scored_item
from environments.sdk.session.nodes import SequenceNode
from environments.sdk.session.session import ManagedSession
from environments.sdk.types import Item, Message, ScoredDataGroup, ScoredDataItem

__all__ = [
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EnvironmentsError",
    "EvalHandlingEnum",
    "GoldItem",
    "Item",
    "ItemDropped",
    "ManagedSession",
    "Message",
    "ScoredDataGroup",
    "ScoredDataItem",
    "SequenceNode",
    "ServerBaseline",
    "scored_group",
    "scored_item",
]
