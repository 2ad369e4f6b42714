"""Laws and known answers of solve(): equality with POT, invariances, recovered matchings."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import warnings

import numpy as np
import ot
import pytest
import reference
import scipy.stats
import torch
from problems import distance_matrices, isometric_copy, random_weights, solve_by_name
from scipy.spatial.distance import cdist

import torchgw
from torchgw import ConvergenceWarning, InvalidTypeError, Status
from torchgw.datasets import spiral, swiss_roll

EXACT = ["dense", "factored"]


@pytest.mark.parametrize(("n", "m", "epsilon"), [(30, 25, 0.05), (120, 150, 0.02)])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_pot(n, m, epsilon, weighted):
    """POT's projected gradient from the same start ends at the same plan and value."""
    d_x, d_y = distance_matrices(n, m)
    a = random_weights(n) if weighted else ot.unif(n)
    b = random_weights(m, 1) if weighted else ot.unif(m)
    expected, log = ot.gromov.entropic_gromov_wasserstein(
        d_x, d_y, a, b, "square_loss", epsilon=epsilon, tol=1e-13, max_iter=5000, log=True,
        numItermax=20_000, stopThr=1e-13,
    )  # fmt: skip
    result = torchgw.solve(
        D_X=d_x,
        D_Y=d_y,
        a=a,
        b=b,
        epsilon=epsilon,
        init=np.outer(a, b),
        tol=1e-10,
        max_iter=5000,
        random_state=0,
        options=torchgw.Options(inner_tol=1e-12),
    )
    assert result.status is Status.CONVERGED
    assert result.epsilon == epsilon
    assert np.abs(np.asarray(result.plan) - expected).sum() < 1e-6
    assert np.abs(expected - np.outer(a, b)).sum() > 0.1
    assert result.value == pytest.approx(log["gw_dist"], rel=1e-6)


def test_fused_equals_reference():
    d_x, d_y = distance_matrices(20, 24)
    linear = np.random.default_rng(0).uniform(size=(20, 24))
    a, b = ot.unif(20), ot.unif(24)
    expected = reference.entropic_gw(d_x, d_y, a, b, 0.05, alpha=0.4, linear=linear, inner=50)
    result = torchgw.solve(
        D_X=d_x, D_Y=d_y, M=linear, alpha=0.4, epsilon=0.05, init=np.outer(a, b), tol=1e-10
    )
    np.testing.assert_allclose(np.asarray(result.plan), expected, atol=1e-8)
    assert result.value_linear == pytest.approx(0.6 * (linear * expected).sum(), rel=1e-6)
    assert result.value_quad == pytest.approx(
        0.4 * reference.gw_value(d_x, d_y, expected), rel=1e-6
    )
    assert result.value == pytest.approx(result.value_quad + result.value_linear)


@pytest.mark.parametrize("precision", ["float64", "mixed", "float32"])
def test_precisions_agree(precision):
    d_x, d_y = distance_matrices(60, 50)
    given = {"D_X": d_x, "D_Y": d_y, "epsilon": 0.01, "n_init": 1}
    exact, result = (solve_by_name(**given, precision=one) for one in ("float64", precision))
    # float32: rounding of exponents, about 1e-7 / 0.01, amplified by the outer iteration
    tolerance = {"float64": 1e-12, "mixed": 1e-4, "float32": 1e-3}[precision]
    assert float(np.abs(result.plan - exact.plan).sum()) <= tolerance
    assert result.value == pytest.approx(exact.value, rel=tolerance)
    marginal = {"float64": 5e-7, "mixed": 5e-7, "float32": 1e-5}[precision]
    assert result.marginal_error <= marginal
    assert result.marginal_a.dtype == np.float64


@pytest.mark.parametrize("gradient", EXACT)
def test_recovers_an_isometric_copy(gradient):
    x, y, answer = isometric_copy(60)
    result = torchgw.solve(x, y, distances="sqeuclidean", gradient=gradient, random_state=0)
    assert result.gradient == gradient
    assert result.converged
    np.testing.assert_array_equal(np.asarray(result.lazy_plan.argmax()), answer)
    # the entropic plan keeps a little blur; the optimum without it is zero
    product = reference.gw_value(
        *(np.asarray(d) for d in _tables(x, y)), np.full((60, 60), 1 / 3600)
    )
    assert 0 <= result.value < 0.05 * product


def _tables(*clouds):
    tables = [ot.dist(cloud, cloud) for cloud in clouds]
    return [table / table.max() for table in tables]


@pytest.mark.parametrize("gradient", ["factored", "auto"])
def test_factored_and_dense_give_one_plan(gradient):
    x, y, _ = isometric_copy(40, noise=0.1)
    options = {"distances": "sqeuclidean", "epsilon": 0.01, "tol": 1e-10, "inner_tol": 1e-12}
    first = solve_by_name(x, y, gradient="dense", **options)
    second = solve_by_name(x, y, gradient=gradient, **options)
    torch.testing.assert_close(first.plan, second.plan, atol=1e-8, rtol=0)
    assert first.value == pytest.approx(second.value, rel=1e-7)


def test_exchanging_sides_transposes_the_plan():
    d_x, d_y = distance_matrices(35, 28)
    options = {"epsilon": 0.01, "tol": 1e-10, "inner_tol": 1e-12, "max_iter": 3000, "n_init": 1}
    forward = solve_by_name(D_X=d_x, D_Y=d_y, **options)
    backward = solve_by_name(D_X=d_y, D_Y=d_x, **options)
    torch.testing.assert_close(forward.plan, backward.plan.T, atol=1e-8, rtol=0)


def test_permuting_points_permutes_the_plan():
    d_x, d_y = distance_matrices(35, 28)
    order = np.random.default_rng(3).permutation(35)
    options = {"epsilon": 0.01, "tol": 1e-10, "inner_tol": 1e-12, "max_iter": 3000}
    plain = solve_by_name(D_X=d_x, D_Y=d_y, **options)
    permuted = solve_by_name(D_X=d_x[order][:, order], D_Y=d_y, **options)
    torch.testing.assert_close(plain.plan[order], permuted.plan, atol=1e-8, rtol=0)


def test_scaling_distances_and_epsilon_keeps_the_plan():
    """(D, epsilon) -> (c D, c^2 epsilon) multiplies the objective by c^2 as a whole."""
    d_x, d_y = distance_matrices(35, 28)
    plain = torchgw.solve(D_X=d_x, D_Y=d_y, epsilon=0.01)
    scaled = torchgw.solve(D_X=1e3 * d_x, D_Y=1e3 * d_y, epsilon=1e4)
    torch.testing.assert_close(plain.plan, scaled.plan, atol=1e-9, rtol=1e-6)
    assert scaled.value == pytest.approx(1e6 * plain.value, rel=1e-6)
    automatic = [torchgw.solve(D_X=unit * d_x, D_Y=unit * d_y, n_init=1) for unit in (1, 1e3)]
    assert automatic[1].epsilon == pytest.approx(1e6 * automatic[0].epsilon)


@pytest.mark.parametrize("scale", ["max", "mean", None, "auto"])
def test_scale_is_reported_and_applied_once(scale):
    x, y, _ = isometric_copy(30)
    result = torchgw.solve(x, 2 * y, distances="euclidean", scale=scale, epsilon=0.5)
    d_x, d_y = (ot.dist(p, p, "euclidean") for p in (x, 2 * y))
    factors = {
        "max": (1 / d_x.max(), 1 / d_y.max()),
        "mean": (1 / d_x.mean(), 1 / d_y.mean()),
        None: (1.0, 1.0),
    }
    expected = factors["max" if scale == "auto" else scale]
    assert result.scale == pytest.approx(expected)
    plan = np.asarray(result.plan)
    value = reference.gw_value(d_x * expected[0], d_y * expected[1], plan)
    assert result.value == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_spiral_to_swiss_roll(seed):
    x, angle_x = spiral(200, seed)
    y, angle_y = swiss_roll(250, seed + 100)
    with warnings.catch_warnings():
        # some noisy spirals fall into two pieces at five neighbours
        warnings.simplefilter("ignore", torchgw.GraphWarning)
        result = torchgw.solve(x, y, n_neighbors=6, random_state=0)
    assert result.converged
    # the law of the plan: both marginals, entry by entry
    for mass, weight in ((result.marginal_a, 1 / 200), (result.marginal_b, 1 / 250)):
        assert float(np.abs(mass / weight - 1).max()) < 1e-4
    matched = angle_y[np.asarray(result.lazy_plan.argmax())]
    assert abs(scipy.stats.spearmanr(angle_x, matched).statistic) > 0.99


@pytest.mark.parametrize(
    "distances", ["dijkstra", "precomputed", "landmark", "euclidean", "cosine"]
)
def test_sampled_gradient_is_close_to_the_exact_one(distances):
    x, y, _ = isometric_copy(50, noise=0.05, seed=2)
    options = {"distances": distances, "epsilon": 0.02, "random_state": 0}
    exact = torchgw.solve(x, y, gradient="dense", **options)
    sampled = solve_by_name(x, y, gradient="sampled", init=exact, n_anchors=800, **options)
    assert sampled.status is Status.STATIONARY
    assert sampled.log["n_anchors"] == 800
    # no more points than anchors: the value is summed, not estimated
    assert sampled.log["value_standard_error"] == 0
    assert sampled.value == pytest.approx(exact.value, rel=0.05)
    assert sampled.marginal_error < 1e-6


def test_the_last_cost_has_more_anchors():
    """Unless their number is given, or nothing is left of the budget."""
    angles = torch.linspace(0, 3, 24, dtype=torch.float64)
    x = torch.stack([angles.cos(), angles.sin()], dim=1)
    options = {"distances": "euclidean", "gradient": "sampled", "epsilon": 2e-2, "n_init": 1}
    result = solve_by_name(x, x[:20], random_state=0, **options)
    given = solve_by_name(x, x[:20], random_state=0, n_anchors=256, **options)
    assert result.log["n_anchors"] == 1024
    assert given.log["n_anchors"] == 256
    assert result.status is given.status is Status.STATIONARY
    assert result.n_iters == given.n_iters + 1
    # four times as many would have half the error without strata
    assert result.log["cost_standard_error"] < 0.6 * given.log["cost_standard_error"]
    with pytest.warns(ConvergenceWarning):
        short = solve_by_name(x, x[:20], random_state=0, max_iter=9, **options)
    assert short.log["n_anchors"] == 256
    assert short.n_iters == 9
    options |= {"callback": lambda entry: entry.iteration == given.n_iters}
    with pytest.warns(ConvergenceWarning):
        assert solve_by_name(x, x[:20], random_state=0, **options).status is Status.STOPPED


@pytest.mark.parametrize("gradient", ["dense", "factored", "sampled"])
def test_same_seed_same_bits(gradient):
    x, y, _ = isometric_copy(40, noise=0.1)
    options = {"distances": "sqeuclidean", "gradient": gradient, "epsilon": 0.02}
    first = torchgw.solve(x, y, random_state=7, **options)
    again = torchgw.solve(x, y, random_state=first.random_state, **options)
    assert np.array_equal(first.plan, again.plan)
    assert first.value == again.value
    if gradient == "sampled":
        other = solve_by_name(x, y, random_state=8, **options)
        assert not np.array_equal(first.plan, other.plan)


def test_epsilon_is_annealed_and_reached_exactly():
    d_x, d_y = distance_matrices()
    result = torchgw.solve(D_X=d_x, D_Y=d_y, epsilon=0.0123)
    epsilons = [entry.epsilon for entry in result.history]
    assert epsilons[0] > 0.0123
    assert epsilons == sorted(epsilons, reverse=True)
    assert epsilons[-1] == 0.0123 == result.epsilon


def test_other_plans_as_a_start_say_how():
    x, y, _ = isometric_copy(12)
    options = {"distances": "sqeuclidean", "random_state": 0}
    rounded = solve_by_name(x, y, **options).lazy_plan.rounded()
    low = torchgw.solve_low_rank(x, y, rank=2, **options)
    for init, plan, name in ((rounded, rounded, "init"), (low, low.lazy_plan, "init.lazy_plan")):
        with pytest.raises(InvalidTypeError, match=rf"Pass `{name}\.to_dense\(\)`"):
            solve_by_name(x, y, init=init, **options)
        assert solve_by_name(x, y, init=plan.to_dense(), **options).converged


def test_large_epsilon_gives_the_product_plan():
    d_x, d_y = distance_matrices()
    result = torchgw.solve(D_X=d_x, D_Y=d_y, epsilon=1e3)
    np.testing.assert_allclose(np.asarray(result.plan), 1 / (30 * 25), rtol=2e-3)


def test_init_is_respected():
    """From the mirrored matching the solver stays in the mirrored optimum."""
    x = np.sort(np.random.default_rng(0).uniform(size=(40, 1)), axis=0)
    matching = {"straight": np.eye(40) / 40, "mirrored": np.eye(40)[::-1] / 40}
    found = {}
    for name, plan in matching.items():
        result = torchgw.solve(x, x, distances="euclidean", epsilon=1e-3, init=plan)
        found[name] = np.asarray(result.lazy_plan.argmax())
        again = torchgw.solve(x, x, distances="euclidean", epsilon=1e-3, init=result)
        assert again.n_iters <= 5
        assert again.value == pytest.approx(result.value, rel=1e-3)
    for name, sign in (("straight", 1), ("mirrored", -1)):
        assert scipy.stats.spearmanr(np.arange(40), found[name]).statistic * sign > 0.9


@pytest.mark.parametrize("gradient", ["dense", "sampled"])
def test_callback_sees_every_iteration_and_can_stop(gradient):
    d_x, d_y = distance_matrices()
    seen = []

    def stop_at_five(entry):
        seen.append(entry)
        return len(seen) == 5

    with pytest.warns(ConvergenceWarning, match="callback"):
        result = torchgw.solve(
            D_X=d_x,
            D_Y=d_y,
            gradient=gradient,
            n_init=1,
            options=torchgw.Options(callback=stop_at_five),
        )
    assert result.status is Status.STOPPED
    assert [entry.iteration for entry in seen] == list(range(5))
    assert tuple(seen) == result.history
    # what comes back is still a plan
    assert result.marginal_error < 1e-6


def test_budgets_are_told_apart():
    d_x, d_y = distance_matrices()
    with pytest.warns(ConvergenceWarning, match="max_iter"):
        outer = torchgw.solve(D_X=d_x, D_Y=d_y, max_iter=3, n_init=1)
    assert outer.status is Status.OUTER_LIMIT
    assert not outer.converged
    small = {"epsilon": 1e-3, "inner_max_iter": 2, "max_iter": 60, "n_init": 1}
    with pytest.warns(ConvergenceWarning):
        inner = solve_by_name(D_X=d_x, D_Y=d_y, **small)
    assert not inner.converged
    assert inner.marginal_error > 5e-7


def test_result_is_complete():
    d_x, d_y = distance_matrices(30, 25)
    result = torchgw.solve(D_X=d_x, D_Y=d_y, epsilon=0.02, random_state=3)
    assert result.plan.shape == (30, 25)
    assert result.potentials == (result.potential_a, result.potential_b)
    assert result.marginals == (result.marginal_a, result.marginal_b)
    assert result.sparse_plan.shape == (30, 25)
    assert result.gw_distance == pytest.approx(result.value_quad**0.5)
    assert result.random_state == 3
    assert result.n_iters == len(result.history)
    assert {"distances", "cost", "sinkhorn", "coupling", "settle"} <= set(result.timings)
    plan, uniform = np.asarray(result.plan), 1 / 750
    kl = float((plan * np.log(plan / uniform)).sum())
    assert result.log["kl"] == pytest.approx(kl, rel=1e-6)
    assert result.log["objective"] == pytest.approx(result.value + result.epsilon * kl, rel=1e-6)
    assert "30 x 25" in repr(result)
    assert "CONVERGED" not in repr(result)
    assert result.status.advice in repr(result)


def test_dual_value_and_objective_of_an_iteration():
    """Of the linearised problem: at a settled plan the quadratic value is in it twice."""
    d_x, d_y = distance_matrices(12, 9)
    result = torchgw.solve(
        D_X=d_x, D_Y=d_y, epsilon=0.05, tol=1e-9, options=torchgw.Options(objective_tol=0)
    )
    last = result.history[-1]
    assert last.dual == pytest.approx(result.report.objective + result.value, rel=1e-6)
    assert last.objective == pytest.approx(result.report.objective, rel=1e-6)
    relaxed = torchgw.solve(D_X=d_x, D_Y=d_y, epsilon=0.05, unbalanced=1.0)
    assert np.isnan(relaxed.history[-1].objective)


def test_reduced_potentials_lack_the_terms_of_rows_and_columns():
    d_x, d_y = distance_matrices(12, 9)
    result = torchgw.solve(D_X=d_x, D_Y=d_y, epsilon=0.05)
    reduced = result.lazy_plan.potentials
    own = (2 * (table**2).mean(1) for table in (d_x, d_y))
    for whole, left, term in zip(result.potentials, reduced, own, strict=True):
        np.testing.assert_allclose(whole - left.numpy(), term, atol=1e-12)
        assert term.min() > 1e-2


def test_log_is_the_report_by_name():
    d_x, d_y = distance_matrices(12, 9)
    result = torchgw.solve(D_X=d_x, D_Y=d_y, epsilon=0.05)
    assert result.log == dataclasses.asdict(result.report)
    # in the order of the fields, as JSON, and as copies that are dictionaries like others
    assert list(result.log)[:3] == ["loss", "value_standard_error", "kl"]
    for again in (copy.deepcopy(result.log), pickle.loads(pickle.dumps(result.log))):
        assert type(again) is dict
        assert again == json.loads(json.dumps(result.log)) == result.log
    for change in (
        lambda log: log.__setitem__("kl", 0), lambda log: log.pop("kl"), lambda log: log.clear(),
        lambda log: log.update(kl=0), lambda log: log.setdefault("new", 0),
    ):  # fmt: skip
        with pytest.raises(torchgw.InvalidTypeError, match=r"is for reading.*dict\(result.log\)"):
            change(result.log)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.report.kl = 0


@pytest.mark.slow
def test_compiled_backend_solves_the_same_problem():
    d_x, d_y = distance_matrices(20, 18)
    eager = torchgw.solve(
        D_X=d_x, D_Y=d_y, epsilon=0.05, tol=1e-9, options=torchgw.Options(backend="eager")
    )
    compiled = torchgw.solve(
        D_X=d_x, D_Y=d_y, epsilon=0.05, tol=1e-9, options=torchgw.Options(backend="compile")
    )
    assert compiled.backend == "compile"
    torch.testing.assert_close(eager.plan, compiled.plan, atol=1e-9, rtol=0)


@pytest.mark.parametrize("gradient", ["factored", "sampled"])
def test_stored_and_streamed_costs_give_one_plan(gradient):
    x, y, _ = isometric_copy(40, noise=0.1)
    options = {"distances": "sqeuclidean", "gradient": gradient, "random_state": 0}
    # where both reach the tolerance within their budgets: the least difference in a plan changes
    # the anchors drawn from it
    options["epsilon"] = 0.1
    # the same tolerances: a streamed cost has looser ones by default
    options |= {"tol": 1e-9, "inner_tol": 1e-9}
    stored = solve_by_name(x, y, storage="stored", **options)
    streamed = solve_by_name(x, y, storage="streamed", **options)
    torch.testing.assert_close(stored.plan, streamed.plan, atol=1e-7, rtol=0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_numbers_of_a_streamed_solve_are_those_of_its_plan(fused, weighted):
    """It mostly ends with the plan of its loop, whose coupling is known already."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 3)), rng.normal(size=(80, 2)) * (1.0, 0.3)
    options = {"features": (x[:, :2], y)} if fused else {}
    if weighted:
        options["a"] = np.append(np.zeros(10), np.full(80, 1 / 80))
    options |= {"storage": "streamed", "precision": "float32", "epsilon": 5e-3, "random_state": 0}
    options["skip_tiles"] = True
    result = solve_by_name(x, y, distances="sqeuclidean", **options)
    assert result.converged
    plan = np.asarray(result.plan, np.float64)
    d_x, d_y = (cdist(p, p, "sqeuclidean") * s for p, s in zip((x, y), result.scale, strict=True))
    value = reference.gw_value(d_x, d_y, plan)
    assert result.value_quad == pytest.approx(value * (0.5 if fused else 1), rel=1e-4)
    a, b = result.lazy_plan.weights
    used = plan > 0
    ratio = plan[used] / np.outer(a, b)[used]
    assert result.log["kl"] == pytest.approx((plan[used] * np.log(ratio)).sum(), rel=1e-3)
    if fused:
        linear = (cdist(x[:, :2], y, "sqeuclidean") * plan).sum()
        assert result.value_linear == pytest.approx(linear / 2, rel=1e-4)


def test_results_are_told_apart_and_go_into_sets():
    x = np.random.default_rng(0).normal(size=(10, 2))
    first, second = (torchgw.solve(x, x, distances="euclidean", n_init=1) for _ in range(2))
    assert first == first
    assert len({first, second, first}) == 2


def test_what_float32_leaves_unresolved_is_settled_in_float64(limited):
    # the rules for problems that are too large for anything but float32
    limited(float64=0, kept_tables=0, settled=0)
    x, y = (torch.linspace(0, 1, 150, dtype=torch.float64)[:, None] ** p for p in (1, 1.2))
    given = {"distances": "sqeuclidean", "gradient": "factored", "storage": "streamed"}
    with pytest.warns(ConvergenceWarning):
        rounded = solve_by_name(x, y, **given, epsilon=2.5e-4, precision="float32", random_state=0)
    assert rounded.status is Status.PRECISION_LIMIT
    settled = solve_by_name(x, y, **given, epsilon=2.5e-4, random_state=0)
    assert settled.status is Status.CONVERGED
    assert settled.lazy_plan.dtype == torch.float64
    # ten times what the last linear problem is asked for; what float32 leaves differs by processor
    assert settled.marginal_error <= 1e-4
    assert settled.marginal_error < rounded.marginal_error
    # where float32 resolves epsilon, it is enough
    enough = solve_by_name(x, y, **given, epsilon=4e-3, random_state=0)
    assert enough.status is Status.CONVERGED
    assert enough.lazy_plan.dtype == torch.float32
