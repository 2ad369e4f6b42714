import networkx
import numpy as np
import pytest

import torchgw
from torchgw._starts.alternatives import _name_of
from torchgw._starts.coarse import eigenpairs


def points_on(kind):
    rng = np.random.default_rng(0)
    if kind == "segment":
        return np.linspace(0, 1, 60)[:, None] * [1.0, 2.0]
    if kind == "ellipse":
        angle = np.linspace(0, 2 * np.pi, 60, endpoint=False)
        return np.column_stack([np.cos(angle), 2 * np.sin(angle)])
    half = rng.uniform(size=(30, 2)) * [1, 3] + [0.2, 0]
    return np.concatenate([half, half * [-1, 1]])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("segment", {"the first read backwards"}),
        (
            "ellipse",
            {
                "the first turned by 180 degrees",
                "the first mirrored",
                "the first mirrored, with its longest extent read backwards",
            },
        ),
        ("two halves", {"the first mirrored"}),
    ],
)
def test_symmetries_are_named_and_warned_of(kind, expected):
    X = points_on(kind)
    order = np.random.default_rng(1).permutation(len(X))
    with pytest.warns(torchgw.AmbiguityWarning, match="nearly the same.*second is the first"):
        result = torchgw.solve(X, X[order], distances="euclidean", random_state=0)
    equal = [
        item for item in result.alternatives if item.value < 1.05 * result.alternatives[0].value
    ]
    assert equal[0].relation == ""
    assert {item.relation for item in equal[1:]} == expected
    assert equal[1].relation in repr(result)
    assert equal[1].relation in repr(equal[1])


def test_relations_are_true(tmp_path):
    X = points_on("ellipse")
    with pytest.warns(torchgw.AmbiguityWarning):
        result = torchgw.solve(X, X, distances="euclidean", random_state=0)
    first, *others = result.alternatives

    def partners(match):
        return X[match.target[match.plan.argmax(1)]]

    for other in others:
        if other.plan.shape != first.plan.shape:
            continue
        turn = np.linalg.lstsq(partners(first), partners(other), rcond=None)[0]
        sign = {
            "the first turned by 180 degrees": [-1, -1],
            "the first mirrored": [-1, 1],
            "the first mirrored, with its longest extent read backwards": [1, -1],
        }[other.relation]
        assert np.abs(turn - np.diag(sign)).max() < 0.15
    result.save(tmp_path / "result.npz")
    again = torchgw.load(tmp_path / "result.npz")
    assert [one.relation for one in again.alternatives] == [
        one.relation for one in result.alternatives
    ]


def test_unrelated_matches_and_one_match():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(6, 5)) * 5
    X = np.repeat(centres, 15, 0) + rng.normal(size=(90, 5)) / 2
    result = torchgw.solve(X, X[::-1], distances="euclidean", random_state=0)
    told = [item.relation for item in result.alternatives]
    assert result.ambiguity < 0.5
    assert told[0] == ""
    assert any(text.startswith("another match, which sends") for text in told[1:])


def test_small_turns_are_told_by_their_angle():
    """Matches that differ by a step around a circle move no point far."""
    for degrees, told in ((0, "almost the first"), (6, "the first turned by 6 degrees")):
        angle = np.radians(degrees)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        assert _name_of(turn, 0.0) == told
    assert _name_of(turn, 0.25) == "almost the first, with 25% of the points elsewhere"


@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
@pytest.mark.parametrize("graph", ["complete", "windmill"])
def test_tables_of_many_equal_eigenvalues_are_related(graph):
    """LAPACK had found none of their largest ones, and the result of a solve was lost."""
    made = {"complete": networkx.complete_graph(80), "windmill": networkx.windmill_graph(12, 6)}
    table = networkx.to_numpy_array(made[graph])
    order = np.random.default_rng(1).permutation(len(table))
    result = torchgw.solve(D_X=table, D_Y=table[order][:, order], random_state=1)
    assert abs(result.value) < 1e-9


@pytest.mark.parametrize("graph", ["complete", "windmill", "path"])
def test_eigenpairs_are_all_there(graph):
    made = {
        "complete": networkx.complete_graph(80),
        "windmill": networkx.windmill_graph(12, 6),
        "path": networkx.path_graph(30),
    }
    table = networkx.to_numpy_array(made[graph])
    n = len(table)
    for first, last in ((0, 2), (n - 3, n - 1)):
        values, vectors = eigenpairs(table, first, last)
        np.testing.assert_allclose(values, np.linalg.eigvalsh(table)[first : last + 1], atol=1e-9)
        np.testing.assert_allclose(table @ vectors, vectors * values, atol=1e-9)
