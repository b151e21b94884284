"""The environments of a launch: each entry's settings, from the run file, the flags and the preset."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atropos_api.common.cliconfig import ConfigError, merge
from atropos_api.common.files import expand_home
from atropos_api.common.identity import server_stem
from environments.commands import environment_names
from example_trainer.errors import TrainerError
from example_trainer.launcher.teacher import TEACHER
from example_trainer.options.presets import PRESETS, Preset
from example_trainer.processes.tree import PACKAGE_ROOT

SOURCES = ("data_path", "val_data_path", "dataset_name")
OF_ONE_ENVIRONMENT = (
    "metrics_port", "session_port", "data_path_to_save_groups", "data_dir_to_save_evals", "wandb_name",
)  # fmt: skip
"""Ports, files and the name that two environments cannot have in common."""


class EnvironmentNotFound(TrainerError):
    """Raised if an environment server is no file, module or environment that can be found from here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSettings:
    """The settings of one environment server to start."""

    name: str
    server: str
    env: Mapping[str, Any]
    openai: Any
    teacher: Any = None
    """The settings of its teacher, or a list of them; None: it has none."""
    written_for: str | None = None
    """The server in the file, if a flag names another one: that one then ignores settings that it does not have."""


def read_environments(
    sections: Mapping[str, Any], flags: Mapping[str, Mapping[str, Any]], preset: str | None, *, may_choose: bool
) -> tuple[tuple[EnvironmentSettings, ...], tuple[str, ...]]:
    """Return the environments that files, flags or the preset ask for, and remarks on the preset's settings for them.

    `flags` has each section's flags. `may_choose` is True if the preset's environment is started where none is named.
    """
    chosen = PRESETS[preset] if preset else None
    listed = sections.get("environments")
    if listed is None:
        wanted = sections.get("env") or flags["env"] or (may_choose and chosen is not None and chosen.server)
        has_teacher = sections.get(TEACHER) or flags[TEACHER]
        only = {"env": sections.get("env") or {}, "openai": sections.get("openai") or {}}
        listed = [only | ({TEACHER: {}} if has_teacher else {})] if wanted else []
    _refuse_shared(flags["env"], len(listed))
    entries: list[EnvironmentSettings] = []
    remarks: list[str] = [] if listed or chosen is None else _unused(chosen, preset)
    remarks += [] if sections.get("environments") is None else _overlooked(sections)
    for number, entry in enumerate(listed, 1):
        name = f"environment-{number}" if len(listed) > 1 else "environment"
        server, in_file = _server_of(entry, flags["env"], chosen if may_choose else None, name=name)
        env = {key: value for key, value in (entry.get("env") or {}).items() if key != "server"}
        if chosen is not None:
            defaults, remarked = _of_preset(chosen, server, {*env, *flags["env"]}, about=f"--preset {preset}")
            env, remarks = defaults | env, [*remarks, *remarked]
        entries.append(
            EnvironmentSettings(
                name=name,
                server=server,
                env=env,
                openai=entry.get("openai") or {},
                teacher=_teacher_of(entry, sections.get(TEACHER) or {}),
                written_for=in_file if in_file is not None and server_stem(in_file) != server_stem(server) else None,
            )
        )
    return tuple(_with_own_names(entries)), tuple(remarks)


def _with_own_names(entries: Sequence[EnvironmentSettings]) -> list[EnvironmentSettings]:
    """Give a name of its own to each further environment of one server, because the broker tells them apart by name.

    If two had the same name, it would lease the items of both as if one process were restarted again and again.
    """
    named: list[EnvironmentSettings] = []
    given = [str(entry.env["wandb_name"]) for entry in entries if entry.env.get("wandb_name")]
    if twice := next((name for name in given if given.count(name) > 1), None):
        raise ConfigError(f"environments: env.wandb_name {twice} is given twice; each environment needs its own")
    for number, entry in enumerate(entries):
        stem = server_stem(entry.server)
        before = sum(server_stem(other.server) == stem for other in entries[:number])
        own = {"wandb_name": f"{stem.removesuffix('_server')}-{before + 1}"} if before else {}
        named.append(
            replace(entry, env=own | {key: value for key, value in entry.env.items() if value or key not in own})
        )
    return named


def _overlooked(sections: Mapping[str, Any]) -> list[str]:
    """Return a remark on the sections that describe the one environment of a file, beside a list of environments."""
    given = [name for name in ("env", "openai") if sections.get(name)]
    return [f"{' and '.join(given)}: no effect, since each entry of environments has its own"] if given else []


def _refuse_shared(flags: Mapping[str, Any], count: int) -> None:
    """Raise `ConfigError` for a flag that gives several environments one port or one file."""
    for key in OF_ONE_ENVIRONMENT if count > 1 else ():
        if key in flags and str(flags[key]) not in {"0", "None"}:
            raise ConfigError(
                f"--env.{key} {flags[key]}: the run file has {count} environments, and each needs its own; set it in "
                "the env of each entry of environments:"
            )


def _server_of(
    entry: Mapping[str, Any], flags: Mapping[str, Any], preset: Preset | None, *, name: str
) -> tuple[str, str | None]:
    """Return the environment's server, and the one that the file names, if it names one."""
    in_file = entry.get("file") or (entry.get("env") or {}).get("server")
    server = flags.get("server") or in_file or (preset.server if preset is not None else None)
    if isinstance(server, list):
        given = " ".join(map(str, server))
        raise ConfigError(f"--env.server takes one name, got {given}; a run file is named by --config FILE")
    if not isinstance(server, str):
        asked = ", ".join({**(entry.get("env") or {}), **flags})
        settings = f" for the settings {asked} (--env.*, env:)" if asked else ""
        raise ConfigError(
            f"{name} names no environment server{settings}; name its file or module: --env dataset_server.py, for "
            "instance, or env.server in the run file"
        )
    return server, in_file if isinstance(in_file, str) else None


def _of_preset(preset: Preset, server: str, given: Container[str], *, about: str) -> tuple[dict[str, Any], list[str]]:
    """Return the preset's settings for this environment, with remarks on unfit settings and on its questions."""
    settings = dict(preset.environment)
    if preset.server is None:
        return settings, []
    if server_stem(server) != server_stem(preset.server):
        unfit = ", ".join(preset.server_settings)
        return settings, [f"{about}: its {unfit} and questions are those of {preset.server}, and {server} has its own"]
    settings |= preset.server_settings
    if any(name in given for name in SOURCES):
        return settings, []
    training, evaluation = preset.data_paths
    if not Path(training).is_file():
        instead = f"there is no {training}; --data-path FILE and --val-data-path FILE name others"
        return settings | {"dataset_name": preset.dataset_name}, [
            f"{about}: the questions are those of {preset.dataset_name} on the Hugging Face hub, because {instead}"
        ]
    settings["data_path"] = training
    if not Path(evaluation).is_file():
        return settings, [f"{about}: the questions are {training}; some are held out, for there is no {evaluation}"]
    settings["val_data_path"] = evaluation
    return settings, [f"{about}: the questions are {training}, for evaluation {evaluation}"]


def _unused(preset: Preset, name: str | None) -> list[str]:
    """Return a remark on the preset's settings for an environment that this launch does not start."""
    settings = {**preset.environment, **preset.server_settings}
    if not settings:
        return []
    flags = " ".join(f"--env.{key} {json.dumps(value).strip(chr(34))}" for key, value in settings.items())
    where = f"{preset.server} " if preset.server else ""
    return [f"--preset {name}: no environment is started here, so give yours these settings: {where}{flags}"]


def _teacher_of(entry: Mapping[str, Any], common: Any) -> Any:
    """Return the teacher of an entry that has a `teacher` key: its own settings over the file's `teacher:` section."""
    if TEACHER not in entry:
        return None
    own = entry[TEACHER] or {}
    return merge(common, own) if isinstance(own, Mapping) and isinstance(common, Mapping) else own or common


def program_of(server: str) -> tuple[str, ...]:
    """Return the Python arguments that start an environment server, which is named by its file (`arithmetic_server.py`
    is ours), by the name under which an installed package offers it, or as a module.
    """
    if server.endswith(".py"):
        for path in (expand_home(server), PACKAGE_ROOT / "environments" / server):
            if path.is_file():
                return (str(path.absolute()),)
        where = "no such file here or among the environments of this package"
        raise EnvironmentNotFound(f"--env.server {server}: {where}{_proposal(server)}")
    if server in environment_names():
        return ("-m", "environments.commands", server)
    if not _is_module(server):
        what = "no file (its name would end in .py), module or installed environment of this name"
        raise EnvironmentNotFound(f"--env.server {server}: {what}{_proposal(server)}")
    return ("-m", server)


def _is_module(name: str) -> bool:
    """Return True if the first part of a module's name is found; the module itself is not imported here."""
    first = name.partition(".")[0]
    if not first or "/" in first:
        return False
    # `python -m` looks into the working directory too.
    return any(path.exists() for path in (Path(first), Path(f"{first}.py"))) or find_spec(first) is not None


def _proposal(server: str) -> str:
    """Return `, did you mean X?` for a name that is close to an environment's, `_server` and suffix left out or not."""
    files = (PACKAGE_ROOT / "environments").glob("*_server*.py")
    known = {name: name for name in environment_names()}
    known |= {stem: path.name for path in files for stem in (path.stem, path.stem.replace("_server", ""))}
    found = get_close_matches(server_stem(server), known, n=1)
    return f", did you mean {known[found[0]]}?" if found else ""


def fillable_batches(group_sizes: Iterable[int], largest: int) -> frozenset[int]:
    """Return the numbers of sequences up to `largest` that whole groups of these sizes add up to."""
    sizes, found = tuple(group_sizes), {0}
    for total in range(1, largest + 1):
        if any(total - size in found for size in sizes):
            found.add(total)
    return frozenset(found)


def require_fillable(
    environments: Sequence[EnvironmentSettings], flags: Mapping[str, Any], batch: int, *, steps: int, resumes: bool
) -> None:
    """Raise `ConfigError` if the group sizes that files and flags give to every environment never fill a batch.

    A schedule may go on after the run's number of steps; if it `resumes` a run, only the last size is sure to be used.
    """
    given = [_sizes_by_step({**entry.env, **flags}) for entry in environments]
    starts = sorted({step for sizes in given for step in sizes if step < steps})
    for start in starts[-1:] if resumes else starts:
        known = {sizes[max(step for step in sizes if step <= start)] for sizes in given}
        # A size that is not known is the environment's own: `atropos doctor` asks for it.
        if known and known.isdisjoint({0, None}) and batch not in fillable_batches(filter(None, known), batch):
            shown = " and ".join(str(size) for size in sorted(filter(None, known)))
            by = f"--env.group_size_schedule from step {start} on" if start else "--env.group_size"
            raise ConfigError(
                f"groups of {shown} ({by}) never fill a batch of {batch} sequences, so that no step would begin; take "
                "a group size that divides --batch-size x --gradient-accumulation-steps (or --rollout-batch-size), or "
                "another batch"
            )


def _sizes_by_step(env: Mapping[str, Any]) -> dict[int, int | None]:
    """Return an environment's group sizes by the step from which they hold; None for one that is not known here.

    The environment refuses a schedule that it cannot read by itself.
    """
    first = str(env.get("group_size", ""))
    sizes: dict[int, int | None] = {0: int(first) if first.isdecimal() else None}
    for pair in filter(None, str(env.get("group_size_schedule") or "").split(",")):
        step, _, size = (part.strip() for part in pair.partition(":"))
        if not (step.isdecimal() and size.isdecimal()):
            return {0: None}
        sizes[int(step)] = int(size)
    return sizes


def with_secrets(servers: Any, secret: Mapping[str, Any]) -> Any:
    """Merge the secret flags into an environment's inference server; raise `ConfigError` if there are several."""
    if not secret:
        return servers
    if isinstance(servers, list):
        raise ConfigError(
            f"--openai.{next(iter(secret))}: openai is a list of {len(servers)} servers in the file; set it there"
        )
    return merge(servers, secret)
