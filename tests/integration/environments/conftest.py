"""A tokenizer folder written without transformers, and the surroundings of an environment in tests."""

import pytest

from environments.sdk.tokenizer import load_tokenizer
from example_trainer.tiny.tokenizer import save_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return load_tokenizer(str(tokenizer_folder))
