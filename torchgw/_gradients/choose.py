"""Which gradient fits a problem; the gradient of a name."""

import logging
from typing import Literal

from torchgw._errors import UnsupportedError
from torchgw._gradients.contract import CostRows, Gradient, Linearised
from torchgw._gradients.dense import DenseGradient
from torchgw._gradients.factored import FactoredGradient
from torchgw._gradients.sampled import SampledGradient
from torchgw._problem.losses import Loss
from torchgw._problem.problem import Problem

logger = logging.getLogger(__name__)


def make_gradient(name: str, problem: Problem, n_anchors: int, redraw: float) -> Gradient:
    """Build a gradient by name."""
    if name == "dense":
        return DenseGradient(problem)
    if name == "factored":
        return FactoredGradient(problem)
    return SampledGradient(problem, n_anchors, redraw)


def cost_rows(known: Linearised, side: int) -> CostRows:
    """Make the cost of new points of the source (0) or the target (1)."""
    kinds = {kind.name: kind for kind in (DenseGradient, FactoredGradient, SampledGradient)}
    return kinds[known.gradient].rows_at(known, side)


# Entries (n * m) up to which the exact gradient by dense products is affordable: three tables of
# this size and two matrix products of n * m * max(n, m) operations per iteration. [L269]
_DENSE_ENTRIES = {"cpu": 12_000_000, "cuda": 40_000_000}
# Triples of points (n * m * min(n, m)) up to which a loss that is no sum of products is exact, and
# the most that may be asked for: a CPU takes 0.1 us for each, in every iteration. [L260]
_TRIPLES = {"cpu": 10_000_000, "cuda": 2_000_000_000}
_MOST_TRIPLES = {"cpu": 1_000_000_000, "cuda": 100_000_000_000}


def choose_gradient(name: "GradientName", problem: Problem) -> "GradientName":
    """Choose the gradient asked for, or for "auto" an exact one wherever it fits."""
    crossed = problem.crossed()
    if crossed is None:
        return _choose_without_products(name, problem)
    source, target = crossed
    with_factors = [side for side in (source, target) if side.factors() is not None]
    if name == "factored" and not with_factors:
        sides = {"X": problem.source, "Y": problem.target}
        directed = " and ".join(f"`{name}`" for name, side in sides.items() if side.directed)
        why = (
            f"the directed costs of {directed} have none"
            if directed
            else "functions of distances, such as the logarithms of loss='kl' for Y, have none"
        )
        raise UnsupportedError(
            "`gradient='factored'` needs factors on at least one side: distances='landmark', "
            f"'sqeuclidean' or 'cosine' ({why}). Pass gradient='auto' or 'sampled'."
        )
    cheap = all(side.cheap_columns for side in (source, target))
    fits = max(source.n, target.n) ** 2 <= _DENSE_ENTRIES.get(source.device.type, 0)
    chosen: GradientName
    if name != "auto":
        chosen, why = name, "asked for"
    elif len(with_factors) == 2:
        chosen, why = "factored", "factors make it exact without matrices"
    elif cheap and fits:
        chosen, why = "dense", "both distance matrices fit, which makes it exact"
    elif cheap and with_factors:
        chosen, why = "factored", "factors of one side make it exact"
    else:
        chosen, why = "sampled", "distances come by columns only, or are too large for products"
    logger.info("gradient %s: %s", chosen, why)
    return chosen


def check_products(name: "GradientName", loss: Loss) -> None:
    """Refuse factors for a loss that has none."""
    if name == "factored" and loss.cross is None:
        raise UnsupportedError(
            f"`gradient='factored'` needs a loss that is made of products, and loss={loss.name!r} "
            "is not. Pass gradient='auto', 'dense' or 'sampled'."
        )


def _choose_without_products(name: "GradientName", problem: Problem) -> "GradientName":
    """Choose the gradient for a loss whose cross term is no product, as :func:`choose_gradient`."""
    n, m, kind = problem.source.n, problem.target.n, problem.source.device.type
    loss, size = problem.loss.name, n * m * min(n, m)
    cheap = problem.source.cheap_columns and problem.target.cheap_columns
    check_products(name, problem.loss)
    if name == "dense" and size > _MOST_TRIPLES.get(kind, 0):
        raise UnsupportedError(
            f"`gradient='dense'` with loss={loss!r} reads {size:.2g} distances in every iteration, "
            f"which is limited to {_MOST_TRIPLES.get(kind, 0):.2g} on {kind!r}. Pass "
            "gradient='sampled'."
        )
    if name == "auto":
        name = "dense" if cheap and size <= _TRIPLES.get(kind, 0) else "sampled"
    logger.info("gradient %s: loss %s", name, loss)
    return name


GradientName = Literal["auto", "dense", "factored", "sampled"]
