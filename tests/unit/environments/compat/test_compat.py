"""Our code behind Atropos' names does what environments expect, without the faults of the originals."""

import inspect
import json
import sys

import numpy as np
import pytest

from environments.compat import envs, rewards, servers, utils
from environments.compat.envs import BaseEnv
from environments.compat.runner import ALIASES, AliasFinder, give_lists
from environments.compat.servers import BaseEnvConfig
from environments.compat.utils import generate_html
from environments.rewards import math as math_rewards
from environments.sdk.testing import FakeInference, InProcess
from environments.sdk.testing_servers import make_chat_tokenizer


def test_every_alias_can_be_imported_and_nothing_is_left_of_it_without_the_hook(hooked):
    import importlib

    for name in ALIASES:
        importlib.import_module(name)
    from atroposlib.envs.base import BaseEnv

    from environments.compat.envs import BaseEnv as Ours

    assert BaseEnv is Ours
    with pytest.raises(ModuleNotFoundError, match="not provided"):
        importlib.import_module("atroposlib.envs.other")


def test_transformers_tokenizers_give_lists_again(tokenizer_folder, monkeypatch):
    from transformers import AutoTokenizer, tokenization_utils_base

    base = tokenization_utils_base.PreTrainedTokenizerBase
    own = AutoTokenizer.from_pretrained(str(tokenizer_folder))
    chat = [{"role": "user", "content": "2 + 2?"}]
    # Another test of this process may have installed the patch for the whole process.
    monkeypatch.setattr(base, "apply_chat_template", inspect.unwrap(base.apply_chat_template))
    expected = own.apply_chat_template(chat, return_dict=False)
    assert own.apply_chat_template(chat) != expected, "transformers changed back; the patch can go"
    give_lists(tokenization_utils_base)
    give_lists(tokenization_utils_base)
    assert own.apply_chat_template(chat) == expected
    assert own.apply_chat_template(chat, return_dict=True)["input_ids"] == expected


def test_without_the_hook_the_name_is_unknown():
    assert not any(isinstance(finder, AliasFinder) for finder in sys.meta_path)
    with pytest.raises(ModuleNotFoundError):
        __import__("atroposlib")


CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


def test_tokens_of_a_chat_are_masked_up_to_the_last_answer(tokenizer):
    out = utils.tokenize_for_trainer(tokenizer, CHAT, include_messages=True)
    assert out["messages"] == CHAT
    trained = [value for value in out["masks"] if value != -100]
    assert out["tokens"][-len(trained) :] == trained
    assert tokenizer.decode(trained).startswith("yes")


def test_tokens_of_every_answer_are_trained_where_asked(tokenizer):
    out = utils.tokenize_for_trainer(tokenizer, CHAT, train_on_all_assistant_turns=True)
    text = tokenizer.decode([value for value in out["masks"] if value != -100])
    assert "4" in text
    assert "yes" in text
    assert "sure" not in text


def test_a_chat_that_was_cut_off_has_no_end_token(tokenizer):
    whole = utils.tokenize_for_trainer(tokenizer, CHAT)["tokens"]
    cut = utils.tokenize_for_trainer(tokenizer, CHAT, finish_reason="length")["tokens"]
    assert cut == (whole[:-1] if whole[-1] == tokenizer.eos_token_id else whole)


def test_apostrophes_survive_the_parsing_of_a_tool_call():
    call = {"name": "say", "arguments": {"text": 'it\'s "here"'}}
    text = f"<tool_call>{json.dumps(call)}</tool_call>"
    assert utils.parse_tool_call(text, [{"name": "say"}]) == ("say", call["arguments"], False)
    assert utils.parse_tool_call(f"<tool_call>{call!r}</tool_call>") == ("say", call["arguments"], False)
    assert utils.parse_tool_call(text, [{"name": "other"}])[2] is True
    assert utils.parse_tool_call("no call") == ("-ERROR-", {}, True)


def test_a_call_with_pythons_quotes_and_jsons_values_is_read_as_atropos_reads_it():
    text = "<tool_call>{'name': 'say', 'arguments': {'loud': true, 'times': null}}</tool_call>"
    assert utils.parse_tool_call(text) == ("say", {"loud": True, "times": None}, False)


@pytest.mark.parametrize("body", ['{{"name": "say", "arguments": {}}}', "{[1]: 2}", "{'name': }", "(" * 1000])
def test_what_a_model_wrote_as_a_call_and_is_none_fails_nothing(body):
    assert utils.parse_tool_call(f"<tool_call>{body}</tool_call>") == ("-ERROR-", {}, True)


def test_thoughts_are_shortened_to_the_last_paragraph_that_fits(tokenizer):
    text = "<think>one two three\n\nfour</think>ended"
    short = utils.truncate_thinking(text, tokenizer, 5)
    assert "four" in short
    assert "one" not in short
    assert short.endswith("</think>ended")
    assert utils.truncate_thinking(text, tokenizer, 500).count("one") == 1
    assert utils.strip_thinking(f"a{text}") == "aended"


def test_a_trajectory_loses_its_oldest_turns_or_the_step(tokenizer):
    long = [CHAT[0], *CHAT[:2] * 6, CHAT[2], CHAT[3]]
    out = utils.tokenize_for_trainer(tokenizer, long)
    step = {"messages": [long], "tokens": [out["tokens"]], "masks": [out["masks"]], "scores": [1.0], "seed": 3}
    most = len(out["tokens"]) - 4
    (kept,) = utils.ensure_trajectory_token_limit([step], tokenizer, most)
    assert len(kept["tokens"][0]) <= most
    assert kept["messages"][0][0] == CHAT[0]
    assert kept["messages"][0][-1] == CHAT[3]
    assert kept["seed"] == 3
    assert utils.ensure_trajectory_token_limit([step], tokenizer, 2) == []


def test_the_best_is_chosen_by_the_first_scores_then_the_second():
    assert utils.select_best_index([1, 3, 3], [0, 5, 2]) == 2
    assert utils.select_best_index([1, 3, 3], [0, 2, 2]) == 1
    assert utils.select_best_index([1, 3, 3], [0, 2, 2], primary_higher_is_better=False) == 0


def test_a_reward_that_fails_is_an_error_and_not_a_score_of_nothing():
    class Broken(rewards.RewardFunction):
        def compute(self, completions, **kwargs):
            raise OSError("no judge")

    with pytest.raises(OSError, match="no judge"):
        Broken()(["x"])


def test_a_combination_counts_the_weights_of_its_parts():
    registry = rewards.registry
    registry.register_function("length_of", lambda completions, **_: [len(text) for text in completions])
    parts = [{"type": "length_of", "weight": 2.0}, {"type": "length_of", "params": {"weight": 0.5}}]
    assert rewards.CombinedReward(parts)(["ab", "abcd"]) == [5.0, 10.0]
    assert rewards.CombinedReward(parts, normalization="sum")(["ab", "abcd"]) == [2.0, 4.0]


async def _in_a_loop():
    return rewards.registry.create("accuracy")(["It is \\boxed{4}", "\\boxed{5}"], solution=["\\boxed{4}"] * 2)


@pytest.mark.anyio
async def test_rewards_of_this_package_answer_to_atropos_names():
    good, bad = await _in_a_loop()
    assert good > bad


def test_a_reward_by_atropos_name_starts_one_process_for_all_its_calls(monkeypatch):
    started = []
    accuracy = math_rewards.MathVerifier
    monkeypatch.setattr(math_rewards, "MathVerifier", lambda: started.append(1) or accuracy(workers=1))
    score = rewards.registry.create("accuracy")
    for _ in range(2):
        assert score(["\\boxed{4}"], solution=["4"]) == [1.0]
    assert started == [1]


def test_the_ground_truth_counts_before_a_solution_and_none_is_no_reference(monkeypatch):
    accuracy = math_rewards.MathVerifier
    monkeypatch.setattr(math_rewards, "MathVerifier", lambda: accuracy(workers=1))
    score = rewards.registry.create("accuracy")
    assert score(["\\boxed{4}", "\\boxed{5}"], solution=["5", "4"], ground_truth=["4", "4"]) == [1.0, 0.0]
    assert score(["\\boxed{4}"], solution="4", ground_truth=None) == [1.0]


@pytest.mark.parametrize("score", [0.5, np.float64(0.5), np.array(0.5)], ids=["float", "number", "array"])
def test_one_score_of_a_function_is_that_of_every_completion(score):
    rewards.registry.register_function("same_for_all", lambda completions, **_: score)
    assert rewards.registry.create("same_for_all")(["a", "b"]) == [0.5, 0.5]


def test_a_reward_of_this_package_is_said_not_to_be_atropos_own(caplog):
    rewards.registry.create("format")
    assert "the reward format is this package's format, not Atropos' own" in caplog.text


def test_settings_that_a_reward_of_this_package_does_not_take_are_said_to_be_ignored(caplog):
    config = {"type": "repetition_penalty", "weight": 2.0, "params": {"threshold": 0.1}}
    assert rewards.registry.create(config)(["a a a a a a"]) == [-1.5]
    assert "repetition_penalty" in caplog.text
    assert "threshold" in caplog.text


def test_a_reward_that_only_shares_the_name_of_atropos_is_not_taken_for_it():
    """Atropos' `cosine_scaled` compares embeddings of texts; ours scales by length."""
    with pytest.raises(KeyError, match="no reward 'cosine_scaled'"):
        rewards.registry.create("cosine_scaled")


def test_pass_at_k():
    assert envs.pass_at_k(4, 4, 1) == 1.0
    assert envs.pass_at_k(4, 1, 1) == pytest.approx(0.25)
    assert envs.pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)


def test_returns_are_discounted():
    assert utils.compute_discounted_returns([1, 0, 2], 0.5).tolist() == [1.5, 1.0, 2.0]
    assert utils.compute_stats([[1, 2], [3]])["mean"] == 2


@pytest.fixture
def manager(tokenizer_folder, tokenizer):
    config = {"server_type": "vllm", "base_url": "http://fake/v1", "tokenizer_name": str(tokenizer_folder)}
    found = servers.ServerManager([servers.APIServerConfig(**config)])
    fake = FakeInference(lambda *_: [*tokenizer.encode("4"), 1], end=1)
    for server in found.servers:
        server.channel._transport = InProcess(fake)
    return found


@pytest.mark.anyio
async def test_a_session_poses_as_openais_client(manager):
    async with manager.managed_server() as session:
        client = servers.ManagedServerAdapter(session, base_url="http://x/v1")
        answer = await client.chat.completions.create(model="m", messages=CHAT[:1])
        assert answer.choices[0].message.content == "4"
        assert len(session.nodes) == 1
        with pytest.raises(NotImplementedError):
            client.copy(timeout=1)


@pytest.mark.anyio
async def test_an_environment_can_serve_sessions_itself_and_is_told_where_they_live(manager, tmp_path):
    own = make_chat_tokenizer(tmp_path, "llama")
    app = InProcess(servers.create_app(manager, own, "m"))
    created = json.loads((await app.request("POST", "http://x/sessions/create", b"{}")).content)
    assert (created["model_name"], created["tool_parser"], created["base_url"]) == ("m", "hermes", "http://fake/v1")
    body = json.dumps({"messages": CHAT[:1]}).encode()
    shown = await app.request("POST", f"http://x/{created['uuid']}/v1/chat/completions/render", body)
    assert json.loads(shown.content)["token_ids"] == own.apply_chat_template(CHAT[:1], add_generation_prompt=True)
    answer = await app.request("POST", f"http://x/{created['uuid']}/v1/chat/completions", body)
    assert json.loads(answer.content)["model"] == "m"
    assert json.loads((await app.request("GET", "http://x/health", None)).content)["model"] == "m"
    assert (await app.request("POST", "http://x/sessions/create", b'{"base_url": "http://no/v1"}')).status == 404
    assert (
        await app.request("POST", f"http://x/{created['uuid']}/v1/chat/completions", b'{"messages": []}')
    ).status == 400
    with pytest.raises(NotImplementedError, match="use_proxy=True"):
        await servers.create_proxy_session("http://localhost:9100")


def test_a_page_of_groups_is_written_where_it_is_wanted(tmp_path):
    path = tmp_path / "groups.jsonl"
    group = {"tokens": [[1]], "masks": [[1]], "scores": [1.0], "messages": [[{"role": "user", "content": "<b>hi"}]]}
    path.write_text(json.dumps(group) + "\n")
    generate_html(str(path), str(tmp_path / "page.html"))
    assert "&lt;b&gt;hi" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(("variable", "allowed"), [("1", True), ("0", False), (None, False)])
def test_the_variable_that_allows_text_alone_has_an_effect(monkeypatch, tokenizer_folder, variable, allowed):
    if variable is not None:
        monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", variable)

    class Env(BaseEnv):
        async def get_next_item(self):
            """Do nothing."""

        async def evaluate(self, *_, **__):
            """Do nothing."""

    env = Env(BaseEnvConfig(tokenizer_name=str(tokenizer_folder)), servers.APIServerConfig())
    assert env.server.allow_estimated_tokens is allowed
