"""One broker process: the application put together, served, and handed over between processes.

In reading order: `serve` (from a configuration to a listening process), `app` (what the application consists of),
`group_commit` (answers that wait for the disk), `fast_path` (calls made all the time), `standby` (one active broker
per Redis). It may import `routes` and all below.
"""
