"""The trainer's client for the inference server's routes (`/bridge/*`, `/lora/*`, `/generate`), as plain calls.

`wait_for` polls for something that another process provides, with a log line every ten seconds and an error at the
timeout, or as soon as the trainer is told to stop. A reason that has not changed is not logged a second time, because
some reasons list every place searched.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx

from atropos_api.common.concurrency import Wait
from atropos_api.common.identity import find_host_error
from example_trainer.errors import ServerRefused, ServerUnavailable, WaitStopped, WaitTimedOut

if TYPE_CHECKING:
    from example_trainer.weight_protocol.broadcast_group import Rendezvous
    from example_trainer.weight_protocol.buckets import Bucket
    from example_trainer.weight_protocol.checkpoint_files import CheckpointSource

logger = logging.getLogger(__name__)

T = TypeVar("T")
_POLL_SECONDS = 0.1


class NotYet(Exception):
    """Raised by a polled function, with the reason why it has no result yet."""


ShouldStop = Callable[[], bool]
"""A function that returns True once the trainer has been told to stop."""


def never() -> bool:
    """Return False: the wait ends by itself."""
    return False


def wait_for(poll: Callable[[], T], *, what: str, timeout_seconds: float, should_stop: ShouldStop = never) -> T:
    """Call `poll` until it returns instead of raising `NotYet`; raise `WaitStopped` once `should_stop` returns True."""
    wait = Wait(timeout_seconds)
    last_reason = ""
    while True:
        try:
            return poll()
        except NotYet as reason:
            if should_stop():
                raise WaitStopped(f"told to stop while waiting for {what}: {reason}") from reason
            if wait.is_over:
                raise WaitTimedOut(
                    f"waited {timeout_seconds:.0f} s for {what}: {reason} (--wait-timeout sets the limit)"
                ) from reason
            if wait.has_line():
                change = "still the same" if str(reason) == last_reason else str(reason)
                logger.info("waiting for %s (%.0f s): %s", what, wait.seconds, change)
                last_reason = str(reason)
            time.sleep(_POLL_SECONDS)


def check_host(url: str, flag: str) -> None:
    """Raise `ServerUnavailable` for a host name that does not exist: waiting does not correct a typing mistake.

    It is no error if the name server does not answer: the caller waits for it as for the server.
    """
    host = urlsplit(url).hostname or ""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        if find_host_error(error) is not None:
            raise ServerUnavailable(
                f"{flag} {host}: there is no such host ({error.strerror}); check the spelling"
            ) from error


_QUICK_SECONDS = 5.0
_PAUSES_SECONDS = (0.1, 0.4, 1.0)
_RECOVERING_STATUSES = frozenset({500, 503})
"""Statuses of a server that may recover within the same publish."""
_SLOW_SECONDS = 600.0  # a broadcast of a large model, a probe on a slow machine


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """The answer of `/bridge/info`; fields that it lacks keep their defaults."""

    model: str = ""
    boot_id: str = ""
    sharing: bool = False
    policy_version: int | None = None
    highest_version: int | None = None
    """The highest version that an adapter has had there, also one that failed its proof and was removed."""
    paused: bool = False
    torn: bool = False
    lora: bool = False
    max_model_len: int = 0
    manifest_path: str | None = None
    how_to_share: str | None = None
    publishing: bool = False
    """True while a publish has begun that has neither ended nor lapsed."""
    token_path: str | None = None
    """File with the bridge token of a server without a manifest; only the server's own user can read it."""
    base_digest: str | None = None
    """Digest of the dequantised base that the server has loaded; None if its model is not one."""
    dtype: str | None = None
    """Dtype in which the server computes; None if it does not say."""
    head_dtype: str | None = None
    """Dtype in which the server's output head computes logits; None if it does not say."""
    hostname: str | None = None
    """Name of the server's machine; None if it does not say."""
    workers: int = 1
    """Number of the server's worker processes, each of which joins a broadcast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fence:
    """A publish for which the server has paused: nothing is computed until the publish is ended."""

    publish_id: str
    paused_requests: int
    generated_tokens_total: int


class ServerClient:
    """Calls to one inference server; safe to use from several threads."""

    def __init__(self, url: str, token: str | None = None, *, repeats: bool = True) -> None:
        """Keep the arguments; without `repeats`, a call whose answer is lost is repeated only once, without a wait."""
        self.patience_seconds = _SLOW_SECONDS
        """Time limit of a call whose duration depends on the weights or on running requests."""
        self._pauses = _PAUSES_SECONDS if repeats else (0.0,)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = url.rstrip("/")
        # Between publishes a connection would be idle for longer than servers keep one open, so none is kept.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=self.url, headers=headers, limits=limits, trust_env=False)

    def info(self, *, timeout_seconds: float = _QUICK_SECONDS) -> ServerInfo:
        answer = self._call("GET", "/bridge/info", timeout_seconds=timeout_seconds)
        known = {each.name: answer[each.name] for each in fields(ServerInfo) if answer.get(each.name) is not None}
        return ServerInfo(**known)

    def use_token(self, token: str) -> None:
        """Send this bridge token from here on."""
        self._http.headers["Authorization"] = f"Bearer {token}"

    def healthy(self) -> bool:
        try:
            return self._http.get("/health", timeout=_QUICK_SECONDS).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def is_there(self) -> bool:
        """Return True if an inference server has the address, even one that is still loading."""
        try:
            answer = self._http.get("/health", timeout=_QUICK_SECONDS)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            return False
        except httpx.TimeoutException:  # the connection was made: the server may be busy with its imports
            return True
        except httpx.HTTPError:
            return False
        return answer.status_code in {httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE}

    def begin_publish(
        self,
        publish_id: str,
        *,
        lease_seconds: float,
        drain_seconds: float,
        in_flight: str,
        timeout_seconds: float | None = None,
    ) -> Fence:
        """Make the server pause for the publish with this id; a repeated call is the same publish."""
        body = {"publish_id": publish_id, "lease_seconds": lease_seconds, "drain_seconds": drain_seconds}
        body |= {"in_flight": in_flight}
        answer = self._repeated("POST", "/bridge/publish/begin", body, timeout_seconds=timeout_seconds)
        return Fence(
            publish_id=publish_id,
            paused_requests=int(answer.get("paused_requests", 0)),
            generated_tokens_total=int(answer.get("generated_tokens_total", 0)),
        )

    def renew_publish(self, publish_id: str) -> None:
        self._call("POST", "/bridge/publish/renew", {"publish_id": publish_id}, timeout_seconds=_QUICK_SECONDS)

    def end_publish(self, publish_id: str, version: int, *, within_seconds: float | None = None) -> dict[str, Any]:
        """Make the server resume under this version; a repeated call gets the same answer."""
        body = {"publish_id": publish_id, "version": version}
        return self._repeated("POST", "/bridge/publish/end", body, within_seconds=within_seconds)

    def abort_publish(self, publish_id: str, *, timeout_seconds: float | None = None) -> None:
        """Make the server resume with its present weights; has no effect on a publish that is over."""
        self._repeated("POST", "/bridge/publish/abort", {"publish_id": publish_id}, timeout_seconds=timeout_seconds)

    def join_broadcast(self, group_id: str, rendezvous: Rendezvous) -> list[str | None]:
        """Make the server's workers join a group, the first as the rank that is given, the others as those after it.

        Return the UUID of each one's GPU, None without one, when all members have joined.
        """
        answer = self._repeated("POST", "/bridge/broadcast/join", {"group_id": group_id, **asdict(rendezvous)})
        return list(answer["gpus"])

    def receive_broadcast(self, transfer_id: str, buckets: Sequence[Bucket], timeout_seconds: float) -> str:
        """Make the server receive these buckets without loading them; return the checksum of the received bytes."""
        body = {"transfer_id": transfer_id, "buckets": [bucket.entries for bucket in buckets]}
        answer = self._repeated("POST", "/bridge/broadcast/receive", body, timeout_seconds=timeout_seconds)
        return str(answer["digest"])

    def load_broadcast(self, publish_id: str, version: int, transfer_id: str) -> None:
        """Load the tensors received in this transfer into the model, inside a publish, to be served as this version."""
        body = {"publish_id": publish_id, "version": version, "transfer_id": transfer_id}
        self._call("POST", "/bridge/broadcast/load", body)

    def leave_broadcast(self) -> None:
        """Make the server leave its group and discard what it has received but not loaded."""
        self._call("POST", "/bridge/broadcast/leave", timeout_seconds=_QUICK_SECONDS)

    def reload(
        self, directory: Path, version: int, *, drain_seconds: float, source: CheckpointSource | None = None
    ) -> dict[str, Any]:
        """Make the server read a checkpoint into its weights and serve it as this version.

        It downloads the checkpoint from `source` if it does not see the directory.
        """
        body: dict[str, Any] = {
            "path": str(directory.absolute()),
            "version": version,
            "drain_seconds": drain_seconds,
            "source": None if source is None else source.model_dump(),
        }
        return self._call("POST", "/bridge/reload", body)

    def checksum(self) -> str:
        """Return the checksum over the shared tensors as the server reads them now."""
        return str(self._repeated("GET", "/bridge/debug?checksum=true")["checksum"])

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._repeated("POST", "/generate", request)

    def upload_adapter(self, name: str, version: int, body: bytes, *, forward_to: Sequence[str] = ()) -> dict[str, Any]:
        """Send an adapter and make it the policy; return the loaded adapters and the checksum of the received bytes.

        The server passes it on to the servers at the addresses `forward_to`; `forwarded` in the answer has the checksum
        of each that it reached.
        """
        query = "".join(f"&forward_to={quote(url, safe='')}" for url in forward_to)
        if forward_to:  # so that this server answers before the call is given up
            query += f"&forward_seconds={min(600.0, 0.6 * self.patience_seconds)}"
        return self._repeated("POST", f"/lora/upload?name={name}&version={version}{query}", content=body)

    def check_adapter(self, name: str) -> dict[str, Any]:
        """Return an uploaded adapter's checksum and the names of its tensors that differ in the server's buffers."""
        return self._repeated("POST", "/lora/check", {"name": name})

    def activate_adapter(self, name: str) -> None:
        self._repeated("POST", "/lora/activate", {"name": name})

    def unload_adapter(self, name: str) -> None:
        """Make the server unload an adapter; one that it does not know counts as unloaded."""
        try:
            self._repeated("POST", "/lora/unload", {"name": name})
        except ServerRefused as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call any other route, for instance of a stock vLLM server."""
        return self._call(method, path, body)

    @contextmanager
    def lease(self, publish_id: str, lease_seconds: float) -> Iterator[None]:
        """Renew the publish's lease as long as the block runs, however long its copies take."""
        done = threading.Event()

        def renew() -> None:
            pause_seconds = lease_seconds / 3
            while not done.wait(pause_seconds):
                try:
                    self.renew_publish(publish_id)
                    pause_seconds = lease_seconds / 3
                except (ServerRefused, ServerUnavailable) as error:
                    # After one lost answer the lease may still be valid; if it has lapsed, ending the publish fails.
                    logger.debug("the lease of publish %s was not renewed: %s", publish_id, error)
                    pause_seconds = lease_seconds / 10

        renewer = threading.Thread(target=renew, name="publish-lease", daemon=True)
        renewer.start()
        try:
            yield
        finally:
            done.set()
            renewer.join()

    def close(self) -> None:
        self._http.close()

    def _repeated(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        content: bytes | None = None,
        timeout_seconds: float | None = None,
        within_seconds: float | None = None,
    ) -> dict[str, Any]:
        """Make an idempotent call, and repeat it if its answer was lost: the server carries it out only once.

        With `within_seconds` it is repeated for that long, and after an error from which the server may recover too.
        """
        began = time.monotonic()
        for attempt in itertools.count():
            try:
                return self._call(method, path, body, content=content, timeout_seconds=timeout_seconds)
            except (ServerUnavailable, ServerRefused) as error:
                seconds = time.monotonic() - began
                if not _is_worth_repeating(error, attempt < len(self._pauses), seconds, within_seconds):
                    raise
                logger.log(logging.DEBUG if within_seconds is None else logging.WARNING, "%s; trying again", error)
            time.sleep(
                _PAUSES_SECONDS[min(attempt, len(_PAUSES_SECONDS) - 1)] if within_seconds else self._pauses[attempt]
            )
        raise AssertionError("unreachable")

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        content: bytes | None = None,
        timeout_seconds: float | None = None,
    ) -> dict[str, Any]:
        limit = self.patience_seconds if timeout_seconds is None else timeout_seconds
        timeout = httpx.Timeout(limit, connect=min(limit, _QUICK_SECONDS))
        try:
            response = self._http.request(method, path, json=body, content=content, timeout=timeout)
        except httpx.HTTPError as error:
            raise ServerUnavailable(
                f"the vLLM server at {self.url} does not answer {path}: {_reason(error)}"
            ) from error
        if response.is_error:
            raise _refusal(self.url, path.partition("?")[0], response)
        try:
            answer = response.json()
        except ValueError:  # some of vLLM's own routes answer with plain text
            return {}
        return answer if isinstance(answer, dict) else {}


def _is_worth_repeating(
    error: ServerUnavailable | ServerRefused, has_attempts: bool, seconds: float, within_seconds: float | None
) -> bool:
    if within_seconds is not None:
        lasts = isinstance(error, ServerRefused) and error.status not in _RECOVERING_STATUSES
        return not lasts and seconds <= within_seconds
    # After a longer time the call has timed out: its answer was not just lost.
    return isinstance(error, ServerUnavailable) and has_attempts and seconds < _QUICK_SECONDS


def _refusal(url: str, path: str, response: httpx.Response) -> ServerRefused:
    kind, reason = _problem_of(response)
    message = f"the vLLM server at {url} refused {path} ({response.status_code}): {reason}"
    after = response.headers.get("Retry-After", "")
    seconds = float(after) if after.isdigit() else None
    return ServerRefused(message, response.status_code, kind=kind, retry_after_seconds=seconds)


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _problem_of(response: httpx.Response) -> tuple[str, str]:
    """Return the last part of a problem's type, and its detail; for any other answer, "" and its beginning."""
    try:
        problem = response.json()
    except ValueError:
        return "", response.text[:200].strip() or "no reason given"
    if not isinstance(problem, dict):
        return "", str(problem)[:200]
    detail = str(problem.get("detail") or problem.get("title") or problem)[:500]
    return str(problem.get("type", "")).rpartition(":")[2], detail
