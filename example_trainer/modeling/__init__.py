"""The policy in torch: loading, adapters, sharding, packing, logprobs and optimizers.

In reading order: `policy`, `loading`, `rotary_factors` (of LongRoPE), `base_fingerprint`, `lora`, `layer_filter`;
`shards`, `fsdp` and `tensor_parallel` (several ranks); `micro_batches`, `attention`, `layout_choice` (the choice of a
layout), `logprobs`, `kernels`; `optimizers`, `sharded_optimizers` and `loss_scale` (of float16); `side_streams` (work
in parallel with a step), `activation_offloading` (layer inputs in host memory). It may import `memory`, `options`,
`weight_protocol` and `errors`.
"""
