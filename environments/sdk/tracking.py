"""Weights & Biases for environment servers, when it is asked for and installed."""

from __future__ import annotations

import datetime as dt
import logging
import random
import string
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)


class WandbTracker:
    """A W&B run that is begun with the first metrics; without the package it says so once and does nothing."""

    def __init__(self, *, name: str, project: str | None, group: str | None, config: Mapping[str, Any]) -> None:
        self._arguments: dict[str, Any] = {"name": name, "project": project, "group": group, "config": dict(config)}
        self._run: Any = None
        self._given_up = False

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.begin()
        if self._run is not None:
            self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()

    def begin(self) -> None:
        """Begin the run, unless that was done or could not be."""
        if self._run is not None or self._given_up:
            return
        try:
            import wandb

            self._run = wandb.init(**self._arguments)
        except Exception as error:  # noqa: BLE001 - W&B fails in many ways; none may stop the rollouts
            self._given_up = True
            logger.warning(
                "not logging to W&B (%s %s); --env.use_wandb false ends this line", type(error).__name__, error
            )


def run_name(name: str) -> str:
    """A name for one run among many of the same environment: with the day and six letters."""
    letters = "".join(random.choices(string.ascii_lowercase, k=6))
    return f"{name}-{dt.datetime.now(dt.UTC):%Y-%m-%d}-{letters}"


def rollout_table(rows: Sequence[Sequence[Any]]) -> Any | None:
    """W&B's table of texts and scores; None without the package."""
    try:
        import wandb
    except ImportError:
        return None
    return wandb.Table(columns=["text", "score"], data=[list(row[:2]) for row in rows])
