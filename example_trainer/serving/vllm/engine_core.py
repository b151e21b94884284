"""Additions to vLLM's engine core for a publish, because only its scheduler has the exact numbers.

Pausing, counting the tokens that a pause discards and that are computed again, stamping the version and resuming: each
is one call from the API process. The methods are added to vLLM's `EngineCore` in the process that runs it, whichever
processes the workers run in: by the server before it forks that process, else by vLLM's plugins there
(`failure_cause.register`). They are called through `call_utility_async`.

Tokens of a request that is answered only at its end are sent to the API process at its end (`OutputBuffer`). vLLM sends
each token of each request in every step, which on cores shared with the decoding costs as much as a good part of the
decoding. A pause sends the buffered tokens, because a message has one weight version. vLLM's logprob rows are as wide
as the widest request of a step wants them, so one request's rows change their width with the other requests. Each is
cut to the width its own request asked for before it is buffered; rows of two widths cannot be joined, and an exception
here ends the engine.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from typing import Any

from example_trainer.serving.drain import Running
from example_trainer.serving.vllm.patches import install_grammar_libraries
from example_trainer.serving.vllm.step_times import StepTimes, noting_length


@dataclass(slots=True)
class BufferedOutputs:
    """The outputs of one request since the last one sent, in order.

    `columns` is the width of its own logprob rows, None if it asked for none.
    """

    client_index: int
    columns: int | None
    outputs: list[Any] = field(default_factory=list)

    def add(self, output: Any) -> None:
        if self.columns is not None and output.new_logprobs is not None:
            output.new_logprobs = fit_columns(output.new_logprobs, self.columns)
        self.outputs.append(output)


class OutputBuffer:
    """The buffered outputs of one scheduler's requests."""

    def __init__(self) -> None:
        self._buffered: dict[str, BufferedOutputs] = {}

    def pass_on(self, scheduler: Any, outputs: list[Any]) -> list[Any]:
        """Return those of a step's outputs that are sent now, each merged with the buffered ones of its request."""
        return [sent for output in outputs if (sent := self._buffer_or_merge(scheduler, output)) is not None]

    def forget(self, request_id: str) -> None:
        self._buffered.pop(request_id, None)

    def take_all(self) -> dict[int, list[Any]]:
        """Return everything buffered, by client, merged; the buffer is empty after that."""
        taken: dict[int, list[Any]] = {}
        for buffered in self._buffered.values():
            taken.setdefault(buffered.client_index, []).append(merge(buffered.outputs))
        self._buffered.clear()
        return taken

    def _buffer_or_merge(self, scheduler: Any, output: Any) -> Any:
        buffered = self._buffered.get(output.request_id)
        if output.finish_reason is not None:
            if buffered is None:
                return output
            del self._buffered[output.request_id]
            buffered.add(output)
            return merge(buffered.outputs)
        if buffered is None:
            request = scheduler.requests.get(output.request_id)
            if request is None or not (is_plain(output) and may_wait(request.sampling_params)):
                return output
            columns = logprob_columns(request.sampling_params)
            buffered = self._buffered[output.request_id] = BufferedOutputs(request.client_index, columns)
        buffered.add(output)
        return None


def may_wait(params: Any) -> bool:
    """Return True if no token is needed before the last: no stream, no text to search for stop strings."""
    from vllm.sampling_params import RequestOutputKind

    return params is not None and not params.detokenize and params.output_kind == RequestOutputKind.FINAL_ONLY


def logprob_columns(params: Any) -> int | None:
    """Return 1 for the sampled token plus the alternatives asked for; None if -1 asked for the whole vocabulary."""
    requested = params.num_logprobs
    return None if requested is None or requested < 0 else requested + 1


def fit_columns(logprobs: Any, columns: int) -> Any:
    """Return `logprobs` with rows of exactly that width; alternatives that a row lacks have the probability 0."""
    import numpy as np

    tokens, values = logprobs[0], logprobs[1]
    width = tokens.shape[1]
    if width == columns:
        return logprobs
    if width > columns:
        tokens, values = tokens[:, :columns], values[:, :columns]
    else:
        missing = ((0, 0), (0, columns - width))
        tokens, values = np.pad(tokens, missing), np.pad(values, missing, constant_values=-np.inf)
    return type(logprobs)(tokens, values, *logprobs[2:])


def is_plain(output: Any) -> bool:
    """Return True if an output has only fields that `merge` can join."""
    return output.new_sampling_mask is None and output.routed_experts is None and output.pooling_output is None


def merge(outputs: list[Any]) -> Any:
    """Return one output with the content of these, one after the other."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    parts = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    last.new_logprobs = _join_logprobs(parts) if parts else None
    last.events = [event for output in outputs for event in output.events or ()] or None
    for name in ("prefill_stats", "new_prompt_logprobs_tensors", "prompt_token_id_logprobs"):
        setattr(last, name, next((value for output in outputs if (value := getattr(output, name)) is not None), None))
    return last


def _join_logprobs(parts: list[Any]) -> Any:
    import numpy as np

    kind = type(parts[0])
    return kind(*(np.concatenate([part[column] for part in parts]) for column in range(3)))


_TALLY = "atropos_tally"


@dataclass(slots=True)
class Tally:
    """Counts over the life of one scheduler; `discarded_by_request` has the computed tokens that a pause discarded."""

    generated_tokens: int = 0
    recomputed_tokens: int = 0
    prefix_hit_tokens: int = 0
    discarded_by_request: dict[str, int] = field(default_factory=dict)
    buffer: OutputBuffer = field(default_factory=OutputBuffer)
    times: StepTimes = field(default_factory=StepTimes)

    def as_reply(self, **more: int) -> dict[str, int]:
        return {
            "generated_tokens_total": self.generated_tokens,
            "recomputed_tokens_total": self.recomputed_tokens,
            **more,
        }


@cache
def install() -> None:
    """Add the methods to vLLM's classes, and the corrections of what runs beside them, once per process."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    install_grammar_libraries()
    EngineCore.atropos_pause = _pause
    EngineCore.atropos_resume = _resume
    EngineCore.atropos_counters = _counters
    EngineCore.atropos_running = _running
    Scheduler._free_request = noting_length(Scheduler._free_request, lambda one: tally_of(one).times)  # noqa: SLF001  each request's end
    Scheduler.schedule = _counting_schedule(Scheduler.schedule)
    Scheduler.update_from_output = _counting_update(Scheduler.update_from_output)


def tally_of(scheduler: Any) -> Tally:
    tally = getattr(scheduler, _TALLY, None)
    if tally is None:
        tally = Tally()
        setattr(scheduler, _TALLY, tally)
    return tally


def _pause(core: Any, discard: bool) -> Future[dict[str, int]] | dict[str, int]:
    """Stop after the current step. With `discard` all computed KV and every cached prefix is dropped as well."""
    pending = core.pause_scheduler("keep", False)
    if pending is None:
        return _after_pause(core, discard)
    answer: Future[dict[str, int]] = Future()
    pending.add_done_callback(partial(_answer_after_pause, core, discard, answer))
    return answer


def _answer_after_pause(core: Any, discard: bool, answer: Future[dict[str, int]], pending: Future[Any]) -> None:
    try:
        pending.result()
        answer.set_result(_after_pause(core, discard))
    except Exception as error:  # noqa: BLE001  the caller waits in another process and needs the error
        answer.set_exception(error)


def _after_pause(core: Any, discard: bool) -> dict[str, int]:
    scheduler = core.scheduler
    tally = tally_of(scheduler)
    tally.times.interrupt()
    _send_buffered(core, tally)
    paused = sum(scheduler.get_request_counts())
    discarded = 0
    if discard:
        discarded = _count_computed(scheduler)
        for request in scheduler.running:
            tally.discarded_by_request[request.request_id] = max(
                request.num_computed_tokens, tally.discarded_by_request.get(request.request_id, 0)
            )
        core._reset_caches()  # noqa: SLF001  vLLM's own pause with clear_cache does the same
    return tally.as_reply(paused_requests=paused, discarded_tokens=discarded)


def _send_buffered(core: Any, tally: Tally) -> None:
    """Send the tokens sampled before a pause under the version they were sampled with."""
    from vllm.v1.engine import EngineCoreOutputs

    version = core.get_weight_version()
    for client_index, outputs in tally.buffer.take_all().items():
        core.output_queue.put_nowait((client_index, EngineCoreOutputs(outputs=outputs, weight_version=version)))


def _count_computed(scheduler: Any) -> int:
    """Return the number of tokens whose KV running requests hold, counting a block shared by several once.

    Layers with a window or a state keep less than the others, so the group of layers that holds the most is counted.
    """
    groups = scheduler.kv_cache_config.kv_cache_groups
    return max((_count_in_group(scheduler, index) for index in range(len(groups))), default=0)


def _count_in_group(scheduler: Any, group: int) -> int:
    manager = scheduler.kv_cache_manager
    size = scheduler.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
    empty = manager.block_pool.null_block.block_id
    filled: dict[int, int] = {}
    for request in scheduler.running:
        for index, block in enumerate(manager.get_block_ids(request.request_id)[group]):
            tokens = min(size, request.num_computed_tokens - index * size)
            if tokens > 0 and block != empty:
                filled[block] = max(filled.get(block, 0), tokens)
    return sum(filled.values())


def _resume(core: Any, version: str | None) -> dict[str, int]:
    """Stamp tokens sampled from here on with `version`, if one is given, and resume."""
    core.model_executor.collective_rpc("synchronize_device")
    if version is not None:
        core.set_weight_version(version)
    core.resume_scheduler()
    return tally_of(core.scheduler).as_reply()


def _counters(core: Any) -> dict[str, int]:
    tally = tally_of(core.scheduler)
    running, waiting = core.scheduler.get_request_counts()
    return tally.as_reply(
        prefix_hit_tokens_total=tally.prefix_hit_tokens,
        requests_running=running,
        requests_waiting=waiting,
        kv_used_per_mille=round(1000 * core.scheduler.kv_cache_manager.usage),
    )


def _running(core: Any) -> Running:
    """Return the running requests and the times of steps, for the choice how long a publish drains."""
    scheduler = core.scheduler
    places = max(0, scheduler.max_num_running_reqs - len(scheduler.running))
    running, times = [*scheduler.running, *islice(scheduler.waiting, places)], tally_of(scheduler).times
    step_seconds, request_seconds, prefill_seconds = times.fit()
    return {
        "computed_tokens": [request.num_computed_tokens for request in running],
        "tokens": [request.num_tokens for request in running],
        "generated_tokens": [request.num_output_tokens for request in running],
        "token_limits": [request.max_tokens for request in running],
        "waiting": sum(scheduler.get_request_counts()) - len(running),
        "distinct_tokens": _count_computed(scheduler),
        "last_lengths": list(times.lengths),
        "step_seconds": step_seconds,
        "request_seconds": request_seconds,
        "prefill_seconds": prefill_seconds,
    }


def _counting_schedule(schedule: Any) -> Any:
    """Return `schedule` changed to count the planned tokens that had been computed before a pause discarded them."""

    def counting(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        plan = schedule(scheduler, *args, **kwargs)
        tally = tally_of(scheduler)
        if plan.scheduled_new_reqs:
            tally.prefix_hit_tokens += _count_prefix_hits(scheduler, plan)
        for request_id in plan.finished_req_ids:
            tally.discarded_by_request.pop(request_id, None)
            tally.buffer.forget(request_id)
        if tally.discarded_by_request:
            _note_recomputed(scheduler, tally, plan)
        return plan

    return counting


def _count_prefix_hits(scheduler: Any, plan: Any) -> int:
    """Return the tokens of new requests that were found in the prefix cache.

    vLLM's second model runner lists a request as new again each time it resumes; its tokens were counted before.
    """
    return sum(
        data.num_computed_tokens
        for data in plan.scheduled_new_reqs
        if scheduler.requests[data.req_id].num_preemptions == 0
    )


def _note_recomputed(scheduler: Any, tally: Tally, plan: Any) -> None:
    for request_id, scheduled in plan.num_scheduled_tokens.items():
        discarded_tokens = tally.discarded_by_request.get(request_id)
        if discarded_tokens is None:
            continue
        end = scheduler.requests[request_id].num_computed_tokens  # `schedule` has advanced it by `scheduled`
        tally.recomputed_tokens += max(0, min(end, discarded_tokens) - (end - scheduled))
        if end >= discarded_tokens:
            del tally.discarded_by_request[request_id]


def _counting_update(update: Any) -> Any:
    """Return `update_from_output` changed to count the tokens it returns and to hold those that may wait."""

    def counting(scheduler: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = update(scheduler, plan, *args, **kwargs)
        tally = tally_of(scheduler)
        requests, tokens = len(plan.num_scheduled_tokens), plan.total_num_scheduled_tokens
        tally.times.end_step(requests, tokens, goes_on=bool(scheduler.running))
        for client_index, client in list(outputs.items()):
            tally.generated_tokens += sum(len(output.new_token_ids) for output in client.outputs)
            client.outputs = tally.buffer.pass_on(scheduler, client.outputs)
            if not (client.outputs or client.scheduler_stats or client.finished_requests):
                del outputs[client_index]  # an empty message would wake the other process for nothing
        return outputs

    return counting
