"""A broker as naive as can be, for comparison: one list of groups, loops and brute force, no code of the real one.

This one knows runs, batches and policies; `reference_rules` adds environments and the Atropos contract.
"""

from types import SimpleNamespace

from brute_force import first_exact


class Reference:
    def __init__(self, max_staleness, keep, drop_orphaned):
        self.max_staleness, self.keep, self.drop_orphaned = max_staleness, keep, drop_orphaned
        self.now, self.run, self.runs, self.rows, self.keys = 0.0, None, [], [], set()

    def submit(self, groups, key, late_for=None):
        """Late: of an environment whose run has ended."""
        if key in self.keys:
            return 0
        self.keys |= {key} - {None}
        for ident, env, size, version in groups:
            row = SimpleNamespace(ident=ident, env=env, size=size, version=version, run=self.run or late_for, batch=0)
            row.keyed = key is not None
            row.version = self.run.version if version is None and self.run else version
            self.rows.append(row)
        return len(groups)

    def members(self, number=0):
        return [row for row in self.rows if row.run is self.run and row.batch == number]

    def batches(self, above=0):
        return sorted({row.batch for row in self.rows if row.run is self.run and row.batch > above})

    def formed(self):
        return max([self.run.committed, *self.batches()])

    def begin(self, name, size, unit="sequences", legacy=False):
        run = SimpleNamespace(name=name, size=size, unit=unit, legacy=legacy, committed=0, epoch=0)
        run.step, run.version, run.steps, run.orphans = None, None, {}, set()
        self.runs.append(run)
        self.open(run)

    def open(self, run):
        if run is not self.run:
            self.close("closed")
        self.run, run.state, run.epoch = run, "open", run.epoch + 1
        for row in self.rows:
            row.run = run if row.run is None else row.run

    def close(self, end):
        if self.run:
            self.run.state, self.run = end, None

    def drop(self, rows):
        for row in rows:
            row.run = "gone"

    def resume(self, run, size, unit, point):
        self.open(run)
        self.commit(min(point, self.formed()))
        run.size, run.unit, run.committed, fits = size, unit, point, point
        while self.measure(self.members(fits + 1)) == size:
            fits += 1
        self.dissolve(fits)
        run.orphans |= {version for version, step in run.steps.items() if step > point}
        run.step = None if run.step is None else min(run.step, point)

    def dissolve(self, above):
        for row in self.rows:
            row.batch = 0 if row.run is self.run and row.batch > above else row.batch

    def measure(self, rows):
        return sum(row.size for row in rows) if self.run.unit == "sequences" else len(rows)

    def policy(self, version, step):
        run = self.run
        if version not in run.steps:
            run.steps[version], run.version, run.step = step, version, step
        elif version == run.version and step > (run.step or 0):
            run.step = step
        else:
            return
        self.expire(self.formed() + 1)

    def expire(self, upcoming):
        run, now = self.run, max(self.run.step or 0, upcoming - 1)
        for row in self.members():
            later = row.version is not None and run.version is not None and row.version > run.version
            step = run.steps.get(row.version, run.step if later else None)
            old = self.max_staleness is not None and step is not None and now - step > self.max_staleness
            self.drop([row] if old or (self.drop_orphaned and row.version in run.orphans) else [])

    def batch(self, number):
        if number > self.formed():
            self.expire(number)
            chosen, queue = self.choose() or (), self.members()
            for place in chosen:
                queue[place].batch = number
        return [row.ident for row in self.members(number)] or None

    def choose(self, needs=()):
        queue = self.members()
        return first_exact([self.measure([row]) for row in queue], [row.env for row in queue], self.run.size, needs)

    def commit(self, number):
        if number > self.run.committed:
            self.run.committed = number
            self.drop([row for n in self.batches() if n <= number - self.keep for row in self.members(n)])
