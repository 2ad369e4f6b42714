"""How far a plan may be from the best one: the bounds in turn, and what the caller gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from torchgw._certify.cuts import ACTIVE, CuttingPlanes
from torchgw._certify.question import Incumbent, Points, Question, check_none_below
from torchgw._certify.semidefinite import squares
from torchgw._certify.streamed import StreamedPlanes
from torchgw._certify.tables import Bound, Lifting, eigenvalues, in_order
from torchgw._plans.contract import Plan
from torchgw._problem.limits import limits_of
from torchgw._sinkhorn.duals import Array, Transport

# Shares of the time; and that of a semidefinite relaxation until its squares are lifted. [L1377]
_TIME, _SHARE = {"cut": 3.0, "lift": 1.0, "squares": 3.0}, 0.5


# The metrics of X and of Y, and the factors of their distances.
Named = tuple[tuple[str | None, str | None], tuple[float, float]]


@dataclass(frozen=True)
class Proof:
    """Numbers from which :func:`torchgw.verify` derives a lower bound again.

    Attributes
    ----------
    method : str
        Name of the bound; docs/certificates.md has its mathematics.
    value : float
        The lower bound that is claimed.
    matchings : bool
        Whether the bound holds for one-to-one matchings alone.
    alpha : float
        Weight of the quadratic term.
    metrics : tuple of str or None
        Of X and of Y, where these were points.
    scale : tuple of float
        Factors that multiply the distances of X and of Y.
    arrays : dict of str to ndarray
        Potentials, vectors and faces by name.
    digest : str
        SHA-256 of all the above: a number that was changed on the way shows at once.
    """

    method: str
    value: float
    matchings: bool
    alpha: float
    metrics: tuple[str | None, str | None]
    scale: tuple[float, float]
    arrays: dict[str, Any]
    digest: str = ""

    def __repr__(self) -> str:
        """Leave out the arrays."""
        return f"Proof({self.value:.6g} by {self.method})"


@dataclass(frozen=True)
class Certificate:
    """What no plan goes below, beside the value of a plan.

    One where a plan costs less than the bound, by more than rounding, is refused.

    Attributes
    ----------
    proof : Proof
        For :func:`torchgw.verify`.
    lower_bound : float
        No plan, or no one-to-one matching if ``proof.matchings``, costs less.
    gap : float
        Value of the plan less ``lower_bound``: what is to be gained at most.
    method : str
        The bound that is the largest.
    value : float
        Objective without entropy of the plan of the result, in float64 and at exact weights.
    best_value : float
        The least of all plans that the bounds have come by; at most ``value``.
    plan : scipy.sparse.csr_array, shape (n, m), float64, or None
        A plan of ``best_value``: ``solve(..., init=certificate.plan.toarray())`` goes on from it.
        ``None`` where there are too many points for tables.
    rounding : float
        What both values may be off by.
    seconds : float
        How long it took.
    """

    proof: Proof
    value: float
    best_value: float
    plan: scipy.sparse.csr_array | None
    rounding: float
    seconds: float

    def __post_init__(self) -> None:
        least = float(np.min([self.value, self.best_value]))
        check_none_below(least, self.lower_bound, self.rounding)

    @property
    def lower_bound(self) -> float:
        """The value that is proven."""
        return self.proof.value

    @property
    def gap(self) -> float:
        """How far the value is above it."""
        return max(self.value - self.lower_bound, 0.0)

    @property
    def method(self) -> str:
        """By what it is proven."""
        return self.proof.method

    def meets(self, gap: float) -> bool:
        """Whether no plan is better by more than a share of the value (and than rounding)."""
        return self.gap <= gap * abs(self.value) + self.rounding

    def of(self, value: float, plan: scipy.sparse.csr_array) -> Certificate:
        """Say the same beside the value of another plan."""
        kept = plan if value < self.best_value else self.plan
        return replace(self, value=value, best_value=min(value, self.best_value), plan=kept)

    def beside(self, earlier: Certificate) -> Certificate:
        """Keep what an earlier one of the same problem has proven, if that is more."""
        more = earlier.lower_bound > self.lower_bound
        return replace(self, proof=earlier.proof) if more else self

    def __repr__(self) -> str:
        """Leave out the arrays."""
        return f"Certificate({self})"

    def __str__(self) -> str:
        """Say it in a line."""
        share = f" ({self.gap / self.value:.2g} of it)" if self.value > 0 else ""
        kind = "matching" if self.proof.matchings else "plan"
        text = f"no {kind} is below {self.lower_bound:.6g} by {self.method}: at most {self.gap:.2g}"
        text += f"{share} is to be gained"
        if self.best_value < self.value:
            text += f"; certificate.plan has {self.best_value:.6g}"
        return text


def make_certificate(
    question: Question,
    plan: Array,
    *,
    seconds: float,
    gap: float,
    matchings: bool,
    device: torch.device,
    improve: Callable[[Array], Array],
    named: Named,
) -> Certificate:
    """Bound a problem from below until the gap is met, a share of the value, or time is up.

    ``improve`` leads a plan to a better one nearby.
    """
    start = monotonic()
    best, value = Incumbent(question, plan, improve), question.value(plan)
    proven: Bound | None = None
    # a concave objective is least at a matching
    exchanged = matchings or (question.is_assignment and question.is_concave)
    raised = False
    for bound in _bounds(question, best, start + seconds, gap, exchanged, device):
        whole = question.attainable(bound.value) if exchanged else bound.value
        raised |= whole > bound.value
        bound = bound._replace(value=whole)
        if proven is None or bound.value > proven.value:
            proven = bound
        if best.within(gap, proven.value):
            break
    assert proven is not None
    alone = matchings and (raised or proven.method not in ("squares", "cutting planes"))
    return Certificate(
        _proof(proven, question, named, matchings=alone), value, best.value,
        scipy.sparse.csr_array(best.plan), question.rounding, monotonic() - start,
    )  # fmt: skip


def _proof(bound: Bound, question: Question | Points, named: Named, *, matchings: bool) -> Proof:
    made = Proof(bound.method, bound.value, matchings, question.alpha, *named, bound.arrays)
    return replace(made, digest=digest_of(made))


def certificate_of_points(
    question: Points, plan: Plan, *, seconds: float, gap: float, scale: tuple[float, float]
) -> Certificate:
    """Bound a problem between too many points for tables, beside a plan of exact weights."""
    start = monotonic()
    read = question.read(plan)
    planes = StreamedPlanes(question, read, gap, plan.device, start + seconds)
    planes.run(start + seconds - monotonic())
    bound = planes.proof()
    # squares are not negative
    bound = bound._replace(value=max(bound.value, 0.0))
    named: Named = ("sqeuclidean", "sqeuclidean"), scale
    return Certificate(
        _proof(bound, question, named, matchings=False), question.value(read), planes.value, None,
        question.rounding, monotonic() - start,
    )  # fmt: skip


def _bounds(
    question: Question,
    best: Incumbent,
    end: float,
    gap: float,
    exchanged: bool,
    device: torch.device,
) -> Iterator[Bound]:
    """Compute one bound after another, the cheap ones first; their plans may be the best."""
    (n, m), limits = question.shape, limits_of(device)
    zero = 0.0
    if question.M is not None:
        own = question.M if question.allowed is None else question.M[question.allowed]
        zero = (1 - question.alpha) * float(own.min())
    yield Bound("squares", zero, {})
    if max(n, m) <= limits.sorted_points:
        yield in_order(question, matchings=exchanged)
        if question.is_symmetric:
            yield eigenvalues(question, matchings=exchanged)
    lifted = n * m <= limits.lifted and question.alpha > 0
    few = question.alpha > 0 and question.is_symmetric and question.products <= limits.cut_products
    # first what follows all numbers of the problem; the other goes on from where it ends
    dual = lifted and exchanged and n <= limits.semidefinite
    ways = [name for name, holds in (("lift", lifted), ("cut", few), ("squares", dual)) if holds]
    if few and question.products <= ACTIVE:
        ways.remove("cut")
        ways.insert(0, "cut")
    for place, way in enumerate(ways):
        left = max(end - monotonic(), 0.0) * _TIME[way] / sum(_TIME[one] for one in ways[place:])
        if way == "cut":
            until, short = monotonic() + left, True
            for whole in (False, True):
                if short:
                    transport = Transport(question.a, question.b, question.allowed)
                    planes = CuttingPlanes(question, best.plan, gap, transport, whole=whole)
                    planes.run(until - monotonic())
                    best.see(scipy.sparse.coo_array(planes.plan).toarray())
                    # by all its distances, what is said of a plan by its factors
                    check_none_below(planes.value, best.value, question.rounding)
                    yield planes.proof()
                    short = planes.short
        else:
            found = None if way == "lift" else squares(question, device, left * _SHARE)
            lifting = Lifting(question, device, matchings=exchanged, squares=found)
            yield lifting.run(left if found is None else end - monotonic(), gap, best)


def digest_of(proof: Proof) -> str:
    """Compute the digest of a proof."""
    made = hashlib.sha256()
    head = (
        proof.method, proof.value, proof.matchings, proof.alpha,
        list(proof.metrics), list(proof.scale),
    )  # fmt: skip
    made.update(json.dumps(head).encode())
    for name in sorted(proof.arrays):
        array: NDArray[Any] = np.ascontiguousarray(proof.arrays[name])
        made.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return made.hexdigest()
