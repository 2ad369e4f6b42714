"""Small problems on a GPU, one Triton program each; what they leave is for the engine."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchgw._batch.costs import start_noise, units
from torchgw._batch.packing import Packed, Stack
from torchgw._batch.relaxed import Relaxed
from torchgw._batch.stopping import Rules
from torchgw._batch.warm import ENDS
from torchgw._batch.worth import Ended, Finish, Found, Terms, found_numbers, of_mass
from torchgw._tensors.ahead import compile_together

# Code with which a Triton program ends when a number of its problem is no longer finite.
_LOST = ENDS.index("LOST")
# Devices, sizes and kinds of problems whose programs have been compiled, or are being.
_compiled: set[tuple[torch.device | int, ...]] = set()
# Relative change of the cost below which a plan is the product plan. [L980]
_STILL = 1e-9


def solver_in_triton(
    problems: Packed, rules: Rules, store: Callable[[Found, Ended], None]
) -> Callable[[Tensor], Tensor]:
    """Make a function that solves problems by a program each, and returns those left unsolved."""
    from torchgw._batch.finish_triton import Finished, finish
    from torchgw._batch.relaxed_triton import Eased, ease
    from torchgw._batch.rough_triton import rough
    from torchgw._batch.settle_triton import settle
    from torchgw._batch.tile_triton import padded
    from torchgw._batch.worth_triton import Worth, worth

    (n, m), relaxed = problems.shape, problems.relaxed
    # programs hold powers of two
    rows, columns = (1 << (size - 1).bit_length() for size in (n, m))
    noise = padded(start_noise(problems.shape, problems.device), rows, columns)
    fall = rules.objective_tol if rules.objective_tol > 0 else -math.inf

    def taken(side: Stack, used: Tensor, size: int) -> tuple[Tensor, Tensor]:
        return padded(side.tables[used], size, size), padded(side.weights[used], size)

    def tables(numbers: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        """Take the tables and weights that some problems need, and where theirs are among them."""
        i, j = problems.i[numbers], problems.j[numbers]
        if problems.y is problems.x:
            # a space that is on both sides is kept once
            used, places = torch.cat([i, j]).unique(return_inverse=True)
            x = y = taken(problems.x, used, rows)
            # clones, as their addresses are aligned: then one compiled variant of each program is
            # enough
            i, j = (part.clone() for part in places.chunk(2))
        else:
            (used_x, i), (used_y, j) = (one.unique(return_inverse=True) for one in (i, j))
            x, y = taken(problems.x, used_x, rows), taken(problems.y, used_y, columns)
        return (x[0], y[0], x[1], y[1]), (i, j)

    def programs(
        numbers: Tensor,
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Relaxed | None, Eased | Finished, Worth]:
        linear, target, first, some = units(problems, numbers)
        linear = None if linear is None else padded(linear, rows, columns)
        double, index = tables(numbers)
        floats = {id(part): part.float() for part in double}
        single = tuple(floats[id(part)] for part in double)
        weights, alpha = (double[2][index[0]], double[3][index[1]]), problems.alpha[numbers]
        begin = None
        if problems.begin is not None:
            costs, chosen = problems.begin(numbers)
            begin = padded(costs, rows, columns), chosen
        begun = alpha, linear, begin, (target, first)
        limits = rules.max_iter, rules.inner_max_iter, rules.tol, rules.inner_tol
        made: Eased | Finished
        if some is None:
            warm = rough(single, index, *begun, noise, (rules.max_iter, fall))
            settle(
                double, single, index, alpha, linear, target, warm,
                (rules.max_iter, rules.tol, fall),
            )  # fmt: skip
            made = finish(double, index, alpha, linear, target, warm, (*limits, fall))
        else:
            made = ease(double, single, index, *begun, some, noise, limits)
        sums = worth(double, index, linear, made.plan, (made.f, made.g))
        return weights, target, some, made, sums

    def solve(numbers: Tensor) -> Tensor:
        alpha = problems.alpha[numbers]
        weights, target, some, made, sums = programs(numbers)
        terms = Terms.of_sums(alpha, sums.crossed, sums.linear, sums.own)
        product = Terms.of_sums(alpha, sums.product_crossed, sums.product_linear, sums.product_own)
        both, plan, f, unit, missing = (terms, product), made.plan, made.f, target, sums.missing
        if isinstance(made, Finished):
            objective = terms.quadratic + terms.linear + sums.potentials - made.spending
        else:
            assert some is not None
            masses = sums.masses[:, :rows], sums.masses[:, rows:]
            best = some.settle(*terms[:2], made.entropy, masses, weights, target)
            objective, missing = best.objective, best.violation
            both, plan, f, unit = of_mass(some, best, both, plan, f, unit)
        solved = made.error <= rules.inner_tol
        ending = Finish(made.error, made.ended, solved, made.done, made.inner)
        found = found_numbers(both, missing, objective, unit, ending, rules)
        ended = Ended(numbers, plan[:, :n, :m], f[:, :n], made.g[:, :m], objective)
        # float32 keeps the symmetry of spaces whose points all look alike: the engine breaks it
        pairs = (sums.crossed, sums.product_crossed), (sums.linear, sums.product_linear)
        still = [abs(here - there) <= _STILL * abs(there) for here, there in pairs]
        known = (made.ended != _LOST) & objective.isfinite() & ~(still[0] & still[1])
        over, left = known.nonzero()[:, 0], (~known).nonzero()[:, 0]
        if len(left):
            found = Found(found.numbers[:, over], found.counts[:, over])
            ended = Ended(*(part[over] for part in ended))
        store(found, ended)
        return numbers[left]

    kind = (
        problems.device, rows, columns, problems.linear is None, problems.begin is None,
        relaxed is None, relaxed is None or relaxed.mass is None,
    )  # fmt: skip
    if kind not in _compiled:
        _compiled.add(kind)
        first_one = torch.zeros(1, dtype=torch.int64, device=problems.device)
        compile_together(problems.device, lambda: programs(first_one))
    return solve
