"""Problems that no default was tuned on: bundled tables, networks, clouds, surfaces, words.

All are small enough for every solver. ``KEPT_ASIDE`` were not looked at while defaults were mended,
and are judged at the end; ``LOOKED_AT`` were.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

import torchgw
from benchmarks.harness.evaluate import made_feasible
from benchmarks.quality import networks, real
from benchmarks.quality.instances import (
    Array,
    Index,
    Instance,
    from_matrices,
    no_truth,
    permutation_plan,
    rotation,
)
from torchgw._problem.problem import stored_matrix

__all__ = ["KEPT_ASIDE", "LOOKED_AT", "as_given", "moved_edges", "moved_lengths", "random_graph"]

Generator = np.random.Generator
Draw = Callable[[Generator], Instance]


def as_given(x: Any, y: Any, judge: Any, answer: Array | None = None) -> Instance:
    """Solved from points or graphs; the matrices are those that the defaults make of them."""
    with warnings.catch_warnings():
        # said again by the solve that is judged
        warnings.simplefilter("ignore")
        asked = torchgw.solve(
            x, y, n_init=1, random_state=0, options=torchgw.Options(callback=lambda entry: True)
        )
    assert asked.extension is not None
    known = asked.extension.known
    d_x, d_y = (
        np.asarray(stored_matrix(known.distances(side).ways()[0]).double()) for side in (0, 1)
    )
    return Instance(d_x, d_y, judge, {"X": x, "Y": y}, answer=answer)


def _same_label(first: Any, second: Any) -> Callable[[Array], float]:
    """Share of the points whose largest entry has their label; NaN for all without labels."""
    return lambda plan: float((np.asarray(second)[plan.argmax(1)] == np.asarray(first)).mean())


def _labelled(x: Array, y: Array, first: Any, second: Any) -> Instance:
    """Points whose partners are those of the same label; what the shares forbid goes anywhere."""
    same = np.asarray(np.asarray(first)[:, None] == np.asarray(second), dtype=np.float64)
    answer = made_feasible(same / same.sum())
    return as_given(x, y, _same_label(first, second), answer)


def _views(x: Array, y: Array, rng: Generator, labels: Any = None) -> Instance:
    """Two tables of the same rows, the second shuffled; judged by labels if there are any."""
    order = rng.permutation(len(y))
    names = np.arange(len(x)) if labels is None else np.asarray(labels)
    answer = permutation_plan(np.argsort(order))
    return as_given(x, y[order], _same_label(names, names[order]), answer)


def _copy(x: Array, rng: Generator, noise: float, wide: int | None = None) -> Instance:
    """A cloud and its turned copy with noise, a share of each axis' deviation."""
    d = x.shape[1]
    moved = x + noise * x.std(0) * rng.normal(size=x.shape)
    return _views(x, moved @ rotation(wide or d, rng)[:d], rng)


def _table(name: str, rng: Generator, n: int, *, standard: bool = True) -> tuple[Array, Any]:
    """Rows of a table that ships with scikit-learn, and their labels."""
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    values = np.asarray(data.data, dtype=np.float64)
    if standard:
        values = (values - values.mean(0)) / np.maximum(values.std(0), 1e-12)
    rows = rng.choice(len(values), min(n, len(values)), replace=False)
    return values[rows], data.target[rows]


def _halves(name: str) -> Draw:
    """Two disjoint halves of the features, two views of the same rows."""

    def draw(rng: Generator) -> Instance:
        values, labels = _table(name, rng, 180)
        columns, half = rng.permutation(values.shape[1]), values.shape[1] // 2
        return _views(values[:, columns[:half]], values[:, columns[half:]], rng, labels)

    return draw


def _noisy(name: str, noise: float, *, standard: bool = True) -> Draw:
    return lambda rng: _copy(_table(name, rng, 200, standard=standard)[0], rng, noise)


def _mean_and_worst(rng: Generator) -> Instance:
    """Breast cancer: means of ten features, and their worst values."""
    values, labels = _table("breast_cancer", rng, 200)
    return _views(values[:, :10], values[:, 20:], rng, labels)


def _digits_top_and_bottom(rng: Generator) -> Instance:
    values, labels = _table("digits", rng, 250, standard=False)
    return _views(values[:, :32], values[:, 32:], rng, labels)


def _digits_pixels_and_gradients(rng: Generator) -> Instance:
    values, labels = _table("digits", rng, 250, standard=False)
    images = values.reshape(-1, 8, 8)
    steps = np.concatenate([np.diff(images, axis=axis).reshape(len(images), -1) for axis in (1, 2)],
                           axis=1)  # fmt: skip
    return _views(values, steps, rng, labels)


def _subset(d: int, n: int, m: int) -> Draw:
    """Some points of a cloud against all of them, turned."""

    def draw(rng: Generator) -> Instance:
        y = rng.normal(size=(m, d)) * np.linspace(1, 2, d)
        chosen, turn = rng.choice(m, n, replace=False), rotation(d, rng)
        return _labelled(y[chosen] @ turn, y, chosen, np.arange(m))

    return draw


def _duplicates(rng: Generator) -> Instance:
    """Every point of a cloud up to five times on one side, once on the other."""
    x = rng.normal(size=(90, 4)) * [1, 1.5, 2, 3]
    repeated = np.repeat(np.arange(90), rng.integers(1, 6, size=90))
    return _labelled(x[repeated] @ rotation(4, rng), x, repeated, np.arange(90))


def _outliers(rng: Generator) -> Instance:
    """A cloud; one side has 4% of its points ten times as far away."""
    x = rng.normal(size=(180, 3)) * [1, 2, 3]
    y = x @ rotation(3, rng)
    y[rng.choice(180, 7, replace=False)] *= 10
    return _views(x, y, rng)


def _clusters(shares: Sequence[float], d: int, n: int, m: int, apart: float) -> Draw:
    """Two draws of one mixture of round clusters; judged by cluster."""

    def draw(rng: Generator) -> Instance:
        centres = rng.normal(size=(len(shares), d)) * apart / d**0.5
        weights = np.asarray(shares) / sum(shares)
        labels = [np.repeat(np.arange(len(shares)), rng.multinomial(k, weights)) for k in (n, m)]
        x, y = (centres[each] + rng.normal(size=(len(each), d)) for each in labels)
        return _labelled(x, y @ rotation(d, rng), *labels)

    return draw


def _two_draws(surface: Callable[[Generator, int], Array], n: int = 180) -> Draw:
    """Two independent samples of one surface, the second turned; no match is true."""

    def draw(rng: Generator) -> Instance:
        x, y = surface(rng, n), surface(rng, n)
        return as_given(x, y @ rotation(y.shape[1], rng), no_truth)

    return draw


def _sphere(rng: Generator, n: int) -> Array:
    x = rng.normal(size=(n, 3))
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


def _torus(rng: Generator, n: int) -> Array:
    u, v = rng.uniform(0, 2 * np.pi, size=(2, n))
    ring = 2 + 0.7 * np.cos(v)
    return np.column_stack([ring * np.cos(u), ring * np.sin(u), 0.7 * np.sin(v)])


def _box(rng: Generator, n: int) -> Array:
    """Points of the surface of a box whose sides differ little."""
    x = rng.uniform(-1, 1, size=(n, 3))
    face = rng.integers(3, size=n)
    x[np.arange(n), face] = rng.choice([-1, 1], n)
    return np.asarray(x * [1, 1.2, 1.5])


def _two_rings(rng: Generator, n: int) -> Array:
    """Two rings linked as in a chain, the second smaller and half as dense."""
    t = rng.uniform(0, 2 * np.pi, size=n)
    zero = np.zeros(n)
    first = np.column_stack([np.cos(t), np.sin(t), zero])
    second = np.column_stack([1 + 0.8 * np.cos(t), zero, 0.8 * np.sin(t)])
    return np.where((np.arange(n) % 3 == 0)[:, None], second, first)


def _helix(rng: Generator, n: int) -> Array:
    """A helix that winds faster at one end."""
    t = np.sort(rng.random(n))
    return np.column_stack([np.cos(12 * t**1.5), np.sin(12 * t**1.5), 3 * t])


def _s_curve(rng: Generator) -> Instance:
    """A sheet bent to an S against the flat one, thinner at one end; judged by rank."""
    from scipy.stats import spearmanr

    u = [np.sqrt(rng.random(220)), np.sqrt(rng.random(250))]
    width = [2 * rng.random(len(part)) * (0.3 + part) for part in u]
    t = 3 * np.pi * (u[0] - 0.5)
    x = np.column_stack([np.sin(t), width[0], np.sign(t) * (np.cos(t) - 1)])
    y = np.column_stack([3 * np.pi * u[1], width[1]]) @ rotation(2, rng)

    def judge(plan: Array) -> float:
        return float(spearmanr(u[0], u[1][plan.argmax(1)]).statistic)

    return as_given(x, y, judge)


def _adjacency(edges: Any, n: int) -> Array:
    table = np.zeros((n, n))
    for i, j in edges:
        table[i, j] = table[j, i] = 1
    return table


def moved_edges(make: Callable[[int], Any], changed: float, *, hops: bool = False) -> Draw:
    """A graph of NetworkX against a shuffled copy with a share of the edges put elsewhere."""

    def draw(rng: Generator) -> Instance:
        first, second, order = _moved(make, changed, rng)
        n, match = len(order), np.argsort(order)
        second = second[np.ix_(order, order)]
        if hops:
            first, second = (_hops(table) for table in (first, second))
        judge = _same_label(match, np.arange(n))
        return from_matrices(first, second, judge, answer=permutation_plan(match))

    return draw


def moved_lengths(make: Callable[[int], Any], changed: float) -> Draw:
    """The same, of edges of length 0.5 to 1.5 that differ by 2% in the copy, given as graphs."""

    def draw(rng: Generator) -> Instance:
        from scipy.sparse import csr_array

        first, second, order = _moved(make, changed, rng)
        n, match = len(order), np.argsort(order)
        lengths, noise = np.triu(rng.uniform(0.5, 1.5, (n, n))), np.triu(rng.normal(size=(n, n)))
        lengths, noise = lengths + lengths.T, noise + noise.T
        second = (second * lengths * np.exp(0.02 * noise))[np.ix_(order, order)]
        judge = _same_label(match, np.arange(n))
        graphs = csr_array(first * lengths), csr_array(second)
        return as_given(*graphs, judge, permutation_plan(match))

    return draw


def _moved(
    make: Callable[[int], Any], changed: float, rng: Generator
) -> tuple[Array, Array, Index]:
    """Draw a graph, the graph with some edges elsewhere, and an order for the nodes of that."""
    import networkx as nx

    graph = nx.convert_node_labels_to_integers(make(int(rng.integers(2**31))))
    n, edges = len(graph), np.array(graph.edges())[:, :2]
    first = _adjacency(edges, n)
    gone = rng.choice(len(edges), round(changed * len(edges)), replace=False)
    free = np.argwhere(np.triu(first == 0, 1))
    fresh = free[rng.choice(len(free), len(gone), replace=False)]
    second = _adjacency(np.concatenate([np.delete(edges, gone, 0), fresh]), n)
    return first, second, rng.permutation(n)


def _hops(table: Array) -> Array:
    """Hop counts; what cannot be reached is one further than anything else."""
    from scipy.sparse.csgraph import shortest_path

    hops = shortest_path(table, unweighted=True)
    finite = np.isfinite(hops)
    return np.where(finite, hops, hops[finite].max() + 1)


def _named(name: str) -> Callable[[int], Any]:
    """A graph that ships with NetworkX; random ones are made of a seed."""

    def make(seed: int) -> Any:
        import networkx as nx

        return getattr(nx, name)()

    return make


def random_graph(name: str, *arguments: Any) -> Callable[[int], Any]:
    """A random graph of NetworkX, by its name and arguments."""

    def make(seed: int) -> Any:
        import networkx as nx

        return getattr(nx, name)(*arguments, seed=seed)

    return make


def _blocks(rng: Generator) -> Instance:
    """Two draws of one block model; judged by block."""
    sizes, shares = (50, 40, 30, 60), 0.03 + 0.35 * np.eye(4)
    labels = np.repeat(np.arange(4), sizes)

    def table() -> Array:
        upper = np.triu(rng.random((180, 180)) < shares[np.ix_(labels, labels)], 1)
        return np.asarray(upper | upper.T, dtype=np.float64)

    order = rng.permutation(180)
    return from_matrices(table(), table()[np.ix_(order, order)], _same_label(labels, labels[order]))


def _unrelated(rng: Generator) -> Instance:
    """Two dense random graphs that have nothing in common."""
    upper = [np.triu(rng.random((n, n)) < 0.4, 1) for n in (150, 170)]
    first, second = (np.asarray(part | part.T, dtype=np.float64) for part in upper)
    return from_matrices(first, second, no_truth)


def _kernels(rng: Generator) -> Instance:
    """Similarities, not distances: Gaussian kernels of a cloud and of its noisy copy."""
    x = rng.normal(size=(160, 5)) * [1, 1, 1.5, 2, 2.5]
    order = rng.permutation(160)
    y = (x + 0.1 * rng.normal(size=x.shape))[order]
    tables = [np.exp(-cdist(side, side, "sqeuclidean") / 20) for side in (x, y)]
    answer = permutation_plan(np.argsort(order))
    judge = _same_label(np.arange(160), order)
    return from_matrices(*tables, judge, answer=answer, divided=False)


def _series(rng: Generator) -> Instance:
    """Correlations among 120 series with six common factors, of two stretches of time."""
    loads = rng.normal(size=(120, 6)) * [3, 1.5, 1.2, 1, 1, 0.8]
    order = rng.permutation(120)
    tables = []
    for rows in (np.arange(120), order):
        series = loads @ rng.normal(size=(6, 400)) + rng.normal(size=(120, 400))
        tables.append(1 - np.corrcoef(series[rows]))
    answer = permutation_plan(np.argsort(order))
    judge = _same_label(np.arange(120), order)
    return from_matrices(*tables, judge, answer=answer, divided=False)


def _dendrograms(name: str, method: str) -> Draw:
    """Heights at which clusters of 100 to 250 points merge, and those of the points with noise."""

    def draw(rng: Generator) -> Instance:
        from scipy.cluster.hierarchy import cophenet, linkage
        from scipy.spatial.distance import squareform

        values, _ = _table(name, rng, int(rng.integers(100, 250)))
        order = rng.permutation(len(values))
        noisy = (values + 0.15 * rng.normal(size=values.shape))[order]
        tables = (squareform(cophenet(linkage(side, method))) for side in (values, noisy))
        judge = _same_label(np.arange(len(order)), order)
        return from_matrices(*tables, judge, answer=permutation_plan(np.argsort(order)))

    return draw


def _word_vectors(packages: Sequence[str]) -> tuple[list[str], Array]:
    """Vectors of words by what stands near them in the docstrings of packages."""
    text: list[str] = []
    for name in packages:
        module = __import__(name, fromlist=["x"])
        for _, item in sorted(vars(module).items()):
            if callable(item):
                text += re.findall("[a-z]{3,}", (inspect.getdoc(item) or "").lower()) + [""] * 4
    words = [word for word, _ in Counter(text).most_common(701) if word][:700]
    place = {word: index for index, word in enumerate(words)}
    pairs = np.zeros((700, 700))
    for gap in range(1, 5):
        for left, right in zip(text, text[gap:], strict=False):
            if left in place and right in place:
                pairs[place[left], place[right]] += 1
                pairs[place[right], place[left]] += 1
    mean = np.outer(pairs.sum(1), pairs.sum(0)) / pairs.sum() + 1e-12
    lifted = np.log(np.maximum(pairs / mean, 1))
    left, sizes, _ = np.linalg.svd(lifted)
    return words, left[:, :40] * np.sqrt(sizes[:40])


def _words_of_two_packages(rng: Generator) -> Instance:
    """250 words as they are used in the docstrings of NumPy and of SciPy, cosine distances."""
    first, x = _word_vectors(["numpy", "numpy.linalg", "numpy.fft", "numpy.random"])
    second, y = _word_vectors(["scipy.stats", "scipy.signal", "scipy.special", "scipy.linalg"])
    common = [word for word in first if word in set(second)]
    chosen = [common[place] for place in rng.permutation(min(250, len(common)))]
    order = rng.permutation(len(chosen))
    x = x[[first.index(word) for word in chosen]]
    y = y[[second.index(chosen[place]) for place in order]]
    tables = [cdist(side, side, "cosine") for side in (x, y)]
    judge = _same_label(np.arange(len(chosen)), order)
    return from_matrices(*tables, judge, answer=permutation_plan(np.argsort(order)))


def _some_words(rng: Generator) -> Instance:
    """300 of the 1,000 words of ``words.npz``, layers 2 and 6."""
    whole = real.word_layers(rng, 2, 6)
    assert whole.answer is not None
    rows = rng.choice(1_000, 300, replace=False)
    columns = rng.permutation(whole.answer.argmax(1)[rows])
    return _part(whole, rows, columns)


def _part(whole: Instance, rows: Index, columns: Index) -> Instance:
    """Some rows and columns of a problem with one partner each."""
    assert whole.answer is not None
    answer = whole.answer[np.ix_(rows, columns)]
    answer = answer / answer.sum()
    match = answer.argmax(1)
    return from_matrices(
        whole.d_x[np.ix_(rows, rows)], whole.d_y[np.ix_(columns, columns)],
        _same_label(match, np.arange(len(columns))), answer=answer, divided=False,
    )  # fmt: skip


def _some_cells(rng: Generator) -> Instance:
    """250 of the cells of SNARE-seq, from points; judged by cell line."""
    data = networks.snare_cells(rng)
    rows = rng.choice(len(data.atac), 250, replace=False)
    columns = rng.permutation(data.match[rows])
    judge = _same_label(data.atac_type[rows], data.rna_type[columns])
    answer = np.asarray(data.match[rows][:, None] == columns, dtype=np.float64) / 250
    return as_given(data.atac[rows], data.rna[columns], judge, answer)


def _heavy(rng: Generator) -> Instance:
    return _copy(rng.standard_t(2, size=(200, 3)) * [1, 1.5, 2], rng, 0.01)


def _scales(rng: Generator) -> Instance:
    """Six features in units that differ by a thousand."""
    return _copy(rng.gamma(2, size=(180, 6)) * np.logspace(-1, 2, 6), rng, 0.05)


def _cloud(n: int, d: int, noise: float, wide: int | None = None) -> Draw:
    return lambda rng: _copy(rng.normal(size=(n, d)) * np.linspace(1, 1.6, d), rng, noise, wide)


def _groups_of_words(rng: Generator) -> Instance:
    """Counts of 60 words in 200 texts of eight subjects, cosine distances of two halves of them."""
    subjects = rng.dirichlet(np.full(60, 0.1), size=8)
    labels = rng.integers(8, size=200)
    counts = np.array([rng.multinomial(80, 0.3 / 60 + 0.7 * subjects[each]) for each in labels])
    return _views(counts[:, ::2].astype(float), counts[:, 1::2].astype(float), rng, labels)


LOOKED_AT: dict[str, Draw] = {
    "iris-noisy": _noisy("iris", 0.03), "iris-halves": _halves("iris"),
    "wine-raw": _noisy("wine", 0.03, standard=False), "cancer-mean-worst": _mean_and_worst,
    "digits-top-bottom": _digits_top_and_bottom,
    "karate": moved_edges(_named("karate_club_graph"), 0.05),
    "florentine": moved_edges(_named("florentine_families_graph"), 0.0),
    "davis-hops": moved_edges(_named("davis_southern_women_graph"), 0.02, hops=True),
    "small-world": moved_edges(random_graph("connected_watts_strogatz_graph", 180, 6, 0.15), 0.05),
    "regular": moved_edges(random_graph("random_regular_graph", 4, 150), 0.0), "blocks": _blocks,
    "unrelated": _unrelated, "clusters-5-unequal": _clusters((1, 2, 4, 6, 8), 3, 200, 260, 9),
    "clusters-8-in-10": _clusters((1,) * 8, 10, 240, 240, 7), "cloud-in-8": _cloud(200, 8, 0.05),
    "heavy-tails": _heavy, "outliers": _outliers, "subset": _subset(3, 100, 240),
    "duplicates": _duplicates, "sphere": _two_draws(_sphere), "torus": _two_draws(_torus),
    "s-curve": _s_curve, "two-rings": _two_draws(_two_rings), "kernels": _kernels,
    "some-words": _some_words, "some-cells": _some_cells,
    "dendrograms": _dendrograms("digits", "average"),
}  # fmt: skip
KEPT_ASIDE: dict[str, Draw] = {
    "wine-halves": _halves("wine"), "diabetes-noisy": _noisy("diabetes", 0.1),
    "digits-gradients": _digits_pixels_and_gradients,
    "les-miserables": moved_edges(_named("les_miserables_graph"), 0.05, hops=True),
    "power-law": moved_edges(random_graph("powerlaw_cluster_graph", 180, 3, 0.4), 0.05),
    "random-tree": moved_edges(random_graph("random_labeled_tree", 140), 0.0, hops=True),
    "clusters-4-unequal": _clusters((1, 1, 3, 7), 5, 220, 150, 8),
    "cloud-to-30": _cloud(180, 12, 0.1, 30), "subset-in-6": _subset(6, 120, 200), "scales": _scales,
    "box": _two_draws(_box), "helix": _two_draws(_helix), "series": _series,
    "words-of-packages": _words_of_two_packages, "groups-of-words": _groups_of_words,
    "dendrograms-complete": _dendrograms("breast_cancer", "complete"),
}  # fmt: skip
