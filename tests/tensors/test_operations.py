"""Operations made of others, against what they stand for."""

import pytest
import torch

from torchgw._tensors.operations import (
    average,
    both,
    exponentiate_,
    greater,
    lesser,
    negative,
    quotient,
    same,
    sums_along,
    sums_of,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


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


@pytest.mark.parametrize("device", DEVICES)
def test_operations_made_of_others_agree_with_those_of_pytorch(device):
    x, y = torch.randn(2, 50, 3, dtype=torch.float64, device=device)
    x[0], y[1] = float("nan"), float("inf")
    torch.testing.assert_close(greater(x, y), torch.maximum(x, y), equal_nan=True)
    torch.testing.assert_close(lesser(x, y), torch.minimum(x, y), equal_nan=True)
    torch.testing.assert_close(average(y), y.mean(0), equal_nan=True)
    torch.testing.assert_close(negative(x), -x, equal_nan=True)
    assert torch.equal(both(x > 0, y > 0), (x > 0) & (y > 0))


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_are_the_same_if_shapes_and_entries_are(device):
    x = torch.arange(6, device=device)
    assert same(x, x.clone())
    assert not same(x, x.flip(0))
    assert not same(x, x[:5])
    assert not same(x, x[:1])


@pytest.mark.parametrize("device", DEVICES)
def test_a_quotient_is_rounded_down_however_near_the_next_number(device):
    whole = torch.tensor([0, 1, 5, 2**26, 2**40 + 1, 2**51 // 3], device=device)
    by = torch.tensor([1, 2, 3, 64, 7, 3], device=device)
    for x in (whole, whole * by, whole * by + by - 1):
        assert torch.equal(quotient(x, by), x // by)
    # the number below each multiple, the hardest to tell from it
    x = (whole[1:] * by[1:]) - 1
    assert torch.equal(quotient(x, by[1:]), x // by[1:])
    assert torch.equal(quotient(whole, 64), whole // 64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [8, 16, 32, 64, 100])
def test_a_table_is_summed_as_if_it_were_alone(device, n):
    generator = torch.Generator("cpu").manual_seed(n)
    tables = torch.randn(600, n, n, generator=generator, dtype=torch.float64).to(device)
    for sums, parts in ((sums_of, tables), (sums_along, tables[:, 0])):
        together = sums(parts)
        rough = parts.flatten(1).sum(1)
        torch.testing.assert_close(together, rough, rtol=0, atol=1e-11)
        for count in (1, 2, 3, 7, 40, 300):
            assert torch.equal(sums(parts[:count].clone()), together[:count])
