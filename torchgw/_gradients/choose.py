"""The gradient of a name."""

from torchgw._errors import UnsupportedError
from torchgw._gradients.contract import CostRows, Gradient, Linearised
from torchgw._gradients.dense import DenseGradient
from torchgw._gradients.factored import FactoredGradient
from torchgw._gradients.sampled import SampledGradient
from torchgw._problem.problem import Problem


def make_gradient(name: str, problem: Problem, n_anchors: int, redraw: float) -> Gradient:
    """Build a gradient by name."""
    if name == "dense":
        return DenseGradient(problem)
    if name == "factored":
        return FactoredGradient(problem)
    return SampledGradient(problem, n_anchors, redraw)


def cost_rows(known: Linearised, side: int) -> CostRows:
    """Make the cost of new points of the source (0) or the target (1)."""
    kinds = {kind.name: kind for kind in (DenseGradient, FactoredGradient, SampledGradient)}
    return kinds[known.gradient].rows_at(known, side)


def check_products(name: str, loss: str, *, products: bool) -> None:
    """Refuse factors for a loss that has none."""
    if name == "factored" and not products:
        raise UnsupportedError(
            f"`gradient='factored'` needs a loss that is made of products, and loss={loss!r} "
            "is not. Pass gradient='auto', 'dense' or 'sampled'."
        )
