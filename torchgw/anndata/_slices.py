"""A sequence of slices in one call: each laid on the next, all in the frame of one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, get_args

from torchgw._boundary.checks import check_choice, check_within, reject_unknown
from torchgw._errors import InvalidInputError
from torchgw._problem.table import Options
from torchgw._results.maps import MapKind, SpaceMap
from torchgw._results.result import GWResult
from torchgw.anndata._align import places_of
from torchgw.anndata._problem import TranslationProblem
from torchgw.anndata._spaces import check_name, check_objects

if TYPE_CHECKING:
    from anndata import AnnData

SlicesKind = Literal["chain", "star"]


@reject_unknown
def align_slices(
    slices: Sequence[AnnData],
    *,
    kind: SlicesKind = "chain",
    reference: int = 0,
    spatial: MapKind = "rigid",
    use_rep: str = "spatial",
    joint_rep: str | None = None,
    key_added: str = "torchgw_slices",
    solve_options: Options | Mapping[str, Any] | None = None,
) -> list[GWResult]:
    """Lay all slices of a sequence into the frame of one of them.

    Each slice is matched with its neighbour on the side of the reference, and a map is fitted to
    ``obsm["spatial"]`` by that match, robustly. Maps follow one another up to the reference.

    Parameters
    ----------
    slices : sequence of AnnData
        In their order, with places in ``obsm["spatial"]``, shape (n, 2) or (n, 3).
    kind : {"chain", "star"}
        Whether each slice is matched with its neighbour, or with the reference.
    reference : int
        The slice whose places stay as they are.
    spatial : {"rigid", "affine", "thin_plate"}
        What is fitted to each match, as by :meth:`torchgw.GWResult.rigid` and the others.
    use_rep, joint_rep : str
        What is compared, as in :func:`align`: by default the places, and with
        ``joint_rep="X_pca"`` also coordinates of the expression that all slices share.
    key_added : str
        Name under which ``uns`` says what was done.
    solve_options : Options or mapping, optional
        Options of :func:`torchgw.solve` for every pair: ``{"mass": "auto"}``, or a number as
        ``mass``, for slices that overlap in part.

    Returns
    -------
    list of GWResult
        One for each slice but the reference, in the order of the slices. Into the slices go:

        ``obsm["spatial_aligned"]``
            Their places in the frame of the reference, in its unit.
        ``uns["torchgw_slices"]`` of all but the reference
            ``matched_with``, the place of the other slice in the sequence; of the map ``map``,
            ``error`` (of the pairs of spots it was fitted to, root mean square, in the unit of that
            slice) and ``reflects``; ``mass``, the share that was matched; ``doubt``, why this match
            or one on the way to the reference may be another; and
            ``accumulated_error``, the root of the sum of the squared errors of all maps on the way
            to the reference, in its unit: how far a spot may be from where a chain of partners
            ends.

    Raises
    ------
    InvalidInputError, InvalidTypeError
        If there are fewer than two slices, or one has no places.

    Examples
    --------
    >>> import numpy as np, torchgw.anndata
    >>> from anndata import AnnData
    >>> spots = np.random.default_rng(0).normal(size=(40, 2)) * [2, 1]
    >>> slices = [AnnData(spots), AnnData(spots), AnnData(spots)]
    >>> for shift, one in enumerate(slices):
    ...     one.obsm["spatial"] = spots + 10 * shift
    >>> options = {"distances": "euclidean", "random_state": 0}
    >>> results = torchgw.anndata.align_slices(slices, solve_options=options)
    >>> bool(np.allclose(slices[2].obsm["spatial_aligned"], spots))
    True
    """
    items = list(slices)
    if len(items) < 2:
        raise InvalidInputError(f"`slices` must have at least two; got {len(items)}.")
    check_objects(*((f"slices[{place}]", one) for place, one in enumerate(items)))
    check_choice("kind", kind, get_args(SlicesKind))
    check_within("reference", reference, 0, len(items) - 1)
    check_name("key_added", key_added, none=False)
    places = places_of(spatial, *((f"slices[{place}]", one) for place, one in enumerate(items)))
    items[reference].obsm["spatial_aligned"] = places[reference]
    ways: dict[int, tuple[SpaceMap, ...]] = {reference: ()}
    accumulated, doubts = {reference: 0.0}, {reference: ""}
    found = dict[int, GWResult]()
    for here in sorted(range(len(items)), key=lambda place: abs(place - reference))[1:]:
        there = here + (1 if here < reference else -1) if kind == "chain" else reference
        problem = TranslationProblem(items[here], items[there])
        problem.prepare(use_rep=use_rep, joint_rep=joint_rep).solve(solve_options=solve_options)
        result = found[here] = next(iter(problem.solutions.values()))
        own: SpaceMap = getattr(result, spatial)(places[here], places[there], robust=True)
        ways[here] = (own, *ways[there])
        items[here].obsm["spatial_aligned"] = _along(ways[here], places[here])
        # maps on the way may stretch what this one misses
        ends = (_along(ways[there], own.target), _along(ways[here], own.source))
        missed = math.sqrt(own.weights @ ((ends[0] - ends[1]) ** 2).sum(1))
        accumulated[here] = math.hypot(missed, accumulated[there])
        # what lies on a slice in doubt is there in doubt
        doubts[here] = result.doubt or result._tell_ambiguity() or doubts[there]
        items[here].uns[key_added] = {
            "matched_with": there, "map": spatial, "error": own.error, "reflects": own.reflects,
            "mass": result.report.mass, "doubt": doubts[here],
            "accumulated_error": accumulated[here],
        }  # fmt: skip
    return [found[place] for place in sorted(found)]


def _along(way: tuple[SpaceMap, ...], points: Any) -> Any:
    """Map points by one map after the other."""
    return reduce(lambda moved, step: step.transform(moved), way, points)
