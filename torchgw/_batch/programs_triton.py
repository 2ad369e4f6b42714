"""Small problems on a GPU, one Triton program each; what they leave is for the engine."""

import math
from collections.abc import Sequence
from threading import Event
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._batch.finish_triton import Finished, finish
from torchgw._batch.packing import ENDS, Packed, Stack, start_noise, units
from torchgw._batch.relaxed_triton import Eased, ease
from torchgw._batch.rough_triton import rough
from torchgw._batch.settle_triton import settle
from torchgw._batch.sweep import Relaxed
from torchgw._batch.tile_triton import padded
from torchgw._batch.worth import Ended, Finish, Found, Rules, Terms, found_numbers, of_mass
from torchgw._batch.worth_triton import Worth, worth
from torchgw._tensors.ahead import COMPILING, compile_together
from torchgw._tensors.operations import EQUAL

# Code with which a Triton program ends when a number of its problem is no longer finite.
_LOST = ENDS.index("LOST")
# When each program of a device, of sizes and of a kind of problems is compiled; and which kinds
# had been before this process.
_compiled: dict[tuple[torch.device | int, ...], Sequence[Event]] = {}
_known: dict[tuple[torch.device | int, ...], bool] = {}


class _Made(NamedTuple):
    """What programs have made of some problems."""

    plans: Eased | Finished
    sums: Worth
    weights: tuple[Tensor, Tensor]
    target: Tensor  # (k,) epsilon
    relaxed: Relaxed | None


class Programs:
    """The programs of problems of one shape, which are compiled side by side."""

    def __init__(self, problems: Packed, rules: Rules) -> None:
        self._problems, self._rules = problems, rules
        # programs hold powers of two
        n, m = (1 << (size - 1).bit_length() for size in problems.shape)
        self._sizes = n, m
        relaxed = problems.relaxed
        self._kind = (
            problems.device, n, m, problems.linear is None, problems.begin is None,
            relaxed is None, relaxed is None or relaxed.mass is None,
        )  # fmt: skip

    @property
    def begun(self) -> bool:
        """Whether they are compiled, or are being."""
        return self._kind in _compiled

    def compile(self) -> Sequence[Event]:
        """Begin to compile them, side by side; tell when each is compiled."""
        if not self.begun:
            device = self._problems.device
            first_one = torch.zeros(1, dtype=torch.int64, device=device)
            _compiled[self._kind] = compile_together(device, lambda: self._launch(first_one))
        return _compiled[self._kind]

    def compiled(self, seconds: float | None) -> bool:
        """Tell whether all are compiled, once they are, or after so many seconds."""
        end = None if seconds is None else monotonic() + seconds
        return all(
            done.wait(None if end is None else max(0.0, end - monotonic()))
            for done in self.compile()
        )

    def known(self) -> bool:
        """Tell whether they had been compiled before this process; the next one knows them."""
        # so that all calls of a process have one answer
        if self._kind not in _known:
            _known[self._kind] = self.compiled(COMPILING * len(self.compile()))
        return _known[self._kind]

    def solve(self, numbers: Tensor) -> tuple[Found, Ended, Tensor]:
        """Solve some problems; also return those that are left unsolved."""
        alpha, rules, (n, m) = self._problems.alpha[numbers], self._rules, self._problems.shape
        made, sums, weights, target, relaxed = self._launch(numbers)
        terms = Terms.of_sums(alpha, sums.crossed, sums.linear, sums.own)
        product = Terms.of_sums(alpha, sums.product_crossed, sums.product_linear, sums.product_own)
        both, plan, f, unit, missing = (terms, product), made.plan, made.f, target, sums.missing
        if isinstance(made, Finished):
            objective = terms.quadratic + terms.linear + sums.potentials - made.spending
        else:
            assert relaxed is not None
            masses = sums.masses[:, : self._sizes[0]], sums.masses[:, self._sizes[0] :]
            best = relaxed.settle(*terms[:2], made.entropy, masses, weights, target)
            objective, missing = best.objective, best.violation
            both, plan, f, unit = of_mass(relaxed, best, both, plan, f, unit)
        solved = made.error <= rules.inner_tol
        ending = Finish(made.error, made.ended, solved, made.done, made.inner)
        found = found_numbers(both, missing, objective, unit, ending, rules)
        ended = Ended(numbers, plan[:, :n, :m], f[:, :n], made.g[:, :m], objective)
        # float32 keeps the symmetry of spaces whose points all look alike: the engine breaks it
        pairs = (sums.crossed, sums.product_crossed), (sums.linear, sums.product_linear)
        still = [abs(here - there) <= EQUAL * abs(there) for here, there in pairs]
        known = (made.ended != _LOST) & objective.isfinite() & ~(still[0] & still[1])
        over, left = known.nonzero()[:, 0], (~known).nonzero()[:, 0]
        if len(left):
            found = Found(found.numbers[:, over], found.counts[:, over])
            ended = Ended(*(part[over] for part in ended))
        return found, ended, numbers[left]

    def _launch(self, numbers: Tensor) -> _Made:
        """Run the programs of some problems."""
        problems, rules = self._problems, self._rules
        linear, target, first, relaxed = units(problems, numbers)
        linear = None if linear is None else padded(linear, *self._sizes)
        double, index = self._tables(numbers)
        floats = {id(part): part.float() for part in double}
        single = tuple(floats[id(part)] for part in double)
        weights, alpha = (double[2][index[0]], double[3][index[1]]), problems.alpha[numbers]
        begin = None
        if problems.begin is not None:
            costs, chosen = problems.begin(numbers)
            begin = padded(costs, *self._sizes), chosen
        noise = padded(start_noise(problems.shape, problems.device), *self._sizes)
        begun = alpha, linear, begin, (target, first)
        limits = rules.max_iter, rules.inner_max_iter, rules.tol, rules.inner_tol
        fall = rules.objective_tol if rules.objective_tol > 0 else -math.inf
        made: Eased | Finished
        if relaxed is None:
            warm = rough(single, index, *begun, noise, (rules.max_iter, fall))
            settle(
                double, single, index, alpha, linear, target, warm,
                (rules.max_iter, rules.tol, fall),
            )  # fmt: skip
            made = finish(double, index, alpha, linear, target, warm, (*limits, fall))
        else:
            made = ease(double, single, index, *begun, relaxed, noise, limits)
        sums = worth(double, index, linear, made.plan, (made.f, made.g))
        return _Made(made, sums, weights, target, relaxed)

    def _tables(self, numbers: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        """Take the tables and weights that some problems need, and where theirs are among them."""
        problems = self._problems
        i, j = problems.i[numbers], problems.j[numbers]
        if problems.y is problems.x:
            # a space that is on both sides is kept once
            used, places = torch.cat([i, j]).unique(return_inverse=True)
            x = y = _taken(problems.x, used, self._sizes[0])
            # clones, as their addresses are aligned: then one compiled variant of each program is
            # enough
            i, j = (part.clone() for part in places.chunk(2))
        else:
            (used_x, i), (used_y, j) = (one.unique(return_inverse=True) for one in (i, j))
            x = _taken(problems.x, used_x, self._sizes[0])
            y = _taken(problems.y, used_y, self._sizes[1])
        return (x[0], y[0], x[1], y[1]), (i, j)


def _taken(side: Stack, used: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Take the tables and weights of some spaces, padded."""
    return padded(side.tables[used], size, size), padded(side.weights[used], size)
