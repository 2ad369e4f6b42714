"""Many problems in one call: lists of spaces, or padded stacks of matrices."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._batch.packing import inside_of
from torchgw._boundary import arrays
from torchgw._boundary.checks import reject_unknown
from torchgw._derivatives.loss import call
from torchgw._errors import InvalidInputError, PlanTooLargeError, UnsupportedError
from torchgw._many import questions
from torchgw._many.result import BatchResult
from torchgw._many.solver import Keep, Kept, solve_questions, solve_together, warn_of_failures
from torchgw._many.spaces import (
    Listed,
    Measure,
    Shelves,
    Space,
    check_columns,
    check_measure,
    listed_spaces,
    read_spaces,
)
from torchgw._problem.named import DistanceName, ScaleName
from torchgw._problem.problem import FeatureMetric, check_feature_metric, is_fused
from torchgw._problem.table import Options, SearchName, check_options, takes_options
from torchgw._tensors.ahead import probe_beside
from torchgw._tensors.machine import free_memory
from torchgw._tensors.operations import straight
from torchgw._tensors.ranks import Distributed, Ranks, check_distributed, join, together


def attach_losses(
    asked: questions.Questions,
    kept: dict[int, Kept],
    objective: Tensor,
    inputs: dict[str, Any],
    distances: Any,
) -> Tensor:
    """Return the objectives (B,) as a tensor whose gradients reach the inputs."""
    # `inputs` holds, as the user gave them, the lists X and Y, M, a and b.
    found = []
    with torch.enable_grad():
        for number in range(len(asked)):
            plan = kept[number].plan
            x = _table(inputs["X"], number, distances, 0, plan)
            y = _table(inputs["Y"], number, distances, 1, plan)
            given = (None if inputs[name] is None else inputs[name][number] for name in "Mab")
            # arrays of NumPy have no gradients, but M tells that there is a linear cost
            parts = [
                part
                if part is None
                else torch.as_tensor(part, dtype=plan.dtype, device=plan.device)[None]
                for part in given
            ]
            tables, worth = (x[None], y[None]), objective[number][None]
            solved = [part[None] for part in kept[number][1:]]
            at_plan = partial(slopes, float(asked.alpha[number]), *tables, *solved)
            found.append(call(Envelope, *tables, *parts, worth, at_plan))
    return torch.cat(found)


class Envelope(torch.autograd.Function):
    """Objectives of solved problems, whose derivatives are those at fixed plans."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, linear: Tensor | None, a: Tensor, b: Tensor,
        objective: Tensor, at_plan: Callable[..., Sequence[Tensor | None]],
    ) -> Tensor:  # fmt: skip
        ctx.at_plan = at_plan
        return objective.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if torch.is_grad_enabled():
            # plans would have to follow the inputs
            raise UnsupportedError(
                "This loss has first derivatives: leave `create_graph` out, or use the second ones "
                'of torchgw.solve(..., differentiable="value").'
            )
        found = (
            part if part is None else part * upstream.view(-1, *(part.ndim - 1) * (1,))
            for part in ctx.at_plan(wanted=ctx.needs_input_grad[:5])
        )
        return (*found, None, None)


def slopes(
    alpha: float, x: Tensor, y: Tensor, plan: Tensor, f: Tensor, g: Tensor, *,
    wanted: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Differentiate objectives (B,) at fixed plans, in what is wanted of x, y, M, a and b."""
    p, q = plan.sum(2), plan.sum(1)
    found: list[Tensor | None] = [None] * 5
    if wanted[0]:
        found[0] = 2 * alpha * (p[:, :, None] * p[:, None, :] * x - plan @ y @ plan.mT)
    if wanted[1]:
        found[1] = 2 * alpha * (q[:, :, None] * q[:, None, :] * y - plan.mT @ x @ plan)
    if wanted[2]:
        found[2] = (1 - alpha) * plan
    for place, table, mass, potential in ((3, x, p, f), (4, y, q, g)):
        if wanted[place]:
            # that of the whole cost, up to a constant that weights of sum one do not see
            whole = potential + 2 * alpha * (table.square() @ mass[:, :, None])[:, :, 0]
            found[place] = whole - (whole * mass).sum(1, keepdim=True)
    return found


def _table(listed: Listed, number: int, distances: Any, place: int, plan: Tensor) -> Tensor:
    """Compute the distances of one space (n, n), attached to the tensors they are made of."""
    space = listed.items[number]
    if listed.are_tables:
        return torch.as_tensor(space, device=plan.device).to(plan)
    name = distances[place] if isinstance(distances, (tuple, list)) else distances
    if not isinstance(space, Tensor) or name not in ("auto", "euclidean", "sqeuclidean"):
        raise UnsupportedError(
            "`differentiable` knows tensors of points with Euclidean distances, and matrices. "
            "Compute the distances by PyTorch and pass them as D_X and D_Y."
        )
    points = space.to(plan)
    if name == "sqeuclidean":
        return (points[:, None] - points).square().sum(2)
    return straight(points, points)


def read_stack(
    name: str, value: Any, sizes_name: str, sizes: Any, device: torch.device, *, signed: bool
) -> tuple[Tensor, Tensor]:
    """Read distance matrices (B, n, n), zero beyond the points in use, and how many these are."""
    if isinstance(value, (list, tuple)) and len({getattr(one, "shape", None) for one in value}) > 1:
        raise InvalidInputError(
            f"`{name}` must be a stack of matrices of one size; got several. Pass the lists to "
            "torchgw.solve_many(D_X=..., D_Y=...)."
        )
    stack = arrays.to_tensor(name, value).detach()
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2] or stack.shape[1:] == (0, 0):
        raise InvalidInputError(
            f"`{name}` must be a stack of square matrices, (B, n, n) with n at least 1; got "
            f"{tuple(stack.shape)}. "
            "Points and lists of matrices are for torchgw.solve_many."
        )
    count, most = stack.shape[:2]
    used = torch.from_numpy(_read_sizes(sizes_name, sizes, count, most)).to(device)
    inside = inside_of(most, used)
    stack = stack.to(device, torch.float64)
    if not bool(inside.all()):
        stack = torch.where(inside[:, :, None] & inside[:, None, :], stack, 0.0)
    arrays.check_finite(
        name, stack, "Replace infinite entries (unreachable pairs) by a finite distance."
    )
    largest = arrays.check_magnitude(name, stack)
    # what is above zero on one side of the diagonal is below it on the other
    if count and float((stack - stack.mT).max()) > arrays.SAME_DISTANCE * largest:
        raise InvalidInputError(f"`{name}` must hold symmetric matrices.")
    least = float(stack.min()) if count else 0.0
    if least < 0 and not signed:
        raise InvalidInputError(
            f"`{name}` must be non-negative where `scale` divides by the largest or the mean "
            f"entry; its smallest entry is {least:.3g}. Pass scale=None."
        )
    return stack, used


def _read_sizes(name: str, sizes: Any, count: int, most: int) -> NDArray[np.int64]:
    """Read how many points of each space are in use."""
    if sizes is None:
        return np.full(count, most)
    found = np.asarray(arrays.to_numpy(sizes))
    good = found.shape == (count,) and found.dtype.kind in "iu"
    if not good or (count and not 1 <= found.min() <= found.max() <= most):
        raise InvalidInputError(
            f"`{name}` must be {count} integers between 1 and {most}; got "
            f"{str(found.tolist())[:60]}."
        )
    return found.astype(np.int64)


def read_costs(M: Any, x: Tensor, rows: Tensor, y: Tensor, columns: Tensor) -> Tensor:
    """Read linear costs (B, n, m), zero beyond the points in use."""
    costs = arrays.to_tensor("M", M).detach().to(x)
    arrays.check_shape("M", costs, (len(x), x.shape[1], y.shape[1]))
    inside = inside_of(x.shape[1], rows)[:, :, None] & inside_of(y.shape[1], columns)[:, None, :]
    costs = torch.where(inside, costs, 0.0)
    arrays.check_finite("M", costs, arrays.FORBIDDEN if bool((costs == torch.inf).any()) else "")
    arrays.check_magnitude("M", costs, smallest=0.0)
    return costs


def read_weights(name: str, value: Any, sizes: Tensor, like: Tensor) -> Tensor:
    """Read weights (B, n), each row of sum one, zero beyond the points in use."""
    inside = inside_of(like.shape[1], sizes)
    if value is None:
        return inside.to(like) / sizes[:, None]
    weights = arrays.to_tensor(name, value).detach().to(like)
    arrays.check_shape(name, weights, tuple(inside.shape))
    weights = torch.where(inside, weights, 0.0)
    arrays.check_finite(name, weights)
    total = weights.sum(1, keepdim=True)
    off = float((total - 1).abs().max()) if len(total) else 0.0
    if off > arrays.MASS_TOLERANCE or bool((weights < 0).any()):
        raise InvalidInputError(
            f"`{name}` must have non-negative rows of sum 1; sums are off by up to {off:.3g}."
        )
    return weights / total


def scaled(stack: Tensor, weights: Tensor, scale: str) -> Tensor:
    """Divide each matrix by its largest or its mean distance among points of positive weight."""
    used = (weights > 0).to(stack)
    if scale == "max":
        size = (stack * used[:, :, None] * used[:, None, :]).amax((1, 2))
    else:
        share = used / used.sum(1, keepdim=True)
        size = ((stack * share[:, None, :]).sum(2) * share).sum(1)
    return stack / torch.where(size > 0, size, 1.0)[:, None, None]


@reject_unknown
@takes_options
def solve_many(
    Xs: Any = None,
    Ys: Any = None,
    *,
    a: Any = None,
    b: Any = None,
    distances: DistanceName | tuple[Any, Any] = "auto",
    D_X: Any = None,
    D_Y: Any = None,
    M: Any = None,
    features: tuple[Any, Any] | None = None,
    feature_metric: FeatureMetric = "sqeuclidean",
    alpha: Any = None,
    n_neighbors: int | None = None,
    scale: ScaleName | None = "auto",
    epsilon: Any = "auto",
    n_init: int | None = None,
    search: SearchName = "auto",
    max_iter: int = 500,
    tol: float = 1e-5,
    objective_tol: float = 1e-4,
    inner_max_iter: int = 2000,
    inner_tol: float | None = None,
    unbalanced: Any = None,
    mass: Any = None,
    regularization: Any = "entropic",
    polish: Any = None,
    plans: bool = True,
    differentiable: bool = False,
    distributed: Distributed = False,
    device: torch.device | str | int | None = None,
    options: Options | None = None,
) -> BatchResult:
    """Solve many small problems together: problem k is between space k of each list.

    The objective, the units and the options are those of :func:`torchgw.solve` with
    ``loss="square"``. A problem has the same bits alone, in any batch and in any order, on one
    device. Problems of more than 512 points on a side are solved one by one.

    Parameters
    ----------
    Xs, Ys : list of B spaces
        Each anything that :func:`torchgw.solve` takes: points (n, d), a graph, a provider; sizes
        may differ. Also a nested tensor, an array (B, n, d), or a batch of PyTorch Geometric.
    a, b : list of array-like, shapes (n,) and (m,), optional
        Weights of each space, of sum 1; uniform by default, or where an entry is None.
    distances : str or pair of str
        As in ``solve``, but ``"auto"`` does not look for what agrees best: it is Euclidean for
        points and shortest paths for graphs, so that values can be compared.
    D_X, D_Y : list of array-like, shapes (n, n) and (m, m), optional
        Distance matrices, in place of Xs and Ys; entries may be negative, as in ``solve``.
    M : list of array-like, shapes (n, m), optional
        Linear cost of each problem.
    features : pair of lists of array-like, shapes (n, k) and (m, k), optional
        Features of the points of all spaces, in place of ``M``; see ``feature_metric``.
    feature_metric : {"sqeuclidean", "cosine", "correlation", "euclidean"}
    alpha : float or B of them, optional
        Weight of the quadratic term: 1, or 0.5 with a linear cost.
    n_neighbors : int, optional
        Neighbours in the graph, where points have geodesics.
    scale : {"auto", "max", "mean"} or None
        As in ``solve``; each space by its own.
    epsilon : float, "auto", or B of these
        As in ``solve``, in units of squared scaled distances.
    n_init : int, optional
        By default problems of up to 1,024 pairs of points (32 x 32) are searched: many starts are
        followed to their ends, the best ones kicked and mixed, and solved from. Larger ones are
        solved from a single start and from the two best of 8 to 23 others, in two to four times the
        time of one start, and those of more than 512 points as by ``solve``. ``result.doubts`` says
        where they did not agree. With a number so many starts are solved, of which the lowest
        objective counts, and nothing is said of other optima: a x b annealed from the natural
        scale, on a CPU more slowly than by ``solve(..., n_init=1)``; then plans by the
        distributions of distances; then by random mixtures of their quantiles, always the same. One
        start of a problem that would be searched takes a tenth of the time.
    search : {"auto", "fast", "thorough"}
        ``"auto"`` is what ``n_init`` says, ``"fast"`` a single start. ``"thorough"`` solves each
        problem, of any size, as ``solve`` does by its defaults: up to a few seconds each.
    max_iter, tol, objective_tol, inner_max_iter, inner_tol
        As in ``solve``. ``tol`` counts in float64, and there is no extrapolation.
        ``objective_tol`` has no effect on relaxed problems.
    unbalanced : float, pair of float, or a list of B of these, optional
        As in ``solve``.
    mass : float or B of them, optional
        As in ``solve``; None is strict, as in a list of ``unbalanced``.
    regularization : {"entropic", "proximal"} or B of these
        As in ``solve``. Proximal steps begin at the plan of an entropic annealing.
    polish : bool, None, or B of these
        As in ``solve``: by default after proximal steps. The plan of the best start is polished on
        the host, one problem after the other.
    plans : bool
        Whether to keep the plans, 8 n m bytes for each problem.
    differentiable : bool
        Whether ``result.loss`` carries gradients to the D_X, D_Y, M that require them, to points
        under Euclidean distances, and to a and b of strict marginals. ``epsilon`` has to be a
        number, and ``scale="auto"`` means None.
    distributed : bool or "auto"
        Whether the processes of ``torch.distributed`` share the problems, as in
        :func:`torchgw.solve`; each makes the same call and gets all answers, with the same bits.
    device : torch.device or str, optional
        Where to compute; by default where the inputs are.
    options : Options, optional
        Any of these that are options of ``solve``, as one object: see :class:`torchgw.Options`.

    Returns
    -------
    BatchResult
        (B,) arrays of numbers, and the plans.

    Raises
    ------
    InvalidInputError, InvalidTypeError
        For input that cannot be used.
    UnsupportedError
        For what only ``solve`` can do.
    PlanTooLargeError
        If the plans do not fit; pass ``plans=False``.
    RankError
        If another process that shares the problems has ended, or has other input.

    Warns
    -----
    ConvergenceWarning
        If problems did not converge; ``result.statuses`` says which.
    SearchWarning
        If there may be better optima; ``result.doubts`` says where.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> rng = np.random.default_rng(0)
    >>> Xs = [rng.normal(size=(n, 2)) for n in (9, 12, 20)]
    >>> batch = torchgw.solve_many(Xs, [X @ [[0, 1], [-1, 0]] for X in Xs], epsilon=0.01)
    >>> batch.plan(1).shape
    (12, 12)
    """
    sides = Listed.of("X", Xs, D_X), Listed.of("Y", Ys, D_Y)
    count, others = (len(side.items) for side in sides)
    if others != count:
        raise InvalidInputError(
            f"There must be as many spaces on both sides; got {count} and {others}. All pairs are "
            "for torchgw.pairwise."
        )
    check_distributed(distributed)
    where = arrays.resolve_device(device, *(item for side in sides for item in side.items))
    probe_beside(where)
    rules = questions.check_rules(max_iter, tol, objective_tol, inner_max_iter, inner_tol, n_init)
    n_init = questions.starts_of(n_init, search)
    check_feature_metric(features, feature_metric)
    if differentiable:
        scale = _check_differentiable(epsilon, scale, features)
    measure = Measure(distances, scale, n_neighbors, feature_metric)
    check_measure(measure, *sides)
    if features is not None and (not isinstance(features, (tuple, list)) or len(features) != 2):
        raise InvalidInputError("`features` must be a pair of lists, one array for each space.")
    fused = is_fused(M, features)
    given = zip(sides, (a, b), features or (None, None), strict=True)
    ranks = join(distributed, where)
    with torch.no_grad(), together(ranks):
        read = [
            read_spaces(side, weights, part, measure, place, where)
            for place, (side, weights, part) in enumerate(given)
        ]
        check_columns(*read)
        linear = _checked_costs(M, read, where)
    followed = (a, b) if differentiable else ()
    shares = questions.weights_of_terms(alpha, count, fused=fused)
    wanted = questions.read_relaxed(unbalanced, mass, shares, followed)
    spaces, places = [*read[0], *read[1]], (np.arange(count), np.arange(count, 2 * count))
    wanted = questions.read_sharpening(regularization, polish, wanted, spaces, places)
    asked = questions.Questions(
        Shelves(spaces, searched=n_init is None), *places, shares,
        questions.epsilons(epsilon, count), linear, squared=feature_metric != "euclidean",
        n_init=n_init,
        search=search, rules=rules, wanted=wanted,
    )  # fmt: skip
    if differentiable:
        inputs = {"X": sides[0], "Y": sides[1], "M": M, "a": a, "b": b}
        return _solve_tracked(asked, where, ranks, inputs, distances, plans=plans)
    result, _ = _solve(asked, where, ranks, plans=plans)
    in_numpy = arrays.without_tensors(Xs, Ys, distances, D_X, D_Y, M, a, b, features)
    return result.in_numpy() if in_numpy else result


@reject_unknown
@takes_options
def solve_batch(
    D_X: Any,
    D_Y: Any,
    M: Any = None,
    *,
    a: Any = None,
    b: Any = None,
    sizes_x: Any = None,
    sizes_y: Any = None,
    alpha: Any = None,
    scale: ScaleName | None = "auto",
    epsilon: Any = "auto",
    n_init: int | None = None,
    search: SearchName = "auto",
    max_iter: int = 500,
    tol: float = 1e-5,
    objective_tol: float = 1e-4,
    inner_max_iter: int = 2000,
    inner_tol: float | None = None,
    unbalanced: Any = None,
    mass: Any = None,
    regularization: Any = "entropic",
    polish: Any = None,
    plans: bool = True,
    differentiable: bool = False,
    distributed: Distributed = False,
    device: torch.device | str | int | None = None,
    options: Options | None = None,
) -> BatchResult:
    """Solve a stack of problems given as padded matrices; :func:`solve_many` for stacks.

    Parameters
    ----------
    D_X, D_Y : array-like, shapes (B, n, n) and (B, m, m)
        Distance matrices. Problem k uses the first ``sizes_x[k]`` and ``sizes_y[k]`` points.
    M : array-like, shape (B, n, m), optional
        Linear costs.
    a, b : array-like, shapes (B, n) and (B, m), optional
        Weights; those of the points in use sum to 1. Uniform by default.
    sizes_x, sizes_y : array-like of int, shape (B,), optional
        Points in use; all by default. What lies beyond them is never read.
    alpha, scale, epsilon, n_init, search, max_iter, tol, objective_tol, inner_max_iter, inner_tol
        As in :func:`solve_many`.
    unbalanced, mass, regularization, polish, plans, differentiable, distributed, device, options
        Likewise.

    Returns
    -------
    BatchResult
        Plans have the sizes in use.

    Examples
    --------
    >>> import torch, torchgw
    >>> points = torch.randn(4, 10, 3, generator=torch.Generator().manual_seed(0))
    >>> D = torch.cdist(points, points).double()
    >>> batch = torchgw.solve_batch(D, D, sizes_y=[10, 9, 8, 7], epsilon=0.1)
    >>> [tuple(plan.shape) for plan in batch.plans()]
    [(10, 10), (10, 9), (10, 8), (10, 7)]
    """
    rules = questions.check_rules(max_iter, tol, objective_tol, inner_max_iter, inner_tol, n_init)
    n_init = questions.starts_of(n_init, search)
    check_options(scale=scale)
    if differentiable:
        scale = _check_differentiable(epsilon, scale, None)
    check_distributed(distributed)
    where, signed = arrays.resolve_device(device, D_X, D_Y), scale in (None, "auto")
    probe_beside(where)
    ranks = join(distributed, where)
    with together(ranks):
        x, rows = read_stack("D_X", D_X, "sizes_x", sizes_x, where, signed=signed)
        y, columns = read_stack("D_Y", D_Y, "sizes_y", sizes_y, where, signed=signed)
        count = len(x)
        if len(y) != count:
            raise InvalidInputError(f"`D_X` holds {count} matrices and `D_Y` {len(y)}.")
        costs = None if M is None else read_costs(M, x, rows, y, columns)
        masses = read_weights("a", a, rows, x), read_weights("b", b, columns, y)
    followed = (a, b) if differentiable else ()
    shares = questions.weights_of_terms(alpha, count, fused=M is not None)
    wanted = questions.read_relaxed(unbalanced, mass, shares, followed)
    if scale in ("max", "mean"):
        x, y = (
            scaled(stack, weights, scale) for stack, weights in zip((x, y), masses, strict=True)
        )
    shelves = Shelves.stacked(
        [(x, masses[0], rows), (y, masses[1], columns)], searched=n_init is None
    )
    places = np.arange(count), np.arange(count, 2 * count)
    wanted = questions.read_sharpening(regularization, polish, wanted, shelves.spaces, places)
    asked = questions.Questions(
        shelves, *places, shares, questions.epsilons(epsilon, count), costs, n_init=n_init,
        rules=rules, wanted=wanted,
    )  # fmt: skip
    if not differentiable:
        result, _ = _solve(asked, where, ranks, plans=plans)
        return result.in_numpy() if arrays.without_tensors(D_X, D_Y, M, a, b) else result
    sizes = list(zip(rows.tolist(), columns.tolist(), strict=True))
    near = [torch.as_tensor(D_X[k], device=where)[:n, :n] for k, (n, _) in enumerate(sizes)]
    far = [torch.as_tensor(D_Y[k], device=where)[:m, :m] for k, (_, m) in enumerate(sizes)]
    inputs = {
        "X": Listed("D_X", True, near),
        "Y": Listed("D_Y", True, far),
        "M": None if M is None else [M[k][:n, :m] for k, (n, m) in enumerate(sizes)],
        "a": None if a is None else [a[k][:n] for k, (n, _) in enumerate(sizes)],
        "b": None if b is None else [b[k][:m] for k, (_, m) in enumerate(sizes)],
    }
    return _solve_tracked(asked, where, ranks, inputs, None, plans=plans)


def _checked_costs(M: Any, read: list[list[Space]], device: torch.device) -> list[Tensor] | None:
    if M is None:
        return None
    costs = listed_spaces("M", M)
    if len(costs) != len(read[0]):
        raise InvalidInputError(
            f"`M` must be one linear cost for each problem, {len(read[0])}; got {len(costs)}."
        )
    return [
        arrays.check_linear_cost(cost, (len(x.table), len(y.table)), f"M[{place}]")
        .detach()
        .to(device, torch.float64)
        for place, (cost, x, y) in enumerate(zip(costs, *read, strict=True))
    ]


def _check_differentiable(
    epsilon: Any, scale: ScaleName | None, features: Any
) -> Literal["auto"] | None:
    """Refuse units that would have to be differentiated as well."""
    values = epsilon if isinstance(epsilon, (list, tuple)) else [epsilon]
    if any(isinstance(value, str) for value in values):
        raise UnsupportedError(
            "`differentiable` needs epsilon as numbers: an automatic one follows the inputs."
        )
    if scale not in ("auto", None):
        raise UnsupportedError(
            f"`differentiable` keeps the units of the inputs, and scale={scale!r} changes them. "
            "Pass scale=None."
        )
    if features is not None:
        raise UnsupportedError(
            "`differentiable` knows linear costs as `M`: compute them of the features by PyTorch."
        )
    return None


def _solve(
    asked: questions.Questions, device: torch.device, ranks: Ranks | None, *, plans: bool
) -> tuple[BatchResult, dict[int, Kept]]:
    """Solve all problems, and keep their plans if asked to."""
    shapes = asked.shelves.sizes[np.stack([asked.i, asked.j], axis=1)]
    total, entries = int(shapes.prod(1).sum()), None
    kept: dict[int, Kept] = {}
    # each is kept once until all are there, and once more in their place
    if plans and (16 if ranks is None else 32) * total > free_memory(device):
        raise PlanTooLargeError(
            f"All plans take {8 * total:,} bytes, and twice that is not free on {device}. Pass "
            "plans=False."
        )
    keep: Keep | None = (lambda plan: kept.update({plan.number: plan})) if plans else None
    if ranks is None or not len(asked):
        numbers = solve_questions(asked, device, keep)
    else:
        with together(ranks):
            numbers = solve_together(asked, ranks, shapes, keep)
    if plans:
        parts = [kept[number].plan.reshape(-1) for number in range(len(asked))]
        entries = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)
    warn_of_failures(numbers)
    return BatchResult(
        **numbers._asdict(), alpha=torch.from_numpy(asked.alpha).to(device),
        shapes=torch.from_numpy(shapes).to(device), entries=entries, questions=asked,
    ), kept  # fmt: skip


def _solve_tracked(
    asked: questions.Questions,
    device: torch.device,
    ranks: Ranks | None,
    inputs: dict[str, Any],
    distances: Any,
    *,
    plans: bool,
) -> BatchResult:
    """Solve all problems, with derivatives of their objectives; keep the plans if asked to."""
    if asked.wanted.proximal is not None:
        raise UnsupportedError(
            "`differentiable` needs regularization='entropic' and polish=False: other plans are no "
            "fixed points of the entropic objective."
        )
    result, kept = _solve(asked, device, ranks, plans=True)
    objective = arrays.to_tensor("objective", result.objective)
    loss = attach_losses(asked, kept, objective, inputs, distances)
    return replace(result, tracked=loss, entries=result.entries if plans else None)
