"""The type names of Atropos: for annotations, nothing checks them."""

from __future__ import annotations

from typing import Any, TypedDict

from environments.sdk.types import UUID, Item, Message, number

__all__ = [
    "UUID",
    "AgentHistory",
    "AgentStep",
    "Content",
    "EvaluationSample",
    "GameHistory",
    "GameStep",
    "Item",
    "Message",
    "Observation",
    "number",
]

Content = str | list[Any]


class Observation(TypedDict):
    """What a game shows: as data, and as what a model reads."""

    raw: dict[str, Any]
    rendered: Content


class AgentStep(TypedDict, total=False):
    """One step of an agent: the messages in it and its reward."""

    step: int
    messages: list[Message]
    reward: float


class GameStep(TypedDict, total=False):
    """One step of a game: observation, action, reward, and whether it was the last."""

    step: int
    agent_id: str
    observation: Observation
    action: str
    reward: float | dict[str, float]
    done: bool
    info: dict[str, Any]


AgentHistory = dict[str, list[AgentStep]]
GameHistory = list[GameStep]
EvaluationSample = dict[str, Any]
