"""What every request has to keep to, whichever of the routes it came by: checked where vLLM takes it in.

Some requests vLLM takes and then answers wrongly or with 500: here they are refused with the reason, as mistakes of the
client's. And a request that cannot be passed on to the engine leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any


def check_sampling(params: Any, vocabulary: int) -> None:
    """Refuse sampling parameters that leave an output without a seed or without any token to sample."""
    from vllm.exceptions import VLLMValidationError

    if params.seed is not None and params.n > 1 and params.seed <= -1 < params.seed + params.n:
        raise VLLMValidationError(
            f"seed: with {params.seed} one of the {params.n} outputs would have the seed -1, which means none; "
            "use seeds from 0"
        )
    if leaves_nothing(params, vocabulary):
        raise VLLMValidationError(
            "allowed_token_ids, bad_words and the stop tokens that min_tokens forbids leave no token to sample"
        )


def leaves_nothing(params: Any, vocabulary: int) -> bool:
    """Whether no token may come first. What only becomes impossible later shows in the answer."""
    forbidden = {ids[0] for ids in params.bad_words_token_ids or () if len(ids) == 1}
    if params.min_tokens and params.structured_outputs is None:
        forbidden |= params.all_stop_token_ids
    if params.allowed_token_ids is not None:
        return forbidden.issuperset(params.allowed_token_ids)
    return len(forbidden) >= vocabulary


def refuse_what_cannot_be_sent(async_llm: Any) -> None:
    """Tell the client of integers beyond 64 bits and of half characters, and forget the request that has them.

    vLLM notes a request before it packs it for the engine, and would keep the note, with its adapter, for ever.
    """
    from vllm.exceptions import VLLMValidationError

    send = async_llm.engine_core.add_request_async
    add = async_llm._add_request  # noqa: SLF001  where vLLM has noted a request and not yet sent it

    async def sending(request: Any) -> None:
        try:
            await send(request)
        except (OverflowError, UnicodeEncodeError) as error:
            raise VLLMValidationError(f"the request holds what cannot be passed on: {error}") from error

    async def adding(request: Any, *args: Any) -> None:
        try:
            await add(request, *args)
        except BaseException:
            with suppress(UnicodeEncodeError):  # a request of such a name is forgotten here, and was never sent
                await async_llm.abort(request.request_id, internal=True)
            raise

    async_llm.engine_core.add_request_async = sending
    async_llm._add_request = adding  # noqa: SLF001


def blame_impossible_grammars(async_llm: Any) -> None:
    """Where guided decoding fails, the grammar is at fault and not the server."""
    generate = async_llm.generate

    def generating(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        outputs: AsyncIterator[Any] = generate(prompt, sampling_params, *args, **kwargs)
        return outputs if sampling_params.structured_outputs is None else _without_errors(outputs)

    async_llm.generate = generating


async def _without_errors(outputs: Any) -> AsyncIterator[Any]:
    from vllm.exceptions import VLLMValidationError

    try:
        async for told in outputs:
            if any(output.finish_reason == "error" for output in told.outputs):
                raise VLLMValidationError(
                    "structured_outputs: the grammar does not compile, or nothing satisfies it together with the other "
                    "limits of the request"
                )
            yield told
    finally:
        await outputs.aclose()
