"""Exports of groups are data sets that the masks cut; what is there already is kept."""

import json
import threading
import time
from itertools import chain
from types import SimpleNamespace

import msgspec
import pytest

from atropos_api.client import BrokerClient, BrokerRefused
from atropos_api.common.cliconfig import ConfigError
from atropos_api.common.errors import AtroposError
from atropos_api.common.files import FileInTheWay
from atropos_api.testing import served_broker
from atropos_api.wire.groups import Batch, Group
from atropos_api.wire.messages import EnvironmentRequest
from environments.export import (
    DpoOptions,
    SftOptions,
    dpo_lines,
    run_dpo,
    run_sft,
    sft_lines,
)
from environments.export import run as run_view
from environments.sdk.errors import TokenizerUnavailable
from environments.sdk.group_files import GroupsUnreadable, write_page


@pytest.fixture
def group(tokenizer):
    """A group of three answers to a prompt whose text is repeated in every answer."""
    prompt = tokenizer.encode("one two ")
    answers = [tokenizer.encode(text) for text in ("one two three", "one two one two", "none")]
    return {
        "tokens": [prompt + answer for answer in answers],
        "masks": [[-100] * len(prompt) + answer for answer in answers],
        "scores": [1.0, 0.25, -1.0],
        "messages": [[{"role": "assistant", "content": str(n)}] for n in range(3)],
    }


def test_a_prompt_that_the_answer_repeats_costs_no_text(group, tokenizer):
    lines = list(sft_lines(group, SftOptions(), tokenizer))
    assert [line["score"] for line in lines] == [1.0, 0.25]
    for line, tokens in zip(lines, group["tokens"], strict=False):
        assert line["prefix"] + line["completion"] == tokenizer.decode(tokens)
        assert line["completion"].startswith("one two")


def test_each_turn_is_an_example_and_a_tools_words_are_in_no_completion(tokenizer):
    parts = [tokenizer.encode(word) for word in ("one", "two", "three", "four")]
    masks = [part if at % 2 else [-100] * len(part) for at, part in enumerate(parts)]
    group = {"tokens": [list(chain(*parts))], "masks": [list(chain(*masks))], "scores": [1.0]}
    lines = [(line["prefix"], line["completion"]) for line in sft_lines(group, SftOptions(), tokenizer)]
    assert lines == [("one", "two"), ("onetwothree", "four")]
    untrained = group | {"masks": [[-100] * len(group["tokens"][0])]}
    assert list(sft_lines(untrained, SftOptions(), tokenizer)) == []


def test_an_empty_prompt_is_not_an_error(tokenizer):
    tokens = tokenizer.encode("three")
    (line,) = sft_lines({"tokens": [tokens], "masks": [tokens], "scores": [1.0]}, SftOptions(), tokenizer)
    assert line["prefix"] == ""
    assert line["completion"] == tokenizer.decode(tokens)


def test_the_best_of_a_group_are_chosen(group, tokenizer):
    def scores(**options):
        return [line["score"] for line in sft_lines(group, SftOptions(**options), tokenizer)]

    assert scores(save_top_n_per_group=1) == [1.0]
    assert scores(allow_negative_scores=True) == [1.0, 0.25, -1.0]
    assert scores(minimum_score_diff_max_min=1.5) == [1.0]
    assert next(sft_lines(group, SftOptions(save_messages=True), None))["messages"][0]["content"] == "0"


def test_rows_of_absent_rollouts_are_no_examples(group, tokenizer):
    """Their score is the mean of the others, and they have no text."""
    rows = len(group["scores"])
    whole = {
        **group,
        **{key: [*group[key], group[key][0][:1]] for key in ("tokens", "masks")},
        "scores": [*group["scores"], 0.9],
        "overrides": [None] * rows + [{"absent": True}],
    }
    for lines, options in ((sft_lines, SftOptions()), (dpo_lines, DpoOptions(minimum_score_diff_max_min=0.1))):
        assert list(lines(whole, options, tokenizer)) == list(lines(group, options, tokenizer))


def test_pairs_share_a_prompt_and_no_rollout_is_in_two(group, tokenizer):
    lines = list(dpo_lines(group, DpoOptions(), tokenizer))
    assert [line["score"] for line in lines] == [2.0]
    assert [lines[0][name] for name in ("prefix", "pos", "neg")] == ["one two ", "one two three", "none"]
    group["tokens"][2] = [5, *group["tokens"][2]]
    group["masks"][2] = [-100, *group["masks"][2]]
    assert [line["score"] for line in dpo_lines(group, DpoOptions(), tokenizer)] == [0.75]


def test_the_commands_write_read_and_append(group, tokenizer_folder, tmp_path, capsys):
    source = tmp_path / "groups.jsonl"
    source.write_bytes(msgspec.json.encode(group) + b"\n" + msgspec.json.encode(group) + b"\n")
    out = tmp_path / "sft.jsonl"
    flags = ["--groups", str(source), "--tokenizer", str(tokenizer_folder)]
    assert run_sft([str(out), *flags, "--num-seqs-to-save", "3"]) == 0
    assert run_sft([str(out), *flags, "--num-seqs-to-save", "3", "--append-to-previous"]) == 0
    assert len(out.read_text().splitlines()) == 6
    assert run_dpo([str(tmp_path / "dpo.jsonl"), *flags]) == 0
    assert len((tmp_path / "dpo.jsonl").read_text().splitlines()) == 2
    assert "2 lines" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="file to write is missing"):
        run_dpo(["--groups", str(source)])


def test_a_score_that_is_not_finite_is_no_example_and_does_not_end_the_export(
    group, tokenizer_folder, tmp_path, capsys
):
    """The original Atropos writes NaN as Python does."""
    source, out = tmp_path / "groups.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({**group, "scores": [float("nan"), 1.0, -1.0]}) + "\n")
    flags = ["--groups", str(source), "--tokenizer", str(tokenizer_folder)]
    assert run_sft([str(out), *flags]) == 0
    assert [json.loads(line)["score"] for line in out.read_text().splitlines()] == [1.0]
    assert run_dpo([str(out), *flags, "--overwrite"]) == 0
    assert [json.loads(line)["score"] for line in out.read_text().splitlines()] == [2.0]
    assert "nan" in write_page(source).read_text()
    assert capsys.readouterr().err == ""


def test_a_file_without_a_fitting_rollout_says_which_flags_would_take_them(group, tokenizer_folder, tmp_path, capsys):
    source = tmp_path / "groups.jsonl"
    source.write_text(json.dumps({**group, "scores": [0.0, -1.0, -2.0]}) + "\n")
    assert run_sft([str(tmp_path / "out"), "--groups", str(source), "--tokenizer", str(tokenizer_folder)]) == 0
    assert "--allow-negative-scores" in capsys.readouterr().err


def test_groups_without_masks_are_refused_in_one_line(tokenizer_folder, tmp_path):
    source = tmp_path / "groups.jsonl"
    source.write_text('{"scores": [1, 0], "tokens": [[1], [2]]}\n')
    for number, command in enumerate((run_sft, run_dpo)):
        with pytest.raises(ConfigError, match="no tokens or no masks"):
            command([str(tmp_path / f"out{number}"), "--groups", str(source), "--tokenizer", str(tokenizer_folder)])


@pytest.fixture
def groups_file(group, tmp_path):
    path = tmp_path / "groups.jsonl"
    path.write_bytes(msgspec.json.encode(group) + b"\n")
    return path


@pytest.mark.parametrize("command", [run_sft, run_dpo])
def test_a_file_that_is_there_is_left_as_it_is_unless_told_otherwise(command, groups_file, tokenizer_folder, tmp_path):
    """That includes a file of groups that is named first, as for the verbs that read one."""
    victim, before = groups_file, groups_file.read_bytes()
    other = tmp_path / "other.jsonl"
    other.write_text("mine\n")
    tokenizer = ["--tokenizer", str(tokenizer_folder)]
    with pytest.raises(FileInTheWay, match=f"--groups {victim} reads groups from it"):
        command([str(victim), "--api-url", "http://localhost:1", *tokenizer])
    with pytest.raises(ConfigError, match="is the file of groups itself"):
        command([str(victim), "--groups", str(victim), "--overwrite", *tokenizer])
    with pytest.raises(FileInTheWay, match="--append-to-previous adds to it, --overwrite replaces it"):
        command([str(other), "--groups", str(victim), *tokenizer])
    assert (victim.read_bytes(), other.read_text()) == (before, "mine\n")
    assert command([str(other), "--groups", str(victim), "--append-to-previous", *tokenizer]) == 0
    assert other.read_text().startswith("mine\n{")
    assert command([str(other), "--groups", str(victim), "--overwrite", *tokenizer]) == 0
    assert other.read_text().startswith("{")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["groups.jsonl", "other.jsonl"]


@pytest.mark.parametrize("command", [run_sft, run_dpo])
@pytest.mark.parametrize("flags", [[], ["--groups", "g.jsonl", "--api-url", "http://localhost:8000"]])
def test_a_broker_is_asked_only_where_it_is_named(command, flags, tmp_path):
    with pytest.raises(ConfigError, match=r"--groups FILE, or a broker, --api-url URL"):
        command([str(tmp_path / "out.jsonl"), *flags])


@pytest.mark.parametrize("out", ["", "/", "groups.jsonl/out.jsonl", "/proc/out.jsonl"])
def test_a_file_that_cannot_be_written_is_one_line(out, groups_file, tmp_path, monkeypatch):
    """A shell's unset variable, and a file in place of a folder, ended in tracebacks."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AtroposError, match=r"is there already and is left as it is|cannot be written \(.*another file"):
        run_sft([out, "--groups", str(groups_file), "--save-messages"])
    assert [path.name for path in tmp_path.iterdir()] == ["groups.jsonl"]


def test_groups_that_are_not_there_are_one_line_also_for_an_output_that_is(tmp_path):
    (tmp_path / "out.jsonl").write_text("mine\n")
    argv = [str(tmp_path / "out.jsonl"), "--groups", str(tmp_path / "grups.jsonl"), "--append-to-previous"]
    with pytest.raises(GroupsUnreadable, match=r"grups\.jsonl: cannot be read"):
        run_sft([*argv, "--save-messages"])
    assert (tmp_path / "out.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize("url", ["", "localhost:8000", "http://localhost:abc", "/groups.jsonl"])
@pytest.mark.parametrize("command", [lambda argv: run_sft(["out.jsonl", *argv]), run_view])
def test_what_is_no_address_of_a_broker_is_refused_before_anything_is_asked(command, url):
    with pytest.raises(ConfigError, match="--api-url: an address"):
        command(["--api-url", url])


def test_text_is_never_read_by_a_tokenizer_that_was_not_named(groups_file, tmp_path):
    with pytest.raises(ConfigError, match="--tokenizer NAME or FOLDER"):
        run_sft([str(tmp_path / "out.jsonl"), "--groups", str(groups_file)])
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(TokenizerUnavailable, match="no such folder; set --tokenizer to a model's folder"):
        run_sft([str(tmp_path / "out.jsonl"), "--groups", str(groups_file), "--tokenizer", "/nowhere"])


def test_what_was_written_before_a_failure_is_kept_next_to_the_file_and_reported(
    groups_file, tokenizer_folder, tmp_path, capsys
):
    with groups_file.open("a") as file:
        file.write("{\n")
    out = tmp_path / "out.jsonl"
    arguments = [str(out), "--groups", str(groups_file), "--tokenizer", str(tokenizer_folder)]
    with pytest.raises(GroupsUnreadable):
        run_sft(arguments)
    assert not out.exists()
    part = tmp_path / "out.jsonl.part"
    assert len(part.read_text().splitlines()) == 2
    assert f"what was written so far is in {part}" in capsys.readouterr().err
    with pytest.raises(FileInTheWay, match=r"out\.jsonl\.part is in the way"):
        run_sft(arguments)
    groups_file.write_text("{\n")
    part.unlink()
    with pytest.raises(GroupsUnreadable):
        run_sft(arguments)
    assert not part.exists()


def test_groups_are_taken_from_a_broker_in_a_trainers_place(group, tokenizer_folder, tmp_path):
    out = tmp_path / "sft.jsonl"
    flags = ["--group-size", "3", "--tasks-per-step", "2", "--num-seqs-to-save", "4"]
    with served_broker() as url, BrokerClient(url) as client:
        arguments = [str(out), "--api-url", url, "--tokenizer", str(tokenizer_folder), *flags]
        export = threading.Thread(target=run_sft, args=(arguments,))
        export.start()
        info = client.register_environment(EnvironmentRequest(name="e", group_size=3, max_token_length=64))
        while client.status()["run"] is None:
            time.sleep(0.01)
        fields = {name: group[name] for name in ("tokens", "masks", "scores")}
        client.submit(info.environment_id, [Group(**fields), Group(**fields)], idempotency_key="once")
        export.join(timeout=30)
        assert not export.is_alive()
        assert client.heartbeat(info.environment_id).state == "finished"
    assert [json.loads(line)["score"] for line in out.read_text().splitlines()] == [1.0, 0.25, 1.0, 0.25]


class TakenOver:
    """A broker's client: it gives one batch, and refuses to end the run."""

    def __init__(self, *_, **__):
        self.ended = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def begin_run(self, request):
        return SimpleNamespace(next_batch=1, run_id="r", epoch=1)

    def get_batch(self, number, **_):
        return Batch(number=number, run_id="r", groups=[Group(tokens=[[5]], masks=[[5]], scores=[1.0])])

    def finish_run(self, run_id, *, epoch):
        raise BrokerRefused({"detail": "another trainer has taken the run over"}, 409)


def test_an_export_whose_end_the_broker_refuses_is_complete(tokenizer_folder, tmp_path, monkeypatch, caplog):
    """It stayed PATH.part with every line that was asked for."""
    monkeypatch.setattr("atropos_api.client.BrokerClient", TakenOver)
    out = tmp_path / "sft.jsonl"
    arguments = ["--api-url", "http://broker", "--tokenizer", str(tokenizer_folder), "--num-seqs-to-save", "1"]
    assert run_sft([str(out), *arguments]) == 0
    assert [json.loads(line)["score"] for line in out.read_text().splitlines()] == [1.0]
    assert not (tmp_path / "sft.jsonl.part").exists()
    assert "did not end the run that took the groups (" in caplog.text
    assert "another trainer has taken the run over" in caplog.text
