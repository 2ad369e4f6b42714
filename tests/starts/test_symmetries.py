"""What symmetries make of a match: as many as there are, one of them listed, and no doubt."""

import itertools
import math
import warnings

import numpy as np
import pytest
from scipy.sparse.csgraph import shortest_path
from scipy.spatial.distance import cdist

import torchgw
from torchgw._starts.symmetries import Symmetries


def ring(n, *steps):
    """The hops between n points, each beside those so many steps away."""
    places = np.arange(n)
    edges = np.isin((places[:, None] - places) % n, [*steps, *(n - step for step in steps)])
    return shortest_path(edges.astype(float), unweighted=True)


def cube(dim):
    corners = np.array(list(itertools.product([0.0, 1.0], repeat=dim)))
    return cdist(corners, corners, "cityblock")


def polygon(n):
    angle = 2 * np.pi * np.arange(n) / n
    return cdist(*[np.column_stack([np.cos(angle), np.sin(angle)])] * 2)


def petersen():
    pairs = [set(pair) for pair in itertools.combinations(range(5), 2)]
    return np.array([[float(not one & other) for one in pairs] for other in pairs])


SPACES = {
    "cycle": (ring(6, 1), 12), "long cycle": (ring(17, 1), 34), "cube": (cube(3), 48),
    "tesseract": (cube(4), 384), "star polygon": (ring(7, 1, 2), 14),
    "complete": (1 - np.eye(6), 720), "many": (1 - np.eye(30), math.factorial(30)),
    "square": (polygon(4), 8), "pentagon": (polygon(5), 10), "petersen": (petersen(), 120),
    "grid": (cdist(*[np.argwhere(np.ones((4, 4))).astype(float)] * 2), 8),
}  # fmt: skip


@pytest.mark.parametrize("name", SPACES)
def test_a_symmetric_space_is_ambiguous_and_says_how_often(name):
    D, count = SPACES[name]
    order = np.random.default_rng(0).permutation(len(D))
    with pytest.warns(torchgw.AmbiguityWarning, match=f"one of {count} that symmetries make"):
        result = torchgw.solve(D_X=D, D_Y=D[np.ix_(order, order)], random_state=0)
    assert result.value == pytest.approx(0, abs=1e-9)
    assert result.ambiguity == 1
    first, other = result.alternatives[:2]
    assert first.images == other.images == count
    assert other.value == pytest.approx(first.value, abs=1e-9)
    # of those that are as good, one of each description is listed
    equal = [each for each in result.alternatives if each.images > 1]
    assert len({each.relation for each in equal}) == len(equal)
    again = torchgw.solve(D_X=D, D_Y=D[np.ix_(order, order)], init=other)
    assert again.value == pytest.approx(0, abs=1e-9)
    assert (first.plan.argmax(1) != other.plan.argmax(1)).any()


def test_images_of_a_match_of_other_points():
    """As many as the square has symmetries; weights and a linear cost leave fewer."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4, 2))
    asked = {"D_X": cdist(X, X), "D_Y": polygon(4), "random_state": 0}
    for more, count in (
        ({}, 8),
        ({"b": [0.1, 0.2, 0.3, 0.4]}, 1),
        ({"b": [0.1, 0.2, 0.5, 0.2]}, 2),
        ({"M": rng.random((4, 4)), "alpha": 0.5}, 1),
        ({"M": np.ones((4, 4)), "alpha": 0.5}, 8),
        ({"M": np.eye(4)[:, [0]] * np.array([[0, 1, 0, 0]]), "alpha": 0.9}, 2),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torchgw.AmbiguityWarning)
            result = torchgw.solve(**asked, **more)
        first = result.alternatives[0]
        assert first.images == count
        assert (result.alternatives[1:2] and result.alternatives[1].images == count) or count == 1


@pytest.mark.parametrize(("size", "directed"), [(5, False), (3, True)])
def test_counts_are_those_of_all_permutations(size, directed):
    rng = np.random.default_rng(0)
    counts = set()
    for _ in range(60):
        table = rng.integers(0, 2, (size, size))
        if not directed:
            table = np.triu(table) + np.triu(table, 1).T
        every = [np.array(order) for order in itertools.permutations(range(size))]
        kept = [order for order in every if (table[np.ix_(order, order)] == table).all()]
        found = Symmetries(table)
        assert found.count == len(kept)
        for order in found.generators:
            assert (table[np.ix_(order, order)] == table).all()
        counts.add(found.count)
    assert len(counts) > 2


def test_what_takes_too_long_is_not_counted(monkeypatch):
    monkeypatch.setattr("torchgw._starts.symmetries._MOST", 3)
    assert Symmetries(petersen().astype(int)).count == 0
