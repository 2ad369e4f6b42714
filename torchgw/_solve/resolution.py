"""A large problem on cells of near points, as fine as its marginals need.

At a fixed epsilon the potentials are smooth functions of a point, so that the number of cells that
a given accuracy needs does not grow with the number of points. The problem is solved on few cells,
its potentials are extended to all points by a half-step, and what the plan then lacks is measured
on the points themselves: exact half-steps of some of them, drawn by weight. Cells are made smaller
until that is little enough. Smaller problems, which are solved on all points, only begin on cells.

Plans are extended in float64: the excess mass of a cell changes the value by its potential, which
is hundreds of times as large as the value, so that in float32 the third digit would be wrong.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._gradients.contract import InFactors, Read, every, none
from torchgw._plans.transport import TransportPlan
from torchgw._problem.limits import limits_of
from torchgw._sinkhorn.annealing import CONTRADICTION, Annealing
from torchgw._sinkhorn.choose import alone
from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._sinkhorn.problem import FactoredCost, LinearProblem
from torchgw._sinkhorn.tiles.tiling import Tiling, side_orders, width_of
from torchgw._solve.evaluation import (
    Evaluation,
    Resolution,
    evaluate_extended,
    factored_linear,
    half_step,
    join_halves,
    judge,
    moved_linear,
    settle,
)
from torchgw._solve.loop import LINEAR, iterate, starting_point
from torchgw._solve.state import RESOLVED, LoopState, Setting, Status, rounding
from torchgw._solve.strategy import Strategy, choose_strategy
from torchgw._starts.subsample import Cells, Coarse, Part, extend, make_cells, take
from torchgw._tensors.block_order import Order
from torchgw._tensors.deadline import is_over
from torchgw._tensors.operations import TINY, inner_products, systematic_categories
from torchgw._typing import Iteration, Marginals, Potentials

logger = logging.getLogger(__name__)

# Marginal error that cells may leave by default. [L424]
_DEFAULT = 1e-3
# Cells of each side to begin with, and at most: more take as long as all points do. [L424]
_FIRST_CELLS = 2**12
_MOST_CELLS = 2**18
# Points that a cell has at least, in the mean. [L424]
_FEWEST_POINTS = 4
# Points of each side whose masses are computed, to measure the marginal error. [L424]
_MEASURED = 4096
# Finer cells are expected to leave at most this share of an error. [L424]
_SLOWEST = 0.5
# The number of the next cells is chosen so that the predicted error is this share of the allowed
# one. [L424] [L1610]
_AIM = 0.8
# Points that a plan is extended to at once, a quarter of all between these: tables of 600 bytes a
# point, on a GPU 2,000. [L1499, L1501, L1726]
_PART = {"cpu": (2**14, 2**14), "cuda": (2**18, 2**19)}
# How many times as many cells come after some, before all points; and the square of that at most,
# where errors tell how many are needed. [L424, L1611]
_FINER = 4


class Resolved(NamedTuple):
    """A large problem that was solved on cells."""

    plan: TransportPlan  # of all points
    state: LoopState  # whose coupling is that of the plan
    evaluation: Evaluation
    status: Status
    resolution: Resolution


def choose_resolution(strategy: Strategy) -> float | None:
    """Choose the marginal error that cells may leave; ``None`` is a solve on all points."""
    options, problem = strategy.options, strategy.problem
    if options.resolution != "auto":
        return options.resolution
    if problem.source.n * problem.target.n < limits_of(problem.source.device).cells:
        return None
    return _DEFAULT if options.inner_tol is None else CONTRADICTION * options.inner_tol


def approach(
    strategy: Strategy, setting: Setting, state: LoopState, few: int, fall: Annealing | None
) -> LoopState:
    """Follow a state of ``few`` points on more and more cells; return it for all points."""
    # With a ``fall`` of epsilon the best plan for the linear cost alone is followed as well.
    # At a small epsilon what a subsample tells of the potentials misses the marginals by far, and
    # half-steps at that epsilon move mass by little. Of cells they take less time, and cells leave
    # only what is between near points. Few cells may favour another optimum, as few points do: the
    # plan for the linear cost is made on the finest, which also tell which of both is lower.
    gradient, problem = setting.gradient.in_factors(), strategy.problem
    assert gradient is not None
    sizes, levels = problem.shape, [2]
    while max(sizes) > _FINER**2 * levels[0] * few:
        levels.insert(0, _FINER * levels[0])
    if choose_resolution(strategy) is not None:
        # cells come next anyway
        most = 0 if fall is None else _FIRST_CELLS * _FINER**2
        levels = [joined for joined in levels if max(sizes) <= most * joined]
    device = problem.source.device
    if device.type == "cuda" and math.prod(sizes) <= limits_of(device).settled and fall is None:
        # cells would save less than their launches take
        levels = []
    finest = _orders(gradient, state, (1, 1)) if levels else None
    for joined in levels:
        if is_over() or state.status is Status.STOPPED or finest is None:
            break
        shares = (math.log2(joined * size / max(sizes)) for size in sizes)
        widths = (2 ** max(0, round(share)) for share in shares)
        source, target = (
            order._replace(width=width) for order, width in zip(finest, widths, strict=True)
        )
        found = _OnCells.on(strategy, setting, make_cells(problem, (source, target)), setting.dtype)
        ends = [_Path.of(found.setting, found.start(state))]
        if fall is not None and joined == levels[-1]:
            own = replace(found.setting, anneal=fall)
            ends.append(_Path.of(own, starting_point(own, LINEAR)._replace(done=state.done)))
        lowest = min(ends, key=lambda path: path.objective)
        setting.recorder.history += lowest.history
        state = to_all_points(setting, found.cells, lowest.state)
        if any(path.state.status is Status.STOPPED for path in ends):
            state = state._replace(status=Status.STOPPED)
    return state


def _orders(gradient: InFactors, state: LoopState, widths: tuple[int, int]) -> tuple[Order, Order]:
    """Order both sides by the cost at a state, of which only one side is there at once."""
    cost = partial(gradient.factored, state.coupling)
    return side_orders((lambda: cost(every, none).left, lambda: cost(none, every).right), widths)


class _Path(NamedTuple):
    """Iterations from a start, beside others."""

    state: LoopState
    history: list[Iteration]

    @classmethod
    def of(cls, setting: Setting, state: LoopState) -> "_Path":
        """Iterate from a state."""
        recorder = replace(setting.recorder, history=[])
        return cls(iterate(replace(setting, recorder=recorder), state), recorder.history)

    @property
    def objective(self) -> float:
        """What is minimised, at the last iteration."""
        return self.history[-1].objective if self.history else math.inf


def to_all_points(setting: Setting, coarse: Coarse, state: LoopState) -> LoopState:
    """Go on from the coupling of a coarse problem, its potentials extended to all points."""
    fine, epsilon = setting.gradient.in_factors(), setting.anneal.target
    assert state.potentials is not None
    assert fine is not None
    potentials = extend(
        coarse, partial(fine.factored, state.coupling), setting.gradient.marginals,
        state.potentials, epsilon, alone(setting.backend),
    )  # fmt: skip
    return LoopState(
        state.coupling, state.coupling, potentials, potentials, state.status, done=state.done
    )


class _OnCells(NamedTuple):
    """A problem on cells, and how it is solved."""

    cells: Coarse
    strategy: Strategy
    setting: Setting

    @classmethod
    def on(
        cls, strategy: Strategy, setting: Setting, cells: Coarse, dtype: torch.dtype
    ) -> "_OnCells":
        """Choose how to solve on some cells, at the target epsilon."""
        epsilon = strategy.epsilon
        # cells are too few to be shared: every rank solves them
        options = replace(strategy.options, epsilon=epsilon, gradient="factored", ranks=None)
        small = choose_strategy(cells.problem, options)
        own = small.setting(
            dtype, setting.tol, Annealing(epsilon, epsilon), setting.generator, setting.recorder
        )
        return cls(cells, small, own)

    def start(self, state: LoopState) -> LoopState:
        """Begin at a state of all points."""
        assert state.potentials is not None
        parts = zip(self.cells[1:], state.potentials, strict=True)
        start = Potentials(*(side.take(part) for side, part in parts))
        coupling = in_dtype(self.setting.dtype, state).coupling
        return LoopState(coupling, coupling, start, start, done=state.done)


def solve_on_cells(
    strategy: Strategy, setting: Setting, state: LoopState, tolerance: float
) -> tuple[LoopState, Resolved | None]:
    """Solve on cells from a state, as finely as the marginals need, in a setting of float64."""
    # The state that comes back is the best known, for the solve on all points that is due where no
    # number of cells will do.
    n, m = strategy.problem.shape
    most = min(_MOST_CELLS, min(n, m) // _FEWEST_POINTS)
    gradient = setting.gradient.in_factors()
    assert gradient is not None
    # a power of two, so that blocks of tiles are made of whole cells
    widths = (2 ** round(math.log2(n / most)), 2 ** round(math.log2(m / most)))
    finest = _orders(gradient, state, widths)
    joined = 2 ** max(0, round(math.log2(most / _FIRST_CELLS)))
    value, last = None, math.inf
    while True:
        source, target = (order._replace(width=order.width * joined) for order in finest)
        found = _solve(strategy, setting, state, (source, target), tolerance, value)
        resolution, state = found.resolution, found.state
        logger.info("value %.6g on cells: %s", found.evaluation.quadratic.value, resolution)
        # the error of the value is taken to fall as the error of the marginals does
        error = resolution.marginal_error
        left, change = min(error / last, _SLOWEST), resolution.value_change
        left = max(error, 0.0 if change is None else change * left / (1 - left))
        known = change is not None and left <= tolerance
        # if float32 has no digits left, finer cells do not help: they have the same precision
        spent = state.status is Status.PRECISION_LIMIT
        if known or not (state.status.converged or spent):
            return state, found
        # errors are of second order in the size of a cell, at most one over their number
        if joined == 1 or spent or error > tolerance * joined**2:
            return state, found if error <= tolerance else None
        value, last = found.evaluation.quadratic.value, error
        joined = max(1, joined // how_much_finer(left, tolerance))
        # its plan is as large as the factors
        del found


def how_much_finer(error: float, tolerance: float) -> int:
    """Choose how many times as many cells leave an error within a tolerance, a power of two."""
    # errors are of second order in the size of a cell: in two dimensions, of first order in its
    # points
    finer = min(max(error / (_AIM * tolerance), 2), _FINER**2)
    return int(2 ** math.ceil(math.log2(finer)))


def _solve(
    strategy: Strategy,
    setting: Setting,
    state: LoopState,
    orders: tuple[Order, Order],
    tolerance: float,
    before: float | None,
) -> Resolved:
    """Solve on some cells, extend the plan to all points, and measure it."""
    cells = make_cells(strategy.problem, orders)
    problem = cells.problem
    entries = problem.source.n * problem.target.n
    precise = entries <= limits_of(problem.source.device).precise_cells
    dtype = torch.float64 if precise else _resolving(strategy, setting.scale, tolerance)
    begun = _OnCells.on(strategy, replace(setting, tol=strategy.options.tol), cells, dtype)
    plan, state = settle(begun.setting, iterate(begun.setting, begun.start(state)), dtype)
    backend = begun.strategy.backend(torch.float64, begun.strategy.tiling)
    cost = plan.cost.to(torch.float64)
    plan = TransportPlan(cost, plan.potentials, plan.weights, strategy.epsilon, backend)
    with setting.recorder.timed("extension"):
        return _extend(strategy, setting, cells, plan, state, tolerance, before)


def _resolving(strategy: Strategy, scale: float, tolerance: float) -> torch.dtype:
    """Choose the dtype of the iterations, or of the settling where that rounds by more."""
    dtypes = strategy.route.dtypes
    rough = rounding(scale, strategy.epsilon, dtypes.loop) > max(RESOLVED, tolerance)
    return dtypes.settle if rough else dtypes.loop


def in_dtype(dtype: torch.dtype, state: LoopState) -> LoopState:
    """Give a state its coupling in another dtype."""
    coupling = state.coupling.with_vector(state.coupling.vector().to(dtype))
    return state._replace(coupling=coupling, latest=coupling)


def _extend(
    strategy: Strategy,
    setting: Setting,
    cells: Coarse,
    small: TransportPlan,
    state: LoopState,
    tolerance: float,
    before: float | None,
) -> Resolved:
    """Extend a plan of cells to all points, all in float64; compute its coupling and numbers."""
    gradient, problem, epsilon = setting.gradient.in_factors(), setting.problem, small.epsilon
    assert gradient is not None
    fine, few = setting.marginals, cells.problem.marginals
    whole = partial(gradient.factored, state.coupling)
    linear = problem.linear
    assert linear is None or isinstance(linear, FactoredCost)
    source, target = problem.source.factors(), problem.target.factors()
    assert source is not None
    assert target is not None
    x, y = cells.source.take(source.matrix), cells.target.take(target.matrix)
    # plans between all points of one side and the cells of the other: no pass over all pairs
    near = _half(
        strategy, lambda some: whole(some, none), whole(none, cells.target.take),
        Marginals(fine.a, few.b), cells.source, source.matrix, small.potentials.g, y,
        linear and take(linear, None, cells.target),
    )  # fmt: skip
    far = _half(
        strategy, lambda some: whole(none, some).transpose(),
        whole(cells.source.take, none).transpose(), Marginals(fine.b, few.a), cells.target,
        target.matrix, small.potentials.f, x,
        linear and take(linear, cells.source, None).transpose(),
    )  # fmt: skip
    potentials = Potentials(near.potential, far.potential)
    values, excess = join_halves(
        small, (x, y), (near.coupling, far.coupling), (near.moved, far.moved)
    )
    coupling = gradient.encoded(values)
    moved = near.linear + far.linear
    if linear is not None:
        moved -= factored_linear(small, take(linear, cells.source, cells.target))
    # in the dtype in which the plan will be read
    dtype = _resolving(strategy, setting.scale, tolerance)
    backend = strategy.backend(dtype, strategy.tiling)
    left, row = _rounded(lambda some: whole(some, none), len(fine.a), dtype)
    right, column = _rounded(lambda some: whole(none, some).transpose(), len(fine.b), dtype)
    plan = TransportPlan(FactoredCost(left, right, row, column), potentials, fine, epsilon, backend)
    error = max(_measure(plan, setting), _measure(plan.T, setting))
    couplings = state.coupling, coupling
    found = evaluate_extended(setting, small, potentials, excess, couplings, moved, error)
    status = state.status
    # the status promises marginals up to the tolerance, so rounding beyond it is reported
    if status.converged and rounding(setting.scale, epsilon, dtype) > max(RESOLVED, tolerance):
        status = Status.PRECISION_LIMIT
    status = judge(status, found, problem, setting.gradient, tolerance, constant=False)
    value = found.quadratic.value
    resolution = Resolution(
        (len(cells.problem.marginals.a), len(cells.problem.marginals.b)), tolerance, error,
        _MEASURED, None if before is None else abs(value - before) / max(abs(value), TINY),
    )  # fmt: skip
    state = state._replace(
        coupling=coupling, latest=coupling, potentials=potentials, start=potentials, solved=None
    )
    return Resolved(plan, state, found, status, resolution)


class _Half(NamedTuple):
    """What is read of a plan between all points of one side and the cells of the other."""

    potential: Tensor  # (n,) of the points
    coupling: Tensor  # where all points have their weights, (r, s)
    moved: Tensor  # potentials of the cells, by their masses then, ()
    linear: float  # <M, P>


def _rounded(
    cost: Callable[[Read], FactoredCost], n: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Make the rows of a cost in some dtype, a part after the other: factors and terms."""
    empty = cost(none)
    left, row = (
        part.new_empty(n, *part.shape[1:], dtype=dtype) for part in (empty.left, empty.row)
    )
    height = _height(n, left.device)
    for first in range(0, n, height):
        some = slice(first, first + height)
        part = cost(itemgetter(some))
        left[some], row[some] = part.left, part.row
    return left, row


def _height(n: int, device: torch.device) -> int:
    """Choose of how many points a part is."""
    least, most = _PART[device.type]
    return min(max(n // 4, least), most)


def _half(
    strategy: Strategy,
    rows: Callable[[Read], FactoredCost],
    columns: FactoredCost,
    weights: Marginals,
    points: Part,
    own: Tensor,
    other: Tensor,
    factors: Tensor,
    linear: FactoredCost | None,
) -> _Half:
    """Go over the points, some at a time."""
    # `rows` makes rows of the cost, and `columns` has its columns. `own` are the factors of the
    # distances of the points, `factors` those of the cells of the other side, and `other` their
    # potentials.
    assert isinstance(points, Cells)
    # whole cells and whole tiles, from everywhere: a part that lies at one end of the space would
    # see few cells, and leave a GPU idle. [L1501]
    n, shape = len(own), (len(own), len(other))
    blocks = points.order.point.split(max(points.order.width, width_of(shape, own.device.type)))
    count = min(len(blocks), -(-n // _height(n, own.device)))
    potential = other.new_empty(n)
    tables = [factors]
    if linear is not None:
        tables += [part.to(factors.dtype) for part in (linear.right, linear.column[:, None])]

    def read(some: Tensor) -> tuple[Tensor, Tensor, float]:
        """Give some points their potentials; a part is let go before the next is begun."""
        part = rows(itemgetter(some))
        cost = columns._replace(left=part.left, row=part.row)
        prepared = _prepare(strategy, cost, Marginals(weights.a[some], weights.b))
        plan, means, moved = half_step(prepared, other, torch.cat(tables, dim=1))
        potential[some] = plan.potentials.f
        means, images = means.tensor_split([factors.shape[1]], dim=1)
        by_linear = 0.0
        if linear is not None:
            by_linear = moved_linear(linear.rows(some), images, weights.a[some])
        return inner_products(own[some], means), moved, by_linear

    found = [read(torch.cat(blocks[first::count])) for first in range(count)]
    couplings, moves, linears = zip(*found, strict=True)
    return _Half(
        potential, torch.stack(couplings).sum(0), torch.stack(moves).sum(), math.fsum(linears)
    )


def _prepare(strategy: Strategy, cost: FactoredCost, weights: Marginals) -> PreparedProblem:
    """Prepare the problem of some points and the cells of the other side, by tiles if any."""
    tiling = strategy.tiling
    if tiling is not None:
        tiling = Tiling.of(cost.shape, cost.device)
        # both cells and points are in the order in which the cells were made
        places = (torch.arange(size, device=cost.device) for size in cost.shape)
        first, second = (Order.of(place, tiling.width) for place in places)
        tiling = tiling.ordered((first, second))
    backend = strategy.backend(cost.dtype, tiling)
    return backend.prepare(LinearProblem(cost, weights, strategy.epsilon))


def _measure(plan: TransportPlan, setting: Setting) -> float:
    """Estimate the L1 error of the row sums, by exact sums of rows drawn by weight."""
    a = plan.weights.a
    drawn = systematic_categories(a, min(_MEASURED, len(a)), setting.generator)
    exact = plan.extend(plan.cost.rows(drawn)).potentials.f
    excess = (plan.potentials.f[drawn] - exact).double() / plan.epsilon
    return float(excess.exp().sub(1).abs().mean())
