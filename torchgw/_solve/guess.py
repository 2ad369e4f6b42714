"""Where a solve begins: what the user passed, or an optimum, as a state of the loop."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._boundary.arrays import check_plan, to_tensor
from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw._plans.contract import Anchors, Plan
from torchgw._plans.given import PairPlan, StoredPlan
from torchgw._plans.transport import DualPlan, TransportPlan
from torchgw._problem.problem import Problem, spread
from torchgw._sinkhorn.annealing import ANNEALING_TOLERANCE
from torchgw._sinkhorn.problem import Cost, DenseCost
from torchgw._solve.state import LoopState, Options, Setting
from torchgw._solve.step import prepare, solve_linear
from torchgw._starts.alternatives import Alternative
from torchgw._starts.chain import GUESS_EPSILON
from torchgw._typing import Marginals, Potentials

# Iterations of a linear problem that is solved roughly. [L297]
INNER = 200


class Guess(NamedTuple):
    """Where a solve begins."""

    plan: Plan | None  # None is the product plan
    potentials: Potentials | None  # of the linear problem at that plan
    epsilon: float  # at which annealing begins, as a share of the natural scale
    patient: bool = False  # annealing is slow, as it is the only search
    whole: bool = False  # potentials are of the whole cost, not of the reduced one
    sharp: bool = False  # proximal steps go on from the plan itself, if they lead to polishing
    ended: bool = False  # the plan is one at which a search has ended, which steps are not to leave
    linear: bool = False  # the plan is the best for the linear cost alone
    named: str = ""  # what it was passed as, if it was passed


# Annealing from the natural scale of the cost forgets every plan but the product plan; slowly where
# nothing else tells where to start.
PRODUCT = Guess(None, None, 1.0)
PATIENT = PRODUCT._replace(patient=True)
LINEAR = Guess(None, None, GUESS_EPSILON, linear=True)


def named_start(init: Any) -> str:
    """Say what was passed as ``init``; nothing is empty."""
    if init is None:
        return ""
    if isinstance(init, Guess):
        return init.named
    if isinstance(init, tuple) and not isinstance(init, Anchors):
        return "potentials"
    return "an optimum of a search" if isinstance(init, Alternative) else "a plan or a matching"


def searchable(problem: Problem, init: Any, options: Options) -> bool:
    """Whether to search for a start: none is given, and there may be several optima."""
    if init is not None and (options.n_init or 1) > 1:
        raise InvalidInputError(
            f"`init` says where to start, so `n_init={options.n_init}` starts have no use. Pass "
            "one of them."
        )
    trivial = problem.alpha == 0 or min(problem.shape) == 1
    # few points say little of what others may be matched with, or of how groups stand to each other
    trivial |= problem.restriction is not None
    trivial |= options.rule is None and problem.has_one_plan
    return init is None and options.n_init != 1 and not trivial


def read_init(init: Any, marginals: Marginals, mass: float | None = 1.0) -> Guess:
    """Read the start that ``init`` asks for, of a problem whose plans have a mass, or any."""
    if isinstance(init, Guess):
        return init
    return _as_guess(init, marginals, mass)._replace(named=named_start(init))


def _as_guess(init: Any, marginals: Marginals, mass: float | None) -> Guess:
    # A plan is continued at the target epsilon. Pairs and optima of a coarse problem are rough:
    # they are taken up at a larger epsilon, which smooths them without forgetting them.
    device = marginals.a.device
    shape = (len(marginals.a), len(marginals.b))
    if init is None:
        return PRODUCT
    if isinstance(init, Alternative):
        _check_shape(init.shape, shape)
        return from_alternative(init, device)
    if isinstance(init, tuple) and not isinstance(init, Anchors):
        return Guess(None, _potentials(init, shape, device), 0.0, whole=True)
    plan = getattr(init, "lazy_plan", init)
    if isinstance(plan, DualPlan):
        _check_shape(plan.shape, shape)
        here, name = plan.potentials.f.device, "init" if plan is init else "init.lazy_plan"
        if here != device:
            raise InvalidInputError(
                f"`init` lies on {here}, the problem on {device}. Pass `device={str(here)!r}` or "
                f"`init={name}.to_dense()`."
            )
        return Guess(plan.giving(in_numpy=False), plan.potentials, 0.0)
    if hasattr(plan, "to_dense") and not isinstance(plan, Tensor):
        name = "init" if plan is init else "init.lazy_plan"
        raise InvalidTypeError(
            f"`{name}` is a {type(plan).__name__}, which is read by products alone. Pass "
            f"`{name}.to_dense()`."
        )
    table = to_tensor("init", init)
    if not table.dtype.is_floating_point and table.dtype is not torch.bool:
        return Guess(_matching(table.to(device).long(), marginals), None, GUESS_EPSILON)
    return Guess(StoredPlan(check_plan(table, shape, mass).to(device)), None, 0.0)


def from_alternative(found: Alternative, device: torch.device) -> Guess:
    """Turn an optimum of a coarse problem into a start for the whole one."""
    parts = found.plan, found.source, found.target
    plan, source, target = (to_tensor("init", part) for part in parts)
    s, t = plan.shape
    pairs = Anchors(source.repeat_interleave(t), target.repeat(s))
    mass = plan.flatten()
    used = mass > 0
    pairs = Anchors(*(side[used].to(device) for side in pairs))
    distinct = all(len(set(side.tolist())) == len(side) for side in (source, target))
    pair_plan = PairPlan(pairs, mass[used].to(device), found.shape, distinct=distinct)
    return Guess(pair_plan, None, found.epsilon)


def _potentials(init: tuple[Any, ...], shape: tuple[int, int], device: torch.device) -> Potentials:
    if len(init) != 2:
        raise InvalidInputError(
            f"`init` as a tuple must be a pair of potentials (f, g); got {len(init)} items. "
            "Pass a plan or a matching as an array."
        )
    parts = []
    for name, value, size in zip("fg", init, shape, strict=True):
        part = to_tensor("init", value).to(device, torch.float64)
        if tuple(part.shape) != (size,):
            raise InvalidInputError(
                f"`init` as a pair of potentials (f, g) must have shapes ({shape[0]},) and "
                f"({shape[1]},); got {tuple(part.shape)} for {name}."
            )
        if not bool(torch.isfinite(part).all()):
            raise InvalidInputError(f"`init` has NaN or infinity in the potential {name}.")
        parts.append(part)
    return Potentials(*parts)


def _matching(table: Tensor, marginals: Marginals) -> PairPlan:
    """Make the coupling of a matching: a partner of each source point, or pairs of indices."""
    a, b = marginals
    n, m = len(a), len(b)
    if table.ndim == 2 and table.shape[1] == 2 and len(table):
        source, target = table.unbind(1)
        mass = a.new_full((len(table),), 1 / len(table))
    elif tuple(table.shape) == (n,):
        source = (table != -1).nonzero()[:, 0]
        target = table[source]
        mass = a[source] / a[source].sum()
    else:
        raise InvalidInputError(
            f"`init` as a matching must be integers of shape ({n},), the target of each source "
            f"point or -1 for none, or (pairs, 2); got shape {tuple(table.shape)}. A plan has "
            "floating-point entries."
        )
    for name, index, size in (("source", source, n), ("target", target, m)):
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise InvalidInputError(
                f"`init` as a matching must have {name} indices within 0 and {size - 1}; got "
                f"{int(index.min())} to {int(index.max())}."
            )
    if not len(mass) or not bool(torch.isfinite(mass).all()):
        raise InvalidInputError("`init` as a matching must match at least one point with weight.")
    return PairPlan(Anchors(source, target), mass, (n, m))


def _check_shape(got: tuple[int, int], expected: tuple[int, int]) -> None:
    if got != expected:
        raise InvalidInputError(f"`init` must be a plan of shape {expected}; got {got}.")


def starting_point(setting: Setting, guess: Guess) -> LoopState:
    """Make the state of the loop from which a guess starts."""
    gradient, support = setting.gradient, setting.problem.support
    if guess.linear:
        coupling = gradient.update(_best_linear(setting, guess.epsilon), None, setting.generator)
    elif guess.plan is None and support is not None:
        coupling = gradient.update(_most_even(setting, support), None, setting.generator)
        coupling = coupling.perturbed()
    elif guess.plan is None:
        coupling = gradient.start().perturbed()
    else:
        coupling = gradient.update(guess.plan, None, setting.generator)
    # potentials of strict marginals are of little use to relaxed ones
    potentials = guess.potentials if setting.rule is None else None
    if potentials is not None and guess.whole:
        potentials = Potentials(potentials.f - gradient.row, potentials.g - gradient.column)
    return LoopState(coupling, coupling, potentials, potentials)


def _most_even(setting: Setting, support: Tensor) -> Plan:
    """Compute the plan nearest to a x b on a support, roughly."""
    nothing = torch.zeros(support.shape, dtype=setting.dtype, device=support.device)
    return _rough(setting, DenseCost(nothing), 1.0)


def _best_linear(setting: Setting, share: float) -> Plan:
    """Compute the best plan for the linear cost alone, at a share of its spread, roughly."""
    cost = setting.problem.linear
    assert cost is not None
    scale = spread(cost) or 1.0
    return _rough(setting, cost.to(setting.dtype), share * scale)


def _rough(setting: Setting, cost: Cost, epsilon: float) -> Plan:
    """Solve a linear problem, roughly."""
    prepared = prepare(setting, cost, epsilon)
    inner = solve_linear(setting, prepared, None, max_iter=INNER, tol=ANNEALING_TOLERANCE)
    return TransportPlan.of(prepared, inner.potentials)
