"""Each test is about a fault of the original, in its scheduler, metrics or defaults, which ours must not have."""

import anyio
import pytest

from atropos_api.testing import memory_broker
from atropos_api.wire.messages import RunRequest
from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig, scored_group
from environments.sdk.config import EvalHandlingEnum, ServerBaseline
from environments.sdk.rollout_metrics import KEPT_TIMINGS, RolloutMetrics
from environments.sdk.runtime.worker import EnvironmentWorker
from environments.sdk.server_manager import ServerManager
from environments.sdk.testing import FakeInference, InProcess, sampled_tokens
from tests.integration.environments.training import batches_of

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "How many?"}]


class Env(BaseEnv):
    """An environment that counts the outcomes of its rollouts and evaluations."""

    name = "counting"

    async def setup(self):
        self.begun = self.ended = self.evaluations = self.evaluated = 0

    async def get_next_item(self):
        return "item"

    async def collect_trajectories(self, item):
        self.begun += 1
        async with self.server.managed_server() as session:
            await session.chat_completion(messages=CHAT, n=2, max_tokens=8)
            self.ended += 1
            return scored_group(session.nodes, [0.0, 1.0]), []

    async def evaluate(self):
        self.evaluations += 1
        await self.server.chat_completion(messages=CHAT, max_tokens=4, temperature=0.0)
        await anyio.sleep(0.3)
        self.evaluated += 1


def make(tokenizer_folder, cls=Env, *, servers=1, delay_seconds=0.0, **settings):
    configs = [
        APIServerConfig(server_type="vllm", base_url=f"http://fake{number}/v1", num_max_requests_at_once=2)
        for number in range(servers)
    ]
    config = BaseEnvConfig(group_size=2, use_wandb=False, tokenizer_name=str(tokenizer_folder), **settings)
    env = cls(config, configs)
    fake = FakeInference(sampled_tokens(0, vocabulary=300, end=1), end=1, delay_seconds=delay_seconds)
    env.server = ServerManager(configs, load_tokenizer=lambda: env.tokenizer, transport=InProcess(fake))
    return env


async def serve(env, *, steps, seconds_a_step=0.0):
    """Serve to a trainer that takes batches of two groups."""
    _, client = memory_broker()

    async def train():
        run = await client.begin_run(RunRequest(name="run", batch_size=4, max_token_length=512, num_steps=steps))
        async for _ in batches_of(client, run, steps):
            await anyio.sleep(seconds_a_step)

    with anyio.fail_after(30):
        async with client, anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            await EnvironmentWorker(env, client).serve()


async def test_a_full_queue_begins_nothing_new_and_throws_no_begun_rollout_away(tokenizer_folder):
    env = make(tokenizer_folder, delay_seconds=0.02, max_batches_offpolicy=1, steps_per_eval=0)
    await serve(env, steps=6, seconds_a_step=0.05)
    # Only at the end of the run may some rollouts be in progress whose groups are not awaited.
    assert env.ended >= 12
    assert env.begun - env.ended <= 2
    assert env.begun <= 20, "more was begun than the queue had room for"


async def test_an_evaluation_stops_admission_and_lets_what_has_begun_end(tokenizer_folder):
    class Watching(Env):
        async def setup(self):
            await super().setup()
            self.begun_meanwhile = []

        async def evaluate(self):
            with anyio.fail_after(5):
                await anyio.sleep(0.1)
                while self.ended < self.begun:  # noqa: ASYNC110 - nothing tells when the last rollout ends
                    await anyio.sleep(0.01)
                before = self.begun
                await anyio.sleep(0.2)
            self.begun_meanwhile.append(self.begun - before)

    stop = EvalHandlingEnum.STOP_TRAIN
    env = make(tokenizer_folder, Watching, delay_seconds=0.02, steps_per_eval=10, eval_handling=stop)
    await serve(env, steps=30, seconds_a_step=0.02)
    assert env.begun_meanwhile, "what had begun did not end while an evaluation ran"
    assert max(env.begun_meanwhile) < 5, "rollouts were begun while an evaluation ran"


async def test_an_evaluation_that_falls_due_during_another_follows_it(tokenizer_folder):
    env = make(tokenizer_folder, steps_per_eval=1, eval_handling=EvalHandlingEnum.NONE)
    await serve(env, steps=8, seconds_a_step=0.1)
    assert env.evaluated >= 2, "steps passed while an evaluation ran, and none came after it"


async def test_rollouts_go_on_while_one_evaluation_holds_up_the_next(tokenizer_folder):
    class Long(Env):
        async def setup(self):
            await super().setup()
            self.later = anyio.Event()

        async def collect_trajectories(self, item):
            if self.curr_step >= 15:
                self.later.set()
            return await super().collect_trajectories(item)

        async def evaluate(self):
            with anyio.move_on_after(10):
                await self.later.wait()
                self.evaluated += 1

    env = make(tokenizer_folder, Long, steps_per_eval=1, eval_handling=EvalHandlingEnum.NONE)
    await serve(env, steps=20)
    assert env.evaluated >= 1, "no rollout was begun while it ran, so the trainer could not go on"


async def test_requests_of_an_evaluation_are_counted_apart_without_saying_so(tokenizer_folder):
    env = make(tokenizer_folder, steps_per_eval=1, eval_handling=EvalHandlingEnum.NONE)
    await serve(env, steps=3, seconds_a_step=0.05)
    timings = env.server.servers[0].channel.timings
    assert len(timings["eval"].seconds) == env.evaluations >= 1
    assert len(timings["train"].seconds) >= env.ended


async def test_every_server_has_metrics_of_its_own(tokenizer_folder):
    env = make(tokenizer_folder, servers=3, delay_seconds=0.02)
    async with anyio.create_task_group() as tasks:
        for _ in range(9):
            tasks.start_soon(env.server._complete, env.server.pool.sticky(), {"prompt": "1+1=", "max_tokens": 4})
    metrics = env.server.metrics()
    assert {f"server/server_{number}_request_time_avg" for number in range(3)} <= set(metrics)


def test_timings_never_grow_without_end():
    metrics = RolloutMetrics()
    for number in range(3 * KEPT_TIMINGS):
        metrics.seconds_succeeded.append(float(number))
    assert len(metrics.seconds_succeeded) == KEPT_TIMINGS
    assert metrics.summary([], 0)["train_perf/succeeded_task_duration_min"] == 2 * KEPT_TIMINGS


async def test_a_servers_timings_are_its_rolling_buffer(tokenizer_folder):
    env = make(tokenizer_folder)
    server = env.server.servers[0]
    assert server.channel.timings["train"].seconds.maxlen == server.config.rolling_buffer_length


def test_an_environment_without_a_name_for_wandb_registers_under_its_own(tokenizer_folder):
    assert make(tokenizer_folder).registered_name == "counting"
    assert make(tokenizer_folder, wandb_name="mine").registered_name == "mine"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_batches_offpolicy", 0),
        ("min_batch_allocation", 1.5),
        ("min_batch_allocation", -0.1),
        ("inference_weight", -1),
        ("group_size", 0),
        ("max_reasoning_tokens", 10),
        ("score_buffer_size", 3),
    ],
)
def test_a_value_that_can_only_be_a_mistake_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        BaseEnvConfig(**{field: value})


def test_a_single_server_config_and_a_baseline_work_like_a_list_of_one(tokenizer_folder):
    config = BaseEnvConfig(tokenizer_name=str(tokenizer_folder))
    single = Env(config, APIServerConfig(base_url="http://one:9001/v1", api_key="k"))
    assert [server.config.base_url for server in single.server.servers] == ["http://one:9001/v1"]
    assert single.server.servers[0].config.api_key == "k"
    assert len(Env(config, ServerBaseline(model_name="m")).server.servers) == 1
