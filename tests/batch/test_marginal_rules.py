"""Laws of relaxed marginals, for many problems at once: masses, half-steps, levels, rounding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
import torch
from problems import random_weights

from torchgw._batch.sweep import Relaxed, _best_logarithm
from torchgw._problem.problem import MarginalRule
from torchgw._typing import Marginals

N, M = 6, 4
RULES = {
    "penalties": MarginalRule((0.5, 0.3)), "free": MarginalRule((math.inf, 0.0)),
    "other free": MarginalRule((0.0, math.inf)), "one penalty": MarginalRule((math.inf, 0.3)),
    "bounds": MarginalRule(mass=0.6),
}  # fmt: skip


def stacked(rule, count=3):
    """The same rule for some problems."""
    if rule.mass is not None:
        return Relaxed(None, torch.full((count,), rule.mass, dtype=torch.float64))
    return Relaxed(torch.tensor(count * [rule.rho], dtype=torch.float64), None)


def problem(count=3):
    """Weights, with a point of none on either side, and normalised plans."""
    rng = np.random.default_rng(1)
    a, b = (np.stack([random_weights(n, k) for k in range(count)]) for n in (N, M))
    a[:, -1], b[:, 0] = 0.0, 0.0
    plans = rng.random((count, N, M)) * (a[:, :, None] > 0) * (b[:, None, :] > 0)
    parts = (a / a.sum(1, keepdims=True), b / b.sum(1, keepdims=True))
    plans /= plans.sum((1, 2), keepdims=True)
    return *map(torch.from_numpy, parts), torch.from_numpy(plans)


@pytest.mark.parametrize("name", [name for name in RULES if name != "bounds"])
def test_a_factor_of_all_columns_changes_none_of_them(name):
    """It changes the mass alone, which penalties choose."""
    (_, b, plans), relaxed = problem(), stacked(RULES[name])
    sums, weight = plans.sum(1, keepdim=True), b[:, None]
    for size in (0.2, 1.0, 5.0):
        error = relaxed.error(weight, sums, torch.full_like(weight, size))
        assert float(error.abs().max()) < 1e-14
    factor = torch.linspace(1, 2, M, dtype=torch.float64).expand_as(weight)
    assert float(relaxed.error(weight, sums, factor).min()) > 0.1


@pytest.mark.parametrize("name", RULES)
def test_rounded_plans_keep_their_rule_and_sound_ones_stay(name):
    (a, b, plans), rule = problem(), RULES[name]
    relaxed = stacked(rule)
    rounded = relaxed.rounded(plans, (a, b))
    assert float(rounded.min()) >= 0
    assert torch.allclose(rounded.sum((1, 2)), torch.ones(3, dtype=torch.float64))
    mass = rule.mass or 1.0
    for k in range(3):
        masses = Marginals(mass * rounded[k].sum(1), mass * rounded[k].sum(0))
        assert rule.violation(masses, Marginals(a[k], b[k])) < 1e-14
    assert torch.allclose(relaxed.rounded(rounded, (a, b)), rounded, atol=1e-15)
    if name == "penalties":
        assert torch.allclose(rounded, plans, atol=1e-15)


def objective_of(mass, rule, value, linear, plan, a, b, epsilon):
    """The definition: quadratic, linear, penalties of products, and half a quadratic entropy."""

    def divergence(p, q):
        return scipy.special.kl_div(p, q).sum()

    plan = mass * plan
    p, q = plan.sum(1), plan.sum(0)
    total = mass**2 * value + mass * linear
    for rho, mine, weight in zip(rule.rho, (p, q), (a, b), strict=True):
        if not math.isinf(rho):
            total += rho * divergence(np.outer(mine, mine), np.outer(weight, weight))
    product = np.outer(a, b)
    one = np.einsum("ij,kl->ijkl", plan, plan), np.einsum("ij,kl->ijkl", product, product)
    return total + epsilon / 2 * divergence(*one)


@pytest.mark.parametrize("linear", [0.0, 0.3])
def test_plans_get_their_best_mass(linear):
    """Compared with a search over masses, and worth the objective as it is defined."""
    (a, b, plans), rule, epsilon = problem(), RULES["penalties"], 0.2
    values = torch.tensor([0.1, 0.7, 2.0], dtype=torch.float64)
    entropy = torch.special.xlogy(plans, plans / (a[:, :, None] * b[:, None, :])).nan_to_num()
    found = stacked(rule).settle(
        values, torch.full_like(values, linear), entropy.sum((1, 2)), (plans.sum(2), plans.sum(1)),
        (a, b), torch.full_like(values, epsilon),
    )  # fmt: skip
    assert not found.violation.any()
    for k in range(3):
        given = rule, float(values[k]), linear, plans[k].numpy(), a[k].numpy(), b[k].numpy()
        mass = float(found.mass[k])
        own = objective_of(mass, *given, epsilon)
        assert float(found.objective[k]) == pytest.approx(own, rel=1e-9)
        for other in (0.5 * mass, 0.99 * mass, 1.01 * mass, 2 * mass):
            assert own < objective_of(other, *given, epsilon)


def test_given_masses_and_strict_sides_are_kept_and_breaches_told():
    a, b, plans = problem()
    one = torch.ones(3, dtype=torch.float64)
    masses = plans.sum(2), plans.sum(1)
    for name in ("free", "bounds"):
        rule = RULES[name]
        found = stacked(rule).settle(one, 0.5 * one, 0 * one, masses, (a, b), 0.1 * one)
        mass = rule.mass or 1.0
        assert torch.allclose(found.mass, mass * one)
        for k in range(3):
            own = Marginals(mass * masses[0][k], mass * masses[1][k])
            expected = rule.violation(own, Marginals(a[k], b[k]))
            assert float(found.violation[k]) == pytest.approx(expected, rel=1e-12)
        if name == "bounds":
            expected = 0.36 * (1 + 0.5 + 0.1 * math.log(0.6))
            assert torch.allclose(found.objective, expected * one)


def test_logarithms_of_masses_solve_their_equation():
    slope = torch.tensor([-1.0, 0.3, 0.1, 5.0], dtype=torch.float64)
    linear = torch.tensor([0.0, 0.1, -0.4, 3.0], dtype=torch.float64)
    pull = torch.tensor([1.0, 0.8, 0.5, 1.0], dtype=torch.float64)
    log, nothing = _best_logarithm(slope, linear, pull)
    left = slope + linear * (-log).exp() + pull * log
    assert nothing.tolist() == [False, False, False, True]
    assert left[:3].abs().max() < 1e-9
    # where no mass is worth moving it is least
    for change in (-0.1, 0.1):
        moved = log[3] + change
        assert slope[3] + linear[3] * (-moved).exp() + pull[3] * moved > left[3]


@pytest.mark.parametrize("name", RULES)
def test_half_steps_are_those_of_the_definition(name):
    (a, _, _), rule, epsilon = problem(), RULES[name], 0.2
    relaxed, rng = stacked(rule), np.random.default_rng(4)
    sums, potential = (torch.from_numpy(rng.random((3, 1, N)) + 0.1) for _ in range(2))
    unit = torch.full((3,), epsilon, dtype=torch.float64)
    factor = relaxed.half_step(0, a[:, None, :], potential, unit)(sums)
    used = (a > 0)[:, None, :]
    assert (factor[~used] == 1).all()
    filled = (factor * sums).where(used, 0.0)
    if rule.mass is not None:
        assert torch.allclose(filled.sum((1, 2)), 0.6 * torch.ones(3, dtype=torch.float64))
        assert (filled <= a[:, None, :] + 1e-14).all()
    elif math.isinf(rule.rho[0]):
        assert torch.allclose(filled, a[:, None, :].where(used, 0.0))
    else:
        tau = rule.tau(epsilon)[0]
        # the potential becomes tau times that of a strict half-step
        after = potential + factor.log()
        strict = potential + (a[:, None, :] / sums).log()
        assert torch.allclose(after[used], tau * strict[used])


@pytest.mark.parametrize(
    ("rule", "share"),
    [
        (MarginalRule((math.inf, 0.0)), 1.0), (MarginalRule((0.3, math.inf)), 1.0),
        (MarginalRule((0.5, 0.3)), 0.5), (MarginalRule(mass=0.6), 0.6),
    ],
)  # fmt: skip
def test_all_of_the_mass_of_a_strict_side_is_sure_to_move(rule, share):
    assert rule.share == share
