"""The naive reference with environments, minima, unpackable groups and the Atropos contract."""

from types import SimpleNamespace

from brute_force import adds_up
from reference import Reference

PATIENCE_SECONDS = 30.0


class FullReference(Reference):
    def __init__(self, *limits):
        super().__init__(*limits)
        self.envs, self.blocked, self.lost, self.answered, self.recorded = {}, None, {}, 0, 0

    def register(self, env, size, minimum):
        left = self.run.size - size if self.run and self.run.unit == "sequences" else 0
        if left < 0 or not adds_up(left, {*self.sizes(), size}):
            return False
        self.envs[env] = SimpleNamespace(size=size, minimum=minimum, run=None)
        self.touch(env)
        return True

    def touch(self, env):
        if env in self.envs:
            known = self.envs[env]
            known.seen, known.connected, known.run = self.now, True, self.run or known.run

    def sizes(self):
        return {env.size for env in self.envs.values() if env.connected}

    def submit_of(self, groups, key, *, legacy, answered=True):
        """A group is (ident, env, size, version). Without a key, repeats of what got no answer are recognised."""
        env = groups[0][1]
        fresh = [g for g in groups if not (key is None and self.lost.pop(g[:2], -1) >= self.now)]
        if not legacy or (fresh and key not in self.keys):
            self.touch(env)
        took_part = self.envs[env].run if env in self.envs else None
        taken = self.submit(fresh, key, took_part if took_part and took_part.state == "finished" else None)
        if taken:
            self.recorded = self.answered
        if legacy or key is None:
            self.answered = len(self.rows)
        if legacy and key is None and not answered:
            self.lost |= {g[:2]: self.now + 30 for g in groups}
        return taken

    def restart(self):
        """That a submission was answered is recorded with the next; until then nobody knows."""
        self.blocked, self.answered = None, self.recorded
        for env in self.envs.values():
            env.seen = self.now
        unsure = [row for row in self.rows[self.recorded :] if row.run != "gone" and not row.keyed]
        self.lost = {(row.ident, row.env): self.now + 30 for row in unsure}

    def open(self, run):
        super().open(run)
        self.blocked = None

    def close(self, end):
        if self.run and (self.run.legacy or end == "finished"):
            self.drop([row for row in self.members() if not self.usable(row)])
        super().close(end)

    def reset(self):
        self.drop([row for row in self.rows if row.run is None and self.run is None])
        self.close("closed")
        for env in self.envs.values():
            env.connected = False

    def usable(self, row):
        known = {*self.sizes(), *(other.size for other in self.members())}
        left = self.run.size - row.size
        return self.run.unit == "groups" or (left >= 0 and adds_up(left, known))

    def outstanding(self):
        trained = self.run.committed if self.run.legacy else max(self.run.step or 0, self.run.committed)
        batched = [row for n in self.batches(trained) for row in self.members(n)]
        return sum(row.size for row in batched + [row for row in self.members() if self.usable(row)])

    def choose(self, needs=()):
        alive = {n: env for n, env in self.envs.items() if env.connected and self.now - env.seen <= 60}
        needs = {n: int(self.run.size * (env.minimum or 0)) for n, env in alive.items()}
        scale = max(1.0, sum(needs.values()) / self.run.size)
        needs = {n: int(need / scale) for n, need in needs.items() if int(need / scale)}
        best, without = super().choose(needs), super().choose()
        since, self.blocked = self.now if self.blocked is None else self.blocked, None
        if best or not without:
            return best
        if self.now - since < PATIENCE_SECONDS:
            self.blocked = since
            return None
        had = {n: self.measure([row for row in self.members() if row.env == n]) for n in needs}
        return super().choose({n: need for n, need in needs.items() if had[n] >= need}) or without

    def next_batch(self, delivered):
        """`GET /batch`: commit what was delivered, hand out the next."""
        if getattr(self.run, "delivered", False):
            self.commit(self.run.handed)
        found = self.batch(self.run.committed + 1)
        if found:
            self.run.handed, self.run.delivered = self.run.committed + 1, delivered
        return found

    def reconnect(self, size):
        self.run.size, self.run.delivered = size, False
        self.dissolve(self.run.committed + (self.measure(self.members(self.run.committed + 1)) == size))
