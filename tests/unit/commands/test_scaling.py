"""`atropos scale` and `atropos drain` on a real broker: what they print, and the one line where nothing can be done."""

import io
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from atropos_api.client import BrokerClient, BrokerRefused
from atropos_api.common.cliconfig import ConfigError
from atropos_api.testing import served_broker
from atropos_api.wire import FleetReport, InferenceServer, ServerReport, ServerSet
from example_trainer.commands import scaling, top
from example_trainer.commands.scaling import drain, run_drain, run_scale, scale

TOKEN = "a-token-of-this-test"


@pytest.fixture
def url():
    with served_broker(token=TOKEN) as served:
        yield served


@pytest.fixture
def broker(url):
    with BrokerClient(url, token=TOKEN, retry_seconds=0.0) as client:
        yield client


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return path


class Launcher:
    """A launcher's reports; as a context it follows whatever is asked for, from a thread."""

    def __init__(self, broker, fleet_id="run-1", **fields):
        self.broker, self.fleet_id = broker, fleet_id
        self.fields = {"launcher_id": "launcher-1", "running": 1, "least": 1, "most": 4} | fields
        self.wanted, self.request = 1, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self.report()

    def report(self):
        report = FleetReport(wanted=self.wanted, request=self.request, **self.fields)
        lease = self.broker.renew_fleet(self.fleet_id, report)
        self.wanted, self.request = lease.wanted, lease.request

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _follow(self):
        while not self._stop.wait(0.02):
            self.report()


def register(broker, server_id, port, **fields):
    values = {
        "lease_id": f"lease-{port}",
        "boot_id": f"boot-{port}",
        "mode": "fixed",
        "url": f"http://127.0.0.1:{port}",
    }
    broker.renew_server(server_id, ServerReport(**(values | fields)))


def test_scale_tells_what_the_launcher_has_taken_over(url, broker, token_file):
    out = io.StringIO()
    with Launcher(broker) as launcher:
        assert run_scale(["vllm=3", "--broker", url, "--token-file", str(token_file)], out) == 0
    assert out.getvalue() == "run-1: 1 of 3 inference servers run\n"
    assert launcher.wanted == 3


def test_a_request_that_no_launcher_would_follow_is_one_line_and_code_2(url, broker, token_file):
    command = [sys.executable, "-m", "example_trainer.commands.main", "scale", "vllm=3", "--broker", url]
    launcher = Launcher(broker, fixed="mode lora_restart replaces its one server: take another")
    refused = subprocess.run(
        [*command, "--token-file", str(token_file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1
    assert "the number of servers of run-1 is fixed: mode lora_restart replaces its one server" in refused.stderr
    assert launcher.wanted == 1


def test_a_launcher_that_does_not_take_the_number_over_is_said_to_be_silent(broker):
    Launcher(broker)
    with pytest.raises(ConfigError, match=r"has not taken 2 over within 0.1 s, and was last heard 0 s ago"):
        scale(broker, 2, wait_seconds=0.1)


def test_of_two_callers_the_earlier_one_learns_of_the_later_one_s_number(broker):
    launcher = Launcher(broker)
    seen = []

    def ask():
        try:
            scale(broker, 3, wait_seconds=20.0)
        except ConfigError as error:
            seen.append(str(error))

    earlier = threading.Thread(target=ask)
    earlier.start()
    while broker.get_fleets().fleets[0].request < 1:
        time.sleep(0.01)
    with launcher:
        assert scale(broker, 2, wait_seconds=20.0).endswith("1 of 2 inference servers run")
        earlier.join()
    # It may have been answered before the second call came.
    assert seen in ([], ["run-1: 2 servers are wanted, not 3: another caller has asked for it"])


def test_a_number_out_of_range_is_refused_with_the_range(broker):
    Launcher(broker)
    with pytest.raises(BrokerRefused, match="runs 1 to 4 servers, not 5"):
        scale(broker, 5, wait_seconds=1.0)


def test_one_of_several_launchers_is_named(broker):
    Launcher(broker)
    Launcher(broker, "run-2")
    with pytest.raises(ConfigError, match="name one's fleet with --fleet: run-1, run-2"):
        scale(broker, 2, wait_seconds=0.0)
    with pytest.raises(ConfigError, match=r"--fleet run-3: no launcher reports on it \(known: run-1, run-2\)"):
        scale(broker, 2, fleet_id="run-3", wait_seconds=0.0)
    with pytest.raises(ConfigError, match="the launcher of run-2 has not taken"):
        scale(broker, 2, fleet_id="run-2", wait_seconds=0.0)


class NoLaunchers:
    """A broker that has just begun, and to which no launcher reports."""

    def __init__(self, complete_after):
        self.calls, self.complete_after = 0, complete_after

    def get_fleets(self):
        self.calls += 1
        return scaling.FleetSet(complete=self.calls > self.complete_after, fleets=[])


def test_a_broker_that_has_just_begun_gives_launchers_time_to_report(monkeypatch):
    monkeypatch.setattr(scaling, "PAUSE_SECONDS", 0.0)
    broker = NoLaunchers(complete_after=3)
    with pytest.raises(ConfigError, match="no launcher reports to this broker"):
        scale(broker, 2, wait_seconds=0.0)
    assert broker.calls == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "atropos scale takes vllm=3 and its options"),
        (["vllm=1", "vllm=2"], "got vllm=1 vllm=2"),
        (["trainer=2"], "only the inference servers can be scaled"),
        (["vllm=many"], "'many' is not a number of servers"),
        (["vllm=2", "--brokr", "x"], "unknown option --brokr, did you mean --broker"),
    ],
)
def test_a_mistake_is_one_line(words, said):
    with pytest.raises(ConfigError, match=said) as told:
        run_scale(words)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("named", ["gpu-1", "http://127.0.0.1:9001/"])
def test_drain_waits_until_the_server_has_left(url, broker, token_file, named):
    register(broker, "gpu-1", 9001, running=3, waiting=1)
    register(broker, "gpu-2", 9002)

    def leave():
        while broker.get_servers().servers[0].state != "draining":
            time.sleep(0.02)
        broker.remove_server("gpu-1")

    leaving = threading.Thread(target=leave)
    leaving.start()
    out = io.StringIO()
    assert run_drain([named, "--broker", url, "--token-file", str(token_file)], out) == 0
    leaving.join()
    assert out.getvalue().splitlines() == [
        "gpu-1 at http://127.0.0.1:9001 drains: 4 requests when it last reported",
        "gpu-1 is gone: it left",
    ]


class Registry:
    """The broker's calls about servers, each of which leaves once it has been seen to drain."""

    def __init__(self, **urls):
        self.rows = {name: row_of(name, url) for name, url in urls.items()}

    def get_servers(self, *, since=None, wait_seconds=0.0):
        shown = [msgspec.structs.replace(row) for row in self.rows.values()]
        for row in self.rows.values():
            row.state, row.reason = ("gone", "it left") if row.state == "draining" else (row.state, row.reason)
        return ServerSet(epoch=1, complete=True, lease_seconds=10.0, servers=shown)

    def drain_server(self, server_id):
        self.rows[server_id].state = "draining"
        return self.rows[server_id]

    def states(self):
        return {name: row.state for name, row in self.rows.items()}


def row_of(server_id, url):
    fields = dict.fromkeys(("version", "kv_free")) | {"running": 1, "waiting": 0, "silent_seconds": 0.0}
    return InferenceServer(
        server_id=server_id,
        state="serving",
        policy="default",
        url=url,
        mode="fixed",
        lease_id=f"lease-{server_id}",
        boot_id="b",
        **fields,
    )


def test_the_servers_of_a_node_are_drained_together_and_all_of_them_are_waited_for():
    registry = Registry(a="http://10.0.0.6:1", b="http://10.0.0.6:2/", c="http://10.0.0.60:1")
    said = []
    drain(registry, "10.0.0.6", wait_seconds=20.0, say=said.append)
    assert registry.states() == {"a": "gone", "b": "gone", "c": "serving"}
    assert said[2:] == ["a is gone: it left", "b is gone: it left"]


def test_a_server_that_is_named_by_its_id_is_drained_alone_though_others_are_on_a_host_of_that_name():
    registry = Registry(gpu1="http://10.0.0.7:1", b="http://gpu1:1")
    drain(registry, "gpu1", wait_seconds=20.0, say=lambda _: None)
    assert registry.states() == {"gpu1": "gone", "b": "serving"}


def test_a_server_that_takes_longer_goes_on_draining(broker):
    register(broker, "gpu-1", 9001)
    said = []
    with pytest.raises(ConfigError, match=r"requests are left at gpu-1 after 0.1 s"):
        drain(broker, "gpu-1", wait_seconds=0.1, say=said.append)
    drain(broker, "gpu-1", wait_seconds=0.0, say=said.append)
    assert len(said) == 2


def test_an_unknown_server_is_one_line_once_all_have_had_time_to_register():
    with (
        served_broker(server_lease=0.5) as url,
        BrokerClient(url) as broker,
        pytest.raises(
            ConfigError, match=r"no registered server has the id, address or host 'gpu-9' \(registered: none\)"
        ),
    ):
        drain(broker, "gpu-9", wait_seconds=0.0, say=lambda _: None)


def test_top_shows_how_many_servers_run_of_those_that_are_wanted(url, broker, token_file):
    Launcher(broker, running=2, note="vllm-3 did not start: it exited with code 1")
    out = io.StringIO()
    assert top.run([url, "--once", "--token-file", str(token_file)], out) == 0
    figures = dict(line.split(" ", 1) for line in out.getvalue().splitlines())
    assert figures["servers"] == "2/1"
    assert figures["servers_note"] == "vllm-3 did not start: it exited with code 1"
