"""How a matrix of one small problem lies on chip: each thread holds a rectangle of it.

Rows are numbered by (inner, thread) and columns likewise, so that a matrix is a tensor [RI, CI, RT,
CT]: thread (rt, ct) holds RI x CI entries, and most of a sum over rows or columns is its own. It is
loaded as [RI * CI, RT * CT], of which compilers give each thread a column; as a matrix of rows and
columns its layout would be the compiler's choice, with several times the instructions. In memory
matrices have as many rows and columns as blocks have, powers of two, so that nothing is masked and
addresses are constants; ``shift``, which is zero, keeps it from compilers that they are aligned, or
they would read four columns at once and give a thread four. [L532]
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """The rectangle of a thread, and how many threads there are."""

    RI: int
    CI: int
    RT: int
    CT: int

    @property
    def warps(self) -> int:
        """Count the warps that hold the matrix."""
        return self.RT * self.CT // 32


def tile_of(rows: int, columns: int, entries: int, across: int = 16) -> Tile:
    """Choose tiles for a matrix, as square as they can be, of so many entries at most."""
    # Two threads for each row at least: small matrices are waited for more than computed. [L533]
    side = 1 << (rows.bit_length() + columns.bit_length() - 2) // 2
    threads = max(2 * side, rows * columns // entries)
    across = min(columns, 8 if threads < 128 else across)
    down = min(rows, threads // across)
    across = threads // down
    return Tile(rows // down, columns // across, down, across)


def tiles_of(n: int, m: int, entries: int, across: int = 16) -> tuple[dict[str, int], int]:
    """Choose tiles for matrices (n, m) and (m, m), by name, and the warps that hold them."""
    square = tile_of(m, m, entries)
    tile = tile_of(n, m, max(1, n * m // (32 * square.warps)), across)
    names = {f"SQUARE_{name}": size for name, size in square._asdict().items()}
    return tile._asdict() | names, max(tile.warps, square.warps)


def padded(values: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Fill the last axes up to some sizes by zeros; what has them is not copied."""
    missing = [size - old for size, old in zip(sizes, values.shape[-len(sizes) :], strict=True)]
    if not any(missing):
        return values.contiguous()
    return torch.nn.functional.pad(values, [part for end in missing[::-1] for part in (0, end)])


@triton.jit
def problem(x, y, a, b, i, j, N: tl.constexpr, M: tl.constexpr):
    """Find the problem of a program, and where its tables and weights begin."""
    number = tl.program_id(0).to(tl.int64)
    row, column = tl.load(i + number), tl.load(j + number)
    return number, x + row * N * N, y + column * M * M, a + row * N, b + column * M


@triton.jit
def line(INNER: tl.constexpr, THREADS: tl.constexpr):
    """List rows as [RI, RT], or columns as [CI, CT]."""
    return tl.arange(0, INNER)[:, None] * THREADS + tl.arange(0, THREADS)[None, :]


@triton.jit
def _places(RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr):
    """Find where entries are in memory, [RI * CI, RT * CT]."""
    held, thread = tl.arange(0, RI * CI)[:, None], tl.arange(0, RT * CT)[None, :]
    fixed = held // CI * (RT * CI * CT) + held % CI * CT
    return fixed + thread // CT * (CI * CT) + thread % CT


@triton.jit
def read(matrix, shift, RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr):
    """Load a matrix."""
    return tl.reshape(tl.load(matrix + shift + _places(RI, CI, RT, CT)), [RI, CI, RT, CT])


@triton.jit
def write(
    matrix, values, shift,
    RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Store a matrix."""
    tl.store(matrix + shift + _places(RI, CI, RT, CT), tl.reshape(values, [RI * CI, RT * CT]))


@triton.jit
def write_row(
    row, values, group: tl.constexpr, place, shift,
    RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Store row ``group`` * RT + ``place`` of a float32 matrix."""
    # a sum of bits, all but one of which are zeros to the compiler: one register is left
    bits = values.to(tl.int32, bitcast=True)
    inner = tl.arange(0, RI)[:, None, None, None]
    chosen = tl.sum(tl.where(inner == group, bits, 0), 0).to(tl.float32, bitcast=True)
    held, thread = tl.arange(0, CI)[:, None], tl.arange(0, RT * CT)[None, :]
    where = row + shift + held * CT + thread % CT
    tl.store(where, tl.reshape(chosen, [CI, RT * CT]), mask=thread // CT == place)


@triton.jit
def by_rows(values):
    """Spread numbers of rows [RI, RT] over a matrix."""
    return values[:, None, :, None]


@triton.jit
def by_columns(values):
    """Spread numbers of columns [CI, CT] over a matrix."""
    return values[None, :, None, :]


@triton.jit
def sums_of_rows(matrix):
    """Sum each row, [RI, RT]."""
    return tl.sum(tl.sum(matrix, 1), 2)


@triton.jit
def sums_of_columns(matrix):
    """Sum each column, [CI, CT]."""
    return tl.sum(tl.sum(matrix, 0), 1)


@triton.jit
def total(matrix):
    """Sum a matrix, its entries on each thread first."""
    return tl.sum(tl.sum(tl.sum(tl.sum(matrix, 0), 0), 1), 0)


@triton.jit
def distance(left, right):
    """Sum how far apart numbers of columns [CI, CT] are."""
    return tl.sum(tl.sum(tl.abs(left - right), 0), 0)


@triton.jit
def own(table, mass, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Sum D_ij^2 p_i p_j and D_ij p_i p_j of a table (SIZE, SIZE) and masses in memory."""
    kind = table.dtype.element_ty
    columns = tl.arange(0, SIZE)
    across = tl.load(mass + columns)
    squares, means = tl.zeros([ROWS], kind), tl.zeros([ROWS], kind)
    for begin in range(0, SIZE, ROWS):
        rows = begin + tl.arange(0, ROWS)
        values = tl.load(table + rows[:, None] * SIZE + columns[None, :])
        down = tl.load(mass + rows)
        squares += tl.sum(values * values * across[None, :], 1) * down
        means += tl.sum(values * across[None, :], 1) * down
    return tl.sum(squares, 0), tl.sum(means, 0)


@triton.jit
def coarse(values):
    """Keep the digits of float32 that a tensor core reads."""
    return (values.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _product(
    left, right, mass, own_costs, ROWS: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Multiply the transpose of a matrix (INNER, ROWS) by a symmetric one, both in memory."""
    # Tensor cores read tf32 of the second along its inner dimension, as a symmetric one lies, in
    # three parts that have the digits of float32. Half precision is added up in float32, and
    # float64 in its own. Writes sum_k D_ik^2 p_k as well, D the symmetric one, if there is a
    # `mass`.
    rows, columns, middle = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    left += rows[:, None] + middle[None, :] * ROWS
    right += middle[:, None] + columns[None, :] * INNER
    kind = right.dtype.element_ty
    total = tl.zeros([ROWS, COLUMNS], tl.float64 if kind == tl.float64 else tl.float32)
    squares = tl.zeros([CHUNK, COLUMNS], total.dtype)
    for begin in range(0, INNER, CHUNK):
        here, there = tl.load(left), tl.load(right)
        if mass is not None:
            plain = there.to(total.dtype)
            squares += plain * plain * tl.load(mass + begin + middle)[:, None]
        if kind == tl.float16:
            total = tl.dot(here, there, total)
        elif kind == tl.float32:
            # tf32x3 of the compiler has a second accumulator, for which no registers are left
            coarse_left, coarse_right = coarse(here), coarse(there)
            total = tl.dot(here - coarse_left, coarse_right, total, input_precision="tf32")
            total = tl.dot(coarse_left, there - coarse_right, total, input_precision="tf32")
            total = tl.dot(coarse_left, coarse_right, total, input_precision="tf32")
        else:
            total = tl.dot(here, there, total, input_precision="ieee", out_dtype=kind)
        left += CHUNK * ROWS
        right += CHUNK
    if mass is not None:
        tl.store(own_costs + columns, tl.sum(squares, 0))
    return total


@triton.jit(noinline=True)
def cross(
    x, plan, y, half, out, N: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr,
    masses=None, own_costs=None,
):  # fmt: skip
    """Write X P Y of a matrix (N, M) and symmetric X and Y of its dtype, through memory."""
    # Held on chip, tiles of products would leave no registers to what is iterated. Waits for what
    # the program has stored before, and until its own stores are seen; `half`, where the product of
    # two is kept, and `out` may be the plan. A call, as is `invert`: inlined, Triton takes twice as
    # long to compile what it is in. [L861] Where `masses` (N + M) of rows and columns are given,
    # writes sum_k D_ik^2 p_k of either side, too.
    down, across = tl.arange(0, N), tl.arange(0, M)
    tl.debug_barrier()
    product = _product(plan, x, masses, own_costs, M, N, N, CHUNK)
    tl.debug_barrier()
    tl.store(half + across[:, None] * N + down[None, :], product.to(half.dtype.element_ty))
    tl.debug_barrier()
    if masses is not None:
        masses += N
        own_costs += N
    product = _product(half, y, masses, own_costs, N, M, M, CHUNK)
    tl.debug_barrier()
    tl.store(out + down[:, None] * M + across[None, :], product)
    tl.debug_barrier()
