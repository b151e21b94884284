"""Settings that were changed and have no effect: in this weight sync mode, or without the option that they refine.

They are warned about by name, not refused: a run file that serves two modes may hold the settings of both.
Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from atropos_api.common.option_flags import flag
from example_trainer.options.objective import CLIPPED_LOSSES, PUBLISHED_FORMS
from example_trainer.options.presets import PRESETS

if TYPE_CHECKING:
    from example_trainer.options.training_options import TrainingOptions

SERVER_FIELDS = (
    "gpu_memory_utilization",
    "max_model_len",
    "log_dir",
    "vllm_gpu",
    "vllm_tensor_parallel_size",
    "vllm_quantization",
    "vllm_head_dtype",
    "vllm_enable_sleep_mode",
    "vllm_settings",
)
"""Options that the program that starts the server uses: the trainer in some modes, the launcher in the others."""


class _Rule(NamedTuple):
    """One option, the condition under which it has an effect, and the reason shown if the condition is false."""

    field: str
    counts: bool
    reason: str


def settings_without_effect(
    config: TrainingOptions, *, is_launched: bool = False, used: Collection[str] = ()
) -> list[str]:
    """Return a sentence for each setting that differs from its default and has no effect with the other settings.

    With `is_launched` the settings are the launcher's as well; `used` names the `SERVER_FIELDS` that it uses itself.
    """
    by_mode = f"has no effect in mode {config.weight_bridge_mode}"
    return [
        *_sentences(config, _mode_rules(config, is_launched, used), by_mode),
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


def _mode_rules(config: TrainingOptions, is_launched: bool, used: Collection[str]) -> Iterator[_Rule]:
    mode, nodes = config.mode, config.num_inference_nodes
    shares, outlives = mode.shares_memory, config.servers_outlive_publish
    restarts = "requests end under the weights that they began with, or are restarted"
    spaces = "it spaces publishes where a forward reads the masters"
    who_starts = "the launcher starts it" if is_launched else "only lora_only starts a server where none answers"
    if config.registered_servers:
        who_starts = "the trainer starts no registered server"
    elif config.uses_remote_server:
        who_starts = f"no server is started on {config.vllm_host} from here"
    spaced = not mode.server_outlives_publish or mode.interval_if_set
    yield _Rule("vllm_restart_interval", spaced, "each step is published")
    yield _Rule("in_flight", shares, restarts)
    yield _Rule("sync_budget", shares and config.forwards_from_masters, spaces)
    yield _Rule("forward_weights", config.shares_memory, "the forward reads the trainer's own weights")
    yield _Rule("drain_seconds", mode.drains_requests, "an adapter is swapped while requests go on")
    from_broker = "registered servers have the addresses that the broker says"
    addressed = not config.registered_servers
    yield _Rule("vllm_host", addressed, from_broker)
    yield _Rule("vllm_port", addressed or (is_launched and config.local_servers > 0), from_broker)
    yield _Rule("vllm_config_path", config.shares_memory, "no memory is shared")
    yield _Rule("restart_method", not mode.server_outlives_publish, "the server is not restarted")
    replaces = not outlives and config.restart_method == "restart"
    yield _Rule("standby_server", replaces, "the server is not replaced")
    if_missing = mode.starts_missing_server and not nodes and addressed and not config.uses_remote_server
    counted = _checks_memory(config) and "gpu_memory_utilization" in config.model_fields_set
    local = config.registered_servers and (is_launched or counted)
    yield _Rule("start_vllm", (if_missing and not is_launched) or local, who_starts)
    for field in ("broadcast_backend", "broadcast_address"):
        yield _Rule(field, config.broadcasts, "weights are broadcast in shared_vllm with several servers")
    yield _Rule("bridge_token", outlives, "the trainer starts the server itself, with a token of its own")
    for field in SERVER_FIELDS:
        counts = config.may_start_server or field in used or field in _counted_for_memory(config)
        but = " (under LongRoPE to both)" if field == "max_model_len" else ""
        yield _Rule(field, counts, f"the trainer starts no server; give it to the server{but}")


def _checks_memory(config: TrainingOptions) -> bool:
    return config.fit != "off" and not (config.device == "cpu" and config.gpu_memory_gb is None)


def _counted_for_memory(config: TrainingOptions) -> frozenset[str]:
    """Return the options from which the memory check estimates a server that is started elsewhere."""
    if not _checks_memory(config) or not config.serves_here:
        return frozenset()
    share = "gpu_memory_utilization"
    if share in config.model_fields_set:
        return frozenset({share} if config.shares_memory else {share, "vllm_gpu"})
    # A share that is not given is taken to be what the weights and one sequence need, where tensors are shared.
    return frozenset({"max_model_len"} if config.shares_memory else ())


def _other_rules(config: TrainingOptions) -> Iterator[_Rule]:
    yield from _objective_rules(config)
    yield from _rule_for_all(("reshard_after_forward", "init_method"), config.world_size > 1, "add --world-size 2")
    if config.world_size > 1:
        yield _Rule("reshard_after_forward", not config.trains_adapter, "each rank holds the whole base and adapter")
    adam = ("adam_beta1", "adam_beta2", "adam_eps")
    yield from _rule_for_all(adam, config.optimizer != "adafactor", "--optimizer adafactor has a decay rule of its own")
    yield _Rule("activation_offloading", config.gradient_checkpointing, "add --gradient-checkpointing")
    yield _Rule("wandb_run_name", config.use_wandb, "add --use-wandb")
    yield _Rule("metrics_host", config.metrics_port is not None, "add --metrics-port")
    samples = config.keep_versions > 0 or (config.trains_adapter and config.lora_dropout > 0)
    yield _Rule("alignment_sample_sequences", samples, "add --keep-versions")


def _objective_rules(config: TrainingOptions) -> Iterator[_Rule]:
    clips = config.importance_sampling == "clip" and config.loss_type in CLIPPED_LOSSES
    reason = f"--loss-type {config.loss_type} with --importance-sampling {config.importance_sampling} clips no ratio"
    yield from _rule_for_all(
        ("clip_eps", "clip_eps_high"), clips or config.loss_type in {"gmpo", "dppo"} or config.has_own_loss, reason
    )
    yield _Rule("dual_clip", clips or config.has_own_loss or config.dual_clip is None, reason)
    for loss_type in ("cispo", "sapo", "vespo"):
        own = (field for field in type(config).model_fields if field.startswith(f"{loss_type}_"))
        users = {"cispo", "dppo"} if loss_type == "cispo" else {loss_type}
        yield from _rule_for_all(
            own, config.loss_type in users or config.has_own_loss, f"add --loss-type {' or '.join(sorted(users))}"
        )
    yield _Rule("m2_threshold", config.loss_type == "m2po" or config.has_own_loss, "add --loss-type m2po")
    yield from _rule_for_all(("kl_estimator", "kl_bias_correction"), config.kl_coef > 0, "add --kl-coef")
    yield _Rule("kl_adapt_rate", config.target_kl is not None, "add --target-kl")
    raw = config.loss_type == "no_baseline"
    yield _Rule("advantage_norm", not raw, "--loss-type no_baseline takes the rewards as they are")
    divides = config.advantage_norm != "none" and not raw
    yield _Rule("advantage_std", divides, "the rewards are divided by no deviation")
    yield _Rule("overlong_buffer", config.overlong_penalty > 0, "add --overlong-penalty")
    uses_limit = config.mask_overlong or config.overlong_penalty > 0 or config.loss_aggregation == "constant"
    use = "add --mask-overlong or --overlong-penalty, or --loss-aggregation constant"
    yield _Rule("max_response_tokens", uses_limit, use)
    yield _Rule("distill_coef", config.distill != "none", "add --distill")
    yield _Rule("distill_temperature", config.distill != "none", "add --distill")


def _rule_for_all(fields: Iterable[str], counts: bool, reason: str) -> Iterator[_Rule]:
    return (_Rule(field, counts, reason) for field in fields)
