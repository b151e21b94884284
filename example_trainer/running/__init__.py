"""What surrounds a run: trackers, optimizers, the launcher's supervision and progress."""
