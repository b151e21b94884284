"""A stock vLLM gets each adapter under a new name; the trainer sends it to the broker, and environments use it.

Such a server needs half a minute to start, so this runs only with ATROPOS_STOCK_VLLM=1.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

import anyio
import httpx
import pytest
import torch

from atropos_api.client import AsyncBrokerClient, BrokerClient
from atropos_api.testing import served_broker
from atropos_api.wire import EnvironmentRequest, RunRequest
from environments.sdk.config import APIServerConfig
from environments.sdk.inference.sampling import Sampling
from environments.sdk.runtime.broker_session import BrokerConnection
from environments.sdk.server_manager import ServerManager
from example_trainer.api import BrokerSession
from example_trainer.processes.ports import free_port
from example_trainer.weights.logprob_parity import ProbeSample, compare
from example_trainer.weights.lora_only import LoraOnlyBridge
from example_trainer.weights.testing import config_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.anyio,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("ATROPOS_STOCK_VLLM" not in os.environ, reason="ATROPOS_STOCK_VLLM=1 starts a stock vLLM"),
]

logger = logging.getLogger(__name__)

ADAPTER = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}
VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def stock_url(tiny_qwen2, tmp_path_factory):
    port, log_path = free_port(), tmp_path_factory.mktemp("stock") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_qwen2)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--enable-lora"]
    command += ["--max-lora-rank", "8", "--max-loras", "4", "--kv-cache-memory-bytes", str(64 << 20)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **VARIABLES})
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 600
        while not _is_healthy(url):
            assert process.poll() is None, log_path.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_healthy(url):
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def bridge(stock_url, tiny_qwen2, tmp_path):
    usual = {"weight_bridge_mode": "lora_only", "run_dir": tmp_path, "dtype": "float32", "max_staleness": 0}
    made = LoraOnlyBridge(config_of(stock_url, tiny_qwen2, **usual | ADAPTER))
    made.prepare()
    yield made
    made.close()


def shift(policy, seed):
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, master in policy.masters.items():
            master.copy_(torch.randn(master.shape, generator=noise) * (0.1 if "lora_A" in name else 0.05))


async def test_r23_environments_sample_from_each_new_adapter_under_the_name_that_the_broker_tells(
    bridge, stock_url, tiny_qwen2
):
    with served_broker() as broker_url, BrokerClient(broker_url) as client:
        session = BrokerSession(client)
        session.begin(RunRequest(name="r", batch_size=8, max_token_length=512, num_steps=9))
        servers = ServerManager(
            [APIServerConfig(server_type="vllm", base_url=f"{stock_url}/v1", model_name=str(tiny_qwen2))],
            load_tokenizer=lambda: None,
        )
        async with AsyncBrokerClient(broker_url) as asked, anyio.create_task_group() as group:
            request = EnvironmentRequest(name="e", group_size=4, max_token_length=512)
            link = BrokerConnection(asked, request, wait_timeout_seconds=10)
            link.on_policy = lambda pacing: servers.follow(pacing.policy_name, pacing.policy_version)
            await link.register()
            group.start_soon(link.keep_pacing)
            for version in range(1, 5):
                shift(bridge._policy, version)
                report = await anyio.to_thread.run_sync(bridge.publish, version)
                session.announce_policy(version, version - 1, report.policy_name)
                assert report.policy_name == f"policy-v{version}"
                with anyio.fail_after(10):
                    while link.pacing.policy_version != version:
                        await link.changed.wait()
                samples = await servers.servers[0].generate(PROMPT, Sampling(n=8, max_tokens=64), "train")
                assert {span for sample in samples for span in sample.versions} == {
                    (0, len(sample.tokens), version) for sample in samples
                }
                for sample in samples:
                    agreement = compare(bridge._policy, [ProbeSample(PROMPT, [sample.tokens], [sample.logprobs])])
                    assert agreement.difference.within(agreement.limit), agreement
            group.cancel_scope.cancel()
        await servers.aclose()
    listed = {model["id"] for model in bridge._server._client.call("GET", "/v1/models")["data"]}
    assert listed == {str(tiny_qwen2), "policy-v3", "policy-v4"}, "older ones are dropped"
