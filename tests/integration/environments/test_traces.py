"""One trace leads from an item over its rollout and group to its batch, also for clients that know nothing of it."""

import anyio
import pytest

from atropos_api.client.calls import Calls
from atropos_api.common.logs import LogContext
from atropos_api.common.tracing import open_tracing
from atropos_api.server.serve import observe
from atropos_api.testing import memory_broker
from environments.sdk.runtime.worker import EnvironmentWorker
from tests.collector import collecting_http

from .test_serve import make_env, make_fake, train

pytestmark = pytest.mark.anyio


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with collecting_http() as found:
        yield found


@pytest.mark.parametrize("form", ["columns", "json"])
async def test_item_rollout_group_and_batch_are_one_trace(tokenizer_folder, collector, form):
    fake = make_fake()
    env = make_env(fake, tokenizer_folder)
    app, client = memory_broker()
    client._calls = Calls(form)
    at_broker = open_tracing(collector.endpoint, service="broker")
    observe(app.context.broker, LogContext(), at_broker)
    env.tracing = open_tracing(collector.endpoint, service="environment")
    batches = []

    async def run_trainer():
        batches.extend(await train(client, fake=fake, steps=3, batch_size=32))

    with anyio.fail_after(30):
        async with client, anyio.create_task_group() as group:
            group.start_soon(run_trainer)
            await EnvironmentWorker(env, client).serve()
    await anyio.to_thread.run_sync(env.tracing.close)
    await anyio.to_thread.run_sync(at_broker.close)
    rollouts = {span.span: span for span in collector.named("rollout")}
    groups = {span.span: span for span in collector.named("group")}
    spans = collector.named("batch")
    assert len(spans) == sum(len(batch.groups) for batch in batches) == 12
    for span in spans:
        group, rollout = groups[span.parent], rollouts[groups[span.parent].parent]
        assert span.trace == group.trace == rollout.trace
        assert (span.service, rollout.service) == ("broker", "environment")
        assert rollout.parent == ""
        assert rollout.began_at <= group.began_at <= span.began_at <= span.ended_at
        asked = [child for child in collector.named("inference") if child.parent == rollout.span]
        assert asked
    assert {span.attributes["atropos.batch"] for span in spans} == {1, 2, 3}
    handed_on = {group.generation_params["traceparent"].split("-")[2] for batch in batches for group in batch.groups}
    assert handed_on == {span.parent for span in spans}
    assert all(group.generation_params["temperature"] == 1.0 for batch in batches for group in batch.groups)


async def test_the_requests_of_a_traced_rollout_carry_its_header(tokenizer_folder, collector):
    from aiohttp import web

    from atropos_api.common.tracing import running
    from environments.sdk.inference.http_transport import HttpTransport

    seen = []

    async def answer(request):
        seen.append(request.headers.get("traceparent"))
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    transport = HttpTransport({})
    tracing = open_tracing(collector.endpoint, service="environment")
    with running(tracing.begin("rollout")) as span:
        await transport.request("POST", f"http://127.0.0.1:{port}/generate", b"{}")
    await transport.request("POST", f"http://127.0.0.1:{port}/generate", b"{}")
    await transport.aclose()
    await runner.cleanup()
    await anyio.to_thread.run_sync(tracing.close)
    assert seen == [span.traceparent, None]
