"""Several spaces at once: plans that agree, pairs that do, files, labels."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

import torchgw
from torchgw._variants.several import belonging, cycle_error

N = np.arange(10)


def copies(count=3, noise=0.05, n=10):
    rng = np.random.default_rng(0)
    points = rng.normal(size=(n, 3))
    return [points + noise * rng.normal(size=points.shape) for _ in range(count)]


@pytest.fixture(scope="module")
def solved():
    return torchgw.solve_all(copies(), distances="euclidean", random_state=0)


def test_copies_find_their_partners(solved):
    assert len(solved) == 3
    assert len(solved.results) == 3
    assert solved.cycle_error == 0
    assert solved.consistent
    for i, j in permutations(range(3), 2):
        assert (solved.matching(i, j) == N).all()
        assert (solved[i, j].argmax() == N).all()
    # a space and itself go through the common space too
    assert (solved[2, 2].argmax() == N).all()
    # no pair costs more, by `tol`, than what the common space leads to
    assert (solved.own <= solved.through * (1 + 1e-4)).all()


def test_every_cycle_closes():
    """Also where the plans of pairs contradict each other."""
    result = torchgw.solve_all(copies(noise=0.7), distances="euclidean", random_state=0)
    matchings = {
        (i, j): torch.from_numpy(result.matching(i, j)) for i, j in permutations(range(3), 2)
    }
    assert cycle_error(matchings, 3) == 0
    if not result.consistent:
        dense = result[0, 1].to_dense()
        near, far = (np.asarray(result.common.results[s].plan) for s in (0, 1))
        expected = near.T @ (far / result.common.weights[:, None])
        np.testing.assert_allclose(dense, expected, atol=1e-12)
        np.testing.assert_allclose(result[1, 0].to_dense(), dense.T, atol=1e-12)
        np.testing.assert_allclose(dense.sum(), 1, atol=1e-5)


def test_what_belongs_together_agrees_with_all_plans():
    """At least as much as by the common space alone, and no space alone can agree more."""
    result = torchgw.solve_all(copies(noise=0.7), distances="euclidean", random_state=0)
    own = {pair: result.pair(*pair).lazy_plan.to_dense() for pair in ((0, 1), (0, 2), (1, 2))}
    common = [np.asarray(item.plan) for item in result.common.results]

    def agreement(labels):
        pairs = sum(p[labels[i][:, None] == labels[j]].sum() for (i, j), p in own.items())
        return pairs + sum(p[k, N].sum() for p, k in zip(common, labels, strict=True))

    found = [np.asarray(part) for part in result.common_points]
    plans = [item.lazy_plan for item in result.common.results]
    assert agreement(found) >= agreement([belonging(plan).numpy() for plan in plans]) - 1e-9
    for side in range(3):
        for i in range(10):
            other = [part.copy() for part in found]
            other[side][[i, i - 1]] = other[side][[i - 1, i]]
            assert agreement(other) <= agreement(found) + 1e-9


@pytest.mark.parametrize(("kind", "count"), [("star", 2), ("chain", 2)])
def test_fewer_pairs_lead_everywhere(kind, count):
    result = torchgw.solve_all(copies(), kind=kind, distances="euclidean", random_state=0)
    assert len(result.pairs) == count
    assert np.isnan(result.cycle_error)
    for i, j in permutations(range(3), 2):
        assert (result.matching(i, j) == N).all()
        assert (result[i, j].argmax() == N).all()
    with pytest.raises(torchgw.UnsupportedError, match="was not solved alone"):
        result.pair(0 if kind == "chain" else 1, 2)


def test_labels_and_new_points(solved):
    names = np.array(["left", "middle", "right"])[N % 3]
    carried = solved.labels({1: names})
    assert all((item == names).all() for item in carried)
    both = solved.labels({0: names, 2: names})
    assert all((item == names).all() for item in both)
    Xs = copies()
    moved = solved.transform(0, 2, Xs[0], values=Xs[2])
    # a known point goes where the plan through the common space sends it
    assert (cdist(moved, Xs[2]).argmin(1) == N).all()
    table = cdist(Xs[0], Xs[0])
    again = solved.transform(0, 2, D_new=table, values=Xs[2])
    np.testing.assert_allclose(moved, again, atol=1e-6)
    # the result of a pair knows its points, too
    own = solved.pair(0, 2).transform(Xs[0][:2])
    assert (cdist(own, Xs[2]).argmin(1) == N[:2]).all()


@pytest.mark.slow
def test_the_folder_is_gone_on_from(tmp_path, monkeypatch):
    options = {"distances": "euclidean", "random_state": 0, "resume": tmp_path}
    first = torchgw.solve_all(copies(3), **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-1.npz", "0-2.npz", "1-2.npz"]
    assert first.results == ()
    assert first.pair(0, 1).lazy_plan.shape == (10, 10)
    (tmp_path / "1-2.npz").unlink()
    again = torchgw.solve_all(copies(3), **options)
    np.testing.assert_allclose(again.own, first.own, rtol=1e-6)
    with pytest.raises(torchgw.InvalidInputError, match="belongs to other spaces or options"):
        torchgw.solve_all(copies(3, noise=0.1), **options)


def test_files_keep_it(solved, tmp_path):
    solved.save(tmp_path / "all.npz")
    again = torchgw.load(tmp_path / "all.npz")
    assert repr(again) == repr(solved)
    # what is printed is there by its name
    assert f"value={solved.value:.4g}" in repr(solved)
    assert (again.matching(0, 2) == solved.matching(0, 2)).all()
    assert (again[2, 0].argmax() == N).all()


def test_tables_weights_and_features():
    Xs = [part[:9] for part in copies(3)]
    tables = [torch.from_numpy(cdist(x, x)) for x in Xs]
    weights = np.array([[0, 3.0, 1], [3, 0, 1], [1, 1, 0]])
    result = torchgw.solve_all(
        D=tables, weights=weights, features=Xs, alpha=0.5, reference=1, random_state=0
    )
    assert isinstance(result.own, torch.Tensor)
    assert (np.asarray(result.matching(0, 2)) == np.arange(9)).all()
    assert result.common.distances.n == 9


def test_plot(solved):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = solved.plot()
    assert "cycle error" in axes.get_title()
    pyplot.close("all")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Xs": [N[:, None]]}, "at least two spaces"),
        ({"D": [np.eye(2)] * 2}, "either `Xs`"),
        ({"kind": "ring"}, "`kind`"),
        ({"reference": 4}, "`reference`"),
        ({"weights": np.ones((2, 2))}, "one weight for each pair"),
        ({"weights": -np.ones((3, 3))}, "non-negative and symmetric"),
        ({"masses": [None]}, "one item for each of the 3"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(torchgw.InvalidInputError, match=message):
        torchgw.solve_all(**({"Xs": copies(), "distances": "euclidean"} | change))


def test_bad_places(solved):
    with pytest.raises(torchgw.InvalidInputError, match="`j`"):
        solved[0, 3]
    with pytest.raises(torchgw.InvalidInputError, match="takes two spaces"):
        solved[0]
    with pytest.raises(torchgw.InvalidInputError, match="one label per point"):
        solved.labels({0: [1, 2]})
    with pytest.raises(torchgw.InvalidInputError, match="dictionary"):
        solved.labels([1])
