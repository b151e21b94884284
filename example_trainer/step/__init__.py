"""One training step: from a batch to gradients, then publish, announce, checkpoint and commit.

In reading order: `start_check` (before anything is loaded), `train_step` (shared by a live run and a replay),
`logprob_mismatch` (trainer against sampler), `metrics`, `token_values` (for people to look at), `post_step` (publish,
announce, checkpoint, commit), `save` (a checkpoint by all ranks). It may import `training` and all layers below.
"""
