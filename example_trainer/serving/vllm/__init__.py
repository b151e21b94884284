"""All that touches vLLM's private names; each is checked when the server starts.

In reading order: `compat` (which names, and why a process failed), `patches` (vLLM's mistakes, mended), `worker`
with `adapter_worker` and `broadcast_worker` (weights in vLLM's process), `load_tracing` (which tensor goes where),
`engine_core` (its scheduler during a publish). It may import `weight_protocol`, `serving.checkpoint_shapes` and
`errors`.
"""
