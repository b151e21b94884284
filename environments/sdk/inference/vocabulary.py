"""Whether an environment's tokenizer is that of the model it samples from, found out before the first sample.

Our server tells the fingerprint of its vocabulary. Another one with vLLM's `/tokenize` is asked to read a text made of
tokens from the whole vocabulary. One with neither is taken at its word, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from atropos_api.common.vocabulary import fingerprint
from environments.sdk.background import run_blocking
from environments.sdk.errors import InferenceRefused, TokenizerMismatch

if TYPE_CHECKING:
    from environments.sdk.inference.channel import Elsewhere
    from environments.sdk.inference.server import HttpServer

logger = logging.getLogger(__name__)

PROBED_TOKENS: Final = (512, 64)
"""How many tokens make the text to be read; the shorter one is for servers whose context the longer one exceeds."""


async def compare_vocabulary(server: HttpServer, tokenizer: Any, told: str | None, elsewhere: Elsewhere) -> None:
    """Raise `TokenizerMismatch` unless `tokenizer` is the server's; `told` is the fingerprint that it tells, if any."""
    ours = vocabulary_of(tokenizer)
    if ours is None:
        logger.info("the tokenizer has no vocabulary that could be compared with that of %s", server.config.root_url)
    elif told is None:
        await _compare_by_text(server, tokenizer, ours, elsewhere)
    elif fingerprint(ours) != told and await _full_fingerprint(tokenizer) != told:
        raise _mismatch(server, tokenizer, "their vocabularies differ")


def vocabulary_of(tokenizer: Any) -> Mapping[str, int] | None:
    get = getattr(tokenizer, "get_vocab", None)
    return None if get is None else dict(get())


def probe_text(tokenizer: Any, vocabulary: Mapping[str, int], count: int) -> str:
    """Words of about `count` tokens from all over the vocabulary; what is no text of its own is left out."""
    ids = sorted(set(vocabulary.values()))
    chosen = ids[:: max(1, len(ids) // count)]
    special = set(getattr(tokenizer, "all_special_ids", ()))
    texts = (tokenizer.decode([index]) for index in chosen if index not in special)
    return " ".join(text.strip() for text in texts if text.strip() and text.isprintable() and "\ufffd" not in text)


async def _compare_by_text(
    server: HttpServer, tokenizer: Any, vocabulary: Mapping[str, int], elsewhere: Elsewhere
) -> None:
    url = f"{server.config.root_url}/tokenize"
    for count in PROBED_TOKENS:
        text = probe_text(tokenizer, vocabulary, count)
        body = msgspec.json.encode({"prompt": text, "add_special_tokens": False})
        try:
            answer = msgspec.json.decode(await server.channel.post(url, body, "train", elsewhere=elsewhere))
            theirs = [int(token) for token in answer["tokens"]]
        except (InferenceRefused, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            logger.debug("%s reads no text of %d tokens: %s", url, count, error)
            continue
        ours = list(tokenizer.encode(text, add_special_tokens=False))
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            detail = "they read a text as different numbers of tokens"
            if at is not None:
                detail = f"{tokenizer.decode([ours[at]])!r} is token {ours[at]} here and {theirs[at]} there"
            raise _mismatch(server, tokenizer, detail)
        return
    logger.info("%s tells nothing of its tokenizer, so it is not compared with ours", server.config.root_url)


async def _full_fingerprint(tokenizer: Any) -> str | None:
    """That of transformers' own tokenizer: a model's files may add tokens that `tokenizer.json` does not hold."""
    load = getattr(tokenizer, "load_full", None)
    if load is None:
        return None
    full = await run_blocking(load, about="the tokenizer as transformers reads it")
    return fingerprint(full.get_vocab())


def _mismatch(server: HttpServer, tokenizer: Any, detail: str) -> TokenizerMismatch:
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    return TokenizerMismatch(
        f"the tokenizer {name} is not that of {server.model_name} at {server.config.base_url}: {detail}; leave out "
        "--env.tokenizer_name to take the server's, or name that model's"
    )
