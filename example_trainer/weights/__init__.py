"""The transfer of trained weights to the inference server: one file per weight sync mode, chosen by `factory`.

In reading order: `base` (the protocol), `factory`, `connection` (to a server that runs already), `publish_loop`
(attempts, fence and checks in every mode), then the modes: `shared_vllm` (with `attachment` and `tensor_map`),
`broadcast` (`shared_vllm` for several servers) with `broadcast_exchange` (all switch together or none) and
`weight_source` (its packed buckets), `lora_only` (with `adapter_target`), `restart` (`lora_restart` and `none`);
`registered` publishes to the servers at the broker, which are the `members` of each publish, by a `delivery`
(`checkpoint_delivery` for whole checkpoints). `served_model` is what a server of the trainer's own loads,
`logprob_parity` the check of each mode. `testing` has a stand-in for the server. The package may import `model`,
`vllm_manager` and all below.
"""
