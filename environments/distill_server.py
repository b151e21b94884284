r"""The environment asks GSM8K word problems and adds the logprobs of a teacher, a larger model of the same family.

    python environments/distill_server.py serve --openai.base_url http://localhost:9001/v1 --env.teacher_top_k 8 \
        --teacher.base_url http://localhost:9003/v1

Scores are those of `gsm8k_server`. In addition every sequence has `distill_token_ids` and `distill_logprobs`: the
teacher's most likely tokens at each position. The teacher must have the student's vocabulary. With
`--env.teacher_enabled false` this is plain GSM8K. It is a file of its own because an environment is run by its file.

Data: that of `gsm8k_server`, `openai/gsm8k:main` from the hub or files in `data_path`.
"""

from __future__ import annotations

from environments.gsm8k_server import GSM8kEnv, GSM8kEnvConfig
from environments.sdk import APIServerConfig, BaseEnvConfig
from environments.sdk.teacher import TeacherFields, TeacherMixin


class DistillEnvConfig(TeacherFields, GSM8kEnvConfig):
    """The configuration has the settings of GSM8K and of its teacher."""


class DistillEnv(TeacherMixin, GSM8kEnv):
    """Word problems whose groups carry a teacher's logprobs."""

    name = "gsm8k_distill"
    env_config_cls = DistillEnvConfig
    config: DistillEnvConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig]:
        config, server = super().config_init()
        # A teacher's logprobs teach something even if all answers have the same score.
        own = {"teacher_enabled": True, "teacher_top_k": 8, "ensure_scores_are_not_same": False}
        return DistillEnvConfig(**{**config.model_dump(), **own}), server


if __name__ == "__main__":
    DistillEnv.cli()
