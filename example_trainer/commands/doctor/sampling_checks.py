"""Checks of what is sampled: the environments, their sampling parameters, and the server options behind logprobs.

The trainer recomputes the logprob of every sampled token from the model's whole distribution at the group's
temperature. Whatever makes the sampler draw from another distribution, or report another number, is found here.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any

from atropos_api.common.sampling_values import LEAST_TEMPERATURE, WHOLE_DISTRIBUTION
from example_trainer.commands.doctor.findings import Finding, error, warning
from example_trainer.commands.doctor.requested_run import Environment, RequestedRun
from example_trainer.launcher.environment_check import FACTS_SECONDS
from example_trainer.launcher.environment_settings import fillable_batches
from example_trainer.launcher.teacher import TEACHER_SERVER
from example_trainer.serving.config import ServerConfig

LOGPROBS_MODE = ServerConfig.model_fields["logprobs_mode"].default

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1, None),
    **{name: (value, None) for name, value in WHOLE_DISTRIBUTION.items()},
    "top_k": (0, -1, 50, None),
}
"""Defaults of sampling in a generation_config.json, with the values that change nothing; 50 is transformers' default
of top_k, which vLLM leaves out."""

INEXACT = {
    "kv_cache_dtype": "the keys and values are rounded",
    "logits_processors": "they change the logits",
}
"""Options of vLLM under which sampled logprobs differ from those that the trainer recomputes."""

KEYS_OF_VLLM = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py")
CLOSE = 0.85
"""Likeness of two option names from which on one is taken for a misspelling of the other."""

MAX_TEMPERATURE = 2.0


def check_environments(requested: RequestedRun) -> Iterator[Finding]:
    """Check that each environment can be imported, takes its settings, and finds its packages and data."""
    for environment in requested.environments:
        facts, name = environment.facts, environment.name
        if facts is None:
            text = f"{name} was not examined: importing it took over {FACTS_SECONDS:.0f} s, ended the process, or "
            text += "showed no environment class"
            yield Finding("note", "environment", text)
            continue
        packages = facts["missing_packages"]
        if packages:
            text = f"{name} needs {', '.join(packages)}, not installed here"
            yield error("environment", text, f"pip install {' '.join(each.replace('_', '-') for each in packages)}")
        elif facts["error"]:
            text, _, advice = str(facts["error"]).partition("; ")
            yield error("environment", f"{name}: {text}", advice or "correct the file, or the section env of the run")
        for missing in facts["missing_files"]:
            setting, _, path = missing.partition(" ")
            yield error("environment", f"env.{setting} of {name}: {path} does not exist", "correct the path")
        for server in facts["servers"]:
            if server["server_type"] == "openai" and not (facts["lenient"] or _allows(environment, "estimated_tokens")):
                text = f"openai.server_type of {name} is openai, which returns no tokens and logprobs to train on"
                yield error("environment", text, "set openai.server_type to vllm")


def check_batch(requested: RequestedRun) -> Iterator[Finding]:
    """Check that groups of each environment's size can fill a batch: the broker never splits a group."""
    sizes = [(each.name, _group_size(each)) for each in requested.environments]
    known = {size for _, size in sizes if size}
    if not known or not all(size for _, size in sizes):
        return
    batch = requested.config.sequences_per_batch
    fillable = fillable_batches(known, batch)
    for name, size in sizes:
        if size and batch - size not in fillable:
            text = f"groups of env.group_size {size} ({name}) never fill a batch of {batch} sequences "
            text += "(batch_size x gradient_accumulation_steps)"
            yield error("batch", text, "take a group size that divides the batch, or change the batch")


def _group_size(environment: Environment) -> int | None:
    """Return the size of all groups of an environment; None if it is not known or changes by a schedule."""
    env = (environment.facts or {}).get("env", {})
    return None if env.get("group_size_schedule") else env.get("group_size")


def check_sampling(requested: RequestedRun) -> Iterator[Finding]:
    """Check the temperature and the other sampling parameters that rollouts are seen to give."""
    for environment in requested.environments:
        facts = environment.facts or {}
        for given in facts.get("temperatures", ()):
            yield from _check_temperature(environment, given, lenient=facts["lenient"])
        for given in facts.get("truncating", ()):
            text = f"{environment.name} samples with {given['name']} {given['value']!r} ({given['where']}), and the "
            text += "trainer recomputes the model's whole distribution"
            if _allows(environment, "truncated_sampling"):
                if facts["maskable"] and _set(environment, "sampling_mask_limit"):
                    continue
                advice = "leave it out if you can: env.allow_truncated_sampling only weighs and caps the difference"
                exact = "; env.sampling_mask_limit 64 makes the ratio exact where at most 64 tokens could be drawn"
                yield warning("sampling", text, advice + exact * facts["maskable"])
            else:
                advice = "leave it out, or set env.allow_truncated_sampling to train with importance weights"
                yield error("sampling", text, advice)


def _allows(environment: Environment, what: str) -> bool:
    return _set(environment, f"allow_{what}")


def _set(environment: Environment, name: str) -> bool:
    return bool((environment.facts or {}).get("env", {}).get(name))


def _check_temperature(environment: Environment, given: Mapping[str, Any], *, lenient: bool) -> Iterator[Finding]:
    value, shown = given["value"], f"{environment.name} samples at temperature {given['value']} ({given['where']})"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if value <= 0:
        yield error("temperature", f"{shown}: greedy answers are all alike and have no logprobs", "set it to 1")
    elif value < LEAST_TEMPERATURE:
        text = f"{shown}: vLLM samples at {LEAST_TEMPERATURE:g} instead of less, so it is refused for training"
        yield error("temperature", text, "set it to 1")
    elif value > MAX_TEMPERATURE:
        yield warning("temperature", f"{shown}, where most tokens are noise", "set it to 1")
    elif value != 1 and lenient:
        text = f"{shown}; groups of Atropos environments name no temperature, so the trainer assumes 1"
        yield error("temperature", text, 'sample at 1, or give each group generation_params={"temperature": ...}')


def check_logprobs(requested: RequestedRun) -> Iterator[Finding]:
    """Check that the server reports the logprobs that the trainer recomputes."""
    server, extras = requested.server, requested.server_extras
    if server is None:
        return
    if server.logprobs_mode != LOGPROBS_MODE:
        text = f"vllm.logprobs_mode {server.logprobs_mode}: the trainer recomputes logprobs at the sampling temperature"
        yield error("logprobs", text, f"leave it out; the default is {LOGPROBS_MODE}")
    for name, reason in INEXACT.items():
        if extras.get(name) not in (None, "auto", False, [], {}):
            text = f"vllm.{name} {extras[name]}: {reason}, so sampled logprobs are not those of the trained weights"
            yield warning("logprobs", text, "leave it out, or watch alignment/diff_abs_mean from the first step on")
    if server.head_dtype == "auto" and requested.config.dtype != "float32":
        text = (
            "vllm.head_dtype auto: the server rounds its logits, the trainer does not, so logprobs agree less closely"
        )
        yield warning("logprobs", text, "leave it out (--vllm-head-dtype too); the default is float32")
    dtype = requested.config.dtype
    if dtype != "auto" and server.dtype not in ("auto", dtype):
        text = f"vllm.dtype {server.dtype} is not trainer.dtype {dtype}: "
        advice = "leave vllm.dtype out: the server takes the trainer's"
        if requested.config.shares_memory:
            yield warning("logprobs", text + "the trainer computes in the dtype of the server's tensors", advice)
        else:
            yield error("logprobs", text + "server and trainer would round differently", advice)


def check_teacher(requested: RequestedRun) -> Iterator[Finding]:
    """Check that the teacher's server can score what is sampled, and reports the logprobs of its own distribution."""
    server = requested.teacher_server
    if server is None:
        return
    if server.logprobs_mode not in (LOGPROBS_MODE, "raw_logprobs"):
        text = f"{TEACHER_SERVER}.logprobs_mode {server.logprobs_mode}: its values are logits, not logprobs"
        yield error("logprobs", text, f"leave it out; the default is {LOGPROBS_MODE}")
    longest = server.max_model_len
    if longest is not None and longest < requested.config.seq_len:
        text = f"{TEACHER_SERVER}.max_model_len {longest} is shorter than trainer.seq_len {requested.config.seq_len}"
        text += ": longer rollouts are trained without the teacher"
        yield error("lengths", text, f"leave {TEACHER_SERVER}.max_model_len out")


def check_defaults(requested: RequestedRun) -> Iterator[Finding]:
    """Check for sampling defaults that a server applies to requests which do not name a value."""
    if requested.server is None:
        return  # a stock vLLM is told every value, by environments and by the trainer's proof
    own = _as_mapping(requested.server_extras.get("override_generation_config"))
    for name, value in _changing(own):
        text = f"vllm.override_generation_config sets {name} {value} for requests to /v1 that do not name it"
        yield warning("sampling", text, "leave it out: such a request is not sampled from the trained policy")
    if requested.model is None or requested.server.generation_config != "auto":
        return
    for name, value in _changing(requested.model.generation_config):
        text = f"generation_config.json sets {name} {value}; vllm.generation_config auto applies it where a request "
        yield warning("sampling", text + "names none", "leave it out")


def _changing(defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, neutral in NEUTRAL.items():
        if name in defaults and defaults[name] not in neutral:
            yield name, defaults[name]


def _as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a JSON object that a flag holds as text, or a file as a mapping; empty for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, Mapping) else {}


def check_server_keys(requested: RequestedRun) -> Iterator[Finding]:
    """Check for misspelt options of a server: those that neither it nor the installed vLLM has."""
    spec = util.find_spec("vllm")
    keys = [("vllm", key) for key in requested.server_extras] + [
        (TEACHER_SERVER, key) for key in requested.teacher_extras
    ]
    if spec is None or spec.origin is None or not keys:
        return
    folder = Path(spec.origin).parent
    texts = [path.read_text(encoding="utf-8") for name in KEYS_OF_VLLM if (path := folder / name).is_file()]
    if not texts:
        return
    words = set(" ".join(texts).replace("-", "_").translate(_SEPARATORS).split())
    for section, key in keys:
        name = key.partition(".")[0].removeprefix("no_")
        likely = difflib.get_close_matches(name, [*ServerConfig.model_fields, *words], n=1, cutoff=CLOSE)
        if name not in words:
            guess = f"did you mean {likely[0]}? " if likely else ""
            text = f"{section}.{key}: neither our server nor the installed vLLM has this option"
            yield error("server", text, f"{guess}correct the name, or leave it out")


_SEPARATORS = {ord(character): " " for character in "()[]{}.,:;=\"'`*|<>/\\#"}
