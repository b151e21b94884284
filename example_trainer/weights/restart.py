"""Modes `none` and `lora_restart`: new weights reach the server by files and a restart of the server.

This is the simplest bridge: two copies of the weights, no shared memory, any device. The trainer starts the server
itself; every `--vllm-restart-interval` steps it writes the weights as a Hugging Face checkpoint (`lora_restart`: the
adapter, as PEFT writes it) and replaces the server by one that has loaded them. A version belongs to one server
process, so each request has exactly one. Clients see no interruption: the new server takes over their connections
(`serving.handover`). With `--standby-server` the next server's process is started right after a publish and has
imported everything when the next publish needs it.

A checkpoint has its version in its name and is served through a link of constant name, which is moved once the
checkpoint is complete; older ones are removed only after that, so the link always leads to a complete one.

With `--restart-method reload` a running server reads the checkpoint into its weights, under the fence of a publish; if
that fails the server is restarted, because the state of its weights is unknown. The first checkpoint that each
server reads in this way is proven.
"""

from __future__ import annotations

import logging
import shutil
import time
from contextlib import closing
from pathlib import Path

from atropos_api.common.errors import REFUSED
from example_trainer.errors import PublishFailed, ServerExited, ServerRefused, ServerUnavailable, WaitTimedOut
from example_trainer.model import load_policy
from example_trainer.modeling.loading import policy_options
from example_trainer.modeling.policy import Policy
from example_trainer.options.training_options import TrainingOptions
from example_trainer.vllm_manager import VllmManager, VllmOptions
from example_trainer.weight_protocol.base_record import BASE_DIRECTORY
from example_trainer.weight_protocol.client import ServerClient, ServerInfo, ShouldStop, never
from example_trainer.weight_protocol.transfer import AdapterPayload
from example_trainer.weights.adapter_target import write_adapter
from example_trainer.weights.base import PublishReport, WeightBridge
from example_trainer.weights.connection import check_server
from example_trainer.weights.publish_loop import ATTEMPTS, FIRST_PAUSE_SECONDS, ParityCheck
from example_trainer.weights.served_model import (
    ServedBase,
    fitted,
    link_served,
    own_server,
    prepare_base,
    whole_policy,
    write_served_checkpoint,
)

logger = logging.getLogger(__name__)


class RestartBridge(WeightBridge):
    """Implements `WeightBridge` by restarting a vLLM server of its own on new weights."""

    def __init__(
        self, config: TrainingOptions, vllm: VllmOptions | None = None, *, should_stop: ShouldStop = never
    ) -> None:
        """Keep the arguments; `vllm` are the server's options in place of the configuration's.

        Waits for a server end once `should_stop` returns True.
        """
        self._config = config
        self._should_stop = should_stop
        self._options = policy_options(config)
        self._vllm = vllm or own_server(config)
        self._weights_dir = config.required_run_dir / "served"
        """The directory to which the served checkpoints are written; the last one is kept."""
        self._policy: Policy | None = None
        self._manager: VllmManager | None = None
        self._base = ServedBase(config.model_name)
        self._version = 0
        self._check = ParityCheck(every=config.sync_check_every)
        self._proven = False
        self._has_reloaded = False
        """True if the present server has read a checkpoint into its weights."""
        self._has_recommended = False

    def prepare(self) -> Policy:
        policy = load_policy(self._options)
        self._policy = policy
        self._manager = VllmManager(fitted(self._vllm, policy), should_stop=self._should_stop)
        return policy

    def publish(self, version: int) -> PublishReport:
        """Write the masters in the served dtype and have them served; see the module's docstring."""
        if self._policy is None or self._manager is None:
            raise PublishFailed("nothing is loaded; call prepare() before publish()")
        started = time.monotonic()
        directory = self._write(self._policy, version)
        try:
            info, gap_seconds = self._serve_again_if_killed(self._manager, directory, version)
        except (ServerExited, WaitTimedOut, ServerUnavailable) as error:
            raise PublishFailed(f"version {version} is not served: {error}") from error
        if not self._version:
            check_server(self._manager.url, info.dtype, info.head_dtype, self._policy)
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
        self._manager.prepare_standby()
        self._remove_all_but(directory)
        return report

    def highest_version(self) -> int:
        return self._version

    def should_publish(self, steps_since_publish: int) -> bool:
        return steps_since_publish >= self._config.vllm_restart_interval

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
        directory = self._weights_dir / f"policy-v{version}"
        if policy.has_adapter:
            return write_adapter(
                AdapterPayload.write(policy.adapter_tensors(policy.dtype), policy.adapter_config()), directory
            )
        return write_served_checkpoint(policy, directory)

    def _serve_again_if_killed(self, manager: VllmManager, directory: Path, version: int) -> tuple[ServerInfo, float]:
        """Call `_serve`, and again if the new server exits before it serves and another start may succeed."""
        for number in range(ATTEMPTS):
            try:
                return self._serve(manager, directory, version)
            except ServerExited as error:
                if number == ATTEMPTS - 1 or not self._may_start(error.exit_code):
                    raise
                logger.warning("the server is started again: %s", error)
                time.sleep(FIRST_PAUSE_SECONDS * 2**number)
        raise AssertionError("the last attempt returns or raises")

    def _may_start(self, exit_code: int | None) -> bool:
        """Return True if another start of an exited server may succeed: it or its engine was killed, or its settings
        have worked.
        """
        if exit_code is None or exit_code == REFUSED:
            return False
        return exit_code < 0 or exit_code > 128 or bool(self._version)

    def _serve(self, manager: VllmManager, directory: Path, version: int) -> tuple[ServerInfo, float]:
        """Have the directory served; return the serving process's info and the seconds in which no server answered."""
        adapts = self._policy is not None and self._policy.has_adapter
        model: str | Path = directory if adapts else link_served(directory)
        if self._config.restart_method == "reload" and manager.running:
            try:
                served = self._reload(manager, directory, version)
            except (ServerRefused, ServerUnavailable) as error:
                logger.warning("the server could not read the new weights in place and is restarted: %s", error)
            else:
                # A reload is other code of vLLM's than the start, and may leave out a step of it: 0.32 left experts
                # unpacked, which it packs for a CPU at the start, and computed with them as if they were packed.
                self._proven, self._has_reloaded = self._proven and self._has_reloaded, True
                return served
        adapter: Path | None = None
        if self._policy is not None and self._policy.has_adapter:
            if self._options.quantises_base and self._base.digest is None:
                self._base = prepare_base(self._policy, self._config.required_run_dir / BASE_DIRECTORY)
            model, adapter = self._base.model, directory
        was_running, self._has_reloaded = manager.running, False
        replacement = manager.replace(model, version=version, adapter=adapter)
        if was_running and not replacement.overlapped:
            self._recommend_another_way(replacement.gap_seconds)
        return replacement.info, replacement.gap_seconds if self._version else 0.0

    def _recommend_another_way(self, gap_seconds: float) -> None:
        """Say once how to publish without a gap: on one GPU, trainer and two servers rarely fit."""
        if self._config.restart_method == "reload" or self._has_recommended:
            return
        self._has_recommended = True
        way = (
            "--weight-bridge-mode lora_only sends adapters to a running server"
            if self._config.trains_adapter
            else "--restart-method reload reads each version into the running server"
        )
        logger.warning("no server answered for %.1f s, as two of them do not fit here; %s", gap_seconds, way)

    def _reload(self, manager: VllmManager, directory: Path, version: int) -> tuple[ServerInfo, float]:
        with closing(ServerClient(manager.url, manager.token)) as client:
            try:
                answer = client.reload(directory, version, drain_seconds=self._vllm.drain_seconds)
            except ServerUnavailable:
                if (info := client.info()).policy_version != version:
                    raise
                return info, 0.0  # the answer was lost
            return client.info(), float(answer["fence_seconds"])

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
        with closing(ServerClient(self._manager.url, self._manager.token)) as client:
            self._check.run(
                whole_policy(self._policy, self._options, directory),
                client.generate,
                version=version,
                boot_id=info.boot_id,
                max_model_len=info.max_model_len,
            )

    def _remove_all_but(self, kept: Path) -> None:
        """Remove the previously served directories and the partial ones that a killed trainer left."""
        served = self._weights_dir
        for path in (*served.glob("policy-v*"), *served.glob(".policy-v*.part")):
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)
