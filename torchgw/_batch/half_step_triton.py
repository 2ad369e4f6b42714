"""Half-steps of one relaxed problem in Triton: sums of its kernel, and what they make of scalings.

Numbers of rows and of columns are lines [N] and [M], which threads compute with once. Penalties
multiply by a power of what a strict half-step would. Of partial problems each side is at most its
weights, and what is not full answers to one level, at which the plan has its mass.
"""

import triton
import triton.language as tl

from torchgw._batch.tile_triton import (
    by_columns,
    by_rows,
    line,
    read,
    sums_of_columns,
    sums_of_rows,
)

# Newton's steps to a level at most, and how many times it is looked for near another one. [L1264]
_STEPS, _TURNS = tl.constexpr(40), tl.constexpr(32)
# How far from being full points are told apart, as a logarithm: float32 ends at e^88. [L1264]
_REACH = tl.constexpr(80.0)
# A level that is further than this from where it was looked for is looked for anew, and no point
# counts as further from being full, as logarithms. [L1264]
_FAR = tl.constexpr(60.0)


@triton.jit
def through(values, memory, here, there):
    """Write numbers of rows or of columns where they are ``here``, and read them ``there``."""
    # As a line of threads they are computed with once, and beside a matrix by every thread that has
    # entries of theirs.
    tl.store(memory + here, values)
    tl.debug_barrier()
    return tl.load(memory + there)


@triton.jit
def _both(left, right, more_left, more_right):
    """Add pairs, so that two sums are one reduction."""
    return left + more_left, right + more_right


@triton.jit
def _level(weight, part, level, mass):
    """Find the level at which sum_i min(weight_i, level part_i) is ``mass``, from another one."""
    # By Newton's steps, which come from below but for the first. Where the mass is that of some
    # points exactly, rounding may leave nothing to others: then the level is where the last is
    # full.
    full, left, begun_below = weight < level * part, _STEPS, 0
    while left > 0:
        parts = tl.where(full, weight, 0.0), tl.where(full, 0.0, part)
        filled, slope = tl.reduce(parts, 0, _both)
        over = mass - filled <= tl.where(slope > 0, 0.0, -1e-6)
        level = tl.where(slope > 0, (mass - filled) / tl.where(slope > 0, slope, 1.0), level)
        before = full
        if over:
            if begun_below == 1:
                level = tl.max(tl.where(full, weight / tl.where(full, part, 1.0), 0.0), 0)
                left = 0
            else:
                level = 0.0 * mass + 1e-30
                begun_below = 1
        full = weight < level * part
        left = tl.where(tl.max((full != before).to(tl.int32), 0) > 0, left - 1, 0)
    return level


@triton.jit
def begun(weight, sums, potential, level, tau, mass, PARTIAL: tl.constexpr):
    """Compute logarithms of what a half-step multiplies points by, as ``Relaxed.scaling``."""
    # And what the next ones have to know of the potentials that this leads to. The logarithm of the
    # level is looked for from `level` on.
    used = weight > 0
    exact = tl.where(used, tl.log(tl.where(used, weight / (sums + 1e-37), 1.0)), 0.0)
    if PARTIAL:
        brim = exact + potential
        lowest = tl.min(tl.where(used, brim, float("inf")), 0)
        highest = tl.max(tl.where(used, brim, -float("inf")), 0)
        left = _TURNS
        while left > 0:
            # where points are full may lie far apart: they are told apart near the level
            near = tl.minimum(tl.maximum(level, lowest), highest)
            part = weight * tl.exp(tl.minimum(tl.maximum(near - brim, -_REACH), _REACH))
            level = near + tl.log(_level(weight, part, 0.0 * near + 1.0, mass))
            left = tl.where(tl.abs(level - near) > _FAR, left - 1, 0)
        grown = tl.where(used, tl.minimum(exact, level - potential), 0.0)
        known = tl.exp(tl.minimum(tl.maximum(level - potential - grown, -_FAR), _FAR))
    else:
        grown = tl.where(used, tau * exact + (tau - 1.0) * potential, 0.0)
        known = (tau - 1.0) * (potential + grown)
    return grown, known


@triton.jit
def half_step(weight, sums, known, tau, PARTIAL: tl.constexpr):
    """Compute what a half-step multiplies points by: at most what is ``known``, if PARTIAL."""
    used = weight > 0
    ratio = tl.where(used, weight / (sums + 1e-37), 1.0)
    factor = tl.minimum(ratio, known) if PARTIAL else tl.exp(tau * tl.log(ratio) + known)
    return tl.where(used, factor, 1.0)


@triton.jit
def filled(weight, sums, known, level, tau, mass, PARTIAL: tl.constexpr):
    """Compute a half-step of rows and, if PARTIAL, the level at which the plan has its mass."""
    # Columns keep theirs: a plan stays the same where the two levels move against each other.
    if PARTIAL:
        level = _level(weight, known * (sums + 1e-37), level, mass)
        known = level * known
    return half_step(weight, sums, known, tau, PARTIAL), level


@triton.jit
def further(old, new, excess):
    """Go further than from old to new, within a factor of two; how much further is rounded."""
    grown = (new - old).to(tl.float32) / tl.maximum(old.to(tl.float32), 1e-37)
    return new + new * (excess * tl.minimum(tl.maximum(grown, -0.5), 1.0))


@triton.jit
def _kept_column_sums(
    kept, s, scaled, parts, shift,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Compute sum_i K_ij s_i of a matrix in memory, of which each thread adds up columns."""
    GROUPS: tl.constexpr = THREADS * WIDE // COLUMNS
    CHUNK: tl.constexpr = min(16, ROWS // GROUPS)
    down, across = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tl.store(scaled + down, s)
    tl.debug_barrier()
    sums = tl.zeros([WIDE, GROUPS, COLUMNS // WIDE], kept.dtype.element_ty)
    for begin in range(0, ROWS, CHUNK * GROUPS):
        part = read(kept + begin * COLUMNS, shift, CHUNK, WIDE, GROUPS, COLUMNS // WIDE)
        sums += tl.sum(part * by_rows(tl.load(scaled + begin + line(CHUNK, GROUPS))), 0)
    columns, group = line(WIDE, COLUMNS // WIDE), tl.arange(0, GROUPS)
    tl.store(parts + columns[:, None, :] + group[None, :, None] * COLUMNS, sums)
    tl.debug_barrier()
    found = tl.load(parts + across)
    for other in tl.static_range(1, GROUPS):
        found += tl.load(parts + other * COLUMNS + across)
    return found


@triton.jit
def column_sums(
    matrix, kept, s, scaled, parts, shift,
    KEPT: tl.constexpr, RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Compute sum_i K_ij s_i of a matrix on chip or, if KEPT, of its copy in memory."""
    # On chip they are added up from thread to thread, which takes longer where the copy stays in
    # the cache beside.
    if KEPT:
        WIDE: tl.constexpr = max(min(KEPT, CI * CT), CI // RT)
        found = _kept_column_sums(kept, s, scaled, parts, shift, WIDE, RI * RT, CI * CT, RT * CT)
    else:
        here = through(s, scaled, tl.arange(0, RI * RT), line(RI, RT))
        here = sums_of_columns(matrix * by_rows(here))
        found = through(here, parts, line(CI, CT), tl.arange(0, CI * CT))
    return found


@triton.jit
def row_sums(
    matrix, t, scaled, parts,
    RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Compute sum_j K_ij t_j of a matrix on chip."""
    found = through(t, scaled, tl.arange(0, CI * CT), line(CI, CT))
    found = sums_of_rows(matrix * by_columns(found))
    return through(found, parts, line(RI, RT), tl.arange(0, RI * RT))
