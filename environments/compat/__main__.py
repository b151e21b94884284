"""Runs `python -m environments.compat FILE VERB [flags]`, the same as `atropos-compat` where that is not installed."""

from environments.compat.runner import main

main()
