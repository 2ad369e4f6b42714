"""Operations made of others, against what they stand for."""

import pytest
import torch

from torchgw._tensors.operations import exponentiate_


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-15)])
def test_exponentials_are_those_of_the_definition(dtype, tolerance):
    x = torch.linspace(-70, 60, 2**17, dtype=dtype)
    found = exponentiate_(x.clone())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), x.double().exp(), rtol=tolerance, atol=0)


def test_an_exponential_is_taken_in_place():
    x = torch.zeros(3)
    assert exponentiate_(x) is x
    assert x.tolist() == [1, 1, 1]
