"""The page in a real browser: fast, live, keyboard and screen reader included, and harmless whatever a model wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from atropos_api.client import BrokerClient
from atropos_api.testing import make_memory_app, serve_in_thread, served_broker
from atropos_api.wire import EnvironmentRequest, FleetReport, PolicyUpdate, ServerReport
from atropos_api.wire.reports import (
    OpenRollout,
    RunReport,
    StepMetrics,
    TokenReport,
    WaitingMember,
)
from tests.stalls import stalled_run

from .chromium import Browser, Page
from .demo_run import SIGN_STEP, TEXTS, DemoRun, begin_demo, make_group, values_of

READY = "document.documentElement.dataset.ready"
CHARTS = "document.querySelectorAll('.uplot').length"
TOKENS = "document.querySelectorAll('.sibling .token').length"
VIEWS = ("overview", "curves", "rollouts", "parts", "events", "group")
AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8")


def show(page: Page, url: str, fragment: str = "") -> None:
    page.open(f"{url}/{fragment}")
    page.wait(READY)


def texts(page: Page, selector: str) -> list[str]:
    found: list[str] = page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)")
    return found


def address_of(view: str) -> str:
    return "#batch=60&group=1&sample=2&token=30" if view == "group" else f"#view={view}"


def settle(page: Page, view: str) -> None:
    charts = "[...document.querySelectorAll('.chart')].filter((one) => one.getBoundingClientRect().top < innerHeight)"
    drawn = f"{charts}.every((one) => one.querySelector('.uplot')) && document.querySelector('.chart')"
    wanted = {"overview": drawn, "curves": drawn, "group": f"{TOKENS} > 40"}
    page.wait(wanted.get(view, "document.querySelector('main h2, main table')"))


def test_the_first_screen_is_there_within_a_second(page: Page, url: str, demo: DemoRun) -> None:
    """The best of some: the machine has other work."""
    seconds = []
    for _ in range(6):
        show(page, url)
        seconds.append(page.wait("performance.now() / 1000"))
        assert texts(page, ".verdict h2")[0]
        assert len(texts(page, ".stage")) == 5
    assert min(seconds) < 1.0, seconds


def test_steps_policies_and_groups_appear_without_a_reload(page: Page, url: str) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        run = begin_demo(client, 3)
        show(page, own)
        page.wait("document.body.innerText.includes('v3')")
        run.step(4)
        page.wait("document.body.innerText.includes('v4')", seconds=5)
        page.wait("document.title.startsWith('4 ')")
        page.wait("document.querySelector('.keys b')")
        before = texts(page, ".chart:first-child .keys")
        run.step(5)
        page.wait(f"document.querySelector('.chart .keys').innerText !== {json.dumps(before[0])}", seconds=8)
        page.open("about:blank")


def test_a_reload_shows_the_same_rollout_and_token(page: Page, url: str, demo: DemoRun) -> None:
    show(page, url, "#batch=60&group=1&sample=2&token=30")
    chosen = page.wait("document.querySelector('.token[aria-selected=true]').innerText")
    page.press("ArrowRight")
    page.call("Page.reload")
    page.wait(READY)
    assert page.wait("document.querySelector('.token[aria-selected=true]').innerText") == chosen
    assert "Token 30" in texts(page, ".facts")[[*texts(page, ".sibling h3")].index("Sequence 2")]


def test_the_slowest_open_groups_are_shown_with_what_each_unfinished_rollout_waits_for(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client, stalled_run(client) as stalled:
        waiting = [WaitingMember(member=3, last_event="tool python: running", seconds=88.0)]
        late = OpenRollout(name="Natalia sold clips", seconds=90.0, done=3, wanted=4, waiting=waiting)
        soon = OpenRollout(name="An ordinary one", seconds=7.0, done=1, wanted=4, last_event="request")
        stalled.report(open_rollouts=2, open_requests=1, usual_seconds=6.0, slowest=[soon, late])
        show(page, own)
        page.wait("document.querySelectorAll('.slowest tbody tr').length === 2")
        first, second = texts(page, ".slowest tbody tr")
        for told in (
            "Natalia sold clips",
            "3 of 4",
            r"6 s: [\d.]+ times that",
            r"rollout 3: tool python: running, \d+ s ago",
        ):
            assert re.search(told, first), first
        assert "An ordinary one" in second
        page.open("about:blank")


def test_the_load_of_each_registered_server_is_shown(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client, stalled_run(client) as stalled:
        for name, waiting, free in (("gpu-1", 0, 0.9), ("gpu-2", 12, 0.04)):
            report = ServerReport(
                lease_id=f"lease-of-{name}", boot_id="b", mode="weights", port=9001, version=7,
                running=64, waiting=waiting, kv_free=free,
            )  # fmt: skip
            client.renew_server(name, report)
        proven = ["lease-of-gpu-1", "lease-of-gpu-2"]
        run = stalled.run
        client.update_policy(
            PolicyUpdate(run_id=run.run_id, version=2, step=0, published_at=1.0, epoch=run.epoch, servers=proven)
        )
        show(page, own)
        page.wait("document.querySelector('.chain').innerText.includes('12 wait inside, least free KV cache 4 %')")
        show(page, own, "#view=parts")
        page.wait("document.querySelectorAll('table').length > 1")
        row = next(one for one in texts(page, "tbody tr") if one.startswith("gpu-2"))
        for told in ("serving", "7", "64", "12", "4 %", "ago"):
            assert told in row
        page.open("about:blank")


def test_the_parts_show_how_many_servers_a_launcher_runs_and_how_many_are_wanted(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        report = FleetReport(launcher_id="launcher-1", wanted=1, running=1, least=1, most=4)
        client.renew_fleet("run-1", report)
        show(page, own, "#view=parts")
        page.wait("document.querySelector('main').innerText.includes('run-1')")
        client.scale_fleet("run-1", 3)
        page.wait("document.querySelector('main').innerText.includes('3 (asked for)')", seconds=8)
        followed = msgspec.structs.replace(report, wanted=2, request=1, running=2, note=HOSTILE)
        client.renew_fleet("run-1", followed)
        page.wait("document.querySelector('main').innerText.includes('<script>')", seconds=8)
        assert "asked for" not in page.text()
        assert page.run("window.hacked === undefined")
        page.open("about:blank")


HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\u202e\x1b[31m\x00\u200bend"


def test_a_rollout_with_a_script_in_it_is_text(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        demo = begin_demo(client, 1, name=HOSTILE[:150])
        name = EnvironmentRequest(name=HOSTILE[:150] + "</td>", group_size=8, max_token_length=512)
        demo.environments[0] = client.register_environment(name).environment_id
        chat = [
            {"role": HOSTILE, "content": HOSTILE},
            {"role": "assistant", "content": HOSTILE, "tool_calls": [HOSTILE]},
        ]
        group = make_group(demo.random, 2, quality=0.5, messages=[chat] * 8, group_overrides={HOSTILE: HOSTILE})
        demo.step(2, groups=[group, *[make_group(demo.random, 2, quality=0.5) for _ in range(3)]])
        hostile_texts = {token: f"{HOSTILE}{text}" for token, text in TEXTS.items()}
        report = TokenReport(groups=[values_of(demo.random, 0, group)], texts=hostile_texts)
        client.report_tokens(demo.run.run_id, 2, report)
        for view in (
            "#batch=2&group=0&sample=0&token=3",
            "#view=rollouts",
            "#view=parts",
            "#view=events",
            "#view=overview",
        ):
            show(page, own, view)
            page.wait("document.querySelector('main h2, main table')")
            if view.startswith("#batch"):
                page.wait(f"{TOKENS} > 20")
                page.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
                page.click(".actions button")
                page.wait("document.querySelector('.test-case')")
                shown = page.text()
                assert "<script>window.hacked = 1</script>" in shown
                assert "⟦U+202E⟧␛[31m␀⟦U+200B⟧end" in shown
            assert page.run("window.hacked === undefined")
            assert page.run("document.querySelectorAll('main script, main img').length") == 0
            assert not any(mark in page.text() for mark in "\u202e\x1b\x00\u200b")
        page.open("about:blank")


def test_a_hundred_thousand_steps_are_drawn_within_a_second_and_the_spike_is_seen(page: Page) -> None:
    app = make_memory_app()
    with serve_in_thread(app) as own, BrokerClient(own) as client:
        demo = begin_demo(client, 1)
        names = ("reward/mean", "response/length_mean", "grpo/mean_ratio", "train/kl", "time/step")
        for first in range(2, 100_001, 1000):
            steps = [
                StepMetrics(step=step, time=1.0, values=dict.fromkeys(names, 0.1 if step != 54_321 else 7.0))
                for step in range(first, first + 1000)
            ]
            app.context.broker.metrics.take(demo.run.run_id, steps, known_runs=[demo.run.run_id])
        seconds = []
        for _ in range(5):
            show(page, own)
            page.wait(f"{CHARTS} >= 4")
            seconds.append(page.wait("performance.now() / 1000"))
        assert min(seconds) < 1.0, seconds
        chart = "document.querySelector('.chart').chart"
        assert page.run(f"{chart}.lines[0].values.includes(7)")
        assert page.run(f"{chart}.lines[0].steps.length") <= 1000
        page.open("about:blank")


def test_rewards_of_each_environment_have_a_shade_also_in_a_long_run(page: Page) -> None:
    """A server reduces the curve and its spread apart, so that most of their steps differ."""
    app = make_memory_app()
    with serve_in_thread(app) as own, BrokerClient(own) as client:
        demo = begin_demo(client, 1)
        draw = demo.random.random
        steps = [
            StepMetrics(step=step, time=1.0, values={f"env/{one}/reward_{part}": base + draw() for one in (0, 1)
                        for part, base in (("mean", 0.0), ("std", 0.1))})
            for step in range(2, 5000)
        ]  # fmt: skip
        app.context.broker.metrics.take(demo.run.run_id, steps, known_runs=[demo.run.run_id])
        show(page, own, "#view=curves")
        plot = (
            "[...document.querySelectorAll('.chart')].find((one) => one.innerText.startsWith('Reward by')).chart.plot"
        )
        page.wait(f"{plot}?.series.length === 7")
        apart = "data[at + 1].every((upper, index) => upper == null || upper > data[at][index] + 0.09)"
        assert page.run(f"{{ const data = {plot}.data; [1, 4].every((at) => {apart}) }}")
        page.open("about:blank")


def test_a_spike_leads_to_the_rollouts_of_its_batch_by_keyboard(page: Page, url: str, demo: DemoRun) -> None:
    show(page, url)
    settle(page, "overview")
    ratio = "[...document.querySelectorAll('.chart')].find((one) => one.innerText.startsWith('Ratio'))"
    page.run(f"{ratio}.querySelector('.plot').focus()")
    page.press("Home")
    for _ in range(SIGN_STEP - 1):
        page.press("ArrowRight")
    page.wait(f"document.getElementById('announcer').textContent.includes('step {SIGN_STEP}: mean ratio 1.31')")
    page.press("Enter")
    page.wait(f"location.hash.includes('batch={SIGN_STEP}')")
    page.wait(f"document.querySelector('main table').innerText.includes('{SIGN_STEP} · 0')")


def test_tokens_are_read_by_keyboard_and_each_has_a_link(page: Page, url: str, demo: DemoRun) -> None:
    show(page, url, "#batch=60&group=1&sample=2&token=30")
    page.wait("document.querySelector('.token[aria-selected=true]')")
    page.run("document.querySelector('.token[aria-selected=true]').closest('.tokens').focus()")
    page.press("ArrowRight")
    page.wait("document.getElementById('announcer').textContent.startsWith('Token 31:')")
    assert "token=31" in page.run("location.hash")
    facts = page.run("document.getElementById('announcer').textContent")
    assert all(word in facts for word in ("advantage", "ratio", "entropy", "policy version 60"))
    page.press("Home")
    page.wait("document.getElementById('announcer').textContent.includes('not sampled')")
    active = page.run("document.activeElement.getAttribute('aria-activedescendant')")
    assert page.run(f"document.getElementById('{active}').getAttribute('aria-selected')") == "true"


@pytest.mark.parametrize("token", ["", "&token=30"])
def test_a_link_to_a_sequence_scrolls_to_it_and_outlines_it(page: Page, url: str, demo: DemoRun, token: str) -> None:
    page.size(900, 800)
    show(page, url, "#batch=60&group=1")
    page.wait("document.querySelectorAll('.sibling').length === 8")
    last = page.run("[...document.querySelectorAll('.sibling h3')].at(-1).innerText").removeprefix("Sequence ")
    page.open("about:blank")
    show(page, url, f"#batch=60&group=1&sample={last}{token}")
    place = "document.querySelector('.sibling[aria-current]').getBoundingClientRect()"
    page.wait(f"document.querySelector('.sibling[aria-current] .token') && {place}.right <= innerWidth")
    assert texts(page, ".sibling[aria-current] h3") == [f"Sequence {last}"]
    assert page.run(f"{place}.left") >= 0
    assert page.run(f"{place}.top") < 800
    assert page.run("getComputedStyle(document.querySelector('.sibling[aria-current]')).boxShadow").endswith("2px")


def test_colours_have_a_pattern_beside_them_and_masks_are_seen(page: Page, url: str, demo: DemoRun) -> None:
    show(page, url, address_of("group"))
    settle(page, "group")
    style = "getComputedStyle(document.querySelector('.legend .token.{0}')).{1}"
    seen = {name: page.run(style.format(name, "textDecorationStyle")) for name in ("n5", "n3", "p3", "p5")}
    assert len(set(seen.values())) == 4, seen
    assert "gradient" in page.run("getComputedStyle(document.querySelector('.tokens .token.masked')).backgroundImage")
    for mode in ("ratio", "gap", "entropy", "version", "logprob"):
        page.click(f"input[value={mode}]")
        page.wait("document.querySelectorAll('.legend li').length >= 2")
        assert page.run("document.querySelectorAll('.tokens .token[class*=\" \"]').length") > 0


def test_a_long_rollout_is_shown_in_windows_of_two_thousand_tokens(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        demo = begin_demo(client, 1)
        rows = [[token % len(TEXTS) for token in range(5000)] for _ in range(8)]
        long = make_group(demo.random, 2, quality=0.5, tokens=rows, masks=rows, inference_logprobs=[[-0.5] * 5000] * 8)
        long.policy_versions = None
        demo.step(2, groups=[long, *[make_group(demo.random, 2, quality=0.5) for _ in range(3)]])
        show(page, own, "#batch=2&group=0&sample=0&token=4321")
        page.wait("document.querySelector('.token[aria-selected=true]')")
        page.wait("document.querySelector('.facts').innerText.includes('Token 4321')")
        sizes = page.run(
            "[...document.querySelectorAll('.tokens')].map((one) => one.querySelectorAll('.token').length)"
        )
        assert max(sizes) <= 2000
        page.run("[...document.querySelectorAll('.pages button')][0].click()")
        page.wait("document.querySelector('.pages').innerText.includes('2,000 to 3,999')")
        page.open("about:blank")


def test_a_step_can_be_replayed_and_a_sequence_taken_as_a_test_case(page: Page, url: str, demo: DemoRun) -> None:
    show(page, url, address_of("group"))
    settle(page, "group")
    page.run("document.querySelector('.replay').open = true")
    assert "atropos replay /runs/demo/rollouts/batch-60.atb" in page.text()
    page.click(".actions button")
    case = json.loads(page.wait("document.querySelector('.test-case pre').textContent"))
    assert case["environment"] == "arithmetic"
    assert len(case["tokens"]) == len(case["masks"]) == len(case["inference_logprobs"])
    assert "72" in case["completion"]
    assert "answer" not in case, "that is the reference's name in rewards"
    assert "reference answer is not in it" in page.text()
    assert case["prompt"].startswith("Natalia sold clips")


def test_runs_are_drawn_over_each_other(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        first = begin_demo(client, 4, name="first")
        client.finish_run(first.run.run_id, epoch=first.run.epoch)
        begin_demo(client, 5, name="second")
        show(page, own, f"#view=curves&over={first.run.run_id}")
        page.wait(f"{CHARTS} >= 3")
        keys = page.wait("document.querySelector('.chart .keys').innerText")
        assert "second: mean" in keys
        assert "first: mean" in keys
        page.open("about:blank")


def test_curves_are_found_by_words_of_their_names_those_without_a_panel_too(page: Page) -> None:
    with served_broker() as own, BrokerClient(own) as client:
        demo = begin_demo(client, 3)
        step = StepMetrics(step=4, time=1.0, values={"mine/odd_length": 1.0, "mine/other": 2.0})
        client.report_run(demo.run.run_id, RunReport(steps=[step]))
        show(page, own, "#view=curves")
        page.wait(f"{CHARTS} >= 3")
        page.run("document.querySelector('.search input').focus()")
        page.call("Input.insertText", text="Length")
        shown = "[...document.querySelectorAll('.chart')].filter((one) => one.offsetParent).map((one) => one.innerText)"
        page.wait(f"{shown}.length === 2")
        answer, own_metric = page.run(shown)
        assert answer.startswith("Answer length")
        assert own_metric.startswith("mine/odd_length")
        page.open("about:blank")


@pytest.mark.parametrize("width", [400, 820])
@pytest.mark.parametrize("view", VIEWS)
def test_a_narrow_screen_needs_no_scrolling_sideways(
    page: Page, url: str, demo: DemoRun, view: str, width: int
) -> None:
    page.size(width, 800)
    show(page, url, address_of(view))
    settle(page, view)
    assert page.run("document.documentElement.scrollWidth") <= width


def barriers(page: Page) -> str:
    page.run(AXE + "; true")
    found = page.run("axe.run(document, {resultTypes: ['violations']}).then((all) => all.violations)")
    nodes = [(one["id"], node) for one in found for node in one["nodes"][:3]]
    return "\n".join(f"{name}: {node['target']} {node['failureSummary']}" for name, node in nodes)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_no_barrier(page: Page, url: str, demo: DemoRun, view: str, theme: str) -> None:
    page.theme(theme)
    show(page, url, address_of(view))
    settle(page, view)
    assert not barriers(page)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("mode", ["ratio", "entropy", "logprob", "version"])
def test_tokens_can_be_read_in_every_colour(page: Page, url: str, demo: DemoRun, mode: str, theme: str) -> None:
    page.theme(theme)
    show(page, url, address_of("group"))
    settle(page, "group")
    page.click(f"input[value={mode}]")
    assert not barriers(page)


def test_the_theme_can_be_chosen_and_is_remembered(page: Page, url: str, demo: DemoRun) -> None:
    show(page, url)
    paper = "getComputedStyle(document.documentElement).getPropertyValue('--paper')"
    light = page.run(paper)
    for _ in range(2):
        page.click("#theme")
    assert page.run("document.documentElement.dataset.theme") == "dark"
    assert page.run(paper) != light
    page.call("Page.reload")
    page.wait(READY)
    assert page.run("document.documentElement.dataset.theme") == "dark"
    page.click("#theme")


def test_nothing_of_the_page_is_hidden_from_a_reader_without_a_mouse(page: Page, url: str, demo: DemoRun) -> None:
    show(page, url)
    settle(page, "overview")
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(30):
        page.press("Tab")
        reached.add(page.run("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"))
    assert {"Curves", "Rollouts", "Parts", "Events"} <= reached
    assert any(str(one).startswith("Reward:") for one in reached)


def test_a_browser_that_has_no_event_stream_is_kept_up_to_date(browser: Browser) -> None:
    page = browser.page(window=True)
    page.call("Page.addScriptToEvaluateOnNewDocument", source="delete window.EventSource;")
    with served_broker() as own, BrokerClient(own) as client:
        run = begin_demo(client, 2)
        show(page, own)
        page.wait("document.getElementById('connection').dataset.state === 'polling'", seconds=8)
        run.step(3)
        page.wait("document.body.innerText.includes('v3')", seconds=8)
        assert [url for url in page.requests if "v1/events?" in url] == []
        page.close()
