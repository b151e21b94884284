"""Chooses a batch's groups by brute force, without code of the broker."""

from functools import cache


def first_exact(rows, weights, target, needs):
    """Return the first rows in lexicographic order that weigh `target` and give each environment its need, or None."""

    @cache
    def search(place, missing, owed):
        if missing <= 0 or place == len(rows):
            return [] if missing == 0 and all(need <= 0 for _, need in owed) else None
        paid = tuple((env, need - weights[place] * (env == rows[place].env)) for env, need in owed)
        rest = search(place + 1, missing - weights[place], paid)
        return [rows[place], *rest] if rest is not None else search(place + 1, missing, owed)

    return search(0, target, tuple(needs.items()))


def adds_up(missing, sizes):
    """Return True if `sizes`, each used any number of times, can add up to `missing`."""
    return missing == 0 or any(missing >= size and adds_up(missing - size, sizes) for size in sizes)
