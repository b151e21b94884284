"""For any chat, any samples and any truncation: tokens, masks, logprobs and spans are those the server gave."""

import anyio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from environments.sdk.config import APIServerConfig
from environments.sdk.inference.vllm import VllmServer
from environments.sdk.session.session import ManagedSession
from environments.sdk.session.tokens_and_masks import NO_LOGPROB, NOT_TRAINED
from environments.sdk.testing import FakeInference, InProcess, logprob_of

END = 1
words = st.text(alphabet="ab 12+=\n#é", max_size=12)
samples = st.lists(st.integers(5, 300), max_size=12)


@st.composite
def conversations(draw):
    """Draw turns: the user's text, the sampled tokens, whether they were cut off, and their version."""
    count = draw(st.integers(1, 4))
    return [(draw(words), draw(samples), draw(st.booleans()), draw(st.integers(1, 9))) for _ in range(count)]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=conversations())
def test_every_sampled_token_is_kept_as_it_came(tokenizer, turns):
    answers = []

    def respond(_prompt, _index):
        _, tokens, cut, version = turns[len(answers)]
        answers.append(tokens if cut and tokens else [*tokens, END])
        fake.version = version
        return answers[-1]

    fake = FakeInference(respond, end=END)
    server = VllmServer(APIServerConfig(server_type="vllm"), transport=InProcess(fake))

    async def talk():
        session = ManagedSession(server, tokenizer)
        chat = []
        for said, *_ in turns:
            chat.append({"role": "user", "content": said})
            answer = await session.chat_completion(messages=chat)
            chat.append({"role": "assistant", "content": answer.choices[0].message.content})
        return session.nodes

    nodes = anyio.run(talk)
    check_alignment(nodes)
    assert sampled_of(nodes) == [token for tokens in answers for token in tokens]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=conversations())
def test_a_conversation_stays_one_sequence_when_its_text_survives(tokenizer, turns):
    """Byte sequences that are not text cannot be continued as text; all others must be."""
    if any("\ufffd" in tokenizer.decode(tokens) for _, tokens, *_ in turns):
        return
    answers = iter([tokens if cut and tokens else [*tokens, END] for _, tokens, cut, _ in turns])
    fake = FakeInference(lambda _prompt, _index: next(answers), end=END)
    server = VllmServer(APIServerConfig(server_type="vllm"), transport=InProcess(fake))

    async def talk():
        session = ManagedSession(server, tokenizer)
        chat = []
        for said, *_ in turns:
            chat.append({"role": "user", "content": said})
            answer = await session.chat_completion(messages=chat)
            chat.append({"role": "assistant", "content": answer.choices[0].message.content})
        return session.nodes, chat

    nodes, chat = anyio.run(talk)
    assert len(nodes) == 1
    ended = nodes[0].finish_reason == "stop"
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer.decode(nodes[0].tokens) == (text if ended else text.removesuffix("<|end|>"))


def check_alignment(nodes):
    for node in nodes:
        sampled = [i for i, mask in enumerate(node.masked_tokens) if mask != NOT_TRAINED]
        assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
        assert all(node.masked_tokens[i] == node.tokens[i] for i in sampled)
        assert all(
            (value == NO_LOGPROB) == (node.masked_tokens[i] == NOT_TRAINED) for i, value in enumerate(node.logprobs)
        )
        assert [i for start, end, _ in node.policy_versions for i in range(start, end)] == sampled
        for start, end, _ in node.policy_versions:
            assert node.logprobs[start:end] == [logprob_of(node.tokens[i], i - start) for i in range(start, end)]


def sampled_of(nodes):
    return [mask for node in nodes for mask in node.masked_tokens if mask != NOT_TRAINED]
