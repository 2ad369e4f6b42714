"""How sure the partner of each point is: solves of some of the points, from several starts."""

from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchgw._batch.engine import run
from torchgw._batch.packing import Packed, pack
from torchgw._batch.worth import Ended, Rules
from torchgw._boundary.arrays import as_labels, make_generator
from torchgw._errors import UnsupportedError
from torchgw._plans.transport import TransportPlan
from torchgw._problem.limits import limits_of
from torchgw._results.mapping import Extension
from torchgw._sinkhorn.blocks import RestrictedBackend
from torchgw._starts.alternatives import Alternative
from torchgw._starts.chain import GUESS_EPSILON
from torchgw._tensors.operations import TINY
from torchgw._typing import Array, Seed

# Share of the points of a resample, and how many they are at most. [L1405]
_SHARE, _MOST = 0.9, 128
# Noise beyond what the answer leaves, which was chosen to leave little. [L1405]
_MORE = 2.0
# Optima beside the answer that a resample begins at, at most. [L1405]
_OTHERS = 3
# When their solves end: what counts is which partner a point has. [L1405]
_RULES = Rules(max_iter=60, tol=1e-3, objective_tol=1e-3)


@dataclass(frozen=True, eq=False)
class Confidence:
    """How sure the partner of each point of X is; made by :meth:`GWResult.confidence`.

    Attributes
    ----------
    partner : Tensor or ndarray, shape (n,), float64
        Share of the resamples that keep the partner of each point, in [0, 1].
    group : Tensor or ndarray, shape (n,), float64
        Share that keep the partner or its group: at least ``partner``.
    groups : Tensor or ndarray, shape (m,), int64
        The group of each point of Y: the labels given, in sorted order; or points whose distances
        to all others are the same, which distances do not tell apart, looked for among up to 5,000.
    n_resamples : int
        Resamples that were solved.
    random_state : int
        Seed that reproduces them.
    """

    partner: Array
    group: Array
    groups: Array
    n_resamples: int
    random_state: int

    def __repr__(self) -> str:
        """Summarise in a line."""
        shared = len(self.groups) - len(set(self.groups.tolist()))
        return (
            f"Confidence({len(self.partner)} points, mean {float(self.partner.mean()):.2f}, by "
            f"{'groups' if shared else 'points'} {float(self.group.mean()):.2f}, "
            f"{self.n_resamples} resamples)"
        )


class _Problem(NamedTuple):
    """What is resampled."""

    tables: tuple[Any, Any]  # columns of distances of both sides
    weights: tuple[Tensor, Tensor]
    alpha: float
    linear: Tensor | None  # (n, m)
    epsilon: float  # NaN for a share of the natural scale


def confidence(
    extension: Extension,
    plan: TransportPlan,
    epsilon: float,
    alternatives: tuple[Alternative, ...],
    *,
    n_resamples: int,
    groups: Any,
    time_limit: float | None,
    random_state: Seed | None,
) -> Confidence:
    """Solve resamples of a problem, and count those that keep the partner of each point."""
    problem = _read(extension, plan, epsilon)
    device = plan.device
    generator, seed = make_generator(random_state, torch.device("cpu"))
    m = plan.shape[1]
    if groups is None:
        label = _alike(problem)
    else:
        places = np.unique(as_labels("groups", groups, m, "point of Y"), return_inverse=True)[1]
        label = torch.from_numpy(places).to(device)
    partners = plan.argmax(axis=1).to(device)
    kept = torch.zeros(2, plan.shape[0], dtype=torch.float64, device=device)
    end, done = None if time_limit is None else monotonic() + time_limit, 0
    while done < n_resamples and (done == 0 or end is None or monotonic() < end):
        # some side by side, between looks at the clock
        count = min(5, n_resamples - done)
        for resample, there in _solved(problem, plan, partners, alternatives, count, generator):
            same = _nearest(problem, resample[1])[partners] == there
            kept[0] += same
            kept[1] += same | (label[there] == label[partners])
        done += count
    return Confidence(kept[0] / done, kept[1] / done, label, done, seed)


def _nearest(problem: _Problem, drawn: Tensor) -> Tensor:
    """Find the drawn point that each point of Y is most like, itself if it was drawn, (m,)."""
    table = problem.tables[1](drawn)
    # by distances to those drawn, as entries of other tables do not say who is near
    apart = torch.cdist(table, table[drawn])
    apart[drawn, torch.arange(len(drawn), device=drawn.device)] = -1.0
    return drawn[apart.argmin(1)]


def why_not(extension: Extension, plan: TransportPlan) -> str:
    """Say why resamples cannot be of the problem of a result; empty where they can."""
    known, told = extension.known, extension.restricted or extension.pairs is not None
    # many points are told groups, or pairs that are allowed, without a table
    told = told or isinstance(plan.backend, RestrictedBackend)
    for odd, what in (
        (not known.loss.is_square, f"loss={known.loss.name!r}"),
        (known.own is not None or extension.mass != 1.0, "relaxed marginals"),
        (told, "pairs that are known or allowed"),
        (known.alpha == 0, "alpha=0"),
    ):
        if odd:
            return (
                f"Confidence is of balanced problems of the square loss; this one has {what}. "
                "Compare `result.alternatives`, or solve parts of the data."
            )
    if any(known.distances(side).directed for side in (0, 1)):
        return "Confidence is of symmetric distances. Symmetrise the tables."
    return ""


def _read(extension: Extension, plan: TransportPlan, epsilon: float) -> _Problem:
    """Read the problem of a result; refuse what resamples cannot be of."""
    if why := why_not(extension, plan):
        raise UnsupportedError(why)
    known = extension.known
    sides = known.distances(0), known.distances(1)
    cost = extension.linear_cost() if known.alpha < 1 else None
    device, double = plan.device, torch.float64
    first, second = (
        lambda some, side=side: side.columns(some.to(side.device)).to(device, double)
        for side in sides
    )
    return _Problem(
        (first, second), (plan.weights.a.to(device, double), plan.weights.b.to(device, double)),
        float(known.alpha), None if cost is None else cost.dense().matrix.to(device, double),
        epsilon if epsilon > 0 else float("nan"),
    )  # fmt: skip


def _alike(problem: _Problem) -> Tensor:
    """Give points of Y numbers by their distances to all others and their linear costs, (m,)."""
    every = torch.arange(len(problem.weights[1]), device=problem.weights[1].device)
    if len(every) ** 2 > limits_of(every.device).read:
        return every
    table = problem.tables[1](every).sort(1).values
    parts = [table] if problem.linear is None else [table, problem.linear.T]
    # distances that differ by less than this share of the largest are the same
    rounded = [(part / (7.3e-7 * part.abs().max().clamp_min(TINY))).round() for part in parts]
    return torch.cat(rounded, 1).unique(dim=0, return_inverse=True)[1]


def _drawn(
    partners: Tensor, shape: tuple[int, int], sizes: list[int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw points of X, and their partners with others of Y beside them if these are too few."""
    # drawn apart, most points would miss their partners, and others take their places
    orders = [
        torch.randperm(k, generator=generator, device="cpu").to(partners.device) for k in shape
    ]
    source = orders[0][: sizes[0]].sort().values
    rank = orders[1] + shape[1]
    chosen = partners[source]
    rank[chosen] = orders[1][chosen]
    return source, rank.argsort()[: sizes[1]].sort().values


def _perturbed(
    problem: _Problem, partners: Tensor, some: tuple[Tensor, Tensor], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Read the distances of some points, (n, s) and (m, t), those of X as they could be as well."""
    # They are the distances of the partners, off by what those of other points are off by.
    first, second = problem.tables
    order = torch.randperm(len(partners), generator=generator, device="cpu").to(partners.device)
    source = order[some[0]]
    off = first(source) - second(partners[source])[partners]
    x = second(partners[some[0]])[partners] + _MORE * off[order]
    return x.clamp_min(0), second(some[1])


def _solved(
    problem: _Problem,
    plan: TransportPlan,
    partners: Tensor,
    alternatives: tuple[Alternative, ...],
    count: int,
    generator: torch.Generator,
) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Solve some resamples: their points, and the partner (n,) of each point of X by each."""
    device, others = plan.device, alternatives[1 : 1 + _OTHERS]
    sizes = [max(min(2, size), min(round(_SHARE * size), _MOST)) for size in plan.shape]
    drawn: list[tuple[Tensor, Tensor]] = []
    stacks, blocks, begun = [], [], []
    for _ in range(count):
        some = _drawn(partners, plan.shape, sizes, generator)
        drawn.append(some)
        x, y = _perturbed(problem, partners, some, generator)
        blocks.append((x, y))
        guesses = [-4 * x[some[0]] @ plan.rows(some[0]).to(x)[:, some[1]] @ y[some[1]]]
        for each in others:
            source, target = (
                torch.as_tensor(part, device=device) for part in (each.source, each.target)
            )
            mass = torch.as_tensor(each.plan, device=device).to(x)
            guesses.append(-4 * x[source].T @ mass @ y[target])
        begun.append(torch.stack([torch.zeros_like(guesses[0]), *guesses]))
    for side in (0, 1):
        tables = [both[side][some[side]] for both, some in zip(blocks, drawn, strict=True)]
        masses = [problem.weights[side][some[side]] for some in drawn]
        stacks.append(pack(tables, [mass / mass.sum() for mass in masses]))
    starts = 2 + len(others)
    which = torch.arange(count, device=device).repeat_interleave(starts)
    kind = torch.arange(starts, device=device).repeat(count)
    wide = (stacks[0].tables.shape[1], stacks[1].tables.shape[1])
    beyond = (0, wide[1] - sizes[1], 0, wide[0] - sizes[0])
    costs = torch.cat(begun)
    # constants of rows and columns move no plan
    costs = costs - costs.mean(2, keepdim=True)
    costs = pad(costs - costs.mean(1, keepdim=True), beyond)
    linear = None
    if problem.linear is not None:
        M = torch.stack([problem.linear[some[0]][:, some[1]] for some in drawn])
        tables_of_m = pad(M, beyond)
        linear = lambda entries: tables_of_m[which[entries]]  # noqa: E731
    full = torch.ones(len(which), dtype=torch.float64, device=device)
    packed = Packed(
        stacks[0], stacks[1], which, which, problem.alpha * full, problem.epsilon * full,
        torch.where(kind == 0, 1.0, GUESS_EPSILON).double(), linear,
        lambda entries: (costs[entries], kind[entries] > 0),
    )  # fmt: skip
    plans = torch.zeros(len(which), *wide, dtype=torch.float64, device=device)
    prices = torch.zeros(len(which), wide[1], dtype=torch.float64, device=device)

    def keep(ended: Ended) -> None:
        plans[ended.number], prices[ended.number] = ended.plan.to(plans), ended.g.to(prices)

    solved = run(packed, _RULES, keep)
    lowest = solved.objective.nan_to_num(nan=torch.inf).view(count, starts).argmin(1)
    answers = []
    for number, (some, (x, y)) in enumerate(zip(drawn, blocks, strict=True)):
        entry = number * starts + int(lowest[number])
        P, g = plans[entry, : sizes[0], : sizes[1]], prices[entry, : sizes[1]]
        # the row of any point by a half-step, as new points are mapped
        cost = -4 * problem.alpha * (x @ (P @ y[some[1]]))
        if problem.linear is not None:
            cost = cost + (1 - problem.alpha) * problem.linear[:, some[1]]
        b = problem.weights[1][some[1]]
        worth = g - cost + float(solved.epsilon[entry]) * (b / b.sum()).log()
        answers.append((some, some[1][worth.argmax(1)]))
    return answers
