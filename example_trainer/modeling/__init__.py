"""The policy in torch: loading, adapters, sharding, packing, logprobs and optimizers.

In reading order: `policy`, `loading`, `lora`, `layer_filter`; `shards`, `fsdp` and `tensor_parallel` (several ranks);
`micro_batches`, `attention`, `model_support` (the choice of a layout), `logprobs`; `optimizers` and
`sharded_optimizers`. It may import `config`, `options` and `errors`.
"""
