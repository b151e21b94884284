"""An evaluation that fails ends the server if it was asked for, and costs no training otherwise."""

import logging

import pytest

from .test_serve import ArithmeticEnv, innermost, make_env, make_fake, serve_and_train

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "raised", [FileNotFoundError("gold"), ExceptionGroup("several attempts", [FileNotFoundError("gold")])]
)
async def test_a_failed_evaluation_that_was_asked_for_ends_the_server_with_the_reason(tokenizer_folder, caplog, raised):
    class NoEvaluation(ArithmeticEnv):
        async def evaluate(self):
            raise raised

    fake = make_fake()
    env = make_env(fake, tokenizer_folder, NoEvaluation, eval_at_start=True)
    with pytest.raises(ExceptionGroup) as failure:
        await serve_and_train(env, fake, steps=1, batch_size=32)
    assert str(innermost(failure.value)) == "the evaluation at step 0 failed: FileNotFoundError('gold')"
    (logged,) = [one for one in caplog.records if one.getMessage() == "the evaluation at step 0 failed"]
    assert "raise raised" in logging.Formatter().format(logged), "the traceback is lost"


async def test_a_failed_evaluation_in_between_costs_no_training(tokenizer_folder, caplog):
    class NoEvaluation(ArithmeticEnv):
        async def evaluate(self):
            raise FileNotFoundError("gold answers")

    fake = make_fake()
    env = make_env(fake, tokenizer_folder, NoEvaluation, steps_per_eval=1)
    batches = await serve_and_train(env, fake, steps=3, batch_size=32, seconds_a_step=0.02)
    assert len(batches) == 3
    assert "gold answers" in caplog.text
