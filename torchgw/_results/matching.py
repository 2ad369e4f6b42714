"""Matchings: a plan rounded to pairs of points, and the value of these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import scipy
import torch
from torch import Tensor

from torchgw._boundary.arrays import to_numpy
from torchgw._boundary.checks import check_choice, check_flag
from torchgw._boundary.graphs import names_of
from torchgw._errors import InvalidInputError
from torchgw._plans.contract import Plan
from torchgw._plans.given import StoredPlan
from torchgw._plans.paired import PairedPlan
from torchgw._problem.limits import limits_of
from torchgw._problem.losses import LOSSES, Loss
from torchgw._problem.problem import stored_matrix
from torchgw._problem.signatures import edges_of
from torchgw._results.mapping import Extension
from torchgw._results.modes import embeddings
from torchgw._results.rounding import Assignment, assign, improve, places
from torchgw._search.beliefs import MATCHING_TRIES, kept_share, rematch_regions
from torchgw._sinkhorn.blocks import RestrictedBackend
from torchgw._sinkhorn.problem import Cost
from torchgw._starts.graphs import Edges, graphs_of
from torchgw._tensors.deadline import is_over
from torchgw._tensors.machine import fits
from torchgw._tensors.operations import EQUAL, plainly
from torchgw._typing import Marginals
from torchgw.distances.base import BLOCK_ENTRIES, DistanceProvider
from torchgw.distances.points import Space

if TYPE_CHECKING:
    from pandas import DataFrame

MatchingKind = Literal["one_to_one", "many_to_one"]
# Rows that a value is estimated from where distances are costly. [L327]
_SAMPLED_ROWS = 256


@dataclass(frozen=True, repr=False, eq=False)
class Matching:
    """Pairs of points, as :meth:`torchgw.GWResult.matching` makes them.

    Attributes
    ----------
    source, target : Tensor or ndarray, shape (p,), int64
        The pairs, in the order of the side that every point of which is matched; on the device of
        the plan. NumPy's if the solve was given no tensor.
    weights : Tensor or ndarray, shape (p,), float64
        Weight of each pair: that of its point on that side.
    value : float
        The objective of the plan that moves these weights between the pairs, in the units and the
        loss of ``result.value``: alpha sum_pq w_p w_q loss(D_X, D_Y) + (1 - alpha) sum_p w_p M.
    value_standard_error : float
        Zero, unless columns of distances are costly: then the value is estimated from 256 rows.
    edges_kept : int or None
        Edges of one graph whose ends are matched to the ends of an edge of the other; ``None``
        unless both sides were given as graphs. A matrix given is one if at most half of its entries
        off the diagonal are not zero.
    edges : tuple of int, or None
        Edges of the source and of the target.
    complete : bool
        False if ``time_limit`` ended the search for better pairs.
    """

    source: Any
    target: Any
    weights: Any
    value: float
    value_standard_error: float
    edges_kept: int | None
    edges: tuple[int, int] | None
    complete: bool = True

    def __len__(self) -> int:
        """Count the pairs."""
        return len(self.source)

    @property
    def pairs(self) -> Any:
        """The pairs as a table (p, 2), which :func:`torchgw.solve` takes as ``init``."""
        stack = torch.stack if isinstance(self.source, Tensor) else np.stack
        return stack([self.source, self.target], 1)

    def as_dict(self, X: Any = None, Y: Any = None) -> dict[Any, Any]:
        """Map source points to targets, by names if the sides that have them are given.

        Parameters
        ----------
        X, Y : graph, DataFrame, AnnData or list of names, optional
            What was matched: nodes of NetworkX and igraph, an index, ``obs_names``, or names in the
            order of the points. Numbers of points without.

        Returns
        -------
        dict
            From source to target.

        Raises
        ------
        InvalidInputError, InvalidTypeError
            If something has no names, or too few; or where a source has several targets, as in a
            matching many to one from the smaller side: :meth:`as_frame` has all pairs.

        Examples
        --------
        >>> import networkx, torchgw
        >>> graph = networkx.relabel_nodes(networkx.path_graph(4), dict(enumerate("abcd")))
        >>> graph.add_edge("b", "e")
        >>> copy = networkx.relabel_nodes(graph, str.upper)
        >>> torchgw.solve(graph, copy, random_state=0).matching().as_dict(graph, copy)["b"]
        'B'
        """
        source, target = self._named(X, Y)
        if len(set(source)) < len(source):
            raise InvalidInputError(
                "A source has several targets, or two sources have one name, so that a dictionary "
                "would lose pairs. Use `as_frame`."
            )
        return dict(zip(source, target, strict=True))

    def as_frame(self, X: Any = None, Y: Any = None) -> DataFrame:
        """List the pairs as a table with columns source, target and weight; see :meth:`as_dict`."""
        from pandas import DataFrame

        source, target = self._named(X, Y)
        return DataFrame({"source": source, "target": target, "weight": to_numpy(self.weights)})

    def _named(self, *sides: Any) -> list[list[Any]]:
        """List the points of both columns of the pairs, by name where a side is given."""
        listed = []
        for label, given, column in zip("XY", sides, (self.source, self.target), strict=True):
            numbers = to_numpy(column).tolist()
            if given is not None:
                names = names_of(label, given, max(numbers, default=-1) + 1)
                numbers = [names[number] for number in numbers]
            listed.append(numbers)
        return listed

    def __repr__(self) -> str:
        """Summarise in a line."""
        error = f" +- {self.value_standard_error:.2g}" if self.value_standard_error else ""
        text = f"Matching({len(self):,} pairs, value={self.value:.6g}{error}"
        if self.edges is not None:
            text += f", edges_kept={self.edges_kept:,} of {self.edges[0]:,} and {self.edges[1]:,}"
        return text + ")"


class _Side(NamedTuple):
    """One side of a problem that points are matched in."""

    distances: DistanceProvider
    space: Space


class _Task(NamedTuple):
    """What is matched; the side whose points all get a partner lies along the rows."""

    plan: Plan  # (k, l)
    near: _Side
    far: _Side
    masses: Marginals  # of rows and columns
    loss: Loss  # of a near and a far distance
    alpha: float
    linear: Cost | None  # (k, l)
    mass: float  # mass that a partial plan moves; 1 for other problems
    support: Tensor | None  # (k, l) bool, the pairs that may be matched; None: all


def match(
    plan: Plan, masses: Marginals, extension: Extension, kind: MatchingKind, improved: bool
) -> Matching:
    """Round a plan of given marginals to a matching; see :meth:`torchgw.GWResult.matching`."""
    check_choice("kind", kind, get_args(MatchingKind))
    check_flag("improve", improved)
    n, m = plan.shape
    turned = n > m if kind == "one_to_one" else n < m
    with plainly(plan.device):
        task = _task(plan, masses, extension, turned)
        capacity = torch.ones(task.plan.shape[1], dtype=torch.int64, device="cpu")
        if kind == "many_to_one":
            # the places of a column: its weight times the number of rows, rounded up, but for
            # rounding errors
            share = task.masses.b / task.masses.b.sum() * task.plan.shape[0]
            capacity = (share * (1 - EQUAL)).ceil().long().cpu()
        partners = assign(task.plan, capacity, task.support)
        rows = _kept(task, partners)
        weights = _weights(task, rows)
        whole = plan.inner if isinstance(plan, PairedPlan) else plan
        if isinstance(getattr(whole, "backend", None), RestrictedBackend):
            # pairs that may be matched are known without a table: exchanges would ask for every one
            _check_used(task, rows, partners, turned)
        elif improved and not is_over():
            partners = _by_modes(task, rows, weights, partners, capacity)
            plain = _is_plain(task, weights, capacity) and not is_over()
            of_given = _by_given(task, rows, partners) if plain else None
            sides = task.near.distances, task.far.distances
            graphs = graphs_of(sides) if plain and of_given is None else None
            if of_given is not None:
                partners = of_given
            elif graphs is not None and not is_over():
                partners[rows] = _by_edges(graphs, rows, partners[rows], plan.device)
            small = graphs is None or len(rows) <= limits_of(plan.device).matched_points
            if small and of_given is None and _small(task) and not is_over():
                partners[rows] = _improved(task, rows, weights, partners[rows], capacity)
        if task.support is not None:
            _check_allowed(task.support, rows, partners[rows], turned)
        complete = not (improved and is_over())
        return replace(_judge(task, rows, partners[rows], weights, turned), complete=complete)


def _task(plan: Plan, masses: Marginals, extension: Extension, turned: bool) -> _Task:
    """Collect what a result knows; the side of which every point gets a partner comes first."""
    known, linear = extension.known, extension.linear_cost()
    support = extension.allowed()
    near, far = (_Side(known.distances(side), extension.spaces[side]) for side in (0, 1))
    loss = LOSSES[known.loss.name]
    if turned:
        cross = None if loss.cross is None else loss.cross[::-1]
        loss = replace(loss, own=loss.own[::-1], cross=cross)
        plan, near, far, masses = plan.T, far, near, Marginals(*masses[::-1])
        linear = None if linear is None else linear.transpose()
        support = None if support is None else support.T
    return _Task(plan, near, far, masses, loss, known.alpha, linear, extension.mass, support)


def _check_allowed(support: Tensor, rows: Tensor, partners: Tensor, turned: bool) -> None:
    """Refuse a matching whose points have no partners of their own among those allowed."""
    inside = support.cpu()[rows, partners]
    if not bool(inside.all()):
        alone = rows[~inside].tolist()[:8]
        raise InvalidInputError(
            f"No matching of this kind keeps to the pairs that are allowed: points {alone} of "
            f"{'YX'[not turned]} are left without a partner. Pass kind='many_to_one', or take "
            "`lazy_plan.argmax()`."
        )


def _check_used(task: _Task, rows: Tensor, partners: Tensor, turned: bool) -> None:
    """Refuse a matching of pairs that hold no mass, as those that are not allowed do."""
    alone = rows[_entries(task, partners)[rows] == 0].tolist()
    if alone:
        raise InvalidInputError(
            f"The plan has no matching of this kind: points {alone[:8]} of {'YX'[not turned]} "
            f"({len(alone)} in all) are left with partners that hold none of their mass. Pass "
            "kind='many_to_one', lower `epsilon`, or take `lazy_plan.argmax()`."
        )


def _entries(task: _Task, partners: Tensor) -> Tensor:
    """Read the entries of the plan between rows and their partners, (k,)."""
    k = len(partners)
    entries = task.masses.a.cpu().clone()
    height = max(1, BLOCK_ENTRIES // task.plan.shape[1])
    for rows in torch.arange(k, device="cpu").split(height):
        block = task.plan.rows(rows.to(task.plan.device)).cpu()
        entries[rows] = block.gather(1, partners[rows, None])[:, 0].double()
    return entries


def _kept(task: _Task, partners: Tensor) -> Tensor:
    """Choose the rows that are matched: all, or the share of them that a partial plan moves."""
    k = len(partners)
    if task.mass >= 1:
        return torch.arange(k, device="cpu")
    count = max(1, round(task.mass * k))
    return _entries(task, partners).argsort(descending=True, stable=True)[:count].sort().values


def _weights(task: _Task, rows: Tensor) -> Tensor:
    """Weigh the rows that are matched; the weights sum to the mass of the plan."""
    mass = task.masses.a.double()
    kept = mass[rows.to(mass.device)]
    return kept * (mass.sum() / kept.sum())


def _by_modes(
    task: _Task, rows: Tensor, weights: Tensor, partners: Tensor, capacity: Tensor
) -> Tensor:
    """Match vertices near where modes of vibration place them, on surfaces, if that costs less."""
    spaces, (k, l), device = (task.near.space, task.far.space), task.plan.shape, task.plan.device
    plain = task.linear is None and task.support is None and task.mass >= 1
    if not plain or spaces[0].faces is None or not fits(16 * k * l, device):
        return partners
    found = embeddings(task.plan, spaces, partners.to(device))
    if found is None:
        return partners
    squares = task.far.distances.columns(found[2]).T.double().square()
    moved = assign(StoredPlan(1 - squares / squares.max()), capacity, few=True)
    sides = (each[rows].to(device) for each in (partners, moved))
    before, after = (_quadratic(task, rows.to(device), each, weights)[0] for each in sides)
    return moved if after < before else partners


def _is_plain(task: _Task, weights: Tensor, capacity: Tensor) -> bool:
    """Tell whether pairs weigh the same, and nothing but the tables has a say."""
    plain = task.linear is None and task.support is None and task.loss.is_square
    equal = (weights - weights.mean()).abs().max() <= EQUAL * weights.mean()
    return plain and bool(equal) and bool((capacity == 1).all())


def _by_given(task: _Task, rows: Tensor, partners: Tensor) -> Tensor | None:
    """Match two graphs that were given by their edges; ``None`` where paths tell more."""
    near, far = task.near.space.given_graph, task.far.space.given_graph
    if near is None or far is None:
        return None
    edges, device = (Edges.given(near), Edges.given(far)), task.plan.device
    if not all(len(side.keys) for side in edges):
        return None
    # landmarks tell less of large graphs than edges do, and paths less of those whose edges are
    # kept, or of a part
    least, small = limits_of(device).kept_edges, _small(task)
    if small and edges[0].n == edges[1].n and kept_share(*edges, partners) < least:
        return None
    found = partners.clone()
    found[rows] = _by_edges(edges, rows, partners[rows], device)
    return None if small and kept_share(*edges, found) < least else found


def _by_edges(
    graphs: tuple[Edges, Edges], rows: Tensor, partners: Tensor, device: torch.device
) -> Tensor:
    """Improve partners of some rows of two graphs."""
    near, far = graphs
    chosen = rows.cpu().numpy()
    near = near if len(chosen) == near.n else near.among(chosen)
    found = rematch_regions(near, far, partners.cpu().numpy(), MATCHING_TRIES, device, anew=True)
    return torch.from_numpy(found).to(partners.device)


def _small(task: _Task) -> bool:
    """Tell whether tables of the problem fit."""
    k, l = task.plan.shape
    limits = limits_of(task.plan.device)
    cheap = task.near.distances.cheap_columns and task.far.distances.cheap_columns
    products = task.loss.cross is not None or k * l * min(k, l) <= limits.improved_triples
    return cheap and products and max(k, l) <= limits.cubed_points


def _improved(
    task: _Task, rows: Tensor, weights: Tensor, partners: Tensor, capacity: Tensor
) -> Tensor:
    """Improve a matching of some rows on its own objective."""
    device = task.plan.device
    rows = rows.to(device)
    near, far = (
        torch.stack([stored_matrix(one).double() for one in side.distances.relations()])
        for side in (task.near, task.far)
    )
    linear = None
    if task.linear is not None:
        linear = (1 - task.alpha) * task.linear.rows(rows).dense().matrix.double()
    if task.support is not None:
        linear = _with_price(task, rows, weights, near, far, linear)
    problem = Assignment(
        near[:, rows][..., rows], far, weights, linear, task.alpha, task.loss, places(capacity)
    )  # fmt: skip
    plan = task.plan.stored().double()[rows]
    share = weights / plan.sum(1).clamp_min(torch.finfo(plan.dtype).tiny)
    return improve(problem, plan * share[:, None], partners.to(device)).cpu()


def _with_price(
    task: _Task, rows: Tensor, weights: Tensor, near: Tensor, far: Tensor, linear: Tensor | None
) -> Tensor:
    """Let pairs that are not allowed cost so much that any allowed matching costs less."""
    assert task.support is not None
    support = task.support[rows]
    if linear is None:
        linear = torch.zeros(support.shape, dtype=near.dtype, device=near.device)
    # losses are largest where one distance is and the other is not
    ends = (torch.stack(table.aminmax()) for table in (near, far))
    losses = task.loss(*torch.meshgrid(*ends, indexing="ij"))
    largest = float(losses[losses.isfinite()].abs().max())
    spent = task.alpha * largest * float(weights.sum()) + float(linear.abs().max())
    least = float(weights[weights > 0].min() / weights.sum())
    return linear.masked_fill(~support, 4 * (spent / least + 1e-12))


def _judge(task: _Task, rows: Tensor, partners: Tensor, weights: Tensor, turned: bool) -> Matching:
    """Compute the value of a matching, and how many edges it keeps."""
    device = task.plan.device
    rows, partners = rows.to(device), partners.to(device)
    quadratic, error = _quadratic(task, rows, partners, weights)
    value = task.alpha * quadratic
    if task.linear is not None:
        value += (1 - task.alpha) * float(weights @ task.linear.at(rows, partners).to(weights))
    near, far = _graph(task.near), _graph(task.far)
    edges = kept = None
    if near is not None and far is not None:
        here, there = rows.cpu().numpy(), partners.cpu().numpy()
        matched = near[here][:, here], (far + far.T)[there][:, there]
        # of one graph, those that are matched to edges of the other
        kept = int(matched[0].astype(bool).multiply(matched[1].astype(bool)).nnz)
        edges = (far.nnz, near.nnz) if turned else (near.nnz, far.nnz)
    source, target = (partners, rows) if turned else (rows, partners)
    return Matching(source, target, weights, value, task.alpha * error, kept, edges)


def _quadratic(task: _Task, rows: Tensor, partners: Tensor, weights: Tensor) -> tuple[float, float]:
    """Compute the sum of w_p w_q loss over pairs p and q, exactly or from some p; its error."""
    # all blocks together hold both directions
    sides = task.near.distances, task.far.distances
    relations = list(zip(*(side.relations() for side in sides), strict=True))
    index, cheap = torch.arange(len(rows), device=rows.device), True
    if not all(side.cheap_columns for side in sides) and len(rows) > _SAMPLED_ROWS:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.multinomial(weights.cpu(), _SAMPLED_ROWS, True, generator=generator)
        index, cheap = drawn.to(rows.device), False
    parts = []
    for block in index.split(max(1, BLOCK_ENTRIES // max(side.n for side in sides))):
        costs = [
            task.loss(
                near.columns(rows[block])[rows].double(),
                far.columns(partners[block])[partners].double(),
            )
            for near, far in relations
        ]
        parts.append(weights @ torch.stack(costs).mean(0))
    each = torch.cat(parts)
    if cheap:
        return float(each @ weights), 0.0
    total = float(weights.sum())
    return total * float(each.mean()), total * float(each.std()) / len(each) ** 0.5


def _graph(side: _Side) -> scipy.sparse.csr_array | None:
    """Find the edges of a side that was given as a graph, each once; ``None`` for other sides."""
    space = side.space
    if space.points is not None or space.metric is not None:
        return None
    if space.given_graph is not None:
        edges = space.given_graph.graph
    else:
        table = side.distances.matrix()
        edges = None if table is None else edges_of(table)
    if edges is None:
        return None
    graph = scipy.sparse.csr_array(scipy.sparse.triu(edges, 1))
    graph.eliminate_zeros()
    return graph
