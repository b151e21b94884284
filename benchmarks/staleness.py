"""Measures the cost of stale rollouts under three corrections: PPO's clip, none, truncated importance weights.

    python benchmarks/staleness.py                          # the whole table, three seeds, about an hour
    python benchmarks/staleness.py --seeds 0 --delays 0 8 --rates 3e-4

A real broker, the real training loop and the tiny base model on the `chain` problems. Batch n is sampled from the
weights after step n - 1 - k, by a sampler in this process that keeps them all, so that every trained token is exactly k
steps old (or as old as the run, in its first steps), which no server can be made to do. Rewards are those of the
policies after 0, 1, 2, ... steps, from which batches k + 1, k + 2, ... were sampled; a run therefore has k more steps.
Each cell is the mean reward over the run, the mean of its last five steps, and for each seed the step at which the mean
of three reached 0.8. Expected: with k = 0 all three are the same; at the low rate the clip slows down as k grows; at
the high rate training without a correction breaks down at k = 8; truncated weights keep their speed throughout.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from compare_trl import base_model
from torch import Tensor

from atropos_api.client import BrokerClient
from atropos_api.testing import served_broker
from atropos_api.wire import EnvironmentRequest, Group
from environments.tasks.arithmetic import Problem, grade, problem_stream
from example_trainer.api import BrokerSession
from example_trainer.cli import run_trackers
from example_trainer.config import TrainingConfig
from example_trainer.group_sequences import MASKED, PLACEHOLDER_LOGPROB
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.monitoring.trackers import METRICS_FILE, read_metrics
from example_trainer.testing import ServingBridge
from example_trainer.trainers import Trainer

PROBLEMS, GROUP_SIZE = 16, 8
LONGEST_ANSWER = 34
REWARD, WINDOW_STEPS, TAIL_STEPS = 0.8, 3, 5
CORRECTIONS: dict[str, dict[str, Any]] = {
    "clip": {"importance_sampling": "clip"},
    "uncorrected": {"loss_type": "reinforce_with_baseline"},
    "truncated": {"importance_sampling": "truncated", "tis_cap": 2.0},
}


class Archive(ServingBridge):
    """The weights after each past step; a step that trained nothing has those of the step before."""

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._weights: dict[int, tuple[int, dict[str, Tensor]]] = {}
        self._grew = threading.Condition()

    def keep(self, step: int) -> None:
        """Store the current weights as those after `step`."""
        assert self.served is not None
        with self._grew:
            self._weights[step] = self.served
            self._grew.notify_all()

    def after_step(self, step: int) -> tuple[int, dict[str, Tensor]]:
        """Wait for `step` to end; return its version and weights."""
        with self._grew:
            if not self._grew.wait_for(lambda: step in self._weights, timeout=1800):
                raise TimeoutError(f"step {step} had not ended after 1800 s")
            return self._weights[step]


class WatchedSession(BrokerSession):
    """A session that reports every finished step to the archive."""

    def __init__(self, client: BrokerClient, archive: Archive) -> None:
        super().__init__(client)
        self._archive = archive

    def announce_policy(self, version: int, step: int, policy_name: str | None = None) -> None:
        super().announce_policy(version, step, policy_name)
        self._archive.keep(step)


class Sampler:
    """Samples answers from given weights, a whole batch at a time, with each token's logprob."""

    def __init__(self, model: Path, seed: int) -> None:
        from transformers import AutoTokenizer

        self._policy = load_policy(PolicyOptions(model_name=str(model), dtype="float32", device="cpu"))
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def groups(self, problems: Sequence[Problem], version: int, weights: dict[str, Tensor]) -> list[Group]:
        prompts = [self._prompt(problem) for problem in problems for _ in range(GROUP_SIZE)]
        with self._policy.with_weights(weights):
            answers = self._answer(prompts)
        found = []
        for at, problem in enumerate(problems):
            rows = range(at * GROUP_SIZE, (at + 1) * GROUP_SIZE)
            found.append(self._group(problem, prompts[rows[0]], [answers[row] for row in rows], version))
        return found

    def _prompt(self, problem: Problem) -> list[int]:
        messages = [{"role": "user", "content": problem.question}]
        tokens: list[int] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return tokens

    def _answer(self, prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float]]]:
        """Return tokens and logprobs of one answer per prompt; prompts are padded on the left and share a cache."""
        width, module, end = max(map(len, prompts)), self._policy.module, self._tokenizer.eos_token_id
        tokens = torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache, drawn, logprobs = None, list[Tensor](), list[Tensor]()
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        while len(drawn) < LONGEST_ANSWER and not bool(ended.all()):
            reply = module(
                input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache, logs = reply.past_key_values, reply.logits[:, -1].float().log_softmax(-1)
            tokens = torch.multinomial(logs.exp(), 1, generator=self._generator)
            drawn.append(tokens)
            logprobs.append(logs.gather(1, tokens))
            ended |= tokens[:, 0] == end
            mask, positions = torch.cat([mask, torch.ones_like(tokens)], dim=1), positions[:, -1:] + 1
        rows = zip(torch.cat(drawn, dim=1).tolist(), torch.cat(logprobs, dim=1).tolist(), strict=True)
        return [_until_end(row, logs, end) for row, logs in rows]

    def _group(
        self, problem: Problem, prompt: list[int], answers: Sequence[tuple[list[int], list[float]]], version: int
    ) -> Group:
        texts = [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens, _ in answers]
        return Group(
            tokens=[prompt + tokens for tokens, _ in answers],
            masks=[[MASKED] * len(prompt) + tokens for tokens, _ in answers],
            scores=[grade(text, problem.answer) for text in texts],
            inference_logprobs=[[PLACEHOLDER_LOGPROB] * len(prompt) + logs for _, logs in answers],
            generation_params={"temperature": 1.0},
            policy_versions=[[(len(prompt), len(prompt) + len(tokens), version)] for tokens, _ in answers],
        )


def _until_end(tokens: list[int], logprobs: list[float], end: int) -> tuple[list[int], list[float]]:
    length = tokens.index(end) + 1 if end in tokens else len(tokens)
    return tokens[:length], logprobs[:length]


class LateEnvironment(threading.Thread):
    """An environment that submits the groups of batch n once the weights of step n - 1 - `delay` exist."""

    def __init__(self, url: str, archive: Archive, model: Path, *, seed: int, delay: int, steps: int) -> None:
        super().__init__(name="late-environment", daemon=True)
        self._client = BrokerClient(url)
        self._archive, self._sampler = archive, Sampler(model, seed)
        self._delay, self._steps = delay, steps
        self._problems: Iterator[Problem] = problem_stream("chain", seed=seed)
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - told when the run has ended
            self.error = error
        finally:
            self._client.close()

    def _serve(self) -> None:
        info = self._client.register_environment(
            EnvironmentRequest(name="late", group_size=GROUP_SIZE, max_token_length=512)
        )
        for batch in range(1, self._steps + 1):
            version, weights = self._archive.after_step(max(0, batch - 1 - self._delay))
            groups = self._sampler.groups(list(islice(self._problems, PROBLEMS)), version, weights)
            self._client.submit(info.environment_id, groups, idempotency_key=uuid.uuid4().hex)


@dataclass(frozen=True)
class Run:
    """Rewards of one run's successive policies, and the age of its freshest batch after the first steps."""

    rewards: list[float]
    least_age: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rewards)

    @property
    def tail(self) -> float:
        return statistics.fmean(self.rewards[-TAIL_STEPS:])

    def reached(self) -> int | None:
        """Return the step at which the mean of three first reached 0.8."""
        for end in range(WINDOW_STEPS, len(self.rewards) + 1):
            if statistics.fmean(self.rewards[end - WINDOW_STEPS : end]) >= REWARD:
                return end
        return None


def train(model: Path, *, correction: str, delay: int, rate: float, seed: int, steps: int) -> Run:
    """Train through a broker of its own; return the rewards of `steps` successive policies, the base's first."""
    batches = steps + delay
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as directory, served_broker() as url:
        config = TrainingConfig.model_validate(
            {
                "model_name": str(model),
                "dtype": "float32",
                "device": "cpu",
                "run_dir": directory,
                "atropos_url": url,
                "training_steps": batches,
                "batch_size": PROBLEMS,
                "gradient_accumulation_steps": GROUP_SIZE,
                "token_budget": 8192,
                "seq_len": 512,
                "optimizer": "adamw",
                "lr": rate,
                "adam_beta2": 0.95,
                "weight_decay": 0.0,
                "dual_clip": None,
                "vllm_restart_interval": 1,
                "checkpoint_interval": 0,
                "max_staleness": delay + 4,
                "prefetch": False,
                "seed": seed,
                **CORRECTIONS[correction],
            }
        )
        archive = Archive(PolicyOptions(model_name=str(model), dtype="float32", device="cpu"))
        environment = LateEnvironment(url, archive, model, seed=seed, delay=delay, steps=batches)
        session = WatchedSession(BrokerClient(url), archive)
        trainer = Trainer(config, session=session, bridge=archive, trackers=run_trackers(config))
        environment.start()
        try:
            trainer.run()
        finally:
            session.close()
        environment.join(timeout=10)
        if environment.error is not None:
            raise environment.error
        lines = read_metrics(Path(directory) / METRICS_FILE)
    # A version that outlived a step without signal is older than the batch's delay, never younger.
    ages = [line["staleness/max"] for line in lines[delay:] if "staleness/max" in line]
    return Run([line["reward/mean"] for line in lines[delay:]], min(ages))


def cell(runs: Sequence[Run]) -> str:
    steps = ",".join("-" if run.reached() is None else str(run.reached()) for run in runs)
    return f"{statistics.fmean(run.mean for run in runs):.3f}/{statistics.fmean(run.tail for run in runs):.2f}/{steps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4])
    parser.add_argument("--corrections", nargs="+", choices=list(CORRECTIONS), default=list(CORRECTIONS))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--model", type=Path, help="another base model than the demo's")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    model = arguments.model or base_model("chain")
    columns = [(rate, correction) for rate in arguments.rates for correction in arguments.corrections]
    print("mean reward / of the last five steps / step to 0.8 by seed")
    print(f"{'k':3}" + "".join(f"{f'{name}, {rate:g}':>28}" for rate, name in columns), flush=True)
    for delay in arguments.delays:
        started = time.process_time()
        print(f"{delay:<3}", end="", flush=True)
        for rate, correction in columns:
            runs = [
                train(model, correction=correction, delay=delay, rate=rate, seed=seed, steps=arguments.steps)
                for seed in arguments.seeds
            ]
            assert all(run.least_age == delay for run in runs), f"tokens of another age than {delay}"
            print(f"{cell(runs):>28}", end="", flush=True)
        spent = (time.process_time() - started) / len(columns) / len(arguments.seeds)
        print(f"   {spent:.0f} CPU s a run", flush=True)


if __name__ == "__main__":
    main()
