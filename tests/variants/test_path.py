"""Paths along one option: warm starts end where solves do, and what is recommended."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist

import torchgw
from torchgw._tensors import deadline
from torchgw._variants import path

RNG = np.random.default_rng(0)
CLOUD = RNG.normal(size=(25, 3)) * [3, 2, 1]
NOISY = CLOUD + 0.05 * RNG.normal(size=CLOUD.shape)
OPTIONS = {"distances": "euclidean", "random_state": 0, "n_resamples": 3}


def test_a_path_of_epsilon_sharpens(tmp_path):
    found = torchgw.path(CLOUD, NOISY, epsilon=[0.003, 0.3, 0.03], **OPTIONS)
    assert found.points == ("0.3", "0.03", "0.003")
    assert [each.epsilon for each in found.results] == pytest.approx([0.3, 0.03, 0.003])
    # as epsilon falls the value does too, and plans become sharper
    assert (np.diff(found.value) < 0).all()
    assert (np.diff(found.entropy) > 0).all()
    assert 0 <= found.entropy.min() <= found.entropy.max() <= 1 + 1e-9
    alone = torchgw.solve(CLOUD, NOISY, epsilon=0.003, distances="euclidean", random_state=0)
    assert found.value[-1] == pytest.approx(alone.value, rel=1e-2)
    worth = found.agreement * found.stability
    assert found.recommended == worth.argmax()
    assert found.best is found.results[found.recommended]
    assert "recommended=" in repr(found)
    plotting = pytest.importorskip("torchgw.plotting")
    assert "epsilon = " in plotting.plot_path(found).get_title()
    found.save(tmp_path / "path.npz")
    assert np.array_equal(torchgw.load(tmp_path / "path.npz").value, found.value)


def test_metrics_are_compared():
    # one side is a blow-up in a direction that says nothing
    options = {"random_state": 0, "n_resamples": 3, "scale": None}
    found = torchgw.path(CLOUD, NOISY, distances=["cosine", "euclidean"], **options)
    assert found.points == ("cosine", "euclidean")
    assert found.points[found.recommended] == "euclidean"
    # a plan is worth what the metric that likes it least says
    for place, (name, one) in enumerate(zip(found.points, found.results, strict=True)):
        by = [one.distance_correlation]
        for other in {"cosine", "euclidean"} - {name}:
            X, Y = (cdist(side, side, other) for side in (CLOUD, NOISY))
            plan = np.asarray(one.plan)
            p, q = plan.sum(1), plan.sum(0)
            means, spread = (p @ X @ p, q @ Y @ q), (p @ X**2 @ p, q @ Y**2 @ q)
            both = ((X @ plan @ Y) * plan).sum() - means[0] * means[1]
            by.append(
                both / np.sqrt(np.prod([s - m**2 for s, m in zip(spread, means, strict=True)]))
            )
        assert found.agreement[place] == pytest.approx(min(by), abs=1e-6)


def test_masses_end_where_costs_rise():
    Y = NOISY.copy()
    Y[:10] = RNG.normal(size=(10, 3)) * [3, 2, 1]
    masses = [0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0]
    found = torchgw.path(CLOUD, Y, mass=masses, **OPTIONS)
    assert found.points[0] == "1"
    assert 0.4 <= float(found.points[found.recommended]) <= 0.8
    assert np.isnan(found.stability).all()


def test_all_of_the_mass_of_what_matches_throughout_is_taken():
    """Where costs are compared, plans of less mass are not sharper."""
    masses = [0.4, 0.6, 0.8, 1.0]
    found = torchgw.path(CLOUD, CLOUD[::-1], mass=masses, distances="euclidean", random_state=0)
    assert found.points[found.recommended] == "1"
    level = [one.epsilon / mass for one, mass in zip(found.results, masses[::-1], strict=True)]
    assert level == pytest.approx([level[0]] * 4)


def test_without_confidence_agreement_alone_counts():
    """Of problems that confidence is not of, however they are asked for; but a part of them."""
    few = {**OPTIONS, "epsilon": [0.3, 0.03], "n_init": 1}
    for options in ({"options": torchgw.Options(unbalanced=10.0)}, {"loss": "kl"}):
        found = torchgw.path(CLOUD, NOISY, **few, **options)
        assert np.isnan(found.stability).all()
        assert found.recommended == found.agreement.argmax()
        assert "no confidence" in found.why
    M = cdist(CLOUD, NOISY)
    found = torchgw.path(CLOUD, NOISY, alpha=[0.0, 0.5, 1.0], M=M, **OPTIONS)
    assert np.isnan(found.stability).tolist() == [True, False, False]
    assert found.recommended == np.nan_to_num(found.agreement * found.stability).argmax()


def test_one_list_is_needed():
    for given in ({}, {"epsilon": [0.1]}, {"epsilon": [0.1, 1.0], "alpha": [0.5, 1.0]}):
        with pytest.raises(torchgw.InvalidInputError, match="one option"):
            torchgw.path(CLOUD, NOISY, **given)
    with pytest.raises(torchgw.InvalidInputError, match="goes along numbers"):
        torchgw.path(CLOUD, NOISY, epsilon=["auto", 0.1])


def test_a_limit_of_time_is_of_the_whole_path(monkeypatch):
    """What each of its parts does not use is left for the others."""
    now, limits, confident = [0.0], [], torchgw.GWResult.confidence
    monkeypatch.setattr(deadline, "monotonic", lambda: now[0])

    def spend(seconds):
        limits.append(seconds)
        now[0] += seconds if len(limits) % 2 else 0.0

    def solve(*given, time_limit, **options):
        spend(time_limit)
        return torchgw.solve(*given, **options)

    def confidence(result, n_resamples, *, groups, time_limit):
        spend(time_limit)
        return confident(result, n_resamples, groups=groups)

    monkeypatch.setattr(path, "solve", solve)
    monkeypatch.setattr(torchgw.GWResult, "confidence", confidence)
    for limit in ({"time_limit": 12.0}, {"options": torchgw.Options(time_limit=12.0)}):
        limits.clear()
        torchgw.path(CLOUD, NOISY, epsilon=[1.0, 0.1], **limit, **OPTIONS)
        assert limits == pytest.approx([3.0, 3.0, 4.5, 4.5])
    with pytest.raises(torchgw.TorchGWError, match="time_limit"):
        torchgw.path(CLOUD, NOISY, epsilon=[1.0, 0.1], time_limit=-1)
