"""Gromov-Wasserstein as a loss to train with, which goes on from its last plans."""

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchgw._batch.engine import run
from torchgw._batch.follow import Nearby, Place, begin, follow, linearised
from torchgw._batch.packing import (
    AUTO_EPSILON,
    Packed,
    Stack,
    make_stack,
    natural_scale,
    padded_sizes,
)
from torchgw._batch.sweep import exact_rows
from torchgw._batch.worth import FLAT, Ended, Rules
from torchgw._boundary.arrays import check_shape
from torchgw._boundary.checks import (
    check_choice,
    check_count,
    check_flag,
    check_not_negative,
    reject_unknown,
)
from torchgw._derivatives.loss import call
from torchgw._errors import (
    ConvergenceWarning,
    InvalidInputError,
    InvalidTypeError,
    NumericalError,
    warn_user,
)
from torchgw._many.questions import check_rules
from torchgw._many.solve_many import Envelope, slopes, solve_batch
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import check_alpha
from torchgw._problem.table import check_options
from torchgw._tensors.cuda_graphs import CAPTURED_BYTES, Replayer
from torchgw._tensors.operations import (
    TINY,
    Call,
    call_directly,
    clone,
    plainly,
    straight,
    tensors_of,
)

__all__ = ["GWLoss"]

LossDistance = Literal["euclidean", "sqeuclidean", "cosine", "precomputed"]
Reduction = Literal["mean", "sum", "none"]

# Starts of problems that a batch does not search by itself. [L1418]
_STARTS = 4
# Iterations from the last plan, after which the engine takes problems of a step; and the share by
# which they may end above the last plan, as its marginals were met to a tolerance. [L1570] [L1410]
_MOST_STEPS, _RISE = 12, 1e-4


class _Problem(NamedTuple):
    """Problems of one shape, float64, without graphs of derivatives."""

    x: Tensor  # (B, n, n)
    y: Tensor  # (B, m, m)
    linear: Tensor | None  # (B, n, m)
    a: Tensor  # (B, n)
    b: Tensor  # (B, m)


# Of objectives in x, y, linear, a and b, each (B, ...), or None where it is not wanted.
_Slopes = tuple[Tensor | None, ...]


class _Kept(NamedTuple):
    """Where the solves of a batch ended."""

    plan: Tensor  # (B, n, m)
    g: Tensor  # (B, m)
    objective: Tensor  # (B,)
    moved: Tensor  # (B, n, m) what the last step has changed of the plan, zero where it began
    moved_g: Tensor  # (B, m)
    share: Tensor  # (B,) of that by which the next plan is expected ahead

    @classmethod
    def anew(cls, plan: Tensor, g: Tensor, objective: Tensor) -> "_Kept":
        """Keep plans of which no step is known."""
        none = torch.zeros_like(plan), torch.zeros_like(g), torch.zeros_like(objective)
        return cls(plan, g, objective, *none)

    @classmethod
    def after(cls, last: "_Kept", plan: Tensor, g: Tensor, objective: Tensor) -> "_Kept":
        """Compare the step from the last plans with the one before, as the next may be like it."""
        moved = plan - last.plan
        square = last.moved.square().sum((1, 2)).clamp_min(TINY)
        share = ((moved * last.moved).sum((1, 2)) / square).clamp(0.0, 1.0)
        return cls(plan, g, objective, moved, g - last.g, share)

    def lower(self, other: "_Kept") -> "_Kept":
        """Take of each problem the plan that costs less."""
        theirs = other.objective < self.objective
        for mine, its in zip(self, other, strict=True):
            mine[theirs] = its[theirs]
        return self


class GWLoss(torch.nn.Module):
    """Entropic Gromov-Wasserstein objective of batches, as a module that remembers its last plans.

    The first call of a shape searches. Later ones go on from the plan and the potentials where the
    last call of the same shape (or ``key``) ended, and search again every ``search_every`` calls,
    or where the value has risen by more than ``jump``; of two plans the one that costs less is
    kept. The gradient is that at a fixed plan (the envelope theorem), as
    ``solve(..., differentiable="value")`` gives it, so that nothing is recorded in the iterations,
    and memory does not grow with the steps.

    Parameters
    ----------
    distances : {"euclidean", "sqeuclidean", "cosine", "precomputed"}
        Of points; or the arguments of a call are distance matrices.
    epsilon : float or "auto"
        Regularisation, in units of squared distances. ``"auto"`` is chosen at the first call, as in
        :func:`torchgw.solve`, and kept, also in the state of the module; pass a number where
        several processes are to have the same.
    alpha : float in [0, 1], optional
        Weight of the structure: 1 without a linear cost, 0.5 with one.
    debiased : bool
        Subtract half the objectives of each side with itself: zero for equal sides.
    search_every : int or None
        Calls between two searches; None searches at the first call only.
    jump : float
        Relative rise of a value over that of the last call at which a search is due.
    n_init : int, optional
        Starts of a search: by default what :func:`torchgw.solve_batch` does for up to 32 x 32
        points, and four starts beyond.
    max_iter, tol, inner_tol
        As in :func:`torchgw.solve_batch`, of the solves that go on: looser than there, since the
        next step moves the problem.
    reduction : {"mean", "sum", "none"}
        Over the problems of a batch.

    Raises
    ------
    InvalidInputError, InvalidTypeError
        For options that cannot be used, and by calls for input that cannot.
    UnsupportedError
        By ``backward(create_graph=True)``: second derivatives are those of ``solve``.
    NumericalError
        By calls, if the value is not finite.

    Warns
    -----
    ConvergenceWarning
        By calls, if solves did not converge within ``max_iter``.

    Examples
    --------
    >>> import torch
    >>> from torchgw.losses import GWLoss
    >>> shape = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    >>> points = torch.nn.Parameter(shape[:, :2].clone())
    >>> loss, optimiser = GWLoss(epsilon=0.1), torch.optim.SGD([points], lr=0.1)
    >>> values = []
    >>> for _ in range(20):
    ...     value = loss(points, shape)
    ...     optimiser.zero_grad()
    ...     value.backward()
    ...     optimiser.step()
    ...     values.append(float(value.detach()))
    >>> values[-1] < values[0], loss.searches
    (True, 1)
    """

    @reject_unknown
    def __init__(
        self,
        *,
        distances: LossDistance = "euclidean",
        epsilon: float | Literal["auto"] = "auto",
        alpha: float | None = None,
        debiased: bool = False,
        search_every: int | None = 100,
        jump: float = 0.5,
        n_init: int | None = None,
        max_iter: int = 100,
        tol: float = 1e-3,
        inner_tol: float = 1e-5,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        check_choice("distances", distances, get_args(LossDistance))
        check_choice("reduction", reduction, get_args(Reduction))
        check_options(epsilon=epsilon)
        check_not_negative("jump", jump)
        check_count("search_every", search_every, none=True)
        check_flag("debiased", debiased)
        self.rules: Rules = check_rules(max_iter, tol, 1e-4, 2000, inner_tol, n_init)
        self.distances, self.alpha, self.debiased = distances, alpha, debiased
        self.search_every, self.jump, self.n_init = search_every, float(jump), n_init
        self.reduction = reduction
        self.epsilon = math.nan if epsilon == "auto" else float(epsilon)
        self.searches = 0  # that were made so far
        # and the steps since the last search
        self._kept: OrderedDict[Hashable, tuple[_Kept, int]] = OrderedDict()

    def reset(self) -> None:
        """Forget all plans: the next call searches."""
        self._kept.clear()

    def get_extra_state(self) -> dict[str, float]:
        """Return epsilon, for the state of the module."""
        return {"epsilon": self.epsilon}

    def set_extra_state(self, state: dict[str, float]) -> None:
        """Take epsilon from the state of a module."""
        self.epsilon = float(state["epsilon"])

    def extra_repr(self) -> str:
        """Name the options that matter."""
        return f"{self.distances}, epsilon={self.epsilon:.4g}, debiased={self.debiased}"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        X: Tensor,
        Y: Tensor,
        M: Tensor | None = None,
        *,
        a: Tensor | None = None,
        b: Tensor | None = None,
        key: Hashable = None,
    ) -> Tensor:
        """Compute the loss of one problem or of B of them.

        Parameters
        ----------
        X, Y : Tensor, shapes (n, d) and (m, d'), or (B, n, d) and (B, m, d')
            Points, or distances (n, n) and (m, m) with ``distances="precomputed"``; floating point
            of any precision. The solve is in float64.
        M : Tensor, shape (n, m) or (B, n, m), optional
            Linear cost.
        a, b : Tensor, shapes (n,) and (m,), or (B, n) and (B, m), optional
            Weights, of sum one; uniform by default.
        key : hashable, optional
            Name of the batch: plans are kept for each. By default a batch goes on from the last one
            of its shape.

        Returns
        -------
        Tensor, shape () or (B,) with reduction="none"
            Of the dtype of X, float32 at least.
        """
        x, y = self._table("X", X), self._table("Y", Y)
        if len(x) != len(y):
            raise InvalidInputError(
                f"`X` and `Y` must have as many problems; got {len(x)} and {len(y)}."
            )
        shape = (len(x), x.shape[1], y.shape[1])
        linear = None if M is None else _batched("M", M, x, shape)
        masses = _weights("a", a, x), _weights("b", b, y)
        alpha = check_alpha(self.alpha, fused=M is not None)
        values = self._values("XY", key, x, y, linear, *masses, alpha)
        if self.debiased:
            # without a linear cost, which has no meaning between a side and itself
            for role, table, mass in (("XX", x, masses[0]), ("YY", y, masses[1])):
                values = values - self._values(role, key, table, table, None, mass, mass, alpha) / 2
        values = values.to(torch.promote_types(X.dtype, torch.float32))
        if self.reduction == "none":
            return values
        return values.mean() if self.reduction == "mean" else values.sum()

    def _table(self, name: str, given: Tensor) -> Tensor:
        """Compute distances (B, n, n) float64, attached to what they are made of."""
        if not isinstance(given, Tensor) or not given.is_floating_point():
            what = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise InvalidTypeError(f"`{name}` must be a floating-point tensor; got {what}.")
        if given.ndim not in (2, 3):
            raise InvalidInputError(
                f"`{name}` must have shape (n, d) or (B, n, d); got {tuple(given.shape)}."
            )
        if given.numel() == 0:
            raise InvalidInputError(f"`{name}` is empty: its shape is {tuple(given.shape)}.")
        points = given.double()
        points = points if points.ndim == 3 else points[None]
        if self.distances == "precomputed":
            if points.shape[1] != points.shape[2]:
                raise InvalidInputError(
                    f"`{name}` must be distances (n, n) or (B, n, n); got {tuple(given.shape)}."
                )
            return (points + points.mT) / 2
        if self.distances == "cosine":
            points = torch.nn.functional.normalize(points, dim=2)
            return 1 - points @ points.mT
        if self.distances == "sqeuclidean":
            length = points.square().sum(2)
            return (length[:, :, None] + length[:, None, :] - 2 * points @ points.mT).clamp_min(0)
        return straight(points, points)

    def _values(
        self, role: str, key: Hashable, x: Tensor, y: Tensor, linear: Tensor | None,
        a: Tensor, b: Tensor, alpha: float,
    ) -> Tensor:  # fmt: skip
        """Compute the objectives (B,) of problems, attached to their tables."""
        given = x, y, linear, a, b
        problem = _Problem(*(None if part is None else part.detach() for part in given))  # type: ignore[arg-type]
        recorded = torch.is_grad_enabled()
        wanted = [part is not None and recorded and part.requires_grad for part in given]
        name = role, key, len(x), x.shape[1], y.shape[1], x.device
        with plainly(x.device):
            objective, found = self._solved(name, problem, alpha, wanted)
        return call(Envelope, *given, objective, lambda **_: found)

    def _solved(
        self, name: Hashable, problem: _Problem, alpha: float, wanted: list[bool]
    ) -> tuple[Tensor, _Slopes]:
        """Solve problems from where the last ones of that name have ended, or with a search."""
        last, steps = self._kept.get(name, (None, -1))
        found, risen = None, False
        if last is not None:
            now, found, risen = self._followed(problem, alpha, last, wanted)
        steps += 1
        due = self.search_every is not None and steps >= self.search_every
        if last is None or risen or due:
            searched, steps, found = self._searched(name, problem, alpha), 0, None
            now = searched if last is None else now.lower(searched)
        self._kept[name] = now, steps
        self._kept.move_to_end(name)
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        if found is None:
            found = _slopes(_near(problem, alpha, self.epsilon), now.plan, now.g, alpha, wanted)
        return now.objective, found

    def _searched(self, name: Any, problem: _Problem, alpha: float) -> _Kept:
        """Search from scratch; a side and itself begin at the plan that leaves all in place."""
        x, y, linear, a, b = problem
        _check(problem)
        if math.isnan(self.epsilon):
            packed = _packed(problem, alpha, math.nan, None)
            every = torch.arange(len(x), device=x.device)
            share = None if linear is None else (1 - alpha) * linear
            self.epsilon = AUTO_EPSILON * float(natural_scale(packed, every, share).mean())
        if name[0] != "XY":
            return self._go_on(problem, alpha, torch.diag_embed(a))
        self.searches += 1
        starts = self.n_init
        if starts is None and x.shape[1] * y.shape[1] > limits_of(x.device).tiny:
            starts = _STARTS
        found = solve_batch(
            x, y, linear, a=a, b=b, alpha=alpha, scale=None, epsilon=self.epsilon, n_init=starts
        )
        assert isinstance(found.entries, Tensor)
        return self._go_on(problem, alpha, found.entries.view(len(x), x.shape[1], y.shape[1]))

    def _followed(
        self, problem: _Problem, alpha: float, last: _Kept, wanted: list[bool]
    ) -> tuple[_Kept, _Slopes | None, bool]:
        """Go on from where the last problems have ended, by the engine where that takes long.

        Returns also slopes, unless they are not known, and whether a value has risen.
        """
        rules = _Steps(alpha, self.epsilon, self.jump, self.rules, tuple(wanted))
        call: Call = call_directly
        given, device = (problem, last), last.plan.device
        few = sum(part.nbytes for part in tensors_of(given)) <= CAPTURED_BYTES
        if device.type == "cuda" and few:
            call = Replayer(device, ("follow", last.plan.shape, problem.linear is None, rules))
            given = call.hold("given", given)
        step, place = partial(_step, rules), None
        for name in ("begin", *(_MOST_STEPS - 1) * ("go on",)):
            went: _Went = call(name, step, given, place, in_place=1)
            place = went.place
            again, risen = went.again.tolist()
            if not again:
                break
        # what a graph returns is overwritten by its next call
        now, found, left = clone((went.now, went.found, went.left))
        if not again:
            return now, found, risen
        some = (None if part is None else part[left] for part in problem)
        rest = self._go_on(_Problem(*some), alpha, last.plan[left])  # type: ignore[arg-type]
        for mine, its in zip(now[:3], rest[:3], strict=True):
            mine[left] = its
        now = _Kept.after(last, *now[:3])
        return now, None, bool(_risen(now.objective, last.objective, self.jump).any())

    def _go_on(self, problem: _Problem, alpha: float, plan: Tensor) -> _Kept:
        """Solve problems from plans alone."""
        _check(problem)
        packed = _packed(problem, alpha, self.epsilon, plan)
        count, n, m = plan.shape
        found, g = torch.empty_like(plan), torch.empty_like(problem.b)

        def keep(ended: Ended) -> None:
            found[ended.number], g[ended.number] = ended.plan[:, :n, :m], ended.g[:, :m]

        solved = run(packed, self.rules, keep)
        failed, lost = torch.stack(
            [solved.ending > FLAT, ~solved.objective.isfinite()]
        ).any(1).tolist()  # fmt: skip
        if lost:
            raise NumericalError(
                "A value is not finite. Check the inputs for NaN and for distances that have "
                "grown, and raise `epsilon`."
            )
        if failed:
            warn_user(
                f"Some solves of a step did not converge in {self.rules.max_iter} iterations: "
                "their gradients are less accurate. Raise `max_iter`, `tol` or `epsilon`.",
                ConvergenceWarning,
            )
        return _Kept.anew(found, g, solved.objective)


class _Steps(NamedTuple):
    """What steps are made by, besides their tensors."""

    alpha: float
    epsilon: float
    jump: float
    rules: Rules
    wanted: tuple[bool, ...]  # slopes


class _Went(NamedTuple):
    """Where an iteration has led, and what is not done."""

    place: Place
    now: _Kept
    found: _Slopes
    left: Tensor  # (B,) bool, the problems that have not settled
    again: Tensor  # (2,) bool, whether any has not, and whether a value has risen


def _step(steps: _Steps, given: tuple[_Problem, _Kept], place: Place | None) -> _Went:
    """Take an iteration and judge it; the first from where the last two steps lead to."""
    problem, last = given
    near = _near(problem, steps.alpha, steps.epsilon)
    if place is None:
        toward = last.share[:, None, None] * last.moved
        g = torch.addcmul(last.g, last.share[:, None], last.moved_g)
        place = begin(near, last.plan, g, toward)
    place = follow(near, place)
    # steps of Newton's may lead past the optimum near by, to one that costs more
    most = place.most + _RISE * place.most.abs()
    # NaN compares as false
    settled = (place.change <= steps.rules.tol) & (place.error <= steps.rules.inner_tol)
    left = ~(settled & (place.objective <= most))
    again = torch.stack([left, _risen(place.objective, last.objective, steps.jump)]).any(1)
    now = _Kept.after(last, place.plan, place.g, place.objective)
    found = _slopes(near, place.plan, place.g, steps.alpha, steps.wanted)
    return _Went(place, now, found, left, again)


def _risen(objective: Tensor, last: Tensor, jump: float) -> Tensor:
    """Say of which problems a search is due, as they have risen."""
    return objective > last + jump * last.abs()


def _slopes(near: Nearby, plan: Tensor, g: Tensor, alpha: float, wanted: Sequence[bool]) -> _Slopes:
    """Differentiate objectives in what is wanted, at fixed plans."""
    f = exact_rows(linearised(near, plan), near.b, g, near.epsilon) if wanted[3] else g
    return tuple(slopes(alpha, near.x, near.y, plan, f, g, wanted=wanted))


def _near(problem: _Problem, alpha: float, epsilon: float) -> Nearby:
    """Name problems with their constants."""
    x, y, linear, a, b = problem
    one = torch.ones_like(a[:, 0])
    linear = None if linear is None else (1 - alpha) * linear
    return Nearby(x, y, linear, a, b, alpha * one, epsilon * one)


def _check(problem: _Problem) -> None:
    """Refuse tables that are not finite; steps are lost with them, and end here."""
    for name, table in (("X", problem.x), ("Y", problem.y)):
        if not bool(table.isfinite().all()):
            raise InvalidInputError(f"`{name}` has entries that are NaN or infinite.")


# Batches, by shape or `key`, whose plans are kept: a choice. [L1418]
_MOST_KEPT = 64


def _packed(problem: _Problem, alpha: float, epsilon: float, plan: Tensor | None) -> Packed:
    """Pack problems for the engine, that begin with the costs of plans at their epsilon."""
    x, y, linear, a, b = problem
    count, n, m = len(x), x.shape[1], y.shape[1]
    # programs of a GPU are for some sizes alone
    padded = padded_sizes(np.array([n, m])).tolist() if x.device.type == "cuda" else [n, m]
    sizes = [size or least for size, least in zip(padded, (n, m), strict=True)]
    beyond = (0, sizes[1] - m, 0, sizes[0] - n)

    def stacked(table: Tensor, weights: Tensor, size: int) -> Stack:
        counts = torch.full((count,), table.shape[1], device=x.device)
        more = size - table.shape[1]
        return make_stack(pad(table, (0, more, 0, more)), pad(weights, (0, more)), counts)

    cost = None if plan is None else pad(-4 * (x @ plan @ y), beyond)
    moved = None if linear is None else pad(linear, beyond)
    every = torch.arange(count, device=x.device)
    one = torch.ones(count, dtype=torch.float64, device=x.device)
    linear_of = None if moved is None else moved.__getitem__

    def begin(some: Tensor) -> tuple[Tensor, Tensor]:
        assert cost is not None
        return cost[some], one[some] > 0

    return Packed(
        stacked(x, a, sizes[0]), stacked(y, b, sizes[1]), every, every, alpha * one, epsilon * one,
        torch.zeros_like(one) if cost is not None else one, linear_of,
        begin if cost is not None else None,
    )  # fmt: skip


def _batched(name: str, given: Tensor, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Read a tensor of one problem or of B of them, float64."""
    if not isinstance(given, Tensor):
        raise InvalidTypeError(f"`{name}` must be a tensor; got {type(given).__name__}.")
    part = given.to(like)
    part = part if part.ndim == len(shape) else part[None]
    check_shape(name, part, shape)
    return part


def _weights(name: str, given: Tensor | None, table: Tensor) -> Tensor:
    """Read weights (B, n) of sum one."""
    count, n = table.shape[:2]
    if given is None:
        return torch.full((count, n), 1 / n, dtype=torch.float64, device=table.device)
    part = _batched(name, given, table, (count, n))
    if not bool(((part >= 0).all(1) & (part.sum(1) > 0)).all()):
        raise InvalidInputError(f"`{name}` must be non-negative, and not all zero.")
    return part / part.sum(1, keepdim=True)
