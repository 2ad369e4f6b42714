import subprocess
import sys

import numpy as np
import pytest
import torch

from torchgw import _errors
from torchgw.distances import CallableDistance, DijkstraDistance, ScaledDistance


def test_a_wrong_shape_is_reported():
    provider = CallableDistance(4, lambda index: torch.zeros(len(index), 4))
    with pytest.raises(_errors.InvalidInputError, match=r"\(4, 2\); got \(2, 4\)"):
        provider.columns(torch.tensor([0, 1]))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_column_is_reported(value):
    provider = CallableDistance(3, lambda index: np.full((3, len(index)), value))
    with pytest.raises(_errors.InvalidInputError, match="finite distances.*unreachable"):
        provider.columns(torch.tensor([0]))


def test_a_function_may_return_an_array_and_gets_its_index_where_it_was_made():
    seen = []

    def columns(index):
        seen.append((index.dtype, index.device.type))
        return np.ones((3, len(index)), dtype=np.int64)

    provider = CallableDistance(3, columns).to(torch.device("cpu"), torch.float64)
    block = provider.columns(torch.tensor([0, 2]))
    assert block.tolist() == [[1, 1]] * 3
    assert block.dtype == torch.float64
    assert seen == [(torch.int64, "cpu")]


def test_refused_arguments_of_a_function():
    with pytest.raises(_errors.InvalidTypeError, match="callable.*got ndarray"):
        CallableDistance(3, np.zeros((3, 3)))
    with pytest.raises(_errors.InvalidInputError, match="at least 1.*got 0"):
        CallableDistance(0, lambda index: index)


def test_a_costly_function_can_say_so(path_graph):
    assert not CallableDistance(3, lambda index: index, cheap_columns=False).cheap_columns
    assert not ScaledDistance(DijkstraDistance(path_graph), 2.0).cheap_columns


def test_importing_pulls_in_nothing_optional():
    # In a fresh process: this one has imported everything already.
    code = (
        "import sys, torchgw.distances; "
        "optional = {'sklearn', 'matplotlib', 'triton', 'networkx'} & sys.modules.keys(); "
        "sys.exit(', '.join(optional) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
