"""`atropos top` on real brokers: live, as lines, or once; without a broker one clear line."""

import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from rich.console import Console

from atropos_api.client import BrokerClient, BrokerHostUnknown, BrokerRefused, ServerEvent
from atropos_api.client.events import parse_events
from atropos_api.common.cliconfig import ConfigError
from atropos_api.common.secrets import TokenUnreadable
from atropos_api.testing import make_group, make_memory_app, serve_in_thread, served_broker
from atropos_api.wire import DropReport, EnvironmentRequest, RunRequest
from example_trainer.commands import top
from example_trainer.commands.top import describe_event, render

COMMAND = [sys.executable, "-m", "example_trainer.commands.main", "top"]
RUN = RunRequest(name="watched", batch_size=4, max_token_length=9, num_steps=3)


@pytest.fixture
def url():
    with served_broker() as served:
        yield served


def begin(url, **options):
    with BrokerClient(url, **options) as client:
        run = client.begin_run(RUN)
        request = EnvironmentRequest(name="env [red]", group_size=4, max_token_length=9)
        environment = client.register_environment(request).environment_id
        client.submit(environment, [make_group(4), make_group(4)], idempotency_key="a")
        client.get_batch(1, run_id=run.run_id, epoch=run.epoch)


def once(*arguments):
    out = io.StringIO()
    assert top.run([*arguments, "--once"], out) == 0
    return dict(line.split(" ", 1) for line in out.getvalue().splitlines())


def test_once_prints_names_and_values_for_scripts(url):
    assert once(url)["run"] == "none"
    begin(url)
    figures = once(url.removeprefix("http://"))
    assert figures["run"] == "watched"
    assert figures["step"] == "0/3"
    assert figures["queued_groups"] == "1"
    assert figures["uncommitted_batches"] == "1"
    assert figures["environments"] == "1/1"


def test_as_json_it_prints_the_whole_status(url):
    begin(url)
    out = io.StringIO()
    assert top.run([url, "--once", "--format", "json"], out) == 0
    (line,) = out.getvalue().splitlines()
    assert json.loads(line)["run"]["name"] == "watched"


def test_as_json_it_goes_on_with_a_line_for_each_status(url):
    begin(url)
    watching = Watching(url, None, "--format", "json")
    with BrokerClient(url) as client:
        names = [json.loads(watching.process.stdout.readline())["run"]["name"]]
        client.begin_run(msgspec.structs.replace(RUN, name="next", take_over=True))
        while names[-1] != "next":
            names.append(json.loads(watching.process.stdout.readline())["run"]["name"])
    assert set(names) == {"watched", "next"}
    assert watching.stop() == (130, "")
    watching.process.stdout.close()
    watching.process.stderr.close()


def test_the_token_is_taken_from_the_flag_the_environment_and_the_path(monkeypatch):
    token = "a-token-of-ours"
    with served_broker(token=token) as url:
        begin(url, token=token)
        assert once(url, "--token", token)["run"] == "watched"
        assert once(f"{url}/t/{token}")["run"] == "watched"
        with pytest.raises(BrokerRefused, match="asks for a token"):
            once(url)
        monkeypatch.setenv("ATROPOS_TOKEN", token)
        assert once(url)["run"] == "watched"


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ([], ConfigError, "takes one URL"),
        (["http://a", "http://b"], ConfigError, "got 2"),
        (["http://127.0.0.1:1"], ConfigError, "no broker answers at http://127.0.0.1:1 .*start one with run-api"),
        (["http://no-such-host.invalid:8000"], BrokerHostUnknown, "no-such-host.invalid"),
        (["http://127.0.0.1:99999"], ConfigError, "names a host and maybe a port"),
        (["http://127.0.0.1:abc"], ConfigError, "names a host and maybe a port"),
        (["ftp://127.0.0.1"], ConfigError, "did you mean http://127.0.0.1"),
        ([""], ConfigError, "names a host"),
        (["http://127.0.0.1:1", "true"], ConfigError, "got 2"),
        (["http://127.0.0.1:1", "--token-file", "nowhere"], TokenUnreadable, "--token-file nowhere"),
        (["127.0.0.1:8000", "--onec"], ConfigError, "did you mean --once"),
        (["127.0.0.1:8000", "--formt", "json"], ConfigError, "unknown option --formt, did you mean --format"),
    ],
)
@pytest.mark.usefixtures("no_such_name")
def test_a_wrong_address_is_one_clear_error(arguments, error, match):
    with pytest.raises(error, match=match):
        top.run(arguments, io.StringIO())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--once", "true", "{}"],
        ["{}", "--once", "true"],
        ["--once", "{}"],
        ["{}", "--once=true"],
        ["--token", "unused", "--once", "yes", "{}"],
    ],
)
def test_an_option_that_is_true_or_false_takes_such_a_word_and_never_the_address(url, arguments):
    out = io.StringIO()
    assert top.run([argument.format(url) for argument in arguments], out) == 0
    assert "run none\n" in out.getvalue()


def test_a_token_file_is_shown(url, tmp_path):
    path = tmp_path / "token"
    path.write_text("a-token-of-ours\n")
    with served_broker(token="a-token-of-ours") as guarded:
        assert once(guarded, "--token-file", str(path))["run"] == "none"


def test_something_else_behind_the_port_is_told_apart(url):
    with pytest.raises(BrokerRefused, match="not as a broker does"):
        once(f"{url}/nowhere")
    with socket.create_server(("127.0.0.1", 0)) as other:
        answering = threading.Thread(target=greet, args=(other,))
        answering.start()
        with pytest.raises(ConfigError, match="no broker answers"):
            once(f"http://127.0.0.1:{other.getsockname()[1]}")
        answering.join()


def greet(listener):
    connection, _ = listener.accept()
    with connection:
        connection.send(b"SSH-2.0-x\r\n")


def test_mistakes_are_one_line_and_exit_code_2():
    result = subprocess.run([*COMMAND, "http://127.0.0.1:1"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


class Watching:
    """A running `atropos top` whose output is collected as it comes."""

    def __init__(self, url, output, *flags):
        write = output if isinstance(output, int) else subprocess.PIPE
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        self.process = subprocess.Popen([*COMMAND, url, *flags], stdout=write, stderr=subprocess.PIPE, env=environment)

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(10), self.process.stderr.read().decode()


def test_lines_elsewhere_than_on_a_terminal_and_a_broker_that_comes_back():
    app = make_memory_app()
    with serve_in_thread(app) as url:
        watching = Watching(url, None)
        lines = iter(watching.process.stdout.readline, b"")
        assert b"run none" in next(lines)
        begin(url)
        until(lines, b"run-began")
        until(lines, b"step 0/3")
    until(lines, b"trying again")
    port = int(url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as back:
        connection, _ = back.accept()
        assert b"last-event-id" in connection.recv(4096).lower()
        connection.close()
    code, errors = watching.stop()
    watching.process.stdout.close()
    watching.process.stderr.close()
    assert code == 130
    assert errors == ""


@pytest.mark.parametrize(
    "outage", [BrokerHostUnknown("no name server answers"), BrokerRefused({"detail": "Bad Gateway of a proxy"}, 502)]
)
def test_a_broker_whose_name_or_proxy_fails_once_it_is_watched_is_a_lost_connection(monkeypatch, outage):
    status = ServerEvent(id=None, type="status", data={"run": None})
    outcomes = iter([[status], outage, [status], KeyboardInterrupt()])

    def watch(*_, **__):
        outcome = next(outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        yield from outcome

    monkeypatch.setattr(top, "watch_events", watch)
    monkeypatch.setattr(top, "RECONNECT_SECONDS", 0.0)
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        top.run(["http://of-a-pod.test:8000"], out)
    assert str(outage) in out.getvalue()
    assert next(outcomes, None) is None


def until(lines, wanted):
    seen = []
    for line in lines:
        seen.append(line)
        if wanted in line:
            return
    raise AssertionError(seen)


def test_a_panel_on_a_terminal_and_a_clean_end(url):
    begin(url)
    ours, theirs = pty.openpty()
    watching = Watching(url, theirs)
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 30
    while b"env [red]" not in shown and time.monotonic() < deadline:
        shown += os.read(ours, 65536)
    code, errors = watching.stop()
    watching.process.stderr.close()
    shown += os.read(ours, 65536)
    os.close(ours)
    assert b"watched" in shown
    assert b"env [red]" in shown
    # The cursor is shown again.
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert code == 130
    assert errors == ""


def test_events_are_read_whatever_else_the_stream_holds():
    text = ": comment\n\nretry: 1000\n\nid: 5\nevent: a\ndata: {}\n\n"
    text += "event: b\ndata: nonsense\n\nid:x\nevent:c\ndata:{}\n\n"
    assert list(parse_events(text.splitlines())) == [ServerEvent(5, "a", {}), ServerEvent(None, "c", {})]


def test_what_an_event_says_stays_on_its_line():
    event = ServerEvent(1, "run-began", {"name": "a\n\x1b[31m", "epoch": 1, "time": 3.0})
    assert describe_event(event).isprintable()


def test_rates_survive_a_restarted_broker():
    snapshot = top.BrokerSnapshot(url="")
    for at, count in ((1.0, 10), (2.0, 30), (3.0, 5), (4.0, 6)):
        snapshot.take(ServerEvent(1, "status", {"time": at, "counters": {"sequences_received_total": count}}))
    assert list(snapshot.rates) == [20.0, 1.0]


def test_each_form_tells_what_the_run_waits_for(url):
    begin(url)
    status = {"flow": {"diagnosis": {"finding": {"severity": "blocked", "headline": "The trainer waits\x1b[31m"}}}}
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(render(url, status, events=(), rates=(), lost=""))
    assert capture.get().count("The trainer waits") == 1
    assert "\x1b[31m" not in capture.get()
    assert "The trainer waits" in dict(top.describe(status))["diagnosis"]
    start = {"rule": "starting", "severity": "ok", "headline": "Starting: waiting for the trainer"}
    assert "the trainer" in dict(top.describe({"flow": {"diagnosis": {"finding": start}}}))["diagnosis"]
    well = {"flow": {"diagnosis": {"finding": {"severity": "ok", "headline": "Running; nothing waits"}}}}
    for other in (well, {}, {"flow": None}):
        assert "diagnosis" not in dict(top.describe(other))


def test_dropped_groups_are_counted_and_explained(url):
    begin(url)
    with BrokerClient(url) as client:
        client.report_dropped(0, DropReport(session="s", groups={"failed": 9}, explanation="9 groups failed"))
        status = client.status()
    assert once(url)["dropped"] == "9"
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(render(url, status, events=(), rates=(), lost=""))
    assert "env [red]: 9 groups failed" in capture.get()
