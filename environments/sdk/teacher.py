"""Teacher distillation: groups get the logprobs that a second, larger model gives their tokens.

    class MyEnv(TeacherDistillationEnv): …
    python my_env.py serve --env.teacher_enabled true --env.teacher_top_k 4 --teacher.base_url http://localhost:9003/v1

The teacher must have the student's vocabulary, and its address must be set if it is enabled; both are checked at the
start. If it fails later, a group is sent without its logprobs: both fields are None.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from atropos_api.common.concurrency import run_all, run_blocking
from atropos_api.wire.groups import MOST_TEACHER_TOKENS
from environments.sdk.base_env import BaseEnv
from environments.sdk.config import APIServerConfig, BaseEnvConfig, ServerBaseline, as_server_list
from environments.sdk.errors import EnvironmentsError, TokenizerMismatch, innermost
from environments.sdk.groups import Item, as_groups
from environments.sdk.inference.server import vocabulary_of
from environments.sdk.server_manager import ServerManager
from environments.sdk.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


class TeacherMissing(EnvironmentsError, ValueError):
    """A teacher is enabled, but no teacher server is configured."""


class TeacherFields(BaseModel):
    """Settings of a teacher: they are added to those of an environment."""

    teacher_enabled: bool = Field(False, description="Ask the teacher for logprobs of every group.")
    teacher_top_k: int = Field(
        0,
        ge=-1,
        lt=MOST_TEACHER_TOKENS,
        description="Most likely tokens to keep at each position, besides the given one; 0: only that.",
    )


class TeacherDistillationConfig(TeacherFields, BaseEnvConfig):
    """Settings of an environment with a teacher: those of every environment and those of the teacher."""


class TeacherMixin(BaseEnv):
    """Mixin that adds the teacher to an environment: a base class for others, such as those of the original Atropos."""

    config: Any

    def __init__(
        self,
        config: Any,
        server_configs: Any,
        slurm: bool = False,
        testing: bool = False,
        *,
        teacher_server_configs: ServerBaseline | APIServerConfig | list[APIServerConfig] | None = None,
    ) -> None:
        super().__init__(config, server_configs, slurm=slurm, testing=testing)
        self.set_teacher(teacher_server_configs or self.teacher_config_init())

    @classmethod
    def teacher_config_init(cls) -> ServerBaseline | APIServerConfig | list[APIServerConfig]:
        """Return a teacher server without an address: the address has to be configured."""
        return APIServerConfig(server_type="vllm", base_url="")

    def set_teacher(self, server_configs: ServerBaseline | APIServerConfig | list[APIServerConfig]) -> None:
        self.teacher_server = ServerManager(
            as_server_list(server_configs),
            load_tokenizer=lambda: self.tokenizer,
            wait_timeout_seconds=self.config.wait_timeout,
        )

    @property
    def server_managers(self) -> list[ServerManager]:
        return [*super().server_managers, *([self.teacher_server] if self.config.teacher_enabled else [])]

    async def check_servers(self) -> None:
        """Raise if the teacher is enabled without an address, or has another vocabulary."""
        await super().check_servers()
        if not self.config.teacher_enabled:
            return
        for config in self.teacher_server.configs:
            if not (config.base_url or config.policy):
                raise TeacherMissing(
                    "teacher_enabled is true, but no teacher server configuration was provided; name one with "
                    "--teacher.base_url (under atropos-grpo-run --teacher.model_name starts one), or set "
                    "--env.teacher_enabled false"
                )
            await self._compare_tokenizers(config.tokenizer_name)

    async def _compare_tokenizers(self, name: str) -> None:
        """Compare vocabularies if the teacher's tokenizer is named; otherwise its server is compared at the first
        request.
        """
        if name in {"", "none", self.config.tokenizer_name}:
            return
        load = partial(load_tokenizer, name, flag="--teacher.tokenizer_name")
        teachers = await run_blocking(load, about=f"the teacher's tokenizer {name}")
        if vocabulary_of(teachers) != vocabulary_of(self.tokenizer):
            raise TokenizerMismatch(
                f"Cross-tokenizer distillation is not supported: the vocabulary of {name} (--teacher.tokenizer_name) "
                "is not that of --env.tokenizer_name; take a teacher of the student's family"
            )

    async def aclose(self) -> None:
        await self.teacher_server.aclose()
        await super().aclose()

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Add the teacher's logprobs to each group, then deliver."""
        groups = [
            None if group is None else await self._with_teacher_logprobs(group) for group in as_groups(scored_data)
        ]
        await super().handle_send_to_api(groups, item, do_send_to_api, abort_on_any_max_length_exceeded)

    async def _with_teacher_logprobs(self, group: Mapping[str, Any]) -> dict[str, Any]:
        overrides = group.get("group_overrides") or {}
        top_k = int(overrides.get("teacher_top_k", self.config.teacher_top_k))
        without_teacher = {**group, "distill_token_ids": None, "distill_logprobs": None}
        if not self.config.teacher_enabled or top_k < 0 or overrides.get("skip_teacher_top_k"):
            return without_teacher
        tokens = [list(map(int, ids)) for ids in group["tokens"]]  # the rows may be arrays, which no request holds
        ask = partial(self.teacher_server.get_logprobs, top_k=top_k, split="train")
        try:
            found = await run_all([partial(ask, input_ids=ids) for ids in tokens])
        except Exception as error:  # if the teacher fails, the group is sent without its logprobs
            if isinstance(mismatch := innermost(error), TokenizerMismatch):
                raise mismatch from error
            logger.warning("a group is sent without teacher logprobs: %r", error)
            return without_teacher
        rows = [_with_given_tokens(*pair) for pair in zip(tokens, found, strict=True)]
        return {
            **group,
            "distill_token_ids": [ids for ids, _ in rows],
            "distill_logprobs": [logprobs for _, logprobs in rows],
        }


def _with_given_tokens(tokens: Sequence[int], found: Mapping[str, Any]) -> tuple[list[list[int]], list[list[float]]]:
    """Return the most likely tokens of each position with their logprobs, and the given one if it is none of them.

    A credit for the sampled token (`--distill reverse_kl`) needs its logprob most where the teacher finds it unlikely.
    """
    ids = [list(row) for row in found["prompt_topk_token_ids"]]
    logprobs = [list(row) for row in found["prompt_topk_logprobs"]]
    for at, (token, value) in enumerate(zip(tokens, found.get("prompt_logprobs", ()), strict=False)):
        if value is not None and token not in ids[at]:
            ids[at].append(token)
            logprobs[at].append(value)
    return ids, logprobs


class TeacherDistillationEnv(TeacherMixin):
    """Base class of environments with a teacher: their groups carry the teacher's logprobs."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = TeacherDistillationConfig
    config: TeacherDistillationConfig
