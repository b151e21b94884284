"""A run of both contracts through a client that was generated from the broker's OpenAPI document.

Run by `test_generated_client.py` in the environment of the generator: `python generated_client.py URL`.
"""

import sys

from broker_client import Client
from broker_client.api.atropos_contract import get_batch, post_register, post_scored_data, post_scored_data_list
from broker_client.api.operations import get_v1_status
from broker_client.api.v1 import (
    get_v1_batches_number,
    post_v1_batches_number_commit,
    post_v1_environments,
    post_v1_groups,
    post_v1_runs,
    post_v1_runs_run_id_finish,
    put_v1_environments_environment_id_heartbeat,
    put_v1_policy,
)
from broker_client.models import (
    Batch,
    CommitRequest,
    EnvironmentRequest,
    FinishRequest,
    Group,
    LegacyRegistration,
    NextBatch,
    PolicyUpdate,
    Problem,
    RunRequest,
    Status,
    Submission,
)


def group(ident):
    return Group(
        tokens=[[ident, 2], [ident, 3]],
        masks=[[-100, 2], [-100, 3]],
        scores=[0.0, 1.0],
        inference_logprobs=[[1.0, -0.5], [1.0, -0.25]],
        policy_versions=[[[1, 2, 7]], [[1, 2, None]]],
    )


def use_v1(client):
    run = post_v1_runs.sync(
        client=client, body=RunRequest(name="generated", batch_size=4, max_token_length=9, num_steps=3)
    )
    env = post_v1_environments.sync(
        client=client, body=EnvironmentRequest(name="env", group_size=2, max_token_length=9)
    )
    put_v1_policy.sync(client=client, body=PolicyUpdate(run_id=run.run_id, version=7, step=0, published_at=1.0))
    answer = post_v1_groups.sync(
        client=client,
        body=Submission(environment_id=env.environment_id, groups=[group(1), group(2)]),
        idempotency_key="one",
    )
    assert (answer.accepted, answer.duplicates, answer.pacing.state) == (2, 0, "run")
    batch = get_v1_batches_number.sync(1, client=client, run_id=run.run_id, epoch=run.epoch, wait=1.0)
    assert isinstance(batch, Batch)
    assert [one.tokens for one in batch.groups] == [group(1).tokens, group(2).tokens]
    assert batch.groups[0].policy_versions == group(1).policy_versions
    committed = post_v1_batches_number_commit.sync_detailed(
        1, client=client, body=CommitRequest(run_id=run.run_id, epoch=run.epoch)
    )
    assert committed.status_code == 204
    gone = get_v1_batches_number.sync(1, client=client, run_id=run.run_id)
    assert isinstance(gone, Problem)
    assert (gone.status, gone.type_.endswith("batch-committed")) == (410, True)
    pacing = put_v1_environments_environment_id_heartbeat.sync(env.environment_id, client=client)
    assert pacing.policy_version == 7
    status = get_v1_status.sync(client=client)
    assert isinstance(status, Status)
    assert (status.run.name, status.run.committed_batch, status.environments[0].name) == ("generated", 1, "env")
    assert status.counters.groups_received_total == 2
    ended = post_v1_runs_run_id_finish.sync_detailed(run.run_id, client=client, body=FinishRequest(epoch=run.epoch))
    assert ended.status_code == 204


def use_atropos_contract(client):
    wanted = LegacyRegistration(
        wandb_group="g",
        wandb_project="p",
        batch_size=4,
        max_token_len=9,
        checkpoint_dir="",
        save_checkpoint_interval=0,
        starting_step=0,
        num_steps=3,
    )
    assert post_register.sync(client=client, body=wanted).uuid > 0
    assert get_batch.sync(client=client).batch is None
    assert post_scored_data.sync(client=client, body=group(3)).status == "received"
    assert post_scored_data_list.sync(client=client, body=[group(4)]).groups_processed == 1
    handed = get_batch.sync(client=client)
    assert isinstance(handed, NextBatch)
    assert [one.tokens[0][0] for one in handed.batch] == [3, 4]


with Client(base_url=sys.argv[1]) as caller:
    use_v1(caller)
    use_atropos_contract(caller)
sys.stdout.write("done\n")
