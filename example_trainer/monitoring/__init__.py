"""What a run reports while it trains: metrics to trackers (`trackers`), signs of trouble (`health`).

It may import `errors` and the broker's `common`.
"""
