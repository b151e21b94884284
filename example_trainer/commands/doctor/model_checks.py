"""Checks of the model: its files and family, the layers and modules to train, lengths and RoPE, and the output head."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any

from example_trainer.commands.doctor.findings import Finding, error, warning
from example_trainer.commands.doctor.model_files import EMBEDDING, ModelFiles
from example_trainer.commands.doctor.requested_run import RequestedRun, not_here
from example_trainer.errors import BadLayerFilter, CannotServe, ModelNotFound
from example_trainer.launcher.base_model import require_model
from example_trainer.memory.shapes import ADAPTER_PRESETS
from example_trainer.modeling.layer_filter import block_index
from example_trainer.options.layer_indices import parse_layer_indices
from example_trainer.options.model import LOGIT_CHANGES
from example_trainer.processes.gpus import serves_from_gpu
from example_trainer.serving.startup import check_adapters, check_publishable, check_shareable, check_sharing
from example_trainer.weight_protocol.checkpoint_files import StoredTensor

COMPARED_BYTES = 1 << 20
"""Bytes of head and embedding that are compared; two matrices that agree so far are taken as equal."""

HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer)\.weight$")
SERVER_ROPE = ("rope_scaling", "rope_theta", "rope_parameters", "hf_overrides")


def check_files(requested: RequestedRun) -> Iterator[Finding]:
    """Check that configuration and weights of the model and of the run's own teacher are there and complete."""
    for model, setting in ((requested.model, "model_name"), (requested.teacher, "teacher.model_name")):
        if model is not None:
            yield from _check_files_of(model, setting)


def _check_files_of(model: ModelFiles, setting: str) -> Iterator[Finding]:
    missing = [path.name for path in model.weight_files if not path.is_file()]
    again = "copy or download the model again"
    nothing = not model.weight_files and not model.has_other_weights
    if model.hub_name is not None and (missing or nothing or not model.has_tokenizer):
        yield not_here(model.hub_name, f"{model.folder} in the local cache lacks weights or tokenizer", setting)
    elif missing:
        text = (
            f"{model.folder} lacks {len(missing)} of {len(model.weight_files)} weight files: {', '.join(missing[:3])}"
        )
        yield error("model files", text, again)
    elif nothing:
        yield error("model files", f"{model.folder} holds no weights: no *.safetensors file", again)
    _ = (model.config, model.generation_config, model.tokenizer_config, model.tensors)
    for fault in dict.fromkeys(model.faults):
        yield error("model files", f"{model.folder}: {fault}", again)


def check_other_models(requested: RequestedRun) -> Iterator[Finding]:
    """Check that the reference model and the checkpoint to resume from are there, where paths are given."""
    config = requested.config
    try:
        if config.ref_model is not None:
            require_model(config.ref_model, "ref_model")
    except ModelNotFound as missing:
        yield error("model", str(missing), "correct the path, or leave it out")
    if config.resume not in (None, "auto") and not Path(str(config.resume)).exists():
        advice = "name a checkpoint-N directory, or auto for the newest one of the run directory"
        yield error("model", f"resume {config.resume}: no such checkpoint", advice)


def check_family(requested: RequestedRun) -> Iterator[Finding]:
    """Check that transformers, vLLM and the weight sync mode can handle this kind of model."""
    model, config = requested.model, requested.config
    if model is None or not model.config:
        return
    kinds, family = model.config.get("architectures") or [], str(model.config.get("model_type", ""))
    kind = str(kinds[0]) if kinds else ""
    other = "take a causal language model that both load, for instance of the Llama, Qwen or Mistral families"
    own_code = "auto_map" in model.config
    if not own_code and _is_unknown("transformers", "models/auto/modeling_auto.py", _CAUSAL, f'("{family}", '):
        yield error("model family", f"transformers has no causal language model of model_type {family!r}", other)
    if kind and _is_unknown("vllm", "model_executor/models/registry.py", None, f'"{kind}":'):
        text = f"vLLM has no model of its own for the architecture {kind!r} and would run transformers' code"
        yield warning("model family", text, other)
    for name, neutral in LOGIT_CHANGES:
        if (value := model.text_config.get(name, neutral)) not in (None, neutral):
            text = f"the model's {name} is {value}; the trainer's logprobs do not apply it"
            yield error("model family", text, "take a model that leaves its logits unchanged")
    if config.shares_memory:
        yield from _refusals(lambda: check_shareable(model.config))


_CAUSAL = re.compile(r"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = .*?\n\)", re.DOTALL)


def _is_unknown(package: str, file: str, part: re.Pattern[str] | None, entry: str) -> bool:
    """Return True if the installed package's table lacks the entry; False if it has it or there is no table to read."""
    spec = util.find_spec(package)
    path = Path(spec.origin).parent / file if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    found = part.search(text) if part is not None else None
    table = text if part is None else found[0] if found else ""
    return bool(table) and entry not in table


def _refusals(check: Any) -> Iterator[Finding]:
    """Return the server's own refusal as a finding."""
    try:
        check()
    except CannotServe as refused:
        text, _, advice = str(refused).rpartition("; ")
        yield error("server", text or str(refused), advice)


def check_server_start(requested: RequestedRun) -> Iterator[Finding]:
    """Check the server's options as it would at its start."""
    server = requested.server
    if server is None:
        return
    if requested.config.shares_memory:
        yield from _refusals(lambda: check_sharing(server, os.environ))
    yield from _refusals(lambda: check_adapters(server, on_gpu=serves_from_gpu(os.environ)))
    yield from _refusals(lambda: check_publishable(server, os.environ))


def check_layers(requested: RequestedRun) -> Iterator[Finding]:
    """Check that the layers and modules to train exist in the model."""
    model, config = requested.model, requested.config
    if model is None:
        return
    count = model.text_config.get("num_hidden_layers") or model.text_config.get("n_layer")
    flags = ("train_layer_indices", "lora_layer_indices")
    for flag, text in ((name, getattr(config, name)) for name in flags):
        if text is not None and isinstance(count, int):
            try:
                parse_layer_indices(text, count, flag=flag)
            except BadLayerFilter as refused:
                cause, _, valid = str(refused).partition("; ")
                yield error("layers", cause, f"{valid}; `atropos doctor --layers {model.folder}` lists examples")
    modules = _linear_modules(model)
    wanted = (config.lora_target_modules or []) if config.trains_adapter else []
    for target in wanted:
        if modules and target not in ADAPTER_PRESETS and not any(f".{path}".endswith(f".{target}") for path in modules):
            names = ", ".join(sorted({path.rpartition(".")[2] for path in modules}))
            where = " inside its layers" if any(target in name for name in model.tensors) else ""
            text = f"lora_target_modules {target}: the model has no such linear module{where}"
            yield error("layers", text, f"name some of {names}, or a preset: {', '.join(ADAPTER_PRESETS)}")


def _linear_modules(model: ModelFiles) -> list[str]:
    """Return the paths of the modules inside the layers whose stored weight is a matrix."""
    return [
        name.removesuffix(".weight")
        for name, tensor in model.tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 2 and block_index(name) is not None
    ]


def check_lengths(requested: RequestedRun) -> Iterator[Finding]:
    """Check the lengths of trainer, server and environments against each other and against the model's positions."""
    longest, asks = requested.max_model_len, requested.config.seq_len
    if requested.model is not None and (limit := _position_limit(requested.model.text_config)) is not None:
        if longest > limit and not os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
            text = f"max_model_len {longest} is more than the {limit} positions of the model"
            advice = f"set trainer.max_model_len to at most {limit}"
            yield error("lengths", text, advice + _scaling_hint(requested.model.text_config))
        if asks > limit:
            text = f"seq_len {asks} is more than the {limit} positions of the model, so its end cannot be computed well"
            yield error("lengths", text, f"set trainer.seq_len to at most {limit}")
    for environment in requested.environments:
        answer = (environment.facts or {}).get("env", {}).get("max_token_length")
        if not isinstance(answer, int):
            continue
        if answer > longest:
            text = f"env.max_token_length {answer} of {environment.name} is more than max_model_len {longest}"
            advice = f"lower it below {longest}, so that prompt and answer fit, or raise trainer.max_model_len"
            yield error("lengths", text, advice)
        elif answer > asks:
            text = f"env.max_token_length {answer} of {environment.name} is more than seq_len {asks}"
            advice = f"lower it below {asks}, or raise trainer.seq_len: longer sequences are sampled and not trained on"
            yield warning("lengths", text, advice)


def _position_limit(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence that vLLM computes for a configuration; None if it names none.

    Linear RoPE multiplies the length by its factor; other types name the scaled length themselves. Under the type
    dynamic vLLM accepts that product too, but its table of rotations ends at the unscaled length.
    """
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    scaling = rope_scaling(config)
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor")
    scaled = kind == "linear" and isinstance(factor, int | float) and "gemma3" not in str(config.get("model_type"))
    return int(positions * factor) if scaled and factor else positions


def rope_scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the RoPE settings of a configuration, under either of the two names that transformers has used."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found if isinstance(found, Mapping) else {}


def _scaling_hint(config: Mapping[str, Any]) -> str:
    return "" if rope_scaling(config).get("factor") else ", or take a checkpoint with RoPE scaling"


def check_rope(requested: RequestedRun) -> Iterator[Finding]:
    """Check that trainer and server rotate positions in the same way, and that the scaling's own numbers agree."""
    for name in SERVER_ROPE:
        if name in requested.server_extras:
            text = f"vllm.{name} {requested.server_extras[name]} changes the model on the server and not in the trainer"
            yield error("rope", text, "write it into the model's config.json, which both read, and leave it out here")
    if requested.model is None:
        return
    config = requested.model.text_config
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        differing = [key for key in old if key in new and old[key] != new[key]]
        if differing:
            key = differing[0]
            text = f"config.json has rope_scaling.{key} {old[key]} and rope_parameters.{key} {new[key]}"
            yield error("rope", text, "keep one of the two: transformers and vLLM may read different ones")
    scaling = rope_scaling(config)
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    positions = config.get("max_position_embeddings")
    # Llama 3.1 declares 131072 positions with a factor of 8 over 8192: only YaRN's factor gives the longest length.
    is_yarn = (scaling.get("rope_type") or scaling.get("type")) == "yarn"
    if is_yarn and isinstance(factor, int | float) and isinstance(original, int) and isinstance(positions, int):
        reached = int(factor * original)
        if reached < positions:
            text = f"RoPE scaling by {factor} of {original} positions reaches {reached}, config.json says {positions}"
            yield warning("rope", text, "correct factor or max_position_embeddings in config.json")


def check_head(requested: RequestedRun) -> Iterator[Finding]:
    """Check that a tied output head is stored as one, and one that is not tied is stored at all."""
    model = requested.model
    if model is None or not model.tensors or not all(path.is_file() for path in model.weight_files):
        return
    head = next((tensor for name, tensor in model.tensors.items() if HEAD.search(name)), None)
    embedding = next((tensor for name, tensor in model.tensors.items() if EMBEDDING.search(name)), None)
    tied = model.text_config.get("tie_word_embeddings")
    if tied is False and head is None and embedding is not None:
        text = "config.json says tie_word_embeddings false, and the weights have no lm_head.weight"
        advice = "set tie_word_embeddings to true in config.json, or get the missing weight file"
        yield error("output head", f"{text}, so the head would be random", advice)
    if tied and head is not None and embedding is not None and not _agree(head, embedding):
        text = "config.json says tie_word_embeddings true, and the weights have an lm_head.weight of its own"
        advice = "set tie_word_embeddings to false in config.json, or remove lm_head.weight from the weights"
        yield error("output head", f"{text}, so the server ties the two and the trainer does not", advice)


def _agree(left: StoredTensor, right: StoredTensor) -> bool:
    return left.shape == right.shape and left.read(COMPARED_BYTES) == right.read(COMPARED_BYTES)
