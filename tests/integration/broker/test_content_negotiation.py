"""Groups sent in one form are delivered in another: over a socket, for both contracts, across restarts."""

import gzip
import json
import uuid

import httpx
import pytest

from atropos_api.broker import Broker
from atropos_api.client import AsyncBrokerClient, BrokerClient, BrokerRefused
from atropos_api.config import BrokerConfig
from atropos_api.server.app import create_app
from atropos_api.store.factory import open_store
from atropos_api.testing import make_group, serve_in_thread, served_broker
from atropos_api.wire import EnvironmentRequest, RunRequest
from atropos_api.wire.columns import MEDIA_TYPE
from atropos_api.wire.columns_groups import decode_batch, encode_submission

COLUMNS = f"{MEDIA_TYPE}; version=1"
LOGPROBS = [[1.0, -0.25, -9.999999974752427e-07], [1.0, -0.30000001192092896, -2.0]]


class Caller:
    """An environment and a trainer; the test chooses every header."""

    def __init__(self, url):
        self.http = httpx.Client(base_url=url, timeout=20)
        self.client = BrokerClient(url, retry_seconds=1.0)
        self.json_client = BrokerClient(url, retry_seconds=1.0, form="json")

    def start(self):
        request = RunRequest(name="run", batch_size=2, max_token_length=64, num_steps=10)
        self.run = self.client.begin_run(request)
        self.register()

    def register(self):
        request = EnvironmentRequest(name="env", group_size=2, max_token_length=64)
        self.env_id = self.client.register_environment(request).environment_id

    def send(self, client, ident, **fields):
        group = make_group(2, 3, first_token=ident * 100, inference_logprobs=LOGPROBS, **fields)
        assert client.submit(self.env_id, [group], idempotency_key=uuid.uuid4().hex).accepted == 1
        return group

    def batch(self, number, accept=None, **headers):
        headers = ({"Accept": accept} if accept else {}) | headers
        return self.http.get(f"/v1/batches/{number}", headers=headers)

    def read(self, client, number):
        return client.get_batch(number, run_id=self.run.run_id, epoch=self.run.epoch).groups[0]

    def close(self):
        for each in (self.http, self.client, self.json_client):
            each.close()


@pytest.fixture(scope="module")
def url():
    with served_broker() as url:
        yield url


@pytest.fixture
def caller(url):
    """A caller with a run of its own, on the server of all tests."""
    caller = Caller(url)
    caller.start()
    yield caller
    caller.close()


def test_each_form_comes_out_in_each_form_with_every_number_it_had(caller):
    clients = {"columns": caller.client, "json": caller.json_client}
    for number, (sender, reader) in enumerate((a, b) for a in clients for b in clients):
        sent = caller.send(clients[sender], number + 1, version=2, overrides=[None, {"a": 1}])
        found = caller.read(clients[reader], number + 1)
        assert (found.env_id, found.received_version) == (caller.env_id, None)
        sent.env_id, sent.overrides = found.env_id, [{}, {"a": 1}]
        assert found == sent


def test_a_batch_has_the_same_bytes_each_time_in_each_form(caller):
    caller.send(caller.client, 1)
    caller.send(caller.json_client, 2)
    for number in (1, 2):
        for accept in (COLUMNS, "application/json"):
            first = caller.batch(number, accept)
            assert first.headers["content-type"] == accept
            assert caller.batch(number, accept).content == first.content


def test_a_group_kept_in_the_form_that_is_asked_for_is_not_touched(caller):
    body = encode_submission(caller.env_id, [make_group(2, 3)])
    caller.http.post("/v1/groups", content=body, headers={"Content-Type": COLUMNS})
    assert body[-72:] == caller.batch(1, COLUMNS).content[-72:]


@pytest.mark.parametrize(
    ("accept", "answered"),
    [
        (None, "application/json"),
        ("*/*", "application/json"),
        ("application/*;q=0.3", "application/json"),
        (MEDIA_TYPE, COLUMNS),
        (f'{MEDIA_TYPE}; version="1"', COLUMNS),
        (f"{MEDIA_TYPE};version=1, */*", COLUMNS),
        (f"{MEDIA_TYPE};q=0.4, application/json;q=0.5", "application/json"),
        (f"{MEDIA_TYPE};version=2, application/json;q=0.5", "application/json"),
        (f"{MEDIA_TYPE};version=2, {MEDIA_TYPE};q=0.1", COLUMNS),
    ],
)
def test_the_form_of_an_answer_is_the_one_that_the_caller_likes_best(caller, accept, answered):
    caller.send(caller.client, 1)
    response = caller.batch(1, accept)
    assert response.headers["content-type"] == answered
    assert "Accept" in response.headers["vary"]


@pytest.mark.parametrize(
    "accept", ["text/html", f"{MEDIA_TYPE};version=2", f"{MEDIA_TYPE};q=0", "application/json;q=x"]
)
def test_a_caller_that_accepts_no_form_we_have_is_told_so(caller, accept):
    caller.send(caller.client, 1)
    response = caller.batch(1, accept)
    assert response.status_code == 406
    assert response.json()["value"] == accept


def test_columns_of_another_version_are_told_from_broken_ones(caller):
    body = encode_submission(caller.env_id, [make_group(2, 3)])
    later = caller.http.post("/v1/groups", content=body, headers={"Content-Type": f"{MEDIA_TYPE}; version=2"})
    broken = caller.http.post("/v1/groups", content=body[:-4], headers={"Content-Type": COLUMNS})
    assert (later.status_code, later.json()["field"]) == (415, "Content-Type")
    assert (broken.status_code, broken.json()["field"]) == (422, "body")


def test_a_bad_number_in_columns_is_refused_by_its_place_and_its_neighbours_with_it(caller):
    groups = [make_group(2, 3), make_group(2, 3, first_token=-1)]
    response = caller.http.post(
        "/v1/groups", content=encode_submission(caller.env_id, groups), headers={"Content-Type": COLUMNS}
    )
    assert (response.status_code, response.json()["field"], response.json()["value"]) == (
        422,
        "groups[1].tokens[0][0]",
        -1,
    )
    assert caller.batch(1).status_code == 204


def test_columns_travel_compressed_both_ways_where_the_caller_wants_it(caller):
    body = encode_submission(caller.env_id, [make_group(2, 300)])
    headers = {"Content-Type": COLUMNS, "Content-Encoding": "gzip"}
    assert caller.http.post("/v1/groups", content=gzip.compress(body), headers=headers).status_code == 202
    plain = caller.batch(1, COLUMNS, **{"Accept-Encoding": "identity"})
    packed = caller.batch(1, COLUMNS, **{"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content
    assert int(packed.headers["content-length"]) < len(plain.content)


@pytest.mark.parametrize(("accept", "packed"), [("gzip;q=0, *", False), ("gzip; q=0.0", False), ("gzip;q=0.5", True)])
def test_a_weight_of_0_refuses_compression(caller, accept, packed):
    caller.send(caller.client, 1, images="x" * 2000)
    headers = {"Accept-Encoding": accept}
    answers = [caller.batch(1, **headers), caller.http.get("/v1/servers", headers=headers)]
    assert ["content-encoding" in answer.headers for answer in answers] == [packed, packed]


@pytest.mark.parametrize(("encoding", "status"), [("zstd", 400), ("Deflate", 400), ("utf-8", 200)])
def test_a_compression_that_the_broker_does_not_read_is_refused_by_its_name(caller, encoding, status):
    body = b'{"name": "env", "group_size": 2, "max_token_length": 64}'
    response = caller.http.post("/v1/environments", content=body, headers={"Content-Encoding": encoding})
    assert response.status_code == status
    assert status == 200 or encoding.lower() in response.json()["detail"]


def test_the_latest_group_is_shown_as_json_whatever_it_came_as(caller):
    sent = caller.send(caller.client, 1)
    for path in ("/latest_example", "/v1/groups/latest"):
        assert caller.http.get(path).json()["tokens"] == sent.tokens


def test_an_atropos_trainer_gets_groups_that_came_in_columns(legacy):
    legacy.start(batch_size=6)
    environment = legacy.register_env(group_size=2)["env_id"]
    with BrokerClient(legacy.url) as client:
        groups = [make_group(2, 3, first_token=n, inference_logprobs=LOGPROBS) for n in (0, 100)]
        client.submit(environment, groups, idempotency_key="k")
    legacy.post(7, 2, env_id=environment)
    batch = legacy.batch()
    assert [item["tokens"][0][0] for item in batch] == [0, 100, 7]
    assert [item["inference_logprobs"] for item in batch] == [LOGPROBS, LOGPROBS, None]
    assert all(set(batch[2]) <= set(item) for item in batch)


def test_the_form_of_a_group_is_remembered_over_a_restart(tmp_path):
    def serve():
        config = BrokerConfig(store=str(tmp_path))
        return create_app(config, Broker(*open_store(str(tmp_path)), settings=config))

    app = serve()
    with serve_in_thread(app) as url:
        caller = Caller(url)
        caller.start()
        caller.send(caller.client, 1)
        before = [caller.batch(1, accept).content for accept in (COLUMNS, "application/json")]
        caller.close()
    app.context.broker.close()
    app = serve()
    with serve_in_thread(app) as url:
        caller = Caller(url)
        assert [caller.batch(1, accept).content for accept in (COLUMNS, "application/json")] == before
        caller.close()
    app.context.broker.close()


def json_only(requests):
    def answer(request):
        requests.append(request)
        if request.headers["content-type"] != "application/json":
            return httpx.Response(415, json={"type": "x/unsupported-media-type", "detail": "JSON only"})
        return httpx.Response(202, json={"accepted": 1, "buffered": 0, "duplicates": 0, "pacing": None})

    return answer


def assert_fell_back(requests):
    assert [request.headers["content-type"] for request in requests] == [
        COLUMNS,
        "application/json",
        "application/json",
    ]
    assert [request.headers["idempotency-key"] for request in requests] == ["a", "a", "b"]
    assert json.loads(requests[1].content)["environment_id"] == 1


def test_a_client_sends_json_from_then_on_to_a_broker_that_knows_no_columns():
    requests = []
    with BrokerClient("http://broker", transport=httpx.MockTransport(json_only(requests))) as client:
        for key in "ab":
            assert client.submit(1, [make_group()], idempotency_key=key).accepted == 1
    assert_fell_back(requests)


@pytest.mark.anyio
async def test_so_does_the_async_client():
    requests = []
    async with AsyncBrokerClient("http://broker", transport=httpx.MockTransport(json_only(requests))) as client:
        for key in "ab":
            assert (await client.submit(1, [make_group()], idempotency_key=key)).accepted == 1
    assert_fell_back(requests)


def test_a_broker_that_reads_no_form_at_all_is_an_error():
    def refuse(_):
        return httpx.Response(415, json={"type": "x/unsupported-media-type", "detail": "nothing pleases me"})

    client = BrokerClient("http://broker", transport=httpx.MockTransport(refuse))
    with client, pytest.raises(BrokerRefused, match="nothing pleases me"):
        client.submit(1, [make_group()], idempotency_key="a")


def test_what_columns_cannot_say_is_explained_from_json(caller):
    with pytest.raises(BrokerRefused, match="tokens\\[0\\]\\[0\\]") as caught:
        caller.client.submit(caller.env_id, [make_group(2, 3, tokens=[[0.5, 1, 2]] * 2)], idempotency_key="bad")
    assert caught.value.status == 422


def test_arrays_are_asked_for_and_got_without_a_copy(caller):
    caller.send(caller.client, 1)
    batch = caller.client.get_batch(1, run_id=caller.run.run_id, epoch=caller.run.epoch, arrays=True)
    rows = batch.groups[0].tokens
    assert not rows[0].flags.owndata
    assert not rows[0].flags.writeable
    assert [row.tolist() for row in rows] == decode_batch(caller.batch(1, COLUMNS).content).groups[0].tokens
