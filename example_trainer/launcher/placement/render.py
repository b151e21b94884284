"""The files by which Slurm and Kubernetes start Ray and the launcher on it: an sbatch script, a RayJob.

Both have the launcher write its process id, so that a signal before the time limit, or the end of a pod, reaches the
launcher alone: it stops the programs in order, and the trainer writes a checkpoint. The next start resumes from it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from example_trainer.launcher.placement.roles import Role
from example_trainer.processes.tree import MARK_VARIABLE

GRACE_SECONDS = 60
"""Time in which the programs of a run that is stopped may end: the launcher's `--stop-grace`."""
BEFORE_LIMIT_SECONDS = 4 * GRACE_SECONDS
"""Time between the signal and the job's limit, or the end of a pod: the trainer ends its step within the grace."""
MOUNT = "/atropos"
PORT = 6379

_SBATCH = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
{gpu_line}#SBATCH --time={time_limit}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{before_limit}
#SBATCH --output={name}-%j.log

set -euo pipefail

run_dir={run_dir}
pid_file="$run_dir/launcher.pid"
mkdir -p "$run_dir"
rm -f "$pid_file"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --all-ip-addresses | awk '{{ print $1 }}')
address="$head:$((20000 + SLURM_JOB_ID % 10000))"

# The batch script runs on the first node, as the launcher does. Only the launcher gets the signal: it stops the others.
limit_is_near=false
stop() {{
    kill -TERM "$(cat "$pid_file")" || true
}}
trap 'limit_is_near=true; stop' USR1
trap stop TERM

srun --ntasks-per-node=1 --kill-on-bad-exit=0 \\
    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus={cpus}{num_gpus} -- \\
    bash -c 'echo $$ > "$0"; exec "$@"' "$pid_file" \\
    atropos-grpo-run {flags} \\
    --placement ray --placement-address "$address" --run-dir "$run_dir" --resume auto --stop-grace {grace} &
step=$!

while true; do # a trap ends a wait early
    code=0
    wait "$step" || code=$?
    kill -0 "$step" 2> /dev/null || break
done
if $limit_is_near && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


class _Text(str):
    """A text of several lines, which is written as a block."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """The equal nodes that a run asks for."""

    nodes: int
    cpus: int
    gpus: int

    @classmethod
    def for_roles(cls, roles: Iterable[Role], *, nodes: int, cpus: int | None, gpus: int) -> Machines:
        """Return nodes for these roles; without a number of CPUs the roles' are divided, with one for the launcher."""
        wanted = sum(role.cpus * role.seats for role in roles)
        return cls(nodes=nodes, cpus=cpus or math.ceil(wanted / nodes) + 1, gpus=gpus)


def render_slurm(machines: Machines, *, name: str, flags: Sequence[str], run_dir: Path, time_limit: str) -> str:
    """Return an sbatch script that starts Ray on each node and the launcher with these flags on the first."""
    return _SBATCH.format(
        name=name,
        nodes=machines.nodes,
        cpus=machines.cpus,
        gpu_line=f"#SBATCH --gpus-per-node={machines.gpus}\n" if machines.gpus else "",
        num_gpus=f" --num-gpus={machines.gpus}" if machines.gpus else "",
        time_limit=time_limit,
        before_limit=BEFORE_LIMIT_SECONDS,
        run_dir=shlex.quote(str(run_dir)),
        flags=shlex.join(flags),
        grace=GRACE_SECONDS,
    )


def render_kuberay(
    machines: Machines, *, name: str, run_file: Mapping[str, Any], image: str, claim: str, deadline_seconds: int
) -> str:
    """Return a ConfigMap with the run file's settings and the job's script, and a RayJob that runs it on its head pod.

    `claim` is a volume that all pods may write. The settings come from the parsed file, so no comment is copied.
    """
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {
            "run.yaml": _Text(yaml.safe_dump(dict(run_file), sort_keys=False)),
            "launch.sh": _Text(_launch_script(name)),
        },
    }
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            # A script: releases of Ray differ in how they quote the words of an entrypoint for the head's shell.
            "entrypoint": f"bash {MOUNT}/config/launch.sh",
            "submissionMode": "K8sJobMode",
            "shutdownAfterJobFinishes": True,
            "activeDeadlineSeconds": deadline_seconds,
            "backoffLimit": 3,
            "rayClusterSpec": _cluster(machines, name, image, claim),
        },
    }
    return yaml.dump_all([config, job], Dumper=_Dumper, sort_keys=False)


def _launch_script(name: str) -> str:
    words = f"--config {MOUNT}/config/run.yaml --placement ray --run-dir {MOUNT}/runs/{name} --resume auto"
    return (
        f"echo $$ > {_PID_FILE}\n"
        f'exec atropos-grpo-run {words} --placement-address "$POD_IP:{PORT}" --stop-grace {GRACE_SECONDS}\n'
    )


_PID_FILE = "/tmp/atropos-launcher.pid"  # noqa: S108 - inside the head's container
_LEAVE = f"while grep -qs {MARK_VARIABLE}= /proc/[0-9]*/environ; do sleep 1; done"
"""The end of a pod without the launcher waits for its programs: a cluster's pods are told to end at the same time."""
_STOP = f'pid=$(cat {_PID_FILE}) && kill -TERM "$pid" && while kill -0 "$pid"; do sleep 1; done; true'


def _cluster(machines: Machines, name: str, image: str, claim: str) -> dict[str, Any]:
    head = _pod(machines, name, image, claim, at_end=_STOP)
    reached = {"dashboard-host": "0.0.0.0"}  # noqa: S104 - inside its pod; the submitter of the job calls it
    cluster: dict[str, Any] = {"headGroupSpec": {"rayStartParams": reached, "template": head}}
    if machines.nodes > 1:
        workers = {
            "groupName": "nodes",
            "replicas": machines.nodes - 1,
            "minReplicas": machines.nodes - 1,
            "maxReplicas": machines.nodes - 1,
            "rayStartParams": {},
            "template": _pod(machines, name, image, claim, at_end=_LEAVE),
        }
        cluster["workerGroupSpecs"] = [workers]
    return cluster


def _pod(machines: Machines, name: str, image: str, claim: str, *, at_end: str) -> dict[str, Any]:
    resources: dict[str, Any] = {"cpu": str(machines.cpus)}
    if machines.gpus:
        resources["nvidia.com/gpu"] = str(machines.gpus)
    container = {
        "name": "ray",
        "image": image,
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "lifecycle": {"preStop": {"exec": {"command": ["bash", "-c", at_end]}}},
        "volumeMounts": [
            {"name": "runs", "mountPath": f"{MOUNT}/runs"},
            {"name": "config", "mountPath": f"{MOUNT}/config", "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108 - vLLM's workers and Ray use it
        ],
    }
    return {
        "spec": {
            "terminationGracePeriodSeconds": BEFORE_LIMIT_SECONDS,
            "containers": [container],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
                {"name": "config", "configMap": {"name": name}},
                {"name": "memory", "emptyDir": {"medium": "Memory"}},
            ],
        }
    }
