"""How often a sync is proven (`--sync-check`): the first to each start of a server always, then every Nth."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SyncCheck:
    """Counts publishes from one proof to the next."""

    every: int
    """0: none is due."""
    _since: int = field(default=0, init=False)

    def is_due(self) -> bool:
        """Whether the publish just made is to be proven; call it once a publish."""
        self._since += 1
        if self.every == 0 or self._since < self.every:
            return False
        self._since = 0
        return True
