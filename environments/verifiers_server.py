r"""The environment runs any environment of the `verifiers` library, which samples and scores its rollouts itself.

    pip install 'verifiers>=0.1.12,<0.3'
    python environments/verifiers_server.py serve --env.environment wordle --env.environment_options '{"num_games": 9}'

`environment` is the name of an installed environment, or a Python file with a `load_environment`. The library runs
the chat and its rubric gives the rewards. Its requests go through one managed session per rollout, so that tokens,
masks, logprobs and policy versions are the sampled ones. A rollout that the library reports as failed is tried again
and is never trained on with a reward of 0.

Data: that of the environment, which the library loads.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Self

from pydantic import Field

from atropos_api.common import metric_names as names
from atropos_api.common.concurrency import run_all, run_blocking
from atropos_api.common.files import expand_home
from atropos_api.common.import_path import import_file
from environments.sdk import (
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    EnvironmentsError,
    ManagedSession,
    ScoredDataGroup,
    scored_group,
)
from environments.sdk.config import JsonObject
from environments.sdk.errors import InferenceRefused
from environments.sdk.session.openai_client import ManagedServerAdapter
from environments.tasks.question_env import mean

PIP_LINE = "pip install 'verifiers>=0.1.12,<0.3'"
TOO_LONG = ("context length", "maximum model length", "max_model_len")


class VerifiersMissing(EnvironmentsError):
    """The package is not installed, or has no such environment with such settings."""


class VerifiersRolloutFailed(EnvironmentsError):
    """The library reports that a rollout failed."""

    ends_server = False


class VerifiersEnvConfig(BaseEnvConfig):
    """The configuration names the environment to run and its settings."""

    names_elsewhere: ClassVar[Mapping[str, str]] = {
        **BaseEnvConfig.names_elsewhere,
        "args": "use --env.environment-options, as JSON",
        "env_args": "use --env.environment-options, as JSON",
        "env_id": "use --env.environment",
        "environment_args": "use --env.environment-options, as JSON",
        "id": "use --env.environment",
        "num_examples": "use --env.eval-problems, of evaluate",
    }

    environment: str = Field("", description="Name of an installed verifiers environment, or a Python file with one.")
    environment_options: JsonObject = Field("{}", description="Arguments of its load_environment, as a JSON object.")
    max_new_tokens: int = Field(1024, ge=1, description="Tokens that one turn may sample.")
    temperature: float = Field(1.0, gt=0, description="Temperature of training rollouts.")
    eval_problems: int = Field(100, ge=1, description="Problems in an evaluation.")
    eval_temperature: float = Field(0.0, ge=0, description="Temperature of evaluations; 0: greedy.")
    seed: int = Field(0, description="Seed of the order of problems.")


class VerifiersEnv(BaseEnv):
    """Problems of an environment of the verifiers library, which also scores them."""

    name = "verifiers"
    env_config_cls = VerifiersEnvConfig
    config: VerifiersEnvConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig]:
        return VerifiersEnvConfig(group_size=8), APIServerConfig(server_type="vllm", num_requests_for_eval=256)

    async def setup(self) -> None:
        self.items_taken = 0
        self.inner = load_environment(self.config)
        self.problems: Any = ()
        if not self.evaluation_only:
            load = partial(self.inner.get_dataset, seed=self.config.seed)
            self.problems = await run_blocking(load, about="the training problems")

    async def item_at(self, number: int) -> dict[str, Any]:
        return dict(self.problems[number % len(self.problems)])

    async def get_next_item(self) -> dict[str, Any]:
        self.items_taken += 1
        return await self.item_at(self.items_taken - 1)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {"items_taken": self.items_taken, **(data or {})})

    async def collect_trajectories(self, item: dict[str, Any]) -> tuple[ScoredDataGroup | None, list[Any]]:
        async with Rollouts(self) as rollouts:
            outputs = await rollouts.run([item] * self.config.group_size, self.config.temperature)
            scored = [(node, output) for output in outputs for node in rollouts.session_of(output).nodes]
            if not scored:
                return None, []
            group = scored_group([node for node, _ in scored], [output["reward"] for _, output in scored])
            if len(scored) != self.config.group_size:
                # Where the next prompt does not continue the sampled tokens, the chat becomes several sequences with
                # the same reward.
                group["group_overrides"] = {"group_size": len(scored)}
            return group, []

    async def evaluate(self, *_: Any, **__: Any) -> None:
        started = time.time()
        load = partial(self.inner.get_eval_dataset, n=self.config.eval_problems)
        problems = await run_blocking(load, about="the evaluation problems")
        samples = await run_all([partial(self.attempt, dict(problem)) for problem in problems])
        metrics = sorted({name for sample in samples for name in sample["metrics"]})
        await self.evaluate_log(
            {
                names.EVAL_REWARD: mean(sample["reward"] for sample in samples),
                **{
                    names.EVAL_OTHER.format(name=name): mean(
                        s["metrics"][name] for s in samples if name in s["metrics"]
                    )
                    for name in metrics
                },
            },
            start_time=started,
            generation_parameters={
                "temperature": self.config.eval_temperature,
                "max_new_tokens": self.config.max_new_tokens,
            },
            samples=samples,
        )

    async def attempt(self, problem: dict[str, Any]) -> dict[str, Any]:
        """Run one evaluation rollout and return it as a sample for the evaluation log."""
        async with Rollouts(self) as rollouts:
            (output,) = await rollouts.run([problem], self.config.eval_temperature)
            return {
                "example_id": output["example_id"],
                "gold": output.get("answer"),
                "text": "".join(node.full_text for node in rollouts.session_of(output).nodes[-1:]),
                "reward": output["reward"],
                "metrics": dict(output.get("metrics") or {}),
                "stop_condition": output.get("stop_condition"),
            }


class Rollouts:
    """Rollouts that run together: each has a managed session of its own that answers the library's requests."""

    def __init__(self, env: VerifiersEnv) -> None:
        self._env = env
        self._sessions: dict[str, ManagedSession] = {}
        self._failures: list[Exception] = []
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def run(self, problems: Sequence[Mapping[str, Any]], temperature: float) -> list[dict[str, Any]]:
        """Run the problems and return the library's outputs in their order; raises when one of them failed."""
        inner, config = self._env.inner, self._env.config
        sampling = {**(inner.sampling_args or {}), "temperature": temperature, "max_tokens": config.max_new_tokens}
        sampling.pop("n", None)  # each rollout asks for one answer at a time
        outputs: list[dict[str, Any]] = await inner.run_group(
            [dict(problem) for problem in problems],
            make_client(self, inner.message_type),
            self._env.server.config.model_name,
            sampling,
            state_columns=["trajectory_id"],
        )
        self._raise_failures(outputs)
        return outputs

    def session_of(self, output: Mapping[str, Any]) -> ManagedSession:
        return self._sessions[output["trajectory_id"]]

    async def adapter(self, trajectory_id: str) -> ManagedServerAdapter:
        """Return an object with the interface of OpenAI's client that sends to the session of one rollout."""
        session = self._sessions.get(trajectory_id)
        if session is None:
            session = await self._opened.enter_async_context(self._env.server.managed_server())
            self._sessions[trajectory_id] = session
        return ManagedServerAdapter(session)

    def note_failure(self, error: Exception) -> None:
        """Keep an error that the library would wrap, so that it can be raised with its own type."""
        self._failures.append(error)

    def _raise_failures(self, outputs: Sequence[Mapping[str, Any]]) -> None:
        if self._failures:
            raise self._failures[0]
        for output in outputs:
            reason = output.get("error") or (output["trajectory_id"] not in self._sessions and "it requested no answer")
            if reason:
                raise VerifiersRolloutFailed(f"a rollout of {self._env.config.environment} failed: {reason}")


def make_client(rollouts: Rollouts, message_type: str) -> Any:
    """Make a client of the library, for chat or for text completions, that sends to managed sessions."""
    clients, errors = import_module("verifiers.clients"), import_module("verifiers.errors")
    kind = clients.OpenAICompletionsClient if message_type == "completion" else clients.OpenAIChatCompletionsClient

    class SessionClient(kind):  # type: ignore[misc, valid-type]
        """Sends each rollout's requests to its session."""

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any
        ) -> Any:
            session = await rollouts.adapter(more["state"]["trajectory_id"])
            fields = {name: value for name, value in sampling_args.items() if value is not None}
            try:
                if message_type == "completion":
                    return await session.completions.create(model=model, prompt=prompt, **fields)
                return await session.chat.completions.create(model=model, messages=prompt, tools=tools, **fields)
            except InferenceRefused as error:
                if any(words in str(error) for words in TOO_LONG):
                    raise errors.OverlongPromptError(str(error)) from error
                rollouts.note_failure(error)
                raise
            except Exception as error:
                rollouts.note_failure(error)
                raise

        async def raise_from_native_response(self, response: Any) -> None:
            """Accept an empty answer: a model may end at once, and the rubric scores that."""

    return SessionClient(None)


def load_environment(config: VerifiersEnvConfig) -> Any:
    """Load the library's environment; the signal handlers it installs are removed again."""
    if not config.environment:
        raise VerifiersMissing(
            "--env.environment is not set; name an installed environment, or a Python file with a load_environment"
        )
    try:
        package = import_module("verifiers")
    except ImportError as error:
        raise VerifiersMissing(f"this environment needs verifiers: {PIP_LINE}") from error
    if not hasattr(package, "load_environment"):
        raise VerifiersMissing(f"verifiers {package.__version__} has another interface: {PIP_LINE}")
    options = json.loads(config.environment_options)
    try:
        with _own_signals():
            if config.environment.endswith(".py"):
                return import_file(expand_home(config.environment)).load_environment(**options)
            return package.load_environment(config.environment, **options)
    except (ImportError, AttributeError, TypeError, ValueError, OSError, RuntimeError) as error:
        raise VerifiersMissing(f"the environment {config.environment!r} cannot be loaded: {error}") from error


@contextmanager
def _own_signals() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    VerifiersEnv.cli()
