"""p-values: exact under the null, small for copies; what each null keeps."""

from __future__ import annotations

import numpy as np
import pytest
import scipy
import torch

import torchgw
from torchgw._many.permutation import (
    columns_shuffled,
    entries_shuffled,
    points_of,
    rewired,
    rotated,
)

ANGLES = np.linspace(0, 5, 40)
ARC = np.stack([np.cos(ANGLES), np.sin(ANGLES)], 1)


def gaussian(rng, n=8):
    return rng.normal(size=(n, 2)) @ rng.normal(size=(2, 2))


def p_values(count, draws, sample, **options):
    """p-values under a null hypothesis, spread over the steps that they come in."""
    rng = np.random.default_rng(5)
    found = [
        torchgw.test(*sample(rng), n_permutations=draws, random_state=k, **options).p_value
        for k in range(count)
    ]
    return np.array(found) - rng.random(count) / (draws + 1)


# what each null says of Y, whatever X is
SAMPLES = {
    "rotated": lambda rng: (ARC[::5], gaussian(rng)),
    "columns": lambda rng: (ARC[::5], np.column_stack([rng.random(8), rng.normal(size=8) ** 3])),
    "rewired": lambda rng: tuple(random_graph(rng) for _ in range(2)),
}


def random_graph(rng, n=10, p=0.35):
    """A graph all of whose edges are as likely, so that all graphs of its degrees are."""
    half = np.triu(rng.random((n, n)) < p, 1)
    half[0, 1] = True
    return scipy.sparse.csr_array((half | half.T).astype(float))


def test_p_values_are_uniform_under_the_null():
    found = p_values(25, 9, SAMPLES["rotated"], epsilon=0.05, max_iter=4)
    assert scipy.stats.kstest(found, "uniform").pvalue > 1e-3


@pytest.mark.filterwarnings("ignore::torchgw.GraphWarning")
@pytest.mark.parametrize("null", ["rotated", "columns", "rewired"])
def test_p_values_are_uniform_over_many_repetitions(null):
    found = p_values(500, 19, SAMPLES[null], null=null)
    assert scipy.stats.kstest(found, "uniform").pvalue > 1e-2


def test_p_values_of_shuffled_tables_are_uniform():
    def tables(rng):
        half = np.triu(rng.random((8, 8)), 1)
        return {"D_X": np.abs(np.subtract.outer(ANGLES[:8], ANGLES[:8])), "D_Y": half + half.T}

    rng = np.random.default_rng(0)
    options = {"null": "entries", "n_permutations": 9, "epsilon": 0.05, "max_iter": 4}
    found = [torchgw.test(**tables(rng), **options, random_state=k).p_value for k in range(60)]
    found -= rng.random(60) / 10
    assert scipy.stats.kstest(found, "uniform").pvalue > 1e-3


def test_noisy_copies_are_told_from_chance():
    rng = np.random.default_rng(0)
    copies = [ARC[rng.permutation(40)] + 0.1 * rng.normal(size=ARC.shape) for _ in range(2)]
    for null in ("rotated", "columns", "entries"):
        found = [torchgw.test(ARC, Y, null=null, n_permutations=19, random_state=0) for Y in copies]
        assert [each.p_value for each in found] == [0.05] * 2
    table = scipy.spatial.distance.cdist(ARC, ARC)
    assert torchgw.test(D_X=table, D_Y=table, n_permutations=19, random_state=0).p_value == 0.05


def test_the_space_given_is_solved_as_those_drawn():
    # a draw that is the space given has its objective, to the last bit
    point = {"n_permutations": 3, "null": "columns", "random_state": 0, "epsilon": 0.1}
    Y = np.repeat([[1.0, 2.0]], 6, 0)
    for named in ("euclidean", "sqeuclidean"):
        found = torchgw.test(ARC[:6], Y, distances=named, **point)
        assert (found.null_distribution == found.statistic).all()
        assert found.p_value == 1


def test_answers_do_not_depend_on_the_order_of_points():
    first = torchgw.test(ARC, ARC[::-1], n_permutations=9, random_state=3)
    again = torchgw.test(ARC, ARC[::-1], n_permutations=9, random_state=3)
    assert np.array_equal(first.null_distribution, again.null_distribution)
    other = torchgw.test(ARC[::-1], ARC[::-1], n_permutations=9, random_state=3)
    np.testing.assert_allclose(first.statistic, other.statistic, rtol=1e-6)


def test_what_nulls_keep():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(30, 3, dtype=torch.float64, generator=generator) + 5
    for cloud in rotated(points, 4, generator):
        torch.testing.assert_close(cloud.mean(0), points.mean(0))
        torch.testing.assert_close(cloud.T.cov(), points.T.cov())
        assert not torch.allclose(cloud, points)
    for cloud in columns_shuffled(points, 4, generator):
        assert torch.equal(cloud.sort(0).values, points.sort(0).values)
    table = torch.cdist(points, points)
    table = (table + table.T) / 2
    for shuffled in entries_shuffled(table, 4, generator):
        assert torch.equal(shuffled, shuffled.T)
        assert torch.equal(shuffled.flatten().sort().values, table.flatten().sort().values)
    found = points_of("D_Y", table)
    torch.testing.assert_close(torch.cdist(found, found), table, atol=1e-6, rtol=0)
    graph = random_graph(np.random.default_rng(0), 20)
    graphs = rewired(graph, 5, 0)
    for made in graphs:
        assert (made != made.T).nnz == 0
        assert np.array_equal(made.sum(0), graph.sum(0))
        assert set(made.data) == {1.0}
        assert made.diagonal().sum() == 0
    assert any((made != graph).nnz for made in graphs)


@pytest.mark.filterwarnings("ignore::torchgw.GraphWarning")
def test_nulls_that_a_space_does_not_have_are_refused():
    graph = random_graph(np.random.default_rng(0))
    table = np.ones((6, 6)) - np.eye(6)
    table[0, 1] = table[1, 0] = 5
    for given, named in (
        ({"X": ARC, "Y": graph, "null": "rotated"}, "needs points"),
        ({"X": ARC, "Y": ARC, "null": "rewired"}, "Y is none"),
        ({"D_X": table, "D_Y": table}, "null='entries'"),
        ({"X": ARC, "Y": ARC, "null": "order"}, "`null`"),
        ({"X": ARC, "Y": ARC, "n_permutations": 0}, "`n_permutations`"),
    ):
        with pytest.raises(torchgw.InvalidInputError, match=named):
            torchgw.test(**given)


def test_pairs_of_one_space_are_refused():
    with pytest.raises(torchgw.InvalidInputError, match="at least two spaces"):
        torchgw.test_pairwise([ARC])


def test_q_values_are_those_of_scipy():
    rng = np.random.default_rng(0)
    spaces = [ARC[::4], ARC[::4] + 0.02 * rng.normal(size=(10, 2)), rng.normal(size=(10, 2))]
    found = torchgw.test_pairwise(spaces, n_permutations=39, random_state=0, epsilon=0.05)
    upper = np.triu_indices(3, 1)
    expected = scipy.stats.false_discovery_control(found.p_value[upper])
    assert np.array_equal(found.q_value[upper], expected)
    assert np.isnan(found.p_value[np.tril_indices(3)]).all()
    assert found.p_value[0, 1] == 1 / 40
    assert "of 3" in repr(found)


def test_groups_of_spaces():
    rng = np.random.default_rng(0)
    wide = [rng.normal(size=(10, 2)) * [1, 1 + 4 * (k % 2)] for k in range(12)]
    options = {"n_permutations": 199, "random_state": 0}
    values = torchgw.pairwise(wide, epsilon=0.1, n_init=1, progress=False)
    found = torchgw.test_groups(values, np.arange(12) % 2, **options)
    assert found.p_value < 0.05
    # by its definition
    two = values[::2, 1::2].mean()
    within = [values[k::2, k::2][~np.eye(6, dtype=bool)].mean() for k in (0, 1)]
    assert found.statistic == pytest.approx(-(2 * two - sum(within)))
    other = torchgw.test_groups(values, np.arange(12) // 6, **options)
    assert other.p_value > 0.05
    with pytest.raises(torchgw.InvalidInputError, match="two groups"):
        torchgw.test_groups(values, np.arange(12), **options)


def test_tests_are_saved_and_drawn(tmp_path):
    found = torchgw.test(ARC, ARC, n_permutations=9, random_state=0)
    found.save(tmp_path / "test.npz")
    again = torchgw.load(tmp_path / "test.npz")
    assert again.p_value == found.p_value
    assert np.array_equal(again.null_distribution, found.null_distribution)
    assert "shapeless" in repr(found)
    plotting = pytest.importorskip("torchgw.plotting")
    assert "p = 0.1" in plotting.plot_test(found).get_title()
