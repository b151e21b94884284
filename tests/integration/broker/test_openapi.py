"""The OpenAPI document is the broker's contract: complete, and kept whatever schemathesis makes up.

The short run is part of the suite; `ATROPOS_SCHEMA_EXAMPLES=500` makes a long one of it.
"""

import os
import re

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from atropos_api.errors import BrokerError
from atropos_api.http import parameters
from atropos_api.http.contract import SECTIONS
from atropos_api.http.openapi import errors_of, known_problems
from atropos_api.http.problems import STATUS_BY_KIND, TYPE_PREFIX
from atropos_api.testing import make_memory_app, serve_in_thread

EXAMPLES = int(os.environ.get("ATROPOS_SCHEMA_EXAMPLES", "2"))
OPERATIONS = [operation for operations in SECTIONS.values() for operation in operations]
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
    negative_data_rejection,
]
# Under the Atropos contract numbers may come as text, as its own broker takes them.
LAX_CHECKS = CHECKS[:-1]
ENDLESS = "/v1/events"


def can_be_wrong(operation):
    """Whether it takes anything but free text."""
    return operation.body is not None or any(one.schema != {"type": "string"} for one in operation.parameters)


CASES = [
    pytest.param(operation, mode, id=f"{operation.method} {operation.path} {mode.value}")
    for operation in OPERATIONS
    for mode in GenerationMode
    if operation.path != ENDLESS and (mode is GenerationMode.POSITIVE or can_be_wrong(operation))
]

app = make_memory_app()
schema = schemathesis.openapi.from_dict(app.openapi())


def name_of(operation):
    return f"{operation.method} {operation.path}"


@pytest.fixture(scope="module")
def url():
    with pytest.MonkeyPatch.context() as patch:
        # Nobody has a minute for each wait that is made up.
        patch.setattr(parameters, "LONGEST_WAIT_SECONDS", 0.01)
        with serve_in_thread(app) as served:
            yield served


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url) as client:
        yield client


def test_every_route_is_described_and_nothing_else():
    routes = {(method, route.path) for route in app.routes for method in route.methods}
    assert routes == {(operation.method, operation.path) for operation in OPERATIONS}


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
        assert f"<code>{operation.method} {operation.path}</code>" in page.text
    for kind in known_problems():
        assert f"<tr id={kind}>" in page.text


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.example is not None], ids=name_of)
def test_the_example_of_a_body_is_understood(client, operation):
    path = operation.path.replace("{number}", "1").replace("{environment_id}", "0")
    assert client.request(operation.method, path, json=operation.example).status_code not in {400, 413, 422}


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
        case.validate_response(response, checks=CHECKS if operation in SECTIONS["v1"] else LAX_CHECKS)
        # A fault of ours is documented too, as what it is.
        assert response.status_code != 500, response.text
        check_problem(operation, response)

    check()


def check_problem(operation, response):
    """The kind of an error is one that the route documents for that status."""
    if response.headers.get("content-type") == "application/problem+json":
        problem = response.json()
        kind = problem["type"].removeprefix(TYPE_PREFIX)
        assert kind in errors_of(operation)[response.status_code]
        assert problem["status"] == response.status_code
