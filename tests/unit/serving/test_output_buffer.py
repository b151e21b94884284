"""Outputs buffered in the engine core: none is lost, out of order, or kept too long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from example_trainer.serving.vllm import engine_core
from example_trainer.serving.vllm.engine_core import OutputBuffer


class Logprobs(NamedTuple):
    """A stand-in for vLLM's `LogprobsLists`."""

    tokens: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    lengths: None = None


def output(request_id, token, *, finished=None, **more):
    fields = dict.fromkeys(
        ["events", "prefill_stats", "new_prompt_logprobs_tensors", "prompt_token_id_logprobs", "new_sampling_mask"]
    )
    fields |= {"routed_experts": None, "pooling_output": None}
    logprobs = Logprobs(np.array([[token]]), np.array([[-token / 10]]), np.array([1]))
    made = {"request_id": request_id, "new_token_ids": [token], "finish_reason": finished, "new_logprobs": logprobs}
    return SimpleNamespace(**(fields | made | more))


def scheduler(*, waiting=(), client_index=0):
    params = {name: SimpleNamespace(may_wait=name in waiting, num_logprobs=0) for name in "ab"}
    requests = {name: SimpleNamespace(sampling_params=params[name], client_index=client_index) for name in "ab"}
    return SimpleNamespace(requests=requests)


@pytest.fixture(autouse=True)
def params_are_the_answer(monkeypatch):
    monkeypatch.setattr(engine_core, "may_wait", lambda params: params.may_wait)


def test_a_request_that_waits_gets_everything_in_one_piece_at_its_end():
    buffer, core = OutputBuffer(), scheduler(waiting="a")
    assert buffer.pass_on(core, [output("a", 1, prefill_stats="first", events=["queued"])]) == []
    assert buffer.pass_on(core, [output("a", 2)]) == []
    (whole,) = buffer.pass_on(core, [output("a", 3, finished="stop", events=["done"])])
    assert whole.new_token_ids == [1, 2, 3]
    assert whole.new_logprobs.logprobs.tolist() == [[-0.1], [-0.2], [-0.3]]
    assert whole.new_logprobs.ranks.tolist() == [1, 1, 1]
    assert (whole.prefill_stats, whole.events, whole.finish_reason) == ("first", ["queued", "done"], "stop")
    assert buffer.take_all() == {}


def test_others_get_each_token_at_once():
    buffer, core = OutputBuffer(), scheduler(waiting="a")
    (sent,) = buffer.pass_on(core, [output("a", 1), output("b", 2)])
    assert (sent.request_id, sent.new_token_ids) == ("b", [2])


def test_an_output_that_cannot_be_joined_is_not_kept():
    buffer, core = OutputBuffer(), scheduler(waiting="a")
    assert buffer.pass_on(core, [output("a", 1, new_sampling_mask="mask")])


def test_taking_all_sends_what_is_kept_and_goes_on_afterwards():
    buffer, core = OutputBuffer(), scheduler(waiting="ab", client_index=2)
    buffer.pass_on(core, [output("a", 1), output("b", 5)])
    buffer.pass_on(core, [output("a", 2)])
    taken = buffer.take_all()
    assert {part.request_id: part.new_token_ids for part in taken[2]} == {"a": [1, 2], "b": [5]}
    (rest,) = buffer.pass_on(core, [output("a", 3, finished="length")])
    assert rest.new_token_ids == [3]


def test_an_aborted_request_is_forgotten():
    buffer, core = OutputBuffer(), scheduler(waiting="a")
    buffer.pass_on(core, [output("a", 1)])
    buffer.forget("a")
    assert buffer.take_all() == {}


def test_tokens_without_logprobs_are_joined_too():
    buffer, core = OutputBuffer(), scheduler(waiting="a")
    buffer.pass_on(core, [output("a", 1, new_logprobs=None)])
    (whole,) = buffer.pass_on(core, [output("a", 2, new_logprobs=None, finished="length")])
    assert (whole.new_token_ids, whole.new_logprobs) == ([1, 2], None)


def rows_of_width(width):
    tokens = np.arange(5, 5 + width)[None, :]
    return Logprobs(tokens, -tokens / 10, np.array([1]))


@pytest.mark.parametrize(("asked", "widths"), [(0, [1, 3, 1]), (2, [5, 3, 4]), (None, [2, 1, 4]), (-1, [4, 4, 4])])
def test_rows_as_wide_as_the_neighbours_wanted_them_are_joined_in_the_width_that_was_asked_for(asked, widths):
    """Rows of two widths cannot be joined: the exception crashed the engine, and ended every run on it."""
    buffer, core = OutputBuffer(), scheduler(waiting="a")
    core.requests["a"].sampling_params.num_logprobs = asked
    told = [None if asked is None else rows_of_width(width) for width in widths]
    steps = [output("a", 5, new_logprobs=rows) for rows in told]
    steps[-1].finish_reason = "length"
    (*nothing, [whole]) = [buffer.pass_on(core, [step]) for step in steps]
    assert nothing == [[], []]
    if asked is None:
        assert whole.new_logprobs is None
    else:
        columns = 4 if asked == -1 else asked + 1
        assert whole.new_logprobs.tokens.tolist() == [list(range(5, 5 + columns))] * 3
        assert whole.new_logprobs.logprobs.shape == (3, columns)


def test_a_row_with_too_few_alternatives_says_that_the_missing_ones_have_no_probability():
    fitted = engine_core.fit_columns(rows_of_width(2), 3)
    assert fitted.tokens.tolist() == [[5, 6, 0]]
    assert fitted.logprobs.tolist() == [[-0.5, -0.6, float("-inf")]]
