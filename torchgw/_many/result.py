"""The result of a batch of problems."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchgw._api import solve
from torchgw._boundary.arrays import in_kind, to_numpy, to_tensor
from torchgw._boundary.checks import check_within
from torchgw._errors import UnsupportedError
from torchgw._many.solver import STATUSES
from torchgw._results.base import Result, tracked_loss
from torchgw._results.matching import Matching, MatchingKind
from torchgw._results.result import GWResult
from torchgw._solve.state import Status
from torchgw._starts.alternatives import WHY_ALONE, WHY_BATCH
from torchgw._typing import Array


@dataclass(frozen=True, repr=False, eq=False)
class BatchResult(Result):
    """Outcome of :func:`torchgw.solve_many` and :func:`torchgw.solve_batch`, B problems.

    Files hold all numbers and plans. The spaces are left out, and with them :meth:`result` and
    :meth:`matching`.

    Attributes
    ----------
    value_quad, value_linear : Tensor or ndarray, shape (B,), float64
        alpha * <L(P), P> and (1 - alpha) * <M, P> of each plan.
    objective : Tensor or ndarray, shape (B,), float64
        What was minimised: value + epsilon KL(P | a x b), as in ``solve`` where marginals are
        relaxed; the value alone after proximal steps or polishing.
    marginal_error : Tensor or ndarray, shape (B,), float64
        Larger of the L1 distances of a plan's marginals to the weights; where these are relaxed,
        how far they break what is strict.
    epsilon, alpha : Tensor or ndarray, shape (B,), float64
        Of each problem. After proximal steps epsilon is that of an entropic solve that ends at the
        same plan; 0 for a polished plan.
    ambiguity : Tensor or ndarray, shape (B,), float64
        As of a single result: value of the best optimum that a search found over that of the next
        one, at most 1. NaN without a search, and where marginals are relaxed.
    status : Tensor or ndarray, shape (B,), int64
        How each ended, as a place in ``tuple(torchgw.Status)``; ``statuses`` has them by name.
    n_iter : Tensor or ndarray, shape (B,), int64
        Outer iterations of each.
    doubtful : Tensor or ndarray, shape (B,), int64
        1 where the starts of a search did not agree on an optimum, so that there may be a better
        one, 2 where a problem was solved as by ``solve``, which is in doubt; ``doubts`` has that in
        words.
    shapes : Tensor or ndarray, shape (B, 2), int64
        Points of both sides of each.
    entries : Tensor, ndarray or None, shape (sum of n m,), float64
        All plans one after the other, row by row; see :meth:`plan`. None with ``plans=False``.
    tracked : Tensor or None, shape (B,), float64
        With ``differentiable=True``: ``objective`` as a tensor that carries gradients. ``loss`` is
        the same, and an error where there is none.
    """

    value_quad: Array
    value_linear: Array
    objective: Array
    marginal_error: Array
    epsilon: Array
    alpha: Array
    ambiguity: Array
    status: Array
    n_iter: Array
    doubtful: Array
    shapes: Array
    entries: Array | None = None
    tracked: Tensor | None = None
    questions: Any = None

    @property
    def loss(self) -> Tensor:
        """Objectives as a tensor that carries gradients, shape (B,), float64.

        Raises
        ------
        UnsupportedError
            If the batch was solved without ``differentiable``.
        """
        return tracked_loss(self.tracked, "solve_batch", "True")

    def __len__(self) -> int:
        """Count the problems."""
        return len(self.objective)

    @property
    def value(self) -> Any:
        """Transport objective of each plan, without the entropy term, (B,)."""
        return self.value_quad + self.value_linear

    @property
    def statuses(self) -> list[Status]:
        """How each problem ended."""
        return [STATUSES[code] for code in self.status.tolist()]

    @property
    def doubts(self) -> list[str]:
        """Why each may not be the best optimum, as ``doubt`` of a single result; empty if not."""
        said = "", WHY_BATCH, WHY_ALONE
        return [said[code] for code in self.doubtful.tolist()]

    @property
    def converged(self) -> Any:
        """Whether each answer may be used without reservation, (B,) bool."""
        good = [place for place, status in enumerate(STATUSES) if status.converged]
        status = to_tensor("status", self.status)
        return in_kind(self.status, torch.isin(status, torch.tensor(good, device=status.device)))

    def plan(self, i: int) -> Any:
        """Plan of problem i, (n, m) float64; UnsupportedError if plans were not kept."""
        if self.entries is None:
            raise UnsupportedError(
                "No plans were kept. Pass plans=True, which takes the memory of all of them; or "
                "solve this one alone, which gives the same plan to the last bit."
            )
        place = self._place(i)
        sizes = self.shapes.prod(1)
        begin, count = int(sizes[:place].sum()), int(sizes[place])
        return self.entries[begin : begin + count].reshape(*self.shapes[place].tolist())

    def plans(self) -> list[Any]:
        """All plans, (n, m) float64 each."""
        if self.entries is None:
            return [self.plan(i) for i in range(len(self))]
        ends = to_numpy(self.shapes).prod(1).cumsum().tolist()
        spans = zip([0, *ends], ends, self.shapes.tolist(), strict=False)
        return [self.entries[begin:end].reshape(*shape) for begin, end, shape in spans]

    def result(self, i: int) -> GWResult:
        """Problem i as a full result: :func:`torchgw.solve` goes on from its plan.

        At the same epsilon, so that values agree up to the tolerances of the two, and polished
        again if it was. UnsupportedError for a batch from a file, which does not hold the spaces.
        """
        init = self.plan(i)
        if self.questions is None:
            raise UnsupportedError(
                "A batch from a file does not hold its spaces. Pass the problem to torchgw.solve "
                "with `init=batch.plan(i) / batch.plan(i).sum()` and `epsilon=batch.epsilon[i]`."
            )
        place = self._place(i)
        arguments = self.questions.arguments(place)
        epsilon: Any = float(self.epsilon[place])
        if epsilon == 0:
            # as it was asked, since steps without regularisation have no epsilon
            asked = float(self.questions.epsilon[place])
            epsilon = "auto" if math.isnan(asked) else asked
            arguments |= self.questions.wanted.sharpness(place)
        return solve(**arguments, init=init / init.sum(), epsilon=epsilon)

    def matching(self, i: int, kind: MatchingKind = "one_to_one") -> Matching:
        """Round plan i to pairs of points; see :meth:`torchgw.GWResult.matching`."""
        return self.result(i).matching(kind)

    def _for_file(self) -> "BatchResult":
        return replace(self, questions=None)

    def _place(self, i: int) -> int:
        check_within("i", i, -len(self), len(self) - 1)
        return int(i) % len(self)

    def _summary(self) -> tuple[str, dict[str, str], str]:
        done = int(self.converged.sum())
        figures = {}
        if len(self):
            figures["value"] = f"{float(self.value.min()):.4g} to {float(self.value.max()):.4g}"
            figures["marginal_error"] = f"up to {float(self.marginal_error.max()):.2g}"
        return f"{len(self)} problems", figures, f"{done} of {len(self)} converged"
