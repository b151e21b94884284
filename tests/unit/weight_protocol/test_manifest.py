"""The manifest is read only if it is safe and current, and found in the documented order."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from example_trainer.errors import CannotServe
from example_trainer.serving import startup
from example_trainer.serving.config import ServerConfig
from example_trainer.weight_protocol.manifest import (
    MANIFEST_NAME,
    BridgeManifest,
    ManifestMissing,
    ManifestStale,
    ManifestUnsafe,
    find_manifest,
    load_manifest,
    process_start_time,
    remove_manifest,
    write_manifest,
)


def manifest(**fields):
    values = {
        "model": "m",
        "param_mappings": {},
        "boot_id": "b",
        "pid": os.getpid(),
        "pid_start_time": process_start_time(os.getpid()),
        "url": "http://127.0.0.1:1",
        "bridge_token": "secret",
        "device": "cpu",
        "dtype": "float32",
        "header_path": "/dev/shm/h",
        "storages": [],
        "tensors": {},
        "tied": {},
        "unmapped": [],
        "vllm_version": "0.32.0",
        "created_at": 0.0,
    }
    return BridgeManifest(**(values | fields))


@contextmanager
def server_saying(body):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_is_written_is_read_back_and_private(tmp_path):
    path = write_manifest(manifest(), tmp_path / "new")
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_manifest(path) == load_manifest(path.parent) == manifest()
    assert [entry.name for entry in path.parent.iterdir()] == [MANIFEST_NAME]


def test_a_manifest_others_may_touch_is_not_read(tmp_path):
    path = write_manifest(manifest(), tmp_path)
    path.chmod(0o644)
    with pytest.raises(ManifestUnsafe, match="chmod 600"):
        load_manifest(path)


@pytest.mark.parametrize("fields", [{"pid": 2**22 + 1}, {"pid_start_time": 1.0}])
def test_a_manifest_of_a_server_that_is_gone_is_stale(tmp_path, fields):
    with pytest.raises(ManifestStale, match="has exited"):
        load_manifest(write_manifest(manifest(**fields), tmp_path))


def test_a_process_that_has_ended_does_not_run_before_its_parent_has_waited_for_it():
    """A server was said to run that a launcher had just killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process_start_time(process.pid) is not None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_start_time(process.pid) is None


def test_a_manifest_of_another_form_is_reported(tmp_path):
    path = tmp_path / MANIFEST_NAME
    path.write_text('{"model": "m"}')
    path.chmod(0o600)
    with pytest.raises(ManifestStale, match="not a manifest of this release"):
        load_manifest(path)


def test_a_server_does_not_replace_the_manifest_of_another_one_that_runs(tmp_path):
    """The trainers of two runs that named one manifest found the newer server, and one run published into the other."""
    sharing = ServerConfig(model=str(tmp_path), share_weights=True, bridge_dir=tmp_path, port=9002)
    (tmp_path / "config.json").write_text("{}")
    startup.check_start(sharing, {}, on_gpu=False)
    write_manifest(manifest(url="http://127.0.0.1:9001"), tmp_path)
    with pytest.raises(CannotServe, match=r"of the server at http://127\.0\.0\.1:9001 .* which runs; .*--bridge-dir"):
        startup.check_start(sharing, {}, on_gpu=False)
    startup.check_manifest(tmp_path, 9001)
    startup.check_manifest(tmp_path / "another", 9002)
    write_manifest(manifest(url="http://127.0.0.1:9001", pid_start_time=1.0), tmp_path)
    startup.check_start(sharing, {}, on_gpu=False)


def test_a_missing_manifest_names_the_places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ManifestMissing, match="Parameter mapping file not found") as caught:
        find_manifest("auto", {"LOGDIR": "/logs"}, "http://127.0.0.1:9")
    for place in (f"/logs/{MANIFEST_NAME}", "http://127.0.0.1:9/bridge/info", f"{tmp_path}/{MANIFEST_NAME}"):
        assert place in str(caught.value)
    with pytest.raises(ManifestMissing, match="elsewhere"):
        find_manifest(str(tmp_path / "elsewhere"), {}, None)


def test_the_order_is_flag_logdir_server_here(tmp_path, monkeypatch):
    places = {name: write_manifest(manifest(), tmp_path / name) for name in ("flag", "logs", "server", "here")}
    monkeypatch.chdir(tmp_path / "here")
    with server_saying({"manifest_path": str(places["server"])}) as url:
        logs = {"LOGDIR": str(tmp_path / "logs")}
        assert find_manifest(str(tmp_path / "flag"), logs, url) == places["flag"]
        assert find_manifest("auto", logs, url) == places["logs"]
        assert find_manifest("auto", {}, url) == places["server"]
        assert find_manifest(None, {}, None) == places["here"]


@pytest.mark.parametrize("left", [{"pid_start_time": 1.0}, {"url": "http://127.0.0.1:2"}])
def test_a_manifest_that_another_server_left_in_logdir_hides_no_running_one(tmp_path, monkeypatch, left):
    """The trainer waited ten minutes for the server, and was told to start it again."""
    monkeypatch.chdir("/")
    write_manifest(manifest(**left), tmp_path / "logs")
    said = {}
    with server_saying(said) as url:
        said["manifest_path"] = str(write_manifest(manifest(url=url), tmp_path / "server"))
        assert find_manifest("auto", {"LOGDIR": str(tmp_path / "logs")}, url) == Path(said["manifest_path"])


def test_a_server_on_this_host_is_not_asked_through_a_proxy(tmp_path, monkeypatch):
    """No other call to a server uses one; through it the manifest was not found, and the trainer waited in vain."""
    path = write_manifest(manifest(), tmp_path)
    monkeypatch.chdir("/")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server_saying({"manifest_path": str(path)}) as url:
        assert find_manifest("auto", {}, url) == path


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.6\r\n", b'HTTP/1.0 200 OK\r\n\r\n["another program"]'])
def test_a_program_of_another_kind_at_the_address_names_no_manifest(tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(said)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ManifestMissing, match="no answer with a manifest"):
            find_manifest("auto", {}, f"http://127.0.0.1:{listening.getsockname()[1]}")


def test_a_manifest_in_another_users_directory_is_refused_with_the_way_to_ones_own(monkeypatch):
    def forbid(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", forbid)  # the tests may run as root, who may read everything
    with (
        server_saying({"manifest_path": "/home/alice/run/vllm_bridge_config.json"}) as url,
        pytest.raises(ManifestUnsafe, match=r"/home/alice/run/.* another user's; start one of your own"),
    ):
        find_manifest("auto", {}, url)


def test_a_server_removes_its_own_manifest_only(tmp_path):
    path = write_manifest(manifest(boot_id="new"), tmp_path)
    remove_manifest(tmp_path, "old")
    assert path.exists()
    remove_manifest(tmp_path, "new")
    assert not path.exists()


def test_start_times_name_processes():
    own = process_start_time(os.getpid())
    assert process_start_time(os.getpid()) == own
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as later:
        assert process_start_time(later.pid) > own
        later.kill()
    assert process_start_time(2**22 + 1) is None
    assert Path("/proc/1").exists() is (process_start_time(1) is not None)
