"""Plans made of others: with known pairs of points beside, or through a third space."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from torchgw._errors import UnsupportedError
from torchgw._plans.contract import Plan
from torchgw._plans.given import SparsePlan, places_in
from torchgw._plans.transport import DualPlan, TransportPlan
from torchgw._typing import Indices, Marginals, Potentials


class _Pairs:
    """Entries of known pairs beside those of a plan of the points that are left."""

    inner: Any  # a plan (n - k, m - k)
    pairs: Indices
    kept: Indices
    mass: Tensor  # (k,) of the pairs

    @property
    def shape(self) -> tuple[int, int]:
        n, m = self.inner.shape
        return n + len(self.mass), m + len(self.mass)

    def _like(self) -> Plan:
        return self.inner

    def _product(self, table: Tensor) -> Tensor:
        found = self.inner._product(table[self.kept.target])
        whole: Tensor = found.new_zeros(self.shape[0], table.shape[1])
        paired = self.mass[:, None].to(found.dtype) * table[self.pairs.target].to(found.dtype)
        return whole.index_copy(0, self.kept.source, found).index_copy(0, self.pairs.source, paired)

    def _block(self, index: Tensor | slice) -> Tensor:
        n, m = self.shape
        if isinstance(index, slice):
            index = torch.arange(*index.indices(n), device=self.mass.device)
        place = places_in(self.kept.source, n)[index]
        rows = torch.zeros(len(index), m, dtype=self.inner.dtype, device=self.inner.device)
        left = (place >= 0).nonzero()[:, 0]
        rows[left[:, None], self.kept.target] = self.inner._block(place[left])
        of_pairs = places_in(self.pairs.source, n)[index]
        here = (of_pairs >= 0).nonzero()[:, 0]
        number = of_pairs[here]
        rows[here, self.pairs.target[number]] = self.mass[number].to(rows.dtype)
        return rows


class PairedPlan(_Pairs, DualPlan):
    """A plan of some points, and pairs of the others that hold all of each other's mass.

    Entries of known points with any other are exactly zero. Nothing (n, m) is stored.

    Parameters
    ----------
    inner : TransportPlan or SparsePlan, shape (n - k, m - k)
        The plan of the points that are left.
    pairs, kept : Indices
        Rows and columns of the k pairs, and of the points of ``inner``, ascending.
    potentials : Potentials, shapes (n,) and (m,)
    weights : Marginals, shapes (n,) and (m,)
    paired_cost : Tensor, shape (k,), float64
        Reduced costs of the pairs: their mass is a b exp((f + g - cost) / epsilon).
    """

    def __init__(
        self,
        inner: TransportPlan | SparsePlan,
        pairs: Indices,
        kept: Indices,
        potentials: Potentials,
        weights: Marginals,
        paired_cost: Tensor,
    ) -> None:
        self.inner, self.pairs, self.kept = inner, pairs, kept
        self.potentials, self.weights, self.paired_cost = potentials, weights, paired_cost
        self.epsilon, self.backend = inner.epsilon, inner.backend
        (i, j), (f, g), (a, b) = pairs, potentials, weights
        exponent = (f[i] + g[j] - paired_cost) / inner.epsilon
        self.mass = a[i] * b[j] * exponent.exp()
        self.masses = Marginals(
            *(
                weight.index_copy(0, index, self.mass).index_copy(0, rest, part)
                for weight, index, rest, part in zip(
                    weights, pairs, kept, inner.masses, strict=True
                )
            )
        )

    @property
    def cost(self) -> NoReturn:
        """Refuse: pairs that may hold no mass have no cost."""
        raise UnsupportedError(
            "With known `pairs` no cost of all points was made: `lazy_plan.inner.cost` is that of "
            "the points that are left, `lazy_plan.kept`."
        )

    @property
    def T(self) -> PairedPlan:
        """The plan from target to source."""
        turned = PairedPlan(
            self.inner.T, Indices(*self.pairs[::-1]), Indices(*self.kept[::-1]),
            Potentials(*self.potentials[::-1]), Marginals(*self.weights[::-1]), self.paired_cost,
        )  # fmt: skip
        return turned.giving(self.in_numpy)

    def replaced(
        self, potentials: Potentials, weights: Marginals, masses: Marginals | None = None
    ) -> PairedPlan:
        """Return the plan of other potentials and weights on the same costs."""
        i, j = self.kept
        inner = self.inner.replaced(
            Potentials(potentials.f[i], potentials.g[j]),
            Marginals(weights.a[i], weights.b[j]),
            masses and Marginals(masses.a[i], masses.b[j]),
        )
        return PairedPlan(inner, self.pairs, self.kept, potentials, weights, self.paired_cost)

    def rounded(self, a: Any = None, b: Any = None) -> Plan:
        """Return the plan moved to exact marginals, those of the solve; pairs stay as they are."""
        if a is not None or b is not None:
            raise UnsupportedError(
                "A plan with known `pairs` holds the weights of the solve, and cannot be rounded "
                "to others. Leave `a` and `b` out."
            )
        return _Joined(self.inner.rounded(), self).giving(self.in_numpy)

    def __repr__(self) -> str:
        """Say what the plan is without computing it."""
        return f"PairedPlan(shape={self.shape}, {len(self.mass)} known pairs, rest={self.inner})"

    def _largest(self, k: int) -> tuple[Tensor, Tensor]:
        if k > self.inner.shape[1]:
            return super()._largest(k)
        n, (best, columns) = self.shape[0], self.inner._largest(k)
        values = best.new_zeros(n, k)
        # zeros of a known point are those of the first columns that are not its partner
        places = torch.arange(k, device=self.device).repeat(n, 1)
        values[self.kept.source], places[self.kept.source] = best, self.kept.target[columns]
        (i, j), first = self.pairs, torch.arange(k, device=self.device)
        places[i] = torch.where(first == j[:, None], 0, first)
        values[i, 0], places[i, 0] = self.mass.to(values), j
        return values, places

    def _row_masses(self) -> Tensor:
        return self.masses.a

    def _partners(self, source: Tensor, generator: torch.Generator) -> Tensor:
        partner = torch.full((self.shape[0],), -1, device=self.device)
        partner[self.pairs.source] = self.pairs.target
        found, place = partner[source], places_in(self.kept.source, self.shape[0])
        left = found < 0
        drawn = self.inner._partners(place[source[left]], generator)
        found[left] = self.kept.target[drawn]
        return found


class _Joined(_Pairs, Plan):
    """Known pairs beside a plan of the others that has no potentials."""

    def __init__(self, inner: Plan, known: _Pairs) -> None:
        self.inner, self.pairs, self.kept, self.mass = inner, known.pairs, known.kept, known.mass

    @property
    def T(self) -> _Joined:
        turned = _Joined(self.inner.T, self)
        turned.pairs, turned.kept = Indices(*self.pairs[::-1]), Indices(*self.kept[::-1])
        return turned.giving(self.in_numpy)


class ComposedPlan(Plan):
    """P = A' diag(1 / w) B of plans A (c, n) and B (c, m) from one space of masses w (c,).

    Nothing of shape (n, m) is stored.
    """

    def __init__(self, near: Plan, far: Plan, masses: Tensor, *, in_numpy: bool = False) -> None:
        self.near, self.far = (plan.giving(in_numpy=False) for plan in (near, far))
        self.masses, self.in_numpy = masses, in_numpy

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.near.shape[1], self.far.shape[1]

    def _like(self) -> Tensor:
        return self.masses

    @property
    def T(self) -> ComposedPlan:
        """The plan from target to source."""
        return ComposedPlan(self.far, self.near, self.masses, in_numpy=self.in_numpy)

    def _product(self, table: Tensor) -> Tensor:
        share = torch.where(self.masses > 0, 1 / self.masses, 0.0)[:, None]
        return self.near.T @ (share * (self.far @ table))
