"""The transfer of trained weights to the inference server: one file per weight sync mode, chosen by `factory`.

In reading order: `base` (the protocol), `factory`, then the modes: `shared_vllm` (with `attachment` and
`tensor_map`), `broadcast` (`shared_vllm` for several servers), `lora_only` (with `adapter_target`), `restart`
(`lora_restart` and `none`); `logprob_parity` checks each of them. It may import `model`, `vllm_manager` and all
below. `testing` has a stand-in for the server.
"""
