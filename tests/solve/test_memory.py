"""Memory of large problems: what grows with the points, and what the model of it says."""

from __future__ import annotations

import pytest
import torch
from problems import solve_by_name

from benchmarks.harness.storages import StorageMeter
from benchmarks.solves.scaling import surface
from benchmarks.solves.scaling_model import bytes_a_pair
from torchgw._answer import passes
from torchgw._solve import resolution
from torchgw.datasets import spiral, swiss_roll
from torchgw.distances import base, landmark


@pytest.fixture
def parts(monkeypatch, limited):
    """Small problems count as large ones, and their parts and cells are small beside them."""
    limited(subsample=10_000)
    for where, name, value in (
        (resolution, "_FIRST_CELLS", 64), (resolution, "_FEWEST_POINTS", 64),
        (resolution, "_MEASURED", 64), (resolution, "_PART", {"cpu": (512, 512)}),
        (base, "ROWS", 512), (landmark, "VERTICES", 512), (passes, "BLOCK_ENTRIES", 2**13),
    ):  # fmt: skip
        monkeypatch.setattr(where, name, value)


@pytest.mark.filterwarnings("ignore::torchgw.PerformanceWarning")
@pytest.mark.parametrize(
    ("space", "n", "last"),
    [
        ("spiral", 2003, "few points"),
        ("spiral", 9001, "extension"),
        ("surface", 9001, "extension"),
    ],
)
def test_the_model_counts_what_grows_with_the_points(parts, space, n, last):
    """All tables of n points that live at once, in float64 and float32 as they are."""
    if space == "spiral":
        x, y = spiral(n, random_state=0)[0], swiss_roll(n, random_state=1)[0]
    else:
        x, y = surface(n, 0)[0], surface(n, 1)[0]
    with StorageMeter(n) as meter:
        found = solve_by_name(
            x, y, distances="landmark", epsilon=5e-3, resolution=0.1, random_state=0
        )
    assert found.log["resolution"] is not None
    sides = [found.log["landmarks"][name] for name in "XY"]
    ranks = sides[0]["rank"], sides[1]["rank"]
    # graphs are tables of edges, which the meter does not see
    count = max(side["count"] for side in sides)
    model = bytes_a_pair(x.shape[1] + y.shape[1], ranks, count, (0, 0))
    most = max(model["landmarks"], model[last])
    assert meter.peak / n == pytest.approx(most, rel=0.25)
    assert meter.now / n < 0.6 * most


def test_a_meter_counts_what_lives():
    with StorageMeter() as meter:
        first = torch.zeros(100, dtype=torch.float64)
        assert meter.now == 800
        again = first.view(10, 10).T
        assert meter.now == 800
        del first
        assert meter.now == 800
        del again
        assert meter.now == 0
        assert meter.peak == 800
    with StorageMeter(7) as meter:
        kept = torch.ones(7), torch.ones(8), torch.ones(2, 7)
        assert meter.now == 28 + 56
    assert len(kept) == 3
