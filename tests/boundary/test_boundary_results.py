"""The boundary of everything beside `solve`: a right answer or a clear error, for any argument."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import pytest
import torch
from hostile import ANYTHING
from test_boundary import X, Y

import torchgw
from torchgw import InvalidInputError, InvalidTypeError, TorchGWError, TorchGWWarning
from torchgw._plans.given import SparsePlan
from torchgw._plans.transport import RoundedPlan, TransportPlan
from torchgw._variants.solve_low_rank import LowRankPlan
from torchgw.datasets import swiss_roll
from torchgw.distances import CallableDistance, knn_graph
from torchgw.metrics import foscttm, transfer_labels

RESULT = torchgw.solve(X, Y, distances="euclidean", epsilon=0.5, n_init=1, random_state=0)
STREAMED = torchgw.solve(
    X,
    Y,
    distances="sqeuclidean",
    epsilon=0.5,
    n_init=1,
    random_state=0,
    options=torchgw.Options(storage="streamed"),
)
LOW_RANK = torchgw.solve_low_rank(
    X, Y, rank=2, distances="sqeuclidean", tol=0.1, random_state=0, init=RESULT
)
COUNTS = ("max_iter", "n", "rank", "n_init")
GENERATOR = torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    path = tmp_path_factory.mktemp("boundary") / "result.npz"
    RESULT.save(path)
    return torchgw.load(path).lazy_plan


def call(function, /, **keywords):
    """Call it; whatever is wrong must be said by one of our errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", TorchGWWarning)
        try:
            return function(**keywords)
        except TorchGWError:
            return None


FUNCTIONS = {
    "barycenter": (
        torchgw.barycenter,
        {"spaces": [X, Y], "n": 3, "distances": "euclidean", "epsilon": 0.5, "max_iter": 1},
    ),
    "joint_embedding": (
        torchgw.joint_embedding,
        {"sources": [X], "anchor": Y, "results": [RESULT]},
    ),
    "solve_low_rank": (
        torchgw.solve_low_rank,
        {"X": X, "Y": Y, "rank": 2, "distances": "sqeuclidean", "max_iter": 2, "init": LOW_RANK},
    ),
    "transform": (RESULT.transform, {"X_new": X}),
    "inverse_transform": (RESULT.inverse_transform, {"Y_new": Y}),
    "save": (RESULT.save, {"path": "result.npz"}),
    "load": (torchgw.load, {"path": "result.npz"}),
    "knn_graph": (knn_graph, {"points": X}),
    "CallableDistance": (CallableDistance, {"n": 12, "function": lambda index: index}),
    "foscttm": (foscttm, {"projected": X, "true": X}),
    "transfer_labels": (
        transfer_labels,
        {"projected": X, "anchors": X, "anchor_labels": np.arange(12)},
    ),
    "swiss_roll": (swiss_roll, {"n": 9}),
}
# NumPy's own generators say what a seed may be.
LEFT_TO_OTHERS = {("swiss_roll", "random_state")}
PARAMETERS = [
    (name, parameter)
    for name, (function, _) in FUNCTIONS.items()
    for parameter in inspect.signature(function).parameters
    if (name, parameter) not in LEFT_TO_OTHERS
]


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS, ids=map(".".join, PARAMETERS))
def test_every_argument_takes_anything(name, parameter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RESULT.save("result.npz")
    function, usual = FUNCTIONS[name]
    for value in ANYTHING:
        # a giant number is a legal, long answer to "how many"
        if parameter in COUNTS and isinstance(value, int) and value > 100:
            continue
        # either the points or what stands for them
        instead = {"D_X": "X", "D_Y": "Y", "D_new": next(iter(usual))}.get(parameter)
        keywords = {key: kept for key, kept in usual.items() if key != instead}
        call(function, **{**keywords, parameter: value})


METHODS = {
    "__matmul__": {"values": np.ones(9)},
    "push": {"values": np.ones(12)},
    "pull": {"values": np.ones(9)},
    "barycentric": {"points": Y},
    "rows": {"index": 3},
    "argmax": {"axis": 0},
    "topk": {"k": 2},
    "to_sparse": {"k": 2, "threshold": 0.1},
    "sample": {"count": 5, "random_state": GENERATOR},
    "rounded": {"a": np.ones(12) / 12, "b": np.ones(9) / 9},
}


OPERATIONS = [
    (kind, method)
    for kind, plan in {
        "stored": TransportPlan,
        "streamed": TransportPlan,
        "sparse": SparsePlan,
        "rounded": RoundedPlan,
        "low rank": LowRankPlan,
    }.items()
    for method in METHODS
    if hasattr(plan, method)
]


@pytest.mark.parametrize(("kind", "method"), OPERATIONS)
def test_every_operation_of_a_plan_takes_anything(kind, method, sparse):
    plan = {
        "stored": RESULT.lazy_plan,
        "streamed": STREAMED.lazy_plan,
        "sparse": sparse,
        "rounded": RESULT.lazy_plan.rounded(),
        "low rank": LOW_RANK.lazy_plan,
    }[kind]
    function = getattr(plan, method)
    if method == "rounded" and kind == "sparse":
        with pytest.raises(torchgw.UnsupportedError):
            function()
        return
    usual = METHODS[method]
    assert call(function, **usual) is not None
    for parameter in usual:
        for value in ANYTHING:
            # of a count too large for memory the allocator speaks
            if parameter == "count" and isinstance(value, int) and value > 10**6:
                continue
            keywords = {**usual, parameter: value}
            if parameter == "threshold":
                del keywords["k"]
            call(function, **keywords)


@pytest.mark.parametrize("plan", [RESULT.lazy_plan, STREAMED.lazy_plan, LOW_RANK.lazy_plan])
def test_what_an_index_may_be(plan):
    every = plan.rows(range(12))
    torch.testing.assert_close(plan.rows([-1, 0]), every[[11, 0]])
    torch.testing.assert_close(plan.rows(np.uint8([3, 3])), every[[3, 3]])
    assert plan.rows([]).shape == (0, 9)
    for odd in ([12], [-13], [1.0], every[:, 0] > 0, [[1, 2]]):
        with pytest.raises(InvalidInputError, match="`index` must be"):
            plan.rows(odd)


def test_values_keep_their_precision():
    """A list of Python floats is double precision, as in NumPy."""
    third = [1 / 3] * 9
    for plan in (RESULT.lazy_plan, STREAMED.lazy_plan):
        assert torch.as_tensor(plan @ third).dtype == torch.float64
        np.testing.assert_allclose(plan @ third, plan @ np.array(third), rtol=1e-15)
        with pytest.raises(InvalidTypeError, match="real numbers"):
            plan @ torch.ones(9, dtype=torch.complex64)


def test_extra_arrays_of_a_file(tmp_path):
    path = tmp_path / "result.npz"
    RESULT.save(path, extra={"mine": [1, 2], "word": "text"})
    with np.load(path) as stored:
        assert stored["mine"].tolist() == [1, 2]
    for odd in ({"metadata": np.ones(2)}, {"objects": np.array([{}], dtype=object)}):
        with pytest.raises(InvalidInputError, match=f"`extra` has {next(iter(odd))}"):
            RESULT.save(path, extra=odd)
    assert torchgw.load(path).value == RESULT.value
