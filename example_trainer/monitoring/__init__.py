"""Reports on a run while it trains: metrics to trackers (`trackers`), health signs (`health`).

It may import `errors` and the broker's `common`.
"""
