"""Tables that are the same but for order: a match of two, or an order that both of them have.

Points are put into classes by their weights, and classes are split by random sums over the table,
which are the same for points that see the same classes alike. If no class splits any more, a point
is taken for the partner of the first of its class on the other side with which both sides still
split alike, and these two have a class of their own. A wrong partner may be taken where that shows
later only, so that the match has to be checked.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchgw._search.graphs import is_sparse

# Sums count as the same if they differ by at most this share of their spread over random numbers.
# A choice. [L1273]
ROUNDING = 1e-6
# Rounds at most, and entries that they read: of a match, and of an order. [L1273, L1331]
_MOST_ROUNDS, _MOST_ENTRIES, _TO_ORDER = 5_000, 5e9, 2e8

# Random sums over a row that tell it from others. A choice. [L1331]
_SUMS = 3


def match_by_classes(near: Tensor, far: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
    """Match the points of two tables (n, n) of weights (n,), (n,); ``None`` if none is found.

    References
    ----------
    B. D. McKay, A. Piperno. Practical graph isomorphism, II. Journal of Symbolic Computation 2014.
    """
    n = len(a)
    tables = [table.to_sparse() if is_sparse(table) else table for table in (near, far)]
    read = sum(table._nnz() if table.is_sparse else table.numel() for table in tables)
    rounds = iter(range(int(min(_MOST_ROUNDS, _MOST_ENTRIES / max(1, read)))))
    first = split(a.new_zeros(2 * n, dtype=torch.int64), torch.cat([a, b]), ROUNDING / n)
    classes = refined(tables, first, rounds)
    while classes is not None and (count := int(classes.max()) + 1) < n:
        # the first of the smallest class of several points
        sizes = torch.bincount(classes[:n])
        chosen = int(sizes.where(sizes > 1, n + 1).argmin())
        point, *_ = (classes[:n] == chosen).nonzero()[:, 0].tolist()
        found = None
        for other in (classes[n:] == chosen).nonzero()[:, 0].tolist():
            both = classes.clone()
            both[[point, n + other]] = count
            found = refined(tables, both, rounds)
            if found is not None:
                break
        classes = found
    return None if classes is None else classes[n:].argsort()[classes[:n]]


def put_in_order(table: Tensor, classes: Tensor) -> Tensor:
    """Order the points of a table (n, n), and of classes (n,), by what they are among the others.

    A table in another order gets the same order of its points, but for points that no automorphism
    tells apart; a rounding may do so for others that look alike.
    """
    rounds = iter(range(max(1, int(_TO_ORDER / table.numel()))))
    found, copies = refined([table], classes, rounds), list[Tensor]()
    while found is not None and int(found.max()) + 1 < len(found):
        classes = found
        copies = copies or _interchangeable(table)
        tied = _first_tied(classes, copies)
        if tied is None:
            break
        found = classes.clone()
        found[tied] = int(classes.max()) + 1
        found = refined([table], found, rounds)
    return (classes if found is None else found).argsort(stable=True)


def _interchangeable(table: Tensor) -> list[Tensor]:
    """Give points one number that see all others alike, in two ways.

    They are at no distance from each other, or at the least distance that there is.
    """
    near = float(table.clone().fill_diagonal_(torch.inf).amin())
    return [find_copies([each]) for each in (table, table.clone().fill_diagonal_(near))]


def find_copies(tables: Sequence[Tensor]) -> Tensor:
    """Give points one number, (n,), whose rows are the same in all of some tables (n, k)."""
    generator = torch.Generator("cpu").manual_seed(0)
    found = torch.zeros(len(tables[0]), dtype=torch.int64, device=tables[0].device)
    for table in tables:
        least = ROUNDING * float(table.square().sum().sqrt()) / len(table) ** 0.5
        # one sum may be the same by chance
        for _ in range(_SUMS):
            drawn = torch.randn(
                table.shape[1], dtype=table.dtype, device="cpu", generator=generator
            )
            found = split(found, table @ drawn, least)
    return found


def _first_tied(classes: Tensor, copies: Sequence[Tensor]) -> int | None:
    """Choose the first point of the smallest class of points that are not copies of each other."""
    kinds = classes.new_full((int(classes.max()) + 1,), len(classes))
    for numbers in copies:
        pairs = (classes * len(classes) + numbers).unique()
        kinds = torch.minimum(kinds, torch.bincount(pairs // len(classes)))
    chosen = int(kinds.where(kinds > 1, len(classes) + 1).argmin())
    return int((classes == chosen).byte().argmax()) if int(kinds[chosen]) > 1 else None


def refined(tables: Sequence[Tensor], classes: Tensor, rounds: Iterator[int]) -> Tensor | None:
    """Split classes of the points of tables until none splits.

    ``None`` where the tables differ, or no rounds are left.
    """
    sides, count = len(tables), 0
    n = len(classes) // sides
    # of a sum of so many numbers
    size = float(tables[0].square().sum().sqrt()) / n**0.5
    for number in rounds:
        if not _same_sizes(classes.chunk(sides)):
            return None
        latest = int(classes.max()) + 1
        if latest in (count, n):
            return classes
        count = latest
        generator = torch.Generator("cpu").manual_seed(number)
        numbers = torch.randn(count, dtype=torch.float64, device="cpu", generator=generator).to(
            classes.device
        )
        known = numbers[classes].view(sides, n, 1)
        sums = torch.cat([table @ side for table, side in zip(tables, known, strict=True)])
        classes = split(classes, sums[:, 0], ROUNDING * size)
    return None


def split(classes: Tensor, values: Tensor, least: float) -> Tensor:
    """Split classes of points by their values, which differ if they are further apart."""
    order = values.argsort()
    order = order[classes[order].argsort(stable=True)]
    begins = (classes[order].diff() > 0) | (values[order].diff() > least)
    found = torch.empty_like(classes)
    found[order] = torch.cat([begins.new_zeros(1), begins]).cumsum(0)
    return found


def _same_sizes(sides: Sequence[Tensor]) -> bool:
    """Whether classes have as many points on each side."""
    count = 1 + max(int(side.max()) for side in sides)
    first, *others = (torch.bincount(side, minlength=count) for side in sides)
    return all(bool((first == other).all()) for other in others)
