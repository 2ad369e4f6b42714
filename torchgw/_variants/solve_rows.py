"""A solve of tables of any size: rows are read, matched and written some at a time.

Both sides are known by a *base*, some of their rows. Graph, geodesics and landmarks are those of
the base; a row has the factors of the base points next to it, by inverse distances, and belongs to
the cell of the nearest. Three passes go over the rows, each over its blocks in any order and by any
number of processes:

1. the base is read;
2. cells: the weight of each and the mean of the factors of its rows;
3. after a solve on the cells, a half-step gives each row its potential, partner and place.

What blocks add up to are whole numbers, or is put together from files in order. So neither bits nor
files depend on who has computed a block, and what is held is the base, the cells and one block.
"""

import logging
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._api import solve
from torchgw._boundary.archive import read_archive, write_archive
from torchgw._boundary.arrays import check_points, resolve_device, to_numpy
from torchgw._boundary.checks import check_choice, check_count, check_not_negative, reject_unknown
from torchgw._boundary.console import Progress, progress
from torchgw._boundary.rows import Rows
from torchgw._errors import ConvergenceWarning, GraphWarning, InvalidInputError, warn_user
from torchgw._plans.transport import TransportPlan
from torchgw._problem.given import Passed
from torchgw._problem.providers import DistanceOptions, build_space
from torchgw._problem.table import Options
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.contract import Backend
from torchgw._sinkhorn.problem import FactoredCost, LinearProblem
from torchgw._sinkhorn.tiles.tiling import Tiling, block_orders
from torchgw._solve.evaluation import half_step, join_halves
from torchgw._solve.resolution import how_much_finer
from torchgw._tensors.block_order import Order
from torchgw._tensors.deadline import say_more
from torchgw._tensors.machine import peak_memory
from torchgw._tensors.operations import TINY, at_even_steps
from torchgw._tensors.ranks import Alone, Distributed, Ranks, join, together
from torchgw._typing import Marginals, Potentials
from torchgw.distances.factored import FactoredDistance
from torchgw.distances.new_points import averaged_factors

logger = logging.getLogger(__name__)

# Rows of a block: a GPU waits for the launches of a small one. [L1665, L1433]
_BLOCK = {"cpu": 2**18, "cuda": 2**20}
# Base rows of a side to begin with, and at most. A choice.
_FIRST, _MOST = 2**11, 2**16
# Rows of a side that a base is tried on, for each of its rows. [L1667]
_TRIED = 8
# Error of distances without the factors that are left out, root mean square, as a share of theirs.
# [L1427]
_NEGLIGIBLE = 1e-3
# Rows of either side whose masses are added up, and the marginal error that a base may leave. A
# choice.
_MEASURED, _ALLOWED = 1024, 1e-3
# Blocks that wait to be written, at most. A choice.
_WAITING = 2
# Sums of at most one are whole numbers of this unit: 2^62 rows round to less than 2^63. A choice.
_UNIT = 2.0**-60
_GO_ON = "The same call, with the same folder, goes on with those that are missing."
# Rows without weight are matched too, with a weight that no sum sees. A choice.
_UNSEEN = 1e-60


class _Side(NamedTuple):
    """What all processes hold of a side, float64."""

    base: Tensor  # (B, d)
    named: Tensor  # (B,) int64, rows of the table
    factors: Tensor  # (B, r), of the base
    signs: Tensor  # (r,)
    drawn: Tensor  # (s,) int64, rows whose masses are measured
    points: Tensor  # (s, d)
    weights: Tensor  # (s,), as shares of their sum
    masses: Tensor  # (B,), of the cells
    cells: Tensor  # (B, r), the mean factors of their rows
    moments: Tensor  # (r, r), second moments of the factors of all rows

    def factors_of(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the factors of points (q, r), and the nearest base points (q,)."""
        return averaged_factors(self.base, self.factors, points)


class _Matched(NamedTuple):
    """What is read of the plan between some rows of one side and the cells of the other."""

    potential: Tensor  # (q,) float64
    partner: Tensor  # (q,) int64, a row of the other table: that of the cell of most mass
    place: Tensor  # (q, d) float32, the mean of base points of the other side


class _Map(NamedTuple):
    """The plan from the rows of one side to the cells of the other."""

    side: _Side
    other: _Side
    plan: TransportPlan  # between cells
    orders: tuple[Order, Order]  # of the cells of both sides, near ones next to each other
    affine: Tensor  # (r + 1, k + 1), from factors and one to those of the cost and its row term

    @classmethod
    def of(cls, side: _Side, other: _Side, plan: TransportPlan) -> "_Map":
        """Find how the cost of cells follows from their factors, which is an affine map."""
        assert isinstance(plan.cost, FactoredCost)
        cost = torch.cat([plan.cost.left, plan.cost.row[:, None]], 1)
        affine = torch.linalg.pinv(_with_one(side.cells), rtol=1e-13) @ cost
        return cls(side, other, plan, block_orders(plan.cost, (1, 1)), affine)

    def cost(self, factors: Tensor) -> FactoredCost:
        """Compute the cost of rows with these factors and the cells of the other side."""
        whole = _with_one(factors) @ self.affine
        known = self.plan.cost
        assert isinstance(known, FactoredCost)
        return known._replace(left=whole[:, :-1].contiguous(), row=whole[:, -1].clone())

    def match(
        self, factors: Tensor, share: Tensor
    ) -> tuple[_Matched, TransportPlan, dict[str, Tensor]]:
        """Match rows of some factors and weights; also give the plan, and what they add up to."""
        cost, weights = self.cost(factors), Marginals(share, self.plan.weights.b)
        backend = _by_tiles(cost, self.orders[1])
        prepared = backend.prepare(LinearProblem(cost, weights, self.plan.epsilon))
        table = torch.cat([self.other.base, self.other.cells], 1)
        plan, means, moved = half_step(prepared, self.plan.potentials.g, table)
        place, far = means.tensor_split([self.other.base.shape[1]], 1)
        partner = self.other.named[plan.topk(1)[1][:, 0]]
        matched = _Matched(plan.potentials.f, partner, (place / share[:, None]).float())
        return matched, plan, {"coupling": factors.T @ far, "moved": moved}

    def drawn(self, back: "_Map") -> "_Drawn":
        """Give the drawn rows of the other side as columns of the plan."""
        factors, at = self.other.factors_of(self.other.points)
        cost, weights = back.cost(factors), torch.ones_like(self.other.weights)
        order = Order.of(self.orders[1].place[at].argsort(stable=True), 1)
        return _Drawn(cost.left, cost.row, back.match(factors, weights)[0].potential, order)


class _Drawn(NamedTuple):
    """Drawn rows of a side, as columns of the plan from the rows of the other."""

    right: Tensor  # (s, k), factors of the cost
    column: Tensor  # (s,), its terms
    g: Tensor  # (s,)
    order: Order  # near ones next to each other

    def masses(self, plan: TransportPlan) -> Tensor:
        """Add up what the rows of a plan, with cells, give to each, (s,), for its weight."""
        assert isinstance(plan.cost, FactoredCost)
        cost = plan.cost._replace(right=self.right, column=self.column)
        weights = Marginals(plan.weights.a, torch.ones_like(self.g))
        potentials = Potentials(plan.potentials.f, self.g)
        if cost.device.type == "cuda":
            # a program walks over the tiles of each block of columns: there are too few of these
            backend = choose_backend("auto", cost.device, cost.dtype)
        else:
            backend = _by_tiles(cost, self.order)
        whole = TransportPlan(cost, potentials, weights, plan.epsilon, backend)
        return whole.T @ torch.ones_like(plan.potentials.f)


def _by_tiles(cost: FactoredCost, columns: Order) -> Backend:
    """Choose what reads a plan whose rows lie next to each other, as its columns do in order."""
    tiling = Tiling.of(cost.shape, cost.device)
    rows = Order.of(torch.arange(cost.shape[0], device=cost.device), tiling.width)
    return choose_backend("auto", cost.device, cost.dtype, tiling.ordered((rows, columns)))


def _with_one(factors: Tensor) -> Tensor:
    return torch.cat([factors, torch.ones_like(factors[:, :1])], 1)


class RowsResult:
    """A match in a folder, as :func:`torchgw.solve_rows` writes it, which is read by rows.

    Parameters
    ----------
    folder : path-like
    device : torch.device or str, optional
        Where new points are mapped.

    Attributes
    ----------
    folder : Path
    shape : tuple of int
        Numbers of rows of X and of Y.
    value : float
        The transport objective of all rows.
    value_change : float
        By how much the value of a sample of the rows differed, in absolute terms, from that of the
        base before, where the base was chosen; NaN where it was given.
    place_change : float
        By how much the places of 1,024 drawn rows of X differed then, root mean square, in the
        units of Y: about how far off the places of that base are. NaN where it was given.
    distance_error : float
        How far distances between drawn rows, the longest of which is one, are from those by a graph
        of 131,072 rows, root mean square, of the worse side; NaN where the base was given.
    marginal_error : float
        The mean of abs(mass / weight - 1) over 1,024 drawn rows of a side, of the worse side: what
        the plan between all rows gives each, added up over all rows of the other.
    epsilon : float
    cells : tuple of int
        Numbers of cells.
    status : str
    converged : bool
        How the solve on the cells ended, and whether it converged.
    doubt : str
        Why there may be a better match, as that solve says; empty if nothing speaks for it.
    seconds : tuple of float
        Of the last call: of base, cells and their solve, and of the rows.
    """

    shape: tuple[int, int]
    value: float
    value_change: float
    place_change: float
    distance_error: float
    marginal_error: float
    epsilon: float
    cells: tuple[int, int]
    status: str
    converged: bool
    doubt: str
    seconds: tuple[float, float]

    def __init__(self, folder: Any, device: Any = None) -> None:
        self.folder, self.device = Path(folder), resolve_device(device)
        told, _ = read_archive(self.folder / "summary.npz")
        for name, value in told.items():
            setattr(self, name, tuple(value) if isinstance(value, list) else value)

    def __repr__(self) -> str:
        """Summarise in a line."""
        (n, m), value = self.shape, f"value={self.value:.6g}"
        error = f"marginal_error={self.marginal_error:.1e}"
        return f"RowsResult({n:,} x {m:,} rows, {value}, {error}, {self.folder})"

    def rows(
        self, start: int = 0, stop: int | None = None, *, side: Literal["X", "Y"] = "X"
    ) -> dict[str, NDArray[Any]]:
        """Read what is known of some rows of a side.

        Parameters
        ----------
        start, stop : int
            Rows of the table; all by default.
        side : {"X", "Y"}

        Returns
        -------
        dict of ndarray
            ``partner`` (q,) int64, a row of the other table: that which stands for the cell with
            most of the row's mass; ``place`` (q, d), the mean of the other side, by the row's plan;
            ``potential`` (q,), in units of the cost.
        """
        check_choice("side", side, ("X", "Y"))
        start, stop, _ = slice(start, stop).indices(self.shape["XY".index(side)])
        # of no rows at all the dtypes are those of the block that they would be in
        stop, read = max(start, stop), list[dict[str, NDArray[Any]]]()
        for first, last in _written(self.folder, side):
            if first <= start <= last or start < first < stop:
                _, arrays = read_archive(_place_of(self.folder, side, slice(first, last)))
                some = slice(max(start - first, 0), max(stop - first, 0))
                read.append({name: arrays[name][some] for name in _Matched._fields})
        if sum(len(part["partner"]) for part in read) < stop - start or not read:
            raise InvalidInputError(
                f"{self.folder}: rows [{start}:{stop}] of {side} are not there, or not all of "
                f"them. {_GO_ON}"
            )
        return {name: np.concatenate([part[name] for part in read]) for name in read[0]}

    def transform(self, points: Any, *, side: Literal["X", "Y"] = "X") -> NDArray[Any]:
        """Map points of a side that need not be rows of it to the other, (q, d)."""
        check_choice("side", side, ("X", "Y"))
        way = _read_head(self.folder, self.device)["XY".index(side)]
        given = check_points("points", points).double().to(self.device)
        share = torch.full_like(given[:, 0], 1 / len(given))
        return to_numpy(way.match(way.side.factors_of(given)[0], share)[0].place)


@reject_unknown
def solve_rows(
    X: Any,
    Y: Any,
    folder: Any,
    *,
    a: Any = None,
    b: Any = None,
    epsilon: float | Literal["auto"] = "auto",
    n_base: int | Literal["auto"] = "auto",
    block: int | None = None,
    device: Any = None,
    distributed: Distributed = False,
    random_state: int = 0,
    verbose: bool = False,
    time_limit: float | None = None,
    options: Options | None = None,
) -> RowsResult:
    """Match tables of any size by geodesics, reading and writing some rows at a time.

    Memory is that of the base, the cells and one block of rows, in each process. A call that was
    ended goes on from the blocks that the folder has, in any number of processes.

    Parameters
    ----------
    X, Y : array, path or DTensor, shapes (n, d) and (m, e)
        Tables that are read by rows: memory maps, arrays of Zarr or HDF5 (the ``X`` or ``obsm`` of
        a backed AnnData), paths of .npy, .zarr and .parquet files or ``"file.h5ad:obsm/NAME"``,
        DTensors with ``Shard(0)`` whose rows stay where they are, or arrays.
    folder : path-like
        Where the result is written, and seen by all processes.
    a, b : array or path, shapes (n,) and (m,), optional
        Weights of the rows, whose sums need not be one; as (n, 1) where they are of Zarr or HDF5.
    epsilon : float or "auto"
        As of :func:`torchgw.solve`.
    n_base : int or "auto"
        Rows of each side that its graph is made of, and cells. ``"auto"`` tries 2,048 and more on
        samples of eight times as many rows, until the plan of these has its weights to 1e-3, and
        distances are those by 131,072 rows up to the root of epsilon; 65,536 at most.
    block : int, optional
        Rows that are read, matched and written at once: 262,144 on a CPU and 1,048,576 on a GPU,
        unless given.
    device : torch.device or str, optional
    distributed : bool or "auto"
        Whether the processes of ``torch.distributed`` share the blocks.
    random_state : int
        Seed of the rows that are drawn.
    verbose : bool
        Show on standard error what bases are tried, what the blocks will take, and progress.
    time_limit : float, optional
        Seconds after which no block is begun; base and cells are made, and each process matches
        one block, in any case. The result is ``"STOPPED"``, with no value, and the same call goes
        on later.
    options : Options, optional
        Of the solve on the cells.

    Returns
    -------
    RowsResult

    Raises
    ------
    InvalidInputError
        For input that cannot be read, with the first row that is not finite, a folder of another
        call, and a disk that is full, or will be.
    RankError
        If another process has ended.

    Warns
    -----
    ConvergenceWarning
        If the marginal error is above 1e-3, or the time was up.
    GraphWarning
        If distances are off by more than the root of epsilon, whatever the base.

    Examples
    --------
    >>> import numpy as np, tempfile, torchgw
    >>> t = np.linspace(0, 1, 2_000) ** 1.3
    >>> curve = np.stack([np.cos(4 * t), np.sin(4 * t), t], axis=1)
    >>> folder = tempfile.mkdtemp()
    >>> result = torchgw.solve_rows(curve, curve[::-1], folder, epsilon=0.02, n_base=500)
    >>> partner = result.rows()["partner"]
    >>> bool(np.abs(t[::-1][partner] - t).mean() < 0.05)
    True
    """
    if n_base != "auto":
        check_count("n_base", n_base)
    check_count("block", block, none=True)
    check_not_negative("time_limit", time_limit, none=True)
    end = math.inf if time_limit is None else monotonic() + time_limit
    options = Options() if options is None else options
    where = resolve_device(device)
    ranks = join(distributed, where)
    team = Alone(where) if ranks is None else ranks
    shown = progress(verbose and team.rank == 0)
    with together(ranks), torch.no_grad(), shown as report:
        tables = Rows("X", X, "a", a), Rows("Y", Y, "b", b)
        told = {
            "shape": [table.n for table in tables], "n_base": n_base,
            "block": block or _BLOCK[where.type],
            "epsilon": epsilon, "random_state": random_state,
            "weighted": [given is not None for given in (a, b)],
        }  # fmt: skip
        if team.rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
        result = _match(_Call(Path(folder), tables, told, team, where, options, report, end))
    if result.status == "STOPPED":
        warn_user("The time was up before all rows were matched. " + _GO_ON, ConvergenceWarning)
    if result.marginal_error > _ALLOWED:
        warn_user(
            f"The plan misses the weights of rows by {result.marginal_error:.1e} in the mean. Pass "
            f"a larger `n_base`, such as {4 * max(result.cells)}.",
            ConvergenceWarning,
        )
    if result.distance_error > math.sqrt(result.epsilon):
        warn_user(
            f"Distances between rows are off by {result.distance_error:.2g} of the longest one by "
            f"{max(result.cells)} rows and by {_MOST}, where epsilon blurs "
            f"{math.sqrt(result.epsilon):.2g}: finer detail counts for nothing. Fewer dimensions, "
            "as of principal components, have geodesics that fewer points tell.",
            GraphWarning,
        )
    return result


class _Call(NamedTuple):
    """What is asked for, and by whom it is answered."""

    folder: Path
    tables: tuple[Rows, Rows]
    told: dict[str, Any]  # what a call that goes on must have too
    team: Ranks
    device: torch.device
    options: Options
    report: Progress | None
    end: float  # when no block is begun any more

    def blocks(self, table: Rows, *done: list[tuple[int, int]]) -> list[slice]:
        """List the blocks of a table that this process reads, but what is done."""
        return table.blocks(self.told["block"], self.team.rank, self.team.size, *done)

    def rounds(self, what: str, blocks: list[Any], end: float = math.inf) -> Iterator[Any]:
        """Go over own blocks up to some time; after each, see who is missed, and say how far."""
        begin = perf_counter()
        for turn in range(max(self.team.counts(len(blocks)))):
            if turn < len(blocks):
                yield blocks[turn]
                if self.report is not None:
                    spent = perf_counter() - begin
                    self.report.part(f"{what}, block", turn + 1, len(blocks), spent)
            if self.team.any(monotonic() > end):
                return

    def draw(self, table: Rows, count: int, *seed: int) -> NDArray[np.int64]:
        """Draw one row of each of ``count`` stretches of equal length, ascending."""
        count = min(count, table.n)
        generator = np.random.default_rng(
            [self.told["random_state"], "XY".index(table.name), *seed]
        )
        ends = np.arange(count + 1) * table.n // count
        return ends[:-1] + (generator.random(count) * np.diff(ends)).astype(np.int64)

    def rows_at(self, table: Rows, index: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Read the rows that an ascending index names, (q, d), and their weights, (q,)."""
        found = [torch.empty(0, table.d + 2, dtype=torch.float64, device=self.device)]
        for rows in self.blocks(table):
            first, last = np.searchsorted(index, [rows.start, rows.stop])
            named = torch.from_numpy(index[first:last]).to(self.device)
            share = table.shares(rows, self.device)[named - rows.start]
            parts = named.double()[:, None], share[:, None], table.at(index, rows, self.device)
            found.append(torch.cat(parts, 1))
        whole = self.team.gather(torch.cat(found))
        whole = whole[whole[:, 0].argsort()]
        return whole[:, 2:].contiguous(), whole[:, 1]


def _match(call: _Call) -> RowsResult:
    """Match tables, going on with what the folder has."""
    head, team, clock = call.folder / "head.npz", call.team, [perf_counter()]
    # the folder is seen by all, and looked at before one writes to it
    if team.any(head.exists()):
        known = read_archive(head)[0]["call"]
        if known != call.told:
            raise InvalidInputError(
                f"{call.folder} holds the result of another call: {known} where this is "
                f"{call.told}. Pass another folder, or remove it."
            )
    else:
        _write_head(call)
    clock.append(perf_counter())
    maps = _read_head(call.folder, call.device)
    _pass_over(call, maps)
    if team.rank == 0:
        clock.append(perf_counter())
        told = _sum_up(call, maps) | {"seconds": np.diff(clock).tolist()}
        write_archive(call.folder / "summary.npz", told, {})
    team.any()
    return RowsResult(call.folder, call.device)


def _choose_base(call: _Call) -> tuple[int, dict[str, float]]:
    """Choose how many rows are a base, by samples of the rows, and tell what these say."""
    count, seen, missed = _FIRST, 0, math.nan
    table = call.tables[0]
    drawn, _ = call.rows_at(table, call.draw(table, _MEASURED, 0))
    before, places = math.nan, torch.full_like(drawn, math.nan)[:, :1]
    while True:
        samples = [
            call.rows_at(table, call.draw(table, _TRIED * count, count)) for table in call.tables
        ]
        # by one process: it takes about as long as a block
        tried = call.team.divide([partial(_try, call, samples, count, drawn)])[0]
        error, value, epsilon, found = tried
        moved = float((found - places).square().sum(1).mean().sqrt())
        logger.info(
            "base of %d: marginal error %.1e, value %.6g, places moved by %.2g",
            count, error, value, moved,
        )  # fmt: skip
        seen, missed = (seen, missed) if seen else _base_that_sees(call, math.sqrt(epsilon))
        known = error <= _ALLOWED and seen <= count and not math.isnan(before)
        if known or count >= min(_MOST, *call.told["shape"]):
            changes = {"value_change": abs(value - before), "place_change": moved}
            return count, changes | {"distance_error": missed}
        finer = max(seen, count * how_much_finer(error, _ALLOWED))
        count, before, places = min(_MOST, finer), value, found


def _try(
    call: _Call, samples: list[tuple[Tensor, Tensor]], count: int, drawn: Tensor
) -> tuple[float, float, float, Tensor]:
    """Match samples with a base; tell error, value, epsilon, and where drawn rows of X go."""
    x, y = (
        Rows(table.name, points.cpu(), "sampled weights", share.cpu())
        for table, (points, share) in zip(call.tables, samples, strict=True)
    )
    asked = call.told | {"n_base": count, "shape": [x.n, y.n]}
    with TemporaryDirectory() as name:
        found = _match(
            call._replace(
                folder=Path(name), tables=(x, y), told=asked, team=Alone(call.device),
                report=None, end=math.inf,
            )
        )  # fmt: skip
        places = torch.from_numpy(found.transform(drawn))
    return found.marginal_error, found.value, found.epsilon, places.to(call.device)


def _base_that_sees(call: _Call, tolerance: float) -> tuple[int, float]:
    """Find a small base whose distances are those of many more rows, and how far they miss."""
    makers = list[Callable[[], tuple[int, float]]]()
    for table in call.tables:
        points, _ = call.rows_at(table, call.draw(table, 2 * _MOST, 1))
        makers.append(partial(_sees, call, table, points, tolerance))
    counts, errors = zip(*call.team.divide(makers), strict=True)
    return max(counts), max(errors)


def _sees(call: _Call, table: Rows, points: Tensor, tolerance: float) -> tuple[int, float]:
    """Find such a base of a side, some of the points.

    Where none does, as in high dimensions, more rows are no help, and the fewest are taken.
    """
    drawn, count = points[_even(points, _MEASURED)], _FIRST
    known = _distances(call, table, points, drawn)
    while True:
        apart = _distances(call, table, points[_even(points, count)], drawn) - known
        error = float(apart.square().mean().sqrt())
        logger.info("%s, base of %d: distances off by %.2g", table.name, count, error)
        if error <= tolerance:
            return count, error
        if count >= min(_MOST, len(points)):
            return _FIRST, error
        count = min(4 * count, _MOST)


def _even(points: Tensor, count: int) -> Tensor:
    return at_even_steps(len(points), min(count, len(points)), points.device)


def _factors(call: _Call, table: Rows, base: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the factors of the geodesics between base points, (B, r), and their signs, (r,).

    Each row takes as long as there are factors: those are left out that distances hardly need.
    """
    options = DistanceOptions(None, None, "auto", "stitch")
    provider, _ = build_space(Passed(table.name, base), "landmark", options, call.device)
    factors = provider.factors()
    assert factors is not None
    matrix, signs = factors.matrix.double(), factors.signs.double()
    moments = matrix.T @ matrix / len(matrix)
    order = moments.diagonal().argsort(descending=True)
    matrix, signs, moments = matrix[:, order], signs[order], moments[order][:, order]
    # mean squares of the distances by each factor and those after it alone
    rest = (torch.outer(signs, signs) * moments.square()).flip(0, 1)
    rest = rest.cumsum(0).cumsum(1).diagonal().flip(0)
    rank = max(1, int((rest > _NEGLIGIBLE**2 * rest[0]).sum()))
    return matrix[:, :rank].contiguous(), signs[:rank]


def _distances(call: _Call, table: Rows, base: Tensor, points: Tensor) -> Tensor:
    """Compute the distances between points that a base is all that is known of."""
    matrix, signs = _factors(call, table, base)
    own, _ = averaged_factors(base, matrix, points)
    return (own * signs) @ own.T


def _write_head(call: _Call) -> None:
    """Read the bases, make the cells, solve on them, and write what rows are matched by."""
    n_base = call.told["n_base"]
    tried = dict.fromkeys(("value_change", "place_change", "distance_error"), math.nan)
    if n_base == "auto":
        with warnings.catch_warnings():
            # of samples; the whole table has its own
            warnings.simplefilter("ignore")
            n_base, tried = _choose_base(call)
    known = [_known(call, table, n_base) for table in call.tables]
    # one side by each process
    makers = [
        partial(_factors, call, table, base)
        for table, (base, *_) in zip(call.tables, known, strict=True)
    ]
    made = call.team.divide(makers)
    sides = [_side(call, *each) for each in zip(call.tables, known, made, strict=True)]
    result = solve(
        *(FactoredDistance(side.cells, side.signs) for side in sides), a=sides[0].masses,
        b=sides[1].masses, epsilon=call.told["epsilon"], device=call.device,
        random_state=call.told["random_state"],
        options=call.options.replace(scale=None, distributed=False, gradient="factored"),
    )  # fmt: skip
    plan = result.lazy_plan
    if call.team.rank == 0:
        arrays = {"f": plan.potentials.f, "g": plan.potentials.g}
        for kind, parts in zip(("cost", "X", "Y"), (plan.cost, *sides), strict=True):
            arrays |= {f"{kind}.{name}": part for name, part in parts._asdict().items()}
        told = {
            "call": call.told, "epsilon": result.epsilon, "status": result.status.name,
            "converged": result.converged, "doubt": result.doubt, **tried,
        }  # fmt: skip
        stored = {name: to_numpy(part) for name, part in arrays.items()}
        write_archive(call.folder / "head.npz", told, stored)
    call.team.any()


def _known(call: _Call, table: Rows, n_base: int) -> tuple[Tensor, ...]:
    """Read the base and the rows that are measured: points, their rows, and weights of the last."""
    chosen = call.draw(table, n_base), call.draw(table, _MEASURED, 0)
    every = np.union1d(*chosen)
    read, parts = call.rows_at(table, every), list[Tensor]()
    for some in chosen:
        at = torch.from_numpy(np.searchsorted(every, some)).to(call.device)
        parts += [torch.from_numpy(some).to(call.device), *(part[at] for part in read)]
    named, base, _, drawn, points, weights = parts
    return base, named, drawn, points, weights / weights.sum().clamp_min(TINY)


def _side(
    call: _Call, table: Rows, known: tuple[Tensor, ...], made: tuple[Tensor, Tensor]
) -> _Side:
    """Add up the rows of cells."""
    (base, named, drawn, points, weights), (matrix, signs) = known, made
    # factors lie between those of the base, and sums of whole numbers have no order
    bound, (count, rank) = matrix.abs().amax(0), matrix.shape
    unit = torch.cat([bound.new_ones(1), bound]) * _UNIT
    sums = torch.zeros(count, 1 + rank, dtype=torch.int64, device=call.device)
    moments = torch.zeros(rank, rank, dtype=torch.int64, device=call.device)
    scale = torch.outer(bound, bound) * _UNIT
    for rows in call.rounds(f"cells of {table.name}", call.blocks(table)):
        own, at = averaged_factors(base, matrix, table.read(rows, call.device))
        share = table.shares(rows, call.device)[:, None]
        sums.index_add_(0, at, (torch.cat([share, share * own], 1) / unit).round().long())
        moments += ((own.T @ (share * own)) / scale).round().long()
    found = call.team.gather(sums[None]).sum(0).double() * unit
    mass = found[:, :1]
    # a cell may be empty where a base point is a copy of another
    cells = torch.where(mass > 0, found[:, 1:] / mass, matrix)
    moments = call.team.gather(moments[None]).sum(0).double() * scale
    return _Side(
        base, named, matrix, signs, drawn, points, weights, mass[:, 0] / mass.sum(), cells, moments
    )  # fmt: skip


def _read_head(folder: Path, device: torch.device) -> tuple[_Map, _Map]:
    """Read what rows are matched by, from X to Y and from Y to X."""
    told, stored = read_archive(folder / "head.npz")
    arrays = {name: torch.from_numpy(part.copy()).to(device) for name, part in stored.items()}
    cost = FactoredCost(*(arrays[f"cost.{name}"].double() for name in FactoredCost._fields))
    potentials = Potentials(arrays["f"].double(), arrays["g"].double())
    x, y = (_Side(*(arrays[f"{letter}.{name}"] for name in _Side._fields)) for letter in "XY")
    backend = choose_backend("auto", device, torch.float64)
    plan = TransportPlan(cost, potentials, Marginals(x.masses, y.masses), told["epsilon"], backend)
    return _Map.of(x, y, plan), _Map.of(y, x, plan.T)


def _place_of(folder: Path, letter: str, rows: slice) -> Path:
    return folder / f"{letter}-{rows.start:012d}-{rows.stop:012d}.npz"


def _written(folder: Path, letter: str) -> list[tuple[int, int]]:
    """List the blocks of a side that are written, in order."""
    found = (path.stem.split("-")[1:] for path in folder.glob(f"{letter}-*.npz"))
    return sorted((int(first), int(last)) for first, last in found)


def _pass_over(call: _Call, maps: tuple[_Map, _Map]) -> None:
    """Match the rows of both sides, and write each block that the folder does not have."""
    todo = [
        (number, rows)
        for number, table in enumerate(call.tables)
        for rows in call.blocks(table, _written(call.folder, table.name))
    ]
    # nobody writes before all have looked, as rounds begin together
    drawn = [way.drawn(back) for way, back in zip(maps, maps[::-1], strict=True)]
    with ThreadPoolExecutor(1) as pool:
        # a block is written while the next are matched
        written, begin = deque[Future[None]](), perf_counter()
        for turns, (number, rows) in enumerate(call.rounds("rows", todo, call.end), 1):
            parts = _match_block(call, call.tables[number], rows, maps[number], drawn[number])
            arrays = {name: to_numpy(part) for name, part in parts.items()}
            if turns <= 2:
                _foretell(call, arrays, turns, len(todo), perf_counter() - begin)
                begin = perf_counter()
            path = _place_of(call.folder, "XY"[number], rows)
            written.append(pool.submit(write_archive, path, {}, arrays))
            if len(written) > _WAITING:
                written.popleft().result()
        for block_written in written:
            block_written.result()
    call.team.any()


def _match_block(
    call: _Call, table: Rows, rows: slice, way: _Map, drawn: _Drawn
) -> dict[str, Tensor]:
    """Match the rows of a block, in their order, and add up what the sums over all need."""
    factors, at = way.side.factors_of(table.read(rows, call.device))
    # rows next to each other, so that tiles of their plan can be skipped
    turn = way.orders[0].place[at].argsort(stable=True)
    share = table.shares(rows, call.device).clamp_min(_UNSEEN)[turn]
    matched, plan, parts = way.match(factors[turn], share)
    parts["drawn"] = drawn.masses(plan)
    for name, part in matched._asdict().items():
        parts[name] = torch.empty_like(part).index_copy_(0, turn, part)
    return parts


def _foretell(
    call: _Call, arrays: dict[str, NDArray[Any]], turn: int, count: int, spent: float
) -> None:
    """Refuse a disk that is too small for all blocks; by the second say how long they take."""
    # the first one compiles kernels
    size = count * sum(part.nbytes for part in arrays.values())
    if turn == 1 and (free := disk_usage(call.folder).free) < size:
        raise InvalidInputError(
            f"cannot write to {call.folder}: its {count} blocks take {size / 2**30:.2g} GiB, and "
            f"{free / 2**30:.2g} are free."
        )
    if turn < min(2, count):
        return
    why = f"{count} blocks of rows are matched, {size / 2**30:.2g} GiB for the disk"
    if peak := peak_memory(call.device):
        why += f" and {peak / 2**30:.2g} of memory"
    say_more(spent * (count - turn), why)


def _sum_up(call: _Call, maps: tuple[_Map, _Map]) -> dict[str, Any]:
    """Add up the blocks of both sides in order, and tell value, marginal error and status."""
    told: dict[str, Any] = read_archive(call.folder / "head.npz")[0]
    small, (x, y) = maps[0].plan, (way.side for way in maps)
    told |= {"shape": told.pop("call")["shape"], "cells": list(small.shape)}
    sums, names = list[tuple[Tensor, ...]](), ("coupling", "moved", "drawn")
    for table in call.tables:
        written = _written(call.folder, table.name)
        if [0, *(last for _, last in written)] != [*(first for first, _ in written), table.n]:
            if math.isinf(call.end):
                raise InvalidInputError(
                    f"{call.folder}: blocks of {table.name} are of other calls."
                )
            unknown = dict.fromkeys(("value", "marginal_error"), math.nan)
            return told | unknown | {"status": "STOPPED", "converged": False}
        total = [0.0] * len(names)
        for ends in written:
            # what is asked for alone is read
            with np.load(_place_of(call.folder, table.name, slice(*ends))) as arrays:
                total = [so_far + arrays[name] for so_far, name in zip(total, names, strict=True)]
        sums.append(tuple(torch.tensor(part, device=call.device) for part in total))
    couplings, moved, drawn = zip(*sums, strict=True)
    coupling, excess = join_halves(small, (x.cells, y.cells), couplings, moved)
    own = sum(side.signs @ side.moments.square() @ side.signs for side in (x, y))
    value = float(own - 2 * (x.signs @ coupling.square() @ y.signs)) - excess
    errors = [
        float(side.weights @ (part - 1).abs())
        for side, part in zip((x, y), drawn[::-1], strict=True)
    ]
    return told | {"value": value, "marginal_error": max(errors)}
