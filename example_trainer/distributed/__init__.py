"""Several processes as one trainer.

In reading order: `ranks` (the processes and their messages), `rank_shares` (the optimizer steps of a rank's rows),
`rank0_proxy` (rank 0 calls broker and server for all, and broadcasts sharded weights). The broker divides a batch's
groups among the ranks (`atropos_api/broker/batches.py`). It may import `weights`, `objective`, `modeling`, `api` and
all layers below.
"""
