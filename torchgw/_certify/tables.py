"""Lower bounds for any tables: sorted distances, eigenvalues, and the first level of liftings.

Gilmore and Lawler [1]_, Memoli [2]_
    A pair (i, j) costs at least what the distances of i and those of j cost in order: l_ij. Then
    min <l, P>. Between matchings i meets j itself, and the others go in order.
Eigenvalues (projected, as for assignment problems [3]_)
    With S = A^1/2 G_X A^1/2 and T = B^1/2 G_Y B^1/2 the quadratic part is tr(S R T R') of a
    contraction R: at most the products of eigenvalues of one sign in order; of matchings, all in
    order but for the constant vector.
First level of liftings (RLT1 [4]_)
    y_ijkl = P_ij P_kl is symmetric, and has the sums P_ij a_k and P_ij b_l. Potentials f (n, m, n)
    and g (n, m, m) with f_ijk + g_ijl + f_kli + g_klj <= C_ijkl + C_klij prove that all plans cost
    at least min <l, P>, l_ij = sum_k a_k f_ijk + sum_l b_l g_ijl. They are improved block by block,
    with entropy, as in Sinkhorn's algorithm.

References
----------
.. [1] E. Lawler. The quadratic assignment problem. Management Science 1963.
.. [2] F. Memoli. Gromov-Wasserstein distances and the metric approach to object matching.
   Foundations of Computational Mathematics 2011.
.. [3] S. Hadley, F. Rendl, H. Wolkowicz. A new lower bound via projection for the quadratic
   assignment problem. Mathematics of Operations Research 1992.
.. [4] P. Hahn, T. Grant. Lower bounds for the quadratic assignment problem based upon a dual
   formulation. Operations Research 1998.
"""

from time import monotonic
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._certify.question import Incumbent, Question
from torchgw._certify.semidefinite import Squares
from torchgw._sinkhorn.duals import Array, Transport

# Parts of equal mass over which quantile functions are averaged where weights differ. [L1352]
PARTS = 1024
# Entropy of the first level as a share of the spread of the costs: at the start, its decay, its
# end, and the rounds at each. [L1353]
_FIRST, _DECAY, _LAST, _ROUNDS = 0.03, 0.6, 1e-6, 40
# Where it begins at potentials that are given. [L1377]
_AGAIN = 3e-3


class Bound(NamedTuple):
    """A value that no plan, or no matching, goes below, and the numbers that prove it."""

    method: str
    value: float
    arrays: dict[str, Array]


def in_order(question: Question, *, matchings: bool) -> Bound:
    """Compute the bound of Gilmore and Lawler."""
    q, tables = question, (question.D_X, question.D_Y)
    if matchings:
        n = len(q.a)
        away = ~np.eye(n, dtype=bool)
        x, y = (np.sort(table[away].reshape(n, n - 1), axis=1) for table in tables)
        own = (q.D_X.diagonal()[:, None] - q.D_Y.diagonal()) ** 2
        local = (_squares(x, y) + own) / n
    elif q.is_assignment:
        x, y = (np.sort(table, axis=1) for table in tables)
        local = _squares(x, y) / len(q.a)
    else:
        x, y = (
            quantile_means(torch.from_numpy(table), torch.from_numpy(weight), PARTS).numpy()
            for table, weight in zip(tables, (q.a, q.b), strict=True)
        )
        local = _squares(x, y) / PARTS
    cost = q.alpha * local
    if q.M is not None:
        cost += (1 - q.alpha) * q.M
    transport = Transport(q.a, q.b, q.allowed)
    _, f = transport(cost)
    return Bound("distances in order", transport.bound(cost, f), {"f": f})


def _squares(x: Array, y: Array) -> Array:
    """Compute |x_i - y_j|^2 of rows, (n, m), from differences."""
    return torch.cdist(torch.from_numpy(x), torch.from_numpy(y)).square().numpy()


def quantile_means(values: Tensor, weights: Tensor, parts: int) -> Tensor:
    """Average the quantile functions of rows (r, n) by weight (n,) over parts of the mass, (r, q).

    The integral of a quantile function up to a share of the mass is linear between the sums that
    sorted values reach.
    """
    values, order = values.sort(dim=1)
    mass = weights[order]
    reached = mass.cumsum(1)
    reached /= reached[:, -1:].clone()
    integral = (values * mass).cumsum(1) / weights.sum()
    share = torch.arange(1, parts + 1, dtype=values.dtype, device=values.device) / parts
    share = share.expand(len(values), -1).contiguous()
    place = torch.searchsorted(reached, share).clamp_(max=values.shape[1] - 1)
    over = reached.gather(1, place) - share
    upto = integral.gather(1, place) - values.gather(1, place) * over
    return parts * upto.diff(dim=1, prepend=upto.new_zeros(len(upto), 1))


def eigenvalues(question: Question, *, matchings: bool) -> Bound:
    """Compute the bound of the eigenvalues of symmetric tables."""
    x, y = (
        np.linalg.eigvalsh(np.sqrt(np.outer(weight, weight)) * table).astype(np.float64)
        for table, weight in zip(question.centred, (question.a, question.b), strict=True)
    )
    most = products_in_order(x, y)
    if matchings:
        # R is orthogonal beside the constant vector, whose eigenvalue is zero
        x, y = (np.delete(part, np.abs(part).argmin()) for part in (x, y))
        most = min(most, float(x @ y))
    transport = Transport(question.a, question.b, question.allowed)
    linear = question.linear.dense()
    _, f = transport(linear)
    value = question.constant + transport.bound(linear, f)
    value -= 2 * question.alpha * most
    return Bound("eigenvalues", value, {"f": f})


def products_in_order(x: Array, y: Array) -> float:
    """Add the products of eigenvalues of one sign, the largest with the largest."""
    total = 0.0
    for sign in (1, -1):
        first, second = (np.sort((sign * part).clip(min=0))[::-1] for part in (x, y))
        size = min(len(first), len(second))
        total += float(first[:size] @ second[:size])
    return total


class Lifting:
    """The potentials of the first level, in float64 on any device."""

    def __init__(
        self,
        question: Question,
        device: torch.device,
        *,
        matchings: bool,
        squares: Squares | None = None,
    ) -> None:
        self._transport = Transport(question.a, question.b, question.allowed)
        x, y = self._on(device, question.D_X, question.D_Y)
        cost = (x[:, None, :, None] - y[None, :, None, :]).square_().mul_(question.alpha)
        if question.M is not None:
            (table,) = self._on(device, (1 - question.alpha) * question.M)
            cost += table[:, :, None, None]
        n, m = question.shape
        self._weights = self._on(device, question.a, question.b)
        # half of what C_ijkl + C_klij leaves
        self._rest = (cost + cost.permute(2, 3, 0, 1)).div_(2)
        # squares of sums of entries (n m, r) are left out: they are not negative
        self._sums = None if squares is None else squares.sums
        self._first = _FIRST
        self._spread = float(self._rest.std())
        self._f, self._g = x.new_zeros(n, m, n), x.new_zeros(n, m, m)
        if squares is not None:
            (left,) = self._on(device, squares.sums)
            self._f += squares.f
            self._g += squares.g
            self._rest -= (left @ left.T).view_as(self._rest)
            self._rest -= self._f[:, :, :, None] + self._g[:, :, None, :]
            self._first = _AGAIN
        if matchings:
            one, two = (torch.eye(size, dtype=torch.bool, device=device) for size in (n, m))
            apart = one[:, None, :, None] ^ two[None, :, None, :]
            self._rest.masked_fill_(apart, torch.inf)
        self._closed: Tensor | None = None
        if question.allowed is not None:
            self._closed = closed = ~torch.from_numpy(question.allowed).to(device)
            self._rest.masked_fill_(closed[:, :, None, None] | closed, torch.inf)
        self.best = self._proven()

    @staticmethod
    def _on(device: torch.device, *arrays: Array) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in arrays)

    def run(self, seconds: float, gap: float, incumbent: Incumbent) -> Bound:
        """Improve the potentials until a share of the best value is left, or time is up."""
        end, share = monotonic() + seconds, self._first
        incumbent.see(self._guess)
        while share >= _LAST and not incumbent.within(gap, self.best.value):
            for _ in range(_ROUNDS):
                self._round(share * self._spread)
                if monotonic() > end:
                    break
            found = self._proven()
            incumbent.see(self._guess)
            if found.value > self.best.value:
                self.best = found
            if monotonic() > end:
                break
            share *= _DECAY
        return self.best

    def _round(self, epsilon: float) -> None:
        """Balance the two halves of each pair of blocks, then rows, columns and blocks."""
        (a, b), rest = self._weights, self._rest
        rest += rest.permute(2, 3, 0, 1).clone()
        rest /= 2
        least = _softmin(rest, b, epsilon)  # (n, m, n)
        step = least - (least @ a)[:, :, None]
        self._f += step
        rest -= step[:, :, :, None]
        least = _softmin(rest.transpose(2, 3), a, epsilon)  # (n, m, m)
        block = least @ b
        step = least - block[:, :, None]
        if self._closed is not None:
            block = block.masked_fill(self._closed, torch.inf)
        # of blocks: what the rows and the columns of P leave
        rows = _softmin(block, b, epsilon)
        columns = _softmin((block - rows[:, None]).T, a, epsilon)
        step += rows[:, None, None] + columns[:, None]
        self._g += step
        rest -= step[:, :, None, :]

    def _proven(self) -> Bound:
        """Make the potentials feasible, and compute the bound."""
        (a, b), rest = self._weights, self._rest
        rest = (rest + rest.permute(2, 3, 0, 1)).div_(2)
        first = _finite(rest.amin(3))
        second = _finite((rest - first[:, :, :, None]).amin(2))
        f, g = self._f + first, self._g + second
        cost = (f @ a + g @ b).cpu().numpy()
        # the best plan of the linear problem that is left is a guess
        self._guess, u = self._transport(cost)
        value = self._transport.bound(cost, u)
        arrays = {"f": u, "pairs_f": f.cpu().numpy(), "pairs_g": g.cpu().numpy()}
        if self._sums is not None:
            arrays["sums"] = self._sums
        method = "first level of liftings" if self._sums is None else "semidefinite relaxation"
        return Bound(method, value, arrays)


def _softmin(rest: Tensor, weights: Tensor, epsilon: float) -> Tensor:
    """Compute -epsilon log sum_l w_l exp(-rest_l / epsilon) over the last axis."""
    return _finite(torch.logsumexp(weights.log() - rest / epsilon, -1).mul_(-epsilon))


def _finite(potential: Tensor) -> Tensor:
    """Put zero where nothing is asked of a potential, since no plan has mass there."""
    return potential.masked_fill_(potential.isinf(), 0.0)
