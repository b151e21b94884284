"""Reports of an environment server: Weights & Biases, Trackio, evaluation results and dropped groups.

`WandbTracker` and `TrackioTracker` log to these if it is wanted and they are installed, and `EvaluationResult` is
written to `metrics.json`, `samples.jsonl` and a page of the samples, with the policy versions it belongs to.
`DroppedGroups` counts by reason the groups that were collected and not sent, logs them with an example and reports them
to the broker: otherwise a reward that is always the same, a task that is too hard and a limit that is too small all
look alike from outside: nothing is ever trained, and no message says why.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import random
import string
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Final

from atropos_api.common import trackio_run, wandb_run
from atropos_api.common.concurrency import Condition
from atropos_api.common.files import free_path, write_whole
from atropos_api.wire.groups import Group
from atropos_api.wire.messages import DropReport
from environments.sdk.evaluation_page import render_evaluation
from environments.sdk.progress import encodable
from environments.sdk.session.tokens_and_masks import NOT_TRAINED

logger = logging.getLogger(__name__)


class WandbTracker:
    """A W&B run that starts with the first metrics, or the trainer's, if the launcher says so: if it cannot be started,
    one warning is logged and nothing else happens.
    """

    def __init__(self, *, name: str, project: str | None, group: str | None, config: Mapping[str, Any]) -> None:
        self._arguments: dict[str, Any] = {"name": name, "project": project, "group": group, "config": dict(config)}
        self._run: Any = None
        self._failed = False
        self._newest = 0

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log the metrics of a step; those of an evaluation may come after other metrics of later steps."""
        self.begin()
        if self._run is not None:
            self._newest = max(self._newest, step)
            wandb_run.log(self._run, metrics, step, newest=self._newest)

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()

    def begin(self) -> None:
        """Start the run, unless it was started or starting it failed before."""
        if self._run is not None or self._failed:
            return
        try:
            import wandb

            self._run = wandb.init(**wandb_run.arguments(self._arguments))
            wandb_run.prepare(self._run)
        except Exception as error:  # noqa: BLE001 - W&B fails in many ways; no failure may stop the rollouts
            self._failed = True
            logger.warning(
                "not logging to W&B (%s %s); --env.use_wandb false hides this warning", type(error).__name__, error
            )


class TrackioTracker:
    """A run in Trackio that starts with the first metrics: if it cannot be started, one warning is logged and nothing
    else happens.
    """

    def __init__(self, *, name: str, config: Mapping[str, Any]) -> None:
        self._name, self._config = name, dict(config)
        self._run: Any = None
        self._failed = False

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log the metrics that are numbers; tables are W&B's."""
        if self._run is None and not self._failed:
            self._begin()
        if self._run is not None:
            numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
            self._run.log(numbers, step=step)

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _begin(self) -> None:
        try:
            self._run = trackio_run.begin_run(self._name, group=None, config=self._config)
        except Exception as error:  # noqa: BLE001 - it fails in many ways; no failure may stop the rollouts
            self._failed = True
            logger.warning(
                "not logging to Trackio (%s %s); pip install trackio, or leave out --env.use_trackio",
                type(error).__name__,
                error,
            )


def run_name(name: str) -> str:
    """Return a name for one run among many of the same environment: with the date and six random letters."""
    letters = "".join(random.choices(string.ascii_lowercase, k=6))
    return f"{name}-{dt.datetime.now(dt.UTC):%Y-%m-%d}-{letters}"


def rollout_table(rows: Sequence[Sequence[Any]]) -> Any | None:
    """Return W&B's table of texts and scores; None if the package is not installed."""
    try:
        import wandb
    except ImportError:
        return None
    return wandb.Table(columns=["text", "score"], data=[list(row[:2]) for row in rows])


METRICS_FILE: Final = "metrics.json"
SAMPLES_FILE: Final = "samples.jsonl"
PAGE_FILE: Final = "samples.html"
EARLIER_FOLDER: Final = "earlier"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The result of an evaluation: it holds the arguments of `BaseEnv.evaluate_log` and the trainer step."""

    metrics: Mapping[str, Any]
    task_name: str
    model_name: str
    seconds: float
    generation_parameters: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]] = ()
    step: int | None = None
    versions: frozenset[int] = field(default_factory=frozenset)

    def all_metrics(self) -> dict[str, Any]:
        """Return the metrics with the range of sampled policy versions: both ends are equal if there was only one."""
        versions = {}
        if self.versions:
            versions = {"policy_version_min": min(self.versions), "policy_version_max": max(self.versions)}
        return {**self.metrics, **versions}

    def document(self) -> dict[str, Any]:
        """Return the content of `metrics.json`, in the form of the original Atropos and lighteval."""
        metrics = self.all_metrics()
        return {
            "config_general": {
                "model_name": self.model_name,
                "total_evaluation_time_seconds": str(self.seconds),
                "generation_parameters": dict(self.generation_parameters),
                "step": self.step,
            },
            "results": {f"atropos|{self.task_name}|0": metrics, "all": metrics},
        }

    def write(self, directory: Path) -> None:
        """Write the files and the page of the samples, each atomically."""
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / SAMPLES_FILE, "".join(_as_json(sample) + "\n" for sample in self.samples))
        when = "" if self.step is None else f" at step {self.step}"
        page = render_evaluation(f"{self.task_name}{when}", self.all_metrics(), self.samples)
        write_whole(directory / PAGE_FILE, page)
        write_whole(directory / METRICS_FILE, _as_json(self.document(), indent=2) + "\n")


def _as_json(value: Any, *, indent: int | None = None) -> str:
    """Return what an evaluation reports as JSON: numbers and arrays of numpy and torch become plain ones, and so do
    calls of a session's messages.
    """
    return json.dumps(value, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else str(value)


class ResultFolders:
    """The result folders of one process: results that another process left for the same step are moved aside."""

    def __init__(self) -> None:
        self._own: set[Path] = set()

    def write(self, result: EvaluationResult, directory: Path) -> None:
        if directory not in self._own and result.step is not None:
            kept = keep_earlier(directory)
            if kept is not None:
                logger.info("%s held the results of another run, which have been moved to %s", directory, kept)
        self._own.add(directory)
        result.write(directory)


def holds_results(directory: Path) -> bool:
    return any((directory / name).exists() for name in (METRICS_FILE, SAMPLES_FILE))


def keep_earlier(directory: Path) -> Path | None:
    """Move the results of an earlier process aside and return their new folder; None if there were none."""
    if not holds_results(directory):
        return None
    kept = free_path(directory.parent / EARLIER_FOLDER / directory.name)
    kept.parent.mkdir(exist_ok=True)
    return directory.rename(kept)


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Format the metrics as one line of `name value`; values that are not floats are printed as they are."""
    return " ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )


FIRST_LINE_AFTER: Final = 8
LINE_SECONDS: Final = 30.0
LONGEST_EXAMPLE: Final = 160

EQUAL_SCORES, TOO_LONG, GROUP_SIZE, NOT_FINITE = "equal-scores", "too-long", "group-size", "not-finite"

NO_GROUP, FAILED, TIMED_OUT = "no-group", "failed", "timed-out"

REFUSED, UNSENT, LATE = "refused", "unsent", "late"

ADVICE: Final[Mapping[str, str]] = {
    EQUAL_SCORES: "--env.ensure_scores_are_not_same false sends them",
    TOO_LONG: "a smaller --env.max_token_length or a larger --seq-len of the trainer lets them through",
    GROUP_SIZE: "return --env.group_size rollouts, or set group_overrides={'group_size': n} on a group",
    NOT_FINITE: "no trainer can compare NaN or infinity; let the reward return a finite number, or raise",
    NO_GROUP: "collect_trajectories or postprocess_histories returned None for them",
    FAILED: "the warnings above give the cause; --env.rollout_attempts sets how often an item is tried",
    TIMED_OUT: "--env.worker_timeout sets how long a rollout may take",
    REFUSED: "the broker refused them; its reply names the field that is wrong",
    LATE: "its item may be tried again, and nothing is sent twice; wait for such tasks in collect_trajectories",
    UNSENT: "--env.drain_seconds sets how long the shutdown may take",
}
"""The advice that is logged for each reason."""

Example = Callable[[], str]


@dataclass(frozen=True, slots=True)
class Rejection:
    """The reason why a group is not sent: `reason` is counted, and `why` is a sentence with this group's values."""

    reason: str
    why: str


@dataclass(slots=True)
class _Kind:
    """Counter for one reason: it also keeps the latest `why` and example."""

    count: int = 0
    why: str = ""
    example: Example | None = None


class DroppedGroups:
    """Dropped groups of one environment process: they are counted by reason, logged and reported."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed = Condition()
        self.sent = 0
        self._clock = clock
        self._session = uuid.uuid4().hex
        self._kinds: dict[str, _Kind] = {}
        self._first_at = self._logged_at = float("-inf")
        self._logged = self._sent_when_logged = 0

    @property
    def total(self) -> int:
        return sum(kind.count for kind in self._kinds.values())

    @property
    def counts(self) -> dict[str, int]:
        return {reason: kind.count for reason, kind in list(self._kinds.items())}

    def count_sent(self) -> None:
        self.sent += 1

    def record(self, rejection: Rejection, example: Example | None = None, *, count: int = 1) -> None:
        """Count a dropped group; a line is logged after the first eight or half a minute, then at most each half
        minute.
        """
        kind = self._kinds.setdefault(rejection.reason, _Kind())
        if rejection.reason == EQUAL_SCORES and kind.count and kind.why != rejection.why:
            rejection = Rejection(EQUAL_SCORES, "the scores within each group are equal")
        kind.count += count
        kind.why, kind.example = rejection.why, example or kind.example
        self.changed.notify()
        now = self._clock()
        if self.total == count:
            self._first_at = now
        enough = self._logged or self.total >= FIRST_LINE_AFTER
        if now - self._logged_at >= LINE_SECONDS and (enough or now - self._first_at >= LINE_SECONDS):
            self._logged_at = now
            self.log()

    def log(self) -> None:
        """Log what was dropped, unless nothing was since the last line; a warning if no group was sent since then."""
        if self.total == self._logged:
            return
        level = logging.INFO if self.sent > self._sent_when_logged else logging.WARNING
        logger.log(level, "%s", self.explain())
        self._logged, self._sent_when_logged = self.total, self.sent

    def explain(self) -> str:
        """Return a sentence: how many groups, why, the last example of the commonest reason, and what to change."""
        if not self._kinds:
            return ""
        scored = self.total + self.sent
        ranked = sorted(self._kinds.items(), key=lambda item: -item[1].count)
        commonest, kind = ranked[0]
        groups = "1 group" if scored == 1 else f"{scored} groups"
        counted = f"{self.total} of {groups} dropped" if self.sent else f"{groups} collected, all dropped"
        reasons = ", ".join(f"{one.why} ({one.count})" if len(ranked) > 1 else one.why for _, one in ranked)
        shown = "" if kind.example is None else _shown(kind.example)
        return f"{counted}: {reasons}{shown}; {ADVICE[commonest]}"

    def report(self) -> DropReport:
        """Return the counts and the explanation as a report for the broker."""
        return DropReport(session=self._session, groups=self.counts, explanation=self.explain()[:2000])


def _shown(example: Example) -> str:
    try:
        return f"; {example()}"
    except Exception:  # noqa: BLE001 - an environment's own tokenizer may raise anything, and this is only an example
        return ""


def last_answer(group: Group, decode: Callable[[list[int]], str]) -> Example:
    """Return the last rollout's sampled text as an example, decoded only when shown; it keeps nothing else of the
    group.
    """
    mask = group.masks[-1] if group.masks else []
    sampled = [int(token) for token in mask if token != NOT_TRAINED]
    return lambda: f"last answer: {quoted(decode(sampled))}"


def quoted(value: Any) -> str:
    """Return `value` in quotes on one line; a long text is cut to its end, which explains a score better."""
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= LONGEST_EXAMPLE else f"…{text[-LONGEST_EXAMPLE:]}")


def one_line(text: str) -> str:
    """Return the beginning of a message, without its line breaks."""
    return encodable(" ".join(text.split())[:LONGEST_EXAMPLE])
