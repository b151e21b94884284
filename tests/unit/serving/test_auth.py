"""The guard admits requests to this machine's names, with the key if one is set, and none from other sites' pages."""

from __future__ import annotations

import pytest

from example_trainer.serving.auth import AllowedHosts, bearer, refuse_foreign_page, refuse_without_key
from example_trainer.serving.problems import Problem

OWN = [
    "127.0.0.1:9001",
    "localhost:9001",
    "[::1]:9001",
    "10.0.0.4",
    "gpu-3:9001",
    "vllm:9001",
    "host.docker.internal:9001",
    "vllm.default.svc.cluster.local",
    "GPU-3.example.edu:9001",
    "",
]
ANYBODYS = [
    "attacker.example",
    "attacker.example:9001",
    "127.0.0.1.attacker.example",
    "localhost.attacker.example",
    "[::1",
]
LOCAL_PAGE = [(b"host", b"localhost:9001"), (b"origin", b"http://localhost:9001"), (b"sec-fetch-site", b"same-origin")]
FOREIGN_PAGES = [
    [(b"origin", b"http://attacker.example")],
    [(b"origin", b"null")],
    [(b"origin", b"http://[::1")],
    [(b"origin", b"http://localhost:3000")],
    [(b"referer", b"http://attacker.example/page")],
    [(b"sec-fetch-site", b"cross-site")],
    [(b"sec-fetch-site", b"same-site")],
]


def hosts(*, host="127.0.0.1", origins=(), has_keys=False, names=("gpu-3.example.edu",)):
    return AllowedHosts(host=host, names=names, origins=origins, has_keys=has_keys)


def refused(guard, method="POST", path="/v1/completions", *, host="localhost:9001", headers=()):
    try:
        guard.check(method, path, [(b"host", host.encode()), *headers])
    except Problem as problem:
        return problem.kind
    return None


@pytest.mark.parametrize("host", OWN)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_r28_names_and_addresses_that_no_attacker_can_point_here_are_answered(host, method):
    assert refused(hosts(), method, host=host) is None


@pytest.mark.parametrize("host", ANYBODYS)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_r28_a_public_name_may_have_been_pointed_here_by_an_attacker(host, method):
    assert refused(hosts(), method, host=host) == "foreign-host"
    assert refused(hosts(names=["*"]), method, host=host) is None


@pytest.mark.parametrize("guard", [hosts(host="0.0.0.0"), hosts(host="10.0.0.4"), hosts(has_keys=True)])
def test_programs_may_use_any_name_where_a_network_may_ask_or_a_key_is_shown(guard):
    for method in ("GET", "POST"):
        assert refused(guard, method, host="gpu-7.example.org:9001") is None
    rebound = [(b"origin", b"http://attacker.example:9001")]
    assert refused(guard, host="attacker.example:9001", headers=rebound) == "foreign-host"


@pytest.mark.parametrize("headers", FOREIGN_PAGES)
def test_r28_pages_of_other_sites_are_refused_where_they_cost_or_change_something(headers):
    for guard in (hosts(), hosts(host="0.0.0.0"), hosts(has_keys=True)):
        assert refused(guard, headers=headers) == "foreign-origin"
        for path in ("/bridge/debug", "/health_generate"):
            assert refused(guard, "GET", path, headers=headers) == "foreign-origin"
    with pytest.raises(Problem, match="403"):
        refuse_foreign_page({b"host": b"localhost:9001", **dict(headers)})


def test_the_servers_own_pages_and_links_to_it_work():
    hosts().check("POST", "/v1/completions", LOCAL_PAGE)
    refuse_foreign_page(dict(LOCAL_PAGE))
    assert refused(hosts(), "GET", "/docs", headers=[(b"sec-fetch-site", b"cross-site")]) is None


@pytest.mark.parametrize("origins", [["http://ui.example:3000"], ["*"]])
def test_pages_that_allowed_origins_names_may_ask(origins):
    guard = hosts(origins=origins)
    assert refused(guard, headers=[(b"origin", b"http://UI.example:3000"), (b"sec-fetch-site", b"cross-site")]) is None
    others = refused(guard, headers=[(b"origin", b"http://attacker.example")])
    assert others == (None if origins == ["*"] else "foreign-origin")


def test_a_key_is_asked_for_only_where_one_is_set():
    refuse_without_key([], [])
    refuse_without_key([(b"authorization", b"Bearer k")], [b"j", b"k"])
    for given in ([], [(b"authorization", b"Basic k")], [(b"authorization", b"Bearer x")]):
        with pytest.raises(Problem):
            refuse_without_key(given, [b"k"])
    assert bearer([(b"authorization", b"bearer k")]) == b"k"
