"""Sparse networks against copies that have lost edges: ``python -m benchmarks networks``.

The protocol of cuGAL: a share p of the edges of one side is lost, the other is whole and in another
order. Euroroad, netscience, highschool and voles are read from the data folder; the others are
drawn with as many nodes and edges as networks that are not there: an email network (arenas),
collaborations (CA-GrQc), a power grid and protein interactions (dmela). A table is printed, with
the share of the nodes and the seconds that were published; a match that keeps as many edges as the
truth is as good as that, whatever share of the nodes it has right.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import minimum_spanning_tree
from scipy.spatial import cKDTree

import torchgw
from benchmarks.harness.measure import synchronize
from benchmarks.quality.networks import MissingDataError
from benchmarks.quality.real import read_data
from torchgw._boundary.arrays import to_numpy

__all__ = ["DRAWN", "Pair", "main", "pairs"]

Generator = np.random.Generator
Array = np.ndarray[Any, Any]


class Pair(NamedTuple):
    """A network that has lost edges, and the whole one."""

    name: str
    n: int
    fewer: Array  # (2, e)
    whole: Array  # (2, e)
    asked: float = float("nan")  # share of the nodes that is to be right, as published
    seconds: float = float("nan")  # that were published, of another GPU


def _by_weight(g: Generator, n: int, edges: int, power: float) -> Array:
    """Join all nodes by a tree that grows by weight, then pairs drawn by weight."""
    weight = (1 + np.arange(n)) ** -power
    known = {(int(g.choice(i, p=weight[:i] / weight[:i].sum())), i) for i in range(1, n)}
    while len(known) < edges:
        some = g.choice(n, size=(edges, 2), p=weight / weight.sum())
        for low, high in np.sort(some, axis=1).tolist():
            if low != high and len(known) < edges:
                known.add((low, high))
    return np.array(sorted(known)).T


def email(g: Generator, n: int = 1_133, edges: int = 5_451) -> Array:
    """Half of the edges close triangles, as in messages between people."""
    known = set(map(tuple, _by_weight(g, n, (n + edges) // 2, 0.4).T.tolist()))
    beside: list[list[int]] = [[] for _ in range(n)]
    for one, other in known:
        beside[one].append(other)
        beside[other].append(one)
    while len(known) < edges:
        ends = beside[int(g.integers(n))]
        if len(ends) > 1:
            low, high = np.sort(g.choice(ends, 2, replace=False)).tolist()
            if (low, high) not in known:
                known.add((low, high))
                beside[low].append(high)
                beside[high].append(low)
    return np.array(sorted(known)).T


def collaborations(g: Generator, n: int = 4_158, edges: int = 13_422) -> Array:
    """All authors of a paper are joined; papers have two or more, one of them known before."""
    known: set[tuple[int, int]] = set()
    written, fresh = [0], 1
    while len(known) + max(0, n - fresh) < edges:
        authors = {written[int(g.integers(len(written)))]}
        for _ in range(1 + int(g.geometric(0.4))):
            new = fresh < n and g.random() < 0.55
            authors.add(fresh if new else written[int(g.integers(len(written)))])
            fresh += new
        written += authors
        known |= {(i, j) for i in authors for j in authors if i < j}
    # those who have written nothing join somebody
    known |= {(int(g.integers(i)), i) for i in range(fresh, n)}
    return np.array(sorted(known)).T


def power_grid(g: Generator, n: int = 4_941, edges: int = 6_594) -> Array:
    """Places in the plane, joined by the shortest tree and then by the shortest other lines."""
    points = g.random((n, 2))
    length, near = cKDTree(points).query(points, k=12)
    rows = np.repeat(np.arange(n), 11)
    lines = coo_array((length[:, 1:].ravel(), (rows, near[:, 1:].ravel())), shape=(n, n))
    tree = minimum_spanning_tree(lines.tocsr()).tocoo()
    known = {(min(e), max(e)) for e in zip(tree.row.tolist(), tree.col.tolist(), strict=True)}
    for place in length[:, 1:].ravel().argsort():
        if len(known) >= edges:
            break
        # some of them only: lines cost
        if g.random() < 0.3:
            known.add(tuple(sorted((int(rows[place]), int(near[:, 1:].ravel()[place])))))
    return np.array(sorted(known)).T


def proteins(g: Generator, n: int = 7_393, edges: int = 25_569) -> Array:
    """Degrees of a power law, as of interactions between proteins."""
    return _by_weight(g, n, edges, 0.55)


_UNKNOWN = float("nan")
# Networks that are drawn, with the shares of nodes that were published for those they stand for, of
# 10 and 20% of the edges lost, and the seconds.
DRAWN: dict[str, tuple[Callable[[Generator], Array], float, float, float]] = {
    "email": (email, 0.955, 0.932, _UNKNOWN),
    "collaborations": (collaborations, 0.73, 0.66, _UNKNOWN),
    "power grid": (power_grid, 0.78, 0.45, 25.0), "proteins": (proteins, 0.80, 0.765, 55.0),
}  # fmt: skip
_READ = {"inf-euroroad": (0.739, 0.283, 2.3), "ca-netscience": (0.654, 0.591, 1.0)}


def _lost(g: Generator, edges: Array, share: float) -> Array:
    count = edges.shape[1]
    return edges[:, np.sort(g.permutation(count)[round(share * count) :])]


def pairs(seed: int) -> Iterator[Pair]:
    """Read those that are on this machine, and draw the others, the smaller first."""
    g = np.random.default_rng(seed)
    try:
        read = read_data("networks.npz")
    except MissingDataError as error:
        print(error)
        read = {}
    for name in sorted({key.split("_")[0] for key in read if key.endswith("_90")}):
        whole = read[f"{name}_100"]
        yield Pair(f"{name} 90%", int(whole.max()) + 1, read[f"{name}_90"], whole)
    drawn = {name: (draw(g), *asked) for name, (draw, *asked) in DRAWN.items()}
    known = {name: (read[name], *asked) for name, asked in _READ.items() if name in read}
    every = sorted((known | drawn).items(), key=lambda item: int(item[1][0].max()))
    for name, (whole, *asked, seconds) in every:
        for share, right in zip((0.1, 0.2), asked, strict=True):
            less = _lost(g, whole, share)
            yield Pair(f"{name} p = {share}", int(whole.max()) + 1, less, whole, right, seconds)


def _table(edges: Array, n: int, device: torch.device) -> torch.Tensor:
    table = torch.zeros(n, n, device=device)
    i, j = torch.as_tensor(edges.astype(np.int64), device=device)
    table[i, j] = table[j, i] = 1.0
    return table.fill_diagonal_(0.0)


def _graph(edges: Array, n: int) -> csr_array:
    """Give a network as a user has it: all paths have a length of one an edge."""
    one_way = coo_array((np.ones(edges.shape[1]), edges), shape=(n, n)).tocsr()
    return one_way + one_way.T


def _kept(fewer: Array, whole: set[tuple[int, int]], partners: Array) -> int:
    ends = np.sort(partners[fewer], axis=0).T
    return len(set(map(tuple, ends.tolist())) & whole)


def main(arguments: list[str] | None = None) -> int:
    """Match every network with its copy, and print a line of each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks networks", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=230.0, help="of all; shared out evenly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graphs", action="store_true", help="given as graphs, not as tables")
    parser.add_argument("--only", nargs="*", help="words, one of which a name has to contain")
    options = parser.parse_args(arguments)
    device, clock = torch.device(options.device), time.perf_counter()
    chosen = [
        pair
        for pair in pairs(options.seed)
        if not options.only or any(word in pair.name for word in options.only)
    ]
    print(
        f"{'network':24}{'nodes':>6}{'edges':>7}{'right':>7}{'asked':>7}{'kept':>7}{'truth':>7}"
        f"{'solve s':>9}{'matching s':>11}{'published s':>12}  said"
    )
    for number, pair in enumerate(chosen):
        left = options.seconds - (time.perf_counter() - clock)
        # larger ones come later, and have what smaller ones leave
        limit = max(1.0, 2 * left / (len(chosen) - number + 1))
        order = np.random.default_rng(options.seed).permutation(pair.n)
        truth = order.argsort()
        sides = pair.fewer, truth[pair.whole]
        given: dict[str, Any]
        if options.graphs:
            x, y = (_graph(edges, pair.n) for edges in sides)
            given = {"X": x, "Y": y, "device": device}
        else:
            x, y = (_table(edges, pair.n, device) for edges in sides)
            given = {"D_X": x, "D_Y": y}
        synchronize(device)
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = torchgw.solve(**given, random_state=0, time_limit=limit)
            synchronize(device)
            solved = time.perf_counter()
            partners = to_numpy(found.matching().target)
        ended = time.perf_counter()
        there = set(map(tuple, np.sort(truth[pair.whole], axis=0).T.tolist()))
        print(
            f"{pair.name:24}{pair.n:6}{pair.fewer.shape[1]:7}{np.mean(partners == truth):7.3f}"
            f"{pair.asked:7.3f}{_kept(pair.fewer, there, partners):7}"
            f"{_kept(pair.fewer, there, truth):7}{solved - start:9.1f}{ended - solved:11.1f}"
            f"{pair.seconds:12.1f}  " + "; ".join(str(one.message)[:50] for one in told),
            flush=True,
        )
        del given, found
    print(f"{time.perf_counter() - clock:.0f} s in all")
    return 0
