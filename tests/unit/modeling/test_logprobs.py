"""The chunked head: equal to full logits, gradients included, without their memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from example_trainer.modeling import logprobs as logprobs_module
from example_trainer.modeling.logprobs import head_of, most_chunk_tokens, token_logprobs
from example_trainer.objective.losses import LossInputs, LossSettings, token_losses


def reference(hidden: Tensor, weight: Tensor, index: Tensor, labels: Tensor, temperatures: Tensor) -> Tensor:
    logits = hidden[index] @ weight.t() / temperatures[:, None]
    return logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)


def make_inputs(vocabulary: int = 50) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    index = torch.tensor(
        [0, 3, 3, 7, 2, 3, 9]
    )  # repeated states: answers of a group that share their last prompt token
    return (
        torch.randn(10, 8, requires_grad=True),
        torch.randn(vocabulary, 8, requires_grad=True),
        index,
        torch.randint(vocabulary, (7,)),
        torch.tensor([1.0, 0.7, 1.3, 1.0, 2.0, 0.5, 1.0]),
    )


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("keeps_probabilities", [True, False])
def test_chunked_logprobs_and_gradients_equal_those_of_full_logits(
    chunk_tokens: int, keeps_probabilities: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not keeps_probabilities:
        monkeypatch.setattr(logprobs_module, "KEEP_PROBABILITIES_BELOW", 0)
    hidden, weight, index, labels, temperatures = make_inputs()
    upstream = torch.randn(7)
    found, _ = token_logprobs(hidden, weight, index, labels, temperatures, chunk_tokens=chunk_tokens)
    expected = reference(hidden, weight, index, labels, temperatures)
    torch.testing.assert_close(found, expected)
    actual = torch.autograd.grad((found * upstream).sum(), [hidden, weight])
    wanted = torch.autograd.grad((expected * upstream).sum(), [hidden, weight])
    for left, right in zip(actual, wanted, strict=True):
        torch.testing.assert_close(left, right)


def test_each_token_is_judged_at_its_own_temperature() -> None:
    hidden, weight, index, labels, temperatures = make_inputs()
    mixed, _ = token_logprobs(hidden, weight, index, labels, temperatures)
    for at in range(7):
        part = slice(at, at + 1)
        alone, _ = token_logprobs(hidden, weight, index[part], labels[part], temperatures[part])
        torch.testing.assert_close(mixed[part], alone)


def test_the_entropy_is_that_of_the_distribution_sampled_from() -> None:
    hidden, weight, index, labels, temperatures = make_inputs()
    _, entropies = token_logprobs(hidden, weight, index, labels, temperatures, chunk_tokens=2)
    distribution = torch.distributions.Categorical(logits=hidden[index] @ weight.t() / temperatures[:, None])
    torch.testing.assert_close(entropies, distribution.entropy())


@pytest.mark.parametrize("keeps_probabilities", [True, False])
def test_entropies_and_several_labels_a_token_have_the_gradients_of_full_logits(
    keeps_probabilities: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not keeps_probabilities:
        monkeypatch.setattr(logprobs_module, "KEEP_PROBABILITIES_BELOW", 0)
    hidden, weight, index, _, temperatures = make_inputs()
    labels, upstream, bonus = torch.randint(50, (7, 3)), torch.randn(7, 3), torch.randn(7)
    found, entropies = token_logprobs(hidden, weight, index, labels, temperatures, chunk_tokens=3)
    logs = (hidden[index] @ weight.t() / temperatures[:, None]).log_softmax(-1)
    expected, entropy = logs.gather(1, labels), -(logs.exp() * logs).sum(-1)
    torch.testing.assert_close(found, expected)
    actual = torch.autograd.grad((found * upstream).sum() + (entropies * bonus).sum(), [hidden, weight])
    wanted = torch.autograd.grad((expected * upstream).sum() + (entropy * bonus).sum(), [hidden, weight])
    for left, right in zip(actual, wanted, strict=True):
        torch.testing.assert_close(left, right)


def test_an_entropy_alone_has_its_gradient() -> None:
    hidden, weight, index, labels, temperatures = make_inputs()
    _, entropies = token_logprobs(hidden, weight, index, labels, temperatures)
    logs = (hidden[index] @ weight.t() / temperatures[:, None]).log_softmax(-1)
    wanted = torch.autograd.grad(-(logs.exp() * logs).sum(), [hidden])[0]
    torch.testing.assert_close(torch.autograd.grad(entropies.sum(), [hidden])[0], wanted)


def test_a_bias_of_the_head_is_honoured_and_trained() -> None:
    hidden, weight, index, labels, temperatures = make_inputs()
    bias = torch.randn(50, requires_grad=True)
    found, _ = token_logprobs(hidden, weight, index, labels, temperatures, bias=bias, chunk_tokens=2)
    logits = (hidden[index] @ weight.t() + bias) / temperatures[:, None]
    expected = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), [bias])[0], torch.autograd.grad(expected.sum(), [bias])[0]
    )


def test_half_precision_states_give_fp32_logprobs_that_do_not_round_between() -> None:
    hidden, weight, index, labels, temperatures = make_inputs()
    low, head = hidden.detach().bfloat16(), weight.detach().bfloat16()
    found, _ = token_logprobs(low, head, index, labels, temperatures)
    expected = reference(low.float(), head.float(), index, labels, temperatures)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


def saved_elements(vocabulary: int) -> int:
    """Return the number of elements that a head over many tokens keeps for its backward, without parameters."""
    tokens = 4096
    states, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(0 if tensor.data_ptr() == weight.data_ptr() else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        labels, temperatures = torch.zeros(tokens, dtype=torch.long), torch.ones(tokens)
        token_logprobs(states, weight, torch.arange(tokens), labels, temperatures, chunk_tokens=256)
    return sum(kept)


def test_memory_kept_for_the_backward_is_flat_in_the_vocabulary() -> None:
    assert saved_elements(4_000) == saved_elements(16_000) < 4096 * 16


def test_a_head_that_is_not_a_plain_linear_layer_is_refused() -> None:
    class Other(torch.nn.Linear):
        pass

    class Model:
        def get_output_embeddings(self) -> torch.nn.Module:
            return Other(2, 2)

    with pytest.raises(TypeError, match="Other"):
        head_of(Model())


FORMS = {
    "grpo": LossSettings(),
    "dapo": LossSettings(loss_type="dapo", clip_eps_high=0.28),
    "gspo": LossSettings(loss_type="gspo"),
    "cispo": LossSettings(loss_type="cispo", cispo_cap=1.5),
    "luspo": LossSettings(loss_type="luspo"),
    "gmpo": LossSettings(loss_type="gmpo", clip_eps_low=0.4, clip_eps_high=0.4),
    "sapo": LossSettings(loss_type="sapo"),
    "vespo": LossSettings(loss_type="vespo"),
    "dppo": LossSettings(loss_type="dppo", clip_eps_low=0.15, clip_eps_high=0.15, cispo_cap=1.5),
    "m2po": LossSettings(loss_type="m2po"),
    "reinforce": LossSettings(loss_type="no_baseline"),
    "truncated": LossSettings(importance_sampling="truncated", tis_cap=1.5),
    "corrected": LossSettings(old_logprobs="recomputed", mismatch_correction="token_truncate", tis_cap=1.5),
    "all terms": LossSettings(kl_coef=0.1, entropy_coef=0.05),
}


@pytest.mark.parametrize("form", FORMS)
def test_p6_each_loss_over_the_chunked_head_is_that_over_full_logits_in_several_micro_batches(form: str) -> None:
    """Value and gradient are compared, with importance ratios, as sums over two micro-batches."""
    hidden, weight, index, labels, temperatures = make_inputs()
    whole = (hidden[index] @ weight.t() / temperatures[:, None]).log_softmax(-1)
    full = whole.gather(1, labels[:, None]).squeeze(1), -(whole.exp() * whole).sum(-1)
    noise = torch.randn(7)
    sequences, advantages = torch.tensor([0, 0, 0, 1, 1, 2, 2]), torch.randn(7)

    def loss(logprobs: Tensor, entropies: Tensor, part: slice) -> Tensor:
        known = full[0].detach()[part]
        inputs = LossInputs(
            logprobs=logprobs,
            entropies=entropies,
            rollout_logprobs=known + noise[part],
            reference_logprobs=known - 0.3,
            advantages=advantages[part],
            sequences=sequences[part],
        )
        return token_losses(inputs, FORMS[form]).sum() / 7

    wanted = loss(*full, slice(None))
    expected = torch.autograd.grad(wanted, [hidden, weight])
    values, found = [], []
    for part in (slice(0, 3), slice(3, 7)):
        logprobs, entropies = token_logprobs(
            hidden, weight, index[part], labels[part], temperatures[part], chunk_tokens=2
        )
        value = loss(logprobs, entropies, part)
        values.append(value.detach())
        found.append(torch.autograd.grad(value, [hidden, weight]))
    torch.testing.assert_close(sum(values), wanted.detach())
    for *parts, exact in zip(*found, expected, strict=True):
        torch.testing.assert_close(sum(parts), exact)


def test_a_gpu_takes_larger_chunks_within_the_memory_that_a_product_beside_the_gradient_took() -> None:
    vocabulary, hidden_size = 151_936, 1536
    at_the_product, freed = 6 * (1 << 26), 4 * vocabulary * hidden_size
    frozen = most_chunk_tokens("cuda", (vocabulary, hidden_size), in_16_bits=False)
    trained = most_chunk_tokens("cuda", (vocabulary, hidden_size), in_16_bits=True)
    assert (frozen, most_chunk_tokens("cpu", (vocabulary, hidden_size), in_16_bits=True)) == (441, 55)
    assert trained == 732
    assert 12 * trained * vocabulary <= at_the_product + freed


def test_in_16_bits_on_a_gpu_the_weights_gradient_is_added_up_in_place_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product that only a GPU has is replaced by one with the same arguments."""

    class OnGpu:
        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cpu")

        def __init__(self, values: Tensor) -> None:
            self.values = values

    def addmm(add: Tensor, left: OnGpu, right: OnGpu, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert add is out
        assert out_dtype == out.dtype == torch.float32
        return out.add_(left.values.float() @ right.values.float())

    monkeypatch.setattr(torch, "addmm", addmm)
    torch.manual_seed(0)
    left, right = torch.randn(6, 3).bfloat16(), torch.randn(3, 4).bfloat16()
    total = torch.ones(6, 4)
    where, gpu = total.data_ptr(), (OnGpu(left), OnGpu(right))
    logprobs_module._add_product(total, *gpu)  # type: ignore[arg-type]
    assert total.data_ptr() == where
    torch.testing.assert_close(total, 1 + left.float() @ right.float())


def test_at_a_vocabulary_of_150_000_values_and_gradients_are_those_of_full_logits() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(120, 8, requires_grad=True), torch.randn(150_000, 8, requires_grad=True)
    index, labels, temperatures = torch.arange(120), torch.randint(150_000, (120,)), torch.linspace(0.7, 1.3, 120)
    found, entropies = token_logprobs(hidden, weight, index, labels, temperatures)  # three chunks
    expected = reference(hidden, weight, index, labels, temperatures)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    exact = (hidden.double() @ weight.double().t() / temperatures[:, None]).softmax(-1)
    torch.testing.assert_close(entropies.double(), torch.special.entr(exact).sum(-1), rtol=1e-5, atol=1e-5)
    actual, wanted = (torch.autograd.grad(values.sum(), [hidden, weight]) for values in (found, expected))
    for left, right in zip(actual, wanted, strict=True):
        assert (left - right).abs().max() <= 1e-5 * right.abs().max()
