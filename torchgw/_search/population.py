"""The best plans of searches, kicked and mixed at the target while that helps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchgw._batch.packing import products
from torchgw._problem.limits import limits_of
from torchgw._sinkhorn.annealing import START_NOISE
from torchgw._starts.alternatives import Ends
from torchgw._starts.chain import AGREEING, ALIKE, BETTER, SAME
from torchgw._tensors.deadline import is_over
from torchgw._tensors.operations import EQUAL, sums_of
from torchgw._typing import Marginals

# Plans that are kept of each group, and new ones of each round. [L1291]
_KEPT, FRESH = 8, 16
# Groups of starts that are improved apart. A choice. [L1311]
_GROUPS = 2
# Shares of the rows at which kicked plans are linearised, by turns. [L1291]
_SHARES = (0.3, 0.5, 0.7)
# Epsilon at which these begin, as a share of the natural scale. [L1291, L1525]
_BLURRED = 0.02
# Rounds that may pass without a better optimum. [L1291]
_PATIENCE = 2
# Exchanges of two rows or columns of the lowest plan at most, and how often they are made. [L1526]
_EXCHANGES, _SWEEPS = 64, 3
# The origin of plans that come from an exchange.
_EXCHANGED = -1
# The family of starts that one search has made.
_RELATED = 0


class Members(NamedTuple):
    """Plans that have been followed to their ends, C of each of B searches, the lowest first."""

    plans: Tensor  # (B, C, n, m) float64
    objectives: Tensor  # (B, C), infinite where there are fewer
    values: Tensor  # (B, C)
    origins: Tensor  # (B, C) int64, places of starts, and numbers beyond these for later plans

    def of(self, rows: Tensor) -> Members:
        """Take some searches."""
        return Members(*(part[rows] for part in self))

    def alone(self) -> Members:
        """Take those of a problem that is alone, without the rest of its columns."""
        there = self.objectives[0].isfinite()
        return Members(*(part[0, there] for part in self))

    def beside(self, other: Members) -> Members:
        """Put others beside them."""
        return Members(*(torch.cat(both, 1) for both in zip(self, other, strict=True)))

    def put(self, rows: Tensor, other: Members) -> None:
        """Replace those of some searches."""
        for mine, its in zip(self, other, strict=True):
            mine[rows] = its


class Followed(Protocol):
    """What follows plans of B problems to where they are compared."""

    def follow(self, which: Tensor, plans: Tensor, first: float = 0.0) -> Ends:
        """Follow plans (k, n, m) of problems (k,) from a ``first`` epsilon."""

    def rows(self, which: Tensor) -> Tensor:
        """Count the rows of plans that belong to points, (k,)."""


class Ending(Followed, Protocol):
    """What follows plans of a problem to their ends."""

    def padded(self, plans: Tensor) -> Tensor:
        """Pad plans (k, n, m) of a problem that is alone."""

    def follow(self, which: Tensor, plans: Tensor, first: float | Tensor = 0.0) -> Ends:
        """Follow plans (k, n, m) of problems (k,), each from a ``first`` epsilon."""

    def descend(self, which: Tensor, plans: Tensor) -> Ends:
        """Lead plans (k, n, m) of problems (k,) down until they stay."""


class Population(NamedTuple):
    """Different optima of B problems."""

    members: Members
    agreed: Tensor  # (B,) whether groups that know nothing of each other have found the lowest
    followed: Tensor  # (B,) int64, plans in all
    met: Tensor  # (B,) int64, how many of the plans that were given have led to the lowest


def improve(
    stack: Followed, starts: Ends, rounds: int, families: Sequence[int] = (), turn: int = 0
) -> Population:
    """Improve the starts (B, S) of all problems of a stack for some rounds, by the draws of a turn.

    Each is of a family, whose members know of each other: ``_RELATED`` if one search has made them.
    Every other family belongs to the same group. Each group is improved apart, so that groups which
    agree say that there is nothing better; where they do not they are put together.
    """
    family = _family(starts, families)
    teams = _Teams(stack, starts, family % _GROUPS, turn)
    for _ in range(rounds):
        if is_over() or not teams.advance():
            break
    agreed = teams.agreed | teams.agree()
    every = torch.arange(len(agreed), device=agreed.device)
    members = distinct(teams.together(every), 2 * _KEPT)
    return Population(members, agreed, teams.followed, _met(starts, members, family))


def _family(starts: Ends, families: Sequence[int]) -> Tensor:
    """Give each start (B, S) the number of its family, all different unless told, (S,)."""
    numbers = families or range(1, starts.objectives.shape[1] + 1)
    return torch.tensor(numbers, device=starts.objectives.device)


def _met(starts: Ends, members: Members, family: Tensor) -> Tensor:
    """Count the starts that have led to the lowest, (B,); those that are related count once."""
    met = _same(starts, Ends(*(part[:, :1] for part in members[:3])))
    alone = family != _RELATED
    return (met & alone).sum(1) + (met & ~alone).any(1)


def improve_again(
    stack: Followed, starts: Ends, rounds: int, families: Sequence[int] = (), enough: int = AGREEING
) -> Population:
    """Improve the starts of a problem that is alone, by other draws once more where these differ.

    What was found is sure if the groups of both turns but one have led to it.
    """
    first = improve(stack, starts, rounds, families)
    if bool(first.agreed) or int(first.met) >= enough or is_over():
        return first
    again = improve(stack, starts, rounds, families, turn=1)
    members = distinct(first.members.beside(again.members), first.members.objectives.shape[1])
    lowest = Ends(*(part[:, :1] for part in members[:3]))
    each = (Ends(*(part[:, :1] for part in one.members[:3])) for one in (first, again))
    same = torch.cat([_same(one, lowest) for one in each], 1).all(1)
    met = _met(starts, members, _family(starts, families))
    return Population(members, again.agreed & same, first.followed + again.followed, met)


def exchange(
    stack: Followed, starts: Ends, found: Population, families: Sequence[int] = ()
) -> Population:
    """Exchange two rows or two columns of the lowest plan of each problem while that helps.

    Of an optimum that is only found so, groups that had agreed on another one know nothing.
    """
    members, agreed, followed = found.members, found.agreed.clone(), found.followed.clone()
    some = torch.arange(len(agreed), device=agreed.device)
    for _ in range(_SWEEPS):
        if is_over() or not len(some):
            break
        which, plans = _exchanged(members.plans[some, 0])
        ends = stack.follow(some[which], plans, _BLURRED)
        followed[some] += torch.bincount(which, minlength=len(some))
        # the lowest of each problem, the first of equals up to rounding
        least = torch.full_like(members.objectives[some, 0], torch.inf)
        least = least.scatter_reduce(0, which, ends.objectives, "amin")[which]
        near = (ends.objectives <= least + EQUAL * least.abs()).nonzero()[:, 0]
        first = near[torch.searchsorted(which[near], torch.arange(len(some), device=some.device))]
        lower = Ends(*(part[first, None] for part in ends))
        before = Ends(*(part[some, :1] for part in members[:3]))
        better = (before.objectives - lower.objectives > BETTER * before.objectives.abs())[:, 0]
        agreed[some] &= ~better | _same(lower, before)[:, 0]
        some, lower = some[better], Ends(*(part[better] for part in lower))
        fresh = Members(*lower, torch.full_like(some, _EXCHANGED)[:, None])
        members.put(some, distinct(members.of(some).beside(fresh), members.plans.shape[1]))
    return Population(members, agreed, followed, _met(starts, members, _family(starts, families)))


class Found(NamedTuple):
    """Where starts of one problem have led, the lowest first."""

    names: list[str]
    plans: Tensor  # (k, n, m) float64
    objectives: list[float]
    values: list[float]
    certain: bool  # whether groups, or enough of the starts, have found the lowest
    followed: int  # plans in all
    met: int  # how many of the starts have led to the lowest


def noisy_product(a: Tensor, b: Tensor) -> Tensor:
    """Make the product plan (n, m) of weights, whose symmetry noise breaks."""
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(len(a), len(b), device="cpu", generator=generator, dtype=torch.float64)
    return torch.outer(a, b) * (1 + START_NOISE * noise.to(a.device))


def follow_starts(
    stack: Ending,
    starts: Sequence[tuple[str, Tensor]],
    marginals: Marginals,
    rounds: int,
    blurred: float | None = None,
    related: Sequence[str] = (),
    *,
    checked: bool = False,
) -> Found:
    """Follow named plans (n, m) of one problem, and the annealed product; improve where they lead.

    Every other one is of the same group, and so are all whose names are ``related``: those that
    know nothing of each other are to take turns.
    Each is also followed from a larger epsilon, if they are ``blurred``, at which it may come to
    another optimum; and rows and columns of the lowest are exchanged then. So they are where groups
    agree, if that is ``checked``.
    """
    a, b = marginals
    tables = [plan.double() for _, plan in starts] + [noisy_product(a, b)]
    plans, first = stack.padded(torch.stack(tables)), [*(0.0 for _ in starts), 1.0]
    labels, ways = [*(label for label, _ in starts), "annealed"], 1
    # both ways of a start are of one family
    numbers = accumulate(label not in related for label in labels)
    families = [
        _RELATED if label in related else number
        for label, number in zip(labels, numbers, strict=True)
    ]
    if blurred is not None:
        plans, ways = torch.cat([plans, plans[:-1]]), 2
        first += [blurred for _ in starts]
        labels += [f"{label}, blurred" for label, _ in starts]
        families += families[:-1]
    alone = torch.zeros(len(plans), dtype=torch.int64, device=plans.device)
    given = Ends(*(part[None] for part in stack.follow(alone, plans, plans.new_tensor(first))))
    found = improve_again(stack, given, rounds, families, ways * AGREEING)
    if rounds and (blurred is not None or (checked and bool(found.agreed))):
        found = exchange(stack, given, found, families)
    members = found.members.alone()
    certain = bool(found.agreed | (found.met >= ways * AGREEING))
    # solves go on from there: what has not settled leads twins of a problem to different optima
    if len(members.plans) and not is_over():
        # what is also followed blurred has come near its end twice
        above = limits_of(a.device).all_above if blurred is None else 0.0
        members, stays = _settled(stack, members, above)
        certain = certain and stays
    names = [name_of(origin, labels) for origin in members.origins.tolist()]
    return Found(
        names, members.plans[:, : len(a), : len(b)], members.objectives.tolist(),
        members.values.tolist(), certain, int(found.followed), int(found.met),
    )  # fmt: skip


def _settled(stack: Ending, members: Members, above: float) -> tuple[Members, bool]:
    """Lead down the lowest plans, up to a share above the first; tell whether that stays lowest."""
    objectives = members.objectives
    count = int((objectives <= objectives[0] + above * objectives[0].abs()).sum())
    which = torch.zeros(count, dtype=torch.int64, device=objectives.device)
    for mine, its in zip(members, stack.descend(which, members.plans[:count]), strict=False):
        mine[:count] = its
    first = objectives[0]
    stays = bool(first - objectives.min() <= SAME * first.abs())
    return Members(*(part[objectives.argsort(stable=True)] for part in members)), stays


def name_of(origin: int, labels: Sequence[str]) -> str:
    """Tell where a plan came from."""
    if origin == _EXCHANGED:
        return "exchange"
    if origin < len(labels):
        return labels[origin]
    number, mixed = divmod(origin - len(labels), 2)
    return f"{'mixture' if mixed else 'kick'} {number}"


class _Teams:
    """Two groups of plans for each problem; the rows of one problem's follow each other."""

    def __init__(self, stack: Followed, starts: Ends, group: Tensor, turn: int) -> None:
        self.stack = stack
        device, (count, self.starts) = starts.objectives.device, starts.objectives.shape
        self.generator = torch.Generator("cpu").manual_seed(turn)
        every = torch.arange(self.starts, device=device).expand(count, -1)
        given = Members(*starts, every)
        # a group without starts has none that could agree
        groups = [
            given._replace(objectives=given.objectives.where(group == place, torch.inf))
            for place in range(_GROUPS)
        ]
        both = (distinct(group, _KEPT) for group in groups)
        parts = (torch.stack(pair, 1).flatten(0, 1) for pair in zip(*both, strict=True))
        self.kept = Members(*parts)
        self.idle = torch.zeros(count, _GROUPS, dtype=torch.int64, device=device)
        self.agreed = torch.zeros(count, dtype=torch.bool, device=device)
        self.over, self.joined = self.agreed.clone(), self.agreed.clone()
        self.followed = torch.full_like(self.idle[:, 0], self.starts)
        self.made = 0

    def lowest(self) -> Tensor:
        """Read the lowest objective of each group, (B, 2), infinite for one without plans."""
        return self.kept.objectives[:, 0].view(-1, _GROUPS)

    def agree(self) -> Tensor:
        """Tell for which problems both groups have come to the same objective, (B,)."""
        first, second = (
            Ends(*(part[group::_GROUPS, :1] for part in self.kept[:3])) for group in range(_GROUPS)
        )
        there = self.lowest().isfinite().all(1)
        return _same(first, second)[:, 0] & there

    def together(self, problems: Tensor) -> Members:
        """Put the groups of some problems beside each other."""
        first = problems * _GROUPS
        return self.kept.of(first).beside(self.kept.of(first + 1))

    def advance(self) -> bool:
        """Kick and mix plans of all groups that are at work; tell whether any is."""
        lowest = self.lowest()
        self.agreed = torch.where(self.over | self.joined, self.agreed, self.agree())
        at_work = (self.idle < _PATIENCE) & lowest.isfinite()
        idle = self.idle.where(lowest.isfinite(), _PATIENCE).amin(1)
        ended = ~at_work.any(1) | (self.agreed & (idle > 0))
        joining = ended & ~self.agreed & ~self.joined & lowest.isfinite().all(1)
        self.over |= ended & ~joining
        if bool(joining.any()):
            self._join((joining & ~self.over).nonzero()[:, 0])
            at_work = (self.idle < _PATIENCE) & self.lowest().isfinite()
        live = (at_work & ~self.over[:, None]).flatten().nonzero()[:, 0]
        if not len(live):
            return False
        problems = live // _GROUPS
        # a group that is alone makes as many plans as two
        wide = torch.bincount(problems, minlength=len(self.over))[problems]
        self._improve(live, problems, FRESH // wide)
        return True

    def _join(self, problems: Tensor) -> None:
        """Put the groups of some problems together in the first one."""
        first = problems * _GROUPS
        self.kept.put(first, distinct(self.together(problems), _KEPT))
        self.kept.objectives[first + 1] = torch.inf
        self.idle[problems] = 0
        self.joined[problems] = True

    def _improve(self, live: Tensor, problems: Tensor, counts: Tensor) -> None:
        """Follow new plans, so many of each group that is at work, and keep the best."""
        kept = self.kept.of(live)
        plans, mixed = _moved(
            kept, live % _GROUPS, self.stack.rows(problems), counts, self.generator
        )
        row, place = (torch.arange(FRESH, device=live.device) < counts[:, None]).nonzero().T
        ends = self.stack.follow(problems[row], plans[row, place], _BLURRED)
        number = self.made + (live % _GROUPS * (FRESH // _GROUPS))[:, None]
        number = number + torch.arange(FRESH, device=live.device)
        unknown = kept.objectives.new_full(plans.shape[:2], torch.inf)
        fresh = Members(plans, unknown, unknown.clone(), self.starts + 2 * number + mixed)
        for mine, its in zip(fresh, ends, strict=False):
            mine[row, place] = its
        before = kept.objectives[:, 0]
        kept = distinct(kept.beside(fresh), _KEPT)
        self.kept.put(live, kept)
        better = kept.objectives[:, 0] < before - BETTER * before.abs()
        idle = self.idle.view(-1)
        idle[live] = torch.where(better, 0, idle[live] + 1)
        self.followed.index_add_(0, problems, counts)
        self.made += FRESH


def _same(some: Ends, other: Ends) -> Tensor:
    """Tell whether plans (B, k) are of the same optimum as others (B, 1), (B, k)."""
    # plans that are alike have settled, no more: their objectives may differ by more [L1314]
    gap = (some.objectives - other.objectives).abs()
    cosine = sums_of((some.plans * other.plans).flatten(0, 1)).view_as(gap)
    cosine = cosine / (_squares(some.plans) * _squares(other.plans)).sqrt()
    room = torch.where(cosine > ALIKE, SAME, BETTER)
    return gap <= room * other.objectives.abs()


def _squares(plans: Tensor) -> Tensor:
    """Compute squared lengths (B, k) of plans (B, k, n, m)."""
    return sums_of(plans.square().flatten(0, 1)).view(plans.shape[:2])


def distinct(members: Members, count: int) -> Members:
    """Choose at most ``count`` plans of different optima of each problem, the lowest first."""
    order = members.objectives.argsort(dim=1, stable=True)
    at = torch.arange(len(order), device=order.device)[:, None]
    flat = members.plans.flatten(2).double()
    inner = products(flat, flat.mT)
    sizes = inner.diagonal(dim1=1, dim2=2).sqrt()
    alike = inner > ALIKE * sizes[:, :, None] * sizes[:, None, :]
    alike = alike[at[:, :, None], order[:, :, None], order[:, None, :]]
    ranked = members.objectives[at, order]
    kept = ranked.isfinite()
    for place in range(1, kept.shape[1]):
        kept[:, place] &= ~(alike[:, place, :place] & kept[:, :place]).any(1)
    ranked = ranked.where(kept, torch.inf)
    first = ranked.argsort(dim=1, stable=True)[:, :count]
    found = Members(*(part[at, order[at, first]] for part in members))
    found = found._replace(objectives=ranked[at, first])
    missing = count - found.objectives.shape[1]
    if missing <= 0:
        return found
    # as many columns as there may be plans
    nothing = Members(*(part[:, :1].expand(-1, missing, *part.shape[2:]) for part in found))
    return found.beside(nothing._replace(objectives=torch.full_like(nothing.objectives, torch.inf)))


def _exchanged(plans: Tensor) -> tuple[Tensor, Tensor]:
    """Exchange two rows or two columns of plans (B, n, m), in all ways or evenly some of them.

    Returns places of plans (k,), each in order and at least once, and what becomes of them,
    (k, n, m).
    """
    n, m = plans.shape[1:]
    inside = torch.cat([plans.sum(2), plans.sum(1)], 1) > 0
    i, j = torch.triu_indices(n + m, n + m, device=plans.device)
    # rows with rows; and nothing at all, where there is nothing to exchange
    kept = (i == j) & (i == 0) | (i < j) & ((i < n) == (j < n))
    i, j = i[kept], j[kept]
    there = inside[:, i] & inside[:, j] | (i == j)
    place, count = there.cumsum(1), there.sum(1, keepdim=True).clamp_min(_EXCHANGES)
    there &= place * _EXCHANGES // count > (place - 1) * _EXCHANGES // count
    which, way = there.nonzero().T
    order = torch.arange(n + m, device=plans.device).repeat(len(which), 1)
    at = torch.arange(len(which), device=plans.device)
    order[at, i[way]], order[at, j[way]] = j[way], i[way]
    rows, columns = order[:, :n, None], order[:, None, n:] - n
    return which, plans[which[:, None, None], rows, columns]


def _moved(
    parents: Members, group: Tensor, sizes: Tensor, counts: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Kick plans out of their optima by leaving rows out, and mix rows of two where there are.

    Returns plans (T, F, n, m), of which the first ``counts`` are wanted, and which are mixtures.
    """
    plans, (many, width) = parents.plans, parents.objectives.shape
    n, device = plans.shape[2], plans.device

    def drawn(size: int) -> Tensor:
        # what is drawn for a problem does not depend on what else there is
        uniform = torch.rand(
            _GROUPS, FRESH, size, device="cpu", generator=generator, dtype=torch.float64
        )
        return uniform.to(device)[group]

    rows, pair, heads = drawn(n), drawn(width), drawn(n)
    turn = torch.arange(FRESH, device=device)
    known = parents.objectives.isfinite().sum(1)
    kicks = torch.where(known > 1, counts - counts // 2, counts)
    at = torch.arange(many, device=device)[:, None]
    # rows beyond the points come last
    beyond = torch.arange(n, device=device) >= sizes[:, None]
    ranks = (rows + 2 * beyond[:, None, :]).argsort(2).argsort(2)
    share = torch.tensor(_SHARES, dtype=torch.float64, device=device)[turn % len(_SHARES)]
    least = (share * sizes[:, None]).round().clamp_(min=2)
    kicked = plans[at, turn % known[:, None]] * (ranks < least[:, :, None])[:, :, :, None]
    missing = torch.arange(width, device=device) >= known[:, None]
    one, other = (pair + 2 * missing[:, None, :]).argsort(2)[:, :, :2].unbind(2)
    mixed = torch.where((heads < 0.5)[:, :, :, None], plans[at, one], plans[at, other])
    mixtures = turn >= kicks[:, None]
    return torch.where(mixtures[:, :, None, None], mixed, kicked), mixtures.long()
