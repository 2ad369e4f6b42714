"""Which blocks of rows a rank computes: shares of the tiles, not of the rows."""

from __future__ import annotations

from torch import Tensor

from torchgw._sinkhorn.tiles.bounds import TileLists
from torchgw._tensors.ranks import Ranks

__all__ = ["Cut"]


class Cut:
    """The blocks of rows that are this rank's, of about as many tiles as those of the others.

    Each block is computed by itself, so that the bits do not depend on where the cuts are. Without
    ranks all blocks are here.
    """

    def __init__(self, ranks: Ranks | None, lists: TileLists) -> None:
        work = lists.start.diff().tolist()
        self._ranks = ranks
        owned = [range(len(work))] if ranks is None else ranks.own(len(work), work)
        self._counts = [len(blocks) for blocks in owned]
        self.own = owned[0 if ranks is None else ranks.rank]

    def gather(self, values: Tensor) -> Tensor:
        """Join values (blocks, ...), of which each rank has filled in its own."""
        if self._ranks is None:
            return values
        return self._ranks.gather(values[self.own.start : self.own.stop], self._counts)
