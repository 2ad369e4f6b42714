"""Many problems between shelved spaces, and their options: one for all, or one for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._batch.worth import Rules
from torchgw._boundary.arrays import to_numpy
from torchgw._boundary.cache import content_key
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._many.spaces import Shelves, Space, per_problem
from torchgw._problem.problem import MarginalRule, check_alpha, check_marginal_rule
from torchgw._problem.table import SearchName, check_options
from torchgw._solve.polish import can_polish, check_polish
from torchgw._tensors.operations import straight
from torchgw._typing import Marginals


def check_rules(
    max_iter: int,
    tol: float,
    objective_tol: float,
    inner_max_iter: int,
    inner_tol: float | None,
    n_init: int | None,
) -> Rules:
    """Check the options of the iteration."""
    check_options(
        max_iter=max_iter, tol=tol, objective_tol=objective_tol, inner_max_iter=inner_max_iter,
        inner_tol=inner_tol, n_init=n_init,
    )  # fmt: skip
    rules = Rules(int(max_iter), float(tol), float(objective_tol), int(inner_max_iter))
    return rules if inner_tol is None else rules._replace(inner_tol=float(inner_tol))


def starts_of(n_init: int | None, search: SearchName) -> int | None:
    """Check how far to look for a better match; count the starts, None for a search."""
    check_options(search=search)
    if search == "thorough" and n_init is not None:
        raise InvalidInputError(
            "search='thorough' is the search of torchgw.solve, by its defaults; leave `n_init` out."
        )
    return 1 if search == "fast" and n_init is None else n_init


def weights_of_terms(alpha: Any, count: int, *, fused: bool) -> NDArray[np.float64]:
    """Read the weight of the quadratic term of each problem."""
    return per_problem("alpha", alpha, count, lambda value: check_alpha(value, fused=fused))


def epsilons(epsilon: Any, count: int) -> NDArray[np.float64]:
    """Read epsilon of each problem, NaN for "auto"."""
    return per_problem("epsilon", epsilon, count, _epsilon)


def _epsilon(value: Any) -> float:
    """Read epsilon of a problem, NaN for "auto"."""
    check_options(epsilon=value)
    return math.nan if isinstance(value, str) and value == "auto" else float(value)


def read_relaxed(
    unbalanced: Any, mass: Any, alpha: NDArray[np.float64], followed: tuple[Any, ...] = ()
) -> Wanted:
    """Read which marginals the plans of B problems must have."""
    # `followed` are weights to which derivatives would go.
    count = len(alpha)
    shares = None if mass is None else per_problem("mass", mass, count, _share)
    if shares is not None and shares.min(initial=1.0) == 1:
        shares = None
    listed = isinstance(unbalanced, list) or getattr(unbalanced, "ndim", 0) > 0
    # one for all is read once
    each = [*unbalanced] if listed else [unbalanced]
    if listed and len(each) != count:
        raise InvalidInputError(
            "`unbalanced` must be a number or a pair (rho_a, rho_b), or a list with one of these "
            f"for each of the {count} problems; got {len(each)}."
        )
    penalties = [to_numpy(one).tolist() if hasattr(one, "tolist") else one for one in each]
    bound = None if mass is None else 1.0
    rules = [check_marginal_rule(one, bound) or MarginalRule() for one in penalties]
    rho = np.array([rule.rho for rule in rules]).reshape(len(rules), 2)
    rho = np.broadcast_to(rho, (count, 2))
    free = np.isfinite(rho)
    if (free.all(1) & (alpha == 0)).any():
        raise UnsupportedError(
            "alpha=0 with penalties on both sides is unbalanced transport, which batches do not "
            "solve. Raise `alpha`, make one side strict, (inf, rho), or loop over torchgw.solve."
        )
    found = Wanted(rho if free.any() else None, shares)
    each = [part for weights in followed if weights is not None for part in weights]
    moving = any(isinstance(part, Tensor) and part.requires_grad for part in each)
    if moving and any(part is not None for part in found):
        raise UnsupportedError(
            "In batches, derivatives with respect to `a` and `b` are those of strict marginals. "
            "Detach the weights, leave `unbalanced` and `mass` out, or loop over torchgw.solve."
        )
    return found


def read_sharpening(
    regularization: Any,
    polish: Any,
    wanted: Wanted,
    spaces: Sequence[Space],
    sides: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> Wanted:
    """Read which of B problems take proximal steps, and which are polished; refuse what cannot."""
    # `sides` are the places of their spaces, (B,) each.
    count = len(sides[0])
    proximal = per_problem("regularization", regularization, count, read_regularization) == 1
    asked = per_problem("polish", polish, count, read_polish)
    due = np.where(np.isnan(asked), proximal, asked == 1)
    if not (proximal | due).any():
        return wanted
    relaxed = wanted.relaxed(count)
    if (proximal & relaxed).any():
        raise UnsupportedError(
            "regularization='proximal' is for plans of given marginals, and `unbalanced` or `mass` "
            "relaxes them. Pass regularization='entropic'."
        )
    if wanted.penalties is not None:
        free = (np.sort(wanted.penalties, 1) == (0.0, math.inf)).all(1)
        if (due & relaxed & ~free).any():
            raise UnsupportedError(
                "`polish=True` moves between plans whose marginals are given, free or bounded, and "
                "`unbalanced` penalises them. Pass polish=False, (inf, 0) or (0, inf)."
            )
    if find_spec("ot") is None:
        for number in np.flatnonzero(due).tolist():
            weights = Marginals(*(spaces[side[number]].weights for side in sides))
            rule = check_marginal_rule(**wanted.marginals(number))
            if asked[number] == 1:
                check_polish(weights, rule)
            due[number] = can_polish(weights, rule)
    return wanted._replace(proximal=proximal, polish=due)


def read_regularization(value: Any) -> float:
    """Read whether a problem takes proximal steps."""
    check_options(regularization=value)
    return float(value == "proximal")


def read_polish(value: Any) -> float:
    """Read whether a problem is polished, NaN where that is left to its regularisation."""
    if value is None:
        return math.nan
    check_options(polish=value)
    return float(value)


def _share(value: Any) -> float:
    """Read the mass that one problem moves."""
    rule = check_marginal_rule(None, value)
    if rule is not None and rule.chosen:
        raise UnsupportedError(
            "mass='auto' compares many masses of one problem, which batches do not. Pass numbers, "
            "or loop over torchgw.solve."
        )
    return 1.0 if value is None else float(value)


class Wanted(NamedTuple):
    """What B problems ask of their plans, ``None`` where no problem asks for it."""

    penalties: NDArray[Any] | None = None  # (B, 2) float64, weights of both marginals
    mass: NDArray[Any] | None = None  # (B,) float64, share that is moved, in place of these
    proximal: NDArray[Any] | None = None  # (B,) bool, KL(P | last plan) for KL(P | a x b)
    polish: NDArray[Any] | None = None  # (B,) bool, conditional gradient steps at the end

    def relaxed(self, count: int) -> NDArray[np.bool_]:
        """Tell which problems have relaxed marginals, (B,)."""
        if self.mass is not None:
            return np.asarray(self.mass < 1)
        if self.penalties is not None:
            return np.asarray(np.isfinite(self.penalties).any(1))
        return np.full(count, False)

    def sharp(self, count: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Tell which problems take proximal steps, and which are polished, (B,) each."""
        proximal, polish = (np.full(count, False) if part is None else part for part in self[2:])
        return proximal, polish

    def each(self, function: Callable[[Any], Any]) -> Wanted:
        """Apply a function to what is asked for."""
        return Wanted(*(None if part is None else function(part) for part in self))

    def alike(self) -> Wanted:
        """Take what all problems ask for, as that of one."""
        first = self.each(lambda part: part[:1])
        return Wanted(*first[:2], *self.each(lambda part: part.all(keepdims=True))[2:])

    def repeated(self, count: int) -> Wanted:
        """Repeat what holds for one problem for so many."""
        return self.each(lambda part: part.repeat(count, 0))

    def of(self, numbers: NDArray[np.int64], turned: NDArray[np.bool_] | None = None) -> Wanted:
        """Take some problems, with their sides exchanged where they are ``turned``."""
        some = self.each(lambda part: part[numbers])
        if turned is None or some.penalties is None:
            return some
        sides = np.where(turned[:, None], some.penalties[:, ::-1], some.penalties)
        return some._replace(penalties=sides)

    def marginals(self, number: int) -> dict[str, Any]:
        """Make the arguments of one problem for :func:`torchgw.solve` that relax its marginals."""
        penalties, mass = (None if part is None else part[number].tolist() for part in self[:2])
        return {"unbalanced": penalties and tuple(penalties), "mass": mass}

    def sharpness(self, number: int) -> dict[str, Any]:
        """Make those by which its plan becomes sharp."""
        proximal, polish = (part is not None and bool(part[number]) for part in self[2:])
        return {"regularization": "proximal" if proximal else "entropic", "polish": polish}


@dataclass(frozen=True)
class Questions:
    """B problems between shelved spaces."""

    shelves: Shelves
    i: NDArray[np.int64]
    j: NDArray[np.int64]
    alpha: NDArray[np.float64]
    epsilon: NDArray[np.float64]  # NaN for "auto"
    # M of each problem, (n, m) float64; from a stack without its padding
    tables: Sequence[Tensor] | Tensor | None = None
    squared: bool = True  # whether distances of features are squared
    n_init: int | None = None  # starts; None is a search
    search: SearchName = "auto"
    rules: Rules = field(default_factory=Rules)
    wanted: Wanted = Wanted()

    def __len__(self) -> int:
        """Count the problems."""
        return len(self.i)

    def some(self, numbers: Tensor) -> Questions:
        """Take some of the problems."""
        at, tables = numbers.numpy(), self.tables
        if isinstance(tables, Tensor):
            tables = tables[numbers.to(tables.device)]
        elif tables is not None:
            tables = [tables[number] for number in at]
        return replace(
            self, i=self.i[at], j=self.j[at], alpha=self.alpha[at], epsilon=self.epsilon[at],
            tables=tables, wanted=self.wanted.of(at),
        )  # fmt: skip

    def key(self) -> str:
        """Hash everything that the answers depend on."""
        shelves, tables = self.shelves, self.tables
        large = (shelves.padded == 0).nonzero()[0]
        content: list[Any] = [part for stack in shelves.stacks.values() for part in stack[:2]]
        content += shelves.features.values()
        content += (part for number in large for part in shelves.spaces[number])
        content += tables if isinstance(tables, list) else [tables]
        given = self.i, self.j, self.alpha, self.epsilon, *self.wanted
        for part in (shelves.sizes, *given):
            content.append(None if part is None else torch.from_numpy(np.array(part)))
        return content_key(
            "many", *content, self.squared, self.n_init, self.search, tuple(self.rules)
        )

    def arguments(self, number: int) -> dict[str, Any]:
        """Make the arguments of one problem for :func:`torchgw.solve`."""
        source, target = (self.shelves.spaces[side[number]] for side in (self.i, self.j))
        linear = None if self.tables is None else self.tables[number]
        if linear is not None:
            linear = linear[: len(source.table), : len(target.table)]
        if source.features is not None and target.features is not None:
            linear = self.feature_costs(source.features, target.features)
        fused = {} if linear is None else {"M": linear, "alpha": float(self.alpha[number])}
        sides = {"D_X": source.table, "D_Y": target.table, "a": source.weights, "b": target.weights}
        return {**sides, **fused, **self.wanted.marginals(number)}

    def feature_costs(self, source: Tensor, target: Tensor) -> Tensor:
        """Compute M of features (..., n, d) and (..., m, d), by operations that go pair by pair."""
        cost = straight(source, target)
        return cost.square_() if self.squared else cost
