"""Further numbers of a solve, beside its result."""

from dataclasses import dataclass, fields
from typing import Any, TypedDict

from torchgw._errors import InvalidTypeError
from torchgw._problem.problem import Problem
from torchgw._problem.providers import Spaces
from torchgw._problem.reduction import Reduction, count_allowed
from torchgw._results.parts import stored
from torchgw._solve.outcome import Outcome


class Log(dict[str, Any]):
    """A report by the names of its fields, for reading; JSON takes it, and copies can change."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Refuse a change."""
        raise InvalidTypeError("`result.log` is for reading. Change a copy: dict(result.log).")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as a plain dictionary."""
        return dict, (dict(self),)


class Chosen(TypedDict):
    """The distances that ``distances="auto"`` has chosen for points."""

    chosen: str
    why: str
    agreement: dict[str, float]


@stored
@dataclass(frozen=True)
class Report:
    """Further numbers of a solve; ``result.log`` has them by name.

    Attributes
    ----------
    loss : str
        Name of the loss.
    value_standard_error : float
        Of ``value``: zero for an exact gradient.
    kl : float
        KL divergence of the plan to a x b; with ``unbalanced`` half of that of the product plans
        P x P, which is the same at mass one (not so where ``alpha=0`` and both are penalised).
    objective : float
        value + penalty + epsilon * kl, what the solve minimises.
    mass : float
        Mass that the plan moves.
    penalty : float
        What ``unbalanced`` marginals cost.
    outer_iterations, max_iter : int
        Outer iterations, and their limit.
    inner_iterations : int
        Sinkhorn iterations of all outer iterations together.
    settle_iterations, inner_max_iter : int
        Sinkhorn iterations of the last linear problem, zero where the loop's own last one is the
        result; and the limit of these iterations in any problem.
    n_anchors : int or None
        Anchor pairs of the last cost. Like the next two ``None`` without a sampled gradient.
    cost_standard_error, cost_size : float or None
        Root mean squares of the error of the sampled cost, and of itself, over all pairs of points.
    landmarks : dict or None
        Count, rank and estimated error of each side ("X", "Y") that has landmarks.
    distances : dict or None
        What ``distances="auto"`` was for points: its name as ``chosen`` ("geodesic" or a metric),
        ``why``, and the ``agreement`` of each that was tried (of squares: that of their plan in
        straight distances).
    polish_steps, polish_gap : int and float, or None
        Conditional gradient steps of ``polish``, and what the linearised objective could still fall
        by at their end.
    tiles : dict or None
        Where tiles of the plan were skipped: ``bound``, the share of a row's or column's mass that
        this may lose in a half-step; ``kept``, the mean share of tiles computed; ``lists``, how
        often they were chosen; and their ``width``.
    resolution : dict or None
        Of a large problem that was solved on cells of near points: the number of ``cells`` of each
        side; the ``tolerance`` for the ``marginal_error``, which was ``measured`` at so many points
        of each side; and ``value_change``, the relative change of the value since the cells before.
    masses : dict or None
        Where ``mass="auto"`` was asked for: the ``shares`` of the mass that were tried, what each
        ``added`` to the one before it (the mean cost of a pair of points, of a point for a linear
        cost), the ``chosen`` share, by how many times the cost rises there as ``step``, and how
        clearly as ``contrast`` (from 7.5 on; infinite if all of the mass matches).
    allowed : dict or None
        Where some pairs may hold no mass: how many ``entries`` the plan may use, their ``share`` of
        all, and how many ``decided`` source points have but one partner left, with the share of
        the ``mass`` that is theirs.
    route : str
        What was chosen before the solve and why, and what it was expected to take, as
        :func:`torchgw.explain` says it; empty in files of earlier versions.
    """

    loss: str
    value_standard_error: float
    kl: float
    objective: float
    mass: float
    penalty: float
    outer_iterations: int
    max_iter: int
    inner_iterations: int
    settle_iterations: int
    inner_max_iter: int
    n_anchors: int | None
    cost_standard_error: float | None
    cost_size: float | None
    landmarks: dict[str, dict[str, float]] | None
    polish_steps: int | None
    polish_gap: float | None
    tiles: dict[str, Any] | None
    # files of earlier versions do not have it
    distances: Chosen | None = None
    resolution: dict[str, Any] | None = None
    route: str = ""
    masses: dict[str, Any] | None = None
    allowed: dict[str, float] | None = None

    @classmethod
    def of(
        cls, outcome: Outcome, problem: Problem, sides: Spaces, reduction: Reduction | None = None
    ) -> "Report":
        """Collect the numbers of a finished solve."""
        confined = problem.support is not None or problem.restriction is not None
        allowed = count_allowed(problem, reduction) if confined or reduction else None
        ending, strategy, recorder = outcome.ending, outcome.strategy, outcome.recorder
        found, polished, noise = ending.evaluation, ending.polished, outcome.noise
        tiles = strategy.tiling and strategy.tiling.report()
        decision = sides.decision
        return cls(
            loss=problem.loss.name,
            value_standard_error=problem.alpha * found.quadratic.standard_error,
            kl=found.kl,
            objective=found.objective(problem.alpha, ending.epsilon),
            mass=found.mass,
            penalty=found.penalty,
            outer_iterations=len(recorder.history),
            max_iter=strategy.options.max_iter,
            inner_iterations=sum(entry.inner_iterations for entry in recorder.history),
            settle_iterations=recorder.settle_iterations,
            inner_max_iter=strategy.options.inner_max_iter,
            n_anchors=outcome.n_anchors,
            cost_standard_error=noise.standard_error if noise else None,
            cost_size=noise.size if noise else None,
            landmarks=sides.landmarks or None,
            distances=decision
            and Chosen(chosen=decision.chosen, why=decision.why, agreement=decision.agreement),
            polish_steps=polished.steps if polished else None,
            polish_gap=polished.gap if polished else None,
            tiles=tiles._asdict() if tiles else None,
            resolution=outcome.resolution and outcome.resolution._asdict(),
            route=str(outcome.route),
            masses=outcome.overlap and outcome.overlap._asdict(),
            allowed=allowed,
        )

    def log(self) -> Log:
        """List the fields by name."""
        return Log((item.name, getattr(self, item.name)) for item in fields(self))
