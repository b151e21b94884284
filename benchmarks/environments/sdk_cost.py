"""CPU seconds that an environment server spends on a group, for our SDK and for Atropos' as published, in one run.

    python benchmarks/environments/sdk_cost.py [--groups 600] [--rounds 3] [--idle-seconds 30]

256 rollouts are in flight (32 groups of 8, 64 tokens each) against a server in another process that answers at once
and also takes the groups. Both SDKs run the same small environment in turns and read the same answers; ours runs again
with the compact form that it agrees on with our own server. The last figure is the cost of a server of ours while the
queue is full.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from example_trainer.tiny.tokenizer import END, save_tokenizer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = Path.home() / ".cache" / "atropos"
REFERENCE = "atroposlib==0.4.0"
SAME_VERSIONS = ("aiohttp", "tokenizers", "transformers", "pydantic")
ITS_NEEDS = (
    "aiofiles fastapi jinja2 jsonlines markdown numpy openai polars pydantic-cli pyyaml requests rich tenacity tqdm "
    "uvicorn wandb"
)
WORKERS = 32
MOST_OF_REFERENCE = 0.2
MOST_WHILE_IDLE = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=600, help="groups measured in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-seconds", type=float, default=30, help="how long an idle server is watched; 0: not")
    arguments = parser.parse_args()
    reference = reference_python()
    with tempfile.TemporaryDirectory() as directory:
        folder, end = make_tokenizer(Path(directory))
        found: dict[str, list[float]] = {}
        with instant_server(end) as url:
            settings = {"url": url, "workers": WORKERS, "groups": arguments.groups, "tokenizer": str(folder)}
            for _ in range(arguments.rounds):
                for name, python, driver, more in sides(reference):
                    found.setdefault(name, []).append(run_driver(python, driver, settings | more))
            idle = settings | {"seconds": arguments.idle_seconds}
            share = run_driver(Path(sys.executable), "idle_driver.py", idle) if arguments.idle_seconds > 0 else None
    return report(found, share)


def sides(reference: Path | None) -> Iterator[tuple[str, Path, str, dict[str, object]]]:
    if reference is not None:
        yield "Atropos 0.4.0", reference, "reference_driver.py", {}
    yield "ours", Path(sys.executable), "ours_driver.py", {"prefix": ""}
    yield "ours, Atropos' form", Path(sys.executable), "ours_driver.py", {"prefix": "/plain"}


def report(found: dict[str, list[float]], idle: float | None) -> int:
    """Print the table; return 1 if ours costs over a fifth of the reference, or a hundredth of a core when idle."""
    reference = found.get("Atropos 0.4.0")
    print(f"{'':24}{'CPU ms a group':>16}{'of Atropos':>12}   (rounds)")
    worst = 0.0
    for name, values in found.items():
        seconds = statistics.median(values)
        ratio = seconds / statistics.median(reference) if reference else None
        shown = f"{ratio:12.3f}" if ratio is not None else f"{'skipped':>12}"
        print(f"{name:24}{seconds * 1000:16.2f}{shown}   {' '.join(f'{value * 1000:.2f}' for value in values)}")
        if name != "Atropos 0.4.0" and ratio is not None:
            worst = max(worst, ratio)
    if idle is not None:
        print(f"an idle server of ours: {idle * 100:.3f} % of a core")
    return int(worst > MOST_OF_REFERENCE or (idle or 0.0) > MOST_WHILE_IDLE)


def run_driver(python: Path, driver: str, settings: dict[str, object]) -> float:
    environment = {
        "PATH": "/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HOME": str(Path.home()),
    }
    if driver != "reference_driver.py":
        environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [str(python), str(HERE / driver), json.dumps(settings)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{driver} failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.split()[-1])


def reference_python() -> Path | None:
    """Return the interpreter of an environment with the reference, created on the first call; None if that fails."""
    environment = CACHE / "bench-atropos-sdk-0.4.0"
    python = environment / "bin" / "python"
    complete = environment / ".complete"
    pins = [f"{name}=={version(name)}" for name in SAME_VERSIONS]
    if complete.exists() and complete.read_text().split() == pins:
        return python
    shutil.rmtree(environment, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *pins, *ITS_NEEDS.split()], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", REFERENCE], check=True)
    except subprocess.CalledProcessError as error:
        print(f"skipped: {REFERENCE} cannot be installed here ({error})", file=sys.stderr)
        return None
    complete.write_text("\n".join(pins))
    return python


def make_tokenizer(directory: Path) -> tuple[Path, int]:
    """Write a small tokenizer folder that both sides can load; return it and the id of its end token."""
    end = save_tokenizer(directory).token_to_id(END)
    assert end is not None
    return directory, end


@contextmanager
def instant_server(end: int) -> Iterator[str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(HERE / "instant_server.py"), str(port), str(end)])
    try:
        deadline = time.monotonic() + 30
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit("the instant server did not start")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=10)


if __name__ == "__main__":
    sys.exit(main())
