"""What of a result goes into a file, and how it comes back.

Factors, potentials, points and graphs are stored as they are, O((n + m) R). A stored (n, m) cost,
and given (n, n) distances, are stored only when asked for; otherwise the plan and the coupling are
stored by their largest entries. Classes of results say by :func:`stored` that they go into files.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import MISSING, replace
from typing import Any, TypeVar

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.archive import RESERVED, decode, encode, read_archive, write_archive
from torchgw._boundary.arrays import resolve_device
from torchgw._errors import InvalidInputError, InvalidTypeError, TorchGWWarning, warn_user
from torchgw._gradients.means import MeanDistances
from torchgw._plans.pairs import Anchors
from torchgw._plans.sparse import SparsePlan, sparse_tensor
from torchgw._plans.transport import TransportPlan
from torchgw._problem.losses import LOSSES, Levels, Loss
from torchgw._results.extension import Extension
from torchgw._results.new_points import Side
from torchgw._search.optima import Alternative
from torchgw._sinkhorn.cost import DenseCost, FactoredCost
from torchgw._solve.status import Status
from torchgw._typing import Iteration, Marginals, Potentials
from torchgw.distances.base import DistanceProvider, ScaledDistance
from torchgw.distances.dijkstra import DijkstraDistance
from torchgw.distances.factored import FactoredDistance
from torchgw.distances.geodesics import Geodesics
from torchgw.distances.new_points import Space
from torchgw.distances.points import PointDistance
from torchgw.distances.precomputed import PrecomputedDistance

__all__ = ["load", "stored", "write_result"]

Kind = TypeVar("Kind", bound=type)

# Entries of each row of a plan that a file keeps, and the share of the row's mass below which an
# entry is dropped in any case.
_ENTRIES_PER_ROW = 256
_SMALLEST_SHARE = 1e-12
# Mass that may be missing from them before a warning says so.
_MISSING_MASS = 1e-6

_RECORDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Anchors, DenseCost, FactoredCost, Iteration, Marginals, MeanDistances, Potentials, Space,
    )
}  # fmt: skip
_DATACLASSES: dict[str, Any] = {"Alternative": Alternative}
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64)}


def stored(kind: Kind) -> Kind:
    """Say of a dataclass, as a decorator, that it goes into files by its fields."""
    _DATACLASSES[kind.__name__] = kind
    return kind


def write_result(
    path: str | os.PathLike[str],
    result: Any,
    *,
    dense: bool = False,
    extra: dict[str, NDArray[Any]] | None = None,
) -> None:
    """Write a result of a :func:`stored` class, and arrays for other readers."""
    if not isinstance(dense, bool):
        raise InvalidTypeError(f"`dense` must be True or False; got {dense!r}.")
    arrays = _extra_arrays(extra)
    # a differentiable plan is read for its numbers alone
    with torch.no_grad():
        fields = {
            name: encode(value, name, lambda part: _parts(part, dense), arrays)
            for name, value in _fields(result).items()
        }
    write_archive(path, {"kind": type(result).__name__, "fields": fields}, arrays)


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Any:
    """Read a result that its ``save`` or ``torchgw align`` wrote.

    Parameters
    ----------
    path : str or path
    device : torch.device or str
        Where the result computes; not where it was solved, unless that is named.

    Returns
    -------
    GWResult, BarycenterResult, JointEmbedding or LowRankResult
        Of the class that was saved, equal in every field. Plan operations and ``transform`` work as
        before, on the entries kept if the plan was stored by its largest entries.

    Raises
    ------
    InvalidInputError
        If the file does not exist, is damaged, or is no result; nothing is ever unpickled.
    """
    where = resolve_device(device)
    tree, arrays = read_archive(path)
    kind = tree.get("kind")
    if kind is None:
        raise InvalidInputError(
            f"{path}: no result but part of one, which a `cache` keeps. `solve(..., cache=folder)` "
            "reads it by itself."
        )
    if kind not in _DATACLASSES:
        raise InvalidInputError(f"{path}: holds a {kind}, which this torchgw does not know.")
    fields = {name: decode(part, arrays, where, _build) for name, part in tree["fields"].items()}
    return _make(kind, fields)


def _extra_arrays(extra: Any) -> dict[str, NDArray[Any]]:
    """Return arrays for other readers, none of which would be pickled."""
    known = isinstance(extra, dict) and all(isinstance(name, str) for name in extra)
    if extra is not None and not known:
        raise InvalidTypeError(
            f"`extra` must be a dictionary of arrays by name; got {type(extra).__name__}."
        )
    try:
        arrays = {name: np.asarray(value) for name, value in dict(extra or {}).items()}
    except ValueError as error:
        raise InvalidTypeError(f"`extra` must hold arrays: {error}") from error
    odd = [name for name, value in arrays.items() if value.dtype.hasobject or name in RESERVED]
    if odd:
        raise InvalidInputError(
            f"`extra` has {', '.join(odd)}: objects have no form in a file, and the names "
            f"{' and '.join(RESERVED)} are taken."
        )
    return arrays


def _fields(value: Any) -> dict[str, Any]:
    return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}


def _make(kind: str, parts: dict[str, Any]) -> Any:
    """Build a dataclass whose fields must be those that it has now."""
    expected = dataclasses.fields(_DATACLASSES[kind])
    needed = {item.name for item in expected if item.default is item.default_factory is MISSING}
    odd = (set(parts) - {item.name for item in expected}) | (needed - set(parts))
    if odd:
        raise InvalidInputError(
            f"The file was written by another version of torchgw: its {kind} differs from this "
            f"one's in {', '.join(sorted(odd))}. Use that version, or solve again."
        )
    return _DATACLASSES[kind](**parts)


def _parts(value: Any, dense: bool) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the parts of what a result is made of; ``None`` for other values."""
    if _RECORDS.get(type(value).__name__) is type(value):
        return type(value).__name__, value._asdict()
    if _DATACLASSES.get(type(value).__name__) is type(value):
        return type(value).__name__, _fields(value)
    if isinstance(value, Loss):
        return "Loss", {
            "name": value.name,
            "floor": value.floor,
            "levels": value.levels and tuple(value.levels),
        }
    if isinstance(value, Status):
        return "Status", {"name": value.name}
    if isinstance(value, (TransportPlan, SparsePlan)):
        return _plan_parts(value, dense)
    if isinstance(value, Extension):
        return "Extension", _extension_parts(value, dense)
    if isinstance(value, Side):
        return "Side", _side_parts(value, dense)
    if isinstance(value, Geodesics):
        return "Geodesics", {"graph": value.graph, "unreachable": value.unreachable}
    if scipy.sparse.issparse(value):
        csr = scipy.sparse.csr_array(value)
        shape = [int(size) for size in csr.shape]
        parts = {"data": csr.data, "indices": csr.indices, "indptr": csr.indptr}
        return "csr", {**parts, "shape": shape}
    if isinstance(value, DistanceProvider):
        return _provider_parts(value)
    return None


def _plan_parts(plan: TransportPlan | SparsePlan, dense: bool) -> tuple[str, dict[str, Any]]:
    rest = {
        "potentials": plan.potentials,
        "marginals": plan.weights,
        "epsilon": plan.epsilon,
    }
    if isinstance(plan, SparsePlan) or (isinstance(plan.cost, DenseCost) and not dense):
        kept = plan if isinstance(plan, SparsePlan) else _shorten(plan)
        return "SparsePlan", {"entries": _csr(kept.entries), **rest}
    # rows are drawn by them; old files have none
    masses = None if plan.masses is plan.weights else plan.masses
    return "TransportPlan", {"cost": plan.cost, **rest, "masses": masses}


def _shorten(plan: TransportPlan) -> SparsePlan:
    """Keep the largest entries of a plan; warn if they are not nearly all of it."""
    kept = SparsePlan.of(plan, _ENTRIES_PER_ROW, _SMALLEST_SHARE)
    total = float(plan.marginals()[0].sum())
    missing = 1 - float(kept.entries.values().sum()) / total
    if missing > _MISSING_MASS:
        warn_user(
            f"The file keeps {_ENTRIES_PER_ROW} entries of each row of the plan, which leave out "
            f"{missing:.2g} of its mass. Pass `dense=True` to store all of it "
            f"({8 * plan.shape[0] * plan.shape[1]:,} bytes).",
            TorchGWWarning,
        )
    return kept


def _extension_parts(extension: Extension, dense: bool) -> dict[str, Any]:
    parts = _fields(extension)
    coupling = extension.coupling
    if isinstance(coupling, Tensor) and not (extension.source.encoded or extension.target.encoded):
        if coupling.is_sparse:
            parts["coupling"] = _csr(coupling)
        elif not dense:
            parts["coupling"] = _largest_entries(coupling)
    return parts


def _largest_entries(coupling: Tensor) -> scipy.sparse.csr_array:
    """Keep the entries of each row that a plan would keep; extrapolated ones may be negative."""
    order = coupling.abs().topk(min(_ENTRIES_PER_ROW, coupling.shape[1]), dim=1)
    kept = order.values > _SMALLEST_SHARE * order.values.sum(1, keepdim=True)
    rows = torch.arange(len(coupling), device=coupling.device)[:, None].expand_as(kept)
    entries = coupling.gather(1, order.indices)[kept].double()
    places = rows[kept].cpu().numpy(), order.indices[kept].cpu().numpy()
    return scipy.sparse.csr_array((entries.cpu().numpy(), places), shape=tuple(coupling.shape))


def _csr(entries: Tensor) -> scipy.sparse.csr_array:
    entries = entries.coalesce()
    places = tuple(entries.indices().cpu().numpy())
    return scipy.sparse.csr_array(
        (entries.values().cpu().numpy(), places), shape=tuple(entries.shape)
    )


def _side_parts(side: Side, dense: bool) -> dict[str, Any]:
    """Return a side with its graph only if distances are still to be read from it."""
    space, provider = side.space._replace(geodesics=None), side.provider
    kept: Any = provider
    if provider is None or (provider.factors() is not None and space.metric is None):
        pass
    elif not side.encoded and (space.metric or side.space.geodesics):
        # made again on reading, from the points or the graph
        space = side.space
        kept = {"dtype": str(provider.dtype), "cheap_columns": provider.cheap_columns}
    elif provider.factors() is None and (provider.matrix() is None or not dense):
        kept = None
    parts = {"name": side.name, "space": space, "provider": kept, "reference": side.reference}
    return {**parts, "mean": side.mean}


def _provider_parts(provider: DistanceProvider) -> tuple[str, dict[str, Any]]:
    factors = provider.factors()
    if factors is not None:
        return "factors", {"matrix": factors.matrix, "signs": factors.signs}
    return "matrix", {"matrix": provider.matrix()}


def _build_side(parts: dict[str, Any]) -> Side:
    """Build a side, whose provider may have to be made from its space."""
    space, provider = parts["space"], parts["provider"]
    if isinstance(provider, dict):
        dtype = _DTYPES[provider["dtype"]]
        made: DistanceProvider
        if space.metric is not None:
            made = PointDistance(space.points.double(), space.metric)
        else:
            made = DijkstraDistance(space.geodesics)
        where = made.device if space.points is None else space.points.device
        made = made if space.scale == 1 else ScaledDistance(made, space.scale)
        # a table is made again column by column; what the solver may ask of it stays
        cheap, provider = provider["cheap_columns"], made.to(where, dtype)
        provider.cheap_columns = cheap
    return Side(parts["name"], space, provider, parts["reference"], parts["mean"])


def _build_loss(parts: dict[str, Any]) -> Loss:
    levels = parts["levels"]
    return LOSSES[parts["name"]].bounded(parts["floor"]).split(levels and Levels(*levels))


def _build_csr(parts: dict[str, Any]) -> scipy.sparse.csr_array:
    arrays = parts["data"], parts["indices"], parts["indptr"]
    return scipy.sparse.csr_array(arrays, shape=tuple(parts["shape"]))


def _build_extension(parts: dict[str, Any]) -> Extension:
    coupling = parts.pop("coupling")
    extension = Extension(coupling=None, **parts)
    if scipy.sparse.issparse(coupling):
        points = (extension.source.space.points, extension.target.space.points)
        devices = {item.device for item in points if item is not None}
        coupling = _coo(coupling).to(devices.pop() if devices else "cpu")
    return replace(extension, coupling=coupling)


def _coo(csr: scipy.sparse.csr_array) -> Tensor:
    entries = csr.tocoo()
    places = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
    return sparse_tensor(places, torch.from_numpy(entries.data), csr.shape).coalesce()


def _build_sparse_plan(parts: dict[str, Any]) -> SparsePlan:
    entries = _coo(parts["entries"]).to(parts["potentials"].f.device)
    return SparsePlan(entries, parts["potentials"], parts["marginals"], parts["epsilon"])


_BUILDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "Extension": _build_extension,
    "Geodesics": lambda parts: Geodesics(
        scipy.sparse.csr_matrix(parts["graph"]), parts["unreachable"]
    ),
    "Loss": _build_loss,
    "Side": _build_side,
    "SparsePlan": _build_sparse_plan,
    "Status": lambda parts: Status[parts["name"]],
    "TransportPlan": lambda parts: TransportPlan(**parts),
    "csr": _build_csr,
    "factors": lambda parts: FactoredDistance(parts["matrix"], parts["signs"]),
    "matrix": lambda parts: PrecomputedDistance(parts["matrix"]),
}


def _build(kind: str, parts: dict[str, Any]) -> Any:
    """Build what :func:`_parts` took apart."""
    if kind in _RECORDS:
        return _RECORDS[kind](**parts)
    if kind in _DATACLASSES:
        return _make(kind, parts)
    if kind not in _BUILDERS:
        raise InvalidInputError(f"The file holds a {kind!r}, which this torchgw does not know.")
    return _BUILDERS[kind](parts)
