"""Terms of a token's loss besides its surrogate: reference divergence, entropy, a teacher, a custom loss."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from example_trainer.errors import UnusableLoss
from example_trainer.objective.kl_divergence import KlController, forward_kl, kl_estimates, teacher_credits
from example_trainer.objective.losses import LossInputs, LossSettings, loss_terms, token_losses
from example_trainer.objective.objective import load_own_loss


def inputs(logprobs: Tensor, **more: Tensor) -> LossInputs:
    values = {
        "logprobs": logprobs,
        "entropies": torch.full_like(logprobs, 0.7),
        "rollout_logprobs": logprobs.detach(),
        "advantages": torch.ones_like(logprobs),
        "sequences": torch.arange(len(logprobs)),
    }
    return LossInputs(**(values | more))


def test_k3_is_exp_d_less_d_less_one_and_never_negative() -> None:
    new, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.0, -0.5, -3.0])
    difference = reference - new
    found = kl_estimates(new, reference, "k3", 20.0)
    torch.testing.assert_close(found, torch.clamp(torch.exp(difference) - difference - 1, min=0))
    assert bool((found >= 0).all())
    assert found[0] == 0.0


def test_the_divergence_is_added_with_its_coefficient_and_pulls_towards_the_reference() -> None:
    new = torch.tensor([-2.0, -0.5], requires_grad=True)
    values = inputs(new, reference_logprobs=torch.tensor([-1.0, -1.0]), advantages=torch.zeros(2))
    settings = LossSettings(kl_coef=0.5)
    token_losses(values, settings).sum().backward()
    assert new.grad is not None
    expected = [0.5 * (1 - torch.tensor(gap).exp().item()) for gap in (1.0, -0.5)]
    assert new.grad.tolist() == pytest.approx(expected)
    assert new.grad[0] < 0 < new.grad[1]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_with_the_bias_correction_it_is_the_divergence_over_another_policy_s_samples_too(estimator: str) -> None:
    torch.manual_seed(0)
    logits, reference, sampler = torch.randn(6, requires_grad=True), *(torch.randn(6).log_softmax(0) for _ in range(2))
    policy = logits.log_softmax(0)
    settings = LossSettings(kl_coef=1.0, kl_estimator=estimator, kl_bias_correction=True)  # type: ignore[arg-type]
    values = inputs(policy, reference_logprobs=reference, rollout_logprobs=sampler)
    found = (sampler.exp() * loss_terms(values, settings)["kl"]).sum()
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close(found, exact)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, exact)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_averaged_over_the_policys_own_samples_an_estimate_is_the_divergence(estimator: str) -> None:
    torch.manual_seed(0)
    policy, reference = torch.randn(6).log_softmax(0), torch.randn(6).log_softmax(0)
    found = (policy.exp() * kl_estimates(policy, reference, estimator, 20.0)).sum()  # type: ignore[arg-type]
    torch.testing.assert_close(found, (policy.exp() * (policy - reference)).sum())


def test_the_gradient_of_k1_averages_to_that_of_the_divergence() -> None:
    torch.manual_seed(1)
    logits, reference = torch.randn(6, requires_grad=True), torch.randn(6).log_softmax(0)
    policy = logits.log_softmax(0)
    exact = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    sampled = (policy.exp().detach() * kl_estimates(policy, reference, "k1", 20.0)).sum()
    torch.testing.assert_close(torch.autograd.grad(sampled, logits)[0], exact)


@pytest.mark.parametrize(("estimator", "pull"), [("k1", 24.5), ("k3", 1.0)])
def test_a_token_that_the_reference_finds_all_but_impossible_is_pulled_back(estimator: str, pull: float) -> None:
    """Its estimate and its gradient are those of the formula also beyond the clamp, which is for exp alone."""
    policy = torch.tensor([-0.5], requires_grad=True)
    found = kl_estimates(policy, torch.tensor([-25.0]), estimator, 20.0)  # type: ignore[arg-type]
    assert found.item() == pytest.approx({"k1": 24.5, "k3": 23.5}[estimator])
    assert torch.autograd.grad(found.sum(), policy)[0].item() == pytest.approx(pull)


def test_the_coefficient_rises_above_the_target_and_falls_below_it_in_bounded_steps() -> None:
    controller = KlController(0.05, target=0.1, rate=0.5)
    controller.observe(5.0)
    assert controller.coefficient == pytest.approx(0.05 * 1.1)
    controller.observe(0.11)
    assert controller.coefficient == pytest.approx(0.05 * 1.1 * 1.05)
    controller.observe(0.0)
    assert controller.coefficient == pytest.approx(0.05 * 1.1 * 1.05 * 0.9)


def test_the_coefficient_stays_within_a_factor_of_a_hundred_and_ignores_what_is_not_finite() -> None:
    controller = KlController(0.05, target=0.1, rate=1.0)
    for _ in range(1000):
        controller.observe(100.0)
    assert controller.coefficient == pytest.approx(5.0)
    controller.observe(float("nan"))
    assert controller.coefficient == pytest.approx(5.0)
    for _ in range(1000):
        controller.observe(0.0)
    assert controller.coefficient == pytest.approx(0.0005)


def test_without_a_target_the_coefficient_stays() -> None:
    controller = KlController(0.05)
    controller.observe(100.0)
    assert controller.coefficient == 0.05


def test_an_entropy_bonus_rewards_entropy() -> None:
    entropies = torch.tensor([0.3, 0.9], requires_grad=True)
    terms = loss_terms(inputs(torch.tensor([-1.0, -1.0]), entropies=entropies), LossSettings(entropy_coef=0.01))
    assert terms["entropy"].tolist() == pytest.approx([-0.003, -0.009])
    terms["entropy"].sum().backward()
    assert entropies.grad is not None
    assert entropies.grad.tolist() == pytest.approx([-0.01, -0.01])


def test_terms_without_a_coefficient_are_not_there() -> None:
    values = inputs(torch.tensor([-1.0]), reference_logprobs=torch.tensor([-9.0]))
    assert set(loss_terms(values, LossSettings())) == {"policy"}


def test_the_loss_is_the_sum_of_its_terms() -> None:
    values = inputs(torch.tensor([-1.0, -2.0]), reference_logprobs=torch.tensor([-2.0, -1.0]))
    settings = LossSettings(kl_coef=0.1, entropy_coef=0.2)
    terms = loss_terms(values, settings)
    assert set(terms) == {"policy", "kl", "entropy"}
    torch.testing.assert_close(token_losses(values, settings), terms["policy"] + terms["kl"] + terms["entropy"])


def test_the_teachers_distribution_is_renormalised_over_its_tokens_at_its_temperature() -> None:
    teacher = torch.tensor([[0.6, 0.2, 0.0]]).log()
    student = torch.tensor([[0.5, 0.25, 0.1]]).log()
    exact = torch.tensor([0.75, 0.25])
    expected = (exact * (exact.log() - student[0, :2])).sum()
    torch.testing.assert_close(forward_kl(student, teacher, torch.ones(1)), expected[None])
    hot = torch.tensor([0.6, 0.2]).sqrt()
    hot = hot / hot.sum()
    torch.testing.assert_close(
        forward_kl(student, teacher, torch.full((1,), 2.0)), (hot * (hot.log() - student[0, :2])).sum()[None]
    )


def test_a_student_that_agrees_with_the_whole_teacher_has_no_distillation_loss() -> None:
    teacher = torch.tensor([[0.6, 0.4]]).log()
    student = teacher.clone().requires_grad_()
    found = forward_kl(student, teacher, torch.ones(1))
    assert found.item() == pytest.approx(0.0, abs=1e-6)
    found.sum().backward()
    assert student.grad is not None
    assert student.grad.tolist()[0] == pytest.approx([-0.6, -0.4])


def test_a_position_without_teacher_neither_adds_nor_breaks() -> None:
    student = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    found = forward_kl(student, torch.full((1, 2), -float("inf")), torch.ones(1))
    found.sum().backward()
    assert found.tolist() == [0.0]
    assert student.grad is not None
    assert student.grad.tolist() == [[0.0, 0.0]]


def test_a_teacher_of_one_token_is_no_distribution_that_would_raise_the_sampled_token() -> None:
    student = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]], requires_grad=True)
    teacher = torch.tensor([[-9.0, -float("inf")], [-0.1, -2.5]])
    found = forward_kl(student, teacher, torch.ones(2))
    found.sum().backward()
    assert found[0].item() == 0.0
    assert found[1].item() > 0.0
    assert student.grad is not None
    assert student.grad[0].tolist() == [0.0, 0.0]


def test_credits_are_what_the_teacher_thinks_of_the_sampled_token_more_than_its_sampler() -> None:
    ids = torch.tensor([[4, 5], [0, 0]])
    teacher = torch.tensor([[-0.5, -1.5], [-float("inf"), -float("inf")]])
    found = teacher_credits(ids, teacher, torch.tensor([5, 0]), torch.tensor([-2.0, -2.0]), torch.ones(2))
    assert found.tolist() == [0.5, 0.0]


def test_a_token_outside_the_teachers_most_likely_ones_is_credited_with_the_most_it_can_have_there() -> None:
    """Without that, the tokens that the teacher finds least likely would be the only ones that nothing moves."""
    ids, labels = torch.tensor([[4, 5], [4, 5]]), torch.tensor([7, 7])
    teacher = torch.tensor([[0.9, 0.08], [0.5, 0.01]]).log()
    found = teacher_credits(ids, teacher, labels, torch.full((2,), -2.0), torch.ones(2))
    torch.testing.assert_close(found, torch.tensor([0.02, 0.01]).log() + 2.0)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_a_student_that_agrees_with_its_teacher_gets_no_credit_at_any_sampling_temperature(temperature: float) -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    sampled, at = (logits / temperature).log_softmax(-1), torch.full((5,), temperature)
    ids, labels = torch.arange(9).expand(5, 9), torch.arange(5)
    rollout = sampled[torch.arange(5), labels]
    found = teacher_credits(ids, logits.log_softmax(-1), labels, rollout, at)
    torch.testing.assert_close(found, torch.zeros(5), atol=1e-3, rtol=0)


@pytest.mark.parametrize("names_all", [False, True])
def test_credits_give_the_gradient_of_the_reverse_divergence_at_the_sampling_temperature(names_all: bool) -> None:
    """Even if the teacher gives nothing but the sampled token's logprob: what is missing is a mere baseline."""
    temperature, generator = 0.7, torch.Generator().manual_seed(1)
    logits = torch.randn(9, generator=generator).requires_grad_()
    teacher, labels = torch.randn(9, generator=generator).log_softmax(-1), torch.arange(9)
    student, tempered = (values.div(temperature).log_softmax(-1) for values in (logits, teacher))
    (wanted,) = torch.autograd.grad((student.exp() * (student - tempered)).sum(), logits, retain_graph=True)
    ids = labels.expand(9, 9) if names_all else labels[:, None]
    credit = teacher_credits(ids, teacher[ids], labels, student.detach(), torch.full((9,), temperature))
    (found,) = torch.autograd.grad(-(student.exp().detach() * credit * student).sum(), logits)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


OWN = """
from torch import Tensor
from example_trainer.objective.losses import LossInputs, LossSettings

def squared(inputs: LossInputs, settings: LossSettings) -> Tensor:
    return inputs.advantages * (inputs.logprobs - inputs.rollout_logprobs + 1.0) ** 2

def scalar(inputs, settings):
    return inputs.logprobs.sum()

def detached(inputs, settings):
    return inputs.advantages

def broken(inputs, settings):
    return inputs.logprob
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    package = tmp_path / "my_pkg_of_losses"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "my_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        monkeypatch.delitem(sys.modules, name)
    return f"{package.name}.my_module"


def test_a_loss_of_ones_own_replaces_the_surrogate_and_keeps_the_other_terms(own_module: str) -> None:
    loss = load_own_loss(f"{own_module}:squared")
    settings = LossSettings(loss_type=f"{own_module}:squared", own_loss=loss, entropy_coef=0.1)
    terms = loss_terms(inputs(torch.tensor([-1.0, -2.0]), advantages=torch.tensor([2.0, -3.0])), settings)
    assert terms["policy"].tolist() == [2.0, -3.0]
    assert "entropy" in terms


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scalar", "returned .* for 3 tokens"),
        ("detached", "with gradient"),
        ("broken", "fails on three tokens"),
        ("absent", "cannot be imported"),
    ],
)
def test_a_loss_that_cannot_work_is_refused_before_the_run_begins(own_module: str, name: str, words: str) -> None:
    with pytest.raises(UnusableLoss, match=words):
        load_own_loss(f"{own_module}:{name}")


def test_a_loss_in_the_working_directory_is_found_and_the_directory_is_not_searched_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_losses_beside_the_run_file.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    places = list(sys.path)
    values = inputs(torch.tensor([-1.0, -2.0]), advantages=torch.tensor([2.0, -3.0]))
    loss = load_own_loss("my_losses_beside_the_run_file:squared")
    assert loss(values, LossSettings()).tolist() == [2.0, -3.0]
    assert sys.path == places


def test_a_module_that_cannot_be_read_is_one_line_with_its_place(own_module: str, tmp_path: Path) -> None:
    (tmp_path / "my_pkg_of_losses" / "my_module.py").write_text("def mine(:\n")
    with pytest.raises(UnusableLoss, match=r"cannot be imported: SyntaxError: .*my_module.py, line 1") as refused:
        load_own_loss(f"{own_module}:mine")
    assert "\n" not in str(refused.value)


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(UnusableLoss, match="no_such_package_of_mine"):
        load_own_loss("no_such_package_of_mine.losses:mine")
