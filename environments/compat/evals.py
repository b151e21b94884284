"""`atroposlib.envs.eval`: evaluations that are no environments, with their runner."""

from __future__ import annotations

import argparse
import inspect
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from environments.compat.config import APIServerConfig
from environments.compat.servers import ServerManager
from environments.sdk.evaluation import EvaluationResult, format_metrics, keep_earlier

__all__ = ["EvalBase", "eval_runner", "evaluate_log", "pass_at_k"]

logger = logging.getLogger(__name__)


def pass_at_k(m: int, c: int, k: int) -> float:
    """The chance that one of `k` samples, drawn from `m` of which `c` are right, is right."""
    return 1.0 if m - c < k else 1.0 - math.comb(m - c, k) / math.comb(m, k)


def evaluate_log(
    metrics: Mapping[str, Any],
    eval_dir: str | None = None,
    task_name: str | None = None,
    model_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    generation_parameters: Mapping[str, Any] | None = None,
    samples: Sequence[Any] | None = None,
    verbose: bool = True,
) -> None:
    """Write `metrics.json` and `samples.jsonl` to the folder, if there is one."""
    if verbose:
        logger.info("%s: %s", task_name, format_metrics(metrics))
    if eval_dir is None:
        logger.warning("no eval_dir is set, so nothing is written")
        return
    keep_earlier(Path(eval_dir))
    now = time.time()
    EvaluationResult(
        metrics=metrics,
        task_name=task_name or "eval",
        model_name=model_name or "default",
        seconds=(end_time or now) - (start_time or end_time or now),
        generation_parameters=generation_parameters or {},
        samples=samples or (),
    ).write(Path(eval_dir))


class EvalBase(ABC):
    """An evaluation: data, and how one item of it is run. Keyword arguments become attributes."""

    def __init__(self, pass_at_n: int = 1, pass_at_n_samples: int = 1, **kwargs: Any) -> None:
        self.pass_at_n = pass_at_n
        self.pass_at_n_samples = pass_at_n_samples
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.data = self.setup_data()

    def get_generation_params(self) -> dict[str, Any]:
        """What each request is sampled with."""
        limit = getattr(self, "max_tokens", -1)
        return {
            "temperature": getattr(self, "temperature", 0.0),
            "n": max(self.pass_at_n, self.pass_at_n_samples),
            "top_p": getattr(self, "top_p", 1.0),
            "max_tokens": limit if limit and limit > 0 else None,
        }

    async def chat_completion(self, server: Any, messages: Sequence[Mapping[str, Any]]) -> Any:
        return await server.chat_completion(messages=messages, **self.get_generation_params(), split="eval")

    @abstractmethod
    def setup_data(self) -> Any:
        """The items, as a list or anything to go through; it may be awaited for."""

    @abstractmethod
    async def run_item(self, server: Any, data_item: Any) -> tuple[dict[str, float], Any]:
        """The metrics of one item and what to keep of it."""

    async def __call__(self, server_manager: Any) -> dict[str, float]:
        started = time.time()
        if inspect.isawaitable(self.data):
            self.data = await self.data
        results: list[Any] = [None] * len(self.data)

        async def run(index: int, item: Any) -> None:
            results[index] = await self.run_item(server_manager, item)

        async with anyio.create_task_group() as group:
            for index, item in enumerate(self.data):
                group.start_soon(run, index, item)
        metrics = {key: sum(found[key] for found, _ in results) / len(results) for key in results[0][0]}
        times = "" if self.pass_at_n == self.pass_at_n_samples else f":{self.pass_at_n_samples}"
        evaluate_log(
            metrics,
            eval_dir=getattr(self, "eval_dir", None),
            task_name=f"{type(self).__name__}@{self.pass_at_n}{times}",
            model_name=server_manager.servers[0].config.model_name,
            start_time=started,
            generation_parameters=self.get_generation_params(),
            samples=[kept for _, kept in results],
            end_time=time.time(),
        )
        return metrics


async def eval_runner(eval_env: EvalBase) -> dict[str, float]:
    """Run an evaluation against `--server-url`, asking for `--model-name`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--server-url", default="http://localhost:8000")
    parser.add_argument("--model-name", default="default")
    given = parser.parse_args()
    manager = ServerManager([APIServerConfig(base_url=given.server_url, model_name=given.model_name)])
    try:
        return await eval_env(manager)
    finally:
        await manager.aclose()
