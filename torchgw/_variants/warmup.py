"""Kernels that are compiled before a solve needs them."""

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torchgw._api import solve
from torchgw._batch.engine import run
from torchgw._batch.packing import LARGEST_ROUGH, Packed, pack
from torchgw._batch.worth import Rules
from torchgw._boundary.arrays import resolve_device
from torchgw._errors import TorchGWWarning, UnsupportedError
from torchgw._many.search import compile_programs, stack_of
from torchgw._problem.table import Options
from torchgw._tensors.ahead import compile_for_rank, variants, wait_for_all
from torchgw.datasets import spiral, swiss_roll

# Sizes and seeds that between them launch nearly all that a default solve may: on one H200, 54
# variants of kernels. [L367]
_SIZES = ((400, 500), (4_000, 5_000), (20_000, 25_000))
_SEEDS = 3


def warmup(device: Any = None, *, verbose: bool = False) -> Path:
    """Compile the kernels of default solves, and of batches, into Triton's cache on disk.

    Batches are those of strict marginals, with and without a linear cost, whose two sides have
    up to as many points: 16, 32, 64 or 128. Others are compiled by their first call.

    A process that finds them there compiles nothing for them. The cache may be copied to machines
    with the same kind of GPU and the same versions of torch, triton and torchgw, for example into
    the image of a container; ``TRITON_CACHE_DIR`` says where it lies.

    Parameters
    ----------
    device : torch device or None
        The GPU to compile for; None is the current CUDA device.
    verbose : bool
        Show on standard error how far it is.

    Returns
    -------
    pathlib.Path
        The folder of the cache.

    Raises
    ------
    UnsupportedError
        If the device is no CUDA device, or Triton is not installed: nothing is compiled then.
    """
    chosen = resolve_device("cuda" if device is None and torch.cuda.is_available() else device)
    if chosen.type != "cuda" or find_spec("triton") is None:
        raise UnsupportedError(
            f"`warmup` compiles kernels for CUDA devices, by Triton; the device is {chosen}. Other "
            "devices need no warm-up."
        )
    from torchgw._sinkhorn.kernels.operands import cache_folder

    problems = [(*size, seed) for size in _SIZES for seed in range(_SEEDS)]
    for side in [16 << step for step in range((LARGEST_ROUGH // 16).bit_length())]:
        _run_batches(side, chosen)
    for number, (n, m, seed) in enumerate(problems, start=1):
        x, y = spiral(n, random_state=seed)[0], swiss_roll(m, random_state=seed + 1)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TorchGWWarning)
            solve(x, y, device=chosen, random_state=seed, options=Options(backend="triton"))
        # a solve compiles what is for factors of its own rank alone
        for rank in {variant.rank for variant in variants()}:
            compile_for_rank(chosen, rank)
        if verbose:
            bar = "#" * number + "." * (len(problems) - number)
            sys.stderr.write(f"\rcompiling [{bar}]")
            sys.stderr.flush()
    wait_for_all()
    if verbose:
        sys.stderr.write("\n")
    return cache_folder()


def _run_batches(side: int, device: torch.device) -> None:
    """Solve one problem of some points by the engine of batches, with and without a linear cost.

    What a search launches is compiled meanwhile.
    """
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(1, side, 3, generator=generator, device="cpu").double().to(device)
    table = torch.cdist(points, points)
    stack = pack([table[0]], [torch.full_like(table[0, 0], 1 / side)])
    index, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones_like(table[:, 0, 0])
    for linear in (None, lambda numbers: table[numbers]):
        problem = Packed(stack, stack, index, index, one / 2, one * torch.nan, one, linear)
        compile_programs(problem, stack_of(problem))
        run(problem, Rules())
