"""A tokenizer folder made without transformers, and the pieces tests put around an environment."""

import json

import pytest

from environments.rewards.math_verifier import MathVerifier
from environments.sdk.tokenizer import load_tokenizer
from example_trainer.tiny.tokenizer import CHAT_TEMPLATE, END, PAD, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "pad_token": PAD, "unk_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return load_tokenizer(str(tokenizer_folder))


@pytest.fixture(scope="session")
def math_verifier():
    """One for all tests: starting it takes a second."""
    with MathVerifier(workers=1) as verifier:
        yield verifier
