"""Several processes as one trainer.

In reading order: `ranks` (the processes and what they tell each other), `rank_shares` (which rank trains what),
`rank0_proxy` (rank 0 speaks to broker and server for all). It may import `weights.base`, `objective`, `modeling`,
`api` and all below.
"""
