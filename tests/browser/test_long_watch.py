"""A page that stays open: one stream, no old value shown as new, and links that never show another run's rollouts."""

from __future__ import annotations

import time
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import pytest

from atropos_api.broker import runs
from atropos_api.client import BrokerClient
from atropos_api.routes import ops
from atropos_api.testing import make_memory_app, serve_in_thread, served_broker
from atropos_api.wire import EnvironmentRequest, RunRequest
from atropos_api.wire.reports import HealthSign, RunReport

from .chromium import WAIT_SECONDS, Browser, Page
from .demo_run import begin_demo
from .test_page import show

STATE = "document.getElementById('connection').dataset.state"
STEPS = "document.querySelector('.chart').chart.lines[0].steps.length"
HIDDEN = "Object.defineProperty(document, 'hidden', {{get: () => {0}, configurable: true}}); "
CHANGED = "document.dispatchEvent(new Event('visibilitychange')); "


def asked(page: Page, part: str) -> list[str]:
    """Return the addresses with `part` in them that the page has requested so far."""
    page.run("0")  # takes the events of the browser that have come
    return [one for one in page.requests if part in one]


def until_asked(page: Page, part: str) -> None:
    """Return once the page has requested an address with `part` in it."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not asked(page, part):
        assert time.monotonic() < deadline, f"no request of {part}"
        time.sleep(0.03)


def test_a_tab_that_joins_twice_in_a_moment_opens_one_stream(page: Page) -> None:
    """As where the tick of a tab that was hidden is due when it is shown: each stream is one of six connections."""
    with served_broker() as own, BrokerClient(own) as client:
        begin_demo(client, 1)
        show(page, own)
        page.wait(f"{STATE} === 'live'")
        page.run(HIDDEN.format("true") + CHANGED)
        page.requests.clear()
        page.run(HIDDEN.format("false") + CHANGED + CHANGED)
        until_asked(page, "/v1/events?")
        time.sleep(1.5)  # three times as long as a join waits for an answer
        assert len(asked(page, "/v1/events?")) == 1
        page.open("about:blank")


def test_a_tab_that_follows_another_tells_the_state_of_its_connection(browser: Browser) -> None:
    with served_broker() as own:
        first, second = browser.page(window=True), browser.page(window=True)
        show(first, own)
        first.wait(f"{STATE} === 'live'")
        show(second, own)
        second.wait(f"{STATE} === 'live'")
        first.close()
        second.close()


def test_in_a_quiet_broker_the_durations_go_on_and_the_connection_stays_live(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "KEEP_ALIVE_SECONDS", 0.5)
    monkeypatch.setattr(ops, "DIAGNOSIS_SECONDS", 0.2)
    with served_broker() as own, BrokerClient(own) as client:
        client.register_environment(EnvironmentRequest(name="silent", group_size=8, max_token_length=9))
        show(page, own, "#view=parts")
        page.wait(f"{STATE} === 'live'")
        heard = "document.querySelector('tbody tr').innerText"
        before = page.wait(heard)
        page.wait(f"{heard} !== {before!r}")
        page.requests.clear()
        page.run("{ const now = Date.now; window.skew = 0; Date.now = () => now() + window.skew }")
        for _ in range(3):  # half a minute between a status and the next, of the 40 s that a stream may be silent
            before = page.run(f"(() => {{ window.skew += 30000; return {heard} }})()")
            page.wait(f"{heard} !== {before!r}")
            time.sleep(1.1)  # once a second the page looks at how long the stream has been silent
        assert page.run(STATE) == "live"
        assert asked(page, "/v1/events?") == [], "the stream was opened again"
        page.open("about:blank")


def test_a_broker_that_answers_no_more_is_told_as_lost(page: Page) -> None:
    with served_broker() as own:
        show(page, own)
        page.wait(f"{STATE} === 'live'")
        page.call("Fetch.enable", patterns=[{"urlPattern": "*/v1/status*"}])  # each stays without an answer
        page.run("{ const now = Date.now; Date.now = () => now() + 41000 }")
        page.wait(f"{STATE} === 'lost'", seconds=30)
        page.call("Fetch.disable")
        page.open("about:blank")


def test_a_page_whose_machine_sets_its_clock_back_goes_on_asking(page: Page) -> None:
    with served_broker() as own:
        show(page, own)
        page.wait(f"{STATE} === 'live'")
    page.wait(f"{STATE} === 'lost'")
    page.run("{ const now = Date.now; Date.now = () => now() - 3600000 }")
    time.sleep(0.5)  # until no request is under way
    page.requests.clear()
    until_asked(page, "/v1/status")
    page.open("about:blank")
    page.errors.clear()  # its requests to the broker that is gone


def test_a_link_to_a_run_that_the_broker_does_not_know_shows_no_other_run(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        begin_demo(client, 2)
        show(page, own, "#run=run-of-another&batch=2&group=0")
        page.wait("document.querySelector('.problem')")
        assert "knows no run run-of-another" in page.text()
        assert page.run("document.querySelectorAll('.sibling').length") == 0
        page.run("location.hash = '#run=run-of-another&view=events'")
        page.wait("document.querySelector('[aria-current=page]').innerText === 'Events'")
        page.wait("document.querySelector('.problem')")
        page.run("location.hash = '#run=run-of-another&batch=2&group=0'")
        page.wait("document.querySelector('[aria-current=page]').innerText === 'Rollouts'")
        page.click(".problem a")
        page.wait("document.querySelectorAll('.sibling').length === 8")
        page.open("about:blank")


def test_a_link_that_was_opened_before_its_run_began_shows_no_other_run_and_then_that_run(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        first = begin_demo(client, 1, name="first")
        client.finish_run(first.run.run_id, epoch=first.run.epoch)
        second = begin_demo(client, 1, name="second")
        monkeypatch.setattr(runs, "uuid", SimpleNamespace(uuid4=lambda: UUID(int=7)))
        show(page, own, "#run=run-000000000000")
        page.wait(f"{STATE} === 'live'")
        client.finish_run(second.run.run_id, epoch=second.run.epoch)
        picker = "document.getElementById('runs')"
        page.wait(f"{picker}.textContent.includes('second (finished')")
        assert page.run(f"{picker}.value") == ""
        assert "knows no run" in page.text()
        third = begin_demo(client, 1, name="third")
        page.wait(f"{STEPS} === 1")
        assert page.run(f"{picker}.value") == third.run.run_id == "run-000000000000"
        page.open("about:blank")


def test_of_two_runs_each_part_says_whose_it_is_and_the_choice_follows_the_back_button(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        first = begin_demo(client, 1, name="first")
        client.finish_run(first.run.run_id, epoch=first.run.epoch)
        second = begin_demo(client, 1, name="second")
        show(page, own)
        picker = "document.getElementById('runs').value"
        assert page.run(picker) == second.run.run_id
        assert "The flow above" not in page.text()
        page.run(f"location.hash = '#run={first.run.run_id}'")
        page.wait("document.body.innerText.includes('The flow above is that of second; below are curves')")
        assert page.run(picker) == first.run.run_id
        page.run("history.back()")
        page.wait(f"{picker} === {second.run.run_id!r}")
        page.wait("!document.body.innerText.includes('The flow above')")
        page.open("about:blank")


def test_steps_of_a_run_resumed_while_events_were_missed_are_read_again(page: Page) -> None:
    app = make_memory_app()
    with serve_in_thread(app) as own, BrokerClient(own) as client:
        demo = begin_demo(client, 6)
        show(page, own)
        page.wait(f"{STEPS} === 6")
        page.wait(f"{STATE} === 'live'")
        plot = "document.querySelector('.chart').chart.plot"
        page.run(f"{plot}.setScale('x', {{min: 5, max: 6}})")
        page.run(HIDDEN.format("true") + CHANGED)
        client.begin_run(
            RunRequest(name="gsm8k-1.5b", batch_size=32, max_token_length=512, num_steps=200, resume=True,
                       resume_from_batch=3, take_over=True)
        )  # fmt: skip
        for number in range(2100):
            app.context.broker.state.events.add("policy", run_id=demo.run.run_id, version=number, step=number)
        page.run(HIDDEN.format("false") + CHANGED)
        page.wait(f"{STEPS} === 3")
        assert page.run(f"{plot}.scales.x.max") == 3, "no step is left of the part that a reader had zoomed into"
        page.open("about:blank")


def test_a_sign_of_trouble_stays_among_hundreds_of_later_events(page: Page) -> None:
    app = make_memory_app()
    with serve_in_thread(app) as own, BrokerClient(own) as client:
        demo = begin_demo(client, 1)
        sign = HealthSign(sign="kl", step=1, value=2.0, message="kl is above 1", advice="lower --lr")
        client.report_run(demo.run.run_id, RunReport(signs=[sign]))
        for number in range(600):
            app.context.broker.state.events.add("policy", run_id=demo.run.run_id, version=number, step=number)
        show(page, own)
        page.wait("document.querySelector('.signs')?.innerText.includes('kl is above 1')")
        page.open("about:blank")


def test_of_a_metric_that_no_step_reports_no_more_is_read_than_of_the_others(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        demo = begin_demo(client, 4)
        show(page, own)
        page.wait(f"{STEPS} === 4")
        page.wait(f"{STATE} === 'live'")
        page.requests.clear()
        demo.step(5)
        page.wait(f"{STEPS} === 5")
        firsts = [parse_qs(urlsplit(one).query).get("first", ["5"])[0] for one in asked(page, "/series?")]
        assert firsts
        assert min(map(int, firsts)) >= 5, "a call without it is of a chart that has come into sight"
        page.open("about:blank")


def test_a_part_that_a_reader_has_zoomed_into_stays_in_view_while_steps_come(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        demo = begin_demo(client, 6)
        show(page, own)
        page.wait(f"{STEPS} === 6")
        page.wait(f"{STATE} === 'live'")
        plots = "[...document.querySelectorAll('.chart')].slice(0, 2).map((one) => one.chart.plot)"
        page.run(f"{plots}[0].setScale('x', {{min: 2, max: 4}})")
        demo.step(7)
        page.wait(f"{STEPS} === 7")
        page.wait(f"{plots}[1].scales.x.max >= 7")
        assert page.run(f"{plots}.map((one) => one.scales.x.min)") == [2, 1]
        assert page.run(f"{plots}[0].scales.x.max") == 4
        page.open("about:blank")


def test_a_table_and_a_link_in_it_stay_where_a_reader_is_while_the_page_is_brought_up_to_date(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        demo = begin_demo(client, 2)
        page.size(400, 800)
        show(page, own, "#view=parts")
        page.run("Object.assign(document.querySelector('.scroll'), {scrollLeft: 60}).focus()")
        page.run("document.querySelector('.scroll').old = true")
        demo.step(3)
        page.wait("!document.querySelector('.scroll').old")
        assert page.run("document.querySelector('.scroll').scrollLeft") == 60
        assert page.run("document.activeElement.getAttribute('aria-label')") == "Environments"
        page.run("location.hash = '#view=rollouts'")
        page.wait("document.querySelectorAll('tbody a').length === 12")
        page.run("document.querySelectorAll('tbody a')[2].focus()")
        at = page.run("document.activeElement.innerText")
        demo.step(4)
        page.wait("document.querySelectorAll('tbody a').length === 16")
        assert page.run("document.activeElement.innerText") == at
        page.open("about:blank")


def test_as_many_rewards_as_the_largest_groups_have_are_listed(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        begin_demo(client, 1)
        show(page, own)
        page.run(
            "const group = (at) => ({batch: 1, group: at, environment: 'e', rewards: Array(1024).fill(-2), tokens: 9, "
            "oldest_version: 1, arrived_at: 1, equal_rewards: true, has_values: false, remarks: {}}); "
            "const answer = JSON.stringify({total: 200, groups: Array.from({length: 200}, (_, at) => group(at))}); "
            "const real = window.fetch; window.fetch = (url, options) => String(url).includes('/groups') "
            "? Promise.resolve(new Response(answer)) : real(url, options)"
        )
        page.run("location.hash = '#view=rollouts'")
        page.wait("document.querySelectorAll('tbody tr').length === 200")
        page.open("about:blank")


def test_an_empty_queue_is_no_batch_that_was_forgotten(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        begin_demo(client, 1)
        show(page, own, "#view=rollouts&batch=0")
        page.wait("document.body.innerText.includes('No group is queued.')")
        page.open("about:blank")


def test_dates_are_those_of_the_reader_s_clock_and_json_that_is_selected_is_the_same_value(
    page: Page, url: str
) -> None:
    page.call("Emulation.setTimezoneOverride", timezoneId="Asia/Tokyo")
    show(page, url)
    at = "import('./page/format.js').then((one) => one.clock(Date.UTC(2026, 0, 5, 20) / 1000))"
    assert page.run(at) == "2026-01-06 05:00:00"
    value = "'a\\u200b\\u202e\\u{e0041}\\ud800\\u007f\\n'"
    shown = f"import('./page/dom.js').then((one) => [one.json({value}), JSON.parse(one.json({value})) === {value}])"
    text, is_same = page.run(shown)
    assert is_same
    assert text.isprintable()
