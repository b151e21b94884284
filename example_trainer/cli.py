"""The trainer's command line: it reads the configuration, runs the training loop and makes sure that the process exits.

Heavy modules are imported only after the arguments have been checked, so that help and errors appear at once. If a
thread blocks the exit, `ensure_exit` logs its name and ends the process with the same exit code.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import Field

from atropos_api.common.cliconfig import ConfigError, load_config, run_cli, validate
from atropos_api.common.errors import OUTAGE, AtroposError
from atropos_api.common.files import RecentLines
from atropos_api.common.logs import LogContext, setup_logging
from atropos_api.common.option_flags import named_in
from atropos_api.common.secrets import TokenSource, public_settings, redact_text
from atropos_api.common.tracing import open_tracing
from example_trainer.config import TrainingConfig, settings_from
from example_trainer.errors import STOPPED_BY_HEALTH, WaitTimedOut
from example_trainer.launcher.base_model import refuse_missing_layers, require_model
from example_trainer.launcher.run_dir import provenance, reporting_flag, require_writable, write_json
from example_trainer.launcher.run_file import trainer_settings
from example_trainer.launcher.run_file_sections import read_sections
from example_trainer.launcher.run_lock import locked, started_by_launcher
from example_trainer.memory.fit import with_changes
from example_trainer.memory.preflight import preflight
from example_trainer.options.presets import find_environment_option
from example_trainer.options.server import with_own_section
from example_trainer.serving.config import ServerConfig

if TYPE_CHECKING:
    from atropos_api.client import BrokerClient
    from example_trainer.api import BrokerSession
    from example_trainer.distributed.ranks import Ranks
    from example_trainer.monitoring.broker_reports import RunReporter
    from example_trainer.monitoring.trackers import RunTrackers
    from example_trainer.weights.base import WeightBridge

logger = logging.getLogger(__name__)

PROG = "atropos-grpo"

DESCRIPTION = (
    "Trains a model with GRPO on rollouts from Atropos environments. Needs a broker (run-api), an environment and, "
    "in shared_vllm mode, a vLLM server (python -m example_trainer.vllm_api_server --share-weights); start them in any "
    "order, or all at once with atropos-grpo-run."
)

REPORT_TIMEOUT_SECONDS = 5.0

RANK0_MARGIN_SECONDS = 600.0
"""Extra time that other ranks wait for rank 0, beyond its own waits, so that it can export or hold a policy."""


class TrainerCommand(TrainingConfig):
    """The trainer's settings, and the options that exist only on the command line."""

    dry_run: bool = Field(False, description="Print the resolved configuration and exit.")


class StopFlag:
    """A flag that SIGTERM, SIGINT or SIGHUP sets during training: the run then stops in order, with a checkpoint.

    Before training starts a signal exits at once, after cleaning up. A second signal has its default effect, except
    after SIGHUP: a terminal that is closed may send others as well.
    """

    def __init__(self) -> None:
        # Not an event: another signal in the middle of its `set` would wait for ever for the lock that `set` holds.
        self._is_set = False
        self.signal_number: int | None = None
        self.training = False

    def is_set(self) -> bool:
        return self._is_set

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals in the block; a SIGHUP that is ignored stays so, since `nohup` asks for that."""
        outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [signal.SIGTERM, signal.SIGINT, *([] if outlives_terminal else [signal.SIGHUP])]
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self.training:
            raise SystemExit(128 + number)
        self.signal_number = number
        self._is_set = True
        if number == signal.SIGHUP:
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> NoReturn:
    """Run the console script `atropos-grpo`."""
    code = 1
    try:
        run_cli(run)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else code
        raise
    finally:
        ensure_exit(code)


def run(argv: list[str]) -> int:
    """Train as `argv` says; return 0 after the last step, 3 if `--stop-on` ended the run, 128 + signal after a stop."""
    refuse_options_of_others(argv)
    settings, own, paths = trainer_settings(argv)
    command = load_config(
        TrainerCommand, own, prog=PROG, description=DESCRIPTION, defaults=settings_from(os.environ) | settings
    )
    asked = TrainingConfig(**command.model_dump(exclude={"dry_run"}, exclude_unset=True))
    sections = [read_sections(path).get("vllm") or {} for path in paths]
    asked, remarks = with_own_section(asked, sections, named_in(own, TrainerCommand))
    if asked.may_start_server:
        validate(ServerConfig, {"model": asked.model_name, **asked.vllm_settings})  # vLLM checks them much later
    choice = preflight(asked, starts_server=not asked.servers_outlive_publish)
    config = settle_run_dir(with_changes(asked, choice.changes))
    if command.dry_run:
        sys.stdout.write(json.dumps(public_settings(config), indent=2) + "\n")
        sys.stderr.writelines(f"{warning}\n" for warning in (*remarks, *config.warnings()))
        return 0
    require_model(config.model_name)
    refuse_missing_layers(config)
    if config.ref_model is not None:
        require_model(config.ref_model, "--ref-model")
    name = "trainer" if config.world_size == 1 else f"trainer {config.trainer_rank}"
    logs = setup_logging(name, form=config.log_format)
    silence_unused_kernels(config)
    if choice.sentence:
        logger.info("%s", choice.sentence)
    for warning in (*remarks, *config.warnings()):
        logger.warning("%s", warning)
    return _train(config, logs)


def silence_unused_kernels(config: TrainingConfig) -> None:
    """Silence bitsandbytes' advice to install a package for 4-bit products if no weight is stored in 4 bits."""
    logging.getLogger("bitsandbytes").setLevel(logging.NOTSET if config.load_in_4bit else logging.ERROR)


OWNERS: Mapping[str, str] = {
    "api": "run-api, where it has no prefix",
    "vllm": "the vLLM server, where it has no prefix",
    "env": "the environment",
    "openai": "the environment",
    "teacher": "the environment",
}
"""The programs whose options carry a section as prefix under the launcher."""


def refuse_options_of_others(argv: Sequence[str]) -> None:
    """Raise `ConfigError` for an option of another program, which has no effect here; the message names its owner."""
    for word in (argument.partition("=")[0] for argument in argv if argument.startswith("--")):
        section, dot, _ = word[2:].removeprefix("no-").partition(".")
        if section in OWNERS and (dot or section == "env"):
            raise ConfigError(
                f"{word} is an option of {OWNERS[section]}: pass it to that program, or use atropos-grpo-run"
            )
    found = find_environment_option(argv)
    if found is not None:
        raise ConfigError(
            f"{found[0]} is an option of the environment: pass {found[1]} to its server, or use atropos-grpo-run"
        )


def settle_run_dir(config: TrainingConfig) -> TrainingConfig:
    """Return the same settings with a run directory: `runs/<name>-<time>` unless one is given."""
    if config.run_dir is not None:
        return config
    return config.model_copy(update={"run_dir": Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"})


def _train(config: TrainingConfig, logs: LogContext) -> int:
    from atropos_api.client import BrokerClient
    from example_trainer.api import BrokerSession

    token = TokenSource.settle(config.atropos_token, config.atropos_token_file, os.environ, flag="--atropos-token-file")
    client = BrokerClient(config.atropos_url, token=token)
    session = BrokerSession(client)
    try:
        session.refuse_unknown_host()
        from example_trainer.distributed.ranks import joined_ranks

        with joined_ranks(
            config.trainer_rank,
            config.world_size,
            config.init_method,
            device=config.device,
            timeout_seconds=config.batch_timeout + config.wait_timeout + RANK0_MARGIN_SECONDS,
            tensor_parallel_size=config.trainer_tensor_parallel_size,
        ) as ranks:
            own = session if ranks.world_size == 1 else ranked_session(config, client, ranks)
            config = config.model_copy(update={"run_dir": ranks.on_main(lambda: config.required_run_dir)})
            with own_directories(config, ranks):
                return _train_in(own, config, ranks, logs)
    finally:
        session.close()


@contextmanager
def own_directories(config: TrainingConfig, ranks: Ranks) -> Iterator[None]:
    """Prepare the directories, and keep other runs out of them while the block runs."""
    places = {"--run-dir": config.required_run_dir, "--save-path": config.save_path}
    with ExitStack() as held:
        ranks.on_main(lambda: prepare_directories(config))
        if not started_by_launcher(os.environ):
            ranks.on_main(lambda: held.enter_context(locked(places)))
        yield


def _train_in(session: BrokerSession, config: TrainingConfig, ranks: Ranks, logs: LogContext) -> int:
    import torch

    from atropos_api.client import is_outage
    from example_trainer.trainers import Trainer

    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    torch.manual_seed(config.seed)
    ranks.on_main(lambda: record_config(config))
    stop = StopFlag()
    bridge = _bridge(config, ranks, session, should_stop=stop.is_set)
    tracing = open_tracing(config.otlp_traces_endpoint if ranks.is_main else None, service="atropos-trainer")
    try:
        with closing(tracing), stop.listening():
            trainer = Trainer(
                config,
                session=session,
                bridge=bridge,
                trackers=run_trackers(config, writes=ranks.is_main),
                should_stop=stop.is_set,
                ranks=ranks,
                reporter=run_reporter(config) if ranks.is_main else None,
                tracing=tracing,
            )
            logs.describe(trainer.log_fields)
            trainer.set_up()
            stop.training = True
            finished = trainer.train()
    except AtroposError as error:
        # At a first start the address may be wrong; in a run that has begun, or is resumed, it was right before.
        waited = isinstance(error, WaitTimedOut)  # for an inference server
        was_there = stop.training if waited else session.begun is not None
        if not (waited or is_outage(error)) or not (was_there or config.resume is not None):
            raise
        sys.stderr.write(f"{PROG}: error: {redact_text(str(error))}\n")
        finished = False
        if trainer.stopped_by is None and stop.signal_number is None:  # else it was to end, so it need not be resumed
            sys.stderr.write(f"{PROG}: --resume auto goes on from the newest checkpoint\n")
            return OUTAGE
    finally:
        bridge.close()
    if trainer.stopped_by is not None:
        sys.stderr.write(f"{PROG}: stopped by --stop-on: {trainer.stopped_by.message}; {trainer.stopped_by.advice}\n")
        return STOPPED_BY_HEALTH
    return 0 if finished else 128 + (stop.signal_number or signal.SIGTERM)


def ranked_session(config: TrainingConfig, client: BrokerClient, ranks: Ranks) -> BrokerSession:
    """Return a broker session for several ranks; a std over the batch needs all of its rewards on each rank."""
    from example_trainer.distributed.rank0_proxy import RankedSession

    return RankedSession(client, ranks, all_see_whole=config.advantage_norm == "batch")


def _bridge(
    config: TrainingConfig, ranks: Ranks, session: BrokerSession, *, should_stop: Callable[[], bool]
) -> WeightBridge:
    from example_trainer.modeling.loading import policy_options
    from example_trainer.weights.factory import make_bridge

    if ranks.world_size == 1:
        return make_bridge(config, registry=session, should_stop=should_stop)
    from example_trainer.distributed.rank0_proxy import CollectiveWeightSource, RankedBridge

    own: WeightBridge | None = None
    if ranks.is_main:
        source = partial(CollectiveWeightSource, ranks)
        own = make_bridge(config, source, registry=session, should_stop=should_stop)
    return RankedBridge(own, policy_options(config), ranks, by_bucket=config.broadcasts)


def run_trackers(
    config: TrainingConfig, *, writes: bool = True, settings: Mapping[str, Any] | None = None
) -> RunTrackers:
    """Return trackers for `metrics.jsonl` and `events.jsonl` in the run directory, and W&B and the like if set.

    `settings` are recorded there as those of the run, in place of `config`.
    """
    from example_trainer.monitoring.trackers import (
        RunTrackers,
        SummaryTracker,
        TensorBoardTracker,
        Tracker,
        TrackioTracker,
        WandbTracker,
    )

    directory = config.required_run_dir
    settings = settings or public_settings(config)
    openers: list[Callable[[], Tracker]] = []
    if config.metrics_port is not None:
        from example_trainer.monitoring.prometheus import PrometheusTracker

        openers.append(partial(PrometheusTracker, config.metrics_host, config.metrics_port))
    if config.benchmark:
        openers.append(SummaryTracker)
    if config.tensorboard:
        openers.append(lambda: TensorBoardTracker(directory / "tensorboard"))
    if config.use_wandb:
        openers.append(
            lambda: WandbTracker(
                project=config.wandb_project,
                group=config.wandb_group,
                name=config.wandb_run_name or config.name,
                directory=directory,
                config=settings,
            )
        )
    if config.use_trackio:
        openers.append(lambda: TrackioTracker(name=directory.name, group=config.name, config=settings))
    return RunTrackers(directory, openers, writes=writes)


def run_reporter(config: TrainingConfig) -> RunReporter:
    """Return the reporter of what the broker's page shows; it has a connection of its own, and never retries."""
    from atropos_api.client import BrokerClient
    from example_trainer.monitoring.broker_reports import KEPT_LINES, MOST_BYTES, TRAINED_FILE, RunReporter

    token = TokenSource.settle(config.atropos_token, config.atropos_token_file, os.environ, flag="--atropos-token-file")
    client = BrokerClient(config.atropos_url, token=token, timeout_seconds=REPORT_TIMEOUT_SECONDS, retry_seconds=0.0)
    path = config.required_run_dir / TRAINED_FILE
    record = RecentLines(path, keep=KEPT_LINES, most_bytes=MOST_BYTES) if config.recorded_tokens else None
    return RunReporter(client, world_size=config.world_size, record=record)


def prepare_directories(config: TrainingConfig) -> None:
    """Create the directories that this run writes to; raise an error of one line for one that cannot be written."""
    places = {"--run-dir": config.required_run_dir, "--save-path": config.save_path, "--log-dir": config.log_dir}
    for flag, directory in places.items():
        if directory is not None:
            require_writable(directory, flag)


def record_config(config: TrainingConfig) -> None:
    """Write `config.json` into the run directory, unless the launcher has written one for the whole run."""
    path = config.required_run_dir / "config.json"
    if path.exists():
        return
    with reporting_flag(config.required_run_dir, "--run-dir"):
        write_json(path, {"trainer": public_settings(config), **provenance()})


PATIENCE_SECONDS = 20.0


def ensure_exit(code: int, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """End the process if it still runs `patience_seconds` after its main thread ended, and list the blocking threads.

    Call it when all work is done. Python waits without limit for non-daemon threads and for exit handlers. While the
    main thread runs, a caller still needs the process, so nothing is ended.
    """
    watch = threading.Thread(target=_end_after, args=(code, patience_seconds), name="exit-watch", daemon=True)
    watch.start()


def describe_threads() -> list[str]:
    """Return a line for each thread that keeps the process alive: its name and its current source line."""
    frames = sys._current_frames()  # noqa: SLF001 - no public API gives other threads' frames
    holding = [thread for thread in threading.enumerate() if not thread.daemon]
    lines = []
    for thread in holding:
        frame = frames.get(thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        place = f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else "nowhere"
        lines.append(f"{thread.name}: {place}")
    return lines


def _end_after(code: int, patience_seconds: float) -> None:
    threading.main_thread().join()
    time.sleep(patience_seconds)
    lines = "".join(f"  {line}\n" for line in describe_threads())
    sys.stderr.write(
        f"not exited {patience_seconds:g} s after the last line; exiting now. Threads that block the exit:\n{lines}"
    )
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
