"""The verb `process`: collect groups one after another into a JSON lines file, without a trainer or a broker."""

from __future__ import annotations

import logging
from pathlib import Path

import anyio
import msgspec

from environments.sdk.env import BaseEnv
from environments.sdk.groups import GroupRules
from environments.sdk.rollouts import Collector

logger = logging.getLogger(__name__)


async def process(env: BaseEnv) -> None:
    """Collect `total_steps` groups; an item that yields none is replaced by the next."""
    env.process_mode = True
    await env.setup()
    path = free_path(Path(env.config.data_path_to_save_groups or f"data/{env.registered_name}.jsonl"))
    path.parent.mkdir(parents=True, exist_ok=True)
    rules = GroupRules(
        group_size=env.config.group_size,
        max_token_length=-1,
        ensure_scores_are_not_same=env.config.ensure_scores_are_not_same,
    )
    collector = Collector(env)
    written = 0
    async with await anyio.open_file(path, "ab") as file:
        while written < env.config.total_steps:
            item = await collector.next_item()
            if item is None:
                break
            for group in await collector.collect(item, rules):
                await file.write(msgspec.json.encode(group) + b"\n")
                env.metrics.note_sent(group)
                written += 1
            await env.wandb_log()
    logger.info("wrote %d groups to %s", written, path)


def free_path(path: Path) -> Path:
    """`path`, or with _1, _2, … at its stem when it is taken: nothing is ever overwritten."""
    number = 0
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}_{number}{path.suffix}")
    return candidate
