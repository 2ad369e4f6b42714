"""What a solve returns."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass, field, replace
from typing import Any

import scipy.sparse
from numpy.typing import NDArray
from torch import Tensor

from torchgw._plans.transport import TransportPlan
from torchgw._results.extension import Extension, map_new
from torchgw._results.storage import stored, write_result
from torchgw._search.optima import Alternative
from torchgw._solve.status import Status
from torchgw._typing import Iteration

__all__ = ["GWResult"]

# Ambiguity above which the summary of a result mentions it.
_AMBIGUOUS = 0.9


@stored
@dataclass(frozen=True, repr=False, eq=False)
class GWResult:
    """Outcome of :func:`torchgw.solve`, with the attribute names of POT's ``OTResult``.

    Attributes
    ----------
    lazy_plan : TransportPlan, shape (n, m)
        The plan as an operator; nothing of its size is stored. :func:`torchgw.load` returns its
        largest entries, without the cost, where that was a stored matrix and the result was not
        saved with ``dense=True``.
    potential_a, potential_b : Tensor, shapes (n,) and (m,), float64
        Dual potentials of the whole linearised cost C(P), in its units. Those in ``lazy_plan``
        belong to its reduced cost, which leaves out the terms of rows and columns alone. Of the
        plan before polishing, if it was polished.
    value : float
        value_quad + value_linear: the transport objective without the entropy term, on the scale of
        the distances after division by ``scale``. Exact for exact gradients; for the sampled one an
        unbiased estimate, whose standard error is ``log["value_standard_error"]``.
    value_quad, value_linear : float
        alpha * <L(P), P> and (1 - alpha) * <M, P>.
    marginal_a, marginal_b : Tensor, shapes (n,) and (m,), float64
        Mass that the plan actually moves out of and into every point.
    marginal_error : float
        Larger of the L1 distances of these to the weights; of relaxed problems, of sides that are
        strict, and by how much the bounds of a partial plan are exceeded.
    status : Status
        How the solve ended; ``status.advice`` says what to do about it.
    epsilon : float
        Entropic regularisation of the plan, in units of the squared (scaled) distances: with
        proximal steps that of the last one, and 0 for a polished plan.
    alpha : float
        Weight of the quadratic term.
    scale : tuple of float
        Factors that multiplied the distances of X and of Y.
    gradient, backend, precision : str
        What was used.
    random_state : int
        Seed that reproduces the run on the same device and backend.
    alternatives : tuple of Alternative
        The distinct optima that a multi-start found on a coarse problem, the best one first, which
        is solved to the end, unless all points settle a doubt about it. Each can be passed as
        ``init``. Empty without a multi-start, and where a few points do not represent the spaces.
    ambiguity : float
        Value of the best of these over that of the second best, in [0, 1]: near 1 two optima cannot
        be told apart, as on symmetric spaces; 0 if only one was found. NaN where there are none,
        and of relaxed problems, whose values have no common zero. With a linear cost both values
        count from the least that its entries could cost.
    n_iters : int
        Outer iterations; ``log["inner_iterations"]`` counts the Sinkhorn iterations.
    history : tuple of Iteration
        Epsilon, objective, marginal error and change at each outer iteration.
    timings : dict
        Seconds by phase: of the preparation "graph", "geodesics", "landmarks" and "distances" (all
        else before the solve), then of the solve.
    log : dict
        loss (its name), landmarks (count, rank and estimated error of each side that has them,
        ``None`` if neither has), value_standard_error, kl (KL of the plan to a x b; with
        ``unbalanced`` half of that of the product plans P x P, which is the same at mass one),
        mass, penalty (what ``unbalanced`` marginals cost), objective (value + penalty +
        epsilon * kl), outer_iterations and its limit max_iter, inner_iterations (all Sinkhorn
        iterations but the last solve's), settle_iterations (the last solve's, zero where the loop's
        last one is the result) and its limit inner_max_iter; n_anchors, cost_standard_error and
        cost_size (``None`` without a sampled gradient); polish_steps and polish_gap (``None``
        without ``polish``); tiles (``None`` where none were skipped; else ``bound``, the share of a
        row's or column's mass that skipping may lose in a half-step, ``kept``, the mean share of
        tiles computed, ``lists``, how often they were chosen, and their ``width``). Every key is
        always there.
    extension : Extension or None
        What :meth:`transform` maps new points by.
    loss : Tensor or None, shape (), float64
        With ``differentiable``: ``log["objective"]`` as a tensor that carries gradients to the
        inputs; docs/differentiation.md. Pickles, deep copies and files leave the graph behind.
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
    alternatives: tuple[Alternative, ...] = ()
    ambiguity: float = float("nan")
    history: tuple[Iteration, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    log: dict[str, Any] = field(default_factory=dict)
    extension: Extension | None = None
    loss: Tensor | None = None

    @property
    def value(self) -> float:
        """Transport objective of the plan, without the entropy term."""
        return self.value_quad + self.value_linear

    @property
    def gw_distance(self) -> float:
        """Square root of <L(P), P>, the Gromov-Wasserstein distance of order 2 at this plan.

        With loss="absolute" that of order 1, <L(P), P> itself. NaN with loss="kl", which is no
        power of a distance, and without a quadratic term.
        """
        order = {"square": 2, "absolute": 1}.get(self.log.get("loss", "square"))
        if self.alpha == 0 or order is None:
            return float("nan")
        # an estimate, or rounding at a perfect match, can fall below zero
        return float(max(self.value_quad / self.alpha, 0.0) ** (1 / order))

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

    def transform(
        self,
        X_new: Any = None,  # noqa: N803 - the names of the field
        *,
        values: Any = None,
        D_new: Any = None,  # noqa: N803
        M_new: Any = None,  # noqa: N803
        F_new: Any = None,  # noqa: N803
    ) -> Tensor:
        """Map new source points to the target without solving again.

        The potentials of the solve give a new point x the row P_xj of the plan, up to its mass, by
        one half-step; the point goes to the weighted mean sum_j P_xj v_j / sum_j P_xj. A point of X
        goes where ``lazy_plan.barycentric`` sends it. A polished plan has no potentials: points are
        then mapped by the entropic plan that it was made from. With relaxed marginals a point that
        has no partner is mapped too, to where the little that it gives would go.

        Parameters
        ----------
        X_new : array-like, shape (q, d), optional
            New points, in the coordinates of X. Point metrics are computed; a geodesic distance
            goes through the nearest points of X, which lengthens it where X is sparse.
        values : array-like, shape (m, c), optional
            What is averaged: Y itself by default, or coordinates, or indicators of labels.
        D_new : array-like, shape (q, n), optional
            Distances to the points of X, in the units of ``D_X``, in place of ``X_new``; for
            matrices, graphs and providers.
        M_new, F_new : array-like, shapes (q, m) and (q, f), optional
            Linear cost of the new points, or their features, if the solve had such.

        Returns
        -------
        Tensor, shape (q, c), float64
            Computed a block at a time; memory does not grow with q times n.

        Raises
        ------
        InvalidInputError
            If the input does not fit the solve; the message says what does.
        UnsupportedError
            If the result comes from a file that does not hold the distances that this takes.

        Examples
        --------
        >>> import numpy as np, torch, torchgw
        >>> X = np.random.default_rng(0).normal(size=(60, 3))
        >>> result = torchgw.solve(X, X + 5, distances="euclidean", random_state=0)
        >>> moved = result.transform(X[:2])
        >>> bool(torch.allclose(moved, result.lazy_plan.barycentric(X + 5)[:2]))
        True
        """
        return map_new(self.extension, self.lazy_plan, (X_new, D_new, M_new, F_new), values)

    def inverse_transform(
        self,
        Y_new: Any = None,  # noqa: N803
        *,
        values: Any = None,
        D_new: Any = None,  # noqa: N803
        M_new: Any = None,  # noqa: N803
        F_new: Any = None,  # noqa: N803
    ) -> Tensor:
        """Map new target points to the source, see :meth:`transform`.

        ``values`` has one row per source point, ``D_new`` has shape (q, m) and ``M_new`` has shape
        (q, n).
        """
        turned = None if self.extension is None else self.extension.T
        return map_new(turned, self.lazy_plan.T, (Y_new, D_new, M_new, F_new), values)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        dense: bool = False,
        extra: dict[str, NDArray[Any]] | None = None,
    ) -> None:
        """Write the result to a file that :func:`torchgw.load` reads.

        The file is NumPy's ``.npz`` with JSON in it; nothing is pickled. It holds the factors of
        the plan, the potentials, and what :meth:`transform` needs. Where the cost was a stored
        matrix it holds the 256 largest entries of each row of the plan instead.

        Parameters
        ----------
        path : str or path
            The file to write; by convention it ends in ``.npz``.
        dense : bool
            Store (n, m) costs, and distances given as matrices, in full.
        extra : dict of str to ndarray, optional
            Further arrays of the file, for readers that do not know torchgw.

        Raises
        ------
        InvalidInputError
            If the path cannot be written.

        Warns
        -----
        TorchGWWarning
            If more than 1e-6 of the mass is outside the entries kept.

        Examples
        --------
        >>> import numpy as np, tempfile, torchgw
        >>> X = np.random.default_rng(0).normal(size=(60, 3))
        >>> result = torchgw.solve(X, X + 5, distances="sqeuclidean", random_state=0)
        >>> with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        ...     result.save(file.name)
        ...     again = torchgw.load(file.name)
        >>> again.value == result.value
        True
        """
        write_result(path, self, dense=dense, extra=extra)

    def __copy__(self) -> GWResult:
        """Share everything, the graph of ``loss`` too."""
        return replace(self)

    def __getstate__(self) -> dict[str, Any]:
        """Leave graphs behind, for pickle and deepcopy: they belong to this process and inputs."""
        return {**vars(self), "loss": None if self.loss is None else self.loss.detach()}

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
            f"  {self.status.advice}{self._warn_of_ambiguity()}"
        )

    def _repr_html_(self) -> str:
        """Summarise as a table, for notebooks."""
        n, m = self.lazy_plan.shape
        error = self.log.get("value_standard_error", 0.0)
        spread = f" &plusmn; {error:.2g}" if error else ""
        rows = {
            "value": f"{self.value:.6g}{spread}",
            "epsilon": f"{self.epsilon:.4g}",
            "marginal error": f"{self.marginal_error:.2g}",
            "how": f"{self.gradient} gradient, {self.backend} backend, {self.precision}",
            "iterations": f"{self.n_iters} in {sum(self.timings.values()):.2f} s",
            "status": html.escape(self.status.advice + self._warn_of_ambiguity()),
        }
        left = "style='text-align:left'"
        cells = "".join(
            f"<tr><th {left}>{name}</th><td {left}>{text}</td></tr>" for name, text in rows.items()
        )
        mark = "&#10003;" if self.converged else "&#9888;"
        return f"<table><caption>GWResult {n} &times; {m} {mark}</caption>{cells}</table>"

    def _warn_of_ambiguity(self) -> str:
        """Return a line for the summary if another optimum is nearly as good."""
        # NaN is not above it
        if not self.ambiguity > _AMBIGUOUS:
            return ""
        return (
            f"\n  Ambiguous: another optimum is nearly as good (ambiguity {self.ambiguity:.2f}). "
            "See `alternatives`; pass one as `init`."
        )
