"""The routes by which people watch runs: reports of trainers and environments go in, curves and rollouts come out.

Nothing here is needed for training. Reports are small and bounded. What a watcher asks for may be large, so it is read
and reduced a part at a time, or in a thread.
"""

from __future__ import annotations

import asyncio
import functools
import shlex
from collections.abc import Sequence
from typing import Final, cast, get_args

import msgspec
from fastapi import APIRouter, Request, Response

from atropos_api.broker import Broker
from atropos_api.broker.rollouts import Rollout, list_groups, summarise, token_values
from atropos_api.errors import InvalidRequest
from atropos_api.http.context import context_of
from atropos_api.http.request import (
    MOST_LENIENT_BYTES,
    decode_body,
    in_thread_if_large,
    json_response,
    parse_int,
    read_body,
    read_int,
)
from atropos_api.page.documents import (
    GroupDocument,
    GroupList,
    MetricList,
    RunList,
    RunSummary,
    SampleWindow,
    Series,
    SeriesLine,
)
from atropos_api.page.rollouts import MOST_TOKENS_A_WINDOW, Only, Order, describe_group, read_fields, window
from atropos_api.page.series import MetricTable, reduced
from atropos_api.routes.schema import (
    COUNT,
    FROM_ONE,
    INTEGER,
    NOTHING,
    TEXT_SCHEMA,
    WRITES,
    Operation,
    in_path,
    in_query,
    ok,
)
from atropos_api.store.base import RunRow
from atropos_api.wire.reports import EnvironmentActivity, RunReport, TokenReport

router = APIRouter(tags=["watching"])

route = functools.partial(Operation, router)

RUN: Final = in_path("run_id", TEXT_SCHEMA, "As given when the run began")
BATCH: Final = in_path("number", COUNT, "Number of the batch; 0 for a group that is queued")
GROUP: Final = in_path("group", COUNT, "Index of the group in its batch; of a queued one, its place")
ORDERS: Final = get_args(Order)
CHOICES: Final = get_args(Only)
MOST_NAMES: Final = 100
MOST_POINTS: Final = 10_000


@route(
    "POST /v1/runs/{run_id}/metrics",
    "Report steps, signs of trouble and the state of the trainer",
    help="A step takes the place of an earlier report of it, so a report may be repeated. It is stored, and survives a "
    "restart of the broker.",
    parameters=(RUN,),
    body=RunReport,
    body_required=False,
    example={"epoch": 1, "steps": [{"step": 7, "time": 1767225600.0, "values": {"reward/mean": 0.5}}]},
    answers=NOTHING,
    errors=("unknown-run", "run-superseded", "invalid-request", *WRITES),
)
async def report_run(request: Request, run_id: str) -> Response:
    report = decode_body(await read_body(request), RunReport)
    context = context_of(request)
    context.broker.reports.take_run(run_id, report)
    context.events_notifier.notify()
    return Response(status_code=204)


@route(
    "PUT /v1/runs/{run_id}/batches/{number}/tokens",
    "Report a trainer's values of the tokens of a batch",
    help="They are kept in memory with the batch's groups, for people to look at, and forgotten with these.",
    parameters=(RUN, in_path("number", FROM_ONE, "Number of the batch")),
    body=TokenReport,
    example={
        "groups": [{"group": 0, "samples": [{"positions": [1], "advantages": [0.5], "logprobs": [-0.7]}, None]}],
        "texts": {"6": " the"},
    },
    answers=NOTHING,
    errors=("unknown-run", "run-superseded", "invalid-request"),
)
async def report_tokens(request: Request, run_id: str, number: str) -> Response:
    wanted = parse_int(number, "number", least=1)
    report, text = await in_thread_if_large(_read_tokens, await read_body(request))
    context_of(request).broker.reports.take_tokens(run_id, wanted, report, text)
    return Response(status_code=204)


def _read_tokens(body: bytes) -> tuple[TokenReport, bytes]:
    """Return a report, and the text to keep: its readers are strict, and a small body may have been read leniently."""
    report = decode_body(body, TokenReport)
    return report, body if len(body) > MOST_LENIENT_BYTES else msgspec.json.encode(report)


@route(
    "PUT /v1/environments/{environment_id}/activity",
    "Report what an environment is doing",
    help="Its open rollouts and requests, and its inference servers, as of now: the diagnosis of /v1/status needs them "
    "to tell a slow tool from a slow server, and to name a straggler.",
    parameters=(in_path("environment_id", INTEGER, "As given at registration"),),
    body=EnvironmentActivity,
    example={"open_rollouts": 3, "open_requests": 24, "usual_seconds": 12.5},
    answers=NOTHING,
    errors=("invalid-request", "unknown-environment", *WRITES),
)
async def report_activity(request: Request, environment_id: str) -> Response:
    report = decode_body(await read_body(request), EnvironmentActivity)
    context = context_of(request)
    context.broker.report_activity(parse_int(environment_id, "environment_id"), report)
    context.events_notifier.notify()
    return Response(status_code=204)


@route("GET /v1/runs", "All runs, the newest first", answers=ok(RunList, "All runs"))
async def runs(request: Request) -> Response:
    broker = context_of(request).broker
    rows = broker.state.runs.all()[::-1]
    return json_response(RunList(runs=[_describe_run(broker, row) for row in rows]))


def _describe_run(broker: Broker, row: RunRow) -> RunSummary:
    return RunSummary(
        run_id=row.run_id,
        name=row.name,
        state=row.state,
        began_at=row.began_at,
        current_step=broker.trained_steps(row),
        num_steps=row.num_steps,
        batch_size=row.batch_size,
        unit=row.unit,
        has_metrics=broker.metrics.has(row.run_id),
        policy_version=row.policy_version,
    )


@route(
    "GET /v1/runs/{run_id}/metrics",
    "Names of a run's metrics, each with its newest value",
    parameters=(RUN,),
    answers=ok(MetricList, "Names and newest values"),
    errors=("unknown-run",),
)
async def metrics(request: Request, run_id: str) -> Response:
    table = await _table(context_of(request).broker, run_id)
    return json_response(
        MetricList(
            run_id=run_id,
            first_step=int(table.steps[0]) if len(table) else None,
            last_step=table.last_step,
            steps=len(table),
            latest=table.latest(),
        )
    )


@route(
    "GET /v1/runs/{run_id}/series",
    "Metrics over steps, reduced to what a picture shows",
    help="Of each span of steps the smallest and the largest value are kept, so that a spike of one step stays.",
    parameters=(
        RUN,
        in_query("names", TEXT_SCHEMA, f"Names with commas between them, at most {MOST_NAMES}"),
        in_query(
            "name", {"type": "array", "items": TEXT_SCHEMA}, "One more name, which may contain commas; may be repeated"
        ),
        in_query(
            "points", FROM_ONE | {"maximum": MOST_POINTS, "default": 1000}, "Largest number of points of each metric"
        ),
        in_query("first", COUNT, "First step; default: the first of the run"),
        in_query("last", COUNT, "Last step; default: the newest"),
    ),
    answers=ok(Series, "Steps and values of each metric"),
    errors=("unknown-run", "invalid-request"),
)
async def series(request: Request, run_id: str) -> Response:
    asked = request.query_params
    names = [*filter(None, asked.get("names", "").split(",")), *asked.getlist("name")][:MOST_NAMES]
    points = min(read_int(request, "points", 1000, least=1) or 1, MOST_POINTS)
    first, last = read_int(request, "first", least=0), read_int(request, "last", least=0)
    table = await _table(context_of(request).broker, run_id)
    found = reduced(table, names, points, first=first, last=last)
    lines = {name: SeriesLine(steps=steps, values=values) for name, (steps, values) in found.items()}
    return json_response(Series(run_id=run_id, last_step=table.last_step, series=lines))


async def _table(broker: Broker, run_id: str) -> MetricTable:
    """Return the metrics of a run; other requests are served between the parts in which they are read."""
    broker.state.runs.find(run_id)
    while broker.metrics.read_part(run_id):  # noqa: ASYNC110 - this does not wait for something
        await asyncio.sleep(0)
    return broker.metrics.table(run_id)


@route(
    "GET /v1/runs/{run_id}/groups",
    "The newest groups of a run",
    help="Those of the newest batches handed out, of batches that no checkpoint covers, and the newest in the queue.",
    parameters=(
        RUN,
        in_query("batch", COUNT, "Only groups of this batch"),
        in_query("environment_id", INTEGER, "Only groups of this environment"),
        in_query("order", {"type": "string", "enum": list(ORDERS), "default": "newest"}, "Order of the groups"),
        in_query(
            "only",
            {"type": "string", "enum": list(CHOICES), "default": "all"},
            "Only groups whose rewards are equal or mixed, that have a reward of 0 or less, or a remark",
        ),
        in_query("limit", FROM_ONE | {"maximum": 1000, "default": 200}, "Largest number of groups"),
    ),
    answers=ok(GroupList, "A line about each group"),
    errors=("unknown-run", "invalid-request"),
)
async def groups(request: Request, run_id: str) -> Response:
    broker = context_of(request).broker
    broker.state.runs.find(run_id)
    order = cast("Order", _one_of(request, "order", ORDERS))
    only = cast("Only", _one_of(request, "only", CHOICES))
    limit = min(read_int(request, "limit", 200, least=1) or 1, 1000)
    found = broker.rollouts.newest(
        run_id, batch=read_int(request, "batch", least=0), environment_id=read_int(request, "environment_id")
    )
    return json_response(await asyncio.to_thread(list_groups, run_id, found, order, only, limit))


def _one_of(request: Request, name: str, known: Sequence[str]) -> str:
    """Return a parameter of the query that has one of the `known` values; the first one if it is missing."""
    value = request.query_params.get(name, known[0])
    if value not in known:
        raise InvalidRequest(f"{name}: one of {', '.join(known)} is needed", field=name, value=value[:80])
    return value


@route(
    "GET /v1/runs/{run_id}/batches/{number}/groups/{group}",
    "One group: rewards, chats, and all that came with it",
    parameters=(RUN, BATCH, GROUP),
    answers=ok(GroupDocument, "The group without its tokens"),
    errors=("unknown-run", "unknown-rollout", "invalid-request"),
)
async def group(request: Request, run_id: str, number: str, group: str) -> Response:
    broker = context_of(request).broker
    rollout = _find(broker, run_id, number, group)
    replay = replay_command(broker.state.runs.find(run_id), rollout.batch)
    return json_response(await asyncio.to_thread(_describe, run_id, rollout, replay))


@route(
    "GET /v1/runs/{run_id}/batches/{number}/groups/{group}/samples/{sample}",
    "Tokens of one sequence, with all that is known of each",
    parameters=(
        RUN,
        BATCH,
        GROUP,
        in_path("sample", COUNT, "Index of the sequence in its group"),
        in_query("start", COUNT | {"default": 0}, "First token"),
        in_query("count", FROM_ONE | {"maximum": MOST_TOKENS_A_WINDOW, "default": 2000}, "Largest number of tokens"),
    ),
    answers=ok(SampleWindow, "The tokens"),
    errors=("unknown-run", "unknown-rollout", "invalid-request"),
)
async def sample(request: Request, run_id: str, number: str, group: str, sample: str) -> Response:
    rollout = _find(context_of(request).broker, run_id, number, group)
    index = parse_int(sample, "sample", least=0)
    if index >= rollout.row.size:
        raise InvalidRequest(f"the group has {rollout.row.size} sequences", field="sample", value=index)
    start = read_int(request, "start", 0, least=0) or 0
    count = read_int(request, "count", 2000, least=1) or 1
    return json_response(await asyncio.to_thread(_window, rollout, index, start, count))


def _find(broker: Broker, run_id: str, number: str, group: str) -> Rollout:
    broker.state.runs.find(run_id)
    return broker.rollouts.find(run_id, parse_int(number, "number", least=0), parse_int(group, "group", least=0))


def _describe(run_id: str, rollout: Rollout, replay: str | None) -> GroupDocument:
    return describe_group(run_id, summarise(rollout), read_fields(rollout.body, rollout.row.form), replay=replay)


def _window(rollout: Rollout, index: int, start: int, count: int) -> SampleWindow:
    values, texts = token_values(rollout)
    mine = values.samples[index] if values is not None and index < len(values.samples) else None
    return window(read_fields(rollout.body, rollout.row.form), index, start, count, values=mine, texts=texts)


def replay_command(run: RunRow, batch: int) -> str | None:
    """Return the command that trains a batch again, if its run saves batches."""
    if not batch or not run.batches_dir:
        return None
    path = f"{run.batches_dir.rstrip('/')}/batch-{batch}.atb"
    return shlex.join(("atropos", "replay", path))
