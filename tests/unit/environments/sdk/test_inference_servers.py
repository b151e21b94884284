"""Servers of every kind over real sockets: the requests to them, their answers, and the use of several at once."""

import anyio
import msgspec
import pytest

from environments.sdk.config import APIServerConfig, BaseEnvConfig
from environments.sdk.errors import InferenceRefused, InferenceUnavailable, TokensUnavailable
from environments.sdk.inference.http_transport import Response
from environments.sdk.inference.other_servers import _parameters
from environments.sdk.inference.sampling import Reasoning, Sampling
from environments.sdk.server_manager import ServerManager
from environments.sdk.session.tokens_and_masks import record_samples
from environments.sdk.testing import FakeInference, InProcess, logprob_of, served
from environments.sdk.testing_servers import FakeOpenAI, FakeSglang, FakeTrl

pytestmark = pytest.mark.anyio

QUESTION = {"role": "user", "content": "How many now?"}


def manager(tokenizer, *configs, transport=None, **options):
    return ServerManager(configs, load_tokenizer=lambda: tokenizer, transport=transport, **options)


def config(kind, url="http://fake", **fields):
    return APIServerConfig(server_type=kind, base_url=f"{url}/v1", **fields)


def counting(tokenizer):
    """Return a responder whose samples differ by a counter over all requests."""
    count = iter(range(5, 250))
    return lambda _prompt, _index: [next(count), tokenizer.eos_token_id]


async def test_sglang_is_asked_and_read_in_its_own_words(tokenizer):
    fake = FakeSglang(respond=counting(tokenizer), end=tokenizer.eos_token_id, weight_version="4")
    with served(fake) as url:
        servers = manager(tokenizer, config("sglang", url, api_key="secret"))
        async with servers.managed_server() as session:
            await session.chat_completion(messages=[QUESTION], n=2, max_completion_tokens=20, seed=3, stop="x")
        await servers.aclose()
    (path, request), *_ = fake.requests
    prompt = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True)
    assert path == "/generate"
    assert request["input_ids"] == prompt
    parameters = {"n": 2, "temperature": 1.0, "max_new_tokens": 20, "sampling_seed": 3, "stop": ["x"]}
    assert request["sampling_params"] == parameters
    assert (request["return_logprob"], request["return_text_in_logprobs"]) == (True, False)
    assert fake.headers[0]["authorization"] == "Bearer secret"
    for index, node in enumerate(session.nodes):
        sampled = [5 + index, tokenizer.eos_token_id]
        assert node.tokens == prompt + sampled
        assert node.logprobs[len(prompt) :] == [logprob_of(token, i) for i, token in enumerate(sampled)]
        assert node.policy_versions == [(len(prompt), len(node.tokens), 4)]
        assert node.finish_reason == "stop"


def test_sglang_samples_to_the_end_of_its_context_where_no_limit_is_given():
    asked = _parameters(Sampling(more={"min_tokens": 3}))
    assert (asked["max_new_tokens"], asked["min_new_tokens"]) == (None, 3)


async def test_a_foreign_server_that_tells_no_version_leaves_it_unknown(tokenizer):
    """R4: a foreign server's version is null, neither an error nor invented."""
    fake = FakeSglang(respond=lambda *_: [7, 8, 9], end=tokenizer.eos_token_id)
    async with manager(tokenizer, config("sglang"), transport=InProcess(fake)).managed_server() as session:
        answer = await session.chat_completion(messages=[QUESTION], max_tokens=2)
    assert session.nodes[0].policy_versions == []
    assert answer.choices[0].finish_reason == "length"


class PlainVllm:
    """vLLM's own server: no `/generate`, a description of its routes, and an adapter for each requested name."""

    def __init__(self, tokens=(7, 8)):
        self.asked = []
        self.tokens = tokens

    async def request(self, method, url, body):
        path = url.removeprefix("http://fake")
        if path == "/openapi.json":
            return Response(200, b'{"paths": {"/v1/completions": {}}}')
        if method == "GET" or path == "/tokenize":
            return Response(404, b'{"detail": "Not Found"}')
        fields = msgspec.json.decode(body)
        self.asked.append((path, fields))
        logprobs = {"token_logprobs": [-0.5, -0.25][: len(self.tokens)]}
        choice = {"token_ids": self.tokens, "logprobs": logprobs, "finish_reason": "length"}
        message = {"role": "assistant", "content": "ok"}
        return Response(200, msgspec.json.encode({"choices": [{**choice, "index": 0, "message": message}]}))

    async def aclose(self):
        pass


async def test_an_empty_answer_of_a_plain_vllm_has_no_version(tokenizer):
    """The broker refuses a group with a span over no token."""
    servers = manager(tokenizer, config("vllm"), transport=PlainVllm(tokens=()))
    servers.follow("policy-v6", 6)
    (sample,) = await servers.servers[0].generate([3, 4], Sampling(max_tokens=2), "train")
    assert (sample.tokens, sample.versions) == ([], [])


async def test_r23_a_plain_vllm_is_asked_for_the_policys_name_which_tells_the_version_of_what_it_samples(tokenizer):
    plain = PlainVllm()
    servers = manager(tokenizer, config("vllm", model_name="base"), transport=plain)
    (before,) = await servers.servers[0].generate([3, 4], Sampling(max_tokens=2), "train")
    servers.follow("policy-v6", 6)
    (sample,) = await servers.servers[0].generate([3, 4], Sampling(max_tokens=2, stop=("x",)), "train")
    servers.follow(None, 7)
    await servers.servers[0].generate([3, 4], Sampling(max_tokens=2), "train")
    assert (sample.tokens, sample.logprobs, sample.finish_reason) == ([7, 8], [-0.5, -0.25], "length")
    assert (before.versions, sample.versions) == ([], [(0, 2, 6)])
    assert [fields["model"] for _, fields in plain.asked] == ["base", "policy-v6", "base"]
    path, fields = plain.asked[1]
    assert path == "/v1/completions"
    assert (fields["prompt"], fields["stop"], fields["return_token_ids"]) == ([3, 4], ["x"], True)


async def test_r23_what_is_asked_of_a_chat_provider_goes_to_the_policys_name_too(tokenizer):
    plain = PlainVllm()
    servers = manager(tokenizer, config("openai", model_name="base"), transport=plain)
    servers.follow("policy-v6", 6)
    await servers.chat_completion(messages=[QUESTION])
    assert [(path, fields["model"]) for path, fields in plain.asked] == [("/v1/chat/completions", "policy-v6")]


class Inconsistent(FakeInference):
    """A server whose answers are spoiled by `spoil`."""

    spoil = None

    def _reply(self, request):
        reply = super()._reply(request)
        type(self).spoil(reply)
        return reply


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda reply: reply["logprobs"][0].pop(),
        lambda reply: reply["logprobs"][0].append(reply["logprobs"][0][0]),
        lambda reply: reply["finish_reasons"].pop(),
        lambda reply: reply["token_ids"][0].__setitem__(0, -5),
        lambda reply: reply["token_ids"][0].__setitem__(0, 1 << 31),
    ],
)
async def test_an_answer_whose_parts_do_not_fit_together_is_refused_with_the_servers_address(tokenizer, ours, spoil):
    server = type("Spoiled", (Inconsistent,), {"spoil": staticmethod(spoil)})
    fake = server(counting(tokenizer), end=tokenizer.eos_token_id, ours=ours)
    servers = manager(tokenizer, config("vllm"), transport=InProcess(fake))
    with pytest.raises(InferenceRefused, match="http://fake/generate sent an unexpected answer"):
        await servers.servers[0].generate([3, 4], Sampling(n=2, max_tokens=2), "train")


class Proxied:
    """A transport whose every answer is a page, as a proxy gives it."""

    async def request(self, *_, **__):
        return Response(200, b"<html>sign in</html>")

    async def aclose(self):
        pass


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("ask", ["generate", "prompt_logprobs"])
async def test_a_page_in_the_place_of_an_answer_is_refused_with_the_servers_address(tokenizer, kind, ask):
    servers = manager(tokenizer, config(kind, model_name="m"), transport=Proxied())
    server = servers.servers[0]
    with pytest.raises(InferenceRefused, match="http://fake/"):
        await (
            server.generate([3, 4], Sampling(n=1, max_tokens=2), "train")
            if ask == "generate"
            else server.prompt_logprobs([3, 4], 1, "train")
        )


async def test_trl_is_asked_with_text_and_refused_for_training_without_logprobs(tokenizer):
    fake = FakeTrl(respond=lambda *_: tokenizer.encode("42"), encode=tokenizer.encode)
    servers = manager(tokenizer, config("trl"), transport=InProcess(fake))
    answer = await servers.chat_completion(messages=[QUESTION], n=2, max_tokens=9, top_p=0.5)
    assert [choice.message.content for choice in answer.choices] == ["42", "42"]
    path, request = fake.requests[0]
    assert path == "/v1/generate/"
    assert request["prompts"] == [tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)]
    assert (request["n"], request["max_tokens"], request["top_p"], request["top_k"]) == (2, 9, 0.5, -1)
    assert "generation_kwargs" not in request
    await servers.chat_completion(messages=[QUESTION], stop="\n", presence_penalty=0.5)
    assert fake.requests[1][1]["generation_kwargs"] == {"stop": ["\n"], "presence_penalty": 0.5}
    async with servers.managed_server() as session:
        with pytest.raises(TokensUnavailable, match="server_type trl"):
            await session.chat_completion(messages=[QUESTION])


async def test_trl_with_logprobs_of_the_very_prompt_can_be_trained_on(tokenizer):
    fake = FakeTrl(respond=lambda *_: [7, 8], encode=tokenizer.encode, returns_logprobs=True)
    async with manager(tokenizer, config("trl"), transport=InProcess(fake)).managed_server() as session:
        await session.chat_completion(messages=[QUESTION])
    assert session.nodes[0].logprobs[-2:] == [logprob_of(7, 0), logprob_of(8, 1)]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("top_k", [0, 3])
async def test_the_logprobs_of_a_prompt_come_in_one_form(tokenizer, kind, top_k):
    end = tokenizer.eos_token_id
    fake = FakeInference(lambda *_: [end], end=end) if kind == "vllm" else FakeSglang(respond=lambda *_: [end], end=end)
    servers = manager(tokenizer, config(kind), transport=InProcess(fake))
    found = await servers.get_logprobs(input_ids=[50, 51, 52], top_k=top_k)
    ids = [[], [0, 1, 2], [0, 1, 2]] if top_k else [[], [51], [52]]
    assert found["prompt_tokens"] == [50, 51, 52]
    assert [row for row in found["prompt_topk_token_ids"] if row] == [row for row in ids if row]
    assert [len(row) for row in found["prompt_topk_logprobs"]] == [len(row) for row in found["prompt_topk_token_ids"]]
    assert len(found["prompt_logprobs"]) == 3
    assert all(value is not None for value in found["prompt_logprobs"][1:])
    if top_k:
        assert found["prompt_topk_logprobs"][1] == pytest.approx([-0.1, -0.2, -0.3])


async def test_a_server_that_tells_no_prompt_logprobs_is_not_a_teacher(tokenizer):
    end = tokenizer.eos_token_id
    fake = FakeInference(lambda *_: [end], end=end, ours=False)
    with pytest.raises(InferenceRefused, match="cannot be a teacher"):
        await manager(tokenizer, config("vllm"), transport=InProcess(fake)).get_logprobs(prompt="a b", top_k=1)


async def test_more_samples_than_a_provider_gives_at_once_are_asked_for_in_parts(tokenizer):
    fake = FakeOpenAI(replies=[str(i) for i in range(99)], most_n=8)
    answer = await manager(tokenizer, config("openai"), transport=InProcess(fake)).chat_completion(
        messages=[QUESTION], n=19
    )
    assert [request["n"] for _, request in fake.requests] == [8, 8, 3]
    assert [choice.message.content for choice in answer.choices] == [str(i) for i in range(19)]
    assert [choice.index for choice in answer.choices] == list(range(19))
    assert answer.usage.completion_tokens == 38


async def test_sessions_split_large_groups_too(tokenizer):
    """Sessions get as many samples as they request, split like any other request."""
    fake = FakeInference(counting(tokenizer), end=tokenizer.eos_token_id)
    async with manager(tokenizer, config("vllm"), transport=InProcess(fake)).managed_server() as session:
        await session.chat_completion(messages=[QUESTION], n=20)
    assert [request["n"] for request in fake.requests] == [8, 8, 4]
    assert len({node.tokens[-2] for node in session.nodes}) == 20


async def test_p28_parts_of_a_group_do_not_share_a_seed(tokenizer):
    """The same seed in all parts of a split group would repeat its samples, and leave nothing to compare."""
    fake = FakeInference(counting(tokenizer), end=tokenizer.eos_token_id)
    async with manager(tokenizer, config("vllm"), transport=InProcess(fake)).managed_server() as session:
        await session.chat_completion(messages=[QUESTION], n=20, seed=7)
        await session.chat_completion(messages=[QUESTION], n=2, seed=7)
        await session.chat_completion(messages=[QUESTION], n=2)
    assert [request.get("seed") for request in fake.requests] == [7, 15, 23, 7, None]
    chat = FakeOpenAI(ignores_n=True, replies=["a", "b", "c"])
    await manager(tokenizer, config("openai"), transport=InProcess(chat)).chat_completion(
        messages=[QUESTION], n=3, seed=7
    )
    assert [request["seed"] for _, request in chat.requests] == [7, 10, 11]


async def test_a_provider_that_ignores_n_is_found_out_and_then_asked_one_by_one(tokenizer):
    fake = FakeOpenAI(ignores_n=True, replies=["a", "b", "c", "d"])
    servers = manager(tokenizer, config("openai"), transport=InProcess(fake))
    for _ in range(2):
        answer = await servers.chat_completion(messages=[QUESTION], n=4)
        assert sorted(choice.message.content for choice in answer.choices) == ["a", "b", "c", "d"]
    assert servers.config.n_kwarg_is_ignored
    assert [request["n"] for _, request in fake.requests] == [4, 1, 1, 1] + [1] * 4


async def test_evaluation_has_its_own_places_and_timings(tokenizer):
    """Requests of an evaluation wait for its own places only, and are counted separately."""
    end = tokenizer.eos_token_id
    fake = FakeInference(lambda *_: [end], end=end, delay_seconds=0.01)
    limits = config("vllm", num_max_requests_at_once=2, num_requests_for_eval=3)
    servers = manager(tokenizer, limits, transport=InProcess(fake))
    with record_samples("eval"):
        async with anyio.create_task_group() as group:
            for _ in range(9):
                group.start_soon(lambda: servers.chat_completion(messages=[QUESTION], temperature=0))
    assert fake.most_in_flight == 3
    found = servers.metrics()
    assert "server/server_0_eval_request_time_avg" in found
    assert "server/server_0_request_time_avg" not in found
    fake.most_in_flight = 0
    async with anyio.create_task_group() as group:
        for split in ("train", "eval"):
            for _ in range(6):
                group.start_soon(lambda split=split: servers.chat_completion(messages=[QUESTION], split=split))
    assert fake.most_in_flight == 5
    assert "server/server_0_request_time_avg" in servers.metrics()


async def test_a_weight_takes_its_share_of_the_places(tokenizer):
    end = tokenizer.eos_token_id
    fake = FakeInference(lambda *_: [end], end=end, delay_seconds=0.01)
    servers = manager(tokenizer, config("vllm", num_max_requests_at_once=8), transport=InProcess(fake))
    servers.update_weight(0.25)
    async with anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(lambda: servers.chat_completion(messages=[QUESTION]))
    assert fake.most_in_flight == 2


class Farm:
    """A transport to several servers by host name; those in `out` refuse connections."""

    def __init__(self, **apps):
        self.apps = {name: InProcess(app) for name, app in apps.items()}
        self.out = set()
        self.asked = dict.fromkeys(apps, 0)

    async def request(self, method, url, body):
        name = url.split("/")[2]
        self.asked[name] += 1
        if name in self.out:
            raise ConnectionRefusedError(name)
        return await self.apps[name].request(method, url, body)

    async def aclose(self):
        pass


def farm_of(tokenizer, *names, delay=0.0):
    end = tokenizer.eos_token_id
    return Farm(**{name: FakeInference(lambda *_: [end], end=end, delay_seconds=delay) for name in names})


async def test_the_least_loaded_server_is_asked(tokenizer):
    farm = farm_of(tokenizer, "one", "two", "three", delay=0.05)
    servers = manager(tokenizer, *(config("vllm", f"http://{name}") for name in farm.apps), transport=farm)
    async with anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(lambda: servers.chat_completion(messages=[QUESTION]))
    assert [app.app.most_in_flight for app in farm.apps.values()] == [4, 4, 4]


async def test_a_server_that_is_out_is_left_for_another_and_used_again_later(tokenizer, monkeypatch):
    monkeypatch.setattr("environments.sdk.inference.retries.FIRST_AVOIDED_SECONDS", 0.05)
    farm = farm_of(tokenizer, "one", "two")
    servers = manager(tokenizer, config("vllm", "http://one"), config("vllm", "http://two"), transport=farm)
    farm.out = {"one"}
    async with servers.managed_server() as session:  # it was pinned to the first server
        await session.chat_completion(messages=[QUESTION])
    for _ in range(20):
        await servers.chat_completion(messages=[QUESTION])
    assert farm.asked["one"] <= 2
    farm.out = set()
    await anyio.sleep(0.15)
    before = farm.asked["one"]
    for _ in range(4):
        await servers.chat_completion(messages=[QUESTION])
    assert farm.asked["one"] > before


async def test_a_request_goes_to_a_server_that_may_be_up_again(tokenizer, monkeypatch):
    """It went back to the one that had just failed; or all waited for that one."""
    pool = manager(tokenizer, config("vllm", "http://one"), config("vllm", "http://two")).pool
    one, two = pool.servers
    one.channel._avoid()
    assert pool.least_loaded(avoid=pool.servers) is two
    assert not pool._failover(two)()
    monkeypatch.setattr("environments.sdk.inference.retries.time.monotonic", lambda: one.channel._avoided_until)
    assert pool._failover(two)()


async def test_a_dedicated_server_is_always_the_same(tokenizer):
    farm = farm_of(tokenizer, "one", "two")
    servers = manager(tokenizer, config("vllm", "http://one"), config("vllm", "http://two"), transport=farm)
    async with servers.dedicated_server() as dedicated:
        name = dedicated.config.base_url.split("/")[2]
        for _ in range(3):
            await dedicated.chat_completion(messages=[QUESTION])
    assert [count for other, count in farm.asked.items() if other != name] == [0]


async def test_nothing_is_asked_of_a_provider_that_the_environment_did_not_ask(tokenizer):
    """Health is judged by real requests only: no completion is sent to a provider as a test."""
    fake = FakeOpenAI()
    servers = manager(tokenizer, config("openai"), transport=InProcess(fake))
    await servers.chat_completion(messages=[QUESTION], max_tokens=5)
    await anyio.sleep(1.2)
    assert len(fake.requests) == 1


async def test_retries_have_one_limit_in_all(tokenizer):
    """Retries are made in one layer for a limited time, not three times in each of three layers."""
    fake = FakeOpenAI(problem=(503, "busy"))
    servers = manager(tokenizer, config("openai"), transport=InProcess(fake), wait_timeout_seconds=0.3)
    with pytest.raises(InferenceUnavailable, match="busy"):
        await servers.chat_completion(messages=[QUESTION])
    assert len(fake.requests) <= 4


async def test_a_request_that_takes_too_long_is_given_up(tokenizer):
    fake = FakeInference(lambda *_: [1], end=1, delay_seconds=30)
    with served(fake) as url:
        servers = manager(tokenizer, config("vllm", url, timeout=0.2, health_check=False))
        with pytest.raises(InferenceUnavailable):
            await servers.chat_completion(messages=[QUESTION])
        await servers.aclose()


@pytest.mark.parametrize(
    ("url", "fields", "expected"),
    [
        ("https://openrouter.ai/api/v1", {"thinking_mode": True}, {"reasoning": {"enabled": True}}),
        ("http://x/v1", {"reasoning_effort": "low"}, {"reasoning": {"enabled": True, "effort": "low"}}),
        ("http://x/v1", {"max_reasoning_tokens": 4000}, {"reasoning": {"enabled": True, "max_tokens": 4000}}),
        (
            "http://x/v1",
            {"max_reasoning_tokens": 4000, "reasoning_effort": "xhigh"},
            {"reasoning": {"enabled": True, "effort": "xhigh"}},
        ),
        ("https://api.openai.com/v1", {"thinking_mode": True}, {"reasoning_effort": "medium", "temperature": 1.0}),
        ("https://api.openai.com/v1", {"max_reasoning_tokens": 24000}, {"reasoning_effort": "high"}),
        ("http://x/v1", {}, {}),
    ],
)
def test_reasoning_is_asked_for_in_the_providers_words(url, fields, expected):
    reasoning = Reasoning.from_config(BaseEnvConfig(**fields))
    asked = reasoning.applied({"messages": [], "temperature": 0.3, "max_tokens": 9}, url)
    assert asked.items() >= expected.items()
    if "openai.com" in url:
        assert asked["max_completion_tokens"] == 9
        assert "max_tokens" not in asked
    else:
        assert (asked["temperature"], asked["max_tokens"]) == (0.3, 9)


async def test_one_call_can_do_without_reasoning(tokenizer):
    fake = FakeOpenAI()
    servers = manager(tokenizer, config("openai"), transport=InProcess(fake), reasoning=Reasoning(True, "high"))
    await servers.chat_completion(messages=[QUESTION])
    await servers.chat_completion(messages=[QUESTION], skip_reasoning=True)
    assert ["reasoning" in request for _, request in fake.requests] == [True, False]
    assert all("skip_reasoning" not in request for _, request in fake.requests)


async def test_text_completions_of_a_provider_keep_extra_fields_and_drop_the_librarys(tokenizer):
    fake = FakeOpenAI(replies=["four"])
    servers = manager(tokenizer, config("openai", model_name="m"), transport=InProcess(fake))
    answer = await servers.completion(prompt="2+2=", timeout=3, extra_body={"provider": "x"}, model="other")
    assert answer.choices[0].text == "four"
    assert fake.requests[0] == ("/v1/completions", {"prompt": "2+2=", "provider": "x", "model": "m"})
