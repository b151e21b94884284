"""A broker of a release without a registry: programs that need one get an error, and all others work as before."""

from __future__ import annotations

import httpx
import pytest

from atropos_api.client import BrokerRefused
from atropos_api.client.connection import raise_for_problem


def answer(path, status=404, **problem):
    return httpx.Response(status, json=problem, request=httpx.Request("GET", f"http://b:8000{path}"))


@pytest.mark.parametrize("path", ["/v1/servers", "/v1/servers/gpu-1", "/prefix/v1/servers?policy=default"])
def test_a_broker_without_a_registry_is_told_apart_from_one_without_this_server(path):
    with pytest.raises(BrokerRefused, match=r"has no registry of inference servers; check the address") as told:
        raise_for_problem(answer(path, detail="Not Found"))
    assert told.value.status == 404


@pytest.mark.parametrize("path", ["/v1/fleets", "/v1/fleets/run-1/wanted"])
def test_a_broker_that_cannot_scale_says_so(path):
    with pytest.raises(BrokerRefused, match="of a release that cannot scale; check the address, or upgrade it"):
        raise_for_problem(answer(path, detail="Not Found"))
    with pytest.raises(BrokerRefused, match="no launcher reports"):
        raise_for_problem(answer(path, type="urn:p/unknown-fleet", detail="no launcher reports"))


def test_an_unknown_server_and_other_unknown_things_keep_the_brokers_own_words():
    with pytest.raises(BrokerRefused, match="no server has the id 'x'"):
        raise_for_problem(answer("/v1/servers/x", type="urn:p/unknown-server", detail="no server has the id 'x'"))
    with pytest.raises(BrokerRefused, match=r"/v1/other is no broker's \(Not Found\); check host and port"):
        raise_for_problem(answer("/v1/other", detail="Not Found"))


def test_the_page_of_a_proxy_is_one_line_and_an_empty_answer_no_dict():
    request = httpx.Request("POST", "http://proxy/v1/runs")
    page = b"<html>\r\n<head><title>301 Moved Permanently</title></head>\r\n</html>\r\n"
    for content, told in ((page, "<html> <head><title>301 Moved"), (b"", "without a reason; check the URL")):
        with pytest.raises(BrokerRefused, match=rf"\Athe broker refused \(301\): {told}") as refused:
            raise_for_problem(httpx.Response(301, request=request, content=content))
        assert "\n" not in str(refused.value)
