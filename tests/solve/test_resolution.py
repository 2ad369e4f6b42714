"""Large problems on cells of near points."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import solve_by_name

import torchgw
from torchgw import ConvergenceWarning, InvalidInputError, UnsupportedError
from torchgw._solve import resolution
from torchgw._starts.subsample import make_cells
from torchgw._tensors.block_order import block_order
from torchgw.datasets import spiral, swiss_roll

N, M = 1300, 1200
X, Y = spiral(N, random_state=0)[0], swiss_roll(M, random_state=1)[0]
OPTIONS = {"distances": "landmark", "random_state": 0, "epsilon": 2e-3}


@pytest.fixture
def few(monkeypatch, limited):
    """Small problems count as large ones."""
    limited(subsample=10_000)
    monkeypatch.setattr(resolution, "_FIRST_CELLS", 64)
    monkeypatch.setattr(resolution, "_MEASURED", 512)


@pytest.fixture
def whole(few):
    return solve_by_name(X, Y, **OPTIONS, resolution=None)


def test_cells_are_means_and_keep_the_mass(few):
    values = torch.rand(50, 3, dtype=torch.float64)
    weight = torch.rand(50, dtype=torch.float64)
    weight[7] = 0
    weight /= weight.sum()
    side = torchgw.distances.FactoredDistance(values, torch.ones(3, dtype=torch.float64))
    order = block_order(values, 8)
    problem = torchgw._problem.problem.Problem(
        side, side, torchgw._typing.Marginals(weight, weight), 1.0, None
    )
    cells = make_cells(problem, (order, order))
    assert cells.problem.source.n == 7
    a = cells.problem.marginals.a
    assert float(a.sum()) == pytest.approx(1)
    means = cells.source.take(values)
    for k in range(7):
        points = order.point[8 * k : 8 * k + 8]
        expected = weight[points] @ values[points] / weight[points].sum()
        torch.testing.assert_close(means[k], expected)
        torch.testing.assert_close(a[k], weight[points].sum())
        assert cells.source.points(torch.tensor([k])) in points


@pytest.mark.parametrize("precision", ["auto", "float64"])
def test_the_plan_is_that_of_all_points(whole, precision):
    found = solve_by_name(X, Y, **OPTIONS, resolution=5e-3, precision=precision)
    report = found.report.resolution
    assert found.status.converged
    assert max(report["cells"]) < min(N, M) / 2
    assert whole.report.resolution is None
    # measured at some points, and the same on all of them
    moved = np.concatenate(found.lazy_plan.marginals())
    weights = np.concatenate(found.marginals)
    missing = np.abs(moved - weights)
    largest = max(float(missing[:N].sum()), float(missing[N:].sum()))
    assert found.marginal_error == pytest.approx(largest, rel=0.25)
    assert found.marginal_error <= 5e-3
    assert found.report.objective == pytest.approx(whole.report.objective, rel=2e-3)
    assert found.value == pytest.approx(whole.value, rel=2e-2)
    difference = np.abs(found.plan - whole.plan).sum()
    assert difference < 0.05
    rows = np.abs(np.asarray(found.plan).sum(1) * N - 1)
    assert rows.mean() <= 5e-3


@pytest.mark.parametrize("precise", [True, False])
def test_rounding_leaves_the_value_alone(few, limited, precise):
    # a value of 3e-4 is the difference of sums near .3: masses of cells off by 1e-5 change it by 2%
    if not precise:
        limited(precise_cells=0)
    options = OPTIONS | {"epsilon": 5e-4}
    whole = solve_by_name(X, Y, **options, resolution=None, precision="float64")
    found = solve_by_name(X, Y, **options, resolution=4e-3)
    assert found.report.resolution is not None
    assert found.lazy_plan.dtype == torch.float32
    # twice what is left here, as landmarks and last bits of the start move the end [L501]
    assert found.value == pytest.approx(whole.value, rel=2e-3 if precise else 4e-3)


def test_cells_have_the_digits_that_a_small_epsilon_needs(few, monkeypatch, limited):
    limited(precise_cells=0)
    monkeypatch.setattr(resolution, "rounding", lambda scale, epsilon, dtype: dtype.itemsize == 4)
    found = solve_by_name(X[::2], Y[::2], **OPTIONS, resolution=1e-2)
    assert found.report.resolution is not None
    # in float32 it would be one that ran out of digits
    assert found.status.converged
    assert found.lazy_plan.dtype == torch.float64
    with pytest.warns(ConvergenceWarning, match="Rounding"):
        solve_by_name(X[::2], Y[::2], **OPTIONS, resolution=1e-2, precision="float32")


def test_rounding_leaves_the_value_of_all_points_alone():
    # masses of points, off by 1e-5, would do the same here: 4e-4 without features
    rng = np.random.default_rng(5)
    a, b = (weight / weight.sum() for weight in (rng.random(size) + 0.1 for size in (N, M)))
    options = OPTIONS | {"epsilon": 8e-4, "gradient": "factored", "a": a, "b": b}
    exact = solve_by_name(X, Y, **options, precision="float64")
    found = solve_by_name(X, Y, **options, precision="float32")
    assert found.lazy_plan.dtype == torch.float32
    assert found.status.converged
    assert found.value == pytest.approx(exact.value, rel=1e-4)
    assert found.report.kl == pytest.approx(exact.report.kl, rel=1e-4)


def test_a_tolerance_that_no_cells_meet_is_met_on_all_points(whole):
    found = solve_by_name(X, Y, **OPTIONS, resolution=1e-7)
    assert found.report.resolution is None
    assert found.marginal_error < 1e-5
    assert found.value == pytest.approx(whole.value, rel=1e-3)


def test_cells_that_say_nothing_of_their_points_are_not_made_finer(few, monkeypatch):
    """In many dimensions no number of cells has points near enough to each other."""
    made, rng = [], np.random.default_rng(0)
    solve, points = resolution._solve, rng.normal(size=(2, 500, 20))
    monkeypatch.setattr(resolution, "_solve", lambda *all: made.append(solve(*all)) or made[-1])
    options = {"distances": "sqeuclidean", "epsilon": 5e-4, "n_init": 1, "random_state": 0}
    found = solve_by_name(*points, **options, resolution=1e-3)
    assert len(made) == 1
    assert made[0].resolution.cells[0] < 500 / resolution._FEWEST_POINTS
    assert found.report.resolution is None
    assert found.marginal_error < 1e-3


def test_automatic_cells_are_for_large_problems(few, limited):
    assert solve_by_name(X, Y, **OPTIONS).report.resolution is None
    limited(cells=1e6)
    found = solve_by_name(X, Y, **OPTIONS, inner_tol=1e-3)
    assert found.report.resolution["tolerance"] == 1e-2
    # those who need all points get them
    same = solve_by_name(X, Y, **OPTIONS, init=found.potentials, inner_tol=1e-3)
    assert same.report.resolution is None


def test_features_and_files(few, tmp_path):
    t, s = np.linspace(0, 1, N)[:, None], np.linspace(0, 1, M)[:, None]
    options = {**OPTIONS, "features": (t, s), "alpha": 0.5}
    whole = solve_by_name(X, Y, **options, resolution=None)
    found = solve_by_name(X, Y, **options, resolution=1e-2)
    assert found.report.resolution is not None
    assert found.value == pytest.approx(whole.value, rel=5e-2)
    assert found.value_linear == pytest.approx(whole.value_linear, rel=0.1)
    found.save(tmp_path / "result.npz")
    again = torchgw.load(tmp_path / "result.npz")
    assert again.report.resolution["marginal_error"] == found.marginal_error
    assert torch.equal(again.lazy_plan.potentials.f, found.lazy_plan.potentials.f)


def test_seeds_give_the_same_bits(few):
    one, two = (solve_by_name(X[::2], Y[::2], **OPTIONS, resolution=1e-2) for _ in range(2))
    assert np.array_equal(one.potential_a, two.potential_a)
    assert one.value == two.value


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"init": np.full((N, M), 1 / (N * M))}, "init"),
        ({"differentiable": "value"}, "derivatives"),
        ({"checkpoint": "state"}, "checkpoint"),
        ({"regularization": "proximal"}, "proximal"),
        ({"polish": True}, "polish"),
        ({"mass": 0.5}, "unbalanced"),
        ({"gradient": "dense"}, "factored"),
        ({"gradient": "sampled"}, "factored"),
    ],
)
def test_what_needs_all_points_is_refused_beforehand(options, why):
    with pytest.raises(UnsupportedError, match=why):
        solve_by_name(X, Y, **OPTIONS | options, resolution=1e-2)


@pytest.mark.parametrize("given", [-1.0, float("nan"), "fine", True, False])
def test_no_tolerance(given):
    with pytest.raises((InvalidInputError, torchgw.InvalidTypeError), match="resolution"):
        solve_by_name(X, Y, **OPTIONS, resolution=given)


def test_tiles_without_mass_are_left_out_of_extensions(few, monkeypatch):
    made = []

    class Watched(resolution.Tiling):
        def ordered(self, orders):
            made.append(self)
            return super().ordered(orders)

    options = OPTIONS | {"epsilon": 5e-4, "resolution": 4e-3, "storage": "streamed"}
    expected = solve_by_name(X, Y, **options, skip_tiles=False)
    monkeypatch.setattr(resolution, "Tiling", Watched)
    found = solve_by_name(X, Y, **options, skip_tiles=True)
    assert len(made) >= 2
    assert all(share < 0.9 for tiling in made for share in tiling._memory.shares)
    # cells are solved with tiles left out as well, to the same tolerance: two hundredths of epsilon
    assert found.value == pytest.approx(expected.value, rel=1e-4)
    np.testing.assert_allclose(found.potential_a, expected.potential_a, atol=2e-2 * 5e-4)


def test_cells_that_run_out_of_digits_give_way_to_all_points(few, limited):
    limited(precise_cells=0)
    points = X[::2].astype(np.float32), Y[::2].astype(np.float32)
    options = OPTIONS | {"epsilon": 1e-4}
    found = solve_by_name(*points, **options, resolution=5e-3)
    assert found.status.converged
    assert found.report.resolution is None
    assert found.marginal_error < 1e-6
    whole = solve_by_name(*points, **options, resolution=None)
    assert found.value == pytest.approx(whole.value, rel=1e-5)


def _clouds(seed):
    """A flat cloud, clusters and a curve, each beside a noisy copy of most of its points."""
    rng = np.random.default_rng(seed)
    time = rng.uniform(0, 8, 300)
    kinds = {
        "flat": rng.normal(size=(300, 2)) * [1, 0.7],
        "clusters": rng.normal(size=(8, 20))[rng.integers(8, size=300)]
        + 0.4 * rng.normal(size=(300, 20)),
        "curve": np.stack([time * np.cos(time), time * np.sin(time), time], 1),
    }
    for points in kinds.values():
        order = rng.permutation(300)
        yield points, points[order] + 0.01 * points.std() * rng.normal(size=points.shape), order


@pytest.mark.parametrize("known", [False, True])
def test_cells_leave_little_to_all_points(known, limited, monkeypatch):
    """The same plans after fewer iterations on all points than from few points at once."""
    from torchgw._solve import pipeline

    limited(subsample=3e4)
    monkeypatch.setattr(pipeline, "_COARSE_POINTS", 50)
    approach, spent = pipeline.approach, {}
    for cells in (False, True):
        monkeypatch.setattr(
            pipeline, "approach", approach if cells else lambda _, __, state, *___: state
        )
        for place, (x, y, order) in enumerate(_clouds(0)):
            taken = []
            given = {"pairs": np.stack([order[:9], np.arange(9)], 1)} if known else {"b": None}
            found = torchgw.solve(
                x, y if known else y[:270], distances="sqeuclidean", n_init=1, random_state=0,
                options=torchgw.Options(callback=taken.append), **given,
            )  # fmt: skip
            assert found.converged
            count = sum(one[5] for one in taken if one[6][0] > 240)
            spent.setdefault(place, []).append((count, found.report.objective))
    counts, ends = np.array(list(spent.values())).transpose(2, 1, 0)
    assert counts[1].sum() < 0.7 * counts[0].sum()
    assert (ends[1] <= (1 + 1e-3) * ends[0]).sum() >= 2


@pytest.mark.parametrize("size", [10, 50, 200, 400])
@pytest.mark.filterwarnings("ignore::torchgw.ConvergenceWarning")
def test_a_solve_that_is_stopped_on_cells_has_a_plan_of_all_points(size, limited, monkeypatch):
    """Wherever a callback stops it, with weights of zero and sides of other sizes."""
    limited(subsample=1e4)
    monkeypatch.setattr("torchgw._solve.pipeline._COARSE_POINTS", 10)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 2)), rng.normal(size=(90, 3))
    a = np.where(np.arange(400) < 7, 0.0, 1.0)
    found = torchgw.solve(
        x, y, a=a / a.sum(), distances="sqeuclidean", n_init=1, random_state=0,
        options=torchgw.Options(callback=lambda one: one.shape[0] == size),
    )  # fmt: skip
    assert found.status is torchgw.Status.STOPPED
    plan = np.asarray(found.plan)
    assert plan.shape == (400, 90)
    assert abs(plan.sum() - 1) < 1e-3
    assert (plan[:7] == 0).all()
