"""Random requests that have one right answer: greedy or seeded, over all routes and options that meet in a batch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
WORDS = ["ab", "8", "q", "Z1", "hello", "(", "7x"]
GUIDES = [
    {"choice": ["yes", "no", "perhaps"]},
    {"regex": "[ab]{3}[0-9]{2,9}"},
    {"json": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]}},
    {"json": {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 1, "maxItems": 3}},
    {"grammar": 'root ::= "(" root ")" | [a-f]+'},
    # xgrammar would ignore the lengths of this schema, so vLLM chooses another library.
    {"json": {"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 6}},
]


HALF_A_CHARACTER = "\ud800"
HUGE = 2**70
MALFORMED = [
    ("/generate", {"prompt": [5], "seed": HUGE}),
    ("/generate", {"prompt": [5], "seed": 2**63}),
    ("/generate", {"prompt": [5], "seed": 2**63 - 2, "n": 4}),
    ("/generate", {"prompt": [5], "seed": -1}),
    ("/generate", {"prompt": [5], "max_tokens": HUGE}),
    ("/generate", {"prompt": [5], "top_k": HUGE}),
    ("/generate", {"prompt": [5], "sampling_mask_limit": HUGE}),
    ("/generate", {"prompt": [5], "sampling_mask_limit": 256}),
    ("/generate", {"prompt": [5], "sampling_mask_limit": 2, "logprobs": 1}),
    ("/generate", {"prompt": [HUGE]}),
    ("/generate", {"prompt": [5], "allowed_token_ids": [0], "min_tokens": 2}),
    ("/generate", {"prompt": [5], "allowed_token_ids": [25], "bad_words": ["8"]}),
    ("/generate", {"prompt": [5], "allowed_token_ids": [25], "bad_words": ["88"]}),
    ("/generate", {"prompt": [5], "repetition_penalty": 1e-300}),
    ("/generate", {"prompt": HALF_A_CHARACTER}),
    ("/generate", {"prompt": "x" * 200_000}),
    ("/generate", {"prompt": [5], "stop": [""]}),
    ("/generate", {"prompt": [5], "model": "nobody"}),
    ("/v1/completions", {"prompt": [5], "top_k": HUGE}),
    ("/v1/completions", {"prompt": [5], "seed": -2, "n": 3}),
    ("/v1/completions", {"prompt": [5], "seed": 2**63 - 1, "n": 2}),
    ("/v1/completions", {"prompt": [5], "repetition_detection": {"max_pattern_size": HUGE, "min_count": HUGE}}),
    ("/v1/completions", {"prompt": [5], "priority": HUGE}),
    ("/v1/completions", {"prompt": [5], "stop": HALF_A_CHARACTER}),
    ("/v1/completions", {"prompt": [5], "bad_words": [HALF_A_CHARACTER]}),
    ("/v1/completions", {"prompt": [5], "request_id": HALF_A_CHARACTER}),
    ("/v1/completions", {"prompt": HALF_A_CHARACTER}),
    ("/v1/completions", {"prompt": [5], "logprobs": 2, "logprob_token_ids": [1, HUGE]}),
    ("/v1/completions", {"prompt": [5], "allowed_token_ids": [25], "bad_words": ["8"]}),
    ("/v1/completions", {"prompt": [5], "structured_outputs": {"json": {"$ref": "#"}}}),
    ("/v1/completions", {"prompt": [5], "structured_outputs": {"grammar": "root ::= root"}}),
    ("/v1/completions", {"prompt": [5], "structured_outputs": {"json": {"type": "integer", "minimum": HUGE}}}),
    ("/v1/completions", {"prompt": [5], "structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [25]}),
    ("/v1/completions", {"prompt": [5], "structured_outputs": {"choice": ["yes"]}, "stream": True, "bad_words": ["y"]}),
    ("/v1/completions", {"prompt": [5], "structured_outputs": 5}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF_A_CHARACTER}]}),
    ("/v1/chat/completions", {"messages": [], "top_logprobs": HUGE}),
    ("/v1/completions", {"prompt": [5], "model": "nobody"}),
]
"""Mistakes of clients, which are never answered 500, as vLLM answers many of them."""


@dataclass(frozen=True)
class RandomRequest:
    """One request; `outputs` is how many texts its answer holds."""

    path: str
    body: dict[str, Any]
    outputs: int
    leave_after_seconds: float | None = field(default=None)

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def tolerance(self) -> float:
        """Largest difference of a logprob to that of the request alone.

        A token at the bound of min_p or top_p is kept or cut by the last bit of its probability, which moves the
        logprobs of all others by its share: 0.005 was seen with min_p 0.1, on one kind of CPU and not on another.
        """
        return 0.02 if self.body.keys() & {"min_p", "top_p"} else 1e-3


class RequestMaker:
    """Makes requests from one seed, for the model itself or one of `adapters`."""

    def __init__(self, seed: int, model: str, adapters: tuple[str, ...] = ()) -> None:
        self._rng = random.Random(seed)
        self._model = model
        self._names = [None, None, *adapters]
        self._shared = [self._rng.randrange(2, 250) for _ in range(290)]

    def make(self, count: int) -> list[RandomRequest]:
        return [self._one() for _ in range(count)]

    def mistakes(self) -> list[RandomRequest]:
        named = {"model": self._model}
        return [RandomRequest(path, body if path == "/generate" else named | body, 1) for path, body in MALFORMED]

    def _one(self) -> RandomRequest:
        path = self._rng.choices(ROUTES, [6, 4, 3])[0]
        body = self._sampling()
        name = self._rng.choice(self._names)
        if path == "/generate":
            body |= self._generate(body) | ({} if name is None else {"model": name})
        else:
            body["model"] = self._model if name is None else name
            body |= self._completion(body) if path == "/v1/completions" else self._chat(body)
        whole_only = {"use_beam_search", "prompt_logprobs"} & body.keys() and path != "/generate"
        if self._chance(0.3) and not whole_only:
            body["stream"] = True
        return RandomRequest(path, body, body.get("n", 1))

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        body: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 12, 24, 40]), "temperature": 0.0}
        if self._chance(0.55):
            body |= {"temperature": round(rng.uniform(0.5, 1.4), 2), "seed": rng.randrange(2**63 - 9)}
            body |= self._some({"top_p": 0.8, "top_k": rng.choice([1, 3, 20]), "min_p": 0.1}, 0.2)
            body |= self._some({"n": rng.choice([2, 3])}, 0.2)
        body |= self._some(
            {
                "presence_penalty": rng.choice([-1.5, 0.7, 2.0]),
                "frequency_penalty": rng.choice([-0.5, 1.1]),
                "repetition_penalty": rng.choice([0.8, 1.3]),
                "logit_bias": {str(rng.randrange(300)): rng.choice([-100, -3, 4, 100]) for _ in range(3)},
                "bad_words": rng.sample(WORDS, 2),
                "allowed_token_ids": sorted(rng.sample(range(300), rng.choice([3, 40]))),
                "stop": rng.sample(WORDS, rng.choice([1, 2])),
                "include_stop_str_in_output": True,
                "stop_token_ids": rng.sample(range(300), 3),
                "min_tokens": rng.choice([1, 5]) if body["max_tokens"] > 4 else 1,
                "skip_special_tokens": False,
            },
            0.13,
        )
        if self._chance(0.8):
            body["ignore_eos"] = True
        return body

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        rng = self._rng
        prompt: Any = self._tokens() if self._chance(0.8) else self._text()
        more = {"prompt": {"prompt_token_ids": prompt} if isinstance(prompt, list) and self._chance(0.5) else prompt}
        more |= {"logprobs": rng.choice([None, False, True, 0, 0, 1, 2, 3, 5, 20])}
        if not more["logprobs"] or more["logprobs"] is True:
            more |= self._some({"sampling_mask_limit": rng.choice([1, 4, 60])}, 0.25)
        more |= self._some({"prompt_logprobs": rng.choice([0, 1, 4]), "compact": True}, 0.25)
        return more | self._some({"detokenize": True}, 0.2)

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        rng = self._rng
        if self._chance(0.06):
            dropped = ("seed", "n", "top_p", "top_k", "min_p", "allowed_token_ids")
            for name in dropped:
                body.pop(name, None)
            beam = {"use_beam_search": True, "n": 2, "max_tokens": 8, "temperature": 0.0}
            return {"prompt": self._tokens(), "return_token_ids": True, **beam}
        more = {"prompt": self._tokens() if self._chance(0.7) else self._text(), "return_token_ids": True}
        more |= self._some(
            {"logprobs": rng.choice([0, 1, 2, 4, 5]), "return_tokens_as_token_ids": True}, 0.6, both=True
        )
        more |= self._some({"prompt_logprobs": rng.choice([0, 2])}, 0.12)
        more |= self._some({"echo": True}, 0.06)
        more |= self._guide(body)
        if "logprobs" in more and "echo" not in more and self._chance(0.15):
            ids = rng.sample(range(300), rng.choice([1, 3, 6]))
            more |= {"logprobs": len(ids), "logprob_token_ids": ids}
        return more

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        rng = self._rng
        messages = [{"role": "user", "content": self._text()} for _ in range(rng.choice([1, 3]))]
        more: dict[str, Any] = {"messages": messages, "return_token_ids": True}
        if self._chance(0.6):
            more |= {"logprobs": True, "top_logprobs": rng.choice([0, 1, 2, 7, 20]), "return_tokens_as_token_ids": True}
        return more | self._guide(body)

    def _guide(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._chance(0.15):
            return {}
        for name in ("allowed_token_ids", "bad_words", "logit_bias", "min_tokens", "stop_token_ids", "stop"):
            body.pop(name, None)  # together with a grammar they may leave nothing to sample
        return {"structured_outputs": self._rng.choice(GUIDES)}

    def _tokens(self) -> list[int]:
        rng = self._rng
        own = [rng.randrange(2, 250) for _ in range(rng.choice([1, 3, 9, 30, 120]))]
        return self._shared[: rng.choice([128, 200, 290])] + own if self._chance(0.2) else own

    def _text(self) -> str:
        return "".join(self._rng.choice("abc 0123xyZ?é") for _ in range(self._rng.choice([1, 4, 15, 40])))

    def _some(self, options: dict[str, Any], probability: float, *, both: bool = False) -> dict[str, Any]:
        if both:
            return dict(options) if self._chance(probability) else {}
        return {name: value for name, value in options.items() if self._chance(probability)}

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability
