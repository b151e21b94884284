"""Random chats, tools, branches and cuts over several templates: sequences have exactly what the server returned."""

import json

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from environments.sdk.config import APIServerConfig
from environments.sdk.inference.vllm import VllmServer
from environments.sdk.session.session import ManagedSession
from environments.sdk.session.tokens_and_masks import NO_LOGPROB, NOT_TRAINED
from environments.sdk.testing import FakeInference, InProcess, logprob_of
from environments.sdk.testing_servers import TEMPLATES, make_chat_tokenizer

PIECES = ["ab", "abab", " ", "\n", "12", "ell", "é", "{", '"', "<think>", "</think>", "\n\n", "x' "]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "it\'s"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    return {family: make_chat_tokenizer(folder / family, family) for family in TEMPLATES}


@st.composite
def turns(draw):
    """Draw a turn: the user's text, the answer (text, tool call or any tokens), cut off or not, number of samples."""
    kind = draw(st.sampled_from(["text", "call", "tokens"]))
    text = "".join(draw(st.lists(st.sampled_from(PIECES), max_size=6)))
    return {
        "said": "".join(draw(st.lists(st.sampled_from(PIECES), max_size=4))),
        "kind": kind,
        "text": text + CALL if kind == "call" else text,
        "tokens": draw(st.lists(st.integers(0, 265), max_size=8)),
        "cut": draw(st.booleans()),
        "version": draw(st.integers(1, 9)),
        "n": draw(st.sampled_from([1, 1, 1, 2])),
    }


class Scripted:
    """A server that gives the answers of the turns, and records the answer to each prompt."""

    def __init__(self, tokenizer, script):
        self.tokenizer = tokenizer
        self.script = script
        self.turn = 0
        self.given = []
        self.fake = FakeInference(self.respond, end=tokenizer.eos_token_id)

    def respond(self, prompt, _index):
        turn = self.script[self.turn]
        body = turn["tokens"] if turn["kind"] == "tokens" else self.tokenizer.encode(turn["text"])
        tokens = body if turn["cut"] and body else [*body, self.tokenizer.eos_token_id]
        self.fake.version = turn["version"]
        self.given.append((list(prompt), tokens, turn["version"]))
        return tokens

    def session(self, **options):
        server = VllmServer(APIServerConfig(server_type="vllm"), transport=InProcess(self.fake))
        return ManagedSession(server, self.tokenizer, **options)

    async def talk(self, session):
        chat = []
        for number, turn in enumerate(self.script):
            self.turn = number
            chat.append({"role": "user", "content": turn["said"]})
            answer = await session.chat_completion(messages=chat, n=turn["n"], tools=TOOLS)
            chat.append(json.loads(json.dumps(answer.choices[-1].message.model_dump())))
            for call in answer.choices[-1].message.tool_calls or []:
                chat.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
        return chat


def check(nodes, given):
    """Check that every sequence ends in a returned sample after its prompt, and its trained tokens were sampled."""
    by_prompt = {(tuple(prompt), tuple(tokens)): version for prompt, tokens, version in given}
    for node in nodes:
        assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
        covered = []
        for start, end, version in node.policy_versions:
            assert by_prompt[tuple(node.tokens[:start]), tuple(node.tokens[start:end])] == version
            expected = [logprob_of(token, i) for i, token in enumerate(node.tokens[start:end])]
            assert node.logprobs[start:end] == expected
            assert node.masked_tokens[start:end] == node.tokens[start:end]
            covered += range(start, end)
        others = set(range(len(node.tokens))) - set(covered)
        assert all(node.masked_tokens[i] == NOT_TRAINED and node.logprobs[i] == NO_LOGPROB for i in others)
        assert covered[-1] == len(node.tokens) - 1


SETTINGS = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SETTINGS
@given(script=st.lists(turns(), min_size=1, max_size=4), family=st.sampled_from(sorted(TEMPLATES)))
def test_trained_positions_are_exactly_the_sampled_ones(tokenizers, script, family):
    server = Scripted(tokenizers[family], script)

    async def run():
        session = server.session()
        await server.talk(session)
        return session

    session = anyio.run(run)
    check(session.nodes, server.given)
    # One conversation is one sequence, even if the template trims or drops text; each further sample is one more.
    assert len(session.nodes) == 1 + sum(turn["n"] - 1 for turn in script)
    longest = max(session.nodes, key=lambda node: len(node.tokens))
    assert [span[2] for span in longest.policy_versions] == [turn["version"] for turn in script]
    assert longest.full_text == server.tokenizer.decode(longest.tokens) or any(t["kind"] == "tokens" for t in script)


@SETTINGS
@given(script=st.lists(turns(), min_size=2, max_size=4), family=st.sampled_from(sorted(TEMPLATES)))
def test_templates_that_drop_thoughts_may_fork_but_never_lose_or_invent_a_token(tokenizers, script, family):
    server = Scripted(tokenizers[family], script)

    async def run():
        session = server.session(preserve_think_blocks=False)
        await server.talk(session)
        return session.nodes

    nodes = anyio.run(run)
    check(nodes, server.given)
    sampled = [(tuple(n.tokens[:a]), tuple(n.tokens[a:b])) for n in nodes for a, b, _ in n.policy_versions]
    assert {(tuple(prompt), tuple(tokens)) for prompt, tokens, _ in server.given} == set(sampled)


@SETTINGS
@given(script=st.lists(turns(), min_size=1, max_size=4), seed=st.integers(0, 3))
def test_texts_gone_on_with_keep_every_earlier_turn(tokenizers, script, seed):
    """Completions of plain text have masks and logprobs of earlier turns just as chats have."""
    server = Scripted(tokenizers["chatml"], script)

    async def run():
        session = server.session()
        text = "start" * seed
        for number, turn in enumerate(script):
            server.turn = number
            await session.completion(prompt=text + (turn["said"] or "\n"))
            node = session.nodes[-1]
            # After an empty answer only its end token tells that a text goes on: else its prompt is asked again.
            text = node.texts[0] if node.metadata["content"] else node.full_text
        return session.nodes

    nodes = anyio.run(run)
    check(nodes, server.given)
    assert len(nodes) == 1
    assert len(nodes[0].policy_versions) == len(script)
