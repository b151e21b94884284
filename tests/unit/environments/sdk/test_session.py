"""Managed sessions: the server's samples are kept token by token, over any number of turns."""

import subprocess
import sys

import anyio
import pytest

from environments.sdk.config import APIServerConfig
from environments.sdk.errors import InferenceAborted, SamplingNotTrainable, TokensUnavailable
from environments.sdk.groups import group_items, scored_group, scored_item, to_wire
from environments.sdk.inference.server import OpenAIServer
from environments.sdk.inference.vllm import VllmServer
from environments.sdk.server_manager import ServerManager
from environments.sdk.session.session import ManagedSession
from environments.sdk.session.tokens_and_masks import NO_LOGPROB, NOT_TRAINED, SampleLog, record_samples
from environments.sdk.testing import FakeInference, InProcess, logprob_of, mask_of
from example_trainer.group_sequences import find_temperature

pytestmark = pytest.mark.anyio

QUESTION = {"role": "user", "content": "How many now?"}


def make_session(fake, tokenizer, **options):
    transport = InProcess(fake)
    config = APIServerConfig(server_type="vllm", base_url="http://fake/v1")
    return ManagedSession(VllmServer(config, transport=transport), tokenizer, **options)


def scripted(tokenizer, *texts):
    """Return a fake server that gives these texts in turn, each with an end token unless it ends with `…`."""
    end = tokenizer.eos_token_id
    said = iter(texts)

    def respond(_prompt, _index):
        text = next(said)
        return tokenizer.encode(text.removesuffix("…")) + ([] if text.endswith("…") else [end])

    return FakeInference(respond, end=end, version=3)


async def test_one_turn_keeps_tokens_masks_logprobs_and_versions(tokenizer):
    fake = scripted(tokenizer, "#### 7")
    session = make_session(fake, tokenizer)
    answer = await session.chat_completion(messages=[QUESTION], max_tokens=20)
    (node,) = session.get_state()["nodes"]
    prompt = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True)
    sampled = [*tokenizer.encode("#### 7"), tokenizer.eos_token_id]
    assert answer.choices[0].message.content == "#### 7"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(sampled))
    assert node.tokens == prompt + sampled
    assert node.masked_tokens == [NOT_TRAINED] * len(prompt) + sampled
    assert node.logprobs == [NO_LOGPROB] * len(prompt) + [logprob_of(t, i) for i, t in enumerate(sampled)]
    assert node.policy_versions == [(len(prompt), len(node.tokens), 3)]
    assert node.metadata["generation_params"] == {"temperature": 1.0}


async def test_version_spans_move_to_positions_of_the_whole_sequence(tokenizer):
    fake = scripted(tokenizer, "35+7=42")
    fake.changed_version_at = 4
    session = make_session(fake, tokenizer)
    await session.chat_completion(messages=[QUESTION])
    (node,) = session.nodes
    start = len(tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True))
    assert node.policy_versions == [(start, start + 4, 2), (start + 4, len(node.tokens), 3)]


async def test_a_second_turn_extends_the_sequence_without_a_doubled_end_token(tokenizer):
    fake = scripted(tokenizer, "First.", "Second.")
    session = make_session(fake, tokenizer)
    chat = [QUESTION]
    first = await session.chat_completion(messages=chat)
    chat = [*chat, {"role": "assistant", "content": first.choices[0].message.content}, QUESTION]
    await session.chat_completion(messages=chat)
    (node,) = session.nodes
    whole = [*chat, {"role": "assistant", "content": "Second."}]
    assert node.tokens == tokenizer.apply_chat_template(whole)
    assert fake.requests[1]["prompt"]["prompt_token_ids"] == node.tokens[: -len(tokenizer.encode("Second.")) - 1]
    trained = [token for token, mask in zip(node.tokens, node.masked_tokens, strict=True) if mask != NOT_TRAINED]
    end = [tokenizer.eos_token_id]
    assert trained == tokenizer.encode("First.") + end + tokenizer.encode("Second.") + end
    assert [span[2] for span in node.policy_versions] == [3, 3]
    assert len(node.logprobs) == len(node.masked_tokens) == len(node.tokens)


async def test_a_cut_off_turn_gets_its_end_token_from_the_template_untrained(tokenizer):
    session = make_session(scripted(tokenizer, "First…", "Second."), tokenizer)
    await session.chat_completion(messages=[QUESTION])
    chat = [QUESTION, {"role": "assistant", "content": "First"}, QUESTION]
    await session.chat_completion(messages=chat)
    (node,) = session.nodes
    assert node.tokens == tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "Second."}])
    first_end = node.tokens.index(tokenizer.eos_token_id, len(tokenizer.apply_chat_template([QUESTION])))
    assert node.masked_tokens[first_end] == NOT_TRAINED


async def test_what_was_sampled_is_never_tokenised_again(tokenizer):
    """Tokens that no encoder would produce for their text survive into the next turn's prompt."""
    odd = [token for character in "42" for token in tokenizer.encode(character)]
    odd = [*odd, *[tokenizer.encode(c)[0] for c in "gets"]]
    assert tokenizer.encode(tokenizer.decode(odd)) != odd
    end = tokenizer.eos_token_id
    fake = FakeInference(lambda _prompt, _index: [*odd, end], end=end)
    session = make_session(fake, tokenizer)
    first = await session.chat_completion(messages=[QUESTION])
    chat = [QUESTION, {"role": "assistant", "content": first.choices[0].message.content}, QUESTION]
    await session.chat_completion(messages=chat)
    start = len(tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True))
    assert fake.requests[1]["prompt"]["prompt_token_ids"][start : start + len(odd) + 1] == [*odd, end]


async def test_completions_carry_the_mask_of_earlier_turns(tokenizer):
    session = make_session(scripted(tokenizer, "35+7…", "=42"), tokenizer)
    first = await session.completion(prompt="Work: ", max_tokens=50)
    await session.completion(prompt="Work: " + first.choices[0].text, max_tokens=50)
    (node,) = session.nodes
    assert node.masked_tokens.count(NOT_TRAINED) == len(tokenizer.encode("Work: "))


async def test_the_samples_of_one_prompt_can_be_continued_at_the_same_time(tokenizer):
    end = tokenizer.eos_token_id
    letters = [tokenizer.encode(letter)[0] for letter in "abcd"]
    fake = FakeInference(lambda prompt, index: [letters[index], end], end=end, delay_seconds=0.01)
    session = make_session(fake, tokenizer)
    answer = await session.chat_completion(messages=[QUESTION], n=4)

    async def go_on(content):
        await session.chat_completion(messages=[QUESTION, {"role": "assistant", "content": content}, QUESTION])

    async with anyio.create_task_group() as group:
        for choice in reversed(answer.choices):
            group.start_soon(go_on, choice.message.content)
    start = len(tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True))
    assert [node.tokens[start] for node in session.nodes] == letters
    assert {node.sampled_count for node in session.nodes} == {4}


async def test_rewritten_history_becomes_a_sequence_of_its_own_and_is_logged(tokenizer, caplog):
    session = make_session(scripted(tokenizer, "First.", "Second."), tokenizer)
    await session.chat_completion(messages=[QUESTION])
    await session.chat_completion(messages=[QUESTION, {"role": "assistant", "content": "Something else"}, QUESTION])
    assert len(session.nodes) == 2
    assert "does not continue what was sampled" in caplog.text


async def test_stop_strings_are_in_the_tokens_and_not_in_the_answer(tokenizer):
    session = make_session(scripted(tokenizer, "42</answer>"), tokenizer)
    answer = await session.chat_completion(messages=[QUESTION], stop=["</answer>"])
    assert answer.choices[0].message.content == "42"
    assert "</answer>" in session.nodes[0].full_text


@pytest.mark.parametrize("empty", ["", "42"], ids=["ended", "stopped"])
async def test_an_empty_answer_is_not_continued_by_the_next_answer_to_its_prompt(tokenizer, empty):
    session = make_session(scripted(tokenizer, empty, "First.", "Second."), tokenizer)
    for prompt in ("How", "How", "How many"):
        await session.completion(prompt=prompt, stop=["42"])
    assert [node.metadata["content"] for node in session.nodes] == ["", "First.", "Second."]
    prompts = [[token for token in node.masked_tokens if token == NOT_TRAINED] for node in session.nodes]
    assert [len(prompt) for prompt in prompts] == [len(tokenizer.encode(p)) for p in ("How", "How", "How many")]


async def test_a_chat_that_is_asked_again_after_an_empty_answer_has_two_sequences(tokenizer):
    fake = scripted(tokenizer, "", "First.", "Second.")
    session = make_session(fake, tokenizer)
    for _ in range(2):
        await session.chat_completion(messages=[QUESTION])
    await session.chat_completion(messages=[QUESTION, {"role": "assistant", "content": "First."}])
    asked = [request["prompt"]["prompt_token_ids"] for request in fake.requests]
    assert asked[0] == asked[1] == asked[2][: len(asked[0])]
    assert asked[2][len(asked[0]) :] == tokenizer.encode("First.")


async def test_an_interrupted_extension_leaves_the_sequence_as_it_was(tokenizer):
    fake = scripted(tokenizer, "First.", "Second.")
    session = make_session(fake, tokenizer)
    await session.chat_completion(messages=[QUESTION])
    chat = [QUESTION, {"role": "assistant", "content": "First."}, QUESTION]
    fake.delay_seconds = 10
    with anyio.move_on_after(0.05):
        await session.chat_completion(messages=chat)
    fake.delay_seconds = 0
    await session.chat_completion(messages=chat)
    assert len(session.nodes) == 1


async def test_servers_of_the_atropos_protocol_are_read_as_well(tokenizer):
    fake = scripted(tokenizer, "#### 7")
    fake.ours = False
    session = make_session(fake, tokenizer)
    await session.chat_completion(messages=[QUESTION])
    (node,) = session.nodes
    assert node.sampled_count == len(tokenizer.encode("#### 7")) + 1
    assert node.policy_versions == []
    assert "compact" not in fake.requests[0]


@pytest.mark.parametrize("temperature", [0, 0.005])
async def test_greedy_samples_are_refused_for_training_and_allowed_for_evaluation(tokenizer, temperature):
    """R24: at temperature 0 there is no processed logprob to train on, and vLLM's are for 0.01 where less is asked."""
    session = make_session(scripted(tokenizer, "#### 7"), tokenizer)
    with pytest.raises(SamplingNotTrainable, match=f"temperature {temperature} "):
        await session.chat_completion(messages=[QUESTION], temperature=temperature)
    answer = await session.chat_completion(messages=[QUESTION], temperature=temperature, split="eval")
    assert answer.choices[0].message.content == "#### 7"


@pytest.mark.parametrize("field", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1}])
async def test_truncated_sampling_is_refused_unless_allowed_and_then_marked(tokenizer, field):
    """R24: the trainer recomputes the model's whole distribution."""
    session = make_session(scripted(tokenizer), tokenizer)
    with pytest.raises(SamplingNotTrainable, match=next(iter(field))):
        await session.chat_completion(messages=[QUESTION], **field)
    allowing = make_session(scripted(tokenizer, "7"), tokenizer, allow_truncated_sampling=True)
    await allowing.chat_completion(messages=[QUESTION], **field)
    params = allowing.nodes[0].metadata["generation_params"]
    assert params["truncated_sampling"] is True
    assert params.items() >= field.items()


async def test_a_turn_at_another_temperature_is_refused_unless_allowed_and_then_marked(tokenizer):
    """The trainer recomputes all turns of a sequence at one temperature."""

    async def talk(session):
        first = await session.chat_completion(messages=[QUESTION], temperature=0.7)
        chat = [QUESTION, first.choices[0].message.model_dump(), QUESTION]
        await session.chat_completion(messages=chat, temperature=1.0)

    with pytest.raises(SamplingNotTrainable, match=r"temperature 1 continues .* at 0\.7"):
        await talk(make_session(scripted(tokenizer, "35", "7"), tokenizer))
    allowing = make_session(scripted(tokenizer, "35", "7"), tokenizer, allow_truncated_sampling=True)
    await talk(allowing)
    (node,) = allowing.nodes
    assert node.metadata["generation_params"] == {"temperature": 1.0, "truncated_sampling": True}


async def test_truncated_sampling_of_an_earlier_turn_marks_the_whole_sequence(tokenizer):
    session = make_session(scripted(tokenizer, "35", "7"), tokenizer, allow_truncated_sampling=True)
    first = await session.chat_completion(messages=[QUESTION], top_p=0.9)
    await session.chat_completion(messages=[QUESTION, first.choices[0].message.model_dump(), QUESTION])
    (node,) = session.nodes
    assert node.metadata["generation_params"]["truncated_sampling"] is True


@pytest.mark.parametrize("build", ["scored_group", "group_items", "by hand"])
async def test_rollouts_that_were_sampled_differently_say_so_in_their_group(tokenizer, build):
    """A group has the parameters of one rollout; the trainer reads a temperature per rollout."""
    session = make_session(scripted(tokenizer, "35", "7", "8"), tokenizer, allow_truncated_sampling=True)
    with record_samples("train") as sample_log:
        for number, sampling in enumerate([{"temperature": 0.7}, {"temperature": 1.2, "top_p": 0.9}, {}]):
            await session.chat_completion(messages=[{**QUESTION, "content": str(number)}], **sampling)
    nodes = session.nodes
    if build == "scored_group":
        raw = scored_group(nodes, [0, 1, 2])
    elif build == "group_items":
        raw = group_items([scored_item(node, number) for number, node in enumerate(nodes)])
    else:
        raw = {"tokens": [n.tokens for n in nodes], "masks": [n.masked_tokens for n in nodes], "scores": [0, 1, 2]}
    group = to_wire({**raw, "overrides": [None, {"weight": 2}, None]}, sample_log)
    assert [find_temperature(group, index) for index in range(3)] == [0.7, 1.2, 1.0]
    assert group.overrides[1]["weight"] == 2
    assert group.generation_params["truncated_sampling"] is True


class Aborting(FakeInference):
    def _reply(self, request):
        return {**FakeInference._reply(self, request), "finish_reasons": ["abort"]}


@pytest.mark.parametrize("ours", [True, False])
async def test_an_answer_that_its_server_cut_off_for_a_pause_is_asked_for_again_and_not_scored(tokenizer, ours):
    config = APIServerConfig(server_type="vllm", base_url="http://fake/v1")
    fake = Aborting(lambda *_: [7, 8], end=tokenizer.eos_token_id, ours=ours)
    servers = ServerManager([config], load_tokenizer=lambda: tokenizer, transport=InProcess(fake))
    async with servers.managed_server() as session:
        with pytest.raises(InferenceAborted, match="aborted"):
            await session.chat_completion(messages=[QUESTION])
    assert session.nodes == []
    assert not InferenceAborted.ends_server


MASKED = {"allow_truncated_sampling": True, "sampling_mask_limit": 8}


@pytest.mark.parametrize("streamed", [False, True])
async def test_sampling_masks_stand_at_their_tokens_over_several_turns(tokenizer, streamed):
    session = make_session(scripted(tokenizer, "35", "7"), tokenizer, **MASKED)
    more = {"on_delta": lambda _: None} if streamed else {}
    await session.chat_completion(messages=[QUESTION], top_p=0.9, **more)
    said = [QUESTION, {"role": "assistant", "content": "35"}, QUESTION]
    await session.chat_completion(messages=said, top_p=0.9, **more)
    (node,) = session.nodes
    masks = [[] if kept == NOT_TRAINED else mask_of(kept) for kept in node.masked_tokens]
    assert node.sampling_masks == masks
    assert any(masks), "a test of empty masks alone would show nothing"
    assert scored_group([node], [1.0])["sampling_masks"] == [masks]


async def test_masks_of_a_turn_at_another_temperature_are_left_out_as_its_ratio_is_not_exact(tokenizer):
    """The trainer computes all turns at the last one's temperature, and clips by the ratio of a token with a mask."""
    session = make_session(scripted(tokenizer, "35", "7"), tokenizer, **MASKED)
    await session.chat_completion(messages=[QUESTION], top_p=0.9, temperature=0.7)
    assert any(session.nodes[0].sampling_masks)
    before = len(session.nodes[0].tokens)
    said = [QUESTION, {"role": "assistant", "content": "35"}, QUESTION]
    await session.chat_completion(messages=said, top_p=0.9, temperature=1.0)
    (node,) = session.nodes
    masks = [[] if kept == NOT_TRAINED else mask_of(kept) for kept in node.masked_tokens]
    assert node.sampling_masks == [[] for _ in range(before)] + masks[before:]
    assert node.metadata["generation_params"]["truncated_sampling"] is True


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ({"top_k": 5, "min_p": 0.1}, 8),
        ({"top_p": 0.9, "min_tokens": 2}, 8),
        ({"top_p": 0.9, "presence_penalty": 1}, None),
        ({"min_tokens": 2}, None),
    ],
)
async def test_masks_are_requested_where_they_make_the_ratio_exact(tokenizer, field, asked):
    """A penalty changes the logits of the tokens that stay, which no mask can repeat; no mask holds all but a few."""
    fake = scripted(tokenizer, "7", "7")
    session = make_session(fake, tokenizer, **MASKED)
    await session.chat_completion(messages=[QUESTION], **field)
    await session.chat_completion(messages=[QUESTION])
    assert [request.get("sampling_mask_limit") for request in fake.requests] == [asked, None]
    assert [node.sampling_masks is None for node in session.nodes] == [asked is None, True]


async def test_a_server_without_sampling_masks_is_refused_where_they_are_wanted(tokenizer):
    fake = scripted(tokenizer, "7")
    fake.ours = False
    session = make_session(fake, tokenizer, **MASKED)
    with pytest.raises(SamplingNotTrainable, match=r"mask_limit 8: http://fake/v1 .* returns no sampling masks"):
        await session.chat_completion(messages=[QUESTION], top_p=0.9)


async def test_a_group_of_single_rollouts_has_the_masks_of_those_that_have_some(tokenizer):
    session = make_session(scripted(tokenizer, "7", "7"), tokenizer, **MASKED)
    await session.chat_completion(messages=[QUESTION], top_p=0.9)
    await session.chat_completion(messages=[QUESTION])
    masked, whole = session.nodes
    group = to_wire(group_items([scored_item(masked, 1.0), scored_item(whole, 0.0)]), SampleLog("train"))
    assert group.sampling_masks == [masked.sampling_masks, [[] for _ in whole.tokens]]
    log = SampleLog("train", [masked])
    by_hand = {"tokens": [masked.tokens], "masks": [masked.masked_tokens], "scores": [1.0]}
    assert to_wire(by_hand, log).sampling_masks == [masked.sampling_masks]


async def test_neutral_sampling_values_are_not_truncation(tokenizer):
    session = make_session(scripted(tokenizer, "7"), tokenizer)
    await session.chat_completion(messages=[QUESTION], top_p=1.0, top_k=-1, min_p=0.0)
    assert session.nodes[0].metadata["generation_params"] == {"temperature": 1.0}


async def test_a_server_without_tokens_says_what_to_set(tokenizer):
    server = OpenAIServer(APIServerConfig(server_type="openai", base_url="http://fake/v1"))
    session = ManagedSession(server, tokenizer)
    with pytest.raises(TokensUnavailable, match=r"--openai\.server_type vllm"):
        await session.chat_completion(messages=[QUESTION])


def test_a_finished_session_is_freed_at_once_and_not_by_the_garbage_collector(tokenizer_folder):
    """A circle of references would keep every rollout's lists until a full collection.

    It runs in a process of its own, where nothing else refers to these objects.
    """
    probe = f"""
import gc, anyio
from environments.sdk.config import APIServerConfig
from environments.sdk.inference.vllm import VllmServer
from environments.sdk.session.tokens_and_masks import SequenceNode
from environments.sdk.session.session import ManagedSession
from environments.sdk.testing import FakeInference, InProcess
from environments.sdk.tokenizer import load_tokenizer

tokenizer = load_tokenizer({str(tokenizer_folder)!r})
fake = FakeInference(lambda *_: [*tokenizer.encode("7"), tokenizer.eos_token_id], end=tokenizer.eos_token_id)
server = VllmServer(APIServerConfig(server_type="vllm", base_url="http://fake/v1"), transport=InProcess(fake))

async def two_turns():
    session = ManagedSession(server, tokenizer)
    first = await session.chat_completion(messages=[{QUESTION!r}])
    said = {{"role": "assistant", "content": first.choices[0].message.content}}
    await session.chat_completion(messages=[{QUESTION!r}, said, {QUESTION!r}])
    assert any(isinstance(found, SequenceNode) for found in gc.get_objects())

gc.disable()
anyio.run(two_turns)
left = sum(isinstance(found, SequenceNode) for found in gc.get_objects())
raise SystemExit(f"{{left}} sequences are left" if left else 0)
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
