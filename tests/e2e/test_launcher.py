"""The launcher as a program: it trains to the end; if any part is killed, everything ends and nothing is left.

The programs are stand-ins, so that each test takes seconds; `test_demo.py` has the real ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from example_trainer.processes.ports import free_port
from example_trainer.processes.tree import wait_until

LIMIT_SECONDS = 10.0
RESTART_SECONDS = 30.0
STANDINS = str(Path(__file__).with_name("standins.py"))
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}


def test_a_run_trains_evaluates_sums_up_and_leaves_nothing(standins, traces) -> None:
    launched = standins("--training-steps", "12", "--cost-per-hour", "3600")
    launched.wait_for_steps(1)
    tree = launched.tree()
    code, out, error = launched.end()
    assert (code, error) == (0, "")
    assert out.count("step ") >= 12
    assert "0.080 -> 0.970" in out
    written = ("config.json", "metrics.jsonl", "summary.json", "reward.png", "report.html", "configs/trainer.yaml")
    for name in (*written, "logs/latest"):
        assert (launched.run_dir / name).exists(), name
    assert (launched.run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    totals = json.loads((launched.run_dir / "summary.json").read_text())["totals"]
    assert totals["cost"] == pytest.approx(totals["seconds"], abs=0.01), "one a second"
    assert totals["cpu_seconds"] > 0
    record = json.loads((launched.run_dir / "config.json").read_text())
    assert set(record["programs"]) == {"broker", "vllm", "environment", "trainer"}
    assert traces(launched, tree) == []


@pytest.mark.parametrize("role", ["broker", "serve", "trainer"])
def test_kill_9_of_any_child_without_restarts_ends_everything_and_names_it_and_how_to_go_on(
    standins, traces, role: str
) -> None:
    launched = standins("--training-steps", "400", "--max-restarts", "0")
    launched.wait_for_steps(3)
    tree = launched.tree()
    launched.child("standins.py", role).kill()
    killed_at = time.monotonic()
    code, _, error = launched.end()
    assert code == 1
    assert launched.ended_at - killed_at < LIMIT_SECONDS
    assert f"{'environment' if role == 'serve' else role} was killed by SIGKILL" in error
    assert "--max-restarts is 0" in error
    assert f"--run-dir {launched.run_dir} --resume auto" in error
    assert traces(launched, tree) == []


def test_as_json_a_run_prints_one_object_a_line_and_nothing_else(standins) -> None:
    code, out, error = standins("--training-steps", "3", "--json").end()
    assert (code, error) == (0, "")
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["step"] for one in found if one["event"] == "step"] == [1, 2, 3]
    assert (found[-1]["event"], found[-1]["steps"]) == ("summary", 3)
    assert Path(found[-1]["run_dir"], "report.html").exists()


def test_a_quiet_run_prints_its_summary_alone(standins) -> None:
    code, out, error = standins("--training-steps", "3", "--quiet").end()
    assert (code, error) == (0, "")
    assert out.startswith("Summary")


def test_every_program_that_is_killed_is_started_again_and_the_run_ends_with_all_its_steps(standins, traces) -> None:
    launched = standins("--training-steps", "200")
    launched.wait_for_steps(20)
    tree = set(launched.tree())
    for role in ("broker", "serve", "trainer", "trainer"):
        launched.child("standins.py", role).kill()
        steps = launched.steps()
        assert wait_until(lambda steps=steps: launched.steps() > steps + 10, RESTART_SECONDS)
        tree |= set(launched.tree())
    code, out, error = launched.end()
    assert (code, error) == (0, "")
    for line in ("broker was killed", "environment was killed", "trainer was killed by SIGKILL", "restart 2 of 5"):
        assert line in out, line
    rows = [json.loads(line) for line in (launched.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 201))
    assert "step 200/200" in out
    assert traces(launched, list(tree)) == []


def test_a_server_that_is_killed_or_loses_its_engine_is_started_again_and_the_run_goes_on(standins, traces) -> None:
    launched = standins("--training-steps", "400")
    launched.wait_for_steps(100)  # five seconds: the launcher has seen the server come up, and its worker settle
    pid_path = launched.run_dir / "bridge/worker.pid"
    tree = set(launched.tree())
    worker = pid_path.read_text()
    os.kill(int(worker), signal.SIGKILL)
    assert wait_until(lambda: pid_path.read_text() not in {"", worker}, RESTART_SECONDS)
    time.sleep(1)  # until the new process answers, so that it is not killed inside its start
    tree |= set(launched.tree())
    second = pid_path.read_text()
    launched.child("standins.py", "vllm").kill()
    assert wait_until(lambda: pid_path.read_text() not in {"", second}, RESTART_SECONDS)
    tree |= set(launched.tree())
    code, out, error = launched.end()
    assert (code, error) == (0, "")
    assert f"vllm lost its process pid {worker}" in out
    assert "restart 1 of 5 within 600 s" in out
    assert "vllm was killed by SIGKILL" in out
    assert "restart 2 of 5 within 600 s" in out
    assert traces(launched, list(tree)) == []


def test_a_server_that_is_killed_too_often_ends_the_run_and_says_how_often(standins, traces) -> None:
    launched = standins("--training-steps", "4000", "--max-restarts", "3")
    launched.wait_for_steps(20)
    pid_path = launched.run_dir / "bridge/worker.pid"
    for _ in range(3):
        before = pid_path.read_text()
        launched.child("standins.py", "vllm").kill()
        assert wait_until(lambda before=before: pid_path.read_text() not in {"", before}, RESTART_SECONDS)
        time.sleep(1)  # until the launcher has seen its shared memory, which it looks for ten times a second
    tree = launched.tree()
    launched.child("standins.py", "vllm").kill()
    code, _, error = launched.end()
    assert code == 1
    assert "vllm was killed by SIGKILL after " in error
    assert ", restarts: 3 (it has failed 4 times within 600 s, and --max-restarts is 3)" in error
    assert traces(launched, tree) == []


def test_kill_9_of_the_launcher_itself_leaves_nothing(standins, traces) -> None:
    launched = standins("--training-steps", "400")
    launched.wait_for_steps(3)
    tree = launched.tree()
    launched.process.kill()
    launched.end()
    assert wait_until(lambda: traces(launched, tree) == [], LIMIT_SECONDS)


def test_a_signal_lets_a_trainer_end_its_publish_before_the_server_ends(standins) -> None:
    launched = standins("--training-steps", "400", STANDIN_TRAINER="publishing")
    launched.wait_for_steps(3)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 143
    assert (launched.run_dir / "published").exists(), launched.logs()


def test_the_end_of_another_program_lets_a_trainer_end_its_publish_before_the_server_ends(standins) -> None:
    launched = standins("--training-steps", "400", "--max-restarts", "0", STANDIN_TRAINER="publishing")
    launched.wait_for_steps(3)
    launched.child("standins.py", "serve").kill()
    assert launched.end()[0] == 1
    assert (launched.run_dir / "published").exists(), launched.logs()


@pytest.mark.parametrize("number", list(SIGNALS))
def test_a_signal_ends_everything_with_its_own_exit_code(standins, traces, number: signal.Signals) -> None:
    launched = standins("--training-steps", "400")
    launched.wait_for_steps(3)
    tree = launched.tree()
    launched.process.send_signal(number)
    code, _, error = launched.end()
    assert code == SIGNALS[number]
    assert f"stopped by {number.name}" in error
    assert traces(launched, tree) == []


def test_a_second_launcher_in_a_run_directory_names_the_first_and_changes_nothing(standins) -> None:
    launched = standins("--training-steps", "400")
    launched.wait_for_steps(1)
    second = standins("--training-steps", "3", "--resume", "auto")
    code, out, error = second.end()
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert f"another run works there (pid {launched.process.pid} on " in error
    assert [path.name for path in launched.run_dir.glob("logs/attempt_*")] == ["attempt_1"]
    launched.process.kill()  # which ends its lock
    launched.process.communicate()
    assert standins("--training-steps", "3", "--resume", "auto").end()[0] == 0


def test_a_run_outlives_the_reader_of_its_output_and_under_nohup_its_terminal(
    start_launcher, standins, tmp_path: Path
) -> None:
    ignoring = "trap '' HUP; exec "
    command = [sys.executable, str(Path(__file__).with_name("launch_standins.py")), "--model-name", tmp_path / "model"]
    launched = start_launcher("sh", "-c", f'{ignoring}"$@"', "sh", *map(str, command), "--training-steps", "40")
    launched.process.stdout.close()
    launched.wait_for_steps(1)
    launched.process.send_signal(signal.SIGHUP)
    with launched.process.stderr as stderr:
        error = stderr.read()
    assert launched.process.wait(60) == 0
    assert launched.steps() == 40
    assert error == f"the output cannot be written (Broken pipe); the run goes on in {launched.run_dir}\n"


def test_a_child_that_will_not_stop_is_stopped(standins, traces) -> None:
    launched = standins("--training-steps", "400", "--max-restarts", "0", STANDIN_VLLM="stubborn")
    launched.wait_for_steps(3)
    tree = launched.tree()
    launched.child("standins.py", "trainer").kill()
    killed_at = time.monotonic()
    code, _, _ = launched.end()
    assert code == 1
    assert launched.ended_at - killed_at < LIMIT_SECONDS
    assert traces(launched, tree) == []


def test_of_several_servers_one_that_dies_is_started_again_and_the_run_goes_on(standins, traces) -> None:
    launched = standins("--training-steps", "240", "--num-inference-nodes", "2")
    launched.wait_for_steps(60)  # three seconds: the launcher has seen both servers come up
    first, second = launched.child("standins.py", "vllm.yaml"), launched.child("standins.py", "vllm-2.yaml")
    pid_path = launched.run_dir / "bridge/vllm-2/worker.pid"
    before = pid_path.read_text()
    second.kill()
    assert wait_until(lambda: pid_path.read_text() not in {"", before}, RESTART_SECONDS)
    tree = launched.tree()
    assert first.is_running()
    code, out, error = launched.end()
    assert (code, error) == (0, "")
    assert "vllm-2 was killed by SIGKILL" in out
    assert "restart 1 of 5 within 600 s" in out
    assert traces(launched, tree) == []


def test_a_teacher_s_server_starts_and_ends_with_the_run_and_is_started_again(standins, traces, tmp_path: Path) -> None:
    asked = ("--teacher.model_name", str(tmp_path / "model"), "--distill", "forward_kl")
    launched = standins("--training-steps", "240", *asked)
    launched.wait_for_steps(60)  # three seconds: the launcher has seen both servers come up
    pid_path = launched.run_dir / "bridge/teacher/worker.pid"
    before = pid_path.read_text()
    tree = set(launched.tree())
    launched.child("standins.py", "teacher.yaml").kill()
    assert wait_until(lambda: pid_path.read_text() not in {"", before}, RESTART_SECONDS)
    tree |= set(launched.tree())
    code, out, error = launched.end()
    assert (code, error) == (0, "")
    assert "teacher ready" in out
    assert "teacher was killed by SIGKILL" in out
    served = yaml.safe_load((launched.run_dir / "configs/teacher.yaml").read_text())["vllm"]
    told = yaml.safe_load((launched.run_dir / "configs/environment.yaml").read_text())["teacher"]
    assert told["base_url"] == f"http://127.0.0.1:{served['port']}/v1"
    assert traces(launched, list(tree)) == []


def test_a_decoy_with_the_same_name_survives(standins, traces) -> None:
    """The launcher ends its descendants only, nothing by name, port or user."""
    decoy = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)  # standins.py vllm trainer"])
    try:
        launched = standins("--training-steps", "400", "--max-restarts", "0")
        launched.wait_for_steps(3)
        launched.child("standins.py", "trainer").kill()
        launched.end()
        assert decoy.poll() is None
    finally:
        decoy.kill()
        decoy.wait()


def test_a_crash_shows_the_last_lines_of_the_program(standins) -> None:
    code, _, error = standins("--training-steps", "3", STANDIN_TRAINER="crash").end()
    assert code == 1
    assert "trainer exited with code 1" in error
    assert "the trainer has had enough" in error
    assert "the same error 3 times in a row" in error


def test_a_refusal_of_a_program_is_one_line_and_exit_code_2(standins) -> None:
    code, _, error = standins(STANDIN_TRAINER="refuse").end()
    assert code == 2
    assert error == "atropos-grpo-run: error: trainer: atropos-grpo: error: --lr -1 is below zero\n"


def test_with_a_broker_elsewhere_only_server_and_trainer_are_started_and_ended(standins, tmp_path: Path) -> None:
    """The command is `--model-name M --atropos-url URL --training-steps N`; broker and environments run by hand."""
    port, server_port = free_port(), free_port()
    settings = tmp_path / "api.yaml"
    settings.write_text(f"api: {{port: {port}}}")
    broker = subprocess.Popen([sys.executable, STANDINS, "broker", "--config", str(settings)])
    try:
        url = f"http://127.0.0.1:{port}"
        launched = standins("--atropos-url", url, "--training-steps", "5", "--vllm-port", str(server_port))
        code, out, error = launched.end()
        assert (code, error) == (0, "")
        assert "trainer ready" in out
        assert {path.name for path in launched.run_dir.glob("logs/latest/*.log")} == {
            "vllm.log",
            "trainer.log",
            "plot.log",
        }
        assert broker.poll() is None
    finally:
        broker.kill()
        broker.wait()


def test_a_second_attempt_keeps_the_logs_of_the_first(standins, tmp_path: Path) -> None:
    standins("--training-steps", "3", STANDIN_TRAINER="crash").end()
    code, _, error = standins("--training-steps", "3").end()
    assert code == 2
    assert "already holds the metrics of a run" in error
    code, _, _ = standins("--training-steps", "3", "--resume", "auto").end()
    assert code == 0
    assert "had enough" in (tmp_path / "run/logs/attempt_1/trainer.log").read_text()
    assert (tmp_path / "run/logs/latest").resolve().name == "attempt_2"


def test_watching_a_run_costs_little(standins) -> None:
    """The work of the launcher alone is counted over seconds of training: how often it wakes, and its reads.

    Its CPU time says little across machines: 0.02 of a core where caches stay warm over a sleep, up to 0.11 where they
    do not, with the same code.
    """
    launched = standins("--training-steps", "400")
    launched.wait_for_steps(3)
    process = psutil.Process(launched.process.pid)
    before = work_of(process)
    time.sleep(6)
    after = work_of(process)
    seconds, wakes, reads, used = (now - then for now, then in zip(after, before, strict=True))
    launched.process.send_signal(signal.SIGTERM)
    launched.end()
    assert wakes / seconds < 40, "it looks ten times a second; 10 to 13 were seen"
    assert reads / seconds < 10 * len(psutil.pids()) + 200, "it reads the table of processes; 5 for each were seen"
    assert used / seconds < 0.2, f"{used / seconds:.3f} of a core"


def work_of(process: psutil.Process) -> tuple[float, int, int, float]:
    """Return the time, and the process' voluntary context switches, read calls and CPU seconds until then."""
    used = process.cpu_times()
    switches, reads = process.num_ctx_switches().voluntary, process.io_counters().read_count
    return time.monotonic(), switches, reads, used.user + used.system
