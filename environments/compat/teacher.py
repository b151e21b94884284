"""`atroposlib.envs.teacher_distillation_env`: our teacher distillation for environments written for Atropos."""

from __future__ import annotations

from typing import ClassVar

from environments.compat.base import BaseEnv
from environments.compat.config import BaseEnvConfig
from environments.sdk import teacher as sdk

__all__ = ["TeacherDistillationConfig", "TeacherDistillationEnv"]


class TeacherDistillationConfig(sdk.TeacherFields, BaseEnvConfig):
    """The fields of a teacher beside those of any environment."""


class TeacherDistillationEnv(sdk.TeacherMixin, BaseEnv):
    """An environment whose groups carry a teacher's logprobs."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = TeacherDistillationConfig
