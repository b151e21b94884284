"""The command line of `atropos-sft`: it reads the settings and the data, and runs the loop.

Heavy modules are imported only after the arguments have been checked, so that help and errors appear at once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pydantic import Field

from atropos_api.common.cliconfig import load_config, run_cli
from atropos_api.common.logs import setup_logging
from atropos_api.common.secrets import public_settings
from example_trainer.cli import StopFlag, run_trackers, silence_unused_kernels
from example_trainer.config import settings_from
from example_trainer.launcher.base_model import require_model
from example_trainer.launcher.run_lock import locked
from example_trainer.memory.fit import with_changes
from example_trainer.memory.preflight import preflight
from example_trainer.options.without_effect import settings_without_effect
from example_trainer.sft.config import SftConfig
from example_trainer.sft.output import claim_folder, refuse_used_folder, settle_folder

if TYPE_CHECKING:
    from example_trainer.distributed.ranks import Ranks
    from example_trainer.sft.batches import Sample
    from example_trainer.sft.fine_tuning import FineTuningData

logger = logging.getLogger(__name__)

PROG = "atropos-sft"

DESCRIPTION = (
    "Fine-tunes a model on chats or texts (supervised fine-tuning). It needs no broker, environment or server; the "
    "folder final_model of its output is a model for atropos-grpo --model-name."
)

WAIT_SECONDS = 3600.0
"""Time that a process waits for the others: reading a large data set may take one of them long."""


class SftCommand(SftConfig):
    """The settings of supervised fine-tuning, and the options that exist only on the command line."""

    dry_run: bool = Field(False, description="Print the resolved configuration and exit.")


def main() -> NoReturn:
    """Run the console script `atropos-sft`."""
    run_cli(run)


def run(argv: list[str]) -> int:
    """Fine-tune as `argv` says; return 0 after the last step, 128 + signal after a stop."""
    command = load_config(SftCommand, argv, prog=PROG, description=DESCRIPTION, defaults=settings_from(os.environ))
    config = SftConfig(**command.model_dump(exclude={"dry_run"}, exclude_unset=True))
    directory = settle_folder(config)
    training = config.training_config(directory, config.training_steps or 1)
    choice = preflight(training, starts_server=False, program=PROG)
    config = config.model_copy(update=dict(choice.changes))
    # The learner's other warnings are about GRPO: its usual learning rates are lower.
    warnings = settings_without_effect(with_changes(training, choice.changes))
    if command.dry_run:
        sys.stdout.write(json.dumps(public_settings(config), indent=2) + "\n")
        sys.stderr.writelines(f"{warning}\n" for warning in warnings)
        return 0
    require_model(config.model_name)
    if not config.overwrite and config.resume is None:
        refuse_used_folder(directory)
    setup_logging("sft" if config.world_size == 1 else f"sft {config.trainer_rank}", form=config.log_format)
    if choice.sentence:
        logger.info("%s", choice.sentence)
    for warning in warnings:
        logger.warning("%s", warning)
    from example_trainer.distributed.ranks import joined_ranks

    with joined_ranks(
        config.trainer_rank,
        config.world_size,
        config.init_method,
        device=config.device,
        timeout_seconds=WAIT_SECONDS,
    ) as ranks:
        return _train(config, directory, ranks)


def _train(config: SftConfig, directory: Path, ranks: Ranks) -> int:
    import torch

    from example_trainer.sft.fine_tuning import FineTuning

    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    torch.manual_seed(config.seed)
    directory = ranks.on_main(lambda: directory)
    data = _read(config)
    stop = StopFlag()
    with ExitStack() as held, stop.listening():
        ranks.on_main(lambda: held.enter_context(locked({"--save-path": directory})))
        ranks.on_main(lambda: claim_folder(directory, model_name=config.model_name, will_delete=config.overwrite))
        tuning = FineTuning(
            config,
            directory,
            data,
            trackers=lambda training: run_trackers(training, writes=ranks.is_main, settings=public_settings(config)),
            should_stop=stop.is_set,
            ranks=ranks,
        )
        silence_unused_kernels(tuning.training)
        stop.training = True
        finished = tuning.train()
    return 0 if finished else 128 + (stop.signal_number or signal.SIGTERM)


def _read(config: SftConfig) -> FineTuningData:
    from example_trainer.sft.batches import hold_out, load_tokenizer, read_samples
    from example_trainer.sft.fine_tuning import FineTuningData

    tokenizer = load_tokenizer(config)
    samples = read_samples(config.dataset, "train", tokenizer, config)
    evaluation: list[Sample] = []
    if config.eval_split is not None:
        samples, evaluation = hold_out(samples, config.eval_split)
    elif config.eval_dataset is not None:
        evaluation = read_samples(config.eval_dataset, "test", tokenizer, config)
    template = None if config.chat_template is None else str(tokenizer.chat_template)
    return FineTuningData(samples=samples, evaluation=evaluation, chat_template=template)
