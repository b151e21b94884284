"""The teacher of a distillation run: its settings, and the vLLM server that the launcher starts for it.

`teacher:` and `--teacher.*` are settings of environments that take a teacher, as `openai:` is of every environment.
With `model_name` and without `base_url`, the launcher starts a server of that model for the run. Two settings are the
launcher's own and no environment sees them: `gpu`, and `vllm`, which holds the server's settings (`--teacher.vllm.*`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atropos_api.common.cliconfig import ConfigError, nearest
from atropos_api.common.secrets import redact
from example_trainer.processes.ports import LOOPBACK

if TYPE_CHECKING:
    from example_trainer.launcher.run_file import RunConfig, RunSettings

TEACHER, TEACHER_SERVER = "teacher", "teacher.vllm"
LAUNCHERS_OWN = ("gpu", "vllm")
REACHED_BY = ("base_url", "model_name")
"""Settings that say how the teacher is reached; one of them is needed."""
MODEL_FLAG = "--teacher.model_name"


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTeacher:
    """A teacher whose server the launcher starts."""

    model_name: str
    gpu: str | None
    """The GPU of its server; None: it shares the one of the policy's server."""
    vllm: Mapping[str, Any]
    """Settings of its server from the files."""
    has_own_share: bool
    """True if its share of the GPU's memory is given, or the whole GPU is its own."""

    def gpu_beside(self, vllm_gpu: int | None) -> str | None:
        """Return the GPU of its server when the policy's server has `vllm_gpu`; None: the first visible one."""
        return self.gpu if self.gpu is not None or vllm_gpu is None else str(vllm_gpu)


def own_teacher(settings: RunSettings) -> OwnTeacher | None:
    """Return the teacher whose server the launcher has to start; None if there is none."""
    given = settings.section(TEACHER)
    if "model_name" not in given or "base_url" in given:
        return None
    vllm, gpu = given.get("vllm") or {}, given.get("gpu")
    share = {"gpu_memory_utilization"} & {*vllm, *settings.flags[TEACHER_SERVER].values}
    return OwnTeacher(
        model_name=str(given["model_name"]),
        gpu=None if gpu is None else str(gpu),
        vllm=vllm,
        has_own_share=bool(share) or gpu is not None,
    )


def for_environment(given: Mapping[str, Any], *, port: int | None, model: str) -> dict[str, Any]:
    """Return an environment's settings of a teacher that the launcher serves at this port."""
    ours = {"base_url": f"http://{LOOPBACK}:{port}/v1", "model_name": model, "tokenizer_name": model, "api_key": "none"}
    kept = {name: value for name, value in given.items() if name not in {*LAUNCHERS_OWN, "model_name"}}
    return {"server_type": "vllm", **ours, **kept}


def check_teacher(settings: RunSettings) -> None:
    """Raise `ConfigError` if a teacher is described that cannot be reached, or from which nothing would be learnt."""
    files, flags = settings.teachers, settings.flags[TEACHER].values
    given = files if isinstance(files, list) else {**files, **flags}
    server_flags = settings.flags[TEACHER_SERVER].values
    entries = [entry.teacher for entry in settings.environments if entry.teacher is not None]
    if not (given or server_flags or entries):
        return
    _refuse_unlearnt(settings.trainer)
    if not entries:
        raise ConfigError("teacher: no environment of this launch takes it; name one with --env distill_server.py")
    if isinstance(given, list):
        if flags or server_flags:
            raise ConfigError("--teacher: teacher is a list of servers in the file; set it there")
        return
    if not isinstance(given.get("vllm") or {}, Mapping):
        shown = json.dumps(redact(given["vllm"]), default=str)
        raise ConfigError(f"teacher.vllm takes settings of the teacher's server, got {shown}")
    own = sorted({*given} & {*LAUNCHERS_OWN})
    if "base_url" in given and (own or server_flags):
        what = own[0] if own else f"vllm.{next(iter(server_flags))}"
        raise ConfigError(
            f"teacher.{what}: the launcher starts no teacher, because teacher.base_url {given['base_url']} names one; "
            "leave one of the two out"
        )
    without = [entry for entry in entries if isinstance(entry, Mapping) and "base_url" not in entry]
    if without and not {*REACHED_BY} & {*given}:
        names = {**given, **without[0]}
        misspelt = (f" ({TEACHER}.{name}{proposal})" for name in names if (proposal := nearest(name, REACHED_BY)))
        raise ConfigError(
            f"teacher: it has no server{next(misspelt, '')}; name one with --teacher.base_url, or the model of a new "
            f"one with {MODEL_FLAG}"
        )
    if "model_name" in given and "base_url" not in given:
        _refuse_second(without, files)


def _refuse_second(entries: Sequence[Mapping[str, Any]], common: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an environment that describes a teacher's server of its own: one is started for all."""
    for entry in entries:
        for name in ("model_name", *LAUNCHERS_OWN):
            if entry.get(name) != common.get(name):
                raise ConfigError(
                    f"environments: teacher.{name} {json.dumps(redact(entry.get(name)), default=str)}: the launcher "
                    "starts one teacher, that of the section teacher:; start this one by itself, and name it there "
                    "with base_url"
                )


def _refuse_unlearnt(config: RunConfig) -> None:
    if "distill" not in config.model_fields_set:
        raise ConfigError(
            "teacher: the trainer would not learn from its logprobs; add --distill forward_kl (or reverse_kl)"
        )


def unused_distillation(settings: RunSettings) -> list[str]:
    """Return a sentence if the trainer is to learn from a teacher, and no environment of this launch has one."""
    form, environments = settings.trainer.distill, settings.environments
    if form == "none" or not environments or any(entry.teacher is not None for entry in environments):
        return []
    text = (
        f"--distill {form} has no effect unless groups carry distill_token_ids: no environment of this launch has a "
        f"teacher; name one with {MODEL_FLAG} and --env distill_server.py"
    )
    return [text]
