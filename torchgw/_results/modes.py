"""Maps between surfaces in their modes of vibration, which place points finer than a plan."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchgw._plans.contract import Plan
from torchgw._problem.limits import CPU
from torchgw.distances.base import BLOCK_ENTRIES
from torchgw.distances.modes import FIRST, apart, modes
from torchgw.distances.points import Space
from torchgw.distances.surface import Surface

# How often a map is made anew, with more modes each time. [L1532]
_TIMES = 15
# A vertex with this share of the mass that its area asks for has a partner. A choice.
_PARTNER = 0.1

# Places of the vertices of both sides, and the nearest of the second to each of the first, (n,).
Embeddings = tuple[Tensor, Tensor, Tensor]


def embeddings(plan: Plan, spaces: tuple[Space, Space], vertex: Tensor) -> Embeddings | None:
    """Place the vertices of two surfaces in one space of modes, as their map asks for.

    It begins at a map of vertices (n,) to vertices. ``None`` if one side is no surface, or one of
    few or loose vertices, if the plan leaves out a part of one, or if they sound too different.
    """
    # Functions move by a map as matrices between modes, which few low modes determine; the nearest
    # places under these are a map that tells of more modes, in turn [1].
    # [1] S. Melzi, J. Ren, E. Rodola, A. Sharma, P. Wonka, M. Ovsjanikov. ZoomOut: spectral
    # upsampling for efficient shape correspondence. ACM Transactions on Graphics 38 (2019).
    first, second = (
        None if space.faces is None else Surface(space.points, space.faces) for space in spaces
    )
    if first is None or second is None:
        return None
    for side, mass in zip((first, second), plan.marginals(), strict=True):
        share = torch.from_numpy(side.weights).to(mass)
        if float(share[mass >= _PARTNER * mass.sum() * share].sum()) < CPU.whole:
            return None
    one, other = modes(first, FIRST), modes(second, FIRST)
    if one is None or other is None or apart(one, other) > CPU.alike:
        return None
    # all of them take several times as long
    found = [modes(side) for side in (first, second)]
    x, y = (torch.from_numpy(side.functions).to(plan.device) for side in found if side)
    weight = torch.from_numpy(first.weights).to(x)
    weight = torch.where(plan.marginals()[0] > 0, weight, 0.0)
    count = min(x.shape[1], y.shape[1])
    for k in np.linspace(FIRST, count, _TIMES).astype(int).tolist():
        here = x[:, :k]
        there = y[:, :k] @ (y[vertex, :k].T @ (weight[:, None] * here))
        vertex = _nearest(here, there)
    return here, there, vertex


def _nearest(here: Tensor, there: Tensor) -> Tensor:
    """Find the nearest of some places (m, k) to each of others (n, k)."""
    squares = there.square().sum(1)
    step = max(1, BLOCK_ENTRIES // len(there))
    return torch.cat([(squares - 2 * some @ there.T).argmin(1) for some in here.split(step)])
