"""The same problem written in another way has the same answer, or there is doubt about it."""

from __future__ import annotations

import fuzz_twins
import numpy as np
import pytest
import torch

from torchgw._problem.problem import Problem
from torchgw._sinkhorn.problem import DenseCost
from torchgw._starts.alternatives import Alternative, Search
from torchgw._starts.standard import put_in_standard_form
from torchgw._typing import Marginals
from torchgw.distances.precomputed import DirectedDistance, PrecomputedDistance

FAMILIES = list(fuzz_twins.FAMILIES)
QUICK = ("clouds in 3", "random graphs")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=() if name in QUICK and not turn else pytest.mark.slow)
        for turn in range(2)
        for number, name in enumerate(FAMILIES, turn * len(FAMILIES))
    ],
)
def test_twins_have_one_answer_or_there_is_doubt(number):
    """Every family, 9 x 11 points and 22 x 30."""
    _, sides = fuzz_twins.problem(number)
    first = fuzz_twins.solve(sides)
    for twin, room in fuzz_twins.TWINS.items():
        found = fuzz_twins.compare(sides, twin, np.random.default_rng(number), first)
        if found is not None:
            apart, said = found
            excused = said and twin in fuzz_twins.DOUBTED
            assert apart <= room or excused, f"{twin.__name__}: {apart:.2g} apart"


@pytest.mark.parametrize(
    ("number", "options", "exchanged"),
    [
        (10, {"mass": 0.7}, {"mass": 0.7}),
        (3, {"unbalanced": (0, np.inf)}, {"unbalanced": (np.inf, 0)}),
        pytest.param(
            11, {"unbalanced": (np.inf, 0)}, {"unbalanced": (0, np.inf)}, marks=pytest.mark.slow
        ),
        pytest.param(
            9, {"unbalanced": (0.3, np.inf)}, {"unbalanced": (np.inf, 0.3)}, marks=pytest.mark.slow
        ),
    ],
)
def test_twins_of_relaxed_problems_have_one_answer(number, options, exchanged):
    _, sides = fuzz_twins.problem(number)
    first = fuzz_twins.solve(sides, **options)
    for twin, room in fuzz_twins.TWINS.items():
        # a penalty has the unit of the cost
        other = None if twin is fuzz_twins.rescaled else twin(np.random.default_rng(number), sides)
        if other is not None:
            result = fuzz_twins.solve(other, **exchanged if twin is fuzz_twins.swapped else options)
            # relaxed plans settle to `tol`, and where they do rounding decides
            expected = pytest.approx(first.report.objective, rel=max(room, 1e-5))
            excused = twin in fuzz_twins.DOUBTED and fuzz_twins.says_so(result)
            assert result.report.objective == expected or excused, twin.__name__


def made(number, *, fused=False, directed=False):
    """A problem of weights that differ, in providers."""
    rng = np.random.default_rng([number, fused, directed])
    n, m = 7, 9
    kind = DirectedDistance if directed else PrecomputedDistance
    tables = [torch.tensor(rng.random((k, k))) for k in (n, m)]
    tables = tables if directed else [table + table.T for table in tables]
    weights = [torch.tensor(rng.uniform(0.3, 1, k)) for k in (n, m)]
    linear = torch.tensor(rng.random((n, m))) if fused else None
    return tables, [weight / weight.sum() for weight in weights], linear, kind


def standard(tables, weights, linear, kind):
    sides = (kind.unchecked(table) for table in tables)
    cost = None if linear is None else DenseCost(linear)
    return put_in_standard_form(Problem(*sides, Marginals(*weights), 0.7, cost))


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"directed": True}])
def test_twins_share_their_standard_form_to_the_bit(options):
    """In another order, another unit, with a point of no weight, in halves, and exchanged."""
    tables, weights, linear, kind = made(0, **options)
    first = standard(tables, weights, linear, kind)
    rng = np.random.default_rng(1)
    order, others = (torch.tensor(rng.permutation(len(weight))) for weight in weights)
    # the last point of the source twice, by halves, and its first one again without weight
    order = torch.cat([order, order[-1:], order[:1]])
    moved = [tables[0][order[:, None], order], tables[1][others[:, None], others]]
    a = weights[0][order].clone()
    a[-3:-1] /= 2
    a[-1] = 0
    moved = [7.3 * table for table in moved], [a, weights[1][others]]
    cost = None if linear is None else 7.3**2 * linear[order[:, None], others]
    second = standard(*moved, cost, kind)
    third = standard(*(part[::-1] for part in moved), None if cost is None else cost.T, kind)
    for twin in (second, third):
        assert twin.factor == pytest.approx(7.3**2 * first.factor)
        assert twin.epsilon(7.3**2 * 0.02) == first.epsilon(0.02)
        for side in ("source", "target"):
            one, other = (getattr(form.problem, side) for form in (first, twin))
            assert torch.equal(one.table, other.table)
        for one, other in zip(first.problem.marginals, twin.problem.marginals, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
        if linear is not None:
            costs = (form.problem.linear.matrix for form in (first, twin))
            torch.testing.assert_close(*costs, rtol=1e-6, atol=0)
    assert third.swapped != second.swapped


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_plan_is_carried_there_and_back(exchanged):
    """Between the points as they were given, of which one was in two unequal parts."""
    tables, weights, _, kind = made(2)
    order = torch.cat([torch.arange(7), torch.tensor([3])])
    a = weights[0][order].clone()
    a[3], a[7] = 0.3 * a[3], 0.7 * a[3]
    given = [[tables[0][order[:, None], order], tables[1]], [a, weights[1]]]
    turn = -1 if exchanged else 1
    form = standard(*(part[::turn] for part in given), None, kind)
    a, b = given[1][::turn]
    plan = torch.outer(a, b) * (1 + 0.1 * torch.cos(torch.arange(len(b))))
    # parts of one point share its mass in proportion
    shape, index = (len(a), len(b)), (torch.arange(len(a)), torch.arange(len(b)))
    found = Alternative(1.5, "some", plan, *index, shape)
    low = form.lower(found)
    assert low.shape == form.sizes == (form.problem.source.n, form.problem.target.n)
    assert sorted(form.sizes) == [7, 9]
    assert form.factor * low.value == pytest.approx(1.5)
    (back,) = form.lift(Search((low,), 0.0)).alternatives
    again = torch.zeros_like(plan)
    again[back.source[:, None], back.target] = back.plan
    assert back.shape == shape
    if not exchanged:
        plan = plan.clone()
    torch.testing.assert_close(again.sum(), plan.sum())
    parts = (again[3], again[7]) if not exchanged else (again[:, 3], again[:, 7])
    torch.testing.assert_close(parts[0] / 0.3, parts[1] / 0.7)
    whole = plan[3] + plan[7] if not exchanged else plan[:, 3] + plan[:, 7]
    torch.testing.assert_close(parts[0] + parts[1], whole)
