"""Requests and replies of `/generate` without an engine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import orjson
import pytest

from example_trainer.serving.engine import (
    EngineAdapter,
    check_adapted_head,
    check_sampling,
    check_sizes,
    within_context,
)
from example_trainer.serving.generate import GenerateHandler, RequestParser, TokenPrompt, sampling_params
from example_trainer.serving.problems import Problem
from example_trainer.serving.responses import (
    Replies,
    all_finite,
    all_logprobs,
    chosen_logprobs,
    sampling_masks,
    version_spans,
)


def parse(**body):
    return RequestParser().parse(json.dumps(body).encode())


def flat(*positions):
    """Return logprobs in vLLM's form: for each position the sampled token first."""
    made = SimpleNamespace(start_indices=[], end_indices=[], token_ids=[], logprobs=[])
    for position in positions:
        made.start_indices.append(len(made.token_ids))
        for token, value in position:
            made.token_ids.append(token)
            made.logprobs.append(value)
        made.end_indices.append(len(made.token_ids))
    return made


def output(tokens, *, versions=None, logprobs=None, text="", index=0, reason="length"):
    spans = None if versions is None else [SimpleNamespace(start=s, end=e, version=v) for s, e, v in versions]
    return SimpleNamespace(
        token_ids=tokens, weight_versions=spans, logprobs=logprobs, text=text, index=index, finish_reason=reason
    )


@pytest.mark.parametrize(("given", "count"), [(True, 0), (False, None), (0, 0), (3, 3), (None, None)])
def test_logprobs_by_word_and_number(given, count):
    assert parse(prompt="a", logprobs=given).logprob_count == count


def test_logprobs_are_there_unless_null():
    assert parse(prompt="a").logprob_count == 0


def test_text_is_made_unless_compact_or_refused():
    assert parse(prompt="a").wants_text
    assert not parse(prompt="a", compact=True).wants_text
    assert parse(prompt="a", compact=True, detokenize=True).wants_text
    assert not parse(prompt="a", detokenize=False).wants_text


def test_prompts_are_text_tokens_or_named_tokens():
    assert parse(prompt="a").prompt == "a"
    assert parse(prompt=[1, 2]).prompt == [1, 2]
    assert parse(prompt={"prompt_token_ids": [1]}).prompt == TokenPrompt([1])


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not JSON"),
        (b"[]", 422, "object"),
        (b'{"prompt": "a", "temprature": 1}', 422, "did you mean temperature"),
        (b'{"prompt": "a", "zzz": 1}', 422, "unknown field 'zzz'"),
        (b'{"prompt": "a", "n": "two"}', 422, "`n`"),
    ],
)
def test_mistakes_name_the_field(body, status, said):
    with pytest.raises(Problem) as caught:
        RequestParser().parse(body)
    assert caught.value.status == status
    assert said in caught.value.detail


def test_spans_cover_the_tokens_and_unlabelled_weights_are_null():
    assert version_spans(output([1, 2, 3], versions=[(0, 2, "4"), (2, 3, "5")])) == [[0, 2, 4], [2, 3, 5]]
    assert version_spans(output([1, 2], versions=[(0, 2, "default")])) == [[0, 2, None]]
    assert version_spans(output([1, 2])) == [[0, 2, None]]
    assert version_spans(output([])) == []


def test_the_sampled_tokens_logprob_is_the_first_of_its_position():
    wide = flat([(5, -1.0), (6, -0.5)], [(7, -2.0), (8, -0.1)])
    assert chosen_logprobs(wide) == [-1.0, -2.0]
    assert all_logprobs(wide) == [[{"5": -1.0}, {"6": -0.5}], [{"7": -2.0}, {"8": -0.1}]]
    assert chosen_logprobs(flat([(5, -1.0)])) == [-1.0]
    assert chosen_logprobs(None) is all_logprobs(None) is None


def test_inexact_versions_are_said_only_when_there_is_something_to_say():
    replies = Replies(boot_id="b", tokenizer=None)
    final = SimpleNamespace(outputs=[output([1], versions=[(0, 1, "2")])])
    request = parse(prompt=[1], compact=True, logprobs=None)
    assert "exact_versions" not in orjson.loads(replies.whole(request, [1], final, None))
    assert orjson.loads(replies.whole(request, [1], final, False))["exact_versions"] is False


def test_without_a_tokenizer_an_answer_has_no_text_of_its_prompt():
    replies = Replies(boot_id="b", tokenizer=None)
    answer = orjson.loads(replies.whole(parse(prompt=[1]), [1], SimpleNamespace(outputs=[output([2])]), None))
    assert (answer["token_ids"], answer["prompt"]) == ([[2]], None)


@pytest.mark.anyio
@pytest.mark.parametrize(("body", "said"), [({"prompt": "a"}, "prompt"), ({"prompt": [5], "stop": "a"}, "stop")])
async def test_without_a_tokenizer_text_is_refused_where_it_would_be_ignored(body, said):
    sent = []

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message):
        sent.append(message)

    handler = GenerateHandler(*[None] * 6)
    await handler({"type": "http", "headers": []}, receive, send)
    assert sent[0]["status"] == 422
    assert orjson.loads(sent[1]["body"])["detail"].startswith(f"{said}: this server has no tokenizer")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
@pytest.mark.parametrize("tokenizer", [None, SimpleNamespace(max_token_id=310)], ids=["none", "a larger one"])
@pytest.mark.parametrize(("prompt", "refused"), [([5, 300], "300"), ([-3], "-3"), ([0, 299], None)])
def test_tokens_that_the_model_lacks_are_refused_before_they_end_the_engine(tokenizer, prompt, refused):
    """VLLM accepts every token of its tokenizer, which may have more than the model, and any without a tokenizer."""
    request = SimpleNamespace(
        request_id="0", prompt_token_ids=prompt, sampling_params=None, lora_request=None, mm_features=None
    )
    processor = SimpleNamespace(process_inputs=lambda: request)
    core = SimpleNamespace(add_request_async=None)
    config = SimpleNamespace(get_vocab_size=lambda: 300, max_model_len=64)
    EngineAdapter(
        SimpleNamespace(
            input_processor=processor,
            engine_core=core,
            model_config=config,
            vllm_config=SimpleNamespace(use_v2_model_runner=False),
            tokenizer=tokenizer,
            _add_request=None,
            generate=None,
        )
    )
    if refused is None:
        assert processor.process_inputs() is request
        return
    with pytest.raises(Exception, match=f"token id {refused} is out of vocabulary"):
        processor.process_inputs()


def test_problems_are_problem_json_with_retry_after():
    response = Problem(503, "no-policy", "why", retry_after_seconds=2).response()
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["retry-after"] == "2"
    assert orjson.loads(response.body) == {
        "type": "urn:atropos:problem:no-policy",
        "title": "no policy",
        "status": 503,
        "detail": "why",
    }


def test_each_token_is_mentioned_once_and_none_that_cannot_be_sampled():
    """vLLM lists the sampled token once or twice, depending on how a stream's pieces came together."""
    nothing = float("-inf")
    told = all_logprobs(flat([(5, -1.0), (6, -0.5), (5, -1.0)], [(7, -2.0), (8, -0.1), (0, nothing)]))
    assert told == [[{"5": -1.0}, {"6": -0.5}], [{"7": -2.0}, {"8": -0.1}]]


def test_a_sampling_mask_is_whole_or_it_is_left_out():
    """Tokens without a probability are not in it, and a repeated one is in it once."""
    nothing = float("-inf")
    rows = flat(
        [(5, -1.0), (6, -0.5), (5, -1.0), (0, nothing)],
        [(7, -2.0), (8, -0.1), (9, -3.0), (4, -4.0)],
        [(7, 0.0), (0, nothing), (1, nothing)],
    )
    assert sampling_masks(rows, 3) == [[5, 6], [], [7]]
    assert sampling_masks(rows, 4) == [[5, 6], [7, 8, 9, 4], [7]]


@pytest.mark.parametrize("compact", [False, True])
def test_beside_sampling_masks_the_logprobs_are_those_of_the_sampled_tokens(compact):
    request = parse(prompt=[1], compact=compact, sampling_mask_limit=2)
    assert (request.requested_logprobs, request.logprob_count) == (3, 0)
    final = SimpleNamespace(outputs=[output([5, 7], logprobs=flat([(5, -1.0), (6, -0.5)], [(7, -2.0), (8, -0.1)]))])
    replies = Replies(boot_id="b", tokenizer=None)
    answer = orjson.loads(replies.whole(request, [1], final, None))
    assert answer["logprobs"] == ([[-1.0, -2.0]] if compact else [[[{"5": -1.0}], [{"7": -2.0}]]])
    assert answer["sampling_masks"] == [[[5, 6], [7, 8]]]
    event = replies.event(request, final.outputs[0], None).removeprefix(b"data: ")
    assert orjson.loads(event)["sampling_masks"] == [[5, 6], [7, 8]]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sampling_mask_limit": -1}, "sampling_mask_limit: -1 is below 0"),
        ({"sampling_mask_limit": 2, "logprobs": 3}, "needs logprobs 0, and 3 were asked for"),
        ({"sampling_mask_limit": 2**63}, "more than 64 bits"),
    ],
)
def test_sampling_masks_that_cannot_be_had_are_refused(fields, said):
    with pytest.raises(Problem, match=said):
        sampling_params(parse(prompt=[1], **fields))


@pytest.mark.parametrize(
    ("total", "finite"), [(-3.0, True), (None, True), (float("-inf"), False), (float("nan"), False)]
)
def test_a_token_without_a_probability_is_noticed(total, finite):
    assert all_finite([SimpleNamespace(cumulative_logprob=-1.0), SimpleNamespace(cumulative_logprob=total)]) is finite


class Tokenizer:
    """A tokenizer whose tokens are letters, by their number."""

    def decode(self, tokens, **_):
        return "".join(chr(96 + token) for token in tokens)


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        ({}, "length", "abc"),
        ({}, "stop", "ab"),
        ({"include_stop_str_in_output": True}, "stop", "abc"),
        ({"stop": "z"}, "stop", "by the engine"),
    ],
)
def test_what_ended_an_output_is_not_a_part_of_its_text(fields, reason, text):
    replies = Replies(boot_id="b", tokenizer=Tokenizer())
    assert replies.text(parse(prompt=[1], **fields), output([1, 2, 3], reason=reason, text="by the engine")) == text


def test_a_text_of_the_engines_may_be_empty():
    """A stop string at the start makes it empty; decoding the tokens instead would give the stop string."""
    replies = Replies(boot_id="b", tokenizer=Tokenizer())
    assert replies.text(parse(prompt=[1], stop="a"), output([1], reason="stop", text="")) == ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"seed": 2**63}, f"seed: {2**63} is not between 0 and {2**63 - 1}"),
        ({"seed": -1}, "seed: -1 is not between"),
        ({"seed": 2**63 - 2, "n": 4}, f"seed: {2**63 - 2} is not between 0 and {2**63 - 1} less the other 3 outputs"),
        ({"max_tokens": 2**63}, f"max_tokens: {2**63} has more than 64 bits"),
        ({"top_k": 2**70}, "top_k"),
        ({"n": -(2**70)}, "n: "),
        ({"logprobs": 2**64}, "logprobs"),
    ],
)
def test_numbers_beyond_64_bits_are_refused_before_the_engine_hears_of_them(fields, said):
    with pytest.raises(Problem) as caught:
        sampling_params(parse(prompt=[5], **fields))
    assert (caught.value.status, caught.value.kind) == (422, "bad-request")
    assert said in caught.value.detail


def generated(**fields):
    """Return sampling parameters as vLLM's input processor leaves them."""
    plain = dict.fromkeys(("seed", "prompt_logprobs", "prompt_logprob_token_ids", "structured_outputs", "logit_bias"))
    plain |= {"n": 1, "max_tokens": 8, "min_tokens": 0, "bad_words_token_ids": None, "allowed_token_ids": None}
    return SimpleNamespace(**plain | {"all_stop_token_ids": {0}} | fields)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
@pytest.mark.parametrize(
    ("most", "beyond", "said"),
    [
        ({"allowed_token_ids": [1] * 1024}, {"allowed_token_ids": [1] * 1025}, "allowed_token_ids: 1025 tokens"),
        ({"logit_bias": dict.fromkeys(range(1024))}, {"logit_bias": dict.fromkeys(range(1025))}, "logit_bias: 1025"),
        (
            {"all_stop_token_ids": set(range(129))},
            {"all_stop_token_ids": set(range(129)), "min_tokens": 1},
            "stop_token_ids with min_tokens: 129 tokens are more than the 128 that this server takes",
        ),
        ({"bad_words_token_ids": [[1] * 1024]}, {"bad_words_token_ids": [[1] * 1024, [2]]}, "bad_words: 1025"),
    ],
)
def test_lists_longer_than_vllms_rows_are_refused_before_they_end_the_engine(most, beyond, said):
    """vLLM's second model runner checks them where an error ends the engine with all of its requests."""
    check_sizes(generated(**most))
    with pytest.raises(Exception, match=said):
        check_sizes(generated(**beyond))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
def test_the_rows_of_vllms_second_runner_have_a_limit_still():
    """If this fails, vLLM has mended it: remove `check_sizes`."""
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState

    state = SimpleNamespace(prompt_len_np=[3])
    with pytest.raises(ValueError, match="Too many allowed token IDs"):
        LogitBiasState.add_request(state, 0, generated(allowed_token_ids=[1] * 1025))


def test_token_limits_beyond_the_context_become_the_context_and_fit_32_bits():
    params = generated(max_tokens=2**40, min_tokens=2**40)
    within_context(params, 64)
    assert (params.max_tokens, params.min_tokens) == (64, 64)
    params = generated(max_tokens=5, min_tokens=2)
    within_context(params, 64)
    assert (params.max_tokens, params.min_tokens) == (5, 2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
def test_the_seed_of_the_last_output_has_63_bits():
    check_sampling(generated(seed=2**63 - 2, n=2), 300)
    with pytest.raises(Exception, match="the last of the 2 outputs would have a seed above"):
        check_sampling(generated(seed=2**63 - 1, n=2), 300)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
def test_numbers_beyond_those_limits_still_end_vllms_second_runner():
    """If this fails, vLLM has mended it: remove `within_context` and the limit of seeds."""
    from vllm.v1.worker.gpu.sample.states import SamplingStates
    from vllm.v1.worker.gpu.states import RequestState

    rows = SimpleNamespace(free_indices=[0], req_id_to_index={}, index_to_req_id={}, max_seq_len=np.zeros(1, np.int32))
    with pytest.raises(OverflowError):
        RequestState.add_request(rows, "a", 3, [1, 2, 3], 0, 2**31)
    number = SimpleNamespace(np=np.zeros(1, np.int64))
    seeds = SimpleNamespace(
        **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seeds"), number), vocab_size=9, seeds_set=[False]
    )
    asked = SimpleNamespace(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=2**63)
    with pytest.raises(OverflowError):
        SamplingStates.add_request(seeds, 0, asked)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
def test_prompt_logprobs_that_would_lack_a_part_of_the_adapter_are_refused():
    check_adapted_head(generated(), "a")
    for asked in ({"prompt_logprobs": 0}, {"prompt_logprob_token_ids": [[1]]}):
        with pytest.raises(Exception, match="'a' changes the output head"):
            check_adapted_head(generated(**asked), "a")
