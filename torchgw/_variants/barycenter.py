"""Barycenters of metric spaces, by plans and distances in turn."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchgw._api import solve
from torchgw._boundary.arrays import (
    as_weights,
    check_distances,
    check_list,
    check_points,
    check_shape,
    in_kind,
    make_generator,
    resolve_device,
    without_tensors,
)
from torchgw._boundary.checks import check_count, reject_unknown
from torchgw._errors import ConvergenceWarning, InvalidInputError, warn_user
from torchgw._problem.given import Passed
from torchgw._problem.named import DistanceName, ScaleName, refuse_names
from torchgw._problem.problem import stored_matrix
from torchgw._problem.providers import DistanceOptions, build_provider
from torchgw._results.base import Result
from torchgw._results.result import GWResult
from torchgw._solve.table import check_options
from torchgw._typing import Array, Seed
from torchgw.distances.base import DistanceProvider
from torchgw.distances.factored import FactoredDistance
from torchgw.distances.precomputed import PrecomputedDistance


class _Space(NamedTuple):
    """One of the spaces of a barycenter, with its share."""

    provider: DistanceProvider
    mass: Any  # of its points, as given
    features: Tensor | None  # (n_s, k), float64
    share: float  # its weight in the mean


@reject_unknown
def barycenter(
    spaces: Sequence[Any],
    n: int,
    *,
    weights: Any = None,
    a: Any = None,
    masses: Sequence[Any] | None = None,
    features: Sequence[Any] | None = None,
    alpha: float | None = None,
    distances: DistanceName = "auto",
    scale: ScaleName | None = None,
    epsilon: float | Literal["auto"] = "auto",
    init: Any = None,
    max_iter: int = 50,
    tol: float = 1e-4,
    device: Any = None,
    random_state: Seed | None = None,
) -> "BarycenterResult":
    """Find the n points whose distances are nearest to those of several spaces.

    Minimises over distances D and plans P_s (and features F)

        sum_s weights_s (alpha <L(P_s), P_s> + (1 - alpha) <|F - F_s|^2, P_s> + epsilon KL_s)

    by two steps in turn: plans for the present distances, each by :func:`torchgw.solve`, and the
    best distances for these plans, D = sum_s weights_s P_s D_s P_s' / (a a').

    Parameters
    ----------
    spaces : sequence
        Each points of shape (n_s, d_s), a graph, or a DistanceProvider; wrap a matrix as
        ``torchgw.distances.PrecomputedDistance(torch.as_tensor(D))``.
    n : int
        Number of points of the barycenter.
    weights : array-like, shape (s,), optional
        Weight of each space, of sum 1; equal by default.
    a : array-like, shape (n,), optional
        Mass of the points of the barycenter; uniform by default. It stays fixed.
    masses : sequence of array-like or None, optional
        Mass of the points of each space; uniform by default.
    features : sequence of array-like, shapes (n_s, k), optional
        Features of each space, compared by squared Euclidean distance (fused barycenter).
    alpha : float in [0, 1], optional
        Weight of the structure; 1 without features and 0.5 with them.
    distances, scale, epsilon, device
        As in :func:`torchgw.solve`, but for three things. ``scale`` is ``None`` by default, as
        dividing each space by its own maximum would average shapes instead of spaces;
        ``epsilon="auto"`` is chosen in the first iteration and kept; and ``distances="auto"`` is
        all pairs of up to 3,000 points on every device.
    init : array-like of shape (n, n), optional
        Distances to start from; by default those among n points drawn from the space of largest
        weight, which also give the features.
    max_iter : int
        Updates at most.
    tol : float
        Relative change of the value at which to stop.
    random_state : int, torch.Generator, numpy.random.Generator, RandomState or None
        Draws the start.

    Returns
    -------
    BarycenterResult

    Raises
    ------
    InvalidInputError
        For input that cannot be used.

    Warns
    -----
    ConvergenceWarning
        If ``max_iter`` updates were not enough, or a last solve did not converge.

    Notes
    -----
    The alternation is that of [1]_, with features that of [2]_. Entropy blurs plans, and a mean
    over blurred plans has smaller distances: a small ``epsilon`` keeps them.

    References
    ----------
    .. [1] G. Peyre, M. Cuturi, J. Solomon. Gromov-Wasserstein averaging of kernel and distance
       matrices. ICML 2016.
    .. [2] T. Vayer, L. Chapel, R. Flamary, R. Tavenard, N. Courty. Optimal transport for structured
       data with application on graphs. ICML 2019.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> circle = [[np.cos(t), np.sin(t)] for t in np.linspace(0, 6, 40)]
    >>> circles = [circle, 2 * np.array(circle)]
    >>> result = torchgw.barycenter(circles, 20, distances="euclidean", random_state=0)
    >>> bool(1.4 < result.D.max() / 2 < 1.6)
    True
    """
    check_count("n", n)
    check_options(max_iter=max_iter, tol=tol, scale=scale)
    spaces = check_list("spaces", spaces, "of points, graphs or distance providers")
    if not spaces:
        raise InvalidInputError("`spaces` must have at least one space.")
    if getattr(spaces[0], "ndim", None) == 1:
        raise InvalidInputError(
            "`spaces` must be a list of spaces, each points of shape (n, d) if not a graph or a "
            f"provider; its first item has shape {tuple(spaces[0].shape)}. Pass [X] for one space."
        )
    in_numpy = without_tensors(spaces, weights, a, masses, features, init)
    own = all(isinstance(space, DistanceProvider) for space in spaces)
    refuse_names(distances, {"spaces": own})
    where = resolve_device(device, *spaces)
    generator, seed = make_generator(random_state, where)
    options = DistanceOptions(None, None, scale, "stitch")
    providers = [
        build_provider(Passed(f"spaces[{index}]", space), distances, options, where).to(
            where, torch.float64
        )
        for index, space in enumerate(spaces)
    ]
    shares = as_weights("weights", weights, len(providers), where, "space").tolist()
    mass = as_weights("a", a, n, where, "point of the barycenter")
    nothing: list[Any] = [None] * len(providers)
    given = nothing if masses is None else check_list("masses", masses, "the masses of each space")
    tables = nothing if features is None else _features(features, where)
    for name, items in (("masses", given), ("features", tables)):
        if len(items) != len(providers):
            raise InvalidInputError(
                f"`{name}` must have one item for each of the {len(providers)} spaces; got "
                f"{len(items)}."
            )
    members = list(map(_Space, providers, given, tables, shares))
    first = _start(n, init, max(members, key=lambda member: member.share), generator)
    barycenter = _Barycenter(members, mass, *first)
    asked = {"alpha": alpha, "epsilon": epsilon, "random_state": seed}
    history: list[float] = []
    settled = False
    # no graph is recorded, even if tensors of providers require gradients
    with torch.no_grad():
        while len(history) < max_iter and not settled:
            barycenter.align(asked)
            value = barycenter.value()
            settled = bool(history) and abs(history[-1] - value) <= tol * abs(value)
            history.append(value)
            barycenter.average()
    results = barycenter.results
    advice = next((item.status.advice for item in results if not item.converged), None)
    converged = settled and advice is None
    if not converged:
        moved = f"The barycenter still moved after {max_iter} updates"
        warn_user(advice or f"{moved}: raise `max_iter`, or loosen `tol`.", ConvergenceWarning)
    found = BarycenterResult(
        barycenter.distances, barycenter.features, mass, tuple(results), tuple(history), converged
    )
    return found.in_numpy() if in_numpy else found


class _Barycenter:
    """A barycenter on its way: distances, features, and how it aligns with each space."""

    def __init__(
        self,
        members: list[_Space],
        mass: Tensor,
        distances: DistanceProvider,
        features: Tensor | None,
    ) -> None:
        self.members, self.mass = members, mass
        self.distances, self.features = distances, features
        self.results: list[GWResult] = []

    def align(self, asked: dict[str, Any]) -> None:
        """Align with each space, as ``asked`` at first, and from the last alignments later."""
        before: list[GWResult | None] = [*self.results] or [None] * len(self.members)
        # early plans need not be accurate; warnings are given for the last ones
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            self.results = [
                solve(
                    D_X=self.distances,
                    D_Y=member.provider,
                    a=self.mass,
                    b=member.mass,
                    features=None if self.features is None else (self.features, member.features),
                    init=last,
                    **asked | ({} if last is None else {"epsilon": last.epsilon}),
                )
                for member, last in zip(self.members, before, strict=True)
            ]

    def value(self) -> float:
        """Compute the weighted mean of the objectives."""
        return sum(
            member.share * item.report.objective
            for member, item in zip(self.members, self.results, strict=True)
        )

    def average(self) -> None:
        """Move distances and features to the means that the plans give."""
        self.distances = _average(self.results, self.members, self.mass)
        if self.features is not None:
            means = [
                member.share * result.lazy_plan.barycentric(member.features)
                for result, member in zip(self.results, self.members, strict=True)
            ]
            self.features = torch.stack(means).sum(0)


def _features(features: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Check the features of all spaces, float64."""
    return [
        check_points(f"features[{index}]", item).to(device).double()
        for index, item in enumerate(check_list("features", features, "a table of each space"))
    ]


def _start(
    n: int, init: Any, space: _Space, generator: torch.Generator
) -> tuple[DistanceProvider, Tensor | None]:
    """Choose distances to start from, and the features of points drawn from a space."""
    provider = space.provider
    order = torch.randperm(provider.n, device=provider.device, generator=generator)
    index = order.repeat(-(-n // provider.n))[:n]
    traits = None if space.features is None else space.features[index]
    if init is not None:
        matrix = check_distances("init", init).to(provider.device).double()
        what = "the distances of the barycenter to start from"
        check_shape("init", matrix, (n, n), what)
        return PrecomputedDistance(matrix), traits
    factors = provider.factors()
    if factors is not None:
        return FactoredDistance(factors.matrix[index], factors.signs), traits
    table = provider.columns(index)[index]
    return PrecomputedDistance((table + table.T) / 2), traits


def _average(results: list[GWResult], members: list[_Space], mass: Tensor) -> DistanceProvider:
    """Compute sum_s share_s P_s D_s P_s' / (a a'), in factors if every D_s has them."""
    factors = [member.provider.factors() for member in members]
    scale = torch.where(mass > 0, 1 / mass, 0.0)[:, None]
    if all(item is not None for item in factors):
        parts = [
            (scale * (result.lazy_plan @ item.matrix), member.share * item.signs)
            for result, item, member in zip(results, factors, members, strict=True)
            if item is not None
        ]
        return FactoredDistance(
            torch.cat([matrix for matrix, _ in parts], 1), torch.cat([signs for _, signs in parts])
        )
    unit = torch.eye(len(mass), dtype=torch.float64, device=mass.device)
    total = torch.zeros_like(unit)
    for result, member in zip(results, members, strict=True):
        plan = result.lazy_plan
        total += member.share * (plan @ member.provider.apply(plan.T @ unit))
    total = scale * total * scale.T
    return PrecomputedDistance(((total + total.T) / 2).clamp_min(0))


@dataclass(frozen=True, repr=False, eq=False)
class BarycenterResult(Result):
    """Outcome of :func:`torchgw.barycenter`.

    Attributes
    ----------
    distances : DistanceProvider
        Distances of the n points; ``solve(D_X=...)`` takes them. Where every space has factors
        they have some too, of rank the sum of all ranks, and nothing of size (n, n) is stored.
    features : Tensor or ndarray of shape (n, k), float64, or None
        Features of the n points, if the spaces have some.
    weights : Tensor or ndarray, shape (n,), float64
        Mass of the n points.
    results : tuple of GWResult
        The alignments with each space, of the barycenter before its last update.
    value : float
        Weighted mean of their objectives, ``report.objective``.
    history : tuple of float
        The value at each iteration.
    converged : bool
        Whether the value changed by ``tol`` at most in the last round, and the last alignments
        converged.
    """

    distances: DistanceProvider
    features: Array | None
    weights: Array
    results: tuple[GWResult, ...]
    history: tuple[float, ...]
    converged: bool

    @property
    def value(self) -> float:
        """Weighted mean of the objectives of ``results``."""
        return self.history[-1]

    def _summary(self) -> tuple[str, dict[str, str], str]:
        ended = "converged" if self.converged else "not converged"
        return (
            f"{self.distances.n} points, {len(self.results)} spaces",
            {"value": f"{self.value:.6g}"},
            f"{ended} after {len(self.history)} rounds",
        )

    @property
    def D(self) -> Any:
        """The distances as a matrix, shape (n, n)."""
        return in_kind(self.weights, stored_matrix(self.distances))

    def points(self, dimension: int, *, squared: bool = False) -> Any:
        """Place the points of the barycenter by classical multidimensional scaling.

        Parameters
        ----------
        dimension : int
            Below n.
        squared : bool
            Whether ``distances`` are squares already, as those of ``distances="sqeuclidean"`` are.

        Returns
        -------
        Tensor or ndarray, shape (n, dimension), float64
            Centred coordinates, in order of variance; zero where the distances leave no variance.
        """
        check_count("dimension", dimension)
        table = stored_matrix(self.distances).double()
        if dimension >= len(table):
            raise InvalidInputError(
                f"`dimension` must be below the {len(table)} points; got {dimension}."
            )
        square = table if squared else table.square()
        square = square - square.mean(0)
        gram = -(square - square.mean(1, keepdim=True)) / 2
        values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
        size = values.flip(0)[:dimension].clamp_min(0).sqrt()
        return in_kind(self.weights, vectors.flip(1)[:, :dimension] * size)
