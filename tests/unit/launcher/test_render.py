"""`atropos render`: the sbatch script and the manifests hold what was asked, and nothing of the run file's comments."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator

from atropos_api.common.cliconfig import ConfigError
from example_trainer.commands import main
from example_trainer.launcher.placement.render import BEFORE_LIMIT_SECONDS, GRACE_SECONDS
from example_trainer.launcher.run_file import read_settings
from example_trainer.processes.tree import MARK_VARIABLE, wait_until

RAY_JOB_SCHEMA = Path(__file__).with_name("ray_job_schema.json")
"""The schema of a RayJob in KubeRay 1.7.0 (`ray.io_rayjobs.yaml`), closed: of fields that no job of ours has, only the
name is kept, and no description.
"""
BROKER = Path(__file__).parents[3] / "deploy/kubernetes/broker.yaml"
TEXT = """# the key is hf_secretsecretsecret
trainer: {model_name: m, registered_servers: true, weight_bridge_mode: lora_only, name: My Run_1}
env: {server: arithmetic_server.py}
placement: {n_nodes: 2, n_gpus_per_node: 4}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.run(["render", *words]) == 0
    return capsys.readouterr().out


def test_the_sbatch_script_is_sound_and_starts_a_command_that_the_launcher_reads(run_file, capsys, tmp_path) -> None:
    script = rendered(capsys, "slurm", str(run_file), "--run-dir", "/shared/my runs/1", "--time-limit", "2-00:00:00")
    path = tmp_path / "job.sh"
    path.write_text(script)
    subprocess.run(["bash", "-n", str(path)], check=True)
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert {"--nodes=2", "--gpus-per-node=4", "--requeue", f"--signal=B:USR1@{BEFORE_LIMIT_SECONDS}"} <= {*options}
    assert "--time=2-00:00:00" in options
    assert "pkill" not in script
    assert "secret" not in script
    joined = script.replace("\\\n", " ")
    (command,) = [line for line in joined.splitlines() if "ray symmetric-run" in line]
    words = command.partition("atropos-grpo-run")[2].replace('"$address"', "10.0.0.5:21000").replace('"$run_dir"', "/r")
    settings = read_settings(words.removesuffix(" &").split())
    assert settings.placement.is_ray
    assert settings.trainer.resume == "auto"
    assert settings.trainer.stop_grace == GRACE_SECONDS < BEFORE_LIMIT_SECONDS


def test_shellcheck_warns_of_nothing_in_the_sbatch_script(run_file, capsys) -> None:
    lint = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if lint is None:
        pytest.skip("shellcheck is not installed here")
    script = rendered(capsys, "slurm", str(run_file), "--run-dir", "/shared/my runs/1")
    result = subprocess.run(
        [lint, "--severity=warning", "-"], input=script, text=True, capture_output=True, check=False
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("signalled", [False, True])
def test_the_sbatch_script_stops_the_launcher_before_the_limit_and_requeues(
    run_file, capsys, tmp_path, signalled: bool
) -> None:
    """Slurm's commands are stand-ins: `srun` runs what it is given, `ray` what follows `--`."""
    tools = tmp_path / "bin"
    tools.mkdir()
    launcher = 'trap "exit 143" TERM; touch started; for i in $(seq 600); do sleep 0.1; done' if signalled else "exit 0"
    for name, body in {
        "scontrol": 'if [ "$1" = requeue ]; then touch requeued; else echo here; fi',
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "hostname": "echo 127.0.0.1",
        "ray": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
        "atropos-grpo-run": f'echo "$@" > words; {launcher}',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o700)
    path = tmp_path / "job.sh"
    path.write_text(rendered(capsys, "slurm", str(run_file), "--run-dir", str(tmp_path / "run")))
    variables = {"SLURM_JOB_ID": "71", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here"}
    job = subprocess.Popen(["bash", str(path)], cwd=tmp_path, env={"PATH": f"{tools}:/usr/bin:/bin", **variables})
    if signalled:
        subprocess.run(["bash", "-c", "until [ -e started ]; do sleep 0.1; done"], cwd=tmp_path, check=True, timeout=60)
        job.send_signal(10)
    assert job.wait(60) == (143 if signalled else 0)
    assert (tmp_path / "requeued").exists() == signalled
    assert "--placement-address 127.0.0.1:20071 " in (tmp_path / "words").read_text()


def test_the_manifests_have_the_keys_of_a_ray_job_and_the_run_file_without_comments(run_file, capsys) -> None:
    text = rendered(capsys, "kuberay", str(run_file), "--image", "registry.local/atropos:1")
    assert "secret" not in text
    config, job = yaml.safe_load_all(text)
    assert (config["kind"], job["kind"], job["apiVersion"]) == ("ConfigMap", "RayJob", "ray.io/v1")
    assert yaml.safe_load(config["data"]["run.yaml"]) == yaml.safe_load(TEXT)
    spec = job["spec"]
    assert {"entrypoint", "shutdownAfterJobFinishes", "activeDeadlineSeconds", "rayClusterSpec"} <= {*spec}
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 1
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > GRACE_SECONDS
        (container,) = pod["containers"]
        assert container["image"] == "registry.local/atropos:1"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert "kill -TERM" in head["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert spec["entrypoint"] == "bash /atropos/config/launch.sh"
    assert f"--stop-grace {GRACE_SECONDS}" in config["data"]["launch.sh"]
    assert '--placement-address "$POD_IP:6379"' in config["data"]["launch.sh"]


@pytest.mark.parametrize("nodes", ["1", "3"])
def test_the_job_is_valid_by_kuberay_s_own_schema(run_file, capsys, nodes: str) -> None:
    _, job = yaml.safe_load_all(rendered(capsys, "kuberay", str(run_file), "--image", "i", "--nodes", nodes))
    schema = Draft7Validator(json.loads(RAY_JOB_SCHEMA.read_text()))
    assert [error.message for error in schema.iter_errors(job)] == []
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    pod["terminationGraceSeconds"] = pod.pop("terminationGracePeriodSeconds")
    (error,) = schema.iter_errors(job)
    assert "'terminationGraceSeconds' was unexpected" in error.message


def test_the_manifests_are_valid_by_kubernetes_own_schemas(run_file, capsys) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    config, _ = yaml.safe_load_all(rendered(capsys, "kuberay", str(run_file), "--image", "i"))
    for manifest in (config, *yaml.safe_load_all(BROKER.read_text())):
        validate(manifest, "1.37", strict=True)


STAND_IN = """#!/bin/bash
trap "touch ended; exit 143" TERM
while sleep 0.1; do :; done
"""


@pytest.mark.parametrize("quoted", [shlex.join, subprocess.list2cmdline])
def test_the_end_of_a_pod_stops_the_launcher_however_the_job_s_words_are_quoted(
    run_file, capsys, tmp_path, quoted
) -> None:
    """Ray hands the entrypoint to a shell; older releases quote it as Windows does, and `$$` is the shell's."""
    text = rendered(capsys, "kuberay", str(run_file), "--image", "i")
    text = text.replace("/atropos/config", str(tmp_path)).replace("/tmp/atropos-launcher.pid", f"{tmp_path}/pid")
    config, job = yaml.safe_load_all(text)
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    (tmp_path / "launch.sh").write_text(config["data"]["launch.sh"])
    (tmp_path / "atropos-grpo-run").write_text(STAND_IN)
    (tmp_path / "atropos-grpo-run").chmod(0o700)
    words = quoted(shlex.split(job["spec"]["entrypoint"]))
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "POD_IP": "10.0.0.1"}
    with subprocess.Popen(words, shell=True, cwd=tmp_path, env=variables) as submitted:
        launcher = tmp_path / "pid"
        assert wait_until(lambda: launcher.exists() and launcher.read_text().endswith("\n"), 20)
        subprocess.run(head["lifecycle"]["preStop"]["exec"]["command"], check=True, timeout=60)
        assert submitted.wait(20) == 143
    assert (tmp_path / "ended").exists()


def test_the_end_of_another_pod_waits_for_the_programs_that_the_launcher_stops(run_file, capsys) -> None:
    """All pods of a cluster are told to end at once, and the trainer writes a checkpoint first."""
    _, job = yaml.safe_load_all(rendered(capsys, "kuberay", str(run_file), "--image", "i"))
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    *shell, code = workers["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert f"{MARK_VARIABLE}= " in code
    code = code.replace(f"{MARK_VARIABLE}=", f"{MARK_VARIABLE}=of-this-test")
    with subprocess.Popen(["sleep", "600"], env={MARK_VARIABLE: "of-this-test.1."}) as program:
        waits = subprocess.Popen([*shell, code])
        with pytest.raises(subprocess.TimeoutExpired):
            waits.wait(2)
        program.kill()
    assert waits.wait(20) == 0


@pytest.mark.parametrize("name", ["Mein Lauf_1", "訓練", "a" * 38 + "-" + "b" * 20, "-"])
def test_the_name_of_a_job_is_one_that_kubernetes_takes(run_file, capsys, name: str) -> None:
    run_file.write_text(TEXT.replace("My Run_1", f"'{name}'"))
    for manifest in yaml.safe_load_all(rendered(capsys, "kuberay", str(run_file), "--image", "i")):
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", manifest["metadata"]["name"])


@pytest.mark.parametrize(
    "pair", [("訓練", "評価"), ("a" * 60 + "1", "a" * 60 + "2"), ("My Run_1", "my-run-1"), ("a.b", "a-b"), ("!!", "?")]
)
def test_runs_whose_names_kubernetes_does_not_take_do_not_share_a_directory(run_file, capsys, pair) -> None:
    """Both were `/atropos/runs/atropos`, so that the second run went on from the checkpoints of the first."""
    scripts = set()
    for name in pair:
        run_file.write_text(TEXT.replace("My Run_1", f"'{name}'"))
        config, _ = yaml.safe_load_all(rendered(capsys, "kuberay", str(run_file), "--image", "i"))
        scripts.add(config["data"]["launch.sh"])
    assert len(scripts) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("slurm", "RUN", "--run-dir", ""), "--run-dir: an empty text is not a path"),
        (("kuberay", "RUN"), "--image is needed"),
        (("slum", "RUN"), "did you mean slurm"),
        (("slurm",), "name the scheduler and the run file"),
        (("slurm", "RUN", "--nodes", "0"), "--nodes"),
        (("slurm", "RUN", "--image", "i"), "--image is for atropos render kuberay; leave it out"),
        (("kuberay", "RUN", "--image", "i", "--time-limit", "2:00:00"), "--time-limit is for atropos render slurm"),
    ],
)
def test_what_is_missing_is_one_line(run_file, words, told) -> None:
    with pytest.raises(ConfigError, match=told):
        main.run(["render", *(str(run_file) if word == "RUN" else word for word in words)])


def test_a_secret_of_the_run_file_is_not_copied_into_a_manifest(run_file) -> None:
    run_file.write_text(TEXT + "api: {token: abcdefghijklmnop}\n")
    with pytest.raises(ConfigError, match=r"api\.token is a secret, and a ConfigMap is none"):
        main.run(["render", "kuberay", str(run_file), "--image", "i"])
