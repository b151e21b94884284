"""The report of a run is one file that asks for nothing, and runs can be compared in a table and over each other."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from atropos_api.common.cliconfig import ConfigError
from example_trainer.commands import main
from example_trainer.launcher.comparison import differing_settings, label_runs, settings_of
from example_trainer.launcher.run_report import read_run, render, report_line
from example_trainer.launcher.summary import NoRun
from example_trainer.launcher.svg_chart import WIDTH, Line, draw_chart, make_line, number

HOSTILE = '<script src="http://evil/x.js"></script><img src=x onerror=alert(1)>'
LOADING = {"src", "href", "srcset", "data", "action", "poster", "background", "xlink:href", "style"}


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text outside of styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data if self.found and self.found[-1][0] != "style" else ""


def write_run(root: Path, rewards: list[float], *, lr: float = 1e-5, name: str = "demo") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "step": step,
            "timestamp": 100.0 + step,
            "time/step": 0.5,
            "reward/mean": reward,
            "reward/std": 0.2,
            "env/3/reward_mean": reward,
            "grpo/mean_ratio": 1.0,
            "alignment/diff_max": 1e-6 * step,
            "staleness/mean": 1.0,
            "staleness/max": 2.0,
        }
        for step, reward in enumerate(rewards, 1)
    ]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sign = {
        "event": "health",
        "sign": "mean_ratio",
        "step": 2,
        "value": 1.5,
        "message": HOSTILE,
        "advice": "lower --lr",
    }
    (root / "events.jsonl").write_text(json.dumps(sign) + "\n")
    environment = {
        "environment_id": 3,
        "name": HOSTILE,
        "queued_sequences": 1,
        "outcomes": {"trained": 7, "expired": 2},
    }
    items = {"drawn": 1234, "dropped": {"failed": 5}, "in_progress": 0, "sampled_sequences": 0, "sampled_tokens": 0}
    (root / "data.json").write_text(json.dumps([{**environment, "items": items, "dropped_groups": {}}]))
    settings = {"lr": lr, "name": name, "run_dir": str(root.resolve()), "vllm_port": 1000 + len(rewards)}
    programs = {"environment": {"settings": {"env": {"group_size": 8, "store": f"{root.resolve()}/data"}}}}
    record = {"trainer": settings, "programs": programs, "command": ["atropos-grpo-run", HOSTILE]}
    (root / "config.json").write_text(json.dumps(record))
    (root / "rollouts").mkdir(exist_ok=True)
    groups = [
        {"scores": [reward, 0.0], "messages": [[{"role": "assistant", "content": f"{HOSTILE}\u202e{'x' * 9000}"}], []]}
        for reward in rewards
    ]
    (root / "rollouts/environment.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    return root


@pytest.fixture
def page(tmp_path: Path) -> str:
    return render([read_run(write_run(tmp_path / "run", [0.1, 0.5, 0.9], name=HOSTILE))])


def test_a_report_asks_a_browser_for_nothing_and_lets_nothing_run(page: str) -> None:
    found = Elements(page).found
    assert not {tag for tag, _ in found} & {"script", "img", "link", "iframe", "object", "embed", "base", "form", "a"}
    assert not {name for _, attributes in found for name in attributes if name in LOADING or name.startswith("on")}
    assert "url(" not in page
    assert "@import" not in page
    policy = next(attributes for tag, attributes in found if attributes.get("http-equiv") == "Content-Security-Policy")
    assert str(policy["content"]).startswith("default-src 'none'")


def test_what_models_environments_and_settings_hold_is_text_with_nothing_hidden(page: str) -> None:
    text = Elements(page).text
    assert text.count(HOSTILE) >= 4
    assert "\u202e" not in page
    assert "⟨U+202E⟩" in text
    assert "more characters" in text


def test_a_report_has_the_curves_signs_data_rollouts_and_settings_of_its_run(page: str) -> None:
    text = Elements(page).text
    for said in ("Reward by environment", "Alignment", "Staleness", "Time of a step", "healthy from 0.8 to 1.2"):
        assert said in text
    assert "Clip share" not in text, "a panel without values is left out"
    assert page.count("<polyline") >= 6
    assert page.count("<polygon") == 1, "one standard deviation around the mean reward"
    assert page.count('class="mark-of-sign"') == 1
    for said in ("lower --lr", "sign of trouble at step 2", "1,234", "5 dropped (failed)", "2 dropped (expired)"):
        assert said in text
    for said in ("the newest group", "the lowest mean reward", "environment.group_size", "RUN/data", "1e-05"):
        assert said in text


def test_a_report_stays_small_with_a_sign_at_every_other_step_of_a_long_run(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", [0.5])
    rows = [{"step": step, "grpo/mean_ratio": 1.0} for step in range(1, 4001)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sign = json.loads((root / "events.jsonl").read_text())
    signs = [sign | {"step": step, "message": "near-its-limit"} for step in range(1, 4000, 2)]
    signs.append(sign | {"sign": "kl", "step": 4000, "message": "seen-once"})
    (root / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in signs))
    page = render([read_run(root)])
    text = Elements(page).text
    assert page.count('class="mark-of-sign"') <= WIDTH
    assert "sign of trouble at 2,000 steps from 1 to 3999" in text
    assert text.count("near-its-limit") == 20
    assert text.count("seen-once") == 1
    assert "1,980 more are in events.jsonl" in text


@pytest.mark.parametrize(("environments", "shades"), [(4, 5), (5, 1)])
def test_rewards_of_a_few_environments_have_shades(tmp_path: Path, environments: int, shades: int) -> None:
    root = write_run(tmp_path / "run", [0.1, 0.9])
    each = {f"env/{one}/reward_{part}": 0.3 for one in range(environments) for part in ("mean", "std")}
    rows = [json.loads(line) | each for line in (root / "metrics.jsonl").read_text().splitlines()]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert render([read_run(root)]).count("<polygon") == shades, "that of all rewards is one of them"


def test_of_a_run_without_anything_but_metrics_there_is_a_report_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert report_line(tmp_path) == f"report: {tmp_path / 'report.html'}"
    assert "None was found." in (tmp_path / "report.html").read_text()


def test_a_report_that_cannot_be_written_is_a_line_and_ends_nothing(tmp_path: Path) -> None:
    said = f"{tmp_path} holds no metrics.jsonl with a finished step"
    assert report_line(tmp_path) == f"report: none of {tmp_path} (NoRun: {said})"


def test_a_spike_of_one_step_stays_visible_in_a_long_run() -> None:
    rows = [{"step": step, "train/kl": 9.0 if step == 7777 else 0.1} for step in range(1, 20_001)]
    line = make_line(rows, "train/kl", label="kl")
    assert line is not None
    assert len(line.steps) <= 400
    assert dict(zip(line.steps, line.values, strict=True))[7777] == 9.0


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [-3.0, -3.0], [1e-9, 5.0], [1e12, -1e12]])
@pytest.mark.parametrize("options", [{}, {"log": True, "healthy": [0, 0.1]}, {"floor": 0, "healthy": [0.8, 1.2]}])
def test_each_point_of_a_chart_lies_within_it(values: list[float], options: dict[str, Any]) -> None:
    drawn = draw_chart(
        {"title": "T", **options}, [Line(label="a", steps=list(range(len(values))), values=values, last=values[-1])]
    )
    found = re.search(r'points="([^"]+)"', drawn)
    assert found is not None
    points = [tuple(map(float, point.split(","))) for point in found[1].split()]
    assert all(50 <= x <= 412 and 8 <= y <= 168 for x, y in points)


def test_numbers_are_written_as_people_read_them() -> None:
    assert [number(value) for value in (0.0, 0.01234, 4.5678, 123.4, 12345.0, 1e-6, None)] == [
        *("0", "0.0123", "4.57", "123", "12,345", "1.0e-06", "–")
    ]


def test_runs_are_compared_by_figures_and_by_the_settings_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    runs = [write_run(tmp_path / "a", [0.1] * 6), write_run(tmp_path / "b", [0.8] * 7, lr=3e-4)]
    assert main.run(["report", *map(str, runs)]) == 0
    printed = capsys.readouterr().out
    rows = {cells[0]: cells[1:] for line in printed.splitlines() if len(cells := _cells(line)) == 3}
    assert rows["best reward over 5 steps"] == ["0.100", "0.800"]
    assert rows["steps"] == ["6", "7"]
    assert rows["staleness of trained tokens, mean and largest"] == ["1.00, 2.00", "1.00, 2.00"]
    assert rows["trainer.lr"] == ["1e-05", "0.0003"]
    assert [name for name in rows if name.startswith(("trainer.", "environment."))] == ["trainer.lr"]
    page = (tmp_path / "a/comparison.html").read_text()
    text = Elements(page).text
    assert "a: mean" in text
    assert "b: mean" in text
    assert page.count("<polygon") == 0
    assert "trainer.lr" in text


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


def test_the_page_of_a_report_goes_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, wanted = write_run(tmp_path / "run", [0.1, 0.9]), tmp_path / "elsewhere.html"
    assert main.run(["report", str(run), "--html", str(wanted)]) == 0
    assert f"report: {wanted}" in capsys.readouterr().out
    assert "<polyline" in wanted.read_text()
    assert main.run(["report", str(run)]) == 0
    assert (run / "report.html").exists()
    assert main.run(["report", str(run), "--html", str(wanted)]) == 0, "a report may be written again"
    (tmp_path / "notes.html").write_text("<p>mine</p>")
    with pytest.raises(ConfigError, match=r"--html .*notes.html exists and is no report; name another file"):
        main.run(["report", str(run), "--html", str(tmp_path / "notes.html")])
    assert (tmp_path / "notes.html").read_text() == "<p>mine</p>"
    with pytest.raises(ConfigError, match=r"/proc: cannot be used \(.*\); --html names the report's file"):
        main.run(["report", str(run), "--html", "/proc/report.html"])
    for bad in (["--html"], ["--html", str(tmp_path)]):
        with pytest.raises(ConfigError, match=r"--html .* is not a file to write"):
            main.run(["report", str(run), *bad])
    with pytest.raises(ConfigError, match=r"unknown option --htm, did you mean --html\?"):
        main.run(["report", str(run), "--htm", "x"])
    with pytest.raises(NoRun, match="holds no metrics"):
        main.run(["report", str(run), str(tmp_path)])
    with pytest.raises(NoRun, match=r"runz: no such directory; name that of a run"):
        main.run(["report", str(tmp_path / "runz")])


def test_settings_that_name_the_run_s_own_directory_do_not_differ(tmp_path: Path) -> None:
    configs = [
        {"trainer": {"save_path": f"{root}/x", "data": f"{root}/d"}, "git": {"commit": root[1:]}}
        for root in ("/a", "/b")
    ]
    settings = [settings_of(config, Path(root)) for config, root in zip(configs, ("/a", "/b"), strict=True)]
    assert differing_settings(settings) == [["git.commit", "a", "b"]]
    assert differing_settings([{"x": "1"}, {}]) == [["x", "1", "–"]]


def test_runs_of_one_name_are_told_apart_by_their_folders() -> None:
    assert label_runs([Path("/x/run"), Path("/y/run")]) == ["x/run", "y/run"]
    assert label_runs([Path("/x/a"), Path("/y/b")]) == ["a", "b"]
