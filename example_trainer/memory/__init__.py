"""The memory that a run needs on its GPU, computed from the model's shape and the trainer's options: no torch.

In reading order: `shapes` (the sizes of a model, from its config.json), `budget` (the bytes of one configuration),
`fit` (the nearest configuration that fits a GPU), `preflight` (what trainer and launcher ask before anything is
loaded). It may import `options` and `processes`.
"""
