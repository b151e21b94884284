"""A model's code runs and its output is returned; where it cannot be isolated, it is not run without permission."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from environments.sandbox.launch import view_of_this_python
from environments.sandbox.python_tool import PythonTool, SandboxUnavailable
from environments.tool_server import ToolEnvConfig

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=["isolated", "limits alone"])
def tool(request):
    made = PythonTool(require_isolation=False, memory_bytes=256 << 20)
    made.probe()
    if request.param == "limits alone":
        made.mechanisms = ()
        made.probe()
    elif not made.isolated:
        pytest.skip("code cannot be isolated on this machine")
    yield made
    made.close()


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
        ("exit()", "(no output)"),
        ("len('\ud800')", "1"),
    ],
)
async def test_what_is_printed_and_the_last_value_come_back(tool, code, output):
    result = await tool.run(code)
    assert output in result.as_text()
    assert not result.timed_out


async def test_a_traceback_shows_the_codes_own_lines_alone(tool):
    result = await tool.run("def half(x):\n    return x / 0\nhalf(1)")
    assert result.output.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<code>", line 3, in <module>',
        '  File "<code>", line 2, in half',
        "ZeroDivisionError: division by zero",
    ]
    assert result.exit_code == 1


async def test_packages_threads_and_processes_can_be_used(tool):
    code = """
import asyncio, multiprocessing, numpy, subprocess, sys, tempfile
def square(x):
    return x * x
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(square, [2, 3]))
async def main():
    return await asyncio.to_thread(square, 4)
print(asyncio.run(main()), numpy.arange(4).sum(), subprocess.check_output([sys.executable, "-c", "print(1)"]))
with tempfile.TemporaryFile("w") as file:
    print(file.write("text"))
"""
    assert (await tool.run(code)).as_text() == "[4, 9]\n16 6 b'1\\n'\n4"


async def test_time_memory_files_and_output_are_limited(tool):
    tool.wall_seconds, tool.cpu_seconds = 1.0, 30
    started = time.monotonic()
    slept = await tool.run("print('begun', flush=True)\nimport time\ntime.sleep(60)")
    assert slept.timed_out
    assert slept.output.splitlines()[0] == "begun"
    assert "TimeoutError" in slept.output
    assert time.monotonic() - started < 5
    tool.wall_seconds, tool.cpu_seconds = 10.0, 1
    assert (await tool.run("while True: pass")).timed_out
    assert "MemoryError" in (await tool.run("x = bytearray(1 << 30)")).output
    tool.file_bytes = 1 << 20
    assert "OSError" in (await tool.run("open('f', 'wb').write(bytes(2 << 20))")).output
    flood = await tool.run("print('x' * 10_000_000)")
    assert len(flood.output) < tool.output_characters + 100
    assert flood.output.endswith("(output cut off)")


def most_held_kib(pid):
    """Return the peak memory of a process, as the current one may have been given back."""
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1])


async def test_a_flood_of_output_fills_no_memory(tool):
    flood = await tool.run("import os\nfor _ in range(800):\n    os.write(1, bytes(1 << 16))")
    assert flood.exit_code == 0
    held_kib = [most_held_kib(supervisor.pid) for supervisor in tool._supervisors]
    assert max(held_kib) < 40 << 10


async def test_a_run_has_a_folder_of_its_own_that_is_empty_at_first(tool):
    code = "import os; open('here', 'w').close(); os.listdir(), os.getcwd() == os.environ['TMPDIR']"
    for _ in range(2):
        assert (await tool.run(code)).as_text() == "(['here'], True)"


async def test_the_environment_of_the_tool_is_not_the_codes(tool, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    code = "import os; sorted(set(os.environ) - {'LC_CTYPE', 'PWD'})"
    found = (await tool.run(code)).as_text()
    assert found == "['HOME', 'LANG', 'MALLOC_ARENA_MAX', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'TMPDIR']"
    new = PythonTool(mechanisms=(), require_isolation=False)
    await new.run("1")
    assert [set(psutil.Process(supervisor.pid).environ()) for supervisor in new._supervisors] == [{"LANG"}]
    new.close()


def test_where_isolation_is_impossible_the_tool_does_not_run_unless_told_to(caplog):
    """`sandbox/test_escapes.py` tries it as on such machines."""
    with pytest.raises(SandboxUnavailable, match="require_isolation false"):
        PythonTool(mechanisms=()).probe()
    assert ToolEnvConfig(data_path="x").require_isolation
    assert caplog.text == ""
    told = PythonTool(mechanisms=(), require_isolation=False)
    told.probe()
    assert not told.isolated
    assert "this user's files, network and tokens" in caplog.text


def test_of_an_interpreters_folder_only_its_programs_and_libraries_are_shown(tmp_path, monkeypatch):
    """A Python environment may be in a project's own folder, next to its secrets."""
    for name in ("bin", "lib", "secrets"):
        (tmp_path / name).mkdir()
    (tmp_path / "pyvenv.cfg").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    shown = {path for _, path in view_of_this_python().folders if path.startswith(str(tmp_path))}
    assert shown == {str(tmp_path / name) for name in ("bin", "lib", "pyvenv.cfg")}


async def test_an_interpreter_below_tmp_leaves_the_working_folder_empty(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as prefix:
        os.mkdir(f"{prefix}/bin")  # noqa: PTH102 - in an asynchronous test
        monkeypatch.setattr(sys, "prefix", prefix)
        tool = PythonTool(require_isolation=False)
        result = await tool.run(f"import os; os.listdir(), os.path.isdir({prefix + '/bin'!r})")
        tool.close()
    assert result.as_text() == "([], True)"
