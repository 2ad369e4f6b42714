"""Twins: the same problem written in another way, for ``fuzz_run.py`` and ``test_twins.py``."""

from __future__ import annotations

import warnings

import networkx
import numpy as np
from problems import solve_by_name
from scipy.cluster.hierarchy import cophenet, linkage
from scipy.spatial.distance import cdist, squareform
from scipy.stats import ortho_group

import torchgw
from torchgw._api import as_arguments

SIZES = ((9, 11), (22, 30), (40, 40), (60, 80))


def cloud(rng, n, dimension):
    return {"X": rng.normal(size=(n, dimension))}


def table(distances):
    return {"D": (distances + distances.T) / 2}


def graph(rng, n):
    edges = np.triu(rng.random((n, n)) < 6 / n, 1)
    return table((edges | edges.T).astype(float))


def hops(rng, n, made):
    """Numbers of edges between nodes of a connected graph."""
    return table(np.asarray(networkx.floyd_warshall_numpy(made(n, int(rng.integers(2**31))))))


def sparse(n, seed):
    return networkx.connected_watts_strogatz_graph(n, 4, 0.3, seed=seed)


def tree(n, seed):
    return networkx.random_labeled_tree(n, seed=seed)


def dendrogram(rng, n):
    return table(squareform(cophenet(linkage(rng.normal(size=(n, 5)), "average"))))


def cosine(rng, n):
    points = rng.normal(size=(n, 12))
    return table(cdist(points, points, "cosine"))


def noise(rng, n):
    return table(2 * np.triu(rng.random((n, n)), 1))


FAMILIES = {
    "clouds in 2": lambda rng, n: cloud(rng, n, 2),
    "clouds in 3": lambda rng, n: cloud(rng, n, 3),
    "clouds in 10": lambda rng, n: cloud(rng, n, 10),
    "random graphs": graph,
    "sparse graphs": lambda rng, n: hops(rng, n, sparse),
    "trees": lambda rng, n: hops(rng, n, tree),
    "dendrograms": dendrogram,
    "cosine tables": cosine,
    "random tables": noise,
}


def problem(number, size=None):
    """Make a problem: two sides of a family, each with points or a table, and weights."""
    names = list(FAMILIES)
    name, size = names[number % len(names)], size or SIZES[number // len(names) % len(SIZES)]
    rng = np.random.default_rng([57, number])
    sides = [FAMILIES[name](rng, n) for n in size]
    weighted = rng.random() < 0.5
    for side, n in zip(sides, size, strict=True):
        weights = rng.uniform(0.3, 1, size=n) if weighted else np.ones(n)
        side["w"] = weights / weights.sum()
    return name, sides


def permuted(rng, sides):
    """The points of both sides in another order."""
    return [_taken(side, rng.permutation(len(side["w"]))) for side in sides]


def rescaled(rng, sides):
    """Both sides in another unit."""
    return [{key: part if key == "w" else 7.3 * part for key, part in side.items()}
            for side in sides]  # fmt: skip


def moved(rng, sides):
    """Points turned, mirrored and shifted; ``None`` of tables."""
    if "X" not in sides[0]:
        return None
    turns = [ortho_group.rvs(side["X"].shape[1], random_state=rng) for side in sides]
    return [
        side | {"X": side["X"] @ turn + rng.normal(size=len(turn))}
        for side, turn in zip(sides, turns, strict=True)
    ]


def padded(rng, sides):
    """Three points of either side once more, without weight."""
    found = []
    for side in sides:
        n = len(side["w"])
        more = _taken(side, np.r_[np.arange(n), rng.choice(n, 3, replace=False)])
        more["w"][n:] = 0
        found.append(more)
    return found


def split(rng, sides):
    """One point of either side in two halves."""
    found = []
    for side in sides:
        n, place = len(side["w"]), int(rng.integers(len(side["w"])))
        halves = _taken(side, np.r_[np.arange(n), place])
        halves["w"][[place, n]] /= 2
        found.append(halves)
    return found


def swapped(rng, sides):
    """The sides in the other order."""
    return sides[::-1]


def _taken(side, index):
    return {key: part[np.ix_(index, index)] if key == "D" else part[index]
            for key, part in side.items()}  # fmt: skip


# How far the objectives of twins may be apart, relative: exactly the same problem, or one that a
# search may begin elsewhere, which says so where it ends elsewhere.
TWINS = {
    permuted: 1e-9,
    rescaled: 1e-9,
    moved: 1e-9,
    padded: 1e-9,
    split: 1e-3,
    swapped: 1e-3,
}
DOUBTED = (split, swapped)


def arguments(sides):
    """What two sides are solved with."""
    given = {}
    for side, other, weights in zip(sides, "XY", "ab", strict=True):
        given[weights] = side["w"]
        if "X" in side:
            given[other] = side["X"]
        else:
            given[f"D_{other}"] = side["D"]
    if "X" in given:
        given["distances"] = "euclidean"
    return given


def solve(sides, **options):
    """Solve by the defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        return solve_by_name(**arguments(sides), random_state=0, **options)


def says_so(result):
    """Whether a result admits that there may be a better one."""
    return bool(result.doubt) or result.is_ambiguous or not result.converged


def compare(sides, twin, rng, first=None, **options):
    """Return how far the objectives of twins are apart, relative, and whether the worse says so."""
    other = twin(rng, sides)
    if other is None:
        return None
    results = [first or solve(sides, **options), solve(other, **options)]
    unit = results[1].epsilon / results[0].epsilon
    objectives = [result.report.objective for result in results]
    objectives[1] /= unit
    worse = results[int(objectives[1] > objectives[0])]
    apart = abs(objectives[1] - objectives[0]) / max(map(abs, objectives))
    return apart, says_so(worse)


def attempt(number, device):
    """Solve a problem and one of its twins; for ``fuzz_run.py``."""
    rng = np.random.default_rng([58, number])
    # most of them few points, of which a second has many
    name, sides = problem(number, SIZES[rng.choice(len(SIZES), p=(0.5, 0.35, 0.1, 0.05))])
    twin = list(TWINS)[int(rng.integers(len(TWINS)))]
    if twin is moved and "X" not in sides[0]:
        # tables have no points to be moved
        twin = permuted
    apart, said = compare(sides, twin, rng)
    off = apart > TWINS[twin] and not (said and twin in DOUBTED)
    text = f"{name}, {twin.__name__}: {apart:.2g} apart" + (", said" if said else "")
    notes = [f"above {share:g}" for share in (1e-6, 1e-3, 1e-2) if apart > share]
    # two solves of at most 80 points
    most = 2 * max(5.0, torchgw.explain(**as_arguments(arguments(sides))).most)
    return {"ended": twin.__name__, "wrong": [text] if off else [], "family": name, "most": most,
            "said": apart > TWINS[twin] and not off, "notes": notes}  # fmt: skip
