"""The inference server: vLLM's own application with token-exact generation and fenced publishes.

In reading order: `start` and `startup` (before anything is loaded), `config`, `app`, `asgi`, `auth`, `state` (what all
routes share), `problems` (error answers), `generate` with `responses` (tokens in and out), `admission`, `fence`,
`publish` and `drain` (no token of mixed versions), `registration` (at a broker), `bridge_routes` and
`adapter_routes` (what a trainer calls), `adapters`, `forwarding` (adapters to other servers), `handover` (connections
to a successor), `metrics` (for Prometheus), `engine` (vLLM as the rest sees it), `checkpoint_shapes` and
`checkpoint_download` (checkpoints to load), `testing` (stand-ins without vLLM), `vllm/` (its private names). It may
import `options`, `weight_protocol`, `processes`, `errors`, and the broker's client and contract; never weights or
model.
"""
