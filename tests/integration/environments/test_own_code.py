"""An environment's own code may do anything: only its own item is lost, never the server or the run."""

import asyncio
import contextlib
import sys

import anyio
import pytest

from atropos_api.testing import memory_broker
from atropos_api.wire.messages import RunRequest
from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig, scored_group
from environments.sdk.errors import ItemDropped
from environments.sdk.runtime import rollouts
from environments.sdk.runtime.broker_session import BrokerConnection
from environments.sdk.runtime.stopping import StopRequest
from environments.sdk.runtime.worker import EnvironmentWorker
from environments.sdk.server_manager import ServerManager
from environments.sdk.testing import FakeInference, InProcess, sampled_tokens
from tests.integration.environments.training import batches_of

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "How many?"}]
STEPS = 3


class Env(BaseEnv):
    """An environment whose third item is treated by `treat`."""

    name = "own-code"

    async def setup(self):
        self.number = 0

    async def get_next_item(self):
        self.number += 1
        return self.number

    async def collect_trajectories(self, item):
        async with self.server.managed_server() as session:
            await session.chat_completion(messages=CHAT, n=2, max_tokens=8)
            group = scored_group(session.nodes, [0.0, 1.0])
        if item == 3:
            await self.treat(group)
        return group, []

    async def treat(self, group): ...


def make(tokenizer_folder, treat, **settings):
    configs = [APIServerConfig(server_type="vllm", base_url="http://fake/v1")]
    config = BaseEnvConfig(
        group_size=2, use_wandb=False, tokenizer_name=str(tokenizer_folder), steps_per_eval=0, **settings
    )
    env = type("Treated", (Env,), {"treat": treat})(config, configs)
    fake = FakeInference(sampled_tokens(0, vocabulary=300, end=1), end=1)
    env.server = ServerManager(configs, load_tokenizer=lambda: env.tokenizer, transport=InProcess(fake))
    return env


async def serve(env, stop=None):
    """Serve until a trainer has taken its batches of two groups."""
    _, client = memory_broker()
    trained = []

    async def train():
        run = await client.begin_run(RunRequest(name="run", batch_size=4, max_token_length=512, num_steps=STEPS))
        async for batch in batches_of(client, run, STEPS):
            trained.append(batch.number)

    with anyio.fail_after(30):
        async with client, anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            await EnvironmentWorker(env, client, stop).serve()
            tasks.cancel_scope.cancel()
    return trained


async def ends_the_process(self, group):
    sys.exit(0)


async def awaits_what_was_cancelled(self, group):
    other = asyncio.ensure_future(asyncio.sleep(60))
    other.cancel()
    await other


async def reads_past_the_end(self, group):
    next(iter(()))


async def needs_too_much(self, group):
    raise MemoryError


async def fails_with_half_a_character(self, group):
    raise ValueError("the tool printed \ud800")


async def masks_one_token_less(self, group):
    group["masks"][0] = group["masks"][0][:-1]


@pytest.mark.parametrize(
    "treat",
    [
        ends_the_process,
        awaits_what_was_cancelled,
        reads_past_the_end,
        needs_too_much,
        fails_with_half_a_character,
        masks_one_token_less,
    ],
)
async def test_an_item_whose_code_fails_in_any_way_is_given_up_and_the_run_goes_on(tokenizer_folder, treat):
    env = make(tokenizer_folder, treat, rollout_attempts=1)
    assert await serve(env) == [1, 2, 3]
    assert env.dropped_groups.report().groups == {"failed": 1}


async def puts_an_object_among_messages(self, group):
    group["messages"] = [[{"role": "user", "content": object()}]] * 2


async def puts_half_a_character_among_messages(self, group):
    group["messages"] = [[{"role": "user", "content": "\ud800"}]] * 2


async def puts_a_loop_among_overrides(self, group):
    group["group_overrides"] = {}
    group["group_overrides"]["self"] = group["group_overrides"]


async def gives_an_advantage_of_nan(self, group):
    group["advantages"] = [float("nan"), 0.0]


@pytest.mark.parametrize(
    "treat",
    [
        gives_an_advantage_of_nan,
        puts_an_object_among_messages,
        puts_half_a_character_among_messages,
        puts_a_loop_among_overrides,
    ],
)
async def test_a_group_that_cannot_be_sent_is_counted_as_refused_and_the_run_goes_on(tokenizer_folder, treat):
    env = make(tokenizer_folder, treat)
    assert await serve(env) == [1, 2, 3]
    assert env.dropped_groups.report().groups == {"refused": 1}


async def test_an_item_whose_data_cannot_be_read_is_given_up_and_the_run_goes_on(tokenizer_folder):
    """It ended the server, and was leased first to each server that was started after it."""
    env, asked = make(tokenizer_folder, never_fails, rollout_attempts=2), []

    async def item_at(self, number):
        asked.append(number)
        if number == 1:
            raise OSError("the picture is gone")
        if number == 2:
            raise ItemDropped("no picture")
        return number

    type(env).item_at = item_at
    assert await serve(env) == [1, 2, 3]
    assert asked[:5] == [0, 1, 1, 2, 3]
    assert env.dropped_groups.report().groups == {"failed": 1, "no-group": 1}


async def test_a_member_whose_code_ends_the_process_ends_its_group_alone(tokenizer_folder):
    class Single(Env):
        async def collect_trajectory(self, item):
            if item == 3:
                sys.exit(0)
            async with self.server.managed_server() as session:
                await session.chat_completion(messages=CHAT, n=1, max_tokens=8)
                (group,) = session.nodes
            return {"tokens": group.tokens, "masks": group.masked_tokens, "scores": float(group.tokens[-2])}, []

        collect_trajectories = BaseEnv.collect_trajectories

    made = make(tokenizer_folder, Env.treat, rollout_attempts=1, ensure_scores_are_not_same=False)
    made.__class__ = Single
    assert await serve(made) == [1, 2, 3]
    assert made.dropped_groups.report().groups == {"failed": 1}


async def test_a_rollout_that_ignores_its_cancellation_stops_the_server(tokenizer_folder, monkeypatch, caplog):
    monkeypatch.setattr(rollouts, "CANCELLATION_SECONDS", 0.1)
    stop = StopRequest()
    monkeypatch.setattr(stop, "set_grace", lambda *_: None)  # it would end this process

    async def ignores(self, group):
        while not stop.count:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    env = make(tokenizer_folder, ignores, worker_timeout=0.2, drain_seconds=0.1, max_num_workers=2)
    await serve(env, stop)
    assert (stop.count, stop.exit_code) == (1, 1)
    assert "after --env.worker_timeout had cancelled it" in caplog.text


@pytest.mark.parametrize("waits_in", ["get_next_item", "lease_items", "add_train_workers"])
async def test_a_stop_ends_the_wait_for_the_next_item_at_once(tokenizer_folder, monkeypatch, waits_in):
    """An item that never comes: the environment's own, one that a broker which is gone would lease, or a hook's."""
    env, stop, waiting = make(tokenizer_folder, ends_the_process), StopRequest(), anyio.Event()
    monkeypatch.setattr(stop, "set_grace", lambda *_: None)  # it would end this process

    async def wait(*_):
        waiting.set()
        await anyio.sleep_forever()

    if waits_in == "lease_items":
        type(env).numbers_items = True
        monkeypatch.setattr(BrokerConnection, "lease_items", wait)
    else:
        setattr(env, waits_in, wait)

    async def stop_the_wait():
        await waiting.wait()
        stop.request("a test")

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_the_wait)
            await serve(env, stop)


async def test_the_end_of_the_run_ends_the_wait_for_an_item_that_never_comes(tokenizer_folder):
    env, waiting = make(tokenizer_folder, ends_the_process), anyio.Event()

    async def wait():
        waiting.set()
        await anyio.sleep_forever()

    env.get_next_item = wait
    _, client = memory_broker()

    async def finish():
        run = await client.begin_run(RunRequest(name="run", batch_size=4, max_token_length=512, num_steps=STEPS))
        await waiting.wait()
        await client.finish_run(run.run_id, epoch=run.epoch)

    with anyio.fail_after(5):
        async with client, anyio.create_task_group() as tasks:
            tasks.start_soon(finish)
            await EnvironmentWorker(env, client).serve()


async def never_fails(self, group): ...


@pytest.mark.parametrize("way", ["the end of the run", "a stop"])
async def test_what_comes_while_an_environment_logs_its_metrics_ends_it(tokenizer_folder, monkeypatch, way):
    """Nothing is in progress and no group is needed any more, so it is the last thing of which the server is told."""
    env, stop, logging = make(tokenizer_folder, never_fails, max_num_workers=1), StopRequest(), anyio.Event()
    monkeypatch.setattr(stop, "set_grace", lambda *_: None)  # it would end this process

    async def log(*_):
        if env.curr_step == STEPS:
            logging.set()
            await anyio.sleep(0.2)

    env.wandb_log = log
    _, client = memory_broker()

    async def train():
        run = await client.begin_run(RunRequest(name="run", batch_size=4, max_token_length=512, num_steps=STEPS))
        async for batch in batches_of(client, run, STEPS):
            if batch.number == STEPS:
                break
        await client.commit(STEPS, run_id=run.run_id, epoch=run.epoch)
        await logging.wait()
        if way == "a stop":
            stop.request(way)
        else:
            await client.finish_run(run.run_id, epoch=run.epoch)

    with anyio.fail_after(10):
        async with client, anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            await EnvironmentWorker(env, client, stop).serve()
