"""Around the optimizer step: the layout a model computes right, alignment with the sampler, what follows a step."""
