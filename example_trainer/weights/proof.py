"""The proof that trainer and server compute the same policy: logprobs of a fixed probe, both sides.

The server samples continuations of fixed random prompts and says under which logprobs; the trainer's
forward computes the logprobs of the same tokens. A wrong slice, a stale cache, rotary frequencies
without their scaling, a tensor left out: each moves them by far more than rounding does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from example_trainer.model import Policy
from example_trainer.weights.errors import ProofFailed

logger = logging.getLogger(__name__)

Generate = Callable[[dict[str, Any]], dict[str, Any]]

_PROMPT_LENGTHS = (4, 9, 17, 33, 48, 70, 100, 140)
_OUTPUTS_PER_PROMPT = 8
_OUTPUT_TOKENS = 32
_SEED = 20260


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far logprobs of the same token under the same weights may lie apart."""

    maximum: float
    mean: float


TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(maximum=1e-4, mean=5e-6),
    torch.bfloat16: Tolerance(maximum=5e-2, mean=5e-3),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """The comparison's outcome."""

    tokens: int
    maximum: float
    mean: float

    def within(self, tolerance: Tolerance) -> bool:
        return self.maximum <= tolerance.maximum and self.mean <= tolerance.mean


@dataclass(frozen=True, slots=True)
class _Sample:
    """One prompt with what the server answered."""

    prompt: list[int]
    outputs: list[list[int]]
    logprobs: list[list[float]]


def prove(policy: Policy, generate: Generate, *, version: int, boot_id: str, max_model_len: int) -> Agreement:
    """Compare both sides on the probe; raises `ProofFailed` with the numbers where they differ."""
    if not policy.forwards_from_masters:
        _check_written(policy)
    prompts = probe_prompts(int(policy.hf_config.vocab_size), max_model_len)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: generate(_request(prompt)), prompts))
    samples = [
        _checked(prompt, answer, version=version, boot_id=boot_id)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    agreement = compare(policy, samples)
    tolerance = TOLERANCES[policy.dtype]
    numbers = (
        f"{agreement.tokens} tokens, |logprob difference| max {agreement.maximum:.2e} (limit {tolerance.maximum:.0e}), "
        f"mean {agreement.mean:.2e} (limit {tolerance.mean:.0e})"
    )
    if not agreement.within(tolerance):
        raise ProofFailed(
            f"trainer and vLLM server disagree on version {version} of the policy: {numbers}; nothing sampled here "
            "can be trained on. Check that both loaded the same model and dtype, or use --weight-bridge-mode none"
        )
    logger.info("trainer and server agree on version %d: %s", version, numbers)
    return agreement


def _check_written(policy: Policy) -> None:
    """A forward that reads the served tensors agrees with the server even where a publish missed some."""
    if stale := policy.stale_weights():
        raise ProofFailed(
            f"after the publish {len(stale)} served tensors differ from the trainer's ({', '.join(stale[:3])}); "
            "the server's manifest places them wrongly: use --weight-bridge-mode none and report the model"
        )


def probe_prompts(vocabulary: int, max_model_len: int) -> list[list[int]]:
    """The same random prompts each time, of lengths short of and beyond a block of the prefix cache."""
    generator = torch.Generator().manual_seed(_SEED)
    room = max(1, (max_model_len or max(_PROMPT_LENGTHS) + _OUTPUT_TOKENS) - _OUTPUT_TOKENS)
    return [torch.randint(vocabulary, (min(length, room),), generator=generator).tolist() for length in _PROMPT_LENGTHS]


@torch.no_grad()
def compare(policy: Policy, samples: list[_Sample]) -> Agreement:
    """Differences between the server's logprobs and those of the trainer's forward."""
    differences = torch.cat([_differences(policy, sample) for sample in samples]).double()
    return Agreement(tokens=differences.numel(), maximum=float(differences.max()), mean=float(differences.mean()))


def _request(prompt: list[int]) -> dict[str, Any]:
    return {
        "prompt": {"prompt_token_ids": prompt},
        "n": _OUTPUTS_PER_PROMPT,
        "max_tokens": _OUTPUT_TOKENS,
        "temperature": 1.0,
        "ignore_eos": True,
        "logprobs": 0,
        "compact": True,
    }


def _checked(prompt: list[int], answer: Mapping[str, Any], *, version: int, boot_id: str) -> _Sample:
    """The answer, once it is known to be sampled by this server under this version alone."""
    versions = {span[2] for spans in answer["policy_versions"] for span in spans}
    if versions != {version} or answer["boot_id"] != boot_id:
        raise ProofFailed(
            f"the server answered the probe from version {sorted(map(str, versions))} (boot {answer['boot_id']}), "
            f"version {version} (boot {boot_id}) was published; does another trainer publish to this server?"
        )
    return _Sample(prompt, answer["token_ids"], answer["logprobs"])


def _differences(policy: Policy, sample: _Sample) -> torch.Tensor:
    lengths = [len(output) for output in sample.outputs]
    width = len(sample.prompt) + max(lengths)
    rows = [[*sample.prompt, *output] + [0] * (width - len(sample.prompt) - len(output)) for output in sample.outputs]
    tokens = torch.tensor(rows, device=policy.device)
    with policy.autocast():
        logits = policy.module(input_ids=tokens).logits[:, len(sample.prompt) - 1 : -1].float()
    chosen = tokens[:, len(sample.prompt) :, None]
    ours = (logits.gather(-1, chosen).squeeze(-1) - logits.logsumexp(-1)).cpu()
    return torch.cat(
        [(ours[row, :length] - torch.tensor(sample.logprobs[row])).abs() for row, length in enumerate(lengths)]
    )
