"""The files in `deploy/` and the workflows name flags, files, programs and stages that exist. No container is built."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from tests import nightly

from .programs import PROGRAMS

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
UNITS = sorted((DEPLOY / "systemd").glob("*.*"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
INSTRUCTIONS = {"FROM", "ENV", "COPY", "RUN", "USER", "WORKDIR", "VOLUME", "CMD", "EXPOSE", "HEALTHCHECK"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, each with its arguments on one line."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parts = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word, " ".join(rest.split())) for word, rest in parts]


def read_command(words: list[str]) -> int:
    """Let the program read its command line, up to the point where it would begin its work."""
    program, *arguments = words
    return PROGRAMS[program](arguments)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_a_dockerfile_copies_what_is_there_and_runs_a_program_of_ours_as_no_root(path: Path) -> None:
    found = instructions(path)
    assert {word for word, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "FROM"
    (python,) = re.findall(r"^python:(\d+\.\d+)-slim$", found[0][1])
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)
    copied = {source for word, rest in found if word == "COPY" for source in rest.split()[:-1]}
    assert {*PACKAGES, "pyproject.toml", "README.md", "LICENSE"} <= copied
    assert all((ROOT / source).exists() for source in copied)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {source.split("/")[0] for source in copied} <= {line[1:] for line in ignored if line.startswith("!")}
    users = [rest for word, rest in found if word == "USER"]
    assert users == ["10001"]
    assert "useradd --uid 10001" in " ".join(rest for word, rest in found if word == "RUN")
    (command,) = [yaml.safe_load(rest) for word, rest in found if word == "CMD"]
    assert command[0] in PROJECT["scripts"]
    assert read_command(command) == 0


PACKAGES = ("atropos_api", "environments", "example_trainer")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_hadolint_finds_nothing(path: Path) -> None:
    lint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if lint is None:
        pytest.skip("hadolint is not installed here")
    result = subprocess.run([lint, path], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_is_built_from_files_that_are_there_and_its_command_is_read(name: str) -> None:
    service = COMPOSE["services"][name]
    if "build" in service:
        context = (DEPLOY / service["build"]["context"]).resolve()
        assert context == ROOT
        assert (context / service["build"]["dockerfile"]).is_file()
        assert read_command(shlex.split(service["command"])) == 0
    else:
        assert re.fullmatch(r"[\w./-]+:v?\d[\w.]+", service["image"])
    for volume in service.get("volumes", ()):
        source = volume.split(":")[0]
        assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
    assert set(service.get("depends_on", ())) <= set(COMPOSE["services"])
    assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_the_broker_of_kubernetes_has_a_command_that_is_read_and_volumes_that_are_there() -> None:
    text = (DEPLOY / "kubernetes/broker.yaml").read_text(encoding="utf-8")
    service, broker = yaml.safe_load_all(text)
    assert (service["kind"], broker["kind"], broker["apiVersion"]) == ("Service", "StatefulSet", "apps/v1")
    pod = broker["spec"]["template"]
    assert pod["metadata"]["labels"] == broker["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    (container,) = pod["spec"]["containers"]
    assert read_command(container["args"]) == 0
    assert f"--port={container['ports'][0]['containerPort']}" in container["args"]
    claims = [claim["metadata"]["name"] for claim in broker["spec"]["volumeClaimTemplates"]]
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]} | {*claims}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_prometheus_scrapes_services_of_compose() -> None:
    scrapes = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    targets = {target for one in scrapes for configs in one["static_configs"] for target in configs["targets"]}
    command = COMPOSE["services"]["run"]["command"]
    (first,) = re.findall(r"--metrics-port (\d+)", command)
    (vllm,) = re.findall(r"--vllm-port (\d+)", command)
    expected = {"broker:8000", f"run:{vllm}", f"run:{first}", f"run:{int(first) + 1}"}
    assert targets == expected
    mounted = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/atropos.yml").read_text(encoding="utf-8"))
    path = mounted["providers"][0]["options"]["path"]
    assert any(f":{path}/atropos.json:" in volume for volume in COMPOSE["services"]["grafana"]["volumes"])


def commands_of(unit: Path) -> Iterator[list[str]]:
    for line in unit.read_text(encoding="utf-8").splitlines():
        if line.startswith("ExecStart="):
            yield shlex.split(line.partition("=")[2])


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit.suffix == ".service"], ids=lambda unit: unit.stem)
def test_a_unit_starts_a_program_that_reads_its_flags(unit: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text((ROOT / "example_trainer/configs/demo.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    for program, *arguments in commands_of(unit):
        filled = [re.sub(r"/etc/atropos/\w+/%i\.yaml", str(config), argument) for argument in arguments]
        if program == "/bin/sh":
            assert "/v1/backup" in filled[-1]
        elif program.endswith("/python"):
            assert filled[:3] == ["-m", "environments.${SERVER}", "serve"]
            assert "--env.log_format" in filled
        else:
            assert read_command([program.removeprefix("/opt/atropos/bin/"), *filled]) == 0


@pytest.mark.parametrize("unit", [unit for unit in UNITS if "@" in unit.name], ids=lambda unit: unit.stem)
def test_a_unit_that_downloads_models_or_data_has_a_home_that_it_can_write(unit: Path) -> None:
    settings = [line.partition("=") for line in unit.read_text(encoding="utf-8").splitlines()]
    (folder,) = [value for name, _, value in settings if name == "StateDirectory"]
    assert ("Environment", "=", f"HOME=/var/lib/{folder}") in settings


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """The programs of the units are in a folder that no machine of a test has; this interpreter stands for them."""
    for unit in UNITS:
        text = re.sub(r"/opt/atropos/bin/[\w-]+", sys.executable, unit.read_text(encoding="utf-8"))
        (tmp_path / unit.name).write_text(text, encoding="utf-8")
    command = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.iterdir()))]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_commands_of_a_workflow_exist(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    ran = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert ran
    for line in ran:
        program, *arguments = shlex.split(line.replace("${{ matrix.stage }}", "STAGE"))
        if program == "make":
            assert arguments[0] in targets
        else:
            assert (ROOT / program).is_file()
            assert (ROOT / program).stat().st_mode & 0o111
    versions = [
        step["with"]["python-version"]
        for job in workflow["jobs"].values()
        for step in job["steps"]
        if "python-version" in step.get("with", {})
    ]
    assert all(SpecifierSet(PROJECT["requires-python"]).contains(version) for version in versions)


def test_the_nightly_workflow_has_a_job_for_every_stage() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert job["strategy"]["matrix"]["stage"] == [stage.name for stage in nightly.STAGES]
    assert any(step.get("run") == ".ci/run" for step in _steps("check"))


def _steps(workflow: str) -> list[dict[str, Any]]:
    content = yaml.safe_load((ROOT / f".github/workflows/{workflow}.yml").read_text(encoding="utf-8"))
    return [step for job in content["jobs"].values() for step in job["steps"]]
