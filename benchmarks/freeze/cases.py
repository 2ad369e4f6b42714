"""400 problems of all kinds, each made from its name alone.

A problem draws its input, and gives back the call that is timed. The call returns what the package
does: a result, a batch, or what POT's function returns. ``single`` ones have one start, or go where
they go without a search: of these the bits can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.spatial.distance import cdist

import torchgw
import torchgw.distances as providers
import torchgw.pot
from benchmarks.quality.instances import Array, rotation
from benchmarks.quality.small import SMALL
from benchmarks.quality.unseen import KEPT_ASIDE, LOOKED_AT
from torchgw._api import as_arguments

# The generators of the fuzzing tests are the benchmark's too.
_TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path += [str(_TESTS), str(_TESTS / "laws")]
from fuzz_cases import make_case  # noqa: E402
from fuzz_more import copy_case, derivative_case  # noqa: E402

__all__ = ["Problem", "problems"]

Generator = np.random.Generator
Call = Callable[[], Any]
Options = dict[str, Any]
Pair = tuple[Array, Array]
INF = float("inf")


@dataclass(frozen=True)
class Problem:
    """A problem by its name, ``kind/number`` or ``kind/what``."""

    name: str
    draw: Callable[[Generator, str], Call]  # from random numbers and a device
    single: bool

    @property
    def kind(self) -> str:
        """What the problem is about."""
        return self.name.partition("/")[0]

    def call(self, device: str) -> Call:
        """Draw the input; the call that is returned solves it."""
        return self.draw(np.random.default_rng([25, *self.name.encode()]), device)


# Spaces: pairs of points, cycled through by the number of a problem.


def _turned(rng: Generator) -> Pair:
    """A cloud and its turned copy with noise, in another order."""
    x = rng.normal(size=(30, 3)) * [1, 1.5, 2]
    y = x @ rotation(3, rng) + 0.05 * rng.normal(size=x.shape)
    return x, y[rng.permutation(30)]


def _unrelated(rng: Generator) -> Pair:
    return rng.normal(size=(26, 2)), rng.normal(size=(33, 3))


def _curves(rng: Generator) -> Pair:
    """A spiral and a helix."""
    t, u = np.sort(rng.random(36)), np.sort(rng.random(30))
    x = np.stack([t * np.cos(9 * t), t * np.sin(9 * t)], axis=1)
    return x, np.stack([np.cos(12 * u), np.sin(12 * u), 3 * u], axis=1)


def _clusters(rng: Generator) -> Pair:
    """Three groups of unequal sizes on both sides."""
    sides = []
    for sizes, d in (((6, 9, 14), 2), ((8, 11, 13), 3)):
        centres = 6 * rng.normal(size=(3, d))
        sides.append(np.repeat(centres, sizes, axis=0) + rng.normal(size=(sum(sizes), d)))
    return sides[0], sides[1]


_SPACES = (_turned, _unrelated, _curves, _clusters)


def _weights(rng: Generator, n: int) -> Array:
    weights = rng.uniform(0.3, 1, n)
    return np.asarray(weights / weights.sum())


def _path_graph(points: Array, distance: str = "distance") -> networkx.Graph:
    """The neighbour graph of points as NetworkX has it, with a colour and a size at each node."""
    graph = networkx.from_scipy_sparse_array(providers.knn_graph(torch.from_numpy(points), 4))
    for node in graph:
        graph.nodes[node].update(colour="rgb"[node % 3], size=float(points[node, 0]))
    return graph


# Options, each of which is solved by a single start and by defaults, between other spaces; those of
# "search" by defaults alone, and "limits" by a single start. A function of the random numbers and
# of the two sides stands for what depends on them.


def _linear(alpha: float, **more: Any) -> Callable[[Generator, Array, Array], Options]:
    def make(rng: Generator, x: Array, y: Array) -> Options:
        return {"M": rng.random((len(x), len(y))), "alpha": alpha, **more}

    return make


def _features(metric: str, **more: Any) -> Callable[[Generator, Array, Array], Options]:
    def make(rng: Generator, x: Array, y: Array) -> Options:
        pair = rng.normal(size=(len(x), 4)), rng.normal(size=(len(y), 4))
        return {"features": pair, "feature_metric": metric, **more}

    return make


def _by_edges(name: str) -> Callable[[Generator, Array, Array], Options]:
    def make(rng: Generator, x: Array, y: Array) -> Options:
        return {"X": _path_graph(x), "Y": _path_graph(y), "features": name, "distances": "auto"}

    return make


def _weighted(**more: Any) -> Callable[[Generator, Array, Array], Options]:
    def make(rng: Generator, x: Array, y: Array) -> Options:
        return {"a": _weights(rng, len(x)), "b": _weights(rng, len(y)), **more}

    return make


def _from_plan(rng: Generator, x: Array, y: Array) -> Options:
    plan = rng.random((len(x), len(y)))
    return {"init": plan / plan.sum()}


def _from_match(rng: Generator, x: Array, y: Array) -> Options:
    return {"init": rng.integers(len(y), size=len(x))}


def _from_potentials(rng: Generator, x: Array, y: Array) -> Options:
    return {"init": (0.01 * rng.normal(size=len(x)), 0.01 * rng.normal(size=len(y)))}


def _directed(**more: Any) -> Callable[[Generator, Array, Array], Options]:
    def make(rng: Generator, x: Array, y: Array) -> Options:
        given = {}
        for name, side in (("X", x), ("Y", y)):
            longer = rng.uniform(1, 1.5, size=(len(side), len(side)))
            given[name] = providers.DirectedDistance(cdist(side, side) * longer)
        return given | {"distances": "auto", **more}

    return make


def _one_way(rng: Generator, x: Array, y: Array) -> Options:
    """Directed graphs: each node has edges to its three nearest."""
    given = {}
    for name, side in (("X", x), ("Y", y)):
        table = cdist(side, side)
        table[table > np.sort(table, axis=1)[:, 3:4]] = 0
        given[name] = providers.DirectedDistance.of_graph(csr_array(table))
    return given | {"distances": "auto"}


_OPTIONS: dict[str, tuple[Any, ...]] = {
    "relaxed": (
        {"unbalanced": 0.1}, {"unbalanced": 5.0}, {"unbalanced": (1.0, 0.2)},
        {"unbalanced": (INF, 0)}, {"unbalanced": (0, INF)}, {"unbalanced": (INF, 1.0)},
        {"unbalanced": 100.0, "unbalanced_type": "l2"}, {"mass": 0.3}, {"mass": 0.7},
        _linear(0.5, mass=0.8), _linear(0.5, unbalanced=0.5), _linear(0.0, unbalanced=0.5),
        {"mass": 0.6, "polish": True}, {"unbalanced": (INF, 0), "polish": True},
        _weighted(unbalanced=(0.3, INF)), {"unbalanced": 0.5, "loss": "kl"},
    ),
    "fused": (
        _linear(0.1), _linear(0.5), _linear(0.9), _linear(0.0), _linear(1.0),
        _features("sqeuclidean"), _features("cosine", alpha=0.8), _features("correlation"),
        _features("euclidean", alpha=0.3), _by_edges("degree"), _by_edges("clustering"),
        _by_edges("heat"), _by_edges("wl"), _by_edges("colour"), _by_edges("size"),
    ),
    "directed": (
        _directed(), _directed(epsilon=0.05), _directed(polish=True), _one_way,
        _directed(regularization="proximal"), _directed(mass=0.7),
    ),
    "loss": (
        {"loss": "kl"}, {"loss": "absolute"}, {"loss": "kl", "gradient": "factored"},
        {"loss": "kl", "gradient": "sampled"}, {"loss": "absolute", "gradient": "sampled"},
        _linear(0.5, loss="kl"), _linear(0.5, loss="absolute"),
    ),
    "sharp": (
        {"regularization": "proximal"}, {"regularization": "proximal", "polish": False},
        {"polish": True}, _weighted(polish=True), _linear(0.5, polish=True),
        _linear(0.0, polish=True), {"regularization": "proximal", "epsilon": 0.05},
        _weighted(regularization="proximal"), {"polish": True, "epsilon": 0.1},
    ),
    "options": (
        {}, _weighted(), {"epsilon": 0.1}, {"epsilon": 1e-3}, {"epsilon": 1e-5},
        {"precision": "float32"}, {"precision": "mixed"}, {"gradient": "factored"},
        {"gradient": "sampled", "max_iter": 100}, {"gradient": "dense"},
        {"storage": "streamed", "distances": "sqeuclidean"}, {"scale": None}, {"scale": "mean"},
    ),
    "search": ({"search": "fast"}, {"search": "thorough"}, {"n_init": 4}, {"n_init": 64}),
    "limits": (
        {"tol": 1e-9, "objective_tol": 0}, {"inner_tol": 1e-10}, {"inner_max_iter": 5},
        {"max_iter": 3}, {"gradient": "sampled", "n_anchors": 32, "max_iter": 60},
        _from_plan, _from_match, _from_potentials,
    ),
}  # fmt: skip


def _with_options(number: int, what: Any, single: bool, rng: Generator, device: str) -> Call:
    x, y = _SPACES[number % len(_SPACES)](rng)
    options: Options = {
        "X": x, "Y": y, "distances": ("euclidean", "sqeuclidean")[number // 4 % 2],
        "random_state": number, "device": device,
    }  # fmt: skip
    if single:
        options["n_init"] = 1
    options |= what(rng, x, y) if callable(what) else what
    if "init" in options:
        del options["n_init"]
    if {"mass", "unbalanced"} & options.keys() and isinstance(options["X"], np.ndarray):
        # the unit of when they were frozen
        options["scale"] = "max"
    return partial(torchgw.solve, **as_arguments(options))


def _all_options() -> Iterator[Problem]:
    for kind, choices in _OPTIONS.items():
        for single in {"search": [False], "limits": [True]}.get(kind, [True, False]):
            for number, what in enumerate(choices):
                name = f"{kind}/{number}{'' if single else '-searched'}"
                # the second time between other spaces
                draw = partial(_with_options, number + (not single), what, single)
                yield Problem(name, draw, single)


# Where distances come from.


def _in_ball(points: Array) -> Array:
    return np.asarray(0.8 * points / np.linalg.norm(points, axis=1).max())


def _on_hyperboloid(points: Array) -> Array:
    return np.column_stack([np.sqrt(1 + (points**2).sum(1)), points])


def _on_sphere(points: Array) -> Array:
    return np.asarray(points / np.linalg.norm(points, axis=1, keepdims=True))


def _cityblock(points: Array) -> providers.CallableDistance:
    given = torch.from_numpy(points)
    return providers.CallableDistance(
        len(given), lambda index: (given[:, None] - given[index]).abs().sum(2), dtype=given.dtype
    )


def _torus(points: Array) -> providers.ManifoldDistance:
    def between(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        apart = (first[:, None] - second).abs() % 1
        return torch.minimum(apart, 1 - apart).square().sum(2).sqrt()

    return providers.ManifoldDistance(torch.from_numpy(points) % 1, between)


def _product(points: Array) -> providers.ProductDistance:
    given = torch.from_numpy(points)
    parts = [providers.PointDistance(given, "sqeuclidean"), providers.PointDistance(given[:, :1])]
    return providers.ProductDistance(parts, [1.0, 0.5])


def _factored(points: Array) -> providers.FactoredDistance:
    factors = providers.PointDistance(torch.from_numpy(points), "sqeuclidean").factors()
    assert factors is not None
    return providers.FactoredDistance(factors.matrix, factors.signs)


def _table(points: Array) -> providers.PrecomputedDistance:
    return providers.PrecomputedDistance(torch.from_numpy(cdist(points, points, "chebyshev")))


def _neighbours(points: Array) -> Any:
    given = torch.from_numpy(points)
    return providers.connect(providers.knn_graph(given, 4), given)


def _nystrom(points: Array) -> providers.NystromDistance:
    return providers.NystromDistance(providers.PointDistance(torch.from_numpy(points)), 12)


def _itself(points: Array) -> Array:
    return points


# How each side is given, and options.
_SOURCES: dict[str, tuple[Callable[[Array], Any], Options]] = {
    "auto": (_itself, {}),
    "euclidean": (_itself, {"distances": "euclidean"}),
    "sqeuclidean": (_itself, {"distances": "sqeuclidean"}),
    "cosine": (_itself, {"distances": "cosine"}),
    "correlation": (lambda points: np.sin(points @ np.ones((points.shape[1], 1)) * np.arange(1, 7)),
                    {"distances": "correlation"}),
    "geodesic": (_itself, {"distances": "precomputed"}),
    "landmark": (_itself, {"distances": "landmark", "n_landmarks": 12}),
    "dijkstra": (_itself, {"distances": "dijkstra"}),
    "dijkstra-sampled": (_itself, {"distances": "dijkstra", "gradient": "sampled",
                                   "max_iter": 100}),
    "neighbours": (_itself, {"n_neighbors": 5}),
    "filled": (_itself, {"distances": "precomputed", "n_neighbors": 2, "disconnected": "fill"}),
    "stitched": (_itself, {"distances": "precomputed", "n_neighbors": 2}),
    "poincare": (_in_ball, {"distances": "poincare"}),
    "lorentz": (_on_hyperboloid, {"distances": "lorentz", "curvature": 1.0}),
    "sphere": (_on_sphere, {"distances": "sphere"}),
    "two-kinds": (_itself, {"distances": ("euclidean", "cosine")}),
    "sparse-graph": (_neighbours, {}),
    "networkx": (_path_graph, {}),
    "callable": (_cityblock, {}),
    "manifold": (_torus, {}),
    "product": (_product, {}),
    "factored": (_factored, {}),
    "table": (_table, {}),
    "nystrom": (_nystrom, {}),
    "dijkstra-object": (lambda points: providers.DijkstraDistance(_neighbours(points)),
                        {"max_iter": 100}),
    "landmark-object": (lambda points: providers.LandmarkDistance(_neighbours(points), 10), {}),
}  # fmt: skip
# Those that are also solved by defaults.
_SEARCHED = ("auto", "euclidean", "sqeuclidean", "cosine", "correlation", "geodesic", "landmark",
             "dijkstra", "poincare", "lorentz", "sphere", "callable", "manifold", "product",
             "nystrom", "sparse-graph")  # fmt: skip


def _from_source(number: int, name: str, single: bool, rng: Generator, device: str) -> Call:
    make, options = _SOURCES[name]
    x, y = (make(side) for side in _SPACES[number % len(_SPACES)](rng))
    if single:
        options = options | {"n_init": 1}
    return partial(torchgw.solve, x, y, random_state=number, device=device, **as_arguments(options))


def _all_sources() -> Iterator[Problem]:
    for number, name in enumerate(_SOURCES):
        for single in (True, False) if name in _SEARCHED else (True,):
            draw = partial(_from_source, number + (not single), name, single)
            yield Problem(f"distances/{name}{'' if single else '-searched'}", draw, single)


# Problems of other suites.


def _fuzzed(number: int, single: bool, rng: Generator, device: str) -> Call:
    arguments = make_case(number, 24).arguments | {"device": device}
    if single:
        arguments = arguments | {"n_init": 1}
    return partial(torchgw.solve, **as_arguments(arguments))


def _copied(what: str, rng: Generator, device: str) -> Call:
    """A copy in another order, whose answer is known."""
    arguments = copy_case(rng, what)[0] | {"random_state": 0, "device": device}
    return partial(torchgw.solve, **as_arguments(arguments))


def _vertices(rng: Generator, device: str) -> Call:
    """Few points, polished: the answer is one of all permutations."""
    x, y = rng.normal(size=(6, 2)), rng.normal(size=(6, 3))
    given = {"distances": "euclidean", "scale": None, "polish": True, "random_state": 0}
    return partial(torchgw.solve, x, y, **given, device=device)


def _subset(rng: Generator, device: str) -> Call:
    """Semi-relaxed: points that are among those of the other side."""
    y = rng.normal(size=(40, 2))
    given = {"distances": "euclidean", "scale": None, "unbalanced": (INF, 0), "random_state": 0}
    return partial(torchgw.solve, y[rng.permutation(40)[:20]], y, **given, device=device)


_COPIES = ("cloud", "weighted", "lattice", "cross", "tree", "network")
_KNOWN: dict[str, Callable[[Generator, str], Call]] = {
    **{f"{what}-{k}": partial(_copied, what) for what in _COPIES for k in range(3)},
    **{f"vertices-{k}": _vertices for k in range(3)},
    **{f"subset-{k}": _subset for k in range(3)},
}
_UNSEEN = LOOKED_AT | KEPT_ASIDE | SMALL
# Words of docstrings are those of the packages that are installed, other data have to be there; the
# rest takes more than five seconds.
_LEFT_OUT = {
    "some-words", "words-of-packages", "some-cells",
    "digits-top-bottom", "clusters-8-in-10", "groups-of-words",
}  # fmt: skip


def _unseen(name: str, rng: Generator, device: str) -> Call:
    instance = _UNSEEN[name](np.random.default_rng([0, *name.encode()]))
    return partial(torchgw.solve, **instance.inputs, random_state=0, device=device)


def _derivative(number: int, rng: Generator, device: str) -> Call:
    given, _, _, options, directions, weights = derivative_case(number)
    tensors = {name: torch.tensor(value, device=device) for name, value in given.items()}
    for name in directions:
        tensors[name].requires_grad_()

    def call() -> Any:
        result = torchgw.solve(**as_arguments(tensors | options))
        assert result.loss is not None
        total = result.loss
        if options["differentiable"] != "value":
            total = total + (result.plan * torch.tensor(weights, device=device)).sum()
        inputs = [tensors[name] for name in directions]
        return result, torch.autograd.grad(total, inputs, allow_unused=True)

    return call


def _hessian(rng: Generator, device: str) -> Call:
    """A product with the Hessian."""
    x, y = (torch.tensor(side, device=device) for side in _turned(rng))
    x.requires_grad_()
    step = torch.tensor(rng.normal(size=x.shape), device=device)

    def call() -> Any:
        result = torchgw.solve(
            x, y, distances="sqeuclidean", scale=None, epsilon=5.0, tol=1e-10, n_init=1,
            differentiable="implicit", random_state=0, options=torchgw.Options(inner_tol=1e-11),
        )  # fmt: skip
        return result, tuple(result.hvp({"X": step}).products.values())

    return call


# Many problems together.


def _lists(rng: Generator, count: int) -> tuple[list[Array], list[Array]]:
    pairs = [_SPACES[k % len(_SPACES)](rng) for k in range(count)]
    return [x for x, _ in pairs], [y for _, y in pairs]


_BATCHES: dict[str, Any] = {
    "plain": {}, "sqeuclidean": {"distances": "sqeuclidean"}, "epsilon": {"epsilon": 0.02},
    "starts": {"n_init": 4}, "penalties": {"unbalanced": 0.5}, "mass": {"mass": 0.7},
    "semi-relaxed": {"unbalanced": (INF, 0)}, "proximal": {"regularization": "proximal"},
    "polished": {"polish": True}, "unscaled": {"scale": None},
    "mixed": {"mass": [0.5, None, 0.9, None, 0.3, None]}, "tight": {"tol": 1e-9},
}  # fmt: skip


def _batch(what: str, rng: Generator, device: str) -> Call:
    xs, ys = _lists(rng, 6)
    options = {"distances": "euclidean", "n_init": 1} | _BATCHES[what]
    return partial(torchgw.solve_many, xs, ys, **options, device=device)


def _stack(more: Options, linear: bool, rng: Generator, device: str) -> Call:
    """Padded matrices, of which each problem uses a part."""
    sides = [rng.normal(size=(5, 25, 3)), rng.normal(size=(5, 30, 2))]
    tables = [np.stack([cdist(x, x) for x in side]) for side in sides]
    sizes = {"sizes_x": rng.integers(8, 26, size=5), "sizes_y": rng.integers(8, 31, size=5)}
    if linear:
        sizes |= {"M": rng.random((5, 25, 30)), "alpha": 0.5}
    return partial(torchgw.solve_batch, *tables, **sizes, **{"n_init": 1, **more}, device=device)


def _pairwise(more: Options, rng: Generator, device: str) -> Call:
    xs, ys = _lists(rng, 3)
    options = {"distances": "euclidean", "progress": False, "n_jobs": 1, "n_init": 1} | more
    return partial(torchgw.pairwise, xs + ys, **options, device=device)


def _differentiated(rng: Generator, device: str) -> Call:
    xs, ys = _lists(rng, 3)
    given = [torch.tensor(x, device=device, requires_grad=True) for x in xs]

    def call() -> Any:
        result = torchgw.solve_many(
            given, [torch.tensor(y, device=device) for y in ys], distances="euclidean",
            scale=None, epsilon=0.1, differentiable=True, n_init=1,
        )  # fmt: skip
        assert result.loss is not None
        return result, torch.autograd.grad(result.loss.sum(), given)

    return call


_TOGETHER: dict[str, Callable[[Generator, str], Call]] = {
    **{what: partial(_batch, what) for what in _BATCHES}, "stack": partial(_stack, {}, False),
    "stack-fused": partial(_stack, {}, True), "stack-mass": partial(_stack, {"mass": 0.6}, False),
    "stack-polished": partial(_stack, {"polish": True}, False), "pairwise": partial(_pairwise, {}),
    "pairwise-objective": partial(_pairwise, {"output": "objective", "epsilon": 0.05}),
    "pairwise-penalties": partial(_pairwise, {"unbalanced": (1.0, 0.3)}),
    "pairwise-pairs": partial(_pairwise, {"pairs": [[0, 3], [4, 1], [5, 5]]}),
    "gradients": _differentiated,
}  # fmt: skip


# POT's calls: a function of ``ot.gromov`` and its options, among them names of what is drawn.


def _squared(first: Any, second: Any) -> Any:
    return (first - second) ** 2


_POT: dict[str, tuple[str, Options]] = {
    "exact": ("gromov_wasserstein", {}),
    "exact-armijo": ("gromov_wasserstein", {"armijo": True}),
    "exact-kl": ("gromov_wasserstein", {"loss_fun": "kl_loss"}),
    "exact-2": ("gromov_wasserstein2", {}),
    "fused": ("fused_gromov_wasserstein", {"M": "M", "alpha": 0.5}),
    "fused-2": ("fused_gromov_wasserstein2", {"M": "M", "alpha": 0.3}),
    "entropic": ("entropic_gromov_wasserstein", {"epsilon": 0.05, "max_iter": 100}),
    "entropic-ppa": ("entropic_gromov_wasserstein", {"epsilon": 0.05, "solver": "PPA",
                                                     "max_iter": 50}),
    "entropic-2": ("entropic_gromov_wasserstein2", {"epsilon": 0.1, "max_iter": 100}),
    "entropic-fused": ("entropic_fused_gromov_wasserstein", {"M": "M", "epsilon": 0.05,
                                                             "max_iter": 100}),
    "bapg": ("BAPG_gromov_wasserstein", {"epsilon": 0.5, "max_iter": 200}),
    "bapg-fused": ("BAPG_fused_gromov_wasserstein", {"M": "M", "epsilon": 0.5, "max_iter": 200}),
    "semi-relaxed": ("semirelaxed_gromov_wasserstein", {}),
    "semi-relaxed-fused": ("semirelaxed_fused_gromov_wasserstein", {"M": "M"}),
    "semi-relaxed-entropic": ("entropic_semirelaxed_gromov_wasserstein", {"epsilon": 0.1,
                                                                          "max_iter": 100}),
    "partial": ("partial_gromov_wasserstein", {"m": 0.6}),
    "partial-fused": ("partial_fused_gromov_wasserstein", {"M": "M", "m": 0.5}),
    "partial-entropic": ("entropic_partial_gromov_wasserstein", {"m": 0.6, "reg": 0.1,
                                                                 "numItermax": 100}),
    "pointwise": ("pointwise_gromov_wasserstein", {"p": "p", "q": "q", "loss_fun": _squared,
                                                   "max_iter": 20, "random_state": 1}),
    "sampled": ("sampled_gromov_wasserstein", {"p": "p", "q": "q", "loss_fun": _squared,
                                               "max_iter": 20, "random_state": 1}),
    "unbalanced": ("fused_unbalanced_gromov_wasserstein", {"reg_marginals": 1.0, "epsilon": 0.05}),
    "co-optimal": ("unbalanced_co_optimal_transport", {"reg_marginals": 1.0, "epsilon": 0.05}),
    "quantized": ("quantized_fused_gromov_wasserstein", {"npart1": 6, "npart2": 6}),
    "unmixing": ("gromov_wasserstein_linear_unmixing", {"C": "C1", "Cdict": "Cs", "reg": 0.01}),
    "dictionary": ("gromov_wasserstein_dictionary_learning",
                   {"Cs": "Cs", "D": 2, "nt": 8, "epochs": 3, "random_state": 0}),
    "barycenter": ("gromov_barycenters", {"N": 9, "Cs": "Cs", "max_iter": 20, "random_state": 0}),
    "barycenter-entropic": ("entropic_gromov_barycenters",
                            {"N": 9, "Cs": "Cs", "epsilon": 0.05, "max_iter": 10,
                             "random_state": 0}),
    "barycenter-fused": ("fgw_barycenters", {"N": 9, "Cs": "Cs", "Ys": "Ys", "max_iter": 20,
                                             "random_state": 0}),
    "low-rank": ("lowrank_gromov_wasserstein_samples", {"X_s": "X", "X_t": "Y", "rank": 4,
                                                        "reg": 0.01, "numItermax": 50}),
    # those that are no names of ot.gromov
    "solve": ("solve_gromov", {}),
    "solve-fused": ("solve_gromov", {"M": "M", "alpha": 0.7}),
    "solve-reg": ("solve_gromov", {"reg": 0.05}),
    "solve-semi-relaxed": ("solve_gromov", {"unbalanced_type": "semirelaxed"}),
    "solve-partial": ("solve_gromov", {"unbalanced_type": "partial", "unbalanced": 0.7}),
    "solve-penalties": ("solve_gromov", {"unbalanced_type": "KL", "unbalanced": 0.5, "reg": 0.1}),
    "solve-kl": ("solve_gromov", {"loss": "KL", "reg": 0.05}),
    "batch": ("solve_gromov_batch", {"reg": 0.05}),
    "batch-fused": ("solve_gromov_batch", {"reg": 0.05, "M": "Ms", "alpha": 0.5}),
}  # fmt: skip
_OTHER_INPUT = {"unmixing", "dictionary", "barycenter", "barycenter-entropic", "barycenter-fused",
                "low-rank"}  # fmt: skip


def _pot(number: int, what: str, rng: Generator, device: str) -> Call:
    """Arrays in NumPy: POT's functions have no device."""
    name, options = _POT[what]
    x, y = _SPACES[number % len(_SPACES)](rng)
    tables = [cdist(side, side) for side in (x, y)]
    tables = [table / table.max() for table in tables]
    sides = [rng.normal(size=(n, 2)) for n in (8, 10, 12)]
    drawn = {
        "C1": tables[0], "X": x, "Y": y, "M": rng.random((len(x), len(y))),
        "p": _weights(rng, len(x)), "q": _weights(rng, len(y)),
        "Cs": [cdist(side, side) for side in sides], "Ys": [np.sin(3 * side) for side in sides],
        "Ms": rng.random((4, 10, 12)),
    }  # fmt: skip
    if what == "unmixing":
        drawn["Cs"] = np.stack([cdist(side[:8], side[:8]) for side in sides])
    given = {
        key: drawn[value] if isinstance(value, str) and value in drawn else value
        for key, value in options.items()
    }
    if name.startswith("solve_gromov_batch"):
        pair = (rng.normal(size=(4, n, 3)) for n in (10, 12))
        stacks = [np.stack([cdist(one, one) for one in side]) for side in pair]
        return partial(torchgw.pot.solve_gromov_batch, *stacks, **given)
    if name == "solve_gromov":
        return partial(torchgw.pot.solve_gromov, *tables, **given)
    call = getattr(torchgw.pot.gromov, name)
    if what in _OTHER_INPUT:
        # POT's dictionaries hand a `log` on, to where it is given already
        logged = {} if what in ("dictionary", "unmixing") else {"log": True}
        return partial(call, **given, **logged)
    first = [given.pop("M")] if "M" in given else []
    return partial(call, *first, *tables, **given, log=True)


# What is not one plan between all points.


def _low_rank(more: Options, rng: Generator, device: str) -> Call:
    x, y = (np.concatenate(sides) for sides in zip(_turned(rng), _turned(rng), strict=True))
    options = {"rank": 5, "distances": "sqeuclidean", "max_iter": 60, "random_state": 0} | more
    if options.pop("fused", False):
        options["M"] = rng.random((len(x), len(y)))
    return partial(torchgw.solve_low_rank, x, y, **options, device=device)


def _barycenter(more: Options, rng: Generator, device: str) -> Call:
    spaces = [rng.normal(size=(n, 2)) for n in (14, 17, 20)]
    options = {
        "n": 12,
        "distances": "euclidean",
        "max_iter": 5,
        "n_init": 1,
        "random_state": 0,
    } | more
    if options.pop("fused", False):
        options["features"] = [np.sin(3 * space) for space in spaces]
    return partial(torchgw.barycenter, spaces, **options, device=device)


def _sampled(more: Options, rng: Generator, device: str) -> Call:
    """The names of the published sampled design."""
    x, y = _curves(rng)
    call = torchgw.sampled_lowrank_gw if "rank" in more else torchgw.sampled_gw
    return partial(call, x, y, **more, random_state=0, device=device)


_OTHERS: dict[str, Callable[[Generator, str], Call]] = {
    "low-rank/plain": partial(_low_rank, {}),
    "low-rank/euclidean": partial(_low_rank, {"distances": "euclidean"}),
    "low-rank/landmark": partial(_low_rank, {"distances": "landmark"}),
    "low-rank/entropic": partial(_low_rank, {"epsilon": 0.01}),
    "low-rank/rank-2": partial(_low_rank, {"rank": 2}),
    "low-rank/fused": partial(_low_rank, {"fused": True, "alpha": 0.5}),
    "low-rank/tight": partial(_low_rank, {"tol": 1e-7}),
    "barycenter/plain": partial(_barycenter, {}),
    "barycenter/sqeuclidean": partial(_barycenter, {"distances": "sqeuclidean"}),
    "barycenter/fused": partial(_barycenter, {"fused": True}),
    "barycenter/epsilon": partial(_barycenter, {"epsilon": 0.1}),
    "barycenter/weights": partial(_barycenter, {"weights": [0.6, 0.3, 0.1]}),
    "sampled/plain": partial(_sampled, {}),
    "sampled/semi-relaxed": partial(_sampled, {"semi_relaxed": True, "rho": 1.0}),
    "sampled/landmark": partial(_sampled, {"distance_mode": "landmark", "M": 64}),
    "sampled/rank": partial(_sampled, {"rank": 4}),
}
_DERIVATIVES = 20
# Cases of the fuzzing tests with one start and as they are; together there are 400 problems.
_FUZZED_SINGLE, _FUZZED_SEARCHED = 31, 16


@cache
def problems() -> dict[str, Problem]:
    """All problems by name, those of one kind one after the other."""
    found = [*_all_options(), *_all_sources()]
    for number in range(_FUZZED_SINGLE + _FUZZED_SEARCHED):
        single = number < _FUZZED_SINGLE
        found.append(Problem(f"fuzz/{number}", partial(_fuzzed, number, single), single))
    found += [Problem(f"known/{what}", draw, False) for what, draw in _KNOWN.items()]
    names = [name for name in _UNSEEN if name not in _LEFT_OUT]
    found += [Problem(f"unseen/{name}", partial(_unseen, name), False) for name in names]
    for number in range(_DERIVATIVES):
        single = derivative_case(number)[3]["n_init"] == 1
        found.append(Problem(f"derivative/{number}", partial(_derivative, number), single))
    found.append(Problem("derivative/hessian", _hessian, True))
    found += [Problem(f"batch/{what}", draw, True) for what, draw in _TOGETHER.items()]
    for number, what in enumerate(_POT):
        found.append(Problem(f"pot/{what}", partial(_pot, number, what), True))
    found += [Problem(name, draw, "barycenter" not in name) for name, draw in _OTHERS.items()]
    return {problem.name: problem for problem in found}
