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
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._api import solve
from torchgw._boundary.archive import read_archive, write_archive
from torchgw._boundary.arrays import check_points, resolve_device, to_numpy
from torchgw._boundary.checks import check_choice, check_count
from torchgw._boundary.console import Progress, progress
from torchgw._boundary.rows import Rows, opened
from torchgw._errors import ConvergenceWarning, InvalidInputError, UnsupportedError, warn_user
from torchgw._plans.transport import TransportPlan
from torchgw._problem.given import Passed
from torchgw._problem.providers import DistanceOptions, build_space
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.problem import FactoredCost, LinearProblem
from torchgw._sinkhorn.tiles.tiling import Tiling, block_orders
from torchgw._solve.evaluation import Half, half_step, join_halves
from torchgw._solve.resolution import how_much_finer
from torchgw._solve.table import Options
from torchgw._tensors.block_order import Order
from torchgw._tensors.foretold import say_more
from torchgw._tensors.ranks import Distributed, Ranks, join, together
from torchgw._typing import Marginals, Potentials
from torchgw.distances.factored import FactoredDistance
from torchgw.distances.new_points import averaged_factors

logger = logging.getLogger(__name__)

# Rows of a block. [L1665]
_BLOCK = 2**18
# Base rows of a side to begin with, and at most. A choice.
_FIRST, _MOST = 2**11, 2**16
# Rows of a side that a base is tried on, for each of its rows. [L1667]
_TRIED = 8
# Rows of either side whose masses are added up, and the marginal error that a base may leave. A
# choice.
_MEASURED, _ALLOWED = 1024, 1e-3
# Blocks that wait to be written, at most. A choice.
_WAITING = 2
# Sums of at most one are whole numbers of this unit: 2^62 rows round to less than 2^63. A choice.
_UNIT = 2.0**-60
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
    cells: Tensor  # (B, r), factors of the cells of the side
    far: Tensor  # (C, s), of the cells of the other side
    orders: tuple[Order, Order]  # of the cells of both sides, near ones next to each other
    affine: Tensor  # (r + 1, k + 1), from factors and one to those of the cost and its row term

    @classmethod
    def of(
        cls, sides: tuple[_Side, _Side], plan: TransportPlan, cells: tuple[Tensor, ...]
    ) -> "_Map":
        """Find how the cost of cells follows from their factors, which is an affine map."""
        known = torch.cat([cells[0], torch.ones_like(cells[0][:, :1])], 1)
        assert isinstance(plan.cost, FactoredCost)
        cost = torch.cat([plan.cost.left, plan.cost.row[:, None]], 1)
        orders = block_orders(plan.cost, (1, 1))
        (near, far), (own, other) = cells, sides
        return cls(own, other, plan, near, far, orders, torch.linalg.pinv(known, rtol=1e-13) @ cost)

    def cost(self, factors: Tensor) -> FactoredCost:
        """Compute the cost of rows with these factors and the cells of the other side."""
        whole = torch.cat([factors, torch.ones_like(factors[:, :1])], 1) @ self.affine
        known = self.plan.cost
        assert isinstance(known, FactoredCost)
        return known._replace(left=whole[:, :-1].contiguous(), row=whole[:, -1].clone())

    def match(self, factors: Tensor, share: Tensor) -> tuple[_Matched, Half, Tensor]:
        """Match rows of some factors and weights; also give what is read, and mean factors."""
        cost = self.cost(factors)
        tiling = Tiling.of(cost.shape, cost.device)
        rows = torch.arange(len(factors), device=cost.device)
        tiling = tiling.ordered((Order.of(rows, tiling.width), self.orders[1]))
        backend = choose_backend("auto", cost.device, cost.dtype, tiling)
        g, weights = self.plan.potentials.g, Marginals(share, self.plan.weights.b)
        prepared = backend.prepare(LinearProblem(cost, weights, self.plan.epsilon))
        half = half_step(prepared, g, torch.cat([self.other.base, self.far], 1))
        place, far = half.means.tensor_split([self.other.base.shape[1]], 1)
        partner = self.other.named[half.plan.topk(1)[1][:, 0]]
        place = (place / share[:, None]).float()
        return _Matched(half.plan.potentials.f, partner, place), half, far

    def columns(self, back: "_Map") -> tuple[Tensor, Tensor, Tensor]:
        """Give the drawn rows of the other side as columns: factors, terms of the cost, and g."""
        factors, _ = self.other.factors_of(self.other.points)
        plan = back.match(factors, torch.ones_like(self.other.weights))[1].plan
        assert isinstance(plan.cost, FactoredCost)
        return plan.cost.left, plan.cost.row, plan.potentials.f


# Weights of the rows of a table, and their sum.
_Weights = tuple[Rows, float]


class _Team:
    """The processes that share the passes, or one alone."""

    def __init__(self, ranks: Ranks | None) -> None:
        self.ranks = ranks
        self.rank, self.size = (0, 1) if ranks is None else (ranks.rank, ranks.size)

    def gather(self, own: Tensor) -> Tensor:
        """Join the rows of all, in the order of the ranks."""
        if self.ranks is None:
            return own
        count = torch.tensor([len(own)], device=own.device)
        counts = self.ranks.gather(count, [1] * self.size).tolist()
        return self.ranks.gather(own, counts)

    def total(self, own: Tensor) -> Tensor:
        """Add up whole numbers over all."""
        return self.gather(own[None]).sum(0)

    def rounds(self, blocks: list[Any]) -> Iterator[Any]:
        """Go over own blocks, and look after each whether somebody is missed."""
        most = max(self.gather(torch.tensor([len(blocks)], device=self._place)).tolist())
        for turn in range(most):
            if turn < len(blocks):
                yield blocks[turn]
            self.meet()

    def meet(self) -> None:
        """Wait for all, and notice who is missed."""
        if self.ranks is not None:
            self.ranks.any(False)

    @property
    def _place(self) -> torch.device:
        return torch.device("cpu") if self.ranks is None else self.ranks.device


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
        written = _written(self.folder, side)
        # of no rows at all the dtypes are those of the first block
        there = [ends for ends in written if ends[0] < stop and ends[1] > start] or written[:1]
        found: dict[str, list[NDArray[Any]]] = {name: [] for name in _Matched._fields}
        for first, last in there:
            _, arrays = read_archive(_place_of(self.folder, side, slice(first, last)))
            for name, parts in found.items():
                parts.append(arrays[name][max(start - first, 0) : max(stop - first, 0)])
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def transform(self, points: Any, *, side: Literal["X", "Y"] = "X") -> NDArray[Any]:
        """Map points of a side that need not be rows of it to the other, (q, d)."""
        check_choice("side", side, ("X", "Y"))
        way = _read_head(self.folder, self.device)["XY".index(side)]
        given = check_points("points", points).double().to(self.device)
        share = torch.full_like(given[:, 0], 1 / len(given))
        return to_numpy(way.match(way.side.factors_of(given)[0], share)[0].place)


def solve_rows(
    X: Any,
    Y: Any,
    folder: Any,
    *,
    a: Any = None,
    b: Any = None,
    epsilon: float | Literal["auto"] = "auto",
    n_base: int | Literal["auto"] = "auto",
    block: int = _BLOCK,
    device: Any = None,
    distributed: Distributed = False,
    random_state: int = 0,
    verbose: bool = False,
    options: Options | None = None,
) -> RowsResult:
    """Match tables of any size by geodesics, reading and writing some rows at a time.

    Memory is that of the base, the cells and one block of rows, in each process. A call that was
    ended goes on from the blocks that the folder has, in any number of processes.

    Parameters
    ----------
    X, Y : array, path or DTensor, shapes (n, d) and (m, e)
        Tables that are read by rows: memory maps, arrays of Zarr or HDF5 (the ``X`` or ``obsm`` of
        a backed AnnData), paths of .npy, .zarr and .parquet files, DTensors with ``Shard(0)`` whose
        rows stay where they are, or arrays.
    folder : path-like
        Where the result is written, and seen by all processes.
    a, b : array or path, shapes (n,) and (m,), optional
        Weights of the rows, whose sums need not be one; as (n, 1) where they are of Zarr or HDF5.
    epsilon : float or "auto"
        As of :func:`torchgw.solve`.
    n_base : int or "auto"
        Rows of each side that its graph is made of, and cells. ``"auto"`` tries 2,048 and more on
        samples of eight times as many rows, until the plan of these has its weights to 1e-3 and the
        value no longer changes by more than epsilon; 65,536 at most.
    block : int
        Rows that are read, matched and written at once.
    device : torch.device or str, optional
    distributed : bool or "auto"
        Whether the processes of ``torch.distributed`` share the blocks.
    random_state : int
        Seed of the rows that are drawn.
    verbose : bool
        Show progress on standard error.
    options : Options, optional
        Of the solve on the cells.

    Returns
    -------
    RowsResult

    Raises
    ------
    InvalidInputError
        For input that cannot be read, a folder of another call, and a disk that is full.
    RankError
        If another process has ended.

    Warns
    -----
    ConvergenceWarning
        If the marginal error is above 1e-3.

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
    check_count("block", block)
    options = Options() if options is None else options
    where = resolve_device(device)
    team = _Team(join(distributed, where))
    place = Path(folder)
    shown = progress(verbose and team.rank == 0)
    with together(team.ranks), torch.no_grad(), shown as report:
        tables = Rows("X", X), Rows("Y", Y)
        weights = tuple(
            None if given is None else _weights(name, given, table.n)
            for name, given, table in zip("ab", (a, b), tables, strict=True)
        )
        call = {
            "shape": [table.n for table in tables], "n_base": n_base, "block": block,
            "epsilon": epsilon, "random_state": random_state,
            "weighted": [given is not None for given in weights],
        }  # fmt: skip
        if team.rank == 0:
            place.mkdir(parents=True, exist_ok=True)
        result = _match(place, call, tables, weights, team, where, options, report)
    if result.marginal_error > _ALLOWED:
        warn_user(
            f"The plan misses the weights of rows by {result.marginal_error:.1e} in the mean. Pass "
            f"a larger `n_base`, such as {4 * max(result.cells)}.",
            ConvergenceWarning,
        )
    return result


def _match(
    place: Path,
    call: dict[str, Any],
    tables: tuple[Rows, Rows],
    weights: tuple[Any, ...],
    team: _Team,
    where: torch.device,
    options: Options,
    report: Progress | None,
) -> RowsResult:
    """Match tables, going on with what the folder has."""
    clock, begun = [perf_counter()], (place / "head.npz").exists()
    if team.ranks is not None:
        # the folder is seen by all, and looked at before one writes to it
        begun = team.ranks.any(begun)
    if begun:
        known, _ = read_archive(place / "head.npz")
        if known["call"] != call:
            raise InvalidInputError(
                f"{place} holds the result of another call: {known['call']} where this is "
                f"{call}. Pass another folder, or remove it."
            )
    else:
        _write_head(place, call, tables, weights, team, where, options)
    clock.append(perf_counter())
    maps = _read_head(place, where)
    _pass_over(place, tables, weights, maps, call["block"], team, report)
    if team.rank == 0:
        clock.append(perf_counter())
        _sum_up(place, call, maps, np.diff(clock).tolist())
    team.meet()
    return RowsResult(place, where)


def _choose_base(
    call: dict[str, Any],
    tables: tuple[Rows, Rows],
    weights: tuple[Any, ...],
    team: _Team,
    device: torch.device,
    options: Options,
) -> tuple[int, float]:
    """Choose how many rows are a base, by the marginal error and the value of samples."""
    # detail that a base does not see changes the value once one sees it: a change within epsilon
    # moves next to no mass
    count, before = _FIRST, math.inf
    while True:
        samples, shares = list[Rows](), list[_Weights]()
        for number, (table, own) in enumerate(zip(tables, weights, strict=True)):
            generator = np.random.default_rng([call["random_state"], number, count])
            index = _draw(table.n, _TRIED * count, generator)
            rows = _rows_at(index, table, own, call["block"], team, device).cpu()
            samples.append(Rows(table.name, rows[:, 2:]))
            shares.append((Rows("weights", rows[:, 1:2]), float(rows[:, 1].sum())))
        trial = call | {"n_base": count, "shape": [sample.n for sample in samples]}
        with TemporaryDirectory() as name:
            # each process for itself: it takes about as long as a block
            found = _match(
                Path(name), trial, (samples[0], samples[1]), tuple(shares), _Team(None), device,
                options, None,
            )  # fmt: skip
        error, change = found.marginal_error, abs(found.value - before)
        logger.info("base of %d: marginal error %.1e, value %.6g", count, error, found.value)
        resolved = error <= _ALLOWED and change <= found.epsilon
        if resolved or count >= min(_MOST, *call["shape"]):
            return count, change
        count, before = min(_MOST, count * how_much_finer(error, _ALLOWED)), found.value


def _weights(name: str, given: Any, n: int) -> _Weights:
    """Open weights, and add them up, block by block in order."""
    given = opened(name, given)
    rows = Rows(name, given if len(given.shape) == 2 else given[:, None])
    if (rows.n, rows.d) != (n, 1):
        raise InvalidInputError(f"`{name}` must have shape ({n},); got ({rows.n}, {rows.d}).")
    if rows.blocks(n, 0, 2) != [slice(0, n)]:
        raise UnsupportedError(f"`{name}` must be whole in each process, not a DTensor.")
    sums = list[float]()
    for some in rows.blocks(_BLOCK, 0, 1):
        part = rows.read(some, torch.device("cpu"))
        if float(part.min()) < 0:
            raise InvalidInputError(f"`{name}` must be non-negative.")
        sums.append(float(part.sum()))
    return rows, math.fsum(sums)


def _shares(weights: _Weights | None, n: int, rows: slice, device: torch.device) -> Tensor:
    """Read the weights of some rows, (q,), whose sum over all is one."""
    if weights is None:
        return torch.full((rows.stop - rows.start,), 1 / n, dtype=torch.float64, device=device)
    return weights[0].read(rows, device)[:, 0] / weights[1]


def _draw(n: int, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw one row of each of ``count`` stretches of equal length, ascending."""
    ends = np.arange(min(count, n) + 1) * n // min(count, n)
    return ends[:-1] + (generator.random(len(ends) - 1) * np.diff(ends)).astype(np.int64)


def _write_head(
    folder: Path,
    call: dict[str, Any],
    tables: tuple[Rows, Rows],
    weights: tuple[Any, ...],
    team: _Team,
    device: torch.device,
    options: Options,
) -> None:
    """Read the bases, make the cells, solve on them, and write what rows are matched by."""
    sides, cells, masses, squares = [], [], [], []
    n_base, change = call["n_base"], math.nan
    if n_base == "auto":
        n_base, change = _choose_base(call, tables, weights, team, device, options)
    for number, (table, own) in enumerate(zip(tables, weights, strict=True)):
        side = _base(table, own, call | {"n_base": n_base}, number, team, device)
        mass, mean, square = _cells(side, table, own, call["block"], team)
        sides.append(side)
        cells.append(mean)
        masses.append(mass)
        squares.append(square)
    distances = (
        FactoredDistance(mean, side.signs) for mean, side in zip(cells, sides, strict=True)
    )
    result = solve(
        *distances, a=masses[0], b=masses[1], epsilon=call["epsilon"], device=device,
        random_state=call["random_state"],
        options=options.replace(scale=None, distributed=False, gradient="factored"),
    )  # fmt: skip
    plan = result.lazy_plan
    if team.rank == 0:
        arrays = {"f": plan.potentials.f, "g": plan.potentials.g}
        arrays |= {f"cost.{name}": part for name, part in plan.cost._asdict().items()}
        for letter, side, mean, mass, square in zip(
            "XY", sides, cells, masses, squares, strict=True
        ):
            arrays |= {f"{letter}.{name}": part for name, part in side._asdict().items()}
            arrays |= {f"{letter}.cells": mean, f"{letter}.mass": mass, f"{letter}.square": square}
        told = {
            "call": call, "epsilon": result.epsilon, "status": result.status.name,
            "converged": result.converged, "doubt": result.doubt, "value_change": change,
        }  # fmt: skip
        write_archive(
            folder / "head.npz", told, {name: to_numpy(part) for name, part in arrays.items()}
        )
    team.meet()


def _base(
    table: Rows, weights: Any, call: dict[str, Any], number: int, team: _Team, device: torch.device
) -> _Side:
    """Read the base of a side and the rows that are measured, and make the factors of the base."""
    generator = np.random.default_rng([call["random_state"], number])
    index, drawn = (_draw(table.n, count, generator) for count in (call["n_base"], _MEASURED))
    every = np.union1d(index, drawn)
    whole = _rows_at(every, table, weights, call["block"], team, device)
    base, measured = (
        whole[torch.from_numpy(np.searchsorted(every, some)).to(device)] for some in (index, drawn)
    )
    options = DistanceOptions(None, None, "auto", "stitch")
    provider, _ = build_space(Passed(table.name, base[:, 2:]), "landmark", options, device)
    factors = provider.factors()
    assert factors is not None
    matrix, signs = factors.matrix.double(), factors.signs.double()
    total = measured[:, 1].sum()
    share = measured[:, 1] / torch.where(total > 0, total, 1.0)
    return _Side(
        base[:, 2:].contiguous(), base[:, 0].long(), matrix, signs, measured[:, 0].long(),
        measured[:, 2:].contiguous(), share,
    )  # fmt: skip


def _rows_at(
    index: NDArray[np.int64],
    table: Rows,
    weights: Any,
    block: int,
    team: _Team,
    device: torch.device,
) -> Tensor:
    """Read rows that an ascending index names, (q, 2 + d): number, weight and point of each."""
    found = [torch.empty(0, table.d + 2, dtype=torch.float64, device=device)]
    for rows in table.blocks(block, team.rank, team.size):
        first, last = np.searchsorted(index, [rows.start, rows.stop])
        named = torch.from_numpy(index[first:last]).to(device)
        share = _shares(weights, table.n, rows, device)[named - rows.start]
        parts = named.double()[:, None], share[:, None], table.at(index, rows, device)
        found.append(torch.cat(parts, 1))
    whole = team.gather(torch.cat(found))
    return whole[whole[:, 0].argsort()]


def _cells(
    side: _Side, table: Rows, weights: Any, block: int, team: _Team
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up the rows of cells: their mass (B,), mean factors (B, r), and second moments (r, r)."""
    count, rank = side.factors.shape
    # factors lie between those of the base, and sums of whole numbers have no order
    bound = side.factors.abs().amax(0)
    unit = torch.cat([bound.new_ones(1), bound]) * _UNIT
    sums = torch.zeros(count, 1 + rank, dtype=torch.int64, device=bound.device)
    moments = torch.zeros(rank, rank, dtype=torch.int64, device=bound.device)
    scale = torch.outer(bound, bound) * _UNIT
    for rows in team.rounds(table.blocks(block, team.rank, team.size)):
        factors, at = side.factors_of(table.read(rows, bound.device))
        share = _shares(weights, table.n, rows, bound.device)[:, None]
        whole = torch.cat([share, share * factors], 1) / unit
        sums.index_add_(0, at, whole.round().long())
        moments += ((factors.T @ (share * factors)) / scale).round().long()
    found = team.total(sums).double() * unit
    mass = found[:, :1]
    # a cell may be empty where a base point is a copy of another
    mean = torch.where(mass > 0, found[:, 1:] / mass, side.factors)
    return mass[:, 0] / mass.sum(), mean, team.total(moments).double() * scale


def _read_head(folder: Path, device: torch.device) -> tuple[_Map, _Map]:
    """Read what rows are matched by, from X to Y and from Y to X."""
    told, stored = read_archive(folder / "head.npz")
    arrays = {name: torch.from_numpy(part.copy()).to(device) for name, part in stored.items()}
    cost = FactoredCost(*(arrays[f"cost.{name}"].double() for name in FactoredCost._fields))
    potentials = Potentials(arrays["f"].double(), arrays["g"].double())
    masses = Marginals(arrays["X.mass"], arrays["Y.mass"])
    backend = choose_backend("auto", device, torch.float64)
    plan = TransportPlan(cost, potentials, masses, told["epsilon"], backend)
    x, y = (_Side(*(arrays[f"{letter}.{name}"] for name in _Side._fields)) for letter in "XY")
    near, far = arrays["X.cells"], arrays["Y.cells"]
    return _Map.of((x, y), plan, (near, far)), _Map.of((y, x), plan.T, (far, near))


def _place_of(folder: Path, letter: str, rows: slice) -> Path:
    return folder / f"{letter}-{rows.start:012d}-{rows.stop:012d}.npz"


def _written(folder: Path, letter: str) -> list[tuple[int, int]]:
    """List the blocks of a side that are written, in order."""
    found = (path.stem.split("-")[1:] for path in folder.glob(f"{letter}-*.npz"))
    return sorted((int(first), int(last)) for first, last in found)


def _pass_over(
    folder: Path,
    tables: tuple[Rows, Rows],
    weights: tuple[Any, ...],
    maps: tuple[_Map, _Map],
    block: int,
    team: _Team,
    report: Progress | None,
) -> None:
    """Match the rows of both sides, and write each block that the folder does not have."""
    todo = list[tuple[int, slice]]()
    for number, letter in enumerate("XY"):
        done = [slice(*ends) for ends in _written(folder, letter)]
        left = tables[number].blocks(block, team.rank, team.size, done.__contains__)
        todo += [(number, rows) for rows in left]
    # nobody writes before all have looked, as rounds begin together
    drawn = [way.columns(back) for way, back in zip(maps, maps[::-1], strict=True)]
    device = maps[0].side.base.device
    with ThreadPoolExecutor(1) as pool:
        # a block is written while the next are matched
        written = deque[Future[None]]()
        begin = perf_counter()
        for turns, (number, rows) in enumerate(team.rounds(todo), 1):
            table, way = tables[number], maps[number]
            share = _shares(weights[number], table.n, rows, device).clamp_min(_UNSEEN)
            factors, at = way.side.factors_of(table.read(rows, device))
            # rows next to each other, so that tiles of their plan can be skipped
            turn = way.orders[0].place[at].argsort(stable=True)
            matched, sums = _of_block(way, drawn[number], factors[turn], share[turn])
            back = (torch.empty_like(part).index_copy_(0, turn, part) for part in matched)
            parts = _Matched(*back)._asdict() | sums
            arrays = {name: to_numpy(part) for name, part in parts.items()}
            path = _place_of(folder, "XY"[number], rows)
            written.append(pool.submit(write_archive, path, {}, arrays))
            if len(written) > _WAITING:
                written.popleft().result()
            if report is not None:
                spent = perf_counter() - begin
                if turns == 1:
                    size = sum(part.nbytes for part in arrays.values()) * len(todo) / 2**30
                    why = f"{len(todo)} blocks of rows are matched, {size:.2g} GiB for the disk"
                    if device.type == "cuda":
                        peak = torch.cuda.max_memory_allocated(device) / 2**30
                        why += f" and {peak:.2g} GiB of the GPU"
                    say_more(spent * (len(todo) - 1), why)
                report.block(turns, len(todo), spent)
        for block_written in written:
            block_written.result()
    team.meet()


def _of_block(
    way: _Map, drawn: tuple[Tensor, Tensor, Tensor], factors: Tensor, share: Tensor
) -> tuple[_Matched, dict[str, Tensor]]:
    """Match the rows of a block, and add up what they give to cells, drawn rows and the value."""
    matched, (plan, _, masses), far = way.match(factors, share)
    right, column, g = drawn
    assert isinstance(plan.cost, FactoredCost)
    whole = TransportPlan(
        plan.cost._replace(right=right, column=column), Potentials(matched.potential, g),
        Marginals(share, torch.ones_like(g)), plan.epsilon, plan.backend,
    )  # fmt: skip
    drawn_masses = whole.T @ torch.ones_like(share)
    return matched, {"coupling": factors.T @ far, "masses": masses, "drawn": drawn_masses}


def _sum_up(
    folder: Path, call: dict[str, Any], maps: tuple[_Map, _Map], seconds: list[float]
) -> None:
    """Add up the blocks of both sides in order, and write value and marginal error."""
    told, stored = read_archive(folder / "head.npz")
    sums = []
    for letter, n in zip("XY", call["shape"], strict=True):
        written, total = _written(folder, letter), dict[str, Any]()
        if [first for first, _ in written] != [0, *(last for _, last in written)][:-1] or (
            written[-1][1] != n
        ):
            raise InvalidInputError(f"{folder}: blocks of {letter} are missing, or of other calls.")
        for first, last in written:
            # what is asked for alone is read
            with np.load(_place_of(folder, letter, slice(first, last))) as arrays:
                for name in ("coupling", "masses", "drawn"):
                    total[name] = total.get(name, 0.0) + arrays[name]
        device = maps[0].far.device
        sums.append({name: torch.tensor(part, device=device) for name, part in total.items()})
    small, (near, far) = maps[0].plan, sums
    coupling, excess = join_halves(
        small, (maps[0].cells, maps[0].far), (near["coupling"], far["coupling"]),
        (near["masses"], far["masses"]),
    )  # fmt: skip
    x, y = (one.side.signs for one in maps)
    moments = [torch.tensor(stored[f"{letter}.square"], device=x.device) for letter in "XY"]
    own = [signs @ moment.square() @ signs for signs, moment in zip((x, y), moments, strict=True)]
    value = float(sum(own) - 2 * (x @ coupling.square() @ y))
    errors = [
        float(one.side.weights @ (part["drawn"] - 1).abs())
        for one, part in zip(maps, sums[::-1], strict=True)
    ]
    summary = {
        "shape": call["shape"], "value": value - excess, "marginal_error": max(errors),
        "cells": list(small.shape), "seconds": seconds,
    }  # fmt: skip
    summary |= {key: part for key, part in told.items() if key != "call"}
    write_archive(folder / "summary.npz", summary, {})
