"""A broker and an inference server are killed and restarted while an environment serves, in real processes.

Each group that the environment submits must be trained once. An environment whose items have numbers is killed as well:
each item of its data must be trained exactly once, and the trained answers are as long as without any kill.
`ATROPOS_ENVIRONMENT_KILLS=20` selects the long form, with 2,000 items.
"""

import inspect
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter

import psutil
import pytest
from tokenizers import Tokenizer

from atropos_api.client import BrokerClient
from atropos_api.wire.messages import RunRequest
from environments.sdk.rehearsal import write_byte_tokenizer
from example_trainer.processes.ports import free_port

logger = logging.getLogger(__name__)

KILLS = int(os.environ.get("ATROPOS_ENVIRONMENT_KILLS", "1"))
ITEMS = 2000 if KILLS > 1 else 150
GROUP_SIZE = 4

ENVIRONMENT = '''
    import sys

    from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig, scored_group


    class CountingEnv(BaseEnv):
        """Each item is a number of its own, which its score tells again."""

        name = "counting"

        @classmethod
        def config_init(cls):
            return BaseEnvConfig(group_size=4, max_num_workers=8, use_wandb=False), APIServerConfig(server_type="vllm")

        async def setup(self):
            self.number = 0

        async def get_next_item(self):
            self.number += 1
            return self.number

        async def collect_trajectories(self, item):
            async with self.server.managed_server() as session:
                await session.completion(prompt=f"item {item}", n=4, max_tokens=64)
                return scored_group(session.nodes, [item, 0, 0, 0]), []

        async def handle_send_to_api(self, scored_data, item=None, *rest):
            await super().handle_send_to_api(scored_data, item, *rest)
            print(item, flush=True)

        async def evaluate(self):
            pass


    CountingEnv.cli()
'''
NUMBERED = ENVIRONMENT.replace(
    """
        async def get_next_item(self):
            self.number += 1
            return self.number
""",
    """
        item_count = ITEM_COUNT

        async def item_at(self, number):
            return number + 1

        async def get_next_item(self):
            raise AssertionError("the broker leases the items")
""",
)
END = 256


def answer_to(prompt, index):
    """Return 1 to 60 tokens, the same ones each time, whichever process asks or answers."""
    chance = random.Random(f"{list(prompt)} {index}")
    return [chance.randrange(5, 200) for _ in range(chance.randrange(60))] + [END]


INFERENCE = """
    import random
    import sys
    import time

    import anyio

    from environments.sdk.testing import FakeInference, served

    END = 256


    class Timed(FakeInference):
        async def __call__(self, scope, receive, send):
            async def send_when_sampled(message):
                await anyio.sleep(len(message.get("body", b"")) / 50_000)
                await send(message)

            await super().__call__(scope, receive, send_when_sampled)


    ANSWER_TO

    with served(Timed(answer_to, end=END), port=int(sys.argv[1])):
        time.sleep(600)
""".replace("ANSWER_TO", textwrap.indent(inspect.getsource(answer_to), " " * 4).lstrip())


def mean_answer(tokenizer, items):
    """Return the mean length of the answers to items, as a run without any kill trains them."""
    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
    return statistics.fmean(
        len(answer_to(encode(f"item {item}").ids, index)) for item in items for index in range(GROUP_SIZE)
    )


class Program:
    """A process that can be killed and started again with the same arguments."""

    def __init__(self, *command, log):
        self.command = command
        self.log = log
        self.process = None
        self.start()

    def start(self):
        if self.process is not None:
            self.process.stdout.close()
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.command], stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        self.process.wait(timeout=60)
        return self.process.returncode


@pytest.fixture
def programs(tmp_path):
    started = []

    def start(name, *command):
        program = Program(*command, log=tmp_path / f"{name}.log")
        started.append(program)
        return program

    yield start
    for program in started:
        if program.process.poll() is None:
            program.kill()
        program.process.stdout.close()


def script(path, text):
    path.write_text(textwrap.dedent(text))
    return str(path)


class Trainer(threading.Thread):
    """Takes batch after batch of one group, until the test says that no more will come."""

    def __init__(self, url):
        super().__init__()
        self.url, self.trained, self.lengths, self.stopping = url, [], [], threading.Event()

    def run(self):
        with BrokerClient(self.url) as client:
            client.wait_until_ready(60)
            request = RunRequest(name="kills", batch_size=4, max_token_length=512, num_steps=1_000_000)
            run = client.begin_run(request)
            number = run.next_batch
            while True:
                last = self.stopping.is_set()
                batch = client.get_batch(number, run_id=run.run_id, epoch=run.epoch, wait_seconds=1)
                if batch is not None:
                    self.trained += [int(max(group.scores)) for group in batch.groups]
                    self.lengths += [sum(mask != -100 for mask in row) for group in batch.groups for row in group.masks]
                    client.commit(number, run_id=run.run_id, epoch=run.epoch)
                    number += 1
                elif last:
                    return


def wait_for(condition, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def test_killed_brokers_and_inference_servers_cost_no_group_and_double_none(tmp_path, programs):
    broker_port, inference_port = free_port(), free_port()
    url = f"http://127.0.0.1:{broker_port}"
    store = ("--store", str(tmp_path / "store"), "--fsync", "always")
    broker = programs("broker", "-m", "atropos_api", "--port", str(broker_port), *store)
    inference = programs("inference", script(tmp_path / "inference.py", INFERENCE), str(inference_port))
    env = programs(
        "env",
        script(tmp_path / "counting_env.py", ENVIRONMENT),
        "serve",
        *("--env.rollout_server_url", url),
        *("--env.tokenizer_name", str(write_byte_tokenizer(tmp_path / "tokenizer"))),
        *("--openai.base_url", f"http://127.0.0.1:{inference_port}/v1"),
    )
    handed_in = []
    reader = threading.Thread(target=lambda: handed_in.extend(map(int, env.process.stdout)))
    reader.start()
    trainer = Trainer(url)
    trainer.start()
    for round_number in range(KILLS):
        for program in (broker, inference):
            goal = len(trainer.trained) + 10
            wait_for(lambda goal=goal: len(trainer.trained) >= goal, f"training in round {round_number}")
            program.kill()
            program.start()
    goal = len(trainer.trained) + 10
    wait_for(lambda: len(trainer.trained) >= goal, "training after the last kill")

    family = [env.process.pid, *(child.pid for child in psutil.Process(env.process.pid).children(recursive=True))]
    assert env.kill(signal.SIGTERM) == 0
    assert not any(map(psutil.pid_exists, family))
    reader.join(timeout=10)
    trainer.stopping.set()
    trainer.join(timeout=60)
    counts = Counter(trainer.trained)
    assert [number for number, times in counts.items() if times > 1] == []
    assert set(counts) == set(handed_in)


def test_each_item_of_a_data_set_is_trained_exactly_once_whatever_is_killed(tmp_path, programs):
    broker_port, inference_port = free_port(), free_port()
    url = f"http://127.0.0.1:{broker_port}"
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    broker = programs("broker", "-m", "atropos_api", "--port", str(broker_port), "--store", str(tmp_path / "store"))
    inference = programs("inference", script(tmp_path / "inference.py", INFERENCE), str(inference_port))
    env = programs(
        "env",
        script(tmp_path / "numbered_env.py", NUMBERED.replace("ITEM_COUNT", str(ITEMS))),
        "serve",
        *("--env.rollout_server_url", url),
        *("--env.tokenizer_name", str(tokenizer)),
        *("--openai.base_url", f"http://127.0.0.1:{inference_port}/v1"),
    )
    trainer = Trainer(url)
    trainer.start()
    chance = random.Random(KILLS)
    for number in range(3 * KILLS):
        goal = min(len(trainer.trained) + ITEMS // (5 * KILLS), ITEMS - 1)
        wait_for(lambda goal=goal: len(trainer.trained) >= goal, f"training after {number} kills")
        time.sleep(chance.uniform(0.0, 0.3))
        program = (env, broker, inference)[number % 3]
        program.kill()
        program.start()
    wait_for(lambda: len(trainer.trained) >= ITEMS, "the last items", seconds=120)
    time.sleep(1.0)  # a group too many would be trained by now
    times, undisturbed = Counter(trainer.trained), mean_answer(tokenizer, range(1, ITEMS + 1))
    logger.info(
        "%d kills; items by the times that each was trained: %s; mean answer %.2f tokens, undisturbed %.2f",
        *(3 * KILLS, dict(Counter(times.values())), statistics.fmean(trainer.lengths), undisturbed),
    )
    assert times == Counter(range(1, ITEMS + 1))
    assert statistics.fmean(trainer.lengths) == pytest.approx(undisturbed, rel=0.01)
    assert env.kill(signal.SIGTERM) == 0
    with BrokerClient(url) as client:
        (described,) = client.status()["environments"]
    trainer.stopping.set()
    trainer.join(timeout=60)
    items = described["items"]
    assert (items["drawn"], items["finished"], items["in_progress"], items["dropped"]) == (ITEMS, ITEMS, 0, {})
    assert described["outcomes"] == {"trained": ITEMS}
    assert items["sampled_sequences"] >= GROUP_SIZE * ITEMS
