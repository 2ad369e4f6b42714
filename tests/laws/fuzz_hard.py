"""Problems whose match is known, of kinds that were missed once in silence, for ``fuzz_run.py``.

Copies of dendrograms, stars, tables of either sign and clouds under other losses; graphs with an
edge moved; and parts: of graphs (one side free) and of clouds (a share of the mass). Half of them
are copied with noise. What the match leads to is found by a solve that begins there: nothing is to
be better without a doubt.
"""

from __future__ import annotations

import warnings

import networkx
import numpy as np
import reference
from fuzz_cases import limited
from fuzz_more import MISSED
from fuzz_twins import FAMILIES as SIDES
from fuzz_twins import dendrogram, says_so
from problems import solve_by_name
from scipy.spatial.distance import cdist

import torchgw
from torchgw import TorchGWError


def star(rng, n):
    """Distances of the corners of a star, by turns far from its centre and near to it."""
    angle = np.arange(2 * (n // 2)) * 2 * np.pi / (2 * (n // 2))
    radius = np.where(np.arange(len(angle)) % 2, rng.uniform(0.3, 0.9), 1.0)
    return points(radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1))


def points(x):
    return cdist(x, x)


def signed(rng, n):
    upper = np.triu(rng.normal(size=(n, n)), 1)
    return upper + upper.T


def sparse(rng, n):
    return networkx.to_numpy_array(
        networkx.fast_gnp_random_graph(n, 4 / n, seed=int(rng.integers(2**31)))
    )


def moved_edge(rng, n):
    """A cubic graph, and the same with one of its edges between two other nodes."""
    graph = networkx.random_regular_graph(3, 2 * (n // 2), seed=int(rng.integers(2**31)))
    changed = graph.copy()
    changed.remove_edge(*list(graph.edges)[rng.integers(graph.number_of_edges())])
    changed.add_edge(*list(networkx.non_edges(graph))[rng.integers(len(graph))])
    return tuple(networkx.to_numpy_array(one, nodelist=sorted(one)) for one in (graph, changed))


# How a table of a number of points is made, of how many at most, and what it is solved with.
FAMILIES = {
    "dendrogram": (lambda rng, n: dendrogram(rng, n)["D"], 60, {}),
    "star": (star, 40, {}),
    "signed table": (signed, 40, {}),
    "signed table, sharp": (signed, 24, {"polish": True}),
    "absolute": (lambda rng, n: points(rng.normal(size=(n, 2))), 30, {"loss": "absolute"}),
    "kl": (lambda rng, n: points(rng.normal(size=(n, 2))), 40, {"loss": "kl"}),
    "edge moved": (moved_edge, 60, {}),
    "part of a graph": (sparse, 24, {"unbalanced": (np.inf, 0)}),
    "part of a cloud": (lambda rng, n: points(rng.normal(size=(n, 2))), 40, {"mass": 0.7}),
}


def problem(number):
    """Make a problem: its family, arguments of a solve, and the plan of the match."""
    rng = np.random.default_rng([61, number])
    family, (make, most, options) = list(FAMILIES.items())[number % len(FAMILIES)]
    made = make(rng, int(rng.integers(8, most + 1)))
    x, y = made if isinstance(made, tuple) else (made, made)
    order = rng.permutation(len(y))
    y = y[np.ix_(order, order)]
    if number // len(FAMILIES) % 2:
        noise = 0.05 * y.std() * signed(rng, len(y))
        y = y + noise if "signed" in family else np.abs(y + noise)
    match = np.eye(len(x))[:, order] / len(x)
    if family == "part of a graph":
        kept = np.sort(rng.permutation(len(x))[: 2 * len(x) // 3])
        x, match = x[np.ix_(kept, kept)], match[kept] * (len(x) / len(kept))
    if family == "part of a cloud":
        # the last points of either side are its own
        common = round(options["mass"] * len(x))
        match[common:] = 0
        options = options | {"mass": common / len(x)}
        own = order >= common
        strange = rng.uniform(0.5, 3, size=y.shape) * y.mean()
        strange = (strange + strange.T) / 2 * (1 - np.eye(len(y)))
        y = np.where(own[:, None] | own, strange, y)
    return family, {"D_X": x, "D_Y": y, "scale": None, "random_state": 0, **options}, match


def attempt(number, device):
    """Solve a problem by the defaults, and from its match."""
    family, given, match = problem(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        try:
            result, known = (
                solve_by_name(device=device, **given, **more) for more in ({}, {"init": match})
            )
        except TorchGWError as error:
            return {"ended": "refused", "wrong": [], "refusal": f"{type(error).__name__}: {error}"}
    own, best = result.report.objective, known.report.objective
    unit = reference.gw_value(given["D_X"], given["D_Y"], np.full(match.shape, 1 / match.size))
    missed, said = own > best + MISSED * unit, says_so(result)
    wrong = f"{family}, {len(match)} points: {own:.8g}, the match leads to {best:.8g}"
    return {
        "ended": result.status.name, "wrong": [wrong] if missed and not said else [],
        "family": family, "said": bool(missed and said), "most": 10.0,
    }  # fmt: skip


# CPU seconds that a solve of up to so many points may take by its defaults, unless its route says
# that it takes longer.
MOST_POINTS, MOST_SECONDS = 500, 5.0


def attempt_size(number, device):
    """Solve a problem of 80 to 500 points by the defaults: in time, as its route has said."""
    rng = np.random.default_rng([63, number])
    family, make = list(SIDES.items())[number % len(SIDES)]
    n, m = (int(80 * (MOST_POINTS / 80) ** rng.random()) for _ in range(2))
    given = {"random_state": 0}
    for name, size in zip("XY", (n, m), strict=True):
        made = make(rng, size)
        given[name if "X" in made else f"D_{name}"] = made.get("X", made.get("D"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", torchgw.TorchGWWarning)
        most = limited(given, MOST_SECONDS)
        result = solve_by_name(device=device, **given)
    return {
        "ended": result.status.name, "wrong": [], "family": f"{family}, up to 500", "most": most,
        "said": bool(said), "notes": [f"{n} x {m}"],
    }  # fmt: skip
