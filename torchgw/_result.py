"""What a solve returns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import scipy.sparse
from torch import Tensor

from torchgw._plan import TransportPlan
from torchgw._schedule import Status
from torchgw._solver import Iteration

__all__ = ["GWResult"]


@dataclass(frozen=True, repr=False)
class GWResult:
    """Outcome of :func:`torchgw.solve`, with the attribute names of POT's ``OTResult``.

    Attributes
    ----------
    lazy_plan : TransportPlan, shape (n, m)
        The plan as an operator; nothing of its size is stored.
    potential_a, potential_b : Tensor, shapes (n,) and (m,), float64
        Dual potentials of the whole linearised cost C(P), in its units. Those in ``lazy_plan``
        belong to its reduced cost, which leaves out the terms of rows and columns alone.
    value : float
        value_quad + value_linear: the transport objective without the entropy term, on the scale of
        the distances after division by ``scale``. Exact for exact gradients; for the sampled one an
        unbiased estimate, whose standard error is ``log["value_standard_error"]``.
    value_quad, value_linear : float
        alpha * <L(P), P> and (1 - alpha) * <M, P>.
    marginal_a, marginal_b : Tensor, shapes (n,) and (m,), float64
        Mass that the plan actually moves out of and into every point.
    marginal_error : float
        Larger of the L1 distances of these to the weights.
    status : Status
        How the solve ended; ``status.advice`` says what to do about it.
    epsilon : float
        Entropic regularisation reached, in units of the squared (scaled) distances.
    scale : tuple of float
        Factors that multiplied the distances of X and of Y.
    gradient, backend, precision : str
        What was used.
    random_state : int
        Seed that reproduces the run on the same device and backend.
    n_iters : int
        Outer iterations; ``log["inner_iterations"]`` counts the Sinkhorn iterations.
    history : tuple of Iteration
        Epsilon, objective, marginal error and change at each outer iteration.
    timings : dict
        Seconds by phase.
    log : dict
        value_standard_error, kl (KL of the plan to a x b), objective (value + epsilon * kl),
        inner_iterations, n_anchors.
    """

    lazy_plan: TransportPlan
    potential_a: Tensor
    potential_b: Tensor
    value_quad: float
    value_linear: float
    marginal_a: Tensor
    marginal_b: Tensor
    marginal_error: float
    status: Status
    epsilon: float
    alpha: float
    scale: tuple[float, float]
    gradient: str
    backend: str
    precision: str
    random_state: int
    history: tuple[Iteration, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    log: dict[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """Transport objective of the plan, without the entropy term."""
        return self.value_quad + self.value_linear

    @property
    def gw_distance(self) -> float:
        """Square root of <L(P), P>, the Gromov-Wasserstein distance of order 2 at this plan."""
        if self.alpha == 0:
            return float("nan")
        # an estimate, or rounding at a perfect match, can fall below zero
        return math.sqrt(max(self.value_quad / self.alpha, 0.0))

    @property
    def plan(self) -> Tensor:
        """The (n, m) matrix, built on demand; PlanTooLargeError if it would not fit."""
        return self.lazy_plan.to_dense()

    @property
    def sparse_plan(self) -> scipy.sparse.csr_array:
        """The entries that carry at least 1e-4 of their row's mass, on the CPU."""
        return self.lazy_plan.to_sparse()

    @property
    def potentials(self) -> tuple[Tensor, Tensor]:
        """Dual potentials (f, g) in cost units."""
        return self.potential_a, self.potential_b

    @property
    def marginals(self) -> tuple[Tensor, Tensor]:
        """(marginal_a, marginal_b)."""
        return self.marginal_a, self.marginal_b

    @property
    def converged(self) -> bool:
        """Whether both the plan and its marginals met their tolerances."""
        return self.status.converged

    @property
    def n_iters(self) -> int:
        """Outer iterations."""
        return len(self.history)

    def __repr__(self) -> str:
        """Summarise in a few lines."""
        n, m = self.lazy_plan.shape
        error = self.log.get("value_standard_error", 0.0)
        spread = f" +- {error:.2g}" if error else ""
        return (
            f"GWResult({n} x {m}, value={self.value:.6g}{spread}, epsilon={self.epsilon:.4g}, "
            f"marginal_error={self.marginal_error:.2g})\n"
            f"  {self.gradient} gradient, {self.backend} backend, {self.precision}, "
            f"{self.n_iters} iterations in {sum(self.timings.values()):.2f} s\n"
            f"  {self.status.advice}"
        )
