"""Environments of the verifiers library as ours. The package is an extra: without it only its absence is tested."""

from __future__ import annotations

import importlib.util
import json
import signal
import threading

import pytest

from environments.sdk.errors import InferenceRefused
from environments.sdk.rehearsal import Rehearsal
from environments.sdk.session.tokens_and_masks import NO_LOGPROB, NOT_TRAINED
from environments.verifiers_server import VerifiersEnv, VerifiersEnvConfig, VerifiersMissing, VerifiersRolloutFailed

pytestmark = pytest.mark.anyio

installed = importlib.util.find_spec("verifiers") is not None
needs_package = [
    pytest.mark.skipif(not installed, reason="verifiers is not installed"),
    pytest.mark.filterwarnings("default"),  # warnings of the library and of its dependencies
]

THEIRS = '''
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"Twice {n}?", "answer": str(2 * n)} for n in range(1, 5)]


async def right(completion, answer, **_):
    last = completion[-1]["content"] if isinstance(completion, list) else completion
    return float(answer in last)


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: the number
    """
    return 2 * number


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [vf.UserMessage(content="Sure?")]


class Broken(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        raise vf.ToolError("the tool is gone")


def load_environment(kind, answer=None):
    rows = Dataset.from_list(ROWS)
    more = {"dataset": rows, "eval_dataset": rows, "rubric": vf.Rubric(funcs=[right])}
    if kind == "tool":
        return vf.ToolEnv(tools=[double], max_turns=4, **more)
    if kind == "text":
        rows = Dataset.from_list([{"prompt": row["question"], "answer": row["answer"]} for row in ROWS])
        return vf.SingleTurnEnv(message_type="completion", **{**more, "dataset": rows})
    if kind == "single":
        return vf.SingleTurnEnv(**more)
    return {"twice": Twice, "broken": Broken}[kind](max_turns=2, **more)
'''


@pytest.fixture
def theirs(tmp_path):
    path = tmp_path / "their_env.py"
    path.write_text(THEIRS)
    return path


def rehearse(theirs, kind, answers, **config):
    options = {"environment": str(theirs), "environment_options": json.dumps({"kind": kind}), "group_size": 2}
    return Rehearsal(VerifiersEnv, answers, theirs.parent, **options, **config)


def sampled(env, tokens, mask):
    """Return the texts of the trained spans."""
    texts, run = [], []
    for token, trained in zip([*tokens, None], [*mask, NOT_TRAINED], strict=True):
        if trained != NOT_TRAINED:
            run.append(token)
        elif run:
            texts.append(env.tokenizer.decode(run))
            run = []
    return texts


@pytest.mark.skipif(installed, reason="verifiers is installed")
async def test_without_the_package_the_pip_line_is_reported(theirs):
    async with rehearse(theirs, "single", ["2"]) as rehearsal:
        with pytest.raises(VerifiersMissing, match="pip install 'verifiers"):
            await rehearsal.env.setup()


async def test_an_environment_must_be_named(theirs):
    async with rehearse(theirs, "single", ["2"]) as rehearsal:
        rehearsal.env.config.environment = ""
        with pytest.raises(VerifiersMissing, match=r"--env\.environment"):
            await rehearsal.env.setup()


async def test_problems_have_numbers_so_that_no_two_processes_train_the_same_one(theirs):
    async with rehearse(theirs, "single", ["2"]) as rehearsal:
        env = rehearsal.env
        assert env.numbers_items
        env.problems, env.items_taken = [{"question": name} for name in "abc"], 0
        taken = [await env.get_next_item() for _ in range(5)]
        assert [item["question"] for item in taken] == list("abcab")
        assert [await env.item_at(number) for number in range(5)] == taken


def test_options_that_are_not_a_json_object_are_refused():
    with pytest.raises(ValueError, match="JSON object"):
        VerifiersEnvConfig(environment_options="[1]")


class TestWithThePackage:
    pytestmark = needs_package

    @pytest.mark.parametrize("kind", ["single", "text"])
    async def test_rewards_are_the_rubrics_and_tokens_the_sampled_ones(self, theirs, kind):
        async with rehearse(theirs, kind, ["2 4 6 8", "9"]) as rehearsal:
            (group,) = await rehearsal.process(1)
            assert sorted(group["scores"]) == [0.0, 1.0]
            texts = [sampled(rehearsal.env, *row) for row in zip(group["tokens"], group["masks"], strict=True)]
            assert sorted(texts) == [["2 4 6 8<|end|>"], ["9<|end|>"]]
            assert group["generation_params"] == {"temperature": 1.0}

    async def test_a_chat_of_several_turns_is_one_sequence_with_every_answer_trained(self, theirs):
        async with rehearse(theirs, "twice", ["no idea", "2 4 6 8"]) as rehearsal:
            (group,) = await rehearsal.process(1)
            for tokens, mask, logprobs, spans in zip(
                *(group[key] for key in ("tokens", "masks", "inference_logprobs", "policy_versions")), strict=True
            ):
                assert len(sampled(rehearsal.env, tokens, mask)) == 2
                trained = [at for at, token in enumerate(mask) if token != NOT_TRAINED]
                assert trained == [at for at, value in enumerate(logprobs) if value != NO_LOGPROB]
                assert trained == [at for start, end, _ in spans for at in range(start, end)]

    async def test_tools_of_the_library_are_called_and_their_results_never_trained(self, theirs):
        call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
        async with rehearse(theirs, "tool", [call, call, "2 4 6 8", "2 4 6 8"]) as rehearsal:
            (group,) = await rehearsal.process(1)
            assert group["scores"] == [1.0, 1.0]
            for tokens, mask in zip(group["tokens"], group["masks"], strict=True):
                assert sampled(rehearsal.env, tokens, mask) == [f"{call}<|end|>", "2 4 6 8<|end|>"]
                assert "42" in rehearsal.env.tokenizer.decode(tokens)

    async def test_an_answer_of_nothing_is_worth_what_the_rubric_says(self, theirs):
        async with rehearse(theirs, "single", ["", "2 4 6 8"]) as rehearsal:
            (group,) = await rehearsal.process(1)
            assert sorted(group["scores"]) == [0.0, 1.0]

    async def test_a_rollout_that_the_library_gives_up_is_an_error_and_no_reward_of_zero(self, theirs):
        async with rehearse(theirs, "broken", ["2"]) as rehearsal:
            await rehearsal.env.setup()
            item = await rehearsal.env.get_next_item()
            with pytest.raises(VerifiersRolloutFailed, match="the tool is gone"):
                await rehearsal.env.collect_trajectories(item)

    async def test_a_refusal_of_the_inference_server_reaches_the_scheduler_as_what_it_is(self, theirs):
        async with rehearse(theirs, "single", ["2"]) as rehearsal:
            rehearsal.inference.problem = (400, "no such model")
            await rehearsal.env.setup()
            item = await rehearsal.env.get_next_item()
            with pytest.raises(InferenceRefused, match="no such model"):
                await rehearsal.env.collect_trajectories(item)

    async def test_an_evaluation_reports_the_rubrics_metrics(self, theirs):
        async with rehearse(theirs, "single", ["2 4 6 8"]) as rehearsal:
            folder = await rehearsal.evaluate()
            metrics = json.loads((folder / "metrics.json").read_text())["results"]["all"]
            assert metrics["eval/reward"] == metrics["eval/right"] == 1.0
            assert len((folder / "samples.jsonl").read_text().splitlines()) == 4

    async def test_signals_stay_ours_when_the_library_loads(self, theirs):
        before = signal.getsignal(signal.SIGTERM)
        async with rehearse(theirs, "single", ["2"]) as rehearsal:
            await rehearsal.env.setup()
        assert signal.getsignal(signal.SIGTERM) is before

    async def test_an_unknown_environment_is_reported(self, theirs):
        async with rehearse(theirs, "single", ["2"]) as rehearsal:
            rehearsal.env.config.environment = "no-such-environment"
            with pytest.raises(VerifiersMissing, match="no-such-environment"):
                await rehearsal.env.setup()


async def test_the_evaluation_problems_are_read_beside_the_event_loop(tmp_path):
    """The heartbeats of all rollouts waited while the library read or made them."""

    class Inner:
        def get_eval_dataset(self, n):
            self.thread = threading.get_ident()
            return [{"question": "2+2?"}] * n

    class Evaluated(VerifiersEnv):
        async def attempt(self, problem):
            return {**problem, "reward": 1.0, "metrics": {"right": 1.0}}

    async with Rehearsal(Evaluated, ["x"], tmp_path, eval_problems=2) as rehearsal:
        rehearsal.env.inner = Inner()
        await rehearsal.env.evaluate()
        assert rehearsal.env.last_evaluation.metrics == {"eval/reward": 1.0, "eval/right": 1.0}
        assert rehearsal.env.inner.thread != threading.get_ident()
