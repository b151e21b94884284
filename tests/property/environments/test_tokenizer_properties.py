"""Text from tokens: the light tokenizer joins them as the tokenizers library does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.sdk.rehearsal import write_byte_tokenizer
from environments.sdk.tokenizer import FastTokenizer


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    return FastTokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@given(ids=st.lists(st.integers(0, 260), max_size=40))
def test_any_bytes_decode_as_the_library_decodes_them(byte_tokenizer, ids):
    library = byte_tokenizer._tokenizer
    assert byte_tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)
    assert byte_tokenizer.decode(ids, skip_special_tokens=True) == library.decode(ids, skip_special_tokens=True)


@given(data=st.data())
def test_any_tokens_of_a_trained_vocabulary_decode_as_the_library_decodes_them(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=40))
    assert tokenizer.decode(ids) == tokenizer._tokenizer.decode(ids, skip_special_tokens=False)


@given(text=st.text(max_size=60))
def test_any_text_comes_back_and_is_encoded_as_the_library_encodes_it(byte_tokenizer, text):
    ids = byte_tokenizer.encode(text)
    assert ids == byte_tokenizer._tokenizer.encode(text).ids
    assert byte_tokenizer.decode(ids) == text
