"""Which path a problem takes: every decision that is made before it is solved, and why.

:func:`make_route` is a pure function of what is known of a problem (``Facts``), of what was asked
for, and of the limits of the device (``_problem/limits.py``). What it returns is printed by
:func:`torchgw.explain` and kept as ``result.report.route``; the strategy and the table of the
search in docs/how-to-choose.md are made from it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from torchgw._errors import UnsupportedError
from torchgw._problem.limits import Limits
from torchgw._problem.losses import check_products
from torchgw._problem.problem import Facts
from torchgw._sinkhorn.choose import BackendName, skips_tiles
from torchgw._sinkhorn.contract import Backend
from torchgw._sinkhorn.tiles.tiling import width_of
from torchgw._solve.forecast import Forecast, iteration_seconds, problem_seconds, tiled_seconds
from torchgw._solve.state import RESOLVED, Dtypes, Options, rounding
from torchgw._starts.chain import affordable_chains
from torchgw._tensors.machine import slowness

# Tiles are considered from so many blocks of a side on, unless they were asked for: on a GPU an
# iteration of a few blocks took 7 ms, most of it to choose them. [L550]
_FEWEST_BLOCKS = 8
# How many matrices of the size of a plan a stored problem holds: the cost, the kernel, and one that
# is being made. [L92]
_STORED_MATRICES = 3
# The match of copies.
KEEPS_ALL = "the match that keeps all distances"
# Factors of squared distances in the plane. A choice.
_PLANE = 4


class Choice(NamedTuple):
    """One decision."""

    what: str  # is decided, such as "gradient"
    chosen: str
    why: str

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{self.what}: {self.chosen} ({self.why})" if self.why else self.chosen


class Storage(NamedTuple):
    """How the cost of an iteration is held."""

    stored: bool  # whether the (n, m) cost is built
    width: int | None  # of tiles that may be skipped
    storable: bool  # whether sweeps that end up with all tiles may store the cost
    why: str

    @property
    def choice(self) -> Choice:
        """Say it."""
        tiles = f"streamed, empty tiles of {self.width} points skipped"
        name = "stored" if self.stored else "streamed" if self.width is None else tiles
        return Choice("cost", name, self.why)


class Route(NamedTuple):
    """The path of one problem: what will be done, why, how long it takes and how much memory.

    ``print`` it. The choices are named tuples of what is decided, what was chosen, and why.

    Attributes
    ----------
    size : str
        The problem, in words.
    gradient, precision, end : Choice
        How costs are computed, in which precision, and what the last steps are.
    begin : tuple of Choice
        Where the solve begins: the moves of the search that may be made, in their order; whether
        one is made depends on what those before it find, which ``why`` says.
    storage : Storage
        Whether the (n, m) cost of an iteration is stored or streamed.
    seconds : tuple of float, or None
        What a solve like this takes, and what if few points do not tell where all go, on one quiet
        core of this machine, whose speed is measured once, distances not counted; ``None`` on a
        GPU.
    bytes : int
        Memory that the solve takes at most, beside its input, by a model.
    longest : float, or None
        Seconds if all linear problems take `inner_max_iter`, where epsilon is so small that they
        may, also in solves from other optima.
    """

    size: str
    gradient: Choice
    precision: Choice
    storage: Storage
    begin: tuple[Choice, ...]
    end: Choice
    each: float  # seconds of an outer iteration on a CPU
    seconds: tuple[float, float] | None
    bytes: int
    dtypes: Dtypes  # of the loop and of the settling
    n_anchors: int  # that a sampled gradient begins with
    longest: float | None = None
    disagreeing: float = 0.0  # seconds on a CPU if starts are compared and do not agree

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All decisions, in the order in which they take effect."""
        return self.gradient, self.precision, self.storage.choice, *self.begin, self.end

    def annealed(self, facts: Facts, options: Options, limits: Limits) -> "Route":
        """Return the path of the same problem where all points are annealed from a x b."""
        storage = choose_storage(
            facts, options, limits, self.gradient.chosen, self.dtypes, self.n_anchors,
            annealed=True,
        )  # fmt: skip
        # a plan that is far from its end keeps most tiles, so that costs are stored if they may be
        stored = storage.stored or storage.storable
        each = _iteration(
            facts, self.gradient.chosen, self.n_anchors, self.dtypes, stored=stored, tiled=False
        )
        return self._replace(storage=storage, each=each)

    def at_match(self, match: str, why: str) -> "Route":
        """Return the path of the same problem where a match is the best, without a search."""
        return self._replace(begin=(Choice("start", match, why),))

    def __repr__(self) -> str:
        """Say it in some lines."""
        first, *others = self.begin
        lines = [
            self.size,
            *(f"  {one}" for one in (self.gradient, self.precision, self.storage.choice, first)),
            *(f"    - {one.chosen}: {one.why}" for one in others),
            f"  {self.end}",
            f"  {self.cost}",
        ]
        return "\n".join(lines)

    @property
    def tried(self) -> tuple[set[str], float]:
        """The moves, and the seconds of a search on all points."""
        return {move.what for move in self.begin}, (self.seconds or (0.0, 0.0))[1]

    @property
    def cost(self) -> str:
        """Say the time and the memory that it takes."""
        memory = f"memory: up to {in_units(self.bytes, _BYTES)} beside the input"
        if self.longest is not None:
            memory = (
                f"up to {in_units(self.longest, _TIMES)} if all linear problems take "
                f"`inner_max_iter`, as epsilon is small; {memory}"
            )
        if self.seconds is None:
            return memory
        usual, longer = (in_units(part, _TIMES) for part in self.seconds)
        rest = f", or {longer} if few points do not tell where all go" if usual != longer else ""
        if self._may_disagree:
            most = in_units(self.disagreeing, _TIMES)
            rest += f", up to {most} if starts do not agree{' either' if usual != longer else ''}"
        return f"time: about {usual}{rest}, on one quiet core of this machine; {memory}"

    @property
    def most(self) -> float:
        """Seconds that a solve on a CPU may take, as far as they are told before it begins."""
        usual, _ = self.seconds or (0.0, 0.0)
        return max(usual, self.disagreeing * self._may_disagree, self.longest or 0.0)

    @property
    def _may_disagree(self) -> bool:
        """Whether starts are compared, and others follow if they do not agree."""
        usual, longer = self.seconds or (0.0, 0.0)
        return longer > usual or "relaxed" in {move.what for move in self.begin}


_BYTES = tuple((1 << 10 * k, name) for k, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))
_TIMES = (1e-3, "ms"), (1, "s"), (60, "min"), (3600, "h")


def in_units(amount: float, units: tuple[tuple[float, str], ...]) -> str:
    """Say an amount by two digits, in the largest unit of which it is one or more."""
    size, name = max(((size, name) for size, name in units if size <= amount), default=units[0])
    return f"{float(f'{amount / size:.2g}'):g} {name}"


class Move(NamedTuple):
    """A way in which the search finds or improves starts, and where it is made."""

    name: str
    what: str
    where: str  # the condition that the data decide, which is known during the search
    applies: Callable[[Facts, Options, Limits], bool]
    limit: Callable[[Limits], str]  # the condition that the size decides, in words


def choose_gradient(facts: Facts, options: Options, limits: Limits) -> Choice:
    """Choose the gradient asked for, or for "auto" an exact one wherever it fits."""
    name = options.gradient
    if not facts.products:
        return _choose_without_products(facts, name, limits)
    with_factors = [rank for rank in facts.factors if rank is not None]
    if name == "factored" and not with_factors:
        _refuse_factors(facts)
    fits = facts.larger**2 <= limits.dense
    if name != "auto":
        chosen, why = name, "asked for"
    elif len(with_factors) == 2:
        chosen, why = "factored", "factors make it exact without matrices"
    elif facts.cheap and fits:
        chosen, why = "dense", "both distance matrices fit, which makes it exact"
    elif facts.cheap and facts.sparse:
        chosen, why = "dense", "products of tables that are mostly zeros are sums over edges"
    elif facts.cheap and with_factors:
        chosen, why = "factored", "factors of one side make it exact"
    else:
        chosen, why = "sampled", "distances come by columns only, or are too large for products"
    return Choice("gradient", chosen, why)


def _refuse_factors(facts: Facts) -> None:
    """Say which side lacks the factors that were asked for."""
    sides = zip("XY", facts.directed, strict=True)
    directed = " and ".join(f"`{name}`" for name, is_directed in sides if is_directed)
    why = (
        f"the directed costs of {directed} have none"
        if directed
        else "functions of distances, such as the logarithms of loss='kl' for Y, have none"
    )
    raise UnsupportedError(
        "`gradient='factored'` needs factors on at least one side: distances='landmark', "
        f"'sqeuclidean' or 'cosine' ({why}). Pass gradient='auto' or 'sampled'."
    )


def _choose_without_products(facts: Facts, name: str, limits: Limits) -> Choice:
    """Choose the gradient for a loss whose cross term is no product, as :func:`choose_gradient`."""
    check_products(name, facts.loss, products=False)
    size = facts.entries * min(facts.n, facts.m)
    if name == "dense" and size > limits.most_triples:
        raise UnsupportedError(
            f"`gradient='dense'` with loss={facts.loss!r} reads {size:.2g} distances in every "
            f"iteration, which is limited to {limits.most_triples:.2g} on {facts.device!r}. Pass "
            "gradient='sampled'."
        )
    if name != "auto":
        return Choice("gradient", name, "asked for")
    if facts.cheap and size <= limits.triples:
        return Choice("gradient", "dense", f"loss {facts.loss} of few points is exact")
    return Choice("gradient", "sampled", f"loss {facts.loss} is no product, and points are many")


def choose_precision(facts: Facts, options: Options, limits: Limits) -> Choice:
    """Choose the precision; "auto" is float64 for small problems."""
    if options.precision != "auto":
        return Choice("precision", options.precision, "asked for")
    if facts.entries <= limits.float64:
        return Choice("precision", "float64", "no slower for so few points")
    return Choice("precision", "mixed", "float32 where its rounding does not show")


def choose_dtypes(facts: Facts, name: str, limits: Limits, gradient: str) -> Dtypes:
    """Return the dtypes of a precision."""
    if name == "float64":
        return Dtypes(torch.float64, torch.float64, again=False)
    if facts.restricted:
        # float32 has no exact zeros where plans underflow
        return Dtypes(torch.float32, torch.float64, again=facts.entries <= limits.kept_tables)
    # float32 would leave a plan that is not resolved, and its last linear problem, which takes a
    # few of all iterations, can be solved in float64
    coarse = facts.spread > 0 and rounding(facts.spread, facts.epsilon, torch.float32) > RESOLVED
    if name == "mixed" and ((coarse and gradient == "factored") or facts.entries <= limits.settled):
        return Dtypes(torch.float32, torch.float64, again=facts.entries <= limits.kept_tables)
    return Dtypes(torch.float32, torch.float32, again=False)


def choose_storage(
    facts: Facts,
    options: Options,
    limits: Limits,
    gradient: str,
    dtypes: Dtypes,
    n_anchors: int,
    *,
    annealed: bool,
) -> Storage:
    """Choose whether costs are stored, and the width of tiles that are skipped."""
    if facts.listed:
        return Storage(
            False, None, False, "costs of what is allowed are computed from their factors"
        )
    matrix = facts.linear == 0
    rank = facts.cost_rank(gradient, n_anchors)
    # relaxed problems have no sweeps over tiles, without which streaming is slow
    tiled = why_no_tiles(gradient, options.backend, linear=matrix, store=False) is None
    tiled &= options.skip_tiles is not False and options.rule is None
    # annealing all points from a large epsilon keeps most tiles for many iterations
    tiled &= not annealed or facts.entries > limits.subsample
    stored, why = store_cost(facts, options.storage, limits, dtypes, rank, tiled=tiled)
    reason = why_no_tiles(gradient, options.backend, linear=matrix, store=stored)
    storable = options.storage == "auto" and cost_fits(facts, limits, dtypes)
    if options.skip_tiles is True and reason is not None:
        raise UnsupportedError(f"`skip_tiles=True` cannot be met: {reason}")
    if options.skip_tiles is False or reason is not None:
        return Storage(stored, None, storable, why)
    width = width_of((facts.n, facts.m), facts.device)
    few = min(facts.n, facts.m) < _FEWEST_BLOCKS * width
    return Storage(stored, None if few and options.skip_tiles == "auto" else width, storable, why)


def store_cost(
    facts: Facts, name: str, limits: Limits, dtypes: Dtypes, rank: int, *, tiled: bool = False
) -> tuple[bool, str]:
    """Whether to store the cost of an iteration instead of streaming factors of some rank."""
    # "auto" stores where the model says that it is faster, over the dtypes that the outer
    # iterations go through, and where it fits. A rank of zero stands for a cost that is a matrix in
    # any case; with `tiled` a streamed cost would have tiles skipped.
    if name != "auto":
        return name != "streamed", "asked for"
    if rank == 0:
        return True, "it is a matrix in any case"
    if not cost_fits(facts, limits, dtypes):
        return False, "the matrix is too large"
    used = [dtypes.loop, dtypes.settle] if dtypes.again else [dtypes.loop]
    times = [problem_seconds(facts.device, dtype, (facts.n, facts.m), rank) for dtype in used]
    stored, streamed = (float(sum(part)) for part in zip(*times, strict=True))
    if tiled and facts.device == "cpu":
        streamed = tiled_seconds(streamed, len(used))
    return stored <= streamed, f"{'quicker' if stored <= streamed else 'slower'} than streaming"


def cost_fits(facts: Facts, limits: Limits, dtypes: Dtypes) -> bool:
    """Whether a cost may be stored, in each dtype that the outer iterations go through."""
    needed = facts.entries * max(dtypes.loop.itemsize, dtypes.settle.itemsize)
    return needed <= limits.stored_bytes and _STORED_MATRICES * needed <= facts.free


def why_no_tiles(
    gradient: str, backend: BackendName | Backend, *, linear: bool, store: bool
) -> str | None:
    """Say why no tiles of the costs of a solve can be skipped, or ``None``."""
    if gradient != "factored":
        return (
            f"the gradient is {gradient!r}, and only costs from factors have bounds that last. "
            "Pass gradient='factored' with distances that have factors."
        )
    if linear:
        return "with `M` every cost is stored. Drop `skip_tiles`, or leave `M` out."
    if store:
        return "costs of this size are stored, and read as a whole. Pass storage='streamed'."
    if not isinstance(backend, str):
        return "the backend is an object of your own. Pass backend='auto' or 'eager'."
    if not skips_tiles(backend):
        return f"backend={backend!r} has no form that skips. Pass backend='auto' or 'eager'."
    return None


def can_subsample(facts: Facts, options: Options, limits: Limits, gradient: str) -> bool:
    """Whether a subsample is worth solving first, and can be."""
    able = gradient == "factored" and options.rule is None and facts.linear != 0
    able &= not facts.listed
    return able and None not in facts.factors and facts.entries > limits.subsample


def can_halve(facts: Facts, limits: Limits, gradient: str) -> bool:
    """Whether products of float32 tables may be made of half-precision ones, and that pays."""
    plain = facts.plain and facts.rule == "strict"
    large = facts.device == "cuda" and facts.entries >= limits.float64
    return gradient == "dense" and plain and large


def _searched(facts: Facts, options: Options) -> bool:
    if facts.listed or facts.one_plan:
        return False
    return options.n_init != 1 and facts.alpha != 0 and min(facts.n, facts.m) > 1


def _strict(facts: Facts, options: Options) -> bool:
    return _searched(facts, options) and options.rule is None


def _follows(facts: Facts, options: Options, limits: Limits) -> bool:
    """Whether chains on all points are of use, and affordable."""
    if not (_strict(facts, options) and options.search != "fast" and facts.products):
        return False
    chains = affordable_chains(limits, options.search, facts.n, facts.m)
    return facts.larger >= limits.least_points and chains >= limits.fewest_chains


def matches_given(facts: Facts, options: Options, limits: Limits) -> bool:
    """Whether two graphs that were given are matched by their edges before all else."""
    # plans of an epsilon that was asked for, or of an iteration to differentiate, are no matches
    usual = options.epsilon == "auto" and options.gradient == "auto" and options.n_init is None
    usual &= options.differentiable is None and options.ranks is None and options.search != "fast"
    # a few nodes do not stand for all of them
    large = facts.given and min(facts.n, facts.m) > limits.few_points
    plain = facts.plain and facts.linear is None and not facts.restricted and facts.alpha == 1
    return _strict(facts, options) and usual and large and plain


def _points_of_chains(limits: Limits) -> str:
    """Say up to how many points per side chains are affordable."""
    n = 1
    while affordable_chains(limits, "auto", n, n) >= limits.fewest_chains:
        n += max(1, n // 50)
    return f"about {float(f'{n:.2g}'):,.0f} points a side"


# The moves of a search, in the order in which they are made.
MOVES = (
    Move(
        "copies", "the match that keeps all distances", "where one side is the other, reordered",
        lambda facts, options, limits: _strict(facts, options) and facts.n == facts.m,
        lambda limits: "any number of points",
    ),
    Move(
        "few points", "16 starts on a few points of each side, the best 3 on 256",
        "always; of more points where all pairs are allowed",
        lambda facts, options, limits: _searched(facts, options)
        and not (facts.restricted and facts.larger > limits.few_points),
        lambda limits: f"{limits.few_points} points a side",
    ),
    Move(
        "all points", "the same starts on all points", "where few points say little of the others",
        lambda facts, options, limits: _searched(facts, options)
        and limits.few_points < facts.larger <= limits.all_points,
        lambda limits: f"{limits.all_points} points a side",
    ),
    Move(
        "chains", "up to 16 starts near a x b (64 if thorough), each followed down to the target",
        "where few points do not determine where all go", _follows, _points_of_chains,
    ),
    Move(
        "messages", "messages along the edges of two graphs",
        "where few points do not determine where all go, and tables are mostly zeros",
        lambda facts, options, limits: _strict(facts, options) and options.search != "fast"
        and facts.square and facts.linear is None and not facts.restricted,
        lambda limits: (
            f"{limits.messages:,.0f} edges times nodes; any number among chains; without turning "
            f"back {limits.walks:,.0f} edges times edges"
        ),
    ),
    Move(
        "open", "a few chains between few points, and on all beside the optima of few",
        "where few determine where all go, but not which optimum is the best",
        lambda facts, options, limits: _strict(facts, options) and options.search != "fast"
        and facts.products and (limits.few_chains > 0 or facts.entries < limits.open_most),
        lambda limits: f"{limits.few_chains} between few; {limits.open_chains} on all, "
        f"below {limits.open_most:,} pairs, then all chains unless one meets the best of few; all "
        f"chains up to {limits.stacked:,}",
    ),
    Move(
        "exchanges", "tabu search over matchings, or entries that exchange partners",
        "where chains are followed and weights equal, or the plan is polished or near a matching",
        lambda facts, options, limits: (
            (_follows(facts, options, limits) and facts.assignment
             and facts.larger <= limits.all_points)
            or (_strict(facts, options) and options.sharp and facts.products
                and facts.larger <= limits.exchanged_points)
        ),
        lambda limits: f"{limits.exchanged_points} points a side; one walk of {limits.all_points}",
    ),
    Move(
        "ends", "all that was found followed to the end, kicked and mixed, for up to 4 rounds",
        "always; chains first where few points leave it open, or their ends disagree",
        lambda facts, options, limits: _follows(facts, options, limits)
        and not any(facts.directed) and facts.entries <= limits.stacked,
        lambda limits: f"{limits.stacked:,} pairs",
    ),
    Move(
        "product", "a solve from a x b at the target", "unless all ends were followed",
        lambda facts, options, limits: _strict(facts, options) and facts.entries <= limits.product,
        lambda limits: f"{limits.product:,} pairs",
    ),
    Move(
        "optima", "a solve from every optimum that may end lower, ended early if it does not",
        "unless all ends were followed",
        lambda facts, options, limits: _strict(facts, options)
        and facts.entries <= limits.followed,
        lambda limits: f"{limits.followed:,.0f} pairs",
    ),
    Move(
        "twice", "a solve from a x b and one from the best plan of few points",
        "where few points say little, and chains are not followed",
        lambda facts, options, limits: _strict(facts, options) and options.search != "fast"
        and facts.larger > limits.all_points and facts.products
        and facts.entries <= limits.subsample,
        lambda limits: f"{limits.subsample:,.0f} pairs where distances have factors",
    ),
    Move(
        "linear cost", "the best plan for the linear cost alone, tried on cells of near points",
        "where a subsample is solved first, with known pairs, `M` or `features`",
        lambda facts, options, limits: _searched(facts, options) and facts.linear is not None
        and can_subsample(facts, options, limits, "factored"),
        lambda limits: f"any number, from {limits.subsample:,.0f} pairs on",
    ),
    Move(
        "edges", "a match of the edges of two graphs, or of the few entries that matter of tables",
        "where the plan keeps less than 90% of them; of graphs that were given before any plan",
        lambda facts, options, limits: (
            (_follows(facts, options, limits) and facts.hops)
            or matches_given(facts, options, limits)
        ),
        lambda limits: f"{limits.edges:,} pairs; where the plan is in doubt, also up to "
        f"{limits.walks:,.0f} edges times nodes; "
        f"all graphs given of more than {limits.few_points} nodes",
    ),
    Move(
        "turns", "all points laid on the others at 96 turns of the plane, a solve from the best",
        "where distances are squared, the plan is polished and optima may cost as much",
        lambda facts, options, limits: _strict(facts, options) and options.search != "fast"
        and options.sharp and facts.square and facts.linear is None and not facts.restricted
        and facts.factors == (_PLANE, _PLANE) and facts.entries <= limits.turned,
        lambda limits: f"{limits.turned:,.0f} pairs",
    ),
    Move(
        "seen", "a solve by short steps from the lowest plan of all points that was listed",
        "where every solve has ended above it",
        lambda facts, options, limits: _strict(facts, options) and not facts.restricted
        and facts.entries <= limits.followed,
        lambda limits: f"{limits.followed:,.0f} pairs",
    ),
    Move(
        "relaxed", "pairs at equal distances, maps, strict optima followed to their ends, mixed",
        "with `unbalanced` or `mass`",
        lambda facts, options, limits: _searched(facts, options) and options.rule is not None
        and facts.larger <= limits.few_points,
        lambda limits: f"{limits.few_points} points a side",
    ),
    Move(
        "pairs", "partners of few points by equal distances, improved and followed, then solves",
        "with `unbalanced` or `mass`; few points are searched where these leave a doubt",
        lambda facts, options, limits: _searched(facts, options) and options.rule is not None
        and facts.plain and not facts.restricted and facts.larger > limits.few_points
        and limits.stores(facts.n, facts.m),
        lambda limits: f"{limits.kept_tables:,.0f} pairs; some points beyond {limits.congruent:,}",
    ),
    Move(
        "parts", "85% of the mass matched on a few points, which may leave the plan in doubt",
        "where the plan is no copy, and costs far more than that part does by it",
        lambda facts, options, limits: _strict(facts, options) and options.search != "fast"
        and facts.plain and facts.linear is None and not facts.restricted
        and facts.larger > limits.few_points and limits.stores(facts.n, facts.m),
        lambda limits: f"{limits.kept_tables:,.0f} pairs",
    ),
)  # fmt: skip


def _begin(facts: Facts, options: Options, moves: Sequence[Move], init: str) -> tuple[Choice, ...]:
    """List where a solve may begin; ``init`` names what was passed, if anything was."""
    if init:
        return (Choice("start", init, "passed as `init`"),)
    if not moves:
        alone = (
            "so many points of which some may not be matched have no search" if facts.listed else ""
        )
        alone = alone or ("what is allowed leaves one plan" if facts.one_plan else "")
        why = "n_init=1" if options.n_init == 1 else alone or "there is but one optimum"
        return (Choice("start", "a x b", why),)
    search = Choice("start", "a search", f"search={options.search!r}")
    return (search, *(Choice(move.name, move.what, move.where) for move in moves))


def _end(facts: Facts, options: Options, gradient: str, limits: Limits) -> Choice:
    """Say how a solve ends."""
    if options.polish:
        return Choice("end", "polished", "conditional gradient steps to a vertex, without entropy")
    if options.regularization == "proximal":
        return Choice("end", "proximal steps", "until the plan no longer changes")
    if can_subsample(facts, options, limits, gradient) and facts.entries >= limits.cells:
        return Choice("end", "cells of near points", "as fine as the marginals need")
    return Choice("end", "entropic plan", "its marginals settled at the target epsilon")


def _size(facts: Facts) -> str:
    """Describe the problem in a line."""
    rule = "" if facts.rule == "strict" else f", {facts.rule} marginals"
    fused = "" if facts.linear is None else f", alpha={facts.alpha:g}"
    known = ", some pairs not allowed" if facts.restricted else ""
    return (
        f"{facts.n:,} x {facts.m:,} points on {facts.device}{known}, {facts.loss} loss{fused}"
        f"{rule}, epsilon {facts.epsilon:.3g}"
    )


def _bytes(
    facts: Facts, options: Options, limits: Limits, gradient: str, storage: Storage,
    dtypes: Dtypes, n_anchors: int,
) -> int:  # fmt: skip
    """Model the bytes that a solve takes at most, beside its input."""
    size = max(dtypes.loop.itemsize, dtypes.settle.itemsize)
    tables = facts.n**2 + facts.m**2 + facts.entries if gradient == "dense" else 0
    cost = _STORED_MATRICES * facts.entries if storage.stored else 0
    rank = facts.cost_rank(gradient, n_anchors)
    followed = 8 * limits.chains * facts.entries if _follows(facts, options, limits) else 0
    return int(size * (tables + cost + _COPIES * rank * (facts.n + facts.m)) + followed)


# Copies of the factors of a cost that a solve holds. [L1293]
_COPIES = 4


def make_route(
    facts: Facts, options: Options, limits: Limits, gradient: Choice, n_anchors: int, init: str = ""
) -> Route:
    """Choose the path of a problem; ``init`` names what was passed as a start, if anything was."""
    name = gradient.chosen
    precision = choose_precision(facts, options, limits)
    dtypes = choose_dtypes(facts, precision.chosen, limits, name)
    storage = choose_storage(
        facts, options, limits, name, dtypes, n_anchors, annealed=options.n_init == 1
    )
    moves = [] if init else [move for move in MOVES if move.applies(facts, options, limits)]
    tiled = storage.width is not None
    each = _iteration(facts, name, n_anchors, dtypes, stored=storage.stored, tiled=tiled)
    forecast = Forecast(facts, options, name, each)
    seconds, most, names = None, 0.0, {move.name for move in moves}
    if facts.device == "cpu":
        seconds = forecast.seconds(limits, names)
        if matches_given(facts, options, limits):
            seconds = forecast.matched(*seconds)
        most = forecast.disagreeing(seconds[1], names)
    return Route(
        _size(facts), gradient, precision, storage, _begin(facts, options, moves, init),
        _end(facts, options, name, limits), each, seconds,
        _bytes(facts, options, limits, name, storage, dtypes, n_anchors), dtypes, n_anchors,
        forecast.longest(names), most,
    )  # fmt: skip


def _iteration(
    facts: Facts, gradient: str, n_anchors: int, dtypes: Dtypes, *, stored: bool, tiled: bool
) -> float:
    """Model the seconds of an outer iteration, on this CPU if it is one."""
    rank = facts.cost_rank(gradient, n_anchors)
    each = iteration_seconds(facts, gradient, rank, dtypes.loop, stored=stored, tiled=tiled)
    return each * slowness() if facts.device == "cpu" else each


def route_of_copies(facts: Facts) -> Route:
    """Return the path of spaces that are the same but for order, where nothing is left to solve."""
    return Route(
        _size(facts), Choice("gradient", "dense", "none is needed"),
        Choice("precision", "float64", ""), Storage(False, None, False, "none is needed"),
        (Choice("start", KEEPS_ALL, "one side is the other in another order"),),
        Choice("end", KEEPS_ALL, "no plan is better"), 0.0, None, 0,
        Dtypes(torch.float64, torch.float64, again=False), 0,
    )  # fmt: skip
