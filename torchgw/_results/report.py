"""From the outcome of a solve to what the user gets."""

from __future__ import annotations

from torchgw._errors import ConvergenceWarning, warn_user
from torchgw._problem.problem import Problem
from torchgw._problem.providers import Spaces
from torchgw._results.extension import Extension
from torchgw._results.result import GWResult
from torchgw._solve.pipeline import Outcome

__all__ = ["make_result"]


def make_result(outcome: Outcome, problem: Problem, sides: Spaces, seed: int) -> GWResult:
    """Assemble the result and warn if it has not converged."""
    ending, strategy, search = outcome.ending, outcome.strategy, outcome.search
    found, polished, options = ending.evaluation, ending.polished, strategy.options
    recorder, tiles = outcome.recorder, strategy.tiling and strategy.tiling.report()
    quadratic = problem.alpha * found.quadratic.value
    value_linear = (1 - problem.alpha) * found.linear
    if not ending.status.converged:
        warn_user(ending.status.advice, ConvergenceWarning)
    return GWResult(
        lazy_plan=ending.plan,
        potential_a=outcome.potentials.f,
        potential_b=outcome.potentials.g,
        value_quad=quadratic,
        value_linear=value_linear,
        marginal_a=found.masses.a,
        marginal_b=found.masses.b,
        marginal_error=found.marginal_error,
        status=ending.status,
        epsilon=ending.epsilon,
        alpha=problem.alpha,
        scale=(sides.origins[0].scale, sides.origins[1].scale),
        gradient=strategy.gradient,
        backend=outcome.backend,
        precision=strategy.precision,
        random_state=seed,
        alternatives=search.alternatives if search else (),
        ambiguity=search.ambiguity if search else float("nan"),
        history=tuple(recorder.history),
        timings=dict(recorder.timings),
        log={
            "loss": problem.loss.name,
            "value_standard_error": problem.alpha * found.quadratic.standard_error,
            "kl": found.kl,
            "objective": quadratic + value_linear + found.penalty + ending.epsilon * found.kl,
            "mass": found.mass,
            "penalty": found.penalty,
            "outer_iterations": len(recorder.history),
            "max_iter": options.max_iter,
            "inner_iterations": sum(entry.inner_iterations for entry in recorder.history),
            "settle_iterations": recorder.settle_iterations,
            "inner_max_iter": options.inner_max_iter,
            "n_anchors": outcome.n_anchors,
            "cost_standard_error": outcome.noise.standard_error if outcome.noise else None,
            "cost_size": outcome.noise.size if outcome.noise else None,
            "landmarks": sides.landmarks or None,
            "polish_steps": polished.steps if polished else None,
            "polish_gap": polished.gap if polished else None,
            "tiles": tiles._asdict() if tiles else None,
        },
        extension=Extension.of(
            strategy.gradient,
            outcome.linearised,
            outcome.coupling,
            sides.origins,
            ending.unpolished,
            strategy.mass,
        ),
    )
