"""The verb `atropos view`: it shows the live page of a run that has ended, or the page of a file of groups."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from atropos_api.common.cliconfig import ConfigError, load_config
from atropos_api.common.files import read_json_object
from atropos_api.view import RecordedBatch, RecordedRun, has_store, serve_view
from atropos_api.wire.reports import HealthSign, StepMetrics, TokenReport
from example_trainer.launcher.run_dir import RunDir
from example_trainer.monitoring.broker_reports import TRAINED_FILE
from example_trainer.monitoring.trackers import EVENTS_FILE, METRICS_FILE, ROLLOUTS, MetricsTail

DESCRIPTION = "The live page of a run that has ended, from its directory, which is only read."


class RunViewOptions(BaseModel):
    """These are the options of `atropos view RUN`."""

    model_config = ConfigDict(extra="forbid")

    port: int = Field(0, ge=0, le=65535, description="Port of the page on this machine; 0: a free one.")


def run(argv: Sequence[str]) -> int:
    """Serve the page until a signal comes."""
    if not argv:
        raise ConfigError("atropos view shows a RUN's directory, a FILE of groups or --api-url URL; name one of them")
    named = argv[0] if not argv[0].startswith("-") else None
    if named is not None and not Path(named).exists():
        raise ConfigError(f"{named}: no such run directory or file of groups; name one, such as runs/demo-DATE")
    if named is None or not Path(named).is_dir():
        from environments.export import run as view_groups

        return view_groups(argv)
    options = load_config(RunViewOptions, argv[1:], prog="atropos view RUN", description=DESCRIPTION)
    store, recorded = read_recorded(Path(named))
    with _scratch() as scratch:
        for address in serve_view(store, recorded, scratch, port=options.port):
            sys.stdout.write(f"page: {address} (Ctrl-C ends it)\n")
            sys.stdout.flush()
    return 0


@contextmanager
def _scratch() -> Iterator[Path]:
    """Provide a temporary folder that is removed at a signal, too; SIGHUP comes where a terminal is closed."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    # The page's server replaces the handler of SIGTERM while it serves.
    handlers = {signal.SIGTERM: end, signal.SIGHUP: lambda *_: signal.raise_signal(signal.SIGTERM)}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under `nohup`
        del handlers[signal.SIGHUP]
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with tempfile.TemporaryDirectory(prefix="atropos-view-") as folder:
            yield Path(folder)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def read_recorded(root: Path) -> tuple[Path | None, RecordedRun]:
    """Return the broker's store in a run directory, None without one, and what the run's files tell.

    Raises `ConfigError` if there is neither a store nor a metric.
    """
    store = RunDir(root=root, log_root=root / "logs", attempt=1).broker_store
    rows = [row for row in MetricsTail(root / METRICS_FILE).read() if isinstance(row.get("step"), int)]
    found = store if has_store(store) else None
    if found is None and not rows:
        raise ConfigError(
            f"{root} holds neither a broker's store (broker/) nor a {METRICS_FILE} with a finished step; name the "
            "directory of a run, such as runs/demo-DATE"
        )
    settings = _read_settings(root)
    times = {row["step"]: float(row.get("timestamp", 0.0)) for row in rows}
    return found, RecordedRun(
        name=str(settings.get("name") or root.resolve().name)[:100],
        num_steps=int(settings.get("training_steps") or 0),
        steps=[_to_step(row) for row in rows],
        signs=list(_read_signs(root)),
        batches=list(_read_batches(root, times)),
    )


def _to_step(row: Mapping[str, Any]) -> StepMetrics:
    values = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
    timestamp = values.pop("timestamp", 0.0)
    return StepMetrics(step=int(values.pop("step")), time=timestamp, values=values)


def _read_signs(root: Path) -> Iterator[HealthSign]:
    for row in MetricsTail(root / EVENTS_FILE).read():
        try:
            yield msgspec.convert({name: row[name] for name in HealthSign.__struct_fields__ if name in row}, HealthSign)
        except msgspec.ValidationError:
            continue


def _read_batches(root: Path, times: Mapping[int, float]) -> Iterator[RecordedBatch]:
    """Yield the batches of `trained.jsonl`, with the chats that the environments kept of the same groups."""
    chats = _read_chats(root)
    for line in MetricsTail(root / TRAINED_FILE).read():
        try:
            values = msgspec.convert({"groups": line["groups"], "texts": line["texts"]}, TokenReport)
            groups = {one["group"]: one["fields"] for one in line["groups"]}
            number, run_id = int(line["number"]), str(line["run_id"])
        except (msgspec.ValidationError, KeyError, TypeError, ValueError):
            continue
        for fields in groups.values():
            fields["messages"] = fields.get("messages") or chats.get(str(fields["tokens"]))
        yield RecordedBatch(run_id=run_id, number=number, groups=groups, values=values, time=times.get(number, 0.0))


def _read_chats(root: Path) -> dict[str, Any]:
    files = sorted((root / ROLLOUTS).glob("*.jsonl"))
    groups = [group for path in files for group in MetricsTail(path).read()]
    return {str(group.get("tokens")): group.get("messages") for group in groups}


def _read_settings(root: Path) -> Mapping[str, Any]:
    found = read_json_object(root / "config.json").get("trainer")
    return found if isinstance(found, Mapping) else {}
