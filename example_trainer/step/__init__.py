"""One training step: from a batch to gradients, then publish, announce, checkpoint and commit.

In reading order: `train_step` (what a live run and a replay have in common), `logprob_mismatch` (trainer against
sampler), `metrics`, `post_step` (what follows the optimizer's step). It may import `training` and all below.
"""
