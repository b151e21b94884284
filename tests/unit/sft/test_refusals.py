"""Data and settings that cannot be fine-tuned with are refused in one line that names the value and the next step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from atropos_api.common.cliconfig import ConfigError
from atropos_api.common.errors import AtroposError
from example_trainer.errors import CheckpointError, DoesNotFit
from example_trainer.launcher.run_lock import locked
from example_trainer.sft.cli import run
from example_trainer.sft.output import claim_folder, delete_earlier_run, finish_model
from example_trainer.testing import make_tiny_model
from example_trainer.tiny.model import PADDED_VOCABULARY_SIZE
from example_trainer.tiny.tokenizer import make_tokenizer
from tests.unit.memory.test_preflight import EIGHT_BILLION

from .conftest import CHATS, Rows

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy

Sft = Callable[..., Path]

BAD_ROWS: list[tuple[Rows, tuple[str, ...], str]] = [
    ([{"body": "x"}], (), "its columns are body. Name the prompt's with .*--text-column"),
    ([{"body": "x"}], ("--prompt-column", "question"), "no prompt under question; its columns are body"),
    ([{"body": "x"}], ("--text-column", "words"), "no prompt under words; its columns are body"),
    ([], (), "it has no row"),
    ([{"text": "1 + 2 + 3 + 4"}] * 3, ("--seq-len", "2"), "nothing of its 3 rows .*: 3 are longer than --seq-len 2"),
    ([{"prompt": "1 + 1"}], (), "1 have no token to learn"),
    ([{"prompt": "1 + 1", **CHATS[0]}], (), r"\(--prompt-column names another\)"),
    ([{"prompt": [{"role": "user"}], "completion": "2"}], (), "messages with role and content"),
    ([{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}] * 2}], (), "completion has 2 messages"),
    (CHATS[:1], ("--eval-split", "0.5"), "too few to hold one out"),
    ([{"text": "1 2 " * 100}], (), r"has \d+ tokens and the model takes 128; use --seq-len 128"),
]


@pytest.mark.parametrize(("rows", "flags", "message"), BAD_ROWS)
def test_data_that_cannot_be_learned_is_one_line(sft: Sft, rows: Rows, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(AtroposError, match=message) as refused:
        sft(*flags, rows=rows)
    assert "\n" not in str(refused.value)


BAD_FLAGS = {
    "--num-epochs 2 --training-steps 3": "both end the run",
    "--eval-split 0.1 --eval-dataset x.jsonl": "both name data",
    "--eval-steps 5": "add --eval-dataset, or --eval-split 0.05",
    "--lora-r 8": "add --use-lora",
    "--load-in-4bit": "add --use-lora",
    "--no-merge-adapter": "add --use-lora",
    "--use-lora --train-layer-indices 0-1": "use --lora-layer-indices",
    "--overwrite --resume auto": "give one",
    "--chat-template missing.jinja": "missing.jinja: cannot be read",
    "--dataset missing.jsonl": "no such file or folder",
    "--model-name ./missing": "no such directory",
    "--training-step 1": "did you mean --training-steps",
    "--optimizer sgd": "sgd is not an optimizer",
}


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS.items())
def test_settings_that_cannot_work_are_one_line(sft: Sft, flags: str, message: str) -> None:
    with pytest.raises(AtroposError, match=message) as refused:
        sft(*flags.split())
    assert "\n" not in str(refused.value)


WITHOUT_EFFECT = {
    "--activation-offloading": ["--activation-offloading True has no effect: add --gradient-checkpointing"],
    "--activation-offloading --gradient-checkpointing": [],
    "--optimizer adafactor --adam-beta1 0.8 --init-method tcp://localhost:1": [
        "--init-method tcp://localhost:1 has no effect: add --world-size 2",
        "--adam-beta1 0.8 has no effect: --optimizer adafactor has a decay rule of its own",
    ],
    "--use-lora --lora-r 8 --lr 1e-3": [],
}


@pytest.mark.parametrize(("flags", "told"), WITHOUT_EFFECT.items())
def test_a_setting_without_effect_is_warned_about(
    sft: Sft, capsys: pytest.CaptureFixture[str], flags: str, told: list[str]
) -> None:
    sft("--dry-run", *flags.split())
    assert capsys.readouterr().err.splitlines() == told


def test_help_says_nothing_of_servers_that_fine_tuning_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "served weights" not in text
    assert "The sampler" not in text


def test_chats_without_a_template_name_the_file_that_would_give_one(sft: Sft, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "plain", vocabulary=PADDED_VOCABULARY_SIZE)
    tokenizer = make_tokenizer(context_length=128)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(model)
    with pytest.raises(AtroposError, match=r"no chat template.*--chat-template"):
        sft(model=model)
    sft("--training-steps", "1", rows=[{"prompt": "1 + 1 =", "completion": " 2"}], model=model, folder="texts")


def test_a_tokenizer_that_cannot_be_read_is_named(sft: Sft, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", vocabulary=PADDED_VOCABULARY_SIZE)
    make_tokenizer(context_length=128).save_pretrained(model)
    kind = json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "of a later version"}})
    (model / "tokenizer.json").write_text(kind)
    with pytest.raises(AtroposError, match=rf"--model-name {model}: it has no tokenizer that can be loaded \("):
        sft(model=model)


def test_overwrite_deletes_no_model_and_no_run_of_another_program(tmp_path: Path) -> None:
    """It removed the config.json of a model, and the checkpoints of a GRPO run."""
    for content in ('{"model_type": "llama"}', '{"trainer": {}}'):
        (tmp_path / "checkpoint-3").mkdir(exist_ok=True)
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"--overwrite: .* has a config.json that atropos-sft did not write"):
            claim_folder(tmp_path, model_name="m", will_delete=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "config.json"]
    (tmp_path / "config.json").write_text('{"sft": {}}')
    claim_folder(tmp_path, model_name="m", will_delete=True)
    delete_earlier_run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_overwrite_deletes_nothing_for_a_run_that_is_refused(sft: Sft) -> None:
    """A sequence too long for the model, and a model in the folder, failed once the earlier run had been deleted."""
    folder = sft("--training-steps", "1")
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(AtroposError, match="the model takes 128"):
        sft("--training-steps", "1", "--overwrite", rows=[{"text": "1 2 " * 100}])
    for name in ("final_model", "checkpoint-1"):
        with pytest.raises(ConfigError, match=f"--overwrite would delete --model-name .*{name}; name another"):
            sft("--training-steps", "1", "--overwrite", model=folder / name)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_copied_run_whose_final_model_became_a_directory_says_what_to_remove(tmp_path: Path) -> None:
    (tmp_path / "final_model").mkdir()
    with pytest.raises(CheckpointError, match=r"final_model: .*Is a directory.*remove a directory of that name"):
        finish_model(tmp_path, cast("Policy", SimpleNamespace(has_adapter=False)), step=1, merges=False)


def test_a_folder_that_is_in_use_is_not_touched(sft: Sft) -> None:
    sft("--training-steps", "1")
    with pytest.raises(AtroposError, match=r"not empty; .*--resume auto .*--overwrite"):
        sft("--training-steps", "1")


def test_a_run_that_goes_on_is_not_deleted_by_another_one(sft: Sft) -> None:
    folder = sft("--training-steps", "1")
    with locked({"--save-path": folder}), pytest.raises(AtroposError, match="another run works there"):
        sft("--training-steps", "1", "--overwrite")
    assert (folder / "checkpoint-1").is_dir()


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ((), ("--use-lora",), "has full weights, and this run trains an adapter; resume without --use-lora"),
        (("--use-lora",), (), "has an adapter, and this run trains full weights; resume with --use-lora"),
    ],
)
def test_an_adapter_is_not_resumed_as_full_weights_nor_the_reverse(
    sft: Sft, first: tuple[str, ...], then: tuple[str, ...], message: str
) -> None:
    sft("--training-steps", "1", *first)
    with pytest.raises(AtroposError, match=message):
        sft("--training-steps", "2", "--resume", "auto", *then)


def test_a_checkpoint_of_other_data_or_of_grpo_is_not_resumed(sft: Sft) -> None:
    folder = sft("--training-steps", "1")
    with pytest.raises(AtroposError, match="written with rows 20, this run has 19"):
        sft("--training-steps", "2", "--resume", "auto", rows=CHATS[1:])
    with pytest.raises(AtroposError, match="written with seed 0, this run has 1"):
        sft("--training-steps", "2", "--resume", "auto", "--seed", "1")
    state = folder / "checkpoint-1" / "trainer_state.json"
    state.write_text(state.read_text().replace('"method": "sft"', '"method": "grpo"'))
    with pytest.raises(AtroposError, match="was written by atropos-grpo"):
        sft("--training-steps", "2", "--resume", "auto")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpu-memory-gb 20 --master-weights none", "no flag makes this training fit, but .*--use-lora.* fits"),
        ("--gpu-memory-gb 80 --optimizer adamw", "--optimizer adamw_8bit --gradient-checkpointing fits .*--fit auto"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path, flags: str, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_BILLION))
    argv = ["--model-name", str(tmp_path), "--dataset", "none.jsonl", "--save-path", str(tmp_path / "out")]
    with pytest.raises(DoesNotFit, match=message) as refused:
        run([*argv, *flags.split()])
    assert "vLLM" not in str(refused.value)
    assert "--weight-bridge-mode" not in str(refused.value)


def test_fit_auto_chooses_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_BILLION))
    argv = ["--model-name", str(tmp_path), "--dataset", "none.jsonl", "--save-path", str(tmp_path / "out")]
    assert run([*argv, "--gpu-memory-gb", "80", "--optimizer", "adamw", "--fit", "auto", "--dry-run"]) == 0
    chosen = json.loads(capsys.readouterr().out)
    assert (chosen["optimizer"], chosen["gradient_checkpointing"]) == ("adamw_8bit", True), "as the refusal proposes"
