"""A solve on a device that is not the current one."""

from __future__ import annotations

import pytest
import torch
from problems import isometric_copy, solve_by_name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


# a few iterations are enough to launch everything
@pytest.mark.filterwarnings("ignore::torchgw.ConvergenceWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"distances": "precomputed"},
        {"distances": "landmark", "storage": "streamed", "precision": "float32"},
        {"distances": "landmark", "storage": "stored"},
        {"distances": "sqeuclidean", "gradient": "sampled"},
    ],
    ids=["dense", "streamed", "stored", "sampled"],
)
def test_the_current_device_does_not_matter(options):
    x, y, _ = isometric_copy(200, noise=0.05)
    points = torch.rand(200, 3, dtype=torch.float64)

    def solve(current):
        with torch.cuda.device(current):
            result = solve_by_name(
                torch.as_tensor(x),
                torch.as_tensor(y),
                epsilon=0.01,
                device="cuda:1",
                random_state=0,
                max_iter=30,
                **options,
            )
            assert torch.cuda.current_device() == current
            plan = result.lazy_plan
            generator = torch.Generator("cuda:1").manual_seed(1)
            return [
                plan.to_dense(), plan @ points, plan.T @ points, *plan.topk(3),
                *plan.sample(50, generator),
            ]  # fmt: skip

    for there, here in zip(solve(1), solve(0), strict=True):
        assert there.device == torch.device("cuda:1")
        assert torch.equal(there, here)
