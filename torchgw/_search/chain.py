"""One chain of plans on its way, and what several of them tell of each other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._search.kinds import Kind

# Objectives within this of each other, relative, are of the same optimum. [L333]
SAME = 1e-3
# Chains with the best objective, kicked ones among them, that make a search end early. [L333]
AGREEING = 3
# Chains of one optimum have plans whose cosine, less a x b, is above this; or objectives this near,
# relative, as images of each other under a symmetry have. Where there are very many optima, some
# have nearly the same objective. [L1290]
_ALIKE, _EQUAL = 0.9, 5e-5
# The best optimum stands out, whichever chain has found it, if its value is less than this share of
# the second best. [L617, L971]
STANDS_OUT = 0.25
# Chains that go on to the target, and how far from the best objective they may be, relative. [L333]
REFINED, _CLOSE = 4, 0.05


class Trial(NamedTuple):
    """How far one start was followed, and the objective that it reached."""

    start: str
    epsilon: float  # the last one it reached, units of the cost
    objective: float  # at that epsilon, with entropy
    value: float  # without entropy
    seconds: float
    status: str  # "refined", or "left behind" at the first comparison


@dataclass(eq=False)
class Chain:
    """One chain on its way."""

    kind: Kind
    number: int | None
    plan: Tensor  # (s, t) float32
    g: Tensor  # (1, t) potential, units of the cost
    epsilon: float = math.inf  # of its last linear problem, units of the cost
    objective: float = math.inf
    value: float = math.inf
    seconds: float = 0.0

    def move(
        self,
        plan: Tensor,
        g: Tensor,
        epsilon: float,
        objective: float,
        value: float,
        *,
        down: bool = False,
    ) -> None:
        """Take another plan; if only ``down``, not one of the same epsilon that is no lower."""
        if down and self.epsilon == epsilon and self.objective <= objective:
            return
        self.plan, self.g, self.epsilon = plan, g, epsilon
        self.objective, self.value = objective, value

    @property
    def name(self) -> str:
        """Its kind and number."""
        return self.kind.name if self.number is None else f"{self.kind.name} {self.number}"

    def trial(self, status: str) -> Trial:
        """Report it."""
        return Trial(self.name, self.epsilon, self.objective, self.value, self.seconds, status)


class Climbed(NamedTuple):
    """What the chains have found, the best first."""

    plans: Tensor  # (k, s, t) float64, of exact marginals
    trials: tuple[Trial, ...]  # of all chains; the first k are those of the plans
    agreed: bool  # whether several found the best one
    met: bool  # whether that is told by their plans, which are yet to be sharpened
    g: Tensor  # (t,) potential of the first plan, as of the coarse cost
    alone: bool  # whether one repair has led to the best plan, and nothing else
    settled: bool = False  # whether all plans were followed to their ends


def near(chain: Chain, best: Chain, share: float) -> bool:
    """Whether the objective of a chain is within a share of the best."""
    return chain.objective - best.objective <= share * abs(best.objective)


def alike(chains: Sequence[Chain], best: Chain) -> list[Chain]:
    """List the chains at the optimum of the best one."""
    away = _away(best)
    return [
        chain
        for chain in chains
        if near(chain, best, _EQUAL)
        or (near(chain, best, SAME) and float(torch.dot(_away(chain), away)) > _ALIKE)
    ]


def _away(chain: Chain) -> Tensor:
    """Return the direction of a plan from the product of its marginals, of length one."""
    plan = chain.plan
    away = plan - torch.outer(plan.sum(1), plan.sum(0)) / plan.sum()
    return torch.nn.functional.normalize(away.flatten(), dim=0)


def agree(chains: Sequence[Chain]) -> bool:
    """Whether independent chains, the best first, have found the same optimum."""
    same = alike(chains, chains[0])
    kicked = sum(chain.kind.kick is not None for chain in same)
    # kicked chains are needed: all that begin with faint noise may follow the same modes into one
    # poor optimum
    return len(same) >= AGREEING and kicked >= min(2, len(same))


def enough(chains: Sequence[Chain]) -> bool:
    """Whether enough chains are at the best optimum."""
    best = min(chains, key=lambda chain: chain.objective)
    return len(alike(chains, best)) >= AGREEING


def stands_out(chains: Sequence[Chain]) -> bool:
    """Whether the best optimum costs far less than all others."""
    best = min(chains, key=lambda chain: chain.objective)
    others = [chain.value for chain in chains if not near(chain, best, SAME)]
    return best.value < STANDS_OUT * min(others, default=0)


def promising(chains: Sequence[Chain]) -> list[Chain]:
    """Choose what goes on to the target: the best of each kind first, then the others."""
    close = [chain for chain in chains if near(chain, chains[0], _CLOSE)]
    first = {chain.kind: chain for chain in reversed(close)}.values()
    ranked = sorted(close, key=lambda chain: (chain not in first, chain.objective))
    return ranked[:REFINED]


def stacked(chains: list[Chain]) -> tuple[Tensor, Tensor]:
    """Put plans (B, s, t) and potentials (B, 1, t) of chains beside each other."""
    plans = torch.stack([chain.plan for chain in chains])
    return plans, torch.stack([chain.g for chain in chains])
