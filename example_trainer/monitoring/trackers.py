"""Trackers, which store a step's metrics: always as one JSON line in `metrics.jsonl`, on request in W&B,
Trackio and TensorBoard.

Health events (see `monitoring.health`) go to `events.jsonl` in the same folder, so that every line of `metrics.jsonl`
is a step.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from atropos_api.common import metric_names as names
from atropos_api.common import trackio_run, wandb_run
from atropos_api.common.errors import AtroposError
from atropos_api.common.files import replace_whole
from example_trainer.errors import NotWritten, TrainerError
from example_trainer.monitoring.health import HealthEvent

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"


class Tracker(Protocol):
    """A destination for metrics, one step at a time, and for health events."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def event(self, event: HealthEvent) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """Appends one line per step and flushes it, so that a reader who follows the file sees it at once.

    `resumed_step` is the last step whose lines are kept: later steps are trained again after a resume.
    """

    def __init__(self, directory: Path, *, resumed_step: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._metrics = _open_lines(directory / METRICS_FILE, resumed_step)
        self._events = _open_lines(directory / EVENTS_FILE, resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        line: dict[str, Any] = {names.STEP: step, "timestamp": time.time()}
        line |= {name: value for name, value in metrics.items() if math.isfinite(value)}
        _write_line(self._metrics, line)

    def event(self, event: HealthEvent) -> None:
        _write_line(self._events, {**event.fields(), "timestamp": time.time()})

    def close(self) -> None:
        for file in (self._metrics, self._events):
            with suppress(OSError):  # closing tries once more to write a line that could not be written
                file.close()


class SummaryTracker:
    """Collects times, rates and memory and logs a summary when the run ends (`--benchmark`)."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._events = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - the protocol's
        for name, value in metrics.items():
            if name.startswith(("time/", "perf/", "sync/")):
                self._values.setdefault(name, []).append(value)

    def event(self, event: HealthEvent) -> None:  # noqa: ARG002 - the protocol's
        self._events += 1

    def close(self) -> None:
        for name, values in sorted(self._values.items()):
            logger.info(
                "benchmark: %s mean %.4f median %.4f max %.4f (%d steps)",
                name,
                fmean(values),
                median(values),
                max(values),
                len(values),
            )
        logger.info("benchmark: %d health events", self._events)


class WandbTracker:
    """Logs to Weights & Biases; wandb itself reads `WANDB_MODE=offline`."""

    def __init__(
        self, *, project: str | None, group: str | None, name: str, directory: Path, config: Mapping[str, Any]
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise TrainerError("--use-wandb needs wandb: pip install wandb, or leave the flag out") from error
        directory.mkdir(parents=True, exist_ok=True)
        try:
            self.run = wandb.init(
                project=project or wandb_run.DEFAULT_PROJECT,
                group=group or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}",
                name=name,
                dir=str(directory),
                config=dict(config),
            )
            wandb_run.prepare(self.run)
        except Exception as error:  # wandb raises many kinds of errors here, all before its run has begun
            cause = " ".join(str(error).split()).rstrip(".")
            raise TrainerError(
                f"--use-wandb: W&B did not start a run ({cause}); run wandb login, set WANDB_MODE=offline, or omit it"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        wandb_run.log(self.run, metrics, step)

    def event(self, event: HealthEvent) -> None:
        self.run.alert(title=event.sign, text=f"step {event.step}: {event.message}; {event.advice}")

    def close(self) -> None:
        self.run.finish()


class TrackioTracker:
    """Logs to Trackio (`--use-trackio`); a resumed run continues the run of its name."""

    def __init__(self, *, name: str, group: str, config: Mapping[str, Any]) -> None:
        try:
            self._run = trackio_run.begin_run(name, group=group, config=config)
        except ImportError as error:
            raise TrainerError("--use-trackio needs trackio: pip install trackio, or leave the flag out") from error
        except Exception as error:  # among others of an unreachable Space, a missing login, a folder or a database
            cause = " ".join(str(error).split()).rstrip(".")
            raise TrainerError(
                f"--use-trackio: trackio did not start a run ({cause}); unset TRACKIO_SPACE_ID to log on this machine, "
                "or omit it"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def event(self, event: HealthEvent) -> None:
        if hasattr(self._run, "alert"):  # older releases have no alerts
            self._run.alert(event.sign, text=f"{event.message}; {event.advice}", step=event.step)

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """Writes event files for TensorBoard into `directory` (`--tensorboard`).

    The first step that is logged hides this and later steps that earlier processes wrote, since a resume trains those
    again.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise TrainerError(
                "--tensorboard needs the tensorboard package: pip install tensorboard, or leave the flag out"
            ) from error
        self._make = partial(SummaryWriter, str(directory))
        self._writer: SummaryWriter | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._writer_from(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def event(self, event: HealthEvent) -> None:
        text = f"{event.message}; {event.advice}"
        self._writer_from(event.step).add_text(f"health/{event.sign}", text, event.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _writer_from(self, step: int) -> SummaryWriter:
        if self._writer is None:
            self._writer = self._make(purge_step=step)
        return self._writer


class RunTrackers:
    """The trackers of a run, opened in two parts: those that can fail before the run begins, the files after.

    A run that had begun at the broker and then ended because of a missing login would keep other trainers waiting.
    """

    def __init__(self, directory: Path, openers: Sequence[Callable[[], Tracker]], *, writes: bool = True) -> None:
        self._directory = directory
        self._openers = openers if writes else ()
        self._writes = writes
        self._opened: list[Tracker] = []

    def open(self) -> None:
        """Open all trackers except the files; if one fails, those opened before it are closed."""
        try:
            for opener in self._openers:
                self._opened.append(opener())
        except AtroposError:
            self.close()
            raise

    def at(self, resumed_step: int | None) -> TrackerSet:
        """Return all trackers, the files continuing after `resumed_step`; none on a rank that writes nothing."""
        files = [JsonlTracker(self._directory, resumed_step=resumed_step)] if self._writes else []
        return TrackerSet([*files, *self._opened])

    def close(self) -> None:
        """Close the opened trackers of a run that does not begin."""
        TrackerSet(self._opened).close()
        self._opened.clear()


class TrackerSet:
    """Several trackers used as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def event(self, event: HealthEvent) -> None:
        for tracker in self._trackers:
            tracker.event(event)

    def close(self) -> None:
        """Close all trackers, also if one raises (TensorBoard writes its last rows here, which a full disk refuses)."""
        with ExitStack() as closing:
            for tracker in reversed(self._trackers):
                closing.callback(tracker.close)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; a last line cut short by a crash is left out."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            logger.debug("ignored an incomplete line in %s", path)
    return found


def last_line(path: Path) -> dict[str, Any]:
    """Return the last line of a metrics file that is whole; a line of step 0 if there is none."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in reversed(deque(file, maxlen=2)):
            if (row := read_row(line)) is not None:
                return row
    return {names.STEP: 0}


def _open_lines(path: Path, resumed_step: int | None) -> TextIO:
    with _naming(path):
        if resumed_step is not None and path.exists():
            _keep_steps_up_to(path, resumed_step)
        return path.open("a", encoding="utf-8", buffering=1)


def _write_line(file: TextIO, content: Mapping[str, Any]) -> None:
    with _naming(file.name):
        file.write(json.dumps(content) + "\n")


@contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotWritten(
            f"{path} cannot be written ({error.strerror}); free the space, and go on with --resume auto"
        ) from error


def _keep_steps_up_to(path: Path, step: int) -> None:
    """Remove the lines of later steps, and one that was cut short.

    One line is in memory at a time: 100,000 steps at once would take gigabytes beside the model.
    """

    def write(partial: Path) -> None:
        with path.open("rb") as lines, partial.open("wb") as kept:
            for line in lines:
                row = read_row(line)
                if row is not None and row.get(names.STEP, 0) <= step:
                    kept.write(line.removesuffix(b"\n") + b"\n")

    replace_whole(path, write)


class MetricsTail:
    """A reader of the complete lines that were appended to a JSONL file since the last call.

    A trainer that resumes replaces the file by one without the steps that it trains again; from the new file only rows
    that are younger than all rows read before are returned.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        stat = path.stat() if from_end and path.exists() else None
        self._offset = 0 if stat is None else stat.st_size
        self._inode = None if stat is None else stat.st_ino
        self._newest = time.time() if from_end else 0.0
        self._replaced = False

    def read(self) -> list[dict[str, Any]]:
        """Return the new rows, oldest first; a line still being written is left for the next call."""
        rows: list[dict[str, Any]] = []
        # There may be none yet, or it was replaced just now on another host (ESTALE on NFS).
        with suppress(OSError), self._path.open("rb") as handle:
            self._note_replacement(os.fstat(handle.fileno()).st_ino)
            handle.seek(self._offset)
            for line in handle:
                if not line.endswith(b"\n"):
                    break
                row = read_row(line)
                self._offset += len(line)
                if row is not None and (not self._replaced or row.get("timestamp", 0.0) > self._newest):
                    rows.append(row)
            self._replaced = False
        self._newest = max([self._newest, *(row.get("timestamp", 0.0) for row in rows)])
        return rows

    def _note_replacement(self, inode: int) -> None:
        if self._inode not in {None, inode}:
            self._offset, self._replaced = 0, True
        self._inode = inode


def read_row(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line, object_pairs_hook=_with_shared_names)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _with_shared_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object whose names are kept once for all rows: they would take half of the memory."""
    return {sys.intern(name): value for name, value in pairs}


ROLLOUTS = "rollouts"
"""The directory, inside the run directory, of groups written for inspection and of saved batches."""
