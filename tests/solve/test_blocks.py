"""Groups of so many points that no table says which pairs may hold mass."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from problems import check_reads

import torchgw
from torchgw import InvalidInputError, Options, UnsupportedError
from torchgw._problem.limits import Limits
from torchgw._problem.problem import Facts, Problem
from torchgw._problem.support import Known, read_restriction
from torchgw._solve.forecast import iteration_seconds
from torchgw._typing import Marginals
from torchgw.distances import PointDistance

RNG = np.random.default_rng(3)
N, M = 36, 48
X, Y = RNG.normal(size=(N, 3)), RNG.normal(size=(M, 3))
KIND, OTHER = RNG.permutation(np.arange(N) % 4), RNG.permutation(np.arange(M) % 4)
SAME = KIND[:, None] == OTHER
OPTIONS = {
    "distances": "sqeuclidean", "epsilon": 0.1, "tol": 1e-8, "n_init": 1, "random_state": 0,
    "scale": "max",    "gradient": "factored",
}  # fmt: skip


@pytest.fixture
def no_table(monkeypatch):
    monkeypatch.setattr(Limits, "stores", lambda self, n, m: False)


WAYS = {
    "groups": {}, "features": {"features": (X[:, :2], Y[:, :2])},
    "landmarks": {"distances": "landmark", "options": Options(n_landmarks=12)},
    "blurred": {"epsilon": 1.0}, "mixed": {"options": Options(precision="mixed")},
    "merged": {"groups": (KIND, OTHER, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 3), (3, 2)])},
    "absent": {"groups": (KIND, np.where(OTHER < 3, OTHER, 7)), "a": np.where(KIND < 3, 1 / 27, 0),
               "b": np.where(OTHER < 3, 1 / 36, 0)},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_blocks_and_a_table_have_one_answer(way: str, monkeypatch):
    options = OPTIONS | {"groups": (KIND, OTHER)} | WAYS[way]
    table = torchgw.solve(X, Y, **options)
    monkeypatch.setattr(Limits, "stores", lambda self, n, m: False)
    found = torchgw.solve(X, Y, **options)
    # two ways to one fixed point, each to 1e-8; of float32 to what that leaves
    close = 1e-3 if way == "mixed" else 1e-6
    assert np.abs(found.plan - table.plan).sum() < close
    x, y, *mixed = options["groups"]
    pairs = set(mixed[0]) if mixed else {(kind, kind) for kind in range(4)}
    allowed = np.array([[(i, j) in pairs for j in y] for i in x])
    assert (found.plan[~allowed] == 0).all()
    assert found.value == pytest.approx(table.value, abs=close)
    assert found.report.objective == pytest.approx(table.report.objective, abs=close)
    assert found.report.allowed == pytest.approx(table.report.allowed)
    assert found.status.converged


def test_a_default_solve_has_no_search(no_table):
    options = {name: value for name, value in OPTIONS.items() if name != "n_init"}
    found = torchgw.solve(X, Y, groups=(KIND, OTHER), **options)
    assert "no search" in found.report.route
    assert (found.plan[~SAME] == 0).all()
    sampled = torchgw.solve(X, Y, groups=(KIND, OTHER), **options | {"gradient": "sampled"})
    assert (sampled.plan[~SAME] == 0).all()
    # beside known pairs
    pair = np.argwhere(SAME)[:1]
    b = np.full(M, 1 / M)
    a = np.full(N, 1 / N)
    a[KIND[pair[0, 0]] == KIND] = 0.25 * 4 / 3 / 9 * 0.75
    a[pair[0, 0]] = 1 / M
    rest = (KIND[pair[0, 0]] == KIND) & (np.arange(N) != pair[0, 0])
    a[rest] = (0.25 - 1 / M) / rest.sum()
    both = torchgw.solve(X, Y, a=a, b=b, groups=(KIND, OTHER), pairs=pair, **options)
    assert both.plan[tuple(pair[0])] == pytest.approx(1 / M)
    assert (both.plan[~SAME] == 0).all()


def test_groups_anneal_by_few_iterations(no_table):
    """While epsilon falls, groups are solved no further than that takes."""
    exact = torchgw.solve(X, Y, groups=(KIND, OTHER), **OPTIONS)
    falling = [step for step in exact.history if step.epsilon > OPTIONS["epsilon"]]
    assert falling
    assert all(step.inner_iterations % 10 for step in falling)
    # as near as linear problems are asked to come meanwhile
    assert all(step.marginal_error <= 1e-2 for step in falling)
    assert exact.marginal_error < 1e-7


def test_a_forecast_counts_what_is_allowed(no_table):
    times = []
    for known in ({}, {"groups": (KIND, OTHER)}, {"allowed": SAME}):
        problem = Problem(
            PointDistance(torch.tensor(X), "sqeuclidean"),
            PointDistance(torch.tensor(Y), "sqeuclidean"),
            Marginals(*(torch.full((k,), 1 / k, dtype=torch.float64) for k in (N, M))),
            1.0,
            None,
        )
        listed = read_restriction(Known(**known), problem.marginals, None, torch.device("cpu"))
        facts = Facts.of(replace(problem, restriction=listed), None)._replace(clouds=True)
        times.append(
            iteration_seconds(facts, "factored", 5, torch.float32, stored=False, tiled=False)
        )
    every, groups, mask = times
    assert groups == pytest.approx(every * SAME.mean())
    # a pair of a list takes longer than one that is streamed
    assert groups < mask < 20 * groups


def test_every_way_to_read_the_plan_gives_its_entries(no_table, tmp_path):
    result = torchgw.solve(X, Y, groups=(KIND, OTHER), **OPTIONS)
    result.save(tmp_path / "groups.npz")
    again = torchgw.load(tmp_path / "groups.npz")
    same = copy.deepcopy(result), pickle.loads(pickle.dumps(result)), again
    for one in (result, *same):
        for plan, mask in ((one.lazy_plan, SAME), (one.lazy_plan.T, SAME.T)):
            check_reads(plan, mask)
    assert result.shard(1, 2).plan == pytest.approx(result.plan[N // 2 :])
    assert np.isfinite(result.transform(X)).all()
    assert np.asarray(again.transform(X)) == pytest.approx(result.transform(X))


def test_what_has_no_blocks_is_refused(no_table):
    groups = KIND, OTHER
    for named, message in (
        ({"groups": groups, "unbalanced": 1.0}, "strict"),
        ({"groups": groups, "M": RNG.random((N, M)), "alpha": 0.5}, "linear cost as a table"),
        ({"groups": groups, "gradient": "dense"}, "this gradient would store"),
        ({"groups": groups, "regularization": "proximal"}, "proximal"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            torchgw.solve(X, Y, **OPTIONS | {"epsilon": "auto"} | named)
    with pytest.raises(InvalidInputError, match=r"weighs .* of the mass can move"):
        torchgw.solve(X, Y, groups=(np.where(KIND == 0, 1, KIND), OTHER), **OPTIONS)
