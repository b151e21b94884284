"""Mode `none`: new weights reach the server by a checkpoint and a restart of the server.

The simplest bridge: two copies of the weights, no shared memory, any device. The trainer starts the
server itself and every `--vllm-restart-interval` steps writes the weights as a Hugging Face
checkpoint and restarts it on them. A version belongs to one start of the server.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from example_trainer.errors import PublishFailed
from example_trainer.model import Policy, PolicyOptions, load_policy
from example_trainer.vllm_manager import VllmManager, VllmOptions
from example_trainer.weights.bridge import PublishReport
from example_trainer.weights.proof import prove
from example_trainer.weights.server_client import ServerClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartOptions:
    """What of the trainer's configuration concerns the restart bridge."""

    policy: PolicyOptions
    vllm: VllmOptions
    weights_dir: Path
    """Where the checkpoints to serve are written; the last one is kept."""
    restart_interval: int = 3


class RestartBridge:
    """Implements `WeightBridge` by restarting a vLLM server of its own on a fresh checkpoint."""

    def __init__(self, options: RestartOptions) -> None:
        self._options = options
        self._policy: Policy | None = None
        self._manager: VllmManager | None = None
        self._version = 0

    def prepare(self) -> Policy:
        policy = load_policy(self._options.policy)
        vllm = self._options.vllm
        longest = getattr(policy.hf_config, "max_position_embeddings", None)
        if longest and vllm.max_model_len and vllm.max_model_len > longest:
            vllm = replace(vllm, max_model_len=int(longest))
        vllm = replace(vllm, dtype=str(policy.dtype).removeprefix("torch."))
        self._policy, self._manager = policy, VllmManager(vllm)
        return policy

    def publish(self, version: int) -> PublishReport:
        """Write the masters as a checkpoint in the served dtype and restart the server on it."""
        if self._policy is None or self._manager is None:
            raise PublishFailed("nothing is loaded; call prepare() before publish()")
        started = time.monotonic()
        directory = write_served_checkpoint(self._policy, self._options.weights_dir / f"policy-v{version}")
        closed = time.monotonic()
        self._manager.stop()
        self._manager.start(directory, version=version)
        info = self._manager.wait_until_ready(version)
        reopened = time.monotonic()
        if not self._version:
            self._prove(version, info.boot_id, info.max_model_len)
        self._version = version
        self._remove_all_but(directory)
        return PublishReport(version=version, seconds=reopened - started, fence_seconds=reopened - closed)

    def highest_version(self) -> int:
        return self._version

    def should_publish(self, steps_since_publish: int) -> bool:
        return steps_since_publish >= self._options.restart_interval

    def needs_publish(self) -> bool:
        """After the server has ended by itself, so that the run goes on with a fresh one."""
        if self._manager is None or not self._version or self._manager.running:
            return False
        logger.warning("vLLM has ended by itself; its last lines:\n%s", self._manager.log_tail())
        return True

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _prove(self, version: int, boot_id: str, max_model_len: int) -> None:
        assert self._policy is not None
        assert self._manager is not None
        client = ServerClient(self._manager.url, self._manager.token)
        try:
            prove(self._policy, client.generate, version=version, boot_id=boot_id, max_model_len=max_model_len)
        finally:
            client.close()

    def _remove_all_but(self, kept: Path) -> None:
        for path in self._options.weights_dir.glob("policy-v*"):
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)


def write_served_checkpoint(policy: Policy, directory: Path) -> Path:
    """Write the weights, in the dtype they are served in, so that the directory is whole or not there."""
    from huggingface_hub import save_torch_state_dict

    beside = directory.with_name(f".{directory.name}.part")
    try:
        for old in (beside, directory):
            shutil.rmtree(old, ignore_errors=True)
        beside.mkdir(parents=True)
        save_torch_state_dict(policy.checkpoint_tensors(policy.dtype), beside)
        config = policy.hf_config.to_dict() | {"dtype": str(policy.dtype).removeprefix("torch.")}
        (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        beside.rename(directory)
    except OSError as error:
        raise PublishFailed(f"cannot write {directory}: {error}; free the space or set --run-dir elsewhere") from error
    return directory
