"""Operands and launch shapes of the Triton kernels, prepared by PyTorch.

The kernels' units, base-2 exponents, are those of (T1) in
:mod:`torchgw._sinkhorn.kernels.exponents`.
"""

import math
import os
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import triton
from torch import Tensor

from torchgw._sinkhorn.problem import Cost, DenseCost, FactoredCost
from torchgw._tensors.operations import both, inverse
from torchgw._typing import Marginals, Potentials

ProductPrecision = Literal["fp16x3", "float32", "float64"]
# Vectors are padded to a multiple of the widest tile, which is a block of what sweeps do between
# passes over a cost. [L286, L287]
BLOCK = 1024
# Entries from which on a kernel is compiled once more for matrices of whole vectors: their products
# take a seventh of the time. [L364]
_ALIGNED_ENTRIES = 2**22
# The dtype in which each precision keeps a factor, in half precision with what rounding left over.
_DTYPES: dict[ProductPrecision, torch.dtype] = {
    "fp16x3": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class Blocks(NamedTuple):
    """Tile and launch shape of a kernel."""

    n: int  # rows of a tile
    m: int  # columns of a tile
    warps: int
    stages: int


class Walk(NamedTuple):
    """Which tiles of columns each block of rows goes over, as the kernels read it."""

    start: Tensor  # (row blocks + 1,) int64, where the list of each begins
    tiles: Tensor  # (kept,) int64, blocks of columns, ascending
    width: int  # points of a block; 0 for all columns
    lists: Tensor  # (row blocks, 3) int64, a block of rows, where its list begins and ends

    @classmethod
    def of(cls, start: Tensor, tiles: Tensor, width: int) -> "Walk":
        """Put the lists into the order in which programs take them: the longest first."""
        # the last programs to begin are short, so that none works on alone
        block = start.diff().argsort(descending=True, stable=True)
        return cls(start, tiles, width, torch.stack([block, start[block], start[block + 1]], 1))

    def rows(self, blocks: range) -> "Walk":
        """Restrict to some blocks of rows."""
        if len(blocks) == len(self.start) - 1:
            return self
        return Walk.of(self.start[blocks.start : blocks.stop + 1], self.tiles, self.width)

    def programs(self, n: int, blocks: Blocks) -> int:
        """Count the programs that n rows take, of which each list has several."""
        return len(self.lists) * (self.width // blocks.n) if self.width else tiles_of(n, blocks.n)

    def fit(self, blocks: Blocks) -> Blocks:
        """Shrink blocks so that they divide those of the lists."""
        if not self.width:
            return blocks
        return blocks._replace(n=min(blocks.n, self.width), m=min(blocks.m, self.width))


class Operands(NamedTuple):
    """A cost as the kernels read it."""

    first: Tensor  # (parts, n, rank) left factors times scale, or the matrix
    second: Tensor  # (parts, m, rank) right factors, or (1,) -scale for a matrix
    row: Tensor  # (n,) part of the cost outside the products, cost units; () zero for a matrix
    column: Tensor  # (m,) or ()
    shape: tuple[int, int]
    strides: tuple[int, int]  # of the matrix; unused for factors
    rank: int  # padded; 0 for a matrix
    block_rank: int
    precision: ProductPrecision

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of accumulation, biases and sums."""
        return torch.float64 if self.precision == "float64" else torch.float32

    def transpose(self) -> "Operands":
        """Exchange source and target."""
        first, second = (self.first, self.second) if self.rank == 0 else (self.second, self.first)
        n, m = self.shape
        return self._replace(
            first=first, second=second, row=self.column, column=self.row, shape=(m, n),
            strides=self.strides[::-1],
        )  # fmt: skip

    def rows(self, part: slice) -> "Operands":
        """Restrict to some rows; those of factors are copied."""
        n, m = self.shape
        if part == slice(0, n):
            return self
        shape = part.stop - part.start, m
        if self.rank:
            first = self.first[:, part].contiguous()
            return self._replace(first=first, row=self.row[part], shape=shape)
        # of a transposed matrix the strides alone are
        offset = self.first.storage_offset() + part.start * self.strides[0]
        return self._replace(first=self.first.as_strided(shape, self.strides, offset), shape=shape)

    def constants(self) -> dict[str, object]:
        """Choose what the kernel function ``exponents`` is compiled for, and its run-time rank."""
        # few classes of sizes, so that a solve of any other compiles nothing
        return {
            "rank": self.rank, "RANK": self.rank if self.rank <= self.block_rank else -1,
            "BLOCK_R": self.block_rank, "PARTS": _parts(self.precision), "AXIS": self._axis,
            "ALIGNED": self._aligned,
        }  # fmt: skip

    @property
    def _axis(self) -> int:
        """The axis along which a matrix is contiguous, 2 for neither."""
        return 1 if self.rank or self.strides[1] == 1 else 0 if self.strides[0] == 1 else 2

    @property
    def _aligned(self) -> bool:
        """Whether a matrix is large and its rows are whole vectors of 16 entries."""
        n, m = self.shape
        if self.rank or self._axis == 2 or n * m < _ALIGNED_ENTRIES:
            return False
        return not any(size % 16 for size in (n, m, self.strides[1 - self._axis]))


class KernelPlan(NamedTuple):
    """An entropic plan whose cost is as the kernels read it."""

    cost: Operands
    marginals: Marginals
    potentials: Potentials  # cost units
    epsilon: float

    def rows(self, part: slice) -> "KernelPlan":
        """Restrict to some rows."""
        (a, b), (f, g) = self.marginals, self.potentials
        return self._replace(
            cost=self.cost.rows(part),
            marginals=Marginals(a[part], b),
            potentials=Potentials(f[part], g),
        )

    def row_potential(self) -> Tensor:
        """Compute the potential of the rows, (n,) exponents; -inf empties a row without mass."""
        potential = self.potentials.f - self.cost.row
        potential = torch.where(self.marginals.a > 0, potential, -torch.inf)
        return (potential * scale_of(self.epsilon)).to(self.cost.dtype)

    def column_bias(self) -> Tensor:
        """Compute potential plus log weight of the columns, (m, padded with -inf) exponents."""
        potential = (self.potentials.g - self.cost.column) * scale_of(self.epsilon)
        kind = self.cost.dtype
        return padded(potential.to(kind) + self.marginals.b.log2().to(kind), -math.inf)


def tiles_of(size: int, width: int) -> int:
    """Count the tiles of a width that cover a size."""
    # Triton's own takes ten times as long, as kernels may call it too
    return -(-size // width)


def scale_of(epsilon: float) -> float:
    """Compute the factor from cost units to base-2 exponents."""
    return math.log2(math.e) / epsilon


def operands(cost: Cost, epsilon: float, precision: ProductPrecision = "fp16x3") -> Operands:
    """Prepare a cost for the kernels: centred, scaled and split into parts."""
    # A product of two numbers split into a leading and a trailing half-precision part loses 2^-22
    # of its size, as with three tf32 products, but half precision multiplies twice as fast on half
    # the bytes. Each column of the factors is first balanced, so that both sides have the same
    # largest entry: an overflow of half precision (65,504) would need an exponent beyond 4e9. The
    # precision is that of float32 factors; float64 ones are multiplied in float64.
    scale = scale_of(epsilon)
    if isinstance(cost, DenseCost):
        zero = torch.zeros((), dtype=cost.dtype, device=cost.device)
        factor = torch.full((1,), -scale, dtype=cost.dtype, device=cost.device)
        dense: ProductPrecision = "float64" if cost.dtype == torch.float64 else "float32"
        strides = (cost.matrix.stride(0), cost.matrix.stride(1))
        return Operands(cost.matrix, factor, zero, zero, cost.shape, strides, 0, 1, dense)
    if cost.dtype == torch.float64:
        precision = "float64"
    cost = cost.centred()
    rank, block_rank = _padded_rank(cost.rank, precision)
    left, right = _balanced(cost, scale)
    return Operands(
        _split(left, rank, precision), _split(right, rank, precision), cost.row, cost.column,
        cost.shape, (0, 0), rank, block_rank, precision,
    )  # fmt: skip


def _balanced(cost: FactoredCost, scale: float) -> tuple[Tensor, Tensor]:
    """Share scale * S among factors whose columns have the same largest entry on both sides."""
    left_size, right_size = cost.left.abs().amax(0), cost.right.abs().amax(0)
    ratio = torch.sqrt(scale * right_size / left_size)
    usable = both(torch.isfinite(ratio), ratio > 0)
    ratio = torch.where(usable, ratio, math.sqrt(scale))
    return cost.left * ratio, cost.right * (inverse(ratio) * scale)


def _parts(precision: ProductPrecision) -> int:
    """Count the parts of a factor."""
    return 2 if precision == "fp16x3" else 1


def _split(factor: Tensor, rank: int, precision: ProductPrecision) -> Tensor:
    """Round a factor to parts (parts, n, rank): padded with zeros, and what rounding left over."""
    shape, dtype = (_parts(precision), len(factor), rank), _DTYPES[precision]
    split = torch.zeros(shape, dtype=dtype, device=factor.device)
    used = split[:, :, : factor.shape[1]]
    used[0] = factor
    if len(split) == 2:
        used[1] = factor - used[0]
    return split


def _padded_rank(rank: int, precision: ProductPrecision) -> tuple[int, int]:
    """Choose the padded rank, and how much of it one tile holds."""
    # Tiles of 64 keep both operands and two stages of them in shared memory at half precision;
    # wider types take 32. A product needs at least 16.
    widest = 64 if precision == "fp16x3" else 32
    block = min(widest, max(16, triton.next_power_of_2(rank)))
    return tiles_of(rank, block) * block, block


def padded_size(size: int) -> int:
    """Compute the size of a column vector in whole tiles, so that kernels need no mask."""
    return BLOCK * tiles_of(size, BLOCK)


def padded(values: Tensor, fill: float) -> Tensor:
    """Pad a vector to whole tiles."""
    result = values.new_full((padded_size(len(values)),), fill)
    result[: len(values)] = values
    return result


@cache
def whole(device: torch.device) -> Walk:
    """Make the walk over all columns; its lists are not read."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return Walk(nothing, nothing, 0, nothing)


@cache
def multiprocessors(device: torch.device) -> int:
    """Count how many programs run side by side; a token number under the interpreter."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def split_columns(
    n: int, m: int, blocks: Blocks, walk: Walk, splits: int | None = None
) -> tuple[int, int]:
    """Choose into how many shares to split the columns, and the width of a share."""
    # Lists of tiles are not split. 64 programs per multiprocessor keep the last, partly filled wave
    # small (a few per cent); a program should still have 8 tiles to walk over.
    tiles = tiles_of(m, blocks.m)
    if walk.width:
        splits = 1
    elif splits is None:
        wanted = tiles_of(64 * multiprocessors(walk.start.device), tiles_of(n, blocks.n))
        splits = min(wanted, tiles_of(tiles, 8))
    width = tiles_of(tiles, splits) * blocks.m
    return tiles_of(m, width), width


def launch_options(blocks: Blocks) -> dict[str, object]:
    """Make launch keywords; fusing a*b+c is asked for because Triton's default changes."""
    return {"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": True}


def cache_folder() -> Path:
    """Find where Triton keeps what it has compiled."""
    return Path(triton.knobs.cache.dir)


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python (TRITON_INTERPRET=1), as our CPU tests do."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
