"""Types shared by every layer."""

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

# What a result holds: NumPy's arrays where the solve was given no tensor.
Array: TypeAlias = Tensor | np.ndarray[Any, Any]
# What makes a run reproducible; of a generator a seed is drawn.
Seed: TypeAlias = int | torch.Generator | np.random.Generator | np.random.RandomState


# Points of a side, by their numbers.
Points: TypeAlias = Tensor | slice


class Potentials(NamedTuple):
    """Dual potentials in cost units, so that they stay valid when epsilon changes.

    They define the plan  P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon).
    """

    f: Tensor  # (n,) source
    g: Tensor  # (m,) target


class Marginals(NamedTuple):
    """Non-negative weights of both sides, each of total mass one, on the device of the solve."""

    a: Tensor  # (n,) source
    b: Tensor  # (m,) target

    @property
    def log_a(self) -> Tensor:
        """Logarithm of a; -inf where a weight is zero, which empties that row of the plan."""
        return self.a.log()

    @property
    def log_b(self) -> Tensor:
        """Logarithm of b; -inf where a weight is zero."""
        return self.b.log()

    def unused(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tell which weights are zero in a dtype, or nearly: it holds no digits of these."""
        least = torch.finfo(dtype).tiny
        return self.a < least, self.b < least

    def mask(self, potentials: Potentials, dtype: torch.dtype) -> Potentials:
        """Round potentials to a dtype, with -inf where a weight is unused.

        An exponential whose entry has two such weights is bounded by nothing, and infinity times
        zero is not zero.
        """
        pairs = zip(self.unused(dtype), potentials, strict=True)
        return Potentials(*(part.masked_fill(none, -torch.inf).to(dtype) for none, part in pairs))


class HessianProduct(NamedTuple):
    """A product of a direction with the Hessian of the objective.

    Attributes
    ----------
    products : dict of Tensor by name
        The product for every input that requires a gradient, in its shape and dtype.
    residual : float
        Relative residual of the linear system for the change of the plan.
    iterations : int
        Products with its matrix, two passes over the plan each.
    converged : bool
        Whether the residual is 1e-4 or less; a ``ConvergenceWarning`` says so otherwise.
    """

    products: dict[str, Tensor]
    residual: float
    iterations: int
    converged: bool


class Indices(NamedTuple):
    """Some points of the source and some of the target, by their numbers."""

    source: Tensor  # int64
    target: Tensor  # int64


class Iteration(NamedTuple):
    """What the callback and the history see of one outer iteration.

    Attributes
    ----------
    iteration : int
        Counted from 0.
    epsilon : float
        Entropic regularisation of the iteration, in units of the squared (scaled) distances.
    dual : float
        Dual value of the linearised entropic problem, which comes free of charge. It counts the
        quadratic value of the plan twice, so it is not the objective.
    marginal_error : float
        L1 distance of the column marginal to b.
    change : float
        Relative change of the coupling; NaN for sampled gradients.
    inner_iterations : int
        Sinkhorn iterations.
    shape : tuple of int
        (n, m), or that of the fewer points which a large solve begins with or takes all along.
    objective : float
        What is minimised, entropy at ``epsilon`` included, at the plan of the iteration; up to
        terms of second order in ``change``, so that it is exact where a solve has converged. NaN
        for sampled gradients and relaxed marginals.
    """

    iteration: int
    epsilon: float
    dual: float
    marginal_error: float
    change: float
    inner_iterations: int
    shape: tuple[int, int]
    objective: float = math.nan
