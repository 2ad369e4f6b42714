"""How chains begin, and how their epsilon falls."""

import math
from typing import NamedTuple

# Epsilons of this file are shares of the natural scale.
# Where chains are compared first: those that lead to a poor optimum are in it by then. [L323]
COMPARED_AT = 0.02
# Sinkhorn iterations in which plans meet their marginals, and over-relaxation. [L333]
LAST_INNER, LAST_RELAXATION = 60, 1.7


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

# How the symmetry of the product plan is broken decides which optimum is found, and no way serves
# all problems: random rows serve dense similarities; on graphs noise so faint that the leading
# modes grow alone; and where plans branch late, ladders that converge at each epsilon.
QUICK = Ladder(0.1, 0.7, 4)
_FAINT_NOISE = Kind("faint noise", QUICK)
_SLOW = Kind("faint noise, slowly", Ladder(0.1, 0.5, 30))
_LOW = Kind("faint noise, from a low epsilon", Ladder(0.05, 0.7, 20))
_KICK = Kind("kick", QUICK, (0.1, 0.1))
_HOT = Kind("hot kick", QUICK, (0.3, 0.05))
# Chains that all problems get: the search is over if they agree. Then those that follow, by turns.
FIRST = (_FAINT_NOISE, _KICK, _HOT, _KICK)
LATER = (_LOW, _KICK, _SLOW, _KICK, _KICK, _HOT, _KICK, _FAINT_NOISE)
# The ladder below the epsilon of the first comparison, and that of graphs, whose plans miss their
# marginals for long. [L1173]
REFINE = Ladder(COMPARED_AT, 0.7, 20, STEP)
REFINE_GRAPHS = REFINE._replace(outer=12, relaxation=LAST_RELAXATION)
# Share of the last step that a step repeats: without it plans had not settled within their
# iterations. [L760]
MOMENTUM = 0.6
# At the target, where many optima of few points are compared: after 20 iterations their plans still
# change, and by how much the objective falls until they do not says which is the best. [L1248]
LONG = REFINE._replace(outer=60, momentum=MOMENTUM)
