"""Adapters on a CPU: each row is computed with the adapter of its slot, as vLLM's own operations do it row by row."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from example_trainer.serving.vllm.cpu_adapters import OPERATIONS, with_slots_of_tokens

ROWS, SLOTS, IN, OUT, PADDED = 6, 3, 4, 5, 8
FURTHER = {
    "bgmv_shrink": [(2.0,)],
    "bgmv_expand": [(True,), (False,)],
    "bgmv_expand_slice": [(2, OUT, True), (0, OUT, False)],
}
CASES = [(name, more) for name, cases in FURTHER.items() for more in cases]


def operands(slots, *, dtype=torch.float32, dimensions=3):
    noise = torch.Generator().manual_seed(0)
    weights = torch.randn(SLOTS, OUT, IN, generator=noise).to(dtype)
    weights = weights[:, None] if dimensions == 4 else weights
    inputs = torch.randn(ROWS, IN, generator=noise).to(dtype)
    return inputs, weights, torch.ones(ROWS, PADDED), torch.tensor(slots)


@pytest.mark.parametrize("slots", [[0] * ROWS, [2] * ROWS, [0, 1, 2, 1, 0, 2]], ids=["first", "last", "mixed"])
@pytest.mark.parametrize("dimensions", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "more"), CASES)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
def test_the_products_are_those_of_vllms_own_operations(name, more, slots, dimensions, dtype):
    from vllm.lora.ops.torch_ops import lora_ops

    values = operands(slots, dtype=dtype, dimensions=dimensions)
    expected = values[2].clone()
    getattr(lora_ops, name)(values[0], values[1], expected, values[3], *more)
    OPERATIONS[name](*values, *more)
    assert torch.allclose(values[2], expected, atol=1e-6)


@pytest.mark.parametrize("slots", [[-1] * ROWS, [0, -1, 1, -1, -1, 2]], ids=["none", "some"])
@pytest.mark.parametrize(("name", "more"), CASES)
def test_rows_without_an_adapter_stay_as_they_are(name, more, slots):
    """vLLM's read -1 as the last slot, which may hold anything."""
    inputs, weights, output, _ = operands(slots)
    if 2 not in slots:
        weights[-1] = float("nan")
    OPERATIONS[name](inputs, weights, output, torch.tensor(slots), *more)
    for row, slot in enumerate(slots):
        assert (output[row] == 1).all() == (slot < 0)


def test_a_batch_without_rows_and_one_of_fewer_outputs_are_computed():
    OPERATIONS["bgmv_shrink"](torch.ones(0, IN), torch.ones(SLOTS, OUT, IN), torch.ones(0, OUT), torch.tensor([]).int())
    output = torch.zeros(2, OUT)
    OPERATIONS["bgmv_expand"](torch.ones(ROWS, IN), torch.ones(SLOTS, OUT, IN), output, torch.zeros(ROWS).int())
    assert (output == IN).all()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
def test_each_row_of_prompt_logprobs_is_computed_with_the_slot_of_its_token():
    """vLLM left the slots of the requests, one for each: the engine ended, as there is a row for each token."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    get = inspect.unwrap(GPUModelRunner._get_prompt_logprobs_dict)
    plain, states = prompt_runner(), torch.randn(9, 8)[:7]
    expected = get(plain, states, plain.scheduled)
    assert plain.given == [], "vLLM has mended it: remove the correction"
    runner = prompt_runner()
    found = with_slots_of_tokens(get)(runner, states, runner.scheduled)
    everywhere = (0, 0, 5, 5, 5, 6, 6)
    assert runner.given == [((5, 5), everywhere, {"five", "six"}), ((6,), everywhere, {"five", "six"})]
    assert found.keys() == expected.keys() == {"b", "c"}
    assert (found["b"].logprobs == expected["b"].logprobs).all()
    assert "compute_logits" not in vars(runner.model)
    without = prompt_runner(lora_config=None)
    with_slots_of_tokens(get)(without, states, without.scheduled)
    assert without.given == []


class Head:
    """A model of which only the output head is asked."""

    def compute_logits(self, states):
        return states * 2.0


def prompt_runner(lora_config="adapters"):
    """Return the part of vLLM's runner that prompt logprobs need, with the prompts b and c to be told."""
    from vllm.v1.sample.sampler import Sampler

    prompts = {"a": [1, 2], "b": [3, 4, 5], "c": [6, 7]}
    scheduled, ends = {name: len(prompt) for name, prompt in prompts.items()}, np.array([0, 2, 5, 7])
    adapters = (np.array([0, 5, 6]), {"five", "six"})
    runner = SimpleNamespace(
        lora_config=lora_config,
        num_prompt_logprobs={"b": 1, "c": 0},
        scheduled=scheduled,
        device=torch.device("cpu"),
        model=Head(),
        model_config=SimpleNamespace(logprobs_mode="processed_logprobs"),
        sampler=SimpleNamespace(compute_logprobs=Sampler.compute_logprobs, gather_logprobs=Sampler.gather_logprobs),
        query_start_loc=SimpleNamespace(np=ends),
        requests={
            name: SimpleNamespace(prompt_token_ids=prompt, in_progress_prompt_logprobs_cpu=None, num_computed_tokens=0)
            for name, prompt in prompts.items()
        },
        input_batch=SimpleNamespace(
            req_ids=list(prompts),
            req_id_to_index={name: row for row, name in enumerate(prompts)},
            make_lora_inputs=lambda counts, _: (None, tuple(adapters[0].repeat(counts).tolist()), adapters[1]),
        ),
        given=[],
        _sync_device=lambda: None,
    )
    runner._set_active_loras = lambda *mapping: runner.given.append(mapping)
    return runner
