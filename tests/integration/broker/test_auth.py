"""The request guard admits tokens by header and by path, and no request from a page of another site."""

import httpx
import pytest
from pydantic import ValidationError

from atropos_api.cli import run
from atropos_api.client import BrokerClient, BrokerRefused
from atropos_api.common.cliconfig import ConfigError
from atropos_api.config import BrokerConfig
from atropos_api.testing import served_broker

TOKEN = "a-token-of-ours"
RUN = {"name": "r", "batch_size": 4, "max_token_length": 9, "num_steps": 3}
CHANGING = [
    ("GET", "/reset_data"),
    ("GET", "/batch"),
    ("GET", "/batch/"),
    ("GET", "/v1/batches/1"),
    ("GET", "/status-env?env_id=0"),
    ("POST", "/scored_data"),
    ("POST", "/scored_data_list"),
    ("POST", "/register"),
    ("POST", "/register-env"),
    ("POST", "/disconnect-env"),
    ("POST", "/v1/groups"),
    ("POST", "/v1/runs"),
    ("POST", "/v1/runs/x/finish"),
    ("POST", "/v1/environments"),
    ("PUT", "/v1/environments/0/heartbeat"),
    ("PUT", "/v1/policy"),
    ("POST", "/v1/policy/hold"),
    ("DELETE", "/v1/policy/hold"),
    ("POST", "/v1/batches/1/commit"),
    ("PUT", "/v1/servers/a"),
    ("DELETE", "/v1/servers/a"),
]
FOREIGN = [
    {"Origin": "http://evil.test"},
    {"Origin": "null"},
    {"Origin": "http://["},
    {"Origin": "http://127.0.0.1:1"},
    {"Referer": "http://evil.test/page"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Purpose": "prefetch;prerender"},
    {"Purpose": "prefetch"},
    {"Host": "evil.test"},
    {"Host": "["},
]


@pytest.fixture(scope="module")
def guarded():
    with served_broker(token=TOKEN) as served:
        yield served


@pytest.fixture(scope="module")
def url_without_token():
    with served_broker() as served:
        yield served


def test_without_the_token_only_health_is_answered(guarded):
    for path in ("/livez", "/readyz", "/health"):
        assert httpx.get(guarded + path).status_code == 200
    for path in ("/", "/status", "/docs", "/openapi.json", "/metrics", "/v1/status", "/v1/events", "/nowhere"):
        assert httpx.get(guarded + path).status_code == 401
    for method, path in CHANGING:
        assert httpx.request(method, guarded + path).status_code == 401


@pytest.mark.parametrize(
    "credentials", ["", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer", f"Basic {TOKEN}", "Bearer \xfc"]
)
def test_a_wrong_token_is_refused(guarded, credentials):
    headers = {"Authorization": credentials.encode("latin-1")}
    response = httpx.get(f"{guarded}/status", headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["type"].endswith("/token-required")


def test_the_token_is_taken_from_the_header_and_from_the_path(guarded):
    assert httpx.get(f"{guarded}/status", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert httpx.get(f"{guarded}/status", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200
    assert httpx.get(f"{guarded}/t/{TOKEN}/status").status_code == 200
    assert httpx.get(f"{guarded}/t/{TOKEN}").json() == {"message": "AtroposLib API"}
    for wrong in ("wrong", "%FF", "", f"{TOKEN}x"):
        assert httpx.get(f"{guarded}/t/{wrong}/status").status_code == 401
    with BrokerClient(f"{guarded}/t/{TOKEN}/") as client:
        assert client.status()["run"] is None
    with BrokerClient(guarded, token=TOKEN) as client:
        client.wait_until_ready(5)
        assert client.status()["run"] is None


def test_the_client_tells_a_missing_token_from_an_absent_broker(guarded):
    with BrokerClient(guarded) as client, pytest.raises(BrokerRefused, match="asks for a token"):
        client.status()


@pytest.mark.parametrize("token", ["", "short", "with space in it", "with/slash-in-it", "späte-Zeichen"])
def test_a_token_that_protects_nothing_or_fits_in_no_path_is_refused(token):
    with pytest.raises(ValidationError, match="8 characters"):
        BrokerConfig(token=token)


@pytest.mark.parametrize(("method", "path"), CHANGING)
def test_nothing_changes_on_behalf_of_a_foreign_page(url_without_token, method, path):
    with httpx.Client(base_url=url_without_token) as client:
        for headers in FOREIGN:
            response = client.request(method, path, headers=headers)
            assert response.status_code == 403, headers
            assert response.json()["type"].endswith("/cross-site-request")


def test_the_token_in_a_path_is_not_a_pass_for_foreign_pages(guarded):
    response = httpx.get(f"{guarded}/t/{TOKEN}/reset_data", headers={"Sec-Fetch-Site": "cross-site"})
    assert response.status_code == 403
    assert TOKEN not in response.text


def test_a_rebound_name_is_refused_where_no_token_protects(url_without_token):
    assert httpx.get(f"{url_without_token}/status", headers={"Host": "evil.test"}).status_code == 403
    for host in ("localhost:80", "127.0.0.1", "[::1]:8000", "broker.localhost"):
        assert httpx.get(f"{url_without_token}/status", headers={"Host": host}).status_code == 200
    with served_broker(allowed_hosts=["broker.test"]) as served:
        assert httpx.get(f"{served}/status", headers={"Host": "broker.test:80"}).status_code == 200


def test_pages_of_our_own_origin_may_change_things(url_without_token):
    own = {"Origin": url_without_token, "Referer": f"{url_without_token}/page", "Sec-Fetch-Site": "same-origin"}
    assert httpx.get(f"{url_without_token}/reset_data", headers=own).status_code == 200
    assert (
        httpx.post(f"{url_without_token}/v1/runs", json={}, headers={"Origin": "http://localhost:3000"}).status_code
        == 403
    )


def test_foreign_pages_may_read_nothing_across_origins(url_without_token):
    for headers in (
        {"Origin": "http://evil.test"},
        {"Origin": "http://evil.test", "Access-Control-Request-Method": "PUT"},
    ):
        for method in ("GET", "OPTIONS"):
            response = httpx.request(method, f"{url_without_token}/status", headers=headers)
            assert "access-control-allow-origin" not in response.headers


def test_an_origin_that_was_allowed_may_call_and_no_other():
    page = "https://page.example"
    with served_broker(allowed_origins=[page], token=TOKEN) as url:
        asked = {
            "Origin": page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        assert httpx.options(f"{url}/v1/runs", headers=asked).headers["access-control-allow-origin"] == page
        caller = {"Authorization": f"Bearer {TOKEN}", "Sec-Fetch-Site": "cross-site"}
        response = httpx.post(f"{url}/v1/runs", json=RUN, headers=caller | {"Origin": page})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == page
        assert httpx.post(f"{url}/v1/runs", json=RUN, headers={"Origin": page}).status_code == 401
        foreign = httpx.post(f"{url}/v1/runs", json=RUN, headers=caller | {"Origin": "https://other.example"})
        assert foreign.status_code == 403
        assert "access-control-allow-origin" not in foreign.headers


def test_a_slash_at_the_end_redirects_nowhere(url_without_token):
    assert httpx.get(f"{url_without_token}/status/").json()["current_step"] == 0
    assert httpx.get(f"{url_without_token}/nowhere/", headers={"Host": "localhost"}).status_code == 404


def test_a_delete_with_an_empty_id_deletes_nothing(url_without_token):
    run = httpx.post(f"{url_without_token}/v1/runs", json=RUN)
    assert run.status_code == 200
    hold = httpx.post(f"{url_without_token}/v1/policy/hold", json={"seconds": 60}).json()
    assert httpx.delete(f"{url_without_token}/v1/policy/hold/").status_code == 404
    assert httpx.delete(f"{url_without_token}/v1/policy/hold/{hold['hold_id']}").status_code == 200


@pytest.mark.parametrize("value", [r'"\ud800"', r'"a\udfff"', r'{"\ud800": NaN}'])
def test_half_a_character_in_a_body_is_refused_like_any_other_nonsense(url_without_token, value):
    group = f'{{"tokens": [[{value}]], "masks": [[1]], "scores": [1], "images": {value}}}'
    for path, body in (("/scored_data", group), ("/scored_data_list", f"[{group}]")):
        assert httpx.post(url_without_token + path, content=body).status_code == 422
    body = f'{{"environment_id": 0, "groups": [{group}]}}'
    assert httpx.post(f"{url_without_token}/v1/groups", content=body).status_code in {404, 422}


@pytest.mark.parametrize(
    ("flags", "wanted"), [([], "from-the-environment"), (["--token", "from-the-flag"], "from-the-flag")]
)
def test_the_token_comes_from_the_environment_where_no_flag_gives_one(monkeypatch, flags, wanted):
    served = []
    monkeypatch.setenv("ATROPOS_TOKEN", "from-the-environment")
    monkeypatch.setattr("atropos_api.server.serve.serve", lambda config, _logs: served.append(config.token) or 0)
    assert run(["--store", "memory", *flags]) == 0
    assert served == [wanted]


def test_a_token_of_the_environment_that_cannot_travel_is_refused(monkeypatch):
    monkeypatch.setenv("ATROPOS_TOKEN", "short")
    with pytest.raises(ConfigError, match=r"^\$ATROPOS_TOKEN: a token has 8 characters"):
        run(["--store", "memory"])
