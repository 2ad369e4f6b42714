"""Where a solve begins: what the user passed as ``init``, or what a multi-start has found."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._boundary.arrays import check_plan, to_tensor
from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw._gradients.contract import Plan
from torchgw._plans.contract import Anchors
from torchgw._plans.given import PairPlan, StoredPlan
from torchgw._plans.transport import DualPlan
from torchgw._problem.problem import Problem
from torchgw._search.all_points import search_all_points
from torchgw._search.alternatives import Alternative, Search, is_whole
from torchgw._search.batch import Searched
from torchgw._search.doubts import WHY_SUBSAMPLE
from torchgw._search.isometry import Isometry
from torchgw._search.matching import match_points
from torchgw._search.optima import DEFAULT_STARTS, find_optima
from torchgw._search.standard import put_in_standard_form
from torchgw._search.starts import GUESS_EPSILON
from torchgw._search.structure import is_smeared, is_structured
from torchgw._search.subsample import Coarse
from torchgw._sinkhorn.choose import choose_backend
from torchgw._solve.options import Options
from torchgw._solve.state import LoopState, Setting
from torchgw._typing import Marginals, Potentials


class Guess(NamedTuple):
    """Where a solve begins."""

    plan: Plan | None  # None is the product plan
    potentials: Potentials | None  # of the linear problem at that plan
    epsilon: float  # at which annealing begins, as a share of the natural scale
    patient: bool = False  # annealing is slow, as it is the only search
    whole: bool = False  # potentials are of the whole cost, not of the reduced one
    sharp: bool = False  # proximal steps go on from the plan itself, if they lead to polishing
    ended: bool = False  # the plan is one at which a search has ended, which steps are not to leave


# Ambiguity above which a few points leave open which optimum is the best. [L292]
_DOUBTED = 0.7
# Annealing from the natural scale of the cost forgets every plan but the product plan; slowly where
# nothing else tells where to start.
PRODUCT = Guess(None, None, 1.0)
PATIENT = PRODUCT._replace(patient=True)


def first_guess(
    problem: Problem,
    sample: Coarse | None,
    init: Any,
    options: Options,
    epsilon: float,
    match: Isometry | None = None,
    made: Sequence[Searched] = (),
    again: str | None = None,
) -> tuple[Guess, Search | None]:
    """Find where to start, on the subsample if there is one, and what a multi-start found."""
    # A `match` that keeps all distances is the start, if there is one: no other optimum is better.
    # Searches that were `made` before are not made again.
    # `again` is the gradient by which the problem can be solved from another start as well.
    if isinstance(init, Guess):
        return init, None
    if init is not None and (options.n_init or 1) > 1:
        raise InvalidInputError(
            f"`init` says where to start, so `n_init={options.n_init}` starts have no use. Pass "
            "one of them."
        )
    if not searchable(problem, init, options):
        mass = options.rule.fixed_mass if options.rule else 1.0
        return _read_init(init, problem.marginals, mass), None
    standard = put_in_standard_form(problem) if sample is None else None
    searched = problem if sample is None else sample.problem
    if standard is not None:
        searched, epsilon = standard.problem, standard.epsilon(epsilon)
    backend = choose_backend(options.backend, problem.source.device, torch.float32)
    copies = None
    if match is not None and standard is not None:
        points = torch.arange(problem.source.n, device=match.partners.device)
        plan = problem.marginals.a.diag()
        kept = Alternative(0.0, "copies", plan, points, match.partners, (len(plan), len(plan)))
        copies = standard.lower(kept).plan
    count = options.n_init or DEFAULT_STARTS
    search = find_optima(searched, epsilon, count, backend, made, match=copies)
    if match is not None:
        # a search on few points may say nothing of the others, and so nothing of other optima
        told = is_whole(searched, search) or is_structured(searched, search)
        a, b = problem.marginals
        pairs = Anchors(torch.arange(len(a), device=a.device), match.partners)
        # potentials of zero are optimal at a match that keeps all distances
        zero = Potentials(torch.zeros_like(a), torch.zeros_like(b))
        guess = Guess(PairPlan(pairs, a, (len(a), len(b))), zero, 0.0, whole=True)
        if not told:
            return guess, Search((), math.nan)
        return guess, search if standard is None else standard.lift(search)
    # whether only some points were searched, and they do not tell the best optimum from the others
    unsure = not is_whole(searched, search) and search.ambiguity > _DOUBTED
    matched = match_points(searched) if unsure or not search.alternatives else None
    alone = matched is not None and not search.alternatives
    if sample is None:
        search = search_all_points(
            searched, epsilon, search, options.n_init, options.search, again,
            backend=backend, told=options.told == "all",
            sharpened=options.regularization == "proximal",
        )._replace(match=matched)  # fmt: skip
    if standard is not None:
        search = standard.lift(search)
    if alone:
        guess = Guess(matched if sample is not None else search.match, None, GUESS_EPSILON)
    elif search.compare or not search.alternatives:
        guess = PATIENT
    else:
        guess = best_found(problem, search)
        if guess.plan is not None and (options.regularization == "entropic" or search.met):
            guess = guess._replace(potentials=search.potentials, whole=True, sharp=search.met)
        guess = guess._replace(ended=search.settled)
    if sample is not None:
        search = sample.lift(search, (problem.source.n, problem.target.n))
        if options.search == "thorough":
            search = search._replace(doubt=WHY_SUBSAMPLE)
    return guess, search


def named_start(init: Any) -> str:
    """Say what was passed as ``init``; nothing is empty."""
    if init is None or isinstance(init, Guess):
        return ""
    if isinstance(init, tuple) and not isinstance(init, Anchors):
        return "potentials"
    return "an optimum of a search" if isinstance(init, Alternative) else "a plan or a matching"


def best_found(problem: Problem, search: Search) -> Guess:
    """Begin at the best optimum that a search has found."""
    if is_smeared(problem, search):
        # begun at the smaller epsilon of the optimum, the plan would stay where it is
        return PRODUCT
    guess = from_alternative(search.alternatives[0], problem.source.device)
    return guess._replace(patient=search.compare)


def searchable(problem: Problem, init: Any, options: Options) -> bool:
    """Whether to search for a start: none is given, and there may be several optima."""
    trivial = problem.alpha == 0 or min(problem.source.n, problem.target.n) == 1
    return init is None and options.n_init != 1 and not trivial


def _read_init(init: Any, marginals: Marginals, mass: float | None) -> Guess:
    """Read the start that ``init`` asks for, of a problem whose plans have a mass, or any."""
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
    gradient = setting.gradient
    if guess.plan is None:
        coupling = gradient.start().perturbed()
    else:
        coupling = gradient.update(guess.plan, None, setting.generator)
    # potentials of strict marginals are of little use to relaxed ones
    potentials = guess.potentials if setting.rule is None else None
    if potentials is not None and guess.whole:
        potentials = Potentials(potentials.f - gradient.row, potentials.g - gradient.column)
    return LoopState(coupling, coupling, potentials, potentials)
