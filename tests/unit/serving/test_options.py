"""The server's options: what turns sharing on, what vLLM is told, what is refused before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from example_trainer.errors import CannotServe
from example_trainer.processes.ports import ServerSockets, listen
from example_trainer.serving import start, startup
from example_trainer.serving.config import (
    ServerConfig,
    kv_budget_on_cpu,
    prepare_environment,
    read_config,
    vllm_arguments,
)
from example_trainer.serving.start import _answers_while_starting


def config(**fields):
    return ServerConfig(model="m", **fields)


@pytest.mark.parametrize(
    ("flag", "environ", "shares"),
    [
        (None, {}, False),
        (None, {"VLLM_ENABLE_SHARED_WEIGHTS": "1"}, True),
        (None, {"VLLM_ENABLE_SHARED_WEIGHTS": "0"}, False),
        (None, {"NUM_INFERENCE_NODES": "0"}, True),
        (None, {"NUM_INFERENCE_NODES": "2", "VLLM_ENABLE_SHARED_WEIGHTS": "1"}, False),
        (True, {}, True),
        (False, {"VLLM_ENABLE_SHARED_WEIGHTS": "1"}, False),
    ],
)
def test_the_flag_or_either_variable_turns_sharing_on(flag, environ, shares):
    assert config(share_weights=flag).shares(environ) is shares


@pytest.mark.parametrize(
    ("fields", "nodes", "awaits"),
    [({}, "2", True), ({}, "0", False), ({"share_weights": True}, "2", False), ({"policy_version": 3}, "2", False)],
)
def test_one_of_several_nodes_awaits_the_weights_that_a_trainer_sends(fields, nodes, awaits):
    assert config(**fields).awaits_policy({"NUM_INFERENCE_NODES": nodes}) is awaits


def test_the_manifest_goes_to_the_flags_directory_then_logdir_then_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config(bridge_dir=Path("/given")).manifest_directory({"LOGDIR": "/logs"}) == Path("/given")
    assert config().manifest_directory({"LOGDIR": "/logs"}) == Path("/logs")
    assert config().manifest_directory({}) == tmp_path


def test_the_token_comes_from_the_flag_then_the_environment():
    assert config(bridge_token="a").token({"ATROPOS_BRIDGE_TOKEN": "b"}) == "a"
    assert config().token({"ATROPOS_BRIDGE_TOKEN": "b"}) == "b"
    assert config().token({}) is None


@pytest.mark.parametrize(("share", "nbytes"), [(None, 1 << 29), (0.25, 1 << 28), (1.0, 1 << 30)])
def test_a_share_of_memory_on_a_cpu_is_at_most_one_gib(share, nbytes):
    assert kv_budget_on_cpu(share) == nbytes


def after(arguments, flag):
    return arguments[arguments.index(flag) + 1]


def test_vllm_is_told_a_budget_and_no_compilation_on_a_cpu():
    told = vllm_arguments(config(gpu_memory_utilization=0.5), [], on_cpu=True)
    assert after(told, "--kv-cache-memory-bytes") == str(1 << 29)
    assert "--enforce-eager" in told
    assert "--gpu-memory-utilization" not in told
    assert after(vllm_arguments(config(kv_cache_memory_bytes=5), [], on_cpu=True), "--kv-cache-memory-bytes") == "5"
    assert "--no-enforce-eager" in vllm_arguments(config(enforce_eager=False), [], on_cpu=True)


def test_vllm_is_told_the_share_itself_on_a_gpu():
    told = vllm_arguments(config(gpu_memory_utilization=0.5), [], on_cpu=False)
    assert after(told, "--gpu-memory-utilization") == "0.5"
    assert "--enforce-eager" not in told


def test_p13_serving_adapters_on_a_gpu_is_not_eager():
    """Eager mode, which older guides ask for with adapters, is what made them slow."""
    told = vllm_arguments(config(enable_lora=True), [], on_cpu=False)
    assert "--enable-lora" in told
    assert "--enforce-eager" not in told


def test_logprobs_are_processed_ones_unless_asked():
    assert after(vllm_arguments(config(), [], on_cpu=True), "--logprobs-mode") == "processed_logprobs"


def test_our_own_options_are_not_vllms():
    told = vllm_arguments(config(share_weights=True, bridge_token="t", allowed_hosts=["h"]), [], on_cpu=True)
    assert not {"--share-weights", "--bridge-token", "--allowed-hosts"} & set(told)


def test_vllms_other_options_pass_from_the_command_line_and_from_the_run_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {lr: 1.0e-4}\nvllm: {max_num_batched_tokens: 512, block_size: 32}\n")
    read, rest = read_config(["--config", str(file), "--model", "m", "--swap-space", "4"])
    assert rest == ["--swap-space", "4"]
    told = vllm_arguments(read, rest, on_cpu=True)
    assert after(told, "--max-num-batched-tokens") == "512"
    assert after(told, "--block-size") == "32"
    assert told[-2:] == ["--swap-space", "4"]


def test_what_vllm_reads_as_json_is_handed_on_as_json(tmp_path):
    file = tmp_path / "run.yaml"
    json_options = "allowed_origins: ['https://ui.example'], structured_outputs_config: {backend: guidance}"
    file.write_text(f"vllm: {{{json_options}, api_key: [a, b]}}")
    read, rest = read_config(["--config", str(file), "--model", "m"])
    told = vllm_arguments(read, rest, on_cpu=True)
    assert after(told, "--allowed-origins") == '["https://ui.example"]'
    assert after(told, "--structured-outputs-config") == '{"backend": "guidance"}'
    assert told[told.index("--api-key") + 1 :][:2] == ["a", "b"]


def test_what_the_user_set_in_the_environment_stays():
    environ = {"OMP_NUM_THREADS": "4"}
    prepare_environment(environ, model_is_local=True)
    assert environ["OMP_NUM_THREADS"] == "4"
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environ["HF_HUB_OFFLINE"] == "1"


def test_the_hub_is_left_alone_only_if_model_and_tokenizer_are_here(tmp_path):
    here, awaited = str(tmp_path), str(tmp_path / "base")
    for model, tokenizer, awaits, local in (
        (here, None, False, True),
        (here, here, False, True),
        ("owner/name", None, False, False),
        (here, "owner/name", False, False),
        (awaited, here, True, True),
        (awaited, "owner/name", True, False),
    ):
        read = ServerConfig(model=model, tokenizer=tokenizer, await_model=awaits)
        assert read.is_local is local, (model, tokenizer)


def test_the_listening_address_is_loopback_unless_asked():
    assert config().host == "127.0.0.1"


@pytest.mark.parametrize("name", ["./m", "/m", "m", "a/b/c"])
def test_a_model_that_is_nowhere_is_refused(name):
    with pytest.raises(CannotServe, match="no such directory"):
        startup.check_model(name)


def test_a_model_that_a_trainer_will_write_is_waited_for_and_not_refused(tmp_path, monkeypatch):
    directory, waits = tmp_path / "base", []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            directory.mkdir()
            (directory / "config.json").touch()

    monkeypatch.setattr(startup.time, "sleep", wait)
    startup.check_start(ServerConfig(model=str(directory), await_model=True), {})
    startup.await_model(str(directory))
    assert len(waits) == 2
    startup.await_model(str(directory))
    assert len(waits) == 2, "a base that is there, as in a run that is resumed, is loaded at once"


def test_a_name_on_the_hub_is_left_to_vllm():
    startup.check_model("owner/name")


@pytest.mark.parametrize(("version", "said"), [("0.31.2", "0.32"), (None, "not installed")])
def test_an_old_or_missing_vllm_is_refused(monkeypatch, version, said):
    monkeypatch.setattr(startup, "installed_vllm", lambda: version)
    with pytest.raises(CannotServe, match=said):
        startup.check_vllm_version()


def test_newer_vllms_are_accepted(monkeypatch):
    for version in ("0.32.0", "0.33.1.dev3", "1.0.0"):
        monkeypatch.setattr(startup, "installed_vllm", lambda version=version: version)
        startup.check_vllm_version()


def test_a_quantised_checkpoint_is_refused_for_sharing():
    startup.check_quantised_checkpoint(None)
    with pytest.raises(CannotServe, match="fp8"):
        startup.check_quantised_checkpoint("fp8")


def test_a_host_that_is_not_this_machines_is_told():
    with pytest.raises(CannotServe, match="--host"):
        listen("192.0.2.1", 0)


def test_of_two_that_want_a_port_one_has_it_from_the_start_and_the_other_is_told_who():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(CannotServe, match=rf"port {port} is taken by process {os.getpid()} .*--vllm-port"):
            listen("127.0.0.1", port, flag="--vllm-port")
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize(("capability", "told"), [((10, 0), "1"), ((12, 0), "1"), ((9, 0), None), (None, None)])
def test_launch_overlap_of_adapters_kernels_is_off_on_blackwell_alone(monkeypatch, capability, told):
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    from example_trainer.serving.vllm.compat import leave_out_launch_overlap_on_blackwell

    monkeypatch.delenv("VLLM_LORA_DISABLE_PDL", raising=False)
    found = None if capability is None else DeviceCapability(*capability)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: found)
    leave_out_launch_overlap_on_blackwell()
    assert os.environ.pop("VLLM_LORA_DISABLE_PDL", None) == told


def test_a_server_of_adapters_keeps_more_of_them_at_hand_than_one_batch_mixes():
    told = vllm_arguments(config(enable_lora=True, max_loras=3), [], on_cpu=True)
    assert (after(told, "--max-loras"), after(told, "--max-cpu-loras")) == ("3", "12")
    assert "--max-loras" not in vllm_arguments(config(), [], on_cpu=True)


def test_a_server_of_several_processes_does_not_wait_for_a_policy_that_cannot_come():
    for field in ("tensor_parallel_size", "pipeline_parallel_size"):
        flag = f"--{field.replace('_', '-')} 2"
        with pytest.raises(CannotServe, match=f"{flag} cannot be combined with --await-policy"):
            startup.check_publishable(config(await_policy=True, **{field: 2}))
        startup.check_publishable(config(**{field: 2}))
    startup.check_publishable(config(await_policy=True))


def test_an_adapter_needs_a_server_of_adapters_and_to_be_one(tmp_path):
    with pytest.raises(CannotServe, match="--adapter needs --enable-lora"):
        startup.check_adapters(config(adapter=tmp_path))
    with pytest.raises(CannotServe, match="holds no adapter_config"):
        startup.check_adapters(config(enable_lora=True, adapter=tmp_path))


@pytest.mark.parametrize(
    ("flags", "told"),
    [([], True), (["--max-num-seqs", "4"], True), (["--ssl-keyfile", "k"], False), (["--ssl_certfile=c"], False)],
)
def test_a_server_says_that_it_starts_unless_its_clients_expect_a_certificate_first(flags, told):
    with listen("127.0.0.1", 0) as listening:
        assert _answers_while_starting(ServerSockets(listening), flags) is told
        assert not _answers_while_starting(ServerSockets(listening, predecessor=listening), flags)


@pytest.mark.parametrize(
    ("fields", "on_gpu", "warned"),
    [
        ({"enable_lora": True, "enforce_eager": True}, True, True),
        ({"enable_lora": True, "enforce_eager": True}, False, False),
        ({"enable_lora": True}, True, False),
        ({"enforce_eager": True}, True, False),
    ],
)
def test_eager_mode_with_adapters_is_remarked_on_a_gpu(tmp_path, fields, on_gpu, warned):
    device = tmp_path / "nvidia0"
    if on_gpu:
        device.touch()
    found = config(**fields).warnings(device)
    assert bool(found) == warned
    assert all("leave --enforce-eager out" in line for line in found)


def test_remarks_are_logged_before_anything_is_loaded(monkeypatch, capfd):
    def refuse(*_):
        raise CannotServe("far enough")

    monkeypatch.setattr(ServerConfig, "warnings", lambda _: ["a remark"])
    monkeypatch.setattr(start, "check_start", refuse)
    with pytest.raises(CannotServe, match="far enough"):
        start.run(["--model", "m", "--enable-lora"])
    assert "a remark" in capfd.readouterr().err
