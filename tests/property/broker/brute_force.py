"""The choice of a batch's groups by trying."""

from functools import cache


def first_exact(weights, owners, target, needs):
    """Places of the first subset in lexicographic order that adds up to `target` and gives each owner its need."""

    @cache
    def search(place, missing, owed):
        if missing <= 0 or place == len(weights):
            return () if missing == 0 and not any(need > 0 for _, need in owed) else None
        paid = tuple((owner, need - weights[place] * (owner == owners[place])) for owner, need in owed)
        rest = search(place + 1, missing - weights[place], paid)
        return (place, *rest) if rest is not None else search(place + 1, missing, owed)

    return search(0, target, tuple(dict(needs).items()))


def adds_up(missing, sizes):
    """Whether sizes, in any number, can add up to `missing`."""
    return missing == 0 or any(missing >= size and adds_up(missing - size, sizes) for size in sizes)
