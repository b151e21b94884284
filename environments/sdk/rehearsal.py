"""`Rehearsal` runs an environment in tests without a model, a data set download or a trainer: the test gives the
answers.

    async with Rehearsal(ColoursEnv, ["a tomato", "the sky"], tmp_path) as rehearsal:
        groups = await rehearsal.process(4)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from atropos_api.common.identity import fingerprint
from environments.sdk.base_env import BaseEnv
from environments.sdk.config import APIServerConfig, as_server_list
from environments.sdk.group_files import read_groups
from environments.sdk.runtime.commands import evaluate_alone, process
from environments.sdk.server_manager import ServerManager
from environments.sdk.testing import FakeInference, InProcess, write_tokenizer

END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Rehearsal:
    """An environment connected to a fake inference server: it gives `answers` in order, over and over."""

    def __init__(self, env_cls: type[BaseEnv], answers: Sequence[str], folder: Path, **config: Any) -> None:
        defaults, servers = env_cls.config_init()
        local = {"tokenizer_name": str(write_byte_tokenizer(folder / "tokenizer")), "use_wandb": False}
        settings = type(defaults).model_validate({**defaults.model_dump(), **local, **config})
        server: APIServerConfig = as_server_list(servers)[0].model_copy(update={"server_type": "vllm"})
        self.env = env_cls(settings, [server])
        self.env.overwrite_results = True
        end = self.env.tokenizer.eos_token_id
        texts = itertools.cycle(answers)
        self.inference = FakeInference(
            lambda *_: [*self.env.tokenizer.encode(next(texts)), end],
            end=end,
            vocabulary=fingerprint(self.env.tokenizer.get_vocab()),
        )
        self.env.server = ServerManager(
            [server], load_tokenizer=lambda: self.env.tokenizer, transport=InProcess(self.inference)
        )
        self._folder = folder

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.env.aclose()

    async def process(self, count: int) -> list[dict[str, Any]]:
        """Return the first `count` groups, as they would be sent."""
        path = self._folder / "groups.jsonl"
        config = self.env.config
        config.total_steps, config.data_path_to_save_groups = count, str(path)
        config.ensure_scores_are_not_same = False
        await process(self.env)
        return list(read_groups(path))

    async def evaluate(self) -> Path:
        """Evaluate once and return the folder with `metrics.json`, `samples.jsonl` and `samples.html`."""
        self.env.config.data_dir_to_save_evals = str(self._folder / "evals")
        await evaluate_alone(self.env)
        return self._folder / "evals"


def write_byte_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of single bytes and an end token, which encodes and decodes any text, and return its folder."""
    write_tokenizer(folder, {"eos_token": END, "pad_token": END}, CHAT_TEMPLATE, special=[END])
    return folder
