"""``torchgw.pot.gromov`` against ``ot.gromov``, function by function."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import ot
import pytest
import torch
from problems import distance_matrices, random_weights
from scipy.spatial.distance import cdist
from scipy.special import xlogy

import torchgw
from torchgw import ConvergenceWarning, InvalidInputError, TorchGWWarning, UnsupportedError
from torchgw._sinkhorn.exact import ExactTransport, _by_scipy
from torchgw.pot import gromov, solve_gromov
from torchgw.pot._quadratic import quadratic
from torchgw.pot._vertices import partial_transport, transport

N, M = 12, 9
C1, C2 = distance_matrices(N, M)
P, Q = random_weights(N), random_weights(M, 1)
LINEAR = np.random.default_rng(0).uniform(size=(N, M))
RANDOM = np.random.default_rng(1)
# directed, with negative entries
D1, D2 = RANDOM.normal(size=(N, N)), RANDOM.normal(size=(M, M))

CALLS = {
    "gromov_wasserstein2": {"p": P, "q": Q},
    "fused_gromov_wasserstein2": {"M": LINEAR, "p": P, "q": Q, "alpha": 0.3},
    "semirelaxed_gromov_wasserstein2": {"p": P},
    "semirelaxed_fused_gromov_wasserstein2": {"M": LINEAR, "p": P},
    "partial_gromov_wasserstein2": {"p": P, "q": Q, "m": 0.6},
    "partial_fused_gromov_wasserstein2": {"M": LINEAR, "p": P, "q": Q, "m": 0.6},
    "entropic_gromov_wasserstein2": {"p": P, "q": Q, "epsilon": 0.1},
    "entropic_fused_gromov_wasserstein2": {"M": LINEAR, "p": P, "q": Q, "epsilon": 0.05},
    "BAPG_gromov_wasserstein2": {"p": P, "q": Q, "epsilon": 1.0},
    "BAPG_fused_gromov_wasserstein2": {"M": LINEAR, "p": P, "q": Q, "epsilon": 1.0},
    "entropic_semirelaxed_gromov_wasserstein2": {"p": P, "epsilon": 1.0, "max_iter": 50},
    "entropic_partial_gromov_wasserstein2": {"p": P, "q": Q, "m": 0.6, "reg": 0.5},
}


def test_names_and_signatures_are_pots():
    assert sorted(gromov.__all__) == sorted(ot.gromov.__all__)
    for name in gromov.__all__:
        ours, theirs = (
            inspect.signature(getattr(module, name)).parameters for module in (gromov, ot.gromov)
        )
        assert list(ours) == list(theirs), name
        assert all(ours[key].default == theirs[key].default for key in ours), name


# one of the calls ends after a few steps on purpose
@pytest.mark.filterwarnings("ignore:The plan still changes:torchgw._errors.ConvergenceWarning")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("directed", [False, True])
def test_values_plans_and_logs_are_pots(name, directed):
    tables = (D1, D2) if directed else (C1, C2)
    call = dict(zip(("C1", "C2"), tables, strict=True)) | CALLS[name]
    if directed and ("BAPG" in name or "entropic" in name):
        # noise has many optima: a large step stays at one
        call = {**call, "reg" if "partial" in name else "epsilon": 50.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, theirs = getattr(ot.gromov, name)(**call, log=True)
    found, ours = getattr(gromov, name)(**call, log=True)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert np.abs(ours["T"] - theirs["T"]).sum() < 1e-3
    # POT's linear solver has more to say, and that of partial problems has other points
    unknown = {"cost", "u", "v"} if "partial" in name else set()
    assert set(theirs) - {"result_code", "warning"} - unknown <= set(ours)
    if "cost" in ours:
        assert ours["cost"] == pytest.approx(theirs["cost"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    "name", [name for name in CALLS if not ("entropic" in name or "BAPG" in name)]
)
@pytest.mark.parametrize("loss", ["square_loss", "kl_loss"])
def test_gradients_are_those_of_differences(name, loss):
    call = {"C1": C1 + 0.1, "C2": C2 + 0.1, **CALLS[name], "loss_fun": loss}
    plan = getattr(gromov, name)(**call, log=True)[1]["T"]
    tensors = {key: torch.tensor(call[key], requires_grad=True) for key in ("C1", "C2")}
    if "M" in call:
        tensors["M"] = torch.tensor(LINEAR, requires_grad=True)
    given = {key: torch.as_tensor(value) for key, value in call.items() if key in ("p", "q")}
    value = getattr(gromov, name)(**{**call, **given, **tensors})
    (3 * value).backward()
    for key, tensor in tensors.items():
        move = RANDOM.normal(size=tensor.shape)
        move = move + move.T if key != "M" else move
        # from the plan found, which stays optimal for a small move
        ends = [
            getattr(gromov, name)(**{**call, key: call[key] + step * move, "G0": plan})
            for step in (1e-5, -1e-5)
        ]
        slope = float((tensor.grad * torch.as_tensor(move)).sum())
        assert slope == pytest.approx(3 * (ends[0] - ends[1]) / 2e-5, rel=2e-3, abs=1e-6)


def test_gradients_by_weights_and_alpha():
    p, alpha = torch.tensor(P, requires_grad=True), torch.tensor(0.3, requires_grad=True)
    value = gromov.fused_gromov_wasserstein2(LINEAR, C1, C2, p, torch.as_tensor(Q), alpha=alpha)
    value.backward()
    _, log = ot.gromov.fused_gromov_wasserstein2(LINEAR, C1, C2, P, Q, alpha=0.3, log=True)
    expected = log["u"] - log["u"].mean()
    assert np.allclose(p.grad.numpy(), expected, atol=1e-8)
    assert float(alpha.grad) == pytest.approx(log["quad_loss"] / 0.3 - log["lin_loss"] / 0.7)


@pytest.mark.parametrize(
    ("solver", "divergence"),
    [("mm", "kl"), ("sinkhorn", "kl"), ("lbfgsb", "kl"), ("mm", "l2"), ("lbfgsb", "l2")],
)
def test_unbalanced_problems_are_pots(solver, divergence):
    call = {
        "Cx": C1,
        "Cy": C2,
        "wx": 2 * P,
        "wy": Q,
        "reg_marginals": (20.0, 10.0),
        "epsilon": 0.5,
        "divergence": divergence,
        "unbalanced_solver": solver,
        "max_iter": 20,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan, _, theirs = ot.gromov.fused_unbalanced_gromov_wasserstein(**call, log=True)
    found, _, ours = gromov.fused_unbalanced_gromov_wasserstein(**call, log=True)
    assert ours["fugw_cost"] == pytest.approx(theirs["fugw_cost"], rel=1e-4)
    assert np.abs(found - plan).sum() < 1e-2 * plan.sum()


def test_gradients_of_unbalanced_values():
    weight = torch.tensor(P, requires_grad=True)
    table = torch.tensor(C1, requires_grad=True)
    call = {"reg_marginals": 5.0, "epsilon": 0.5, "unbalanced_solver": "sinkhorn", "max_iter": 1000}
    value = gromov.fused_unbalanced_gromov_wasserstein2(
        table, C2, weight, torch.as_tensor(Q), **call
    )
    value.backward()
    move = RANDOM.uniform(size=N)
    ends = [
        gromov.fused_unbalanced_gromov_wasserstein2(C1, C2, P + step * move, Q, **call)
        for step in (1e-5, -1e-5)
    ]
    slope = float((weight.grad * torch.as_tensor(move)).sum())
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3)
    assert table.grad.abs().sum() > 0


def test_barycenters_are_pots():
    for names, features in (
        ("gromov_barycenters", ()),
        ("fgw_barycenters", ([LINEAR, LINEAR[:9]],)),
    ):
        call = {"max_iter": 5, "random_state": 0}
        expected = getattr(ot.gromov, names)(5, *features, [C1, C2], **call)
        found = getattr(gromov, names)(5, *features, [C1, C2], **call)
        for ours, theirs in zip(np.atleast_3d(found[-1]), np.atleast_3d(expected[-1]), strict=True):
            assert np.allclose(ours, theirs, atol=1e-6)


def test_kinds_of_arrays():
    single = gromov.gromov_wasserstein(C1.astype(np.float32), C2.astype(np.float32))
    assert single.dtype == np.float32
    tensor = gromov.gromov_wasserstein(torch.as_tensor(C1).float(), torch.as_tensor(C2).float())
    assert tensor.dtype == torch.float32
    # POT turns plans of whole numbers into zeros
    whole = gromov.gromov_wasserstein(np.ceil(3 * C1).astype(int), np.ceil(3 * C2).astype(int))
    assert whole.sum() == pytest.approx(1)


def test_polished_plans_have_zeros_that_are_zero():
    plan = gromov.gromov_wasserstein(C1, C1[::-1, ::-1])
    assert (plan == 0).sum() >= N * N - 2 * N


def test_signs_have_a_tolerance():
    points = RANDOM.normal(size=(8, 3))
    squares = (points**2).sum(1)
    table = squares + squares[:, None] - 2 * points @ points.T
    np.fill_diagonal(table, -1.4e-14)
    assert np.isfinite(solve_gromov(table, table, loss="KL").value)
    with pytest.raises(torchgw.InvalidInputError, match="must not be negative"):
        solve_gromov(table - 1, table, loss="KL")


def test_messages_name_the_arguments_of_the_call():
    with pytest.raises(torchgw.InvalidInputError, match="`plan_init` must have the marginals `a`"):
        solve_gromov(C1, C2, plan_init=np.ones((N, M)))
    with pytest.raises(torchgw.InvalidInputError, match="`Ca` must be a square"):
        solve_gromov(LINEAR, C2)
    with pytest.raises(torchgw.InvalidInputError, match="same sum"):
        gromov.gromov_wasserstein(C1, C2, 2 * P, Q)
    with pytest.raises(NotImplementedError, match="implicit"):
        gromov.entropic_gromov_wasserstein2(torch.tensor(C1, requires_grad=True), C2)
    with pytest.warns(torchgw.TorchGWWarning, match="'n_dummies'"):
        gromov.partial_gromov_wasserstein(C1, C2, m=0.5, n_dummies=3)


def test_linear_problems_without_pot():
    cost = RANDOM.normal(size=(N, M))
    ours, scipys = ExactTransport(P, Q)(cost), _by_scipy(P, Q, cost)
    assert (ours.plan * cost).sum() == pytest.approx((scipys.plan * cost).sum())
    for found in (ours, scipys):
        f, g = found.u, found.v
        assert (f[:, None] + g <= cost + 1e-9).all()
        assert f @ P + g @ Q == pytest.approx((found.plan * cost).sum())


def test_linear_problems_by_parts():
    """Large problems after the first are solved on some entries, to the optimum of all."""
    rng = np.random.default_rng(0)
    p, q = random_weights(170), random_weights(160, 1)
    solve, cost = transport(p, q), rng.random((170, 160))
    for _ in range(3):
        found = solve(cost, 0.0)
        assert np.vdot(found.plan, cost) == pytest.approx(ot.emd2(p, q, cost), rel=1e-9)
        f, g = found.potentials()
        assert (cost - f[:, None] - g).min() > -1e-9
        cost = cost + 0.02 * rng.random(cost.shape)


def test_linear_problems_by_parts_end_below_a_value(monkeypatch):
    rng = np.random.default_rng(0)
    p, q = random_weights(170), random_weights(160, 1)
    x, y = rng.random((170, 2)), rng.random((160, 2))
    cost, before = cdist(x, y), cdist(x[:, ::-1], y)
    best = ot.emd2(p, q, cost)
    counts, values = [], []
    for share in (-np.inf, 0.999, 1.2, 9.0):
        solve, rounds = ExactTransport(p, q), []
        solve(before)
        simplex = solve._by_simplex
        monkeypatch.setattr(
            solve, "_by_simplex", lambda *given, r=rounds, s=simplex: r.append(1) or s(*given)
        )
        found = solve(cost, below=share * best)
        assert abs(found.plan.sum(1) - p).max() < 1e-12
        counts.append(len(rounds))
        values.append(np.vdot(found.plan, cost) / best)
    # no plan is below the least value
    assert values[:2] == pytest.approx([1, 1], rel=1e-9)
    assert 1 + 1e-6 < values[2] < 1.2 < values[3] < 9
    assert counts[0] == counts[1] > counts[2] > counts[3] == 1


@pytest.mark.parametrize("kind", ["clouds", "weights", "directed", "kernels", "fused"])
def test_large_partial_plans_end_where_no_linear_problem_gains(kind):
    """Whatever entries they were found on."""
    rng = np.random.default_rng(0)
    shape = n, m = 170, 155
    first, second = (cdist(X, X) for X in (rng.normal(size=(n, 2)), rng.normal(size=(m, 3))))
    p, q, linear, alpha = np.full(n, 1 / n), np.full(m, 1 / m), 0.0, 1.0
    if kind == "weights":
        p, q = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))
    elif kind == "directed":
        first, second = (C * rng.uniform(0.5, 1.5, C.shape) for C in (first, second))
    elif kind == "kernels":
        # of opposite signs the objective is convex, and vertices are mixed
        first, second = np.exp(-(first**2)), -np.exp(-(second**2))
    elif kind == "fused":
        linear, alpha = rng.uniform(size=shape), 0.5
    call = {"p": p, "q": q, "m": 0.7, "log": True, "numItermax": 100}
    if kind == "fused":
        plan, log = gromov.partial_fused_gromov_wasserstein(
            linear, first, second, alpha=alpha, **call
        )
    else:
        plan, log = gromov.partial_gromov_wasserstein(first, second, **call)
    term = quadratic(first, second, "square_loss", None)
    slope = (1 - alpha) * linear + alpha * term.gradient(plan)
    value = (1 - alpha) * np.sum(linear * plan) + alpha * term.value(plan)
    best = partial_transport(p, q, 0.7)(slope).plan
    assert log["loss"][-1] == pytest.approx(value, rel=1e-10)
    assert plan.sum() == pytest.approx(0.7, abs=1e-12)
    assert max((plan.sum(1) - p).max(), (plan.sum(0) - q).max()) <= 1e-12
    assert abs(np.vdot(slope, plan - best)) <= (0.05 if kind == "kernels" else 1e-9) * value


@pytest.mark.filterwarnings("ignore:numItermax reached")
def test_large_fused_partial_plans_are_worth_what_pots_are():
    rng = np.random.default_rng(3)
    first, second = (cdist(X, X) for X in (rng.normal(size=(170, 2)), rng.normal(size=(155, 3))))
    call = {"M": rng.uniform(size=(170, 155)), "alpha": 0.5}
    call |= {"unbalanced": 0.2, "unbalanced_type": "partial"}
    expected = ot.solve_gromov(first / first.max(), second / second.max(), **call)
    found = torchgw.pot.solve_gromov(first / first.max(), second / second.max(), **call)
    assert expected.plan.sum() == pytest.approx(0.2)
    assert found.value <= expected.value + 1e-9


def test_prices_of_an_assignment():
    cost = RANDOM.normal(size=(N, N))
    weights = np.full(N, 1 / N)
    found = transport(weights, weights)(cost)
    f, g = found.potentials()
    assert (f[:, None] + g <= cost + 1e-9).all()
    assert (f.sum() + g.sum()) / N == pytest.approx((found.plan * cost).sum())


@pytest.mark.parametrize(("rank", "reg"), [(2, 0.0), (None, 0.1)])
def test_plans_of_low_rank_have_the_value_that_they_say(rank, reg):
    """Of POT's rescaled costs, with its entropy."""
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(12, 2)) * 3, rng.normal(size=(15, 3))
    Q, R, g, log = gromov.lowrank_gromov_wasserstein_samples(X, Y, rank=rank, reg=reg, log=True)
    plan = log["lazy_plan"][:]
    np.testing.assert_allclose(plan, Q @ np.diag(1 / g) @ R.T)
    np.testing.assert_allclose(plan.sum(0), 1 / 15, atol=1e-8)
    np.testing.assert_allclose(log["lazy_plan"][3:5, 1], plan[3:5, 1])
    factors = [ot.lowrank.compute_lr_sqeuclidean_matrix(points, points, True) for points in (X, Y)]
    parts = ot.gromov.init_matrix(*(left @ right.T for left, right in factors), *_sums(plan))
    np.testing.assert_allclose(log["value_quad"], ot.gromov.gwloss(*parts, plan), rtol=1e-6)
    entropy = -sum(float(xlogy(part, part).sum()) for part in (Q, R, g))
    np.testing.assert_allclose(log["value"], log["value_quad"] - reg * entropy)


def _sums(plan):
    return plan.sum(1), plan.sum(0)


def test_low_rank_refuses_what_it_does_not_hold():
    X = np.random.default_rng(0).normal(size=(8, 2))
    solve = gromov.lowrank_gromov_wasserstein_samples
    with pytest.raises(UnsupportedError, match="no lower bound"):
        solve(X, X, rank=2, alpha=0.1)
    with pytest.raises(UnsupportedError, match="cost_factorized"):
        solve(X, X, rank=2, cost_factorized_Xs=(X, X))
    with pytest.raises(InvalidInputError, match="`rank`"):
        solve(X, X, rank=9)
    with pytest.warns(TorchGWWarning, match="numItermax_dykstra"):
        solve(X, X, rank=2, numItermax_dykstra=5)


PLACES = np.random.default_rng(3)
ATOMS = np.stack([np.abs(np.subtract.outer(x, x)) for x in PLACES.uniform(size=(3, 8))])
FEATURES = PLACES.normal(size=(3, 8, 2))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("reg", [0.0, 0.01])
def test_unmixing_is_pots(fused, reg):
    graph = ATOMS[1][::-1, ::-1] + 0.1 * ATOMS[0]
    call = {"C": graph, "Cdict": ATOMS, "reg": reg, "q": Q[:8] / Q[:8].sum()}
    name = "gromov_wasserstein_linear_unmixing"
    if fused:
        name = f"fused_{name}"
        call |= {"Y": FEATURES[1][::-1], "Ydict": FEATURES, "alpha": 0.4}
    (w, *_, plan, value), (theirs, *_, loss) = (
        getattr(module, name)(**call) for module in (gromov, ot.gromov)
    )
    assert value <= loss + 1e-6
    # both stop at a relative change of 1e-5
    assert np.abs(w - theirs).sum() < 0.05
    assert w.sum() == pytest.approx(1)
    assert np.allclose(plan.sum(1), 1 / 8)
    mean = np.tensordot(w, ATOMS, 1)
    objective = {"C1": graph, "C2": mean, "q": call["q"], "G0": plan, "max_iter": 0, "log": True}
    if fused:
        cost = cdist(call["Y"], np.tensordot(w, FEATURES, 1), "sqeuclidean")
        _, log = gromov.fused_gromov_wasserstein(cost, alpha=0.4, **objective)
    else:
        _, log = gromov.gromov_wasserstein(**objective)
    assert value == pytest.approx(log["loss"][0] - reg * w @ w, abs=1e-10)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("adam", [False, True])
def test_a_dictionary_learns(fused, adam):
    shares = np.random.default_rng(2).dirichlet(np.ones(3), size=6)
    mixed = [np.tensordot(w, ATOMS, 1) for w in shares]
    call = {"Cs": mixed, "D": 2, "nt": 8, "random_state": 0, "use_log": True, "epochs": 8}
    call |= {"batch_size": 6, "use_adam_optimizer": adam, "max_iter_outer": 5}
    name, rate = "gromov_wasserstein_dictionary_learning", 0.05 if adam else 8.0
    if fused:
        call |= {"Ys": [FEATURES[0]] * 6, "alpha": 0.5, "learning_rate_Y": rate}
        name = f"fused_{name}"
    call |= {"learning_rate_C" if fused else "learning_rate": rate}
    *atoms, log = getattr(gromov, name)(**call)
    again = [np.asarray(part) for part in getattr(gromov, name)(**call)[:-1]]
    assert all(np.array_equal(*pair) for pair in zip(atoms, again, strict=True))
    assert min(log["loss_epochs"]) < 0.7 * log["loss_epochs"][0]
    assert (atoms[0] >= 0).all()
    assert np.array_equal(atoms[0], atoms[0].transpose(0, 2, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Cdict": ATOMS[0]}, "`Cdict` must have shape"),
        ({"q": 2 * Q[:8]}, "same sum"),
        ({"C": ATOMS[0][:, :3]}, "`C` must be a square matrix"),
    ],
)
def test_dictionaries_say_what_is_wrong(change, message):
    with pytest.raises(InvalidInputError, match=message):
        gromov.gromov_wasserstein_linear_unmixing(**{"C": ATOMS[0], "Cdict": ATOMS, **change})
    with pytest.raises(InvalidInputError, match="Unknown `projection="):
        gromov.gromov_wasserstein_dictionary_learning([ATOMS[0]], 2, 8, projection="none")


# without entropy several plans are as good, and which one it is depends on rounding
@pytest.mark.parametrize("epsilon", [pytest.param(0, marks=pytest.mark.exact), 0.5])
def test_sampled_plans_are_pots(epsilon):
    def loss(x, y):
        return abs(x - y)

    call = {"nb_samples_grad": (3, 1), "epsilon": epsilon, "max_iter": 4, "random_state": 0}
    found, expected = (
        module.sampled_gromov_wasserstein(C1, C2, P, Q, loss, **call)
        for module in (gromov, ot.gromov)
    )
    # to the error of POT's Sinkhorn iterations
    assert np.abs(found - expected).sum() < 1e-6


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("convert", [np.asarray, torch.tensor])
@pytest.mark.parametrize(
    "methods", [("random", "random"), ("spectral", "random"), ("fluid_fused", "pagerank")]
)
def test_quantized_plans_are_made_of_parts(methods, convert, fused):
    rng = np.random.default_rng(0)
    points, others = rng.normal(size=(20, 2)), rng.normal(size=(16, 3))
    F, G = rng.normal(size=(20, 2)), rng.normal(size=(16, 2))
    first, second, p = cdist(points, points), cdist(others, others), np.arange(1, 21) / 210
    given = {"p": p, "alpha": 0.5 if fused else 1.0, "F1": F, "F2": G}
    given = {key: convert(value) if key != "alpha" else value for key, value in given.items()}
    by = {"part_method": methods[0], "rep_method": methods[1]}
    whole, local, plan, log = gromov.quantized_fused_gromov_wasserstein(
        convert(first), convert(second), 4, 3, **given, **by, log=True
    )
    assert type(plan) is type(convert(first))
    whole, plan = np.asarray(whole), np.asarray(plan)
    # points are in their order
    np.testing.assert_allclose(plan.sum(1), p, atol=1e-12)
    np.testing.assert_allclose(plan.sum(0), 1 / 16, atol=1e-12)
    assert set(local) == set(zip(*whole.nonzero(), strict=True))
    for part in local.values():
        assert float(part.sum()) == pytest.approx(1, abs=1e-12)
    value = quadratic(first, second, "square_loss", True).value(plan)
    if fused:
        value = (value + (cdist(F, G, "sqeuclidean") * plan).sum()) / 2
    assert float(log["qFGW_dist"]) == pytest.approx(value, rel=1e-9)


def test_quantized_points_are_matched_in_order_and_single_ones_as_they_are():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 2)), rng.normal(size=(7, 2))
    first, second = cdist(x, x, "sqeuclidean"), cdist(y, y, "sqeuclidean")
    whole, _, plan = gromov.quantized_fused_gromov_wasserstein_samples(x, y, 9, 7)
    assert np.array_equal(plan, whole)
    np.testing.assert_allclose(plan, gromov.gromov_wasserstein(first, second), atol=1e-12)
    _, local, plan = gromov.quantized_fused_gromov_wasserstein_samples(
        x, y, 1, 1, method="random", random_state=3
    )
    chosen = [
        gromov.get_partition_and_representants_samples(points, 1, random_state=3)[1][0]
        for points in (x, y)
    ]
    orders = first[chosen[0]].argsort(), second[chosen[1]].argsort()
    rows, columns = plan[np.ix_(*orders)].nonzero()
    # neither goes back
    assert (np.diff(rows) >= 0).all()
    assert (np.diff(columns) >= 0).all()
    np.testing.assert_allclose(plan, local[0, 0], rtol=1e-11)
    with pytest.raises(InvalidInputError, match="features"):
        gromov.quantized_fused_gromov_wasserstein_samples(x, y, 2, 2, alpha=0.5)
    with pytest.raises(InvalidInputError, match="part_method"):
        gromov.get_graph_partition(first, 2, part_method="GW")


def test_parts_that_cannot_be_are_refused():
    """Each of them ended in an error of another package, or in one part in place of none."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 2)), rng.normal(size=(7, 2))
    for count in (0, 2.5, None, "two"):
        with pytest.raises(InvalidInputError, match="`npart2` must be an integer"):
            gromov.quantized_fused_gromov_wasserstein_samples(x, y, 3, count)
    pairs = np.kron(np.eye(3), [[0, 1], [1, 0]])
    with pytest.raises(InvalidInputError, match="'fluid' divides connected graphs"):
        gromov.quantized_fused_gromov_wasserstein(pairs, pairs, 2, 2)
    with pytest.raises(InvalidInputError, match="`part` must have shape"):
        gromov.format_partitioned_samples(x, None, np.zeros(3), [0])
    for places in ([0], [0, 9], [0, 1.5], x):
        with pytest.raises(InvalidInputError, match="`rep_indices`"):
            gromov.format_partitioned_samples(x, None, np.arange(9) % 2, places)
    two, thirds = [np.zeros(2), np.zeros(1)], [np.full(2, 1 / 3), np.full(1, 1 / 3)]
    table = np.array([[0, 1.0], [1, 0]])
    with pytest.raises(InvalidInputError, match="`list_R1` and `list_p1`"):
        gromov.quantized_fused_gromov_wasserstein_partitioned(
            table, table, [np.zeros(3), np.zeros(1)], two, thirds, thirds
        )


def test_a_small_epsilon_gives_no_warning_and_exact_marginals():
    rng = np.random.default_rng(3)
    points = rng.normal(size=(12, 2)), rng.normal(size=(15, 3))
    tables = [ot.dist(side, side, "euclidean") for side in points]
    with np.errstate(all="raise", under="ignore"):
        plan = gromov.entropic_gromov_wasserstein(*tables, epsilon=1e-4)
    # linear problems are solved to 1e-9
    np.testing.assert_allclose(plan.sum(1), 1 / 12, atol=1e-8)
    np.testing.assert_allclose(plan.sum(0), 1 / 15, atol=1e-8)


def test_steps_that_turn_back_are_shortened_until_the_plan_stays():
    """Whole steps go to and fro between two plans for ever, as POT's do."""
    rng = np.random.default_rng(0)
    tables = [table + table.T for table in (rng.random((12, 12)), rng.random((15, 15)))]
    call = {"reg": 0.01, "m": 0.5, "log": True}
    plan, log = gromov.entropic_partial_gromov_wasserstein(*tables, **call)
    _, expected = ot.gromov.entropic_partial_gromov_wasserstein(*tables, **call)
    assert log["err"][-1] <= 1e-7 < expected["err"][-1]
    assert plan.sum() == pytest.approx(0.5, abs=1e-9)
    assert log["partial_gw_dist"] < expected["partial_gw_dist"]
    with pytest.warns(ConvergenceWarning, match="still changes by .* in step 3"):
        gromov.entropic_partial_gromov_wasserstein(*tables, **call, numItermax=3)


@pytest.mark.parametrize(
    "convert",
    [
        lambda array: np.ascontiguousarray(array[::-1])[::-1],
        lambda array: np.repeat(array, 2, axis=0)[::2],
        lambda array: torch.tensor(np.repeat(array, 2, axis=0))[::2],
        lambda array: np.asmatrix(array) if array.ndim == 2 else array,
        np.ma.asarray,
    ],
    ids=["backwards", "strided", "strided tensor", "matrix", "masked"],
)
@pytest.mark.parametrize("name", ["gromov_wasserstein", "partial_gromov_wasserstein"])
def test_arrays_of_any_layout(name, convert):
    """Linear solvers refuse strides; matrices and masked arrays multiply otherwise."""
    given = np.linspace(1, 2, N) / np.linspace(1, 2, N).sum(), Q
    expected = getattr(gromov, name)(C1, C2, *given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        found = getattr(gromov, name)(*map(convert, (C1, C2, *given)))
    assert np.allclose(np.asarray(found), expected, atol=1e-12)


def test_masked_entries_are_refused():
    with pytest.raises(torchgw.InvalidInputError, match="`C1` has masked entries"):
        gromov.gromov_wasserstein(np.ma.masked_greater(C1, C1.max() / 2), C2)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gromov_wasserstein", {"max_iter": None}, "`max_iter` must be a number"),
        ("gromov_wasserstein", {"max_iter": -1}, "`max_iter` must be a number"),
        ("gromov_wasserstein", {"tol_rel": "small"}, "`tol_rel` must be a number"),
        ("gromov_wasserstein", {"tol_abs": float("nan")}, "`tol_abs` must be a number"),
        ("entropic_gromov_wasserstein", {"epsilon": "auto"}, "`epsilon` must be a positive"),
        ("entropic_semirelaxed_gromov_wasserstein", {"epsilon": -1.0}, "`epsilon` must be"),
        ("entropic_partial_gromov_wasserstein", {"reg": 0}, "`reg` must be a positive"),
        ("gromov_barycenters", {"ps": [P]}, "`Cs`, `ps` must have one entry"),
        ("gromov_barycenters", {"N": 2.0}, "`N` must be an integer"),
        ("gromov_wasserstein_dictionary_learning", {"ps": [P]}, "`Cs`, `ps` must have one entry"),
        ("unbalanced_co_optimal_transport", {"X": P}, r"`X` must have shape \(n, d\)"),
        ("unbalanced_co_optimal_transport", {"init_pi": C1}, "`init_pi` must be a pair"),
        ("lowrank_gromov_wasserstein_samples", {"X_t": Q}, r"`X_t` must have shape \(n, d\)"),
        ("sampled_gromov_wasserstein", {"p": 2 * P}, "`p` must sum to 1"),
        ("sampled_gromov_wasserstein", {"loss_fun": "square_loss"}, "must be a function"),
    ],
)
def test_what_cannot_be_is_named_before_any_work(name, change, message):
    given = {
        "C1": C1, "C2": C2, "p": P, "q": Q, "loss_fun": lambda x, y: np.abs(x - y), "N": 3, "D": 2,
        "nt": 3, "Cs": [C1, C2], "X": C1, "Y": C2, "X_s": C1, "X_t": C2,
    } | change  # fmt: skip
    function = getattr(gromov, name)
    known = inspect.signature(function).parameters
    functions = ("sampled_gromov_wasserstein",)
    with pytest.raises((torchgw.InvalidInputError, torchgw.InvalidTypeError), match=message):
        function(**{
            key: value
            for key, value in given.items()
            if key in known and (key != "loss_fun" or name in functions)
        })  # fmt: skip


SHARES = {
    "fused_gromov_wasserstein": 1.5, "fused_gromov_wasserstein2": -0.1,
    "entropic_fused_gromov_wasserstein": np.nan, "BAPG_fused_gromov_wasserstein": "1",
    "semirelaxed_fused_gromov_wasserstein": torch.tensor(1.1), "fgw_barycenters": 2,
    "partial_fused_gromov_wasserstein": np.ones(2), "semirelaxed_fgw_barycenters": -1,
    "fused_gromov_wasserstein_dictionary_learning": 2.0, "semirelaxed_init_plan": 3,
    "fused_gromov_wasserstein_linear_unmixing": -1, "pointwise_gromov_wasserstein": 1.5,
    "quantized_fused_gromov_wasserstein": 1.5, "get_graph_partition": -0.5,
    "format_partitioned_graph": "x",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        *((name, {"alpha": value}, r"in \[0, 1\]; got") for name, value in SHARES.items()),
        ("fgw_barycenters", {"Ys": [C1, C2]}, r"`Ys\[1\]` must have shape \(9, 12\)"),
        ("fgw_barycenters", {"Ys": [P, Q]}, r"`Ys\[0\]` must have shape \(n, d\)"),
        ("semirelaxed_fgw_barycenters", {"Ys": [C2, C2]}, r"`Ys\[0\]` must have shape \(12, 9\)"),
        ("fgw_barycenters", {"init_X": C2}, r"`init_X` must have shape \(3, 4\)"),
        ("gromov_barycenters", {"init_C": C2}, r"`init_C` must have shape \(3, 3\)"),
        ("semirelaxed_gromov_barycenters", {"init_C": C2}, r"`init_C` must have shape \(3, 3\)"),
        ("fused_gromov_wasserstein_dictionary_learning", {"Ys": [C1, C2]}, r"many; got \[12, 9\]"),
        ("update_barycenter_feature", {"Ys": [C1, C2]}, r"`Ys\[1\]` must have shape \(9, 12\)"),
        ("update_barycenter_feature", {"Ts": [C1, C2]}, "`Ts` must be matrices"),
        ("update_barycenter_feature", {"Ts": None}, "`Ts` must be a list"),
        ("update_barycenter_feature", {"lambdas": [1]}, "`Ts`, `Ys`, `lambdas` must have one"),
        ("update_barycenter_structure", {"Cs": [C1, C1]}, r"`Cs\[1\]` must have shape \(9, 9\)"),
        ("update_barycenter_structure", {"p": P}, r"`p` must have shape \(3,\) or \(2, 3\)"),
        ("init_matrix", {"C1": LINEAR}, "`C1` must be a square"),
        ("init_matrix", {"q": P}, r"`q` must have shape \(9,\)"),
        ("init_matrix_semirelaxed", {"p": Q}, r"`p` must have shape \(12,\)"),
        ("tensor_product", {"T": C1}, r"`constC` must have shape \(12, 12\); got \(12, 9\)"),
        ("gwloss", {"T": LINEAR.tolist()}, r"`T` must have shape \(n, m\); got list"),
        ("gwggrad", {"hC2": LINEAR}, r"`hC2` must have shape \(9, 9\)"),
        ("solve_gromov_linesearch", {"G": P}, r"`G` must have shape \(n, m\)"),
        ("solve_gromov_linesearch", {"cost_G": None}, "`cost_G` must be a number"),
        ("solve_gromov_linesearch", {"reg": "x"}, "`reg` must be a number"),
        ("solve_semirelaxed_gromov_linesearch", {"fC2t": C1}, r"`fC2t` must have shape \(9, 9\)"),
        ("solve_partial_gromov_linesearch", {"M": C1}, r"`M` must have shape \(12, 9\)"),
        ("solve_partial_gromov_linesearch", {"alpha_min": "0"}, "`alpha_min` must be a number"),
        ("gromov_wasserstein", {"alpha_max": "1"}, "`alpha_max` must be a number"),
        ("div_to_product", {"a": Q}, r"`a` must have shape \(12,\)"),
        ("div_to_product", {"divergence": "tv"}, "`divergence` must be 'kl' or 'l2'"),
        ("div_between_product", {"alpha": Q}, r"`alpha` must have shape \(12,\)"),
        ("semirelaxed_init_plan", {"M": C1}, r"`M` must have shape \(12, 9\)"),
    ],
)
def test_what_does_not_fit_is_named(name, change, message):
    """Of arguments that have no default all but one are right."""
    given = {
        "C1": C1, "C2": C2, "M": LINEAR, "p": P, "q": Q, "loss_fun": lambda x, y: np.abs(x - y),
        "N": 3, "D": 2, "nt": 3, "Cs": [C1, C2], "Ys": [C1[:, :4], C2[:, :4]], "alpha": 0.5,
        "Ts": [C1[:, :3], C2[:, :3]], "lambdas": [0.5, 0.5], "C": C1, "Y": C1, "Cdict": C1[None],
        "Ydict": C1[None], "npart": 2, "npart1": 2, "npart2": 2, "part": P, "rep_indices": [0],
        "constC": LINEAR, "hC1": C1, "hC2": C2, "T": LINEAR, "G": LINEAR, "deltaG": LINEAR,
        "cost_G": 1.0, "reg": 1.0, "ones_p": P, "df_G": LINEAR, "df_Gc": LINEAR, "pi": LINEAR,
        "a": P, "b": Q, "mu": P, "nu": Q, "beta": Q, "divergence": "kl",
    }  # fmt: skip
    function = getattr(gromov, name)
    parameters = inspect.signature(function).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.name != "kwargs"]
    with pytest.raises((torchgw.InvalidInputError, torchgw.InvalidTypeError), match=message):
        function(**{key: given[key] for key in needed} | change)


def test_limits_may_be_floats_and_numbers_of_numpy():
    plan = gromov.unbalanced_co_optimal_transport(C1, C2, max_iter=2.0)[0]
    again = gromov.unbalanced_co_optimal_transport(C1, C2, max_iter=np.int64(2))[0]
    assert np.array_equal(plan, again)


@pytest.mark.parametrize("name", ["pointwise_gromov_wasserstein", "sampled_gromov_wasserstein"])
def test_samplers_take_weights_of_float32_and_generators(name):
    p, q = (weight.astype(np.float32) for weight in (P, Q))
    more = {"nb_samples_grad": np.int64(2)} if name.startswith("sampled") else {}
    plan = getattr(gromov, name)(
        C1, C2, p * np.float32(1 + 1e-7), q, lambda x, y: np.abs(x - y), max_iter=3,
        random_state=np.random.default_rng(0), **more,
    )  # fmt: skip
    assert float(plan.sum()) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_have_a_sum_of_one(dtype):
    tables = [torch.tensor(table, dtype=dtype) for table in (C1, C2)]
    weights = [torch.tensor(weight, dtype=dtype) for weight in (P, Q)]
    assert abs(float(weights[0].double().sum() - weights[1].double().sum())) > 1e-5
    plan = gromov.gromov_wasserstein(*tables, *weights)
    assert plan.dtype == dtype
    assert float(plan.double().sum()) == pytest.approx(1, abs=1e-2)
