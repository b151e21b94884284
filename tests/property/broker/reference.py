"""A broker as naive as can be, for comparison: lists, loops and brute force, sharing no code with the real one."""


class Reference:
    def __init__(self, max_staleness, sizes):
        self.max_staleness, self.sizes = max_staleness, sizes
        self.pending, self.left_over, self.keys = [], {}, set()
        self.run = None
        self.runs = {}

    def submit(self, ident, env, size, version, key):
        if (env, key) in self.keys:
            return 0
        self.keys.add((env, key))
        current = self.run["version"] if self.run else None
        row = (ident, env, size, version if version is not None else current)
        (self.run["queue"] if self.run else self.pending).append(row)
        return 1

    def begin(self, name, batch_size):
        self.close()
        self.run = {"name": name, "size": batch_size, "queue": self.pending, "batches": {}, "committed": 0, "epoch": 1}
        self.run |= {"step": None, "version": None, "steps": {}}
        self.runs[name] = self.run
        self.pending = []

    def close(self):
        self.run = None

    def resume(self, name, batch_size, point):
        if self.run is None or self.run["name"] != name:
            self.close()
            self.run = self.runs[name]
            self.run["queue"] = sorted(self.run["queue"] + self.pending)
            self.pending = []
        run = self.run
        run["epoch"] += 1
        run["batches"] = {n: rows for n, rows in run["batches"].items() if n > point}
        if point < run["committed"]:
            fits = 0
        else:
            fits = point
            while sum(row[2] for row in run["batches"].get(fits + 1, [])) == batch_size:
                fits += 1
        for number in sorted(run["batches"]):
            if number > fits:
                run["queue"] = sorted(run["queue"] + run["batches"].pop(number))
        run["size"], run["committed"] = batch_size, point
        if run["step"] is not None:
            run["step"] = min(run["step"], point)

    def policy(self, version, step):
        self.run["version"], self.run["step"] = version, step
        self.run["steps"][version] = step
        self.expire(max([self.run["committed"], *self.run["batches"]]) + 1)

    def expire(self, upcoming):
        run = self.run
        now = max(run["step"] or 0, upcoming - 1)
        if self.max_staleness is None:
            return
        run["queue"] = [
            row
            for row in run["queue"]
            if row[3] not in run["steps"] or now - run["steps"][row[3]] <= self.max_staleness
        ]

    def batch(self, number):
        run = self.run
        if number in run["batches"]:
            return run["batches"][number]
        self.expire(number)
        chosen = first_exact(run["queue"], run["size"])
        if chosen is None:
            return None
        run["queue"] = [row for row in run["queue"] if row not in chosen]
        run["batches"][number] = chosen
        return chosen

    def commit(self, number):
        self.run["committed"] = max(number, self.run["committed"])
        self.run["batches"] = {n: rows for n, rows in self.run["batches"].items() if n > number}


def first_exact(rows, missing):
    """The first subset in lexicographic order of arrival that adds up to `missing`, by trying."""
    if missing == 0:
        return []
    for place, row in enumerate(rows):
        if row[2] <= missing:
            rest = first_exact(rows[place + 1 :], missing - row[2])
            if rest is not None:
                return [row, *rest]
    return None
