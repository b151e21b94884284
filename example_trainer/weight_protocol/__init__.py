"""The contract between trainer and inference server: manifest, shared memory, transfers, and the calls of `/bridge/*`.

In reading order: `manifest` (where each tensor is stored), `segment` and `shm_header` (shared memory and its version),
`client` (the calls), `transfer` (adapters and weights that are sent), `checkpoint_files` (those that are offered),
`checksums` (of weights, on their own device), `buckets` and `broadcast_group` (packed weights, and the process group
that carries them), `pinned_memory` (of the host, for weights on their way to a GPU or from it), `base_record` (which
frozen base a server of adapters computes with). It may import `errors`.
"""
