"""The engine core's counts of tokens: prefix hits, and what a pause discards."""

from __future__ import annotations

from types import SimpleNamespace

from example_trainer.serving.vllm.engine_core import _count_computed, _count_prefix_hits


def scheduler_with(blocks, sizes, computed):
    """Return a scheduler with a running request: `blocks` by group of layers, `sizes` the tokens of a block there."""
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in sizes]
    manager = SimpleNamespace(
        get_block_ids=lambda _: blocks, block_pool=SimpleNamespace(null_block=SimpleNamespace(block_id=0))
    )
    request = SimpleNamespace(request_id="a", num_computed_tokens=computed)
    return SimpleNamespace(
        running=[request],
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
        kv_cache_manager=manager,
    )


def test_a_request_that_resumes_as_a_new_one_is_not_a_prefix_hit():
    plan = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id="new", num_computed_tokens=16),
            SimpleNamespace(req_id="resumed", num_computed_tokens=64),
        ]
    )
    requests = {"new": SimpleNamespace(num_preemptions=0), "resumed": SimpleNamespace(num_preemptions=1)}
    assert _count_prefix_hits(SimpleNamespace(requests=requests), plan) == 16


def test_the_layers_that_keep_most_say_how_many_tokens_were_computed():
    windowed_first = ([0, 0, 7], [3, 4, 5])  # a window drops what lies behind it: block 0 is empty
    assert _count_computed(scheduler_with(windowed_first, (16, 16), 40)) == 40
    assert _count_computed(scheduler_with(([1, 2],), (16,), 20)) == 20


def test_blocks_of_each_group_have_their_own_size():
    assert _count_computed(scheduler_with(([1], [2, 3]), (32, 16), 30)) == 30
