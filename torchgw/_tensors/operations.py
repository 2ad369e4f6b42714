"""Operations written by others that solves use anyway: loading the code of each takes long.

On a GPU PyTorch loads the code of a source file at the first launch of any operation in it. [L1020]
"""

import math
from functools import reduce

import torch
from torch import Tensor


def lengths(vectors: Tensor, dim: int, *, keepdim: bool = False) -> Tensor:
    """Compute Euclidean norms along a dimension."""
    if vectors.is_cuda:
        return (vectors * vectors).sum(dim, keepdim=keepdim).sqrt()
    sizes: Tensor = torch.linalg.vector_norm(vectors, dim=dim, keepdim=keepdim)
    return sizes


def lesser(x: Tensor, y: Tensor) -> Tensor:
    """Take the lesser of each two entries."""
    return torch.stack([x, y]).amin(0)


def inverse(x: Tensor) -> Tensor:
    """Compute 1 / x."""
    return torch.ones_like(x) / x


def power(x: Tensor, exponent: int) -> Tensor:
    """Multiply entries by themselves."""
    return reduce(torch.mul, exponent * [x])


def power_of_two(exponent: Tensor) -> Tensor:
    """Compute 2^x."""
    # PyTorch itself compiles exp2 when it is first launched, for half a second
    return (exponent.double() * math.log(2)).exp_().to(exponent.dtype)


def exponentiate_(x: Tensor) -> Tensor:
    """Compute e^x in place."""
    # PyTorch computes the other by a library that takes three times as long on some CPUs
    slow = x.device.type == "cpu" and x.dtype == torch.float32
    return x.mul_(1 / math.log(2)).exp2_() if slow else x.exp_()
