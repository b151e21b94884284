"""The checks before a launch: a run that cannot work is refused before anything is written or started."""

from __future__ import annotations

import os
from pathlib import Path

from atropos_api.common.cliconfig import ConfigError
from example_trainer.launcher.base_model import (
    LocalBase,
    local_base,
    refuse_missing_layers,
    refuse_unknown_task,
    require_model,
)
from example_trainer.launcher.endpoints import settle_endpoints
from example_trainer.launcher.environment_settings import require_fillable
from example_trainer.launcher.launch import Launch
from example_trainer.launcher.placement.choice import check_fits, passed_variables
from example_trainer.launcher.plan import Plan, make_plan
from example_trainer.launcher.programs import VLLM
from example_trainer.launcher.run_dir import plan_run_dir, refuse_other_checkpoints
from example_trainer.launcher.run_file import RunSettings
from example_trainer.launcher.run_file_sections import refuse_broker_settings
from example_trainer.launcher.run_lock import refuse_foreign_directory
from example_trainer.launcher.teacher import MODEL_FLAG, TEACHER_SERVER, own_teacher
from example_trainer.options.vllm_settings import refuse_unknown


def plan_launch(settings: RunSettings) -> Launch:
    """Return a launch for `settings`; nothing is written yet."""
    config = settings.trainer
    refuse_unknown(section := settings.section(VLLM), where="vllm:")
    refuse_unknown(config.vllm_settings.keys() - section.keys(), where="--vllm-settings")
    refuse_unknown_task(config.model_name)
    if (own := own_teacher(settings)) is not None:
        refuse_unknown_task(own.model_name, MODEL_FLAG)
        refuse_unknown({**own.vllm, **settings.flags[TEACHER_SERVER].values}, where=f"{TEACHER_SERVER}:")
    if "atropos_url" not in config.model_fields_set:
        refuse_broker_settings(settings.sections["api"], settings.flags["api"])
    if settings.placement.is_ray:
        check_fits(settings)
        passed_variables(settings.placement, os.environ)  # raises an error if a listed variable is not set
    refuse_missing_layers(config)
    if config.resume not in {None, "auto"} and not Path(config.resume).exists():
        raise ConfigError(f"--resume {config.resume}: no such directory; name a checkpoint-N directory, or auto")
    if config.resume == "auto" and config.run_dir is None and config.save_path is None:
        raise ConfigError("--resume auto: a new run directory holds no run; name that of the run with --run-dir")
    if "atropos_url" not in config.model_fields_set:  # else other environments may fill a batch
        require_fillable(
            settings.environments,
            settings.flags["env"].values,
            config.sequences_per_batch,
            steps=config.training_steps,
            resumes=config.resume is not None,
        )
    run = plan_run_dir(config.run_dir, name=config.name, log_dir=config.log_dir, resume=config.resume is not None)
    refuse_foreign_directory(run)
    if config.resume is None:
        flag = "--run-dir" if config.save_path is None else "--save-path"
        refuse_other_checkpoints(config.save_path or run.root, flag)
    return Launch(settings=settings, run=run)


def dry_plan(launch: Launch) -> Plan:
    """Return the plan of `launch`; a base model that is made on this machine appears by its name only."""
    settings = launch.settings
    name, own = settings.trainer.model_name, own_teacher(settings)
    model = name if local_base(name) else require_model(name)
    if own is not None and local_base(own.model_name) is None:
        require_model(own.model_name, MODEL_FLAG)
    if settings.trainer.ref_model is not None:
        require_model(settings.trainer.ref_model, "--ref-model")
    return make_plan(settings, launch.run, settle_endpoints(settings), model=model)


def local_bases(settings: RunSettings) -> list[LocalBase]:
    """Return the tiny models that this launch finds or makes first."""
    own = own_teacher(settings)
    named = [settings.trainer.model_name, *([own.model_name] if own is not None else [])]
    return [base for name in named if (base := local_base(name)) is not None]
