"""Reports on a run while it trains: metrics to trackers (`trackers`, `prometheus`), health signs (`health`), and all of
it to the broker, for the page (`broker_reports`).

It may import `errors`, `state`, and the broker's client, contract and `common`.
"""
