"""Several processes as one trainer.

In reading order: `ranks` (the processes and their messages), `rank_shares` (which rank trains which rows),
`rank0_proxy` (rank 0 calls broker and server for all, and broadcasts sharded weights). It may import `weights`,
`objective`, `modeling`, `api` and all layers below.
"""
