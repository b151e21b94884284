"""The broker's calls as data: the request to send, the reading of its answer, and the errors to handle.

Both clients are loops around these functions. `BearerAuth` sends the broker's token in each request's header; if the
token comes from a file, it is the newest one there.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import httpx
import msgspec

from atropos_api.common.concurrency import Wait
from atropos_api.common.errors import AtroposError
from atropos_api.common.identity import find_host_error
from atropos_api.common.secrets import TokenSource
from atropos_api.wire.columns import MEDIA_TYPE, VERSION
from atropos_api.wire.columns_groups import NotColumnar, decode_batch, encode_submission
from atropos_api.wire.fleets import FleetReport, ScaleRequest
from atropos_api.wire.groups import Batch, Form, Group
from atropos_api.wire.messages import (
    CommitRequest,
    DropReport,
    EnvironmentRequest,
    FinishRequest,
    HoldRequest,
    ItemRequest,
    PolicyUpdate,
    RunRequest,
    Submission,
    decode_problem,
)
from atropos_api.wire.reports import EnvironmentActivity, RunReport, TokenReport
from atropos_api.wire.servers import ServerReport

AnswerT = TypeVar("AnswerT")
RETRIED_STATUSES: Final = frozenset({502, 503, 504})
FIRST_DELAY_SECONDS: Final = 0.05
LONGEST_DELAY_SECONDS: Final = 2.0
READY_POLL_SECONDS: Final = 0.25
JSON: Final = "application/json"
COLUMNS: Final = f"{MEDIA_TYPE}; version={VERSION}"
ACCEPTED: Final = {"json": JSON, "columns": f"{COLUMNS}, {JSON}; q=0.5"}

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request. `repeatable`: after a lost answer it may be sent again without doing the thing twice."""

    method: str
    path: str
    params: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes | None = None
    extra_seconds: float = 0.0
    repeatable: bool = True


def tls_of(url: str) -> ssl.SSLContext | bool:
    """Return the certificates to trust at this address: `$SSL_CERT_FILE` or `$SSL_CERT_DIR`, else those of httpx.

    Reading them costs more than a call, so they are not read for plain HTTP.
    """
    return httpx.create_ssl_context() if url.startswith("https:") else False


def default_headers() -> dict[str, str]:
    # Compressing for a loopback peer costs more than the bytes it saves.
    return {"Accept-Encoding": "identity", "Content-Type": JSON}


def begin_run(request: RunRequest) -> Call:
    return Call(method="POST", path="/v1/runs", content=_encoder.encode(request), repeatable=False)


def finish_run(run_id: str, *, epoch: int) -> Call:
    body = _encoder.encode(FinishRequest(epoch=epoch))
    return Call(method="POST", path=f"/v1/runs/{run_id}/finish", content=body)


def get_batch(
    number: int, *, run_id: str, epoch: int, wait_seconds: float, rank: int, world_size: int, form: Form
) -> Call:
    params = {"run_id": run_id, "epoch": str(epoch), "wait": str(wait_seconds)}
    if world_size != 1:
        params |= {"rank": str(rank), "world_size": str(world_size)}
    headers = {"Accept": ACCEPTED[form]}
    return Call(method="GET", path=f"/v1/batches/{number}", params=params, headers=headers, extra_seconds=wait_seconds)


def commit(number: int, *, run_id: str, epoch: int) -> Call:
    body = _encoder.encode(CommitRequest(run_id=run_id, epoch=epoch))
    return Call(method="POST", path=f"/v1/batches/{number}/commit", content=body)


def update_policy(update: PolicyUpdate) -> Call:
    return Call(method="PUT", path="/v1/policy", content=_encoder.encode(update))


def get_policy(*, run_id: str | None, epoch: int | None, wait_seconds: float) -> Call:
    params = {"wait": str(wait_seconds)}
    if run_id is not None:
        params["run_id"] = run_id
    if epoch is not None:
        params["epoch"] = str(epoch)
    return Call(method="GET", path="/v1/policy", params=params, extra_seconds=wait_seconds)


def hold_policy(request: HoldRequest) -> Call:
    # A lost answer leaves a lease whose id no client knows, so only a renewal may be repeated.
    repeatable = request.hold_id is not None
    return Call(method="POST", path="/v1/policy/hold", content=_encoder.encode(request), repeatable=repeatable)


def release_policy(hold_id: str) -> Call:
    return Call(method="DELETE", path=f"/v1/policy/hold/{hold_id}", repeatable=False)


def register_environment(request: EnvironmentRequest) -> Call:
    return Call(method="POST", path="/v1/environments", content=_encoder.encode(request))


def leave(environment_id: int) -> Call:
    return Call(method="DELETE", path=f"/v1/environments/{environment_id}")


def heartbeat(environment_id: int, *, revision: int | None, wait_seconds: float, process: str = "") -> Call:
    params = {"wait": str(wait_seconds)}
    if process:
        params["process"] = process
    if revision is not None:
        params["revision"] = str(revision)
    path = f"/v1/environments/{environment_id}/heartbeat"
    return Call(method="PUT", path=path, params=params, extra_seconds=wait_seconds)


def report_dropped(environment_id: int, report: DropReport) -> Call:
    path = f"/v1/environments/{environment_id}/dropped"
    return Call(method="PUT", path=path, content=_encoder.encode(report))


def report_activity(environment_id: int, report: EnvironmentActivity) -> Call:
    path = f"/v1/environments/{environment_id}/activity"
    return Call(method="PUT", path=path, content=_encoder.encode(report))


def report_run(run_id: str, report: RunReport) -> Call:
    return Call(method="POST", path=f"/v1/runs/{run_id}/metrics", content=_encoder.encode(report))


def report_tokens(run_id: str, number: int, report: TokenReport) -> Call:
    return Call(method="PUT", path=f"/v1/runs/{run_id}/batches/{number}/tokens", content=_encoder.encode(report))


def lease_items(environment_id: int, request: ItemRequest) -> Call:
    path = f"/v1/environments/{environment_id}/items"
    return Call(method="POST", path=path, content=_encoder.encode(request))


def submit(
    environment_id: int, groups: Sequence[Group], *, idempotency_key: str, run_id: str | None, form: Form
) -> Call:
    try:
        body, media_type = _encode_submission(environment_id, groups, form)
    except (TypeError, ValueError, RecursionError) as error:  # an object, half a surrogate pair, a loop
        raise GroupNotEncodable(f"the group holds what JSON cannot ({type(error).__name__}: {error})") from error
    headers = {"Idempotency-Key": idempotency_key, "Content-Type": media_type}
    params = {} if run_id is None else {"run_id": run_id}
    return Call(method="POST", path="/v1/groups", params=params, content=body, headers=headers)


def renew_server(server_id: str, report: ServerReport, *, state: str | None, wait_seconds: float) -> Call:
    params = {"wait": str(wait_seconds)} if state is None else {"wait": str(wait_seconds), "state": state}
    return Call(
        method="PUT",
        path=f"/v1/servers/{server_id}",
        params=params,
        content=_encoder.encode(report),
        extra_seconds=wait_seconds,
    )


def get_servers(policy: str | None, *, answering: bool, since: int | None, wait_seconds: float) -> Call:
    params = {"wait": str(wait_seconds), "answering": "true" if answering else "false"}
    if policy is not None:
        params["policy"] = policy
    if since is not None:
        params["since"] = str(since)
    # Compressed once for all who follow the set, which has a few hundred bytes a server.
    headers = {"Accept-Encoding": "gzip"}
    return Call(method="GET", path="/v1/servers", params=params, headers=headers, extra_seconds=wait_seconds)


def drain_server(server_id: str) -> Call:
    return Call(method="POST", path=f"/v1/servers/{server_id}/drain")


def remove_server(server_id: str, *, lease_id: str | None) -> Call:
    params = {} if lease_id is None else {"lease_id": lease_id}
    return Call(method="DELETE", path=f"/v1/servers/{server_id}", params=params)


def renew_fleet(fleet_id: str, report: FleetReport) -> Call:
    return Call(method="PUT", path=f"/v1/fleets/{fleet_id}", content=_encoder.encode(report))


def get_fleets() -> Call:
    return Call(method="GET", path="/v1/fleets")


def scale_fleet(fleet_id: str, wanted: int, *, wait_seconds: float) -> Call:
    return Call(
        method="PUT",
        path=f"/v1/fleets/{fleet_id}/wanted",
        params={"wait": str(wait_seconds)},
        content=_encoder.encode(ScaleRequest(wanted=wanted)),
        extra_seconds=wait_seconds,
    )


def remove_fleet(fleet_id: str, *, launcher_id: str) -> Call:
    return Call(method="DELETE", path=f"/v1/fleets/{fleet_id}", params={"launcher_id": launcher_id})


def status() -> Call:
    return Call(method="GET", path="/v1/status")


def readiness() -> Call:
    return Call(method="GET", path="/readyz")


def read_batch(response: httpx.Response, *, arrays: bool) -> Batch | None:
    if response.status_code == 204:
        return None
    if response.headers.get("Content-Type", "").startswith(MEDIA_TYPE):
        return decode_batch(response.content, arrays=arrays)
    return msgspec.json.decode(response.content, type=Batch)


def read_answer(response: httpx.Response, kind: type[AnswerT]) -> AnswerT:
    return msgspec.json.decode(response.content, type=kind)


def wants_json(refused: BrokerRefused, form: Form) -> bool:
    """Return True if the broker refused the form of the body, and not its contents."""
    return form != "json" and refused.status in {406, 415}


def raise_for_problem(response: httpx.Response) -> None:
    """Raise the error class that belongs to an unsuccessful answer."""
    if response.is_success:
        return
    refused = BrokerRefused(decode_problem(response.content), response.status_code)
    if refused.kind == "run-superseded":
        raise RunSuperseded(refused.problem, refused.status)
    if refused.kind == "batch-committed":
        raise BatchCommitted(refused.problem, refused.status)
    is_missing = refused.status == httpx.codes.NOT_FOUND and refused.kind not in {"unknown-server", "unknown-fleet"}
    if is_missing and "/v1/servers" in response.url.path:
        detail = f"{response.url} is not a route of this broker: its release has no registry of inference servers"
        raise BrokerRefused({"detail": f"{detail}; upgrade it, or name servers by address"}, refused.status)
    if is_missing and "/v1/fleets" in response.url.path:
        detail = f"{response.url} is not a route of this broker: its release cannot scale; upgrade it"
        raise BrokerRefused({"detail": detail}, refused.status)
    raise refused


def should_retry(url: str, call: Call, failure: httpx.Response | httpx.TransportError) -> bool:
    """Return True for connection errors and gateway statuses, if the call is repeatable or never reached the broker."""
    if isinstance(failure, httpx.Response):
        # With 503 the broker itself states that nothing was kept, and with 408 that the request was never whole.
        return failure.status_code in {408, 503} or (failure.status_code in RETRIED_STATUSES and call.repeatable)
    if isinstance(failure, httpx.UnsupportedProtocol) or find_host_error(failure, url) is not None:
        return False
    return call.repeatable or isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout)


def settle(url: str, outcome: httpx.Response | httpx.TransportError, *, waited_seconds: float) -> httpx.Response:
    """Return the response if it is a success; raise the matching error for everything else."""
    if isinstance(outcome, httpx.Response):
        raise_for_problem(outcome)
        return outcome
    raise unreachable(url, outcome, waited_seconds=waited_seconds) from outcome


def retry_delay(attempt: int, failure: httpx.Response | httpx.TransportError) -> float:
    """Return the delay: doubling from 50 ms to 2 s, or what the broker asks for in `Retry-After`."""
    if isinstance(failure, httpx.Response):
        asked = failure.headers.get("Retry-After", "")
        if asked.isdigit():
            return float(asked)
    return min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0**attempt)


def unreachable(url: str, error: Exception | None, *, waited_seconds: float) -> BrokerUnreachable | BrokerHostUnknown:
    """Return the error for a broker that does not answer; a host name that does not resolve has its own class."""
    if isinstance(error, httpx.UnsupportedProtocol):
        return BrokerHostUnknown(f"the broker's URL {url} does not begin with http:// or https://; try http://{url}")
    host_error = find_host_error(error, url)
    if host_error is not None:
        host = httpx.URL(url).host
        return BrokerHostUnknown(f"the broker's host {host!r} cannot be resolved ({host_error}); check the URL {url}")
    reason = f": {type(error).__name__} {error}".rstrip() if error is not None else ""
    return BrokerUnreachable(
        f"Atropos API not reachable at {url} after {waited_seconds:.0f} s{reason}; is run-api running there?"
    )


def report_wait(wait: Wait, url: str, error: Exception, on_wait: Callable[[str], None] | None) -> None:
    """Raise if the wait for the broker at `url` is over or useless; else pass a line to `on_wait` if one is due."""
    failure = unreachable(url, error, waited_seconds=wait.seconds)
    if isinstance(failure, BrokerHostUnknown) or wait.is_over:
        raise failure
    if on_wait is not None and wait.has_line():
        on_wait(f"waiting for the broker at {url} ({wait.seconds:.0f} s): {error}")


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
        detail = problem.get("detail") or problem.get("title") or problem
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


class RunSuperseded(BrokerRefused):
    """Another trainer began a run or took this one over; this one must stop."""


class BatchCommitted(BrokerRefused):
    """The requested batch is already covered by a checkpoint and no longer stored."""


UNAUTHORIZED: Final = 401


class BearerAuth(httpx.Auth):
    """The authentication by bearer token: it sends `Authorization: Bearer <token>` with each request.

    It repeats a refused request if the token's file has a new one.
    """

    def __init__(self, token: str | TokenSource | None) -> None:
        self._source = token if isinstance(token, TokenSource) else TokenSource(token)
        self._was_accepted = False

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        self._sign(request)
        response = yield request
        if response.status_code == UNAUTHORIZED and self._source.reload():
            self._sign(request)
            yield request

    def note(self, outcome: httpx.Response | httpx.TransportError) -> None:
        """Remember that the broker has accepted this source's token for a call, if `outcome` is a success."""
        if isinstance(outcome, httpx.Response) and outcome.is_success:
            self._was_accepted = True

    def awaits_replacement(self, outcome: httpx.Response | httpx.TransportError) -> bool:
        """Return True if the broker may have read a new token before this process can.

        A changed file becomes visible later on another host.
        """
        refused = isinstance(outcome, httpx.Response) and outcome.status_code == UNAUTHORIZED
        return refused and self._was_accepted and self._source.file is not None

    def _sign(self, request: httpx.Request) -> None:
        if self._source.value:
            request.headers["Authorization"] = f"Bearer {self._source.value}"
