"""Whether a match keeps left and right apart, or takes one for the other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgw._errors import (
    AmbiguityWarning,
    InvalidInputError,
    SearchWarning,
    UnsupportedError,
    warn_user,
)
from torchgw._plans.contract import Plan
from torchgw._problem.table import Options
from torchgw._starts.alternatives import Alternative, related
from torchgw._tensors.deadline import countdown
from torchgw.distances.points import Space
from torchgw.distances.surface import Surface


def check_handed(spaces: tuple[Space, Space]) -> None:
    """Refuse sides that have no left and right in common."""
    surfaces = [space.faces is not None for space in spaces]
    wide = [None if space.points is None else space.points.shape[1] for space in spaces]
    # where a turn cannot make a mirror image of itself, and people know left from right
    if surfaces[0] != surfaces[1] or wide[0] != wide[1] or wide[0] not in (2, 3):
        raise InvalidInputError(
            "Left and right are those of two sides of points in 2 or 3 dimensions, or of two "
            f"surfaces; got {_kind(surfaces[0], wide[0])} and {_kind(surfaces[1], wide[1])}. Leave "
            "`reflections` out."
        )
    if wide[0] == 2 and surfaces[0]:
        # flat surfaces are points of the plane
        return
    for name, space in zip("XY", spaces, strict=True):
        if space.faces is not None and not Surface(space.points, space.faces).is_oriented:
            raise InvalidInputError(
                f"The triangles of the surface `{name}` are not all turned the same way, so it has "
                "no left and right. Orient them: trimesh.repair.fix_normals(mesh)."
            )


def _kind(surface: bool, wide: int | None) -> str:
    if surface:
        return f"a surface in {wide} dimensions"
    return "a side without points" if wide is None else f"points in {wide} dimensions"


def handedness(plan: Plan, spaces: tuple[Space, Space]) -> float:
    """Tell how clearly a plan keeps (towards 1) or exchanges (towards -1) left and right."""
    check_handed(spaces)
    first, second = spaces
    assert first.points is not None
    assert second.points is not None
    x, y = first.points.double(), second.points.double()
    if first.faces is None or second.faces is None or x.shape[1] == 2:
        return _of_points(plan, x, y)
    return _of_surfaces(plan, first.faces, y, second.faces)


def _of_points(plan: Plan, x: Tensor, y: Tensor) -> float:
    """Look at the linear map that fits best: the sign of its determinant."""
    mass = plan.marginals()[0].double()
    kept = mass > 0
    x, y, mass = x[kept], plan.barycentric(y)[kept], mass[kept] / mass.sum()
    x, y = x - mass @ x, y - mass @ y
    left, sizes, right = torch.linalg.svd(x.T @ (mass[:, None] * y))
    sign = float(torch.linalg.det(left @ right).sign())
    total = float(sizes.sum())
    return sign * len(sizes) * float(sizes[-1]) / total if total > 0 else 0.0


def _of_surfaces(plan: Plan, faces: Tensor, y: Tensor, others: Tensor) -> float:
    """Look at where triangles go: the same side of them has to lie outside there."""
    # This does not depend on how a shape bends, as a rigid map of all of it would.
    outside = _normals(y, others)
    there, up = plan.barycentric(torch.cat([y, outside], 1)).split(3, 1)
    corners, up = there[faces], up[faces].mean(1)
    turned = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    same = (turned * up).sum(1)
    size = turned.norm(dim=1) * up.norm(dim=1)
    known = same.isfinite()
    total = float(size[known].sum())
    return float(same[known].sum()) / total if total > 0 else 0.0


def _normals(points: Tensor, faces: Tensor) -> Tensor:
    """Average the normals of the triangles around each vertex, (m, 3), of length one."""
    one, two, three = points[faces].unbind(1)
    each = torch.linalg.cross(two - one, three - one)
    found = torch.zeros_like(points).index_add_(0, faces.reshape(-1), each.repeat_interleave(3, 0))
    return found / found.norm(dim=1, keepdim=True).clamp_min(torch.finfo(each.dtype).tiny)


def without_reflections(solve: Callable[..., Any], init: Any, asked: Options) -> Any:
    """Solve, and again from optima that keep left and right if the best one does not."""
    if init is not None:
        raise InvalidInputError(
            "`init` says where to start, and `reflections=False` would begin elsewhere. Pass one "
            "of them."
        )
    if asked.checkpoint is not None:
        raise UnsupportedError(
            "`checkpoint` keeps one solve, and `reflections=False` may take several. Leave one of "
            "them out; `result.handedness()` tells whether a match is a mirror image."
        )
    left = countdown(asked.time_limit)

    def from_(start: Any) -> Any:
        # all solves together take the time that is given
        return solve(init=start, asked=asked.replace(reflections=True, time_limit=left()))

    with warnings.catch_warnings():
        # that the mirror image costs nearly the same is what was asked about
        warnings.simplefilter("ignore", AmbiguityWarning)
        first = from_(None)
        found = first if first.handedness() > 0 else None
        for start in first.alternatives[1:]:
            if found is not None:
                break
            other = from_(start)
            if other.handedness() > 0:
                rest = (one for one in first.alternatives if one is not start)
                told = _told_anew((replace(start, relation=""), *rest), first)
                found = replace(other, alternatives=told, trials=first.trials)
    if found is not None:
        found = _judged(found, first.ambiguity)
        if found.is_ambiguous:
            warn_user(found._tell_ambiguity(), AmbiguityWarning)
        return found
    doubt = (
        "Every optimum that was found is a mirror image, and reflections=False asks for another. "
        "Look further by search='thorough', or see whether one side is turned inside out."
    )
    warn_user(doubt, SearchWarning)
    return replace(first, doubt=doubt)


def _judged(result: Any, before: float) -> Any:
    """Say how close the next optimum is that is no mirror image; those come last."""
    if len(result.alternatives) < 2:
        return result
    best, *rest = result.alternatives
    rest.sort(key=lambda one: "mirrored" in one.relation)
    ambiguity = 0.0
    if "mirrored" not in rest[0].relation and rest[0].value > 0:
        ambiguity = min(1.0, best.value / rest[0].value)
    if math.isnan(before):
        ambiguity = before
    return replace(result, alternatives=(best, *rest), ambiguity=ambiguity)


def _told_anew(found: tuple[Alternative, ...], result: Any) -> Any:
    """Say what other optima are to the first of them."""
    tensor = partial(torch.as_tensor, device=result.lazy_plan.device)
    tables = tuple(
        replace(one, plan=tensor(one.plan), source=tensor(one.source), target=tensor(one.target))
        for one in found
    )
    known = result.extension.known
    told: Any = related(tables, known.distances(0), known.distances(1))
    return result._handed_out(told)
