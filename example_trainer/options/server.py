"""The settings of the policy's inference server, as the trainer's options and a run file's `vllm:` section set them.

The launcher writes them to the server's settings file, `vllm_manager` passes them as flags. Each adds what depends on
the program that starts the server: address, model, files. Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from atropos_api.common.cliconfig import validate
from example_trainer.options.publish import served_rank
from example_trainer.options.training_options import TrainingOptions
from example_trainer.options.vllm_settings import DECIDED, TRAINER_FIELDS, refuse_unknown

OptionsT = TypeVar("OptionsT", bound=TrainingOptions)


def server_settings(config: TrainingOptions, index: int = 0) -> dict[str, Any]:
    """Return the settings of the policy's server with this index, by the names of the server's own options."""
    settings: dict[str, Any] = {
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "seed": config.seed + index,
    }
    if config.mode.shares_memory or config.registered_servers:
        settings |= {"share_weights": config.shares_memory, "await_policy": config.broadcasts}
    if config.trains_adapter:
        settings |= {"enable_lora": True, "max_lora_rank": served_rank(config.lora_r)}
        settings["max_loras"] = config.served_adapters
    if config.mode.awaits_policy or config.registered_servers:
        settings["await_policy"] = True
    if config.vllm_tensor_parallel_size > 1:
        settings["tensor_parallel_size"] = config.vllm_tensor_parallel_size
    if config.vllm_quantization is not None:
        settings["quantization"] = config.vllm_quantization
    if config.vllm_head_dtype != "float32":
        settings["head_dtype"] = config.vllm_head_dtype
    if config.vllm_enable_sleep_mode:
        settings["enable_sleep_mode"] = True
    settings |= config.model_dump(include={"log_format", "otlp_traces_endpoint"}, exclude_defaults=True)
    return settings | config.vllm_settings


def below_flags(section: Mapping[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """Return a `vllm:` section without the options whose counterpart in the trainer was typed on the command line."""
    fields = {**TRAINER_FIELDS, "dtype": "dtype", "seed": "seed"}
    given = {str(name).replace("-", "_"): value for name, value in section.items()}
    if "model_name" in given:  # the server's other name of the setting, which the launcher writes as `model`
        given["model"] = given.pop("model_name")
    return {name: value for name, value in given.items() if fields.get(name) not in typed}


def with_vllm_section(
    config: OptionsT, section: Mapping[str, Any], *, no_server: bool = False
) -> tuple[OptionsT, list[str]]:
    """Return the options with those of a `vllm:` section, if the trainer starts the server, and remarks.

    A server that the launcher starts reads the section itself; `no_server` says that neither of them starts one. The
    section overrides the trainer's options of the same meaning. A remark names an option without effect.
    """
    given = {name: value for name, value in section.items() if value is not None}
    if given and no_server:
        names = ", ".join(f"vllm.{name}" for name in given)
        return config, [f"{names}: no effect, since no server of the policy is started here; give it to the server"]
    if config.servers_outlive_publish:
        model = {name: value for name, value in given.items() if name in {"model", "model_name"}}
        return config, list(_remarks(config, model, starter="launcher"))
    return _merged(config, given) if given else (config, [])


def with_own_section(
    config: OptionsT, sections: Iterable[Mapping[str, Any]], typed: Collection[str]
) -> tuple[OptionsT, list[str]]:
    """Return the options of a trainer without launcher, with the `vllm:` sections of its run files, and remarks.

    In `lora_only` the section may have been written for a server that runs already, so its address is not used then.
    """
    given = {name: value for section in sections for name, value in below_flags(section, typed).items()}
    if config.may_start_server:
        refuse_unknown(given, where="vllm:")
    refuse_unknown(config.vllm_settings, where="--vllm-settings")
    if config.servers_outlive_publish and config.may_start_server:
        own = {name: value for name, value in given.items() if name not in {"host", "port", *DECIDED}}
        return _merged(config, own)
    return with_vllm_section(config, given)


def _merged(config: OptionsT, given: Mapping[str, Any]) -> tuple[OptionsT, list[str]]:
    changes = {TRAINER_FIELDS[name]: value for name, value in given.items() if name in TRAINER_FIELDS}
    rest = {name: value for name, value in given.items() if name not in TRAINER_FIELDS and name not in DECIDED}
    if rest:
        changes["vllm_settings"] = rest | dict(config.vllm_settings)
    remarks = list(_remarks(config, given))
    if not changes:
        return config, remarks
    return validate(type(config), config.model_dump(exclude_unset=True) | changes), remarks


def _remarks(config: TrainingOptions, given: Mapping[str, Any], *, starter: str = "trainer") -> Iterator[str]:
    as_decided = (str(config.model_name), str(config.dtype), str(config.seed))
    for name, value in given.items():
        if name in DECIDED and str(value) not in as_decided:
            yield (
                f"vllm.{name} {value} has no effect in mode {config.weight_bridge_mode}: the {starter} starts the "
                f"server, and {DECIDED[name]} decides it"
            )
