"""An attempt at an item has a time limit, and what it sends goes whole or not at all."""

import asyncio

import anyio
import msgspec
import numpy as np
import pytest

from environments.sdk.rehearsal import Rehearsal
from environments.sdk.runtime.rollouts import DrawnItem
from tests.full_disk import files_of_at_most
from tests.unit.environments.sdk.test_surface import Env, collector_of

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("slow", ["collect_trajectories", "postprocess_histories"])
async def test_a_worker_that_takes_too_long_is_stopped_and_its_item_dropped(tmp_path, caplog, slow):
    async def wait(*_):
        await anyio.sleep(60)

    async with Rehearsal(Env, ["x"], tmp_path, worker_timeout=0.5) as rehearsal:
        collector, sent = await collector_of(rehearsal.env)
        setattr(rehearsal.env, slow, wait)
        with anyio.fail_after(20):
            assert await collector.collect(DrawnItem(1)) == 0
        assert rehearsal.env.dropped_groups.counts == {"timed-out": 1}
    assert sent == []
    assert "given up after attempt 1: RolloutTimedOut: it took longer than 0.5 s" in caplog.text


async def test_a_time_limit_of_the_environments_own_code_is_a_failure_like_others(tmp_path):
    class Flaky(Env):
        calls = 0

        async def collect_trajectories(self, item):
            self.calls += 1
            if self.calls == 1:
                raise TimeoutError("the tool did not answer")
            return await super().collect_trajectories(item)

    async with Rehearsal(Flaky, ["x"], tmp_path, worker_timeout=60) as rehearsal:
        collector, sent = await collector_of(rehearsal.env)
        assert await collector.collect(DrawnItem(1)) == 1
    assert len(sent) == 1


async def test_a_group_that_cannot_be_saved_keeps_the_item_whole_and_none_of_it_is_sent_twice(tmp_path):
    class Two(Env):
        async def collect_trajectories(self, item):
            group, _ = await super().collect_trajectories(item)
            return [group, group], []

    path = tmp_path / "groups.jsonl"
    async with Rehearsal(Two, ["x"], tmp_path, data_path_to_save_groups=str(path)) as rehearsal:
        collector, sent = await collector_of(rehearsal.env)
        append, calls = collector._delivery.file.append, []

        def append_to_full_disk(*groups):
            calls.append(groups)
            room = len(msgspec.json.encode(groups[0])) + 8 if len(calls) == 1 else 1 << 20
            with files_of_at_most(room):
                append(*groups)

        collector._delivery.file.append = append_to_full_disk
        assert await collector.collect(DrawnItem(1)) == 2
        collector._delivery.close()
    assert [len(groups) for groups in calls] == [2, 2]
    assert len(sent) == 2
    assert len(path.read_text().splitlines()) == 2, "the first group's line is in the file once"


async def test_the_backlog_of_an_attempt_that_cannot_be_saved_is_not_taken(tmp_path):
    class WithBacklog(Env):
        async def collect_trajectories(self, item):
            group, _ = await super().collect_trajectories(item)
            return group, ["more of it"]

    config = {"data_path_to_save_groups": str(tmp_path / "groups.jsonl")}
    async with Rehearsal(WithBacklog, ["x"], tmp_path, **config) as rehearsal:
        collector, sent = await collector_of(rehearsal.env)
        append, calls = collector._delivery.file.append, []

        def append_to_full_disk(group):
            calls.append(group)
            if len(calls) == 1:
                raise OSError("no space is left")
            append(group)

        collector._delivery.file.append = append_to_full_disk
        assert await collector.collect(DrawnItem(1)) == 1
        collector._delivery.close()
    assert len(sent) == 1
    assert list(collector.backlog) == ["more of it"]


@pytest.mark.parametrize("more", [None, 5, "the next question", {"question": "the next"}], ids=repr)
async def test_an_item_whose_backlog_is_no_list_is_given_up_and_no_group_of_it_is_saved(tmp_path, more):
    class NoBacklog(Env):
        async def collect_trajectories(self, item):
            group, _ = await super().collect_trajectories(item)
            return group, more

    path = tmp_path / "groups.jsonl"
    async with Rehearsal(NoBacklog, ["x"], tmp_path, data_path_to_save_groups=str(path)) as rehearsal:
        collector, sent = await collector_of(rehearsal.env)
        assert await collector.collect(DrawnItem(1)) == 0
        collector._delivery.close()
        assert list(collector.backlog) == [], "of a text its letters were tried next, of a mapping its keys"
    assert sent == []
    assert not path.exists()


async def test_a_group_whose_overrides_cannot_be_read_is_not_saved(tmp_path):
    """It was counted after it had been saved, and that failed: each attempt left a line, and none was sent."""

    class Odd(Env):
        async def collect_trajectories(self, item):
            group, _ = await super().collect_trajectories(item)
            return {**group, "overrides": ["set_advantage_to_zero", None]}, []

    path = tmp_path / "groups.jsonl"
    async with Rehearsal(Odd, ["x"], tmp_path, data_path_to_save_groups=str(path)) as rehearsal:
        collector, sent = await collector_of(rehearsal.env)
        assert await collector.collect(DrawnItem(1)) == 0
        collector._delivery.close()
    assert sent == []
    assert not path.exists()


async def test_what_fails_after_a_delivery_sends_nothing_twice(tmp_path):
    class Late(Env):
        calls = 0

        async def handle_send_to_api(self, scored_data, item=None, *rest):
            await super().handle_send_to_api(scored_data, item, *rest)
            self.calls += 1
            if self.calls == 1:
                raise OSError("after the delivery")

    async with Rehearsal(Late, ["x"], tmp_path) as rehearsal:
        collector, sent = await collector_of(rehearsal.env)
        assert await collector.collect(DrawnItem(7)) == 1
    assert [group.scores for group in sent] == [[7.0, 0.0]]


class FromATask(Env):
    """It hands its group in from a task that outlives the rollout, or from the rollout itself."""

    in_background = True
    raises = False

    async def collect_trajectories(self, item):
        self.may_send = anyio.Event()

        async def send():
            await self.may_send.wait()
            await self.handle_send_to_api(group, item)

        group, _ = await super().collect_trajectories(item)
        if self.in_background:
            self.task = asyncio.ensure_future(send())
        else:
            await self.handle_send_to_api(group, item)
        if self.raises:
            raise OSError("the tool is down")
        return None, []


async def test_a_group_that_a_task_hands_in_after_its_rollout_is_sent_for_the_run_of_that_rollout(tmp_path):
    async with Rehearsal(FromATask, ["x"], tmp_path) as rehearsal:
        collector, sent = await collector_of(rehearsal.env)
        runs = []
        collector._delivery._send = lambda group, _, run_id: (sent.append(group), runs.append(run_id))
        await collector.collect(DrawnItem(7, run_id="run-7"))
        assert sent == []
        rehearsal.env.may_send.set()
        await rehearsal.env.task
    assert [group.scores for group in sent] == [[7.0, 0.0]]
    assert runs == ["run-7"]


async def test_a_group_that_a_task_hands_in_after_its_rollout_failed_is_dropped_with_the_reason(tmp_path):
    async with Rehearsal(FromATask, ["x"], tmp_path, rollout_attempts=1) as rehearsal:
        rehearsal.env.raises = True
        collector, sent = await collector_of(rehearsal.env)
        await collector.collect(DrawnItem(7))
        rehearsal.env.may_send.set()
        await rehearsal.env.task
        assert rehearsal.env.dropped_groups.counts == {"failed": 1, "late": 1}
        assert "by a rollout that had failed before" in rehearsal.env.dropped_groups.explain()
    assert sent == []


async def test_a_group_that_comes_after_the_environment_has_stopped_is_named_in_the_log(tmp_path, caplog):
    async with Rehearsal(FromATask, ["x"], tmp_path) as rehearsal:
        collector, sent = await collector_of(rehearsal.env)
        await collector.collect(DrawnItem(7))
        collector._delivery.close()
        rehearsal.env.may_send.set()
        await rehearsal.env.task
    assert "a group of item 7 came after the environment had stopped, and is dropped" in caplog.text
    assert sent == []


async def test_a_group_that_collect_trajectories_hands_in_itself_is_sent_though_it_returns_none(tmp_path):
    async with Rehearsal(FromATask, ["x"], tmp_path) as rehearsal:
        rehearsal.env.in_background = False
        collector, sent = await collector_of(rehearsal.env)
        assert await collector.collect(DrawnItem(7)) == 1
        assert rehearsal.env.dropped_groups.counts == {}
    assert [group.scores for group in sent] == [[7.0, 0.0]]


async def test_numbers_of_numpy_in_a_group_are_saved_as_numbers(tmp_path):
    """An array made a list holds them; each attempt failed at the file, though the broker would have taken it."""

    class OfNumpy(Env):
        async def collect_trajectories(self, item):
            group, backlog = await super().collect_trajectories(item)
            logprobs = [list(np.array(row, np.float32)) for row in group["inference_logprobs"]]
            return {**group, "inference_logprobs": logprobs, "group_overrides": {"level": np.int64(3)}}, backlog

    async with Rehearsal(OfNumpy, ["x"], tmp_path) as rehearsal:
        (group,) = await rehearsal.process(1)
    assert group["group_overrides"] == {"level": 3}
    assert {type(value) for row in group["inference_logprobs"] for value in row} == {float}
