"""A common space of several others, and their plans: by turns, from several starts, by moves."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._api import solve
from torchgw._errors import ConvergenceWarning, TorchGWWarning, warn_user
from torchgw._results.result import GWResult
from torchgw.distances.base import DistanceProvider
from torchgw.distances.factored import FactoredDistance
from torchgw.distances.precomputed import PrecomputedDistance

# Other optima of one space that are followed with all others, the lowest first. [L1415]
_FOLLOWED = 3


class Space(NamedTuple):
    """One of the spaces of a barycenter, with its share."""

    provider: DistanceProvider
    mass: Any  # of its points, as given
    features: Tensor | None  # (n_s, k), float64
    share: float  # its weight in the mean


class Start(NamedTuple):
    """Where a common space begins."""

    distances: DistanceProvider  # of n points
    features: Tensor | None  # (n, k), float64


class Reached(NamedTuple):
    """Where turns of plans and means have ended."""

    aligned: Start  # what the plans were found for
    mean: Start  # the means that they give
    results: tuple[GWResult, ...]
    history: tuple[float, ...]  # weighted mean of the objectives at each turn
    settled: bool

    @property
    def value(self) -> float:
        """Weighted mean of the objectives."""
        return self.history[-1]


@dataclass
class Alternation:
    """Turns of plans to a common space, each by :func:`torchgw.solve`, and of its means."""

    members: list[Space]
    mass: Tensor  # (n,) of the points of the common space
    asked: dict[str, Any]  # of the solves
    max_iter: int
    tol: float
    # whether first plans are searched for briefly, since all are searched for again at the end
    brief: bool = False
    fixed: tuple[bool, bool] = (False, False)  # whether distances and features stay
    # epsilon of each space, which is kept once it was chosen, so that values can be compared
    epsilons: list[float] = field(default_factory=list)
    # what the last search of each space warned of
    told: dict[int, list[warnings.WarningMessage]] = field(default_factory=dict)

    def follow(self, start: Start, begin: Sequence[Any]) -> Reached:
        """Take turns until the value no longer changes; plans ``begin`` there, or with a search."""
        history: list[float] = []
        now, settled, results = start, False, tuple(begin)
        while len(history) < self.max_iter and not settled:
            here = now
            found = tuple(self._align(here, place, item) for place, item in enumerate(results))
            if not self.epsilons:
                self.epsilons = [item.epsilon for item in found]
            value = sum(
                member.share * item.report.objective
                for member, item in zip(self.members, found, strict=True)
            )
            settled = bool(history) and abs(history[-1] - value) <= self.tol * abs(value)
            history.append(value)
            now, results = self._average(here, found), found
        return Reached(here, now, found, tuple(history), settled)

    def improve(self, best: Reached) -> Reached:
        """Move one space at a time to other optima of its plan, while that lowers the value.

        All others follow each move. At the end every plan has been searched for, at the common
        space that it belongs to, and says what the search has found.
        """
        self.brief = False
        since, place = 0, 0
        searches: dict[int, GWResult] = {}
        while since < len(self.members):
            fresh = self._align(best.aligned, place, None)
            searches[place], moved = fresh, None
            for other in self._others(best, place, fresh):
                begin = [*best.results]
                begin[place] = other
                ended = self.follow(best.aligned, begin)
                if ended.value < best.value - self.tol * abs(best.value):
                    moved = ended
                    break
            best, since = (best, since + 1) if moved is None else (moved, 0)
            place = (place + 1) % len(self.members) if moved is None else place
        results = tuple(
            replace(
                item,
                ambiguity=searches[place].ambiguity,
                alternatives=searches[place].alternatives,
                doubt=searches[place].doubt,
            )
            for place, item in enumerate(best.results)
        )
        return best._replace(results=results)

    def warn(self, results: Sequence[GWResult], *, settled: bool, updates: int) -> bool:
        """Warn of what did not converge or is in doubt, by the space; tell if all converged."""
        open_ones = [place for place, item in enumerate(results) if not item.converged]
        for place in open_ones:
            warn_user(f"`spaces[{place}]`: {results[place].status.advice}", ConvergenceWarning)
        if not settled:
            warn_user(
                f"The barycenter still moved after {updates} updates: raise `max_iter`, or loosen "
                "`tol`.",
                ConvergenceWarning,
            )
        for place, said in sorted(self.told.items()):
            for item in said:
                # what did not converge in the search is told of the plans that are returned
                if not issubclass(item.category, ConvergenceWarning):
                    warn_user(f"`spaces[{place}]`: {item.message}", item.category)
        return settled and not open_ones

    def _align(self, common: Start, place: int, begin: Any) -> GWResult:
        """Align the common space with one space, from where it ``begin``s or with a search."""
        member = self.members[place]
        traits = None if common.features is None else (common.features, member.features)
        asked = self.asked | ({"epsilon": self.epsilons[place]} if self.epsilons else {})
        if begin is None and self.brief:
            asked["search"] = "fast"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", TorchGWWarning)
            found = solve(
                D_X=common.distances, D_Y=member.provider, a=self.mass, b=member.mass,
                features=traits, init=begin, **asked,
            )  # fmt: skip
        if begin is None:
            self.told[place] = said
        return found

    def _others(self, best: Reached, place: int, fresh: GWResult) -> list[GWResult]:
        """Solve from the optima that a search has found, but for the present plan, best first."""
        now = best.results[place].report.objective
        # few points and all points may order them in other ways
        inits = fresh.alternatives[: _FOLLOWED + 1]
        found = [fresh, *(self._align(best.aligned, place, init) for init in inits)]
        kept: list[GWResult] = []
        for item in sorted(found, key=lambda item: item.report.objective):
            seen = [now, *(each.report.objective for each in kept)]
            value = item.report.objective
            if all(abs(value - each) > self.tol * abs(each) for each in seen):
                kept.append(item)
        return kept[:_FOLLOWED]

    def _average(self, common: Start, results: Sequence[GWResult]) -> Start:
        """Compute the distances and features that are best for these plans."""
        distances, features = common
        if not self.fixed[0]:
            distances = _mean_distances(results, self.members, self.mass)
        if features is not None and not self.fixed[1]:
            means = [
                member.share * result.lazy_plan.barycentric(member.features)
                for result, member in zip(results, self.members, strict=True)
            ]
            features = torch.stack(means).sum(0)
        return Start(distances, features)


def drawn(n: int, space: Space, generator: torch.Generator) -> Start:
    """Draw n points of a space, to start from their distances and features."""
    provider = space.provider
    order = torch.randperm(provider.n, device=provider.device, generator=generator)
    index = order.repeat(-(-n // provider.n))[:n]
    traits = None if space.features is None else space.features[index]
    factors = provider.factors()
    if factors is not None:
        return Start(FactoredDistance(factors.matrix[index], factors.signs), traits)
    table = provider.columns(index)[index]
    return Start(PrecomputedDistance((table + table.T) / 2), traits)


def _mean_distances(
    results: Sequence[GWResult], members: list[Space], mass: Tensor
) -> DistanceProvider:
    """Compute sum_s share_s P_s D_s P_s' / (a a'), in factors if every D_s has them."""
    factors = [member.provider.factors() for member in members]
    scale = torch.where(mass > 0, 1 / mass, 0.0)[:, None]
    if all(item is not None for item in factors):
        parts = [
            (scale * (result.lazy_plan @ item.matrix), member.share * item.signs)
            for result, item, member in zip(results, factors, members, strict=True)
            if item is not None
        ]
        return FactoredDistance(
            torch.cat([matrix for matrix, _ in parts], 1), torch.cat([signs for _, signs in parts])
        )
    unit = torch.eye(len(mass), dtype=torch.float64, device=mass.device)
    total = torch.zeros_like(unit)
    for result, member in zip(results, members, strict=True):
        plan = result.lazy_plan
        total += member.share * (plan @ member.provider.apply(plan.T @ unit))
    total = scale * total * scale.T
    return PrecomputedDistance(((total + total.T) / 2).clamp_min(0))
