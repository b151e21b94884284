"""An unfit teacher is refused at the start, not group by group."""

import shutil

import pytest

from atropos_api.testing import memory_broker
from atropos_api.wire import ServerReport
from environments.compat.envs import TeacherDistillationConfig as CompatConfig
from environments.compat.envs import TeacherDistillationEnv as CompatEnv
from environments.compat.servers import BaseEnvConfig
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import TokenizerMismatch
from environments.sdk.runtime.cli import following_registry
from environments.sdk.runtime.commands import process
from environments.sdk.teacher import TeacherDistillationConfig, TeacherDistillationEnv, TeacherMissing
from environments.sdk.testing_servers import make_chat_tokenizer

pytestmark = pytest.mark.anyio

STUDENT = APIServerConfig(server_type="vllm", base_url="http://student/v1")


class SetUp(Exception):
    """Raised once an environment's setup begins."""


class Begins:
    async def setup(self):
        raise SetUp

    async def get_next_item(self):
        """Do nothing."""

    async def evaluate(self, *_, **__):
        """Do nothing."""


class Native(Begins, TeacherDistillationEnv):
    """An environment written for this project."""


class Atropos(Begins, CompatEnv):
    """An environment written for Atropos."""


KINDS = pytest.mark.parametrize(
    ("cls", "config_cls"), [(Native, TeacherDistillationConfig), (Atropos, CompatConfig)], ids=["native", "atropos"]
)


def config_of(config_cls, tokenizer_folder, tmp_path, **fields):
    path = str(tmp_path / "groups.jsonl")
    return config_cls(tokenizer_name=str(tokenizer_folder), use_wandb=False, data_path_to_save_groups=path, **fields)


@KINDS
async def test_a_teacher_that_is_enabled_and_not_named_ends_the_start(cls, config_cls, tokenizer_folder, tmp_path):
    """With a default address every group would be sent without its teacher, with a warning."""
    env = cls(config_of(config_cls, tokenizer_folder, tmp_path, teacher_enabled=True), STUDENT)
    with pytest.raises(TeacherMissing, match=r"no teacher server configuration was provided.*--teacher\.base_url"):
        await process(env)
    await env.aclose()
    env = cls(config_of(config_cls, tokenizer_folder, tmp_path), STUDENT)
    with pytest.raises(SetUp):
        await process(env)
    await env.aclose()


@KINDS
async def test_a_teacher_whose_tokenizer_is_another_ends_the_start(cls, config_cls, tokenizer_folder, tmp_path):
    make_chat_tokenizer(tmp_path / "other", "chatml")
    shutil.copytree(tokenizer_folder, tmp_path / "same")
    expected = {"other": (TokenizerMismatch, "Cross-tokenizer distillation is not supported"), "same": (SetUp, None)}
    for name, (error, words) in expected.items():
        teacher = APIServerConfig(
            server_type="sglang", base_url="http://teacher/v1", tokenizer_name=str(tmp_path / name)
        )
        config = config_of(config_cls, tokenizer_folder, tmp_path, teacher_enabled=True)
        env = cls(config, STUDENT, teacher_server_configs=[teacher])
        with pytest.raises(error, match=words):
            await process(env)
        await env.aclose()


async def test_a_teacher_may_be_the_servers_that_are_registered_under_a_policy_of_its_own(tokenizer_folder, tmp_path):
    _, broker = memory_broker()
    student, teacher = (APIServerConfig(server_type="vllm", policy=policy) for policy in ("default", "teacher"))
    config = config_of(TeacherDistillationConfig, tokenizer_folder, tmp_path, teacher_enabled=True)
    env = Native(config, student, teacher_server_configs=teacher)
    await env.check_servers()
    async with broker, following_registry(env, broker):
        for name, policy in (("a", "default"), ("b", "teacher")):
            report = ServerReport(
                lease_id=f"lease-of-{name}", boot_id=name, mode="fixed", url=f"http://{name}", policy=policy
            )
            await broker.renew_server(name, report)
        for manager in env.server_managers:
            await manager.registered.wait(60.0)
        addresses = [[server.config.root_url for server in manager.servers] for manager in env.server_managers]
        assert addresses == [["http://a"], ["http://b"]]
    await env.aclose()


def test_the_teachers_fields_are_among_those_of_environments_written_for_atropos():
    assert issubclass(CompatConfig, BaseEnvConfig)
