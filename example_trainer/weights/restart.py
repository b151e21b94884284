"""Modes `none` and `lora_restart`: new weights reach the server by files and a restart of the server.

This is the simplest bridge: two copies of the weights, no shared memory, any device. The trainer starts the server
itself; every `--vllm-restart-interval` steps it writes the weights as a Hugging Face checkpoint (`lora_restart`: the
adapter, as PEFT writes it) and replaces the server by one that has loaded them. A version belongs to one server
process, so each request has exactly one. Clients see no interruption: the new server takes over their connections
(`serving.handover`).

With `--restart-method reload` a running server reads the checkpoint into its weights, under the fence of a publish; if
that fails the server is restarted, because the state of its weights is unknown.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from example_trainer.errors import PublishFailed, ServerExited, ServerRefused, ServerUnavailable, WaitTimedOut
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.policy import Policy
from example_trainer.vllm_manager import VllmManager, VllmOptions
from example_trainer.weight_protocol.base_record import BASE_DIRECTORY
from example_trainer.weight_protocol.client import ServerClient, ServerInfo
from example_trainer.weight_protocol.transfer import AdapterPayload
from example_trainer.weights.adapter_target import write_adapter
from example_trainer.weights.base import PublishReport, WeightBridge
from example_trainer.weights.publish_loop import ParityCheck, refuse_other_dtype
from example_trainer.weights.served_model import ServedBase, fitted, prepare_base, write_served_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartOptions:
    """The part of the trainer's configuration that concerns the restart bridge."""

    policy: PolicyOptions
    vllm: VllmOptions
    weights_dir: Path
    """Directory to which the served checkpoints are written; the last one is kept."""
    base_dir: Path = BASE_DIRECTORY
    """Directory to which the values of a quantised base are written."""
    restart_interval: int = 3
    method: Literal["restart", "reload"] = "restart"
    adapter_arguments: Sequence[str] = ()
    """Extra arguments for starting a server of adapters."""
    sync_check_every: int | None = 0


class RestartBridge(WeightBridge):
    """Implements `WeightBridge` by restarting a vLLM server of its own on new weights."""

    def __init__(self, options: RestartOptions) -> None:
        self._options = options
        self._policy: Policy | None = None
        self._manager: VllmManager | None = None
        self._base = ServedBase(options.policy.model_name)
        self._version = 0
        self._check = ParityCheck(every=options.sync_check_every)
        self._proven = False

    def prepare(self) -> Policy:
        policy = load_policy(self._options.policy)
        self._policy, self._manager = policy, VllmManager(fitted(self._options.vllm, policy))
        return policy

    def publish(self, version: int) -> PublishReport:
        """Write the masters in the served dtype and have them served; see the module's docstring."""
        if self._policy is None or self._manager is None:
            raise PublishFailed("nothing is loaded; call prepare() before publish()")
        started = time.monotonic()
        directory = self._write(self._policy, version)
        try:
            info, gap_seconds = self._serve(self._manager, directory, version)
        except (ServerExited, WaitTimedOut, ServerUnavailable) as error:
            raise PublishFailed(f"version {version} is not served: {error}") from error
        refuse_other_dtype(self._manager.url, info.dtype, self._policy)
        report = PublishReport(version=version, seconds=time.monotonic() - started, fence_seconds=gap_seconds)
        logger.info(
            "version %d is served after %.1f s; requests waited for %.1f s of them",
            version,
            report.seconds,
            gap_seconds,
        )
        if self._check.is_due() or not self._proven:
            self._prove_or_put_off(info, version, directory)
        self._version = version
        self._remove_all_but(directory)
        return report

    def highest_version(self) -> int:
        return self._version

    def should_publish(self, steps_since_publish: int) -> bool:
        return steps_since_publish >= self._options.restart_interval

    def needs_publish(self) -> bool:
        """Return True after the server has exited by itself, so that the run continues with a new one."""
        if self._manager is None or not self._version or self._manager.running:
            return False
        logger.warning("vLLM has exited; its last lines:\n%s", self._manager.log_tail())
        return True

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _write(self, policy: Policy, version: int) -> Path:
        directory = self._options.weights_dir / f"policy-v{version}"
        if policy.has_adapter:
            return write_adapter(
                AdapterPayload.write(policy.adapter_tensors(policy.dtype), policy.adapter_config()), directory
            )
        return write_served_checkpoint(policy, directory)

    def _serve(self, manager: VllmManager, directory: Path, version: int) -> tuple[ServerInfo, float]:
        """Have the directory served; return the serving process's info and the seconds in which no server answered."""
        if self._options.method == "reload" and manager.running:
            try:
                return self._reload(manager, directory, version)
            except (ServerRefused, ServerUnavailable) as error:
                logger.warning("the server could not read the new weights in place and is restarted: %s", error)
        model: str | Path = directory
        arguments: Sequence[str] = ()
        if self._policy is not None and self._policy.has_adapter:
            if self._options.policy.quantises_base and self._base.digest is None:
                self._base = prepare_base(self._policy, self._options.base_dir)
            model = self._base.model
            arguments = (*self._options.adapter_arguments, "--adapter", str(directory))
        replacement = manager.replace(model, version=version, arguments=arguments)
        return replacement.info, replacement.gap_seconds if self._version else 0.0

    def _reload(self, manager: VllmManager, directory: Path, version: int) -> tuple[ServerInfo, float]:
        client = ServerClient(manager.url, manager.token)
        try:
            answer = client.reload(directory, version, drain_seconds=self._options.vllm.drain_seconds)
        except ServerUnavailable:
            if (info := client.info()).policy_version != version:
                raise
            return info, 0.0  # the answer was lost
        else:
            return client.info(), float(answer["fence_seconds"])
        finally:
            client.close()

    def _prove_or_put_off(self, info: ServerInfo, version: int, directory: Path) -> None:
        """Run the parity check; if the server exits meanwhile (`needs_publish` notices), the next one is checked."""
        self._proven = False
        try:
            self._prove(info, version, directory)
        except (ServerRefused, ServerUnavailable) as error:
            logger.warning("version %d could not be proven: %s", version, error)
        else:
            self._proven = True

    def _prove(self, info: ServerInfo, version: int, directory: Path) -> None:
        assert self._policy is not None
        assert self._manager is not None
        client = ServerClient(self._manager.url, self._manager.token)
        try:
            self._check.run(
                self._whole_policy(directory),
                client.generate,
                version=version,
                boot_id=info.boot_id,
                max_model_len=info.max_model_len,
            )
        finally:
            client.close()

    def _whole_policy(self, directory: Path) -> Policy:
        """Return the policy, or load the checkpoint just written if it is sharded: a forward would need all ranks."""
        assert self._policy is not None
        if not self._policy.is_sharded:
            return self._policy
        return load_policy(replace(self._options.policy, model_name=str(directory), sharding=None))

    def _remove_all_but(self, kept: Path) -> None:
        """Remove the previously served directories and the partial ones that a killed trainer left."""
        served = self._options.weights_dir
        for path in (*served.glob("policy-v*"), *served.glob(".policy-v*.part")):
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)
