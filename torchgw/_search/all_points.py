"""The search on all points, where few of them do not represent a problem."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchgw._batch.packing import AUTO_EPSILON
from torchgw._plans.contract import Plan
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem, entries_that_matter, hops_of, is_sparse
from torchgw._problem.table import SearchName
from torchgw._search.beliefs import match_graphs
from torchgw._search.chains import STARTS, Guess, Repair, climb
from torchgw._search.optima import (
    DEFAULT_STARTS,
    LEAST_EPSILON,
    MATCHED,
    SEARCHED,
    find_optima,
    way_to_call,
)
from torchgw._search.stack import Stack, can_stack
from torchgw._search.world import World
from torchgw._sinkhorn.choose import batch_solver
from torchgw._sinkhorn.contract import Backend
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.problem import DenseCost, softmin
from torchgw._starts.alternatives import (
    AGREED,
    WHY_BESIDE,
    WHY_FAST,
    WHY_OPEN,
    WHY_SINGLE,
    WHY_TIME,
    Alternative,
    Search,
    among_all,
    different_optima,
    is_whole,
)
from torchgw._starts.chain import (
    AGREED_SOON,
    COMPARED_AT,
    KEPT_SOON,
    NOTHING_BEGUN,
    SAME,
    STANDS_OUT,
    Climbed,
    affordable_chains,
    is_smeared,
    near,
)
from torchgw._starts.coarse import Coarsened, CoarseProblem, centre, coarse_problem, is_graph
from torchgw._starts.standard import put_in_standard_form
from torchgw._tensors.deadline import is_over, say_more, say_share
from torchgw._tensors.machine import slowness
from torchgw._typing import Potentials
from torchgw.distances.base import DistanceProvider
from torchgw.distances.geodesics import Geodesics
from torchgw.distances.precomputed import PrecomputedDistance
from torchgw.distances.sampling import choose_points


def tells_all(problem: Problem, first: Search) -> bool:
    """Whether the optima of few points determine where all points go."""
    # entries of adjacency matrices and similarities are no distances, and small ones abound
    least = limits_of(problem.source.device).no_distance
    few = first.resolution > least or is_structured(problem, first)
    return few and not any(map(_are_no_distances, problem.sides))


def is_structured(problem: Problem, found: Search | None = None) -> bool:
    """Tell whether points have others like them, so that few of them represent all."""
    # The few are those of a search, if it has drawn some.
    drawn = found.points if found else (None, None)
    sides = zip(problem.sides, problem.marginals, drawn, strict=True)
    most = limits_of(problem.source.device).lonely
    return all(_loneliness(*side) <= most for side in sides)


def is_blurred(problem: Problem, found: Search) -> bool:
    """Tell whether the best plan between the nodes of two graphs hardly tells partners."""
    best = found.alternatives[0]
    if best.epsilon == 0 or not is_smeared(best.plan):
        return False
    tables = problem.source.matrix(), problem.target.matrix()
    return all(table is not None and is_sparse(table) for table in tables)


def _are_no_distances(provider: DistanceProvider) -> bool:
    """Whether the first point is further from itself than from others, or most entries are zero."""
    columns, table = provider.columns(torch.arange(1, device=provider.device)), provider.matrix()
    similarities = bool(provider.n * columns[0, 0] > columns.sum())
    return similarities or (table is not None and is_sparse(table))


def _loneliness(provider: DistanceProvider, weights: Tensor, drawn: Tensor | None) -> float:
    """Root mean square difference of a point's distances to those of the nearest coarse point."""
    # Relative to the deviation of distances: about 1 where points have nothing in common. That also
    # holds for adjacency matrices and similarities, which say "near" with large numbers or not at
    # all.
    few = limits_of(provider.device).few_points
    points = choose_points(provider, weights, few).indices if drawn is None else drawn
    columns = provider.columns(points).double()
    others = columns.clone()
    others[points, torch.arange(len(points), device=points.device)] = torch.inf
    nearest = points[others.argmin(1)]
    columns = torch.cat([way.columns(points).double() for way in provider.ways()], dim=1)
    error = (columns - columns[nearest]).square().mean(1) @ weights
    variance = columns.var().clamp_min(torch.finfo(columns.dtype).tiny)
    return float((error / variance).sqrt())


# How the search on all points goes on from that of few. "told": these tell where all go; "checked":
# clearly, and their optima are followed on all, of few pairs; "full" and "brief": they leave open
# which optimum is the best, of few pairs and of more; "unclear": so do starts on all points;
# "chains": few points tell nothing of the others.
Course = Literal["told", "checked", "full", "brief", "unclear", "chains"]


def search_all_points(
    problem: Problem,
    epsilon: float,
    first: Search,
    n_init: int | None,
    how: SearchName,
    gradient: str | None,
    *,
    backend: Backend | None = None,
    told: bool = False,
    sharpened: bool = False,
) -> Search:
    """Follow ``n_init`` chains on all points where a few do not represent them, or say so."""
    # Chains are compared at the target `epsilon`, together with the optima that few points have
    # found `first`, if these are of all points.
    # Unless `gradient` is None the problem can be solved from another start too, by that gradient.
    # Whether it has been `told` before how long that takes, and whether the plan is `sharpened`.
    backend = backend or EagerBackend()
    n, m = problem.shape
    limits = limits_of(problem.source.device)
    if max(n, m) < limits.least_points or problem.loss.cross is None:
        return first
    if first.alternatives and is_over():
        return first._replace(doubt=WHY_TIME)
    plain = how == "auto" and n_init is None
    course = _course(problem, first, how, plain=plain)
    if course == "told":
        if first.alternatives:
            return first
        first = search_twice(problem, how, gradient)
        if not first.compare:
            return first
        return find_optima(problem, epsilon, n_init or DEFAULT_STARTS, backend, rough=True)
    affordable = _affordable(problem, how)
    if affordable < limits.fewest_chains:
        match = None if how == "fast" else match_graphs(problem)
        if match is not None:
            # values of few points are none of all: their optima are followed beside the match
            return first._replace(alternatives=(match,), doubt=WHY_BESIDE, few=first)
        return first._replace(doubt=WHY_SINGLE["thorough" if how == "thorough" else "auto"])
    whole = coarse_problem(problem, max(n, m))
    coarse = whole.problem
    guesses = [Guess(one.label, *among_all(one, coarse)) for one in first.alternatives]
    if _is_found(whole, epsilon, first, guesses, course):
        return first
    if how == "fast":
        return first._replace(doubt=WHY_FAST)
    # for a far smaller epsilon a ladder of stages would not end
    target = max(epsilon, LEAST_EPSILON * whole.scale)
    device = problem.source.device
    stack = None
    if n * m <= limits.stacked and can_stack(problem, strict=True):
        scale = None if problem.support is None else whole.scale
        stack = Stack.of(whole.problem, target, device=device, scale=scale, loss=problem.loss)
    most = limits.chains_of(how)
    if course == "checked":
        assert stack is not None
        # the ends of few starts are kicked and mixed for as long as those of many
        say_share(math.sqrt(len(guesses) / most), "few points are checked on all")
        found = climb(whole, target, 0, guesses, solver=batch_solver(backend), stack=stack)
        if found.agreed:
            alternatives, ambiguity = different_optima(whole, found.trials, found.plans, (n, m))
            return Search(alternatives, ambiguity, found.trials, settled=True)
        guesses = _ends(found, coarse)
    brief, left_open = course == "brief", course in ("brief", "full")
    why = "leave open which optimum is the best" if left_open else "do not tell where all go"
    read = whole.problem.x, whole.problem.y, whole.problem.base
    call = way_to_call("chains", device, backend, read)
    begun = NOTHING_BEGUN
    if brief:
        # a few chains have no moves that follow them
        say_share(_BRIEF * min(1.0, limits.open_chains / most), f"few points {why}")
        found = climb(
            whole, target, limits.open_chains, guesses, limits.open_chains,
            solver=batch_solver(backend), told=told, repair=False, call=call, sides=problem.sides,
        )  # fmt: skip
        begun = found.begun
    if not (brief and (found.agreed or _is_met(found, guesses))):
        guesses = _ends(found, coarse) if brief else guesses
        count = min(n_init or most, affordable)
        searched = SEARCHED if max(n, m) > limits.few_points and is_whole(problem, first) else 0.0
        share = min(1.0, searched + count / most)
        soon = KEPT_SOON if is_graph(whole.problem) else AGREED_SOON if stack is None else 1.0
        say_share(soon * share, f"few points {why}")
        found = climb(
            # ends of the few chains are at the target [L1866]
            whole, target, count, () if brief else guesses, 2 * affordable,
            solver=batch_solver(backend), told=told, sharpened=sharpened and plain,
            # few points have told where clusters go
            repair=not left_open or brief,
            stack=stack,
            share=share if soon < 1 else 0.0,
            call=call,
            sides=problem.sides,
            begun=begun,
        )  # fmt: skip
    alternatives, ambiguity = different_optima(whole, found.trials, found.plans, (n, m))
    stands_out = ambiguity < STANDS_OUT and not found.alone
    known = _holds(found, guesses) if course == "full" else brief and _is_met(found, guesses)
    certain = found.agreed or stands_out or known
    doubt = "" if certain else WHY_OPEN[how].format(count=len(found.trials))
    potentials = None
    # smaller problems are solved in no time, and a few iterations more make them more exact
    if problem.plain and max(n, m) > limits.few_points and found.plans.shape[1:] == (n, m):
        potentials = _of_whole_cost(whole, found.plans[0], found.g, target)
    return Search(
        alternatives, ambiguity, found.trials, doubt, potentials=potentials, met=found.met,
        settled=found.settled, few=first if left_open or course == "unclear" else None,
    )  # fmt: skip


def _course(problem: Problem, first: Search, how: SearchName, *, plain: bool) -> Course:
    """Decide how to go on from what few points have found."""
    n, m = problem.shape
    limits = limits_of(problem.source.device)
    if how == "thorough" or not tells_all(problem, first):
        return "chains"
    if not plain:
        return "told"
    if _is_unclear(problem, first):
        return "unclear"
    small = n * m <= limits.stacked
    if first.ambiguity > limits.left_open:
        return "full" if small else "brief" if n * m < limits.open_most else "told"
    # what few points tell clearly is seldom wrong, and then costs no chains to put right
    return (
        "checked"
        if small and can_stack(problem, strict=True) and is_whole(problem, first)
        else "told"
    )


def _is_found(
    whole: Coarsened, epsilon: float, first: Search, guesses: Sequence[Guess], course: Course
) -> bool:
    """Whether chains would come to no other plan than few points have, or to none that counts."""
    limits = limits_of(whole.problem.base.device)
    # at the natural scale there is only one plan, and chains would take seconds where plans are
    # blurred
    if epsilon >= (COMPARED_AT if course in ("full", "checked") else 1.0) * whole.scale:
        return True
    value = first.alternatives[0].value if first.alternatives else math.inf
    # nothing is better than a match that keeps all distances
    kept = any(guess.rows is None for guess in guesses) and value <= limits.isometric * whole.scale
    return kept or (course == "checked" and value <= limits.copies * whole.scale)


def _ends(found: Climbed, coarse: CoarseProblem) -> list[Guess]:
    """Take the plans of a search as guesses of another one."""
    ends = zip(found.trials, found.plans, strict=False)
    # copied: plans may lie in the memory of graphs, which other chains replay
    return [Guess(trial.start, plan.to(coarse.base, copy=True), None) for trial, plan in ends]


def _is_unclear(problem: Problem, first: Search) -> bool:
    """Whether starts on all points, made where few points say little, leave the best one open."""
    n, m = problem.shape
    limits = limits_of(problem.source.device)
    needed_all = (
        max(n, m) > limits.few_points and first.resolution == 0 and is_whole(problem, first)
    )
    # of more points that takes long, and optima of nearly the same value are told as ambiguous
    followed = n * m < limits.open_most or first.ambiguity <= limits.left_open
    return needed_all and followed and first.ambiguity > limits.unclear


def _holds(found: Climbed, guesses: Sequence[Guess]) -> bool:
    """Tell whether no chain has come below the optima that few points had found."""
    names, best = {guess.name for guess in guesses}, found.trials[0].objective
    own = (trial.objective for trial in found.trials if trial.start in names)
    return min(own, default=math.inf) - best <= AGREED * abs(best)


def _is_met(found: Climbed, guesses: Sequence[Guess]) -> bool:
    """Tell whether a guess and a chain, which know nothing of each other, have led to the best."""
    names, best = {guess.name for guess in guesses}, found.trials[0].objective
    ends = {True: math.inf, False: math.inf}
    for trial in found.trials:
        ends[trial.start in names] = min(ends[trial.start in names], trial.objective)
    return max(ends.values()) - best <= AGREED * abs(best)


def search_twice(
    problem: Problem, how: SearchName, gradient: str | None, *, relaxed: bool = False
) -> Search:
    """Ask for a second solve, by a gradient, where few points say little, or say why not."""
    nothing = Search((), float("nan"))
    if gradient in (None, "sampled") or problem.loss.cross is None:
        return nothing
    limits = limits_of(problem.source.device)
    cheap = gradient == "factored" and problem.source.n * problem.target.n <= limits.subsample
    if not cheap and _affordable(problem, how) < limits.fewest_chains:
        # relaxed problems have no thorough search
        return nothing._replace(doubt=WHY_SINGLE["thorough" if relaxed else "auto"])
    return nothing._replace(doubt=WHY_FAST) if how == "fast" else nothing._replace(compare=True)


def repair_found(
    problem: Problem,
    found: Alternative,
    epsilon: float,
    how: SearchName,
    backend: Backend,
    *,
    told: bool = True,
) -> Alternative | None:
    """Repair the plan of a solve of all points; ``None`` if that is no better, or takes long.

    How long it takes is said before unless it was ``told``.
    """
    if not few_enough(problem, how):
        return None
    standard = put_in_standard_form(problem)
    if standard is not None:
        problem, epsilon, found = standard.problem, standard.epsilon(epsilon), standard.lower(found)
    n, m = problem.shape
    whole = coarse_problem(problem, max(n, m))
    low = max(epsilon / whole.scale, LEAST_EPSILON)
    if low >= COMPARED_AT:
        return None
    world = World(whole, batch_solver(backend))
    before = world.take(found.label, among_all(found, whole.problem)[0])
    repair = Repair(world, COMPARED_AT)
    if not (told or whole.problem.base.is_cuda):
        ends = 2 * world.seconds_down(world.refine, low)
        seconds = ends + _REPAIRS * world.seconds_of_repair(repair.ladder)
        say_more(slowness() * seconds, "regions are matched anew")
    after = repair.improved(before)
    for chain in (before, after):
        world.finish([chain], low)
    if near(before, after, SAME):
        return None
    plan, *_ = world.rounded([after])
    source, target = (side.indices for side in whole.problem.sides)
    repaired = Alternative(after.value, "repair", plan, source, target, (n, m), epsilon=0.0)
    return repaired if standard is None else standard.lift_optimum(repaired)


def _of_whole_cost(whole: Coarsened, plan: Tensor, g: Tensor, epsilon: float) -> Potentials:
    """Turn g (t,) at a plan of all points into potentials of the cost without centring."""
    # The terms of rows, of columns and the constant that the search leaves out; see HalfGradient.
    coarse = whole.problem
    (x, u, mean_x, _), (y, w, mean_y, _) = centre(coarse.source), centre(coarse.target)
    cost = coarse.base.addmm(x @ plan, y, alpha=-4 * float(coarse.alpha)).float()
    g = g.double()
    f = softmin(DenseCost(cost), coarse.target.weights.log(), g, epsilon, axis=1)
    own_x, own_y = (side.table.square() @ side.weights for side in (coarse.source, coarse.target))
    along, down = plan @ w, plan.T @ u
    row = own_x - 2 * (x @ along + mean_y * u + u @ along + mean_x * mean_y)
    column = own_y - 2 * (y @ down + mean_x * w)
    f, g = f + 2 * coarse.alpha * row + whole.floor, g + 2 * coarse.alpha * column
    source, target = torch.empty_like(f), torch.empty_like(g)
    source[coarse.source.indices], target[coarse.target.indices] = f, g
    return Potentials(source, target)


def few_enough(problem: Problem, how: SearchName) -> bool:
    """Whether chains on all points are of use, and affordable."""
    fewest = limits_of(problem.source.device).fewest_chains
    return problem.loss.cross is not None and _affordable(problem, how) >= fewest


def _affordable(problem: Problem, how: SearchName) -> int:
    """Count the chains that a search may follow."""
    return affordable_chains(limits_of(problem.source.device), how, *problem.shape)


# Repairs of a plan that forecasts count: four if none helps, 16 if two do; and which share of their
# time a few chains take, which no other moves follow. [L1590]
_REPAIRS, _BRIEF = 8, 0.5
# Chains of the match of edges, and by how many times more there are of few entries. [L1282, L1283]
_CHAINS, _TIMES = {"auto": 4, "thorough": 16}, 4


class EdgeMatch(NamedTuple):
    """The best match of two graphs by their edges, or of tables by the entries that matter."""

    found: Alternative
    of_edges: bool
    certain: bool  # whether several chains have led to it, or it is better by far
    keeps_more: bool  # than the plan does, of the edges; entries differ in how much they matter


def match_edges(
    problem: Problem,
    graphs: tuple[Geodesics | None, Geodesics | None],
    plan: Plan,
    doubted: bool,
    how: SearchName,
    backend: Backend,
) -> EdgeMatch | None:
    """Match two graphs by their edges alone: those given, or those that hops tell of.

    Few nodes stand for the others, as distances go, but arcs of a ring or groups of one size may be
    sent to wrong places at little cost. Edges tell more of where a node belongs. So do the few
    entries that matter of tables such as heat kernels, whose others are nearly equal.

    ``None`` if there are none, and if a plan (n, m) is not ``doubted`` and keeps most of them, or
    is large; or is so large that messages along all of them take minutes.
    """
    x = _edges(problem.source, graphs[0])
    y = None if x is None else _edges(problem.target, graphs[1])
    if x is None or y is None or x.dtype != y.dtype:
        return None
    # nodes without weight have no partner, and chains leave them out
    partners = torch.as_tensor(plan.argmax(1), device=x.device)
    before = _kept(x, y, partners.where(problem.marginals.a > 0, -1))
    limits = limits_of(x.device)
    large = len(x) * len(y) > limits.edges
    if not doubted and (large or before >= limits.kept_edges):
        return None
    fewest = min(int(edges.count_nonzero()) for edges in (x, y))
    if large and fewest * max(len(x), len(y)) > limits.walks:
        return None
    say_share(MATCHED, "edges are matched too, of which the plan keeps few")
    source, target = (PrecomputedDistance.unchecked(edges.to(torch.float64)) for edges in (x, y))
    of_edges = Problem(source, target, problem.marginals, 1.0, None)
    standard = put_in_standard_form(of_edges)
    of_edges = of_edges if standard is None else standard.problem
    shape = of_edges.shape
    whole = coarse_problem(of_edges, max(shape))
    low, count = AUTO_EPSILON * whole.scale, _CHAINS[how]
    count *= _TIMES if len(x) * len(y) <= limits.open_most else 1
    # plans are not followed to their ends by edges, nor improved: the objective judges what they
    # lead to [L1687, L1774]; from the entries that matter of a table all moves are needed [L1851]
    given = x.dtype == torch.bool
    moves, affordable = (STARTS, 0) if given else (None, 2 * _affordable(of_edges, how))
    chains = climb(
        whole, low, count, (), affordable,
        solver=batch_solver(backend), sides=of_edges.sides, moves=moves,
    )  # fmt: skip
    optima, ambiguity = different_optima(whole, chains.trials, chains.plans, shape)
    best, certain = optima[0], chains.agreed or ambiguity < limits.edges_found
    best = best if standard is None else standard.lift_optimum(best)
    partners = torch.full_like(partners, -1)
    partners[best.source] = best.target[best.plan.argmax(1)]
    found = replace(best, label="edges" if given else "entries that matter")
    return EdgeMatch(found, given, certain, not given or _kept(x, y, partners) > before)


def _edges(provider: DistanceProvider, given: Geodesics | None) -> Tensor | None:
    """Return edges (n, n): of a given graph, of hops, or the entries that matter of a table."""
    if given is not None:
        start, vertex = given.edges.source, given.edges.vertex
        edges = torch.zeros(given.shape, dtype=torch.bool, device=provider.device)
        edges[start.to(edges.device), vertex.to(edges.device)] = True
        return edges if is_sparse(edges) and bool(edges.any()) else None
    if (told := hops_of(provider)) is None:
        return entries_that_matter(provider)
    return told if is_sparse(told) and bool(told.any()) else None


def _kept(x: Tensor, y: Tensor, partners: Tensor) -> float:
    """Share of the edges x (n, n) whose ends have partners (n,), not -1, with an edge in y."""
    i, j = partners[x.nonzero().T]
    matched = (i >= 0) & (j >= 0)
    kept = y[i[matched], j[matched]] != 0
    return float(kept.double().mean()) if len(kept) else 1.0
