"""The transfer of trained weights to the inference server: one file per weight sync mode, chosen by `factory`.

In reading order: `base` (the protocol), `factory`, `publish_loop` (attempts and checks in every mode), then the modes:
`shared_vllm` (with `attachment` and `tensor_map`), `broadcast` (`shared_vllm` for several servers), `lora_only` (with
`adapter_target`), `restart` (`lora_restart` and `none`); `served_model` is what a server of the trainer's own loads,
`logprob_parity` the check of each mode.
`testing` has a stand-in for the server. The package may import `model`, `vllm_manager` and all below.
"""
