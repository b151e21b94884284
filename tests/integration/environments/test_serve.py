"""`serve` against a real broker in memory, a fake inference server and a trainer that only takes batches."""

import contextlib
import json
import time

import anyio
import pytest

from atropos_api.testing import memory_broker
from atropos_api.wire.messages import PolicyUpdate, RunRequest
from environments.arithmetic_server import ArithmeticEnv, ArithmeticEnvConfig
from environments.sdk import BaseEnv
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import innermost
from environments.sdk.groups import scored_item
from environments.sdk.runtime.worker import EnvironmentWorker
from environments.sdk.server_manager import ServerManager
from environments.sdk.testing import FakeInference, InProcess, sampled_tokens
from tests.integration.environments.training import batches_of

pytestmark = pytest.mark.anyio


def make_env(fake, tokenizer_folder, cls=ArithmeticEnv, **overrides):
    settings = {
        "group_size": 8,
        "max_num_workers": 64,
        "max_batches_offpolicy": 2,
        "ensure_scores_are_not_same": False,
        "use_wandb": False,
        "tokenizer_name": str(tokenizer_folder),
        **overrides,
    }
    config = ArithmeticEnvConfig(**settings)
    server = APIServerConfig(server_type="vllm", base_url="http://fake/v1", num_requests_for_eval=256)
    env = cls(config, server)
    env.server = ServerManager([server], load_tokenizer=lambda: env.tokenizer, transport=InProcess(fake))
    return env


def make_fake(**options):
    return FakeInference(sampled_tokens(0, vocabulary=300, end=1), end=1, **options)


async def train(client, *, steps, batch_size, seconds_a_step=0.0, fake=None, **more):
    """Take each batch, publish a version, commit and finish, as a trainer; return the batches."""
    request = RunRequest(
        **{"name": "run", "batch_size": batch_size, "max_token_length": 512, "num_steps": steps, **more}
    )
    run = await client.begin_run(request)

    async def publish(step):
        version = run.highest_policy_version + 1 + step
        if fake is not None:
            fake.version = version
        await client.update_policy(
            PolicyUpdate(run_id=run.run_id, version=version, step=step, published_at=time.time(), epoch=run.epoch)
        )

    await publish(0)
    batches = []
    async for batch in batches_of(client, run, steps):
        batches.append(batch)
        await anyio.sleep(seconds_a_step)
        await publish(batch.number)
    return batches


async def serve_and_train(env, fake, **training):
    """Run both at once and return the trained batches; the environment must end by itself."""
    _, client = memory_broker()
    batches = []

    async def run_trainer():
        batches.extend(await train(client, fake=fake, **training))

    with anyio.fail_after(20):
        async with client, anyio.create_task_group() as group:
            group.start_soon(run_trainer)
            await EnvironmentWorker(env, client).serve()
    return batches


async def test_groups_reach_the_trainer_complete_and_the_server_ends_with_the_run(tokenizer_folder):
    fake = make_fake()
    batches = await serve_and_train(make_env(fake, tokenizer_folder), fake, steps=4, batch_size=32)
    groups = [group for batch in batches for group in batch.groups]
    assert [sum(len(g.tokens) for g in batch.groups) for batch in batches] == [32] * 4
    for group in groups:
        assert group.generation_params == {"temperature": 1.0}
        for tokens, mask, logprobs, spans in zip(
            group.tokens, group.masks, group.inference_logprobs, group.policy_versions, strict=True
        ):
            sampled = [i for i, value in enumerate(mask) if value != -100]
            assert [tokens[i] for i in sampled] == [mask[i] for i in sampled]
            assert all((value == 1.0) == (i not in set(sampled)) for i, value in enumerate(logprobs))
            assert [i for start, end, _ in spans for i in range(start, end)] == sampled
            assert all(version is not None for _, _, version in spans)


@pytest.mark.parametrize("ends", ["with the run", "by a failure", "by a stop"])
async def test_an_environment_that_left_is_not_called_connected(tokenizer_folder, ends):
    class Failing(ArithmeticEnv):
        async def evaluate(self, **_):
            raise RuntimeError("no")

    fake = make_fake()
    env = make_env(fake, tokenizer_folder, Failing, eval_at_start=ends == "by a failure")
    _, client = memory_broker()
    with anyio.fail_after(20):
        async with client, anyio.create_task_group() as trainer:
            trainer.start_soon(
                lambda: train(client, fake=fake, steps=1 if ends == "with the run" else 50, batch_size=8)
            )
            async with anyio.create_task_group() as group:
                group.start_soon(serve_to_the_end, EnvironmentWorker(env, client))
                if ends == "by a stop":
                    await anyio.sleep(0.3)
                    group.cancel_scope.cancel()
            status = await client.status()
            trainer.cancel_scope.cancel()
    assert [shown["connected"] for shown in status["environments"]] == [False]


async def serve_to_the_end(worker):
    with contextlib.suppress(Exception):
        await worker.serve()


async def test_no_more_is_under_way_than_the_pacing_leaves_room_for(tokenizer_folder):
    fake = make_fake(delay_seconds=0.01)
    batches = await serve_and_train(make_env(fake, tokenizer_folder), fake, steps=6, batch_size=32, seconds_a_step=0.03)
    assert fake.most_in_flight <= 2 * 32 / 8
    oldest = [
        min(version for group in batch.groups for spans in group.policy_versions for _, _, version in spans)
        for batch in batches
    ]
    # Version v is that of step v - 1; the batch of step n may be at most two steps old.
    assert all(number - version <= 2 for number, version in enumerate(oldest, start=1))


async def test_evaluation_before_the_first_group_and_after_the_run_is_written(tokenizer_folder, tmp_path):
    fake = make_fake()
    env = make_env(
        fake,
        tokenizer_folder,
        eval_at_start=True,
        eval_at_end=True,
        eval_problems=20,
        data_dir_to_save_evals=str(tmp_path),
    )
    await serve_and_train(env, fake, steps=3, batch_size=32)
    assert [request["temperature"] for request in fake.requests[:20]] == [0.0] * 20
    for step, version in ((0, 1), (3, 4)):
        document = json.loads((tmp_path / f"step-{step}" / "metrics.json").read_text())
        metrics = document["results"]["all"]
        assert metrics["policy_version_min"] == metrics["policy_version_max"] == version
        assert 0 <= metrics["eval/accuracy"] <= 1
        samples = (tmp_path / f"step-{step}" / "samples.jsonl").read_text().splitlines()
        assert len(samples) == 20


async def test_an_environment_without_evaluate_trains_and_says_so(tokenizer_folder, caplog):
    class Trained(ArithmeticEnv):
        evaluate = BaseEnv.evaluate

    fake = make_fake()
    caplog.set_level("INFO")
    env = make_env(fake, tokenizer_folder, Trained, eval_at_start=True, eval_at_end=True, steps_per_eval=1)
    assert len(await serve_and_train(env, fake, steps=3, batch_size=32)) == 3
    assert caplog.text.count("Trained has no method evaluate, so no evaluation runs") == 1


async def test_a_state_that_cannot_be_kept_costs_no_training(tokenizer_folder, caplog):
    class Forgetful(ArithmeticEnv):
        def save_checkpoint(self, step, data=None):
            raise PermissionError("read-only")

    fake = make_fake()
    env = make_env(fake, tokenizer_folder, Forgetful)
    batches = await serve_and_train(
        env, fake, steps=3, batch_size=32, seconds_a_step=0.02, checkpoint_dir="/nowhere", checkpoint_interval=1
    )
    assert len(batches) == 3
    assert "the environment's state of step" in caplog.text


async def test_of_two_copies_of_an_environment_each_keeps_its_own_state(tokenizer_folder, tmp_path):
    copies = [make_env(make_fake(), tokenizer_folder, ArithmeticEnv) for _ in range(2)]
    for number, (env, told) in enumerate(zip(copies, ("arithmetic", "arithmetic_1"), strict=True)):
        env.checkpoint_dir, env.wandb_prepend, env.curr_step = str(tmp_path), told, 4
        env.save_checkpoint(4, {"drawn": number})
    for env in copies:
        env.load_checkpoint()
    assert [env.drawn for env in copies] == [0, 1]


async def test_results_of_an_earlier_run_in_the_same_folder_are_kept_aside(tokenizer_folder, tmp_path):
    for name in ("step-0", "earlier/step-0"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.json").write_text(f'"{name}"')
    fake = make_fake()
    evaluations = {"eval_at_start": True, "eval_problems": 5, "data_dir_to_save_evals": str(tmp_path)}
    await serve_and_train(make_env(fake, tokenizer_folder, **evaluations), fake, steps=1, batch_size=32)
    assert "results" in json.loads((tmp_path / "step-0" / "metrics.json").read_text())
    kept = {name: (tmp_path / "earlier" / name / "metrics.json").read_text() for name in ("step-0", "step-0_1")}
    assert kept == {"step-0": '"earlier/step-0"', "step-0_1": '"step-0"'}


async def test_evaluations_come_each_so_many_steps(tokenizer_folder, tmp_path):
    fake = make_fake()
    env = make_env(fake, tokenizer_folder, steps_per_eval=2, eval_problems=5, data_dir_to_save_evals=str(tmp_path))
    await serve_and_train(env, fake, steps=6, batch_size=32, seconds_a_step=0.02)
    steps = [int(path.parent.name.removeprefix("step-")) for path in tmp_path.glob("step-*/metrics.json")]
    assert len(steps) >= 2
    assert len({step // 2 for step in steps}) == len(steps), steps


async def test_a_failing_rollout_is_tried_again_and_never_trained_as_nothing(tokenizer_folder):
    class Flaky(ArithmeticEnv):
        calls = 0

        async def collect_trajectories(self, item):
            self.calls += 1
            if self.calls % 3 == 0:
                raise RuntimeError("the tool broke")
            return await super().collect_trajectories(item)

    fake = make_fake()
    env = make_env(fake, tokenizer_folder, Flaky)
    batches = await serve_and_train(env, fake, steps=3, batch_size=32)
    assert all(len(group.tokens) == 8 for batch in batches for group in batch.groups)
    assert env.calls > 12


async def test_an_environment_that_only_fails_ends_with_the_reason(tokenizer_folder):
    class Broken(ArithmeticEnv):
        async def collect_trajectories(self, item):
            raise RuntimeError("no such file")

    fake = make_fake()
    env = make_env(fake, tokenizer_folder, Broken, rollout_attempts=1, max_failures_in_a_row=3)
    with pytest.raises(ExceptionGroup) as failure:
        await serve_and_train(env, fake, steps=1, batch_size=32)
    assert "3 items failed in a row, the last with RuntimeError: no such file" in str(innermost(failure.value))


async def test_a_refused_sampling_ends_the_server_at_once(tokenizer_folder):
    """R24: no further request could succeed, so nothing is retried."""

    class Greedy(ArithmeticEnv):
        async def collect_trajectories(self, item):
            async with self.server.managed_server() as session:
                await session.chat_completion(messages=[{"role": "user", "content": "?"}], temperature=0)

    fake = make_fake()
    with pytest.raises(ExceptionGroup) as failure:
        await serve_and_train(make_env(fake, tokenizer_folder, Greedy), fake, steps=1, batch_size=32)
    assert "temperature 0" in str(innermost(failure.value))


async def test_a_server_without_policy_is_waited_for_with_one_request_probing(tokenizer_folder):
    fake = make_fake(problem=(503, "no-policy"))
    asked = []

    async def counting(scope, receive, send):
        if fake.problem is not None:
            asked.append(scope["path"])
        await fake(scope, receive, send)

    env = make_env(counting, tokenizer_folder)

    async def publish_later():
        await anyio.sleep(0.5)
        fake.problem = None

    async with anyio.create_task_group() as group:
        group.start_soon(publish_later)
        batches = await serve_and_train(env, fake, steps=2, batch_size=32)
    assert len(batches) == 2
    assert asked.count("/generate") < 20


async def test_a_timed_out_rollout_is_dropped(tokenizer_folder):
    class Slow(ArithmeticEnv):
        slow, cut_off_at = None, ()

        async def collect_trajectories(self, item):
            self.slow = self.slow or item
            if item is self.slow:
                try:
                    await anyio.sleep(60)
                finally:
                    self.cut_off_at += (self.curr_step,)
            return await super().collect_trajectories(item)

    fake = make_fake()
    env = make_env(fake, tokenizer_folder, Slow, worker_timeout=0.5)
    batches = await serve_and_train(env, fake, steps=4, batch_size=32, seconds_a_step=0.4)
    assert len(batches) == 4
    assert len(env.cut_off_at) == 1, "an item that took too long is not tried again"
    assert env.cut_off_at[0] < 3, "the end of the run, not its time limit, cut it off"


async def test_versions_and_sampling_are_added_to_groups_put_together_by_hand(tokenizer_folder):
    class ByHand(ArithmeticEnv):
        async def collect_trajectories(self, item):
            group, backlog = await super().collect_trajectories(item)
            return {key: group[key] for key in ("tokens", "masks", "scores")}, backlog

    fake = make_fake()
    batches = await serve_and_train(make_env(fake, tokenizer_folder, ByHand), fake, steps=1, batch_size=32)
    for group in batches[0].groups:
        assert group.policy_versions is not None
        assert group.inference_logprobs is not None
        assert group.generation_params == {"temperature": 1.0}


async def test_single_rollouts_become_groups(tokenizer_folder):
    class Single(ArithmeticEnv):
        async def collect_trajectory(self, item):
            async with self.server.managed_server() as session:
                await session.chat_completion(messages=[{"role": "user", "content": item.question}], max_tokens=20)
                (node,) = session.nodes
                return {"tokens": node.tokens, "masks": node.masked_tokens, "scores": 1.0}, []

        async def collect_trajectories(self, item):
            return await super(ArithmeticEnv, self).collect_trajectories(item)

    fake = make_fake()
    batches = await serve_and_train(make_env(fake, tokenizer_folder, Single), fake, steps=1, batch_size=32)
    assert all(len(group.tokens) == 8 and group.policy_versions for group in batches[0].groups)


async def test_groups_are_closed_without_a_late_rollout_and_batches_stay_exact(tokenizer_folder):
    class OneNeverEnds(ArithmeticEnv):
        calls = 0

        async def collect_trajectory(self, item):
            self.calls += 1
            if self.calls % 8 == 3:
                await anyio.sleep_forever()
            async with self.server.managed_server() as session:
                await session.chat_completion(messages=[{"role": "user", "content": item.question}], max_tokens=20)
                (node,) = session.nodes
                return scored_item(node, len(node.tokens)), []

        async def collect_trajectories(self, item):
            return await super(ArithmeticEnv, self).collect_trajectories(item)

    fake = make_fake()
    env = make_env(fake, tokenizer_folder, OneNeverEnds, late_members="close", min_items_sent_before_logging=10**6)
    batches = await serve_and_train(env, fake, steps=3, batch_size=32)
    assert 0 not in env.completion_lengths, "a row of an absent rollout counts as an answer"
    absent = [[bool(row and row.get("absent")) for row in group.overrides] for b in batches for group in b.groups]
    assert absent == [[False] * 7 + [True]] * 12
    assert env.metrics.totals.absent >= 12


async def test_metrics_are_logged_with_the_trainers_steps(tokenizer_folder):
    class Logging(ArithmeticEnv):
        def log_metrics(self, metrics, step):
            logged.append((step, metrics))

    logged = []
    fake = make_fake()
    env = make_env(fake, tokenizer_folder, Logging)
    await serve_and_train(env, fake, steps=4, batch_size=32, seconds_a_step=0.05)
    assert logged
    step, metrics = logged[-1]
    assert 1 <= step <= 4
    assert metrics["arithmetic_train/completion_lengths"] > 0
    assert metrics["arithmetic_train/items_sent_to_api"] >= 2


async def test_the_group_size_follows_its_schedule_and_batches_stay_full(tokenizer_folder):
    fake = make_fake()
    env = make_env(fake, tokenizer_folder, group_size_schedule="0:8,3:4")
    batches = await serve_and_train(env, fake, steps=8, batch_size=32, seconds_a_step=0.02)
    sizes = [{len(group.tokens) for group in batch.groups} for batch in batches]
    assert [sum(len(group.tokens) for group in batch.groups) for batch in batches] == [32] * 8
    assert sizes[0] == sizes[1] == {8}
    assert sizes[-1] == {4}


async def test_before_the_first_step_of_a_schedule_the_group_size_is_the_one_that_setup_has_set(tokenizer_folder):
    class Own(ArithmeticEnv):
        async def setup(self):
            await super().setup()
            self.config.group_size = 16

    fake = make_fake()
    env = make_env(fake, tokenizer_folder, Own, group_size_schedule="4:8")
    batches = await serve_and_train(env, fake, steps=2, batch_size=32, seconds_a_step=0.02)
    assert {len(group.tokens) for group in batches[0].groups} == {16}


async def test_the_broker_is_told_the_size_of_a_schedule_and_not_the_one_that_it_replaces(tokenizer_folder):
    """Groups of 5 never fill 32 sequences, so the broker paused an environment whose groups had 8, for ever."""
    fake = make_fake()
    env = make_env(fake, tokenizer_folder, group_size=5, group_size_schedule="0:8")
    batches = await serve_and_train(env, fake, steps=2, batch_size=32)
    assert {len(group.tokens) for batch in batches for group in batch.groups} == {8}


async def test_a_run_whose_groups_all_score_alike_says_so_at_the_broker_and_in_the_log(tokenizer_folder, caplog):
    class Hopeless(ArithmeticEnv):
        async def score_answer(self, item, text):
            return 0.0

    env = make_env(make_fake(), tokenizer_folder, Hopeless, ensure_scores_are_not_same=True)
    _, client = memory_broker()
    async with client:
        await client.begin_run(RunRequest(name="run", batch_size=32, max_token_length=512, num_steps=3))
        status = await serve_until(env, client, lambda shown: shown["dropped_groups"].get("equal-scores", 0) >= 8)
    assert status["counters"]["groups_received_total"] == 0
    (shown,) = status["environments"]
    explanation = shown["latest_drop"]["explanation"]
    assert "all dropped: every score is 0; last answer: " in explanation
    assert "--env.ensure_scores_are_not_same false sends them" in explanation
    assert "groups collected, all dropped: every score is 0" in caplog.text


async def test_groups_that_the_broker_refuses_are_reported_as_dropped(tokenizer_folder):
    class NotFinite(ArithmeticEnv):
        async def collect_trajectories(self, item):
            group, more = await super().collect_trajectories(item)
            return {**group, "advantages": [float("nan")] * 8}, more

    env = make_env(make_fake(), tokenizer_folder, NotFinite)
    _, client = memory_broker()
    async with client:
        await client.begin_run(RunRequest(name="run", batch_size=32, max_token_length=512, num_steps=3))
        status = await serve_until(env, client, lambda shown: shown["dropped_groups"].get("refused"))
    assert "advantages" in status["environments"][0]["latest_drop"]["explanation"]


async def serve_until(env, client, enough):
    """Serve until the broker's status of the one environment is `enough`; return that status."""
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(EnvironmentWorker(env, client).serve)
            while True:
                status = await client.status()
                if status["environments"] and enough(status["environments"][0]):
                    group.cancel_scope.cancel()
                    return status
                await anyio.sleep(0.02)
