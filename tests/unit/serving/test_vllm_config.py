"""VLLM's own configuration, made from the arguments that the server gives it, without an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from example_trainer.testing import make_tiny_model

CONFIGURE = """
import json, os, sys
from example_trainer.errors import CannotServe
from example_trainer.serving.config import prepare_environment, read_config
from example_trainer.serving.start import _prepare_vllm
from example_trainer.weights.served_model import link_served
from pathlib import Path

prepare_environment(os.environ, model_is_local=True)

def configured(model, *flags):
    config, rest = read_config(["--model", str(model), "--dtype", "bfloat16", *flags])
    args = _prepare_vllm(config, rest)
    from vllm.config import ModelConfig
    given = {"dtype": args.dtype, "hf_overrides": args.hf_overrides, "skip_tokenizer_init": True}
    return ModelConfig(model=args.model, **given)

def refused(*flags):
    try:
        configured(versions[0], *flags)
    except CannotServe as error:
        return str(error)

versions = [Path(path) for path in sys.argv[1:]]
print(json.dumps({
    "heads": [str(configured(versions[0], *flags).head_dtype) for flags in ((), ("--head-dtype", "auto"))],
    "linked": [configured(link_served(version)).compute_hash() for version in versions],
    "engines": refused("--share-weights", "--data-parallel-size", "2"),
    "apart": [configured(version).compute_hash() for version in versions],
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what vLLM makes of two versions of one model, in a process of its own, which is changed for a server."""
    served = tmp_path_factory.mktemp("served")
    versions = [make_tiny_model(served / f"policy-v{version}", seed=version) for version in (1, 2)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", CONFIGURE, *map(str, versions)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_the_head_of_a_server_in_bf16_computes_in_fp32_unless_it_is_left_to_the_model(found: dict[str, Any]) -> None:
    assert found["heads"] == ["torch.float32", "torch.bfloat16"]


def test_every_version_behind_the_link_has_the_same_compiled_graphs(found: dict[str, Any]) -> None:
    """VLLM finds the graphs of an earlier server by this hash; with a path of its own each version would compile."""
    assert len(set(found["linked"])) == 1
    assert len(set(found["apart"])) == 2


def test_several_engines_are_refused_with_shared_weights_before_any_is_started(found: dict[str, Any]) -> None:
    assert "--data-parallel-size 2 cannot be combined with --share-weights" in found["engines"]
