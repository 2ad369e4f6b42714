"""What solve() takes, what it refuses and how it says so."""

from __future__ import annotations

import copy
import json
import tempfile
import types
import warnings
from pathlib import Path

import hypothesis
import networkx
import numpy as np
import pytest
import reference
import scipy.sparse
import torch
from hypothesis import strategies as st
from problems import random_weights, solve_by_name
from scipy.sparse.csgraph import dijkstra
from scipy.spatial.distance import cdist

import torchgw
from torchgw import GraphWarning, InvalidInputError, InvalidTypeError
from torchgw._boundary import arrays
from torchgw._boundary.arrays import as_weights, check_points, to_tensor
from torchgw._sinkhorn.contract import Backend
from torchgw.distances import (
    CallableDistance,
    DistanceProvider,
    PointDistance,
    PrecomputedDistance,
    connect,
    knn_graph,
)

RNG = np.random.default_rng(0)
N, M = 9, 7
X, Y = RNG.normal(size=(N, 3)), RNG.normal(size=(M, 2))
D_X, D_Y = cdist(X, X), cdist(Y, Y)
LINEAR = RNG.uniform(size=(N, M))
# Large enough that a solve takes milliseconds; the boundary is what is tested.
EPSILON = 0.2


def solve(x=None, y=None, **options):
    """Solve with Euclidean distances, a large epsilon and no search unless told otherwise."""
    defaults = {"epsilon": EPSILON, "random_state": 0, "n_init": 1}
    if any(name in options for name in ("D_X", "D_Y")):
        defaults["epsilon"] = 5 * EPSILON
    if not all(isinstance(side, DistanceProvider | None) for side in (x, y)):
        defaults["distances"] = "euclidean"
    return solve_by_name(x, y, **{**defaults, **options})


def check(result, d_x=None, d_y=None, a=None, b=None):
    """Fail unless the result is what its plan says, and a plan between the weights."""
    plan = np.asarray(result.plan, np.float64)
    n, m = plan.shape
    assert np.isfinite(plan).all()
    assert plan.min() >= 0
    a = np.full(n, 1 / n) if a is None else a
    b = np.full(m, 1 / m) if b is None else b
    # float32 solves reach rounding, others 5e-7
    tolerance = 1e-4 if result.precision == "float32" else 6e-7
    assert np.abs(plan.sum(1) - a).sum() <= tolerance
    assert np.abs(plan.sum(0) - b).sum() <= tolerance
    assert abs(result.marginal_error) <= tolerance
    assert result.converged
    assert np.isfinite(result.value)
    if d_x is not None:
        scale = result.scale
        expected = reference.gw_value(d_x * scale[0], d_y * scale[1], plan)
        assert result.value == pytest.approx(expected, rel=1e-5, abs=1e-9)
    return result


def same_plan(result, expected, atol=1e-9):
    plans = (np.asarray(each.plan, np.float64) for each in (result, expected))
    np.testing.assert_allclose(*plans, atol=atol, rtol=0)


BASELINE = solve(X, Y)
GIVEN = solve(D_X=D_X, D_Y=D_Y)


# -- kinds of arrays --------------------------------------------------------------------------


class WithArray:
    """What pandas, xarray and others offer."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype=dtype)


class WithDlpack:
    """What CuPy and JAX offer."""

    def __init__(self, values):
        self.values = torch.from_numpy(values.copy())

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


def read_only(values):
    values = values.copy()
    values.flags.writeable = False
    return values


def strided(values):
    wide = np.zeros((2 * len(values), 2 * values.shape[1]))
    wide[::2, ::2] = values
    return wide[::2, ::2]


def in_file(values, read):
    """Values in a file that is read where it is."""
    with tempfile.NamedTemporaryFile() as file:
        values.tofile(file.name)
        return read(file.name)


EXACT_KINDS = {
    "memory map": lambda v: in_file(v, lambda path: np.memmap(path, v.dtype, "r", shape=v.shape)),
    "tensor of a file": lambda v: in_file(
        v, lambda path: torch.from_file(path, size=v.size, dtype=torch.float64).view(v.shape)
    ),
    "list": lambda v: v.tolist(),
    "list of arrays": list,
    "list of tensors": lambda v: list(torch.from_numpy(v)),
    "Fortran": np.asfortranarray,
    "negative strides": lambda v: np.ascontiguousarray(v[::-1, ::-1])[::-1, ::-1],
    "strided": strided,
    "big endian": lambda v: v.astype(">f8"),
    "read only": read_only,
    "long double": lambda v: v.astype(np.longdouble),
    "array subclass": lambda v: np.ma.masked_array(v),
    "tensor": torch.from_numpy,
    "transposed tensor": lambda v: torch.from_numpy(np.ascontiguousarray(v.T)).T,
    "expanded": lambda v: torch.from_numpy(v)[None].expand(3, -1, -1)[1],
    "requires grad": lambda v: torch.from_numpy(v).requires_grad_(),
    "parameter": lambda v: torch.nn.Parameter(torch.from_numpy(v)),
    "__array__": WithArray,
    "__dlpack__": WithDlpack,
}


def test_files_that_are_mapped_are_not_copied(tmp_path):
    np.save(tmp_path / "X.npy", np.arange(24.0).reshape(8, 3))
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    for array, shared in ((mapped, True), (mapped[2:5], True), (mapped[:, :2], False)):
        tensor = to_tensor("X", array)
        np.testing.assert_array_equal(tensor, array)
        assert (tensor.data_ptr() == array.ctypes.data) == shared
    # PyTorch would let others write to what NumPy does not
    inside = read_only(np.arange(6.0))
    assert to_tensor("X", inside).data_ptr() != inside.ctypes.data


def test_unusable_entries_are_counted_block_by_block(monkeypatch):
    monkeypatch.setattr(arrays, "BLOCK", 4)
    points = np.zeros((5, 3))
    points[[0, 2, 4], [1, 0, 2]] = np.nan, np.inf, -np.inf
    with pytest.raises(InvalidInputError, match="has 3 entries that are NaN or infinite, of 15"):
        check_points("X", points)


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_every_kind_of_array_gives_the_same_plan(kind):
    convert = EXACT_KINDS[kind]
    same_plan(solve(convert(X), convert(Y)), BASELINE)
    same_plan(solve(D_X=convert(D_X), D_Y=convert(D_Y)), GIVEN)
    fused = solve(D_X=D_X, D_Y=D_Y, M=LINEAR, init=np.full((N, M), 1 / (N * M)))
    same_plan(
        solve(D_X=D_X, D_Y=D_Y, M=convert(LINEAR), init=convert(np.full((N, M), 1 / (N * M)))),
        fused,
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str
)
def test_lower_precision_is_taken_as_the_numbers_it_holds(dtype):
    x, y = (torch.from_numpy(v).to(dtype) for v in (X, Y))
    closely = {"tol": 1e-9, "inner_tol": 1e-11, "max_iter": 1000}
    result = solve(x, y, **closely)
    same_plan(result, solve(x.double().numpy(), y.double().numpy(), **closely), atol=1e-6)
    assert result.precision == "float64"


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"]
)
def test_integer_and_boolean_matrices_are_distances(dtype):
    steps = np.abs(np.arange(N)[:, None] - np.arange(N))
    table = (steps > 2) if dtype == "bool" else steps.astype(dtype)
    result = check(solve(D_X=table, D_Y=D_Y), table.astype(float), D_Y)
    same_plan(result, solve(D_X=table.astype(float), D_Y=D_Y))
    # the plan is a coupling, not the zeros or the product that truncated factors would give
    assert np.abs(np.asarray(result.plan) - 1 / (N * M)).max() > 1e-4
    same_plan(solve(D_X=torch.from_numpy(table), D_Y=D_Y), result)


@pytest.mark.parametrize("gradient", ["dense", pytest.param("sampled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["array", "tensor", "__dlpack__"])
def test_inputs_are_never_modified(kind, gradient):
    convert = {"array": np.array, "tensor": lambda v: torch.from_numpy(v.copy())}.get(
        kind, WithDlpack
    )
    given = {
        "D_X": convert(D_X),
        "D_Y": convert(D_Y),
        "M": convert(LINEAR),
        "a": convert(random_weights(N)),
        "b": convert(random_weights(M)),
        "init": convert(np.full((N, M), 1 / (N * M))),
    }
    before = copy.deepcopy(given)
    result = solve(gradient=gradient, scale="max", **given)
    result.lazy_plan.barycentric(given["D_Y"] if kind != "__dlpack__" else D_Y)

    def numbers(value):
        return np.asarray(getattr(value, "values", value) if kind == "__dlpack__" else value)

    for name, value in given.items():
        np.testing.assert_array_equal(numbers(value), numbers(before[name]))


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
    n=st.integers(1, 8),
    m=st.integers(1, 8),
    d=st.integers(1, 3),
    exponent=st.integers(-12, 12),
    dtype=st.sampled_from(["float64", "float32"]),
    distances=st.sampled_from(["euclidean", "sqeuclidean"]),
    levels=st.integers(1, 4),
    n_init=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_cloud_has_a_plan(n, m, d, exponent, dtype, distances, levels, n_init, seed):
    """Sizes from one, duplicated and collinear points, scales over 24 decades."""
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(0, levels, size=(k, d)).astype(dtype) for k in (n, m))
    x *= np.asarray(10.0**exponent, dtype)
    result = solve(x, y, distances=distances, gradient="dense", n_init=n_init)
    d_x, d_y = (cdist(v.astype(float), v.astype(float), distances) for v in (x, y))
    check(result, d_x, d_y)


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_bad_entry_is_reported_by_the_name_of_its_argument(data):
    name = data.draw(st.sampled_from(["X", "Y", "D_X", "D_Y", "a", "b", "M", "init"]))
    bad = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    dtype = data.draw(st.sampled_from([np.float64, np.float32, np.float16]))
    values = {
        "X": X, "Y": Y, "D_X": D_X, "D_Y": D_Y, "M": LINEAR, "init": LINEAR,
        "a": random_weights(N), "b": random_weights(M),
    }[name].astype(dtype)  # fmt: skip
    values.flat[data.draw(st.integers(0, values.size - 1))] = bad
    sides = {"X": X, "Y": Y}
    if name.startswith("D_"):
        del sides[name[-1]]
    with pytest.raises(InvalidInputError, match=rf"`{name}` has 1 entries that are NaN or inf"):
        torchgw.solve(**{**sides, name: values}, distances="euclidean")


# -- arguments of a wrong type or shape -------------------------------------------------------

NO_ARRAYS = {
    "string": "cells.csv",
    "bytes": b"cells",
    "strings": np.array([["a", "b"]]),
    "complex": X + 1j,
    "complex tensor": torch.tensor(X + 1j),
    "objects": np.array([[1, None]], dtype=object),
    "numbers as objects": X.astype(object),
    "dict": {"a": 1},
    "set": {1, 2},
    "generator": (i for i in range(3)),
    "ragged": [[1.0], [1.0, 2.0]],
    "dates": np.zeros((3, 2), dtype="M8[s]"),
    "records": np.zeros(3, dtype=[("x", float)]),
    "sparse tensor": torch.from_numpy(X).to_sparse(),
}


@pytest.mark.parametrize("name", ["X", "D_Y", "a", "M", "init"])
@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_no_array_of_real_numbers(name, kind):
    sides = {"X": X, "Y": Y}
    sides.pop(name[-1] if name.startswith("D_") else "", None)
    with pytest.raises(InvalidTypeError, match=f"`{name}` must be a"):
        torchgw.solve(**{**sides, name: NO_ARRAYS[kind]}, distances="euclidean")


def test_columns_that_are_not_numbers_are_named():
    frame = pytest.importorskip("pandas").DataFrame(X, columns=["x", "y", "z"])
    assert solve(frame, Y).value == solve(X, Y).value
    with pytest.raises(InvalidTypeError, match="these columns are not numbers: 'kind'. Drop them"):
        solve(frame.assign(kind="a"), Y)


def test_a_nested_tensor_is_no_table(recwarn):
    """Its shape cannot be asked for; torch warns that it is a prototype."""
    with pytest.raises(InvalidTypeError, match="got a nested tensor"):
        torchgw.solve(torch.nested.nested_tensor([torch.ones(2, 3)]), Y)


@pytest.mark.parametrize("ends", [("source", "target"), ("from", "to")])
def test_a_table_of_edges_is_no_table_of_points(ends):
    frame = networkx.to_pandas_edgelist(networkx.path_graph(9), *ends)
    with pytest.raises(InvalidInputError, match="networkx.from_pandas_edgelist"):
        solve(frame, Y)
    assert solve(frame.to_numpy(), Y).converged


def test_columns_of_several_kinds_are_numbers():
    frame = pytest.importorskip("pandas").DataFrame(X, columns=["x", "y", "z"])
    mixed = frame.assign(y=frame.y > 0, z=(10 * frame.z).round().astype(int))
    assert solve(mixed, Y).value == solve(mixed.to_numpy(dtype=float), Y).value
    known = frame.convert_dtypes()
    assert solve(known, Y).value == solve(X, Y).value
    with pytest.raises(InvalidInputError, match="`X` has 1 entries that are NaN"):
        solve(known.assign(x=known.x.where(known.x < known.x.max())), Y)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"D_X": networkx.path_graph(9)}, "`D_X` is a graph. Pass it as `X`"),
     ({"D_X": networkx.path_graph(9, networkx.DiGraph)}, "`D_X` is a graph. Pass it as `X`"),
     ({"X": Path("points.npy")}, "got the text 'points.npy'. If it names a file"),
     ({"X": [types.SimpleNamespace(vertices=X, faces=X)]}, "one surface; got a list of"),
     ({"X": (X, np.array([3, 0, 1, 2]))}, "mesh.regular_faces. of PyVista"),
     ({"X": types.SimpleNamespace(points=X, cells_dict={})}, r"X.cells_dict\['triangle'\]"),
     ({"X": types.SimpleNamespace(n_blocks=2, combine=None)}, r"X.combine\(\).extract_surface"),
     ({"M": types.SimpleNamespace(vertices=X, faces=X)}, "got a surface, SimpleNamespace"),
     ({"X": np.zeros(4, dtype=[("x", float), ("y", float)])}, "structured_to_unstructured"),
     ({"X": (np.eye(3, dtype=int), X)}, "A surface is .vertices, faces., in this order"),
     ({"X": (X, np.zeros((0, 3), int))}, "The surface `X` has no faces. Pass its vertices"),
     ({"X": types.SimpleNamespace(vertices=X, bounds=None)}, "no faces. Pass its points, X.ver")],
)  # fmt: skip
def test_what_is_not_as_it_was_meant_says_how_to_pass_it(given, message):
    with pytest.raises(torchgw.TorchGWError, match=message):
        torchgw.solve(**given, Y=Y)


def test_tensors_without_plain_numbers():
    with pytest.raises(InvalidTypeError, match="`X` must be a plain tensor.*complex"):
        solve(torch.tensor(X + 1j), Y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(InvalidTypeError, match="`M` must be a plain tensor.*nested"):
        solve(X, Y, M=nested)
    with pytest.raises(InvalidTypeError, match="`a` must be a plain tensor.*meta"):
        solve(X, Y, a=torch.empty(N, device="meta"))
    with pytest.raises(InvalidInputError, match="'cpu' and 'cuda' devices; got 'meta'"):
        solve(torch.empty(3, 2, device="meta"), Y)


def test_masked_entries_are_not_taken_for_data():
    with pytest.raises(InvalidInputError, match=r"`X` has masked entries, \d+ of 27.*Fill them"):
        solve(np.ma.masked_array(X, mask=X > 1), Y)


@pytest.mark.parametrize("value", [X[:, 0], X[None], np.zeros((0, 3)), np.zeros((3, 0)), 3.0])
def test_points_have_a_row_each(value):
    column = r"numpy.asarray\(X\)\[:, None\]" if np.ndim(value) == 1 else r"; got \(.*\)\.$"
    with pytest.raises(InvalidInputError, match=rf"`X` must have shape \(n, d\).*{column}"):
        solve(value, Y)
    with pytest.raises(InvalidInputError, match=r"`Y` must have shape \(n, d\)"):
        solve(X, value)


@pytest.mark.parametrize("value", [X, X[:, 0], np.zeros((0, 0)), np.zeros((2, 2, 2, 2)), 1])
def test_distance_matrices_are_square(value):
    with pytest.raises(InvalidInputError, match=r"`D_X` must be a square.*Pass points as X or Y"):
        solve(D_X=value, D_Y=D_Y)


def test_distance_matrices_are_symmetric_and_not_negative():
    with pytest.raises(InvalidInputError, match=r"`D_X` must be symmetric.*\(D_X \+ D_X.T\) / 2"):
        solve(D_X=D_X + np.triu(D_X), D_Y=D_Y)
    for refusing in ({"loss": "kl"}, {"scale": "max"}):
        with pytest.raises(InvalidInputError, match=r"`D_Y` must be non-negative.*S.max\(\) - S"):
            solve(D_X=D_X, D_Y=-D_Y, **refusing)
    # rounding is no asymmetry
    rounded = D_X * (1 + 1e-7 * RNG.normal(size=D_X.shape))
    check(solve(D_X=rounded, D_Y=D_Y), D_X, D_Y)


@pytest.mark.parametrize("name", ["X", "D_X"])
@pytest.mark.parametrize("factor", [1e-200, 1e-30, 1e30, 1e200, 1e300])
def test_sizes_whose_squares_cannot_be_computed_are_refused(name, factor):
    given = {"X": {"x": X * factor, "y": Y}, "D_X": {"D_X": D_X * factor, "D_Y": D_Y}}[name]
    with pytest.raises(InvalidInputError, match=f"largest entry of `{name}`.*another unit"):
        solve(**given)
    graph = scipy.sparse.csr_array(D_X * factor)
    with pytest.raises(InvalidInputError, match="largest entry of `X`"):
        solve(graph, Y, distances=("precomputed", "euclidean"))


def test_a_linear_cost_may_be_tiny_but_not_huge():
    with pytest.raises(InvalidInputError, match="largest entry of `M`"):
        solve(X, Y, M=1e300 * LINEAR)
    tiny = solve(X, Y, M=1e-200 * LINEAR, alpha=0.999999)
    same_plan(tiny, BASELINE, atol=1e-4)


@pytest.mark.parametrize("precision", ["float64", "mixed"])
@pytest.mark.parametrize("distances", ["euclidean", "sqeuclidean", "cosine", "auto"])
@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_the_unit_of_points_does_not_matter(factor, distances, precision):
    options = {"distances": distances, "precision": precision}
    plain = check(solve(X, Y, **options))
    scaled = check(solve(X * factor, Y / factor, **options))
    # the stopping rule sees rounding of float32 iterations
    same_plan(scaled, plain, atol=1e-5)
    assert scaled.value == pytest.approx(plain.value, rel=1e-4)


@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_the_unit_of_given_matrices_goes_into_epsilon(factor):
    result = solve(D_X=D_X * factor, D_Y=D_Y * factor, epsilon=5 * EPSILON * factor**2)
    check(result, D_X * factor, D_Y * factor)
    # both end where steps are small
    same_plan(result, GIVEN, atol=1e-6)


# -- weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(N), r"must sum to 1; it sums to 9. Pass `a / a.sum\(\)`"),
        (np.zeros(N), "is all zero.*a=None"),
        (np.full(N, 1.01 / N), "must sum to 1"),
        (np.r_[2.0, -1.0, np.zeros(N - 2)], "must be non-negative"),
        (np.full(N - 1, 1 / (N - 1)), r"must have shape \(9,\), one weight per row of X"),
        (np.full((N, 1), 1 / N), r"must have shape \(9,\)"),
        (np.empty(0), r"must have shape \(9,\)"),
        (1.0, r"must have shape \(9,\).*a=None"),
    ],
)
def test_refused_weights(weights, message):
    with pytest.raises(InvalidInputError, match=f"`a` {message}"):
        solve(X, Y, a=weights)
    mirrored = message.replace("of X", "of Y").replace("`a / a.sum", "`b / b.sum")
    with pytest.raises(InvalidInputError, match=f"`b` {mirrored}".replace("a=None", "b=None")):
        solve(Y, X, b=weights)


def test_rounding_of_a_sum_is_normalised():
    rounded = random_weights(N) * (1 + 5e-5)
    result = solve(X, Y, a=rounded, b=torch.full((M,), 1 / M, dtype=torch.float32))
    check(result, a=random_weights(N))
    assert float(result.marginal_a.sum()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("gradient", ["dense", pytest.param("sampled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["float64", "mixed", "float32"])
def test_zero_weights_leave_their_rows_and_columns_empty(gradient, precision):
    a, b = random_weights(N), random_weights(M)
    a[[0, 4]], b[2] = 0, 0
    a, b = a / a.sum(), b / b.sum()
    # `tol` bounds the next change; the fixed point of this problem is up to twenty times that away
    tol = 1e-7 if gradient == "dense" and precision != "float32" else 1e-5
    # a search has to leave them alone too
    options = {"tol": tol, "n_init": None if precision == "mixed" else 1}
    found = solve(X, Y, a=a, b=b, gradient=gradient, precision=precision, **options)
    result = check(found, a=a, b=b)
    plan = np.asarray(result.plan)
    assert (plan[[0, 4]] == 0).all()
    assert (plan[:, 2] == 0).all()
    if gradient == "dense":
        # the same problem without those points, on the same scale
        keep_x, keep_y = a > 0, b > 0
        small = solve(
            D_X=(D_X * result.scale[0])[keep_x][:, keep_x],
            D_Y=(D_Y * result.scale[1])[keep_y][:, keep_y],
            a=a[keep_x], b=b[keep_y], epsilon=EPSILON, tol=tol,
        )  # fmt: skip
        tolerance = 1e-4 if precision == "float32" else 1e-6
        np.testing.assert_allclose(plan[keep_x][:, keep_y], np.asarray(small.plan), atol=tolerance)


def test_weights_may_be_integers_or_booleans():
    one = np.zeros(N, dtype=int)
    one[3] = 1
    for a in (one, one.astype(bool), torch.from_numpy(one)):
        check(solve(X, Y, a=a), a=one)


# -- which argument is which ------------------------------------------------------------------


def test_each_side_is_given_once():
    with pytest.raises(InvalidInputError, match="exactly one of `X`.*`D_X`.*neither"):
        torchgw.solve()
    with pytest.raises(InvalidInputError, match="exactly one of `Y`.*`D_Y`.*neither"):
        torchgw.solve(X)
    with pytest.raises(InvalidInputError, match="exactly one of `X`.*both"):
        solve(X, Y, D_X=D_X)
    provider = PointDistance(torch.from_numpy(X))
    for given in ({"x": X}, {"D_X": D_X}):
        with pytest.raises(InvalidInputError, match="`distances` gives a provider.*would not be"):
            solve(**given, y=Y, distances=(provider, "euclidean"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_sum_to_one_by_its_rounding(dtype):
    weights = as_weights("a", torch.full((150,), 1 / 150, dtype=dtype), 150, torch.device("cpu"))
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    with pytest.raises(InvalidInputError, match="must sum to 1"):
        as_weights("a", torch.full((150,), 1.02 / 150, dtype=dtype), 150, torch.device("cpu"))


def test_unknown_arguments_name_the_nearest_one():
    with pytest.raises(InvalidTypeError, match="no argument 'epsilom'. Did you mean 'epsilon'"):
        solve(X, Y, epsilom=1)
    with pytest.raises(InvalidTypeError, match="no argument 'zzz'. Known: X, Y, a, b"):
        solve(X, Y, zzz=1)
    with pytest.raises(TypeError, match="without a name; got 3.*by name, as a="):
        torchgw.solve(X, Y, None)


@pytest.mark.parametrize(
    ("name", "here"),
    [("C1", "D_X"), ("p", "a"), ("reg", "epsilon"), ("G0", "init"), ("seed", "random_state"),
     ("metric", "distances"), ("loss_fun", "loss"), ("n_iters", "max_iter"),
     ("timeout", "time_limit"), ("partial", "mass"), ("gpu", "device"), ("tau_a", "unbalanced")],
)  # fmt: skip
def test_names_of_other_packages_are_known(name, here):
    with pytest.raises(InvalidTypeError, match=f"no argument '{name}'. Did you mean '{here}'"):
        torchgw.solve(X, Y, **{name: 1})


def test_a_matrix_passed_as_points_is_refused():
    with pytest.raises(InvalidInputError, match=r"square symmetric matrix.*`D_X`"):
        torchgw.solve(D_X, Y, distances="precomputed")
    with pytest.raises(InvalidInputError, match=r"square symmetric matrix.*`D_Y`"):
        torchgw.solve(X, D_Y, distances=("euclidean", "precomputed"))


@pytest.mark.parametrize("distances", ["auto", "euclidean"])
def test_a_matrix_taken_as_points_is_warned_about(distances):
    with pytest.warns(torchgw.TorchGWWarning, match="as points. Pass a matrix .*`D_X`.*csr_array"):
        solve(D_X, Y, distances=distances)


@pytest.mark.parametrize(
    "value", ["x", None, 3, {}, np.array([1, 2]), ("euclidean", None), ("euclidean", ["cosine"])]
)
def test_refused_distances(value):
    with pytest.raises(InvalidInputError, match="`distances` must be one of 'auto'"):
        solve(X, Y, distances=value)


def test_distances_are_one_or_two():
    with pytest.raises(InvalidInputError, match="a pair of them; got 3 items"):
        solve(X, Y, distances=("cosine",) * 3)
    mixed = check(solve(X, Y, distances=["cosine", "euclidean"]), cdist(X, X, "cosine"), D_Y)
    swapped = solve(Y, X, distances=("euclidean", "cosine"))
    torch.testing.assert_close(mixed.plan, swapped.plan.T, atol=1e-5, rtol=0)


def test_cosine_needs_directions():
    with pytest.raises(InvalidInputError, match=r"zero vector.*row 8.*'cosine'"):
        solve(np.vstack([X[:-1], np.zeros(3)]), Y, distances="cosine")


def test_providers():
    source, target = PointDistance(torch.from_numpy(X)), PrecomputedDistance(torch.from_numpy(D_Y))
    for given in (
        {"x": source, "y": target},
        {"distances": (source, target)},
        {"D_X": source, "D_Y": target},
        {"D_X": D_X, "y": target},
        {"x": CallableDistance(N, lambda i: D_X[:, i.numpy()], dtype=torch.float64), "D_Y": D_Y},
    ):
        same_plan(solve(**given, epsilon=5 * EPSILON), GIVEN, atol=1e-8)
    both = solve(distances=source, epsilon=5 * EPSILON)
    same_plan(both, solve(D_X=D_X, D_Y=D_X))
    with pytest.raises(InvalidTypeError, match=r"`X` is a function.*CallableDistance\(n, function"):
        solve(lambda index: index, Y)


def test_kinds_may_differ_between_sides():
    graph = networkx.path_graph(N)
    steps = np.abs(np.arange(N)[:, None] - np.arange(N)).astype(float)
    check(solve(graph, Y, distances=("auto", "euclidean")), steps, D_Y)
    check(solve(graph, D_Y=D_Y, distances="auto"), steps, D_Y)
    check(solve(X, D_Y=D_Y), D_X, D_Y)
    with pytest.raises(InvalidInputError, match="'euclidean'` needs points; `X` is a graph"):
        solve(graph, Y)


# -- graphs -----------------------------------------------------------------------------------


def geometric_graph():
    """A connected weighted NetworkX graph and its shortest-path lengths."""
    graph = networkx.random_geometric_graph(N, 0.7, seed=1)
    for u, v in graph.edges:
        ends = (np.array(graph.nodes[node]["pos"]) for node in (u, v))
        graph.edges[u, v]["weight"] = float(np.linalg.norm(np.subtract(*ends)))
    lengths = dijkstra(networkx.to_scipy_sparse_array(graph))
    assert np.isfinite(lengths).all()
    return graph, lengths


GRAPH, LENGTHS = geometric_graph()
ADJACENCY = networkx.to_scipy_sparse_array(GRAPH)
EDGES = torch.tensor(np.array(list(GRAPH.edges)).T)
EDGES = torch.cat([EDGES, EDGES.flip(0)], dim=1)
EDGE_LENGTHS = torch.tensor([GRAPH.edges[u, v]["weight"] for u, v in EDGES.T.tolist()])


def pyg(**fields):
    return types.SimpleNamespace(**{"edge_index": EDGES, "num_nodes": N, **fields})


GRAPHS = {
    **{kind: ADJACENCY.asformat(kind) for kind in ("csr", "csc", "coo", "lil", "dok", "bsr")},
    "matrix": scipy.sparse.csr_matrix(ADJACENCY),
    "float32": ADJACENCY.astype(np.float32),
    "networkx": GRAPH,
    "named nodes": networkx.relabel_nodes(GRAPH, {node: f"cell {node}" for node in GRAPH}),
    "edge_index": pyg(edge_weight=EDGE_LENGTHS),
    "edge_index arrays": pyg(edge_index=EDGES.numpy(), edge_weight=EDGE_LENGTHS.numpy()),
    "repeated edges": pyg(
        edge_index=torch.cat([EDGES, EDGES], dim=1), edge_weight=EDGE_LENGTHS.repeat(2)
    ),
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_every_kind_of_graph(kind):
    result = check(solve(GRAPHS[kind], Y, distances=("auto", "euclidean")), LENGTHS, D_Y)
    assert result.scale[0] == pytest.approx(1 / LENGTHS.max(), rel=1e-6)


PATH = networkx.path_graph(N)


@pytest.mark.parametrize(
    "graph", [PATH, networkx.to_scipy_sparse_array(PATH, dtype=bool)], ids=["networkx", "boolean"]
)
def test_unweighted_graphs_count_steps(graph):
    steps = np.abs(np.arange(N)[:, None] - np.arange(N)).astype(float)
    for distances in ("precomputed", "landmark"):
        result = solve(graph, Y, distances=(distances, "euclidean"))
        check(result, steps if distances == "precomputed" else None, D_Y)
        assert result.scale[0] == pytest.approx(1 / (N - 1))


def with_weight(weight):
    graph = GRAPH.copy()
    graph.edges[next(iter(graph.edges))]["weight"] = weight
    return graph


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (networkx.MultiGraph(GRAPH), "`X` must have one edge.*networkx.Graph"),
        (networkx.MultiDiGraph(GRAPH), "`X` must have one edge.*networkx.DiGraph"),
        (with_weight("1"), "`X` must have numbers as edge attribute 'weight'; got '1'"),
        (with_weight(None), "`X` must have numbers as edge attribute"),
        (with_weight(-1.0), "non-negative edge lengths"),
        (with_weight(float("nan")), "finite, non-negative edge lengths"),
        (networkx.Graph(), "`X` is a graph without nodes"),
        ([GRAPH, GRAPH], "`X` must be one graph; got a list of them.*solve_many"),
        (scipy.sparse.triu(ADJACENCY), "`X` must be symmetric; got a directed graph.*symmetrise"),
        (ADJACENCY[:, :4], r"must be square.*sparse points as `X.toarray\(\)`"),
        (ADJACENCY.astype(complex), "real weights"),
        (pyg(num_nodes=3), "`X.edge_index` must be within 0 and num_nodes - 1 = 2"),
        (pyg(num_nodes=None), "`X.num_nodes` must be a positive integer"),
        (pyg(edge_index=EDGES.T), r"`X.edge_index` must be integers of shape \(2, e\)"),
        (pyg(edge_index=EDGES.double()), "`X.edge_index` must be integers"),
        (pyg(edge_index=None), "`X.edge_index` must be the edges.*data.x or data.pos"),
        (pyg(edge_index=-EDGES), "`X.edge_index` must be within 0"),
        (pyg(edge_weight=torch.ones(3)), r"`X.edge_weight` must have shape \(\d+,\)"),
        (pyg(edge_index=EDGES[:, : EDGES.shape[1] // 2]), "must be symmetric"),
    ],
)  # fmt: skip
def test_refused_graphs(graph, message):
    with pytest.raises((InvalidInputError, InvalidTypeError), match=message):
        solve(graph, Y, distances="auto")


def test_sparse_matrices_are_graphs_and_nothing_else():
    for name, value in (("D_X", ADJACENCY), ("M", scipy.sparse.csr_array(LINEAR))):
        given = {"D_X": value, "D_Y": D_Y} if name == "D_X" else {"x": X, "y": Y, "M": value}
        with pytest.raises(InvalidTypeError, match=rf"`{name}` must be a dense.*{name}.toarray"):
            solve(**given)
    tensor = torch.from_numpy(ADJACENCY.toarray()).to_sparse()
    # both ways out are taken, and ask different questions
    with pytest.raises(InvalidTypeError, match=r"`D_X.to_dense\(\)`.*SciPy sparse matrix X or Y"):
        solve(D_X=tensor, D_Y=D_Y)
    entries = torchgw.solve(D_X=tensor.to_dense(), D_Y=D_Y, n_init=1)
    assert entries.value != torchgw.solve(ADJACENCY, D_Y=D_Y, n_init=1).value


@pytest.mark.parametrize("policy", ["stitch", "fill"])
@pytest.mark.parametrize("distances", ["precomputed", "dijkstra", "landmark"])
def test_disconnected_clouds_are_joined_or_filled_and_say_so(policy, distances):
    far = np.concatenate([X, X + [100.0, 0, 0]])
    said = {"stitch": "joined them by the 1 shortest edges", "fill": "get the distance"}[policy]
    options = {"distances": (distances, "euclidean"), "n_neighbors": 4}
    with pytest.warns(GraphWarning, match=f"2 components.*{said}"):
        result = solve(far, Y, disconnected=policy, **options)
    check(result)


def test_disconnected_graphs_are_filled_and_say_so():
    graph = networkx.disjoint_union(networkx.path_graph(4), networkx.path_graph(3))
    lengths = dijkstra(networkx.to_scipy_sparse_array(graph))
    lengths[np.isinf(lengths)] = 1.5 * 3
    for policy, why in (("stitch", "no points to join them by"), ("fill", "pairs without a path")):
        with pytest.warns(GraphWarning, match=f"the graph `X` has 2.*{why}.*add edges"):
            result = solve(graph, Y, distances=("auto", "euclidean"), disconnected=policy)
        check(result, lengths, D_Y)


def _unused_names():
    """Calls whose distances are given, under the sides that messages name."""
    given, points = PrecomputedDistance.unchecked(torch.from_numpy(D_X)), {"X": X}
    one, names = {"distances": "cosine"}, {"distances": ("cosine", "euclidean")}
    return {
        "X and Y are neither": [
            (torchgw.solve, {"D_X": D_X, "D_Y": D_Y} | one),
            (torchgw.solve, {"D_X": D_X, "Y": given} | one),
            (torchgw.solve, {"M": LINEAR, "alpha": 0} | one),
            (torchgw.solve_low_rank, {"D_X": D_X, "D_Y": D_Y, "rank": 2} | one),
            (torchgw.solve_low_rank, {"X": given, "Y": given, "rank": 2} | names),
        ],
        "X is neither": [(torchgw.solve, {"D_X": D_X, "Y": Y} | names)],
        "Y is neither": [(torchgw.solve, {"D_Y": D_Y} | points | names)],
        "D_X and D_Y are neither": [(torchgw.solve_many, {"D_X": [D_X], "D_Y": [D_Y]} | one)],
        "D_Y is neither": [(torchgw.solve_many, {"Xs": [X], "D_Y": [D_Y]} | names)],
        "D_X is neither": [(torchgw.pairwise, {"D_X": [D_X, D_X]} | one)],
        "Xs is neither": [(torchgw.pairwise, {"Xs": [given, given]} | one)],
        "spaces is neither": [(torchgw.barycenter, {"spaces": [given], "n": 3} | one)],
    }


@pytest.mark.parametrize(
    ("sides", "function", "given"),
    [(sides, *call) for sides, calls in _unused_names().items() for call in calls],
)
def test_a_name_of_distances_that_are_given_is_refused(sides, function, given):
    """Rather than ignored."""
    with pytest.raises(InvalidInputError, match=rf"`distances=.*cosine.*{sides}"):
        function(**given)


def test_a_name_of_distances_may_be_for_other_spaces():
    """For the other side of a problem, or other spaces of a list."""
    given = PrecomputedDistance.unchecked(torch.from_numpy(D_X))
    options = {"distances": "euclidean", "scale": "max", "epsilon": EPSILON}
    same_plan(solve(D_X=D_X, y=Y, **options), solve(X, Y, **options))
    listed = [[given, X], [X, X]]
    values = [torchgw.pairwise(each, **options) for each in listed]
    np.testing.assert_allclose(*values, atol=1e-9)
    shapes = [torchgw.barycenter(each, 4, random_state=0, **options).D for each in listed]
    np.testing.assert_allclose(*shapes, atol=1e-9)


@pytest.mark.parametrize(
    "given", [{"D_X": D_X, "D_Y": D_Y}, {"x": X, "y": Y}, {"D_X": D_X, "y": Y}]
)
def test_what_becomes_of_pieces_is_refused_without_graphs(given):
    with pytest.raises(InvalidInputError, match="`disconnected` is used for geodesics"):
        solve(**given, disconnected="fill")


@pytest.mark.parametrize("distances", ["auto", "dijkstra", "landmark"])
def test_what_connect_returned_is_a_graph(distances, tmp_path):
    """As the warning of slow searches advises, for points with approximate neighbours."""
    graph = knn_graph(X, 4)
    options = {"distances": (distances, "euclidean"), "cache": tmp_path}
    result = solve(connect(graph, X), Y, **options)
    # by columns alone the value is estimated
    check(result, *(() if distances == "dijkstra" else (dijkstra(graph), D_Y)))
    assert result.transform(D_new=dijkstra(graph)[:2], values=Y).shape == (2, 2)


# -- numbers and names ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("epsilon", [0, -1, np.nan, np.inf, "x", None], "positive finite number.*epsilon='auto'"),
        ("epsilon", [True, [0.1], np.ones(2), 1j], "positive finite number.*epsilon='auto'"),
        ("tol", [0, -1e-3, np.nan, "x", None], "positive finite number"),
        ("inner_tol", [0, np.inf, "x"], "positive finite number"),
        ("redraw", [0, -1, np.nan, "x", None], "positive finite number"),
        ("redraw", [1.5, 2], r"share of anchors redrawn, in \(0, 1\]"),
        ("max_iter", [0, -1, 2.5, "x", None, True, np.ones(2)], "integer of at least 1"),
        ("min_iter", [0, 1.5], "integer of at least 1"),
        ("inner_max_iter", [0, None], "integer of at least 1"),
        ("n_anchors", [0, -3, 1.5, True], "integer of at least 1"),
        ("n_neighbors", [0, -1, 2.5, "3", True, np.ones(2)], "integer of at least 1, or None"),
        ("n_landmarks", [0, 1.5, "x"], "integer of at least 1, or None"),
        ("alpha", [-0.1, 1.1, np.nan, "1", True, 1j], r"number in \[0, 1\]"),
        ("scale", ["x", 1.0, ["max"], np.ones(2)], "'auto', 'max', 'mean' or None"),
        ("disconnected", ["x", None, np.ones(2)], "'stitch' or 'fill'"),
        ("gradient", ["x", None, 3, ["dense"], np.ones(2)], "one of 'auto', 'dense', 'factored'"),
        ("backend", ["x", None, ["eager"]], "one of 'auto', 'triton', 'compile', 'eager'"),
        ("precision", ["x", None, 64], "one of 'auto', 'mixed', 'float64', 'float32'"),
        ("dtype", [torch.float16, torch.int64, "float32", np.float32], "float32 or torch.float64"),
        ("device", ["x", 1.5, [], "cuda:99", "cpu:5", "meta"], "device"),
        ("random_state", [-1, 2**64, 2**70], "within 0 and 2.64 - 1"),
    ],
)  # fmt: skip
def test_refused_numbers_and_names(name, values, message):
    for value in values:
        with pytest.raises(InvalidInputError, match=message) as caught:
            solve(X, Y, **{name: value})
        assert name in str(caught.value)


def test_a_backend_has_all_of_the_contract():
    """Rather than an error in the middle of a solve."""
    parts = {*vars(Backend), *Backend.__annotations__}
    parts = {name for name in parts if not name.startswith("_")}
    for left_out in sorted(parts):
        backend = types.SimpleNamespace(**dict.fromkeys(parts - {left_out}))
        with pytest.raises(InvalidInputError, match=rf"SimpleNamespace has no {left_out}\. Give"):
            solve(X, Y, backend=backend)


@pytest.mark.parametrize("value", [1.5, "x", True, [1], np.random, torch.ones(())])
def test_refused_kinds_of_random_state(value):
    with pytest.raises(InvalidTypeError, match="`random_state` must be an integer, a generator"):
        solve(X, Y, random_state=value)


@pytest.mark.parametrize("value", [0, np.int64(5), np.uint64(2**64 - 1), 2**64 - 1])
def test_integers_of_every_kind_are_seeds(value):
    quick = {"gradient": "sampled", "n_anchors": 40, "epsilon": 0.25}
    first = solve(X, Y, random_state=value, **quick)
    assert first.random_state == int(value)
    again = solve(X, Y, random_state=int(value), **quick)
    assert np.array_equal(first.plan, again.plan)


@pytest.mark.parametrize(
    "make",
    [torch.Generator().manual_seed, np.random.default_rng, np.random.RandomState],
    ids=["torch", "numpy", "legacy"],
)
def test_a_generator_is_a_source_of_seeds(make):
    options = {"gradient": "sampled", "n_anchors": 40, "epsilon": 0.25}
    generator = make(4)
    results = [solve(X, Y, random_state=generator, **options) for _ in range(2)]
    assert results[0].random_state != results[1].random_state
    again = solve(X, Y, random_state=make(4), **options)
    assert np.array_equal(again.plan, results[0].plan)


@pytest.mark.slow
def test_without_a_seed_every_solve_draws_its_own():
    fresh = [solve(X, Y, gradient="sampled", random_state=None).random_state for _ in range(2)]
    assert fresh[0] != fresh[1]


def test_numpy_numbers_are_numbers():
    result = solve(
        X, Y, epsilon=np.float32(0.25), max_iter=np.int64(200), n_anchors=np.int32(64),
        tol=np.float64(1e-6), inner_max_iter=np.uint16(500), redraw=np.float32(0.5),
        gradient="sampled", distances="dijkstra", n_neighbors=np.int8(4),
    )  # fmt: skip
    check(result)
    assert result.epsilon == 0.25
    assert type(result.epsilon) is float
    assert json.loads(json.dumps(result.log)) == result.log


def test_momentum_is_the_former_name_of_redraw():
    options = {"gradient": "sampled", "n_anchors": 40, "epsilon": 0.25, "random_state": 0}
    with pytest.warns(DeprecationWarning, match=r"`momentum` is now .*redraw"):
        former = solve(X, Y, momentum=0.5, **options)
    assert np.array_equal(former.plan, solve(X, Y, redraw=0.5, **options).plan)
    assert not np.array_equal(former.plan, solve(X, Y, **options).plan)
    with (
        pytest.raises(InvalidInputError, match=r"`redraw` is the share.*got 2"),
        pytest.warns(DeprecationWarning, match="redraw"),
    ):
        solve(X, Y, momentum=2, **options)


def test_alpha_needs_a_linear_cost():
    for alpha in (0, 0.5):
        with pytest.raises(InvalidInputError, match=rf"`alpha={alpha}` weighs.*Pass `M`"):
            solve(X, Y, alpha=alpha)
    check(solve(X, Y, alpha=1))
    assert solve(X, Y, M=LINEAR).alpha == 0.5


@pytest.mark.parametrize("shape", [(N, M + 1), (M, N), (N * M,), (1, N, M), ()])
def test_tables_over_pairs_have_their_shape(shape):
    for name in ("M", "init"):
        with pytest.raises(InvalidInputError, match=rf"`{name}` must have shape \(9, 7\)"):
            solve(X, Y, **{name: np.ones(shape)})


def test_a_constant_linear_cost_changes_nothing():
    plain = solve(X, Y, epsilon=EPSILON)
    shifted = solve(X, Y, M=np.full((N, M), -3.0), alpha=0.5, epsilon=EPSILON / 2)
    same_plan(shifted, plain, atol=1e-5)
    assert shifted.value_linear == pytest.approx(-1.5)


def test_dtype_and_precision_do_not_contradict_each_other():
    with pytest.raises(InvalidInputError, match="contradicts `precision='mixed'`; pass one"):
        solve(X, Y, dtype=torch.float64, precision="mixed")
    assert solve(X, Y, dtype=torch.float32, precision="float32").precision == "float32"
    assert solve(X, Y, dtype=torch.float64).precision == "float64"


@pytest.mark.parametrize("count", [N, N + 1, 1000])
def test_neighbours_are_fewer_than_points(count):
    with pytest.raises(InvalidInputError, match=f"`n_neighbors` must be below.*{count} for the 9"):
        solve(X, D_Y=D_Y, distances="dijkstra", n_neighbors=count)


def test_landmarks_are_no_more_than_points():
    with pytest.raises(InvalidInputError, match="`n_landmarks` must be an integer between 1 and 9"):
        solve(X, D_Y=D_Y, distances="landmark", n_landmarks=10)


def test_a_callback_that_fails_is_heard():
    def fail(entry):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        solve(X, Y, callback=fail)


def test_other_results_of_a_callback_do_not_stop():
    for value in (None, 0, 1, "yes"):
        same_plan(solve(X, Y, callback=lambda entry, value=value: value), BASELINE)


# -- small and degenerate spaces --------------------------------------------------------------

SPACES = ["euclidean", "sqeuclidean", "cosine", "precomputed", "dijkstra", "landmark"]


@pytest.mark.parametrize("distances", SPACES)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 5), (5, 1), (2, 1), (2, 3)])
def test_one_and_two_points(distances, n, m):
    result = check(solve(X[:n], Y[:m], distances=distances, n_init=None))
    assert result.plan.shape == (n, m)
    if 1 in (n, m):
        np.testing.assert_allclose(np.asarray(result.plan), 1 / (n * m), rtol=1e-6)
    if n == m == 1:
        assert result.value == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("distances", SPACES)
def test_identical_points_get_the_product_plan(distances):
    options = {"distances": distances, "n_init": None}
    result = check(solve(np.ones((N, 3)), Y, **options))
    np.testing.assert_allclose(np.asarray(result.plan), 1 / (N * M), rtol=1e-5)
    both = check(solve(np.ones((N, 3)), np.full((M, 2), 0.1), epsilon="auto", **options))
    assert both.value == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("distances", SPACES)
def test_duplicated_points_share_their_partners(distances):
    twice = np.repeat(X, 2, axis=0)
    # enough neighbours to connect the pairs, where there is a neighbour graph
    geodesic = distances in ("dijkstra", "precomputed", "landmark")
    options = {"n_neighbors": 6} if geodesic else {}
    result = check(solve(twice, Y, distances=distances, gradient="dense", n_init=None, **options))
    plan = np.asarray(result.plan)
    # Nystrom factors of duplicates agree to the rounding of an eigenvalue problem
    np.testing.assert_allclose(plan[::2], plan[1::2], rtol=1e-6)


def test_warnings_point_at_the_caller():
    """However deep inside, and through wrappers, the line to change is the user's."""
    points = np.concatenate([np.eye(3), np.eye(3) + 9])
    with pytest.warns(torchgw.GraphWarning) as caught:
        torchgw.solve(points, points, n_neighbors=1, n_init=1)
    with pytest.warns(torchgw.GraphWarning) as wrapped:
        torchgw.sampled_gw(points, points, k=1, M=64, epsilon=0.05)
    assert {entry.filename for entry in [*caught, *wrapped]} == {__file__}


def test_a_starting_plan_may_miss_its_sum_by_a_thousandth():
    """As solvers in float32 leave it; what is more than rounding is said."""
    points = np.random.default_rng(0).normal(size=(9, 2))
    options = {"distances": "sqeuclidean", "epsilon": 0.1}
    expected = torchgw.solve(points, points, init=np.eye(9) / 9, **options)
    for total in (0.9999, 0.9991, 1.0009):
        plan = (np.eye(9) / 9 * total).astype(np.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = torchgw.solve(points, points, init=plan, **options)
        assert result.value == pytest.approx(expected.value, rel=1e-5)
        assert len(caught) == (total != 0.9999)
        assert all("`init` sums to" in str(each.message) for each in caught)
    for total in (0.998, 1.002):
        with pytest.raises(InvalidInputError, match="sum to 1"):
            torchgw.solve(points, points, init=np.eye(9) / 9 * total, **options)


@pytest.mark.parametrize("distances", ["euclidean", "sqeuclidean", "precomputed"])
@pytest.mark.parametrize("scale", ["auto", "max", "mean"])
def test_points_of_weight_zero_have_no_say(distances, scale):
    rng = np.random.default_rng(0)
    x, far = rng.normal(size=(20, 2)), np.array([[1e2, -1e2]])
    y = x[::-1] * [1, -1]
    a, options = np.full(20, 1 / 20), {"scale": scale, "random_state": 0, "n_init": 1}
    if distances == "precomputed":
        if scale == "auto":
            pytest.skip("given distances are not scaled")
        sides, farther = ((cdist(p, p), cdist(q, q)) for p, q in ((x, np.r_[x, far]), (y, y)))
        given = {"D_X": sides[0], "D_Y": farther[0]}
        added = given | {"D_X": sides[1]}
    else:
        given = {"X": x, "Y": y, "distances": distances}
        added = given | {"X": np.r_[x, far]}
    expected = torchgw.solve(**given, a=a, **options)
    result = torchgw.solve(**added, a=np.r_[a, 0], **options)
    assert result.converged
    assert result.scale == pytest.approx(expected.scale, rel=1e-6)
    assert result.epsilon == pytest.approx(expected.epsilon, rel=1e-4)
    assert result.value == pytest.approx(expected.value, rel=1e-3)
    assert float(np.abs(result.plan[:20] - expected.plan).sum()) < 1e-2


def test_rounding_of_points_that_coincide_is_no_scale():
    """Used points at one place, as products leave them, and one elsewhere of no weight."""
    table = np.full((4, 4), 1.0)
    noise = 1e-33 * np.random.default_rng(0).random((3, 3))
    table[:3, :3] = noise + noise.T
    np.fill_diagonal(table, 0)
    a = np.array([0.2, 0.3, 0.5, 0])
    other = cdist(np.arange(5.0)[:, None], np.arange(5.0)[:, None])
    result = torchgw.solve(D_X=table, D_Y=other, a=a, random_state=0)
    assert result.converged
    assert result.epsilon > 1e-4


def test_weights_over_many_decades_have_a_usable_epsilon():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 2)), rng.normal(size=(20, 3))
    weights = np.r_[1, np.full(19, 1e-12)]
    weights /= weights.sum()
    result = torchgw.solve(x, y, a=weights, b=weights, distances="euclidean", random_state=0)
    assert result.epsilon > 1e-7
    assert result.converged
    # weights of one decade keep the epsilon that they had
    weights = np.linspace(0.1, 1, 20) / np.linspace(0.1, 1, 20).sum()
    result = torchgw.solve(x, y, a=weights, b=weights, distances="sqeuclidean", n_init=1)
    tables = [cdist(p, p, "sqeuclidean") for p in (x, y)]
    spreads = []
    for table in tables:
        table = table / table.max()
        mean = weights @ table @ weights
        spreads.append(np.sqrt(weights @ table**2 @ weights - mean**2))
    assert result.epsilon == pytest.approx(0.0025 * 4 * spreads[0] * spreads[1], rel=1e-6)


SIDES = {"X": X[:4], "Y": Y[:4]}


@pytest.mark.parametrize(
    "options",
    [
        {"gradient": "sampled", "differentiable": "implicit", "epsilon": 0.1},
        {"gradient": "sampled", "polish": True},
        {"loss": "kl", "differentiable": "value", "epsilon": 0.1},
        {"unbalanced": 1.0, "differentiable": "unrolled", "epsilon": 0.1},
        {"polish": True, "differentiable": "value", "epsilon": 0.1},
        {"regularization": "proximal", "differentiable": "value", "epsilon": 0.1},
        {"unbalanced": 1.0, "polish": True},
        {"unbalanced": 1.0, "regularization": "proximal"},
        {"unbalanced": 1.0, "M": np.zeros((4, 4)), "checkpoint": "state"},
        {"unbalanced": 1.0, "mass": 0.5},
        {"skip_tiles": True, "M": np.zeros((4, 4))},
        {"skip_tiles": True, "gradient": "dense"},
        {"skip_tiles": True, "storage": "stored"},
        {"loss": "absolute", "gradient": "factored"},
        {"resolution": 1e-3, "gradient": "dense"},
        {"resolution": 1e-3, "mass": 0.5},
        {"search": "thorough", "init": np.full((4, 4), 1 / 16)},
        {"search": "thorough", "loss": "absolute"},
        {"alpha": 0.5},
        {"alpha": torch.tensor(0.5, requires_grad=True), "M": np.zeros((4, 4))},
        {"M": np.zeros((4, 4)), "features": (np.zeros((4, 1)), np.zeros((4, 1)))},
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_that_cannot_work_together_are_refused_before_the_work(options, monkeypatch):
    def begun(*args, **kwargs):
        raise AssertionError("distances are made")

    monkeypatch.setattr(torchgw._api, "build_providers", begun)
    with pytest.raises(torchgw.TorchGWError):
        solve_by_name(**SIDES, **options)


@pytest.mark.parametrize("options", [{}, {"gradient": "sampled"}, {"mass": 1e-12}])
@pytest.mark.parametrize("epsilon", [1e40, 1e300])
def test_an_epsilon_that_leaves_nothing_of_a_plan_is_refused(options, epsilon):
    """It overflowed in float32, drew from no plan at all, or was said to be too small."""
    with pytest.raises(torchgw.InvalidInputError, match=r"`epsilon` leaves nothing .* Lower it"):
        torchgw.solve(**SIDES, epsilon=epsilon, **options)


def test_an_exact_gradient_is_asked_for_before_the_search(limited):
    """What is chosen for many points is known after their distances, and before all else."""
    limited(dense=0)
    with pytest.raises(torchgw.UnsupportedError, match="needs a fixed point"):
        solve(X, Y, epsilon=0.1, differentiable="implicit", distances="euclidean")


@pytest.mark.parametrize("options", [{}, {"unbalanced": (0.5, 2)}])
def test_similarities_may_be_negative(options):
    """Squares of differences do not mind a constant added to both tables."""
    rng = np.random.default_rng(0)
    first, second = (np.corrcoef(rng.normal(size=(n, 9))) for n in (12, 10))
    call = {"epsilon": 0.5, "init": np.full((12, 10), 1 / 120), **options}
    found = solve(D_X=first, D_Y=second, **call)
    shifted = solve(D_X=first + 1, D_Y=second + 1, **call)
    assert first.min() < -0.1
    assert found.value_quad == pytest.approx(shifted.value_quad, rel=1e-6)
    assert found.value_quad == pytest.approx(
        reference.gw_value(first, second, np.asarray(found.plan)), rel=1e-6
    )
    assert np.isfinite(found.transform(D_new=first[:2], values=np.eye(10))).all()


def test_signs_have_a_tolerance_and_are_compared():
    squares = (X**2).sum(1)
    rounded = squares[:, None] + squares - 2 * X @ X.T - 1e-12
    with warnings.catch_warnings():
        warnings.simplefilter("error", torchgw.TorchGWWarning)
        solve(D_X=rounded, D_Y=D_Y, n_init=1, epsilon=5.0)
    with pytest.warns(
        torchgw.TorchGWWarning, match="`D_Y` has negative entries and `D_X` has none"
    ):
        solve(D_X=D_X, D_Y=-D_Y, n_init=1, epsilon=5.0)


@pytest.mark.parametrize("scale", ["auto", "max"])
def test_similarities_beside_distances_are_named(scale):
    """The product plan is then about the best one, whatever the two spaces are."""
    options = {"n_init": 1, "epsilon": 5.0, "scale": scale}
    for first, second, one, other in (
        (np.exp(-D_X), D_Y, "largest", "smallest"),
        (D_X, np.exp(-D_Y), "smallest", "largest"),
    ):
        with pytest.warns(
            torchgw.TorchGWWarning, match=f"`D_X` has its {one} .* of `D_Y` its {other}"
        ):
            solve(D_X=first, D_Y=second, **options)
    joined = (np.quantile(D_X, 0.3) > D_X).astype(float) - np.eye(len(D_X))
    with warnings.catch_warnings():
        warnings.simplefilter("error", torchgw.TorchGWWarning)
        solve(D_X=np.exp(-D_X), D_Y=np.exp(-D_Y), **options)
        # of adjacency matrices nothing is known: they are similarities with zeros on the diagonal
        solve(D_X=np.exp(-D_X), D_Y=joined, **options)


def test_numbers_may_be_tensors():
    options = {"M": np.ones((len(D_X), len(D_Y))), "n_init": 1, "D_X": D_X, "D_Y": D_Y}
    ours = solve(alpha=torch.tensor(0.5), epsilon=torch.tensor(1.0), **options)
    assert ours.value == solve(alpha=0.5, epsilon=1.0, **options).value


@pytest.mark.parametrize("directed", [False, True])
def test_one_graph_with_weights_and_one_without(directed):
    networkx = pytest.importorskip("networkx")
    graph = networkx.karate_club_graph()
    if directed:
        graph = graph.to_directed()
    plain = networkx.create_empty_copy(graph)
    plain.add_edges_from(graph.edges)
    for X, Y, said in ((graph, plain, "edge of `Y`"), (plain, graph, "edge of `X`")):
        with pytest.warns(GraphWarning, match=f"Every {said} has length 1"):
            solve(X, Y, distances="auto", n_init=1, epsilon=0.1)
    for both in (graph, plain):
        # no warning: a warning is an error
        solve(both, both, distances="auto", n_init=1, epsilon=0.1)
