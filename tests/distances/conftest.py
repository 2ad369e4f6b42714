"""Point sets and graphs shared by the tests of distance providers."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from torchgw.distances import graph


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> torch.device:
    # a GPU assembles these small graphs as it does large ones
    monkeypatch.setattr(graph, "_HOST_VERTICES", 0)
    return torch.device(request.param)


@pytest.fixture
def path_graph() -> csr_matrix:
    """0 - 1 - 2 - 3 with edges 1, 2, 3."""
    return csr_matrix(
        (np.array([1.0, 1, 2, 2, 3, 3]), ([0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2])), shape=(4, 4)
    )


@pytest.fixture
def two_paths() -> csr_matrix:
    """0 - 1 - 2 with edges 1 and 2, and 3 - 4 with an edge of 1; vertex 5 alone."""
    return csr_matrix(
        (np.array([1.0, 1, 2, 2, 1, 1]), ([0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3])), shape=(6, 6)
    )
