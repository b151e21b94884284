"""Construction of the weight bridge of the configured mode; apart from the bridges, because it imports them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from example_trainer.modeling.policy import Policy
from example_trainer.options.modes import BridgeMode
from example_trainer.options.training_options import TrainingOptions
from example_trainer.weight_protocol.client import ShouldStop, never
from example_trainer.weights.base import WeightBridge
from example_trainer.weights.broadcast import BroadcastBridge
from example_trainer.weights.checkpoint_delivery import CheckpointDelivery
from example_trainer.weights.delivery import AdapterDelivery, BroadcastDelivery, WeightDelivery
from example_trainer.weights.lora_only import LoraOnlyBridge, SeveralServersBridge
from example_trainer.weights.members import MemberCalls, Registry
from example_trainer.weights.registered import RegisteredBridge
from example_trainer.weights.restart import RestartBridge
from example_trainer.weights.shared_vllm import SharedVllmBridge
from example_trainer.weights.weight_source import WeightSource

MakeBridge = Callable[..., WeightBridge]
"""A bridge's class: it takes the options, and `should_stop`."""

TO_ONE_SERVER: Mapping[BridgeMode, MakeBridge] = MappingProxyType(
    {"shared_vllm": SharedVllmBridge, "lora_only": LoraOnlyBridge, "lora_restart": RestartBridge, "none": RestartBridge}
)
TO_SEVERAL_SERVERS: Mapping[BridgeMode, MakeBridge] = MappingProxyType(
    {"shared_vllm": BroadcastBridge, "lora_only": SeveralServersBridge}
)
"""The bridges with `--num-inference-nodes`."""


DELIVERIES: Mapping[BridgeMode, Callable[[TrainingOptions, MemberCalls], WeightDelivery]] = MappingProxyType(
    {"lora_only": AdapterDelivery, "none": CheckpointDelivery}
)
"""The way in which weights reach the servers of `--registered-servers`, if they are not broadcast."""


def make_bridge(
    config: TrainingOptions,
    make_source: Callable[[Policy], WeightSource] | None = None,
    *,
    registry: Registry | None = None,
    should_stop: ShouldStop = never,
) -> WeightBridge:
    """Return the bridge for the configured mode; its waits for a server end once `should_stop` returns True.

    `make_source` is for a broadcast of sharded weights, `registry` is the broker's, for `--registered-servers`.
    """
    if config.registered_servers:
        assert registry is not None, "--registered-servers needs the broker's registry"
        calls = MemberCalls()
        if config.broadcasts:
            source = make_source or WeightSource
            delivery: WeightDelivery = BroadcastDelivery(config, calls, source, should_stop=should_stop)
        else:
            delivery = DELIVERIES[config.weight_bridge_mode](config, calls)
        return RegisteredBridge(config, registry, delivery, calls, should_stop=should_stop)
    if config.broadcasts and make_source is not None:
        return BroadcastBridge(config, make_source, should_stop=should_stop)
    bridges = TO_SEVERAL_SERVERS if config.num_inference_nodes else TO_ONE_SERVER
    return bridges[config.weight_bridge_mode](config, should_stop=should_stop)
