"""The parts of the tiny model's recipe: its teacher, its batches, its optimizer, its tokenizer on disk."""

import random
from collections import Counter
from itertools import islice

import pytest
import torch

from environments.tasks.arithmetic import extract_answer, grade, problem_stream
from example_trainer.tiny.model import CONTEXT_LENGTH, make_model
from example_trainer.tiny.muon import Muon, orthogonalise
from example_trainer.tiny.teacher import CHAIN_GUESSED, CHAIN_WORKED, noisy_solution
from example_trainer.tiny.tokenizer import ASSISTANT, END, QWEN2_SPLIT, make_tokenizer, render_prompt
from example_trainer.tiny.warmup import IGNORED, SEQUENCES_PER_STEP, Moods, make_batch, rate_fraction


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(context_length=CONTEXT_LENGTH)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_teacher_keeps_its_proportions_and_guesses_are_never_right():
    rng = random.Random(0)
    kinds = Counter()
    for problem in islice(problem_stream("chain", seed=0), 2000):
        text = noisy_solution(problem, rng.random(), rng)
        lines = text.count("\n")
        kinds[lines] += 1
        if lines == 0 and problem.answer > 9:
            assert grade(text, problem.answer) == 0.0
        assert extract_answer(text) is not None
    assert kinds[3] / 2000 == pytest.approx(CHAIN_WORKED, abs=0.04)
    assert kinds[0] / 2000 == pytest.approx(CHAIN_GUESSED, abs=0.04)


def test_the_teacher_of_sums_is_mostly_not_right():
    rng = random.Random(0)
    right = [
        grade(noisy_solution(problem, rng.random(), rng), problem.answer)
        for problem in islice(problem_stream("add", seed=0), 1000)
    ]
    assert 0.35 < sum(right) / 1000 < 0.45


def test_only_completions_are_labelled(tokenizer):
    rng = random.Random(0)
    ids, labels = make_batch(tokenizer, problem_stream("chain", seed=0), lambda p, *_: p.worked, Moods(rng), rng)
    assert ids.shape == labels.shape
    assert len(ids) == SEQUENCES_PER_STEP
    assistant, end = tokenizer.convert_tokens_to_ids([ASSISTANT, END])
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        start = row.index(assistant) + 1
        stop = row.index(end, start) + 1
        assert label[:start] == [IGNORED] * start
        assert label[start:stop] == row[start:stop]
        assert set(label[stop:]) <= {IGNORED}


def test_moods_are_even_for_each_first_digit():
    moods = Moods(random.Random(0))
    by_digit = {}
    for problem in islice(problem_stream("chain", seed=0), 900):
        by_digit.setdefault(str(problem.steps[0].left)[0], []).append(moods.next_for(problem))
    for drawn in by_digit.values():
        assert sum(mood < 0.3 for mood in drawn) / len(drawn) == pytest.approx(0.3, abs=0.08)


def test_the_rate_rises_and_falls_to_a_twentieth():
    rates = [rate_fraction(step, 280) for step in range(280)]
    assert rates[0] == 0.05
    highest = rates.index(max(rates))
    assert rates[highest] > 0.9
    assert rates[:highest] == sorted(rates[:highest])
    assert rates[highest:] == sorted(rates[highest:], reverse=True)
    assert rates[9] == 0.5, "linear from the first step on"
    assert rates[-1] == pytest.approx(0.05, abs=0.01)


def test_muon_makes_singular_values_about_one_for_any_shape():
    torch.manual_seed(0)
    for shape in ((3, 32, 64), (2, 64, 32), (1, 48, 48)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.quantile(0.05) > 0.6
        assert values.max() < 1.3


def test_muon_lowers_a_loss():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 16))
    target = torch.randn(8, 16)
    optimizer = Muon([weight], lr=0.1)
    losses = []
    for _ in range(100):
        loss = (weight - target).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 4


def test_every_loader_sees_the_same_tokenizer(folder):
    """With a qwen2 config next to it AutoTokenizer rebuilds the tokenizer by Qwen2's rules; the ids must not change."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    auto, plain = AutoTokenizer.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    texts = [problem.question + problem.worked for problem in islice(problem_stream("add", seed=9), 200)]
    texts += ["  ünïcödé, 漢字 🙂\t\n\n it's THEY'LL 12345", "x<|end|>y<|user|>", "\r\n \r\n a"]
    assert len(auto) == len(plain)
    for text in texts:
        assert auto.encode(text) == plain.encode(text)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    for tokenizer in (auto, plain):
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert rendered == "<|system|>Be brief.<|end|><|user|>2+2?<|end|><|assistant|>"
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")


def test_the_splitting_rule_is_still_qwen2s():
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert QWEN2_SPLIT == PRETOKENIZE_REGEX


def test_the_saved_model_is_untied_fp32_with_room_and_knows_its_end_token(folder, tokenizer):
    """R40: the context has at least 512 tokens."""
    from safetensors import safe_open
    from transformers import AutoConfig, GenerationConfig

    config, generation = AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    assert config.tie_word_embeddings is False
    assert config.max_position_embeddings >= 512
    assert generation.eos_token_id == config.eos_token_id == tokenizer.eos_token_id
    assert generation.pad_token_id == tokenizer.pad_token_id
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
        assert {tensors.get_slice(name).get_dtype() for name in names} == {"F32"}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= names


def test_the_prompt_is_what_the_chat_template_renders(tokenizer):
    chat = [{"role": "user", "content": "How many?"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == render_prompt("How many?")
