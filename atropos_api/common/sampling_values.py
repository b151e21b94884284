"""The sampling values here are shared by environments, the trainer's proof of a publish and `atropos doctor`: packages
that do not import each other, so this stands alone.

The trainer recomputes the logprobs of a model's whole distribution at the temperature of a group, so that what is
sampled otherwise has to be named or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WHOLE_DISTRIBUTION: Final[Mapping[str, int]] = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}
"""Values that change nothing. A stock vLLM takes what a request leaves out from the model's generation_config.json, and
the logprobs of Qwen2.5's top_k 20 are not those that the trainer computes.
"""

LEAST_TEMPERATURE: Final = 0.01
"""vLLM samples at this temperature where less is asked for (except 0); the trainer would compute at the lower one."""
