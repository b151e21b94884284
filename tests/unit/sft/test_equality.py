"""Loss and gradient are those of transformers with labels of -100; packing and ranks change neither."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from example_trainer.library import ChatBatch, ChatDataCollator, ChatDataset
from example_trainer.model import load_policy
from example_trainer.modeling.loading import policy_options
from example_trainer.sft.batches import Sample, load_tokenizer, make_batch, read_samples
from example_trainer.sft.config import SftConfig
from example_trainer.step.train_step import make_train_step
from example_trainer.training import Learner

from .conftest import Rows, chat, write_rows

ROWS: dict[str, Rows] = {
    "messages": [chat("3 + 4", "7"), chat("2 + 2", "4", "and 1 more?", "5"), chat("20 + 20", "It is 40.")],
    "prompt and completion": [{"prompt": "3 + 4", "completion": "7"}, {"prompt": "1 + 1 + 1", "completion": "3, so"}],
    "text": [{"text": "one and one is two"}, {"text": "3 + 4 = 7"}],
}


def config_for(model: Path, source: Path, **settings: Any) -> SftConfig:
    usual = {"dtype": "float32", "device": "cpu", "optimizer": "adamw", "lr": 1e-2, "max_grad_norm": 0.0}
    return SftConfig(model_name=str(model), dataset=str(source), **(usual | settings))


def make_learner(config: SftConfig, directory: Path) -> Learner:
    training = config.training_config(directory, steps=1)
    return make_train_step(training, load_policy(policy_options(training))).learner


def learn(learner: Learner, samples: Sequence[Sample]) -> tuple[float, dict[str, Tensor]]:
    loss = learner.train(make_batch(1, samples)).metrics["train/loss"]
    return loss, {
        name: master.grad.clone() for name, master in learner.policy.masters.items() if master.grad is not None
    }


def reference(model: Path, batch: ChatBatch) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of a plain forward of transformers."""
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}  # type: ignore[literal-required]
    loss = module(**inputs).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("form", ROWS)
def test_loss_and_gradient_are_those_of_transformers_with_ignored_labels(
    chat_model: Path, tmp_path: Path, form: str, packing: bool
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", ROWS[form])
    config = config_for(chat_model, source, packing=packing, token_budget=20)
    tokenizer = load_tokenizer(config)
    dataset = ChatDataset(source, tokenizer, text_column="text")
    collated = ChatDataCollator(pad_token_id=tokenizer.pad_token_id)(list(dataset))
    wanted_loss, wanted = reference(chat_model, collated)
    learner = make_learner(config, tmp_path)
    assert learner.layout == ("shared" if packing else "rows")
    loss, found = learn(learner, read_samples(str(source), "train", tokenizer, config))
    assert loss == pytest.approx(wanted_loss, abs=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5)


def test_every_token_after_the_first_is_learned_without_assistant_only_loss(chat_model: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", ROWS["messages"])
    config = config_for(chat_model, source, assistant_only_loss=False)
    tokenizer = load_tokenizer(config)
    for sample, row in zip(
        read_samples(str(source), "train", tokenizer, config), ChatDataset(source, tokenizer), strict=True
    ):
        assert sample.tokens.tolist() == row["token_ids"]
        assert sample.targets.tolist() == list(range(1, len(row["token_ids"])))


def test_an_overlong_row_is_cut_with_overlong_mask_and_left_out_else(chat_model: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "1 + 2 + 3 + 4 + 5"}, {"text": "1"}])
    left, cut = (
        read_samples(str(source), "train", load_tokenizer(config), config)
        for config in (config_for(chat_model, source, seq_len=4, overlong=form) for form in ("drop", "mask"))
    )
    assert [len(sample.tokens) for sample in left] == [2]
    assert [len(sample.tokens) for sample in cut] == [4, 2]
    assert cut[0].targets.tolist() == [1, 2, 3]


def test_rollouts_that_were_exported_are_learned_as_the_chats_that_they_are(chat_model: Path, tmp_path: Path) -> None:
    exported = [{"prefix": "<|user|>3 + 4<|end|><|assistant|>", "completion": "7<|end|>", "score": 1.0}]
    sources = [write_rows(tmp_path / f"{at}.jsonl", rows) for at, rows in enumerate((exported, [chat("3 + 4", "7")]))]
    configs = [
        config_for(chat_model, sources[0], prompt_column="prefix", prompt_form="text"),
        config_for(chat_model, sources[1]),
    ]
    rendered, messages = (read_samples(each.dataset, "train", load_tokenizer(each), each)[0] for each in configs)
    assert rendered.tokens.tolist() == messages.tokens.tolist()
    assert rendered.targets.tolist() == messages.targets.tolist()


def test_all_that_a_reply_s_message_holds_reaches_the_chat_template(chat_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{{ m.get('thought', '') }}<|end|>{% endfor %}")
    row = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", "thought": "3"}]}
    config = config_for(chat_model, write_rows(tmp_path / "rows.jsonl", [row]), chat_template=template)
    tokenizer = load_tokenizer(config)
    (sample,) = read_samples(config.dataset, "train", tokenizer, config)
    assert tokenizer.decode(sample.tokens[sample.targets]) == "23<|end|>"
