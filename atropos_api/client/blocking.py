"""The blocking client: the trainer and scripts use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import httpx

from atropos_api.client import calls
from atropos_api.client.calls import BearerAuth, BrokerRefused, Call
from atropos_api.common.concurrency import Wait
from atropos_api.common.identity import note_answer
from atropos_api.common.secrets import TokenSource
from atropos_api.wire.fleets import Fleet, FleetLease, FleetReport, FleetSet
from atropos_api.wire.groups import Batch, Form, Group
from atropos_api.wire.messages import (
    DropReport,
    EnvironmentInfo,
    EnvironmentRequest,
    Hold,
    HoldRequest,
    ItemLease,
    ItemRequest,
    Pacing,
    PolicyState,
    PolicyUpdate,
    RunInfo,
    RunRequest,
    SubmitAnswer,
)
from atropos_api.wire.reports import RunReport, TokenReport
from atropos_api.wire.servers import InferenceServer, ServerLease, ServerReport, ServerSet


class BrokerClient:
    """A client of one broker; usable from several threads. Close it, or use it as a context manager.

    `timeout_seconds` bounds one attempt, `retry_seconds` all attempts of a call together, so that a broker restart in
    between is not an error. `form` is the form of groups and batches; a broker that does not know it gets JSON. The
    file of a `TokenSource` is read again when the broker refuses its token, so that a token can be replaced during a
    run.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | TokenSource | None = None,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 60.0,
        form: Form = "columns",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._form = form
        self._auth = BearerAuth(token)
        self._http = httpx.Client(
            base_url=self.url,
            headers=calls.default_headers(),
            auth=self._auth,
            transport=transport,
            trust_env=False,
            verify=calls.tls_of(self.url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def wait_until_ready(self, timeout_seconds: float = 600.0, on_wait: Callable[[str], None] | None = None) -> None:
        """Return as soon as the broker is ready; `on_wait` is called with one line every ten seconds."""
        wait = Wait(timeout_seconds)
        while (error := self._probe()) is not None:
            calls.report_wait(wait, self.url, error, on_wait)
            time.sleep(calls.READY_POLL_SECONDS)

    def begin_run(self, request: RunRequest) -> RunInfo:
        return calls.read_answer(self._send(calls.begin_run(request)), RunInfo)

    def finish_run(self, run_id: str, *, epoch: int) -> None:
        """End the run and ask its environments to stop. Refused if another trainer took it over meanwhile."""
        self._send(calls.finish_run(run_id, epoch=epoch))

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
    ) -> Batch | None:
        """Return batch `number`, the same each time until it is committed; None if it did not form in time.

        With `arrays`, rows of numbers that came in columns are read-only numpy arrays, made without a copy.
        """
        call = calls.get_batch(
            number,
            run_id=run_id,
            epoch=epoch,
            wait_seconds=wait_seconds,
            rank=rank,
            world_size=world_size,
            form=self._form,
        )
        return calls.read_batch(self._send(call), arrays=arrays)

    def commit(self, number: int, *, run_id: str, epoch: int) -> None:
        """Declare that a checkpoint covers everything up to `number`; the broker may forget it."""
        self._send(calls.commit(number, run_id=run_id, epoch=epoch))

    def update_policy(self, update: PolicyUpdate) -> PolicyState:
        """Announce a publish that succeeded. `held_seconds` in the answer: for how long to publish no other.

        A version announced while an evaluation holds the policy is accepted all the same, because servers have it
        already; the evaluation learns that its version was not kept. To respect holds, ask `get_policy` before
        publishing.
        """
        return calls.read_answer(self._send(calls.update_policy(update)), PolicyState)

    def get_policy(
        self, *, run_id: str | None = None, epoch: int | None = None, wait_seconds: float = 0.0
    ) -> PolicyState:
        """Return the published policy; with `wait_seconds`, once no hold is left, at the latest after that time."""
        call = calls.get_policy(run_id=run_id, epoch=epoch, wait_seconds=wait_seconds)
        return calls.read_answer(self._send(call), PolicyState)

    def hold_policy(self, seconds: float, *, hold_id: str | None = None, reason: str = "") -> Hold:
        """Ask the trainer to publish no other version for so long (600 s at most); with `hold_id`, renew that lease."""
        request = HoldRequest(seconds=seconds, hold_id=hold_id, reason=reason)
        return calls.read_answer(self._send(calls.hold_policy(request)), Hold)

    def release_policy(self, hold_id: str) -> Hold:
        """Release a lease; `kept` says whether the version stayed the published one until now."""
        return calls.read_answer(self._send(calls.release_policy(hold_id)), Hold)

    def register_environment(self, request: EnvironmentRequest) -> EnvironmentInfo:
        return calls.read_answer(self._send(calls.register_environment(request)), EnvironmentInfo)

    def leave(self, environment_id: int) -> None:
        """Disconnect the environment: its weight and minimum no longer count until it calls again."""
        self._send(calls.leave(environment_id))

    def heartbeat(
        self, environment_id: int, *, revision: int | None = None, wait_seconds: float = 0.0, process: str = ""
    ) -> Pacing:
        """Return the pacing now, or as soon as it is no longer `revision`, at the latest after `wait_seconds`."""
        call = calls.heartbeat(environment_id, revision=revision, wait_seconds=wait_seconds, process=process)
        return calls.read_answer(self._send(call), Pacing)

    def lease_items(self, environment_id: int, request: ItemRequest) -> ItemLease:
        """Report what became of leased items and lease others; a repeated call gets the same answer."""
        return calls.read_answer(self._send(calls.lease_items(environment_id, request)), ItemLease)

    def report_dropped(self, environment_id: int, report: DropReport) -> None:
        """Report how many groups the environment dropped so far, and why."""
        self._send(calls.report_dropped(environment_id, report))

    def report_run(self, run_id: str, report: RunReport) -> None:
        """Report steps, signs of trouble and the state of the trainer, for the page; repeating it is harmless."""
        self._send(calls.report_run(run_id, report))

    def report_tokens(self, run_id: str, number: int, report: TokenReport) -> None:
        """Report the trainer's values of the tokens of a batch, for the page."""
        self._send(calls.report_tokens(run_id, number, report))

    def submit(
        self, environment_id: int, groups: Sequence[Group], *, idempotency_key: str, run_id: str | None = None
    ) -> SubmitAnswer:
        """Submit groups, for the open run or for `run_id`; repeating the call with the same key is harmless."""
        call = calls.submit(environment_id, groups, idempotency_key=idempotency_key, run_id=run_id, form=self._form)
        try:
            return calls.read_answer(self._send(call), SubmitAnswer)
        except BrokerRefused as refused:
            if not calls.wants_json(refused, self._form):
                raise
        self._form = "json"
        return self.submit(environment_id, groups, idempotency_key=idempotency_key, run_id=run_id)

    def renew_server(
        self, server_id: str, report: ServerReport, *, state: str | None = None, wait_seconds: float = 0.0
    ) -> ServerLease:
        """Register an inference server or renew its lease; answered once its state is not `state`, or after
        `wait_seconds`.

        The lease counts from the moment at which the broker takes the call, so a caller that is not told that moment
        counts it from before the call.
        """
        call = calls.renew_server(server_id, report, state=state, wait_seconds=wait_seconds)
        return calls.read_answer(self._send(call), ServerLease)

    def get_servers(
        self,
        policy: str | None = None,
        *,
        answering: bool = False,
        since: int | None = None,
        wait_seconds: float = 0.0,
    ) -> ServerSet:
        """Return the registered inference servers, of one policy or all; with `answering` only those that answer
        requests. With `since`, once the set's epoch is another, at the latest after `wait_seconds`.
        """
        call = calls.get_servers(policy, answering=answering, since=since, wait_seconds=wait_seconds)
        return calls.read_answer(self._send(call), ServerSet)

    def drain_server(self, server_id: str) -> InferenceServer:
        """Let a server end the requests that it runs, take no new one, and leave."""
        return calls.read_answer(self._send(calls.drain_server(server_id)), InferenceServer)

    def remove_server(self, server_id: str, *, lease_id: str | None = None) -> None:
        """End a server's lease; with `lease_id`, only that one."""
        self._send(calls.remove_server(server_id, lease_id=lease_id))

    def renew_fleet(self, fleet_id: str, report: FleetReport) -> FleetLease:
        """Report on a launcher's inference servers, and return how many are wanted."""
        return calls.read_answer(self._send(calls.renew_fleet(fleet_id, report)), FleetLease)

    def get_fleets(self) -> FleetSet:
        """Return the inference servers that launchers start, by launcher."""
        return calls.read_answer(self._send(calls.get_fleets()), FleetSet)

    def scale_fleet(self, fleet_id: str, wanted: int, *, wait_seconds: float = 0.0) -> Fleet:
        """Ask for another number of servers; answered once the launcher follows, at the latest after `wait_seconds`."""
        call = calls.scale_fleet(fleet_id, wanted, wait_seconds=wait_seconds)
        return calls.read_answer(self._send(call), Fleet)

    def remove_fleet(self, fleet_id: str, *, launcher_id: str) -> None:
        """End the lease of a launcher that ends."""
        self._send(calls.remove_fleet(fleet_id, launcher_id=launcher_id))

    def status(self) -> dict[str, Any]:
        return calls.read_answer(self._send(calls.status()), dict[str, Any])

    def _probe(self) -> Exception | None:
        call = calls.readiness()
        try:
            response = self._http.request(call.method, call.path, timeout=5.0)
        except httpx.TransportError as error:
            return error
        note_answer(self.url)
        if response.status_code in {401, 403}:
            calls.raise_for_problem(response)
        return None if response.is_success else ConnectionError(f"it answers {response.status_code}")

    def _send(self, call: Call) -> httpx.Response:
        started = time.monotonic()
        attempt = 0
        while True:
            outcome = self._attempt(call)
            waited = time.monotonic() - started
            delay = calls.retry_delay(attempt, outcome)
            self._auth.note(outcome)
            again = calls.should_retry(self.url, call, outcome) or self._auth.awaits_replacement(outcome)
            if not again or waited + delay > self._retry_seconds:
                return calls.settle(self.url, outcome, waited_seconds=waited)
            time.sleep(delay)
            attempt += 1

    def _attempt(self, call: Call) -> httpx.Response | httpx.TransportError:
        timeout = httpx.Timeout(self._timeout_seconds, read=self._timeout_seconds + call.extra_seconds)
        try:
            response = self._http.request(
                call.method,
                call.path,
                params=call.params,
                headers=call.headers,
                content=call.content,
                timeout=timeout,
            )
        except httpx.TransportError as error:
            return error
        note_answer(self.url)
        return response
