"""Small programs that behave towards the launcher like broker, vLLM, environment and trainer. Run by path.

`python standins.py broker|vllm|trainer|serve --config FILE`. How a stand-in misbehaves is set in STANDIN_<ROLE>.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

CHECKPOINT_STEPS = 3


def serve_http(port: int, answers: dict[str, Any], host: str = "127.0.0.1") -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = answers.get(self.path.split("?")[0])
            body = json.dumps(answer).encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    ThreadingHTTPServer((host, port), Handler).serve_forever()


def broker(settings: dict[str, Any]) -> None:
    status = {
        "run": {"run_id": "r", "current_step": 0},
        "environments": [{"name": "arithmetic"}],
        "queue": {"sequences": 64},
    }
    servers = [{"server_id": name, "state": "serving"} for name in ("vllm", "vllm-2")]
    answers = {"/health": {}, "/v1/status": status, "/v1/servers": {"servers": servers}}
    serve_http(settings["api"]["port"], answers, settings["api"].get("host", "127.0.0.1"))


def vllm(settings: dict[str, Any]) -> None:
    """Run a server with a worker process, shared memory and a socket file, which stops slowly on a signal."""
    segment = Path("/dev/shm") / f"atropos-standin-{os.getpid()}"
    segment.write_bytes(b"\0" * 4096)
    (Path(tempfile.gettempdir()) / "engine.sock").touch()
    handle = segment.open("r+b")
    mapping = mmap.mmap(handle.fileno(), 4096)
    worker = subprocess.Popen(
        [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
        start_new_session=True,
    )
    home = Path(os.environ["LOGDIR"])
    home.mkdir(exist_ok=True)
    (home / "worker.pid").write_text(str(worker.pid))
    if os.environ.get("STANDIN_VLLM") == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve_http(settings["vllm"]["port"], {"/health": {}})
    mapping.close()


def serve(settings: dict[str, Any]) -> None:
    """Run an environment that ends after the trainer has, and writes the evaluations before and after."""
    evals = Path(settings["env"]["data_dir_to_save_evals"])
    servers = settings["openai"] if isinstance(settings["openai"], list) else [settings["openai"]]
    if any(server["server_type"] != "vllm" for server in servers):
        sys.exit("arithmetic_server: error: --openai.server_type openai gives no logprobs; set it to vllm")
    write_eval(evals / "step-0", 0.08)
    done = evals.parent / "trained"
    while not done.exists():
        time.sleep(0.05)
    write_eval(evals / "step-5", 0.97)


def write_eval(folder: Path, accuracy: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps({"results": {"all": {"eval/accuracy": accuracy}}}))


def trainer(settings: dict[str, Any]) -> None:
    run_dir, steps = Path(settings["trainer"]["run_dir"]), settings["trainer"].get("training_steps", 10)
    behaviour = os.environ.get("STANDIN_TRAINER", "")
    if behaviour == "refuse":
        sys.stderr.write("a line of no interest\natropos-grpo: error: --lr -1 is below zero\n")
        sys.exit(2)
    if behaviour == "publishing":
        signal.signal(signal.SIGTERM, lambda *_: end_publish(settings["trainer"]["vllm_port"], run_dir / "published"))
    done = resume(run_dir / "metrics.jsonl") if "--resume" in sys.argv or settings["trainer"].get("resume") else 0
    with (run_dir / "metrics.jsonl").open("a") as metrics:
        for step in range(done + 1, steps + 1):
            time.sleep(0.05)
            if step % CHECKPOINT_STEPS == 0:
                (run_dir / f"checkpoint-{step}").mkdir(exist_ok=True)
            row = {"step": step, "reward/mean": min(1.0, 0.25 + 0.1 * step), "response/length_mean": 13.0 + step}
            metrics.write(json.dumps(row | {"time/step": 0.05, "timestamp": time.time()}) + "\n")
            metrics.flush()
    if behaviour == "crash":
        sys.exit("the trainer has had enough")
    if behaviour == "hang":
        time.sleep(600)
    (run_dir / "trained").touch()


def end_publish(port: int, path: Path) -> None:
    """End as a trainer that is in the middle of a publish: it needs its server once more, after a moment."""
    time.sleep(0.5)
    socket.create_connection(("127.0.0.1", port), timeout=1).close()
    path.touch()
    sys.exit(143)


def resume(path: Path) -> int:
    """Replace the metrics by those up to the last checkpoint's step; return that step."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    step = len(rows) // CHECKPOINT_STEPS * CHECKPOINT_STEPS
    beside = path.with_suffix(".new")
    beside.write_text("".join(json.dumps(row) + "\n" for row in rows[:step]))
    beside.replace(path)
    return step


if __name__ == "__main__":
    role = sys.argv[1]
    config = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    {"broker": broker, "vllm": vllm, "serve": serve, "trainer": trainer}[role](config)
