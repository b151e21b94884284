"""`BaseEnv` is the class that an environment subclasses; its docstring is the tutorial.

It is `Environment` of `environment.py`, which holds every hook, with the command line of `runtime/cli.py` added. Only
users and the environments of this package import it; `runtime` imports `Environment` alone.
"""

from __future__ import annotations

from typing import NoReturn

from environments.sdk.environment import Environment


class BaseEnv(Environment):
    """Base class of environments: a subclass gives the problems, collects the model's attempts and scores them.

    Three methods are required. This is a complete environment; `python colours.py serve` feeds a trainer from it:

        from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig, scored_group

        class ColoursEnv(BaseEnv):
            name = "colours"

            @classmethod
            def config_init(cls):
                server = APIServerConfig(server_type="vllm", base_url="http://localhost:9001/v1")
                return BaseEnvConfig(group_size=8, max_token_length=64), server

            async def setup(self):
                self.colours = ["red", "green", "blue"]
                self.count = 0

            async def get_next_item(self):
                self.count += 1
                return self.colours[self.count % len(self.colours)]

            async def collect_trajectories(self, item):
                async with self.server.managed_server() as session:
                    answer = await session.chat_completion(
                        messages=[{"role": "user", "content": f"Name something {item}."}],
                        n=self.config.group_size,
                        max_tokens=32,
                    )
                    scores = [float(item not in choice.message.content) for choice in answer.choices]
                    return scored_group(session.nodes, scores), []

            async def evaluate(self):
                answer = await self.server.chat_completion(
                    messages=[{"role": "user", "content": "Name something red."}], temperature=0.0, max_tokens=32
                )
                right = float("red" not in answer.choices[0].message.content)
                await self.evaluate_log({"eval/accuracy": right})

        if __name__ == "__main__":
            ColoursEnv.cli()

    What happens to what you return: the sequences of a group are trained against each other, so each group holds the
    attempts at one item, `group_size` of them. `scored_group` takes the exact tokens, masks, logprobs and policy
    versions from the session; nothing is tokenised again. The second value returned is a list of items to try next.
    Return `None` instead of a group to drop the item. An exception is logged, the item tried again and then given up;
    it never becomes a reward of 0.

    Life cycle of `serve`: `setup`, register with the broker, then `get_next_item` and `collect_trajectories` for as
    many groups at once as the broker's pacing leaves room for, each followed by `postprocess_histories` and `cleanup`;
    `evaluate` each `steps_per_eval` trainer steps; when the run has finished the server exits with code 0.

    With `gold_items` and `score_answer` as well, `python colours.py validate` checks the scores before anything is
    trained on them, without a model: right answers must earn `best_score`, wrong ones less.
    """

    @classmethod
    def cli(cls) -> NoReturn:
        """Run the command line `serve | process | evaluate | validate` of this environment."""
        from atropos_api.common.cliconfig import run_cli
        from environments.sdk.runtime.cli import run_verb

        run_cli(lambda argv: run_verb(cls, argv))
