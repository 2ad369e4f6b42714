"""The named problems: how an instance is drawn, what is scored, and what counts as success."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.quality import clouds, networks, random_matrices, real
from benchmarks.quality.instances import Instance

__all__ = ["PROBLEMS", "RANDOM_MATRICES", "QualityProblem"]


@dataclass(frozen=True)
class QualityProblem:
    """A distribution of instances with a known answer."""

    name: str
    draw: Callable[[np.random.Generator], Instance]
    metric: str
    threshold: float  # of the metric, for success
    lower_is_better: bool = False
    large: bool = False  # takes minutes with some peers

    def instance(self, seed: int) -> Instance:
        """Return the instance of a seed; instances of two problems share no random numbers."""
        key = [seed, *self.name.encode()]
        return self.draw(np.random.default_rng(key))

    def succeeds(self, metric: float) -> bool:
        """Whether a metric meets the threshold; NaN does not."""
        return metric <= self.threshold if self.lower_is_better else metric >= self.threshold


# Sizes and epsilon, at which the product plan is no optimum.
RANDOM_MATRICES = {
    "random-12x15": (12, 15, 0.02),
    "random-40x50": (40, 50, 0.02),
    "random-60x80": (60, 80, 0.01),
}
_HITS = "nodes matched"
_NEAR = "points near a right place"


def _network(
    kind: str,
    draw: Callable[[np.random.Generator, float], Instance],
    percent: int,
    threshold: float,
) -> QualityProblem:
    return QualityProblem(
        f"{kind}-1000-extra{percent}", lambda rng: draw(rng, percent / 100), _HITS, threshold,
        large=True,
    )  # fmt: skip


def _scale_free(rng: np.random.Generator, extra: float) -> Instance:
    return networks.scale_free(rng, 1_000, extra)


def _geometric(rng: np.random.Generator, extra: float) -> Instance:
    return networks.geometric(rng, 1_000, extra, local=True)


def _shortcuts(rng: np.random.Generator, extra: float) -> Instance:
    return networks.geometric(rng, 1_000, extra, local=False)


def _word_layers(source: int, target: int) -> QualityProblem:
    return QualityProblem(
        f"words-{source}-{target}", lambda rng: real.word_layers(rng, source, target), "P@1", 0.99,
        large=True,
    )  # fmt: skip


def _yeast(extra: int, threshold: float) -> QualityProblem:
    return QualityProblem(
        f"yeast-{extra}", lambda rng: real.yeast(rng, extra, by_degree=False),
        "nodes of the matching right", threshold, large=True,
    )  # fmt: skip


def _yeast_by_degree(extra: int) -> QualityProblem:
    return QualityProblem(
        f"yeast-{extra}-degree", lambda rng: real.yeast(rng, extra, by_degree=True), _HITS, 0.5,
        large=True,
    )  # fmt: skip


def _rewired(percent: int) -> QualityProblem:
    return QualityProblem(
        f"erdos-renyi-500-rewired{percent}",
        lambda rng: networks.rewired(rng, 500, 4, percent / 100),
        "edges kept / the true matching's", 0.98, large=True,
    )  # fmt: skip


def _random_matrices(name: str, n: int, m: int, epsilon: float) -> QualityProblem:
    return QualityProblem(
        name, lambda rng: random_matrices.independent(rng, n, m, epsilon),
        "objective / best of 64 descents", 1 + 1e-4, lower_is_better=True, large=True,
    )  # fmt: skip


def _digits(n: int) -> QualityProblem:
    return QualityProblem(
        f"digits-{n}", lambda rng: real.digits(rng, n), "P@1", 0.8, large=True
    )  # fmt: skip


_ALL = (
    QualityProblem("tiny", lambda rng: clouds.isometric_copy(rng, 40, 2, 0.01), _HITS, 0.8),
    QualityProblem("cloud-2d", lambda rng: clouds.isometric_copy(rng, 200, 2, 0.01), _HITS, 0.8),
    QualityProblem("cloud-3d", lambda rng: clouds.isometric_copy(rng, 200, 3, 0.03), _HITS, 0.8),
    QualityProblem(
        "cloud-round",
        lambda rng: clouds.isometric_copy(rng, 200, 3, 0.03, round_=True),
        _HITS,
        0.8,
    ),
    QualityProblem("tree", lambda rng: networks.tree(rng, 200, 0.02), _HITS, 0.8),
    QualityProblem("moons", lambda rng: clouds.moons(rng, 200, 0.03), _NEAR, 0.9),
    QualityProblem("square", lambda rng: clouds.shape(rng, 4, 120, 0.01), _NEAR, 0.9),
    QualityProblem("pentagon", lambda rng: clouds.shape(rng, 5, 120, 0.01), _NEAR, 0.9),
    QualityProblem("ellipse", lambda rng: clouds.shape(rng, 0, 120, 0.01), _NEAR, 0.9),
    QualityProblem("fork", lambda rng: clouds.fork(rng, 250, 300, 0.02), _NEAR, 0.9),
    QualityProblem(
        "spiral", lambda rng: clouds.spiral_to_roll(rng, 400, 500), "signed Spearman", 0.998
    ),
    QualityProblem(
        "sizes", lambda rng: clouds.mixture(rng, 120, 300, (1, 1, 1, 1, 1)), "same blob", 0.95
    ),
    QualityProblem(
        # the shares allow 0.88 to be right; the best plans near the truth have 0.68 to 0.88
        "densities",
        lambda rng: clouds.mixture(rng, 200, 200, (0.12, 0.16, 0.2, 0.24, 0.28)),
        "same blob",
        0.6,
    ),
    QualityProblem("cosine", lambda rng: clouds.cosine_copy(rng, 300, 15, 0.6), "P@1", 0.8),
    QualityProblem("cosine-noisy", lambda rng: clouds.cosine_copy(rng, 300, 15, 0.9), "P@1", 0.8),
    QualityProblem("cosine-few", lambda rng: clouds.cosine_copy(rng, 300, 5, 0.6), "P@1", 0.8),
    QualityProblem("words", lambda rng: clouds.words(rng, 300, 0.3, zipf=False), "P@1", 0.8),
    QualityProblem("words-noisy", lambda rng: clouds.words(rng, 300, 0.4, zipf=False), "P@1", 0.5),
    QualityProblem("words-zipf", lambda rng: clouds.words(rng, 300, 0.3, zipf=True), "P@1", 0.8),
    *(_network("scale-free", _scale_free, percent, 0.5) for percent in (5, 15, 25)),
    # nodes side by side look alike in hops: a right arrangement has some of them exchanged
    *(_network("geometric", _geometric, percent, 0.1) for percent in (5, 15, 25)),
    _network("shortcuts", _shortcuts, 5, 0.1),
    *(_word_layers(*layers) for layers in ((2, 6), (4, 6), (2, 4))),
    # nodes that have the same neighbours can be exchanged; the best published are these
    _yeast(5, 0.84),
    _yeast(20, 0.77),
    *(_yeast_by_degree(extra) for extra in (5, 20)),
    *(_rewired(percent) for percent in (10, 20)),
    *(_random_matrices(name, *kind) for name, kind in RANDOM_MATRICES.items()),
    *(_digits(n) for n in (1_000, 5_000)),
    QualityProblem(
        "snare-scot", networks.snare_scot, "FOSCTTM", 0.16, lower_is_better=True, large=True
    ),
    QualityProblem(
        "snare-points", networks.snare_points, "FOSCTTM", 0.2, lower_is_better=True, large=True
    ),
)
PROBLEMS: dict[str, QualityProblem] = {problem.name: problem for problem in _ALL}
