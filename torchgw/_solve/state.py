"""What flows through a solve: options, precision, status, the state of the loop, and its file."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from torchgw._boundary.archive import check_writable, read_archive, write_archive
from torchgw._boundary.trees import Decoder, encode
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._gradients.contract import Coupling, Gradient
from torchgw._gradients.dense import PlanMatrix
from torchgw._gradients.factored import Encoding
from torchgw._gradients.relaxed import RelaxedCoupling
from torchgw._gradients.sampled import AnchorCoupling
from torchgw._plans.transport import TransportPlan
from torchgw._problem import table
from torchgw._problem.problem import MarginalRule, Problem
from torchgw._problem.table import Precision, check_options
from torchgw._sinkhorn.annealing import Annealing
from torchgw._sinkhorn.contract import Backend
from torchgw._tensors.deadline import is_over
from torchgw._tensors.ranks import Ranks
from torchgw._typing import Iteration, Marginals, Potentials


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class Options(table.Options):
    """Options of a call that are checked, and what else the solver goes by."""

    epsilon: float | Literal["auto"] = "auto"
    rule: MarginalRule | None = None  # relaxed marginals; None for strict ones
    fixed_point: bool = False  # whether the plan is to be differentiated at a fixed point
    ranks: Ranks | None = None  # processes that share the solve
    # what an earlier solve of the same call has said of its time
    told: Literal["nothing", "loops", "all"] = "nothing"

    @classmethod
    def of(
        cls, asked: table.Options, epsilon: float | Literal["auto"], rule: MarginalRule | None
    ) -> "Options":
        """Read the options of a call; epsilon is a number, where a tensor was given."""
        check_options(epsilon=epsilon)
        read = {
            "epsilon": epsilon,
            "objective_tol": 0.0 if asked.differentiable else asked.objective_tol,
            "precision": merge_precision(asked.dtype, asked.precision),
            "resolution": asked.resolution or None,
        }
        fixed = asked.differentiable == "implicit"
        return cls(**vars(asked) | read, rule=rule, fixed_point=fixed)

    def __post_init__(self) -> None:
        """Refuse what does not go together; every option has been checked."""
        self.check_gradient(self.gradient)

    def check_gradient(self, gradient: str, advice: Callable[[], str] = str) -> None:
        """Refuse the sampled gradient, asked for or chosen, where an exact one is needed."""
        if gradient != "sampled":
            return
        if self.polish:
            raise UnsupportedError(
                "`polish=True` needs an exact gradient, and this solve samples its own. Pass "
                f"gradient='dense' or 'factored', or polish=False.{advice()}"
            )
        if self.fixed_point:
            raise UnsupportedError(
                "differentiable='implicit' needs a fixed point, and a sampled gradient has none. "
                "Pass gradient='dense' or 'factored', or differentiable='value'."
            )

    def check_combination(self, *, linear: bool, weight: float = 1.0) -> None:
        """Refuse what relaxed marginals do not combine with, with the reason."""
        if self.rule is None:
            return
        differentiable, checkpoint = self.differentiable is not None, self.checkpoint is not None
        squares, chosen = self.rule.squares, self.rule.chosen
        _refuse(
            "`unbalanced_type='l2'` solves for some penalties by entropy, and {}. Leave one of "
            "them out.",
            {
                "`differentiable` follows penalties by entropy": squares and differentiable,
                "`checkpoint` keeps one solve of several": squares and checkpoint,
                "`alpha=0` is unbalanced transport, which ot.solve has": squares and weight == 0,
            },
        )
        if self.unbalanced_unit != "value" and differentiable:
            raise UnsupportedError(
                "unbalanced_unit='scale' follows the inputs, and derivatives take `unbalanced` as "
                "it is. Pass the number, in units of the value."
            )
        _refuse(
            "mass='auto' makes a solve for each of many masses, and {}. Pass the number that "
            "mass='auto' finds without it, `result.report.mass`.",
            {
                "`differentiable` follows one": chosen and differentiable,
                "`checkpoint` keeps one": chosen and checkpoint,
            },
        )
        relaxed = "`unbalanced`" if self.rule.mass is None else "`mass`"
        if self.regularization == "proximal":
            raise UnsupportedError(
                f"regularization='proximal' is for plans of given marginals, and {relaxed} relaxes "
                "them. Pass regularization='entropic'."
            )
        if self.polish and not self.rule.polyhedral:
            raise UnsupportedError(
                "`polish=True` moves between plans whose marginals are given, free or bounded, and "
                f"{relaxed} penalises them. Pass polish=False, (inf, 0) or (0, inf)."
            )
        if differentiable and self.gradient == "sampled":
            raise UnsupportedError(
                f"`differentiable` with {relaxed} needs an exact gradient. Pass gradient='auto', "
                "'dense' or 'factored'."
            )
        if linear and checkpoint and self.rule.fixed_mass is None:
            raise UnsupportedError(
                "`checkpoint` with a linear cost (`M` or `features`) needs plans of a mass that is "
                "known. Make one side strict, (inf, rho), or pass `mass`."
            )

    def check_search(self, *, given: bool, crossed: bool) -> None:
        """Refuse a thorough search where none would be made, and a start of many masses."""
        if given and self.rule is not None and self.rule.chosen:
            raise UnsupportedError(
                "mass='auto' begins each of its masses at the plan of another. Leave `init` out, "
                "or pass the mass of that plan."
            )
        if self.search != "thorough":
            return
        _refuse(
            "search='thorough' follows many starts on all points, and {}. Leave one of them out.",
            {
                "`init` says where to start": given,
                "n_init=1 asks for a single start": self.n_init == 1,
                "relaxed marginals have starts of their own": self.rule is not None,
                "with the absolute loss that takes too long": not crossed,
            },
        )

    def check_resolution(self, *, given: bool) -> "Options":
        """Refuse cells where all points are needed; where cells are "auto", take all points."""
        why = {
            "`init` says where to start": given,
            "derivatives are those of a plan of all points": self.differentiable is not None,
            "`checkpoint` keeps where the loop over all points stands": self.checkpoint is not None,
            "proximal steps sharpen the plan of points": self.regularization == "proximal",
            "`polish` makes a plan of points": bool(self.polish),
            "the masses of `unbalanced` and `mass` are not known beforehand": self.rule is not None,
            f"gradient={self.gradient!r} reads no means of them as 'factored' does": (
                self.gradient not in ("auto", "factored")
            ),
        }
        if self.resolution not in ("auto", None):
            _refuse(
                "`resolution` solves on cells of near points, and {}. Leave out `resolution`, or "
                "the other.", why,
            )  # fmt: skip
        return replace(self, resolution=None) if any(why.values()) else self

    @property
    def sharp(self) -> bool:
        """Whether the plan is to minimise the objective without entropy: proximal or polished."""
        return bool(self.polish) or (self.polish is None and self.regularization == "proximal")

    @property
    def patience(self) -> int:
        """Checks without progress before a sampled solve stops."""
        return max(self.min_iter // 2, 20)


def _refuse(text: str, reasons: dict[str, bool]) -> None:
    """Refuse what does not go together, for the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedError(text.format(reason))


def merge_precision(dtype: torch.dtype | None, precision: Precision) -> Precision:
    """Return the precision that ``dtype`` and ``precision`` ask for together."""
    if dtype is None:
        return precision
    names: dict[torch.dtype, Precision] = {torch.float32: "float32", torch.float64: "float64"}
    if precision not in ("auto", names[dtype]):
        raise InvalidInputError(
            f"`dtype={dtype}` contradicts `precision={precision!r}`; pass one of them."
        )
    return names[dtype]


# A solve may count as converged if the exponents are rounded by at most this; in float32 its
# marginal error, and the last change of the plan, may then be as large. [L350] [L478]
RESOLVED = 2e-4


class Dtypes(NamedTuple):
    """Dtypes of a solve."""

    loop: torch.dtype  # of the outer iterations
    settle: torch.dtype  # of the final marginals and values
    again: bool  # whether the outer iterations go on in the second dtype


def rounding(scale: float, epsilon: float, dtype: torch.dtype) -> float:
    """Compute the rounding of the exponents of a plan whose costs have a scale."""
    return 4 * scale / epsilon * torch.finfo(dtype).eps


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


@dataclass
class Recorder:
    """What is collected along the way: history, seconds by phase, the callback."""

    callback: Callable[[Iteration], Any] | None = None
    history: list[Iteration] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    settle_iterations: int = 0  # Sinkhorn iterations of the last linear problem
    ranks: Ranks | None = None  # processes that go on or stop together
    # function that keeps a state in a file, once the loop over all points has begun
    checkpoint: "Callable[[LoopState], None] | None" = None

    def add(self, entry: Iteration) -> bool:
        """Record an iteration; return whether to stop: the callback or the time, on any rank."""
        self.history.append(entry)
        if self.ranks is not None:
            self.ranks.agree("(iteration, epsilon, dual value, error, change)", entry[:5])
        answer = None if self.callback is None else self.callback(entry)
        stop = (isinstance(answer, (bool, np.bool_)) and bool(answer)) or is_over(agreed=True)
        return stop if self.ranks is None else self.ranks.any(stop)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block to a phase, if it ends."""
        clock = perf_counter()
        yield
        self.time(phase, clock)

    def time(self, phase: str, since: float) -> float:
        """Add the seconds since a moment to a phase; return the present moment."""
        now = perf_counter()
        self.timings[phase] = self.timings.get(phase, 0.0) + now - since
        return now


@dataclass(frozen=True)
class Setting:
    """What stays the same throughout a solve."""

    gradient: Gradient
    problem: Problem  # in the dtype of the gradient
    anneal: Annealing
    options: Options
    backend: Backend
    generator: torch.Generator
    recorder: Recorder
    store: bool  # build the (n, m) cost of an iteration: scaling a stored kernel is faster
    tol: float  # change of the coupling and marginal error at which the loop ends
    scale: float  # natural scale of the cost
    dtype: torch.dtype  # of the exponents
    rule: MarginalRule | None = None  # relaxed marginals; None for strict ones

    @property
    def marginals(self) -> Marginals:
        """Weights of the points."""
        return self.problem.marginals

    def rounding(self, epsilon: float) -> float:
        """Return the rounding of the exponents of the plan."""
        return rounding(self.scale, epsilon, self.dtype)


class Solved(NamedTuple):
    """The last linear problem of a loop, if it is solved as well as a result needs, or cut."""

    plan: TransportPlan
    point: Coupling  # where its cost is linearised
    coupling: Coupling  # of the plan
    cut: bool = False  # time is over, and the cost takes too long to be computed again


class LoopState(NamedTuple):
    """What flows through the loop."""

    coupling: Coupling  # where the next cost is linearised
    latest: Coupling  # of the last plan
    potentials: Potentials | None  # of the last plan, cost units; None before there is one
    start: Potentials | None  # where the next linear problem begins
    status: Status = Status.OUTER_LIMIT
    done: int = 0  # outer iterations of the whole solve so far
    annealed: int = 0  # of these since the annealing began; they determine the next epsilon
    solved: Solved | None = None  # what the result can be, if the loop has reached it


# Seconds between two writes: a restart loses so many at most, and one iteration. A choice. [L418]
WRITTEN_EVERY = 60.0
# What is kept of the state of a loop.
_SAVED = "coupling", "latest", "potentials", "start", "done", "annealed"

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Annealing, AnchorCoupling, Encoding, Marginals, PlanMatrix, Potentials, RelaxedCoupling,
    )
}  # fmt: skip


class Saved(NamedTuple):
    """What a checkpoint holds."""

    state: LoopState
    anneal: Annealing


class Checkpoint:
    """A file that the first rank writes every so many seconds, and all ranks read."""

    def __init__(self, path: str | os.PathLike[str], ranks: Ranks | None) -> None:
        self.path = Path(check_writable(path))
        self._ranks = ranks
        self._problem: list[float] = []
        self._written = time.monotonic()

    def read(self, problem: list[float], device: torch.device) -> Saved | None:
        """Read the state of a solve of a problem, known by some numbers, if there is a file."""
        self._problem = problem
        there = self.path.is_file()
        if self._ranks is not None:
            self._ranks.agree(f"whether there is a checkpoint {self.path}", [there])
        if not there:
            return None
        tree, arrays = read_archive(self.path)
        if not isinstance(tree, dict) or tree.get("kind") != "checkpoint":
            raise InvalidInputError(f"{self.path}: no checkpoint of a solve. Pass another path.")
        found = Decoder(arrays, device, _build).decode(tree["fields"])
        same = all(
            math.isclose(old, new, rel_tol=1e-6)
            for old, new in zip(found["problem"], self._problem, strict=True)
        )
        if not same:
            raise InvalidInputError(
                f"{self.path}: a checkpoint of another problem (n, m, scale, epsilon are "
                f"{found['problem'][:4]} there and {self._problem[:4]} now). Remove the file, or "
                "pass another path."
            )
        return Saved(LoopState(**{name: found[name] for name in _SAVED}), found["anneal"])

    def keep(self, setting: Setting, state: LoopState, *, now: bool = False) -> None:
        """Write the state of the loop, if it is time or ``now``; the file is always whole."""
        due = now or time.monotonic() - self._written >= WRITTEN_EVERY
        if not due or (self._ranks is not None and self._ranks.rank > 0):
            return
        arrays: dict[str, Any] = {}
        values = {"problem": self._problem, "anneal": setting.anneal}
        values |= {name: getattr(state, name) for name in _SAVED}
        fields = encode(values, "checkpoint", _parts, arrays)
        write_archive(self.path, {"kind": "checkpoint", "fields": fields}, arrays)
        self._written = time.monotonic()

    def done(self) -> None:
        """Remove the file of a solve that has ended."""
        if self._ranks is None or self._ranks.rank == 0:
            self.path.unlink(missing_ok=True)


def _parts(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Name a part of a state and take it apart."""
    name = type(value).__name__
    if _KINDS.get(name) is not type(value):
        return None
    return name, value._asdict() if hasattr(value, "_asdict") else dict(vars(value))


def _build(name: str, parts: dict[str, Any]) -> Any:
    """Make a part of a state again."""
    return _KINDS[name](**parts)
