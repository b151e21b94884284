"""A model's code: its output comes back, its limits hold, and nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from environments.tasks.python_tool import PythonTool, SandboxUnavailable

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def isolated_tool():
    tool = PythonTool(wall_seconds=10)
    tool.probe()
    if not tool.isolated:
        pytest.skip("this machine forbids user namespaces")
    return tool


@pytest.fixture
def limited_tool():
    """A tool as it is where namespaces are forbidden."""
    return PythonTool(wall_seconds=10, memory_bytes=256 << 20)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print('a')\n6 * 7", "a\n42"),
        ("x = 1", "(no output)"),
        ("import math\nmath.isqrt(17)", "4"),
        ("'ü\U0001f600'", "'ü\U0001f600'"),
        ("input('?')", "?Traceback"),
        ("1 +", "SyntaxError"),
        ("raise ValueError('no')", "ValueError: no"),
        ("import sys\nsys.exit(3)", "(no output)"),
    ],
)
async def test_what_is_printed_and_the_last_value_come_back(limited_tool, code, output):
    result = await limited_tool.run(code)
    assert output in result.as_text()
    assert not result.timed_out


async def test_text_that_no_encoding_knows_is_run_all_the_same(limited_tool):
    assert (await limited_tool.run("len('\ud800')")).as_text() == "1"


async def test_time_memory_files_and_output_are_limited(limited_tool):
    limited_tool.wall_seconds, limited_tool.cpu_seconds = 1.0, 30
    started = time.monotonic()
    slept = await limited_tool.run("print('begun', flush=True)\nimport time\ntime.sleep(60)")
    assert slept.timed_out
    assert slept.output.splitlines()[0] == "begun"
    assert "TimeoutError" in slept.output
    assert time.monotonic() - started < 5
    limited_tool.wall_seconds, limited_tool.cpu_seconds = 10.0, 1
    assert (await limited_tool.run("while True: pass")).timed_out
    assert "MemoryError" in (await limited_tool.run("x = bytearray(1 << 30)")).output
    limited_tool.file_bytes = 1 << 20
    assert "File too large" in (await limited_tool.run("open('f', 'wb').write(bytes(2 << 20))")).output
    flood = await limited_tool.run("print('x' * 10_000_000)")
    assert len(flood.output) < limited_tool.output_characters + 100
    assert flood.output.endswith("(output cut off)")


async def test_code_has_no_network_writes_nowhere_and_sees_no_secrets(isolated_tool, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    target = tmp_path / "written"
    tmp_path.chmod(0o777)
    code = f"""
import os, socket
for attempt in (
    lambda: socket.create_connection(("127.0.0.1", 22), 1),
    lambda: open({str(target)!r}, "w"),
    lambda: open({str(Path(__file__).parent / "written")!r}, "w"),
    lambda: os.kill({os.getpid()}, 0),
):
    try:
        attempt()
    except OSError as error:
        print(type(error).__name__, error.errno)
print(sorted(os.environ), os.getcwd())
open("here", "w").write("fine")
os.listdir()
"""
    lines = (await isolated_tool.run(code)).output.splitlines()
    assert lines[0] == "OSError 101"
    assert len([line for line in lines if "Error" in line]) == 4
    assert "SECRET_TOKEN" not in lines[-2]
    assert lines[-1] == "['here']"
    assert not target.exists()


@pytest.mark.parametrize("ending", ["", "import time; time.sleep(60)"], ids=["ended", "timed out"])
async def test_processes_that_hide_end_with_the_code(isolated_tool, ending):
    """Two forks and a session of its own are what a daemon does; its group is not the tool's any more."""
    mark = f"sleeper-{os.getpid()}"
    isolated_tool.wall_seconds = 1.5
    code = f"""
import os, subprocess, sys
if os.fork() == 0:
    os.setsid()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", {mark!r}])
    os._exit(0)
os.wait()
print("left behind", flush=True)
{ending}
"""
    result = await isolated_tool.run(code)
    assert "left behind" in result.output
    assert result.timed_out == bool(ending)
    deadline = time.monotonic() + 5
    while any(mark in (process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline


async def test_where_isolation_is_impossible_it_is_said_or_refused(monkeypatch, caplog):
    def denied(*_args, **_kwargs):
        return subprocess.CompletedProcess([], 97, b"", b"unshare: Operation not permitted\n")

    monkeypatch.setattr(subprocess, "run", denied)
    tool = PythonTool()
    tool.probe()
    assert not tool.isolated
    assert "this user's rights and network (unshare: Operation not permitted)" in caplog.text
    with pytest.raises(SandboxUnavailable, match="require_isolation false"):
        PythonTool(require_isolation=True).probe()
