"""``torchgw.pot.solve_gromov`` against ``ot.solve_gromov``, call by call."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import ot
import pytest
import torch
from problems import distance_matrices, random_weights
from scipy.spatial.distance import cdist

import torchgw
from torchgw.pot import solve_gromov

N, M = 25, 20
COSTS = distance_matrices(N, M)
LINEAR = np.random.default_rng(0).uniform(size=(N, M))
WEIGHTS = {"a": random_weights(N), "b": random_weights(M, 1)}
CALLS = {
    "reg": {"reg": 0.02},
    "reg, weights": {"reg": 0.02, **WEIGHTS},
    "reg, M": {"reg": 0.02, "M": LINEAR},
    "reg, M, alpha": {"reg": 0.05, "M": LINEAR, "alpha": 0.2},
    "reg, M, alpha 1": {"reg": 0.02, "M": LINEAR, "alpha": 1},
    "reg, partial": {"reg": 0.05, "unbalanced": 0.3, "unbalanced_type": "partial"},
    # bounds do not bind
    "reg 1, partial": {"reg": 1.0, "unbalanced": 0.5, "unbalanced_type": "partial"},
    "reg, partial, weights": {
        "reg": 0.5,
        "unbalanced": 0.6,
        "unbalanced_type": "partial",
        **WEIGHTS,
    },
    "reg, partial, M": {"reg": 0.05, "unbalanced": 0.6, "unbalanced_type": "partial", "M": LINEAR},
    "reg, KL": {"reg": 0.02, "unbalanced": 0.3},
    "reg, KL, alpha, weights": {"reg": 0.05, "unbalanced": 0.5, "alpha": 0.8, **WEIGHTS},
    "reg, semirelaxed": {"reg": 0.02, "unbalanced_type": "semirelaxed"},
    "reg, semirelaxed, M": {"reg": 0.02, "unbalanced_type": "semirelaxed", "M": LINEAR},
    "reg, M, alpha 0": {"reg": 0.02, "M": LINEAR, "alpha": 0},
    "exact": {},
    "exact, weights": WEIGHTS,
    "exact, partial": {"unbalanced": 0.7, "unbalanced_type": "partial"},
    "exact, partial, M": {"unbalanced": 0.7, "unbalanced_type": "partial", "M": LINEAR},
    "exact, semirelaxed": {"unbalanced_type": "semirelaxed"},
    "exact, semirelaxed, M": {"unbalanced_type": "semirelaxed", "M": LINEAR, "a": WEIGHTS["a"]},
    "exact, KL": {"unbalanced": 0.3},
    "reg, KL, M": {"reg": 0.02, "unbalanced": 0.3, "M": LINEAR},
    "exact, M": {"M": LINEAR},
    "exact, M, alpha": {"M": LINEAR, "alpha": 0.2, **WEIGHTS},
    "exact, M, alpha 1": {"M": LINEAR, "alpha": 1},
}
KL_CALLS = {
    "reg": {"reg": 0.5},
    "reg, weights": {"reg": 0.5, **WEIGHTS},
    "reg, M": {"reg": 0.2, "M": LINEAR},
    "exact": {},
    "exact, M, weights": {"M": LINEAR, **WEIGHTS},
}


def solve_by_pot(**call):
    with warnings.catch_warnings():
        # KL problems without M: "M_samp is None but alpha_samp > 0"
        warnings.simplefilter("ignore", UserWarning)
        return ot.solve_gromov(*COSTS, **call)


def test_signature_is_that_of_pot():
    ours, theirs = (inspect.signature(f).parameters for f in (solve_gromov, ot.solve_gromov))
    assert list(ours) == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in ours)


SLOW = {"exact, KL", "reg, KL", "reg, KL, alpha, weights", "reg, KL, M"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CALLS]
)
def test_value_is_that_of_pot_or_lower(name):
    expected = solve_by_pot(**CALLS[name])
    found = solve_gromov(*COSTS, **CALLS[name])
    assert isinstance(found.plan, np.ndarray)
    # without entropy the turns of a penalised problem get slow, as POT's do
    assert found.status.converged or name == "exact, KL"
    # the same units: at POT's own plan the value below would be POT's
    assert found.value <= expected.value + 1e-6
    if abs(found.value - expected.value) < 1e-6:
        assert np.abs(found.plan - expected.plan).sum() < 1e-2
    moved = found.plan.sum()
    if "KL" in name:
        assert 0.1 < moved < 0.99
    else:
        partial = "partial" in name
        assert moved == pytest.approx(CALLS[name]["unbalanced"] if partial else 1, abs=1e-6)
    for marginal in found.marginals:
        assert marginal.sum() == pytest.approx(moved, abs=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in CALLS
        if any(kind in name for kind in ("partial", "semi", "KL"))
    ],
)
def test_relaxed_problems_started_at_pots_plan_have_pots_value(name):
    expected = solve_by_pot(**CALLS[name])
    found = solve_gromov(*COSTS, **CALLS[name], plan_init=expected.plan)
    assert found.status.converged or name == "exact, KL"
    # POT's entropic partial solver with M ends far above: its plan is not stationary
    if name == "reg, partial, M":
        assert found.value < expected.value - 0.05
    else:
        # where it is, the objective is the same number; steps of ours may leave a flat place
        assert found.value == pytest.approx(expected.value, rel=1e-3, abs=1e-5)
    if name.startswith("reg, KL"):
        # the same fixed point, to the tolerances of both
        assert found.value == pytest.approx(expected.value, rel=1e-8)
        assert np.abs(found.plan - expected.plan).sum() < 1e-5


@pytest.mark.parametrize("name", ["reg", "reg, M, alpha", "exact", "exact, M, alpha"])
def test_started_at_pots_plan_it_is_pots_optimum(name):
    expected = solve_by_pot(**CALLS[name])
    found = solve_gromov(*COSTS, **CALLS[name], plan_init=expected.plan)
    # proximal steps may leave a saddle point downwards
    assert found.value <= expected.value + 1e-6
    # ot.solve_gromov of POT 0.9.7 with M solves for an epsilon of 0.1 whatever reg is
    if name == "reg":
        assert found.value == pytest.approx(expected.value, abs=1e-6)
        assert np.abs(found.plan - expected.plan).sum() < 1e-3


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if "reg" in name else name for name in KL_CALLS],
)
def test_kl_loss(name):
    call = {"loss": "KL", **KL_CALLS[name]}
    expected = ot.solve_gromov(*COSTS, **call)
    again = solve_gromov(*COSTS, **call, plan_init=expected.plan)
    assert again.value <= expected.value + 1e-7
    # with M POT's plan is that of reg=0.1
    if "reg" in call and "M" not in call:
        assert again.value == pytest.approx(expected.value, rel=1e-7)
        assert np.abs(again.plan - expected.plan).sum() < 1e-5
    # this loss has many optima: a search may end in one that is a little worse
    found = solve_gromov(*COSTS, **{**call, "loss": "kl"})
    assert found.status.converged
    assert found.value <= expected.value + 0.03 * abs(expected.value)


def test_value_parts_mean_what_pots_mean():
    """At the same plan: linear and quadratic part, and the entropy of the value."""
    call = CALLS["reg, M, alpha"]
    expected = ot.solve_gromov(*COSTS, **call)
    found = solve_gromov(*COSTS, **call, plan_init=expected.plan)
    plan = found.plan
    assert found.value_linear == pytest.approx(0.8 * (plan * LINEAR).sum(), rel=1e-6)
    entropy = (plan * np.log(plan)).sum()
    assert found.value == pytest.approx(
        found.value_linear + found.value_quad + 0.05 * entropy, rel=1e-6
    )


@pytest.mark.slow
def test_ppa_is_sharper_than_pgd():
    with warnings.catch_warnings():
        # POT says that its last Sinkhorn solves stop early
        warnings.simplefilter("ignore")
        expected = ot.solve_gromov(*COSTS, reg=0.02, method="PPA")
    ppa = solve_gromov(*COSTS, reg=0.02, method="PPA")
    pgd = solve_gromov(*COSTS, reg=0.02, method="PGD")
    assert ppa.value_quad < pgd.value_quad
    assert ppa.value_quad <= expected.value_quad + 1e-4


def test_tensors_in_tensors_out():
    tensors = [torch.tensor(cost, dtype=torch.float32) for cost in COSTS]
    found = solve_gromov(*tensors, reg=0.05)
    assert found.plan.dtype == torch.float32
    assert isinstance(found.potentials[0], torch.Tensor)
    assert found.lazy_plan.shape == (N, M)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "absolute"}, "'KL'"),
        ({"reg_type": "l2"}, "reg_type"),
        ({"unbalanced": 0.5, "reg": 0.1, "method": "PPA"}, "both of its marginals"),
        ({"n_threads": 4}, "one thread"),
        ({"unbalanced": 0.5, "unbalanced_type": "TV"}, "'partial'"),
        ({"method": "BAPG", "reg": 0.1}, "'PPA'"),
        ({"method": "PGD"}, "regularised"),
    ],
)
def test_what_is_not_solved_is_refused(change, message):
    with pytest.raises(torchgw.UnsupportedError, match=message):
        solve_gromov(*COSTS, **change)


def test_penalties_have_the_square_loss_of_pot():
    call = {"unbalanced": 0.5, "reg": 0.1}
    with pytest.warns(torchgw.TorchGWWarning, match="loss='kl'"):
        found = solve_gromov(*COSTS, loss="KL", **call)
    assert found.value == solve_gromov(*COSTS, **call).value


def test_penalties_leave_points_without_weight_alone():
    weights = np.append(0.0, np.full(N - 1, 1 / (N - 1)))
    call = {"unbalanced": 0.5, "reg": 0.1}
    found = solve_gromov(*COSTS, a=weights, **call)
    assert not found.plan[0].any()
    rest = solve_gromov(COSTS[0][1:, 1:], COSTS[1], **call)
    assert found.value == pytest.approx(rest.value, rel=1e-9)
    assert solve_gromov(*COSTS, max_iter=0, **call).status.name == "OUTER_LIMIT"


@pytest.mark.slow
def test_a_heavy_kl_penalty_is_balanced():
    strict = solve_gromov(*COSTS, reg=0.05, alpha=1)
    heavy = solve_gromov(*COSTS, reg=0.05, alpha=1, unbalanced=1e5)
    # the mass is off by about the cost over the penalty
    assert np.abs(strict.plan - heavy.plan).sum() < 1e-4


@pytest.mark.parametrize("value", [-0.5, 0, "much", float("nan")])
def test_bad_unbalanced(value):
    with pytest.raises(torchgw.InvalidInputError, match="`unbalanced` must be a positive number"):
        solve_gromov(*COSTS, reg=0.1, unbalanced=value)


def test_negative_reg():
    with pytest.raises(torchgw.InvalidInputError, match="`reg`"):
        solve_gromov(*COSTS, reg=-1.0)


@pytest.mark.parametrize("more", [{}, {"reg": 0.1}, {"unbalanced": 1.0}])
@pytest.mark.parametrize("alpha", [-0.1, 1.5, "much", float("nan")])
def test_bad_alpha(alpha, more):
    with pytest.raises(torchgw.InvalidInputError, match=r"`alpha` must be a number in \[0, 1\]"):
        solve_gromov(*COSTS, np.zeros((N, M)), alpha=alpha, **more)


def test_names_of_the_functions_of_ot_gromov():
    for name, here in (("C1", "Ca"), ("epsilon", "reg"), ("G0", "plan_init"), ("p", "a")):
        with pytest.raises(TypeError, match=f"no argument '{name}'. Did you mean '{here}'"):
            solve_gromov(np.ones((2, 2)), np.ones((2, 2)), **{name: 1})


def test_result_has_what_pots_has():
    found, expected = solve_gromov(*COSTS, reg=0.05), solve_by_pot(reg=0.05)
    # displacements belong to costs between points
    names = {name for name, kind in vars(type(expected)).items() if isinstance(kind, property)}
    for name in names - {"a_to_b", "b_to_a", "citation"}:
        assert hasattr(found, name), name
    assert np.array_equal(found.marginal_b, found.marginals[1])
    assert found.potential_a is found.potentials[0]
    assert abs(found.sparse_plan - found.plan).sum() < 1e-3
    assert found == found
    assert found != solve_gromov(*COSTS, reg=0.05)


def test_float32_in_float32_out():
    found = solve_gromov(*(cost.astype(np.float32) for cost in COSTS), reg=0.05)
    assert {array.dtype for array in (found.plan, *found.potentials)} == {np.dtype("float32")}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"plan_init": "near", "unbalanced_type": "semirelaxed"}, "`plan_init` must be one of"),
        ({"max_iter": "many"}, "`max_iter` must be a number"),
        ({"tol": -1.0}, "`tol` must be a number"),
    ],
)
def test_messages_name_the_argument(change, said):
    table = 1 - np.eye(4)
    with pytest.raises(torchgw.InvalidInputError, match=said):
        solve_gromov(table, table, **change)


@pytest.mark.parametrize("steps", [0, 1, 2, 1000])
def test_partial_plans_move_the_share_however_few_steps_there_are(steps):
    call = {"unbalanced": 0.7, "unbalanced_type": "partial"}
    first = solve_gromov(*COSTS, **call, max_iter=0)
    found = solve_gromov(*COSTS, **call, max_iter=steps)
    assert found.plan.sum() == pytest.approx(0.7, abs=1e-12)
    assert found.value <= first.value + 1e-12


@pytest.mark.filterwarnings("ignore:numItermax reached")
@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
@pytest.mark.parametrize("seed", [3, 12, 15])
def test_partial_plans_are_worth_what_pots_are_or_less(seed):
    """Of these 100 points POT moves .76 in one; in two its unfinished linear problems help it."""
    rng = np.random.default_rng(seed)
    tables = [cdist(points, points) for points in (rng.normal(size=(100, d)) for d in (2, 3))]
    Ca, Cb = (table / table.max() for table in tables)
    call = {"unbalanced": 0.7, "unbalanced_type": "partial"}
    expected, found = ot.solve_gromov(Ca, Cb, **call), solve_gromov(Ca, Cb, **call)
    searched = torchgw.solve(D_X=Ca, D_Y=Cb, mass=0.7, polish=True, random_state=0)
    # a share of a plan that moves more is a plan that may be compared
    share = expected.plan * (0.7 / expected.plan.sum())
    value = float(solve_gromov(Ca, Cb, **call, plan_init=share, max_iter=0).log["loss"][0])
    assert expected.plan.sum() == pytest.approx(0.76 if seed == 3 else 0.7, abs=1e-9)
    for plan in (found.plan, np.asarray(searched.plan)):
        assert plan.sum() == pytest.approx(0.7, abs=1e-9)
        assert max(plan.sum(1).max(), plan.sum(0).max()) <= 0.01 + 1e-9
    assert searched.value <= found.value + 1e-6
    assert found.value <= value + 1e-9


@pytest.mark.parametrize(("n", "seed", "reg"), [(5, 4, 0.03), (12, 15, 0.05)])
def test_partial_plans_with_entropy_are_worth_what_pots_are_or_less(n, seed, reg):
    """Whole steps lead where POT's do: the first of these ended 40% above it by shorter ones."""
    rng = np.random.default_rng(seed)
    tables = [cdist(points, points) for points in (rng.normal(size=(n, d)) for d in (2, 3))]
    Ca, Cb = (table / table.max() for table in tables)
    call = {"unbalanced": 0.7, "unbalanced_type": "partial", "reg": reg}
    expected, found = ot.solve_gromov(Ca, Cb, **call), solve_gromov(Ca, Cb, **call)
    assert found.value <= expected.value + 1e-6 * abs(expected.value)


@pytest.mark.filterwarnings("ignore:numItermax reached")
@pytest.mark.parametrize("loss", ["L2", "KL"])
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize(
    "call", [{}, {"unbalanced_type": "semirelaxed"}, CALLS["exact, partial"]], ids=str
)
def test_where_costs_tie_values_are_those_of_pot(call, directed, loss):
    """Rounding chooses among the solutions of a linear problem of 0/1 tables, as in POT."""
    rng = np.random.default_rng(5)
    for n, m in ((5, 5), (9, 14), (16, 12), (20, 20), (23, 23)):
        drawn = [np.triu(rng.random((size, size)) < 0.3, 1) for size in (n, m)]
        Ca, Cb = ((half if directed else half + half.T).astype(float) for half in drawn)
        # directed ones and KL may take thousands of steps
        call = {**call, "loss": loss, "max_iter": 300}
        assert solve_gromov(Ca, Cb, **call).value == pytest.approx(
            ot.solve_gromov(Ca, Cb, **call).value, abs=1e-9
        )


@pytest.mark.parametrize("call", [{}, {"unbalanced_type": "semirelaxed"}], ids=str)
def test_where_costs_of_many_points_tie_values_are_those_of_pot(call):
    drawn = np.random.default_rng(7).random((2, 160, 160)) < 0.2
    Ca, Cb = ((half | half.T).astype(float) for half in np.triu(drawn, 1))
    found, expected = (solver(Ca, Cb, **call) for solver in (solve_gromov, ot.solve_gromov))
    assert found.value == pytest.approx(expected.value, abs=1e-9)


def test_a_linear_cost_may_tie_too_or_be_negative():
    rng = np.random.default_rng(2)
    Ca, Cb = ((table + table.T).astype(float) for table in rng.random((2, 12, 12)) < 0.3)
    for shift in (0, -3):
        M = rng.integers(0, 3, (12, 12)) + float(shift)
        found, expected = (solver(Ca, Cb, M) for solver in (solve_gromov, ot.solve_gromov))
        np.testing.assert_allclose(found.plan.sum(0), 1 / 12, rtol=1e-12)
        assert found.value <= expected.value + 1e-9
