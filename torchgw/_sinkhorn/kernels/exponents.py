"""What the Triton kernels share: tiles of exponents, exponentials, log-sum-exps.

Everything inside a kernel is in base 2. With scale = log2(e) / epsilon, a potential enters as
p_i = (f_i - row_i) * scale and an entry of the plan is

    P_ij = a_i b_j exp2(p_i + p_j + S_ij),    S = left . right  or  -scale * C,                (T1)

so that an exponential and a logarithm are one hardware instruction each.
"""

import triton
import triton.language as tl


@triton.jit
def logsumexp_step(
    best,  # [BLOCK_N] running maximum, -inf at first
    total,  # [BLOCK_N] sum of exp2(x - best) so far
    x,  # [BLOCK_N, BLOCK_M] new exponents
):
    """Add a tile to an online base-2 log-sum-exp; rows that are all -inf stay so."""
    top = tl.maximum(best, tl.max(x, 1))
    shift = tl.where(top == -float("inf"), 0.0, top)
    total = total * tl.exp2(best - shift) + tl.sum(tl.exp2(x - shift[:, None]), 1)
    return top, total


@triton.jit
def walk_range(
    lists,  # [row blocks, 3] as in Walk
    width,  # columns of one split
    m,
    WALK: tl.constexpr,  # points of a block of the lists; 0 for all columns
    BLOCK_N: tl.constexpr,
):
    """Find this program's rows, and where its walk over tiles begins and ends, in columns."""
    first = tl.program_id(0) * BLOCK_N
    if WALK == 0:
        begin = tl.program_id(1) * width
        return first + tl.arange(0, BLOCK_N), begin, tl.minimum(begin + width, m)
    else:  # noqa: RET505 - Triton compiles both branches unless they are exclusive
        mine = lists + first // WALK * 3
        first = (tl.load(mine) * WALK + first % WALK).to(tl.int32)
        rows = first + tl.arange(0, BLOCK_N)
        return rows, tl.load(mine + 1) * WALK, tl.load(mine + 2) * WALK


@triton.jit
def walk_column(
    tiles,  # [kept] as in Walk
    position,  # of a walk, a multiple of BLOCK_M
    WALK: tl.constexpr,
):
    """Find the first column of the tile at a position of the walk."""
    if WALK == 0:
        return position
    else:  # noqa: RET505
        return (tl.load(tiles + position // WALK) * WALK + position % WALK).to(tl.int32)


@triton.jit
def load_left(
    first,  # [PARTS, n, rank] left factors, row-major
    rows,  # [BLOCK_N] row numbers
    start,  # first column of the factors
    n,
    rank,  # columns of the factors, a compile-time number if one tile holds them
    BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Load [BLOCK_N, BLOCK_R] of the leading and of the trailing part (the same if only one)."""
    column = start + tl.arange(0, BLOCK_R)
    row = rows.to(tl.int64)[:, None]
    inside = (rows < n)[:, None]
    leading = tl.load(first + row * rank + column[None, :], mask=inside, other=0.0)
    if PARTS == 2:
        # n may be a compile-time number, which has no dtype to widen: the row carries 64 bits
        return leading, tl.load(first + (row + n) * rank + column[None, :], mask=inside, other=0.0)
    else:  # noqa: RET505
        return leading, leading


@triton.jit
def _multiply(
    products,  # [BLOCK_N, BLOCK_M] accumulator
    leading,  # [BLOCK_N, BLOCK_R]
    trailing,  # [BLOCK_N, BLOCK_R]
    other_leading,  # [BLOCK_M, BLOCK_R]
    other_trailing,  # [BLOCK_M, BLOCK_R]
    PARTS: tl.constexpr,
):
    """Add left . right, the small cross terms first."""
    kind: tl.constexpr = products.dtype
    if PARTS == 2:
        products = tl.dot(
            trailing, other_leading.T, products, input_precision="ieee", out_dtype=kind
        )
        products = tl.dot(
            leading, other_trailing.T, products, input_precision="ieee", out_dtype=kind
        )
    return tl.dot(leading, other_leading.T, products, input_precision="ieee", out_dtype=kind)


@triton.jit
def exponents(
    first,  # [PARTS, n, rank] left factors, or the (n, m) matrix
    second,  # [PARTS, m, rank] right factors, or [1] -scale
    leading,  # [BLOCK_N, BLOCK_R] from load_left, read only if one tile holds the rank
    trailing,  # [BLOCK_N, BLOCK_R]
    bias,  # [BLOCK_M] added to every row
    rows,  # [BLOCK_N] row numbers
    columns,  # [BLOCK_M] column numbers
    n,
    m,
    stride_n,  # of the matrix, in elements, 64-bit
    stride_m,
    rank,  # columns of the factors, read if one tile does not hold them
    RANK: tl.constexpr,  # the same if it does, -1 if not, 0 for a matrix
    BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
    AXIS: tl.constexpr,  # along which a matrix is contiguous: 0, 1, or 2 for neither
    ALIGNED: tl.constexpr,  # whether its sizes and strides are multiples of 16
):
    """Compute S_ij + bias_j of (T1), shape [BLOCK_N, BLOCK_M]."""
    if RANK == 0:
        i, j = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
        if ALIGNED:
            # the same numbers, but the compiler sees what divides them
            n, m = n // 16 * 16, m // 16 * 16
            stride_n, stride_m = stride_n // 16 * 16, stride_m // 16 * 16
        at = first + i + j * stride_m
        if AXIS != 0:
            at = first + i * stride_n + (j if AXIS == 1 else j * stride_m)
        inside = (rows < n)[:, None] & (columns < m)[None, :]
        return tl.load(at, mask=inside, other=0.0) * tl.load(second) + bias[None, :]
    else:  # noqa: RET505
        products = tl.zeros((rows.shape[0], columns.shape[0]), bias.dtype)
        if RANK == BLOCK_R:
            other, rest = load_left(second, columns, 0, m, RANK, BLOCK_R, PARTS)
            products = _multiply(products, leading, trailing, other, rest, PARTS)
        else:
            for start in range(0, rank, BLOCK_R):
                own, own_rest = load_left(first, rows, start, n, rank, BLOCK_R, PARTS)
                other, rest = load_left(second, columns, start, m, rank, BLOCK_R, PARTS)
                products = _multiply(products, own, own_rest, other, rest, PARTS)
        return products + bias[None, :]
