"""Who comes in: tokens by header and by path, and nobody on behalf of a foreign page."""

import httpx
import pytest

from atropos_api.client import BrokerClient, BrokerRefused
from atropos_api.testing import served_broker

TOKEN = "a-token-of-ours"


@pytest.fixture
def url():
    with served_broker(token=TOKEN) as served:
        yield served


def test_without_the_token_only_health_is_answered(url):
    assert httpx.get(f"{url}/status").status_code == 401
    assert httpx.get(f"{url}/t/wrong/status").status_code == 401
    assert httpx.get(f"{url}/livez").status_code == 200


def test_the_token_is_taken_from_the_header_and_from_the_path(url):
    assert httpx.get(f"{url}/status", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert httpx.get(f"{url}/t/{TOKEN}/status").status_code == 200
    with BrokerClient(url, token=TOKEN) as client:
        client.wait_until_ready(5)
        assert client.status()["run"] is None


def test_the_client_tells_a_missing_token_from_an_absent_broker(url):
    with BrokerClient(url) as client, pytest.raises(BrokerRefused, match="asks for a token"):
        client.status()


def test_a_rebound_name_is_refused_where_no_token_protects():
    with served_broker() as served:
        assert httpx.get(f"{served}/status", headers={"Host": "evil.test"}).status_code == 403
    with served_broker(allowed_hosts=["broker.test"]) as served:
        assert httpx.get(f"{served}/status", headers={"Host": "broker.test:80"}).status_code == 200


def test_pages_of_our_own_origin_may_change_things():
    with served_broker() as served:
        own = {"Origin": served, "Sec-Fetch-Site": "same-origin"}
        assert httpx.get(f"{served}/reset_data", headers=own).status_code == 200
        assert httpx.post(f"{served}/v1/runs", json={}, headers={"Origin": "http://localhost:3000"}).status_code == 403


def test_foreign_pages_may_read_nothing_across_origins():
    with served_broker() as served:
        response = httpx.get(f"{served}/status", headers={"Origin": "http://evil.test"})
        assert "access-control-allow-origin" not in response.headers
