"""How many variants of Triton kernels a solve compiles: what waits on a first call."""

import numpy as np
import pytest
import torch
from problems import solve_by_name
from triton.runtime.interpreter import InterpretedFunction

import torchgw
from torchgw._sinkhorn.kernels.operands import interpreted
from torchgw._triton_sinkhorn import TritonBackend


@pytest.fixture
def launched(monkeypatch):
    """Names of kernels with their constants and the dtypes of their tensors."""
    found, launch = set(), InterpretedFunction.__getitem__

    def recorded(self, grid):
        run = launch(self, grid)

        def call(*arguments, **constants):
            kinds = tuple(one.dtype for one in arguments if isinstance(one, torch.Tensor))
            found.add((self.fn.__name__, kinds, tuple(sorted(constants.items()))))
            return run(*arguments, **constants)

        return call

    monkeypatch.setattr(InterpretedFunction, "__getitem__", recorded)
    return found


@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
@pytest.mark.slow
def test_a_small_solve_has_few_variants(launched):
    points = np.random.default_rng(0).normal(size=(10, 2))
    backend = TritonBackend(least_entries=2**25)
    options = {"n_init": 1, "max_iter": 2, "inner_max_iter": 10, "random_state": 0}
    with pytest.warns(torchgw.ConvergenceWarning):
        solve_by_name(points, points[:8] * 1.5, distances="euclidean", backend=backend, **options)
    assert "_sweep_kernel" in {name for name, *_ in launched}
    # a search has one more, and so has a neighbour graph on a GPU; asked: 12 in all
    assert len(launched) <= 8, sorted(name for name, *_ in launched)
