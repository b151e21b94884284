"""Whole runs in the modes that replace their server: no request of clients that are unaware of it fails.

Every step replaces the server, with the launcher, broker, trainer and environment of a run at work next to the clients.
`ATROPOS_HANDOVER_STEPS=40 pytest tests/e2e/test_handover_runs.py` takes half an hour;
`tests/integration/weights/test_handover.py` has the same without vLLM in seconds.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import httpx
import pytest

from example_trainer.processes.tree import wait_until
from tests.integration.weights.plain_clients import PlainClients

STEPS = int(os.environ.get("ATROPOS_HANDOVER_STEPS", "0"))
ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    *("--vllm-restart-interval", "1", "--checkpoint-interval", "1", "--keep-last", "1"),
    *("--env.eval_at_start", "false", "--env.eval_at_end", "false"),
)
START_SECONDS = 600.0
STEP_SECONDS = 120.0
MORE_STEPS = 3
"""Further steps after the counted ones, so that the run does not end under the clients."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(STEPS == 0, reason="half an hour; ATROPOS_HANDOVER_STEPS=40 runs it"),
]

logger = logging.getLogger(__name__)


def requests_for(model):
    """Return requests of tokens and of text, short and longer, streamed and whole."""

    def request(number, turn):
        length = 8 + (5 * number + 7 * turn) % 56
        if (number + turn) % 2:
            prompt = {"prompt_token_ids": [3 + (number + turn) % 20, 7, 5]}
            return "/generate", {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "compact": True}
        body = {"model": model, "prompt": [3 + number % 20, 7], "max_tokens": length, "ignore_eos": True}
        return "/v1/completions", body | {"stream": turn % 8 == 0}

    return request


def read(path, response, text):
    """Return the version of an answer; `/v1/completions` returns none."""
    if path == "/v1/completions":
        assert text.endswith(b"data: [DONE]\n\n") or json.loads(text)["choices"][0]["finish_reason"] == "length", text
        return {"version": None}
    told = json.loads(text)
    if path == "/bridge/info":
        return {"version": int(told["policy_version"])}
    ((_, end, version),) = told["policy_versions"][0]
    assert end == len(told["token_ids"][0])
    return {"version": int(version)}


@pytest.mark.parametrize("mode", ["none", "lora_restart"])
def test_r42_no_request_of_24_clients_fails_and_no_version_falls_over_a_run_that_replaces_its_server_at_every_step(
    start_launcher, traces, mode
):
    demo = (sys.executable, "-m", "example_trainer.run", "--config", str(ROOT / "configs/demo.yaml"))
    steps = ("--training-steps", str(STEPS + MORE_STEPS))
    launched = start_launcher(*demo, *FLAGS, *steps, "--weight-bridge-mode", mode)
    settings = launched.run_dir / "config.json"
    assert wait_until(settings.exists, START_SECONDS)
    trainer = json.loads(settings.read_text())["trainer"]
    url = f"http://127.0.0.1:{trainer['vllm_port']}"
    assert wait_until(lambda: serves(url), START_SECONDS, interval_seconds=0.5), launched.logs()
    tree = launched.tree()
    requests = requests_for(trainer["model_name"])
    with PlainClients(url, requests, read, pause_seconds=0.2) as clients:
        launched.wait_for_steps(STEPS, START_SECONDS + STEPS * STEP_SECONDS)
        tree += launched.tree()
    code, _, error = launched.end(START_SECONDS + MORE_STEPS * STEP_SECONDS)
    versions = {answer.version for answer in clients.answers if answer.version is not None}
    lines = [json.loads(line) for line in launched.metrics.read_text().splitlines()]
    # A step without anything to learn publishes nothing; the publish of the last one may still be under way.
    served = {1, *(line["policy_version"] for line in lines[: STEPS - 1])}
    slowest = max(answer.ended - answer.started for answer in clients.answers)
    logger.info(
        "%s: %d steps, %d requests, %d failed, %d versions seen, none after a newer one: %s, longest wait %.1f s",
        *(mode, STEPS, len(clients.answers) + len(clients.failures), len(clients.failures), len(versions)),
        *(clients.falling() == [], slowest),
    )
    assert clients.failures == []
    assert clients.falling() == []
    assert versions >= served, "both servers existed for a while"
    assert len(served) > STEPS / 2
    assert code == 0, error + launched.logs()
    assert traces(launched, tree) == []


def serves(url):
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
