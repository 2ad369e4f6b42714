"""Operations of PyTorch that are loaded beside other work, before a solve needs them.

The first launch of an operation on a GPU loads all that PyTorch keeps in the same source file, in 5
to 40 ms; the operations of files that are loaded are free, of all dtypes. The driver loads one file
at a time, whatever the threads (L1020). So solves keep to few files: `x * x` is free where `square`
is not. Threads launch some operation of each, on a few numbers, while the solve reads its input and
waits for its own kernels. Decompositions are not among them: PyTorch refuses two threads that begin
with those at once.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchgw._tensors.machine import most_points
from torchgw._tensors.operations import FEW_PAIRS

logger = logging.getLogger(__name__)


def _neighbours(x: Tensor) -> None:
    """Launch what neighbours of points (n, d) and graphs need."""
    n = len(x)
    row = torch.arange(n, device=x.device)
    square = ((x - x.sum(0) / n) * x).sum(1)
    near = torch.addmm(square, x, x.T, alpha=-2).topk(8, largest=False, sorted=False).indices
    length, order = x[near].sum(2).sqrt().sort(dim=1, stable=True)
    near = torch.cat([near.gather(1, order)])
    keep = near != row[:, None]
    length[torch.where(keep.sum(1)[:, None] > 7, False, keep)]
    key = row.repeat_interleave(4).sort().values
    torch.searchsorted(key, row)
    root = row.clone().scatter_reduce_(0, row, row, "amin")
    torch.repeat_interleave(torch.ones_like(row), output_size=n)
    (root == row).cumsum(0)
    # products of float32, which larger problems are solved in
    small = x.float()
    small @ (small.T @ small)
    small @ small[0], small.T @ small[:, 0]


def _leaves(x: Tensor) -> None:
    """Launch what leaves of many points, their neighbours and tiles need."""
    table = x @ x.T
    (x.amax(0) - x.amin(0)).argmax()
    table.new_ones(1, 16_384).argsort(dim=1)
    for dtype in (torch.float64, torch.float32):
        table.new_ones(16, 1_024, dtype=dtype).argsort(dim=1)
    torch.aminmax(table)
    table.clamp_(min=0)
    keep = table > 0
    torch.zeros_like(keep).scatter_(1, keep.long(), keep)
    table.new_ones(1, 4_096).topk(8, dim=1)


def _spaces(x: Tensor) -> None:
    """Launch what distances (n, n), their scale and the drawing of points need."""
    row, weights = torch.arange(len(x), device=x.device), x[:, 0]
    table = x[row] @ x.T
    table[row, row] = 0
    table.nan_to_num().max()
    (table * weights.min()) @ weights
    several = weights > 0
    share = torch.where(several, weights, several.sum().double()) / weights.sum()
    number = several.cumsum(0) + row
    share.index_fill(0, torch.searchsorted(number, row[:1]), 0.0).log()


def _search(x: Tensor) -> None:
    """Launch what plans of a small problem and their costs need."""
    stack = (x @ x.T).expand(3, -1, -1).contiguous()
    torch.baddbmm(stack, stack, stack).abs()


def _stored(x: Tensor) -> None:
    """Launch what reading a plan that is stored needs."""
    torch.threshold_(x.clone(), 0.0, 0.0)


_PARTS = (_spaces, _search)
# Points up to which plans are stored and none of ``_leaves`` is needed. A choice. [L881] [L930]
_FEW = 1_000


def load_beside(device: torch.device, *given: Any) -> None:
    """Begin to load, once, the operations that a solve of these inputs launches on a GPU."""
    if device.type == "cuda":
        most = most_points(given)
        _begin(device, most**2 > FEW_PAIRS, most > _FEW)


@cache
def _begin(device: torch.device, neighbours: bool, leaves: bool) -> None:
    parts = (_leaves if leaves else _stored, *[_neighbours] * neighbours, *_PARTS)
    threading.Thread(target=_load, args=(device, parts), name="torchgw-load").start()


def _load(device: torch.device, parts: Sequence[Callable[[Tensor], None]]) -> None:
    """Run the first part, and begin the others beside it."""
    part, *others = parts
    if others:
        threading.Thread(target=_load, args=(device, others), name="torchgw-load").start()
    try:
        with torch.cuda.device(device), torch.inference_mode():
            part(torch.ones(64, 4, dtype=torch.float64, device=device))
    except RuntimeError as error:
        # a solve that needs what failed says so itself
        logger.info("operations could not be loaded ahead: %s", error)
