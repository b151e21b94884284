"""The functions that run the verbs `process`, `evaluate` and `validate`.

`prepare` runs before `setup`, for `serve` as well: it checks that results can be written, and loads the model's
tokenizer once. `process` collects groups one after another into a file, without a trainer or a broker, and writes a
page of the same name to read them in a browser. `run_evaluation` runs an evaluation for `serve` and `evaluate`.
`validate` tries the environment's rewards on answers known to be right and wrong, without a model.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import yaml

from atropos_api.common.concurrency import run_blocking
from atropos_api.common.files import FileInTheWay, write_private
from atropos_api.common.secrets import public_settings
from environments.rewards.gold_check import check_gold
from environments.sdk.environment import Environment
from environments.sdk.errors import EnvironmentsError, GoldMissing, TokenizerUnavailable
from environments.sdk.group_files import write_page
from environments.sdk.groups import GroupRules
from environments.sdk.reporting import holds_results
from environments.sdk.runtime.delivery import Delivery
from environments.sdk.runtime.rollouts import RolloutRunner
from environments.sdk.session.tokens_and_masks import record_samples
from environments.sdk.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


class PathUnusable(EnvironmentsError):
    """A folder that the configuration names is not writable."""


async def prepare(env: Environment, *, needs_tokenizer: bool = True) -> None:
    """Check at once what would otherwise fail hours later: the folders of groups and results, and the tokenizer."""
    config = env.config
    if config.data_path_to_save_groups is not None:
        _require_writable(Path(config.data_path_to_save_groups).parent, "--env.data_path_to_save_groups")
    if config.data_dir_to_save_evals is not None:
        _require_writable(Path(config.data_dir_to_save_evals), "--env.data_dir_to_save_evals")
    if needs_tokenizer:
        await prepare_tokenizer(env)
    if not env.evaluation_only:
        await env.check_servers()
        # Under `close` it may return fewer rollouts itself.
        if config.late_members == "redraw" and type(env).collect_trajectory is Environment.collect_trajectory:
            logger.warning(
                "--env.late_members redraw has no effect on the rollouts of %s, which collects the members of a group "
                "together; it is for environments with a collect_trajectory",
                type(env).__name__,
            )


def evaluates(env: Environment) -> bool:
    """Return True if the environment can evaluate; log a line if it should and cannot."""
    config = env.config
    if not env.can_evaluate and (config.eval_at_start or config.eval_at_end or config.steps_per_eval > 0):
        logger.info("%s has no method evaluate, so no evaluation runs", type(env).__name__)
    return env.can_evaluate


def _require_writable(folder: Path, flag: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PathUnusable(f"{flag}: {folder} is not writable ({error.strerror}); name another folder") from error


async def prepare_tokenizer(env: Environment) -> None:
    """Load the configured tokenizer, or else the one of the model that the inference server serves.

    If every server returns only text and no tokenizer is configured, none is loaded; using it then raises an error.
    """
    if "tokenizer" in vars(env) or type(env).tokenizer is not Environment.tokenizer:
        return  # the environment brings its own tokenizer
    name = env.config.tokenizer_name
    if name is not None:
        env.tokenizer = await _load(name)
        return
    reported = await env.server.tokenizer_name()
    if reported is None:
        return
    url, name = reported
    logger.info("the tokenizer is that of the model at %s: %s", url, name)
    try:
        env.tokenizer = await _load(name)
    except TokenizerUnavailable as error:
        raise TokenizerUnavailable(f"{url} serves {name}: {error}") from error
    env.config.tokenizer_name = name


async def _load(name: str) -> Any:
    return await run_blocking(lambda: load_tokenizer(name), about=f"the tokenizer {name}")


class NothingToCollect(EnvironmentsError):
    """No number of groups is configured: `process` has no run to take it from."""


async def process(env: Environment) -> None:
    """Collect `total_steps` groups; an item without a group is replaced by the next."""
    env.process_mode = True
    if env.config.total_steps < 1:
        raise NothingToCollect(
            f"total_steps is {env.config.total_steps}; set --env.total_steps to the number of groups"
        )
    if env.config.data_path_to_save_groups is None:
        env.config.data_path_to_save_groups = f"data/{env.registered_name}.jsonl"
    env.config.groups_to_keep = 0  # `process` keeps every group that it was asked for
    await prepare(env)
    await env.setup()
    await env.setup_wandb()
    rules = GroupRules.from_config(env.config, max_token_length=-1)
    delivery = Delivery(env, lambda: rules, send=lambda *_: None)
    try:
        await _collect(env, RolloutRunner(env, delivery))
    finally:
        env.dropped_groups.log()
        _close(env, delivery)
    if delivery.file is None or not delivery.file.count:
        logger.warning("no group was collected, so nothing is written")


async def _collect(env: Environment, collector: RolloutRunner) -> None:
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


def _close(env: Environment, delivery: Delivery) -> None:
    delivery.close()
    env.finish_tracking()
    file = delivery.file
    if file is not None and file.count:
        page = write_page(file.path)
        logger.info("wrote %d groups to %s and a page to read them to %s", file.count, file.path, page)


class NoEvaluation(EnvironmentsError):
    """An evaluation was explicitly requested of an environment that has none."""


async def run_evaluation(env: Environment, *, step: int | None) -> None:
    """Evaluate once; `step` is the trainer step it belongs to, None outside a run."""
    env.evaluation_step = step
    with record_samples("eval"):
        await env.evaluate()


async def evaluate_alone(env: Environment) -> None:
    """Run the verb `evaluate`: set up and evaluate once. `evaluation_only` lets `setup` skip the training data."""
    if not env.can_evaluate:
        raise NoEvaluation(f"{type(env).__name__} has no evaluate; write one that calls self.evaluate_log")
    env.evaluation_only = True
    _require_free_folder(env)
    await prepare(env, needs_tokenizer=any(config.server_type != "openai" for config in env.server.configs))
    await env.setup()
    await env.setup_wandb()
    try:
        await run_evaluation(env, step=None)
    finally:
        env.finish_tracking()
    if env.config.data_dir_to_save_evals is not None:
        _save_config(env, Path(env.config.data_dir_to_save_evals))


def _require_free_folder(env: Environment) -> None:
    folder = env.config.data_dir_to_save_evals
    if folder is not None and holds_results(Path(folder)) and not env.overwrite_results:
        raise FileInTheWay(
            f"{folder} holds the results of an evaluation, which are not overwritten; name another "
            "--env.data_dir_to_save_evals, or replace them with --overwrite"
        )


def _save_config(env: Environment, folder: Path) -> None:
    """Write the settings of the evaluation next to its results, without secrets."""
    document = {
        "env": public_settings(env.config),
        "openai": [public_settings(config) for config in env.server.configs],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_private(folder / "evaluate_config.yaml", yaml.safe_dump(document, sort_keys=False))


async def validate(env: Environment) -> int:
    """Report pass or fail for every gold item, and return the exit code: 1 if any failed."""
    _require_hooks(type(env))
    await env.setup()
    count, failed = 0, []
    async for result in check_gold(env.gold_items(), env.score_answer, best=env.best_score):
        count += 1
        if result.passed:
            sys.stdout.write(f"pass  {result.name}\n")
        else:
            failed.append(result.name)
            sys.stdout.write(f"FAIL  {result.name}: {'; '.join(result.problems)}\n")
    if not count:
        raise GoldMissing(f"{type(env).__name__}.gold_items gave no item, so nothing was checked; give at least one")
    sys.stdout.write(f"{count - len(failed)} of {count} items passed\n")
    if failed:
        sys.stdout.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def _require_hooks(env_cls: type[Environment]) -> None:
    for hook in ("gold_items", "score_answer"):
        if getattr(env_cls, hook) is getattr(Environment, hook):
            raise GoldMissing(f"{env_cls.__name__} has no {hook}; validate needs gold_items and score_answer")
