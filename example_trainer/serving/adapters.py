"""LoRA adapters: each version under a name of its own, and the newest served under the model's name.

The version of a request is that of the adapter it was admitted with, so a new adapter needs no fence: running requests
end under the old one. Names and paths are never reused, because vLLM caches prefixes by both. The adapters of the
newest versions stay loaded; an older one is dropped when the last request that was admitted with it has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, UserDict
from collections.abc import Awaitable, Callable, Iterator, ValuesView
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atropos_api.common.malloc import return_freed_memory
from example_trainer.errors import WorkerFailed
from example_trainer.serving.engine import EngineAdapter
from example_trainer.serving.problems import Problem
from example_trainer.weight_protocol.shm_header import PolicyVersion
from example_trainer.weight_protocol.transfer import MEMORY_PATH, AdapterPayload

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
_FIRST_ID = 1 << 20
"""Number of the first adapter loaded here: vLLM numbers those of `--lora-modules` from 1, and it would answer requests
for an adapter with the one that has its number already.
"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter; `request` is vLLM's handle for it, `digest` the checksum of an uploaded one.

    `adapts_head` is True if it changes the output head, as only one from a directory can.
    """

    name: str
    path: str
    version: PolicyVersion | None
    request: Any
    digest: str | None = None
    adapts_head: bool = False


class RequestsByName(UserDict[str, Any]):
    """The table of adapters by name for vLLM: the model's own names map to an adapter too, but are not listed."""

    def values(self) -> ValuesView[Any]:
        return {request.lora_name: request for request in self.data.values()}.values()


class Adapters:
    """The loaded adapters. `models` is vLLM's table of the names under `/v1`; `keep` is the number of versions kept."""

    def __init__(
        self,
        engine: EngineAdapter,
        models: Any,
        *,
        enabled: bool,
        model_names: list[str],
        boot_id: str,
        keep: int,
        on_active: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._models = models
        self._models.lora_requests = RequestsByName(models.lora_requests)
        self._model_names = model_names
        self._boot_id = boot_id
        self._keep = keep
        self._on_active = on_active
        self._ids = itertools.count(_FIRST_ID)
        self._loaded = {
            name: Adapter(name, request.lora_path, None, request) for name, request in models.lora_requests.items()
        }
        self._used_names = {*model_names, *self._loaded}
        self._retired: dict[str, Adapter] = {}
        self._users: Counter[str] = Counter()
        self.changing = asyncio.Lock()
        """Held while an adapter is loaded, unloaded or activated; waiters get it in the order in which they came."""
        self._dropping: asyncio.Task[None] | None = None
        self.enabled = enabled
        self.active: Adapter | None = None
        self.highest_version: PolicyVersion | None = None
        """The highest version that an adapter has had here, loaded or not: its name is used."""
        if enabled:
            engine.serves_adapter = self._loaded.__contains__
            engine.adapts_head = lambda name: name in self._loaded and self._loaded[name].adapts_head

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = {
            "enabled": self.enabled,
            "active": self.active.name if self.active else None,
            "adapters": [
                {"name": adapter.name, "path": adapter.path, "version": adapter.version}
                for adapter in self._loaded.values()
            ],
            "retired": list(self._retired),
            "versions_kept": self._keep,
        }
        if not self.enabled:
            status["how_to_enable"] = "start the server with --enable-lora (not together with --share-weights)"
        return status

    def named(self, model: str | None) -> Adapter | None:
        """Return the adapter to answer with: the named one, or the active one for the model's own name or no name."""
        if model is None or model in self._model_names:
            return self.active
        if model not in self._loaded:
            names = ", ".join([*self._model_names, *self._loaded])
            raise Problem(404, "unknown-model", f"model: {model!r} is not served here; there are {names}")
        return self._loaded[model]

    @contextmanager
    def held(self, adapter: Adapter | None) -> Iterator[None]:
        """Keep an adapter loaded inside the block, for a request that was admitted with it."""
        if adapter is None:
            yield
            return
        self._users[adapter.name] += 1
        try:
            yield
        finally:
            self._users[adapter.name] -= 1

    async def look_at_given(self) -> None:
        """Learn which adapters of `--lora-modules`, which vLLM has loaded, change the output head."""
        for name, given in list(self._loaded.items()):
            told = await self._engine.call_worker("atropos_load_adapter", name, given.request.adapter_id, given.path)
            self._loaded[name] = replace(given, adapts_head=told["adapts_head"])

    async def load(self, name: str, path: str, version: PolicyVersion | None, *, activate: bool) -> dict[str, Any]:
        """Load an adapter from a directory."""
        async with self.changing:
            self._check(name, version)
            if not (Path(path) / "adapter_config.json").is_file():
                raise Problem(422, "bad-adapter", f"{path} holds no adapter_config.json, so it is not a PEFT adapter")
            request = self._request(name, path)
            loading = self._engine.call_worker("atropos_load_adapter", name, request.adapter_id, path)
            loaded = await self._try(loading, request, f"the adapter at {path}")
            adapter = Adapter(name, path, version, request, adapts_head=loaded["adapts_head"])
            self._register(adapter, activate=activate)
        return self.status()

    async def upload(self, name: str, body: bytes, version: PolicyVersion, *, activate: bool) -> dict[str, Any]:
        """Serve an adapter sent as a safetensors body; a body that is sent again after a lost answer is loaded once."""
        async with self.changing:
            try:
                digest = AdapterPayload.read(body).digest()
            except ValueError as error:
                raise Problem(422, "bad-adapter", str(error)) from error
            known = self._loaded.get(name)
            if known is not None and (known.version, known.digest) == (version, digest):
                return self.status() | {"digest": digest, "boot_id": self._boot_id}
            self._check(name, version)
            request = self._request(name, f"{MEMORY_PATH}{self._boot_id}/{name}")
            adding = self._engine.call_worker("atropos_add_adapter", name, request.adapter_id, request.path, body)
            loaded = await self._try(adding, request, f"adapter {name}")
            self._register(Adapter(name, request.path, version, request, loaded["digest"]), activate=activate)
        return self.status() | {"digest": loaded["digest"], "boot_id": self._boot_id}

    async def unload(self, name: str) -> dict[str, Any]:
        """Stop serving an adapter; it is dropped when its last request has ended."""
        async with self.changing:
            adapter = self._known(name)
            if self.active is adapter:
                self._activate(None)
            self._retire(adapter)
        return self.status()

    async def activate(self, name: str) -> dict[str, Any]:
        """Switch back, or forward, to a version that is still loaded."""
        async with self.changing:
            self._activate(self._known(name))
        return self.status()

    async def check(self, name: str) -> dict[str, Any]:
        """Return the checksum of an uploaded adapter, and its tensors for which vLLM's buffers hold other values."""
        adapter = self._loaded.get(name)
        if adapter is None or adapter.digest is None:
            raise Problem(404, "unknown-adapter", f"no adapter {name!r} was sent; GET /lora/status lists them")
        found = await self._engine.call_workers("atropos_check_adapter", adapter.request.adapter_id, adapter.path)
        misplaced = {name: None for each in found for name in each["misplaced"]}
        return {**found[0], "misplaced": list(misplaced)}

    @property
    def count(self) -> int:
        """Number of loaded adapters."""
        return len(self._loaded)

    async def counters(self) -> dict[str, Any]:
        return dict(await self._engine.call_worker("atropos_adapter_counters")) if self.enabled else {}

    def _known(self, name: str) -> Adapter:
        if name not in self._loaded:
            raise Problem(404, "unknown-adapter", f"no adapter {name!r} is loaded; GET /lora/status lists them")
        return self._loaded[name]

    async def _try(self, adding: Awaitable[Any], request: Any, what: str) -> Any:
        try:
            return await adding
        except WorkerFailed as error:
            with suppress(WorkerFailed):  # other ranks may have loaded it
                await self._engine.call_worker("atropos_drop_adapter", request.adapter_id, request.path)
            raise Problem(422, "bad-adapter", f"vLLM does not accept {what}: {error}") from error

    def _request(self, name: str, path: str) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(lora_name=name, lora_int_id=next(self._ids), lora_path=path)

    def _register(self, adapter: Adapter, *, activate: bool) -> None:
        self._used_names.add(adapter.name)
        if adapter.version is not None:
            self.highest_version = max(adapter.version, self.highest_version or 0)
        self._loaded[adapter.name] = adapter
        self._models.lora_requests[adapter.name] = adapter.request
        if activate:
            self._activate(adapter)
        versioned = [each for each in self._loaded.values() if each.version is not None]
        for old in versioned[: -self._keep]:
            if old is not self.active:
                self._retire(old)

    def _activate(self, adapter: Adapter | None) -> None:
        """Map the model's own names to this adapter, under `/v1` as well."""
        self.active = adapter
        for model_name in self._model_names:
            if adapter is None:
                self._models.lora_requests.pop(model_name, None)
            else:
                self._models.lora_requests[model_name] = adapter.request
        if adapter is not None:
            self._on_active()

    def _retire(self, adapter: Adapter) -> None:
        """Give the adapter to no new request; once no request uses it, it is dropped."""
        del self._loaded[adapter.name], self._models.lora_requests[adapter.name]
        self._retired[adapter.name] = adapter
        if self._dropping is None or self._dropping.done():
            self._dropping = asyncio.ensure_future(self._drop_retired())

    async def _drop_retired(self) -> None:
        """Drop each retired adapter that was unused at two looks.

        vLLM forgets a request that a stop string has ended before it tells the engine, which ends if it has to load a
        dropped adapter for one more token.
        """
        unused: set[str] = set()
        while self._retired:
            in_use = self._engine.adapters_in_use() | {name for name, count in self._users.items() if count}
            before, unused = unused, self._retired.keys() - in_use
            for name in before & unused:
                await self._drop(self._retired[name])
            if self._retired:
                await asyncio.sleep(_LOOK_SECONDS)

    async def _drop(self, adapter: Adapter) -> None:
        try:
            await self._engine.call_worker("atropos_drop_adapter", adapter.request.adapter_id, adapter.path)
        except Exception as error:  # noqa: BLE001  it costs a slot of memory; serving continues
            logger.warning("adapter %s could not be unloaded: %s", adapter.name, error)
        self._engine.forget_adapter(adapter.name)
        return_freed_memory()
        del self._retired[adapter.name]
        del self._users[adapter.name]

    def _check(self, name: str, version: PolicyVersion | None) -> None:
        if not self.enabled:
            raise Problem(409, "no-lora", "the server was started without --enable-lora")
        if name in self._used_names:
            detail = f"the name {name!r} has been used; each version of an adapter needs a name of its own"
            raise Problem(409, "name-used", detail)
        newest = max((each.version for each in self._loaded.values() if each.version is not None), default=None)
        if version is not None and newest is not None and version <= newest:
            detail = f"version {version} is not above {newest}, which is loaded; versions are never reused"
            raise Problem(409, "version-not-new", detail)
