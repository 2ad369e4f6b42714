"""A plan known by its largest entries, as a file holds it."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import scipy
import torch
from torch import Tensor

from torchgw._boundary.checks import check_draw, check_threshold
from torchgw._errors import UnsupportedError
from torchgw._plans.contract import Anchors, handed_out
from torchgw._plans.transport import DualPlan, TransportPlan
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._tensors.draws import sample_categories
from torchgw._tensors.sparse import sparse_tensor
from torchgw._typing import Marginals, Potentials


class SparsePlan(DualPlan):
    """The largest entries of each row of a plan; others count as zero.

    What :func:`torchgw.load` returns for a result whose cost was a stored matrix, unless it was
    saved with ``dense=True``. It is read like a :class:`torchgw.TransportPlan`, of the entries that
    are kept; the cost is gone, and with it :meth:`rounded`.

    Parameters
    ----------
    entries : Tensor, sparse COO, shape (n, m), float64
    potentials : Potentials
    marginals : Marginals
    epsilon : float
    """

    _unmapped = (
        "have no entry in this sparse plan, so they are mapped nowhere. Save the result with "
        "`result.save(path, dense=True)`."
    )

    def __init__(
        self, entries: Tensor, potentials: Potentials, marginals: Marginals, epsilon: float
    ) -> None:
        self.entries = entries.coalesce()
        values, places = self.entries.values(), self.entries.indices()
        self.masses = Marginals(
            *(
                values.new_zeros(size).index_add_(0, place, values)
                for place, size in zip(places, self.shape, strict=True)
            )
        )
        self.potentials, self.weights, self.epsilon = potentials, marginals, epsilon
        self.backend = EagerBackend()

    @classmethod
    def of(cls, plan: TransportPlan, k: int, share: float) -> SparsePlan:
        """Keep of each row the k largest entries that carry at least ``share`` of its mass."""
        values, columns = plan.giving(in_numpy=False).topk(min(k, plan.shape[1]))
        kept = values >= share * values.sum(1, keepdim=True)
        rows = torch.arange(plan.shape[0], device=plan.device)[:, None].expand_as(columns)
        places = torch.stack([rows[kept], columns[kept]])
        entries = sparse_tensor(places, values[kept].double(), plan.shape)
        return cls(entries, plan.potentials, plan.weights, plan.epsilon)

    @property
    def cost(self) -> NoReturn:
        """Refuse: only the largest entries of the plan were stored."""
        raise UnsupportedError(
            "This plan was stored by its largest entries, without its cost. Save the result with "
            "`result.save(path, dense=True)`."
        )

    def _like(self) -> Tensor:
        return self.entries

    @property
    def T(self) -> SparsePlan:
        (f, g), (a, b) = self.potentials, self.weights
        turned = SparsePlan(self.entries.t(), Potentials(g, f), Marginals(b, a), self.epsilon)
        return turned.giving(self.in_numpy)

    def replaced(
        self, potentials: Potentials, weights: Marginals, masses: Marginals | None = None
    ) -> SparsePlan:
        """Return the plan of other potentials and weights, its entries scaled accordingly."""
        values, places = self.entries.values(), self.entries.indices()
        sides = zip(places, potentials, self.potentials, weights, self.weights, strict=True)
        for place, now, before, weight, old in sides:
            share = torch.where(old > 0, weight / old, 0.0)
            values = values * (share * ((now - before) / self.epsilon).exp())[place]
        entries = sparse_tensor(places, values, self.shape)
        return SparsePlan(entries, potentials, weights, self.epsilon)

    def __repr__(self) -> str:
        """Say what the plan is."""
        return (
            f"SparsePlan(shape={self.shape}, epsilon={self.epsilon:.4g}, "
            f"{self.entries.values().numel():,} entries, {self.dtype}, {self.device})"
        )

    @handed_out
    def sample(self, count: int, generator: torch.Generator) -> Anchors:
        check_draw(count, generator, self.device)
        drawn = sample_categories(self.entries.values(), count, generator)
        source, target = self.entries.indices()[:, drawn]
        return Anchors(source, target)

    def stored(self) -> Tensor:
        return self.entries.to_dense()

    def to_sparse(self, k: int | None = None, threshold: float = 1e-4) -> scipy.sparse.csr_array:
        """Return the entries, or those that :meth:`torchgw.TransportPlan.to_sparse` keeps."""
        if k is not None:
            return super().to_sparse(k)
        check_threshold(threshold)
        rows, columns = self.entries.indices().cpu().numpy()
        data = self.entries.values().cpu().numpy()
        mass, largest = np.bincount(rows, data, minlength=self.shape[0]), np.zeros(self.shape[0])
        np.maximum.at(largest, rows, data)
        kept = (data >= threshold * mass[rows]) | (data == largest[rows])
        entries = (data[kept], (rows[kept], columns[kept]))
        return scipy.sparse.csr_array(entries, shape=self.shape)

    def rounded(self, a: Any = None, b: Any = None) -> NoReturn:
        """Refuse: rounding works on the whole plan."""
        raise UnsupportedError(
            "A plan stored by its largest entries cannot be rounded to marginals. Save the "
            "result with `result.save(path, dense=True)`."
        )

    def _product(self, table: Tensor) -> Tensor:
        found: Tensor = torch.sparse.mm(self.entries, table)
        return found

    def _largest(self, k: int) -> tuple[Tensor, Tensor]:
        """Find the k largest entries of each row, of the entries alone if all rows have so many."""
        rows, columns = self.entries.indices()
        count = torch.bincount(rows, minlength=self.shape[0])
        if int(count.min()) < k:
            return super()._largest(k)
        place = torch.arange(len(rows), device=self.device) - (count.cumsum(0) - count)[rows]
        values = self.entries.values().new_full((self.shape[0], int(count.max())), -torch.inf)
        values[rows, place] = self.entries.values()
        table = torch.zeros_like(values, dtype=torch.int64)
        table[rows, place] = columns
        best = values.topk(k, dim=1)
        return best.values, table.gather(1, best.indices)

    def _block(self, index: Tensor | slice) -> Tensor:
        if isinstance(index, slice):
            index = torch.arange(*index.indices(self.shape[0]), device=self.device)
        return self.entries.index_select(0, index).to_dense()
