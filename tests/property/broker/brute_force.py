"""The choice of a batch's groups by trying."""

from functools import cache


def first_exact(rows, weights, target, needs):
    """The first of the rows, in lexicographic order, that weigh `target` and give each environment its need."""

    @cache
    def search(place, missing, owed):
        if missing <= 0 or place == len(rows):
            return [] if missing == 0 and all(need <= 0 for _, need in owed) else None
        paid = tuple((env, need - weights[place] * (env == rows[place].env)) for env, need in owed)
        rest = search(place + 1, missing - weights[place], paid)
        return [rows[place], *rest] if rest is not None else search(place + 1, missing, owed)

    return search(0, target, tuple(needs.items()))


def adds_up(missing, sizes):
    """Whether sizes, in any number, can add up to `missing`."""
    return missing == 0 or any(missing >= size and adds_up(missing - size, sizes) for size in sizes)
