"""Mode `shared_vllm`: one copy of the served weights, written by the trainer into memory that vLLM reads.

A publish: the server holds back new requests and lets running ones end or pause (the fence, `OpenPublish`, under a
lease that the trainer renews); the trainer marks the header as being written, casts the masters into the shared
tensors, marks the header as complete and sends the version to the server, which then resumes. If the trainer is killed
in between, the header shows it, and the server answers nothing until a publish has completed. A server that restarts
has another boot id and no version: the bridge attaches to its new tensors and publishes the masters again.

Without masters (`--master-weights none`) the optimizer writes the shared tensors themselves. Then a publish begins with
the step: the fence is set and the header marked before the first weight changes, and `publish` gives the written
weights their version. From prepare() on there is no other copy of the weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from example_trainer.errors import CannotShare, PublishFailed, ServerRefused, ServerUnavailable
from example_trainer.model import load_policy
from example_trainer.modeling.loading import policy_options
from example_trainer.modeling.policy import Policy
from example_trainer.options.training_options import TrainingOptions
from example_trainer.weight_protocol.client import ShouldStop, never
from example_trainer.weight_protocol.manifest import given_token
from example_trainer.weight_protocol.shm_header import WriteRefused
from example_trainer.weights.attachment import Attachment, attach
from example_trainer.weights.base import Cost, PublishReport, WeightBridge
from example_trainer.weights.connection import warn_of_rounding_head
from example_trainer.weights.publish_loop import OpenPublish, ParityCheck, SyncBudget, is_lasting, publish_with_retries

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0


class _AttachedPublish(OpenPublish):
    """A publish to the server process whose tensors are attached."""

    def __init__(self, attachment: Attachment, **settings: Any) -> None:
        self.attachment = attachment
        super().__init__(attachment.client, **settings)


@dataclass(slots=True)
class _Written:
    """The server process and the publish to which an attempt has written all weights: the next need not write again."""

    boot_id: str = ""
    publish_id: str = ""


class SharedVllmBridge(WeightBridge):
    """Implements `WeightBridge` over tensors shared with a vLLM server on this machine."""

    def __init__(
        self, config: TrainingOptions, *, lease_seconds: float = LEASE_SECONDS, should_stop: ShouldStop = never
    ) -> None:
        """Keep the arguments; waits for the server end once `should_stop` returns True."""
        self._config = config
        self._lease_seconds = lease_seconds
        self._should_stop = should_stop
        self._budget = SyncBudget.from_config(config)
        self._check = ParityCheck(every=config.sync_check_every)
        self._publishing = threading.Lock()
        self._attached: Attachment | None = None
        self._open: _AttachedPublish | None = None
        """The publish that a change of the served tensors has begun and that `publish` will end."""
        self._policy: Policy | None = None

    def prepare(self) -> Policy:
        """Wait for the server, load the policy and map its parameters onto the shared tensors."""
        attachment = self._attach()
        options = policy_options(self._config)
        device = _device(attachment, options.device)
        from_masters = self._config.forwards_from_masters
        dtype = attachment.manifest.dtype.removeprefix("torch.")
        if options.dtype not in ("auto", dtype):
            logger.warning(
                "the vLLM server at %s serves %s, so that is trained, not --dtype %s; to train in yours, start the "
                "server with it",
                attachment.client.url,
                dtype,
                options.dtype,
            )
        served = replace(options, dtype=dtype, device=device)
        if attachment.device.type == "cuda":
            # Otherwise GPU 0 stays the current device: a context would take memory there, and kernels would be launched
            # on the wrong GPU.
            torch.cuda.set_device(attachment.device)
        policy = load_policy(served, forwards_from_masters=from_masters)
        warn_of_rounding_head(attachment.client.url, attachment.info.head_dtype, policy)
        attachment.bind(policy, forwards_from_masters=from_masters)
        self._policy, self._attached = policy, attachment
        if policy.steps_served:
            policy.changing = self._changing
            if not policy.is_served:  # the server has other weights than the configured model
                with policy.changing():
                    policy.write_served()
        return policy

    def publish(self, version: int) -> PublishReport:
        """Write the masters into the shared tensors under a fence; see the module's docstring."""
        with self._publishing:
            failed = f"version {version} was not published"
            report = publish_with_retries(
                partial(self._publish_once, version, _Written()), failed, also=(WriteRefused,)
            )
        self._budget.note(report)
        return report

    def highest_version(self) -> int:
        if self._attached is None:
            return 0
        state = self._attached.header.state()
        return max(0, state.write_begin, state.write_end)

    def should_publish(self, steps_since_publish: int) -> bool:
        """Return True at each step if the forward reads the served tensors, else as the budget allows."""
        if not self._config.forwards_from_masters:
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
        if self._open is not None:  # not published: its lease lapses and the torn header keeps the server from serving
            self._open.close()
            self._open = None
        if self._attached is not None:
            self._attached.close()
            self._attached = None

    def _attach(self) -> Attachment:
        config = self._config
        return attach(
            config.vllm_url,
            manifest_flag=config.vllm_config_path,
            port_is_given=config.vllm_port_is_given,
            token=given_token(config.bridge_token, {}),
            timeout_seconds=config.wait_timeout,
            should_stop=self._should_stop,
        )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Run a change of served tensors (there are no masters) inside a publish; begin one if none is open."""
        with self._publishing:
            if self._open is None:
                self._open = publish_with_retries(
                    self._begin_write, "the served weights cannot be changed", also=(WriteRefused,)
                )
            yield

    def _begin(self) -> _AttachedPublish:
        attachment = self._current_attachment()
        attachment.check_untouched()
        return _AttachedPublish(
            attachment,
            lease_seconds=self._lease_seconds,
            drain_seconds=self._config.drain_seconds,
            in_flight=self._config.in_flight,
            should_stop=self._should_stop,
        )

    def _begin_write(self) -> _AttachedPublish:
        """Begin a publish whose version is not known yet; until it is, the header names the next one."""
        opened = self._begin()
        try:
            opened.attachment.header.begin_write(self.highest_version() + 1)
        except BaseException:
            opened.abort()
            raise
        return opened

    def _publish_once(self, version: int, written: _Written) -> PublishReport:
        report = self._end_again(version, written)
        if report is None:
            opened, self._open = self._open or self._begin(), None
            with opened:
                self._write(opened, version, written)
                cost = Cost()
                cost.note(opened.attachment, opened.fence, opened.end(version))
                report = cost.report(version, time.monotonic() - opened.began)
        assert self._attached is not None
        self._verify(self._attached, version)
        return report

    def _end_again(self, version: int, written: _Written) -> PublishReport | None:
        """Return a report if an earlier attempt wrote all weights and its publish has ended or can end, else None."""
        if not written.publish_id:
            return None
        attachment = self._current_attachment()
        if attachment.boot_id != written.boot_id:
            return None
        try:
            attachment.client.end_publish(written.publish_id, version)
        except ServerRefused as error:
            if error.kind != "publish-lapsed":
                raise
            return None
        return PublishReport(version=version, seconds=0.0)

    def _write(self, opened: _AttachedPublish, version: int, written: _Written) -> None:
        """Cast the masters into the shared tensors, between the header's two stamps."""
        assert self._policy is not None
        attachment = opened.attachment
        state = attachment.header.state()
        if written.boot_id != attachment.boot_id or state.version != version or state.torn:
            try:
                _begin_write(attachment, version)
                self._policy.write_served()
                attachment.segment.synchronise()
                attachment.header.end_write(version)
            except BaseException:
                opened.abort()
                raise
        written.boot_id, written.publish_id = attachment.boot_id, opened.publish_id

    def _verify(self, attachment: Attachment, version: int) -> None:
        """Check the first publish to each server process, and later ones as often as `--sync-check` says."""
        due = self._check.is_due()
        if attachment.boot_id in self._check.proven and not due:
            return
        assert self._policy is not None
        if due:
            attachment.check_memory()
        self._check.run(
            self._policy,
            attachment.client.generate,
            version=version,
            boot_id=attachment.boot_id,
            max_model_len=attachment.info.max_model_len,
        )

    def _current_attachment(self) -> Attachment:
        """Return the attachment to the server process that runs now; attach again after a restart."""
        current = self._attached
        if self._policy is None or current is None:
            raise PublishFailed("nothing is attached; call prepare() before publish()")
        try:
            if current.client.info().boot_id == current.boot_id:
                return current
        except (ServerUnavailable, ServerRefused) as error:
            if is_lasting(error):
                raise
            logger.warning("%s; waiting for it to come back", error)
        attachment = self._attach()
        if attachment.boot_id == current.boot_id:
            attachment.close()
            return current
        if attachment.info.model != current.info.model:
            raise CannotShare(f"the server now serves {attachment.info.model}; start it with {current.info.model}")
        if self._policy.steps_served and attachment.device.type == "cuda":
            raise PublishFailed(
                "the vLLM server has restarted, and with --master-weights none the weights existed only in its memory; "
                "continue from the last checkpoint with --resume auto"
            )
        logger.warning("the vLLM server has restarted (boot %s); attached again", attachment.boot_id)
        attachment.bind(self._policy, forwards_from_masters=self._config.forwards_from_masters)
        self._attached = attachment
        current.close()
        return attachment


def _begin_write(attachment: Attachment, version: int) -> None:
    try:
        attachment.header.begin_write(version)
    except ValueError as error:
        raise PublishFailed(str(error)) from error


def _device(attachment: Attachment, wanted: str) -> str:
    """Return the device of the shared tensors, which is where the forward has to run."""
    device = attachment.device
    if wanted != "auto" and torch.device(wanted).type != device.type:
        raise CannotShare(f"--device {wanted}: the server's weights are on {device}; use --device auto")
    return str(device)
