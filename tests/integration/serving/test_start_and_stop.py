"""The server starts, refuses bad settings, and ends as it should."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from example_trainer.processes.tree import is_alive

REPOSITORY = Path(__file__).resolve().parents[3]
MODULE = [sys.executable, "-m", "example_trainer.vllm_api_server"]


def run(arguments, *, cwd=REPOSITORY, command=MODULE, **environ):
    line, variables = [*command, *map(str, arguments)], os.environ | environ
    return subprocess.run(line, cwd=cwd, env=variables, capture_output=True, text=True, timeout=120, check=False)


def refused(finished, *said):
    assert finished.returncode == 2, finished.stderr
    last = finished.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm_api_server.py: error: ")
    for part in said:
        assert part in last
    assert "Traceback" not in finished.stderr


def test_help_is_the_same_by_module_by_path_and_from_its_folder():
    script = REPOSITORY / "example_trainer" / "vllm_api_server.py"
    helps = [
        run(["--help"]).stdout,
        run(["--help"], command=[sys.executable, script]).stdout,
        run(["--help"], command=[sys.executable, "vllm_api_server.py"], cwd=script.parent).stdout,
    ]
    assert "--share-weights" in helps[0]
    assert len(set(helps)) == 1


def test_help_loads_neither_vllm_nor_torch_nor_fastapi():
    probe = (
        "import sys; from example_trainer.vllm_api_server import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('vllm', 'torch', 'fastapi', 'transformers') if name in sys.modules])"
    )
    assert run([], command=[sys.executable, "-c", probe]).stdout.strip().endswith("[]")


def test_a_missing_model_is_reported_at_once(tmp_path):
    refused(run(["--model", tmp_path / "nothing"]), "nothing", "no such directory")
    refused(run(["--model", tmp_path]), "config.json")


def test_a_taken_port_is_reported_with_its_holder_and_the_flag(tiny_qwen2):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(run(["--model", tiny_qwen2, "--port", port]), str(port), f"pid {os.getpid()}", "--port")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size 2"),
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size 2"),
        (["--quantization", "fp8"], "--quantization fp8"),
        (["--enable-lora"], "--enable-lora"),
        (["--enable-sleep-mode"], "--enable-sleep-mode"),
        (["--enable-cumem-allocator"], "--enable-cumem-allocator"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_reason(tiny_qwen2, flags, said):
    refused(run(["--model", tiny_qwen2, "--port", 0, "--share-weights", *flags]), said, "--share-weights")


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "8 experts (num_local_experts)"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised (awq)"),
    ],
    ids=["experts", "quantised"],
)
def test_a_checkpoint_that_cannot_be_shared_is_refused_before_it_is_loaded(tmp_path, described, said):
    (tmp_path / "config.json").write_text(json.dumps(described))
    refused(run(["--model", tmp_path, "--port", 0, "--share-weights"]), said, "cannot be shared")


def test_an_allocator_that_cannot_be_shared_is_refused(tiny_qwen2):
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    refused(run(["--model", tiny_qwen2, "--port", 0, "--share-weights"], **setting), "expandable_segments")


@pytest.mark.vllm
def test_an_unknown_flag_gets_one_line_with_the_nearest(tiny_qwen2):
    refused(run(["--model", tiny_qwen2, "--port", 0, "--max-num-sequences", "4"]), "did you mean --max-num-seqs")


@pytest.mark.parametrize("seconds", [0, 1.8, 2.1])  # while it loads; in its first calls; about when it is ready
def test_a_start_whose_engine_is_killed_is_not_a_refusal_so_that_a_launcher_tries_again(tiny_qwen2, seconds):
    command = [*MODULE, "--model", tiny_qwen2, "--port", "0"]
    with subprocess.Popen(list(map(str, command)), cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as server:
        process, engines = psutil.Process(server.pid), []
        while not engines:
            assert server.poll() is None
            time.sleep(0.02)
            engines = [child for child in process.children() if "EngineCore" in title(child)]
        time.sleep(seconds)
        engines[0].kill()
        last = server.communicate(timeout=120)[1].strip().splitlines()[-1]
    assert server.returncode == 137 or (seconds > 0 and server.returncode == 1), "it may have been ready"
    assert last.startswith("vllm_api_server.py: error: vLLM's engine has failed: ")
    assert "was killed by" in last


@pytest.mark.vllm
def test_r27_nothing_is_served_before_the_first_publish_and_old_files_are_swept(start_server, wait_until):
    temporary = Path(tempfile.mkdtemp())  # pytest's own are too long for sockets
    dead = Path("/dev/shm/atropos-00000000deadbeef-weights")
    dead.write_bytes(b"left by a server that was killed")
    other = Path("/dev/shm/atropos-of-somebody-else")
    other.write_bytes(b"not ours")
    try:
        variables = {"NUM_INFERENCE_NODES": "0", "VLLM_USE_V1": "0", "VLLM_API_KEY": "sesam", "TMPDIR": str(temporary)}
        server = start_server(environ=variables)
        assert not dead.exists()
        assert other.exists()
    finally:
        other.unlink()
        dead.unlink(missing_ok=True)
    assert "VLLM_USE_V1 is ignored" in server.log_path.read_text()
    for path in ("/bridge/info", "/bridge/debug", "/lora/status", "/metrics", "/v1/models"):
        assert server.client.get(path).status_code == 401, "with a key everything but health asks for it"
    assert server.post("/generate", {"prompt": [5]}).status_code == 401
    server.client.headers["Authorization"] = "Bearer sesam"
    info = server.info()
    assert (info["sharing"], info["policy_version"], info["torn"]) == (True, None, False)
    for path, body in (("/generate", {"prompt": [5]}), ("/v1/completions", {"model": info["model"], "prompt": [5]})):
        answer = server.post(path, body)
        assert answer.status_code == 503
        assert answer.json()["type"].endswith("no-policy")
        assert answer.headers["retry-after"] == "1"
    assert server.client.get("/health").status_code == 200

    server.publish()
    assert server.generate([5], max_tokens=1)["policy_versions"] == [[[0, 1, 1]]]
    stop_under_load(server, wait_until)
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
    shutil.rmtree(temporary)


def stop_under_load(server, wait_until):
    """R39: SIGTERM with requests in flight ends everything soon; the server answers what it can and leaves nothing."""
    boot_id, family = server.info()["boot_id"], psutil.Process(server.process.pid).children(recursive=True)

    def ask():
        try:
            body = {"prompt": [5, 6], "max_tokens": 4000, "ignore_eos": True, "compact": True}
            return server.client.post("/generate", json=body).status_code
        except httpx.TransportError:
            return None

    with ThreadPoolExecutor(32) as pool:
        pending = [pool.submit(ask) for _ in range(32)]
        wait_until(lambda: server.debug()["requests_inside"] == 32)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0
        assert time.monotonic() - began < 10
        answers = [future.result() for future in pending]
    assert set(answers) <= {200, 503, None}
    assert answers.count(503) > 0
    wait_until(lambda: not any(map(is_alive, family)), 10)  # workers end once they notice that the server has
    assert not list(Path("/dev/shm").glob(f"atropos-{boot_id}-*"))
    assert not server.manifest_path.exists()


@pytest.mark.vllm
def test_the_port_of_a_killed_server_is_free_while_its_engine_ends(start_server, wait_until):
    """A launcher starts a killed server again at once, on the same port; an engine may need seconds to end."""
    server = start_server()
    family = psutil.Process(server.process.pid).children(recursive=True)
    held = {each.laddr.port for process in family for each in process.net_connections("tcp")}
    assert httpx.URL(server.url).port not in held
    server.process.kill()
    wait_until(lambda: not any(map(is_alive, family)), 30)


@pytest.mark.vllm
def test_an_engine_that_was_spawned_ends_with_a_server_that_is_killed(start_server, wait_until):
    """On a GPU every engine is spawned; here vLLM starts the processes itself, with a worker below the engine core."""
    server = start_server(
        environ={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
    )
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert {"resource_tracker", "EngineCore", "Worker"} <= {
        word for process in family for word in ("resource_tracker", "EngineCore", "Worker") if word in title(process)
    }, "a forked engine needs no resource tracker"
    server.process.kill()
    wait_until(lambda: not any(map(is_alive, family)), 30)


def title(process):
    """Return a process's command line, into which vLLM's processes write their role; it is empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
