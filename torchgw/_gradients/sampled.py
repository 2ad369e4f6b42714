"""The sampled gradient: unbiased, from distance columns at anchor pairs drawn from the plan."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Generator, Tensor

from torchgw._gradients import contract
from torchgw._gradients.contract import Own, Plan
from torchgw._plans.contract import Anchors
from torchgw._plans.transport import TransportPlan
from torchgw._problem.losses import MinimumCross, spread_parts
from torchgw._problem.problem import Problem, stored_matrix
from torchgw._sinkhorn.problem import Cost, FactoredCost
from torchgw._tensors.block_order import block_order
from torchgw._tensors.operations import categories_at, sample_categories
from torchgw._typing import Marginals
from torchgw.distances.base import BLOCK_ENTRIES, DistanceProvider, both_ways
from torchgw.distances.sampling import choose_points

# Strata that the noise is estimated from at most, two anchors each. [L272]
_NOISE_STRATA = 128
# For a cross term that is no product, a mean over a plan becomes a mean over pairs: so many at
# most. [L272]
_MOST_PAIRS = 2**13


def places(slots: Tensor, count: int, generator: Generator) -> Tensor:
    """Draw a place in [0, 1) for each slot, two independent ones in each of equal strata."""
    # Stratum t is [2t, 2t + 2) / count; where `count` is odd the last one is half as wide and has
    # one place. Over all slots the places are uniform: so the mean over points at these places of
    # the cumulative weight has no bias, and along an order in which neighbours are alike far less
    # variance than that over independent draws. The two of a stratum show how much.
    uniform = torch.rand(len(slots), dtype=torch.float64, device=slots.device, generator=generator)
    first = slots - slots % 2
    return (first + (count - first).clamp(max=2) * uniform) / count


def spread_slots(count: int, total: int, generator: Generator) -> Tensor:
    """Draw ``count`` distinct slots of ``total``, at equal steps."""
    device = generator.device
    offset = torch.rand((), dtype=torch.float64, device=device, generator=generator)
    steps = torch.arange(count, dtype=torch.float64, device=device) + offset
    return (steps * (total / max(1, count))).long().clamp_(max=total - 1)


class AnchorCoupling(Anchors):
    """Anchors in strata: slots 2t and 2t + 1 hold independent draws from stratum t."""

    masses = None
    empty = False

    def replaced(self, slots: Tensor, fresh: Anchors) -> AnchorCoupling:
        """Put fresh anchors into some slots: P <- (1 - share) P + share P_new, on a sample."""
        parts = zip(self, fresh, strict=True)
        return AnchorCoupling(*(old.index_copy(0, slots, new) for old, new in parts))

    def mean(self, latest: AnchorCoupling, share: float, generator: Generator) -> AnchorCoupling:
        """Replace a share of the anchors, which then are a sample of the mean (a reservoir)."""
        total = len(self.source)
        # rounded up or down so that the share is met in the mean, however small it is
        chance = torch.rand((), generator=generator, device=generator.device)
        slots = spread_slots(int(share * total + float(chance)), total, generator)
        return self.replaced(slots, Anchors(*(side[slots] for side in latest)))

    def change(self, previous: AnchorCoupling) -> Tensor:
        return self.source.new_full((), torch.nan, dtype=torch.float64)

    def perturbed(self) -> AnchorCoupling:
        return self

    def minus(self, point: AnchorCoupling) -> Tensor:
        return self.vector()

    def vector(self) -> Tensor:
        return self.source.new_empty(0, dtype=torch.float64)

    def with_vector(self, vector: Tensor) -> AnchorCoupling:
        return self


class _ProductCoupling(AnchorCoupling):
    """The product plan a x b, whose cost is known without anchors."""

    empty = True
    gradient: SampledGradient

    def mean(self, latest: AnchorCoupling, share: float, generator: Generator) -> AnchorCoupling:
        """Draw anchors of a x b, and replace a share of them."""
        return self.gradient.draw_product(generator).mean(latest, share, generator)


class SampledGradient(contract.StrictGradient):
    """Unbiased, from distance columns at anchor pairs drawn from the plan."""

    # With the mean columns x = DX a and y = DY b, which are known, and s anchors (k, l) ~ P
    #   Q = 4 alpha [(DX[:, k] - x) / s, x],    K = [DY[:, l] - y, y]
    # give the cost up to terms of rows or columns alone. The means are control variates: without
    # them the error of the anchors' own marginals is multiplied by distances as a whole, and is
    # larger than what is to be found. The source points are drawn from equal strata of their mass,
    # along an order in which neighbours are near, and so are the targets as far as the plan is a
    # map. Each iteration draws a share `redraw` of the anchors anew, and keeps the others.

    name = "sampled"
    exact = False
    n_anchors: int

    def __init__(self, problem: Problem, n_anchors: int, redraw: float) -> None:
        self._loss = problem.loss
        super().__init__(contract.visible(problem, n_anchors))
        self.n_anchors, self.redraw = n_anchors, redraw
        # anchors read directed costs in both directions by turns, as two parts of the cross term
        self._ways = both_ways(*problem.sides)
        # the order of the source points, in which neighbours are near each other
        nodes = choose_points(problem.source, problem.marginals.a, contract.FEW_COLUMNS).indices
        self._order = block_order(problem.source.columns(nodes), 1).point
        self._means = self._mean_columns(problem.marginals)
        self.row, self.column = (
            term.double() for term in contract.own_terms(problem, problem.marginals)
        )
        a, b = problem.marginals
        means = self._means
        if self.problem.loss.cross != problem.loss.cross:
            # these means do not have the floor of a singular loss
            source, target = contract.mean_distances(problem, problem.marginals)
            means = source.values, target.values
        total = (a @ means[0].double()) @ (b @ means[1].double()) / means[0].shape[1]
        self.product = contract.product_value(problem, (self.row, self.column), total)
        if problem.loss.cross is None and self._is_summed():
            # the exact sum over pairs: means over parts would not be comparable with exact values
            self.product = problem.alpha * self._sum_pairs(torch.outer(a, b), problem.marginals)

    @property
    def _parts(self) -> int:
        """Number of products whose mean is the cross term; of directed costs in both directions."""
        return self.problem.loss.parts * len(self._ways)

    def _mean_columns(self, masses: Marginals) -> tuple[Tensor, Tensor]:
        """Compute DX p and DY q as the parts see them, (n, r) and (m, r)."""
        problem = self.problem
        ways = (replace(problem, source=one, target=two) for one, two in self._ways)
        source, target = zip(*(contract.mean_distances(way, masses) for way in ways), strict=True)
        return torch.cat([m.values for m in source], 1), torch.cat([m.values for m in target], 1)

    def start(self) -> AnchorCoupling:
        """Make the coupling of a x b, which needs no anchors."""
        none = torch.empty(0, dtype=torch.int64, device=self._order.device)
        product = _ProductCoupling(none, none)
        product.gradient = self
        return product

    def linearise(self, coupling: AnchorCoupling) -> contract.LinearCost:
        """Compute the factored cost at anchors; at a x b it is known, of a rank of few parts."""
        left, right = self._means
        left = left / self._parts
        if not coupling.empty:
            # any number of pairs in a row, so those of any strata too, spread over the parts
            count = len(coupling.source)
            parts = spread_parts(count, self._parts, self._order.device)
            near, far = self._centred_columns(coupling, parts)
            left = torch.cat([near / count, left], dim=1)
            right = torch.cat([far, right], dim=1)
        cost = FactoredCost.of_products(4 * self.problem.alpha * left, right)
        return contract.LinearCost(
            contract.add_linear(cost.centred(), self.problem), self.row, self.column
        )

    def _centred_columns(self, anchors: Anchors, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Compute DX[:, k] - x and DY[:, l] - y, each pair in its own part of the cross term."""
        loss = self.problem.loss
        near, far = (
            loss.part(side, self._columns(side, index, parts), parts % loss.parts)
            - (mean if self._parts == 1 else mean[:, parts])
            for side, (index, mean) in enumerate(zip(anchors, self._means, strict=True))
        )
        return near, far

    def _columns(self, side: int, index: Tensor, parts: Tensor) -> Tensor:
        """Read the costs of a side at anchors, each in the direction of its part."""
        columns: Tensor = self._ways[0][side].columns(index)
        for way, pair in enumerate(self._ways[1:], start=1):
            back = parts // self.problem.loss.parts == way
            columns = torch.where(back, pair[side].columns(index), columns)
        return columns

    def update(
        self, plan: Plan, previous: AnchorCoupling | None, generator: Generator
    ) -> AnchorCoupling:
        """Redraw a share ``redraw`` of the anchors from the plan; all if there are to be more."""
        if previous is None or len(previous.source) != self.n_anchors:
            return AnchorCoupling(*self._draw(plan, self._slots(), generator))
        slots = spread_slots(max(1, round(self.redraw * self.n_anchors)), self.n_anchors, generator)
        return previous.replaced(slots, self._draw(plan, slots, generator))

    def draw_product(self, generator: Generator) -> AnchorCoupling:
        """Draw anchors of a x b."""
        a, b = self.problem.marginals
        source = self._order[categories_at(a[self._order], self._places(self._slots(), generator))]
        return AnchorCoupling(source, sample_categories(b, self.n_anchors, generator))

    def _slots(self) -> Tensor:
        return torch.arange(self.n_anchors, device=self._order.device)

    def _places(self, slots: Tensor, generator: Generator) -> Tensor:
        """Draw where the anchors of some slots lie in the mass of the source points."""
        where = places(slots, self.n_anchors, generator)
        if self._parts > 1:
            # each part has slots of its own: they must not always be those of the same strata
            where += torch.rand((), dtype=where.dtype, device=where.device, generator=generator)
        return where % 1

    def _draw(self, plan: Plan, slots: Tensor, generator: Generator) -> Anchors:
        return plan.sample_at(self._places(slots, generator), self._order, generator)

    def noise(self, coupling: AnchorCoupling) -> contract.CostNoise:
        # Both are of the part that depends on rows and columns together; the rest moves no plan.
        whole, known = max(1, self.n_anchors // 2), self._parts
        strata = min(whole, _NOISE_STRATA)
        first = 2 * (torch.arange(strata, device=self._order.device) * whole // strata)
        chosen = torch.stack([first, first + 1], dim=1).flatten().clamp_(max=self.n_anchors - 1)
        index = Anchors(*(side[chosen] for side in coupling))
        # the two draws of a stratum are independent, and compared in one part
        parts = spread_parts(strata, known, self._order.device).repeat_interleave(2)
        a, b = (weight.to(self.problem.dtype)[:, None] for weight in self.problem.marginals)
        near, far = self._centred_columns(index, parts)
        left, right = (
            torch.cat(pair, dim=1) for pair in zip((near, far), self._means, strict=True)
        )
        left, right = left - (a * left).sum(0), right - (b * right).sum(0)
        # <u_s v_s', u_t v_t'> of the terms of the cost, one for each anchor; those after are known
        gram = ((a * left).T @ left * ((b * right).T @ right)).double()
        count = len(chosen)
        drawn = gram[:count, :count]
        variance = (drawn.diagonal().mean() - drawn.diagonal(1)[::2].mean()).clamp_min(0)
        share = torch.full_like(gram[0], 1 / count)
        share[count:] = 1 / known
        size = (share @ gram @ share - variance / count).clamp_min(0)
        error = (variance / self.n_anchors).sqrt()
        return contract.CostNoise(
            *(4 * self.problem.alpha * torch.stack([error, size.sqrt()])).tolist()
        )

    def with_anchors(self, count: int) -> SampledGradient:
        other = copy.copy(self)
        other.n_anchors = count
        return other

    def centred_by(self, masses: Marginals) -> SampledGradient:
        """Make the gradient for plans of other marginals, whose means anchors are compared with."""
        other = copy.copy(self)
        other._means = self._mean_columns(masses)
        return other

    def evaluate(
        self, plan: TransportPlan, masses: Marginals, generator: Generator, coupling: Own = None
    ) -> contract.QuadraticValue:
        """Estimate the value from fresh anchors."""
        # Given an anchor (k, l) ~ P the mean loss of DX_ik and DY_jl over (i, j) ~ P is computed
        # exactly, so the mean of the anchors' values is unbiased, and the differences of the two of
        # each stratum tell its error. Where the cross term is no product that mean is one over
        # further pairs, the same for all anchors. Spaces of no more points than anchors are few
        # enough to be summed over, fewer where it is no product, so their value is exact.
        loss = self._loss
        if self._is_summed():
            return contract.QuadraticValue(self._sum(plan, masses), 0.0)
        anchors = self._draw(plan, self._slots(), generator)
        p, q = masses
        pairs, tables, parts = None, [], []
        if loss.cross is None:
            count = min(_MOST_PAIRS, max(2, BLOCK_ENTRIES // self.n_anchors))
            pairs = plan.sample(count, generator)
        for way in self._relations():
            left, right = (
                side.columns(index).double() for side, index in zip(way, anchors, strict=True)
            )
            if loss.cross is None:
                assert pairs is not None
                tables.append(loss(left[pairs.source], right[pairs.target]))
            else:
                cross = (loss.cross[0](left) * (plan @ loss.cross[1](right))).sum(0)
                parts.append(p @ loss.own[0](left) + q @ loss.own[1](right) - 2 * cross)
        shared = 0.0
        if tables:
            table = torch.stack(tables).mean(0)
            parts = [table.mean(0)]
            shared = float(table.mean(1).var()) / len(table)
        values = torch.stack(parts).mean(0)
        if self.n_anchors == 1:
            return contract.QuadraticValue(float(values), float("nan"))
        strata = values[: self.n_anchors // 2 * 2].reshape(-1, 2)
        variance = float(strata.diff(dim=1).square().mean()) / 2
        # an anchor more or less on a point, where strata hold few points, differs from none
        step = float(values.var()) / self.n_anchors**2
        error = (variance / self.n_anchors + shared + step) ** 0.5
        return contract.QuadraticValue(float(values.mean()), error)

    def _is_summed(self) -> bool:
        """Whether values are sums over all points."""
        n, m = self.problem.shape
        work = 0 if self._loss.cross is not None else n * m * max(n, m)
        return max(n, m) <= self.n_anchors and work <= BLOCK_ENTRIES

    def _relations(self) -> list[tuple[DistanceProvider, DistanceProvider]]:
        """Pair the relations of both sides: of pairs of pairs one way holds (p, q) and (q, p)."""
        return list(zip(*(side.relations() for side in self.problem.sides), strict=True))

    def _tables(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Give all distances of both sides, for each relation."""
        for left, right in self._relations():
            yield stored_matrix(left).double(), stored_matrix(right).double()

    def _sum(self, plan: TransportPlan, masses: Marginals) -> float:
        """Sum the loss of all pairs of pairs."""
        if self._loss.cross is None:
            return self._sum_pairs(plan.stored().double(), masses)
        found = []
        for left, right in self._tables():
            moved = plan @ self._loss.cross[1](right.T)
            cross = (moved * (plan.T @ self._loss.cross[0](left)).T).sum()
            found.append(self._own(left, right, masses) - 2 * float(cross))
        return sum(found) / len(found)

    def _sum_pairs(self, plan: Tensor, masses: Marginals) -> float:
        """Sum a loss that is no product, at a plan that is stored."""
        found = []
        for left, right in self._tables():
            cross = (MinimumCross(left, right)(plan) * plan).sum()
            found.append(self._own(left, right, masses) - 2 * float(cross))
        return sum(found) / len(found)

    def _own(self, left: Tensor, right: Tensor, masses: Marginals) -> float:
        """Sum the terms of each side."""
        p, q = masses
        return float(p @ self._loss.own[0](left) @ p + q @ self._loss.own[1](right) @ q)

    def remember(self, coupling: AnchorCoupling, masses: Marginals) -> contract.Linearised:
        """Keep the anchors, and the mean distances that their cost is centred by."""
        return self.remembered(
            Anchors(*coupling), means=contract.mean_distances(self.problem, masses)
        )

    @staticmethod
    def rows_at(known: contract.Linearised, side: int) -> contract.CostRows:
        """Do what :meth:`linearise` does for distances of new points to the anchors."""
        loss, weight, far = known.loss, 4 * known.alpha, known.distances(1 - side)
        near_mean, far_mean = known.means[side], known.means[1 - side]
        assert near_mean is not None
        assert far_mean is not None
        nodes, mass, _ = near_mean
        assert isinstance(known.coupling, Anchors)
        anchors, partners = known.coupling[side], known.coupling[1 - side]
        count = len(anchors)
        parts = spread_parts(count, loss.parts, anchors.device)
        mean = far_mean.values.reshape(far.n, -1)
        columns = loss.part(1 - side, far.columns(partners), parts)
        right = torch.cat([columns - mean[:, parts], mean], dim=1).double()

        def rows(distances: Tensor) -> Cost:
            # to the anchors first, and then to the nodes that means are taken over
            to_anchors = distances[:, anchors] if nodes is None else distances[:, :count]
            to_nodes = distances if nodes is None else distances[:, count:]
            own = contract.part_means(loss, side, to_nodes, mass.to(distances.dtype))
            left = loss.part(side, to_anchors, parts) - own[:, parts]
            left = torch.cat([left / count, own / loss.parts], dim=1)
            return FactoredCost.of_products(weight * left.double(), right).centred()

        return contract.CostRows(rows, None if nodes is None else torch.cat([anchors, nodes]))
