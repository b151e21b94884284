"""Exports collected groups: data sets for supervised fine-tuning (SFT) and DPO, and a local web page to read them.

    atropos-sft-gen sft.jsonl --groups data/gsm8k.jsonl --tokenizer MODEL
    atropos-dpo-gen dpo.jsonl --api-url http://localhost:8000 --tokenizer MODEL

SFT lines are the best rollouts, DPO lines are pairs of a better and a worse one. The argument is the file to write,
as `PATH.part` until it is complete; an existing file is not overwritten by default. Prompt and completion are
separated by the masks, so no text is lost where the answer repeats the prompt.

    view-run data/gsm8k.jsonl
    view-run --api-url http://localhost:8000

`view-run` shows the latest groups of a growing file or of a broker. It answers requests from this machine only.
"""

from __future__ import annotations

import json
import math
import os
import sys
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from atropos_api.common.cliconfig import ConfigError, load_config, run_cli
from atropos_api.common.files import OutputFile, named_path
from atropos_api.common.identity import Address
from atropos_api.common.secrets import SECRET, TokenSource
from atropos_api.wire.groups import ABSENT
from environments.sdk.group_files import (
    GroupsUnreadable,
    groups_from_broker,
    read_groups,
    render,
    trained_text,
    trained_turns,
)


class ExportOptions(BaseModel):
    """Options of both data sets; their names are those of Atropos' tools."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    groups: Path | None = Field(None, description="File of groups to read, as `process` writes them.")
    api_url: Address | None = Field(
        None,
        description="Broker to fetch groups from instead of a file, as the trainer of a new run.",
    )
    token: str | None = Field(
        None, description="Bearer token of that broker; default: $ATROPOS_TOKEN.", json_schema_extra=SECRET
    )
    token_file: Path | None = Field(None, description="File that holds that token; default: $ATROPOS_TOKEN_FILE.")
    group_size: int = Field(2, ge=1, description="Rollouts a group, to ask the broker for batches of whole groups.")
    tasks_per_step: int = Field(64, ge=1, description="Groups a batch from the broker.")
    max_token_len: int = Field(2048, ge=1, description="Longest sequence, sent to the broker.")
    tokenizer: str | None = Field(None, description="Name or folder of the model's tokenizer; not needed for messages.")
    save_messages: bool = Field(False, description="Save messages instead of text, where the groups have them.")
    num_seqs_to_save: int = Field(100, ge=1, description="Lines to write at most.")
    allow_negative_scores: bool = Field(False, description="Keep rollouts whose score is 0 or less.")
    append_to_previous: bool = Field(False, description="Append to the file, if there is one.")
    overwrite: bool = Field(False, description="Replace the file, if there is one.")

    _find_groups = field_validator("groups", mode="before")(named_path)


class SftOptions(ExportOptions):
    """These options select the rollouts to imitate."""

    save_top_n_per_group: int = Field(3, ge=1, description="Rollouts of a group at most, the best first.")
    minimum_score_diff_max_min: float = Field(0.0, description="Least distance from the worst of the group.")


class DpoOptions(ExportOptions):
    """These options select the pairs that differ enough."""

    save_n_pairs_per_group: int = Field(3, ge=1, description="Pairs of a group at most.")
    minimum_score_diff_max_min: float = Field(0.5, description="Least difference within a pair.")


OptionsT = TypeVar("OptionsT", bound=ExportOptions)

Lines = Callable[[Mapping[str, Any], OptionsT, Any], Iterator[dict[str, Any]]]


def sft_lines(group: Mapping[str, Any], options: SftOptions, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the best rollouts of a group: prefix and completion of each turn, or messages, with their score.

    One completion of all turns would hold what tools and users said in between, which nothing should learn to say.
    """
    scores = group["scores"]
    ranked = sorted(_rollouts(group), key=lambda index: -scores[index])
    worst = min((scores[index] for index in ranked), default=0.0)
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
            tokens, masks = _sequences(group)
            for prefix, completion in trained_turns(tokenizer, tokens[index], masks[index]):
                yield {"prefix": prefix, "completion": completion, "score": scores[index]}


def dpo_lines(group: Mapping[str, Any], options: DpoOptions, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield pairs with the same prompt, each rollout in at most one pair: the best paired with the worst first."""
    scores = group["scores"]
    prompts = [tuple(_prompt(group, index)) for index in range(len(scores))]
    left = sorted(_rollouts(group), key=lambda index: -scores[index])
    for _ in range(options.save_n_pairs_per_group):
        pair = _widest_pair(left, scores, prompts, options)
        if pair is None:
            return
        better, worse = pair
        left = [index for index in left if index not in pair]
        yield _pair_line(group, better, worse, tokenizer)


def _rollouts(group: Mapping[str, Any]) -> list[int]:
    """Return the indices of a group's rollouts, without absent ones and those whose score is no number to compare."""
    overrides = group.get("overrides") or []
    absent = {index for index, override in enumerate(overrides) if (override or {}).get(ABSENT)}
    return [index for index, score in enumerate(group["scores"]) if index not in absent and math.isfinite(score)]


def export(options: OptionsT, output: OutputFile, lines: Lines[OptionsT]) -> int:
    """Write the lines of all groups until there are enough; return their number."""
    tokenizer = _load_tokenizer(options)
    count = 0
    with closing(_groups(options)) as groups, output:  # the file is complete before the groups end
        for group in groups:
            for line in lines(group, options, tokenizer):
                output.write_line(json.dumps(line, ensure_ascii=False))
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
        raise ConfigError(f"the file to write is missing: {program} OUT [flags]")
    flags = argv if wants_help else argv[1:]
    options = load_config(model, flags, prog=f"{program} OUT", description=description)
    _require_one_source(options)
    output = _open_output(Path(argv[0]), options)
    try:
        count = export(options, output, lines)
    finally:
        if output.is_kept:
            sys.stderr.write(f"what was written so far is in {output.part}\n")
    sys.stdout.write(f"{count} lines in {argv[0]}\n")
    if not count:
        sys.stderr.write(
            "no rollout fits: --allow-negative-scores true keeps scores of 0 and less, and a smaller "
            "--minimum-score-diff-max-min those that differ little\n"
        )
    return 0


def _require_one_source(options: ExportOptions) -> None:
    if (options.groups is None) == (options.api_url is None):
        raise ConfigError(
            "the source of the groups is missing; name either a file, --groups FILE, or a broker, --api-url URL, "
            "whose environments then work for this command instead of a trainer"
        )


def _open_output(path: Path, options: ExportOptions) -> OutputFile:
    if options.append_to_previous and options.overwrite:
        raise ConfigError(
            "--append-to-previous keeps the file's lines and --overwrite replaces them; set only one of the two"
        )
    if options.groups is not None and path.exists() and options.groups.exists() and path.samefile(options.groups):
        raise ConfigError(f"{path} is the file of groups itself; name another one to write")
    hint = f"--append-to-previous adds to it, --overwrite replaces it, --groups {path} reads groups from it"
    return OutputFile(path, overwrite=options.overwrite, append=options.append_to_previous, hint=hint)


def _load_tokenizer(options: ExportOptions) -> Any:
    if options.save_messages:
        return None
    if options.tokenizer is None:
        raise ConfigError(
            "--tokenizer NAME or FOLDER, that of the model which wrote the groups, is needed for text; "
            "--save-messages true saves messages instead"
        )
    from environments.sdk.tokenizer import load_tokenizer

    return load_tokenizer(options.tokenizer, flag="--tokenizer")


def _groups(options: ExportOptions) -> Generator[dict[str, Any], None, None]:
    if options.groups is not None:
        yield from read_groups(options.groups)
        return
    assert options.api_url is not None
    yield from groups_from_broker(
        options.api_url,
        group_size=options.group_size,
        tasks_per_step=options.tasks_per_step,
        max_token_length=options.max_token_len,
        token=TokenSource.settle(options.token, options.token_file, os.environ).value,
    )


def _messages(group: Mapping[str, Any]) -> list[Any]:
    found = group.get("messages")
    if not found:
        raise ConfigError("--save-messages: a group has no messages; collect with --env.include_messages true")
    return list(found)


def _sequences(group: Mapping[str, Any]) -> tuple[Sequence[list[int]], Sequence[list[int]]]:
    """Return the tokens and masks of a group, which separate the prompt from what was sampled."""
    tokens, masks = group.get("tokens"), group.get("masks")
    if not tokens or not masks:
        raise ConfigError("a group has no tokens or no masks, so its prompts are unknown; `process` writes both")
    return tokens, masks


def _prompt(group: Mapping[str, Any], index: int) -> list[int]:
    tokens, masks = _sequences(group)
    mask = masks[index]
    start = next((at for at, value in enumerate(mask) if value != -100), len(mask))
    return list(tokens[index][:start])


def _widest_pair(
    left: Sequence[int], scores: Sequence[float], prompts: Sequence[tuple[int, ...]], options: DpoOptions
) -> tuple[int, int] | None:
    """Return the best remaining rollout with a worse one of the same prompt, and the worst such one."""
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
    tokens, masks = _sequences(group)
    prefix, pos = trained_text(tokenizer, tokens[better], masks[better])
    _, neg = trained_text(tokenizer, tokens[worse], masks[worse])
    return {"prefix": prefix, "pos": pos, "neg": neg, "score": score}


LOOPBACK = "127.0.0.1"
OUR_HOSTS = frozenset({LOOPBACK, "localhost"})

Source = Callable[[], list[dict[str, Any]]]


class ViewOptions(BaseModel):
    """These are the options of `view-run`."""

    model_config = ConfigDict(extra="forbid")

    api_url: Address | None = Field(None, description="Broker whose latest groups are shown; without a file.")
    token: str | None = Field(
        None, description="Bearer token of that broker; default: $ATROPOS_TOKEN.", json_schema_extra=SECRET
    )
    token_file: Path | None = Field(None, description="File that holds that token; default: $ATROPOS_TOKEN_FILE.")
    port: int = Field(9009, ge=0, le=65535, description="Port of the page on this machine; 0: a free one.")
    groups: int = Field(8, ge=1, description="How many of the latest groups.")
    refresh_seconds: int = Field(5, ge=1, description="How often the browser asks again.")


def main() -> NoReturn:
    run_cli(run)


def run(argv: Sequence[str]) -> int:
    """Serve the page until interrupted."""
    path = Path(argv[0]) if argv and not argv[0].startswith("-") else None
    flags = argv[1:] if path is not None else argv
    options = load_config(ViewOptions, flags, prog="view-run [FILE]", description="a local page of groups")
    if (path is None) == (options.api_url is None):
        raise ConfigError("view-run shows either a FILE of groups or --api-url URL; name one of them")
    title = str(path or options.api_url)
    if path is not None:
        source = latest_of_file(path, options.groups)
    else:
        token = TokenSource.settle(options.token, options.token_file, os.environ).value
        source = latest_of_broker(title, options.groups, token=token)
    try:
        server = make_server(source, title=title, port=options.port, refresh_seconds=options.refresh_seconds)
    except OSError as error:
        raise ConfigError(
            f"--port {options.port} cannot be bound ({error.strerror}); name another, or 0 for any"
        ) from error
    with server:
        sys.stdout.write(f"http://{LOOPBACK}:{server.server_port}/\n")
        sys.stdout.flush()
        server.serve_forever()
    return 0


def latest_of_file(path: Path, count: int) -> Source:
    return lambda: list(deque(read_groups(path), maxlen=count))[::-1]


def latest_of_broker(url: str, count: int, *, token: str | None = None) -> Source:
    """Return a source that fetches the broker's newest group at each call and gives the last `count` it saw."""
    seen: deque[dict[str, Any]] = deque(maxlen=count)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/groups/latest", headers=headers)  # noqa: S310 - the user's
    # As in all other calls to a broker: a proxy does not reach this machine, and would be shown the token.
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask() -> list[dict[str, Any]]:
        try:
            with without_proxy.open(request, timeout=10) as answer:
                content = answer.read()
            group = json.loads(content) if content else None  # it is empty until a first group has come
        except (OSError, ValueError, HTTPException) as error:  # HTTPException: the answer is not HTTP
            raise GroupsUnreadable(f"{url}: no group could be fetched ({error})") from error
        if isinstance(group, dict) and group.get("scores") and group not in seen:
            seen.appendleft(group)
        return list(seen)

    return ask


def make_server(source: Source, *, title: str, port: int, refresh_seconds: int) -> ThreadingHTTPServer:
    """Make the page's server on the loopback address; it refuses requests whose Host header names another host."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").rsplit(":", 1)[0] not in OUR_HOSTS:
                self.send_error(421, "this page is served to 127.0.0.1 only")
                return
            try:
                page = render(source(), title=title, refresh_seconds=refresh_seconds)
            except GroupsUnreadable as error:
                page = render([], title=str(error), refresh_seconds=refresh_seconds)
            body = page.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing: browsers ask for the page every few seconds."""

    return ThreadingHTTPServer((LOOPBACK, port), Handler)


if __name__ == "__main__":
    main()
