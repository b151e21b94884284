"""A run as the page shows it: metrics, groups of two environments with a trainer's values, and a sign of trouble."""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass
from typing import Any

from atropos_api.client import BrokerClient
from atropos_api.client.calls import Calls
from atropos_api.wire import EnvironmentRequest, Group, PolicyUpdate, RunInfo, RunRequest
from atropos_api.wire.reports import (
    EnvironmentActivity,
    GroupValues,
    HealthSign,
    OpenRollout,
    RunReport,
    SampleValues,
    ServerUse,
    StepMetrics,
    TokenReport,
    TrainerActivity,
)

PROMPT = re.split(
    " ", "Natalia sold clips to 48 friends in April , then she sold half as many in May . How many in all ?"
)
ANSWER = re.split(" ", "She sold 48 / 2 = 24 clips in May .\nIn all 48 + 24 = 72 clips .\n#### 72 <|end|>")
WORDS = [*dict.fromkeys([*PROMPT, *ANSWER, "because", "maybe", "wait", "so", "70", "96"])]
TEXTS = {str(number): word if number == 0 else f" {word}" for number, word in enumerate(WORDS)}
SIGN_STEP = 41
SPIKE = 1.31
QUESTION = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."


@dataclass
class DemoRun:
    """The run, and what a test adds to it."""

    client: BrokerClient
    run: RunInfo
    environments: list[int]
    steps: int
    random: random.Random

    @property
    def path(self) -> str:
        return f"/v1/runs/{self.run.run_id}"

    def step(self, number: int, *, groups: list[Group] | None = None) -> None:
        """Collect, train and report one step."""
        update = PolicyUpdate(run_id=self.run.run_id, version=number, step=number - 1, published_at=time.time())
        self.client.update_policy(update)
        made = groups or [make_group(self.random, number, quality=number / self.steps) for _ in range(4)]
        for index, group in enumerate(made):
            self.client.submit(
                self.environments[index % 2], [group], idempotency_key=f"{self.run.run_id} {number} {index}"
            )
        batch = self.client.get_batch(number, run_id=self.run.run_id, epoch=self.run.epoch)
        assert batch is not None
        values = [values_of(self.random, index, group) for index, group in enumerate(batch.groups)]
        report = TokenReport(groups=values, texts=TEXTS)
        self.client.report_tokens(self.run.run_id, number, report)
        self.client.report_run(self.run.run_id, self.report(number))
        self.client.commit(number, run_id=self.run.run_id, epoch=self.run.epoch)
        done = PolicyUpdate(run_id=self.run.run_id, version=number, step=number, published_at=time.time())
        self.client.update_policy(done)

    def report(self, number: int) -> RunReport:
        metrics = StepMetrics(step=number, time=time.time(), values=metrics_of(self.random, number, self.steps))
        activity = TrainerActivity(step=number + 1, phases={"train": 2.1}, host="node-1", pid=4242)
        signs = []
        if number == SIGN_STEP:
            message = f"mean_ratio {SPIKE:.3f} is outside 0.8-1.2: the policy is far from the sampler's"
            sign = HealthSign(sign="mean_ratio", step=number, value=SPIKE, message=message, advice="lower --lr")
            signs.append(sign)
        return RunReport(steps=[metrics], signs=signs, activity=activity)

    def report_activity(self, **changes: Any) -> None:
        slow = OpenRollout(
            name=QUESTION, seconds=3.1, done=5, wanted=8, last_event="request to http://vllm:9001",
            last_event_seconds=2.2,
        )  # fmt: skip
        server = ServerUse(url="http://vllm:9001/v1", open_requests=14, requests=5120)
        usual = {"open_rollouts": 6, "open_requests": 14, "usual_seconds": 6.2, "slowest": [slow], "servers": [server]}
        for environment in self.environments:
            self.client._send(Calls().report_activity(environment, EnvironmentActivity(**(usual | changes))))


def begin_demo(client: BrokerClient, steps: int, *, name: str = "gsm8k-1.5b", batches_dir: str = "") -> DemoRun:
    request = RunRequest(
        name=name, batch_size=32, max_token_length=512, num_steps=200, take_over=True, batches_dir=batches_dir
    )
    run = client.begin_run(request)
    names = ("gsm8k", "arithmetic")
    requests = (EnvironmentRequest(name=one, group_size=8, max_token_length=512) for one in names)
    environments = [client.register_environment(one).environment_id for one in requests]
    demo = DemoRun(client, run, environments, steps, random.Random(7))
    for number in range(1, steps + 1):
        demo.step(number)
    demo.report_activity()
    return demo


def make_group(source: random.Random, version: int, *, quality: float, size: int = 8, **fields: Any) -> Group:
    """Rollouts of one question: the better the policy, the more of them end with the right words."""
    index = {word: number for number, word in enumerate(WORDS)}
    prompt = [index[word] for word in PROMPT]
    tokens, masks, logprobs, scores = [], [], [], []
    for _ in range(size):
        right = source.random() < 0.2 + 0.6 * quality
        answer = [index[word] for word in ANSWER]
        if not right:
            at = source.randrange(len(answer))
            answer[at:at] = [index[word] for word in source.sample(["because", "maybe", "wait", "so"], 3)]
            answer[-2] = index["96"]
        tokens.append([*prompt, *answer])
        masks.append([*[-100] * len(prompt), *answer])
        logprobs.append([*[1.0] * len(prompt), *(round(-abs(source.gauss(0, 0.5)), 4) for _ in answer)])
        scores.append(float(right))
    chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": " ".join(ANSWER)}]
    spans = [[(len(prompt), len(row), version)] for row in tokens]
    values: dict[str, Any] = {"messages": [chat] * size, "policy_versions": spans}
    return Group(
        **({"tokens": tokens, "masks": masks, "scores": scores, "inference_logprobs": logprobs} | values | fields)
    )


def values_of(source: random.Random, index: int, group: Group) -> GroupValues:
    mean = sum(group.scores) / len(group.scores)
    spread = (sum((score - mean) ** 2 for score in group.scores) / len(group.scores)) ** 0.5 or 1.0
    samples: list[SampleValues | None] = []
    for row, score in enumerate(group.scores):
        positions = [at for at, value in enumerate(group.masks[row]) if value != -100]
        sampler = group.inference_logprobs[row] if group.inference_logprobs else []
        samples.append(
            SampleValues(
                positions=positions,
                advantages=[round((score - mean) / spread, 3)] * len(positions),
                logprobs=[round(sampler[at] + source.gauss(0, 0.06), 4) for at in positions],
                entropies=[round(abs(source.gauss(0.4, 0.5)), 3) for _ in positions],
            )
        )
    return GroupValues(group=index, samples=samples)


def metrics_of(source: random.Random, step: int, steps: int) -> dict[str, float]:
    share = step / steps
    reward = 0.2 + 0.6 * share + source.gauss(0, 0.03)
    return {
        "reward/mean": reward,
        "reward/std": 0.45 - 0.1 * share,
        "env/0/reward_mean": reward - 0.05,
        "env/0/reward_std": 0.4,
        "env/1/reward_mean": reward + 0.05,
        "env/1/reward_std": 0.3,
        "advantages/zero_group_fraction": 0.1 + 0.4 * share,
        "data/no_signal_fraction": 0.08 + 0.35 * share,
        "response/length_mean": 80 + 60 * share + source.gauss(0, 4),
        "response/length_max": 240.0 + source.randrange(12),
        "response/length_min": 20.0,
        "data/overlong": float(source.randrange(3)),
        "data/truncated": 0.0,
        "grpo/mean_ratio": SPIKE if step == SIGN_STEP else 1 + source.gauss(0, 0.02),
        "grpo/clipped_fraction": abs(source.gauss(0.06, 0.02)),
        "train/kl": 0.9 if step == SIGN_STEP else 0.004 + 0.002 * source.random(),
        "train/entropy": 0.8 - 0.4 * share,
        "train/loss": source.gauss(0, 0.02),
        "train/grad_norm": 0.4 + 0.1 * source.random(),
        "train/lr": 1e-5,
        "alignment/diff_abs_mean": 1e-3 * abs(source.gauss(1, 0.2)),
        "alignment/diff_max": 1e-2 * abs(source.gauss(1, 0.2)),
        "staleness/mean": source.random(),
        "staleness/max": 2.0,
        "time/step": 4 + source.random(),
        "time/fetch": 0.5 + 0.3 * source.random(),
        "time/train": 2.9,
        "time/sync_wait": 0.3,
        "time/sync": 0.6,
        "time/sync_fence": 0.05,
        "perf/tokens_per_second": 2200 + source.gauss(0, 100),
        "perf/trained_tokens_per_second": 3900.0,
        "response/repetition": 0.05,
    }
