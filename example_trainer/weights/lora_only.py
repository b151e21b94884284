"""Mode `lora_only`: a new adapter is sent to a running server, which continues decoding meanwhile.

The adapter's tensors are sent as one safetensors body into the server's memory; from the server's answer on, requests
under the model's name start with the new adapter, and those already running end with theirs. There is no fence, no
file, no restart and no `--enforce-eager`. If an adapter is rejected, the old one stays served. A server that answers at
`--vllm-port` is used, unless it has another base (`weights.served_model`); otherwise the trainer starts one, and
restarts it if it exits. The requests are in `weights.adapter_target`; a stock vLLM server takes its adapters
from files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

from example_trainer.errors import CannotSwap, ProofFailed, PublishFailed, ServerRefused, ServerUnavailable
from example_trainer.model import load_policy
from example_trainer.modeling.loading import name_of, policy_options, served_dtype_of, stored_config
from example_trainer.modeling.policy import Policy
from example_trainer.options.publish import served_rank, versions_kept
from example_trainer.options.training_options import TrainingOptions
from example_trainer.vllm_manager import VllmManager, VllmOptions
from example_trainer.weight_protocol.base_record import BASE_DIRECTORY
from example_trainer.weight_protocol.client import ServerClient, ServerInfo, ShouldStop, check_host, never
from example_trainer.weight_protocol.transfer import AdapterPayload
from example_trainer.weights.adapter_target import AdapterServer, AtroposServer, StockServer
from example_trainer.weights.base import PublishReport, WeightBridge
from example_trainer.weights.connection import check_server, connect_server, named_token, until_it_answers
from example_trainer.weights.publish_loop import (
    CHECKED_SHARE,
    ParityCheck,
    is_lasting,
    publish_with_retries,
)
from example_trainer.weights.served_model import ServedBase, fitted, own_server, prepare_base

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LoraOnlyBridge(WeightBridge):
    """Implements `WeightBridge` by sending adapters to a running vLLM server."""

    def __init__(
        self,
        config: TrainingOptions,
        url: str | None = None,
        adapters_dir: Path | None = None,
        *,
        vllm: VllmOptions | None = None,
        should_stop: ShouldStop = never,
    ) -> None:
        """Keep the arguments; by default the server is the configured one.

        `adapters_dir` is the directory to which adapters are written for a server that only takes files. `vllm`
        are the options of the trainer's own server in place of the configuration's. Waits for the server end once
        `should_stop` returns True.
        """
        self._config = config
        self._should_stop = should_stop
        self._options = policy_options(config)
        self._url = url or config.server_urls[0]
        self._adapters_dir = adapters_dir
        self._vllm = vllm or (own_server(config) if config.may_start_server else None)
        """Options to start a server with if none answers; None: wait for one."""
        self._policy: Policy | None = None
        self._server: AdapterServer | None = None
        self._manager: VllmManager | None = None
        self.base = ServedBase(config.model_name)
        """The base that the server has to compute with."""
        self._boot_id: str | None = None
        # The checks of all servers together take as much time as those of one would.
        share = CHECKED_SHARE / len(config.server_urls)
        self._check = ParityCheck(every=config.sync_check_every, share=share)
        self._good_version: int | None = None
        """The last version whose publish passed its check, or needed none."""
        self._has_published = False
        self._publishing = threading.Lock()

    def prepare(self) -> Policy:
        """Find the server or start one, and load the policy meanwhile.

        A server for a quantised base starts after the policy is loaded, because it loads that base's values.
        """
        options = self._options
        check_host(self._url, "--vllm-host or --inference-urls")
        vllm = self._vllm if self._vllm is not None and not is_served(self._url) else None
        if vllm is not None and not options.quantises_base:
            dtype = served_dtype_of(options, stored_config(options))
            self._manager = self._start_own(vllm.with_settings(dtype=name_of(dtype)))
        policy = load_policy(options)
        if options.quantises_base:
            self.base = prepare_base(policy, self._config.required_run_dir / BASE_DIRECTORY)
            if vllm is not None:
                self._manager = self._start_own(fitted(vllm, policy))
        self.connect(policy, self.base)
        return policy

    def connect(self, policy: Policy, base: ServedBase) -> None:
        """Wait for the server, for which this policy is loaded already and its base prepared."""
        check_host(self._url, "--vllm-host or --inference-urls")
        self._policy, self.base = policy, base
        server = self._connect()
        identity = server.identify()
        check_server(self._url, identity.dtype, identity.head_dtype, policy)

    def publish(self, version: int) -> PublishReport:
        """Send the adapter as it is now; see the module's docstring."""
        with self._publishing:
            return self._publish(version)

    def highest_version(self) -> int:
        """Return the highest version that the server has had, which may come from an earlier run; 0 if none."""
        if self._server is None:
            return 0
        found = self._until_it_answers(self._server.identify)
        return max(found.policy_version or 0, found.highest_version or 0)

    def needs_publish(self) -> bool:
        if self._server is None or not self._has_published or self._publishing.locked():
            return False
        if self._manager is not None and not self._manager.running:
            logger.warning("vLLM has exited; its last lines:\n%s", self._manager.log_tail())
            return True
        try:
            now = self._server.identify()
        except (ServerUnavailable, ServerRefused):
            return False
        return now.boot_id != self._boot_id or now.policy_version is None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _start_own(self, vllm: VllmOptions) -> VllmManager | None:
        """Start a server of the trainer's own; None if another one has taken the port meanwhile, which is used then."""
        manager = VllmManager(vllm, should_stop=self._should_stop)
        try:
            manager.start(self.base.model, version=None)
        except ServerUnavailable as error:
            manager.close()
            if not is_served(self._url):
                raise
            logger.info("%s; waiting for that server", error)
            return None
        return manager

    def _connect(self) -> AdapterServer:
        """Wait for the server, find out in which way it takes adapters, and refuse it if it has another base."""
        if self._manager is not None:
            self._manager.wait_until_ready(None)
            self._server = AtroposServer(ServerClient(self._url, self._manager.token))
        else:
            self._server = self._until_it_answers(self._connect_found)
        return self._server

    def _connect_found(self) -> AdapterServer:
        """Return the server that was started outside of the trainer."""
        try:
            client, info = connect_server(self._url, self._config.bridge_token)
        except ServerRefused as error:
            if error.status != 404:
                raise
            return self._connect_stock()
        try:
            self._refuse_unfit(client.url, info)
        except BaseException:
            client.close()
            raise
        return AtroposServer(client)

    def _refuse_unfit(self, url: str, info: ServerInfo) -> None:
        if not info.lora:
            raise CannotSwap(
                f"the vLLM server at {url} serves no adapters: start it with --enable-lora "
                f"--max-lora-rank {served_rank(self._config.lora_r)}, and without --share-weights"
            )
        self.base.check(info.base_digest, url)

    def _connect_stock(self) -> AdapterServer:
        """Return a server without the bridge's routes, which reads adapters from files."""
        client = ServerClient(self._url, named_token(self._config.bridge_token))
        directory = self._adapters_dir or self._config.required_run_dir / "served"
        kept = versions_kept(self._config.max_staleness)
        return StockServer(client, directory, model=self._config.model_name, keep=kept)

    def _until_it_answers(self, ask: Callable[[], T]) -> T:
        limit_seconds = self._config.wait_timeout
        return until_it_answers(ask, self._url, timeout_seconds=limit_seconds, should_stop=self._should_stop)

    def _publish(self, version: int) -> PublishReport:
        if self._policy is None or self._server is None:
            raise PublishFailed("nothing is connected; call prepare() before publish()")
        started = time.monotonic()
        payload = AdapterPayload.write(self._policy.adapter_tensors(self._policy.dtype), self._policy.adapter_config())
        send = partial(self._send, self._server, version, payload)
        boot_id = publish_with_retries(send, f"version {version} was not published")
        self._has_published = True
        seconds = time.monotonic() - started
        report = PublishReport(version=version, seconds=seconds, policy_name=self._server.policy_name(version))
        self._verify(version, payload, boot_id)
        return report

    def _send(self, server: AdapterServer, version: int, payload: AdapterPayload) -> str:
        """Send the adapter; return the boot id of the server process that has it."""
        self._restart_exited()
        try:
            return server.send(version, payload)
        except (ServerUnavailable, ServerRefused) as error:
            if self._manager is None and not is_lasting(error):
                self._until_it_answers(server.identify)
            raise

    def _restart_exited(self) -> None:
        """Restart the server if the trainer started it and it has exited."""
        manager = self._manager
        if manager is None or manager.running:
            return
        manager.stop()
        manager.start(self.base.model, version=None)
        manager.wait_until_ready(None)

    def _verify(self, version: int, payload: AdapterPayload, boot_id: str) -> None:
        """Check the first publish to each server process, and later ones as often as `--sync-check` says."""
        assert self._server is not None
        assert self._policy is not None
        try:
            if self._check.is_due() or boot_id != self._boot_id:
                self._server.check(version, payload)
                self._check.run(
                    self._policy,
                    self._server.generate,
                    version=version,
                    boot_id=boot_id,
                    max_model_len=self._server.identify().max_model_len,
                )
        except ProofFailed as error:
            if self._good_version is not None and self._server.restore(version, self._good_version):
                logger.exception("version %d failed its check; serving version %d again", version, self._good_version)
            if self._good_version is None and self.base.digest is not None:
                raise ProofFailed(f"{error}; --load-in-4bit needs a server of {self.base.flags}") from error
            raise
        except (ServerRefused, ServerUnavailable) as error:  # `needs_publish` will find the server's state
            if is_lasting(error):
                raise
            logger.warning("version %d could not be proven: %s", version, error)
            self._boot_id = None
        else:
            self._boot_id, self._good_version = boot_id, version


class SeveralServersBridge(WeightBridge):
    """Implements `WeightBridge` for several servers: each gets every adapter, one after the other.

    A server that is behind meanwhile answers under its older version, with which its tokens are stamped.
    """

    def __init__(self, config: TrainingOptions, *, should_stop: ShouldStop = never) -> None:
        served, urls = config.required_run_dir / "served", config.server_urls
        self._bridges = [
            LoraOnlyBridge(config, url, served / str(index) if len(urls) > 1 else served, should_stop=should_stop)
            for index, url in enumerate(urls)
        ]

    def prepare(self) -> Policy:
        first, *others = self._bridges
        policy = first.prepare()
        for bridge in others:
            bridge.connect(policy, first.base)
        return policy

    def publish(self, version: int) -> PublishReport:
        """Send the adapter to every server; it is served everywhere when this returns."""
        started = time.monotonic()
        names = {bridge.publish(version).policy_name for bridge in self._bridges}
        if len(names) > 1:
            raise PublishFailed(
                f"version {version} has different names on the servers ({', '.join(map(str, names))}), so no client "
                "could request it; name servers of one kind in --inference-urls"
            )
        return PublishReport(version=version, seconds=time.monotonic() - started, policy_name=names.pop())

    def highest_version(self) -> int:
        return max(bridge.highest_version() for bridge in self._bridges)

    def needs_publish(self) -> bool:
        return any(bridge.needs_publish() for bridge in self._bridges)

    def close(self) -> None:
        for bridge in self._bridges:
            bridge.close()


def is_served(url: str) -> bool:
    """Return True if an inference server has this address, even one that is still loading."""
    with closing(ServerClient(url)) as client:
        return client.is_there()
