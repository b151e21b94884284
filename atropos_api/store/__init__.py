"""Where groups and the broker's small rows are kept: in memory, or durable in a directory."""
