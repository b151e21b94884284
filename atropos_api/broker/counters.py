"""Totals since the start of the process; `/metrics` shows each under its name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    groups_received_total: int = 0
    sequences_received_total: int = 0
    tokens_received_total: int = 0
    groups_duplicate_total: int = 0
    groups_refused_total: int = 0
    groups_expired_total: int = 0
    groups_orphaned_total: int = 0
    groups_without_version_total: int = 0
    groups_unregistered_total: int = 0
    groups_unpackable_total: int = 0
    groups_left_over_total: int = 0
    groups_lost_total: int = 0
    batches_formed_total: int = 0
    batches_handed_total: int = 0
    batches_committed_total: int = 0
    minima_waived_total: int = 0
    publishes_while_held_total: int = 0
    pressure_total: int = 0
    store_failures_total: int = 0
