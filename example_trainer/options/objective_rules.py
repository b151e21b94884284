"""Combinations of advantage and loss settings that contradict each other, each with its reason.

`refusals` asks here; importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from example_trainer.options.naming import flag
from example_trainer.options.publish import LORA_MODES

if TYPE_CHECKING:
    from example_trainer.config import TrainingConfig


def refuse_objective(config: TrainingConfig) -> str | None:
    """The first contradiction among the options of the objective, or None."""
    rules: tuple[Callable[[TrainingConfig], Iterator[str]], ...] = (
        _importance_sampling,
        _importance_bounds,
        _reference,
        _overlong,
        _several_ranks,
    )
    return next((reason for rule in rules for reason in rule(config)), None)


def _importance_sampling(config: TrainingConfig) -> Iterator[str]:
    sampling = f"--importance-sampling {config.importance_sampling}"
    if config.importance_sampling != "clip":
        if config.loss_type == "cispo":
            yield f"{sampling}: --loss-type cispo cuts its own weights; set --cispo-cap and leave {sampling} out"
        if config.has_own_loss:
            yield f"{sampling}: {config.loss_type} weighs its own ratios; leave {sampling} out"
        if config.old_logprobs == "recomputed":
            yield (
                f"{sampling} weighs the policy against the sampler already, so --old-logprobs recomputed would count "
                "the gap twice; use --importance-sampling clip with --mismatch-correction"
            )
    if config.mismatch_correction != "none" and config.old_logprobs == "rollout":
        yield (
            f"--mismatch-correction {config.mismatch_correction} weighs the trainer's old logprobs against the "
            "sampler's; add --old-logprobs recomputed"
        )


def _importance_bounds(config: TrainingConfig) -> Iterator[str]:
    weighs = config.importance_sampling != "clip" or config.mismatch_correction != "none"
    if config.tis_floor and not weighs:
        yield (
            f"--tis-floor {config.tis_floor:g} bounds importance weights and there are none; add "
            "--importance-sampling truncated, or --mismatch-correction"
        )
    if config.tis_floor >= config.tis_cap:
        yield f"--tis-floor {config.tis_floor:g} must be below --tis-cap {config.tis_cap:g}"


def _reference(config: TrainingConfig) -> Iterator[str]:
    for field in ("target_kl", "ref_model", "ref_update_interval"):
        if getattr(config, field) and not config.kl_coef:
            given = f"{flag(field)} {getattr(config, field)}"
            yield f"{given} needs a divergence to act on; add --kl-coef, 1e-3 for instance"
    if config.ref_model is not None and config.weight_bridge_mode in LORA_MODES:
        yield (
            f"--ref-model {config.ref_model}: under {config.weight_bridge_mode} the reference is the base with the "
            "adapter off; leave it out"
        )


def _overlong(config: TrainingConfig) -> Iterator[str]:
    limit = config.max_response_tokens
    if limit is None:
        for field in ("overlong_penalty", "mask_overlong", "overlong_buffer"):
            if getattr(config, field):
                yield f"{flag(field)} {getattr(config, field)} needs the length limit; add --max-response-tokens"
    elif config.overlong_buffer > limit:
        yield f"--overlong-buffer {config.overlong_buffer} is longer than --max-response-tokens {limit}"
    elif limit > config.seq_len:
        yield f"--max-response-tokens {limit} is longer than --seq-len {config.seq_len}"


def _several_ranks(config: TrainingConfig) -> Iterator[str]:
    if config.shuffle_advantages and config.world_size > 1:
        yield (
            f"--shuffle-advantages with --world-size {config.world_size} would permute within each rank's share only; "
            "run the control on one process"
        )
