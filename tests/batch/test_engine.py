"""The engine of many small problems, against definitions in NumPy and against itself."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import scipy.special
import torch
from problems import distance_matrices, random_weights

from torchgw._batch import advance, engine
from torchgw._batch.engine import run
from torchgw._batch.newton import newton_step
from torchgw._batch.packing import Packed, pack, padded_sizes
from torchgw._batch.sweep import TICK, exact_rows, next_relaxation, sweep
from torchgw._batch.worth import (
    CONVERGED,
    ENDINGS,
    FLAT,
    IMPLAUSIBLE,
    INNER,
    Descent,
    Ended,
    Finish,
    Rules,
    Terms,
    found_numbers,
)
from torchgw._sinkhorn.annealing import STUCK

SIZES = [(9, 16), (12, 13), (16, 16), (10, 10), (14, 11)]


RULES = Rules()


def packed_problems(sizes=SIZES, epsilon=0.02, zero=False):
    tables, weights = [], []
    for seed, (n, m) in enumerate(sizes):
        tables += map(torch.from_numpy, distance_matrices(n, m, seed))
        weights += [torch.from_numpy(random_weights(k, seed)) for k in (n, m)]
    if zero:
        weights[0][2] = 0
        weights[0] /= weights[0].sum()
    stack, count = pack(tables, weights), len(sizes)
    index = torch.arange(count)
    ones = torch.ones(count, dtype=torch.float64)
    return Packed(stack, stack, 2 * index, 2 * index + 1, ones, epsilon * ones, ones)


def some(problems, index):
    index = torch.tensor(index)
    parts = (problems.i, problems.j, problems.alpha, problems.epsilon, problems.first)
    return Packed(problems.x, problems.y, *(part[index] for part in parts))


def solved(problems, rules=RULES):
    plans = {}

    def keep(ended: Ended):
        plans.update(zip(ended.number.tolist(), ended.plan, strict=True))

    return run(problems, rules, keep), plans


def test_padded_sizes_hold_their_spaces():
    sizes = padded_sizes(np.array([1, 16, 17, 100, 512, 513]))
    assert sizes.tolist() == [16, 16, 32, 128, 512, 0]


def test_a_sweep_is_sinkhorns_iteration():
    rng = np.random.default_rng(0)
    cost, epsilon = rng.normal(size=(2, 9, 7)), np.array([0.5, 0.2])
    a, b = random_weights(9), random_weights(7)
    given = torch.from_numpy(cost)
    weights = tuple(torch.from_numpy(np.stack([part, part])) for part in (a, b))
    g = torch.zeros(2, 7, dtype=torch.float64)
    f = exact_rows(given, weights[1], g, torch.tensor([0.5, 0.2]).double())
    made = sweep(
        given, weights, (f, g), torch.from_numpy(epsilon), torch.ones(2).double(),
        torch.empty_like(given),
    )  # fmt: skip
    for k in range(2):
        # columns come first here
        _, g_ref, _ = reference.sinkhorn(cost[k].T, b, a, epsilon[k], TICK, g=f[k].numpy())
        f_ref = reference.softmin(cost[k], b, made.g[k].numpy(), epsilon[k], 1)
        plan = reference.plan(cost[k], a, b, f_ref, made.g[k].numpy(), epsilon[k])
        np.testing.assert_allclose(made.plan[k], plan, rtol=1e-10)
        np.testing.assert_allclose(made.plan[k].sum(1), a, rtol=1e-12)
        assert made.error[k] == pytest.approx(np.abs(plan.sum(0) - b).sum(), abs=1e-13)
        assert g_ref.shape == (9,)


def test_over_relaxation_takes_fewer_sweeps_to_the_same_plan():
    rng = np.random.default_rng(1)
    given = torch.from_numpy(rng.uniform(size=(2, 12, 12)))
    given[1] = given[0]
    weight = torch.full((2, 12), 1 / 12, dtype=torch.float64)
    g = torch.zeros(2, 12, dtype=torch.float64)
    epsilon = torch.full((2,), 0.004, dtype=torch.float64)
    f = exact_rows(given, weight, g, epsilon)
    factor, error = torch.ones(2).double(), torch.full((2,), torch.inf, dtype=torch.float64)
    for _ in range(20):
        made = sweep(given, (weight, weight), (f, g), epsilon, factor, torch.empty_like(given))
        f, g = made.f_next, made.g
        # the second problem is left at plain iterations
        factor = next_relaxation(factor, made.error / error)
        factor[1], error = 1.0, made.error
    assert 1 < float(factor[0]) < 2
    assert float(made.error[0]) < 0.1 * float(made.error[1])


def near_plans(error):
    """Two plans of exact rows near met ones, with a point of no weight on each side."""
    rng = np.random.default_rng(3)
    a, b = (torch.from_numpy(np.stack([random_weights(k, s) for s in (0, 1)])) for k in (9, 7))
    a[:, 2], b[:, 4] = 0, 0
    a, b = (part / part.sum(1, keepdim=True) for part in (a, b))
    plan = torch.from_numpy(rng.uniform(0.1, 1, size=(2, 9, 7))) * a[:, :, None] * b[:, None, :]
    for _ in range(200):
        plan = plan * (b / torch.where(b > 0, plan.sum(1), 1.0))[:, None, :]
        plan = plan * (a / torch.where(a > 0, plan.sum(2), 1.0))[:, :, None]
    plan = plan * (1 + error * torch.from_numpy(rng.normal(size=(2, 1, 7))))
    return plan * (a / torch.where(a > 0, plan.sum(2), 1.0))[:, :, None], a, b


def test_newtons_steps_square_the_error():
    plan, a, b = near_plans(1e-2)
    before = (plan.sum(1) - b).abs().sum(1)
    made = newton_step(plan, a, b)
    assert made.taken.all()
    # what has no weight stays where it is
    assert (made.rows[a == 0] == 0).all()
    assert (made.columns[b == 0] == 0).all()
    after = plan * (made.rows[:, :, None] + made.columns[:, None, :]).exp()
    torch.testing.assert_close(after.sum(2), a, rtol=1e-13, atol=0)
    assert ((after.sum(1) - b).abs().sum(1) < before**2).all()


def test_newtons_steps_that_are_too_long_are_not_taken():
    plan, a, b = near_plans(1e-2)
    # two columns of the second problem, which no row shares, cannot exchange what they lack
    plan[1] = 0
    plan[1, :5, :3] = plan[0, :5, :3] + 1e-3
    plan[1, 5:, 3:] = plan[0, 5:, 3:] + 1e-3
    made = newton_step(plan, plan.sum(2), b)
    assert made.taken.tolist() == [True, False]
    assert (made.columns[1] == 0).all()
    assert made.rows[1].abs().max() < 1e-14


def test_steady_changes_are_followed_to_their_limit(monkeypatch):
    problems = some(packed_problems(epsilon=0.01), [0, 1, 2, 3, 4])
    rules = Rules(objective_tol=0)
    followed, _ = solved(problems, rules)
    monkeypatch.setattr(advance, "_SLOWEST", 0.0)
    plain, _ = solved(problems, rules)
    assert {ENDINGS[code] for code in [*followed.ending.tolist(), *plain.ending.tolist()]} == {
        "CONVERGED"
    }
    torch.testing.assert_close(followed.objective, plain.objective, rtol=1e-6, atol=0)
    assert int(followed.n_iter.sum()) < int(plain.n_iter.sum())


def test_shrinking_changes_are_led_to_their_limit_and_others_nowhere():
    """Changes that shrink by a share r lead r / (1 - r) of the last step ahead, near the end."""
    places, last, known = np.arange(2), np.array([1e-3, 1e-3]), np.ones(2, dtype=bool)
    for before, rate in itertools.product((0.2, 0.5, 0.9), (0.05, 0.2, 0.5, 0.8, 0.9, 0.99)):
        for size in (1.0, 1e3):
            pool = SimpleNamespace(share=None)
            now = SimpleNamespace(change=size * last / rate, rate=0 * last + before)
            step, stay = torch.zeros(2, 3, 3, dtype=torch.float64), np.array([False, True])
            ahead = advance._ahead(pool, now, places, size * last, step, exact=known, stay=stay)
            steady = abs(rate - before) <= 0.1 * before and 0.3 < rate < 0.97 and size == 1
            assert ahead.tolist() == pytest.approx([steady * rate / (1 - rate), 0.0])


def test_flat_is_what_falls_by_no_more_an_iteration_than_the_tolerance():
    tol, like = 1e-4, torch.zeros(1, dtype=torch.float64)
    rates, rows = np.array([0.0, 0.5, 0.9, 1.1, 2.0, 10.0]) * tol, np.arange(6)
    descent, met = Descent(6, like), np.ones(6, dtype=bool)
    for count in range(12):
        value = (1 - rates) ** count
        flat = descent.update(rows, value, np.full_like(value, 1e-3), met, tol)
        # told once there are values to compare, and only of changes that do not settle
        assert flat.tolist() == [count >= 10 and bool(rate <= tol) for rate in rates]
    # plans that miss their marginals have no objective, then and when others are compared with them
    assert not descent.update(rows, value, 0 * value + 1e-3, ~met, tol).any()
    for _ in range(4):
        descent.update(rows, value, 0 * value + 1e-3, met, tol)
    assert not descent.update(rows, value, 0 * value + 1e-3, met, tol).any()
    assert descent.update(rows, value, 0 * value + 1e-3, met, tol).all()


def test_inner_limit_is_said_where_a_settled_plan_has_spent_all_iterations_in_vain():
    settled, whole, met, falls = np.array([*itertools.product((False, True), repeat=4)]).T
    places, one = np.arange(len(met)), np.ones(len(met))
    now = SimpleNamespace(
        error=1e-4 * one, settling=np.full_like(places, -1), done=places,
        tol=np.where(met, 1e-3, 1e-9), stuck=np.full_like(places, STUCK - 1),
        budget=np.where(whole, RULES.inner_max_iter, 10), last_error=np.where(falls, 1.0, 1e-4),
    )  # fmt: skip
    same = torch.from_numpy(one)
    pool = SimpleNamespace(sharp=None, descent=Descent(len(met), same))
    reached = SimpleNamespace(
        change=torch.from_numpy(np.where(settled, 1e-7, 1.0)), epsilon=same, target=same,
        objective=same, relaxed=None,
    )  # fmt: skip
    ending = advance._course(pool, now, places, reached, RULES).ending
    assert np.array_equal(ending == INNER, settled & whole & ~met & ~falls)


@pytest.mark.parametrize("alpha", [0.2, 0.7, 1.0])
def test_the_quadratic_term_is_that_of_the_definition(alpha):
    rng = np.random.default_rng(0)
    x, y, plan = rng.random((5, 8, 8)), rng.random((5, 6, 6)), rng.random((5, 8, 6))
    plan /= plan.sum((1, 2), keepdims=True)
    tables = [torch.from_numpy(one + one.swapaxes(1, 2)) for one in (x, y)]
    given = torch.from_numpy(plan)
    crossed = ((tables[0] @ given @ tables[1]) * given).sum((1, 2))
    unit = torch.full((5,), alpha, dtype=torch.float64)
    terms = Terms.of(*tables, (given.sum(2), given.sum(1)), crossed, unit)
    for k, (near, far, one) in enumerate(zip(*tables, plan, strict=True)):
        own = alpha * reference.gw_value(near.numpy(), far.numpy(), one)
        assert float(terms.quadratic[k]) == pytest.approx(own, rel=1e-12)


@pytest.mark.parametrize("linear", [-0.3, 0.0, 0.2])
def test_implausible_is_what_costs_more_than_the_product_or_less_than_nothing(linear):
    share = torch.tensor([-0.5, -1e-9, 0.0, 0.5, 1.0, 1.0 + 1e-9, 1.5], dtype=torch.float64)
    one, none = torch.ones_like(share), torch.zeros(len(share), dtype=torch.int64)
    for ending in (CONVERGED, FLAT):
        found = Terms(share, linear * one, one), Terms(one, linear * one, 2 * one)
        finish = Finish(0 * one, none + ending, none == 0, none, none)
        ended = found_numbers(found, 0 * one, one, one, finish, RULES).counts[0]
        expected = [IMPLAUSIBLE, *5 * [ending], IMPLAUSIBLE]
        assert ended.tolist() == expected


@pytest.mark.parametrize("zero", [False, True])
def test_plans_are_fixed_points_of_the_definition(zero):
    epsilon = 0.05
    problems = packed_problems(epsilon=epsilon, zero=zero)
    found, plans = solved(problems, Rules(objective_tol=0))
    assert {ENDINGS[code] for code in found.ending.tolist()} == {"CONVERGED"}
    for k, (n, m) in enumerate(SIZES):
        x, y = (
            stack.tables[i[k]][:size, :size].numpy()
            for stack, i, size in zip(
                (problems.x, problems.y), (problems.i, problems.j), (n, m), strict=True
            )
        )
        plan = plans[k].numpy()
        # nothing lies in the padding
        assert plan[n:].sum() == plan[:, m:].sum() == 0
        plan = plan[:n, :m]
        a, b = (problems.x.weights[side[k]].numpy() for side in (problems.i, problems.j))
        cost = 2 * reference.gw_cost(x, y, plan)
        f, g, _ = reference.sinkhorn(cost, a[:n], b[:m], epsilon, 200)
        np.testing.assert_allclose(
            reference.plan(cost, a[:n], b[:m], f, g, epsilon), plan, atol=1e-5
        )
        value = reference.gw_value(x, y, plan)
        assert float(found.value_quad[k]) == pytest.approx(value, rel=1e-9)
        kl = scipy.special.rel_entr(plan, np.outer(a[:n], b[:m])).sum()
        assert float(found.objective[k]) == pytest.approx(value + epsilon * kl, rel=1e-6)


@pytest.mark.parametrize("order", [[3], [4, 0], [2, 1, 4, 3, 0], [0, 1, 1, 1, 3, 2, 4] * 5])
def test_bits_do_not_depend_on_neighbours(order):
    problems = packed_problems()
    whole, plans = solved(problems)
    part, others = solved(some(problems, order))
    for mine, its in zip(part, whole, strict=True):
        assert torch.equal(mine, its[torch.tensor(order)])
    for place, number in enumerate(order):
        assert torch.equal(others[place], plans[number])


def test_a_queue_longer_than_the_pool_has_the_same_bits(monkeypatch):
    problems = some(packed_problems(), [0, 1, 2, 3, 4] * 4)
    whole = run(problems, Rules())
    monkeypatch.setitem(engine.POOL_ENTRIES, "cpu", 3 * 256)
    for mine, its in zip(run(problems, Rules()), whole, strict=True):
        assert torch.equal(mine, its)


def test_limits_are_told():
    problems = packed_problems(epsilon=1e-3)
    found = run(problems, Rules(max_iter=3))
    assert {ENDINGS[code] for code in found.ending.tolist()} == {"OUTER_LIMIT"}
    assert found.n_iter.tolist() == [3] * len(SIZES)
    # Newton's steps meet most tolerances within two ticks
    found = run(problems, Rules(inner_max_iter=10, inner_tol=1e-15))
    assert {ENDINGS[code] for code in found.ending.tolist()} <= {"INNER_LIMIT", "BOTH_LIMITS"}


def test_spaces_alike_everywhere_are_left_from_the_saddle():
    """The product plan of two circles is stationary: without noise it would be the answer."""
    angle = 2 * np.pi * np.arange(12) / 12
    circle = torch.from_numpy(np.abs(np.exp(1j * angle[:, None]) - np.exp(1j * angle)))
    weight = torch.full((12,), 1 / 12, dtype=torch.float64)
    stack, one = pack([circle], [weight]), torch.ones(1, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.int64)
    found = run(Packed(stack, stack, zero, zero, one, 0.01 * one, one), Rules())
    product = reference.gw_value(circle.numpy(), circle.numpy(), np.full((12, 12), 1 / 144))
    assert float(found.value_quad) < 0.2 * product
