"""The broker's calls as data: the request to send, the reading of its answer, and the errors to handle.

Each method of the clients sends the call of the same name of `Calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

import httpx
import msgspec

from atropos_api.common.errors import AtroposError
from atropos_api.wire.columns import MEDIA_TYPE, VERSION
from atropos_api.wire.columns_groups import NotColumnar, decode_batch, encode_submission
from atropos_api.wire.fleets import Fleet, FleetLease, FleetReport, FleetSet, ScaleRequest
from atropos_api.wire.groups import Batch, Form, Group, as_plain
from atropos_api.wire.messages import (
    CommitRequest,
    DropReport,
    EnvironmentInfo,
    EnvironmentRequest,
    FinishRequest,
    Hold,
    HoldRequest,
    ItemLease,
    ItemRequest,
    Pacing,
    PolicyState,
    PolicyUpdate,
    RunInfo,
    RunRequest,
    Submission,
    SubmitAnswer,
)
from atropos_api.wire.reports import EnvironmentActivity, RunReport, TokenReport
from atropos_api.wire.servers import InferenceServer, ServerLease, ServerReport, ServerSet

AnswerT = TypeVar("AnswerT")
JSON: Final = "application/json"
COLUMNS: Final = f"{MEDIA_TYPE}; version={VERSION}"
ACCEPTED: Final = {"json": JSON, "columns": f"{COLUMNS}, {JSON}; q=0.5"}

_encoder = msgspec.json.Encoder(enc_hook=as_plain)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[AnswerT]):
    """One request. `repeatable`: after a lost answer it may be sent again without doing the thing twice. `has_form`:
    its body has the client's form, which an older broker may not know.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], AnswerT]
    params: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes | None = None
    extra_seconds: float = 0.0
    repeatable: bool = True
    has_form: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of a client. `form` is the form of its groups and batches."""

    form: Form = "columns"

    def begin_run(self, request: RunRequest) -> Call[RunInfo]:
        content = _encoder.encode(request)
        return Call(method="POST", path="/v1/runs", content=content, read=_answer(RunInfo), repeatable=False)

    def finish_run(self, run_id: str, *, epoch: int) -> Call[None]:
        """End the run and ask its environments to stop. Refused if another trainer took it over meanwhile."""
        body = _encoder.encode(FinishRequest(epoch=epoch))
        return Call(method="POST", path=f"/v1/runs/{run_id}/finish", content=body, read=_no_answer)

    def get_batch(
        self,
        number: int,
        *,
        run_id: str,
        epoch: int,
        wait_seconds: float = 30.0,
        rank: int = 0,
        world_size: int = 1,
        arrays: bool = False,
    ) -> Call[Batch | None]:
        """Return batch `number`, the same each time until it is committed; None if it did not form in time.

        With `arrays`, rows of numbers that came in columns are read-only numpy arrays, made without a copy.
        """
        params = {"run_id": run_id, "epoch": str(epoch), "wait": str(wait_seconds)}
        if world_size != 1:
            params |= {"rank": str(rank), "world_size": str(world_size)}
        return Call(
            method="GET",
            path=f"/v1/batches/{number}",
            params=params,
            headers={"Accept": ACCEPTED[self.form]},
            read=partial(_batch, arrays=arrays),
            extra_seconds=wait_seconds,
        )

    def commit(self, number: int, *, run_id: str, epoch: int) -> Call[None]:
        """Declare that a checkpoint covers everything up to `number`; the broker may forget it."""
        body = _encoder.encode(CommitRequest(run_id=run_id, epoch=epoch))
        return Call(method="POST", path=f"/v1/batches/{number}/commit", content=body, read=_no_answer)

    def update_policy(self, update: PolicyUpdate) -> Call[PolicyState]:
        """Announce a publish that succeeded. `held_seconds` in the answer: for how long to publish no other.

        A version announced while an evaluation holds the policy is accepted all the same, because servers have it
        already; the evaluation learns that its version was not kept. To respect holds, ask `get_policy` before
        publishing.
        """
        return Call(method="PUT", path="/v1/policy", content=_encoder.encode(update), read=_answer(PolicyState))

    def get_policy(
        self, *, run_id: str | None = None, epoch: int | None = None, wait_seconds: float = 0.0
    ) -> Call[PolicyState]:
        """Return the published policy; with `wait_seconds`, once no hold is left, at the latest after that time."""
        params = {"wait": str(wait_seconds)}
        if run_id is not None:
            params["run_id"] = run_id
        if epoch is not None:
            params["epoch"] = str(epoch)
        path = "/v1/policy"
        return Call(method="GET", path=path, params=params, read=_answer(PolicyState), extra_seconds=wait_seconds)

    def hold_policy(self, seconds: float, *, hold_id: str | None = None, reason: str = "") -> Call[Hold]:
        """Ask the trainer to publish no other version for so long (600 s at most); with `hold_id`, renew that lease."""
        body = _encoder.encode(HoldRequest(seconds=seconds, hold_id=hold_id, reason=reason))
        # A lost answer leaves a lease whose id no client knows, so only a renewal may be repeated.
        repeatable = hold_id is not None
        return Call(method="POST", path="/v1/policy/hold", content=body, read=_answer(Hold), repeatable=repeatable)

    def release_policy(self, hold_id: str) -> Call[Hold]:
        """Release a lease; `kept` says whether the version stayed the published one until now."""
        return Call(method="DELETE", path=f"/v1/policy/hold/{hold_id}", read=_answer(Hold), repeatable=False)

    def register_environment(self, request: EnvironmentRequest) -> Call[EnvironmentInfo]:
        content = _encoder.encode(request)
        return Call(method="POST", path="/v1/environments", content=content, read=_answer(EnvironmentInfo))

    def leave(self, environment_id: int) -> Call[None]:
        """Disconnect the environment: its weight and minimum no longer count until it calls again."""
        return Call(method="DELETE", path=f"/v1/environments/{environment_id}", read=_no_answer)

    def heartbeat(
        self, environment_id: int, *, revision: int | None = None, wait_seconds: float = 0.0, process: str = ""
    ) -> Call[Pacing]:
        """Return the pacing now, or as soon as it is no longer `revision`, at the latest after `wait_seconds`."""
        params = {"wait": str(wait_seconds)}
        if process:
            params["process"] = process
        if revision is not None:
            params["revision"] = str(revision)
        path = f"/v1/environments/{environment_id}/heartbeat"
        return Call(method="PUT", path=path, params=params, read=_answer(Pacing), extra_seconds=wait_seconds)

    def report_dropped(self, environment_id: int, report: DropReport) -> Call[None]:
        """Report how many groups the environment dropped so far, and why."""
        path = f"/v1/environments/{environment_id}/dropped"
        return Call(method="PUT", path=path, content=_encoder.encode(report), read=_no_answer)

    def report_activity(self, environment_id: int, report: EnvironmentActivity) -> Call[None]:
        """Report what the environment is doing, for the page."""
        path = f"/v1/environments/{environment_id}/activity"
        return Call(method="PUT", path=path, content=_encoder.encode(report), read=_no_answer)

    def report_run(self, run_id: str, report: RunReport) -> Call[None]:
        """Report steps, signs of trouble and the state of the trainer, for the page; repeating it is harmless."""
        return Call(method="POST", path=f"/v1/runs/{run_id}/metrics", content=_encoder.encode(report), read=_no_answer)

    def report_tokens(self, run_id: str, number: int, report: TokenReport) -> Call[None]:
        """Report the trainer's values of the tokens of a batch, for the page."""
        path = f"/v1/runs/{run_id}/batches/{number}/tokens"
        return Call(method="PUT", path=path, content=_encoder.encode(report), read=_no_answer)

    def lease_items(self, environment_id: int, request: ItemRequest) -> Call[ItemLease]:
        """Report what happened to leased items and lease others; a repeated call gets the same answer."""
        path = f"/v1/environments/{environment_id}/items"
        return Call(method="POST", path=path, content=_encoder.encode(request), read=_answer(ItemLease))

    def submit(
        self, environment_id: int, groups: Sequence[Group], *, idempotency_key: str, run_id: str | None = None
    ) -> Call[SubmitAnswer]:
        """Submit groups, for the open run or for `run_id`; repeating the call with the same key is harmless."""
        try:
            body, media_type = _encode_submission(environment_id, groups, self.form)
        except (TypeError, ValueError, RecursionError) as error:  # an object, half a surrogate pair, a loop
            raise GroupNotEncodable(f"the group holds what JSON cannot ({type(error).__name__}: {error})") from error
        return Call(
            method="POST",
            path="/v1/groups",
            params={} if run_id is None else {"run_id": run_id},
            headers={"Idempotency-Key": idempotency_key, "Content-Type": media_type},
            content=body,
            read=_answer(SubmitAnswer),
            has_form=self.form != "json",
        )

    def renew_server(
        self, server_id: str, report: ServerReport, *, state: str | None = None, wait_seconds: float = 0.0
    ) -> Call[ServerLease]:
        """Register an inference server or renew its lease; answered once its state is not `state`, or after
        `wait_seconds`.

        The lease counts from the moment at which the broker takes the call, so a caller that is not told that moment
        counts it from before the call.
        """
        params = {"wait": str(wait_seconds)} if state is None else {"wait": str(wait_seconds), "state": state}
        return Call(
            method="PUT",
            path=f"/v1/servers/{server_id}",
            params=params,
            content=_encoder.encode(report),
            read=_answer(ServerLease),
            extra_seconds=wait_seconds,
        )

    def get_servers(
        self, policy: str | None = None, *, answering: bool = False, since: int | None = None, wait_seconds: float = 0.0
    ) -> Call[ServerSet]:
        """Return the registered inference servers, of one policy or all; with `answering` only those that answer
        requests. With `since`, once the set's epoch is another, at the latest after `wait_seconds`.
        """
        params = {"wait": str(wait_seconds), "answering": "true" if answering else "false"}
        if policy is not None:
            params["policy"] = policy
        if since is not None:
            params["since"] = str(since)
        return Call(
            method="GET",
            path="/v1/servers",
            params=params,
            # Compressed once for all who follow the set, which has a few hundred bytes a server.
            headers={"Accept-Encoding": "gzip"},
            read=_answer(ServerSet),
            extra_seconds=wait_seconds,
        )

    def drain_server(self, server_id: str) -> Call[InferenceServer]:
        """Let a server end the requests that it runs, take no new one, and leave."""
        return Call(method="POST", path=f"/v1/servers/{server_id}/drain", read=_answer(InferenceServer))

    def remove_server(self, server_id: str, *, lease_id: str | None = None) -> Call[None]:
        """End a server's lease; with `lease_id`, only that one."""
        params = {} if lease_id is None else {"lease_id": lease_id}
        return Call(method="DELETE", path=f"/v1/servers/{server_id}", params=params, read=_no_answer)

    def renew_fleet(self, fleet_id: str, report: FleetReport) -> Call[FleetLease]:
        """Report on a launcher's inference servers, and return how many are wanted."""
        content = _encoder.encode(report)
        return Call(method="PUT", path=f"/v1/fleets/{fleet_id}", content=content, read=_answer(FleetLease))

    def get_fleets(self) -> Call[FleetSet]:
        """Return the inference servers that launchers start, by launcher."""
        return Call(method="GET", path="/v1/fleets", read=_answer(FleetSet))

    def scale_fleet(self, fleet_id: str, wanted: int, *, wait_seconds: float = 0.0) -> Call[Fleet]:
        """Ask for another number of servers; answered once the launcher follows, at the latest after `wait_seconds`."""
        return Call(
            method="PUT",
            path=f"/v1/fleets/{fleet_id}/wanted",
            params={"wait": str(wait_seconds)},
            content=_encoder.encode(ScaleRequest(wanted=wanted)),
            read=_answer(Fleet),
            extra_seconds=wait_seconds,
        )

    def remove_fleet(self, fleet_id: str, *, launcher_id: str) -> Call[None]:
        """End the lease of a launcher that ends."""
        params = {"launcher_id": launcher_id}
        return Call(method="DELETE", path=f"/v1/fleets/{fleet_id}", params=params, read=_no_answer)

    def status(self) -> Call[dict[str, Any]]:
        return Call(method="GET", path="/v1/status", read=_answer(dict[str, Any]))


def _answer(kind: type[AnswerT]) -> Callable[[httpx.Response], AnswerT]:
    def read(response: httpx.Response) -> AnswerT:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError as error:  # a proxy's page, while the broker behind it restarts
            raise BrokerUnreachable(
                f"{response.url} answers with something else than a broker does ({error}); is the address the broker's?"
            ) from error

    return read


def _no_answer(_: httpx.Response) -> None:
    return None


def _batch(response: httpx.Response, *, arrays: bool) -> Batch | None:
    if response.status_code == 204:
        return None
    if response.headers.get("Content-Type", "").startswith(MEDIA_TYPE):
        return decode_batch(response.content, arrays=arrays)
    return _answer(Batch)(response)


def _encode_submission(environment_id: int, groups: Sequence[Group], form: Form) -> tuple[bytes, str]:
    if form == "columns":
        try:
            return encode_submission(environment_id, groups), COLUMNS
        except NotColumnar:
            # No trainer could use such a group; the broker explains the reason best from JSON.
            pass
    return _encoder.encode(Submission(environment_id=environment_id, groups=list(groups))), JSON


class GroupNotEncodable(AtroposError):
    """A group holds something that cannot be sent, such as an object among its messages."""


class BrokerUnreachable(AtroposError):
    """Nothing answers at the broker's address within the time allowed."""


class BrokerHostUnknown(AtroposError):
    """The host in the broker's URL cannot be resolved: a mistyped name, which waiting does not correct."""


class BrokerRefused(AtroposError):
    """The broker answered with a problem; `problem` is its body, `status` the HTTP status."""

    def __init__(self, problem: dict[str, Any], status: int) -> None:
        said = any(value for name, value in problem.items() if name != "type")
        detail = (
            problem.get("detail") or problem.get("title") or (problem if said else "without a reason; check the URL")
        )
        super().__init__(f"the broker refused ({status}): {detail}")
        self.problem = problem
        self.status = status

    @property
    def kind(self) -> str:
        """The stable last part of the problem's `type`, such as `run-superseded`."""
        return str(self.problem.get("type", "")).rpartition("/")[2]

    @property
    def is_passing(self) -> bool:
        """True if the same call may succeed later; 408: this process stood still before its request was whole."""
        return self.status >= 500 or self.status == 408


def is_outage(error: Exception) -> bool:
    """Return True for an error that is over once the broker is up again."""
    return isinstance(error, BrokerUnreachable) or (isinstance(error, BrokerRefused) and error.is_passing)


class RunSuperseded(BrokerRefused):
    """Another trainer began a run or took this one over; this one must stop."""


class BatchCommitted(BrokerRefused):
    """The requested batch is already covered by a checkpoint and no longer stored."""
