"""How a solve ended, with advice."""

from enum import Enum


class Status(Enum):
    """How a solve ended. The value is the advice.

    The marginals of ``CONVERGED``, ``STATIONARY`` and ``FLAT`` are missed by ten times
    ``inner_tol`` at most, and their value is at most that of the product plan. One more exact
    iteration changes the plan of ``CONVERGED`` by about ``tol``, relative to its norm; five lower
    the objective of ``FLAT`` by at most ten times ``objective_tol`` of it each, on average (after
    proximal steps, which are iterations here, the value, or 1% of its squared distances); one
    lowers that of ``STATIONARY`` by at most 1% of it and three times
    ``report.cost_standard_error``, which is checked up to 400 points. A polished ``CONVERGED``
    plan has no vertex of lower linearised cost. All this holds up to rounding, see
    docs/failures.md, and says nothing of other optima: a saddle point is a fixed point as well.
    """

    CONVERGED = "Converged: the plan is a fixed point and both marginals are met."
    STATIONARY = (
        "Converged in the mean: the moving average of the sampled objective stopped improving and "
        "both marginals are met. More `n_anchors` lower the remaining noise."
    )
    FLAT = (
        "Converged in value: the objective no longer falls and both marginals are met, though the "
        "plan still changes among plans of nearly the same objective. Pass `objective_tol=0` to go "
        "on."
    )
    STOPPED = "Stopped by the callback or a time limit before convergence."
    OUTER_LIMIT = (
        "The plan still changed after `max_iter` outer iterations: raise `max_iter`, loosen `tol`, "
        "or raise `epsilon`. After proximal steps `polish=True` goes the rest of the way."
    )
    INNER_LIMIT = (
        "The plan no longer changed, but the last Sinkhorn solve stopped before the marginals were "
        "met: raise `inner_max_iter`, loosen `inner_tol`, or raise `epsilon`."
    )
    BOTH_LIMITS = (
        "The plan still changed after `max_iter` outer iterations, and the last Sinkhorn solve "
        "stopped before the marginals were met: raise `max_iter` and `inner_max_iter`, or raise "
        "`epsilon`."
    )
    PRECISION_LIMIT = (
        "Rounding ends the solve before its tolerances are met: the cost divided by epsilon is too "
        "large for the precision. Raise `epsilon`, or pass `precision='mixed'` or "
        "`'float64'` where float32 was used."
    )
    NOISE_LIMIT = (
        "The sampled objective stopped improving, but an exact iteration lowers it by more than "
        "its noise explains: the sample shows too little of the distances. Raise `n_anchors`, or "
        "pass `gradient='dense'`."
    )
    IMPLAUSIBLE = (
        "The plan costs more than the product plan a x b, which matches every point with all, or "
        "less than zero: it is no useful answer. Raise `epsilon`, or pass another `init`."
    )
    POLISH_LIMIT = (
        "The conditional gradient steps of `polish` ran out before the plan was stationary: it is "
        "valid, and its value may still fall by `log['polish_gap']`. Start closer "
        "(`regularization='proximal'`), or accept it."
    )

    @property
    def advice(self) -> str:
        """What happened and what to do."""
        return self.value

    @property
    def converged(self) -> bool:
        """Whether the answer may be used without reservation."""
        return self in (Status.CONVERGED, Status.STATIONARY, Status.FLAT)
