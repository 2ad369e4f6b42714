"""Joint embeddings against dense eigenvectors and known matches."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from problems import isometric_copy

import torchgw
from torchgw._variants.embedding import _affinity
from torchgw.distances import knn_graph


def aligned(n=60, seed=0):
    x, y, match = isometric_copy(n, seed=seed)
    return x, y, match, torchgw.solve(x, y, distances="euclidean", random_state=0)


def test_eigenvectors_are_those_of_the_joint_matrix():
    x, y, _, result = aligned(30)
    joint = torchgw.joint_embedding([x], y, [result], dimension=3, coupling=0.7)
    plan = np.asarray(result.plan)
    a, b = (weight.numpy() for weight in result.lazy_plan.weights)
    bridge = 0.7 * plan / np.sqrt(np.outer(a, b))
    near, far = (_affinity("X", points, None).toarray() for points in (x, y))
    affinity = np.block([[near, bridge], [bridge.T, far]])
    values, vectors = scipy.linalg.eigh(
        np.diag(affinity.sum(1)) - affinity, np.diag(affinity.sum(1))
    )
    np.testing.assert_allclose(joint.eigenvalues, values[1:4], atol=1e-8)
    found = np.concatenate([joint.sources[0], joint.anchor])
    np.testing.assert_allclose(np.abs(found), np.abs(vectors[:, 1:4]), atol=1e-6)


def test_partners_are_neighbours():
    x, y, match, result = aligned()
    joint = torchgw.joint_embedding([x], y, [result])
    gap = joint.sources[0] - joint.anchor[match]
    assert np.linalg.norm(gap) < 0.05 * np.linalg.norm(joint.anchor)
    assert joint.eigenvalues[0] > 1e-6


def test_two_sources_on_one_anchor():
    x, y, match, result = aligned(50)
    other = x[::-1] * 2.0
    second = torchgw.solve(other, y, distances="euclidean", random_state=0)
    joint = torchgw.joint_embedding([x, other], y, [result, second.lazy_plan], coupling=5.0)
    assert [len(part) for part in joint.sources] == [50, 50]
    gap = joint.sources[0] - joint.sources[1][::-1]
    assert np.linalg.norm(gap) < 0.05 * np.linalg.norm(joint.anchor)
    # more coupling, smaller distance of partners
    loose = torchgw.joint_embedding([x, other], y, [result, second], coupling=0.05)
    far, near = (
        np.linalg.norm(each.sources[0] - each.anchor[match]) / np.linalg.norm(each.anchor)
        for each in (loose, joint)
    )
    assert near < far


def test_graphs_in_place_of_points():
    x, y, _, result = aligned(40)
    points = torchgw.joint_embedding([x], y, [result], n_neighbors=6)
    graphs = torchgw.joint_embedding([knn_graph(x, 6)], knn_graph(y, 6), [result])
    torch.testing.assert_close(points.anchor, graphs.anchor)


def test_duplicated_points_and_unused_ones():
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(10, 2)), 8, axis=0)
    y = rng.normal(size=(40, 2))
    a = np.r_[0.0, np.full(79, 1 / 79)]
    result = torchgw.solve(x, y, a=a, distances="sqeuclidean", n_init=1)
    joint = torchgw.joint_embedding([x], y, [result])
    assert np.isfinite(joint.sources[0]).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dimension": 29}, torchgw.InvalidInputError, "at most 28"),
        ({"dimension": 0}, torchgw.InvalidInputError, "`dimension`"),
        ({"coupling": 0}, torchgw.InvalidInputError, "`coupling`"),
        ({"results": []}, torchgw.InvalidInputError, "one plan for each"),
        ({"results": [np.ones((30, 30))]}, torchgw.InvalidTypeError, "GWResult"),
        ({"anchor": np.ones((20, 2))}, torchgw.InvalidInputError, "anchor's"),
        ({"dimensions": 2}, torchgw.InvalidTypeError, "Did you mean 'dimension'"),
    ],
)
def test_bad_input(change, error, message):
    x, y, _, result = aligned(30)
    options = {"sources": [x], "anchor": y, "results": [result], **change}
    with pytest.raises(error, match=message):
        torchgw.joint_embedding(**options)
