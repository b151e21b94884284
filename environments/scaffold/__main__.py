"""Runs `python -m environments.scaffold NAME`, for machines where the command `atropos` is not installed."""

from atropos_api.common.cliconfig import run_cli
from environments.scaffold import run

run_cli(run)
