"""Devices, precisions and memory of the tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from problems import skip_unless_kernels_run


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    device = torch.device(request.param)
    skip_unless_kernels_run(device)
    return device


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill every torch.empty with NaN, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
