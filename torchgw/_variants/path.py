"""Solves along one option: what each value, metric or mass is worth, and which one to take."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchgw._answer.overlap import elbow
from torchgw._api import solve
from torchgw._boundary.checks import check_count, check_not_negative, is_number
from torchgw._errors import InvalidInputError
from torchgw._problem.table import Options
from torchgw._results.base import Result
from torchgw._results.bounds import distance_correlation
from torchgw._results.confidence import why_not
from torchgw._results.result import GWResult
from torchgw._starts.alternatives import entropy
from torchgw._tensors.deadline import countdown
from torchgw._typing import Array

# Options that a path may go along; a solve of the first three begins at the plan before it.
_WARM = ("epsilon", "alpha", "mass")
_ALONG = (*_WARM, "distances", "n_neighbors")
_WHY = {
    "agreement": "the largest agreement, as these matches have no confidence",
    "metrics": "the plan that the least favourable of the metrics agrees with most",
    "product": "the largest product of agreement and stability",
    "elbow": "the last mass before the cost of more leaves its level",
}


@dataclass(frozen=True, repr=False, eq=False)
class PathResult(Result):
    """Outcome of :func:`torchgw.path`, K solves in the order in which values are listed.

    Attributes
    ----------
    option : str
        What the path goes along.
    points : tuple of str
        Its values, in words.
    value, agreement, entropy, stability : ndarray, shape (K,), float64
        The transport objective; the correlation of the distances that the plan relates, along
        ``distances`` the least of those by each of the metrics listed; KL(P |
        a x b) as a share of the largest that a plan of these sizes has, 1 for a matching and 0 for
        the product plan; and the mean of :meth:`GWResult.confidence`, by groups where there are
        any, NaN for relaxed plans, masks and known pairs, other losses, directed tables and
        ``alpha=0``.
    recommended : int
        Place of the value to take.
    why : str
        By what rule.
    results : tuple of GWResult
        The solves.
    """

    option: str
    points: tuple[str, ...]
    value: Array
    agreement: Array
    entropy: Array
    stability: Array
    recommended: int
    why: str
    results: tuple[GWResult, ...] = ()

    @property
    def best(self) -> GWResult:
        """The solve to take."""
        return self.results[self.recommended]

    def _summary(self) -> tuple[str, dict[str, str], str]:
        place = self.recommended
        figures = {
            "recommended": self.points[place],
            "value": f"{self.value[place]:.6g}",
            "agreement": f"{self.agreement[place]:.3f}",
            "stability": f"{self.stability[place]:.3f}",
        }
        return f"{len(self.points)} solves along {self.option}", figures, self.why

    def __repr__(self) -> str:
        """Summarise, with a line for each value."""
        rows = zip(
            self.points, self.value, self.agreement, self.entropy, self.stability, strict=True
        )
        lines = [super().__repr__(), f"  {self.option:>12} value      agreement entropy stability"]
        lines += [
            f"  {name:>12} {v:<10.4g} {a:<9.3f} {e:<7.3f} {s:.3f}" for name, v, a, e, s in rows
        ]
        return "\n".join(lines)


def path(
    X: Any = None,
    Y: Any = None,
    *,
    epsilon: Any = None,
    alpha: Any = None,
    mass: Any = None,
    distances: Any = None,
    n_neighbors: Any = None,
    n_resamples: int = 10,
    groups: Any = None,
    **options: Any,
) -> PathResult:
    """Solve along several values of one option, and recommend one, without a truth.

    Pass a list for one of ``epsilon``, ``alpha``, ``mass``, ``distances`` and ``n_neighbors``.
    Along the first three a solve begins at the plan of the one before it: from the largest epsilon
    down, from the largest mass down, and up in alpha. Metrics and numbers of neighbours are solved
    each by itself.

    Recommended is the largest product of agreement (correlation of the distances that the plan
    relates, negative ones count as 0) and stability (mean confidence); the largest agreement alone
    where no solve has a stability, as with ``unbalanced``, ``allowed``, ``pairs`` or another loss.
    Either alone misleads: a blurred plan is stable and agrees in nothing, and a sharp one of
    unrelated data agrees in what it could choose, until points are drawn again. Of masses it is the
    last one before the cost of what is added leaves its level, as by ``mass="auto"``: they are
    compared at one epsilon over the mass, and the one recommended is solved again at its own,
    unless you pass an ``epsilon``. Of metrics it is the one whose plan the least favourable of all
    that are listed agrees with most: what a metric sees by mistake in both spaces, others do not.

    Parameters
    ----------
    X, Y : space
        As in :func:`torchgw.solve`.
    epsilon, alpha, mass, distances, n_neighbors
        As in ``solve``; one of them a list, of two values or more.
    n_resamples : int
        Of :meth:`GWResult.confidence`, at every value.
    groups : array-like, shape (m,), optional
        Labels of Y, within which a partner may change; see :meth:`GWResult.confidence`.
    **options
        All others of ``solve``, which refuses unknown ones. A ``time_limit`` is of the whole path.

    Returns
    -------
    PathResult
        ``torchgw.plotting.plot_path`` draws it; ``best`` is the solve recommended.

    Raises
    ------
    InvalidInputError, InvalidTypeError
        If not exactly one option is a list, and as in ``solve``.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> X = np.random.default_rng(0).normal(size=(30, 2)) * [3, 1]
    >>> found = torchgw.path(
    ...     X, X + 5, epsilon=[1.0, 0.1, 0.01], distances="euclidean", scale=None, random_state=0,
    ...     n_resamples=3,
    ... )
    >>> found.points[found.recommended] != '1'
    True
    """
    check_count("n_resamples", n_resamples)
    passed = dict(zip(_ALONG, (epsilon, alpha, mass, distances, n_neighbors), strict=True))
    lists = [name for name, given in passed.items() if isinstance(given, (list, np.ndarray))]
    if len(lists) != 1 or len(passed[lists[0]]) < 2:
        raise InvalidInputError(
            f"A path goes along one option: pass a list of two values or more for one of "
            f"{', '.join(_ALONG)}; got lists for {', '.join(lists) or 'none'}."
        )
    if isinstance(groups, (tuple, list)) and any(np.ndim(part) for part in groups):
        raise InvalidInputError(
            "`groups` of a path are a label for each row of Y, within which a partner may change. "
            "Pass `allowed` for labels that may not mix, such as lambda i, j: x[i] == y[j]."
        )
    option = lists[0]
    fixed = {name: given for name, given in passed.items() if given is not None and name != option}
    points = [each.item() if hasattr(each, "item") else each for each in passed[option]]
    if option in _WARM:
        if not all(map(is_number, points)):
            raise InvalidInputError(f"A path along `{option}` goes along numbers; got {points}.")
        points = sorted(set(points), reverse=option != "alpha")
    limit, given = options.pop("time_limit", None), options.get("options")
    common = given if isinstance(given, Options) else Options()
    if limit is None and common.time_limit is not None:
        limit, options["options"] = common.time_limit, common.replace(time_limit=None)
    limits = _shares(limit, 2 * len(points))
    level = option == "mass" and fixed.get("epsilon", common.epsilon) == "auto"

    def solved(point: Any, near: list[GWResult], **own: Any) -> GWResult:
        if option in _WARM and near:
            plan = near[-1].lazy_plan.giving(in_numpy=False).to_dense()
            own["init"] = plan / plan.sum()
        own = {**fixed, **options, **own, option: point}
        return solve(X, Y, **own, time_limit=next(limits))

    results: list[GWResult] = []
    for point in points:
        # costs of masses are compared where each is blurred in proportion to its mass [L1903]
        start = {"epsilon": results[0].epsilon * point / points[0]} if level and results else {}
        results.append(solved(point, results, **start))
    if option == "mass":
        place = _last_level(np.array(points), np.array([one.value for one in results]))
        if level and place:
            results[place] = solved(points[place], [results[place]])
    # a plan is judged by its own distances, but along metrics by all of them
    known = [one._known() for one in results]
    stability = np.full(len(results), np.nan)
    for k, (one, own) in enumerate(zip(results, known, strict=True)):
        if option != "mass" and not why_not(own, one.lazy_plan):
            sure = one.confidence(n_resamples, groups=groups, time_limit=next(limits))
            stability[k] = float(sure.group.mean())
    agreement = np.array([
        min(
            distance_correlation(one.lazy_plan.giving(in_numpy=False), judge)
            for judge in (known if option == "distances" else [own])
        )
        for one, own in zip(results, known, strict=True)
    ])  # fmt: skip
    value = np.array([one.value for one in results])
    if option == "mass":
        why = _WHY["elbow"]
    elif option == "distances":
        place, why = int(np.nan_to_num(agreement, nan=-1.0).argmax()), _WHY["metrics"]
    else:
        none = bool(np.isnan(stability).all())
        worth = np.nan_to_num(agreement).clip(0) * (1.0 if none else np.nan_to_num(stability))
        place, why = int(worth.argmax()), _WHY["agreement" if none else "product"]
    return PathResult(
        option,
        tuple(f"{point:.4g}" if isinstance(point, float) else str(point) for point in points),
        value, agreement, np.array([_sharpness(one) for one in results]), stability, place, why,
        tuple(results),
    )  # fmt: skip


def _shares(limit: float | None, count: int) -> Iterator[float | None]:
    """Yield what is left of a limit of time, shared by what is still to come."""
    check_not_negative("time_limit", limit, none=True)
    left = countdown(limit)
    for more in range(count, 0, -1):
        seconds = left()
        yield None if seconds is None else seconds / more


def _sharpness(result: GWResult) -> float:
    """Compute KL(P | a x b), as a share of the logarithm of the smaller side."""
    plan = result.lazy_plan.giving(in_numpy=False)
    a, b = (part.double() for part in plan.weights)
    rows = torch.arange(plan.shape[0], device=plan.device).split(256)
    total = sum(entropy(plan.rows(block).double(), a[block], b) for block in rows)
    return total / max(math.log(min(plan.shape)), sys.float_info.min)


def _last_level(masses: Any, value: Any) -> int:
    """Find the last mass before the cost of what is added leaves its level."""
    order = masses.argsort()
    shares, values = masses[order], np.maximum.accumulate(value[order])
    added = np.diff(values, prepend=0) / np.diff(shares**2, prepend=0)
    return int(order[elbow(shares, added)[0]])
