"""Environment servers as processes of their own, next to a real vLLM whose model thinks, calls tools and answers.

The model is not trained: the token transitions are written into it. The embeddings of the tokens that matter are
orthogonal, and the output head holds the logarithms of the wanted transition probabilities in terms of them. Attention
and MLP stay random, so that a token's logprob depends on everything before it and on every tensor: an extra token or an
older version of the weights changes it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest

from atropos_api.client import BrokerClient
from atropos_api.wire.groups import Group
from atropos_api.wire.messages import PolicyUpdate, RunRequest
from environments.gsm8k_server import SYSTEM_PROMPT as GSM8K_PROMPT
from environments.sdk.tokenizer import load_tokenizer
from environments.tasks.question_env import load_template
from environments.tool_server import CALL_FORM
from environments.tool_server import SYSTEM_PROMPT as TOOL_PROMPT

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

CONTEXT = 4096
HIDDEN = 128
END = "<eos>"
ROLES = ("[system]", "[user]", "[assistant]", "[tool]")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' + (message['content'] or '') + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
CALL, CALL_END = '{"name": "python", "arguments": {"code": "print(', ')"}}'
WORDS = (" so", " we", " add", " and", " then", " it")
NUMBERS = ("11", "22", "33", "44", "55")
DIGITS = tuple("0123456789")
PIECES = (
    *("<tool_call>", "</tool_call>", CALL, CALL_END, "\\boxed{", "}"),
    *("<think>", "</think>", "<answer>", "</answer>", "+", *WORDS, *NUMBERS, *DIGITS),
)
THINKING = {**dict.fromkeys(WORDS, 0.96 / len(WORDS)), "</think>": 0.03, "<tool_call>": 0.01}
SUM = {**dict.fromkeys(NUMBERS, 0.97 / len(NUMBERS)), CALL_END: 0.03}  # a sum that breaks off is not Python
FOLLOWERS: dict[str, dict[str, float]] = {
    "[assistant]": {"<tool_call>": 0.3, **dict.fromkeys(WORDS, 0.7 / len(WORDS))},
    "<think>": THINKING,
    **dict.fromkeys(WORDS, THINKING),
    "</think>": {"<answer>": 0.7, "\\boxed{": 0.2, "<tool_call>": 0.1},
    "<answer>": {"\\boxed{": 1.0},
    "\\boxed{": dict.fromkeys(DIGITS, 0.1),
    **{digit: {"}": 0.95, **dict.fromkeys(DIGITS, 0.005)} for digit in DIGITS},
    "}": {"</answer>": 0.7, END: 0.3},
    "</answer>": {END: 1.0},
    "<tool_call>": {CALL: 1.0},
    CALL: SUM,
    "+": SUM,
    **{number: {"+": 0.4, CALL_END: 0.6} for number in NUMBERS},
    CALL_END: {"</tool_call>": 1.0},
    "</tool_call>": {END: 0.9, "<tool_call>": 0.1},
}


@dataclass
class Served:
    """The inference server, its model, and a trainer that publishes versions of the weights in order."""

    start: Callable[..., Any]
    model: Path
    variant: Callable[[int], dict[str, Any]]
    server: Any = None
    version: int = 0

    def publish(self) -> int:
        """Publish the next version of the weights, clearly different from the others."""
        self.version += 1
        self.server.publish(lambda: self.server.write(self.variant(self.version)), version=self.version)
        return self.version

    def kill(self) -> None:
        self.server.kill()

    def restart(self) -> None:
        """Start the server again on the same port; it serves nothing before a publish."""
        port = self.server.client.base_url.port if self.server is not None else None
        self.server = self.start("--share-weights", "--max-num-seqs", "64", model=self.model, port=port)


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [GSM8K_PROMPT, TOOL_PROMPT + CALL_FORM, load_template("math_zero").text, "What is 3 + 4?"]
    return make_writer(tmp_path_factory.mktemp("models") / "writer", texts)


@pytest.fixture(scope="session")
def tokenizer_of_writer(writer: Path) -> Any:
    return load_tokenizer(str(writer))


@pytest.fixture(scope="session")
def writer_reference(writer: Path, make_reference: Callable[[Path], Any]) -> Any:
    """The model in Hugging Face's implementation, and the weights of each version."""
    return make_reference(writer)


@pytest.fixture(scope="session")
def served(start_server: Callable[..., Any], writer: Path, writer_reference: Any) -> Served:
    """One real vLLM for all tests of this folder; version 1 is published."""
    made = Served(start_server, writer, writer_reference.variant)
    made.restart()
    made.publish()
    return made


class Program:
    """A process in a group of its own that can be killed and started again with the same arguments."""

    def __init__(self, command: tuple[str, ...], log: Path) -> None:
        self.command = command
        self.log = log
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.command], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def terminate(self) -> tuple[int, list[int]]:
        """Send SIGTERM; return the exit code and the processes that are left."""
        family = [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))]
        self.process.terminate()
        code = self.process.wait(60)
        return code, [pid for pid in family if psutil.pid_exists(pid)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []
    folder = tmp_path_factory.mktemp("programs")

    def start(name: str, *command: str) -> Program:
        started.append(Program(command, folder / f"{name}.log"))
        return started[-1]

    yield start
    for program in started:
        if program.process.poll() is None:
            program.kill()


@dataclass
class Trainer:
    """Takes numbered batches from a broker, commits each, and tells it of every version that is published."""

    client: BrokerClient
    run: Any
    batches: list[list[Group]] = field(default_factory=list)

    @classmethod
    def begin(cls, url: str, *, batch_size: int) -> Trainer:
        client = BrokerClient(url, retry_seconds=120)
        client.wait_until_ready(60)
        request = RunRequest(name="served", batch_size=batch_size, max_token_length=2048, num_steps=1_000_000)
        return cls(client, client.begin_run(request))

    def announce(self, version: int) -> None:
        update = PolicyUpdate(
            run_id=self.run.run_id,
            version=version,
            step=len(self.batches),
            published_at=time.time(),
            epoch=self.run.epoch,
        )
        self.client.update_policy(update)

    def step(self, *, wait_seconds: float = 60) -> list[Group]:
        """Take and commit the next batch; return its groups, none if no batch came in time."""
        number, run = len(self.batches) + 1, self.run
        batch = self.client.get_batch(number, run_id=run.run_id, epoch=run.epoch, wait_seconds=wait_seconds)
        if batch is None:
            return []
        self.client.commit(number, run_id=run.run_id, epoch=run.epoch)
        self.batches.append(batch.groups)
        return batch.groups


@pytest.fixture(scope="module")
def begin_training() -> Iterator[Callable[..., Trainer]]:
    begun: list[Trainer] = []

    def begin(url: str, *, batch_size: int) -> Trainer:
        begun.append(Trainer.begin(url, batch_size=batch_size))
        return begun[-1]

    yield begin
    for trainer in begun:
        trainer.client.close()


class Rollout(NamedTuple):
    """A row of a group."""

    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]

    @property
    def trained(self) -> list[int]:
        return [place for place, value in enumerate(self.mask) if value != -100]

    def places_of(self, version: int) -> list[int]:
        return [place for start, end, stamped in self.spans if stamped == version for place in range(start, end)]


@pytest.fixture(scope="session")
def rollouts_of() -> Callable[[Group], list[Rollout]]:
    def read(group: Group) -> list[Rollout]:
        rows = zip(group.tokens, group.masks, group.inference_logprobs or (), group.policy_versions or (), strict=True)
        return [Rollout(*row) for row in rows]

    return read


@pytest.fixture(scope="session")
def differences(writer_reference: Any) -> Callable[..., torch.Tensor]:
    """Return |submitted logprob - logprob of the trainer's head| of all tokens stamped with a version."""

    def compare(rollouts: list[Rollout], version: int, *, weights_of: int | None = None) -> torch.Tensor:
        import torch

        module = writer_reference.model
        module.load_state_dict(writer_reference.variant(version if weights_of is None else weights_of))
        parts = [(rollout, places) for rollout in rollouts if (places := rollout.places_of(version))]
        sent = torch.cat([torch.tensor(rollout.logprobs)[places] for rollout, places in parts])
        recomputed = torch.cat([_logprobs(module, torch.tensor(rollout.tokens), places) for rollout, places in parts])
        return (sent - recomputed).abs()

    return compare


def _logprobs(module: Any, tokens: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Return the logprobs of the tokens at `places`, each given all before it, at temperature 1."""
    import torch

    from example_trainer.modeling.logprobs import head_of, token_logprobs

    at = torch.tensor(places)
    with torch.no_grad():
        hidden = module.model(tokens[None]).last_hidden_state[0]
        weight, bias = head_of(module)
        return token_logprobs(hidden, weight, at - 1, tokens[at], torch.ones(len(at)), bias=bias)[0]


def make_writer(directory: Path, texts: list[str]) -> Path:
    """Write the model in Hugging Face layout; its tokenizer knows the words of `texts`, so that prompts are short."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = _make_tokenizer(texts)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token=END).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.06,
        eos_token_id=tokenizer.token_to_id(END),
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        _write_transitions(model, tokenizer)
    model.save_pretrained(directory)
    return directory


def _make_tokenizer(texts: list[str]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*ROLES, *PIECES)])
    return tokenizer


def _write_transitions(model: torch.nn.Module, tokenizer: Tokenizer) -> None:
    """Give each token that has successors a direction of its own; all others share one, and lead to a thought."""
    import torch

    size = tokenizer.get_vocab_size()
    directions = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN)).Q
    embeddings = directions[0] + 0.02 * torch.randn(size, HIDDEN)
    head = torch.outer(_logs(THINKING, tokenizer, size), directions[0])
    for direction, (text, followers) in zip(directions[1:], FOLLOWERS.items(), strict=False):
        embeddings[tokenizer.token_to_id(text)] = direction
        head += torch.outer(_logs(followers, tokenizer, size), direction)
    model.model.embed_tokens.weight.copy_(embeddings * math.sqrt(HIDDEN))
    model.lm_head.weight.copy_(head / math.sqrt(HIDDEN))


def _logs(followers: dict[str, float], tokenizer: Tokenizer, size: int) -> torch.Tensor:
    import torch

    probabilities = torch.full((size,), 1e-6)
    for text, probability in followers.items():
        probabilities[tokenizer.token_to_id(text)] += probability
    logs = probabilities.log()
    return logs - logs.mean()
