"""Finds the new groups of each submission for the reference broker, which gets only groups that are not repeats."""

WINDOW_SECONDS = 30


class ExpectedRepeats:
    """Groups are (ident, env, size, version); those of one ident and environment are equal bytes.

    `lost` has the groups that the broker expects again, and until when; `recorded` those of them in its ledger.
    """

    def __init__(self):
        self.keys, self.lost, self.recorded = set(), {}, set()
        self.unsure = []
        """Groups of the last submission without a key, for which no record of the answer exists yet."""
        self.taken = 0

    def fresh(self, groups, key, now):
        if key is not None:
            return [] if key in self.keys else groups
        self.lost = {name: until for name, until in self.lost.items() if until >= now}
        # A repeat is expected until its own answer has been sent.
        self.expected = set(self.lost)
        return [group for group in groups if self.lost.pop(group[:2], None) is None]

    def note(self, groups, fresh, key, *, arrived, now):
        """Record that the `fresh` groups were accepted, and if the answer arrived."""
        if fresh:
            self.keys |= {key} - {None}
            self.recorded = self.expected if key is None else set(self.lost)
            first = self.taken
            self.taken += len(fresh)
            self.unsure = [] if key is not None else [(first + n, group[:2]) for n, group in enumerate(fresh)]
        if key is None and not arrived:
            self.lost |= {group[:2]: now + WINDOW_SECONDS for group in groups}
            self.record()

    def record(self):
        self.recorded = set(self.lost)
        self.unsure = []

    def restart(self, rows, now):
        """Expect repeats of the recorded groups, and of those stored whose answers may not have arrived."""
        places = {row.place for row in rows}
        there = {name for place, name in self.unsure if place in places}
        self.lost = dict.fromkeys(self.recorded | there, now + WINDOW_SECONDS)
        if self.unsure:
            self.record()
