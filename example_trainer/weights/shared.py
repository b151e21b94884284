"""`shared_vllm`: one copy of the served weights, written by the trainer where vLLM reads them.

A publish is: ask the server to hold new requests and let running ones end or pause (the fence); mark
the header as being written; cast the masters into the shared tensors; mark the header as complete;
tell the server the version, upon which it goes on. A trainer that dies on the way leaves a header
that says so, and the server answers nothing until a whole publish has been made. A server that
restarts comes back with another boot id and without a version: the bridge attaches to its new
tensors and publishes the masters again.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from example_trainer.errors import PublishFailed
from example_trainer.model import Policy, PolicyOptions, load_policy
from example_trainer.weights.attachment import Attachment, attach
from example_trainer.weights.bridge import PublishReport, WeightBridge
from example_trainer.weights.budget import SyncBudget
from example_trainer.weights.errors import CannotShare, ServerRefused, ServerUnavailable
from example_trainer.weights.proof import Difference, prove
from example_trainer.weights.server_client import Fence, ServerClient
from example_trainer.weights.sync_check import SyncCheck
from example_trainer.weights.versions import WriteRefused

logger = logging.getLogger(__name__)

_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedOptions:
    """What of the trainer's configuration concerns the shared bridge."""

    policy: PolicyOptions
    server_url: str
    manifest_path: str = "auto"
    bridge_token: str | None = None
    wait_timeout_seconds: float = 600.0
    forwards_from_masters: bool = False
    drain_seconds: float = 0.5
    in_flight: Literal["drain", "recompute", "finish", "keep_kv"] = "drain"
    lease_seconds: float = 30.0
    sync_budget: float = 0.2
    max_staleness: int | None = None
    sync_check_every: int = 0


class SharedVllmBridge(WeightBridge):
    """Implements `WeightBridge` over tensors shared with a vLLM server on this machine."""

    def __init__(self, options: SharedOptions) -> None:
        _refuse_master_weights(options)
        self._options = options
        self._budget = SyncBudget(options.sync_budget, most_steps=options.max_staleness)
        self._check = SyncCheck(every=options.sync_check_every)
        self._publishing = threading.Lock()
        self._attached: Attachment | None = None
        self._policy: Policy | None = None
        self._limit: Difference | None = None

    def prepare(self) -> Policy:
        """Wait for the server, load the policy and hang it onto the shared tensors."""
        attachment = self._attach()
        options = self._options.policy
        device = _device(attachment, options.device)
        from_masters = self._options.forwards_from_masters
        served = replace(options, dtype=attachment.manifest.dtype.removeprefix("torch."), device=device)
        policy = load_policy(served, forwards_from_masters=from_masters)
        attachment.hang(policy, forwards_from_masters=from_masters)
        self._policy, self._attached = policy, attachment
        return policy

    def publish(self, version: int) -> PublishReport:
        """Write the masters into the shared tensors under a fence; see the module's docstring."""
        with self._publishing:
            report = self._publish_with_retries(version)
        self._budget.note(report)
        return report

    def highest_version(self) -> int:
        if self._attached is None:
            return 0
        state = self._attached.header.state()
        return max(0, state.write_begin, state.write_end)

    def should_publish(self, steps_since_publish: int) -> bool:
        """Each step when the forward reads the served tensors, else as the budget allows."""
        if not self._options.forwards_from_masters:
            return steps_since_publish > 0
        return self._budget.allows(steps_since_publish)

    def needs_publish(self) -> bool:
        if self._attached is None or self._publishing.locked():
            return False
        try:
            info = self._attached.client.info()
        except (ServerUnavailable, ServerRefused):
            return False
        return info.boot_id != self._attached.boot_id or info.policy_version is None or info.torn

    def close(self) -> None:
        if self._attached is not None:
            self._attached.close()
            self._attached = None

    def _attach(self) -> Attachment:
        options = self._options
        return attach(
            options.server_url,
            manifest_flag=options.manifest_path,
            token=options.bridge_token,
            timeout_seconds=options.wait_timeout_seconds,
        )

    def _publish_with_retries(self, version: int) -> PublishReport:
        """A server that restarts in the middle gets the same masters once it is back."""
        for attempt in range(_ATTEMPTS):
            try:
                return self._publish_once(version)
            except (ServerUnavailable, ServerRefused, WriteRefused) as error:
                lasting = isinstance(error, ServerRefused) and error.status not in {404, 409, 410, 503}
                if lasting or attempt == _ATTEMPTS - 1:
                    raise PublishFailed(f"version {version} was not published: {error}") from error
                logger.warning("publish of version %d is tried again: %s", version, error)
        raise AssertionError("unreachable")

    def _publish_once(self, version: int) -> PublishReport:
        started = time.monotonic()
        attachment = self._current_attachment()
        client = attachment.client
        fence = client.begin_publish(
            lease_seconds=self._options.lease_seconds,
            drain_seconds=self._options.drain_seconds,
            in_flight=self._options.in_flight,
        )
        with client.lease(fence.publish_id, self._options.lease_seconds):
            self._write(attachment, version, fence)
        ended = _end(client, fence.publish_id, version)
        report = PublishReport(
            version=version,
            seconds=time.monotonic() - started,
            fence_seconds=float(ended.get("fence_seconds", 0.0)),
            recomputed_tokens=int(ended.get("recomputed_tokens", 0)),
            generated_tokens=max(0, fence.generated_tokens_total - attachment.generated_tokens_total),
            paused_requests=fence.paused_requests,
        )
        attachment.generated_tokens_total = fence.generated_tokens_total
        self._verify(attachment, version)
        return report

    def _write(self, attachment: Attachment, version: int, fence: Fence) -> None:
        """Cast the masters into the shared tensors, between the header's two stamps."""
        assert self._policy is not None
        state = attachment.header.state()
        if state.version == version and not state.torn:
            return  # written by an attempt whose last answer was lost
        try:
            attachment.header.begin_write(version)
        except ValueError as error:
            attachment.client.abort_publish(fence.publish_id)
            raise PublishFailed(str(error)) from error
        with torch.no_grad():
            for name, master in self._policy.masters.items():
                self._policy.served[name].copy_(master, non_blocking=True)
        attachment.segment.synchronise()
        attachment.header.end_write(version)

    def _verify(self, attachment: Attachment, version: int) -> None:
        """Prove the first publish to each start of the server, and as often as asked from then on."""
        due = self._check.is_due()
        if attachment.proven and not due:
            return
        assert self._policy is not None
        if due:
            attachment.check_memory()
        agreement = prove(
            self._policy,
            attachment.client.generate,
            version=version,
            boot_id=attachment.boot_id,
            max_model_len=attachment.info.max_model_len,
            limit=self._limit,
        )
        self._limit = agreement.limit
        attachment.proven = True

    def _current_attachment(self) -> Attachment:
        """The attachment to the server as it runs now, made anew after a restart."""
        current = self._attached
        if self._policy is None or current is None:
            raise PublishFailed("nothing is attached; call prepare() before publish()")
        try:
            if current.client.info().boot_id == current.boot_id:
                return current
        except ServerUnavailable as error:
            logger.warning("%s; waiting for it to come back", error)
        attachment = self._attach()
        if attachment.boot_id == current.boot_id:
            attachment.close()
            return current
        if attachment.info.model != current.info.model:
            raise CannotShare(f"the server came back with {attachment.info.model} in place of {current.info.model}")
        logger.warning("the vLLM server has restarted (boot %s); attached again", attachment.boot_id)
        attachment.hang(self._policy, forwards_from_masters=self._options.forwards_from_masters)
        self._attached = attachment
        current.close()
        return attachment


def _end(client: ServerClient, publish_id: str, version: int) -> dict[str, Any]:
    try:
        return client.end_publish(publish_id, version)
    except ServerUnavailable:  # perhaps only the answer was lost: repeated, it is the same
        return client.end_publish(publish_id, version)


def _refuse_master_weights(options: SharedOptions) -> None:
    if options.policy.master_weights == "none":
        raise CannotShare(
            "--master-weights none is not available with shared_vllm yet: the optimizer would write weights that "
            "are being read; use --master-weights fp32 or host"
        )
    if options.policy.master_weights == "host" and options.forwards_from_masters:
        raise CannotShare(
            "--master-weights host keeps the masters in host memory, where no forward runs; "
            "use --forward-weights views, or --master-weights fp32"
        )


def _device(attachment: Attachment, wanted: str) -> str:
    """The device of the shared tensors, which is where the forward has to run."""
    device = attachment.device
    if wanted != "auto" and torch.device(wanted).type != device.type:
        raise CannotShare(f"--device {wanted}: the server's weights lie on {device}; use --device auto")
    return str(device)
