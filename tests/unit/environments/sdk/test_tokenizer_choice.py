"""The tokenizer is the served model's: taken from the server if none is named, else compared with it."""

import json
import logging

import msgspec
import pytest

from atropos_api.common.identity import fingerprint
from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig
from environments.sdk.errors import TokenizerMismatch, TokenizerUnavailable
from environments.sdk.inference.http_transport import Response
from environments.sdk.inference.sampling import Sampling
from environments.sdk.runtime.commands import prepare_tokenizer
from environments.sdk.server_manager import ServerManager
from environments.sdk.teacher import TeacherDistillationConfig, TeacherDistillationEnv
from environments.sdk.testing import FakeInference, InProcess
from environments.sdk.tokenizer import load_tokenizer

pytestmark = pytest.mark.anyio

SAMPLING = Sampling(max_tokens=2)


class Answers:
    """A foreign server with a body for each of its paths; `/tokenize` uses `tokenizer`."""

    def __init__(self, tokenizer=None, **bodies):
        self.tokenizer = tokenizer
        self.bodies = {f"/{path.replace('__', '/')}": body for path, body in bodies.items()}
        self.asked = []

    async def request(self, method, url, body):
        path = url.removeprefix("http://fake")
        self.asked.append(path)
        if path == "/tokenize" and self.tokenizer is not None:
            text = msgspec.json.decode(body)["prompt"]
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            return Response(200, msgspec.json.encode({"tokens": tokens, "count": len(tokens)}))
        if path == "/v1/completions":
            choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
            return Response(200, msgspec.json.encode({"choices": [choice]}))
        if path in self.bodies:
            return Response(200, msgspec.json.encode(self.bodies[path]))
        return Response(404, b'{"detail": "Not Found"}')

    async def aclose(self):
        pass


PLAIN = {"openapi.json": {"paths": {"/v1/completions": {}}}}


def manager(transport, load=lambda: None, server_type="vllm"):
    config = APIServerConfig(server_type=server_type, base_url="http://fake/v1")
    return ServerManager([config], load_tokenizer=load, transport=transport)


@pytest.fixture
def swapped(tokenizer_folder, tmp_path):
    """Return the tokenizer with the ids of a few letters exchanged, so that only its size is right."""
    document = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    for one, other in ("ab", "cd"):
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((tokenizer_folder / name).read_bytes())
    return load_tokenizer(str(tmp_path))


class Plain(BaseEnv):
    name = "plain"

    async def setup(self):
        pass

    async def get_next_item(self):
        return None

    async def evaluate(self):
        pass


def env_before(transport, server_type="vllm", **settings):
    config = APIServerConfig(server_type=server_type, base_url="http://fake/v1")
    env = Plain(BaseEnvConfig(use_wandb=False, **settings), config)
    env.server = manager(transport, lambda: env.tokenizer, server_type)
    return env


@pytest.mark.parametrize(
    ("server_type", "bodies"),
    [
        ("vllm", {"bridge__info": {"boot_id": "b", "tokenizer": "FOLDER", "model": "another"}}),
        ("vllm", {"bridge__info": {"boot_id": "b", "model": "FOLDER"}}),
        ("vllm", {"v1__models": {"data": [{"id": "a", "parent": "x"}, {"id": "x", "root": "FOLDER"}]}}),
        ("sglang", {"get_model_info": {"model_path": "m", "tokenizer_path": "FOLDER"}}),
    ],
)
async def test_where_none_is_named_it_is_that_of_the_served_model(tokenizer_folder, server_type, bodies):
    told = json.loads(json.dumps(bodies).replace("FOLDER", str(tokenizer_folder)))
    env = env_before(Answers(**told), server_type)
    await prepare_tokenizer(env)
    assert env.tokenizer.name_or_path == env.config.tokenizer_name == str(tokenizer_folder)


async def test_where_the_servers_settings_name_one_it_is_not_asked(tokenizer_folder):
    env = env_before(Answers())
    env.server.servers[0].config.tokenizer_name = str(tokenizer_folder)
    await prepare_tokenizer(env)
    assert env.tokenizer.name_or_path == str(tokenizer_folder)


async def test_one_that_is_named_needs_no_server(tokenizer_folder):
    server = Answers()
    env = env_before(server, tokenizer_name=str(tokenizer_folder))
    await prepare_tokenizer(env)
    assert env.tokenizer.name_or_path == str(tokenizer_folder)
    assert server.asked == []


async def test_a_served_tokenizer_that_is_not_here_is_reported_with_the_server(tmp_path):
    env = env_before(Answers(bridge__info={"boot_id": "b", "model": "/models/there"}))
    with pytest.raises(TokenizerUnavailable, match=r"http://fake/v1 serves /models/there: .*--env\.tokenizer_name"):
        await prepare_tokenizer(env)


async def test_servers_of_text_need_no_tokenizer_and_a_use_of_it_names_the_flag():
    env = env_before(Answers(), "openai")
    await prepare_tokenizer(env)
    with pytest.raises(TokenizerUnavailable, match=r"--env\.tokenizer_name"):
        _ = env.tokenizer


async def test_a_vocabulary_with_swapped_ids_is_refused_before_the_first_sample(tokenizer, swapped):
    fake = FakeInference(lambda *_: [7], end=7, vocabulary=fingerprint(tokenizer.get_vocab()))
    await manager(InProcess(fake), lambda: tokenizer).servers[0].generate([3], SAMPLING, "train")
    with pytest.raises(TokenizerMismatch, match=r"their vocabularies differ; leave out --env\.tokenizer_name"):
        await manager(InProcess(fake), lambda: swapped).servers[0].generate([3], SAMPLING, "train")
    assert len(fake.requests) == 1


async def test_a_plain_vllm_is_asked_to_read_a_text(tokenizer, swapped):
    for kind in ("generate", "prompt_logprobs"):
        servers = manager(Answers(tokenizer, **PLAIN), lambda: swapped)
        with pytest.raises(TokenizerMismatch, match=r"'.' is token \d+ here and \d+ there"):
            await getattr(servers.servers[0], kind)([3], SAMPLING if kind == "generate" else 1, "train")
    alike = Answers(tokenizer, **PLAIN)
    await manager(alike, lambda: tokenizer).servers[0].generate([3], SAMPLING, "train")
    await manager(alike, lambda: tokenizer).servers[0].generate([3], SAMPLING, "train")
    assert alike.asked.count("/tokenize") == 2


async def test_a_server_that_tells_nothing_is_taken_at_its_word_with_a_line(tokenizer, caplog):
    caplog.set_level(logging.INFO)
    await manager(Answers(**PLAIN), lambda: tokenizer).servers[0].generate([3], SAMPLING, "train")
    assert "http://fake reports nothing about its tokenizer" in caplog.text


async def test_tokens_that_only_the_models_other_files_add_are_not_a_difference(tokenizer):
    class Light:
        """A stand-in for `FastTokenizer`, which loads transformers' own tokenizer."""

        def get_vocab(self):
            return {"a": 0}

        def load_full(self):
            return Full()

    class Full:
        def get_vocab(self):
            return {"a": 0, "<added>": 1}

    for told, refused in (({"a": 0, "<added>": 1}, False), ({"a": 0}, False), ({"a": 1}, True)):
        fake = FakeInference(lambda *_: [7], end=7, vocabulary=fingerprint(told))
        server = manager(InProcess(fake), Light).servers[0]
        if refused:
            with pytest.raises(TokenizerMismatch):
                await server.generate([3], SAMPLING, "train")
        else:
            await server.generate([3], SAMPLING, "train")


async def test_a_teacher_of_another_vocabulary_is_refused_and_not_gone_without(tokenizer, swapped, tokenizer_folder):
    config = TeacherDistillationConfig(
        tokenizer_name=str(tokenizer_folder), teacher_enabled=True, teacher_top_k=1, use_wandb=False
    )

    class Taught(TeacherDistillationEnv, Plain):
        pass

    env = Taught(config, APIServerConfig(server_type="vllm"))
    fake = FakeInference(lambda *_: [7], end=7, vocabulary=fingerprint(swapped.get_vocab()))
    env.teacher_server = manager(InProcess(fake), lambda: env.tokenizer)
    with pytest.raises(TokenizerMismatch):
        await env.handle_send_to_api({"tokens": [[3, 4]], "masks": [[-100, 4]], "scores": [1.0]})


def test_a_fingerprint_changes_with_every_token_and_id():
    known = {"a": 0, "b": 1}
    others = [{"a": 1, "b": 0}, {"a": 0, "b": 2}, {"a": 0}, {"a": 0, "b": 1, "c": 2}, {"a": 0, "b\n1": 1}]
    assert len({fingerprint(known), *map(fingerprint, others)}) == 6
    assert fingerprint({"b": 1, "a": 0}) == fingerprint(known)
