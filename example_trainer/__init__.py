"""The trainer, its inference server and the launcher."""
