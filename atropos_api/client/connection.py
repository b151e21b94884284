"""The parts that the two clients share: the connection, the token, and what becomes of a call that fails.

`BearerAuth` sends the broker's token in each request's header; if the token comes from a file, it is the newest one
there.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Generator
from typing import Any, Final, Generic, TypeVar

import httpx

from atropos_api.client.calls import (
    JSON,
    BatchCommitted,
    BrokerHostUnknown,
    BrokerRefused,
    BrokerUnreachable,
    Call,
    Calls,
    RunSuperseded,
)
from atropos_api.common.concurrency import Wait
from atropos_api.common.identity import find_host_error
from atropos_api.common.secrets import TokenSource
from atropos_api.wire.groups import Form
from atropos_api.wire.messages import decode_problem

RETRIED_STATUSES: Final = frozenset({502, 503, 504})
FIRST_DELAY_SECONDS: Final = 0.05
LONGEST_DELAY_SECONDS: Final = 2.0
READY_POLL_SECONDS: Final = 0.25
HttpT = TypeVar("HttpT")
TransportT = TypeVar("TransportT")


class Connection(Generic[HttpT, TransportT]):
    """The part of a client that does not depend on how it waits."""

    def __init__(
        self,
        url: str,
        *,
        token: str | TokenSource | None = None,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 60.0,
        form: Form = "columns",
        transport: TransportT | None = None,
    ) -> None:
        """Connect at the first call.

        `timeout_seconds` bounds one attempt, `retry_seconds` all attempts of a call together, so that a broker restart
        in between is not an error. `form` is the form of groups and batches; a broker that does not know it gets JSON.
        The file of a `TokenSource` is read again when the broker refuses its token, so that a token can be replaced
        during a run.
        """
        self.url = url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._calls = Calls(form)
        self._auth = BearerAuth(token)
        self._answered = False
        """True once the broker has answered: its name is right, so a lookup that fails later is an outage."""
        self._http = self._open(
            base_url=self.url,
            headers=default_headers(),
            auth=self._auth,
            transport=transport,
            trust_env=False,
            verify=tls_of(self.url),
        )

    def _open(self, **options: Any) -> HttpT:
        raise NotImplementedError


def tls_of(url: str) -> ssl.SSLContext | bool:
    """Return the certificates to trust at this address: `$SSL_CERT_FILE` or `$SSL_CERT_DIR`, else those of httpx.

    Reading them costs more than a call, so they are not read for plain HTTP.
    """
    return False if url[:5].lower() == "http:" else httpx.create_ssl_context()  # a scheme may be in capitals


def default_headers() -> dict[str, str]:
    # Compressing for a loopback peer costs more than the bytes it saves.
    return {"Accept-Encoding": "identity", "Content-Type": JSON}


def wants_json(refused: BrokerRefused, call: Call[Any]) -> bool:
    """Return True if the broker refused the form of the body, and not its contents."""
    return call.has_form and refused.status in {406, 415}


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
        detail = f"{response.url} is no broker's, or one of a release that has no registry of inference servers"
        raise BrokerRefused({"detail": f"{detail}; check the address, or name servers by address"}, refused.status)
    if is_missing and "/v1/fleets" in response.url.path:
        detail = f"{response.url} is no broker's, or one of a release that cannot scale"
        raise BrokerRefused({"detail": f"{detail}; check the address, or upgrade it"}, refused.status)
    if is_missing and refused.kind in {"", "about:blank"}:  # the broker's own answers have a kind
        said = refused.problem.get("detail") or "no text"
        detail = f"{response.url} is no broker's ({said}); check host and port"
        raise BrokerRefused({"detail": detail}, refused.status)
    raise refused


def should_retry(call: Call[Any], failure: httpx.Response | httpx.TransportError, *, answered: bool) -> bool:
    """Return True for connection errors and gateway statuses, if the call is repeatable or never reached the broker."""
    if isinstance(failure, httpx.Response):
        # With 408 the broker states that the request was never whole, and with 503 that nothing was kept. After a sync
        # that failed it may have been: then a run is begun twice, and the second one closes the first.
        return failure.status_code in {408, 503} or (failure.status_code in RETRIED_STATUSES and call.repeatable)
    if isinstance(failure, httpx.UnsupportedProtocol) or find_host_error(failure, answered=answered) is not None:
        return False
    return call.repeatable or isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout)


def settle(
    url: str, outcome: httpx.Response | httpx.TransportError, *, waited_seconds: float, answered: bool
) -> httpx.Response:
    """Return the response if it is a success; raise the matching error for everything else."""
    if isinstance(outcome, httpx.Response):
        raise_for_problem(outcome)
        return outcome
    raise unreachable(url, outcome, waited_seconds=waited_seconds, answered=answered) from outcome


def retry_delay(attempt: int, failure: httpx.Response | httpx.TransportError) -> float:
    """Return the delay: doubling from 50 ms to 2 s, or what the broker asks for in `Retry-After`."""
    if isinstance(failure, httpx.Response):
        asked = failure.headers.get("Retry-After", "")
        if asked.isdigit():
            return float(asked)
    return min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0**attempt)


def unreachable(
    url: str, error: Exception | None, *, waited_seconds: float, answered: bool = False
) -> BrokerUnreachable | BrokerHostUnknown:
    """Return the error for a broker that does not answer; a host name that does not resolve has its own class."""
    if isinstance(error, httpx.UnsupportedProtocol):
        return BrokerHostUnknown(f"the broker's URL {url} does not begin with http:// or https://; try http://{url}")
    host_error = find_host_error(error, answered=answered)
    if host_error is not None:
        host = httpx.URL(url).host
        return BrokerHostUnknown(f"the broker's host {host!r} cannot be resolved ({host_error}); check the URL {url}")
    reason = f": {type(error).__name__} {error}".rstrip() if error is not None else ""
    return BrokerUnreachable(
        f"Atropos API not reachable at {url} after {waited_seconds:.0f} s{reason}; is run-api running there?"
    )


def report_wait(
    wait: Wait, url: str, error: Exception, on_wait: Callable[[str], None] | None, *, answered: bool
) -> None:
    """Raise if the wait for the broker at `url` is over or useless; else pass a line to `on_wait` if one is due."""
    failure = unreachable(url, error, waited_seconds=wait.seconds, answered=answered)
    if isinstance(failure, BrokerHostUnknown) or wait.is_over:
        raise failure
    if on_wait is not None and wait.has_line():
        on_wait(f"waiting for the broker at {url} ({wait.seconds:.0f} s): {error}")


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
