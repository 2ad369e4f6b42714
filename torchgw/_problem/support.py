"""Which pairs of points may hold mass: what is known before a solve, and whether a plan fits it.

A support is a table (n, m) of bool. Known pairs, masks, groups and infinite linear costs are ways
to give one; where several are given, a pair has to be allowed by each. Marginals that no plan on a
support has are found by a maximum flow, whose minimum cut names points that outweigh all their
allowed partners (P. Hall's theorem, for weights).
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import as_labels, is_sparse, to_numpy, to_tensor
from torchgw._boundary.checks import first_of
from torchgw._errors import InvalidInputError, InvalidTypeError, UnsupportedError
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import LEAST_SHARE, MarginalRule
from torchgw._sinkhorn.blocks import Blocks, Restriction
from torchgw._sinkhorn.entries import Entries
from torchgw._tensors.operations import EQUAL
from torchgw._typing import Indices, Marginals
from torchgw.distances.base import BLOCK_ENTRIES

Mask = NDArray[np.bool_]

# Units that weights are rounded to where they are not all equal: SciPy's flows are of 32-bit
# integers. A choice. [L1372]
_UNITS = 2**29
# Rows from which violating sets are looked for. A choice. [L1372]
_SEEDS = 64
# Entries of each row and column among which a flow is looked for first, of those that are listed.
# [L1459]
_FEW = 32


class Known(NamedTuple):
    """What is known of a match, as the user gave it."""

    allowed: Any = None  # table (n, m), sparse matrix, candidates of each row, or a function
    groups: Any = None  # labels of both sides, and perhaps the pairs of them that may mix
    pairs: Any = None  # (k, 2), or (k, 3) with a confidence

    @property
    def given(self) -> list[str]:
        """Names of what was given."""
        return [name for name, value in self._asdict().items() if value is not None]


def check_known_pairs(known: Known, *, infinite: bool, distributed: bool) -> None:
    """Refuse what works on no support, before any work."""
    names = [f"`{name}`" for name in known.given] + ["infinite entries of `M`"] * infinite
    if names and distributed:
        raise UnsupportedError(
            f"{' and '.join(names)} say which pairs may hold mass, and the processes of a "
            "distributed solve do not share that yet. Pass distributed=False."
        )


def without_infinite(table: Any) -> tuple[Any, Tensor | None]:
    """Replace infinite entries of M, which are forbidden, by zero; say which ones are allowed."""
    tensor = to_tensor("M", table)
    forbidden = tensor == math.inf
    if not tensor.dtype.is_floating_point or not bool(forbidden.any()):
        return table, None
    return tensor.masked_fill(forbidden, 0.0), ~forbidden


def read_support(
    known: Known,
    finite: Tensor | None,
    pairs: Indices | None,
    shape: tuple[int, int],
    device: torch.device,
) -> Tensor | None:
    """Make the support (n, m), bool, of all that is known; ``None`` if nothing is."""
    # `finite` are the finite entries of M, if there are infinite ones, and `pairs` known pairs that
    # are no problem of their own.
    if finite is None and pairs is None and known.allowed is None and known.groups is None:
        return None
    if not limits_of(device).stores(*shape):
        raise UnsupportedError(
            f"`{(known.given or ['M'])[0]}` would store {shape[0]} x {shape[1]} entries that say "
            "which pairs may hold mass, which is too many. Give `allowed` or `groups`, which are "
            "listed for solves without derivatives, or take fewer points."
        )
    mask: Mask = np.ones(shape, dtype=bool)
    if known.allowed is not None:
        allowed = _allowed(known.allowed, shape)
        mask &= allowed(slice(None)) if callable(allowed) else allowed.toarray()
    if known.groups is not None:
        x, y, mix = _read_groups(known.groups, shape)
        mask &= mix[x[:, None], y]
    support = torch.from_numpy(mask).to(device)
    if finite is not None:
        if tuple(finite.shape) != shape:
            raise InvalidInputError(
                f"`M` must have shape {shape}, one entry per pair of a row of X and a row of Y; "
                f"got {tuple(finite.shape)}."
            )
        support &= finite.to(device)
    return support if pairs is None else of_pairs(support, pairs, shape)


def _allowed(
    value: Any, shape: tuple[int, int]
) -> scipy.sparse.csr_array | Callable[[slice], Mask]:
    """Read a sparse matrix or a list of candidates; a table or a function row by row."""
    n, m = shape
    if is_sparse(value):
        listed = scipy.sparse.csr_array(value).astype(bool)
        listed.eliminate_zeros()
        _check_table(listed, shape)
        return listed
    if isinstance(value, (list, tuple)):
        return _candidates(value, shape)
    if not callable(value):
        table = to_numpy(value) if isinstance(value, Tensor) else np.asarray(value)
        _check_table(table, shape)
        return lambda rows: table[rows]
    try:
        inspect.signature(value).bind(0, 0)
    except TypeError as error:
        raise InvalidTypeError(
            f"`allowed` as a function must take two arrays of indices, of rows and of columns: "
            f"{error}."
        ) from error

    def read(rows: slice) -> Mask:
        every, columns = np.arange(n)[rows], np.arange(m)[None, :]
        height = max(1, BLOCK_ENTRIES // m)
        blocks = [every[first : first + height, None] for first in range(0, len(every), height)]
        found = [np.asarray(value(block, columns)) for block in blocks]
        whole = []
        for one, block in zip(found, blocks, strict=True):
            with contextlib.suppress(ValueError):
                one = np.broadcast_to(one, (len(block), m))
            _check_table(one, (len(block), m))
            whole.append(one)
        return np.concatenate(whole)

    return read


def _check_table(table: Any, shape: tuple[int, int]) -> None:
    if table.dtype != bool or table.shape != shape:
        raise InvalidInputError(
            f"`allowed` must be a table of bool of shape {shape}, True where a pair may hold mass, "
            "a SciPy sparse matrix, a list of the allowed columns of each row, or a function of "
            f"indices; got {table.dtype} of shape {table.shape}."
        )


def _candidates(rows: Sequence[Any], shape: tuple[int, int]) -> scipy.sparse.csr_array:
    n, m = shape
    if len(rows) != n:
        raise InvalidInputError(
            f"`allowed` as a list must have the allowed columns of each of {n} rows; got "
            f"{len(rows)} items."
        )
    listed = [np.asarray(columns).ravel() for columns in rows]
    for row, index in enumerate(listed):
        if index.size and index.dtype.kind not in "iu":
            raise InvalidInputError(
                f"`allowed[{row}]` must list columns, integers; got {index.dtype}. A table of bool "
                "is passed as an array: np.array(allowed)."
            )
        _check_index(f"allowed[{row}]", index, m)
    start = np.cumsum([0, *map(len, listed)])
    column = np.concatenate([index.astype(np.int64) for index in listed])
    found = scipy.sparse.csr_array((np.ones(len(column), bool), column, start), shape=shape)
    # a column that is listed twice
    found.sum_duplicates()
    return found


def _check_index(name: str, index: NDArray[Any], size: int) -> None:
    if index.size and not 0 <= index.min() <= index.max() < size:
        raise InvalidInputError(
            f"`{name}` must have indices within 0 and {size - 1}; got {index.min()} to "
            f"{index.max()}."
        )


class _Labels(NamedTuple):
    """Numbers of the labels of both sides, and which may be matched with each other."""

    source: NDArray[np.int64]  # (n,)
    target: NDArray[np.int64]  # (m,)
    mix: Mask  # (labels, labels)


def _read_groups(value: Any, shape: tuple[int, int]) -> _Labels:
    """Read pairs of points of one label, or of labels that a table lists, as allowed."""
    if not isinstance(value, (tuple, list)) or len(value) not in (2, 3):
        raise InvalidTypeError(
            "`groups` must be (labels_x, labels_y), one label for each point of X and of Y, or "
            "(labels_x, labels_y, table), a table of the pairs of labels that may be matched; got "
            f"{type(value).__name__}."
        )
    labels = [as_labels(f"groups[{side}]", value[side], size) for side, size in enumerate(shape)]
    # words and categories, as words
    labels = [item.astype(str) if item.dtype.kind == "O" else item for item in labels]
    names, numbers = np.unique(np.concatenate(labels), return_inverse=True)
    x, y = np.split(numbers.ravel(), [shape[0]])
    mix: Mask = np.eye(len(names), dtype=bool)
    if len(value) == 3 and not (isinstance(value[2], str) and value[2] == "same"):
        mix[:] = False
        place = {name: number for number, name in enumerate(names.tolist())}
        for pair in value[2]:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise InvalidTypeError(
                    "`groups[2]` must list pairs (label of X, label of Y) that may be matched; got "
                    f"{pair!r}."
                )
            # a label that no point has forbids and allows nothing
            here, there = (place.get(label, place.get(str(label))) for label in pair)
            if here is not None and there is not None:
                mix[here, there] = True
    return _Labels(x, y, mix)


def read_restriction(
    known: Known, marginals: Marginals, rule: MarginalRule | None, device: torch.device
) -> Restriction | None:
    """Read what is known of so many points that no table of it is made; ``None`` if nothing is."""
    # That are groups that do not mix, or a list of all pairs of points that may hold mass.
    n, m = len(marginals.a), len(marginals.b)
    if (known.groups is None and known.allowed is None) or limits_of(device).stores(n, m):
        return None
    if rule is not None:
        given = "allowed" if known.groups is None else "groups"
        raise UnsupportedError(
            f"`{given}` of {n} x {m} points, too many for a table, needs strict marginals. Leave "
            "`unbalanced` and `mass` out, solve groups one by one, or take fewer points."
        )
    labels = None if known.groups is None else _read_groups(known.groups, (n, m))
    if known.allowed is None:
        assert labels is not None
        blocks = _read_blocks(labels, marginals, device)
        if blocks is not None:
            return blocks
    allowed = None if known.allowed is None else _allowed(known.allowed, (n, m))
    listed = _list(allowed, labels, (n, m), limits_of(device).settled)
    return usable_entries(Entries.of(listed, device), marginals)


def _list(
    allowed: scipy.sparse.csr_array | Callable[[slice], Mask] | None,
    labels: _Labels | None,
    shape: tuple[int, int],
    most: float,
) -> scipy.sparse.csr_array:
    """List the entries that are allowed, reading blocks of rows of what is no list; bounded."""
    n, m = shape
    if isinstance(allowed, scipy.sparse.csr_array):
        allowed.sort_indices()
        start, column = allowed.indptr, allowed.indices
        if labels is not None:
            row = np.repeat(np.arange(n), np.diff(start))
            inside = labels.mix[labels.source[row], labels.target[column]]
            start = np.concatenate([[0], np.cumsum(inside)])[start]
            column = column[inside]
        parts, count = [column], len(column)
    else:
        start, parts, count = np.zeros(n + 1, dtype=np.int64), [], 0
        height = max(1, BLOCK_ENTRIES // m)
        for first in range(0, n, height):
            rows = slice(first, min(first + height, n))
            mask = np.ones((rows.stop - first, m), bool) if allowed is None else allowed(rows)
            if labels is not None:
                mask = mask & labels.mix[labels.source[rows, None], labels.target]
            start[first + 1 : rows.stop + 1] = count + mask.sum(1).cumsum()
            parts.append(mask.nonzero()[1].astype(np.int32))
            count = int(start[rows.stop])
            if count > most:
                break
    if count > most:
        raise UnsupportedError(
            f"More than {most:,.0f} of {n} x {m} pairs of points are allowed, which is too many to "
            "list. Allow fewer, or give `groups` that do not mix, which are read from their "
            "labels; or take fewer points."
        )
    column = np.concatenate(parts)
    return scipy.sparse.csr_array((np.ones(count, bool), column, start), shape=shape)


def _read_blocks(labels: _Labels, marginals: Marginals, device: torch.device) -> Blocks | None:
    """Read labels that make groups that do not mix; ``None`` if some overlap."""
    # Labels that may be matched with each other make a group, within which all pairs have to be
    # allowed, and as much weight on both sides.
    used = [np.isin(np.arange(len(labels.mix)), side) for side in labels[:2]]
    mix = labels.mix & used[0][:, None] & used[1]
    count, (i, j) = len(mix), mix.nonzero()
    graph = scipy.sparse.csr_array((np.ones(len(i)), (i, j + count)), shape=(2 * count, 2 * count))
    number = scipy.sparse.csgraph.connected_components(graph, directed=False)[1]
    same = number[:count, None] == number[count:]
    if bool((same & used[0][:, None] & used[1] & ~mix).any()):
        return None
    blocks = Blocks(
        *(
            torch.from_numpy(part[side]).to(device, torch.int64)
            for part, side in zip((number[:count], number[count:]), labels[:2], strict=True)
        )
    )
    masses = [
        torch.bincount(side, weight.double(), minlength=2 * count)
        for side, weight in zip(blocks, marginals, strict=True)
    ]
    gap = masses[0] - masses[1]
    if float(gap.abs().max()) > EQUAL:
        worst = int(gap.abs().argmax())
        heavy = 0 if float(gap[worst]) > 0 else 1
        point = int((blocks[heavy] == worst).nonzero()[0, 0])
        weights = [float(mass[worst]) for mass in masses]
        raise InvalidInputError(
            f"No plan has the weights `a` and `b` on what is allowed. The group of point {point} "
            f"of {'XY'[heavy]} weighs {weights[heavy]:.6g}, and that of its partners is "
            f"{weights[1 - heavy]:.6g}. At most {float(torch.minimum(*masses).sum()):.6g} of the "
            "mass can move. Give weights with which groups weigh the same on both sides."
        )
    return blocks


class KnownPairs(NamedTuple):
    """Pairs that are known, and pairs that are likely."""

    known: Indices | None
    likely: Indices | None = None
    confidence: Tensor | None = None  # (k,) float64, of likely pairs

    def weights(self, marginals: Marginals) -> Tensor:
        """Weigh likely pairs in the linear cost, (k,): at confidence one as their mass would be."""
        assert self.likely is not None
        assert self.confidence is not None
        a, b = marginals
        return 2 * self.confidence * torch.minimum(a[self.likely.source], b[self.likely.target])


def _listed(pairs: Any) -> Tensor:
    """Read rows of pairs; a dictionary has a partner for each key."""
    return to_tensor("pairs", list(pairs.items()) if isinstance(pairs, dict) else pairs)


def are_likely(value: Any) -> bool:
    """Whether `pairs` says of some that they are likely, with a confidence."""
    if value is None:
        return False
    table = _listed(value)
    return table.ndim == 2 and table.shape[1] == 3 and not bool((table[:, 2] == math.inf).all())


def read_pairs(value: Any, shape: tuple[int, int], device: torch.device) -> KnownPairs:
    """Read known pairs, integers (k, 2), or pairs with a confidence, numbers (k, 3)."""
    if value is None:
        return KnownPairs(None)
    table = _listed(value)
    if not table.numel():
        return KnownPairs(None)
    whole = table.dtype in (torch.int64, torch.int32)
    if table.ndim != 2 or table.shape[1] not in (2, 3) or not (whole or table.shape[1] == 3):
        raise InvalidInputError(
            "`pairs` must be integers of shape (k, 2), a row of X and a row of Y for each known "
            "pair, or numbers of shape (k, 3), with a confidence; got "
            f"{table.dtype} of shape {tuple(table.shape)}."
        )
    index = table[:, :2].long()
    if not whole and bool((index != table[:, :2]).any()):
        raise InvalidInputError("`pairs[:, :2]` must be whole numbers, rows of X and of Y.")
    for side, size in enumerate(shape):
        _check_index("pairs", to_numpy(index[:, side].cpu()), size)
    index = index.to(device)
    if table.shape[1] == 2:
        return KnownPairs(_known_once(index))
    confidence = table[:, 2].to(device, torch.float64)
    if not bool((confidence >= 0).all()):
        raise InvalidInputError(
            "`pairs[:, 2]`, how sure the pairs are, must not be negative or NaN; got "
            f"{float(confidence.min()):g}. inf is a known pair, 1 counts as much as its mass does."
        )
    sure = confidence == math.inf
    known = _known_once(index[sure]) if bool(sure.any()) else None
    likely = Indices(*index[~sure].T) if not bool(sure.all()) else None
    return KnownPairs(known, likely, None if likely is None else confidence[~sure])


def _known_once(index: Tensor) -> Indices:
    """Make known pairs of rows (k, 2); refuse points that are in two."""
    for side in range(2):
        points, count = index[:, side].unique(return_counts=True)
        if bool((count > 1).any()):
            raise InvalidInputError(
                f"`pairs` names row {int(points[count > 1][0])} of {'XY'[side]} twice, and a known "
                "partner is one point. Drop one of them, give several as `allowed`, or with a "
                "confidence, as numbers (k, 3)."
            )
    return Indices(*index.T)


def of_pairs(support: Tensor | None, pairs: Indices, shape: tuple[int, int]) -> Tensor:
    """Allow points of known pairs for each other alone, (n, m) bool; others as a support does."""
    mask = pairs.source.new_ones(shape).bool() if support is None else support.clone()
    inside = mask[pairs.source, pairs.target].clone()
    mask[pairs.source] = False
    mask[:, pairs.target] = False
    mask[pairs.source, pairs.target] = inside
    return mask


def usable(support: Tensor, marginals: Marginals, rule: MarginalRule | None) -> Tensor:
    """Keep the entries that some plan with these marginals has; refuse if there is no plan."""
    # Of relaxed marginals all are kept. A plan with strict ones would have mass at the others only
    # in the limit, which Sinkhorn's iterations would take for ever to come to.
    mask = to_numpy(support.cpu())
    a, b = (to_numpy(weight.cpu()) for weight in marginals)
    if rule is not None and rule.mass is None:
        for side, rho in enumerate(rule.rho):
            if math.isinf(rho):
                _check_partners(
                    mask if side == 0 else mask.T, (a, b)[side], (b, a)[side], "XY"[side]
                )
        if not mask[a > 0][:, b > 0].any():
            raise InvalidInputError(
                "No points with weight may be matched: every plan on what is allowed is zero. Pass "
                "`allowed`, `groups` or entries of `M` that leave some pairs."
            )
        return support
    flow = _Flow.of(mask, a, b)
    needed = 1.0 if rule is None or rule.mass is None else rule.mass
    if rule is not None and rule.chosen:
        # masses that do not fit are left out, if any fits
        needed = LEAST_SHARE
        rule = replace(rule, mass=needed)
    if flow.moved < needed - flow.rounding:
        raise _infeasible(flow, None if rule else _Flow.of(mask.T, b, a), a, b, rule)
    if rule is not None:
        return support
    # points without weight hold none anywhere, and may be matched as they were allowed to
    unused = (flow.rows < 0)[:, None] | (flow.columns < 0)
    return torch.from_numpy(np.where(unused, mask, flow.entries())).to(support.device)


def usable_entries(entries: Entries, marginals: Marginals) -> Entries:
    """Keep those of listed entries that some plan with these strict marginals has, as `usable`."""
    listed = entries.listed()
    a, b = (to_numpy(weight.cpu()) for weight in marginals)
    flow = _Flow.of_listed(listed, a, b)
    if flow.moved < 1 - flow.rounding:
        turned = scipy.sparse.csr_array(listed.T)
        raise _infeasible(flow, _Flow.of_listed(turned, b, a), a, b, None)
    row, column = np.repeat(np.arange(len(a)), np.diff(listed.indptr)), listed.indices
    # points without weight hold none anywhere, and may be matched as they were allowed to
    kept = np.ones(listed.nnz, dtype=bool)
    kept[(flow.rows[row] >= 0) & (flow.columns[column] >= 0)] = flow.inside()
    if kept.all():
        return entries
    start = np.concatenate([[0], np.cumsum(kept)])[listed.indptr]
    parts = kept[kept], column[kept], start
    return Entries.of(scipy.sparse.csr_array(parts, shape=listed.shape), entries.start.device)


def most_mass(support: Tensor, marginals: Marginals) -> float:
    """Compute how much mass can move on a support, up to rounding of the flow."""
    flow = _Flow.of(to_numpy(support.cpu()), *(to_numpy(weight.cpu()) for weight in marginals))
    return flow.moved + flow.rounding


def is_feasible(support: Tensor, marginals: Marginals) -> bool:
    """Tell whether some plan on a support has these marginals."""
    flow = _Flow.of(to_numpy(support.cpu()), *(to_numpy(weight.cpu()) for weight in marginals))
    return flow.moved >= 1 - flow.rounding


def _check_partners(mask: Mask, weights: Any, others: Any, side: str) -> None:
    """Refuse points of a strict marginal that no point of weight is allowed for."""
    alone = np.flatnonzero((weights > 0) & ~mask[:, others > 0].any(1))
    if len(alone):
        raise InvalidInputError(
            f"{_named(side, alone)} must keep their weight, and no partner is allowed for them. "
            "Allow some, give them weight zero, or relax that side too by `unbalanced`."
        )


class _Flow(NamedTuple):
    """A largest flow between points of weight, those with the same partners taken together."""

    table: Any  # (r, c) sparse bool, between classes
    rows: NDArray[np.int64]  # (n,) class of each row, -1 where it has no weight
    columns: NDArray[np.int64]  # (m,)
    supply: NDArray[np.int64]  # (r,) units
    demand: NDArray[np.int64]  # (c,)
    sent: Any  # (r, c) sparse, units
    units: int  # that make up the total weight
    slack: int  # units by which rounding may be off

    @classmethod
    def of(cls, mask: Mask, a: Any, b: Any) -> _Flow:
        """Find one on a table."""
        (rows, used), (columns, wanted) = (
            _classes(table, weight) for table, weight in ((mask, a), (mask.T, b))
        )
        first = [
            np.flatnonzero(part >= 0)[np.unique(part[part >= 0], return_index=True)[1]]
            for part in (rows, columns)
        ]
        table = scipy.sparse.csr_array(mask[np.ix_(*first)])
        return cls._between(table, rows, columns, _integers(a, b, rows, columns, (used, wanted)))

    @classmethod
    def of_listed(cls, listed: scipy.sparse.csr_array, a: Any, b: Any) -> _Flow:
        """Find one on listed entries, on a few of each row and column if that is enough."""
        used, wanted = a > 0, b > 0
        rows, columns = (np.where(part, part.cumsum() - 1, -1) for part in (used, wanted))
        table = listed if used.all() and wanted.all() else listed[used][:, wanted]
        numbers = _integers(a, b, rows, columns, table.shape)
        few = _few(table) + scipy.sparse.csr_array(_few(scipy.sparse.csr_array(table.T)).T)
        flow = cls._between(few, rows, columns, numbers)
        if flow.moved < 1 - flow.rounding:
            return cls._between(table, rows, columns, numbers)
        return flow._replace(table=table)

    @classmethod
    def _between(cls, table: Any, rows: Any, columns: Any, numbers: Any) -> _Flow:
        """Find one between classes by SciPy's maximum flow."""
        (supply, demand), units, slack = numbers
        r, c = table.shape
        i, j = table.nonzero()
        capacity = np.concatenate([supply, np.minimum(supply[i], demand[j]), demand])
        start = np.concatenate([np.zeros(r, int), i + 1, np.arange(c) + r + 1])
        end = np.concatenate([np.arange(r) + 1, j + r + 1, np.full(c, r + c + 1)])
        graph = scipy.sparse.csr_array(
            (capacity.astype(np.int32), (start, end)), shape=(r + c + 2, r + c + 2)
        )
        found = scipy.sparse.csgraph.maximum_flow(graph, 0, r + c + 1)
        sent = scipy.sparse.csr_array(found.flow)[1 : r + 1, r + 1 : r + c + 1].maximum(0)
        return cls(table, rows, columns, supply, demand, sent, units, slack)

    @property
    def moved(self) -> float:
        """Mass that can move, of a total of one."""
        return float(self.sent.sum()) / self.units

    @property
    def rounding(self) -> float:
        """What rounding to units may change of it."""
        return self.slack / self.units + 1e-12

    def inside(self) -> NDArray[np.bool_]:
        """Tell which entries some largest flow uses: those on cycles of what is left."""
        r, _ = self.table.shape
        graph = scipy.sparse.block_array(
            [[None, self.table], [self.sent.T > 0, None]], format="csr"
        )
        part = scipy.sparse.csgraph.connected_components(graph, connection="strong")[1]
        if part.max() == 0:
            return np.ones(self.table.nnz, dtype=bool)
        row = np.repeat(np.arange(r), np.diff(self.table.indptr))
        flown = np.asarray(self.sent[row, self.table.indices]).ravel() > 0
        same: NDArray[np.bool_] = part[row] == part[r + self.table.indices]
        return same | flown

    def entries(self) -> Mask:
        """Find the entries that some largest flow uses, (n, m)."""
        # Rows and columns without weight have no class, and say nothing.
        classes = np.zeros(self.table.shape, dtype=bool)
        classes[self.table.nonzero()] = self.inside()
        found: Mask = classes[self.rows[:, None], self.columns]
        return found

    def violating(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find rows that outweigh all columns allowed for them, and these; the fewest if easy."""
        r, _ = self.table.shape
        graph = scipy.sparse.csr_array(
            scipy.sparse.block_array([[None, self.table], [self.sent.T > 0, None]], format="csr")
        )
        left = self.supply - self.sent.sum(1)
        best: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        for row in np.argsort(-left)[:_SEEDS]:
            if left[row] <= self.slack:
                break
            order = scipy.sparse.csgraph.breadth_first_order(graph, row, return_predecessors=False)
            mine, theirs = np.sort(order[order < r]), np.sort(order[order >= r]) - r
            if best is None or len(mine) + len(theirs) < sum(map(len, best)):
                best = mine, theirs
        assert best is not None
        return (
            np.flatnonzero(np.isin(self.rows, best[0])),
            np.flatnonzero(np.isin(self.columns, best[1])),
        )


def _few(table: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """Keep some entries of each row, at equal steps."""
    count = np.diff(table.indptr)
    kept = np.minimum(count, _FEW)
    start = np.concatenate([[0], kept.cumsum()])
    step = np.arange(start[-1]) - np.repeat(start[:-1], kept)
    place = np.repeat(table.indptr[:-1], kept) + step * np.repeat(count, kept) // np.repeat(
        kept, kept
    )
    parts = np.ones(len(place), bool), table.indices[place], start
    return scipy.sparse.csr_array(parts, shape=table.shape)


def _classes(mask: Mask, weights: Any) -> tuple[NDArray[np.int64], int]:
    """Give rows of weight the number of their pattern, others -1; and count the patterns."""
    used = weights > 0
    found, numbers = np.full(len(mask), -1), dict[bytes, int]()
    packed = np.packbits(mask[used], axis=1)
    found[used] = [numbers.setdefault(row.tobytes(), len(numbers)) for row in packed]
    return found, len(numbers)


def _integers(
    a: Any, b: Any, rows: Any, columns: Any, counts: tuple[int, int]
) -> tuple[tuple[Any, Any], int, int]:
    """Write the weights of classes in whole units; also the total, and what rounding is off by."""
    used = (a > 0).sum(), (b > 0).sum()
    units = math.lcm(int(used[0]), int(used[1]))
    equal = all(
        np.allclose(weight[weight > 0], 1 / count, rtol=EQUAL, atol=0)
        for weight, count in zip((a, b), used, strict=True)
    )
    exact = equal and units <= _UNITS
    units = units if exact else _UNITS
    made = []
    for weight, number, count in zip((a, b), (rows, columns), counts, strict=True):
        mass = np.bincount(number[number >= 0], weight[number >= 0], count)
        made.append(np.rint(mass * units).astype(np.int64))
    return (made[0], made[1]), units, 0 if exact else sum(counts)


def _infeasible(
    flow: _Flow, back: _Flow | None, a: Any, b: Any, rule: MarginalRule | None
) -> InvalidInputError:
    """Say which points outweigh what is allowed for them, and what can be done."""
    # `back` is the flow of the other side of strict marginals, whose set may be smaller.
    found = [(*flow.violating(), 0)]
    if back is not None:
        found.append((*back.violating(), 1))
    mine, theirs, side = min(found, key=lambda each: len(each[0]) + len(each[1]))
    weights = (a, b) if side == 0 else (b, a)
    near, far = "XY"[side], "YX"[side]
    light = f"only {weights[1][theirs].sum():.6g}, {_named(far, theirs)}" if len(theirs) else "none"
    asked = "the weights `a` and `b`" if rule is None else f"mass={rule.mass:g}"
    # rounded down, so that it can move
    advice = f"mass={math.floor(flow.moved * 1e4) / 1e4:g}" if flow.moved > 1e-4 else "other groups"
    return InvalidInputError(
        f"No plan has {asked} on what is allowed. Of {_named(near, mine)}, the weight is "
        f"{weights[0][mine].sum():.6g}, and that of all their allowed partners is {light}. At most "
        f"{flow.moved:.6g} of the mass can move. Allow more pairs, pass {advice}, or relax the "
        "weights by `unbalanced`."
    )


def _named(side: str, points: Any) -> str:
    """Name points of a side."""
    return f"point{'s' if len(points) != 1 else ''} {first_of(points.tolist())} of {side}"
