"""The OpenAPI document yields a working client. `ATROPOS_GENERATED_CLIENT=1` runs it, in an environment of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atropos_api.testing import served_broker

GENERATOR = "openapi-python-client==0.29.1"
SCRIPT = Path(__file__).with_name("generated_client.py")
MODELS = 80
"""Most models of the client; more would mean that answers are described in place instead of by name."""


@pytest.mark.skipif(
    "ATROPOS_GENERATED_CLIENT" not in os.environ, reason="ATROPOS_GENERATED_CLIENT=1 installs a generator of clients"
)
@pytest.mark.timeout(600)
def test_a_generated_client_makes_a_run_of_both_contracts(tmp_path):
    # An environment of its own: neither this project nor the client may import the other.
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    bin_ = tmp_path / "environment" / "bin"

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run(sys.executable, "-m", "venv", str(bin_.parent))
    run(str(bin_ / "pip"), "install", "--quiet", GENERATOR)
    with served_broker() as url:
        where = ("--url", f"{url}/openapi.json", "--output-path", "broker_client", "--meta", "none")
        told = run(str(bin_ / "openapi-python-client"), "generate", *where)
        # The binary form is for our own client; a generated client has to understand all others.
        warnings = [block.strip() for block in told.split("WARNING parsing ")[1:]]
        assert [block.partition("\n\n")[2].splitlines()[0] for block in warnings] == [
            "Unsupported content type application/vnd.atropos.columns"
        ]
        assert len(list((tmp_path / "broker_client" / "models").glob("*.py"))) < MODELS
        script = tmp_path / SCRIPT.name
        script.write_text(SCRIPT.read_text())
        assert run(str(bin_ / "python"), str(script), url).endswith("done\n")
