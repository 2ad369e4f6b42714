"""How long linear problems take, stored and streamed, by a model."""

from typing import NamedTuple

import torch


class _Rates(NamedTuple):
    """Picoseconds of one linear problem, fitted to the tables in OPTIMIZATION_LOG.md."""

    make: float  # per entry: compute the cost, and the kernel from it
    read: float  # per entry and iteration: scale the kernel
    wide: float  # the same where a row does not fit on chip
    exponential: float  # per entry and iteration of streaming, at any rank
    product: float  # per entry, iteration and column of the factors
    launch: float  # per iteration, the least that streaming takes
    prepare: float  # per problem: the operands of streaming


# The time of a stored and of a streamed problem is a sum of these. On a GPU a row of up to
# 2^17 bytes is read once per iteration, and launches bound small streamed problems. [L91]
_RATES = {
    ("cuda", torch.float32): _Rates(12.0, 1.1, 2.0, 0.55, 0.018, 2.0e8, 1.2e9),
    ("cuda", torch.float64): _Rates(18.0, 2.25, 5.2, 4.0, 0.1, 2.0e8, 1.2e9),
    ("cpu", torch.float32): _Rates(6.5e3, 650.0, 650.0, 1500.0, 30.0, 0.0, 0.0),
    ("cpu", torch.float64): _Rates(1.4e4, 1200.0, 1200.0, 2900.0, 75.0, 0.0, 0.0),
}
# Iterations of one linear problem: what most outer iterations take. [L91]
_PROBLEM_ITERATIONS = 20
# Time of a streamed problem on a CPU if tiles are skipped: half the tiles are kept over five
# iterations of two levels. On a curve a fifth are kept, in fewer iterations. On a cloud nearly all
# are, which is not known before: so small problems, where storing loses 0.2 s at most, are charged
# extra seconds for streaming. [L99, L211]
_TILED_SHARE = 0.125
_TILED_SECONDS = 2.7e-2
# Bytes of a row that the one-read iteration holds on chip. [L91]
_ROW_BYTES = 2**17


def tiled_seconds(streamed: float, problems: int = 1) -> float:
    """Model the time of streamed problems on a CPU once tiles are skipped."""
    return _TILED_SECONDS * problems + _TILED_SHARE * streamed


def problem_seconds(
    device: str, dtype: torch.dtype, shape: tuple[int, int], rank: int
) -> tuple[float, float]:
    """Model the time of one linear problem, stored and streamed."""
    rates = _RATES[device, dtype]
    entries = shape[0] * shape[1]
    wide = shape[1] * dtype.itemsize > _ROW_BYTES
    stored = entries * (rates.make + _PROBLEM_ITERATIONS * (rates.wide if wide else rates.read))
    each = max(rates.launch, entries * (rates.exponential + rates.product * rank))
    return 1e-12 * stored, 1e-12 * (rates.prepare + _PROBLEM_ITERATIONS * each)
