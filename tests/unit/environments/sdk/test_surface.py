"""The interface that Atropos' environments rely on; each test names the fault of the original to avoid."""

import json
import logging
import os
import stat
import sys
from types import SimpleNamespace

import anyio
import msgspec
import numpy as np
import pytest
import yaml

from atropos_api.common.cliconfig import ConfigError
from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig, ServerBaseline, scored_group, state_files
from environments.sdk.config import EvalHandlingEnum, slurm_servers
from environments.sdk.errors import RolloutsKeepFailing
from environments.sdk.groups import GroupRules
from environments.sdk.rehearsal import Rehearsal
from environments.sdk.runtime.cli import read_command, run_verb
from environments.sdk.runtime.commands import NothingToCollect
from environments.sdk.runtime.delivery import Delivery
from environments.sdk.runtime.rollouts import DrawnItem, RolloutRunner
from environments.sdk.runtime.worker import EnvironmentWorker, interval_passed
from environments.sdk.teacher import TeacherDistillationConfig, TeacherDistillationEnv
from tests.trackio_stand_in import RecordedTrackio

pytestmark = pytest.mark.anyio

DEFAULTS = {
    "group_size": 4,
    "max_num_workers": -1,
    "max_eval_workers": 16,
    "max_num_workers_per_node": 8,
    "steps_per_eval": 100,
    "max_token_length": 2048,
    "eval_handling": EvalHandlingEnum.STOP_TRAIN,
    "eval_limit_ratio": 0.5,
    "inference_weight": 1.0,
    "batch_size": -1,
    "max_batches_offpolicy": 3,
    "use_wandb": True,
    "rollout_server_url": "http://localhost:8000",
    "total_steps": 1000,
    "wandb_name": None,
    "num_rollouts_to_keep": 32,
    "num_rollouts_per_group_for_logging": 1,
    "ensure_scores_are_not_same": True,
    "data_path_to_save_groups": None,
    "data_dir_to_save_evals": None,
    "min_items_sent_before_logging": 2,
    "include_messages": False,
    "min_batch_allocation": None,
    "worker_timeout": 600,
    "thinking_mode": False,
    "reasoning_effort": None,
    "max_reasoning_tokens": None,
    "custom_thinking_prompt": None,
}
SERVER_DEFAULTS = {
    "timeout": 1200,
    "num_max_requests_at_once": 512,
    "num_requests_for_eval": 64,
    "model_name": "default",
    "rolling_buffer_length": 1000,
    "server_type": "openai",
    "tokenizer_name": "none",
    "api_key": "",
    "n_kwarg_is_ignored": False,
    "health_check": True,
}


class Env(BaseEnv):
    name = "surface"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=2), ServerBaseline(server_type="vllm")

    async def setup(self):
        self.count = 0

    async def get_next_item(self):
        self.count += 1
        return self.count

    async def collect_trajectories(self, item):
        async with self.server.managed_server() as session:
            await session.completion(prompt=f"item {item}", n=2, max_tokens=8)
            return scored_group(session.nodes, [item, 0]), []

    async def evaluate(self, *args, **kwargs):
        await self.evaluate_log({"eval/word": "not a number", "eval/x": 1.0}, samples=[{"text": "a"}])


def lenient_rules():
    return GroupRules(group_size=2, max_token_length=-1, ensure_scores_are_not_same=False)


async def collector_of(env):
    await env.setup()
    sent = []
    return RolloutRunner(env, Delivery(env, lenient_rules, lambda group, *_: sent.append(group))), sent


def test_fields_and_their_defaults_are_atropos():
    assert {name: getattr(BaseEnvConfig(), name) for name in DEFAULTS} == DEFAULTS
    server = APIServerConfig()
    assert {name: getattr(server, name) for name in SERVER_DEFAULTS} == SERVER_DEFAULTS


def test_the_command_has_the_flags_beside_the_sections():
    command = read_command(Env, "serve", ["--max_n_completions", "4"])
    assert (command.max_n_completions, command.slurm, command.testing, command.proxy_url) == (4, False, False, None)


@pytest.mark.parametrize(("flags", "words"), [(["--testing"], "FakeInference"), (["--proxy_url", "http://x"], "proxy")])
def test_what_cannot_be_done_is_refused_with_the_reason(flags, words):
    with pytest.raises(ConfigError, match=words):
        run_verb(Env, ["process", *flags])


def fake_scontrol(folder, monkeypatch):
    program = folder / "scontrol"
    program.write_text("#!/bin/sh\nprintf 'a1\\na2\\na3\\n'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_slurm_names_the_servers_behind_the_training_nodes(tmp_path, monkeypatch):
    fake_scontrol(tmp_path, monkeypatch)
    job = {"SLURM_JOB_NODELIST": "a[1-3]", "NUM_TRAINING_NODES": "1", "INFER_TP": "4"}
    servers = slurm_servers(APIServerConfig(server_type="vllm", timeout=3), job)
    assert [server.base_url for server in servers] == [
        f"http://{node}:{port}/v1" for node in ("a2", "a3") for port in (9000, 9001)
    ]
    assert {server.timeout for server in servers} == {3}
    assert len(slurm_servers(APIServerConfig(), {**job, "INFER_TP": "1", "NUM_TRAINING_NODES": "2"})) == 8
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST is not set"):
        slurm_servers(APIServerConfig(), {})
    with pytest.raises(ConfigError, match="no server fits"):
        slurm_servers(APIServerConfig(), {**job, "NUM_TRAINING_NODES": "3"})
    with pytest.raises(ConfigError, match="INFER_TP='two'"):
        slurm_servers(APIServerConfig(), {**job, "INFER_TP": "two"})


def test_an_empty_file_is_not_an_error(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("")
    assert read_command(Env, "serve", ["--config", str(file)]).env.group_size == 2


def test_no_jump_of_steps_misses_an_evaluation():
    assert [interval_passed(before, now, 100) for before, now in ((99, 100), (50, 260), (100, 199), (0, 0))] == [
        True,
        True,
        False,
        False,
    ]
    assert not interval_passed(0, 5, 0)
    assert not interval_passed(0, 5, -1)


def test_checkpoints_are_whole_and_found_under_a_stable_name(tmp_path):
    state_files.save_state(tmp_path, "surface", 10, {"iter": 3})
    with pytest.raises(TypeError):
        state_files.save_state(tmp_path, "surface", 20, {"iter": object()})
    assert [path.name for path in (tmp_path / "env_checkpoints" / "surface").iterdir()] == ["step-10.json"]
    (tmp_path / "env_checkpoints/surface/step-10 (copy).json").write_text("{}")  # a resumed run ended with a traceback
    assert state_files.load_state(tmp_path, "surface", 25) == {"iter": 3}
    assert state_files.load_state(tmp_path, "surface", 9) == {}


async def test_the_backlog_goes_first_and_in_order(tmp_path):
    class Following(Env):
        async def collect_trajectories(self, item):
            seen.append(item)
            return None, ["first", "second"] if item == 1 else []

    seen = []
    async with Rehearsal(Following, ["x"], tmp_path) as rehearsal:
        collector, _ = await collector_of(rehearsal.env)
        for _ in range(4):
            await collector.collect(await collector.next_item())
    assert seen == [1, "first", "second", 2]


async def test_errors_are_told_with_their_cause_and_end_the_server_when_nothing_else_happens(tmp_path, caplog):
    class Broken(Env):
        async def collect_trajectories(self, item):
            raise KeyError("solution")

    async with Rehearsal(Broken, ["x"], tmp_path, max_failures_in_a_row=2) as rehearsal:
        collector, _ = await collector_of(rehearsal.env)
        assert await collector.collect(DrawnItem(1)) == 0
        with pytest.raises(RolloutsKeepFailing, match="solution"):
            await collector.collect(DrawnItem(2))
    assert "KeyError" in caplog.text


async def test_cleanup_follows_every_attempt(tmp_path):
    class Tidy(Env):
        cleaned = 0

        async def collect_trajectories(self, item):
            raise OSError

        async def cleanup(self):
            self.cleaned += 1

    async with Rehearsal(Tidy, ["x"], tmp_path, rollout_attempts=2) as rehearsal:
        collector, _ = await collector_of(rehearsal.env)
        await collector.collect(DrawnItem(1))
    assert rehearsal.env.cleaned == 2


async def test_the_cleanup_of_a_cancelled_rollout_is_not_cut_short(tmp_path):
    """A rollout is cancelled at the run's end and at a second signal; its container stayed."""
    begun = anyio.Event()

    class Tidy(Env):
        cleaned = False

        async def collect_trajectories(self, item):
            begun.set()
            await anyio.sleep_forever()

        async def cleanup(self):
            await anyio.sleep(0.01)
            self.cleaned = True

    async with Rehearsal(Tidy, ["x"], tmp_path) as rehearsal, anyio.create_task_group() as tasks:
        collector, _ = await collector_of(rehearsal.env)
        tasks.start_soon(collector.collect, DrawnItem(1))
        await begun.wait()
        tasks.cancel_scope.cancel()
    assert rehearsal.env.cleaned


async def test_several_groups_of_an_item_are_all_sent_and_the_missing_ones_left_out(tmp_path):
    class Several(Env):
        async def collect_trajectories(self, item):
            group, more = await super().collect_trajectories(item)
            return [group, None, group], more

    async with Rehearsal(Several, ["x"], tmp_path) as rehearsal:
        collector, sent = await collector_of(rehearsal.env)
        assert await collector.collect(DrawnItem(3)) == 2
    assert len(sent) == 2


async def test_groups_are_saved_while_serving_too(tmp_path):
    path = tmp_path / "saved" / "groups.jsonl"
    async with Rehearsal(Env, ["x"], tmp_path, data_path_to_save_groups=str(path)) as rehearsal:
        collector, _ = await collector_of(rehearsal.env)
        await collector.collect(DrawnItem(1))
        assert json.loads(path.read_text())["scores"] == [1.0, 0.0]
        collector._delivery.close()


async def test_an_evaluation_with_words_among_its_metrics_is_written(tmp_path):
    async with Rehearsal(Env, ["x"], tmp_path) as rehearsal:
        folder = await rehearsal.evaluate()
    document = json.loads((folder / "metrics.json").read_text())
    assert set(document["results"]) == {"atropos|surface_eval|0", "all"}
    assert document["results"]["all"]["eval/word"] == "not a number"
    assert document["config_general"]["generation_parameters"]["max_new_tokens"] == 2048
    told = yaml.safe_load((folder / "evaluate_config.yaml").read_text())
    assert told["env"]["group_size"] == 2
    assert "api_key" not in told["openai"][0]
    assert (folder / "samples.jsonl").read_text() == '{"text": "a"}\n'


async def test_rollouts_for_the_table_stay_few_and_lengths_begin_anew(tmp_path):
    logged = []

    class Logging(Env):
        def log_metrics(self, metrics, step):
            logged.append(metrics)

    config = {"use_wandb": True, "num_rollouts_to_keep": 3, "num_rollouts_per_group_for_logging": -1}
    async with Rehearsal(Logging, ["four"], tmp_path, **config) as rehearsal:
        env = rehearsal.env
        env.wandb_prepend = "surface_0"
        collector, _ = await collector_of(env)
        for item in range(5):
            await collector.collect(DrawnItem(item))
        assert [len(rows) for rows in env.rollouts_for_wandb] == [2, 2, 2]
        await env.wandb_log({"mine": 1})
        await env.wandb_log()
    assert logged[0]["surface_0_mine"] == 1
    assert logged[0]["surface_0_train/completion_lengths"] == 5
    assert logged[0]["surface_0_train/items_sent_to_api"] == 5
    assert "surface_0_train/completion_lengths" not in logged[1]
    assert "surface_0_train/completion_lengths_p95" not in logged[0], "without a run there is no limit to be near to"


async def test_the_table_asks_a_tokenizer_only_for_what_sessions_ask_of_it(tmp_path):
    async with Rehearsal(Env, ["x"], tmp_path, use_wandb=True) as rehearsal:
        env = rehearsal.env
        env.tokenizer = SimpleNamespace(decode=lambda tokens: f"{len(tokens)} tokens")
        await env.add_rollouts_for_wandb({"tokens": [[1, 2, 3], [4]], "scores": [1.0, 0.0]})
        assert env.rollouts_for_wandb[0] == [("3 tokens", 1.0)]


async def test_a_run_of_wandb_gets_keys_and_table(tmp_path, monkeypatch):
    class Run:
        def log(self, metrics, step):
            logged.append((step, metrics))

        def finish(self):
            logged.append("finished")

    logged, begun = [], []
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", lambda **arguments: begun.append(arguments) or Run())
    async with Rehearsal(Env, ["x"], tmp_path, use_wandb=True) as rehearsal:
        await rehearsal.process(1)
    assert begun[0]["name"].startswith("surface-20")
    step, metrics = logged[0]
    assert step == 1
    assert metrics["train/rollouts"].columns == ["text", "score"]
    assert len(metrics["train/rollouts"].data) == 1
    assert logged[-1] == "finished"


async def test_a_run_of_trackio_gets_the_numbers_under_the_name_that_the_launcher_gives(tmp_path, monkeypatch):
    trackio = RecordedTrackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    settings = {"use_wandb": False, "use_trackio": True, "trackio_name": "tried-surface"}
    async with Rehearsal(Env, ["x"], tmp_path, **settings) as rehearsal:
        await rehearsal.process(1)
    kinds = [kind for kind, _ in trackio.calls]
    assert (kinds[0], kinds[1], kinds[-1]) == ("init", "log", "finish")
    begun, logged = trackio.calls[0][1], trackio.calls[1][1]
    assert (begun["name"], begun["resume"]) == ("tried-surface", "allow")
    assert logged["step"] == 1
    assert "train/rollouts" not in logged
    assert len(logged) > 2


async def test_without_trackio_a_warning_is_logged_and_rollouts_go_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "trackio", None)
    async with Rehearsal(Env, ["x"], tmp_path, use_wandb=False, use_trackio=True) as rehearsal:
        await rehearsal.process(2)
    assert caplog.text.count("not logging to Trackio") == 1
    assert "pip install trackio" in caplog.text


class Taught(TeacherDistillationEnv, Env):
    of_numpy = False

    async def postprocess_histories(self, trajectories):
        tokens = [np.array(row) if self.of_numpy else row for row in trajectories["tokens"]]
        return {**trajectories, "tokens": tokens}

    @classmethod
    def config_init(cls):
        return TeacherDistillationConfig(group_size=2, teacher_enabled=True, teacher_top_k=1), ServerBaseline()


class Teacher:
    """A teacher that gives each token itself with a logprob, or fails."""

    broken = False

    async def get_logprobs(self, *, input_ids, top_k, split):
        if self.broken:
            raise OSError("teacher away")
        msgspec.json.encode(input_ids)  # as in a request
        return {
            "prompt_topk_token_ids": [[token] * top_k for token in input_ids],
            "prompt_topk_logprobs": [[-0.5] * top_k for _ in input_ids],
        }

    async def aclose(self):
        pass


async def test_a_teacher_is_set_by_flags_and_adds_its_logprobs(tmp_path):
    command = read_command(Taught, "serve", ["--teacher.base_url", "http://teacher:1/v1"])
    assert [server.base_url for server in command.teachers] == ["http://teacher:1/v1"]
    async with Rehearsal(Taught, ["x"], tmp_path) as rehearsal:
        env = rehearsal.env
        env.set_teacher(command.teachers)
        assert env.teacher_server.servers[0].config.base_url == "http://teacher:1/v1"
        await env.teacher_server.aclose()
        env.teacher_server = Teacher()
        collector, sent = await collector_of(env)
        await collector.collect(DrawnItem(1))
        env.of_numpy = True
        await collector.collect(DrawnItem(2))
        env.teacher_server.broken = True
        await collector.collect(DrawnItem(3))
    for group in sent[:2]:
        assert group.distill_token_ids == [[[token] for token in row] for row in group.tokens]
    assert sent[2].distill_token_ids is None
    assert sent[2].distill_logprobs is None


def test_environments_without_a_teacher_have_no_flags_for_it():
    with pytest.raises(ConfigError, match="teacher"):
        read_command(Env, "serve", ["--teacher.base_url", "http://x"])


async def test_a_text_is_sent_along_where_asked(tmp_path):
    async with Rehearsal(Env, ["said"], tmp_path, include_messages=True) as rehearsal:
        (group,) = await rehearsal.process(1)
    assert [[message["role"] for message in chat] for chat in group["messages"]] == [["user", "assistant"]] * 2
    assert [chat[-1]["content"] for chat in group["messages"]] == ["said", "said"]


async def test_process_without_any_group_writes_nothing_and_says_so(tmp_path, caplog):
    class Empty(Env):
        async def get_next_item(self):
            return None

    caplog.set_level(logging.WARNING)
    path = tmp_path / "groups.jsonl"
    async with Rehearsal(Empty, ["x"], tmp_path, data_path_to_save_groups=str(path)) as rehearsal:
        from environments.sdk.runtime.commands import process

        await process(rehearsal.env)
    assert not path.exists()
    assert "no group was collected" in caplog.text


@pytest.mark.parametrize(("handling", "left"), [("STOP_TRAIN", 0), ("LIMIT_TRAIN", 4), ("NONE", 8)])
async def test_an_evaluation_leaves_training_the_workers_it_should(tmp_path, handling, left):
    async with Rehearsal(Env, ["x"], tmp_path, eval_handling=handling) as rehearsal:
        worker = EnvironmentWorker(rehearsal.env, client=None)
        assert worker._worker_limit() == 8
        worker._evaluation = anyio.CancelScope()
        assert worker._worker_limit() == left


async def test_process_asks_how_many_groups_where_no_number_is_given(tmp_path):
    """There is no run whose number of steps it could take, so -1 must not end silently."""
    async with Rehearsal(Env, ["a"], tmp_path) as rehearsal:
        with pytest.raises(NothingToCollect, match=r"--env\.total_steps"):
            await rehearsal.process(-1)
