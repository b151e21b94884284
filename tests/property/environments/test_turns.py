"""The pieces of a streamed answer add up to its content, for any tokenizer, text and cut into pieces."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.sdk.inference.sampling import Sample, Sampling
from environments.sdk.session.prompt_tokens import Chat, Prompt
from environments.sdk.session.turns import DeltaWriter, SampleReader, Turn
from environments.sdk.testing_servers import make_chat_tokenizer
from environments.sdk.tokenizer import Codec
from environments.sdk.tools import HermesParser, JsonParser

EXAMPLES = int(os.environ.get("ATROPOS_PROPERTY_EXAMPLES", "100"))
END = "<end>"
PIECES = [
    "a",
    " b",
    "é",
    "数",
    "🙂",
    "\n",
    "<",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {}}',
    "STOP",
    "ST",
]


class SentencePiece:
    """A tokenizer like Llama's: spaces are letters, missing ones are spelled in bytes, a first space is lost."""

    def __init__(self):
        from tokenizers import Tokenizer, decoders, models, normalizers

        letters = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"ab<>TOPS"]
        model = models.BPE({letter: i for i, letter in enumerate(letters)}, [], unk_token="<unk>", byte_fallback=True)
        self.inner = Tokenizer(model)
        self.inner.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        self.inner.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        self.inner.add_special_tokens([END])
        self.eos_token_id = 1
        self.all_special_ids = [1]

    def encode(self, text, add_special_tokens=True):
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, tokens, skip_special_tokens=False):
        return self.inner.decode(list(tokens), skip_special_tokens=skip_special_tokens)


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    return [Codec(make_chat_tokenizer(tmp_path_factory.mktemp("chatml"), "chatml")), Codec(SentencePiece())]


@settings(max_examples=EXAMPLES)
@given(
    which=st.integers(0, 1),
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
    parser=st.sampled_from([None, HermesParser(), JsonParser()]),
    stop=st.sampled_from([(), ("STOP",)]),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    ended=st.booleans(),
)
def test_the_pieces_of_an_answer_are_its_content(codecs, which, pieces, parser, stop, cuts, ended):
    codec = codecs[which]
    tokens = codec.encode_part("".join(pieces))
    sample = Sample([*tokens, codec.tokenizer.eos_token_id] if ended else tokens, [], "stop" if ended else "length", [])
    sampling = Sampling(stop=stop)
    chat = Chat.read([{"role": "user", "content": "hi"}], None, {})
    turn = Turn(Prompt([], "", None, chat), [], False, sampling, "train", {}, parser)
    told = []
    reader = SampleReader(codec)
    writer = DeltaWriter(codec, reader, told.append)
    received = 0
    for cut in sorted({min(cut, len(sample.tokens)) for cut in cuts}):
        writer.receive(turn, 0, sample.tokens[received:cut], [0.0] * (cut - received))
        received = cut
    node = reader.read(turn, sample)
    writer.end(turn, 0, sample, node)
    message = node.metadata["message"]
    assert "".join(delta.text for delta in told) == (message.content or "")
    assert sum("id" in part for delta in told for part in delta.tool_calls) == len(message.tool_calls or ())
    assert [delta.finish_reason for delta in told if delta.finish_reason] == [node.metadata["choice_finish_reason"]]
