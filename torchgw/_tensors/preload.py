"""Operations that PyTorch's library is asked for beside other work, before a solve needs them.

PyTorch loads the code of an operation on a GPU when it is first launched, which takes 10 to 80 ms
each, half a second for a solve. Threads launch those of solves on a few numbers, while the solve
reads its input and waits for its own kernels. Decompositions are not among them: PyTorch refuses
two threads that begin with those at once.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchgw._tensors.threads import most_points

logger = logging.getLogger(__name__)


def _neighbours(x: Tensor) -> None:
    """Neighbours of points (n, d), and graphs."""
    n = len(x)
    row = torch.arange(n, device=x.device)
    x.aminmax()
    table = torch.addmm(x.square().sum(1), x, x.T, alpha=-2)
    near = table.topk(8, dim=1, largest=False, sorted=False).indices
    length, order = (x[near] - x[:, None]).norm(dim=2).sort(dim=1, stable=True)
    near = near.gather(1, order)
    keep = near != row[:, None]
    keep[:, -1] &= ~keep.all(dim=1)
    length[keep]
    key, order = torch.cat([row.repeat_interleave(4) * n, row.repeat_interleave(4)]).sort()
    first = torch.ones_like(key, dtype=torch.bool)
    first[1:] = key[1:] != key[:-1]
    torch.searchsorted(key, row * n), key % n
    root = row.clone().scatter_reduce_(0, row, row, "amin")
    torch.equal(root[root], root)
    root.unique(return_inverse=True)


def _leaves(x: Tensor) -> None:
    """Leaves of many points, neighbours among them, and what their tiles need."""
    row, table = torch.arange(len(x), device=x.device), x @ x.T
    row // 2
    (x.amax(0) - x.amin(0)).argmax()
    for shape in ((1, 16_384), (16, 1_024)):
        table.new_ones(shape).argsort(dim=1)
    gap = torch.maximum(table, table.T).clamp_(min=0)
    table.addcmul_(gap, gap)
    table.masked_fill_(row < 0, torch.inf)
    keep = table > 0
    torch.zeros_like(keep).scatter_(1, keep.long(), keep)
    table.sqrt()
    table.new_ones(1, 4_096).topk(8, dim=1)
    torch.isin(row, row)
    table[0].nextafter(table[1])


def _spaces(x: Tensor) -> None:
    """Distances (n, n), their scale, and points drawn from them."""
    table, weights = x @ x.T, x[:, 0]
    table.nan_to_num()
    table.max()
    torch.stack([table, table]).sum()
    raised = torch.where(weights > 0, weights.clamp_min(0.5), 0.0)
    torch.where((raised == weights).all(), weights, raised / raised.sum())
    table.square() @ weights
    torch.maximum(weights.sum(), 2 * weights.max())
    number = (weights > 0).cumsum(0) - 1
    index = (number == number.max().clamp(max=1)).byte().argmax()[None]
    weights.log() * table.amin(1).pow(2.0)
    share = weights.index_fill(0, index, 0.0)
    weights.topk(1)
    weights.topk(32)
    table.min(1)
    share.where(number == number[:8, None], 0).sum(1)
    table.mean()
    table.reciprocal()
    torch.linalg.vector_norm(table)


def _search(x: Tensor) -> None:
    """Plans of a small problem, and what is made of them."""
    small = x.float()
    table = small @ small.T
    stack = table.expand(3, *table.shape).contiguous()
    torch.baddbmm(stack, stack, stack)
    table.new_ones(3, 64, 8).gather(1, torch.zeros(3, 8, 8, dtype=torch.int64, device=x.device))
    torch.cdist(x, x)
    stack.double().sum((1, 2)).nan_to_num(nan=torch.inf)
    table.clamp(min=-80).exp_()
    torch.threshold_(table, 0.0, 0.0)
    torch.linalg.vector_norm(x)


_PARTS = (_spaces, _search)
# Points up to which a CPU finds the neighbours, and up to which none of ``_leaves`` is needed.
# Choices. [L881] [L930]
_FEWEST, _FEW = 512, 1_000


def load_beside(device: torch.device, *given: Any) -> None:
    """Begin to load, once, the operations that a solve of these inputs launches on a GPU."""
    if device.type == "cuda":
        most = most_points(given)
        _begin(device, most > _FEWEST, most > _FEW)


@cache
def _begin(device: torch.device, neighbours: bool, leaves: bool) -> None:
    parts = (*[_leaves] * leaves, *[_neighbours] * neighbours, *_PARTS)
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
