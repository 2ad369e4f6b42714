"""The one entry point."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, ParamSpec, cast

import torch
from torch import Tensor

from torchgw._answer.balance import alike, check_chosen, is_chosen, solve_balanced
from torchgw._answer.overlap import solve_overlap
from torchgw._answer.passes import solve_problem
from torchgw._answer.reduced import of_all_points, reduced, told_of
from torchgw._answer.squares import solve_squares
from torchgw._boundary.arrays import as_weights, make_generator, resolve_device, without_tensors
from torchgw._boundary.cache import open_cache
from torchgw._boundary.checks import number_of, reject_unknown
from torchgw._boundary.console import progress
from torchgw._derivatives.transforms import through_transforms
from torchgw._errors import UnsupportedError
from torchgw._problem.given import Passed, warn_of_angles, with_area, with_relations
from torchgw._problem.limits import limits_of
from torchgw._problem.losses import Loss, LossName, check_loss, find_loss
from torchgw._problem.named import DistanceName, ScaleName
from torchgw._problem.problem import (
    Problem,
    check_alpha,
    check_features,
    check_marginal_rule,
    divide_by_totals,
    is_fused,
    linear_cost,
    without_structure,
)
from torchgw._problem.providers import DistanceOptions, Spaces, build_providers
from torchgw._problem.reduction import Reduction, with_likely, without_pairs
from torchgw._problem.signatures import SignatureName, is_signature, named_features
from torchgw._problem.support import (
    Known,
    KnownPairs,
    are_likely,
    check_known_pairs,
    is_feasible,
    read_pairs,
    read_restriction,
    read_support,
    usable,
    without_infinite,
)
from torchgw._problem.table import (
    FORMER,
    TABLE,
    Differentiable,
    GradientName,
    Options,
    Regularization,
    SearchName,
    gather,
)
from torchgw._results.certified import certified_solve, check_covered
from torchgw._results.handedness import without_reflections
from torchgw._results.result import GWResult, make_result, warn_of_little_mass
from torchgw._search.optima import Searched, agreement
from torchgw._solve.pipeline import Asked, Outcome, strategy_of
from torchgw._solve.route import Route
from torchgw._solve.state import Checkpoint, Recorder
from torchgw._solve.state import Options as SolverOptions
from torchgw._solve.strategy import (
    check_known,
    heavy_as_strict,
    in_units_of_cost,
    with_penalised_areas,
)
from torchgw._tensors.ahead import compile_beside, compile_rest
from torchgw._tensors.deadline import compiles_within, telling, within
from torchgw._tensors.machine import host_threads, small_on_one_thread
from torchgw._tensors.preload import load_beside
from torchgw._tensors.ranks import Ranks, check_distributed, join, share_inputs, together
from torchgw._typing import Iteration, Marginals, Seed
from torchgw.distances.base import DistanceProvider

P = ParamSpec("P")
# Arguments of `solve` that are no options.
DATA = (
    "X", "Y", "a", "b", "D_X", "D_Y", "M", "features", "allowed", "groups", "pairs", "init",
)  # fmt: skip
# Whether a solve is to end with the route of its problem.
_explaining: ContextVar[bool] = ContextVar("explaining", default=False)


@partial(reject_unknown, former=FORMER)
def solve(
    X: Any = None,
    Y: Any = None,
    *,
    a: Any = None,
    b: Any = None,
    distances: DistanceName | DistanceProvider | tuple[Any, Any] = "auto",
    D_X: Any = None,
    D_Y: Any = None,
    M: Any = None,
    features: tuple[Any, Any] | SignatureName | str | None = None,
    allowed: Any = None,
    groups: tuple[Any, ...] | None = None,
    pairs: Any = None,
    alpha: float | torch.Tensor | Literal["auto"] | None = None,
    loss: LossName = "square",
    n_neighbors: int | None = None,
    scale: ScaleName | None = "auto",
    epsilon: float | torch.Tensor | Literal["auto"] = "auto",
    gradient: GradientName = "auto",
    n_init: int | None = None,
    search: SearchName = "auto",
    init: Any = None,
    max_iter: int = 500,
    time_limit: float | None = None,
    tol: float = 1e-5,
    unbalanced: float | tuple[float, float] | None = None,
    mass: float | Literal["auto"] | None = None,
    regularization: Regularization = "entropic",
    polish: bool | None = None,
    certify: bool | float = False,
    device: torch.device | str | int | None = None,
    differentiable: Differentiable | None = None,
    random_state: Seed | None = None,
    verbose: bool = False,
    options: Options | None = None,
    **former: Any,
) -> GWResult:
    """Match two data sets by the distances inside each: entropic Gromov-Wasserstein transport.

    Minimises over plans P, of shape (n, m) and with marginals a and b,

        alpha * sum_ijkl (DX_ik - DY_jl)^2 P_ij P_kl + (1 - alpha) <M, P> + epsilon KL(P | a x b).

    Parameters
    ----------
    X, Y : array-like of shape (n, d) and (m, d'), or graph, or DistanceProvider
        Points; or a graph with edge lengths (SciPy sparse and symmetric, NetworkX, igraph, PyTorch
        Geometric data); or a surface: (vertices, faces), trimesh or PyVista, see
        :class:`torchgw.distances.Surface`. The two sides may be of different kinds.
    a, b : array-like, shapes (n,) and (m,), optional
        Non-negative weights of sum 1, or of any sum where ``unbalanced`` penalises that marginal;
        uniform by default, areas of a surface, which are penalised and not kept, with a warning,
        between surfaces of different shape; see docs/shapes.md.
    distances : str, DistanceProvider, or a pair of these
        How distances are computed from points; a pair has one for each side.

        - ``"euclidean"``, ``"sqeuclidean"``, ``"cosine"``, ``"correlation"``.
        - ``"poincare"``, ``"lorentz"``, ``"sphere"``: in a space of constant curvature, see
          :class:`torchgw.distances.CurvedDistance` and docs/curved.md.
        - Shortest paths on the nearest-neighbour graph: ``"geodesic"``, which is one of
          ``"precomputed"`` (all pairs, once), ``"landmark"`` (approximated from some points) and
          ``"dijkstra"`` (when needed), by the number of points.
        - ``"auto"``: geodesics for graphs, with ``n_neighbors`` or ``n_landmarks``, and on curves,
          surfaces and solids whose neighbour graph is in one piece; otherwise those in which the
          two sides agree best on a few points, of Euclidean (squared for many points), geodesic
          and cosine distances. ``result.log["distances"]`` says what was taken and why.
    D_X, D_Y : array-like, shapes (n, n) and (m, m), optional
        Given distance matrices, in place of X and Y. Any symmetric costs will do; similarities,
        kernels and Laplacians may be negative, except with the KL loss or a ``scale``. Directed
        costs are given as X and Y, each as :class:`torchgw.distances.DirectedDistance`. A pair, or
        a stack (r, n, n), is of several relations, directed or not, each compared with the same one
        of the other side: see docs/known.md.
    M : array-like, shape (n, m), optional
        Linear cost between the two sides (fused Gromov-Wasserstein). ``inf``: a pair that is not
        allowed.
    features : pair of array-like, shapes (n, k) and (m, k), or a name, optional
        Features of both sides, in place of ``M``: their distances are the linear cost. Of graphs
        and adjacency matrices a name has them computed from the edges: ``"degree"``,
        ``"clustering"``, ``"heat"`` (that stays at a node, at five times) or ``"wl"``
        (Weisfeiler-Lehman); any other name is an attribute of the nodes of both graphs, numbers or
        words. See docs/fused.md.
    allowed : array-like of bool, shape (n, m), or sparse matrix, list or function, optional
        Pairs of points that may hold mass; the plan is exactly zero at all others. A list has the
        allowed columns of each row; a function is called with row and column numbers of shapes
        (s, 1) and (1, m), and returns bool (s, m). See docs/known.md.
    groups : (labels_x, labels_y), or (labels_x, labels_y, table), optional
        Labels of shapes (n,) and (m,): points are matched within their label alone (``"same"``), or
        between the pairs of labels that the table lists.
    pairs : array-like, shape (k, 2) or (k, 3), optional
        Known pairs, a row of X and a row of Y each, which are matched with each other alone; or
        likely ones, with a confidence as third column (``inf``: known), see docs/known.md.
    alpha : float in [0, 1] or "auto", optional
        Weight of the quadratic term; by default 1 without a linear cost, 0.5 with one, 0.99 with
        features made from the edges, and with ``mass`` ``"auto"``: both terms count alike at the
        match. 0 is a Wasserstein problem, which needs no X and Y.
    loss : {"square", "kl", "absolute"}
        How a distance x of two points of X is compared with a distance y of two points of Y:
        (x - y)^2; or x log(x / y) - x + y, as in POT; or |x - y|, which is exact for some hundred
        points (a thousand on a GPU) and sampled beyond. See docs/losses.md.
    n_neighbors : int, optional
        Neighbours in the graph; about log n by default.
    scale : {"auto", "max", "mean"} or None
        What each side's distances are divided by, once, among the points of positive weight.
        ``"auto"`` divides distances that are computed here by the maximum, and leaves given ones;
        both sides of a relaxed problem (``unbalanced``, ``mass``) by the larger one, where both are
        points with as many columns, or graphs.
    epsilon : float or "auto"
        Regularisation, in units of squared scaled distances, as in POT. ``"auto"`` is 0.0025 times
        the natural scale of the cost, 4 alpha std(D_X) std(D_Y) (+ (1 - alpha) std(M)); or 0.1
        times that with proximal steps; and times the square of ``mass`` where that is given.
    gradient : {"auto", "dense", "factored", "sampled"}
        How the quadratic term is linearised: exactly by stored matrices, exactly by factors of the
        distances, or without bias from sampled anchor pairs. ``"auto"`` is exact wherever it fits.
    n_init : int, optional
        Number of starts, 16 by default, on few points of each side; 1 is a single start from a x b.
    search : {"auto", "fast", "thorough"}
        How far to look for a lower optimum; ``print(torchgw.explain(X, Y))`` says which moves that
        may mean for a problem, and docs/how-to-choose.md has the table. ``"auto"`` follows up to
        16 starts on all points (chains) where few points do not tell where all go, and solves from
        whatever it has found that may end lower. ``"fast"`` leaves that out and warns.
        ``"thorough"`` follows up to 64 chains, solves as the default and from a single start too,
        and returns the lowest; relaxed problems and the absolute loss refuse it.
    init : array-like, TransportPlan, GWResult, Matching, Alternative or pair of arrays, optional
        Where to start, in place of a search. A plan, floating-point numbers of shape (n, m) or an
        object, is continued at the target epsilon. A matching, ``result.matching()`` or integers
        of shape (n,) (each source point's target, -1: none) or (pairs, 2), and any of
        ``result.alternatives`` are refined from a larger epsilon. Potentials, a tuple (f, g), make
        the first Sinkhorn solve from a x b faster.
    max_iter : int
        Outer iterations at most.
    time_limit : float, optional
        Seconds after which the call ends with the best it has found, status ``STOPPED`` if
        that has not converged, a doubt if the search was cut. Distances and one plan are made in
        any case: where that takes longer on a CPU, a ``PerformanceWarning`` says so before. A plan
        out of time is not polished, and has the epsilon that was reached (``result.epsilon``). Of
        up to 9 million entries (on a CPU) and without a support it is rounded to its strict
        marginals, and no higher than where the solve began.
    tol : float
        Relative change of the plan in an outer iteration below which an exact solve has converged;
        2e-4 at least in float32.
    unbalanced : float or pair of float, optional
        Weight rho of the penalty KL(P1 x P1 | a x a) in place of P1 = a, of both sides or of each.
        inf is a strict marginal and 0 a free one: ``(inf, 0)`` is the semi-relaxed problem. Unless
        a side is strict, the mass of the plan is part of the answer; with ``alpha=0`` the penalty
        is 2 rho KL(P1 | a).
    mass : float in (0, 1] or "auto", optional
        Partial transport: exactly this share of the mass is moved, and no point gives or takes more
        than its weight. ``"auto"`` solves for 19 shares, each from its neighbour, and returns the
        last one before more mass costs more by far: see ``report.masses``.
    regularization : {"entropic", "proximal"}
        ``"proximal"`` replaces KL(P | a x b) by KL(P | last plan), which vanishes at the end: the
        plan becomes sharp. ``epsilon`` is then the weight of a step; ``result.epsilon`` that of an
        entropic solve that ends at the last plan.
    polish : bool, optional
        Whether to end with conditional gradient steps without regularisation; by default, after
        proximal steps between stored plans. ``report.polish_gap`` is what the linearised objective
        could still fall by. Needs an exact gradient and a stored plan; each step solves an
        assignment problem (equal weights, n = m) or a transport problem by POT's exact solver.
        Plans with a penalty on a marginal cannot be polished.
    certify : bool or float
        Whether to bound what any plan costs from below, go on from the best plan that the bounds
        come by, and keep the proof: ``result.certificate``. The bounds end once the result is
        within this share of its value (True: 1e-3) of the best there is, at ``time_limit``, or
        after ten seconds; where it is not, a doubt says so. The plan is polished unless that is
        refused. See docs/certificates.md.
    device : torch.device or str, optional
        Where to compute; by default where the inputs are.
    differentiable : {"value", "implicit", "unrolled"} or None
        Whether ``result.loss``, the objective as a tensor, carries gradients to those of X, Y, a,
        b, D_X, D_Y, M, features, ``alpha`` and ``epsilon`` that require them; but for ``"value"``,
        ``result.lazy_plan`` does too. ``epsilon`` must be a number then, and ``scale="auto"`` means
        ``None``. See docs/differentiation.md.
    random_state : int, torch.Generator, numpy.random.Generator, RandomState or None
        Seed of every random choice: the same seed gives the same bits on one device and backend.
    verbose : bool
        Show progress on standard error: a moving line on a terminal, otherwise one per outer
        iteration. Choices go to ``logging.getLogger("torchgw")``.
    options : Options, optional
        Further options, and any of those above: ``options=torchgw.Options(inner_tol=1e-9)``, see
        :class:`torchgw.Options` and docs/options.md. As arguments of their own those that are not
        listed above are deprecated.

    Returns
    -------
    GWResult

    Raises
    ------
    InvalidInputError, InvalidTypeError
        For input that cannot be used.
    UnsupportedError, BackendUnavailableError
        For options that cannot be met here.
    NumericalError
        If the solve becomes non-finite.
    RankError
        If another process of a distributed solve has ended, or has other input.

    Warns
    -----
    ConvergenceWarning
        If the result did not converge; the message is ``result.status.advice``.
    GraphWarning
        If a neighbour graph was disconnected.
    SearchWarning
        If there may be a better optimum; the message is ``result.doubt``.
    AmbiguityWarning
        If another match costs nearly the same, as where a space is symmetric; the message says what
        it is to the one returned.

    Notes
    -----
    The square-loss problem is that of [1]_, the sampled gradient that of [2]_.

    References
    ----------
    .. [1] G. Peyre, M. Cuturi, J. Solomon. Gromov-Wasserstein averaging of kernel and distance
       matrices. ICML 2016.
    .. [2] T. Kerdoncuff, R. Emonet, M. Sebban. Sampled Gromov Wasserstein. Machine Learning 2021.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> X = np.random.default_rng(0).normal(size=(60, 3))
    >>> result = torchgw.solve(X, X @ np.diag([1, -1, 1]), distances="euclidean", random_state=0)
    >>> int((result.lazy_plan.argmax() == np.arange(60)).sum())
    60
    """
    given = locals()
    asked = gather(given, options, former)
    data = {name: given[name] for name in DATA}
    # apart from the others, since tensors among them may be those of torch.func
    tensors = {"alpha": asked.alpha, "epsilon": asked.epsilon}
    answer = _solve if asked.differentiable is None else through_transforms(_solve)
    return answer(**data, **tensors, asked=asked, covered=False)


def _solve(
    X: Any, Y: Any, *, a: Any, b: Any, D_X: Any, D_Y: Any, M: Any, features: Any, allowed: Any,
    groups: Any, pairs: Any, init: Any, alpha: Any, epsilon: Any, asked: Options, covered: bool,
) -> GWResult:  # fmt: skip
    """Solve with options that are checked; one that has to be ``covered`` will be certified."""
    if asked.certify is not False:
        strict = asked.unbalanced is None and asked.mass is None
        asked = asked.replace(polish=True if asked.polish is None and strict else asked.polish)
    if (asked.certify is not False or not asked.reflections) and not _explaining.get():
        again = partial(
            _solve, X, Y, a=a, b=b, D_X=D_X, D_Y=D_Y, M=M, features=features,
            allowed=allowed, groups=groups, pairs=pairs, alpha=alpha, epsilon=epsilon,
            covered=False,
        )  # fmt: skip
        several = without_reflections if asked.certify is False else certified_solve
        return cast("GWResult", several(again, init, asked))
    data, known = _Data(X, Y, a, b, D_X, D_Y, M, features), Known(allowed, groups, pairs)
    call = _checked(data, known, init, alpha, epsilon, asked, covered=covered)
    generator, seed = make_generator(asked.random_state, call.device)
    ranks = join(asked.distributed, call.device)
    if ranks is not None:
        seed = ranks.same_seed(seed)
        generator.manual_seed(seed)
        call = call._replace(
            options=replace(call.options, ranks=ranks), measure=replace(call.measure, ranks=ranks)
        )
    keeper = None if asked.checkpoint is None else Checkpoint(asked.checkpoint, ranks)
    with _running(call, ranks) as recorder:
        sides, made = _measured(call, recorder)
        posed = _posed(call, sides)
        if covered:
            rule = posed.options.rule
            check_covered(call.loss.name, rule is not None, sides.origins, sides.providers)
        inputs = _followed(call, posed) if call.tracked else None
        source, target = sides.providers
        with small_on_one_thread(source.n, target.n, call.device):
            question = Asked(
                posed.problem, posed.options, init, generator, sides.graphs,
                (sides.origins[0].scale, sides.origins[1].scale), keeper, made,
            )  # fmt: skip
            if posed.reduction is not None:
                question = reduced(question, posed.reduction)
            if _explaining.get():
                # for explain(), which is the only one to ask for it, and returns it
                return cast("GWResult", told_of(strategy_of(question).route, posed.reduction))
            outcome, problem = _answer(call, posed, question, recorder)
            if call.pair is not None:
                sides = sides.featured(call.pair, asked.feature_metric)
            result = make_result(
                outcome, problem, sides, seed, posed.told, posed.reduction,
                posed.pairs if call.likely else None, linear=posed.linear,
            )  # fmt: skip
            warn_of_little_mass(posed.options.rule, outcome)
    if call.device.type == "cuda":
        if asked.backend == "auto" and call.asked.backend == "eager":
            # for later calls
            compile_beside(call.device, asked.distances, *call.data.sides)
        compile_rest(call.device)
    if asked.differentiable is None or inputs is None:
        return result.in_numpy() if call.in_numpy else result
    from torchgw._derivatives.plan import attach
    from torchgw._derivatives.tracked import Definition

    definition = Definition(problem, call.pair, asked.feature_metric, posed.options.rule)
    found = outcome.ending.evaluation
    slopes = {"alpha": found.quadratic.value - found.linear, "epsilon": found.kl}
    return attach(result, definition, inputs, asked.differentiable, generator, slopes)


class _Data(NamedTuple):
    """What is compared, as the user gave it."""

    X: Any
    Y: Any
    a: Any
    b: Any
    D_X: Any
    D_Y: Any
    M: Any
    features: Any

    @property
    def sides(self) -> tuple[Any, ...]:
        """Points, graphs or tables of both sides."""
        return self.X, self.Y, self.D_X, self.D_Y


class _Call(NamedTuple):
    """A call that has been checked, before anything of the size of the data is made."""

    data: _Data  # areas of surfaces are weights; features by name are arrays
    asked: Options
    known: Known
    finite: Tensor | None  # which entries of M are, if some are not
    table: Any  # M, with zero in place of these
    shares: tuple[Any, Any]  # weights without the totals that a penalty keeps
    pair: tuple[Tensor, Tensor] | None  # features
    alpha: Any  # as it was given; None if it is chosen
    weight: float  # of the quadratic term
    epsilon: Any  # as it was given
    balanced: bool  # whether several solves find the weight
    likely: bool  # whether pairs have confidences
    loss: Loss
    options: SolverOptions
    measure: DistanceOptions
    device: torch.device
    in_numpy: bool  # whether no tensor was given

    @property
    def tracked(self) -> bool:
        """Whether derivatives are asked for."""
        return self.asked.differentiable is not None

    @property
    def apart(self) -> bool:
        """Whether points of known pairs are no part of the problem that is solved."""
        return self.options.rule is None and not (self.tracked or self.balanced)


def _checked(
    data: _Data, known: Known, init: Any, alpha: Any, epsilon: Any, asked: Options, *, covered: bool
) -> _Call:
    """Refuse what does not go together, and begin to load what a GPU will need."""
    tracked, given = asked.differentiable is not None, init is not None
    squares = None if str(asked.unbalanced_type).lower() == "kl" else asked.unbalanced_type
    check_distributed(
        asked.distributed, differentiable=asked.differentiable, polish=asked.polish,
        unbalanced_type=squares, mass=asked.mass if isinstance(asked.mass, str) else None,
    )  # fmt: skip
    data = _Data(*share_inputs(asked.distributed, **data._asdict()))
    in_numpy = without_tensors(*data, asked.distances)
    (X, a), (Y, b) = with_area("X", data.X, data.a), with_area("Y", data.Y, data.b)
    unasked = all(part is None for part in (data.a, data.b, data.M, data.features, *known))
    if unasked and not (tracked or covered):
        asked = with_penalised_areas(X, Y, asked)
    (X, D_X), (Y, D_Y) = with_relations("X", X, data.D_X), with_relations("Y", Y, data.D_Y)
    data = data._replace(X=X, Y=Y, a=a, b=b, D_X=D_X, D_Y=D_Y)
    table, finite = (None, None) if data.M is None else without_infinite(data.M)
    if finite is not None or any(part is not None for part in known):
        check_known_pairs(known, infinite=finite is not None, distributed=bool(asked.distributed))
    rule = check_marginal_rule(asked.unbalanced, asked.mass, asked.unbalanced_type)
    a, b, rule = divide_by_totals(a, b, rule)
    options = SolverOptions.of(asked, number_of("epsilon", epsilon, tracked=tracked), rule)
    loss, scale = find_loss(asked.loss), asked.scale
    if asked.differentiable is not None:
        from torchgw._derivatives.tracked import check_units

        scale = check_units(asked.differentiable, options, scale, loss)
    options.check_search(given=given, crossed=loss.cross is not None)
    options = options.check_resolution(given=given)
    by_name, features = False, data.features
    if features is not None:
        by_name = is_signature(features)
        features = named_features(features, (X, Y), (data.D_X, data.D_Y))
    pair = check_features(features, asked.feature_metric)
    likely = known.pairs is not None and are_likely(known.pairs)
    if likely and tracked:
        raise UnsupportedError(
            "`pairs` with a confidence are a linear cost that is computed from the distances, of "
            "which no derivatives are known. Pass known pairs (k, 2), or a table `M`."
        )
    fused = is_fused(data.M, pair)
    balanced = False
    if fused or alpha is not None:
        balanced = is_chosen(alpha, fused=fused, named=by_name, mass=asked.mass)
    if balanced:
        check_chosen(
            checkpoint=asked.checkpoint, distributed=asked.distributed or None,
            unbalanced=asked.unbalanced,
        )  # fmt: skip
        alpha = None
    fused = fused or likely
    weight = check_alpha(alpha, fused=fused, named=by_name, tracked=tracked)
    options.check_combination(linear=fused, weight=float(weight))
    check_known(options, loss, matrix=data.M is not None)
    structure = any(part is not None for part in data.sides)
    device = resolve_device(asked.device, *(data.sides if structure else (data.M, *(pair or ()))))
    if device.type == "cuda":
        load_beside(device, *data.sides)
        if asked.backend == "auto" and not compiles_within(asked.time_limit, device):
            asked, options = asked.replace(backend="eager"), replace(options, backend="eager")
        if asked.backend in ("auto", "triton"):
            compile_beside(device, asked.distances, *data.sides)
    free = asked.gradient in ("auto", "factored") and not asked.polish
    measure = DistanceOptions(
        asked.n_neighbors, asked.n_landmarks, scale, asked.disconnected,
        None if asked.cache is None else open_cache(asked.cache),
        bool(asked.verbose), factors=loss.is_square,
        exact=asked.gradient == "auto" and asked.n_anchors is None,
        dense=asked.gradient == "dense",
        # explicitly exact options are not approximated
        approximate=loss.is_square and free,
        curvature=asked.curvature, signed=not loss.singular, relaxed=options.rule is not None,
    )  # fmt: skip
    return _Call(
        data._replace(features=features), asked, known, finite, table, (a, b),
        pair, alpha, weight, epsilon, balanced, likely, loss, options, measure, device, in_numpy,
    )  # fmt: skip


@contextmanager
def _running(call: _Call, ranks: Ranks | None) -> Iterator[Recorder]:
    """Set what holds while a call is answered, and yield what records it."""
    asked, device = call.asked, call.device
    first = ranks is None or ranks.rank == 0
    shown: Any = nullcontext()
    if asked.verbose and first:
        shown = progress(True, asked.max_iter, asked.tol, pause=0.0)
    # no graph grows over the iterations, even if tensors of a provider require gradients; and no
    # autocast of the caller rounds products in here
    exactly = torch.autocast(device.type, enabled=False)
    aside = host_threads(device, call.data.X, call.data.Y)
    limit = within(asked.time_limit, shared=ranks is not None)
    with limit, telling(), torch.no_grad(), exactly, aside, together(ranks), shown as report:
        yield Recorder(_both(report, asked.callback), ranks=ranks)


def _measured(call: _Call, recorder: Recorder) -> tuple[Spaces, list[Searched]]:
    """Make the distances of both sides, and keep the searches that have chosen them."""
    data, asked, device = call.data, call.asked, call.device
    tables, structure = (data.D_X, data.D_Y), any(part is not None for part in data.sides)
    if call.weight == 0 and not structure and isinstance(asked.distances, str):
        tables = without_structure(data.M, call.pair)
    made: list[Searched] = []
    judge = partial(agreement, device=device, backend=asked.backend, made=made)
    sides = build_providers(
        (Passed("X", data.X, tables[0], call.shares[0]),
         Passed("Y", data.Y, tables[1], call.shares[1])),
        asked.distances, call.measure, device, recorder.time,
        # choices that follow the inputs are not differentiated
        None if call.tracked else judge, directed=True,
    )  # fmt: skip
    if sides.decision is not None:
        warn_of_angles(call.options.rule is not None, sides.decision.chosen)
    check_loss(call.loss, sides.providers[1])
    return sides, made


class _Posed(NamedTuple):
    """The problem that is solved, and what a result tells of how it was posed."""

    problem: Problem
    options: SolverOptions
    reduction: Reduction | None  # to the points whose partners are not known
    pairs: KnownPairs
    told: Tensor | None  # the support that a result keeps
    linear: bool  # whether a linear cost was given


def _posed(call: _Call, sides: Spaces) -> _Posed:
    """Pose the problem: weights, costs, and which pairs may hold mass."""
    options, where = call.options, call.device
    (source, target), (a, b) = sides.providers, call.shares
    shape = source.n, target.n
    marginals = Marginals(as_weights("a", a, source.n, where), as_weights("b", b, target.n, where))
    linear = linear_cost(call.table, call.pair, call.asked.feature_metric, shape, where)
    problem = Problem(source, target, marginals, call.weight, linear, call.loss)
    pairs, told = KnownPairs(None), None
    if call.finite is not None or any(part is not None for part in call.known):
        problem, pairs, told = _told(call, problem)
    if call.balanced:
        problem = replace(problem, alpha=alike(problem))
    # where the mass of known pairs is fixed, the other points are a problem of their own
    apart = pairs.known if call.apart and shape != (1, 1) else None
    reduction = None if apart is None else without_pairs(problem, apart)
    if call.asked.unbalanced_unit == "scale":
        options = replace(options, rule=in_units_of_cost(options.rule, problem))
    rule = heavy_as_strict(options.rule, problem)
    if problem.support is not None and rule is None and options.rule is not None:
        # penalties, however heavy, are what lets a plan be where none is strict
        if is_feasible(problem.support, marginals):
            problem = replace(problem, support=usable(problem.support, marginals, None))
        else:
            rule = options.rule
    options = replace(options, rule=rule)
    return _Posed(problem, options, reduction, pairs, told, linear is not None)


def _told(call: _Call, problem: Problem) -> tuple[Problem, KnownPairs, Tensor | None]:
    """Let a problem know which pairs may hold mass, or do; also give what a result keeps of it."""
    known, finite, where, marginals = call.known, call.finite, call.device, problem.marginals
    shape, rule = problem.shape, call.options.rule
    pairs = read_pairs(known.pairs, shape, where)
    held, listed = None if call.apart else pairs.known, None
    if finite is None and not call.tracked:
        listed = read_restriction(known, marginals, rule, where)
    some = known if listed is None else known._replace(allowed=None, groups=None)
    told = support = read_support(some, finite, held, shape, where)
    limits, apart = limits_of(where), call.apart and pairs.known is not None
    if (apart or listed is not None) and limits.certifies(*shape) and limits.stores(*shape):
        told = read_support(known, finite, pairs.known, shape, where)
    if support is not None and not apart:
        support = usable(support, marginals, rule)
    problem = replace(with_likely(problem, pairs), support=support, restriction=listed)
    return problem, pairs, told


def _followed(call: _Call, posed: _Posed) -> dict[str, Tensor]:
    """Pick the inputs that require gradients; refuse those that have none."""
    from torchgw._derivatives.tracked import check_stored, check_tracked, tracked_inputs

    data, problem, rule = call.data, posed.problem, posed.options.rule
    inputs = tracked_inputs(
        X=data.X, Y=data.Y, a=data.a, b=data.b, D_X=data.D_X, D_Y=data.D_Y, M=data.M,
        F=data.features, alpha=call.alpha, epsilon=call.epsilon,
    )  # fmt: skip
    check_tracked(inputs, problem, rule, scaled=call.measure.scale is not None)
    assert call.asked.differentiable is not None
    check_stored(call.asked.differentiable, rule, problem.marginals)
    return inputs


def _answer(
    call: _Call, posed: _Posed, question: Asked, recorder: Recorder
) -> tuple[Outcome, Problem]:
    """Solve in the way that the marginals ask for; also give the problem of all points."""
    rule, problem = posed.options.rule, posed.problem
    squared, chosen = (rule.squares, rule.chosen) if rule is not None else (False, False)
    way = solve_squares if squared else solve_overlap if chosen else solve_problem
    if call.balanced:
        outcome = solve_balanced(question, recorder, way)
        problem = replace(problem, alpha=outcome.strategy.problem.alpha)
    else:
        outcome = way(question, recorder)
    if posed.reduction is not None:
        outcome = of_all_points(question, posed.reduction, outcome)
    return outcome, problem


def _taking(
    function: Callable[P, GWResult],
) -> Callable[[Callable[..., Route]], Callable[P, Route]]:
    """Give a function the parameters of another."""

    def with_parameters(made: Callable[..., Route]) -> Callable[P, Route]:
        shown = inspect.signature(function).replace(return_annotation=Route)
        made.__signature__ = shown  # type: ignore[attr-defined]
        return made

    return with_parameters


@_taking(solve)
def explain(*data: Any, **arguments: Any) -> Route:
    """Say what :func:`solve` will do with the same arguments, why, and what it will take.

    Distances are prepared and everything is checked as for a solve; nothing is solved.

    Parameters
    ----------
    X, Y, a, b, and every other argument of :func:`solve`
        As there.

    Returns
    -------
    Route
        A named tuple, whose text is printed by ``print``: the choices of gradient, precision and
        storage, where the solve begins, which moves the search may make and on what they depend,
        how it ends, and seconds (on one quiet core; of a CPU) and bytes by a model.

    Raises
    ------
    InvalidInputError, InvalidTypeError, UnsupportedError
        Where :func:`solve` would.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> X = np.random.default_rng(0).normal(size=(60, 3))
    >>> route = torchgw.explain(X, X, distances="euclidean", n_init=1)
    >>> route.gradient.chosen, route.precision.chosen
    ('dense', 'float64')
    """
    before = _explaining.set(True)
    try:
        return cast("Route", solve(*data, **arguments))
    finally:
        _explaining.reset(before)


def as_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sort names and values into data and options, as arguments of :func:`solve`."""
    data = {name: value for name, value in values.items() if name not in TABLE}
    return data | {"options": gather(values, data.get("options"), {})}


def _both(
    report: Callable[[Iteration], None] | None, callback: Callable[[Iteration], Any] | None
) -> Callable[[Iteration], Any] | None:
    """Join the display of progress and the user's callback, whose answer counts."""
    if report is None or callback is None:
        return report or callback

    def shown(entry: Iteration) -> Any:
        report(entry)
        return callback(entry)

    return shown
