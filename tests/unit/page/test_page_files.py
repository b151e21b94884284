"""The page's files keep its promises: nothing inline, nothing from elsewhere, texts as texts, and names that exist."""

import json
import re

import httpx
import pytest

from atropos_api.common import metric_names
from atropos_api.page.files import FOLDER, HEADERS, page_files
from atropos_api.testing import served_broker
from example_trainer.monitoring.health import HealthLimits, sign_names

MODULES = sorted(FOLDER.glob("*.js"))
PANELS = json.loads((FOLDER / "panels.json").read_text())
MARKUP = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|setAttribute\(\"style"
SOURCES = "\n".join(path.read_text() for path in (FOLDER.parents[1] / "broker").glob("*.py"))


@pytest.fixture(scope="module")
def url():
    with served_broker() as url:
        yield url


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_is_short_and_sets_texts_as_texts(path):
    text = path.read_text()
    assert text.count("\n") <= 350
    assert text.startswith("// ")
    assert re.findall(MARKUP, text) == []
    assert re.findall(r"https?://", text) == []


def test_what_an_address_names_leads_to_no_other_call_of_the_broker():
    """A page of another site may send its reader to any `/#/view=group&batch=../../../../reset_data`."""
    for path in MODULES:
        for call in re.findall(r"`(v1/[^`]*)`", path.read_text()):
            parts = re.findall(r"\$\{(.*?)\}", call)
            assert all(re.fullmatch(r"(encodeURIComponent|Number)\([\w.]+\)", part) for part in parts), call


def test_the_modules_together_stay_small():
    assert sum(path.read_text().count("\n") for path in MODULES) <= 2200


def test_the_html_has_nothing_inline_and_names_every_module_and_no_other_host():
    html = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*src=)|<style|\son\w+=|style=", html) == []
    assert set(re.findall(r'href="page/(\w+\.js)"', html)) == {path.name for path in MODULES} - {"main.js"}
    named = re.findall(r'(?:href|src)="page/([^"]+)"', html)
    assert set(named) <= set(page_files())
    assert "//" not in re.sub(r"<!doctype[^>]*>", "", html)


def test_no_style_loads_anything_from_elsewhere():
    for path in FOLDER.rglob("*.css"):
        assert re.findall(r"@import|url\((?!\"icon\.svg\")", path.read_text()) == [], path


def test_the_policy_allows_the_pages_own_files_alone():
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert set(policy.values()) == {"'self'", "'none'"}


def test_every_kind_of_event_is_listened_to():
    sent = set(re.findall(r'events\.add\(\s*"([a-z-]+)"', SOURCES)) | {"policy-held", "policy-released", "missed"}
    listed = re.search(r"EVENT_TYPES = \[(.*?)\]", (FOLDER / "events.js").read_text(), re.DOTALL)
    assert set(re.findall(r'"([a-z-]+)"', listed[1])) == sent


def test_every_panel_shows_metrics_that_exist_with_the_bands_of_the_health_signs():
    known = {value for name, value in vars(metric_names).items() if name.isupper() and isinstance(value, str)}
    families = [re.escape(name).replace(r"\{cause\}", r"\w+") for name in known]
    limits = HealthLimits()
    for panel in PANELS:
        for name in [*panel["names"], *filter(None, [panel.get("spread")])]:
            assert name in known or any(re.fullmatch(family, name) for family in families), name
        if sign := panel.get("sign"):
            assert sign in sign_names()
            limit = getattr(limits, sign)
            assert panel["healthy"] == list(limit if isinstance(limit, tuple) else (0, limit))


def test_uplot_comes_with_its_licence():
    assert "MIT License" in (FOLDER / "vendor" / "uPlot.LICENSE.txt").read_text()
    assert "uPlot (v1.6.32)" in (FOLDER / "vendor" / "uPlot.iife.min.js").read_text()[:100]


def test_a_browser_gets_the_page_and_a_client_the_answer_of_atropos(url):
    for accept in ("*/*", "application/json", ""):
        assert httpx.get(url, headers={"Accept": accept}).json() == {"message": "AtroposLib API"}
    page = httpx.get(url, headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "main.js" in page.text


def test_every_file_is_served_with_its_policy_and_asked_for_again_by_its_tag(url):
    for name, file in page_files().items():
        answer = httpx.get(f"{url}/page/{name}")
        assert (answer.status_code, answer.content) == (200, file.content)
        assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
        again = httpx.get(f"{url}/page/{name}", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for name in ("nothing.js", "..%2Ffiles.py", "vendor/..%2F..%2Ffiles.py"):
        assert httpx.get(f"{url}/page/{name}").status_code == 404


def test_with_a_token_the_page_is_below_it_and_an_address_without_the_slash_leads_there():
    with served_broker(token="secret-token") as url, httpx.Client(headers={"Accept": "text/html"}) as browser:
        assert browser.get(url).status_code == 401
        redirect = browser.get(f"{url}/t/secret-token")
        assert (redirect.status_code, redirect.headers["location"]) == (307, "secret-token/")
        page = browser.get(f"{url}/t/secret-token/")
        assert "main.js" in page.text
        assert page.headers["referrer-policy"] == "no-referrer"
        assert browser.get(f"{url}/t/secret-token/page/main.js").status_code == 200
        assert browser.get(f"{url}/page/main.js").status_code == 401
