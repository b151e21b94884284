"""Load as from environments: the SDK's own client requests rollouts one after the other, until it is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import anyio
import torch

from environments.sdk.config import APIServerConfig
from environments.sdk.inference.sampling import Sample, Sampling
from environments.sdk.inference.vllm import VllmServer
from example_trainer.modeling.policy import Policy

ROWS_AT_ONCE = 32


@dataclass
class RolloutLoad:
    """Workers that each request one rollout at a time; each is either answered or recorded as an error."""

    url: str
    workers: int = 4
    output_tokens: int = 60
    pause_seconds: float = 0.05
    """Pause between a worker's rollouts; a server that starts meanwhile needs the processor too."""
    shared_prompt: Sequence[int] = ()
    """Common beginning of the workers' prompts."""
    asked: int = 0
    samples: list[Sample] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    """Policy versions of the samples, one by one."""
    errors: list[BaseException] = field(default_factory=list)
    answered_at: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._stop.clear()
        self._thread = threading.Thread(target=anyio.run, args=(self._work,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    @property
    def longest_silence_seconds(self) -> float:
        """Return the longest time between two answers."""
        return max(after - before for before, after in zip(self.answered_at, self.answered_at[1:], strict=False))

    def versions(self) -> set[int | None]:
        return {version for sample in self.samples for _, _, version in sample.versions}

    async def _work(self) -> None:
        server = VllmServer(APIServerConfig(base_url=self.url, timeout=120.0), wait_timeout_seconds=120.0)
        async with anyio.create_task_group() as group:
            for number in range(self.workers):
                group.start_soon(self._ask, server, number)
        await server.channel.aclose()

    async def _ask(self, server: VllmServer, number: int) -> None:
        sampling = Sampling(max_tokens=self.output_tokens, more={"ignore_eos": True})
        prompt = [*self.shared_prompt, 2 + number, 7, 9]
        while not self._stop.is_set():
            self.asked += 1
            try:
                (sample,) = await server.generate(prompt, sampling, "train")
                assert len(sample.tokens) == self.output_tokens
                self.samples.append(sample)
                self.prompts.append(prompt)
                self.answered_at.append(time.monotonic())
                await anyio.sleep(self.pause_seconds)
            except Exception as error:
                self.errors.append(error)
                await anyio.sleep(0.1)


@torch.no_grad()
def differences(
    policy: Policy, weights: Mapping[int, dict[str, torch.Tensor]], load: RolloutLoad, *, back: int = 0
) -> torch.Tensor:
    """Return |logprob given - logprob computed| of each token of a load, under the version stamped on it.

    `weights` are the snapshots by version; with `back` those of that many versions before are taken, if they exist.
    """
    found = []
    for version in sorted(version for version in load.versions() if version is not None and version - back in weights):
        chosen = [
            (prompt, sample, start, end)
            for prompt, sample in zip(load.prompts, load.samples, strict=True)
            for start, end, stamped in sample.versions
            if stamped == version
        ]
        with policy.with_weights(weights[version - back]), policy.autocast():
            for first in range(0, len(chosen), ROWS_AT_ONCE):
                rows = chosen[first : first + ROWS_AT_ONCE]
                tokens = torch.tensor([[*prompt, *sample.tokens] for prompt, sample, _, _ in rows])
                computed = policy.module(input_ids=tokens).logits.log_softmax(-1)[:, :-1]
                computed = computed.gather(-1, tokens[:, 1:, None]).squeeze(-1)
                for (prompt, sample, start, end), row in zip(rows, computed, strict=True):
                    told = torch.tensor(sample.logprobs[start:end])
                    found.append((told - row[len(prompt) - 1 + start : len(prompt) - 1 + end]).abs())
    return torch.cat(found)
