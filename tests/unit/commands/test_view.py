"""`atropos view RUN` shows a run that has ended from its directory, and changes nothing in it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from atropos_api.broker import Broker
from atropos_api.client import BrokerClient
from atropos_api.common.cliconfig import ConfigError
from atropos_api.config import BrokerConfig
from atropos_api.errors import DataDirectoryInUse
from atropos_api.server.app import create_app
from atropos_api.store.factory import open_store
from atropos_api.testing import make_group, serve_in_thread
from atropos_api.view import StoreNotCopied, copy_store, opened_view
from example_trainer.commands import main
from example_trainer.commands.view import read_recorded
from tests.browser.demo_run import SIGN_STEP, begin_demo

STEPS = SIGN_STEP + 2
CHANGING = [
    ("POST", "/v1/groups"),
    ("POST", "/v1/runs"),
    ("GET", "/v1/batches/1"),
    ("GET", "/batch"),
    ("GET", "/reset_data"),
    ("GET", "/status-env"),
    ("GET", "/v1/backup"),
    ("DELETE", "/v1/runs/x"),
    ("POST", "/v1/runs/x/metrics"),
    ("POST", "/scored_data"),
    ("OPTIONS", "/v1/groups"),
]


@contextmanager
def broker_over(place: Path) -> Iterator[str]:
    config = BrokerConfig(store=str(place), fsync="never")
    broker = Broker(*open_store(config.store, fsync="never"), settings=config)
    try:
        with serve_in_thread(create_app(config, broker)) as url:
            yield url
    finally:
        broker.close()


def write_files(root: Path, run_id: str) -> None:
    """Write what trainer and launcher leave in a run directory beside the broker's store."""
    rows = [{"step": step, "timestamp": 1e9 + step, "reward/mean": step / STEPS} for step in range(1, STEPS + 1)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sign = {"event": "health", "sign": "kl", "step": 2, "value": 3.0, "message": "diverging KL", "advice": "lower --lr"}
    (root / "events.jsonl").write_text(json.dumps(sign) + "\n{}\n")
    (root / "config.json").write_text(json.dumps({"trainer": {"name": "from files", "training_steps": 50}}))
    group = make_group(version=3, env_id=0)
    fields = {name: getattr(group, name) for name in ("tokens", "masks", "scores", "inference_logprobs")}
    fields |= {"policy_versions": group.policy_versions, "env_id": 0, "messages": None}
    samples = [{"positions": [1], "advantages": [0.5], "logprobs": [-0.25], "entropies": [0.1]}] * 4
    trained = {"number": 4, "run_id": run_id, "groups": [{"group": 2, "samples": samples, "fields": fields}]}
    text = json.dumps({**trained, "texts": {"1": "<b>one"}})
    (root / "trained.jsonl").write_text(f'{{"number": "x"}}\n{text}\n{{"numb')
    (root / "rollouts").mkdir(exist_ok=True)
    chats = [[{"role": "assistant", "content": "What was said."}]] * 4
    (root / "rollouts/environment.jsonl").write_text(json.dumps({**fields, "messages": chats}) + "\n")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run directory as a launch leaves it, and the id of its run."""
    root = tmp_path_factory.mktemp("run")
    with broker_over(root / "broker") as url, BrokerClient(url) as client:
        demo = begin_demo(client, STEPS)
        client.finish_run(demo.run.run_id, epoch=demo.run.epoch)
    write_files(root, demo.run.run_id)
    return root, demo.run.run_id


@contextmanager
def viewed(root: Path, scratch: Path) -> Iterator[httpx.Client]:
    store, recorded = read_recorded(root)
    with (
        opened_view(store, recorded, scratch) as app,
        serve_in_thread(app) as url,
        httpx.Client(base_url=url) as client,
    ):
        yield client


def contents(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): f"{path.stat().st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def read(client: httpx.Client, path: str, **parameters: Any) -> Any:
    answer = client.get(path, params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_page_shows_the_curves_events_and_trained_groups_of_a_finished_run(
    run: tuple[Path, str], tmp_path: Path
) -> None:
    root, run_id = run
    with viewed(root, tmp_path) as client:
        page = client.get("/", headers={"Accept": "text/html"})
        assert "<!doctype html>" in page.text
        assert client.get("/page/main.js").status_code == 200
        (known,) = read(client, "/v1/runs")["runs"]
        assert (known["run_id"], known["state"], known["has_metrics"]) == (run_id, "finished", True)
        line = read(client, f"/v1/runs/{run_id}/series", names="grpo/mean_ratio")["series"]["grpo/mean_ratio"]
        assert line["steps"] == list(range(1, STEPS + 1))
        events = read(client, "/v1/events/recent")["events"]
        assert [event["data"]["step"] for event in events if event["type"] == "health"] == [SIGN_STEP]
        assert read(client, "/v1/status")["flow"]["diagnosis"]["finding"]["rule"] == "finished"
        (group,) = read(client, f"/v1/runs/{run_id}/groups")["groups"]
        assert (group["batch"], group["group"], group["has_values"], group["oldest_version"]) == (4, 2, True, 3)
        assert group["environment"] == "gsm8k"
        assert group["arrived_at"] == 1e9 + 4


def test_a_trained_group_has_its_tokens_with_the_trainer_s_values_and_its_chat(
    run: tuple[Path, str], tmp_path: Path
) -> None:
    root, run_id = run
    with viewed(root, tmp_path) as client:
        place = f"/v1/runs/{run_id}/batches/4/groups/2"
        assert read(client, place)["messages"][0][0]["content"] == "What was said."
        tokens = read(client, f"{place}/samples/0")
        assert tokens["texts"] == {"1": "<b>one"}
        assert (tokens["advantages"][1], tokens["logprobs"][1], tokens["versions"][1]) == (0.5, -0.25, 3)


def test_no_call_changes_the_run_s_directory_and_none_that_changes_something_is_taken(
    run: tuple[Path, str], tmp_path: Path
) -> None:
    root, run_id = run
    before = contents(root)
    with viewed(root, tmp_path) as client:
        for method, path in CHANGING:
            assert client.request(method, path, json={}).status_code == 405, (method, path)
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
        read(client, f"/v1/runs/{run_id}/groups")
    assert contents(root) == before


def test_without_a_store_curves_signs_and_groups_come_from_the_run_s_files(
    run: tuple[Path, str], tmp_path: Path
) -> None:
    write_files(tmp_path, "run-elsewhere")
    with viewed(tmp_path, tmp_path / "scratch") as client:
        (known,) = read(client, "/v1/runs")["runs"]
        assert (known["name"], known["state"], known["current_step"]) == ("from files", "finished", STEPS)
        line = read(client, f"/v1/runs/{known['run_id']}/series", names="reward/mean")["series"]["reward/mean"]
        assert line["values"][-1] == 1.0
        events = read(client, "/v1/events/recent")["events"]
        assert [event["data"]["advice"] for event in events if event["type"] == "health"] == ["lower --lr"]
        assert read(client, f"/v1/runs/{known['run_id']}/groups")["total"] == 1


def test_a_run_that_was_killed_shows_the_batches_that_its_store_still_has(tmp_path: Path) -> None:
    with broker_over(tmp_path / "broker") as url, BrokerClient(url) as client:
        demo = begin_demo(client, 3)
        client.submit(demo.environments[0], [make_group(8)], idempotency_key="the last")
    write_files(tmp_path, demo.run.run_id)
    with viewed(tmp_path, tmp_path / "scratch") as client:
        found = read(client, f"/v1/runs/{demo.run.run_id}/groups")["groups"]
        assert {group["batch"] for group in found} >= {0, 4}
        told = read(client, "/v1/status")["flow"]["diagnosis"]
        assert (told["finding"]["rule"], told["finding"]["severity"], told["notes"]) == ("ended", "ok", [])


def test_a_run_whose_broker_still_works_is_refused_with_the_broker_named(tmp_path: Path) -> None:
    with broker_over(tmp_path / "broker"):
        store, recorded = read_recorded(tmp_path)
        with pytest.raises(DataDirectoryInUse, match=rf"\(pid {os.getpid()}\), so its run has not ended"):
            opened_view(store, recorded, tmp_path / "scratch").__enter__()


def test_a_directory_without_store_and_metrics_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a broker's store \(broker/\) nor a metrics\.jsonl") as raised:
        main.run(["view", str(tmp_path)])
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="RUN's directory, a FILE of groups"):
        main.run(["view"])


def test_segments_are_linked_where_they_can_be_and_what_is_written_is_not(
    run: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, linked = run[0] / "broker", copy_store(run[0] / "broker", tmp_path / "linked")
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EXDEV, "Invalid cross-device link")))
    copied = copy_store(store, tmp_path / "copied")
    segments = {path.relative_to(store) for path in store.glob("segments/*.log")}
    same = {path.relative_to(linked) for path in linked.rglob("*") if path.samefile(store / path.relative_to(linked))}
    assert same == segments != set()
    assert contents(copied) == contents(linked)


def test_a_store_without_room_for_its_copy_is_refused_before_anything_is_copied(
    run: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(StoreNotCopied, match=r"No space left on device\); .* by TMPDIR=FOLDER") as raised:
        copy_store(run[0] / "broker", tmp_path / "scratch/store")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "scratch"]


def test_a_disk_that_fills_during_the_copy_is_told_in_one_line(
    run: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "copy2", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(StoreNotCopied, match="No space left on device") as raised:
        copy_store(run[0] / "broker", tmp_path / "store")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("flags", [[], ["--port", "0"]])
def test_a_path_with_nothing_at_it_is_told_in_place_of_an_empty_page(tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="missing: no such run directory or file of groups"):
        main.run(["view", str(tmp_path / "missing"), *flags])


@pytest.fixture
def hangup_is_not_ignored() -> Iterator[None]:
    """Undo what `nohup` asks for, if the tests themselves run under it."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)


@pytest.mark.usefixtures("hangup_is_not_ignored")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_prints_its_address_and_leaves_nothing_when_it_is_stopped(
    run: tuple[Path, str], tmp_path: Path, end: signal.Signals
) -> None:
    command = (sys.executable, "-m", "example_trainer.commands.main", "view", str(run[0]))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as viewer:
        assert viewer.stdout is not None
        label, address, way_out = viewer.stdout.readline().split(maxsplit=2)
        assert (label, way_out) == ("page:", "(Ctrl-C ends it)\n")
        assert httpx.get(f"{address}v1/runs").json()["runs"][0]["run_id"] == run[1]
        viewer.send_signal(end)
        out, error = viewer.communicate(timeout=20)
    assert (viewer.returncode, out, error) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
