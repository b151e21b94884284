"""The objective that a step optimises: advantages, ratios, losses and their metrics, as pure torch.

In reading order: `advantages`, `ratios`, `kl_divergence` (its estimators and controller, and distillation),
`surrogates`, `losses`, `sampling_masks` (logprobs under top-p or like sampling), `metrics`, `objective` (a run's
selection of these) with `reference_policy`; `cs336` has the same under the names of Stanford's course. Only `objective`
and `reference_policy` use a policy. It may import `model`, `modeling`, `options`, `state` and `errors`.
"""
