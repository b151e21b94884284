"""One copy of the weights, shared with a real vLLM: changes show at once, are written under a fence, and proven."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from example_trainer.errors import ProofFailed
from example_trainer.modeling.optimizers import OptimizerSettings, make_optimizer
from example_trainer.weights.logprob_parity import TOLERANCES, _checked, _request, compare, probe_prompts
from example_trainer.weights.publish_loop import SyncBudget

pytestmark = pytest.mark.vllm

TOKENS = torch.arange(3, 67).view(2, 32)
VERSION_GAP = 1e-2
FORMS = {
    "views": {"forward_weights": "views"},
    "masters": {"forward_weights": "masters"},
    "none": {"forward_weights": "views", "master_weights": "none"},
}
"""Bridge settings by form: the place of the masters, and the weights that the forward reads."""


def samples_of(bridge, version):
    """Return samples of the probe from the server."""
    attachment = bridge._attached
    prompts = probe_prompts(int(bridge._policy.hf_config.vocab_size), attachment.info.max_model_len)
    generate = attachment.client.generate
    return [
        _checked(prompt, generate(_request(prompt)), version=version, boot_id=attachment.boot_id) for prompt in prompts
    ]


def agrees(policy, samples):
    agreement = compare(policy, samples)
    return agreement.difference.within(agreement.limit)


def shift(policy, scale, seed):
    noise = torch.Generator().manual_seed(seed)
    with policy.changing(), torch.no_grad():
        for master in policy.masters.values():
            master.mul_(1 + scale * torch.randn(master.shape, generator=noise))


def train_one_step(policy, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(policy.masters.values(), lr=0.01)
    optimizer.zero_grad()
    with policy.autocast():
        logits = policy.module(input_ids=TOKENS).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten())
    loss.backward()
    policy.collect_gradients()
    with policy.changing():
        optimizer.step()
    return loss.item()


def processes_of(server):
    leader = psutil.Process(server.process.pid)
    return [leader, *leader.children(recursive=True)]


def differing_share(policy, samples, old):
    """Return the share of tokens whose logprob under the old weights is clearly different."""
    apart = []
    for sample in samples:
        tokens = torch.tensor([[*sample.prompt, *output] for output in sample.outputs])
        with policy.with_weights(old), policy.autocast():
            logits = policy.module(input_ids=tokens).logits[:, len(sample.prompt) - 1 : -1].float()
        chosen = tokens[:, len(sample.prompt) :, None]
        before = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
        apart.append((before - torch.tensor(sample.logprobs)).abs().flatten() > VERSION_GAP)
    return torch.cat(apart).float().mean().item()


@pytest.mark.parametrize("form", FORMS)
def test_r5_the_servers_logprobs_follow_each_publish(shared_server, bridge_to, form):
    bridge = bridge_to(shared_server, **FORMS[form])
    policy = bridge.prepare()
    version = bridge.highest_version() + 1
    bridge.publish(version)
    for number in range(2):
        old = policy.snapshot()
        shift(policy, 0.3, seed=number)
        version += 1
        report = bridge.publish(version)
        assert report.version == shared_server.version == version
        samples = samples_of(bridge, version)
        assert agrees(policy, samples)
        assert differing_share(policy, samples, old) >= 0.9, "otherwise agreement proves nothing about the version"


def test_a_prompt_cached_under_the_old_version_gets_the_new_versions_values(shared_server, bridge_to):
    bridge = bridge_to(shared_server)
    policy = bridge.prepare()
    version = bridge.highest_version() + 1
    bridge.publish(version)
    prompt = list(range(2, 282))
    for _ in range(2):
        bridge._attached.client.generate(_request(prompt))
    shift(policy, 0.3, seed=9)
    bridge.publish(version + 1)
    answer = bridge._attached.client.generate(_request(prompt))
    assert agrees(policy, [_checked(prompt, answer, version=version + 1, boot_id=bridge._attached.boot_id)])


def test_one_copy_an_element_written_here_is_the_servers_with_no_request_in_between(shared_server, bridge_to):
    policy = bridge_to(shared_server, forward_weights="views").prepare()
    before = shared_server.checksum()
    parameter = policy.module.get_parameter("model.layers.1.self_attn.k_proj.weight")
    kept = parameter[3, 5].item()
    with torch.no_grad():
        parameter[3, 5] = kept + 1.0
    assert shared_server.checksum() != before
    with torch.no_grad():
        parameter[3, 5] = kept
    assert shared_server.checksum() == before


def test_one_copy_the_segment_is_the_same_file_in_both_processes_and_counted_once(shared_server, bridge_to):
    bridge = bridge_to(shared_server)
    policy = bridge.prepare()
    for view in policy.served.values():
        view.sum().item()  # touched in this process, so that the kernel counts it for this process
    storage = bridge._attached.manifest.storages[0]
    path = storage.handle["path"]
    inode = Path(path).stat().st_ino
    mapped = {pid: _mapping(pid, path) for pid in [os.getpid(), *(each.pid for each in processes_of(shared_server))]}
    holders = {pid: found for pid, found in mapped.items() if found}
    assert len(holders) >= 2
    assert {found["inode"] for found in holders.values()} == {inode}
    proportional = sum(found["pss_bytes"] for found in holders.values())
    assert proportional <= 1.1 * storage.nbytes + 2 * 4096 * len(holders)


def _mapping(pid, path):
    """Return inode and proportional size of a file's mapping in a process, from /proc/PID/smaps."""
    inode, pss, inside = None, 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            inside = path in line
            inode = int(fields[4]) if inside else inode
        elif inside and fields[0] == "Pss:":
            pss += int(fields[1]) * 1024
    return {"inode": inode, "pss_bytes": pss} if inode is not None else None


def test_no_file_over_a_megabyte_is_written_per_publish(shared_server, bridge_to):
    bridge = bridge_to(shared_server)
    policy = bridge.prepare()
    version = bridge.highest_version() + 1
    bridge.publish(version)
    processes = [psutil.Process(), *processes_of(shared_server)]
    written = _written(processes)
    for number in range(1, 6):
        shift(policy, 0.01, seed=number)
        bridge.publish(version + number)
    assert (_written(processes) - written) / 5 < 1_000_000


def _written(processes):
    """Return the bytes that these processes passed to write(), for files, pipes and sockets."""
    return sum(process.io_counters().write_chars for process in processes)


def test_r36_four_epochs_a_batch_are_one_publish_with_the_losses_of_the_view_form(shared_server, bridge_to):
    losses = {}
    base = None
    for form in ("views", "masters"):
        bridge = bridge_to(shared_server, forward_weights="masters" if form == "masters" else "views")
        policy = bridge.prepare()
        base = base or policy.snapshot()
        policy.load_masters(base)
        version = bridge.highest_version() + 1
        bridge.publish(version)
        losses[form] = []
        for _ in range(4):
            losses[form].append(train_one_step(policy))
            if form == "views":
                version += 1
                bridge.publish(version)
        if form == "masters":
            bridge.publish(version + 1)
        assert agrees(policy, samples_of(bridge, shared_server.version))
    assert losses["masters"] == losses["views"]


def test_a_publish_into_running_requests_reports_what_it_made_the_server_compute_again(shared_server, bridge_to):
    bridge = bridge_to(shared_server, drain_seconds=0.0)
    bridge._budget = SyncBudget(0.2, window_seconds=600.0)  # a slow machine takes its time over these requests
    policy = bridge.prepare()
    version = bridge.highest_version() + 1
    bridge.publish(version)
    request = {**_request([5, 6, 7]), "max_tokens": 700, "n": 16}
    answers, reports = [], []

    def is_reported():
        return any(report.paused_requests and report.recomputed_tokens for report in reports)

    with ThreadPoolExecutor(1) as pool:
        # Again if a request ended before a publish: beside an engine that waits in a busy loop for its workers, this
        # process got no time for up to 3 s on two cores.
        while not is_reported() and len(answers) < 10:
            asked = pool.submit(bridge._attached.client.generate, request)
            for _ in range(3):
                time.sleep(0.3)
                shift(policy, 0.02, seed=len(reports))
                version += 1
                reports.append(bridge.publish(version))
            answers.append(asked.result())
    assert is_reported()
    assert sum(report.generated_tokens for report in reports) > 0
    assert len({span[2] for spans in answers[-1]["policy_versions"] for span in spans}) > 1
    assert bridge._budget.used_share() > 0


@pytest.mark.parametrize("form", ["views", "none"])
def test_r26_a_trainer_killed_while_it_writes_leaves_a_server_that_refuses_until_a_whole_publish(
    shared_server, bridge_to, form
):
    """Without masters it is killed inside the optimizer step; the weights then come from the last checkpoint."""
    bridge = bridge_to(shared_server, lease_seconds=1.0, **FORMS[form])
    policy = bridge.prepare()
    bridge.publish(bridge.highest_version() + 1)
    checkpoint = {name: tensor.clone() for name, tensor in policy.checkpoint_tensors().items()}
    trainer = os.fork()
    if trainer == 0:
        die_while_writing(bridge, policy)
    assert os.WTERMSIG(os.waitpid(trainer, 0)[1]) == signal.SIGKILL
    bridge.close()
    deadline = time.monotonic() + 30
    while not shared_server.info()["torn"] and time.monotonic() < deadline:
        time.sleep(0.1)
    refused = shared_server.post("/generate", {"prompt": [1, 2, 3], "max_tokens": 1})
    assert refused.status_code == 503
    assert refused.json()["type"].endswith("weights-torn")

    bridge = bridge_to(shared_server, **FORMS[form])
    policy = bridge.prepare()
    assert bridge.needs_publish()
    policy.load_masters(checkpoint)
    version = bridge.highest_version() + 1
    bridge.publish(version)
    assert not bridge.needs_publish()
    assert all(torch.equal(tensor, checkpoint[name]) for name, tensor in policy.checkpoint_tensors().items())
    assert agrees(policy, samples_of(bridge, version))


def test_r41_a_trainer_killed_between_its_whole_write_and_the_end_leaves_the_new_version_served(
    shared_server, bridge_to
):
    bridge = bridge_to(shared_server, lease_seconds=1.0)
    policy = bridge.prepare()
    version = bridge.highest_version() + 1
    bridge.publish(version)
    with torch.no_grad():
        for master in policy.masters.values():
            master.mul_(1 + 0.1 * torch.randn(master.shape))
    trainer = os.fork()
    if trainer == 0:
        die_with_the_whole_write(bridge, version + 1)
    assert os.WTERMSIG(os.waitpid(trainer, 0)[1]) == signal.SIGKILL
    deadline = time.monotonic() + 30
    while shared_server.info()["publishing"] and time.monotonic() < deadline:
        time.sleep(0.05)
    info = shared_server.info()
    assert (info["policy_version"], info["torn"], info["paused"]) == (version + 1, False, False)
    assert agrees(policy, samples_of(bridge, version + 1))


def die_with_the_whole_write(bridge, version):
    """Publish in a process of its own that is killed before it ends the publish."""
    try:
        bridge._attached.client.end_publish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        bridge.publish(version)
    finally:
        os._exit(1)


def die_while_writing(bridge, policy):
    """Begin a publish in a process of its own, write a part as this form does, and be killed."""
    try:
        if policy.steps_served:
            with policy.changing(), torch.no_grad():
                next(iter(policy.masters.values())).zero_()
                os.kill(os.getpid(), signal.SIGKILL)
        bridge._attached.client.begin_publish("d" * 32, lease_seconds=1.0, drain_seconds=0.0, in_flight="drain")
        bridge._attached.header.begin_write(bridge.highest_version() + 1)
        next(iter(policy.served.values())).zero_()
        os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)


def test_bf16_is_proven_by_rounding_and_learns_in_the_served_tensors_without_masters(restartable_server, bridge_to):
    """The first steps have fp32 masters, the rest none: each step is rounded stochastically in the served tensors."""
    restartable_server.start("--dtype", "bfloat16")
    bridge = bridge_to(restartable_server, forward_weights="views")
    policy = bridge.prepare()
    bridge.publish(1)
    train_one_step(policy)
    bridge.publish(2)
    assert policy.dtype == torch.bfloat16
    agreement = compare(policy, samples_of(bridge, 2))
    assert agreement.limit.mean >= TOLERANCES[torch.bfloat16].mean
    assert agreement.difference.within(agreement.limit)
    bridge.close()

    bridge = bridge_to(restartable_server, **FORMS["none"])
    policy = bridge.prepare()
    bridge.publish(3)
    first = policy.snapshot()
    optimizer = make_optimizer(policy.masters.values(), OptimizerSettings(name="adamw", lr=2e-3))
    losses = []
    for version in range(4, 8):
        losses.append(train_one_step(policy, optimizer))
        bridge.publish(version)
    assert losses[-1] < losses[0] - 0.5
    assert policy.is_served
    assert {master.dtype for master in policy.masters.values()} == {torch.bfloat16}
    samples = samples_of(bridge, 7)
    assert compare(policy, samples, agreement.limit).difference.within(agreement.limit)
    with policy.with_weights(first):
        assert not compare(policy, samples, agreement.limit).difference.within(agreement.limit), "it proves nothing"


@pytest.mark.skipif(os.environ.get("ATROPOS_KILLS") != "all", reason="two starts of vLLM; ATROPOS_KILLS=all runs it")
@pytest.mark.parametrize("form", ["views", "none"])
def test_r27_bf16_survives_a_killed_and_restarted_server(restartable_server, bridge_to, form):
    restartable_server.start("--dtype", "bfloat16")
    bridge = bridge_to(restartable_server, **FORMS[form])
    policy = bridge.prepare()
    bridge.publish(1)
    train_one_step(policy)
    bridge.publish(2)
    restartable_server.kill()
    trained = policy.snapshot()
    restartable_server.start("--dtype", "bfloat16")
    assert bridge.publish(3).version == 3
    assert all(torch.equal(policy.served[name], weight) for name, weight in trained.items())
    train_one_step(policy)
    bridge.publish(4)
    assert agrees(policy, samples_of(bridge, 4))


def leave_one_out(policy):
    name = "model.layers.1.self_attn.v_proj.weight"
    policy.served[name] = policy.served[name].clone()


def write_into_a_wrong_slice(policy):
    query = policy.served["model.layers.0.self_attn.q_proj.weight"]
    name = "model.layers.0.self_attn.k_proj.weight"
    policy.served[name] = query[: len(policy.served[name])]


@pytest.mark.parametrize("fault", [leave_one_out, write_into_a_wrong_slice])
def test_a_sync_check_after_every_publish_finds_a_fault_within_one(shared_server, bridge_to, fault):
    bridge = bridge_to(shared_server, forward_weights="masters", sync_check="every")
    policy = bridge.prepare()
    version = bridge.highest_version()
    for _ in range(2):
        version += 1
        bridge.publish(version)
    policy.served = dict(policy.served)
    fault(policy)
    shift(policy, 0.3, seed=5)
    with pytest.raises(ProofFailed):
        bridge.publish(version + 1)


def test_a_sync_check_notices_a_server_that_reads_other_memory(shared_server, bridge_to):
    bridge = bridge_to(shared_server, forward_weights="masters")
    bridge.prepare()
    attachment = bridge._attached
    attachment.check_memory()
    storage = next(iter(attachment.storages))
    attachment.storages[storage] = attachment.storages[storage].clone()
    attachment.storages[storage][5] ^= 1
    with pytest.raises(ProofFailed, match="checksum"):
        attachment.check_memory()
