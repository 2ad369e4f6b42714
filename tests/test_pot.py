"""``torchgw.pot.solve_gromov`` against ``ot.solve_gromov``, call by call."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import ot
import pytest
import torch
from problems import distance_matrices, random_weights

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
    "reg, M, alpha 0": {"reg": 0.02, "M": LINEAR, "alpha": 0},
    "exact": {},
    "exact, weights": WEIGHTS,
    "exact, M": {"M": LINEAR},
    "exact, M, alpha": {"M": LINEAR, "alpha": 0.2, **WEIGHTS},
    "exact, M, alpha 1": {"M": LINEAR, "alpha": 1},
}


def test_signature_is_that_of_pot():
    ours, theirs = (inspect.signature(f).parameters for f in (solve_gromov, ot.solve_gromov))
    assert list(ours) == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in ours)


@pytest.mark.parametrize("name", CALLS)
def test_value_is_that_of_pot_or_lower(name):
    expected = ot.solve_gromov(*COSTS, **CALLS[name])
    found = solve_gromov(*COSTS, **CALLS[name])
    assert isinstance(found.plan, np.ndarray)
    assert found.status.converged
    # the same units: at POT's own plan the value below would be POT's
    assert found.value <= expected.value + 1e-6
    if abs(found.value - expected.value) < 1e-6:
        assert np.abs(found.plan - expected.plan).sum() < 1e-2
    for marginal in found.marginals:
        assert marginal.sum() == pytest.approx(CALLS[name].get("unbalanced", 1), abs=1e-6)


@pytest.mark.parametrize("name", ["reg", "reg, M, alpha", "exact", "exact, M, alpha"])
def test_started_at_pots_plan_it_is_pots_optimum(name):
    expected = ot.solve_gromov(*COSTS, **CALLS[name])
    found = solve_gromov(*COSTS, **CALLS[name], plan_init=expected.plan)
    # proximal steps may leave a saddle point downwards
    assert found.value <= expected.value + 1e-6
    # the entropic fused solver of POT 0.9.7 ends at a plan that is no fixed point of its objective
    if name == "reg":
        assert found.value == pytest.approx(expected.value, abs=1e-6)
        assert np.abs(found.plan - expected.plan).sum() < 1e-3


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
    assert found.result.lazy_plan.shape == (N, M)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "KL"}, "square loss"),
        ({"symmetric": False}, "symmetric"),
        ({"reg_type": "l2"}, "reg_type"),
        ({"unbalanced": 0.5}, "balanced"),
        ({"unbalanced_type": "semirelaxed"}, "balanced"),
        ({"unbalanced": 0.5, "unbalanced_type": "partial"}, "needs `reg`"),
        ({"n_threads": 4}, "set_num_threads"),
        ({"method": "BAPG", "reg": 0.1}, "'PPA'"),
        ({"method": "PGD"}, "regularised"),
        ({"M": LINEAR, "alpha": 0}, "linear program"),
    ],
)
def test_what_is_not_solved_is_refused(change, message):
    with pytest.raises(torchgw.UnsupportedError, match=message):
        solve_gromov(*COSTS, **change)


def test_negative_reg():
    with pytest.raises(torchgw.InvalidInputError, match="`reg`"):
        solve_gromov(*COSTS, reg=-1.0)
