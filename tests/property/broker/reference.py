"""A naive broker for comparison: lists, loops and brute force, without code of the real one."""

from functools import partial
from itertools import count
from types import SimpleNamespace as Thing

from brute_force import adds_up, first_exact


def by_arrival(rows):
    return sorted(rows, key=lambda row: row.place)


class Reference:
    """Runs with a queue in order of arrival, and their batches by number, including those kept for replay.

    Version -1 stands for none: it is older than all.
    """

    def __init__(self, max_staleness, keep, drop_orphaned, patience):
        self.max_staleness, self.keep, self.drop_orphaned, self.patience = max_staleness, keep, drop_orphaned, patience
        self.now, self.run, self.blocked_since, self.places = 0.0, None, None, count()
        self.runs, self.envs, self.homeless = [], {}, []

    def register(self, env, size, minimum):
        self.envs[env] = Thing(size=size, minimum=minimum or 0, run=None)
        self.touch(env)

    def touch(self, env):
        if known := self.envs.get(env):
            known.seen, known.connected, known.run = self.now, True, self.run or known.run

    def usable(self, size, queue):
        """Return True if groups of this size fill a batch together with sizes that are queued or registered."""
        sizes = {size, *(row.size for row in queue), *(env.size for env in self.envs.values() if env.connected)}
        return self.run.unit == "groups" or adds_up(self.run.size - size, sizes)

    def take(self, groups):
        for ident, env, size, said in groups:
            run = self.run or (self.envs[env].run if env in self.envs else None)
            home = run.queue if run and run.state != "closed" else self.homeless
            version = said if said is not None else self.run.version if self.run else -1
            home.append(Thing(place=next(self.places), ident=ident, env=env, size=size, version=version))

    def begin(self, name, size, unit="sequences", legacy=False):
        run = Thing(name=name, size=size, unit=unit, legacy=legacy, committed=0, epoch=0, handed=0, delivered=False)
        run.longest, run.total = 0.0, 0
        run.queue, run.batches, run.steps, run.orphans, run.step, run.version = [], {}, {}, set(), None, -1
        self.runs.append(run)
        self.open(run)

    def open(self, run):
        self.close("closed")
        self.run, run.state, run.epoch, self.blocked_since = run, "open", run.epoch + 1, None
        run.heard = self.now
        run.queue, self.homeless = by_arrival(run.queue + self.homeless), []

    def call(self, *, named=True):
        """Record a call of the trainer."""
        run = self.run
        if named or not self.gone(run):
            run.longest, run.heard = max(run.longest, self.now - run.heard), self.now

    def at_work(self, run, least=30):
        return self.now - run.heard <= max(least, 3 * run.longest)

    def gone(self, run):
        return not self.at_work(run, least=900)

    def over(self, run):
        return run.legacy and run.delivered and 0 < run.total <= run.handed

    def refuses_another(self):
        return self.run is not None and self.at_work(self.run) and not self.over(self.run)

    def close(self, end):
        if run := self.run:
            if end == "finished" or run.legacy:
                run.queue = [row for row in run.queue if self.usable(row.size, run.queue)]
            run.state, self.run = end, None

    def resume(self, run, size, unit, point):
        self.open(run)
        self.commit(min(point, self.formed()))
        run.size, run.unit, run.committed = size, unit, point
        self.dissolve()
        run.orphans |= {version for version, step in run.steps.items() if step > point and self.drop_orphaned}
        run.step = None if run.step is None else min(run.step, point)

    def dissolve(self):
        run = self.run
        last = next(n for n in count(run.committed) if self.weigh(run.batches.get(n + 1, [])) != run.size)
        for number in [n for n in run.batches if n > last]:
            run.queue = by_arrival(run.queue + run.batches.pop(number))

    def formed(self):
        return max([self.run.committed, *self.run.batches])

    def weigh(self, rows):
        return sum(row.size for row in rows) if self.run.unit == "sequences" else len(rows)

    def policy(self, version, step):
        run = self.run
        if version not in run.steps or (version == run.version and step > run.step):
            run.steps.setdefault(version, step)
            run.version, run.step = version, step
            self.expire(self.formed() + 1)

    def expire(self, upcoming):
        run, now = self.run, max(self.run.step or 0, upcoming - 1)

        def is_fresh(row):
            step = run.steps.get(row.version, run.step if row.version > run.version else None)
            return row.version not in run.orphans and (step is None or now - step <= self.max_staleness)

        run.queue = [row for row in run.queue if is_fresh(row)]

    def batch(self, number):
        run = self.run
        if number not in run.batches:
            self.expire(number)
            if chosen := self.choose(run):
                run.batches[number] = chosen
                run.queue = [row for row in run.queue if row not in chosen]
        return [row.ident for row in run.batches.get(number, [])] or None

    def choose(self, run):
        first = partial(first_exact, run.queue, [self.weigh([row]) for row in run.queue], run.size)
        alive = {n: env for n, env in self.envs.items() if env.connected and self.now - env.seen <= 60}
        scale = max(1.0, sum(int(run.size * env.minimum) for env in alive.values()) / run.size)
        needs = {n: int(int(run.size * env.minimum) / scale) for n, env in alive.items()}
        best, without = first(needs), first({})
        if without and not best:
            self.blocked_since = self.blocked_since or self.now
            if self.now - self.blocked_since < self.patience:
                return None
            had = {n: self.weigh([row for row in run.queue if row.env == n]) for n in needs}
            due = {}
            for n in sorted(needs, key=lambda n: (had[n] < needs[n], n)):
                most = min(needs[n], had[n])
                due[n] = next(need for need in range(most, -1, -1) if first({**due, n: need}))
            best = first(due)
        self.blocked_since = None
        return best

    def commit(self, number):
        if number > self.run.committed:
            self.run.committed = number
            self.run.batches = {n: rows for n, rows in self.run.batches.items() if n > number - self.keep}

    def outstanding(self):
        run = self.run
        trained = run.committed if run.legacy else max(run.step or 0, run.committed)
        batched = [row for n, rows in run.batches.items() if n > trained for row in rows]
        return sum(row.size for row in batched + [row for row in run.queue if self.usable(row.size, run.queue)])
