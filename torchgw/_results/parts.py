"""The parts that a result is taken apart into for a file, and built from again.

Factors, potentials, points and graphs go in as they are, O((n + m) R). An (n, m) cost and given
(n, n) distances do so only when asked for; otherwise the plan and the coupling go in by their
largest entries. A class goes into files by its name once it is :func:`stored`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import MISSING
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_type_hints

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.trees import check_fields
from torchgw._errors import InvalidInputError, TorchGWWarning, warn_user
from torchgw._gradients.contract import Levels, Linearised, MeanDistances, SampledLoss
from torchgw._plans.contract import Anchors
from torchgw._plans.given import SparsePlan
from torchgw._plans.paired import PairedPlan
from torchgw._plans.transport import DualPlan, TransportPlan
from torchgw._problem.losses import LOSSES, Loss
from torchgw._results.mapping import Extension
from torchgw._sinkhorn.blocks import Blocks, RestrictedBackend
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.entries import Entries
from torchgw._sinkhorn.problem import DenseCost, FactoredCost
from torchgw._solve.state import Status
from torchgw._starts.alternatives import Alternative
from torchgw._starts.chain import Trial
from torchgw._tensors.operations import NOTHING, sparse_tensor
from torchgw._typing import Indices, Iteration, Marginals, Potentials
from torchgw.distances.base import DistanceProvider, ScaledDistance
from torchgw.distances.curved import CurvedDistance
from torchgw.distances.dijkstra import DijkstraDistance
from torchgw.distances.factored import FactoredDistance
from torchgw.distances.geodesics import Geodesics
from torchgw.distances.points import CurvedModel, PointDistance, PointMetric, Space
from torchgw.distances.precomputed import DirectedDistance, PrecomputedDistance

Kind = TypeVar("Kind", bound=type)

# Entries of each row of a plan that a file keeps. [L277]
_ENTRIES_PER_ROW = 256
# A warning says so if the entries that are kept miss more than this mass. [L277]
_MISSING_MASS = 1e-6

_RECORDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Anchors, DenseCost, FactoredCost, Indices, Iteration, Marginals, MeanDistances, Potentials,
        Space, Trial,
    )
}  # fmt: skip
DATACLASSES: dict[str, Any] = {"Alternative": Alternative}
# Former names of renamed parts, as older files have them.
_FORMERLY = {
    "GWResult": {"log": "report", "loss": "tracked"},
    "BatchResult": {"loss": "tracked"},
    "Iteration": {"objective": "dual"},
}
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64)}


def stored(kind: Kind) -> Kind:
    """Let a dataclass go into files by its name and its fields; a decorator."""
    DATACLASSES[kind.__name__] = kind
    return kind


def fields_of(value: Any) -> dict[str, Any]:
    """Take a dataclass apart."""
    return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}


def _make(kind: str, parts: dict[str, Any]) -> Any:
    """Build a dataclass; refuse parts that are not the fields it has now."""
    if isinstance(parts.get("report"), dict):
        parts["report"] = _make("Report", parts["report"])
    expected = dataclasses.fields(DATACLASSES[kind])
    check_fields(parts, _hints(kind))
    needed = {item.name for item in expected if item.default is item.default_factory is MISSING}
    odd = (set(parts) - {item.name for item in expected}) | (needed - set(parts))
    if odd:
        raise InvalidInputError(
            f"The file was written by another version of torchgw: its {kind} differs from this "
            f"one's in {', '.join(sorted(odd))}. Use that version, or solve again."
        )
    return DATACLASSES[kind](**parts)


def take_apart(value: Any, dense: bool) -> tuple[str, dict[str, Any]] | None:
    """Name a part of a result and take it apart; ``None`` for values that are plain."""
    if _RECORDS.get(type(value).__name__) is type(value):
        return type(value).__name__, value._asdict()
    if DATACLASSES.get(type(value).__name__) is type(value):
        return type(value).__name__, fields_of(value)
    if isinstance(value, Loss):
        floor, levels = getattr(value, "floor", 0.0), getattr(value, "levels", None)
        return "Loss", {"name": value.name, "floor": floor, "levels": levels and levels[:2]}
    if isinstance(value, Status):
        return "Status", {"name": value.name}
    if isinstance(value, (TransportPlan, SparsePlan)):
        return _plan_parts(value, dense)
    if isinstance(value, PairedPlan):
        names = "inner", "pairs", "kept", "potentials", "weights", "paired_cost"
        return "PairedPlan", {name: getattr(value, name) for name in names}
    if isinstance(value, Extension):
        return "Extension", _extension_parts(value, dense)
    if isinstance(value, SolvedSide):
        return "Side", value._asdict()
    if isinstance(value, Geodesics):
        return "Geodesics", {"graph": value.graph, "unreachable": value.unreachable}
    if scipy.sparse.issparse(value):
        csr = scipy.sparse.csr_array(value)
        shape = [int(size) for size in csr.shape]
        parts = {"data": csr.data, "indices": csr.indices, "indptr": csr.indptr}
        return "csr", {**parts, "shape": shape}
    return _provider_parts(value) if isinstance(value, DistanceProvider) else None


def _plan_parts(plan: TransportPlan | SparsePlan, dense: bool) -> tuple[str, dict[str, Any]]:
    """Name a plan and take it apart, without an (n, m) cost unless that is asked for."""
    rest = {"potentials": plan.potentials, "marginals": plan.weights, "epsilon": plan.epsilon}
    if isinstance(plan, SparsePlan) or (isinstance(plan.cost, DenseCost) and not dense):
        kept = plan if isinstance(plan, SparsePlan) else _shorten(plan)
        return "SparsePlan", {"entries": _csr(kept.entries), **rest}
    # draws choose rows by these masses; old files have none
    masses = None if plan.masses is plan.weights else plan.masses
    backend = plan.backend
    known = backend.restriction if isinstance(backend, RestrictedBackend) else None
    listed = {
        "groups": Indices(*known) if isinstance(known, Blocks) else None,
        "allowed": known.listed() if isinstance(known, Entries) else None,
    }
    return "TransportPlan", {"cost": plan.cost, **rest, "masses": masses, **listed}


def _build_plan(
    groups: Indices | None = None, allowed: scipy.sparse.csr_array | None = None, **parts: Any
) -> TransportPlan:
    """Build a plan, of groups that do not mix or of listed entries if it was of these."""
    if groups is None and allowed is None:
        return TransportPlan(**parts)
    device = parts["potentials"].f.device
    known = Entries.of(allowed, device) if groups is None else Blocks(*groups)
    return TransportPlan(**parts, backend=RestrictedBackend(EagerBackend(), known))


def _shorten(plan: TransportPlan) -> SparsePlan:
    """Keep the largest entries of a plan; warn if they are not nearly all of it."""
    kept = SparsePlan.of(plan, _ENTRIES_PER_ROW, NOTHING)
    total = float(plan._moved()[0].sum())
    missing = 1 - float(kept.entries.values().sum()) / total
    if missing > _MISSING_MASS:
        warn_user(
            f"The file keeps {_ENTRIES_PER_ROW} entries of each row of the plan, which leave out "
            f"{missing:.2g} of its mass. Pass `dense=True` to store all of it "
            f"({8 * plan.shape[0] * plan.shape[1]:,} bytes).",
            TorchGWWarning,
        )
    return kept


class SolvedSide(NamedTuple):
    """One side of a solved problem, as a file holds it."""

    name: str  # X or Y
    space: Space
    provider: Any  # a dictionary where it is made again from the space
    reference: Tensor | None
    mean: MeanDistances | None


# What an extension has beside its sides and its last cost, and what it has to be.
_EXTENSION: dict[str, Any] = {
    "linear": bool, "unpolished": DualPlan | None, "mass": float,
    "table": DenseCost | FactoredCost | None, "restricted": bool, "support": Tensor | None,
    "pairs": Indices | None, "likely": Indices | None, "likely_weights": Tensor | None,
}  # fmt: skip


def _extension_parts(extension: Extension, dense: bool) -> dict[str, Any]:
    """Take apart what maps new points; a coupling of points is kept by its largest entries."""
    known, coupling = extension.known, extension.known.coupling
    if isinstance(coupling, Tensor) and known.gradient == "dense":
        if coupling.is_sparse:
            coupling = _csr(coupling)
        elif not dense:
            coupling = _largest_entries(coupling)
    sides = {
        name: _solved_side(extension, side, dense) for side, name in enumerate(("source", "target"))
    }
    of_cost = {"gradient": known.gradient, "coupling": coupling, "alpha": known.alpha}
    kept = {name: getattr(extension, name) for name in _EXTENSION}
    if not dense:
        in_factors = isinstance(extension.table, FactoredCost)
        kept |= {"support": None, "table": extension.table if in_factors else None}
    return {**sides, **of_cost, "own": known.own, "loss": known.loss, **kept}


def _solved_side(extension: Extension, side: int, dense: bool) -> SolvedSide:
    """Take one side apart, with its graph only if distances will be computed from it."""
    known = extension.known
    provider, reference = known.providers[side], known.references[side]
    given = extension.spaces[side]
    kept: Any = provider
    space = given._replace(geodesics=None)
    if provider is None or (provider.factors() is not None and space.metric is None):
        pass
    elif reference is None and (given.metric or given.geodesics):
        # not kept: it is computed again from the points or the graph when the file is read
        space = given
        kept = {"dtype": str(provider.dtype), "cheap_columns": provider.cheap_columns}
    elif provider.factors() is None and (provider.matrix() is None or not dense):
        kept = None
    return SolvedSide("XY"[side], space, kept, reference, known.means[side])


def _largest_entries(coupling: Tensor) -> scipy.sparse.csr_array:
    """Keep the largest entries of each row of a coupling, some of which may be negative."""
    largest, columns = coupling.abs().topk(min(_ENTRIES_PER_ROW, coupling.shape[1]), dim=1)
    kept = largest > NOTHING * largest.sum(1, keepdim=True)
    places = torch.stack([kept.nonzero()[:, 0], columns[kept]])
    values = coupling.gather(1, columns)[kept].double()
    return _csr(sparse_tensor(places, values, (len(coupling), coupling.shape[1])))


def _csr(entries: Tensor) -> scipy.sparse.csr_array:
    """Turn a sparse tensor into a SciPy matrix."""
    entries = entries.coalesce()
    places = tuple(entries.indices().cpu().numpy())
    return scipy.sparse.csr_array(
        (entries.values().cpu().numpy(), places), shape=tuple(entries.shape)
    )


def _provider_parts(provider: DistanceProvider) -> tuple[str, dict[str, Any]]:
    """Name what is kept of distances: their factors, or their table."""
    factors = provider.factors()
    if factors is not None:
        return "factors", {"matrix": factors.matrix, "signs": factors.signs}
    if isinstance(provider, DirectedDistance):
        return "directed", {"table": provider.table}
    return "matrix", {"matrix": provider.matrix()}


def _build_side(**parts: Any) -> SolvedSide:
    """Build a side, whose distances may have to be made again from its points or its graph."""
    side = SolvedSide(**parts)
    space, known = side.space, side.provider
    if not isinstance(known, dict):
        return side
    made: DistanceProvider
    if space.curvature is not None:
        assert space.points is not None
        made = CurvedDistance(
            space.points, cast(CurvedModel, space.metric), curvature=space.curvature
        )
    elif space.metric is not None:
        assert space.points is not None
        made = PointDistance(space.points.double(), cast(PointMetric, space.metric))
    else:
        assert space.geodesics is not None
        made = DijkstraDistance(space.geodesics)
    where = made.device if space.points is None else space.points.device
    made = made if space.scale == 1 else ScaledDistance(made, space.scale)
    made = made.to(where, _DTYPES[known["dtype"]])
    # a table is made again column by column; what the solver may ask of it stays
    made.cheap_columns = known["cheap_columns"]
    return side._replace(provider=made)


def _build_extension(**parts: Any) -> Extension:
    """Build what maps new points."""
    source, target, coupling = parts["source"], parts["target"], parts["coupling"]
    spaces = source.space, target.space
    if scipy.sparse.issparse(coupling):
        devices = {space.points.device for space in spaces if space.points is not None}
        coupling = _coo(coupling).to(devices.pop() if devices else "cpu")
    # files written before it was stored do not name the gradient
    in_factors = any(side.reference is not None for side in (source, target))
    guess = "sampled" if source.mean is not None else "factored" if in_factors else "dense"
    known = Linearised(
        parts.get("gradient", guess), (source.provider, target.provider), coupling, parts["alpha"],
        parts["loss"], (source.reference, target.reference), (source.mean, target.mean),
        parts["own"],
    )  # fmt: skip
    # older files lack some, which have defaults
    return Extension(spaces, known, **{name: parts[name] for name in _EXTENSION if name in parts})


def _coo(csr: scipy.sparse.csr_array) -> Tensor:
    """Turn a SciPy matrix into a sparse tensor."""
    entries = csr.tocoo()
    places = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
    return sparse_tensor(places, torch.from_numpy(entries.data), csr.shape).coalesce()


def _build_csr(
    data: NDArray[Any], indices: NDArray[Any], indptr: NDArray[Any], shape: list[int]
) -> scipy.sparse.csr_array:
    """Build a sparse matrix, all of whose indices SciPy checks."""
    if len(indptr) != shape[0] + 1:
        raise InvalidInputError(f"`indptr` has {len(indptr)} entries for {shape[0]} rows.")
    found = scipy.sparse.csr_array((data, indices, indptr), shape=tuple(shape))
    found.check_format(full_check=True)
    return found


_VECTORS = {"potentials.f": "n", "potentials.g": "m", "weights.a": "n", "weights.b": "m"}
# Shapes of the parts of a value: the same letter is the same size.
_SHAPES = {
    "Alternative": {"plan": "st", "source": "s", "target": "t"},
    "Anchors": {"source": "s", "target": "s"},
    "DenseCost": {"matrix": "nm"},
    "FactoredCost": {"left": "nr", "right": "mr", "row": "n", "column": "m"},
    "GWResult": {
        "lazy_plan": "nm", "potential_a": "n", "potential_b": "m", "marginal_a": "n",
        "marginal_b": "m",
    },
    "LowRankPlan": {"Q": "nr", "R": "mr", "g": "r"},
    "LowRankResult": {"lazy_plan": "nm", "marginal_a": "n", "marginal_b": "m"},
    "Marginals": {"a": "n", "b": "m"},
    "Potentials": {"f": "n", "g": "m"},
    "PairedPlan": {
        "inner": "rc", "kept.source": "r", "kept.target": "c", "pairs.source": "k",
        "pairs.target": "k", "paired_cost": "k", **_VECTORS,
    },
    "SparsePlan": {"entries": "nm", **_VECTORS},
    "TransportPlan": {"cost": "nm", **_VECTORS, "masses.a": "n", "masses.b": "m"},
}  # fmt: skip


def _hints(kind: str) -> dict[str, Any]:
    """Say what the parts of a value have to be."""
    if kind in _made():
        return _made()[kind][1]
    known = _RECORDS.get(kind) or DATACLASSES[kind]
    # a plan may have come back by its largest entries
    return {
        name: DualPlan if hint is TransportPlan else hint
        for name, hint in get_type_hints(known).items()
    }


def _check_shapes(kind: str, value: Any) -> None:
    """Refuse parts whose shapes do not fit each other."""
    sizes: dict[str, int] = {}
    for name, axes in _SHAPES.get(kind, {}).items():
        shape = tuple(attrgetter(name)(value).shape)
        known = [sizes.setdefault(axis, size) for axis, size in zip(axes, shape, strict=False)]
        if len(shape) != len(axes) or known != list(shape):
            raise InvalidInputError(
                f"`{name}` of {kind} has the shape {shape}, which the others do not go with."
            )


@functools.cache
def _made() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """List how kinds that are no tuple or dataclass are built, and what their parts have to be."""
    # SciPy's sparse matrices are imported when a file is read
    csr = scipy.sparse.csr_array
    plan = {"potentials": Potentials, "marginals": Marginals, "epsilon": float}
    return {
        "Extension": (_build_extension, {
            "source": SolvedSide, "target": SolvedSide, "gradient": str, "alpha": float,
            "coupling": Tensor | Anchors | csr, "loss": Loss, "own": Marginals | None, **_EXTENSION,
        }),
        "Geodesics": (
            lambda graph, unreachable: Geodesics(scipy.sparse.csr_matrix(graph), unreachable),
            {"graph": csr, "unreachable": float | None},
        ),
        # as a sample sees it
        "Loss": (lambda name, floor, levels: SampledLoss.of(
            LOSSES[name], floor=floor, levels=levels and Levels(*levels)
        ), {"name": Literal[tuple(LOSSES)], "floor": float, "levels": tuple[float, int] | None}),
        "Side": (_build_side, {
            **get_type_hints(SolvedSide), "provider": DistanceProvider | dict[str, Any] | None,
        }),
        "PairedPlan": (PairedPlan, {
            "inner": DualPlan, "pairs": Indices, "kept": Indices, "potentials": Potentials,
            "weights": Marginals, "paired_cost": Tensor,
        }),
        "SparsePlan": (lambda entries, potentials, **rest: SparsePlan(
            _coo(entries).to(potentials.f.device), potentials, **rest
        ), {"entries": csr, **plan}),
        "Status": (lambda name: Status[name], {"name": Literal[tuple(Status.__members__)]}),
        "TransportPlan": (_build_plan, {
            "cost": DenseCost | FactoredCost, "masses": Marginals | None,
            "groups": Indices | None, "allowed": csr | None, **plan,
        }),
        "csr": (_build_csr, {
            "data": np.ndarray, "indices": np.ndarray, "indptr": np.ndarray, "shape": list[int],
        }),
        "factors": (FactoredDistance, {"matrix": Tensor, "signs": Tensor}),
        "matrix": (PrecomputedDistance, {"matrix": Tensor}),
        "directed": (DirectedDistance, {"table": Tensor}),
    }  # fmt: skip


def build(kind: str, parts: dict[str, Any]) -> Any:
    """Build what :func:`take_apart` took apart."""
    renamed = _FORMERLY.get(kind, {})
    # a name may have got another meaning since
    renamed = {old: new for old, new in renamed.items() if new not in parts}
    parts = {renamed.get(name, name): part for name, part in parts.items()}
    if kind not in {*_RECORDS, *DATACLASSES, *_made()}:
        raise InvalidInputError(f"The file holds a {kind!r}, which this torchgw does not know.")
    if kind in DATACLASSES:
        value = _make(kind, parts)
    else:
        check_fields(parts, _hints(kind))
        value = (_RECORDS[kind] if kind in _RECORDS else _made()[kind][0])(**parts)
    _check_shapes(kind, value)
    return value
