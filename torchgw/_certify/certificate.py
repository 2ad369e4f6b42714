"""How far a plan may be from the best one: the bounds in turn, and what the caller gets."""

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
from torchgw._certify.question import Incumbent, Question
from torchgw._certify.semidefinite import squares
from torchgw._certify.streamed import Points, StreamedPlanes
from torchgw._certify.tables import Bound, Lifting, eigenvalues, in_order
from torchgw._plans.contract import Plan
from torchgw._problem.limits import limits_of
from torchgw._sinkhorn.duals import Array, Transport

# Shares of the time; and that of a semidefinite relaxation until its squares are lifted. [L1377]
_TIME, _SHARE = {"cut": 3.0, "lift": 1.0, "squares": 3.0}, 0.5


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


@dataclass(frozen=True)
class Certificate:
    """What no plan goes below, beside the value of a plan.

    Attributes
    ----------
    lower_bound : float
        No plan, or no one-to-one matching if ``proof.matchings``, costs less.
    gap : float
        Value of the plan less ``lower_bound``: what is to be gained at most.
    method : str
        The bound that is the largest.
    proof : Proof
        For :func:`torchgw.verify`.
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

    lower_bound: float
    gap: float
    method: str
    proof: Proof
    value: float
    best_value: float
    plan: scipy.sparse.csr_array | None
    rounding: float
    seconds: float

    def meets(self, gap: float) -> bool:
        """Whether no plan is better by more than a share of the value (and than rounding)."""
        return self.gap <= gap * abs(self.value) + self.rounding

    def of(self, value: float, plan: scipy.sparse.csr_array) -> "Certificate":
        """Say the same beside the value of another plan."""
        gap, best = max(value - self.lower_bound, 0.0), min(value, self.best_value)
        kept = plan if value < self.best_value else self.plan
        return replace(self, gap=gap, value=value, best_value=best, plan=kept)

    def beside(self, earlier: "Certificate") -> "Certificate":
        """Keep what an earlier one of the same problem has proven, if that is more."""
        if earlier.lower_bound <= self.lower_bound:
            return self
        bound, gap = earlier.lower_bound, max(self.value - earlier.lower_bound, 0.0)
        return replace(self, lower_bound=bound, gap=gap, method=earlier.method, proof=earlier.proof)

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
    named: tuple[tuple[str | None, str | None], tuple[float, float]],
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
    metrics, scale = named
    proof = Proof(proven.method, proven.value, alone, question.alpha, metrics, scale, proven.arrays)
    return Certificate(
        proven.value, max(value - proven.value, 0.0), proven.method,
        replace(proof, digest=digest_of(proof)), value, best.value,
        scipy.sparse.csr_array(best.plan), question.rounding, monotonic() - start,
    )  # fmt: skip


def certificate_of_points(
    question: Points, plan: Plan, *, seconds: float, gap: float, scale: tuple[float, float]
) -> Certificate:
    """Bound a problem between too many points for tables, beside a plan of exact weights."""
    start = monotonic()
    read = question.read(plan)
    planes = StreamedPlanes(question, read, gap, plan.device, start + seconds)
    planes.run(start + seconds - monotonic())
    bound, value = planes.proof(), question.value(read)
    # squares are not negative
    bound = bound._replace(value=max(bound.value, 0.0))
    metrics = "sqeuclidean", "sqeuclidean"
    proof = Proof(bound.method, bound.value, False, question.alpha, metrics, scale, bound.arrays)
    return Certificate(
        bound.value, max(value - bound.value, 0.0), bound.method,
        replace(proof, digest=digest_of(proof)), value, planes.value, None, question.rounding,
        monotonic() - start,
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
    possible = (("lift", lifted), ("cut", few), ("squares", dual))
    ways = [name for name, holds in possible if holds]
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
                    best.see(planes.plan)
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
