"""Logprobs of named tokens for one request, which vLLM would give to all requests of its step.

`logprob_token_ids` replaces the most likely tokens by named ones, in vLLM's sampler for the whole batch: a neighbour
who asked for alternatives got token 0 with the probability 0 instead. Here only the rows that named tokens get those.
"""

from __future__ import annotations

from typing import Any

_INSTALLED = "atropos_installed"
_ASKED = "atropos_most_likely"


def install() -> None:
    """Wrap vLLM's sampler, once a process."""
    from vllm.v1.sample.sampler import Sampler

    if hasattr(Sampler, _INSTALLED):
        return
    setattr(Sampler, _INSTALLED, True)
    forward = Sampler.forward

    def noting(sampler: Any, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(sampler, _ASKED, sampling_metadata.max_num_logprobs or 0)
        return forward(sampler, logits, sampling_metadata, *args, **kwargs)

    Sampler.forward = noting
    Sampler.gather_specific_token_logprobs = _gather


def _gather(sampler: Any, logprobs: Any, named: dict[int, list[int]], sampled: Any) -> Any:
    """Each row's sampled token, and after it the named tokens or the most likely ones; rows are padded with -inf."""
    import torch
    from vllm.v1.outputs import LogprobsTensors

    likely = sampler.gather_logprobs(logprobs, getattr(sampler, _ASKED), sampled)
    missing = max(0, 1 + max(map(len, named.values())) - likely.logprobs.shape[1])
    tokens = torch.nn.functional.pad(likely.logprob_token_ids, (0, missing))
    values = torch.nn.functional.pad(likely.logprobs, (0, missing), value=-torch.inf)
    for row, wanted in named.items():
        end = 1 + len(wanted)
        ids = torch.as_tensor(wanted, dtype=torch.int64, device=logprobs.device)
        tokens[row, 1:end] = ids.to(tokens.dtype)
        values[row, 1:end] = logprobs[row, ids]
        values[row, end:] = -torch.inf
    return LogprobsTensors(tokens, values, likely.selected_token_ranks)
