"""`make` installs with uv from the registries that pip is configured with, and with pip where uv cannot."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SOURCE = Path(__file__).parents[3] / "requirements" / "install.py"
CONFIGURED = """\
:env:.index-url='https://wins.example/simple'
global.cert='/etc/certs.pem'
global.extra-index-url='https://one.example/simple\\nhttps://two.example/simple'
global.index-url='https://loses.example/simple'
install.find-links='/opt/wheels'
"""
ASKED = ["--no-deps", "--requirement", "cpu.txt"]
INDEX = "https://cpu.example"


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The commands that are run, without those that get uv; those of which `fails` is true fail."""
    seen = SimpleNamespace(commands=[], fails=lambda _: False, uv_can_be_had=True)

    def run(command: list[str], **_: object) -> SimpleNamespace:
        if command[-1].startswith("uv=="):
            return SimpleNamespace(returncode=int(not seen.uv_can_be_had))
        seen.commands.append(command)
        return SimpleNamespace(returncode=int(seen.fails(command)))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: CONFIGURED)
    return seen


def installer(command: list[str]) -> str:
    assert command[:2] == [sys.executable, "-m"]
    return command[2]


def test_uv_gets_the_registries_of_pips_configuration(
    install: ModuleType, attempts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert install.main(["--or-from", INDEX, *ASKED]) == 0
    (command,) = attempts.commands
    flags = command[command.index("unsafe-best-match") + 1 :]
    assert flags == [
        *("--default-index", "https://wins.example/simple"),
        *("--index", "https://one.example/simple", "--index", "https://two.example/simple"),
        *("--find-links", "/opt/wheels", *ASKED),
    ]
    assert install.variables()["SSL_CERT_FILE"] == "/etc/certs.pem"


def test_the_further_index_is_asked_only_if_the_configured_ones_lack_a_package(
    install: ModuleType, attempts: SimpleNamespace
) -> None:
    attempts.fails = lambda command: INDEX not in command
    assert install.main(["--or-from", INDEX, *ASKED]) == 0
    assert [(installer(command), INDEX in command) for command in attempts.commands] == [("uv", False), ("uv", True)]


@pytest.mark.parametrize("uv_can_be_had", [True, False])
def test_pip_installs_where_uv_cannot(install: ModuleType, attempts: SimpleNamespace, uv_can_be_had: bool) -> None:
    attempts.uv_can_be_had = uv_can_be_had
    attempts.fails = lambda command: installer(command) == "uv"
    assert install.main(ASKED) == 0
    assert [installer(command) for command in attempts.commands] == (["uv", "pip"] if uv_can_be_had else ["pip"])
    assert attempts.commands[-1][3:] == ["install", *ASKED, "--quiet"]


def test_a_package_that_cannot_be_installed_is_a_failure(install: ModuleType, attempts: SimpleNamespace) -> None:
    attempts.fails = lambda _: True
    assert install.main(["--or-from", INDEX, *ASKED]) == 1
    assert len(attempts.commands) == 4
