"""The policy as torch: loaded, adapted, sharded, packed, and its logprobs.

In reading order: `policy`, `loading`, `lora`, `layer_filter`, `fsdp`; `micro_batches`, `attention`, `model_support`
(which layout a model computes right), `logprobs`, `optimizers`. It may import `config`, `options` and `errors`.
"""
