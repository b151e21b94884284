"""Command lines follow from the models: every spelling parses, every mistake is one line with value and remedy."""

from __future__ import annotations

import errno
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from atropos_api.common.cliconfig import ConfigError, load_config, load_config_with_rest, run_cli
from atropos_api.common.errors import AtroposError, Outage
from atropos_api.common.yaml_files import read_yaml


class Env(BaseModel):
    model_config = ConfigDict(extra="forbid")
    group_size: int = 4
    use_wandb: bool = True
    total_steps: int = 10


class Server(BaseModel):
    model_config = ConfigDict(extra="forbid")
    base_url: str = ""
    api_key: str = ""
    timeout: float = 1.0


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model_name: str = Field(description="Model to train.", json_schema_extra={"aliases": ["model"]})
    lr: float = 1e-5
    targets: list[str] | None = None
    mode: Literal["none", "shared"] = "none"
    benchmark: bool = False
    limits: dict[str, int] = Field(default_factory=dict)
    env: Env = Env()
    openai: Server | list[Server] = Server()

    @model_validator(mode="after")
    def _shared_needs_small_groups(self) -> Settings:
        if self.mode == "shared" and self.env.group_size > 64:
            raise ValueError(f"--mode shared takes groups up to 64, got {self.env.group_size}")
        return self


def parse(line: str, **kwargs: object) -> Settings:
    return load_config(Settings, line.split(), prog="tool", description="A tool.", **kwargs)  # type: ignore[arg-type] # free-form in tests


@pytest.mark.parametrize(
    ("line", "field", "expected"),
    [
        ("--model m", "model_name", "m"),
        ("--model_name=m", "model_name", "m"),
        ("--model m --lr 3e-4", "lr", 3e-4),
        ("--model m --targets q_proj v_proj --lr 1", "targets", ["q_proj", "v_proj"]),
        ("--model m --targets None", "targets", None),
        ("--model m --benchmark", "benchmark", True),
        ("--model m --benchmark false", "benchmark", False),
        ("--model m --no-benchmark", "benchmark", False),
        ('--model m --limits {"a":3}', "limits", {"a": 3}),
    ],
)
def test_every_spelling_of_a_flag_parses(line: str, field: str, expected: object) -> None:
    assert getattr(parse(line), field) == expected


def test_a_setting_under_two_of_its_names_is_refused_since_one_value_would_be_lost() -> None:
    """The TRL guide's `mini_batch_size=4, batch_size=128` are one setting here, and the last one won silently."""
    with pytest.raises(ConfigError, match=r"^--model and --model-name are one setting; leave one of them out$"):
        parse("--model m --lr 1 --model_name=n")
    assert parse("--model m --model n --env.group-size 2 --env.group_size 3").model_name == "n"


def test_nested_models_take_dotted_flags_in_kebab_and_snake_case_and_negative_numbers() -> None:
    settings = parse(
        "--model m --env.group_size 2 --env.use-wandb false --env.total_steps -1 --openai.base_url http://x"
    )
    assert settings.env == Env(group_size=2, use_wandb=False, total_steps=-1)
    assert settings.openai == Server(base_url="http://x")


def test_files_merge_in_order_and_flags_lie_on_top(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("model: a\nlr: 1.0\nenv: {group_size: 8, total_steps: 5}\n")
    second.write_text("lr: 2.0\nenv: {group_size: 16}\n")
    settings = parse(f"--config {first} --config {second} --env.total-steps 7")
    assert (settings.model_name, settings.lr) == ("a", 2.0)
    assert settings.env == Env(group_size=16, total_steps=7)


def test_a_run_file_gives_each_command_its_own_section(tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text("trainer: {model-name: m, lr: 0.5}\napi: {port: 1}\n")
    assert parse(f"--config {run_file}", section="trainer").lr == 0.5


def test_sections_of_other_commands_are_left_alone_by_an_environment(tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text("model_name: m\ntrainer: {whatever: 1}\nenv: {group_size: 3}\n")
    assert parse(f"--config {run_file}").env.group_size == 3


def test_defaults_lie_under_files_and_flags() -> None:
    settings = parse("--env.group_size 9", defaults={"model_name": "d", "env": {"group_size": 1, "total_steps": 2}})
    assert (settings.model_name, settings.env.group_size, settings.env.total_steps) == ("d", 9, 2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model m --bnchmark", ["--bnchmark", "did you mean --benchmark?"]),
        ("--bnchmark", ["--bnchmark", "did you mean --benchmark?"]),
        ("--lr 1", ["--model-name is required"]),
        ("--model m --lr fast", ["--lr", '"fast"']),
        ("--model m --mode both", ["--mode", "'none' or 'shared'", '"both"']),
        ("--model m --lr fast --mode both", ["--lr", "--mode"]),
        ("--model m stray", ["'stray'"]),
        ("--config nowhere.yaml", ["nowhere.yaml: no such file"]),
        ("--model m --mode shared --env.group_size 65", ["takes groups up to 64, got 65"]),
    ],
)
def test_a_mistake_is_one_line_that_names_value_and_remedy(line: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_run_file_of_the_project_is_proposed_for_one_that_is_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/demo.yaml").write_text("model_name: m\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no such file; did you mean configs/demo\.yaml\?$"):
        parse("--config example_trainer/configs/demo.yaml")
    with pytest.raises(ConfigError, match=r"no such file$"):
        parse("--config example_trainer/configs/other.yaml")


def test_an_unknown_key_in_a_file_is_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("model_name: m\nenv: {groupsize: 3}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'groupsize', did you mean group_size\?"):
        parse(f"--config {config}")


def test_arguments_of_another_parser_are_handed_back_in_order() -> None:
    settings, rest = load_config_with_rest(
        Settings, ["--model", "m", "--foreign", "3", "--lr", "2"], prog="tool", description=""
    )
    assert settings.lr == 2
    assert rest == ["--foreign", "3"]


def test_a_misspelt_flag_explains_a_missing_one_even_where_others_may_know_more_flags() -> None:
    with pytest.raises(ConfigError, match=r"unknown option --modle-name, did you mean --model-name\?"):
        load_config_with_rest(Settings, ["--modle-name", "m"], prog="tool", description="")


def test_help_shows_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for words in ("--model-name", "Model to train. (required)", "--env.group-size", "(default: 4)", "none|shared"):
        assert words in text


def test_help_tells_the_defaults_that_lie_under_the_files_and_each_name_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    defaults = {
        "model_name": "d",
        "targets": ["q", "v"],
        "env": {"group_size": 7},
        "openai": [{"base_url": "http://x"}],
    }
    with pytest.raises(SystemExit):
        parse("--help", defaults=defaults)
    text = capsys.readouterr().out
    for words in ("--model-name, --model MODEL_NAME", "Model to train. (default: d)", "(default: q v)", "(default: 7)"):
        assert words in text
    assert "(default: http://x)" in text
    assert "--env.group_size" not in text
    assert "(default: )" not in text
    assert text.count("options:") == 1


def test_a_mistake_in_one_of_several_forms_is_reported_alone_and_no_key_with_it(tmp_path: Path) -> None:
    """A section may be one server or a list of them; the given values show which was meant."""
    with pytest.raises(ConfigError) as caught:
        parse("--model m --openai.timeout soon --openai.api_key secret")
    assert str(caught.value).startswith("--openai.timeout: ")
    assert "secret" not in str(caught.value)
    config = tmp_path / "a.yaml"
    config.write_text("model_name: m\nopenai: [{api_key: secret}, {timeout: soon}]\n")
    with pytest.raises(ConfigError, match=r"\A--openai\.1\.timeout: [^;]*\Z"):
        parse(f"--config {config}")


def test_a_setting_under_two_of_its_names_is_refused_in_a_file(tmp_path: Path) -> None:
    """The value of one of them was lost without a word."""
    config = tmp_path / "a.yaml"
    for text, told in (
        ("model_name: m\nmodel: n\n", "'model_name' and 'model' are one setting"),
        ("model_name: m\nenv: {group-size: 2, group_size: 3}\n", "env: 'group-size' and 'group_size' are one setting"),
    ):
        config.write_text(text)
        with pytest.raises(ConfigError, match=told):
            parse(f"--config {config}")


@pytest.mark.parametrize(
    ("text", "kind"), [("yes", "bool"), ("2024-01-01", "date"), ("100:4", "int"), ("1.5", "float")]
)
def test_a_text_that_yaml_reads_as_something_else_is_to_be_quoted(tmp_path: Path, text: str, kind: str) -> None:
    """A date was shown in quotes, as if it were text."""
    config = tmp_path / "a.yaml"
    config.write_text(f"model_name: {text}\n")
    with pytest.raises(
        ConfigError, match=rf"--model-name: .*, which is {kind} in YAML; put what the file has in quotes"
    ):
        parse(f"--config {config}")


@pytest.mark.parametrize("text", ["2024-13-45", "0b_", "1" * 5000])
def test_a_text_that_has_the_form_of_a_date_or_a_number_and_is_none_is_to_be_quoted(tmp_path: Path, text: str) -> None:
    """It ended with a traceback of the date's or the number's class, which named neither file nor line."""
    config = tmp_path / "a.yaml"
    config.write_text(f"model_name: m\nlimits: {text}\n")
    told = rf"a\.yaml: cannot be read as YAML: '{text[:20]}.* is no value \(.*line 2"
    with pytest.raises(ConfigError, match=told):
        parse(f"--config {config}")


def test_a_value_in_a_flags_mapping_that_is_no_date_is_a_text() -> None:
    with pytest.raises(ConfigError, match=r'--limits\.day: .*"2024-13-45"'):
        parse("--model m --limits day=2024-13-45")


def test_a_file_that_is_nested_too_deeply_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("[" * 3000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse(f"--config {config}")


def test_a_section_with_nothing_in_it_leaves_the_settings_as_they_are(tmp_path: Path) -> None:
    """The launcher takes such a file; an environment's own command refused it."""
    config = tmp_path / "a.yaml"
    config.write_text("model_name: m\nenv:\n  # group_size: 8\nopenai:\n")
    defaults = {"env": {"group_size": 1}}
    settings = parse(f"--config {config} --openai.timeout 3", defaults=defaults)
    assert (settings.env.group_size, settings.openai) == (1, Server(timeout=3))
    config.write_text("model_name: m\nenv: {group_size: null}\n")
    with pytest.raises(ConfigError, match=r"--env\.group-size: .*null"):
        parse(f"--config {config}", defaults=defaults)


@pytest.mark.parametrize("given", ["http://x", "[http://x]", "5"])
def test_a_section_that_is_no_mapping_is_one_line_beside_a_flag_of_it(tmp_path: Path, given: str) -> None:
    """It ended with a traceback: 'dictionary update sequence element #0 has length 1'."""
    config = tmp_path / "a.yaml"
    config.write_text(f"model_name: m\nopenai: {given}\n")
    with pytest.raises(
        ConfigError, match=r"--openai\.timeout: openai takes settings by their names, and the files have"
    ):
        parse(f"--config {config} --openai.timeout 3")


class Bits(Enum):
    FOUR = 4
    AUTO = "auto"


class Chosen(BaseModel):
    level: Literal["auto", 1, 2] | None = "auto"
    bits: Bits = Bits.AUTO


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--level 2", Chosen(level=2)),
        ("--level auto --bits 4", Chosen(bits=Bits.FOUR)),
        ("--level None", Chosen(level=None)),
        ("--bits auto", Chosen()),
    ],
)
def test_a_choice_that_is_no_text_can_be_given_by_its_flag(line: str, expected: Chosen) -> None:
    """The help named it, and it was refused: "Input should be 'auto', 1 or 2, got "2"."""
    assert load_config(Chosen, line.split(), prog="tool", description="A tool.") == expected
    with pytest.raises(ConfigError, match=r"--level: .*\"3\""):
        load_config(Chosen, ["--level", "3"], prog="tool", description="A tool.")


def test_a_list_is_added_to_by_each_of_its_flags(tmp_path: Path) -> None:
    """Of `--env.reward a --env.reward b` the first was lost without a word."""
    config = tmp_path / "a.yaml"
    config.write_text("model_name: m\ntargets: [k]\n")
    assert parse(f"--config {config}").targets == ["k"]
    assert parse(f"--config {config} --targets q --targets v o").targets == ["q", "v", "o"]
    assert parse(f"--config {config} --targets None --targets q").targets == ["q"]
    assert parse(f"--config {config} --targets q --targets None").targets is None, "no entry of this name"
    given = parse('--model m --limits {"a":1,"b":1} --limits {"b":2} --limits c=3').limits
    assert given == {"a": 1, "b": 2, "c": 3}, "a later one wins"


def test_a_key_that_a_merged_mapping_has_as_well_is_no_key_twice(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("base: &base {a: 1, b: 2}\nover: {<<: *base, a: 3}\nlist: [{a: 1}, {a: 2}]\n")
    assert read_yaml(path)["over"] == {"a": 3, "b": 2}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG])
def test_a_path_that_cannot_be_used_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A model in another user's directory was a traceback."""

    def main(_: list[str]) -> int:
        raise OSError(number, os.strerror(number), "/home/alice/model")

    monkeypatch.setattr(sys, "argv", ["/bin/tool"])
    with pytest.raises(SystemExit) as ended:
        run_cli(main)
    told = f"tool: error: /home/alice/model: {os.strerror(number)}; name a path that user {os.getuid()} can use\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, told)


@pytest.mark.parametrize(("error", "code"), [(ConfigError("gone"), 2), (Outage("gone"), 75)])
def test_what_a_later_start_may_mend_has_an_exit_code_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: AtroposError, code: int
) -> None:
    def main(_: list[str]) -> int:
        raise error

    monkeypatch.setattr(sys, "argv", ["/bin/tool"])
    with pytest.raises(SystemExit) as ended:
        run_cli(main)
    assert (ended.value.code, capsys.readouterr().err) == (code, "tool: error: gone\n")


def test_an_error_of_the_system_that_may_pass_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(_: list[str]) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/data/model")

    monkeypatch.setattr(sys, "argv", ["/bin/tool"])
    with pytest.raises(OSError, match="/data/model"):
        run_cli(main)
