"""What a step optimises: advantages, ratios, losses and their metrics, as pure torch.

In reading order: `advantages`, `ratios`, `losses`, `metrics`, `objective` (the choice of them for a run, with its
reference policy); `cs336` is the same by the names of Stanford's course. Only `objective` knows a policy. It may
import `model`, `modeling`, `config` and `errors`.
"""
