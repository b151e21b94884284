"""A request's own seed on a CPU, where vLLM's engine would die of it.

A step samples for every request of the batch, also for one whose prompt it has read only in part. vLLM throws that
token away and turns the request's generator back by an offset, which a CPU's generator does not have: the error ends
the engine. Here the generator of such a request sits out the step, which comes to the same: one seed gives the same
tokens however a prompt was cut into parts, and whether or not the request was paused and computed again.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Wrap the sampling of vLLM's runner for CPUs."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner.sample_tokens = _sitting_out(CPUModelRunner.sample_tokens)


def _sitting_out(sample: Any) -> Any:
    def sampling(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        if not batch.generators:
            return sample(runner, *args, **kwargs)
        (unfinished,) = runner.discard_request_mask.np[: batch.num_reqs].nonzero()
        out = {row: batch.generators.pop(row) for row in unfinished.tolist() if row in batch.generators}
        try:
            return sample(runner, *args, **kwargs)
        finally:
            batch.generators.update(out)

    return sampling
