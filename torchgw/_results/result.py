"""What a solve returns, and further numbers of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args

import scipy
import torch
from torch import Tensor

from torchgw._boundary.arrays import in_kind, to_numpy
from torchgw._boundary.checks import check_choice, check_count, check_not_negative, check_within
from torchgw._certify.certificate import Certificate, Proof
from torchgw._errors import (
    AmbiguityWarning,
    ConvergenceWarning,
    InvalidTypeError,
    SearchWarning,
    TorchGWWarning,
    UnsupportedError,
    warn_user,
)
from torchgw._plans.transport import TransportPlan
from torchgw._problem.limits import limits_of
from torchgw._problem.losses import LOSSES
from torchgw._problem.problem import MarginalRule, Problem
from torchgw._problem.providers import Spaces
from torchgw._problem.reduction import Reduction, count_allowed
from torchgw._problem.support import KnownPairs
from torchgw._results.base import Result, as_numpy, tracked_loss
from torchgw._results.bounds import distance_correlation, lower_bound
from torchgw._results.certified import certify
from torchgw._results.confidence import Confidence, confidence
from torchgw._results.handedness import handedness
from torchgw._results.mapping import Extension, map_new
from torchgw._results.maps import Pairs, SpaceMap, SurfaceMap, fit_map, map_to_surface, placed_of
from torchgw._results.matching import Matching, MatchingKind, match
from torchgw._results.parts import stored
from torchgw._sinkhorn.problem import DenseCost
from torchgw._solve.pipeline import Outcome
from torchgw._solve.state import Status
from torchgw._starts.alternatives import Alternative, related
from torchgw._starts.chain import Trial
from torchgw._starts.symmetries import with_images
from torchgw._tensors.deadline import within
from torchgw._tensors.operations import plainly
from torchgw._typing import Array, HessianProduct, Iteration, Marginals, Seed

T = TypeVar("T")


class Log(dict[str, Any]):
    """A report by the names of its fields, for reading; JSON takes it, and copies can change."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Refuse a change."""
        raise InvalidTypeError("`result.log` is for reading. Change a copy: dict(result.log).")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as a plain dictionary."""
        return dict, (dict(self),)


class Chosen(TypedDict):
    """The distances that ``distances="auto"`` has chosen for points."""

    chosen: str
    why: str
    agreement: dict[str, float]


@stored
@dataclass(frozen=True)
class Report:
    """Further numbers of a solve; ``result.log`` has them by name.

    Attributes
    ----------
    loss : str
        Name of the loss.
    value_standard_error : float
        Of ``value``: zero for an exact gradient.
    kl : float
        KL divergence of the plan to a x b; with ``unbalanced`` half of that of the product plans
        P x P, which is the same at mass one (not so where ``alpha=0`` and both are penalised).
    objective : float
        value + penalty + epsilon * kl, what the solve minimises.
    mass : float
        Mass that the plan moves.
    penalty : float
        What ``unbalanced`` marginals cost.
    outer_iterations, max_iter : int
        Outer iterations, and their limit.
    inner_iterations : int
        Sinkhorn iterations of all outer iterations together.
    settle_iterations, inner_max_iter : int
        Sinkhorn iterations of the last linear problem, zero where the loop's own last one is the
        result; and the limit of these iterations in any problem.
    n_anchors : int or None
        Anchor pairs of the last cost. Like the next two ``None`` without a sampled gradient.
    cost_standard_error, cost_size : float or None
        Root mean squares of the error of the sampled cost, and of itself, over all pairs of points.
    landmarks : dict or None
        Count, rank and estimated error of each side ("X", "Y") that has landmarks.
    distances : dict or None
        What ``distances="auto"`` was for points: its name as ``chosen`` ("geodesic" or a metric),
        ``why``, and the ``agreement`` of each that was tried (of squares: that of their plan in
        straight distances).
    polish_steps, polish_gap : int and float, or None
        Conditional gradient steps of ``polish``, and what the linearised objective could still fall
        by at their end.
    tiles : dict or None
        Where tiles of the plan were skipped: ``bound``, the share of a row's or column's mass that
        this may lose in a half-step; ``kept``, the mean share of tiles computed; ``lists``, how
        often they were chosen; and their ``width``.
    resolution : dict or None
        Of a large problem that was solved on cells of near points: the number of ``cells`` of each
        side; the ``tolerance`` for the ``marginal_error``, which was ``measured`` at so many points
        of each side; and ``value_change``, the relative change of the value since the cells before.
    masses : dict or None
        Where ``mass="auto"`` was asked for: the ``shares`` of the mass that were tried, what each
        ``added`` to the one before it (the mean cost of a pair of points, of a point for a linear
        cost), the ``chosen`` share, by how many times the cost rises there as ``step``, and how
        clearly as ``contrast`` (from 7.5 on; infinite if all of the mass matches).
    allowed : dict or None
        Where some pairs may hold no mass: how many ``entries`` the plan may use, their ``share`` of
        all, and how many ``decided`` source points have but one partner left, with the share of
        the ``mass`` that is theirs.
    route : str
        What was chosen before the solve and why, and what it was expected to take, as
        :func:`torchgw.explain` says it; empty in files of earlier versions.
    """

    loss: str
    value_standard_error: float
    kl: float
    objective: float
    mass: float
    penalty: float
    outer_iterations: int
    max_iter: int
    inner_iterations: int
    settle_iterations: int
    inner_max_iter: int
    n_anchors: int | None
    cost_standard_error: float | None
    cost_size: float | None
    landmarks: dict[str, dict[str, float]] | None
    polish_steps: int | None
    polish_gap: float | None
    tiles: dict[str, Any] | None
    # files of earlier versions do not have it
    distances: Chosen | None = None
    resolution: dict[str, Any] | None = None
    route: str = ""
    masses: dict[str, Any] | None = None
    allowed: dict[str, float] | None = None

    @classmethod
    def of(
        cls, outcome: Outcome, problem: Problem, sides: Spaces, reduction: Reduction | None = None
    ) -> Report:
        """Collect the numbers of a finished solve."""
        confined = problem.support is not None or problem.restriction is not None
        allowed = count_allowed(problem, reduction) if confined or reduction else None
        ending, strategy, recorder = outcome.ending, outcome.strategy, outcome.recorder
        found, polished, noise = ending.evaluation, ending.polished, outcome.noise
        tiles = strategy.tiling and strategy.tiling.report()
        decision = sides.decision
        distances = decision and Chosen(
            chosen=decision.chosen, why=decision.why, agreement=decision.agreement
        )
        return cls(
            loss=problem.loss.name, kl=found.kl, mass=found.mass, penalty=found.penalty,
            value_standard_error=problem.alpha * found.quadratic.standard_error,
            objective=found.objective(problem.alpha, ending.epsilon),
            outer_iterations=len(recorder.history), max_iter=strategy.options.max_iter,
            inner_iterations=sum(entry.inner_iterations for entry in recorder.history),
            settle_iterations=recorder.settle_iterations,
            inner_max_iter=strategy.options.inner_max_iter, n_anchors=outcome.n_anchors,
            cost_standard_error=noise.standard_error if noise else None,
            cost_size=noise.size if noise else None, landmarks=sides.landmarks or None,
            distances=distances, polish_steps=polished.steps if polished else None,
            polish_gap=polished.gap if polished else None,
            tiles=tiles._asdict() if tiles else None,
            resolution=outcome.resolution and outcome.resolution._asdict(),
            route=str(outcome.route), masses=outcome.overlap and outcome.overlap._asdict(),
            allowed=allowed,
        )  # fmt: skip

    def log(self) -> Log:
        """List the fields by name."""
        return Log((item.name, getattr(self, item.name)) for item in fields(self))


# parts of a result in a file
stored(Certificate)
stored(Proof)
stored(Confidence)

# Ambiguity above which the summary of a result mentions it. [L276]
_AMBIGUOUS = 0.9
# Share of the mass below which a penalty that leaves the rest is reported: a choice. [L1387]
_LITTLE_MASS = 0.1

# What a certificate is about.
CertifiedKind = Literal["plan", "one_to_one"]
# What maps of one space onto the other are fitted to.
PairsName = Literal["matching", "plan"]


@dataclass(frozen=True, repr=False, eq=False)
class GWResult(Result):
    """Outcome of :func:`torchgw.solve`, with the attribute names of POT's ``OTResult``.

    Arrays are NumPy's where the solve was given no tensor, and tensors on its device otherwise.

    Attributes
    ----------
    lazy_plan : TransportPlan, shape (n, m)
        The plan as an operator; nothing of its size is stored. :func:`torchgw.load` returns its
        largest entries, without the cost, where that was a stored matrix and the result was not
        saved with ``dense=True``. So does ``polish=True`` where both spaces are the same.
    potential_a, potential_b : Tensor or ndarray, shapes (n,) and (m,), float64
        Dual potentials of the whole linearised cost C(P), in its units. They are not the *reduced
        potentials* ``lazy_plan.potentials``, which belong to ``lazy_plan.cost``: C(P) less its
        terms of rows and columns alone. Those of the plan before polishing, if it was polished.
    value : float
        value_quad + value_linear: the transport objective without the entropy term, in units of the
        squared (scaled) distances. Exact for exact gradients; for the sampled one an unbiased
        estimate, whose standard error is ``report.value_standard_error``.
    value_quad, value_linear : float
        alpha * <L(P), P> and (1 - alpha) * <M, P>.
    marginal_a, marginal_b : Tensor or ndarray, shapes (n,) and (m,), float64
        Mass that the plan actually moves out of and into every point.
    marginal_error : float
        Larger of the L1 distances of the two to the weights. Relaxed problems count the sides that
        are strict, or held by 1e8 times the spread of the cost, which is taken as strict; partial
        ones count by how much the bounds are exceeded.
    status : Status
        How the solve ended; ``status.advice`` says what to do about it.
    epsilon : float
        Entropic regularisation of the plan, in units of the squared (scaled) distances: after
        proximal steps that of an entropic solve that ends at the same plan; 0 for a polished plan.
    alpha : float
        Weight of the quadratic term.
    scale : tuple of float
        Factors that multiplied the distances of X and of Y.
    gradient, backend, precision : str
        What was used; see :func:`torchgw.solve` for the names.
    report : Report
        Further numbers, such as the objective, standard errors and limits; ``log`` has the same.
    random_state : int
        Seed that reproduces the run on the same device and backend.
    alternatives : tuple of Alternative
        The distinct optima that several starts found on a few points, the best one first. The solve
        goes on from that one, unless they are about as good and all points can be matched by their
        distances. Each can be passed as ``init``. Empty with a single start, and where few points
        do not represent the spaces.
    ambiguity : float
        Value of the best alternative over that of the second best, in [0, 1]: near 1 two optima
        cannot be told apart, as on symmetric spaces; 0 if only one was found. NaN where there are
        none, and for relaxed problems of few points, whose values have no common zero: of more
        points it compares the partners of some of them, without entropy. With a linear cost both
        values count from the least that its entries could cost.
    trials : tuple of Trial
        What each start that a search followed on all points (a chain) came to, the best one first:
        its start, the epsilon that it has reached, the objective with entropy and the value there,
        seconds, and whether it was "refined" (followed to the final epsilon) or "left behind"
        before. Where a solve from a x b ("product") is compared with one from the best optimum of a
        few points, these two; the second is left behind, with NaN for its value, once it is clearly
        no lower, and not solved if it leads to the same plan. Empty without such a search.
    doubt : str
        Why there may be a better optimum and what to do about it; empty where nothing says so.
    n_iters : int
        Outer iterations; ``report.inner_iterations`` counts the Sinkhorn iterations.
    history : tuple of Iteration
        What each outer iteration reported: epsilon, dual value, marginal error, change.
    timings : dict
        Seconds by phase: "graph", "geodesics", "landmarks" and "distances" (all else before the
        solve), then the phases of the solve.
    extension : Extension or None
        What :meth:`transform` maps new points by.
    certificate : Certificate or None
        What :meth:`certify` found when it was last called: files keep it, and the summary shows it.
    stability : Confidence or None
        What :meth:`confidence` found when it was last called: files keep it.
    tracked : Tensor or None, shape (), float64
        With ``differentiable``: ``report.objective`` as a tensor that carries gradients to the
        inputs; docs/differentiation.md. Pickles, deep copies and files leave the graph behind.
        ``loss`` is the same, and an error where there is none.
    """

    lazy_plan: TransportPlan
    potential_a: Array
    potential_b: Array
    value_quad: float
    value_linear: float
    marginal_a: Array
    marginal_b: Array
    marginal_error: float
    status: Status
    epsilon: float
    alpha: float
    scale: tuple[float, float]
    gradient: str
    backend: str
    precision: str
    random_state: int
    report: Report
    alternatives: tuple[Alternative, ...] = ()
    ambiguity: float = float("nan")
    trials: tuple[Trial, ...] = ()
    doubt: str = ""
    history: tuple[Iteration, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    extension: Extension | None = None
    tracked: Tensor | None = None
    certificate: Certificate | None = None
    stability: Confidence | None = None

    @property
    def loss(self) -> Tensor:
        """Entropic objective as a tensor that carries gradients, shape (), float64.

        Raises
        ------
        UnsupportedError
            If the solve was without ``differentiable``.
        """
        return tracked_loss(self.tracked, "solve", "'value'")

    @property
    def value(self) -> float:
        """Transport objective of the plan, without the entropy term."""
        return self.value_quad + self.value_linear

    @property
    def log(self) -> Log:
        """The fields of ``report`` by name, a dictionary for reading. Every key is always there."""
        return self.report.log()

    @property
    def gw_distance(self) -> float:
        """Gromov-Wasserstein distance at this plan: the square root of <L(P), P>, of order 2.

        With ``loss="absolute"`` it is of order 1, <L(P), P> itself. NaN with ``loss="kl"``, which
        is no power of a distance, and without a quadratic term.
        """
        loss = LOSSES.get(self.report.loss)
        order = None if loss is None else loss.order
        if self.alpha == 0 or order is None:
            return float("nan")
        # an estimate, or rounding at a perfect match, can fall below zero
        return float(max(self.value_quad / self.alpha, 0.0) ** (1 / order))

    @cached_property
    def distance_correlation(self) -> float:
        """Correlation of the distances that the plan relates: how well the two spaces agree.

        Pearson's, of D_X(i, k) and D_Y(j, l) for two pairs (i, j) and (k, l) drawn from the plan; 1
        where distances are the same up to a factor and a constant. Exact where both sides have
        factors, or the squared number of points is at most 25 million and all distances can be
        read; otherwise from 1,024 drawn pairs, with a standard error of about 0.03 (1 - r^2) and
        always the same ones. NaN where all distances of a side are equal. UnsupportedError if the
        result comes from a file that does not hold the distances.
        """
        return distance_correlation(self.lazy_plan.giving(in_numpy=False), self._known())

    @cached_property
    def lower_bound(self) -> float:
        """A value that no plan goes below: ``value - lower_bound`` bounds what is to be gained.

        The largest of Memoli's three lower bounds [1]_ that is cheap enough, up to rounding and to
        what the plan misses its marginals by. The third, from the distributions of the distances of
        each point, is the largest: it is computed for up to 4 million pairs of points; the second,
        from those of all distances, up to 5,000 points per side; the first, from eccentricities,
        wherever all distances can be read. A linear cost enters with its own weight. Bounds tell
        little of spaces whose points are all alike: zero is no sign of a perfect plan.

        NaN with ``loss="kl"``, with ``unbalanced`` or ``mass``, and where columns of distances are
        costly (``distances="dijkstra"`` on many points): then none is known. UnsupportedError if
        the result comes from a file that does not hold the distances.

        References
        ----------
        .. [1] F. Memoli. Gromov-Wasserstein distances and the metric approach to object matching.
           Foundations of Computational Mathematics 2011.
        """
        return lower_bound(self._known(), self.lazy_plan.weights)

    @property
    def plan(self) -> Any:
        """The (n, m) matrix, built on demand; PlanTooLargeError if it would not fit."""
        return self.lazy_plan.to_dense()

    @property
    def sparse_plan(self) -> scipy.sparse.csr_array:
        """The entries that carry at least 1e-4 of their row's mass, on the CPU."""
        return self.lazy_plan.to_sparse()

    @property
    def potentials(self) -> tuple[Any, Any]:
        """Dual potentials (f, g) of the whole cost: (potential_a, potential_b)."""
        return self.potential_a, self.potential_b

    @property
    def marginals(self) -> tuple[Any, Any]:
        """(marginal_a, marginal_b)."""
        return self.marginal_a, self.marginal_b

    @property
    def converged(self) -> bool:
        """Whether both the plan and its marginals met their tolerances."""
        return self.status.converged

    @property
    def is_ambiguous(self) -> bool:
        """Whether another match costs nearly the same: ``ambiguity`` above 0.9.

        One that sends no point elsewhere than the first is no other.
        """
        return self._other_match() is not None

    @property
    def n_iters(self) -> int:
        """Outer iterations."""
        return len(self.history)

    def hvp(self, direction: Any) -> HessianProduct:
        """Multiply a direction by the Hessian of ``loss`` in the inputs that require gradients.

        It is the derivative of the gradient along the direction, with the plan and its potentials
        following: one linear system and a few streamed products, whatever the number of inputs.

        Parameters
        ----------
        direction : Tensor, or dict of Tensor by name
            One step, of the shape of the input, for the inputs named as in :func:`torchgw.solve`
            (features are F_X and F_Y); those left out stay. A tensor alone if there is one input.

        Returns
        -------
        HessianProduct

        Raises
        ------
        UnsupportedError
            If the solve was without ``differentiable="value"`` or ``"implicit"``, if no input
            requires a gradient, or if the gradient was sampled, which has no fixed point.
        InvalidInputError
            If the direction does not fit the inputs.
        """
        product = getattr(getattr(self.tracked, "grad_fn", None), "hessian_product", None)
        if product is None:
            raise UnsupportedError(
                "`hvp` needs a result of solve(..., differentiable='value') or 'implicit' with "
                "inputs that require gradients; pickles, copies and files leave these behind."
            )
        return product(direction)

    def transform(
        self,
        X_new: Any = None,
        *,
        values: Any = None,
        D_new: Any = None,
        M_new: Any = None,
        F_new: Any = None,
    ) -> Any:
        """Map new source points to the target without solving again.

        By one half-step the potentials of the solve give a new point x a row P_xj of the plan, up
        to its mass, and x goes to the weighted mean sum_j P_xj v_j / sum_j P_xj. A point of X goes
        where ``lazy_plan.barycentric`` sends it, and a point near it goes nearby. A plan without
        entropy (polished, or the match of two spaces that are the same) has no potentials: points
        are mapped by the entropic plan that it was made from, or that of the match, and moved by
        what this misses at the points of X, weighted by inverse squares of distances to them: with
        tables the entries of ``D_new``, 0 for a point of X. With relaxed marginals a point without
        a partner is mapped too, to where the little that it gives would go.

        Parameters
        ----------
        X_new : array-like, shape (q, d), optional
            New points, in the coordinates of X. A geodesic distance goes through the nearest points
            of X, which lengthens it where X is sparse.
        values : array-like, shape (m, c), optional
            What is averaged: Y itself by default, or other coordinates, or indicators of labels.
        D_new : array-like, shape (q, n), optional
            Distances to the points of X, in the units of ``D_X``, in place of ``X_new``; for
            matrices, graphs and providers.
        M_new, F_new : array-like, shapes (q, m) and (q, f), optional
            Linear cost of the new points, or their features, if the solve had such.

        Returns
        -------
        Tensor or ndarray, shape (q, c), float64
            A tensor on the device of the plan for new points in a tensor, and NumPy's for those in
            any other form. Computed block by block, in memory that does not grow with q times n.

        Raises
        ------
        InvalidInputError
            If the input does not fit the solve; the message says what does.
        UnsupportedError
            If the result comes from a file that does not hold the distances needed.

        Examples
        --------
        >>> import numpy as np, torchgw
        >>> X = np.random.default_rng(0).normal(size=(60, 3))
        >>> result = torchgw.solve(X, X + 5, distances="euclidean", random_state=0)
        >>> moved = result.transform(X[:2])
        >>> np.allclose(moved, result.lazy_plan.barycentric(X + 5)[:2])
        True
        """
        return self._map(0, values, points=X_new, table=D_new, linear=M_new, features=F_new)

    def inverse_transform(
        self,
        Y_new: Any = None,
        *,
        values: Any = None,
        D_new: Any = None,
        M_new: Any = None,
        F_new: Any = None,
    ) -> Any:
        """Map new target points to the source, see :meth:`transform`.

        ``values`` has n rows, ``D_new`` has shape (q, m), and ``M_new`` shape (q, n).
        """
        return self._map(1, values, points=Y_new, table=D_new, linear=M_new, features=F_new)

    def _map(self, side: int, values: Any, **new: Any) -> Any:
        """Map new points of a side to the other one."""
        # a plan that was polished or cut is not the plan of its cost
        before = self.extension is not None and self.extension.unpolished is not None
        sharp = self.epsilon == 0 or before
        mapped = map_new(self.extension, self.lazy_plan, side, values, sharp=sharp, **new)
        return in_kind(new["points"] if new["table"] is None else new["table"], mapped)

    def rigid(
        self,
        X: Any = None,
        Y: Any = None,
        *,
        reflection: bool = True,
        scale: bool = False,
        robust: bool = False,
        pairs: PairsName = "matching",
    ) -> SpaceMap:
        """Fit the turn and the shift that take the source to the target, by its match.

        Unlike :meth:`transform`, which averages points of Y, the map goes on beyond all points.
        It minimises sum_p w_p |y_p - (s x_p R + t)|^2 over pairs p of places, R orthogonal.

        Parameters
        ----------
        X, Y : array-like, shapes (n, d) and (m, e), optional
            Coordinates of both sides, such as places on a slide where the match was one of genes;
            by default the points, or the vertices of surfaces, that were matched.
        reflection : bool
            Whether the map may be a mirror image, which ``reflects`` then tells.
        scale : bool
            Whether s is fitted too; 1 otherwise.
        robust : bool
            Whether pairs that are far off lose their weight (Tukey's biweight, after the least sum
            of absolute residuals). ``weights`` of the map are 0 for those left out.
        pairs : {"matching", "plan"}
            ``"matching"`` pairs the points as ``matching(improve=False)`` does, of weight as there.
            ``"plan"`` pairs each point of X with the mean of its row of the plan: nothing is
            rounded, but a blurred plan draws these means, and the map, together.

        Returns
        -------
        SpaceMap
            ``transform(points)``, ``matrix``, ``offset``, ``scale``, ``residuals`` and ``error``.
            It is in no file: fit it again to a loaded result.

        Raises
        ------
        InvalidInputError, InvalidTypeError
            If a side has no points and none are passed, or the numbers of coordinates differ.

        Examples
        --------
        >>> import numpy as np, torchgw
        >>> X = np.random.default_rng(0).normal(size=(60, 2)) * [3, 1]
        >>> result = torchgw.solve(X, X @ [[0, 1], [-1, 0]] + 5, distances="euclidean", n_init=4)
        >>> result.rigid().transform([[100.0, 0.0]]).round(6)
        array([[  5., 105.]])
        """
        found = self._pairs(X, Y, pairs)
        return fit_map("rigid", found, reflection=reflection, scale=scale, robust=robust)

    def affine(
        self, X: Any = None, Y: Any = None, *, robust: bool = False, pairs: PairsName = "matching"
    ) -> SpaceMap:
        """Fit the affine map that takes the source to the target; see :meth:`rigid`.

        The sides may have different numbers of coordinates. Pairs that lie in a plane of fewer
        dimensions than the source, which leave the map open, are refused.
        """
        return fit_map("affine", self._pairs(X, Y, pairs), robust=robust)

    def thin_plate(
        self,
        X: Any = None,
        Y: Any = None,
        *,
        smoothing: float | None = None,
        neighbors: int | None = None,
        robust: bool = False,
        pairs: PairsName = "matching",
    ) -> SpaceMap:
        """Fit thin plates that take the source to the target; see :meth:`rigid`.

        An affine map, and bending that ``smoothing`` holds back: SciPy's ``RBFInterpolator``.

        Parameters
        ----------
        smoothing : float, optional
            How much pairs may be missed, in coordinates of spread 1: 0 goes through all of them. By
            default that of eight powers of ten by which halves of the pairs (1,000 at most) tell
            each other best.
        neighbors : int, optional
            Nearest pairs that a place is mapped by. All by default, in time that grows with the
            cube of their number, seconds for 5,000 and eight times that where ``robust``: pass some
            hundred for more.
        """
        check_count("neighbors", neighbors, none=True)
        found = self._pairs(X, Y, pairs)
        return fit_map("thin_plate", found, robust=robust, smoothing=smoothing, neighbors=neighbors)

    def _pairs(self, X: Any, Y: Any, pairs: PairsName) -> Pairs:
        """Pair places of both sides, which are those known if none are given."""
        check_choice("pairs", pairs, get_args(PairsName))
        spaces = None if self.extension is None else self.extension.spaces
        x, y = (
            placed_of("XY"[side], given, spaces and spaces[side], self.lazy_plan.shape[side])
            for side, given in enumerate((X, Y))
        )
        if pairs == "plan":
            plan = self.lazy_plan.giving(in_numpy=True)
            mass = to_numpy(self.marginal_a)
            return Pairs.of(x[mass > 0], plan.barycentric(y)[mass > 0], mass[mass > 0])
        found = self.matching(improve=False)
        return Pairs.of(x[to_numpy(found.source)], y[to_numpy(found.target)], found.weights)

    def surface_map(self, *, inverse: bool = False, refine: bool = True) -> SurfaceMap:
        """Find where the points of X lie on the surface Y: places in triangles, not vertices alone.

        A row of the plan is blurred, and its largest entry is that of a large triangle near by.
        Each point goes to the geodesic median of its row among the vertices, and from there by one
        step of Weiszfeld's iteration to the best place in the triangles around it.

        Where X and Y are both surfaces of 400 vertices or more that the plan matches as wholes, the
        map is then refined by the modes of their vibrations (the Laplacian's eigenfunctions): the
        functions that it moves are moved by a matrix between few modes, the nearest places under
        that are a map, and so on with up to 150 modes.

        Parameters
        ----------
        inverse : bool
            Whether the points of Y are mapped onto the surface X.
        refine : bool
            False for the places that the plan alone tells of.

        Returns
        -------
        SurfaceMap
            ``face`` (n,), ``barycentric`` (n, 3), ``points`` (n, 3) and ``vertex`` (n,).

        Raises
        ------
        InvalidInputError
            If the side that points are mapped to was not given as a surface.
        UnsupportedError
            If the distances of all its vertices do not fit into memory, or the result is from a
            file that does not hold the surface.

        Examples
        --------
        >>> import numpy as np, torchgw
        >>> points = np.array([[0, 0, 0], [3, 0, 0], [0, 2, 0], [0, 0, 1.0]])
        >>> tetrahedron = points, [[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]]
        >>> result = torchgw.solve(tetrahedron, tetrahedron, random_state=0)
        >>> np.allclose(result.surface_map().points, points, atol=0.1)
        True
        """
        plan = self.lazy_plan.giving(in_numpy=False)
        plan, side = (plan.T, 0) if inverse else (plan, 1)
        with plainly(plan.device):
            spaces = self._known().spaces
            pair = (spaces[1 - side], spaces[side])
            found = map_to_surface(plan, pair, "XY"[side], refine=refine)
        return self._handed_out(found)

    def handedness(self) -> float:
        """Tell whether the match keeps left and right (above 0) or is a mirror image (below).

        Of points in 2 or 3 dimensions it is the sign of the determinant of the linear map that fits
        best, times the share of its smallest singular value in their mean: near 0 for flat clouds.
        Of surfaces it is how well triangles lie with the same side outside where the match takes
        them, which does not depend on how a shape bends: 1 if all do and -1 if none does.

        Returns
        -------
        float
            In [-1, 1].

        Raises
        ------
        InvalidInputError
            For other sides, and for surfaces whose triangles are not turned the same way. Both
            surfaces have to be turned outwards, or both inwards.
        """
        plan = self.lazy_plan.giving(in_numpy=False)
        with plainly(plan.device):
            return handedness(plan, self._known().spaces)

    def shared(self) -> GWResult:
        """Return the result that all processes read and save together.

        For the processes of ``torch.distributed`` after a solve with ``distributed``. Every process
        makes the same calls of it. Products with its plan, :meth:`transform` and
        :meth:`inverse_transform` compute some of the rows in each and give all of them the whole;
        :meth:`save` writes a file for each, of some rows, and one that names them, from which
        :func:`torchgw.load` puts the result together in any number of processes.

        Raises
        ------
        UnsupportedError
            If there is no process group, or the plan is not one that processes can share.
        """
        return replace(self, lazy_plan=self._divisible("leave `shared()` out").shared())

    def shard(self, rank: int, size: int) -> GWResult:
        """Return the share of the source points of one of ``size`` processes.

        Rows n rank / size to n (rank + 1) / size, rounded down, of ``lazy_plan``, ``potential_a``
        and ``marginal_a``; what belongs to the target, and all numbers, are those of the whole. It
        holds no other rows, and nothing that new points are mapped by.

        Raises
        ------
        InvalidInputError
            If ``rank`` is not between 0 and ``size`` - 1.
        UnsupportedError
            If the plan is known by its largest entries alone.
        """
        check_within("rank", rank, 0, size - 1, ", the number of processes less one")
        plan = self._divisible("save with `dense=True`, or take shares before, in the first case")
        n = plan.shape[0]
        rows = slice(n * rank // size, n * (rank + 1) // size)
        # copies, so that the memory of the whole can be freed
        own = (part[rows] + 0 for part in (self.potential_a, self.marginal_a))
        return replace(
            self, lazy_plan=plan.part(rows), potential_a=next(own), marginal_a=next(own),
            alternatives=(), extension=None,
        )  # fmt: skip

    def _divisible(self, advice: str) -> TransportPlan:
        """Give the plan; refuse one that processes cannot share."""
        if not isinstance(self.lazy_plan, TransportPlan):
            raise UnsupportedError(
                "This plan is known by its largest entries alone, or beside known `pairs`, and has "
                f"no shares: {advice}."
            )
        return self.lazy_plan

    def matching(
        self,
        kind: MatchingKind = "one_to_one",
        *,
        improve: bool = True,
        time_limit: float | None = None,
    ) -> Matching:
        """Round the plan to pairs of points, and say what these are worth.

        An assignment problem chooses the pairs with the largest sum of plan entries. Then
        conditional gradient steps on the objective of matchings, from the plan and from the pairs,
        and exchanges of two partners look for pairs that cost less: of up to 128 points a side by
        tabu search, in a second or two, which mostly finds the best matching of up to 40 points.
        The answer never costs more than the pairs that the assignment chose.

        Parameters
        ----------
        kind : {"one_to_one", "many_to_one"}
            ``"one_to_one"`` gives every point of the smaller side (of X, if both are as large) a
            partner of its own. ``"many_to_one"`` gives every point of the larger side a partner,
            which may be that of others too: a point j of the smaller side is the partner of at most
            b_j times the size of the larger side, rounded up. Of a partial plan, and of a relaxed
            one with a linear cost, only a share of these points is matched, those whose pairs carry
            most: as much as the mass that moves.
        improve : bool
            Whether to look for better pairs. They are looked for among up to 1,500 points per side
            whose distances can all be read, with ``loss="absolute"`` up to 126;
            and among any number of nodes of sparse graphs, by exchanges along their edges.
        time_limit : float, optional
            Seconds after which no better pairs are looked for; ``complete`` says whether all were.
            The assignment itself is made in any case.

        Returns
        -------
        Matching
            ``source`` and ``target``, their ``weights``, the ``value`` of the matching, the
            ``edges_kept`` if both sides were given as graphs, and whether it is ``complete``.

        Raises
        ------
        InvalidInputError, InvalidTypeError
            For other arguments.
        UnsupportedError
            If the result comes from a file that does not hold the distances or the table ``M``, or
            if a matching many to one of more than 25 million pairs of points has too many to weigh.

        Notes
        -----
        Pairs are assigned on the host: exactly for up to 25 million pairs of points, and by the 32
        largest entries of each row beyond. The steps are those of [1]_.

        References
        ----------
        .. [1] J. Vogelstein et al. Fast approximate quadratic programming for graph matching. PLOS
           ONE 2015.

        Examples
        --------
        >>> import numpy as np, torchgw
        >>> X = np.random.default_rng(0).normal(size=(60, 3))
        >>> result = torchgw.solve(X, X[::-1] + 5, distances="euclidean", random_state=0)
        >>> result.matching().target[:3].tolist()
        [59, 58, 57]
        """
        extension = self._known()
        plan = self.lazy_plan.giving(in_numpy=False)
        moved = (torch.as_tensor(part, device=plan.device) for part in self.marginals)
        masses = plan.weights if extension.known.own is None else Marginals(*moved)
        check_not_negative("time_limit", time_limit, none=True)
        with within(time_limit):
            found = match(plan, masses, extension, kind, improve)
        return self._handed_out(found)

    def certify(
        self, seconds: float = 10.0, *, gap: float = 1e-3, kind: CertifiedKind = "plan"
    ) -> Certificate:
        """Bound how much better any other plan could be, with a proof that others can check.

        The bounds are tried in turn, the cheap ones first, until ``gap`` is met or time is up:
        that of distances in order, that of eigenvalues, the first level of liftings for up to 3,600
        pairs of points, a semidefinite relaxation of matchings for up to 30 points, and cutting
        planes for squared Euclidean and cosine distances (and tables with few factors). The last
        ones come down to nothing in many problems; in which, and what cannot be expected, is in
        docs/certificates.md. ``certificate`` keeps what was found.

        Parameters
        ----------
        seconds : float
            Time that the bounds may take; one that is under way is ended a little later.
        gap : float
            Share of the value at which they end.
        kind : {"plan", "one_to_one"}
            What the bound is about: every plan of these weights, or one-to-one matchings, as
            :meth:`matching` makes them, of which the value then is. Fewer compete: the bound is no
            lower.

        Returns
        -------
        Certificate
            ``lower_bound``, ``gap`` (a difference of values), ``method``, ``proof`` for
            :func:`torchgw.verify`, and ``plan``, the best one that the bounds have come by.

        Raises
        ------
        InvalidInputError, InvalidTypeError
            For other arguments.
        UnsupportedError
            With another loss, relaxed marginals or data in float32, with more than 5,000 points a
            side unless their distances are squared Euclidean and of few coordinates, and if the
            result comes from a file that does not hold the distances.

        Examples
        --------
        >>> import numpy as np, torchgw
        >>> X = np.random.default_rng(0).normal(size=(30, 2))
        >>> Y = X + 0.1 * np.random.default_rng(1).normal(size=(30, 2))
        >>> result = torchgw.solve(
        ...     X, Y, distances="sqeuclidean", polish=True, random_state=0
        ... )
        >>> certificate = result.certify()
        >>> certificate.gap < 2e-3 * result.value
        True
        """
        check_not_negative("seconds", seconds)
        check_not_negative("gap", gap)
        check_choice("kind", kind, get_args(CertifiedKind))
        plan = self.lazy_plan.giving(in_numpy=False)
        matchings = kind == "one_to_one"
        with plainly(plan.device):
            found = certify(
                self._known(), plan, lambda: self._certified_plan(kind),
                seconds=float(seconds), gap=float(gap), matchings=matchings,
            )  # fmt: skip
        known = self.certificate
        # what holds for every plan holds for matchings
        if known is not None and (matchings or not known.proof.matchings):
            found = found.beside(known)
        # kept as `lower_bound` is, which takes as long
        vars(self)["certificate"] = found
        return found

    def confidence(
        self,
        n_resamples: int = 20,
        *,
        groups: Any = None,
        time_limit: float | None = None,
        random_state: Seed | None = 0,
    ) -> Confidence:
        """Tell how sure the partner of each point is, without a truth.

        Nine tenths of the points of either side, 128 at most, are drawn again and again and solved:
        from the product plan, from this plan and from up to three ``alternatives``, of which the
        lowest objective counts. Points that were not drawn are matched by a half-step, as new ones
        are. A resample keeps a partner if it matches the point to it, or, where the partner was not
        drawn, to the drawn point next to it. So a match that other starts improve on, that hangs on
        a few points, or that others equal is kept by few; docs/real.md has how often shares are
        right. A match that is wrong in all resamples alike is kept: that is for
        :func:`torchgw.test`. ``stability`` keeps what was found.

        Parameters
        ----------
        n_resamples : int
            How many are solved.
        groups : array-like, shape (m,), optional
            A label for each point of Y, of which ``group`` of the answer counts the shares; by
            default points whose distances to all others are the same, of up to 5,000 points.
        time_limit : float, optional
            Seconds after which no more are solved.
        random_state : int, generator or None

        Returns
        -------
        Confidence
            ``partner`` and ``group``, shares in [0, 1] for each point of X.

        Raises
        ------
        InvalidInputError, InvalidTypeError
            For other arguments.
        UnsupportedError
            With another loss, relaxed marginals, known or allowed pairs, directed tables, and if
            the result comes from a file that does not hold the distances.

        Examples
        --------
        >>> import numpy as np, torchgw
        >>> X = np.random.default_rng(0).normal(size=(30, 2)) * [3, 1]
        >>> result = torchgw.solve(X, X + 5, distances="euclidean", random_state=0)
        >>> bool(result.confidence(5).partner.mean() > 0.9)
        True
        """
        check_count("n_resamples", n_resamples)
        check_not_negative("time_limit", time_limit, none=True)
        plan = self.lazy_plan.giving(in_numpy=False)
        with plainly(plan.device):
            found = confidence(
                self._known(), plan, self.epsilon, self.alternatives, n_resamples=n_resamples,
                groups=groups, time_limit=time_limit, random_state=random_state,
            )  # fmt: skip
        found = self._handed_out(found)
        # kept as a certificate is
        vars(self)["stability"] = found
        return found

    def _certified_plan(self, kind: CertifiedKind) -> Tensor:
        """Build the plan that a certificate is about, (n, m)."""
        plan = self.lazy_plan.giving(in_numpy=False)
        if kind == "plan":
            return plan.to_dense().double()
        made = torch.zeros(plan.shape, dtype=torch.float64, device=plan.device)
        made[tuple(torch.as_tensor(self.matching().pairs, device=plan.device).T)] = 1.0
        return made

    def _handed_out(self, found: T) -> T:
        """Give arrays of the kind that the plan gives."""
        return cast(T, as_numpy(found)) if self.lazy_plan.in_numpy else found

    def _known(self) -> Extension:
        """Give what is kept of the solve; refuse a result that has no distances."""
        if self.extension is None:
            raise UnsupportedError(
                "This result does not hold the distances of its points (`result.extension`). Solve "
                "again."
            )
        return self.extension

    def _summary(self) -> tuple[str, dict[str, str], str]:
        n, m = self.lazy_plan.shape
        error = self.report.value_standard_error
        figures = {
            "value": f"{self.value:.6g}" + (f" +- {error:.2g}" if error else ""),
            "epsilon": f"{self.epsilon:.4g}",
            "marginal_error": f"{self.marginal_error:.2g}",
            "how": f"{self.gradient} gradient, {self.backend} backend, {self.precision}",
            "iterations": f"{self.n_iters} in {sum(self.timings.values()):.2f} s",
        }
        # a bound takes a while to compute, so it is shown only if it has been asked for before
        bound = vars(self).get("lower_bound", float("nan"))
        if bound == bound:
            figures["above_lower_bound"] = f"{self.value - bound:.6g}"
        ended = [self.status.advice, *filter(None, (self.doubt, self._tell_ambiguity()))]
        return f"{n} x {m}", figures, "\n  ".join(ended)

    def __repr__(self) -> str:
        """Summarise in a few lines."""
        size, figures, ended = self._summary()
        how, (count, _, seconds) = figures.pop("how"), figures.pop("iterations").partition(" in ")
        steps = f"{count} iteration{'' if count == '1' else 's'}"
        numbers = ", ".join(f"{name}={text}" for name, text in figures.items())
        lines = [f"GWResult({size}, {numbers})", f"{how}, {steps} in {seconds}"]
        if self.certificate is not None:
            lines.append(f"certificate: {self.certificate}")
        decided = self.report.distances
        if decided:
            lines.append(f"distances: {decided['chosen']} ({decided['why']})")
        return "\n  ".join([*lines, ended])

    def _other_match(self) -> Alternative | None:
        """Find another match that costs nearly the same."""
        # NaN is not above it
        if not self.ambiguity > _AMBIGUOUS:
            return None
        for other in self.alternatives[1:]:
            if other.value <= self.alternatives[1].value and other.relation != "almost the first":
                return other
        return None

    def _tell_ambiguity(self) -> str:
        """Describe another optimum that is nearly as good, such as "the first mirrored"."""
        other = self._other_match()
        if other is None:
            return ""
        second = other.relation or "another match"
        if other.images > 1:
            second += f", one of {other.images} that symmetries make of it"
        return (
            f"Ambiguous: two matches cost nearly the same (ratio {self.ambiguity:.2f}), and the "
            f"second is {second}. The distances alone do not tell which is right: see "
            "`result.alternatives` and pass one as `init`, or tell points apart by `features`."
        )


def warn_of_little_mass(rule: MarginalRule | None, outcome: Outcome) -> None:
    """Warn where penalties are so small beside the costs that hardly any mass is moved."""
    if rule is None or rule.fixed_mass is not None:
        return
    share = outcome.ending.evaluation.mass / min(rule.totals)
    if share < _LITTLE_MASS:
        unit = "unbalanced=1 with options=torchgw.Options(unbalanced_unit='scale')"
        advice = "a larger one" if rule.squares else unit
        warn_user(
            f"The plan moves {share:.1%} of the mass: `unbalanced` is the price of what is left, "
            f"and costs vary by {outcome.strategy.facts.spread:.3g}. Pass {advice}, or the `mass` "
            "to move.",
            TorchGWWarning,
        )


def make_result(
    outcome: Outcome,
    problem: Problem,
    sides: Spaces,
    seed: int,
    told: Tensor | None,
    reduction: Reduction | None = None,
    likely: KnownPairs | None = None,
    *,
    linear: bool = True,
) -> GWResult:
    """Make the result of a solve that was told a support, and warn if it has not converged.

    Of ``likely`` pairs is part of the linear cost, or all of it if no other (``linear``) was given.
    """
    ending, strategy, search = outcome.ending, outcome.strategy, outcome.search
    found, recorder = ending.evaluation, outcome.recorder
    if search and max(problem.shape) <= limits_of(problem.source.device).few_points:
        search = with_images(search, problem)
    if not ending.status.converged:
        advice = ending.status.advice
        # what was rounded has the plan before that beside it
        rounded = strategy.options.rule is not None or ending.unpolished is not None
        if ending.status is Status.STOPPED and not rounded:
            free = problem.support is None and problem.restriction is None
            way_out = " (`lazy_plan.rounded()` meets them)" if free else ""
            advice += f" Its marginals{way_out} are missed by {found.marginal_error:.2g}."
        warn_user(advice, ConvergenceWarning)
    if search and search.doubt:
        warn_user(search.doubt, SearchWarning)
    # a linear cost of features is not kept: it is computed again from these
    table = None
    featured = sides.origins[0].features is not None
    # a support alone has a linear cost of zeros
    restricted = problem.support is not None or problem.restriction is not None
    fused = problem.linear is not None and (not restricted or problem.alpha < 1)
    if likely is not None:
        table, fused = problem.linear, linear
    elif fused and isinstance(problem.linear, DenseCost) and not featured:
        table = DenseCost(problem.linear.matrix.detach())
    extension = Extension(
        spaces=(sides.origins[0].copy(), sides.origins[1].copy()), known=outcome.known,
        linear=fused, restricted=problem.support is not None, support=told,
        pairs=None if reduction is None else reduction.pairs,
        likely=None if likely is None else likely.likely,
        likely_weights=None if likely is None else likely.weights(problem.marginals),
        unpolished=cast("TransportPlan | None", ending.unpolished),
        mass=1.0 if strategy.options.rule is None else strategy.options.rule.unit, table=table,
    )  # fmt: skip
    of_search: dict[str, Any] = {}
    if search:
        told_of = related(search.alternatives, problem.source, problem.target)
        of_search = {
            "alternatives": told_of, "ambiguity": search.ambiguity, "trials": search.trials,
            "doubt": search.doubt,
        }  # fmt: skip
    result = GWResult(
        # a SparsePlan has the same methods
        lazy_plan=cast(TransportPlan, ending.plan), potential_a=outcome.potentials.f,
        potential_b=outcome.potentials.g, value_quad=problem.alpha * found.quadratic.value,
        value_linear=(1 - problem.alpha) * found.linear, marginal_a=found.masses.a,
        marginal_b=found.masses.b, marginal_error=found.marginal_error, status=ending.status,
        epsilon=ending.epsilon, alpha=problem.alpha,
        scale=(sides.origins[0].scale, sides.origins[1].scale), gradient=strategy.gradient,
        backend=outcome.backend, precision=strategy.route.precision.chosen, random_state=seed,
        report=Report.of(outcome, problem, sides, reduction), **of_search,
        history=tuple(recorder.history), timings=dict(recorder.timings), extension=extension,
    )  # fmt: skip
    ambiguous = result._tell_ambiguity()
    if ambiguous:
        warn_user(ambiguous, AmbiguityWarning)
    return result
