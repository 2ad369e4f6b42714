"""``torchgw.pot.gromov`` against ``ot.gromov``, function by function."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import ot
import pytest
import torch
from problems import distance_matrices, random_weights
from scipy.spatial.distance import cdist

import torchgw
from torchgw import ConvergenceWarning, InvalidInputError, UnsupportedError
from torchgw._sinkhorn.exact import ExactTransport, by_scipy, partial_transport, transport
from torchgw.pot import gromov, solve_gromov
from torchgw.pot._quadratic import quadratic

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
    "entropic_partial_gromov_wasserstein2": {"p": P, "q": Q, "m": 0.6, "reg": 0.5},
}


def test_every_name_is_ours_or_pots_as_the_table_says():
    """The table of docs/migrating.md, and signatures of ours."""
    theirs = set(ot.gromov.__all__) - set(gromov.__all__)
    assert dir(gromov) == sorted(ot.gromov.__all__)
    for name in theirs:
        assert getattr(gromov, name) is getattr(ot.gromov, name)
    for name in gromov.__all__:
        ours, pots = (
            inspect.signature(getattr(module, name)).parameters for module in (gromov, ot.gromov)
        )
        assert list(ours) == list(pots), name
        assert all(ours[key].default == pots[key].default for key in ours), name
        # for readers of types
        assert all(one.annotation is not one.empty for one in ours.values()), name
    page = (Path(__file__).parents[2] / "docs/migrating.md").read_text(encoding="utf-8")
    told = page.partition("<!-- names -->")[2].partition("<!-- end of names -->")[0]
    rows = [line.strip("| ").split(" | ") for line in told.strip().splitlines()[2:]]
    said = {whose: set() for _, whose, *_ in rows}
    for names, whose, *_ in rows:
        said[whose] |= set(re.findall(r"`(\w+)`", names))
    assert said["POT"] == theirs
    assert said["torchgw"] == {*gromov.__all__, "solve_gromov"}


def test_pot_can_be_imported_as_ot():
    """Ours under the names that `ot` has for them, and all the rest of POT."""
    pot = torchgw.pot
    names = [name for name in ot.__all__ if hasattr(ot, name)]
    assert set(dir(pot)) == {*names, *pot.__all__}
    for name in names:
        expected = getattr(gromov, name) if name in gromov.__all__ else getattr(ot, name)
        assert (getattr(pot, name) is expected) == (name not in ("gromov", "solve_gromov")), name
    # a part of POT that `import ot` leaves out
    assert pot.plot.plot1D_mat is importlib.import_module("ot.plot").plot1D_mat
    assert pot.unif(4) @ pot.dist(np.ones((4, 1))) == pytest.approx(0)
    for module, where in ((gromov, "torchgw.pot.gromov"), (pot, "torchgw.pot")):
        with pytest.raises(AttributeError, match=f"'{where}' has no attribute 'gromov_distance'"):
            module.gromov_distance  # noqa: B018
        assert not hasattr(module, "__wrapped__")


def test_without_pot_its_names_say_what_to_install(monkeypatch):
    for module in ("ot", "ot.gromov"):
        monkeypatch.setitem(sys.modules, module, None)
    for module, name in ((gromov, "gwloss"), (torchgw.pot, "solve_gromov_batch")):
        with pytest.raises(UnsupportedError, match=f"`{name}` is not solved .* pip install POT"):
            getattr(module, name)
    assert dir(gromov) == sorted(gromov.__all__)
    assert gromov.gromov_wasserstein(C1, C2).sum() == pytest.approx(1)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("directed", [False, True])
def test_values_plans_and_logs_are_pots(name, directed):
    tables = (D1, D2) if directed else (C1, C2)
    call = dict(zip(("C1", "C2"), tables, strict=True)) | CALLS[name]
    if directed and "entropic" in name:
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


@pytest.mark.parametrize("name", [name for name in CALLS if "entropic" not in name])
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


def test_gradients_of_penalised_values():
    weight, table = (torch.tensor(array, requires_grad=True) for array in (P, C1))
    call = {"b": Q, "unbalanced": 5.0, "reg": 0.5, "tol": 1e-12}
    value = solve_gromov(table, C2, a=weight, **{**call, "b": torch.as_tensor(Q)}).value
    value.backward()
    weights, tables = RANDOM.uniform(size=N), RANDOM.uniform(size=(N, N))
    tables += tables.T
    for tensor, move, of in (
        (weight, weights, lambda step: solve_gromov(C1, C2, a=P + step * weights, **call)),
        (table, tables, lambda step: solve_gromov(C1 + step * tables, C2, a=P, **call)),
    ):
        slope = (of(1e-5).value - of(-1e-5).value) / 2e-5
        assert float((tensor.grad * torch.as_tensor(move)).sum()) == pytest.approx(slope, rel=1e-5)


def test_entropic_barycenters_are_pots_or_lower():
    call = {"max_iter": 200, "random_state": 0, "epsilon": 0.5}
    found, expected = (
        module.entropic_gromov_barycenters(5, [C1, C2], **call) for module in (gromov, ot.gromov)
    )
    # plans of a turn are solved to 1e-4
    np.testing.assert_allclose(found, expected, atol=1e-3)
    features = LINEAR, LINEAR[:9]
    X, C, log = gromov.entropic_fused_gromov_barycenters(
        5, features, [C1, C2], **{**call, "epsilon": 0.05}, log=True
    )
    # POT returns the features that it began with; these are the means over the plans
    means = sum(plan @ Y for plan, Y in zip(log["T"], features, strict=True)) * 5 / 2
    np.testing.assert_allclose(X, means, atol=1e-8)
    assert C.shape == (5, 5)


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
    ours, scipys = ExactTransport(P, Q)(cost), by_scipy(P, Q, cost)
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
        ot.gromov.get_partition_and_representants_samples(points, 1, "random", 3)[1][0]
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
    with pytest.raises(ValueError, match="part_method"):
        gromov.quantized_fused_gromov_wasserstein(first, second, 2, 2, part_method="GW")


def test_parts_that_cannot_be_are_refused():
    """Each of them ends in an error of another package, or in one part in place of none, in POT."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 2)), rng.normal(size=(7, 2))
    for count in (0, 2.5, None, "two"):
        with pytest.raises(InvalidInputError, match="`npart2` must be an integer"):
            gromov.quantized_fused_gromov_wasserstein_samples(x, y, 3, count)
    pairs = np.kron(np.eye(3), [[0, 1], [1, 0]])
    with pytest.raises(InvalidInputError, match="'fluid' divides connected graphs"):
        gromov.quantized_fused_gromov_wasserstein(pairs, pairs, 2, 2)


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
        ("entropic_partial_gromov_wasserstein", {"reg": 0}, "`reg` must be a positive"),
        ("entropic_gromov_barycenters", {"ps": [P]}, "`Cs`, `ps` must have one entry"),
        ("entropic_gromov_barycenters", {"N": 2.0}, "`N` must be an integer"),
    ],
)
def test_what_cannot_be_is_named_before_any_work(name, change, message):
    given = {
        "C1": C1, "C2": C2, "p": P, "q": Q, "N": 3, "Cs": [C1, C2], "X_s": C1, "X_t": C2,
    } | change  # fmt: skip
    function = getattr(gromov, name)
    known = inspect.signature(function).parameters
    with pytest.raises((torchgw.InvalidInputError, torchgw.InvalidTypeError), match=message):
        function(**{key: value for key, value in given.items() if key in known and key != "p"})


_FUSED = "entropic_fused_gromov_barycenters"
SHARES = {
    "fused_gromov_wasserstein": 1.5, "fused_gromov_wasserstein2": -0.1,
    "entropic_fused_gromov_wasserstein": np.nan, "entropic_fused_gromov_wasserstein2": "1",
    "semirelaxed_fused_gromov_wasserstein": torch.tensor(1.1),
    "partial_fused_gromov_wasserstein": np.ones(2), _FUSED: 2,
    "quantized_fused_gromov_wasserstein": 1.5, "quantized_fused_gromov_wasserstein_samples": "x",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        *((name, {"alpha": value}, r"in \[0, 1\]; got") for name, value in SHARES.items()),
        (
            "entropic_fused_gromov_barycenters",
            {"Ys": [C1, C2]},
            r"`Ys\[1\]` must have shape \(9, 12\)",
        ),
        (
            "entropic_fused_gromov_barycenters",
            {"Ys": [P, Q]},
            r"`Ys\[0\]` must have shape \(n, d\)",
        ),
        (_FUSED, {"init_Y": C2}, r"`init_Y` must have shape \(3, 4\)"),
        ("entropic_gromov_barycenters", {"init_C": C2}, r"`init_C` must have shape \(3, 3\)"),
        ("gromov_wasserstein", {"alpha_max": "1"}, "`alpha_max` must be a number"),
    ],
)
def test_what_does_not_fit_is_named(name, change, message):
    """Of arguments that have no default all but one are right."""
    given = {
        "C1": C1, "C2": C2, "M": LINEAR, "p": P, "q": Q, "N": 3, "Cs": [C1, C2], "X1": C1, "X2": C2,
        "Ys": [C1[:, :4], C2[:, :4]], "alpha": 0.5, "npart1": 2, "npart2": 2,
    }  # fmt: skip
    function = getattr(gromov, name)
    parameters = inspect.signature(function).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.name != "kwargs"]
    with pytest.raises((torchgw.InvalidInputError, torchgw.InvalidTypeError), match=message):
        function(**{key: given[key] for key in needed} | change)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_have_a_sum_of_one(dtype):
    tables = [torch.tensor(table, dtype=dtype) for table in (C1, C2)]
    weights = [torch.tensor(weight, dtype=dtype) for weight in (P, Q)]
    assert abs(float(weights[0].double().sum() - weights[1].double().sum())) > 1e-5
    plan = gromov.gromov_wasserstein(*tables, *weights)
    assert plan.dtype == dtype
    assert float(plan.double().sum()) == pytest.approx(1, abs=1e-2)
