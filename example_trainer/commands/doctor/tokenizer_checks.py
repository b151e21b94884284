"""Checks of the tokenizer, the chat template and the end of a turn.

A tokenizer that does not belong to the model, or a turn that does not end with an end token, breaks no program: the run
goes on for hours and learns from the wrong text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from example_trainer.commands.doctor.findings import Finding, error, warning
from example_trainer.commands.doctor.model_files import ModelFiles, token_ids
from example_trainer.commands.doctor.requested_run import Environment, RequestedRun
from example_trainer.launcher.teacher import TEACHER

PROBE = "What is 12 + 30? It is 42.\n  def f(x): return x\n\tÄpfel, 数学 🙂"
"""A text that tokenizers of different families split differently."""


def check_tokenizer(requested: RequestedRun) -> Iterator[Finding]:
    """Check that the tokenizer is there, can be loaded and fits the model's embedding."""
    model = requested.model
    if model is None:
        return
    if not model.has_tokenizer and model.hub_name is None:
        text = f"{model.folder} has no tokenizer.json or other tokenizer"
        yield error("tokenizer", text, "copy the tokenizer's files into it from the model that it was made from")
    elif model.tokenizer is None and model.tokenizer_fault:
        text = f"{model.folder / 'tokenizer.json'} cannot be loaded: {model.tokenizer_fault}"
        yield error("tokenizer", text, "copy the file again from the model's source; it may be cut off")
    rows = model.embedding_rows
    if model.vocabulary and rows is not None:
        token, last = max(model.vocabulary.items(), key=lambda item: item[1])
        if last >= rows:
            text = f"the tokenizer has the token {token!r} with id {last}; the model's embedding has {rows} rows"
            advice = "use the tokenizer that belongs to the model, or resize the embedding before training"
            yield error("tokenizer", text, advice)


def check_other_tokenizers(requested: RequestedRun) -> Iterator[Finding]:
    """Check that environments and server use the model's tokenizer, where they name one of their own."""
    model = requested.model
    if model is None:
        return
    named = [
        (f"env.tokenizer_name of {each.name}", name) for each in requested.environments if (name := _named_by(each))
    ]
    if requested.server is not None and requested.server.tokenizer is not None:
        named.append(("vllm.tokenizer", requested.server.tokenizer))
    for setting, name in named:
        if name in {str(model.folder), requested.config.model_name}:
            continue
        advice = f"leave {setting.partition(' ')[0]} out: the model's own is used"
        if not Path(name).is_dir():
            if name.startswith(("/", ".", "~")):
                yield error("tokenizer", f"{setting} is {name}, and there is no such directory", advice)
            continue
        if difference := _difference(ModelFiles(Path(name)), model):
            yield error("tokenizer", f"{setting} {name} is not the tokenizer of the model: {difference}", advice)


def check_teachers_vocabulary(requested: RequestedRun) -> Iterator[Finding]:
    """Check that the run's own teacher has the model's vocabulary, which its environment compares at the start."""
    model, teacher = requested.model, requested.teacher
    if model is None or teacher is None or "tokenizer_name" in requested.settings.section(TEACHER):
        return
    if model.vocabulary and teacher.vocabulary and model.vocabulary != teacher.vocabulary:
        text = (
            f"teacher.model_name {teacher.folder} has another vocabulary than the model: {_difference(teacher, model)}"
        )
        yield error("tokenizer", text, "take a teacher of the model's family")


def _named_by(environment: Environment) -> str | None:
    facts = environment.facts or {}
    own = facts.get("env", {}).get("tokenizer_name")
    served = [server.get("tokenizer_name") for server in facts.get("servers", ())]
    return own or next((name for name in served if name not in {None, "none"}), None)


def _difference(other: ModelFiles, model: ModelFiles) -> str | None:
    """Return the first difference of two tokenizers in words; None if they agree, or one cannot be compared."""
    if other.tokenizer is None or model.tokenizer is None:
        return f"{other.folder} has no tokenizer.json that can be loaded" if model.tokenizer is not None else None
    if len(other.vocabulary) != len(model.vocabulary):
        return f"it has {len(other.vocabulary)} tokens, the model's {len(model.vocabulary)}"
    moved = next((token for token, index in model.vocabulary.items() if other.vocabulary.get(token) != index), None)
    if moved is not None:
        return f"{moved!r} is {model.vocabulary[moved]} in the model's and {other.vocabulary.get(moved)} in this one"
    split = other.tokenizer.encode(PROBE).ids != model.tokenizer.encode(PROBE).ids
    return f"it splits {PROBE[:16]!r}... into other tokens" if split else None


def check_chat_template(requested: RequestedRun) -> Iterator[Finding]:
    """Check that there is a chat template that works, if an environment chats."""
    model, chatting = requested.model, _chatting(requested)
    if model is None or not chatting or not model.has_tokenizer:
        return
    if model.chat_template is None:
        text = f"{chatting[0].name} chats with the model, and {model.folder} has no chat template"
        advice = (
            "a base model: take its instruct version, add a chat_template.jinja, or use an environment that writes the "
            "prompt itself (math_server_zero.py, dataset_server.py with env.prompt_form text)"
        )
        yield error("chat template", text, advice)
        return
    facts = chatting[0].facts or {}
    advice = "correct chat_template.jinja, or copy it again from the model's source"
    if failure := facts["template_error"]:
        yield error("chat template", f"the chat template of {model.folder} fails: {failure}", advice)


def _chatting(requested: RequestedRun) -> list[Environment]:
    return [each for each in requested.environments if each.facts and each.facts["chats"]]


def check_end_of_turn(requested: RequestedRun) -> Iterator[Finding]:
    """Check that answers end: the end token exists, both programs know it, and the chat template ends turns with it."""
    model = requested.model
    if model is None or not model.vocabulary:
        return
    eos = model.special_token("eos")
    described = token_ids(model.text_config.get("eos_token_id"))
    generated = token_ids(model.generation_config.get("eos_token_id")) or described
    if eos is None and generated:  # a tokenizer class may bring its own, as GPT-2's does
        yield from _check_turn(requested, model, ends=generated)
        return
    if eos is None or eos not in model.vocabulary:
        shown = "names no eos_token" if eos is None else f"has eos_token {eos!r}, which is not in its vocabulary"
        text = f"{model.folder / 'tokenizer_config.json'} {shown}, so no answer ends by itself"
        yield error("end of turn", text, "set eos_token to the token that ends an answer, <|im_end|> for instance")
        return
    index = model.vocabulary[eos]
    if described | generated and index not in described | generated:
        shown = ", ".join(map(str, sorted(described | generated)))
        text = f"the tokenizer's eos_token {eos!r} is {index}; config.json and generation_config.json end at {shown}"
        advice = f"set eos_token_id to {index} in generation_config.json, or correct tokenizer_config.json"
        yield error("end of turn", text, advice)
    yield from _check_turn(requested, model, ends=generated | {index})


def _check_turn(requested: RequestedRun, model: ModelFiles, *, ends: frozenset[int]) -> Iterator[Finding]:
    """Check the token that the chat template writes after an answer."""
    chatting = _chatting(requested)
    written = next((each.facts["after_answer"] for each in chatting if each.facts), None)
    if model.tokenizer is None or written is None:
        return
    after = written.strip()
    special = [token.content for token in model.tokenizer.get_added_tokens_decoder().values() if token.special]
    pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
    match = re.match(pattern, after)
    last = match[0] if match and match[0] else None
    by_text = {text for each in chatting if each.facts for text in each.facts["stops"]}
    if last is None:
        text = f"the chat template writes no special token after an answer, but {after[:20]!r}"
        yield warning("end of turn", text, "the model ends its turn only if it has learnt another end token")
    elif model.vocabulary[last] not in ends and last not in by_text:
        names = ", ".join(sorted(map(repr, filter(None, map(model.tokenizer.id_to_token, ends)))))
        text = f"the chat template ends a turn with {last!r} ({model.vocabulary[last]}); the server stops at {names}"
        advice = f"add {model.vocabulary[last]} to eos_token_id in generation_config.json, or set eos_token to {last!r}"
        yield error("end of turn", text, advice)
