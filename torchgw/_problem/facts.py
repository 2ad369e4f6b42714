"""All that the path of a problem may depend on, measured once."""

from typing import NamedTuple

from torchgw._problem.marginals import MarginalRule, is_assignment
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.problem import FactoredCost
from torchgw._tensors.memory import known_free
from torchgw.distances.points import PointDistance


class Facts(NamedTuple):
    """What is known of a problem before it is solved; plain numbers and names, no tensors."""

    n: int
    m: int
    device: str  # "cpu" or "cuda"
    loss: str
    square: bool  # whether it is the square loss
    products: bool  # whether the loss is a sum of products of functions of both distances
    factors: tuple[int | None, int | None]  # columns of the factors of each side; None: no factors
    directed: tuple[bool, bool]
    cheap: bool  # whether any columns of both sides can be read at little cost
    linear: int | None  # columns of the factors of a linear cost; 0 if it is stored, None: no cost
    alpha: float
    rule: str  # "strict", "relaxed" or "partial"
    assignment: bool  # whether there are as many points on both sides, of equal weight
    graphs: bool  # whether paths in two graphs were given
    clouds: bool  # whether either side is measured straight between points
    free: int  # bytes that can be allocated, if three float64 tables of a plan may be too many
    spread: float = float("nan")  # natural scale of the cost; zero where every plan costs the same
    epsilon: float = float("nan")

    @classmethod
    def of(cls, problem: Problem, rule: MarginalRule | None, *, graphs: bool = False) -> "Facts":
        """Read those that cost nothing; the scale is known once the gradient is."""
        source, target, linear = problem.source, problem.target, problem.linear
        crossed = problem.crossed() or ()
        found = [side.factors() for side in crossed] or [None, None]
        ranks = [None if side is None else side.signs.numel() for side in found]
        columns = linear.rank if isinstance(linear, FactoredCost) else 0
        return cls(
            n=source.n, m=target.n, device=source.device.type, loss=problem.loss.name,
            square=problem.loss.is_square, products=problem.loss.cross is not None,
            factors=(ranks[0], ranks[1]), directed=(source.directed, target.directed),
            cheap=all(side.cheap_columns for side in crossed or (source, target)),
            linear=None if linear is None else columns, alpha=problem.alpha,
            rule="strict" if rule is None else "relaxed" if rule.mass is None else "partial",
            assignment=is_assignment(problem.marginals), graphs=graphs,
            clouds=any(isinstance(side, PointDistance) for side in (source, target)),
            free=known_free(3 * 8 * source.n * target.n, source.device),
        )  # fmt: skip

    @property
    def entries(self) -> int:
        """Pairs of points."""
        return self.n * self.m

    @property
    def larger(self) -> int:
        """Points of the larger side."""
        return max(self.n, self.m)

    def cost_rank(self, gradient: str, n_anchors: int) -> int:
        """Count the columns of the factors of a linearised cost, zero if it is a matrix anyway."""
        if gradient == "dense" or self.linear == 0:
            return 0
        own = [rank for rank in self.factors if rank is not None]
        return (n_anchors if gradient == "sampled" else min(own)) + (self.linear or 0)
