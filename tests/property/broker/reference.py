"""A broker as naive as can be, for comparison: one list of groups, loops and brute force, no code of the real one."""

from types import SimpleNamespace as Thing

from brute_force import adds_up, first_exact


class Reference:
    def __init__(self, max_staleness, keep, drop_orphaned, patience):
        self.max_staleness, self.keep, self.drop_orphaned, self.patience = max_staleness, keep, drop_orphaned, patience
        self.now, self.run, self.blocked, self.runs, self.rows, self.envs = 0.0, None, None, [], [], {}

    def register(self, env, size, minimum):
        if self.run and not self.fills(size, {*self.sizes(), size}):
            return False
        self.envs[env] = Thing(size=size, minimum=minimum or 0, run=None)
        return self.touch(env) or True

    def touch(self, env):
        if known := self.envs.get(env):
            known.seen, known.connected, known.run = self.now, True, self.run or known.run

    def sizes(self):
        return {env.size for env in self.envs.values() if env.connected}

    def fills(self, size, others):
        left = self.run.size - size
        return self.run.unit == "groups" or (left >= 0 and adds_up(left, others))

    def take(self, groups):
        for ident, env, size, said in groups:
            run = self.run or (self.envs[env].run if env in self.envs else None)
            version = self.run.version if said is None and self.run else said
            home = run if run and run.state != "closed" else None
            self.rows.append(Thing(ident=ident, env=env, size=size, version=version, run=home, batch=0))

    def members(self, number=0):
        return [row for row in self.rows if row.run is self.run and row.batch == number]

    def batches(self, above=0):
        return sorted({row.batch for row in self.rows if row.run is self.run and row.batch > above})

    def formed(self):
        return max([self.run.committed, *self.batches()])

    def measure(self, rows):
        return sum(row.size for row in rows) if self.run.unit == "sequences" else len(rows)

    def begin(self, name, size, unit="sequences", legacy=False):
        run = Thing(name=name, size=size, unit=unit, legacy=legacy, committed=0, epoch=0, handed=0, delivered=False)
        run.step, run.version, run.steps, run.orphans = None, None, {}, set()
        self.runs.append(run)
        self.open(run)

    def open(self, run):
        if run is not self.run:
            self.close("closed")
        self.run, run.state, run.epoch, self.blocked = run, "open", run.epoch + 1, None
        for row in self.rows:
            row.run = row.run or run

    def close(self, end):
        if self.run:
            keeps = end == "closed" and not self.run.legacy
            self.drop([row for row in self.members() if not keeps and not self.usable(row)])
            self.run.state, self.run = end, None

    def drop(self, rows):
        for row in rows:
            row.run = "gone"

    def usable(self, row):
        return self.fills(row.size, {*self.sizes(), *(other.size for other in self.members())})

    def resume(self, run, size, unit, point):
        self.open(run)
        self.commit(min(point, self.formed()))
        run.size, run.unit, run.committed = size, unit, point
        self.dissolve()
        run.orphans |= {version for version, step in run.steps.items() if step > point}
        run.step = None if run.step is None else min(run.step, point)

    def dissolve(self):
        fits = self.run.committed
        while self.measure(self.members(fits + 1)) == self.run.size:
            fits += 1
        for row in self.rows:
            row.batch = 0 if row.run is self.run and row.batch > fits else row.batch

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
            queue = self.members()
            for place in self.choose(queue) or ():
                queue[place].batch = number
        return [row.ident for row in self.members(number)] or None

    def choose(self, queue):
        def first(needs):
            return first_exact([self.measure([row]) for row in queue], [row.env for row in queue], self.run.size, needs)

        alive = {n: env for n, env in self.envs.items() if env.connected and self.now - env.seen <= 60}
        needs = {n: int(self.run.size * env.minimum) for n, env in alive.items()}
        scale = max(1.0, sum(needs.values()) / self.run.size)
        needs = {n: int(need / scale) for n, need in needs.items() if int(need / scale)}
        best, without = first(needs), first({})
        since, self.blocked = self.now if self.blocked is None else self.blocked, None
        if best or not without:
            return best
        if self.now - since < self.patience:
            self.blocked = since
            return None
        had = {n: self.measure([row for row in queue if row.env == n]) for n in needs}
        return first({n: need for n, need in needs.items() if had[n] >= need}) or without

    def commit(self, number):
        if number > self.run.committed:
            self.run.committed = number
            self.drop([row for n in self.batches() if n <= number - self.keep for row in self.members(n)])

    def outstanding(self):
        trained = self.run.committed if self.run.legacy else max(self.run.step or 0, self.run.committed)
        batched = [row for n in self.batches(trained) for row in self.members(n)]
        return sum(row.size for row in batched + [row for row in self.members() if self.usable(row)])
