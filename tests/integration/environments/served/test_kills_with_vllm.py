"""Broker and real vLLM are killed and restarted while the tool user serves: each sample is trained exactly once.

Chats of several turns are in progress at each kill. `ATROPOS_ENVIRONMENT_KILLS=20` selects the long form.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter

import msgspec
import numpy as np
import pytest

from atropos_api.wire.groups import Group
from environments.tasks.data import ShuffledEpochs, load_questions
from example_trainer.processes.ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("ATROPOS_ENVIRONMENT_KILLS", "1"))
GROUP_SIZE = 4
GROUPS_BETWEEN_KILLS = 8 if KILLS > 1 else 3
QUESTIONS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(100) for b in range(100)]


class Training(threading.Thread):
    """A trainer that takes batch after batch until the test says that no more will come."""

    def __init__(self, trainer):
        super().__init__()
        self.trainer, self.groups, self.stopping = trainer, [], threading.Event()

    def run(self):
        while True:
            last = self.stopping.is_set()
            groups = self.trainer.step(wait_seconds=1)
            self.groups += groups
            if last and not groups:
                return

    def wait_for_groups(self, count, seconds=120):
        goal, deadline = len(self.groups) + count, time.monotonic() + seconds
        while len(self.groups) < goal:
            assert time.monotonic() < deadline, f"{len(self.groups)} groups, {goal} were awaited"
            time.sleep(0.02)


def identity(group):
    """Return the tokens and logprobs that identify a group, in the precision in which they are sent."""
    logprobs = tuple(np.array(row, np.float32).tobytes() for row in group.inference_logprobs)
    return tuple(map(tuple, group.tokens)), logprobs


def test_killed_brokers_and_vllm_servers_cost_no_group_and_double_none(
    served, writer, tokenizer_of_writer, programs, begin_training, rollouts_of, differences, tmp_path
):
    port, data, handed_in = free_port(), tmp_path / "questions.jsonl", tmp_path / "handed_in.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    url, store = f"http://127.0.0.1:{port}", str(tmp_path / "store")
    broker = programs("broker", "-m", "atropos_api", "--port", str(port), "--store", store, "--fsync", "always")
    trainer = begin_training(url, batch_size=GROUP_SIZE)
    trainer.announce(served.version)
    environment = programs(
        "environment",
        *("-m", "environments.tool_server", "serve", "--env.data_path", str(data), "--env.steps_per_eval", "0"),
        *("--env.rollout_server_url", url, "--openai.base_url", f"{served.server.url}/v1"),
        *("--env.tokenizer_name", str(writer), "--env.group_size", str(GROUP_SIZE), "--env.max_turns", "3"),
        *("--env.require_isolation", "false"),
        *("--env.data_path_to_save_groups", str(handed_in), "--env.ensure_scores_are_not_same", "false"),
        *("--env.max_batches_offpolicy", "8", "--env.drain_seconds", "60", "--env.use_wandb", "false"),
    )
    training = Training(trainer)
    training.start()
    first_version = served.version
    for _ in range(KILLS):
        training.wait_for_groups(GROUPS_BETWEEN_KILLS)
        broker.kill()
        broker.start()
        training.wait_for_groups(GROUPS_BETWEEN_KILLS)
        served.kill()
        served.restart()
        trainer.announce(served.publish())
    training.wait_for_groups(GROUPS_BETWEEN_KILLS)
    assert environment.terminate() == (0, [])
    training.stopping.set()
    training.join(timeout=120)

    sent = [msgspec.json.decode(line, type=Group) for line in handed_in.read_bytes().splitlines()]
    assert Counter(map(identity, training.groups)) == Counter(map(identity, sent))
    assert len(sent) == len(set(map(identity, sent)))
    draws = ShuffledEpochs(load_questions(data, "train"), 0)
    asked = [tokenizer_of_writer.decode(group.tokens[0]).split("[user]")[1].split("<eos>")[0] for group in sent]
    assert sorted(asked) == sorted(draws[number].question for number in range(len(sent)))
    rollouts = [rollout for group in training.groups for rollout in rollouts_of(group)]
    versions = {version for rollout in rollouts for _, _, version in rollout.spans}
    assert versions == set(range(first_version, first_version + KILLS + 1))
    assert max(float(differences(rollouts, version).max()) for version in versions) <= 1e-4
