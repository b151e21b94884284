"""The environment SDK: subclass `BaseEnv`, whose docstring is the tutorial, and call `cli()`.

In reading order: `base_env` and `environment` (what is subclassed), `config`, `groups` (what is returned), `members`
(rules for late rollouts), `server_manager` (`self.server`) over `session/` (chats as exact tokens) over `inference/`
(servers of every kind), `tokenizer`, `tools`, `errors`, `reporting`, `evaluation_page`, `progress`, `rollout_metrics`,
`group_files`, `state_files`, `teacher`, `runtime/` (serves what is described here); `testing`, `testing_servers` and
`rehearsal` are for tests. It may import `rewards` and the broker's client, wire and common code.
"""

from environments.rewards.gold_check import GoldItem
from environments.sdk.base_env import BaseEnv
from environments.sdk.config import APIServerConfig, BaseEnvConfig, EvalHandlingEnum, ServerBaseline
from environments.sdk.errors import EnvironmentsError, ItemDropped
from environments.sdk.groups import Item, Message, ScoredDataGroup, ScoredDataItem, scored_group, scored_item
from environments.sdk.session.session import ManagedSession
from environments.sdk.session.tokens_and_masks import SequenceNode

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
