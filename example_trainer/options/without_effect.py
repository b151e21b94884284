"""Settings that were changed and have no effect: in this weight sync mode, or without the option that they refine.

They are warned about by name, not refused: a run file that serves two modes may hold the settings of both.
Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from atropos_api.common.option_flags import flag
from example_trainer.options.objective import PUBLISHED_FORMS
from example_trainer.options.presets import PRESETS

if TYPE_CHECKING:
    from example_trainer.options.training_options import TrainingOptions

CLIPPED = ("grpo", "dr_grpo", "dapo", "gspo")
"""Loss types that clip the probability ratio."""
SERVER_FIELDS = ("max_model_len", "log_dir", "vllm_quantization", "vllm_enable_sleep_mode")
"""Options that only the program that starts the server uses: the trainer in some modes, the launcher in the others."""


class _Rule(NamedTuple):
    """One option, the condition under which it has an effect, and the reason told if the condition is false."""

    field: str
    counts: bool
    reason: str


def settings_without_effect(config: TrainingOptions, *, servers_started: bool = False) -> list[str]:
    """Return a sentence for each setting that differs from its default and has no effect beside the other settings.

    With `servers_started`, the launcher starts the servers of modes in which the trainer does not.
    """
    by_mode = f"has no effect in mode {config.weight_bridge_mode}"
    return [
        *_sentences(config, _mode_rules(config, servers_started), by_mode),
        *_sentences(config, _other_rules(config), "has no effect"),
    ]


def _sentences(config: TrainingOptions, rules: Iterable[_Rule], lacks: str) -> Iterator[str]:
    chosen = [PUBLISHED_FORMS.get(config.loss_type, {})] + ([PRESETS[config.preset].settings] if config.preset else [])
    for field, counts, reason in rules:
        value, default = getattr(config, field), type(config).model_fields[field].default
        # A loss type or preset may bring a setting that another option then leaves without effect.
        if not counts and value not in [default, *(settings.get(field, default) for settings in chosen)]:
            shown = "" if field == "bridge_token" else f" {value}"
            yield f"{flag(field)}{shown} {lacks}: {reason}"


def _mode_rules(config: TrainingOptions, servers_started: bool) -> Iterator[_Rule]:
    mode, nodes = config.mode, config.num_inference_nodes
    shares, outlives = mode.shares_memory, mode.server_outlives_publish
    restarts = "requests end under the weights that they began with, or are restarted"
    spaces = "it spaces publishes where a forward reads the masters"
    only_lora = "only lora_only starts a server where none answers"
    yield _Rule("vllm_restart_interval", not outlives or mode.interval_if_set, "each step is published")
    yield _Rule("in_flight", shares, restarts)
    yield _Rule("sync_budget", shares and config.forwards_from_masters, spaces)
    yield _Rule("forward_weights", shares, "the forward reads the trainer's own weights")
    yield _Rule("drain_seconds", mode.name != "lora_only", "an adapter is swapped while requests go on")
    yield _Rule("vllm_config_path", config.shares_memory, "no memory is shared")
    yield _Rule("restart_method", not outlives, "the server is not restarted")
    yield _Rule("start_vllm", mode.name == "lora_only" and not nodes, only_lora)
    yield _Rule("broadcast_backend", config.broadcasts, "weights are broadcast in shared_vllm with several servers")
    yield _Rule("bridge_token", outlives, "the trainer starts the server itself, with a token of its own")
    starts = servers_started or not outlives or (mode.name == "lora_only" and config.start_vllm == "auto" and not nodes)
    # The share of a server that somebody else starts is taken to be what the weights and one sequence need.
    estimates_share = (
        config.shares_memory and config.fit != "off" and "gpu_memory_utilization" not in config.model_fields_set
    )
    for field in SERVER_FIELDS:
        counts = starts or (field == "max_model_len" and estimates_share)
        yield _Rule(field, counts, "the trainer starts no server; give it to the server")


def _other_rules(config: TrainingOptions) -> Iterator[_Rule]:
    yield from _objective_rules(config)
    yield from _rule_for_all(("reshard_after_forward", "init_method"), config.world_size > 1, "add --world-size 2")
    adam = ("adam_beta1", "adam_beta2", "adam_eps")
    yield from _rule_for_all(adam, config.optimizer != "adafactor", "--optimizer adafactor has a decay rule of its own")
    yield _Rule("wandb_run_name", config.use_wandb, "add --use-wandb")
    samples = config.keep_versions > 0 or (config.trains_adapter and config.lora_dropout > 0)
    yield _Rule("alignment_sample_sequences", samples, "add --keep-versions")


def _objective_rules(config: TrainingOptions) -> Iterator[_Rule]:
    clips = config.importance_sampling == "clip" and config.loss_type in CLIPPED
    reason = f"--loss-type {config.loss_type} with --importance-sampling {config.importance_sampling} clips no ratio"
    yield from _rule_for_all(("clip_eps", "clip_eps_high"), clips or config.has_own_loss, reason)
    yield _Rule("dual_clip", clips or config.has_own_loss or config.dual_clip is None, reason)
    yield _Rule("cispo_cap", config.loss_type == "cispo" or config.has_own_loss, "add --loss-type cispo")
    yield _Rule("kl_estimator", config.kl_coef > 0, "add --kl-coef")
    yield _Rule("kl_adapt_rate", config.target_kl is not None, "add --target-kl")
    yield _Rule("advantage_std", config.advantage_norm != "none", "--advantage-norm none divides by no deviation")
    yield _Rule("distill_coef", config.distill != "none", "add --distill")
    yield _Rule("distill_temperature", config.distill == "forward_kl", "add --distill forward_kl")


def _rule_for_all(fields: Iterable[str], counts: bool, reason: str) -> Iterator[_Rule]:
    return (_Rule(field, counts, reason) for field in fields)
