"""Secrets appear in no record, log line, error line or command line, whichever program declared or passed them."""

from __future__ import annotations

import json
import logging
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from atropos_api.common.cliconfig import ConfigError, load_config, run_cli
from atropos_api.common.errors import AtroposError
from atropos_api.common.files import write_private
from atropos_api.common.logs import LogFormat, setup_logging
from atropos_api.common.option_flags import list_options
from atropos_api.common.secrets import (
    SECRET,
    names_secret,
    program_words,
    public_settings,
    redact,
    redact_arguments,
    redact_text,
)
from atropos_api.config import BrokerConfig
from environments.sdk.config import APIServerConfig, BaseEnvConfig
from example_trainer.commands.top import TopConfig
from example_trainer.config import TrainingConfig
from example_trainer.serving.config import ServerConfig

SECRET_VALUE = "s3cret-value"
OUR_MODELS = (BrokerConfig, BaseEnvConfig, APIServerConfig, TrainingConfig, ServerConfig, TopConfig)


class Judge(BaseModel):
    """A user's own section, with a secret whose name does not look like one."""

    model_config = ConfigDict(extra="allow")
    pass_phrase_of_judge: str = Field("", json_schema_extra=SECRET)
    name: str = "judge"


class Settings(BaseModel):
    opened_by: str | None = Field(None, json_schema_extra=SECRET)
    steps: int = 1
    judge: Judge = Judge()
    judges: list[Judge] = []
    extra: dict[str, Any] = {}

    @field_validator("opened_by")
    @classmethod
    def _is_long(cls, value: str | None) -> str | None:
        if value is not None and len(value) < 8:
            raise ValueError("a key has 8 characters or more")
        return value


def test_a_record_leaves_out_what_is_declared_secret_at_any_depth() -> None:
    settings = Settings(
        opened_by=SECRET_VALUE,
        judge=Judge(pass_phrase_of_judge=SECRET_VALUE),
        judges=[Judge(pass_phrase_of_judge=SECRET_VALUE)],
    )
    assert public_settings(settings) == {
        "steps": 1,
        "judge": {"name": "judge"},
        "judges": [{"name": "judge"}],
        "extra": {},
    }


def test_a_record_leaves_out_undeclared_keys_that_name_a_secret() -> None:
    unknown = {"api_key": SECRET_VALUE, "deep": [{"hf_token": SECRET_VALUE, "max_tokens": 3}]}
    unknown["api_keys"] = ["none", SECRET_VALUE]
    settings = Settings(judge=Judge.model_validate(unknown), extra=unknown)
    shown = public_settings(settings)
    assert SECRET_VALUE not in json.dumps(shown)
    assert shown["extra"] == {"deep": [{"max_tokens": 3}]}


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        *((key, True) for key in ("api_key", "api-key", "apikey", "openai.api_key", "hf_token", "token", "password")),
        *((key, True) for key in ("judge_api_keys", "client_secret", "Authorization", "private_key", "credentials")),
        *((key, False) for key in ("max_tokens", "tokenizer", "token_budget", "answer_key", "token_file", "keys")),
    ],
)
def test_an_undeclared_key_is_judged_by_its_name(key: str, secret: bool) -> None:
    assert names_secret(key) is secret


@pytest.mark.parametrize("model", OUR_MODELS)
def test_every_declared_secret_is_known_by_its_name_too_where_only_that_is_seen(model: type[BaseModel]) -> None:
    """The launcher passes flags on to programs whose models it does not know."""
    declared = [option.path for option in list_options(model) if option.secret]
    assert declared
    assert [path for path in declared if not names_secret(path)] == []
    named = [option.path for option in list_options(model) if names_secret(option.path)]
    assert named == declared, "declare it as a secret, or name it otherwise"


def test_a_placeholder_for_a_key_is_not_a_secret() -> None:
    assert redact({"api_key": "none", "token": None}) == {"api_key": "none", "token": None}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:pa55word@host:6379/0", "redis://user:***@host:6379/0"),
        ("https://ghp_0123@github.com/x", "https://***@github.com/x"),
        ("waiting for http://b:8000/t/s3cret-value/v1/status", "waiting for http://b:8000/t/***/v1/status"),
        ("Illegal header value b'Bearer s3cret-value\\n'", "Illegal header value b'Bearer ***'"),
        ("GET /x?api_key=s3cret-value&n=1", "GET /x?api_key=***&n=1"),
        ("send Authorization: Bearer <token>", "send Authorization: Bearer <token>"),
        ("http://host:8000/t", "http://host:8000/t"),
        ("user@host and http://host/a@b", "user@host and http://host/a@b"),
    ],
)
def test_a_text_is_shown_without_the_secrets_that_its_form_gives_away(text: str, shown: str) -> None:
    assert redact_text(text) == shown


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("--token s3cret-value --port 1", "--token *** --port 1"),
        ("--openai.api_key=s3cret-value --n 1", "--openai.api_key=*** --n 1"),
        ("--vllm.api-key one-secret two-secret --vllm.port 1", "--vllm.api-key *** *** --vllm.port 1"),
        ("--opened-by s3cret-value", "--opened-by ***"),
        ("--env.max_tokens 9 --tokenizer t", "--env.max_tokens 9 --tokenizer t"),
        ('--env.extra {"api_key":"s3cret-value","n":1}', '--env.extra {"n": 1}'),
        ("--env.rollout_server_url http://h/t/s3cret-value", "--env.rollout_server_url http://h/t/***"),
        ("--openai.api_key none", "--openai.api_key none"),
    ],
)
def test_a_command_line_is_shown_without_the_values_of_secret_flags(typed: str, shown: str) -> None:
    assert redact_arguments(typed.split(), secret_flags=["--opened-by"]) == shown.split(" ", typed.count(" "))


def test_of_another_process_only_its_program_is_named() -> None:
    assert program_words(["/usr/bin/python3.11", "-m", "atropos_api", "--token", "x"]) == (
        "/usr/bin/python3.11 -m atropos_api"
    )
    assert program_words(["python", "server.py", "secret"]) == "python server.py"
    assert program_words(["python", "-c", "key = 'secret'"]) == "python"
    assert program_words(["mysqld", "secret"]) == "mysqld"


def parse(*argv: str, defaults: dict[str, object] | None = None) -> Settings:
    return load_config(Settings, argv, prog="tool", description="A tool.", defaults=defaults)


def test_an_error_line_names_the_option_and_not_its_secret_value() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--opened-by", "short")
    assert str(caught.value) == "--opened-by: a key has 8 characters or more"
    with pytest.raises(ConfigError) as caught:
        parse("--steps", "many", "--extra", '{"api_key": 3')
    assert "--steps" in str(caught.value)


def test_a_section_of_the_wrong_form_is_reported_without_the_secrets_in_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"steps: {{api_key: {SECRET_VALUE}, other: 1}}\n")
    with pytest.raises(ConfigError) as caught:
        parse("--config", str(path))
    assert SECRET_VALUE not in str(caught.value)
    assert '{"other": 1}' in str(caught.value)


def test_help_does_not_show_a_secret_that_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help", defaults={"opened_by": SECRET_VALUE, "steps": 7})
    shown = capsys.readouterr().out
    assert "(default: 7)" in shown
    assert SECRET_VALUE not in shown


def test_what_records_the_process_s_arguments_finds_them_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """W&B uploads `sys.argv` with every run."""
    typed = ["tool", "--opened-by", SECRET_VALUE, "--judge.own_token", SECRET_VALUE, "--steps", "2"]
    monkeypatch.setattr(sys, "argv", list(typed))

    def main(argv: list[str]) -> int:
        assert argv == typed[1:]
        parse(*argv[:2], *argv[4:])
        assert sys.argv == ["tool", "--opened-by", "***", "--judge.own_token", "***", "--steps", "2"]
        raise AtroposError(f"http://host/t/{SECRET_VALUE} does not answer")

    with pytest.raises(SystemExit):
        run_cli(main)
    assert capsys.readouterr().err == "tool: error: http://host/t/*** does not answer\n"


def open_address(url: str) -> None:
    raise ConnectionError(url)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_line_and_a_traceback_in_it_hold_no_token(
    form: LogFormat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    with monkeypatch.context() as patch:
        patch.setattr(root, "handlers", [])
        patch.setattr(root, "level", root.level)
        setup_logging("me", form=form)
        try:
            open_address(f"http://host/t/{SECRET_VALUE}/v1")
        except ConnectionError:
            logging.getLogger("a").exception("asking %s", f"redis://u:{SECRET_VALUE}@h/0")
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert SECRET_VALUE not in shown


def test_a_private_file_that_a_signal_breaks_off_leaves_nothing_of_what_it_would_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> None:
        raise SystemExit(143)  # as the trainer's handler does until it trains

    monkeypatch.setattr(Path, "replace", end)
    with pytest.raises(SystemExit):
        write_private(tmp_path / "token", "hunter2")
    assert list(tmp_path.iterdir()) == []


def test_a_private_file_is_its_owner_s_alone_also_where_one_was_open_to_all(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]
