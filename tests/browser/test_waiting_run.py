"""The wait of a run on the page in a real browser: a stall is shown on its edge, and a start calmly."""

from __future__ import annotations

import time

import pytest

from atropos_api.client import BrokerClient
from atropos_api.testing import served_broker
from atropos_api.wire import EnvironmentRequest, RunRequest
from atropos_api.wire.reports import EnvironmentActivity, ServerUse
from tests.stalls import STALLS, put, stalled_run

from .chromium import Page
from .test_page import show, texts


@pytest.mark.parametrize("rule", STALLS)
def test_a_planted_stall_is_shown_in_words_on_its_edge_within_ten_seconds(page: Page, rule: str) -> None:
    plant, edge = STALLS[rule]
    with served_broker() as own, BrokerClient(own) as client, stalled_run(client) as stalled:
        show(page, own)
        with plant(stalled):
            began = time.monotonic()
            page.wait(f"document.querySelector('.verdict').dataset.rule === '{rule}'", seconds=10)
            page.wait(f"!document.querySelector('.edge.ok[data-edge={edge}]')", seconds=2)
            assert time.monotonic() - began < 12
            (headline,) = texts(page, ".verdict h2")
            assert len(headline.split()) > 4
            marked = page.run("[...document.querySelectorAll('.edge:not(.ok)')].map((one) => one.dataset.edge)")
            assert marked == [edge]
            page.wait("document.title.startsWith('blocked: ')", seconds=30)
        page.open("about:blank")


def test_a_run_that_starts_is_told_calmly_with_the_part_that_is_awaited(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        request = EnvironmentRequest(name="dataset", group_size=8, max_token_length=512)
        environment = client.register_environment(request).environment_id
        client.begin_run(RunRequest(name="new", batch_size=32, max_token_length=512, num_steps=9))
        loading = ServerUse(url="http://vllm:9001", open_requests=0, requests=0, available=False)
        put(
            own,
            f"/v1/environments/{environment}/activity",
            EnvironmentActivity(open_rollouts=0, open_requests=0, servers=[loading]),
        )
        show(page, own)
        page.wait("document.querySelector('.verdict').dataset.rule === 'starting'", seconds=10)
        assert texts(page, ".verdict h2") == ["Starting: waiting for the inference server"]
        assert texts(page, ".verdict .badge") == ["starting"]
        assert page.run("document.querySelectorAll('.edge:not(.ok)').length") == 0
        page.open("about:blank")
