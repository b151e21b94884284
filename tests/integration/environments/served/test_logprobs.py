"""GSM8K, competition mathematics and the tool user together feed one run from a real vLLM whose weights change.

The broker's batches are compared with the model itself: every trained token's logprob under the version of the weights
that its span names, and the choice of trained tokens. `LOGPROB_TOKENS` sets more than 2,000 trained tokens of each
environment.
"""

from __future__ import annotations

import itertools
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from example_trainer.processes.ports import free_port

pytestmark = pytest.mark.vllm

TOKENS = int(os.environ.get("LOGPROB_TOKENS", "2000"))
GROUP_SIZE = 8
BATCHES_A_VERSION = 3
SUMS = [(f"What is {a} + {b}?", str(a + b)) for a, b in itertools.product(range(10), repeat=2) if a + b < 10]
SETTINGS = {
    "gsm8k": ("gsm8k_server", "--env.max_token_length", "1024", "--env.max_batches_offpolicy", "1"),
    # Answers are cut off at 60 tokens at first and at 400 at the end of a run of 40 planned steps.
    "math": (
        *("math_server_zero", "--env.max_token_length", "400", "--env.start_tok_length", "60"),
        *("--env.total_steps", "40", "--env.max_batches_offpolicy", "1"),
    ),
    "python_tool": (
        *("tool_server", "--env.max_token_length", "2000", "--env.max_new_tokens", "512", "--env.max_turns", "3"),
        *("--env.require_isolation", "false"),
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The same sums in each form of data that users have."""
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in SUMS]
    (folder / "sums.jsonl").write_text("\n".join(lines))
    pq.write_table(
        pa.table(dict(zip(("prompt", "response"), zip(*SUMS, strict=True), strict=True))), folder / "p.parquet"
    )
    (folder / "sums").mkdir()
    lines = [json.dumps({"prompt": question, "response": f"#### {answer}"}) for question, answer in SUMS]
    (folder / "sums" / "train.jsonl").write_text("\n".join(lines))
    return {"gsm8k": folder / "sums.jsonl", "math": folder / "p.parquet", "python_tool": folder / "sums"}


@pytest.fixture(scope="module")
def rollouts(served, writer, data, programs, begin_training, rollouts_of):
    """Return each environment's rollouts that a trainer received while it published a version every few batches."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    programs("broker", "-m", "atropos_api", "--port", str(port), "--store", "memory")
    trainer = begin_training(url, batch_size=4 * GROUP_SIZE)
    trainer.announce(served.version)
    servers = [
        programs(
            name,
            *("-m", f"environments.{module}", "serve", "--env.data_path", str(data[name]), *flags),
            *("--env.rollout_server_url", url, "--openai.base_url", f"{served.server.url}/v1"),
            *("--env.tokenizer_name", str(writer), "--env.group_size", str(GROUP_SIZE)),
            *("--env.steps_per_eval", "0", "--env.use_wandb", "false", "--env.ensure_scores_are_not_same", "false"),
        )
        for name, (module, *flags) in SETTINGS.items()
    ]
    found = {name: [] for name in SETTINGS}
    while not all(has_enough(each) for each in found.values()):
        groups = trainer.step()
        names = {entry["environment_id"]: entry["name"] for entry in trainer.client.status()["environments"]}
        for group in groups:
            assert len(group.tokens) == GROUP_SIZE
            found[names[group.env_id]] += rollouts_of(group)
        if len(trainer.batches) % BATCHES_A_VERSION == 0:
            trainer.announce(served.publish())
    # Two environments are stopped in the middle of the run, and drain; the third ends by itself with the run.
    assert [server.terminate() for server in servers[:2]] == [(0, [])] * 2
    trainer.client.finish_run(trainer.run.run_id, epoch=trainer.run.epoch)
    assert servers[2].process.wait(30) == 0
    return found


def has_enough(rollouts):
    """Return True if an environment has enough tokens, of three versions; on a busy machine that takes long."""
    return sum(len(rollout.trained) for rollout in rollouts) >= TOKENS and len(versions_of(rollouts)) >= 3


def versions_of(rollouts):
    return {version for rollout in rollouts for _, _, version in rollout.spans}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_trainer_recomputes_every_logprob_under_the_version_it_is_stamped_with(rollouts, differences, name):
    """R5: they differ in fp32 by at most 1e-4, and 5e-6 in the mean; under another version by far more."""
    versions = versions_of(rollouts[name])
    assert None not in versions
    errors = torch.cat([differences(rollouts[name], version) for version in versions])
    assert len(errors) == sum(len(rollout.trained) for rollout in rollouts[name]) >= TOKENS
    assert float(errors.max()) <= 1e-4
    assert float(errors.mean()) <= 5e-6
    version = min(versions)
    mistaken = differences(rollouts[name], version, weights_of=version + 1)
    assert float(mistaken.mean()) > 0.05


@pytest.mark.parametrize("name", SETTINGS)
def test_spans_masks_and_logprobs_tell_of_the_same_tokens(rollouts, name):
    for rollout in rollouts[name]:
        trained = rollout.trained
        assert [rollout.tokens[place] for place in trained] == [rollout.mask[place] for place in trained]
        assert [place for start, end, _ in rollout.spans for place in range(start, end)] == trained
        assert [place for place, logprob in enumerate(rollout.logprobs) if logprob != 1.0] == trained


def test_all_turns_of_the_tool_user_are_trained_and_no_end_token_is_doubled(rollouts, tokenizer_of_writer):
    """The tokens show it: an answer begins after the assistant's mark and ends with the first end token."""
    end, assistant, tool = map(tokenizer_of_writer.encode, ("<eos>", "[assistant]", "[tool]"))
    counts = []
    for rollout in rollouts["python_tool"]:
        speaking, turns, expected = False, 0, []
        for place, token in enumerate(rollout.tokens):
            if speaking:
                expected.append(place)
            elif [token] == assistant:
                turns += 1
            speaking = (speaking or [token] == assistant) and [token] != end
        assert rollout.trained == expected
        assert end * 2 not in [rollout.tokens[place : place + 2] for place in range(len(rollout.tokens))]
        assert turns == 1 or tool[0] in rollout.tokens
        counts.append(turns)
    assert max(counts) == 3
    assert sum(turns > 1 for turns in counts) >= len(counts) / 5


def test_one_rollout_may_have_turns_of_several_versions(rollouts):
    assert any(len({version for _, _, version in rollout.spans}) > 1 for rollout in rollouts["python_tool"])
