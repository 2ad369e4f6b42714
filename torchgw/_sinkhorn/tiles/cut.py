"""Which blocks of rows a rank computes: shares of the tiles, not of the rows."""

from __future__ import annotations

from torch import Tensor

from torchgw._tensors.ranks import Ranks, pieces


class Cut:
    """The rows that are this rank's, of about as many tiles as those of the others.

    They are whole pieces of whole blocks, which are the same for any number of ranks. Without ranks
    all rows are here.
    """

    def __init__(self, ranks: Ranks | None, start: Tensor, n: int, width: int) -> None:
        # ``start`` says where the list of each block begins, as in a walk
        parts, owned, rank = [slice(0, n)], [range(1)], 0
        if ranks is not None:
            parts, first, rank = pieces(n, width), start.tolist(), ranks.rank
            work = [first[-(-part.stop // width)] - first[part.start // width] for part in parts]
            owned = ranks.own(len(parts), work)
        ends = [0, *(parts[own.stop - 1].stop if own.stop else 0 for own in owned)]
        block_ends = [-(-end // width) for end in ends]
        self._ranks = ranks
        self._counts, self._block_counts = (
            [after - before for before, after in zip(these, these[1:], strict=False)]
            for these in (ends, block_ends)
        )
        self.rows = slice(ends[rank], ends[rank + 1])  # from the first of a block on
        self.own = slice(block_ends[rank], block_ends[rank + 1])  # selects the blocks
        self.blocks = range(block_ends[rank], block_ends[rank + 1])
        origin = self.rows.start  # of the pieces, as places within the rows
        self.pieces = [slice(parts[k].start - origin, parts[k].stop - origin) for k in owned[rank]]

    def join(self, own: Tensor) -> Tensor:
        """Join values of the rows of all ranks, (n, ...), given one's own."""
        return own if self._ranks is None else self._ranks.gather(own, self._counts)

    def join_blocks(self, own: Tensor) -> Tensor:
        """Join values of blocks, (blocks, ...), given those of one's own."""
        return own if self._ranks is None else self._ranks.gather(own, self._block_counts)
