"""Batches without entropy: polished plans and proximal steps."""

from __future__ import annotations

import importlib.util
from functools import partial

import numpy as np
import pytest
import reference
import torch
from problems import weighted_clouds
from scipy.spatial.distance import cdist

import torchgw
from torchgw._many import questions

# of one start, whose bits and answers are those of the engine alone; searches have their own tests
pairwise = partial(torchgw.pairwise, n_init=1)
solve_batch = partial(torchgw.solve_batch, n_init=1)
solve_many = partial(torchgw.solve_many, n_init=1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RNG = np.random.default_rng(0)
SIZES, XS, YS, A, B = weighted_clouds(RNG)
COSTS = [RNG.random(size) for size in SIZES]


def table(points):
    found = cdist(points, points)
    return found / found.max()


def least_fall(k, plan, alpha, cost):
    """How much a step to any vertex could lower the linearised objective of a strict plan."""
    import ot

    x, y = table(XS[k]), table(YS[k])
    gradient = -4 * alpha * x @ plan @ y + (1 - alpha) * cost
    return float((gradient * plan).sum() - ot.emd2(A[k], B[k] / B[k].sum(), gradient))


@pytest.mark.parametrize("regularization", ["entropic", "proximal"])
@pytest.mark.parametrize("fused", [False, True])
def test_polished_plans_are_stationary(regularization, fused):
    more = {"M": COSTS, "alpha": [0.3, 0.5, 0.9, 0.99]} if fused else {}
    given, proximal = {"a": A, "b": B, **more}, regularization == "proximal"
    batch = solve_many(XS, YS, regularization=regularization, polish=True, **given)
    assert batch.converged.all()
    assert (batch.epsilon == 0).all()
    np.testing.assert_array_equal(batch.objective, batch.value)
    if not proximal:
        # the plans that the steps began at have their marginals but for 5e-7
        plain = solve_many(XS, YS, **given)
        assert (batch.value <= plain.value * (1 + 1e-5)).all()
    for k, (n, m) in enumerate(SIZES):
        plan, alpha = batch.plan(k), more["alpha"][k] if fused else 1.0
        np.testing.assert_allclose(plan.sum(1), A[k], atol=1e-14)
        np.testing.assert_allclose(plan.sum(0), B[k], atol=1e-14)
        # a vertex, or a mean of a few
        assert np.count_nonzero(plan > 1e-12) < 2 * (n + m)
        value = reference.gw_value(table(XS[k]), table(YS[k]), plan)
        assert batch.value_quad[k] == pytest.approx(alpha * value, rel=1e-9)
        assert least_fall(k, plan, alpha, COSTS[k] if fused else 0) < 1e-7
        # proximal steps go on from there, and may find more
        again = batch.result(k).value
        assert batch.value[k] * (0.99 if proximal else 1 - 1e-7) < again
        assert again < batch.value[k] * (1 + 1e-7)


def test_proximal_steps_end_near_a_vertex():
    batch = solve_many(XS, YS, a=A, b=B, regularization="proximal", polish=False)
    polished = solve_many(XS, YS, a=A, b=B, regularization="proximal")
    entropic = solve_many(XS, YS, a=A, b=B)
    assert batch.converged.all()
    assert (polished.epsilon == 0).all()
    # sharper than entropic plans, at an epsilon that an entropic solve could have
    assert (batch.epsilon <= entropic.epsilon * (1 + 1e-9)).all()
    np.testing.assert_allclose(batch.value, polished.value, rtol=2e-2)
    np.testing.assert_array_equal(batch.objective, batch.value)
    for k in range(len(SIZES)):
        assert least_fall(k, batch.plan(k), 1.0, 0) < 1e-3 * batch.value[k]
        again = batch.result(k)
        assert again.epsilon == pytest.approx(batch.epsilon[k])
        assert again.value == pytest.approx(batch.value[k], rel=1e-2)


@pytest.mark.parametrize(
    "marginals", [{"mass": 0.7}, {"unbalanced": (float("inf"), 0)}], ids=["partial", "semi-relaxed"]
)
def test_relaxed_plans_are_polished_as_by_solve(marginals):
    batch = solve_many(XS, YS, a=A, b=B, M=COSTS, alpha=0.5, polish=True, **marginals)
    plain = solve_many(XS, YS, a=A, b=B, M=COSTS, alpha=0.5, **marginals)
    assert batch.converged.all()
    assert (batch.value <= plain.value * (1 + 1e-6)).all()
    assert batch.marginal_error.max() < 5e-7
    for k in range(len(SIZES)):
        again = batch.result(k)
        assert again.value == pytest.approx(batch.value[k], rel=1e-6)
        assert batch.plan(k).sum() == pytest.approx(marginals.get("mass", 1.0))


@pytest.mark.parametrize("device", DEVICES)
def test_each_problem_has_its_own_kind_and_bits(device):
    kinds = ["entropic", "proximal", "proximal", "entropic"]
    polish = [True, None, False, False]
    batch = solve_many(XS, YS, a=A, b=B, regularization=kinds, polish=polish, device=device)
    assert ((batch.epsilon == 0) == [True, True, False, False]).all()
    for k in range(len(SIZES)):
        one = solve_many(
            XS[k : k + 1], YS[k : k + 1], a=A[k : k + 1], b=B[k : k + 1], regularization=kinds[k],
            polish=polish[k], device=device,
        )  # fmt: skip
        np.testing.assert_array_equal(one.plan(0), batch.plan(k))
        assert one.value[0] == batch.value[k]


def test_pairs_and_stacks_are_polished_alike(tmp_path):
    tables = [table(points) for points in XS]
    batch = solve_many(D_X=tables[:3], D_Y=tables[1:], polish=True)
    pairs, file = [[0, 1], [1, 2], [2, 3]], tmp_path / "values.npz"
    for jobs in (None, 2):
        values = pairwise(
            D_X=tables, pairs=pairs, polish=True, n_jobs=jobs, progress=False, resume=file
        )
        np.testing.assert_array_equal(values, batch.value)
    with pytest.raises(torchgw.InvalidInputError, match="other spaces, pairs or options"):
        pairwise(D_X=tables, pairs=pairs, progress=False, resume=file)
    same = torch.from_numpy(np.stack([table(YS[1])] * 2))
    stacked = solve_batch(same, same, polish=[True, False], epsilon=0.05)
    assert float(stacked.value[0]) < 1e-12 < float(stacked.value[1])


def test_large_problems_are_polished_by_solve():
    points = np.random.default_rng(1).normal(size=(520, 2))
    batch = solve_many([points[:30]], [points], polish=True)
    assert batch.epsilon[0] == 0
    assert batch.converged.all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"polish": "yes"}, "`polish` must be True, False or None"),
        ({"polish": [True]}, "one for each of the 4 problems"),
        ({"regularization": "kl"}, "'entropic' or 'proximal'"),
        ({"regularization": "proximal", "mass": 0.5}, "relaxes them"),
        ({"polish": True, "unbalanced": 1.0}, r"penalises them. Pass polish=False"),
        ({"polish": True, "differentiable": True, "epsilon": 0.1}, "polish=False"),
        (
            {"regularization": "proximal", "differentiable": True, "epsilon": 0.1},
            "regularization='entropic'",
        ),
    ],
)
def test_what_cannot_be_sharp_is_refused(given, message, monkeypatch):
    def solved(*args, **kwargs):
        raise AssertionError("work was begun")

    monkeypatch.setattr("torchgw._many.solver.run", solved)
    with pytest.raises(torchgw.TorchGWError, match=message):
        solve_many(XS, YS, **given)
    if "differentiable" not in given:
        message = "True, False or None" if given.get("polish") == [True] else message
        with pytest.raises(torchgw.TorchGWError, match=message):
            pairwise(XS, **given, progress=False)


def test_without_pot_only_assignments_are_polished(monkeypatch):
    find = importlib.util.find_spec
    hidden = lambda name: None if name == "ot" else find(name)  # noqa: E731
    monkeypatch.setattr(questions, "find_spec", hidden)
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(torchgw.UnsupportedError, match="pip install pot"):
        solve_many(XS, YS, polish=True)
    batch = solve_many(XS, YS, regularization="proximal")
    assert ((batch.epsilon == 0) == [False, False, True, False]).all()
