"""An environment server that several trainers use one after the other, or one that comes back with other settings."""

import anyio
import pytest

from atropos_api.testing import memory_broker
from atropos_api.wire.messages import RunRequest
from environments.arithmetic_server import ArithmeticEnv
from environments.sdk.runtime.stopping import StopRequest
from environments.sdk.runtime.worker import EnvironmentWorker
from tests.integration.environments.test_serve import make_env, make_fake, train
from tests.integration.environments.training import batches_of

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("name", ["run", "another"])
async def test_a_run_that_begins_or_is_resumed_meanwhile_brings_its_own_settings(tokenizer_folder, tmp_path, name):
    saved = []

    class Keeping(ArithmeticEnv):
        def save_checkpoint(self, step, data=None):
            saved.append(self.checkpoint_dir)

    fake = make_fake()
    env = make_env(fake, tokenizer_folder, Keeping, total_steps=-1)
    _, client = memory_broker()

    async def run_trainers():
        folders = [str(tmp_path / "one"), str(tmp_path / "two")]
        first = RunRequest(name="run", batch_size=32, max_token_length=512, num_steps=50, checkpoint_dir=folders[0])
        run = await client.begin_run(first)
        while await client.get_batch(1, run_id=run.run_id, epoch=run.epoch, wait_seconds=5) is None:
            pass
        settings = {"checkpoint_dir": folders[1], "checkpoint_interval": 1, "resume": True, "take_over": True}
        await train(client, steps=4, batch_size=16, fake=fake, name=name, max_token_length=300, **settings)

    with anyio.fail_after(20):
        async with client, anyio.create_task_group() as group:
            group.start_soon(run_trainers)
            await EnvironmentWorker(env, client).serve()
    assert (env.max_token_len, env.config.batch_size) == (300, 16)
    assert env.config.total_steps == 4, "it kept the number of steps of the first run"
    assert set(saved) == {str(tmp_path / "two")}


async def test_a_rollout_that_was_begun_in_one_run_gives_the_next_run_no_group(tokenizer_folder):
    asked, began = anyio.Event(), anyio.Event()

    class Slow(ArithmeticEnv):
        async def collect_trajectories(self, item):
            asked.set()
            earlier = not began.is_set()
            if earlier:
                await began.wait()
                await anyio.sleep(0.05)
            group, more = await super().collect_trajectories(item)
            return {**group, "generation_params": {"temperature": 1.0, "earlier": earlier}}, more

    fake = make_fake()
    env = make_env(fake, tokenizer_folder, Slow)
    app, client = memory_broker()
    batches = []

    async def run_trainers():
        await client.begin_run(RunRequest(name="first", batch_size=32, max_token_length=512, num_steps=50))
        await asked.wait()
        request = RunRequest(name="second", batch_size=32, max_token_length=512, num_steps=2, take_over=True)
        run = await client.begin_run(request)
        began.set()
        async for batch in batches_of(client, run, 2):
            batches.append(batch)

    with anyio.fail_after(20):
        async with client, anyio.create_task_group() as group:
            group.start_soon(run_trainers)
            await EnvironmentWorker(env, client).serve()
    assert {group.generation_params["earlier"] for batch in batches for group in batch.groups} == {False}
    assert app.context.broker.state.counters.groups_left_over_total > 0


async def test_two_processes_of_one_program_are_two_environments_of_the_run(tokenizer_folder):
    fake = make_fake()
    app, client = memory_broker()
    environments = [make_env(fake, tokenizer_folder, ArithmeticEnv) for _ in range(2)]

    async def begin_once_both_are_there():
        while len(app.context.broker.state.environments) < 2:  # noqa: ASYNC110 - the broker has no event for it
            await anyio.sleep(0.01)
        await train(client, steps=6, batch_size=32, fake=fake)

    with anyio.fail_after(60):
        async with client, anyio.create_task_group() as group:
            group.start_soon(begin_once_both_are_there)
            for env in environments:  # each with its own stop: two in one process would restore each other's handlers
                group.start_soon(EnvironmentWorker(env, client, StopRequest()).serve)
    rows = list(app.context.broker.state.environments)
    names = [environments[0].registered_name, f"{environments[0].registered_name}_1"]
    assert [row.name for row in rows] == names
    assert {env.wandb_prepend for env in environments} == set(names)
