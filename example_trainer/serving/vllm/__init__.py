"""The modules that use vLLM's private names; each name is checked when the server starts.

In reading order: `compat` (which names, checked), `failure_cause` (why and with whom a process ends), `patches`
(corrections of vLLM's errors), `cpu_adapters` (adapters without a GPU), `worker` with `adapter_worker` and
`broadcast_worker` (weights in vLLM's process), `load_tracing` (which tensor goes where), `engine_core` (its scheduler
during a publish) with `step_times`. It may import `weight_protocol`, `processes`, `serving.checkpoint_shapes`,
`serving.drain` and `errors`.
"""
