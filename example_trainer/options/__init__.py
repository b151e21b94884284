"""The sections of the trainer's options: fields, defaults, help, and refused combinations. It loads no torch.

In reading order: `modes` (what each weight sync mode is), `model` (policy, adapter, optimizer, batch), `objective`,
`publish` with `vllm_settings` (further options of vLLM), `presets`, `training_options` (those of the run, and all
sections joined), `server` (the server's settings that follow from them), `conflicts`, `without_effect`, `layer_indices`
(the form of a layer filter), `layout` (nodes and GPUs), `names_elsewhere` (other frameworks' names in error lines). It
may import `monitoring.health` and the broker's `common`.
"""
