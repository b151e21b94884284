"""One-line faults of float16: the loss scale, the steps that it skips, and the dtype on both sides."""

from __future__ import annotations

from .mutant import Mutant

_SCALE = "example_trainer/modeling/loss_scale.py"
_TRAINING = "example_trainer/training.py"
_STEP = "example_trainer/step/train_step.py"
_PROOF = "example_trainer/weights/logprob_parity.py"
_LOADING = "example_trainer/modeling/loading.py"
_LORA_ONLY = "example_trainer/weights/lora_only.py"

_TRAINED = "unit/trainer/test_float16.py::test_"
_SERVED = "unit/weights/test_float16.py::test_"

FLOAT16: tuple[Mutant, ...] = (
    Mutant(
        "a loss that is not scaled, so that small gradients are lost",
        _TRAINING,
        "loss = loss * self.loss_scale.scale",
        "loss = loss * 1.0",
        f"{_TRAINED}gradients_too_small_for_float16_reach_the_masters",
    ),
    Mutant(
        "gradients clipped before the scale is divided out",
        _SCALE,
        "parameter.grad.mul_(1.0 / self.scale)",
        "pass",
        f"{_TRAINED}the_norm_is_measured_and_clipped_after_the_scale_is_divided_out",
    ),
    Mutant(
        "a scale that never grows",
        _SCALE,
        "if self.steps >= self.growth_interval:",
        "if False:",
        f"{_TRAINED}the_scale_moves_as_torch_s_own_scaler_moves_it",
    ),
    Mutant(
        "an overflow that does not start the count of good steps anew",
        _SCALE,
        "self.scale, self.steps = self.scale * _BACKOFF, 0",
        "self.scale, self.steps = self.scale * _BACKOFF, self.steps",
        f"{_TRAINED}the_scale_moves_as_torch_s_own_scaler_moves_it",
    ),
    Mutant(
        "an overflow counted as divergence",
        _TRAINING,
        "if scale is not None and math.isfinite(gradients.loss) and scale.overflowed():",
        "if scale is not None and math.isfinite(gradients.loss) and scale.overflowed() and False:",
        f"{_TRAINED}a_step_that_overflows_is_left_out_counted_and_halves_the_scale",
    ),
    Mutant(
        "a loss that is not finite blamed on the scale",
        _TRAINING,
        "if scale is not None and math.isfinite(gradients.loss) and scale.overflowed():",
        "if scale is not None and scale.overflowed():",
        f"{_TRAINED}a_loss_that_is_not_finite_is_not_the_scale_s_fault",
    ),
    Mutant(
        "a scale that falls for ever",
        _SCALE,
        "return was_above_one",
        "return True",
        f"{_TRAINED}gradients_that_overflow_at_any_scale_end_the_run",
    ),
    Mutant(
        "a resumed run that begins with the first scale",
        _STEP,
        "learner.loss_scale.load_state(state.loss_scale)",
        "pass",
        f"{_TRAINED}a_resumed_run_has_the_weights_and_the_scale_of_one_that_was_not_stopped",
    ),
    Mutant(
        "float16 weights that are their own masters",
        _LOADING,
        'if dtype == torch.float16 and options.master_weights == "none":',
        "if False:",
        f"{_TRAINED}a_float16_checkpoint_without_masters_is_refused_before_it_is_loaded",
    ),
    Mutant(
        "float16 held to the limits of bf16",
        _PROOF,
        "torch.float16: Difference(maximum=6e-3, mean=6e-4)",
        "torch.float16: Difference(maximum=5e-1, mean=5e-2)",
        f"{_SERVED}float16_is_allowed_what_float16_rounds_and_not_more",
    ),
    Mutant(
        "adapters sent to a server of another dtype",
        _LORA_ONLY,
        "check_server(self._url, identity.dtype, identity.head_dtype, policy)",
        "pass",
        f"{_SERVED}a_server_of_another_dtype_is_refused_with_the_flag_to_change",
    ),
    Mutant(
        "the adapter's server started in vLLM's own choice of dtype",
        _LORA_ONLY,
        "vllm.with_settings(dtype=name_of(dtype))",
        "vllm",
        f"{_SERVED}the_adapter_s_own_server_is_started_in_the_dtype_of_the_trainer_s_base",
    ),
)
