"""Which groups of a submission are news, kept beside the reference: that one is only told of those that are."""

WINDOW_SECONDS = 30


class ExpectedRepeats:
    """Groups are (ident, env, size, version); those of one ident and environment are equal bytes."""

    def __init__(self):
        self.keys, self.lost = set(), {}
        self.keyed = []
        """Of each group taken, in order of arrival."""
        self.answered = self.recorded = 0

    def news(self, groups, key, now):
        if key is not None:
            return [] if key in self.keys else groups
        return [group for group in groups if self.lost.pop(group[:2], -1) < now]

    def note(self, groups, taken, key, *, arrived, now):
        """So many of the groups were taken, and the answer arrived or did not."""
        if taken:
            self.keys |= {key} - {None}
            # That a submission was answered is recorded with the next one.
            self.recorded = self.answered
            self.keyed += [key is not None] * taken
        self.answered = len(self.keyed)
        if key is None and not arrived:
            self.lost |= {group[:2]: now + WINDOW_SECONDS for group in groups}

    def restart(self, rows, now):
        """Of what came after the last record nobody knows whether it was answered."""
        self.answered = self.recorded
        unsure = [row for row, keyed in list(zip(rows, self.keyed, strict=True))[self.recorded :] if not keyed]
        self.lost = {(row.ident, row.env): now + WINDOW_SECONDS for row in unsure if row.run != "gone"}
