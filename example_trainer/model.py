"""Loading of the policy under training: a Hugging Face causal language model and its master weights.

A `Policy` separates two things that most trainers mix: the *module* that the forward runs on and the *masters* (master
weights) that the optimizer changes. The layout says what the module's trained parameters are:

- plain: the masters themselves if they have the served dtype, else a copy of them in the served dtype, cast anew for
  each forward. The sampler computes in that dtype throughout, so this agrees with it more closely than autocast over
  fp32 weights would (there the residual stream stays fp32);
- shared, forward from masters: the same, and `served` holds views into the tensors vLLM reads, which only a publish
  writes;
- shared, forward from views: those views, which with `--master-weights none` are also the masters and change only
  inside a publish (`Policy.changing`).

With an adapter the base is frozen in the served dtype (or in four bits), and the masters are the adapter's matrices
under PEFT's names; all of the above holds for them. Gradients always end up on the masters, in their precision. The
module is always built by transformers' own loading, so that buffers (above all rotary frequencies with their scaling)
are never rebuilt by hand.
"""

from __future__ import annotations

import logging

import torch

from example_trainer.modeling.loading import (
    PolicyOptions,
    load_module,
    name_of,
    resolve_device,
    served_dtype_of,
    stored_config,
)
from example_trainer.modeling.policy import Policy
from example_trainer.weight_protocol.pinned_memory import pin

logger = logging.getLogger(__name__)


def load_policy(options: PolicyOptions, *, forwards_from_masters: bool = True) -> Policy:
    """Load a policy from a local directory or by name.

    Without `forwards_from_masters` the caller attaches served tensors before the first forward.
    """
    device = resolve_device(options.device)
    if options.activation_offloading and device.type == "cpu":
        logger.warning("--activation-offloading has no effect on a CPU, where activations are in host memory")
    stored = stored_config(options)
    served_dtype = served_dtype_of(options, stored)
    frozen = options.adapter is not None
    load_dtype = served_dtype if frozen or options.master_weights == "none" else torch.float32
    waits_for_views = options.master_weights == "none" and not forwards_from_masters
    if options.sharding is not None:
        from example_trainer.modeling.fsdp import load_sharded

        return load_sharded(options, stored, served_dtype=served_dtype, device=device)
    module = load_module(options, stored, load_dtype, device)
    if frozen or not (options.master_weights == "host" or waits_for_views):
        module = module.to(device)
    policy = Policy(module, hf_config=stored, served_dtype=served_dtype, device=device, options=options)
    if options.master_weights == "host" and device.type == "cuda":
        pin(policy.masters.values())
    for remark in [] if options.adapter is None else policy.describe_left_out(options.adapter):
        logger.warning("%s", remark)
    if forwards_from_masters:
        policy.compute_in_served_dtype()
    logger.info(
        "loaded %s: %.1fM parameters, %.1fM of them trained, served as %s on %s",
        options.model_name,
        sum(parameter.numel() for parameter in module.parameters()) / 1e6,
        sum(master.numel() for master in policy.masters.values()) / 1e6,
        name_of(served_dtype),
        device,
    )
    return policy
