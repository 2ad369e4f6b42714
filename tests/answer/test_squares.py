"""Penalties by squares: ``unbalanced_type="l2"``."""

from __future__ import annotations

import math

import networkx
import numpy as np
import ot
import pytest
import torch
from problems import solve_by_name

import torchgw
from torchgw.distances import DirectedDistance

INF = math.inf
RNG = np.random.default_rng(0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def table(n, directed=False):
    points = RNG.normal(size=(n, 2))
    found = ot.dist(points, points, "euclidean")
    found /= found.max()
    return found + (0.3 * RNG.uniform(size=(n, n)) if directed else 0.0)


D_X, D_Y = table(20), table(25)
ONE_WAY, OTHER = table(20, directed=True), table(25, directed=True)
A, B = RNG.uniform(0.3, 1, 20), RNG.uniform(0.3, 1, 25)
A, B = A / A.sum(), 1.2 * B / B.sum()
LINEAR = RNG.uniform(size=(20, 25))


def objective(plan, first, second, a, b, rho, epsilon, alpha=1.0, linear=None):
    """The objective as its definition says, as a function of a tensor."""
    p, q, mass = plan.sum(1), plan.sum(0), plan.sum()
    total = p @ first**2 @ p + q @ second**2 @ q - 2 * ((first @ plan @ second.T) * plan).sum()
    total = alpha * total
    if linear is not None:
        total = total + (1 - alpha) * (linear * plan).sum()
    for weight, masses, given in zip(rho, (p, q), (a, b), strict=True):
        if math.isfinite(weight):
            pairs = torch.outer(masses, masses) - torch.outer(given, given)
            total = total + weight / 2 * (pairs**2).sum()
    product = torch.outer(a, b)
    entropy = mass * (plan * (plan / product).log()).sum()
    return total + epsilon * (entropy - mass**2 / 2 + product.sum() ** 2 / 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rho", "linear", "directed", "weighted"),
    [
        (50.0, False, False, False),
        ((50.0, 200.0), True, False, True),
        ((INF, 100.0), True, False, False),
        ((0.0, 100.0), False, False, False),
        (500.0, False, True, True),
    ],
)
def test_no_entry_of_the_plan_could_do_better(rho, linear, directed, weighted, device):
    sides = (DirectedDistance(ONE_WAY), DirectedDistance(OTHER)) if directed else ()
    data = {} if directed else {"D_X": D_X, "D_Y": D_Y}
    weights = {"a": A, "b": B} if weighted else {}
    beside = {"M": LINEAR, "alpha": 0.6} if linear else {}
    found = solve_by_name(
        *sides, **data, **weights, **beside, unbalanced=rho, unbalanced_type="L2", epsilon=0.05,
        scale=None, random_state=0, device=device, precision="float64", n_init=1,
    )  # fmt: skip
    assert found.converged
    a, b = (weights["a"], weights["b"]) if weighted else (np.full(20, 1 / 20), np.full(25, 1 / 25))
    costs = (ONE_WAY, OTHER) if directed else (D_X, D_Y)
    pair = rho if isinstance(rho, tuple) else (rho, rho)
    plan = torch.as_tensor(found.plan).double().cpu().requires_grad_()
    first, second, a, b, extra = map(torch.as_tensor, (*costs, a, b, LINEAR))
    value = objective(
        plan, first, second, a, b, pair, 0.05, 0.6 if linear else 1.0, extra if linear else None
    )
    assert found.report.objective == pytest.approx(float(value.detach()), abs=1e-10)
    (slope,) = torch.autograd.grad(value, plan)
    if pair[0] == INF:
        # rows that are held
        slope = slope - slope.mean(1, keepdim=True)
    mean = (plan * slope.abs()).sum() / plan.sum()
    assert float(mean.detach()) < 2e-4
    by_weights = found.lazy_plan.weights[0] / found.lazy_plan.weights[0].sum()
    np.testing.assert_allclose(torch.as_tensor(by_weights).cpu(), a / a.sum(), rtol=1e-12)


def hops(graph):
    return np.asarray(networkx.floyd_warshall_numpy(graph))


# half a percent of the mass, by so low a price of the rest
@pytest.mark.filterwarnings("ignore:The plan moves:torchgw.TorchGWWarning")
@pytest.mark.parametrize(
    ("sides", "rho", "options"),
    [
        ("parts", 0.5, {}),
        ("point", 25.0, {}),
        ("ring", 25.0, {"epsilon": 0.05, "scale": None}),
    ],
)
def test_hops_of_graphs_come_to_a_stationary_plan(sides, rho, options):
    """Plans underflowed, or masses without weight led the others away, up to 1e49."""
    rng = np.random.default_rng(3)
    tree, ring = hops(networkx.random_labeled_tree(30, seed=3)), hops(networkx.cycle_graph(12))
    weights, others = rng.dirichlet(np.ones(30)), rng.dirichlet(np.ones(12))
    if sides == "parts":
        table = hops(networkx.barabasi_albert_graph(140, 2, seed=0))
        first, second = table[:60, :60], table[60:110, 60:110]
        a, b = np.full(60, 1 / 60), np.full(50, 1 / 50)
    elif sides == "point":
        first, second, a, b = tree, np.zeros((1, 1)), weights, np.ones(1)
    else:
        first, second, a, b = tree, ring, 2 * weights, others
    found = solve_by_name(
        D_X=first, D_Y=second, a=a, b=b, unbalanced=rho, unbalanced_type="l2", random_state=0,
        **options,
    )  # fmt: skip
    assert found.converged
    assert found.report.mass > 1e-3
    # logarithms of entries that have underflowed
    plan = torch.as_tensor(found.plan).clamp_min(1e-300).requires_grad_()
    tables = map(torch.as_tensor, (first, second, a, b))
    value = objective(plan, *tables, (rho, rho), found.epsilon)
    assert found.report.objective == pytest.approx(float(value.detach()), rel=1e-9)
    (slope,) = torch.autograd.grad(value, plan)
    # the slope of a plan that misses by the tolerance of 1e-5, times costs of up to 100
    plan = plan.detach()
    assert float((plan * slope.abs()).sum() / plan.sum()) < 2e-4


def test_little_entropy_comes_to_the_plan_of_pot():
    a, b = np.full(20, 1 / 20), np.full(25, 1 / 25)
    pots = ot.gromov.fused_unbalanced_gromov_wasserstein(
        D_X, D_Y, wx=a, wy=b, reg_marginals=(100.0, 300.0), epsilon=0, divergence="l2",
        unbalanced_solver="mm", alpha=0, max_iter=200, tol=1e-9,
    )[0]  # fmt: skip
    ours = torchgw.solve(
        D_X=D_X,
        D_Y=D_Y,
        unbalanced=(100.0, 300.0),
        epsilon=1e-3,
        scale=None,
        random_state=0,
        n_init=1,
        options=torchgw.Options(unbalanced_type="l2"),
    )
    costs = [
        float(
            objective(
                torch.as_tensor(np.maximum(plan, 1e-300)),
                *map(torch.as_tensor, (D_X, D_Y, a, b)),
                (100.0, 300.0),
                0.0,
            )
        )
        for plan in (ours.plan, pots)
    ]
    assert costs[0] <= 1.01 * costs[1]


def test_points_and_features_by_defaults():
    X, Y = RNG.normal(size=(14, 3)), RNG.normal(size=(12, 2))
    found = torchgw.solve(
        X,
        Y,
        features=(X[:, :1], Y[:, :1]),
        unbalanced=1e3,
        random_state=0,
        options=torchgw.Options(unbalanced_type="l2"),
    )
    assert found.converged
    assert 0.5 < found.report.mass < 1
    assert found.report.penalty > 0
    # what the search of the first penalties has found
    assert found.alternatives
    moved = found.transform(X[:2], F_new=X[:2, :1])
    np.testing.assert_allclose(moved, found.lazy_plan.barycentric(Y)[:2], atol=1e-6)


def test_a_free_side_has_no_penalty():
    plain, squared = (
        solve_by_name(D_X=D_X, D_Y=D_Y, unbalanced=(INF, 0), random_state=0, n_init=1, **kind)
        for kind in ({}, {"unbalanced_type": "l2"})
    )
    np.testing.assert_array_equal(plain.plan, squared.plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unbalanced_type": "l2"}, "pass its weight"),
        ({"unbalanced_type": "semirelaxed", "unbalanced": 1.0}, r"unbalanced=\(inf, 0\)"),
        ({"unbalanced": 1.0, "mass": 0.5}, "Pass one"),
        ({"unbalanced": 1.0, "differentiable": "value", "epsilon": 0.1}, "`differentiable`"),
        ({"unbalanced": 1.0, "checkpoint": "state"}, "`checkpoint`"),
        ({"unbalanced": 1.0, "M": LINEAR, "alpha": 0.0}, "`alpha=0`"),
        ({"unbalanced": 1.0, "polish": True}, "polish=False"),
        ({"unbalanced": 1.0, "regularization": "proximal"}, "entropic"),
        ({"unbalanced": 1.0, "distributed": "auto"}, "unbalanced_type"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_the_work(options, message, monkeypatch):
    monkeypatch.setattr("torchgw._api.build_providers", None)
    with pytest.raises((torchgw.InvalidInputError, torchgw.UnsupportedError), match=message):
        solve_by_name(D_X=D_X, D_Y=D_Y, **{"unbalanced_type": "l2", **options})


def test_the_penalty_keeps_the_digits_that_a_heavy_one_multiplies():
    given = {"D_X": D_X, "D_Y": D_Y, "epsilon": 0.05, "random_state": 0}
    found = solve_by_name(**given, unbalanced=1e9, unbalanced_type="l2")
    tables = (torch.as_tensor(table) for table in (found.plan, D_X, D_Y))
    weights = (torch.full((n,), 1 / n, dtype=torch.float64) for n in found.plan.shape)
    wanted = objective(*tables, *weights, (1e9, 1e9), 0.05)
    assert found.log["objective"] == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.filterwarnings("ignore:Rounding ends the solve:torchgw.ConvergenceWarning")
@pytest.mark.parametrize("seed", [1, 2])
def test_masses_that_float32_does_not_settle_end_where_the_objective_is_flat(seed):
    """Masses of points fall below what float32 holds, in which products with them were no numbers.

    The last of the solves may be at the limit of the precision.
    """
    random = np.random.default_rng(seed)
    points = random.normal(size=(12, 3)), random.normal(size=(14, 3))
    tables = dict(
        zip(("D_X", "D_Y"), (ot.dist(one, one, "euclidean") for one in points), strict=True)
    )
    options = {**tables, "unbalanced": 5.0, "unbalanced_type": "l2", "random_state": 0}
    found = solve_by_name(**options, precision="float32")
    exact = solve_by_name(**options, precision="float64")
    assert found.status in {torchgw.Status.FLAT, torchgw.Status.PRECISION_LIMIT}
    # objectives are compared up to the rounding of exponents in float32, 2e-4 here
    assert found.report.objective == pytest.approx(exact.report.objective, rel=2e-4)


def test_a_plan_that_moves_less_and_less_is_refused():
    """One of the two points would have to be left out, and a plan from a x b treats them alike."""
    apart = np.array([[0.0, 1.7], [1.7, 0.0]])
    with pytest.raises(torchgw.NumericalError, match="moves nothing here"):
        torchgw.solve(
            D_X=apart,
            D_Y=np.zeros((1, 1)),
            unbalanced=1.0,
            options=torchgw.Options(unbalanced_type="l2"),
        )
