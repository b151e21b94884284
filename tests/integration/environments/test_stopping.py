"""One SIGTERM ends an environment, whatever it waits for; an impossible start is one line and exit code 2.

The fast form blocks threads by sleeping; with `ATROPOS_HUB_WAITS=1` a hub accepts connections and never answers.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest

ENDS_WITHIN_SECONDS = 12.0  # an orderly end takes less than one, a blocked one the three it is allowed
WAITING = """
import sys, time
from pathlib import Path
from environments.sdk import BaseEnv
from environments.sdk.runtime import commands
from atropos_api.common.concurrency import run_blocking

def wait(*_):
    Path({marker!r}).touch()
    time.sleep(600)

class Waiting(BaseEnv):
    async def setup(self):
        if {what!r} == "data":
            await run_blocking(wait, about="data")
        if {what!r} == "setup":
            wait()

    async def get_next_item(self):
        return None

    async def collect_trajectories(self, item):
        return None, []

if {what!r} == "tokenizer":
    commands.load_tokenizer = wait
Waiting.cli()
"""


@contextmanager
def silent_server():
    """A server that accepts connections and never answers: its address, and a function that waits for a connection."""
    with socket.socket() as listener, ExitStack() as taken:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(100)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", lambda: taken.enter_context(listener.accept()[0])


@contextmanager
def started(*command, **environment):
    process = subprocess.Popen(
        [sys.executable, *command],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "WANDB_MODE": "disabled", **environment},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until_there(path, process):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def ends_by_one_sigterm(waits):
    """Stop each process once it waits and return the exit codes; `waits`: name to process and a wait for that."""
    codes = {}
    for name, (process, wait) in waits.items():
        wait()
        time.sleep(0.2)
        assert process.poll() is None, f"{name}: ended before it was told to: {process.stderr.read()}"
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        codes[name] = process.wait(timeout=60)
        assert time.monotonic() - begun < ENDS_WITHIN_SECONDS, name
    return codes


def test_one_sigterm_ends_an_environment_whatever_it_waits_for(tokenizer_folder, tmp_path):
    vllm, local = ("--openai.server_type", "vllm"), ("--env.tokenizer_name", str(tokenizer_folder))
    with ExitStack() as stack:

        def waiting(what, *flags):
            file, marker = tmp_path / f"{what}_env.py", tmp_path / what
            file.write_text(WAITING.format(what=what, marker=str(marker)))
            process = stack.enter_context(started(str(file), "serve", *vllm, *flags))
            return process, lambda: until_there(marker, process)

        inference, broker = (stack.enter_context(silent_server()) for _ in range(2))
        waits = {
            "tokenizer": waiting("tokenizer", *local),
            "data": waiting("data", *local),
            "setup that blocks": waiting("setup", *local),
            "server": (waiting("served", "--openai.base_url", f"{inference[0]}/v1")[0], inference[1]),
            "broker": (waiting("brokered", *local, "--env.rollout_server_url", broker[0])[0], broker[1]),
        }
        codes = ends_by_one_sigterm(waits)
    assert codes.pop("setup that blocks") == 128 + signal.SIGTERM
    assert set(codes.values()) == {0}, codes


@pytest.mark.skipif(
    "ATROPOS_HUB_WAITS" not in os.environ, reason="loads transformers and datasets: ATROPOS_HUB_WAITS=1"
)
def test_one_sigterm_ends_an_environment_in_the_hubs_retries(tokenizer_folder, tmp_path):
    home = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    with ExitStack() as stack:
        for_tokenizer, for_data = (stack.enter_context(silent_server()) for _ in range(2))
        arithmetic = ("-m", "environments.arithmetic_server", "serve", "--env.tokenizer_name", "no/such")
        gsm8k = ("-m", "environments.gsm8k_server", "serve", "--env.tokenizer_name", str(tokenizer_folder))
        waits = {
            name: (stack.enter_context(started(*command, HF_ENDPOINT=url, **home)), connected)
            for name, command, (url, connected) in (("tokenizer", arithmetic, for_tokenizer), ("data", gsm8k, for_data))
        }
        assert set(ends_by_one_sigterm(waits).values()) == {0}


@pytest.mark.parametrize("verb", ["serve", "process"])
def test_no_tokenizer_is_one_line_and_exit_code_2(verb, tmp_path):
    command = ("-m", "environments.arithmetic_server", verb, "--env.tokenizer_name", str(tmp_path / "none"))
    with started(*command) as process:
        _, stderr = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "no such folder; set --env.tokenizer_name" in stderr
    assert "Traceback" not in stderr


def test_a_signal_ends_process_without_a_traceback(tokenizer_folder, tmp_path):
    with silent_server() as (url, connected):
        command = ("-m", "environments.arithmetic_server", "process", "--openai.base_url", f"{url}/v1")
        flags = ("--env.tokenizer_name", str(tokenizer_folder), "--env.data_path_to_save_groups", str(tmp_path / "g"))
        with started(*command, *flags) as process:
            connected()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 128 + signal.SIGINT
            assert "Traceback" not in process.stderr.read()
