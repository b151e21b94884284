"""The verb `atropos render`: the file by which Slurm or Kubernetes starts a run on Ray."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from atropos_api.common.cliconfig import ConfigError, load_config, nearest
from atropos_api.common.files import named_path
from atropos_api.common.option_flags import flag
from atropos_api.common.secrets import redact
from atropos_api.common.yaml_files import read_yaml
from example_trainer.launcher.endpoints import differing
from example_trainer.launcher.placement.choice import check_fits, roles_of
from example_trainer.launcher.placement.render import Machines, render_kuberay, render_slurm
from example_trainer.launcher.run_dir import as_plain_data
from example_trainer.launcher.run_file import RunSettings, find_run_file, read_settings

OF_ONE_KIND = {"slurm": ("run_dir", "time_limit"), "kuberay": ("image", "claim", "deadline")}
"""The schedulers, each with the options that only its file has."""
KINDS = tuple(OF_ONE_KIND)
DESCRIPTION = "Print an sbatch script, or a ConfigMap and a RayJob for KubeRay, that runs a run file on Ray."

LONGEST_NAME = 47
"""The most characters of a RayJob's name: KubeRay adds to it what names its cluster, and its pods."""

_TO_BE_TOLD = "head:6379"
"""Stands for the address of the head, which is known once the job runs."""


class RenderOptions(BaseModel):
    """These are the options of `atropos render`."""

    model_config = ConfigDict(extra="forbid")

    nodes: int | None = Field(None, ge=1, description="Number of nodes; unset: that of the file's layout, or 1.")
    gpus_per_node: int | None = Field(None, ge=0, description="GPUs of a node; unset: that of the layout, or 0.")
    cpus_per_node: int | None = Field(None, ge=1, description="CPUs of a node; unset: those of the roles, divided.")
    run_dir: Path | None = Field(None, description="Run directory that all nodes share (slurm); unset: the file's.")
    time_limit: str = Field("24:00:00", description="Slurm's limit, in its own form.", pattern=r"^[0-9:-]+$")
    image: str | None = Field(
        None, description="Container image with this package, the extra [ray] and vLLM (kuberay)."
    )
    claim: str = Field("atropos-runs", description="PersistentVolumeClaim that all pods may write (kuberay).")
    deadline: int = Field(86_400, ge=1, description="Seconds after which the RayJob is ended (kuberay).")

    _find_directory = field_validator("run_dir", mode="before")(named_path)


def run(argv: Sequence[str]) -> int:
    """Print the file for the scheduler in the first argument, made from the run file in the second."""
    prog = "atropos render slurm|kuberay RUNFILE"
    if argv and argv[0] not in {*KINDS, "-h", "--help"}:
        raise ConfigError(f"unknown scheduler {argv[0]!r}{nearest(argv[0], KINDS)} ({', '.join(KINDS)})")
    asks_help = not {"-h", "--help"}.isdisjoint(argv)
    if not asks_help and (len(argv) < 2 or argv[1].startswith("-")):
        raise ConfigError(f"name the scheduler and the run file: {prog}")
    options = load_config(RenderOptions, ["--help"] if asks_help else argv[2:], prog=prog, description=DESCRIPTION)
    for kind, names in OF_ONE_KIND.items():
        for name in names if kind != argv[0] else ():
            if name in options.model_fields_set:
                raise ConfigError(f"{flag(name)} is for atropos render {kind}; leave it out")
    path = Path(find_run_file(argv[1])).absolute()
    settings = read_settings(["--config", str(path), "--placement", "ray", "--placement-address", _TO_BE_TOLD])
    check_fits(settings)
    sys.stdout.write(_render(argv[0], path, settings, options))
    return 0


def _render(kind: str, path: Path, settings: RunSettings, options: RenderOptions) -> str:
    layout = settings.layout
    gpus = options.gpus_per_node if options.gpus_per_node is not None else layout.n_gpus_per_node if layout else 0
    machines = Machines.for_roles(
        roles_of(settings, has_gpus=gpus > 0),
        nodes=options.nodes or (layout.n_nodes if layout else 1),
        cpus=options.cpus_per_node,
        gpus=gpus,
    )
    name = _job_name(settings.trainer.name)
    if kind == "slurm":
        run_dir = (options.run_dir or settings.trainer.run_dir or Path("runs") / settings.trainer.name).absolute()
        return render_slurm(
            machines, name=name, flags=["--config", str(path)], run_dir=run_dir, time_limit=options.time_limit
        )
    if options.image is None:
        raise ConfigError("--image is needed: the container image of the pods, with this package and its extra [ray]")
    return render_kuberay(
        machines,
        name=name,
        run_file=_public_content(path),
        image=options.image,
        claim=options.claim,
        deadline_seconds=options.deadline,
    )


def _job_name(run_name: str) -> str:
    """Return a name that Kubernetes takes: letters, digits and inner hyphens, of at most `LONGEST_NAME` characters.

    One that differs from the run's ends in a digest: it names the run directory, and another run would resume there.
    """
    name = f"atropos-{re.sub(r'[^a-z0-9]+', '-', run_name.lower())}".rstrip("-")
    if name == f"atropos-{run_name}" and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(run_name.encode()).hexdigest()[:6]
    return f"{name[: LONGEST_NAME - 7].rstrip('-')}-{digest}"


def _public_content(path: Path) -> dict[str, Any]:
    """Return what the run file holds, without comments; raise `ConfigError` if a secret is in it."""
    content: dict[str, Any] = as_plain_data(read_yaml(path) or {})
    if secret := differing(content, redact(content)):
        section, held = next(iter(secret.items()))
        key = f"{section}.{next(iter(held))}" if isinstance(held, dict) else section
        raise ConfigError(
            f"{path}: {key} is a secret, and a ConfigMap is none; take it out of the file, and give it to the pods "
            "by a Secret (docs/howto/ray.md)"
        )
    return content
