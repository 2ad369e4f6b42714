"""The best plans of a search, kicked and mixed at the target while that helps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._search.stack import Ends, Stack
from torchgw._tensors.deadline import is_over

# Plans that are kept of each group, and new ones of each round. [L1291]
_KEPT, _FRESH = 8, 16
# Shares of the rows at which kicked plans are linearised, by turns. [L1291]
_SHARES = (0.3, 0.5, 0.7)
# Epsilon at which these begin, as a share of the natural scale. [L1291]
_BLURRED = 0.04
# An objective is better if it is lower by this share; two within it are of one optimum. [L1291]
BETTER = 1e-4
# Cosine of the angle between plans above which they are of one optimum. [L561, L1291]
_ALIKE = 0.9
# Rounds that may pass without a better optimum. [L1291]
_PATIENCE = 2


class Member(NamedTuple):
    """A plan that has been followed to its end."""

    label: str
    plan: Tensor  # (n, m) float64
    objective: float
    value: float


class Population(NamedTuple):
    """Different optima, the lowest first."""

    members: list[Member]
    agreed: bool  # whether groups that know nothing of each other have found the lowest one
    followed: int  # plans in all
    met: int  # how many of the plans that were given have led to the lowest


def improve(
    stack: Stack,
    epsilon: float,
    groups: Sequence[Sequence[tuple[str, Tensor]]],
    rounds: int,
    tell: Callable[[int, float], None] = lambda *_: None,
) -> Population:
    """Follow labelled plans of some groups to their ends, and improve them for some rounds.

    Each group is improved apart, so that groups which agree say that there is nothing better;
    where they do not they are put together.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = itertools.count()
    # a plan of several groups is followed once
    given = {id(plan): (label, plan) for group in groups for label, plan in group}
    ends = dict(zip(given, _followed(stack, epsilon, list(given.values())), strict=True))
    kept = [distinct([ends[id(plan)] for _, plan in group], _KEPT) for group in groups]
    idle, followed, agreed = [0] * len(kept), len(given), False
    for _ in range(rounds):
        if is_over():
            break
        live = [place for place, count in enumerate(idle) if count < _PATIENCE]
        agreed = len(kept) > 1 and _agree(kept)
        if not live or (agreed and min(idle) > 0):
            if agreed or len(kept) == 1:
                break
            kept, idle, live = [distinct(itertools.chain(*kept), _KEPT)], [0], [0]
        fresh = {
            place: _moved(kept[place], _FRESH // len(live), numbers, generator) for place in live
        }
        found = iter(_followed(stack, epsilon, list(itertools.chain(*fresh.values())), _BLURRED))
        for place, some in fresh.items():
            before = kept[place][0].objective
            kept[place] = distinct([*kept[place], *itertools.islice(found, len(some))], _KEPT)
            better = kept[place][0].objective < before - BETTER * abs(before)
            idle[place] = 0 if better else idle[place] + 1
            followed += len(some)
        tell(followed, min(group[0].objective for group in kept))
    agreed = agreed or (len(kept) > 1 and _agree(kept))
    members = distinct(itertools.chain(*kept), 2 * _KEPT)
    most = members[0].objective + BETTER * abs(members[0].objective)
    met = sum(end.objective <= most for end in ends.values())
    return Population(members, agreed, followed, met)


def distinct(members: Sequence[Member] | itertools.chain[Member], count: int) -> list[Member]:
    """Choose plans of different optima, the lowest first."""
    ranked = sorted(members, key=lambda one: one.objective)
    flat = torch.stack([one.plan for one in ranked]).flatten(1)
    flat = torch.nn.functional.normalize(flat)
    alike = (flat @ flat.T > _ALIKE).tolist()
    kept: list[int] = []
    for place, row in enumerate(alike):
        if not any(row[other] for other in kept):
            kept.append(place)
    return [ranked[place] for place in kept[:count]]


def _agree(groups: Sequence[Sequence[Member]]) -> bool:
    """Whether the lowest objectives of all groups are the same."""
    lowest = [group[0].objective for group in groups]
    return max(lowest) - min(lowest) <= BETTER * abs(min(lowest))


def _followed(
    stack: Stack, epsilon: float, plans: list[tuple[str, Tensor]], first: float = 0.0
) -> list[Member]:
    """Follow labelled plans to their ends."""
    table = torch.stack([plan.double().cpu() for _, plan in plans])
    ends: Ends = stack.follow(table, epsilon, first)
    numbers = ends.objectives.tolist(), ends.values.tolist()
    labels = (label for label, _ in plans)
    return [Member(*parts) for parts in zip(labels, ends.plans, *numbers, strict=True)]


def _moved(
    parents: Sequence[Member], count: int, numbers: itertools.count[int], generator: torch.Generator
) -> list[tuple[str, Tensor]]:
    """Kick plans out of their optima by leaving rows out, and mix rows of two where there are."""
    plans = torch.stack([one.plan for one in parents])
    mixed = count // 2 if len(plans) > 1 else 0
    turn = torch.arange(count - mixed)
    n = plans.shape[1]
    rows = (torch.tensor(_SHARES)[turn % len(_SHARES)] * n).round().clamp_(min=2)
    drawn = torch.rand(len(turn), n, generator=generator)
    used = drawn.argsort(1).argsort(1) < rows[:, None]
    made = [("kick", plans[turn % len(plans)] * used[:, :, None])]
    if mixed:
        drawn = torch.rand(mixed, len(plans), generator=generator)
        one, other = drawn.argsort(1)[:, :2].T
        heads = torch.rand(mixed, n, 1, generator=generator) < 0.5
        made.append(("mixture", torch.where(heads, plans[one], plans[other])))
    return [(f"{name} {next(numbers)}", plan) for name, some in made for plan in some]
