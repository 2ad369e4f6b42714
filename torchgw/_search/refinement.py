"""A match of two tables that are the same but for order, where many of their points look alike.

Points are put into classes by their weights, and classes are split by random sums over the table,
which are the same for points that see the same classes alike. If no class splits any more, a point
is taken for the partner of the first of its class on the other side with which both sides still
split alike, and these two have a class of their own. A wrong partner may be taken where that shows
later only, so that the match has to be checked.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from torchgw._search.graphs import is_sparse

# Sums count as the same if they differ by at most this share of their spread over random numbers.
# A choice. [L1273]
_ROUNDING = 1e-6
# Rounds at most, and entries that they read. [L1273]
_MOST_ROUNDS, _MOST_ENTRIES = 5_000, 5e9


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
    classes = _split(a.new_zeros(2 * n, dtype=torch.int64), torch.cat([a, b]), _ROUNDING / n)
    classes = None if classes is None else _refined(tables, classes, rounds)
    while classes is not None and (count := int(classes.max()) + 1) < n:
        # the first of the smallest class of several points
        sizes = torch.bincount(classes[:n])
        chosen = int(sizes.where(sizes > 1, n + 1).argmin())
        point, *_ = (classes[:n] == chosen).nonzero()[:, 0].tolist()
        found = None
        for other in (classes[n:] == chosen).nonzero()[:, 0].tolist():
            both = classes.clone()
            both[[point, n + other]] = count
            found = _refined(tables, both, rounds)
            if found is not None:
                break
        classes = found
    return None if classes is None else classes[n:].argsort()[classes[:n]]


def _refined(tables: list[Tensor], classes: Tensor, rounds: Iterator[int]) -> Tensor | None:
    """Split classes until none splits; ``None`` where sides differ, or no rounds are left."""
    n, count = len(classes) // 2, 0
    # of a sum of so many numbers
    size = float(tables[0].square().sum().sqrt()) / n**0.5
    for number in rounds:
        latest = int(classes.max()) + 1
        if latest in (count, n):
            return classes
        count = latest
        generator = torch.Generator().manual_seed(number)
        numbers = torch.randn(count, dtype=torch.float64, generator=generator).to(classes.device)
        known = numbers[classes].view(2, n, 1)
        sums = torch.cat([table @ side for table, side in zip(tables, known, strict=True)])
        found = _split(classes, sums[:, 0], _ROUNDING * size)
        if found is None:
            return None
        classes = found
    return None


def _split(classes: Tensor, values: Tensor, least: float) -> Tensor | None:
    """Split classes of points of both sides by values, (2n,); ``None`` where the sides differ."""
    order = values.argsort()
    order = order[classes[order].argsort(stable=True)]
    begins = (classes[order].diff() > 0) | (values[order].diff() > least)
    found = torch.empty_like(classes)
    found[order] = torch.cat([begins.new_zeros(1), begins]).cumsum(0)
    sides = [torch.bincount(side, minlength=int(found.max()) + 1) for side in found.chunk(2)]
    return found if bool((sides[0] == sides[1]).all()) else None
