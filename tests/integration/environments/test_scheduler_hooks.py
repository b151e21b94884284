"""The hooks into the scheduler that Atropos' environments override are called and have their documented effects."""

import anyio
import pytest

from atropos_api.testing import memory_broker
from atropos_api.wire.messages import RunRequest
from environments.compat.envs import BaseEnv, SchedulerReplaced
from environments.compat.servers import BaseEnvConfig
from environments.sdk.config import APIServerConfig
from environments.sdk.runtime.worker import EnvironmentWorker
from environments.sdk.server_manager import ServerManager
from environments.sdk.testing import FakeInference, InProcess, sampled_tokens
from tests.integration.environments.training import batches_of

pytestmark = pytest.mark.anyio

STEPS = 4


class Env(BaseEnv):
    """An environment with two answers to the same question, over and over."""

    name = "hooks"

    async def setup(self):
        self.asked = 0

    async def get_next_item(self):
        self.asked += 1
        return "How many?"

    async def collect_trajectories(self, item):
        async with self.server.managed_server() as session:
            chat = [{"role": "user", "content": item}]
            await session.chat_completion(messages=chat, n=2, max_tokens=8)
            nodes = session.get_state()["nodes"]
            tokens, masks = [node.tokens for node in nodes], [node.masked_tokens for node in nodes]
            return {"tokens": tokens, "masks": masks, "scores": [0.0, 1.0]}, []

    async def evaluate(self, *_, **__):
        """Do nothing."""


def make(env_cls, tokenizer_folder):
    server = APIServerConfig(server_type="vllm", base_url="http://fake/v1")
    config = BaseEnvConfig(group_size=2, use_wandb=False, tokenizer_name=str(tokenizer_folder))
    env = env_cls(config, [server])
    fake = FakeInference(sampled_tokens(0, vocabulary=300, end=1), end=1)
    env.server = ServerManager([server], load_tokenizer=lambda: env.tokenizer, transport=InProcess(fake))
    return env


async def serve(env_cls, tokenizer_folder):
    """Serve to a trainer of `STEPS` steps; return the environment and the groups of its batches."""
    env = make(env_cls, tokenizer_folder)
    _, client = memory_broker()
    groups = []

    async def train():
        run = await client.begin_run(RunRequest(name="run", batch_size=4, max_token_length=512, num_steps=STEPS))
        async for batch in batches_of(client, run, STEPS):
            groups.extend(batch.groups)
            await anyio.sleep(0.05)

    with anyio.fail_after(20):
        async with client, anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            await EnvironmentWorker(env, client).serve()
    return env, groups


async def test_env_step_checks_sees_the_new_step_before_the_environment_has_taken_it(tokenizer_folder):
    class Watching(Env):
        seen = ()

        async def env_step_checks(self):
            self.seen += ((self.curr_step, self.status_dict["current_step"]),)
            await super().env_step_checks()

    env, _ = await serve(Watching, tokenizer_folder)
    assert env.seen
    assert all(before < now for before, now in env.seen)
    assert env.curr_step == env.seen[-1][1] == STEPS


async def test_env_step_checks_can_send_groups_of_its_own(tokenizer_folder):
    class Sending(Env):
        async def env_step_checks(self):
            mark = {"tokens": [[7, 7, 7], [7, 7, 7]], "masks": [[-100, 7, 7], [-100, 7, 7]], "scores": [0.0, 1.0]}
            await self.handle_send_to_api(mark)
            await super().env_step_checks()

    _, groups = await serve(Sending, tokenizer_folder)
    assert any(group.tokens == [[7, 7, 7], [7, 7, 7]] for group in groups)


async def test_an_env_step_checks_that_raises_is_reported_and_stops_nothing(tokenizer_folder, caplog):
    class Raising(Env):
        async def env_step_checks(self):
            raise ValueError("not today")

    env, groups = await serve(Raising, tokenizer_folder)
    assert "not today" in caplog.text
    assert env.curr_step == STEPS
    assert len(groups) == 2 * STEPS


async def test_add_train_workers_without_super_begins_no_rollout(tokenizer_folder):
    class Loader(Env):
        calls = 0

        async def add_train_workers(self):
            self.calls += 1
            group = {"tokens": [[5, 6], [5, 7]], "masks": [[-100, 6], [-100, 7]], "scores": [0.0, 1.0]}
            if self.calls % 2:
                await self.handle_send_to_api(group)

    env, groups = await serve(Loader, tokenizer_folder)
    assert env.asked == 0
    assert {tuple(map(tuple, group.tokens)) for group in groups} == {((5, 6), (5, 7))}


async def test_get_server_info_without_super_keeps_the_environments_own_longest_sequence(tokenizer_folder):
    class Stubborn(Env):
        async def get_server_info(self):
            self.max_token_len = 8192

    env, _ = await serve(Stubborn, tokenizer_folder)
    assert env.max_token_len == 8192
    env, _ = await serve(Env, tokenizer_folder)
    assert (env.max_token_len, env.config.batch_size) == (512, 4)


async def test_total_steps_of_minus_one_becomes_the_runs_number_of_steps(tokenizer_folder):
    class Scheduled(Env):
        def __init__(self, config, server_configs):
            config.total_steps = -1
            super().__init__(config, server_configs)

    env, _ = await serve(Scheduled, tokenizer_folder)
    assert env.config.total_steps == STEPS
    env, _ = await serve(Env, tokenizer_folder)
    assert env.config.total_steps == BaseEnvConfig().total_steps


async def test_an_environment_with_a_scheduler_of_its_own_is_refused_with_the_reason(tokenizer_folder):
    class Own(Env):
        async def env_manager(self):
            """Do nothing; it must never be called."""

    with pytest.raises(SchedulerReplaced, match="Own overrides env_manager"):
        await EnvironmentWorker(make(Own, tokenizer_folder), memory_broker()[1]).serve()
