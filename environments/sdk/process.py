"""The verb `process`: collect groups one after another into a file, without a trainer or a broker.

Beside the JSON lines lies a page of the same name to read them in a browser.
"""

from __future__ import annotations

import logging

from environments.export.page import write_page
from environments.sdk.delivery import Delivery
from environments.sdk.env import BaseEnv
from environments.sdk.errors import EnvironmentsError
from environments.sdk.groups import GroupRules
from environments.sdk.preparing import prepare
from environments.sdk.rollouts import Collector

logger = logging.getLogger(__name__)


class NothingToCollect(EnvironmentsError):
    """No number of groups is given: `process` has no run to take it from."""


async def process(env: BaseEnv) -> None:
    """Collect `total_steps` groups; an item that yields none is replaced by the next."""
    env.process_mode = True
    if env.config.total_steps < 1:
        raise NothingToCollect(f"total_steps is {env.config.total_steps}; say with --env.total_steps how many groups")
    if env.config.data_path_to_save_groups is None:
        env.config.data_path_to_save_groups = f"data/{env.registered_name}.jsonl"
    env.config.groups_to_keep = 0  # every group that is asked for is kept
    await prepare(env)
    await env.setup()
    await env.setup_wandb()
    rules = GroupRules(
        group_size=env.config.group_size,
        max_token_length=-1,
        ensure_scores_are_not_same=env.config.ensure_scores_are_not_same,
    )
    delivery = Delivery(env, lambda: rules, send=lambda _: None)
    try:
        await _collect(env, Collector(env, delivery))
    finally:
        env.dropped_groups.tell()
        _close(env, delivery)
    if delivery.file is None or not delivery.file.count:
        logger.warning("no group was collected, so nothing is written")


async def _collect(env: BaseEnv, collector: Collector) -> None:
    done = 0
    while done < env.config.total_steps:
        item = await collector.next_item()
        if item is None:
            return
        sent = await collector.collect(item)
        if sent:
            done += sent
            env.curr_step += 1
            await env.wandb_log()


def _close(env: BaseEnv, delivery: Delivery) -> None:
    delivery.close()
    if env.tracker is not None:
        env.tracker.finish()
    file = delivery.file
    if file is not None and file.count:
        page = write_page(file.path)
        logger.info("wrote %d groups to %s and a page to read them to %s", file.count, file.path, page)
