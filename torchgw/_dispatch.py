"""What runs where: backend, gradient, precision, and whether a cost is stored.

Each choice is a rule with a reason; ``"auto"`` follows the rule and the result reports it, a name
given by the user is obeyed or refused.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch

from torchgw._backend import Backend
from torchgw._compiled_sinkhorn import CompiledBackend
from torchgw._eager_sinkhorn import EagerBackend
from torchgw._errors import BackendUnavailableError, UnsupportedError
from torchgw._gradient import Problem
from torchgw._memory import free_memory
from torchgw._options import BackendName, GradientName, Precision, Storage
from torchgw._tiled_sinkhorn import TiledEagerBackend
from torchgw._tiling import Tiling

__all__ = [
    "Steps",
    "choose_backend",
    "choose_gradient",
    "choose_precision",
    "choose_tiling",
    "cost_fits",
    "problem_seconds",
    "store_cost",
    "unavailable_backends",
    "why_no_tiles",
]

logger = logging.getLogger(__name__)

# Order tried by backend="auto". On a CPU the eager sweep reuses one stored kernel, which beats a
# compiled softmin; compile is there when asked for by name.
_ORDER = {"cuda": ("triton", "compile", "eager"), "cpu": ("eager",)}

# Entries below which "auto" leaves one half-step over factors to PyTorch: Triton's takes 0.7 ms
# whatever the size, most of it to prepare operands that a sweep prepares once (PyTorch: 0.23 ms at
# 1,024 x 1,024 and rank 16, 0.5 at 4,096 x 4,096, 4.3 at 16,384 x 16,384). Sweeps, stored costs and
# everything read off a plan are faster by Triton from the smallest size on, or within 0.1 ms.
_KERNEL_ENTRIES = 2**25
# Entries (n * m) up to which the exact gradient by dense products is affordable: three tables of
# this size and two matrix products of n * m * max(n, m) operations per iteration.
_DENSE_ENTRIES = {"cpu": 12_000_000, "cuda": 40_000_000}
# Triples of points (n * m * min(n, m)) up to which a loss that is no sum of products is exact, and
# the most that may be asked for: a CPU takes 0.1 us for each, in every iteration.
_TRIPLES = {"cpu": 10_000_000, "cuda": 2_000_000_000}
_MOST_TRIPLES = {"cpu": 1_000_000_000, "cuda": 100_000_000_000}
# Entries up to which a mixed-precision solve goes on in float64 from where float32 has settled.
_AGAIN_ENTRIES = {"cpu": 25_000_000, "cuda": 200_000_000}
# Entries up to which float64 throughout costs less than a separate float64 settling: on a GPU
# launches take the time there, not arithmetic.
_FLOAT64_ENTRIES = {"cpu": 100_000, "cuda": 2_000_000}
# Entries up to which marginals are settled in float64 after a float32 solve.
_SETTLE_ENTRIES = {"cpu": 100_000_000, "cuda": 1_000_000_000}


def choose_backend(
    name: BackendName | Backend,
    device: torch.device,
    dtype: torch.dtype,
    tiling: Tiling | None = None,
) -> Backend:
    """Return the backend asked for, or for "auto" the first in order that can run.

    A backend that is given as an object is taken as it is.

    With a ``tiling`` it is the form of it that skips tiles, where there is one.

    Raises
    ------
    BackendUnavailableError
        If a backend was asked for by name and cannot run; the message gives the reason.
    """
    if not isinstance(name, str):
        return name
    if name != "auto":
        reason = _why_not(name, device, dtype)
        if reason is not None:
            raise BackendUnavailableError(
                f"`backend={name!r}` cannot run here: {reason} Pass backend='auto' to use what can."
            )
        return _make(name, tiling, asked=True)
    for candidate in _ORDER.get(device.type, ("eager",)):
        reason = _why_not(candidate, device, dtype)
        if reason is None:
            return _make(candidate, tiling, asked=False)
        _log_once(candidate, reason)
    return _make("eager", tiling, asked=False)


def unavailable_backends(device: torch.device) -> dict[str, str | None]:
    """Return every backend with the reason why it cannot run on a device, ``None`` if it can."""
    names = ("triton", "compile", "eager")
    return {name: _why_not(name, device, torch.float32) for name in names}


def _why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if name == "eager":
        return None
    if name == "compile":
        return CompiledBackend.why_not(device, dtype)
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)."
    from torchgw._triton_sinkhorn import TritonBackend

    return TritonBackend.why_not(device, dtype)


def _make(name: str, tiling: Tiling | None, *, asked: bool) -> Backend:
    if name == "triton":
        from torchgw._triton_sinkhorn import TritonBackend
        from torchgw._triton_tiled import TiledTritonBackend

        if tiling is not None:
            return TiledTritonBackend(tiling)
        return TritonBackend(least_entries=0 if asked else _KERNEL_ENTRIES)
    if name == "compile":
        return CompiledBackend()
    return EagerBackend() if tiling is None else TiledEagerBackend(tiling)


def choose_tiling(
    asked: bool | Literal["auto"],
    shape: tuple[int, int],
    device: torch.device,
    reason: str | None,
    *,
    storable: bool,
) -> Tiling | None:
    """Return the tiling of a solve whose tiles are to be skipped.

    Parameters
    ----------
    asked : bool or "auto"
    shape : tuple of int
    device : torch.device
    reason : str or None
        Why tiles cannot be skipped, as :func:`why_no_tiles` says.
    storable : bool
        Whether the cost may be stored where skipping them comes to nothing.

    Raises
    ------
    UnsupportedError
        If it was asked for and cannot be done; the message gives the reason.
    """
    if asked is True and reason is not None:
        raise UnsupportedError(f"`skip_tiles=True` cannot be met: {reason}")
    if asked is False or reason is not None:
        return None
    return Tiling.of(shape, device, storable=storable)


def why_no_tiles(
    gradient: str, backend: BackendName | Backend, *, linear: bool, store: bool
) -> str | None:
    """Return why no tiles of the costs of a solve can be skipped, or ``None``."""
    if gradient != "factored":
        return (
            f"the gradient is {gradient!r}, and only costs from factors have bounds that last. "
            "Pass gradient='factored' with distances that have factors."
        )
    if linear:
        return "with `M` every cost is stored. Drop `skip_tiles`, or leave `M` out."
    if store:
        return "costs of this size are stored, and read as a whole. Pass storage='streamed'."
    if not isinstance(backend, str):
        return "the backend is an object of your own. Pass backend='auto' or 'eager'."
    if backend == "compile":
        return "compiled half-steps have no form that skips. Pass backend='auto' or 'eager'."
    return None


@cache
def _log_once(name: str, reason: str) -> None:
    logger.info("backend %s is passed over: %s", name, reason)


def choose_gradient(name: GradientName, problem: Problem) -> GradientName:
    """Return the gradient asked for, or for "auto" an exact one wherever it fits.

    Raises
    ------
    UnsupportedError
        If "factored" is asked for and neither side has factors, or "dense" and it takes too long.
    """
    sides = problem.sides()
    if sides is None:
        return _choose_without_products(name, problem)
    source, target = sides
    with_factors = [side for side in (source, target) if side.factors() is not None]
    if name == "factored" and not with_factors:
        raise UnsupportedError(
            "`gradient='factored'` needs factors on at least one side: distances='landmark', "
            "'sqeuclidean' or 'cosine' (with loss='kl' for X: logarithms of distances have none). "
            "Pass gradient='auto' or 'sampled'."
        )
    cheap = all(side.cheap_columns for side in (source, target))
    fits = max(source.n, target.n) ** 2 <= _DENSE_ENTRIES.get(source.device.type, 0)
    chosen: GradientName
    if name != "auto":
        chosen, why = name, "asked for"
    elif len(with_factors) == 2:
        chosen, why = "factored", "factors make it exact without matrices"
    elif cheap and fits:
        chosen, why = "dense", "both distance matrices fit, which makes it exact"
    elif cheap and with_factors:
        chosen, why = "factored", "factors of one side make it exact"
    else:
        chosen, why = "sampled", "distances come by columns only, or are too large for products"
    logger.info("gradient %s: %s", chosen, why)
    return chosen


def _choose_without_products(name: GradientName, problem: Problem) -> GradientName:
    """Return the gradient for a loss whose cross term is no product, as :func:`choose_gradient`."""
    n, m, kind = problem.source.n, problem.target.n, problem.source.device.type
    loss, size = problem.loss.name, n * m * min(n, m)
    cheap = problem.source.cheap_columns and problem.target.cheap_columns
    if name == "factored":
        raise UnsupportedError(
            f"`gradient='factored'` needs a loss that is made of products, and loss={loss!r} is "
            "not. Pass gradient='auto', 'dense' or 'sampled'."
        )
    if name == "dense" and size > _MOST_TRIPLES.get(kind, 0):
        raise UnsupportedError(
            f"`gradient='dense'` with loss={loss!r} reads {size:.2g} distances in every iteration, "
            f"which is limited to {_MOST_TRIPLES.get(kind, 0):.2g} on {kind!r}. Pass "
            "gradient='sampled'."
        )
    if name == "auto":
        name = "dense" if cheap and size <= _TRIPLES.get(kind, 0) else "sampled"
    logger.info("gradient %s: loss %s", name, loss)
    return name


class Steps(NamedTuple):
    """Dtypes of a solve."""

    loop: torch.dtype  # of the outer iterations
    settle: torch.dtype  # of the final marginals and values
    again: bool  # whether the outer iterations go on in the second dtype


def choose_precision(
    name: Precision, device: torch.device, entries: int
) -> tuple[Precision, Steps]:
    """Return the precision and its dtypes; "auto" is float64 for small problems."""
    if name == "auto":
        name = "float64" if entries <= _FLOAT64_ENTRIES.get(device.type, 0) else "mixed"
    if name == "float64":
        return name, Steps(torch.float64, torch.float64, again=False)
    if name == "mixed" and entries <= _SETTLE_ENTRIES.get(device.type, 0):
        return name, Steps(
            torch.float32, torch.float64, again=entries <= _AGAIN_ENTRIES.get(device.type, 0)
        )
    return name, Steps(torch.float32, torch.float32, again=False)


class _Rates(NamedTuple):
    """Picoseconds of one linear problem, fitted to the tables in OPTIMIZATION_LOG.md."""

    make: float  # per entry: compute the cost, and the kernel from it
    read: float  # per entry and iteration: scale the kernel
    wide: float  # the same where a row does not fit on chip
    exponential: float  # per entry and iteration: what streaming takes whatever the rank
    product: float  # per entry, iteration and column of the factors
    launch: float  # per iteration, the least that streaming takes
    prepare: float  # per problem: the operands of streaming


# The time of a stored and of a streamed problem is a sum of these. On a GPU a row of up to
# 2^17 bytes is read once per iteration, and small streamed problems are bound by their launches.
_RATES = {
    ("cuda", torch.float32): _Rates(12.0, 1.1, 2.0, 0.55, 0.018, 2.0e8, 1.2e9),
    ("cuda", torch.float64): _Rates(18.0, 2.25, 5.2, 4.0, 0.1, 2.0e8, 1.2e9),
    ("cpu", torch.float32): _Rates(6.5e3, 650.0, 650.0, 1500.0, 30.0, 0.0, 0.0),
    ("cpu", torch.float64): _Rates(1.4e4, 1200.0, 1200.0, 2900.0, 75.0, 0.0, 0.0),
}
# Iterations of one linear problem: what most outer iterations take.
_PROBLEM_ITERATIONS = 20
# Time of a streamed problem on a CPU once tiles are skipped: half of them, over five iterations of
# two levels. On a curve a fifth is left, and fewer iterations. On a cloud nearly all are, which is
# not known before: so small problems, where storing loses 0.2 s at most, pay for that in advance.
_TILED_SHARE = 0.125
_TILED_SECONDS = 2.7e-2
# Bytes of a row that the one-read iteration holds on chip.
_ROW_BYTES = 2**17
# Bytes of a cost above which streaming, whose memory does not grow with n m, is preferred to time;
# and how many matrices of that size a stored problem holds: cost, kernel, one in the making.
_STORED_BYTES = {"cpu": 2**28, "cuda": 2**31}
_STORED_MATRICES = 3


def store_cost(
    name: Storage,
    device: torch.device,
    steps: Steps,
    shape: tuple[int, int],
    rank: int,
    *,
    tiled: bool = False,
) -> bool:
    """Whether to store the cost of an iteration instead of streaming its factors of some rank.

    "auto" stores where the model says that it is faster, over the dtypes that the outer iterations
    go through, and where it fits. A rank of zero stands for a cost that is a matrix in any case;
    with ``tiled`` a streamed cost would have tiles skipped.
    """
    if name != "auto" or rank == 0:
        return name != "streamed"
    if not cost_fits(device, steps, shape):
        return False
    dtypes = [steps.loop, steps.settle] if steps.again else [steps.loop]
    times = [problem_seconds(device, dtype, shape, rank) for dtype in dtypes]
    stored, streamed = (float(sum(part)) for part in zip(*times, strict=True))
    if tiled and device.type == "cpu":
        streamed = _TILED_SECONDS * len(dtypes) + _TILED_SHARE * streamed
    return stored <= streamed


def cost_fits(device: torch.device, steps: Steps, shape: tuple[int, int]) -> bool:
    """Whether a cost may be stored, in each dtype that the outer iterations go through."""
    needed = shape[0] * shape[1] * max(steps.loop.itemsize, steps.settle.itemsize)
    small = needed <= _STORED_BYTES.get(device.type, 0)
    return small and _STORED_MATRICES * needed <= free_memory(device)


def problem_seconds(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], rank: int
) -> tuple[float, float]:
    """Return the modelled time of one linear problem, stored and streamed."""
    rates = _RATES["cuda" if device.type == "cuda" else "cpu", dtype]
    entries = shape[0] * shape[1]
    wide = shape[1] * dtype.itemsize > _ROW_BYTES
    stored = entries * (rates.make + _PROBLEM_ITERATIONS * (rates.wide if wide else rates.read))
    each = max(rates.launch, entries * (rates.exponential + rates.product * rank))
    return 1e-12 * stored, 1e-12 * (rates.prepare + _PROBLEM_ITERATIONS * each)
