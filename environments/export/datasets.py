"""Collected groups as data sets: the best rollouts for supervised fine-tuning, better and worse pairs for DPO.

    atropos-sft-gen sft.jsonl --groups data/gsm8k.jsonl --tokenizer MODEL
    atropos-dpo-gen dpo.jsonl --api-url http://localhost:8000 --tokenizer MODEL

Prompt and completion are told apart by the masks, so a prompt that is repeated in the answer costs no text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from atropos_api.common.cliconfig import ConfigError, load_config, run_cli
from environments.export.groups import groups_from_broker, read_groups, trained_text


class ExportOptions(BaseModel):
    """What both data sets can be told, by the names of Atropos' tools."""

    model_config = ConfigDict(extra="forbid")

    groups: Path | None = Field(None, description="file of groups to read; without it they come from the broker")
    api_url: str = Field("http://localhost:8000", description="broker to take groups from, in a trainer's place")
    group_size: int = Field(2, ge=1, description="rollouts a group, to ask the broker for batches of whole groups")
    tasks_per_step: int = Field(64, ge=1, description="groups a batch from the broker")
    max_token_len: int = Field(2048, ge=1, description="longest sequence, told to the broker")
    tokenizer: str = Field(
        "NousResearch/DeepHermes-3-Llama-3-8B-Preview", description="name or folder; not needed for messages"
    )
    save_messages: bool = Field(False, description="save messages instead of text, where the groups have them")
    num_seqs_to_save: int = Field(100, ge=1, description="stop after so many lines")
    allow_negative_scores: bool = Field(False, description="keep rollouts whose score is 0 or less")
    append_to_previous: bool = Field(False, description="append to the file, if there is one")


class SftOptions(ExportOptions):
    """Which rollouts are good enough to imitate."""

    save_top_n_per_group: int = Field(3, ge=1, description="at most so many of a group, the best first")
    minimum_score_diff_max_min: float = Field(0.0, description="least distance from the worst of the group")


class DpoOptions(ExportOptions):
    """Which pairs differ enough."""

    save_n_pairs_per_group: int = Field(3, ge=1, description="at most so many pairs of a group")
    minimum_score_diff_max_min: float = Field(0.5, description="least difference within a pair")


OptionsT = TypeVar("OptionsT", bound=ExportOptions)
Lines = Callable[[Mapping[str, Any], OptionsT, Any], Iterator[dict[str, Any]]]


def sft_lines(group: Mapping[str, Any], options: SftOptions, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The best rollouts of a group: prefix and completion, or messages, with their score."""
    scores = group["scores"]
    worst = min(scores)
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    chosen = [
        index
        for index in ranked
        if (scores[index] > 0 or options.allow_negative_scores)
        and scores[index] - worst >= options.minimum_score_diff_max_min
    ]
    for index in chosen[: options.save_top_n_per_group]:
        if tokenizer is None:
            yield {"messages": _messages(group)[index], "score": scores[index]}
        else:
            prefix, completion = trained_text(tokenizer, group["tokens"][index], group["masks"][index])
            yield {"prefix": prefix, "completion": completion, "score": scores[index]}


def dpo_lines(group: Mapping[str, Any], options: DpoOptions, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Pairs of a group with the same prompt, each rollout in one pair at most: the best against the worst first."""
    scores = group["scores"]
    prompts = [tuple(_prompt(group, index)) for index in range(len(scores))]
    left = sorted(range(len(scores)), key=lambda index: -scores[index])
    for _ in range(options.save_n_pairs_per_group):
        pair = _widest_pair(left, scores, prompts, options)
        if pair is None:
            return
        better, worse = pair
        left = [index for index in left if index not in pair]
        yield _pair_line(group, better, worse, tokenizer)


def export(options: OptionsT, path: Path, lines: Lines[OptionsT]) -> int:
    """Write the lines of all groups until there are enough; how many there are."""
    tokenizer = None
    if not options.save_messages:
        from environments.sdk.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(options.tokenizer)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("a" if options.append_to_previous else "w", encoding="utf-8") as file:
        for group in _groups(options):
            for line in lines(group, options, tokenizer):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                count += 1
                if count == options.num_seqs_to_save:
                    return count
    return count


def run_sft(argv: Sequence[str]) -> int:
    return _run(SftOptions, argv, sft_lines, "atropos-sft-gen", "the best rollouts as data for fine-tuning")


def run_dpo(argv: Sequence[str]) -> int:
    return _run(DpoOptions, argv, dpo_lines, "atropos-dpo-gen", "better and worse rollouts as pairs")


def main_sft() -> NoReturn:
    run_cli(run_sft)


def main_dpo() -> NoReturn:
    run_cli(run_dpo)


def _run(model: type[OptionsT], argv: Sequence[str], lines: Lines[OptionsT], program: str, description: str) -> int:
    wants_help = bool({"-h", "--help"} & set(argv))
    if not wants_help and (not argv or argv[0].startswith("-")):
        raise ConfigError(f"the file to write is missing: {program} FILE [flags]")
    flags = argv if wants_help else argv[1:]
    options = load_config(model, flags, prog=f"{program} FILE", description=description)
    count = export(options, Path(argv[0]), lines)
    sys.stdout.write(f"{count} lines in {argv[0]}\n")
    return 0


def _groups(options: ExportOptions) -> Iterator[dict[str, Any]]:
    if options.groups is not None:
        return read_groups(options.groups)
    return groups_from_broker(
        options.api_url,
        group_size=options.group_size,
        tasks_per_step=options.tasks_per_step,
        max_token_length=options.max_token_len,
    )


def _messages(group: Mapping[str, Any]) -> list[Any]:
    found = group.get("messages")
    if not found:
        raise ConfigError("--save-messages: a group has no messages; collect with --env.include_messages true")
    return list(found)


def _prompt(group: Mapping[str, Any], index: int) -> list[int]:
    mask = group["masks"][index]
    start = next((at for at, value in enumerate(mask) if value != -100), len(mask))
    return list(group["tokens"][index][:start])


def _widest_pair(
    left: Sequence[int], scores: Sequence[float], prompts: Sequence[tuple[int, ...]], options: DpoOptions
) -> tuple[int, int] | None:
    """Of the rollouts left the best one for which a worse one of the same prompt is left, and the worst such."""
    for better in left:
        if scores[better] <= 0 and not options.allow_negative_scores:
            return None
        for worse in reversed(left):
            apart = scores[better] - scores[worse]
            if apart <= 0 or apart < options.minimum_score_diff_max_min:
                break
            if prompts[better] == prompts[worse]:
                return better, worse
    return None


def _pair_line(group: Mapping[str, Any], better: int, worse: int, tokenizer: Any) -> dict[str, Any]:
    score = group["scores"][better] - group["scores"][worse]
    if tokenizer is None:
        chats = _messages(group)
        return {"pos": chats[better], "neg": chats[worse], "score": score}
    prefix, pos = trained_text(tokenizer, group["tokens"][better], group["masks"][better])
    _, neg = trained_text(tokenizer, group["tokens"][worse], group["masks"][worse])
    return {"prefix": prefix, "pos": pos, "neg": neg, "score": score}
