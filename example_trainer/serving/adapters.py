"""LoRA adapters: each version under a name of its own, the active one standing in for the model.

The version of a request is that of the adapter it was admitted with, so a new adapter needs no fence: running requests
end under the old one. Names are never reused, because vLLM knows cached prefixes by the adapter's name and path.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from example_trainer.serving.engine import EngineAdapter
from example_trainer.serving.problems import Problem
from example_trainer.weights.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter; `request` is vLLM's handle for it."""

    name: str
    path: str
    version: PolicyVersion | None
    request: Any


class Adapters:
    """The loaded adapters. `models` is vLLM's table of what `/v1` serves under which name."""

    def __init__(self, engine: EngineAdapter, models: Any, *, enabled: bool, model_names: list[str]) -> None:
        self._engine = engine
        self._models = models
        self._model_names = model_names
        self._ids = itertools.count(1)
        self._used_names: set[str] = set(model_names)
        self._loaded: dict[str, Adapter] = {}
        self.enabled = enabled
        self.active: Adapter | None = None

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "enabled": self.enabled,
            "active": self.active.name if self.active else None,
            "adapters": [
                {"name": adapter.name, "path": adapter.path, "version": adapter.version}
                for adapter in self._loaded.values()
            ],
        }
        if not self.enabled:
            told["how_to_enable"] = "start the server with --enable-lora (not together with --share-weights)"
        return told

    def named(self, model: str | None) -> Adapter | None:
        """The adapter to answer with: the one named, or the active one for the model's own name and for none."""
        if model is None or model in self._model_names:
            return self.active
        if model not in self._loaded:
            names = ", ".join([*self._model_names, *self._loaded])
            raise Problem(404, "unknown-model", f"model: {model!r} is not served here; there are {names}")
        return self._loaded[model]

    async def load(self, name: str, path: str, version: PolicyVersion | None, *, activate: bool) -> dict[str, Any]:
        self._check(name, path)
        from vllm.lora.request import LoRARequest

        request = LoRARequest(lora_name=name, lora_int_id=next(self._ids), lora_path=path)
        self._used_names.add(name)
        try:
            await self._engine.async_llm.add_lora(request)
        except Exception as error:
            self._used_names.discard(name)
            raise Problem(422, "bad-adapter", f"vLLM does not take the adapter at {path}: {error}") from error
        adapter = self._loaded[name] = Adapter(name, path, version, request)
        self._models.lora_requests[name] = request
        if activate:
            self._activate(adapter)
        return self.status()

    async def unload(self, name: str) -> dict[str, Any]:
        adapter = self._loaded.get(name)
        if adapter is None:
            raise Problem(404, "unknown-adapter", f"no adapter {name!r} is loaded; GET /lora/status lists them")
        del self._loaded[name], self._models.lora_requests[name]
        if self.active is adapter:
            self._activate(None)
        await self._engine.async_llm.remove_lora(adapter.request.lora_int_id)
        return self.status()

    def _activate(self, adapter: Adapter | None) -> None:
        """Let the model's own names mean this adapter, under `/v1` as well."""
        self.active = adapter
        for model_name in self._model_names:
            if adapter is None:
                self._models.lora_requests.pop(model_name, None)
            else:
                self._models.lora_requests[model_name] = adapter.request

    def _check(self, name: str, path: str) -> None:
        if not self.enabled:
            raise Problem(409, "no-lora", "the server was started without --enable-lora")
        if name in self._used_names:
            detail = f"the name {name!r} has been used; each version of an adapter needs a name of its own"
            raise Problem(409, "name-used", detail)
        if not (Path(path) / "adapter_config.json").is_file():
            raise Problem(422, "bad-adapter", f"{path} holds no adapter_config.json, so it is no PEFT adapter")
