"""The state of the running server, shared by all routes through `app.state.atropos`, and its warm-up.

The first batches of an engine are slow; `warm_up` runs them before the server reports that it is healthy.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request

from atropos_api.common.identity import fingerprint
from example_trainer.serving import problems
from example_trainer.serving.adapters import Adapters
from example_trainer.serving.admission import AdmissionGate
from example_trainer.serving.checkpoint_download import download
from example_trainer.serving.checkpoint_shapes import CheckpointUnreadable, Shapes, check_replacement
from example_trainer.serving.config import SHARING_HOW_TO, ServerConfig
from example_trainer.serving.engine import EngineAdapter
from example_trainer.serving.fence import Fence
from example_trainer.serving.problems import Problem
from example_trainer.serving.registration import Load, Registration
from example_trainer.weight_protocol.checkpoint_files import CheckpointSource, is_whole
from example_trainer.weight_protocol.manifest import BridgeManifest
from example_trainer.weight_protocol.shm_header import PolicyVersion

logger = logging.getLogger(__name__)

_PROOF_SECONDS = 30.0
_RELOAD_SECONDS = 600.0


@dataclass(kw_only=True)
class ServerState:
    """The state of one server process."""

    config: ServerConfig
    boot_id: str
    bridge_token: str
    hostname: str
    vllm_version: str
    engine: EngineAdapter
    fence: Fence
    gate: AdmissionGate
    adapters: Adapters
    manifest: BridgeManifest | None = None
    manifest_path: Path | None = None
    token_path: Path | None = None
    base_digest: str | None = None
    """Digest of the dequantised base that was loaded; None for any other model."""
    head_dtype: str | None = None
    """Dtype in which the output head computes its logits; None if the worker cannot tell."""
    registration: Registration | None = None
    """The registration at a broker, if there is one."""
    sleeping: bool = False
    switching: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the server falls asleep or wakes up."""
    exchanges: int = 0
    """Broadcasts that are joined or received now: receiving copies the weights, which therefore stay in memory."""
    checkpoint_shapes: Shapes = field(default_factory=dict)
    """Shapes of the loaded model, with which a checkpoint that is to replace it is compared."""

    def info(self) -> dict[str, Any]:
        """Return the server's identity and what it serves now, for `/bridge/info`."""
        model_config = self.engine.async_llm.model_config
        status = {
            "model": self.config.model,
            "tokenizer": str(model_config.tokenizer),
            "vocabulary": self.vocabulary,
            "boot_id": self.boot_id,
            "sharing": self.manifest is not None,
            "policy_version": self.policy_version,
            "highest_version": self.adapters.highest_version,
            "manifest_path": str(self.manifest_path) if self.manifest_path else None,
            "paused": self.fence.paused,
            "torn": self.fence.torn,
            "publishing": self.fence.publishing,
            "dtype": str(model_config.dtype).removeprefix("torch."),
            "head_dtype": self.head_dtype,
            "max_model_len": model_config.max_model_len,
            "vllm_version": self.vllm_version,
            "lora": self.config.enable_lora,
            "token_path": str(self.token_path) if self.token_path else None,
            "hostname": self.hostname,
            "base_digest": self.base_digest,
            "registration": None if self.registration is None else self.registration.describe(),
            "workers": self.engine.workers,
        }
        if self.manifest is None:
            status["how_to_share"] = SHARING_HOW_TO
        return status

    @cached_property
    def vocabulary(self) -> str | None:
        """The fingerprint of the model's vocabulary, with which environments compare theirs."""
        tokenizer = self.engine.async_llm.tokenizer
        return None if tokenizer is None else fingerprint(tokenizer.get_vocab())

    @property
    def policy_version(self) -> PolicyVersion | None:
        """The version of tokens sampled now."""
        adapter = self.adapters.active
        return adapter.version if adapter else self.fence.policy_version

    async def debug(self, *, with_checksum: bool) -> dict[str, Any]:
        """Return counters, and `with_checksum` a checksum over the shared tensors as the server sees them now.

        The checksum reads all weights, and nothing is decoded meanwhile.
        """
        counters: dict[str, Any] = dict(await self.engine.counters())
        counters["requests_inside"] = self.gate.inside
        counters["requests_known"] = self.engine.requests_known()
        counters.update(await self.adapters.counters())
        if self.manifest is None or not with_checksum:
            return {**counters, "checksum": None, "per_tensor": {}, "segment": None}
        began = time.monotonic()
        counters.update(await self.engine.call_worker("atropos_checksum"))
        counters["checksum_seconds"] = time.monotonic() - began
        counters["segment"] = {
            "header_path": self.manifest.header_path,
            "storages": [asdict(storage) for storage in self.manifest.storages],
            "device": self.manifest.device,
        }
        return counters

    async def prove_generation(self) -> dict[str, Any]:
        """Sample one token under any version; raise an error if that takes too long or the engine has failed."""
        if self.fence.paused:
            raise problems.paused()
        began = time.monotonic()
        try:
            await asyncio.wait_for(sample_tokens(self.engine, [1], 1), _PROOF_SECONDS)
        except TimeoutError:
            raise Problem(503, "no-answer", f"no token within {_PROOF_SECONDS:g} s; see the server's log", 5) from None
        return {"seconds": time.monotonic() - began}

    async def reload(
        self, path: str, version: PolicyVersion, *, drain_seconds: float, source: CheckpointSource | None = None
    ) -> dict[str, float]:
        """Read a checkpoint into the running model under the fence, and serve it as `version`.

        With `source` it is downloaded before the fence, unless the path has it whole. If the weights could not be read
        completely they are torn: nothing is served until another checkpoint is read.
        """
        if self.manifest is not None or self.config.enable_lora:
            raise Problem(
                409, "cannot-reload", "a server that shares weights or serves adapters cannot load a checkpoint"
            )
        self.check_awake()
        if source is None or await asyncio.to_thread(is_whole, Path(path), source.files):
            return await self._reload(path, version, drain_seconds)
        with tempfile.TemporaryDirectory(prefix="atropos-checkpoint-") as directory:
            try:
                await download(source, Path(directory))
            except CheckpointUnreadable as error:
                raise Problem(503, "checkpoint-unavailable", str(error), 1) from error
            return await self._reload(directory, version, drain_seconds)

    async def _reload(self, path: str, version: PolicyVersion, drain_seconds: float) -> dict[str, float]:
        try:
            lacking = await asyncio.to_thread(check_replacement, path, self.checkpoint_shapes)
        except CheckpointUnreadable as error:
            raise Problem(422, "bad-checkpoint", str(error)) from error
        self.check_awake()  # again: it may have been sent to sleep during the download
        begun = await self.fence.begin(lease_seconds=_RELOAD_SECONDS, drain_seconds=drain_seconds, in_flight="drain")
        publish_id = str(begun["publish_id"])
        try:
            self.fence.overwrite(publish_id, version)
        except Problem:
            await self.fence.abort(publish_id)
            raise
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._read(path, publish_id, lacking)
        except EngineDeadError:
            raise
        except Exception as error:
            await self.fence.abort(publish_id)
            raise Problem(422, "bad-checkpoint", f"vLLM cannot read {path} into the model: {error}") from error
        return await self.fence.end(publish_id, version)

    async def _read(self, path: str, publish_id: str, lacking: Shapes | None) -> None:
        """Read a checkpoint into the model; raise `CheckpointUnreadable` if it lacks some of the weights.

        vLLM leaves those as they are, and they would be served as weights of the new version. `lacking` are the served
        checkpoint's tensors that this one does not have, None if that is not known. The publish's lease is
        renewed meanwhile, because a slow disk takes longer: a lease that ran out left the weights torn, though the
        checkpoint had been read whole.
        """
        reading = asyncio.ensure_future(self.engine.call_workers("atropos_reload", path, lacking or {}))
        try:
            while not reading.done():
                self.fence.renew(publish_id)
                await asyncio.wait({reading}, timeout=_RELOAD_SECONDS / 3)
        finally:
            reading.cancel()
        missed = sorted({name for each in reading.result() for name in each["missed"]})
        if missed and lacking != {}:
            raise CheckpointUnreadable(f"{len(missed)} of the model's parameters are not in it: {missed[0]}, ...")

    def check_ready(self) -> None:
        """Raise the refusal of a request for tokens that came now, if there is one."""
        self.gate.check()
        if self.registration is not None:
            self.registration.check()

    async def load(self) -> Load:
        """Return the version and the engine's load; an engine that is being written to is not asked."""
        if self.fence.publishing or self.sleeping:
            return Load(version=self.policy_version)
        counters = await self.engine.counters()
        return Load(
            version=self.policy_version,
            running=counters["requests_running"],
            waiting=counters["requests_waiting"],
            kv_free=1 - counters["kv_used_per_mille"] / 1000,
        )

    def check_awake(self) -> None:
        """Raise `Problem` if the server sleeps: its weights are not in memory, so they cannot be changed."""
        if self.sleeping:
            raise Problem(409, "asleep", "the server sleeps, its weights are not in memory; POST /bridge/wake_up first")

    async def sleep(self, level: int) -> None:
        """Move the weights to host memory and free the KV cache; no request is served until `wake_up`."""
        async with self.switching:
            if not self.sleeping:
                await self._fall_asleep(level)

    async def wake_up(self) -> None:
        """Move the weights back, and serve again."""
        async with self.switching:
            if self.sleeping:
                await self.engine.async_llm.wake_up()
                self.sleeping = False
                await self.fence.release()

    async def _fall_asleep(self, level: int) -> None:
        if level != 1:  # level 2 drops the weights; after waking, their memory would have undefined values
            raise Problem(422, "bad-sleep-level", f"level {level} would lose the weights; sleep at level 1")
        # Sleep would take the weights out of memory, and waking would resume the engine.
        if self.fence.publishing or self.exchanges:
            raise Problem(
                409, "publish-in-progress", "a publish is under way; the server can sleep once it has ended", 1
            )
        if not self.config.enable_sleep_mode:
            raise Problem(
                409, "no-sleep-mode", "the server was started without --enable-sleep-mode, so it cannot sleep"
            )
        self.sleeping = True  # from here on no publish begins
        try:
            await self.fence.hold()
            async with self.adapters.changing:
                await self.engine.async_llm.sleep(level, mode="abort")
        except BaseException:
            self.sleeping = False
            await self.fence.release()
            raise


_SEQUENCES = 32
_TOKENS = 8


async def warm_up(engine: EngineAdapter) -> None:
    """Decode a few tokens for many sequences, sampled with logprobs as training requests are."""
    model_config = engine.async_llm.model_config
    vocabulary = model_config.get_vocab_size()
    tokens = max(1, min(_TOKENS, model_config.max_model_len - 2))
    await asyncio.gather(*(sample_tokens(engine, [number % vocabulary], tokens) for number in range(_SEQUENCES)))


async def head_dtype_of(engine: EngineAdapter, model: str) -> str | None:
    """Return the dtype in which the head has computed, after the warm-up; log a warning if another was asked for."""
    used: str | None = await engine.call_worker("atropos_head_dtype")
    asked = str(engine.async_llm.model_config.head_dtype).removeprefix("torch.")
    if used != asked:
        logger.warning(
            "the output head of %s is quantised or not vLLM's common one, so it computes in %s, not in %s; sampled "
            "logprobs will be further from the trainer's",
            model,
            used or "a dtype of its own",
            asked,
        )
    return used


async def sample_tokens(engine: EngineAdapter, prompt: list[int], count: int) -> None:
    """Sample `count` tokens and discard them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=count, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, ignore_eos=True
    )
    async for _ in engine.generate(prompt, params):
        pass


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.atropos
    return state


State = Annotated[ServerState, Depends(state_of)]
