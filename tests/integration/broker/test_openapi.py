"""The OpenAPI document is complete, and the broker keeps to it under requests that schemathesis invents.

The suite has the short run; `ATROPOS_SCHEMA_EXAMPLES=100` makes it long.
"""

import json
import os
import re

import httpx
import hypothesis
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from atropos_api.broker.status import Status
from atropos_api.errors import BrokerError
from atropos_api.http import request
from atropos_api.http.problems import STATUS_BY_KIND, TYPE_PREFIX
from atropos_api.routes.docs import errors_of, known_problems
from atropos_api.routes.schema import operations_of
from atropos_api.testing import make_memory_app, serve_in_thread
from atropos_api.wire.columns import MEDIA_TYPE

EXAMPLES = int(os.environ.get("ATROPOS_SCHEMA_EXAMPLES", "2"))
app = make_memory_app()
OPERATIONS = operations_of(app.routes)
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
    negative_data_rejection,
]
# Under the Atropos contract, and inside of groups, numbers may come as text, as Atropos' own broker takes them.
LAX_CHECKS = CHECKS[:-1]
# Requests that may be refused although the schema allows them: rows that differ in length, a size above the run's
# batch, an id that is neither in the query nor in the body, a rank that is not below the world size, an unknown host.
REFUSED_BY_RULE = {
    "/v1/groups",
    "/v1/environments",
    "/scored_data",
    "/scored_data_list",
    "/register-env",
    "/status-env",
    "/v1/batches/{number}",
    "/v1/servers/{server_id}",
}
ENDLESS = "/v1/events"


def can_be_wrong(operation):
    """Return True if the operation takes anything but free text, so that a request can be invalid."""
    return operation.body is not None or any(one.schema != {"type": "string"} for one in operation.parameters)


CASES = [
    pytest.param(operation, mode, id=f"{operation.route} {mode.value}")
    for operation in OPERATIONS
    for mode in GenerationMode
    if operation.path != ENDLESS and (mode is GenerationMode.POSITIVE or can_be_wrong(operation))
]

schema = schemathesis.openapi.from_dict(app.openapi())


def name_of(operation):
    return operation.route


@pytest.fixture(scope="module")
def url():
    with pytest.MonkeyPatch.context() as patch:
        # Each generated wait would take up to a minute.
        patch.setattr(request, "LONGEST_WAIT_SECONDS", 0.01)
        with serve_in_thread(app) as served:
            yield served


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url) as client:
        yield client


def test_every_route_is_described_and_nothing_else():
    routes = [f"{method} {route.path}" for route in app.routes for method in route.methods]
    assert routes == [operation.route for operation in OPERATIONS]


def test_a_path_names_all_its_methods(client):
    for path, methods in {"/v1/policy": "GET, PUT", "/v1/policy/hold": "DELETE, POST", "/status": "GET"}.items():
        answer = client.options(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)


def test_every_body_and_answer_has_a_type_and_no_schema_that_generators_stumble_over():
    document = app.openapi()
    for operation in OPERATIONS:
        described = document["paths"][operation.path][operation.method.lower()]
        bodies = [described["requestBody"]] if operation.body is not None else []
        for one in (*bodies, *described["responses"].values()):
            for media_type, form in one.get("content", {}).items():
                known = media_type in {"text/plain", "text/html", "text/event-stream", "application/x-tar", MEDIA_TYPE}
                is_file = operation.path == "/openapi.json" or operation.path.startswith("/page/")
                assert known or is_typed(form["schema"]) or is_file, (operation.path, form)
    text = json.dumps(document["components"]["schemas"])
    assert "prefixItems" not in text
    assert '"default": null' not in text
    assert '"items": false' not in text


def is_typed(schema):
    return (
        "$ref" in schema
        or bool(schema.get("properties"))
        or any(map(is_typed, schema.get("anyOf", ())))
        or (schema.get("type") == "array" and is_typed(schema["items"]))
    )


def test_both_ways_to_write_groups_are_described(client):
    document = app.openapi()["paths"]
    sent = document["/v1/groups"]["post"]["requestBody"]["content"]
    answered = document["/v1/batches/{number}"]["get"]["responses"]["200"]["content"]
    assert set(sent) == set(answered) == {"application/json", MEDIA_TYPE}


def test_the_status_is_what_its_type_says(client):
    run = client.post("/v1/runs", json={"name": "r", "batch_size": 4, "max_token_length": 9, "num_steps": 3}).json()
    client.post("/v1/environments", json={"name": "e", "group_size": 4, "max_token_length": 9})
    client.post("/v1/policy/hold", json={"seconds": 60})
    shown = client.get("/v1/status").content
    assert msgspec.json.decode(shown, type=Status).run.run_id == run["run_id"]
    types = msgspec.json.schema_components([Status])[1]
    for name, value in {"Status": json.loads(shown), "RunStatus": json.loads(shown)["run"]}.items():
        assert set(value) == set(types[name]["properties"])
    client.post(f"/v1/runs/{run['run_id']}/finish")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"null",
        b"1.0",
        b'"x"',
        b"{",
        b"2\xff",
        b'{"name": 1} x',
        b"[1e308]",
        b"[" * 9000,
        b'{"seconds": 1e400}',
    ],
)
def test_a_body_that_lacks_everything_is_the_callers_fault(client, body):
    for operation in OPERATIONS:
        if operation.body is not None:
            path = operation.path.replace("{number}", "1")
            answer = client.request(operation.method, path, content=body)
            assert answer.status_code in ({204, 404, 422} if operation.body_required is False else {422}), operation


@pytest.mark.parametrize("written", ["4.0", "4e0"])
def test_an_integer_may_be_written_as_json_allows(client, written):
    body = f'{{"name": "r", "batch_size": {written}, "max_token_length": 9.0, "num_steps": 3}}'
    begun = client.post("/v1/runs", content=body)
    assert begun.status_code == 200
    client.post(f"/v1/runs/{begun.json()['run_id']}/finish")
    group = b'{"environment_id": 0.0, "groups": [{"tokens": [[1.0]], "masks": [[1]], "scores": [0]}]}'
    client.post("/v1/environments", json={"name": "e", "group_size": 1, "max_token_length": 9})
    assert client.post("/v1/groups", content=group).status_code == 202
    refused = client.post("/v1/runs", content=body.replace("9.0", "9.5"))
    assert refused.status_code == 422
    assert "max_token_length" in refused.json()["detail"]


def test_every_error_has_a_status_and_a_meaning():
    assert {kind.kind for kind in descendants(BrokerError)} == set(STATUS_BY_KIND)
    assert all(problem.meaning for problem in known_problems().values())


def descendants(kind):
    for child in kind.__subclasses__():
        yield child
        yield from descendants(child)


def test_every_way_in_that_is_not_open_documents_the_token():
    open_paths = {operation.path for operation in OPERATIONS if 401 not in errors_of(operation)}
    assert open_paths == {"/livez", "/readyz", "/health"}


def test_the_pages_for_readers_load_nothing_from_elsewhere(client):
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"<script|<link|<img|src=|href=.?(http|//)", page.text)
    for operation in OPERATIONS:
        assert f"<code>{operation.route}</code>" in page.text
    for kind in known_problems():
        assert f"<tr id={kind}>" in page.text


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.example is not None], ids=name_of)
def test_the_example_of_a_body_is_understood(client, operation):
    path = operation.path.replace("{number}", "1").replace("{environment_id}", "0")
    path = path.replace("{server_id}", "a").replace("{fleet_id}", "a")
    assert client.request(operation.method, path, json=operation.example).status_code not in {400, 413, 422, 500}


@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_whatever_is_made_up_the_answer_is_one_of_those_documented(url, operation, mode):
    described = schema[operation.path][operation.method]

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        database=None,
        derandomize="ATROPOS_SCHEMA_EXAMPLES" not in os.environ,
    )
    @hypothesis.given(case=described.as_strategy(generation_mode=mode))
    def check(case):
        response = case.call(base_url=url)
        lax = operation.section != "v1" or operation.path == "/v1/groups"
        checks = LAX_CHECKS if lax else CHECKS
        if operation.path not in REFUSED_BY_RULE:
            checks = [*checks, positive_data_acceptance]
        case.validate_response(response, checks=checks)
        # A fault of the broker's is documented too, as an error of the server.
        assert response.status_code != 500, response.text
        check_problem(operation, response)

    check()


def check_problem(operation, response):
    """Check that the kind of an error is one that the route documents for that status."""
    if response.headers.get("content-type") == "application/problem+json":
        problem = response.json()
        kind = problem["type"].removeprefix(TYPE_PREFIX)
        assert kind in errors_of(operation)[response.status_code]
        assert problem["status"] == response.status_code
