"""`DistributedLayout`: the numbers of a run over nodes, for twelve shapes, and the sizes that are refused."""

from __future__ import annotations

import pytest

from example_trainer.options.layout import BadLayout, DistributedLayout

SHAPES = [  # n_nodes, n_gpus_per_node, actor_tp_size, rollout_tp_size -> world_size, actor_dp_size, rollout_replicas
    (1, 1, 1, 1, 1, 1, 1),
    (1, 2, 1, 1, 2, 2, 2),
    (1, 4, 1, 1, 4, 4, 4),
    (1, 4, 2, 1, 4, 2, 4),
    (1, 4, 1, 2, 4, 4, 2),
    (1, 8, 8, 4, 8, 1, 2),
    (1, 6, 3, 2, 6, 2, 3),
    (2, 1, 1, 1, 2, 2, 2),
    (2, 1, 2, 2, 2, 1, 1),
    (2, 4, 4, 2, 8, 2, 4),
    (2, 4, 8, 8, 8, 1, 1),
    (4, 8, 16, 2, 32, 2, 16),
]


@pytest.mark.parametrize(("nodes", "gpus", "actor", "rollout", "world", "rows", "replicas"), SHAPES)
def test_sizes_follow_from_nodes_gpus_and_tensor_parallelism(nodes, gpus, actor, rollout, world, rows, replicas):
    layout = DistributedLayout(n_nodes=nodes, n_gpus_per_node=gpus, actor_tp_size=actor, rollout_tp_size=rollout)
    assert (layout.world_size, layout.actor_dp_size, layout.rollout_replicas) == (world, rows, replicas)
    names = layout.worker_names
    assert len(set(names)) == world
    assert (names[0], names[-1]) == ("worker-0-0", f"worker-{nodes - 1}-{gpus - 1}")
    assert f"world size {world}, actor data parallel {rows} x tensor parallel {actor}" in layout.describe()


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"n_nodes": 0}, "n_nodes 0 must be a whole number of at least 1"),
        ({"n_gpus_per_node": True}, "n_gpus_per_node True must be a whole number"),
        ({"n_nodes": 2, "n_gpus_per_node": 4, "actor_tp_size": 3}, "actor_tp_size 3 does not divide the 8 GPUs"),
        ({"n_nodes": 2, "n_gpus_per_node": 3, "rollout_tp_size": 2}, "parts of nodes with 3 GPUs each"),
        ({"nodes": 2}, "unknown key 'nodes'; the keys are n_nodes, n_gpus_per_node"),
    ],
)
def test_sizes_that_do_not_divide_the_gpus_are_refused_by_name(section, told):
    with pytest.raises(BadLayout, match=told):
        DistributedLayout.from_section(section)
