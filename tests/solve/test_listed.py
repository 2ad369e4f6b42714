"""Pairs of points that are listed, where no table says which may hold mass."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import scipy
import torch
from problems import check_reads

import torchgw
from torchgw import InvalidInputError, Options, UnsupportedError
from torchgw._problem.limits import Limits

RNG = np.random.default_rng(5)
N, M = 36, 48
X, Y = RNG.normal(size=(N, 3)), RNG.normal(size=(M, 3))
MASK = RNG.random((N, M)) < 0.3
KIND, OTHER = np.arange(N) % 4, np.arange(M) % 4
OPTIONS = {
    "distances": "sqeuclidean", "epsilon": 0.3, "tol": 1e-8, "n_init": 1, "random_state": 0,
    "scale": "max",    "gradient": "factored",
}  # fmt: skip


def no_table(monkeypatch):
    monkeypatch.setattr(Limits, "stores", lambda self, n, m: False)


LIGHT = np.where(np.arange(N) % 3, 1 / 24, 0.0)
WAYS = {
    "table": {},
    "sparse": {"allowed": scipy.sparse.csr_array(MASK)},
    "candidates": {"allowed": [np.flatnonzero(row).tolist() for row in MASK]},
    "function": {"allowed": lambda i, j: MASK[i, j]},
    "groups": {"groups": (KIND, OTHER % 2, [(i, i % 2) for i in range(4)])},
    "overlapping": {"allowed": None, "groups": (KIND, OTHER, [
        (i, j) for i in range(4) for j in range(4) if abs(i - j) < 2])},
    "weights": {"a": LIGHT},
    "features": {"features": (X[:, :2], Y[:, :2])},
    "landmarks": {"distances": "landmark", "options": Options(n_landmarks=12)},
    "mixed": {"options": Options(precision="mixed")},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_list_and_a_table_have_one_answer(way: str, monkeypatch):
    options = OPTIONS | {"allowed": MASK} | WAYS[way]
    table = torchgw.solve(X, Y, **options)
    no_table(monkeypatch)
    found = torchgw.solve(X, Y, **options)
    close = 1e-3 if way == "mixed" else 1e-6
    assert np.abs(found.plan - table.plan).sum() < close
    outside = table.plan == 0
    assert outside.sum() > N * M / 3
    assert (found.plan[outside] == 0).all()
    assert found.value == pytest.approx(table.value, abs=close)
    assert found.report.objective == pytest.approx(table.report.objective, abs=close)
    assert found.report.allowed == pytest.approx(table.report.allowed)
    assert found.status.converged


def test_every_way_to_read_the_plan_gives_its_entries(monkeypatch, tmp_path):
    no_table(monkeypatch)
    result = torchgw.solve(X, Y, allowed=MASK, **OPTIONS)
    result.save(tmp_path / "listed.npz")
    again = torchgw.load(tmp_path / "listed.npz")
    for one in (result, copy.deepcopy(result), pickle.loads(pickle.dumps(result)), again):
        for plan, mask in ((one.lazy_plan, MASK), (one.lazy_plan.T, MASK.T)):
            check_reads(plan, mask, (1, 20))
            assert np.asarray(plan.marginals()[0]) == pytest.approx(1 / len(mask))
    assert result.shard(1, 2).plan == pytest.approx(result.plan[N // 2 :])
    assert np.asarray(again.transform(X)) == pytest.approx(result.transform(X))


def test_sampled_distances_and_known_pairs_keep_to_a_list(monkeypatch):
    no_table(monkeypatch)
    options = OPTIONS | {"distances": "euclidean", "gradient": "sampled"}
    sampled = torchgw.solve(X, Y, allowed=MASK, **options)
    assert (sampled.plan[~MASK] == 0).all()
    assert sampled.marginal_error < 1e-6
    pairs, same = np.argwhere(MASK[:, :N])[:1], Y[:N]
    both = torchgw.solve(X, same, allowed=MASK[:, :N], pairs=pairs, **OPTIONS)
    assert both.plan[tuple(pairs[0])] == pytest.approx(1 / N)
    assert (both.plan[~MASK[:, :N]] == 0).all()
    with pytest.raises(InvalidInputError, match="is a known pair"):
        torchgw.solve(X, same, allowed=MASK[:, :N], pairs=np.argwhere(~MASK)[:1], **OPTIONS)


def test_what_no_list_can_do_is_refused(monkeypatch):
    no_table(monkeypatch)
    closed = MASK.copy()
    closed[:3] = False
    closed[:3, :2] = True
    says = r"Of points 0, 1.* of X.* is only 0.0416667, points 0, 1 of Y. At most 0.958333 of"
    with pytest.raises(InvalidInputError, match=says):
        torchgw.solve(X, Y, allowed=closed, **OPTIONS)
    for named, message in (
        ({"unbalanced": 1.0}, "strict"),
        ({"differentiable": "implicit", "M": torch.zeros(N, M)}, "without derivatives"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            torchgw.solve(X, Y, allowed=MASK, **OPTIONS | named)
    monkeypatch.setattr("torchgw._problem.support.BLOCK_ENTRIES", 4 * M)
    few = torchgw._problem.limits.CPU._replace(settled=500)
    monkeypatch.setattr("torchgw._problem.support.limits_of", lambda device: few)
    with pytest.raises(UnsupportedError, match="More than 500 of 36 x 48 pairs"):
        torchgw.solve(X, Y, allowed=MASK, **OPTIONS)


def test_a_matching_keeps_to_what_is_allowed(monkeypatch):
    no_table(monkeypatch)
    points = X[RNG.permutation(N)]
    for known, mask in (
        ({"allowed": MASK[:, :N]}, MASK[:, :N]),
        ({"groups": (KIND, KIND[::-1])}, KIND[:, None] == KIND[::-1]),
    ):
        for result in (
            torchgw.solve(X, points, **known, **OPTIONS),
            torchgw.solve(X, points, **known, pairs=np.argwhere(mask)[:1], **OPTIONS),
        ):
            pairs = result.matching().pairs
            assert mask[pairs[:, 0], pairs[:, 1]].all()
            assert len(pairs) == N
    loose = torchgw.solve(X, points, allowed=MASK[:, :N], **OPTIONS)
    outside = torch.from_numpy((~MASK[:, :N]).argmax(1))
    monkeypatch.setattr("torchgw._results.matching.assign", lambda *_: outside)
    with pytest.raises(InvalidInputError, match="hold none of their mass"):
        loose.matching()
