"""The OpenAPI document yields a working client. `ATROPOS_GENERATED_CLIENT=1` runs it, in an environment of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from atropos_api.testing import served_broker

GENERATOR = "openapi-python-client==0.29.1"
SCRIPT = Path(__file__).with_name("generated_client.py")
UNNAMED = 5
"""Most models that are no named schema or part of one; more would mean that answers are described in place."""


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
        # The binary form is for our own client, a backup is a file; a generated client has to understand all others.
        warnings = told.split("WARNING parsing ")[1:]
        unread = ("application/vnd.atropos.columns", "application/x-tar")
        assert [kind for block in warnings for kind in unread if kind in block] == sorted(unread)
        assert len(warnings) == len(unread)
        schemas = httpx.get(f"{url}/openapi.json").json()["components"]["schemas"]
        named = tuple(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in schemas)
        models = [path.stem for path in (tmp_path / "broker_client" / "models").glob("[!_]*.py")]
        assert len([model for model in models if not model.startswith(named)]) <= UNNAMED, models
        script = tmp_path / SCRIPT.name
        script.write_text(SCRIPT.read_text())
        assert run(str(bin_ / "python"), str(script), url).endswith("done\n")
