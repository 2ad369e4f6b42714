"""One chain of plans: how it begins, how its epsilon falls, and what several tell of each other."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._problem.limits import Limits, limits_of

# Epsilons of this file are shares of the natural scale.
# Where chains are compared first: those that lead to a poor optimum are in it by then. [L323]
COMPARED_AT = 0.02
# Where a guess is taken up: above it is forgotten. [L105]
GUESS_EPSILON = 0.1
# Sinkhorn iterations of an outer iteration whose plan has yet to settle. [L323, L337, L1362]
INNER = 5
# Outer iterations at the target in which plans meet their marginals, Sinkhorn iterations of each,
# and over-relaxation. [L225, L333]
LAST_OUTER, LAST_INNER, LAST_RELAXATION = 5, 60, 1.7


class Ladder(NamedTuple):
    """How epsilon falls: geometrically, with some outer iterations at each stage."""

    start: float
    decay: float
    outer: int
    step: float = 1.0  # how far each linearisation goes from the last one to that of the plan
    meeting: int = LAST_INNER  # Sinkhorn iterations in which the plans meet their marginals
    momentum: float = 0.0  # share of the last step that the next one repeats
    relaxation: float = 1.0  # over-relaxation of Sinkhorn iterations

    def stages(self, last: float) -> list[float]:
        """List the epsilons down to the last one."""
        count = math.ceil(math.log(last / self.start) / math.log(self.decay) - 1e-9)
        return [self.start * self.decay**stage for stage in range(count)] + [last]


class Kind(NamedTuple):
    """A way to begin a chain, and how it goes on."""

    name: str
    ladder: Ladder
    kick: tuple[float, float] | None = None  # epsilon, and the share of rows linearised at


# How far linearisations go where epsilon is small: whole steps go round for ever where the
# objective is steeply convex in a direction. [L559, L601]
STEP = 0.75

# How fast epsilon falls on most ladders. A choice.
_DECAY = 0.7

# How the symmetry of the product plan is broken decides which optimum is found, and no way serves
# all problems: random rows serve dense similarities; on graphs noise so faint that the leading
# modes grow alone; and where plans branch late, ladders that converge at each epsilon.
QUICK = Ladder(GUESS_EPSILON, _DECAY, 4)
_FAINT_NOISE = Kind("faint noise", QUICK)
_SLOW = Kind("faint noise, slowly", Ladder(GUESS_EPSILON, 0.5, 30))
_LOW = Kind("faint noise, from a low epsilon", Ladder(GUESS_EPSILON / 2, _DECAY, 20))
_KICK = Kind("kick", QUICK, (GUESS_EPSILON, 0.1))
_HOT = Kind("hot kick", QUICK, (0.3, 0.05))
# Chains that all problems get: the search is over if they agree. Then those that follow, by turns.
FIRST = (_FAINT_NOISE, _KICK, _HOT, _KICK)
LATER = (_LOW, _KICK, _SLOW, _KICK, _KICK, _HOT, _KICK, _FAINT_NOISE)


def kinds_of_chains() -> Iterator[Kind]:
    """List how chains begin, without end."""
    return itertools.chain(FIRST, itertools.cycle(LATER))


# The ladder below the epsilon of the first comparison, and that of graphs, whose plans miss their
# marginals for long. [L1173]
REFINE = Ladder(COMPARED_AT, _DECAY, 20, STEP)
REFINE_GRAPHS = REFINE._replace(outer=12, relaxation=LAST_RELAXATION)
# Share of the last step that a step repeats: without it plans had not settled within their
# iterations. [L760]
MOMENTUM = 0.6
# At the target, where many optima of few points are compared: after 20 iterations their plans still
# change, and by how much the objective falls until they do not says which is the best. [L1248]
LONG = REFINE._replace(outer=60, momentum=MOMENTUM)


# Objectives within this of each other, relative, are of the same optimum. [L333]
SAME = 1e-3
# Chains with the best objective, kicked ones among them, that make a search end early. [L333]
AGREEING = 3
# Cosine of the angle between plans above which they are of one optimum. [L561, L1290, L1291]
ALIKE = 0.9
# Chains of one optimum have plans that are alike, less a x b; or objectives this near, relative, as
# images of each other under a symmetry have. Where there are very many optima, some have nearly the
# same objective. [L1290]
_EQUAL = 5e-5
# An objective is better if it is lower by this share. [L345, L1291]
BETTER = 1e-4
# The best optimum stands out, whichever chain has found it, if its value is less than this share of
# the second best. [L617, L971]
STANDS_OUT = 0.25
# Chains that go on to the target, and how far from the best objective they may be, relative. [L333]
REFINED, _CLOSE = 4, 0.05


# Share of the time of chains in which starts that only graphs have keep all edges, or the first
# chains agree, if they do. [L1590]
KEPT_SOON, AGREED_SOON = 0.1, 0.3


def chain_products(n: int, m: int) -> int:
    """Count the multiplications of a chain until it is compared with others."""
    return QUICK.outer * len(QUICK.stages(COMPARED_AT)) * n * m * (n + m)


def affordable_chains(limits: Limits, how: str, n: int, m: int) -> int:
    """Count the chains between n and m points that a search may follow."""
    most = limits.chain_products * (limits.thorough**2 if how == "thorough" else 1)
    return int(most / chain_products(n, m))


class Trial(NamedTuple):
    """How far one start was followed, and the objective that it reached."""

    start: str
    epsilon: float  # the last one it reached, units of the cost
    objective: float  # at that epsilon, with entropy
    value: float  # without entropy
    seconds: float
    status: str  # "refined", or "left behind" at the first comparison

    def scaled(self, factor: float) -> "Trial":
        """Return it in other units of the cost."""
        epsilon, objective, value = (factor * part for part in self[1:4])
        return self._replace(epsilon=epsilon, objective=objective, value=value)


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


class Begun(NamedTuple):
    """How far a search has come, from which one between the same points goes on."""

    chains: Sequence[Chain] = ()  # from near the product plan, as they were first compared
    opposed: Sequence[Chain] = ()  # those of them that are opposites of others
    ended: Sequence[Chain] = ()  # at the target


NOTHING_BEGUN = Begun()


class Climbed(NamedTuple):
    """What the chains have found, the best first."""

    plans: Tensor  # (k, s, t) float64, of exact marginals
    trials: tuple[Trial, ...]  # of all chains; the first k are those of the plans
    agreed: bool  # whether several found the best one
    met: bool  # whether that is told by their plans, which are yet to be sharpened
    g: Tensor  # (t,) potential of the first plan, as of the coarse cost
    alone: bool  # whether one repair has led to the best plan, and nothing else
    settled: bool = False  # whether all plans were followed to their ends
    begun: Begun = NOTHING_BEGUN


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
        or (near(chain, best, SAME) and float(torch.dot(_away(chain), away)) > ALIKE)
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


def is_smeared(plan: Tensor) -> bool:
    """Tell whether a plan (s, t) is so near the product plan that it hardly tells partners."""
    away = plan - torch.outer(plan.sum(1), plan.sum(0))
    return float(away.abs().sum()) <= limits_of(plan.device).smeared


def promising(chains: Sequence[Chain]) -> list[Chain]:
    """Choose what goes on to the target: the best of each kind first, then the others."""
    close = [chain for chain in chains if near(chain, chains[0], _CLOSE)]
    first = {chain.kind: chain for chain in reversed(close)}.values()
    return sorted(close, key=lambda chain: (chain not in first, chain.objective))[:REFINED]


def stacked(chains: list[Chain]) -> tuple[Tensor, Tensor]:
    """Put plans (B, s, t) and potentials (B, 1, t) of chains beside each other."""
    return torch.stack([chain.plan for chain in chains]), torch.stack([chain.g for chain in chains])
