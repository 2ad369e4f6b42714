"""Which backends there are, which of them runs, and how processes share one."""

import logging
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchgw._boundary.checks import check_choice
from torchgw._errors import BackendUnavailableError, InvalidInputError
from torchgw._sinkhorn.contract import Backend, Kernel, PreparedProblem, Sweeper
from torchgw._sinkhorn.eager import BatchSolver, EagerProblem, StoredSweeper, solve_batch
from torchgw._sinkhorn.problem import DenseCost, EntropicPlan, LinearProblem
from torchgw._sinkhorn.tiles.prepared import TiledBackend
from torchgw._sinkhorn.tiles.tiling import Tiling
from torchgw._tensors.ranks import Ranks
from torchgw._typing import Potentials

# What a rank computes for one of its pieces of rows.
Compute = Callable[[PreparedProblem, slice], Tensor]


class ShardedBackend:
    """A backend that computes some of the rows, beside others that compute the rest.

    A half-step over the columns is one over the rows of the transposed problem.
    """

    def __init__(self, alone: Backend, ranks: Ranks) -> None:
        self.name = alone.name
        self.alone, self.ranks = alone, ranks

    def prepare(self, problem: LinearProblem) -> PreparedProblem:
        return ShardedProblem(problem, self)


class ShardedProblem(PreparedProblem):
    """A problem of which this rank computes some rows, and some columns."""

    backend: ShardedBackend

    def __init__(
        self,
        problem: LinearProblem,
        backend: ShardedBackend,
        turned: "ShardedProblem | None" = None,
    ) -> None:
        super().__init__(problem, backend)
        self._turned = turned
        self._alone: PreparedProblem = turned._alone.T if turned else backend.alone.prepare(problem)

    @property
    def T(self) -> "ShardedProblem":  # noqa: N802 - the name of every array library
        return self._turned or ShardedProblem(self.problem.T, self.backend, self)

    @cached_property
    def _rows(self) -> "_Share":
        return _Share(self._alone, self.backend.ranks)

    @cached_property
    def _columns(self) -> "_Share":
        return self._turned._rows if self._turned else _Share(self._alone.T, self.backend.ranks)

    def softmin(self, potential: Tensor, axis: int) -> Tensor:
        side = self._rows if axis == 1 else self._columns
        return side.gather(lambda part, _: part.softmin(potential, 1), potential.new_empty(0))

    def sweeper(self, start: Potentials) -> Sweeper:
        """Make sweeps that scale a kernel in pieces, or take one softmin after the other."""
        if isinstance(self._alone, EagerProblem) and isinstance(self.problem.cost, DenseCost):
            return StoredSweeper(self.problem, start, self.kernel(start))
        return super().sweeper(start)

    def kernel(self, start: Potentials) -> Kernel:
        """Store the pieces of a kernel that this rank reads, those of rows and of columns."""
        plan = self.plan(start)
        return Kernel(self._rows.kernel(plan), self._columns.kernel(plan.T))

    def apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        f, g = potentials
        return self._rows.gather(
            lambda part, rows: part.apply(Potentials(f[rows], g), values), values[:0]
        )

    def dense(self, potentials: Potentials) -> Tensor:
        f, g = potentials
        cost = self.problem.cost
        empty = torch.empty(0, cost.shape[1], dtype=cost.dtype, device=cost.device)
        return self._rows.gather(lambda part, rows: part.dense(Potentials(f[rows], g)), empty)

    def topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        f, g = potentials
        found: list[Tensor] = []

        def values(part: PreparedProblem, rows: slice) -> Tensor:
            best, index = part.topk(Potentials(f[rows], g), k)
            found.append(index)
            return best

        cost = self.problem.cost
        empty = torch.empty(0, k, dtype=cost.dtype, device=cost.device)
        largest, places = self._rows.gather(values, empty), iter(found)
        return largest, self._rows.gather(lambda *_: next(places), empty.long())

    def draw(self, potentials: Potentials, rows: Tensor, generator: torch.Generator) -> Tensor:
        return self._alone.draw(potentials, rows, generator)


class _Share:
    """The pieces of the rows of one problem that this rank computes."""

    def __init__(self, whole: PreparedProblem, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own, self._counts = ranks.cut(whole.problem.cost.shape[0])
        self._problems = [whole.rows(part) for part in self._own]

    def gather(self, compute: Compute, empty: Tensor) -> Tensor:
        """Compute own pieces, and join those of all ranks; ``empty`` is a result of no rows."""
        own = [compute(*pair) for pair in zip(self._problems, self._own, strict=True)]
        return self._ranks.gather(torch.cat([empty, *own]), self._counts)

    def kernel(self, plan: EntropicPlan) -> Callable[[Tensor], Tensor]:
        """Store the rows of a kernel that are this rank's, for products with vectors."""
        (f, g), a = plan.potentials, plan.marginals.a
        parts = [
            plan._replace(
                cost=plan.cost.rows(rows),
                potentials=Potentials(f[rows], g),
                marginals=plan.marginals._replace(a=a[rows]),
            ).density()
            for rows in self._own
        ]

        def product(vector: Tensor) -> Tensor:
            own = [torch.mv(part, vector) for part in parts]
            return self._ranks.gather(torch.cat([vector[:0], *own]), self._counts)

        return product


logger = logging.getLogger(__name__)


class _BuiltIn(NamedTuple):
    """A backend that is asked for by name; places are "module:name", imported when needed."""

    # A torchgw.backends.Backend; its ``why_not(device, dtype)`` says why it cannot run, or None.
    backend: str
    # Devices on which backend="auto" tries it; None for all.
    automatic_on: tuple[str, ...] | None
    # Arguments of the backend if "auto" has chosen it.
    automatic: Mapping[str, Any] = {}
    # Package that has to be installed.
    needs: str | None = None
    # The torchgw._sinkhorn.tiles.prepared.TiledProblem whose tiles it skips.
    tiles: str | None = None
    # The function that solves many small problems at once beside it; PyTorch operations if none.
    batch: str | None = None


# Entries below which "auto" leaves one half-step over factors to PyTorch: Triton's takes 0.7 ms
# whatever the size, most of it to prepare operands that a sweep prepares once. [L68]
_KERNEL_ENTRIES = 2**25

BackendName = Literal["auto", "triton", "compile", "eager"]
# In the order in which backend="auto" tries them. On a CPU the eager sweep reuses one stored
# kernel, which beats a compiled softmin; compile is there when asked for by name.
_BUILT_IN: dict[str, _BuiltIn] = {
    "triton": _BuiltIn(
        "torchgw._triton_sinkhorn:TritonBackend",
        automatic_on=("cuda",),
        automatic={"least_entries": _KERNEL_ENTRIES},
        needs="triton",
        tiles="torchgw._sinkhorn.tiles.triton:TiledTritonProblem",
        batch="torchgw._sinkhorn.kernels.batch:RecordingSolver",
    ),
    "compile": _BuiltIn("torchgw._sinkhorn.compiled:CompiledBackend", automatic_on=("cuda",)),
    "eager": _BuiltIn(
        "torchgw._sinkhorn.eager:EagerBackend",
        automatic_on=None,
        tiles="torchgw._sinkhorn.tiles.eager:TiledEagerProblem",
    ),
}
# What makes an object a torchgw.backends.Backend.
_PARTS = ("name", "prepare")


def check_backend(backend: object) -> None:
    """Refuse an unknown name, and an object that is not all of a backend."""
    missing = [name for name in _PARTS if not hasattr(backend, name)]
    if isinstance(backend, str) or len(missing) == len(_PARTS):
        check_choice("backend", backend, ("auto", *_BUILT_IN))
    elif missing:
        raise InvalidInputError(
            f"`backend` must have all of a torchgw.backends.Backend; a {type(backend).__name__} "
            f"has no {', '.join(missing)}. Give it a `name`, and a method `prepare(problem)` that "
            "returns a torchgw.backends.PreparedProblem."
        )


def choose_backend(
    name: BackendName | Backend,
    device: torch.device,
    dtype: torch.dtype,
    tiling: Tiling | None = None,
    ranks: Ranks | None = None,
) -> Backend:
    """Find the backend asked for, or for "auto" the first in order that can run."""
    # An object is taken as it is. With a tiling it is the form of the backend that skips tiles, if
    # there is one; with ranks they share its work. One that was asked for by name and cannot run is
    # an error, with the reason.
    if not isinstance(name, str):
        return _shared(name, ranks)
    if name != "auto":
        reason = why_not(name, device, dtype)
        if reason is not None:
            raise BackendUnavailableError(
                f"`backend={name!r}` cannot run here: {reason} Pass backend='auto' to use what can."
            )
        return _make(_BUILT_IN[name], tiling, {}, ranks)
    for candidate, entry in _BUILT_IN.items():
        if entry.automatic_on is not None and device.type not in entry.automatic_on:
            continue
        reason = why_not(candidate, device, dtype)
        if reason is None:
            return _make(entry, tiling, entry.automatic, ranks)
        _log_once(candidate, reason)
    raise AssertionError("the last backend runs everywhere")


def skips_tiles(name: BackendName) -> bool:
    """Whether a backend has a form that skips tiles; "auto" looks for one that has."""
    return name == "auto" or _BUILT_IN[name].tiles is not None


def batch_solver(backend: Backend) -> BatchSolver:
    """Choose what solves many small problems at once beside a backend."""
    entry = _BUILT_IN.get(backend.name)
    if entry is None or entry.batch is None:
        return solve_batch
    found: BatchSolver = _load(entry.batch)()
    return found


def unavailable_backends(device: torch.device) -> dict[str, str | None]:
    """List every backend with the reason why it cannot run on a device, ``None`` if it can."""
    return {name: why_not(name, device, torch.float32) for name in _BUILT_IN}


def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why a backend cannot run; ``None`` if it can."""
    entry = _BUILT_IN[name]
    if entry.needs is not None and find_spec(entry.needs) is None:
        return f"{entry.needs} is not installed (pip install {entry.needs})."
    found: str | None = _load(entry.backend).why_not(device, dtype)
    return found


def alone(backend: Backend, shape: tuple[int, int] | None = None) -> Backend:
    """Return a backend as one process uses it by itself, for costs of another shape if given."""
    if isinstance(backend, TiledBackend):
        old = backend.tiling
        tiling = old if shape is None else Tiling(shape, old.width, storable=old.storable)
        return TiledBackend(alone(backend.whole), backend.kind, tiling)
    return backend.alone if isinstance(backend, ShardedBackend) else backend


def shared(backend: Backend, ranks: Ranks) -> Backend:
    """Return a backend that one process uses by itself as one that ranks use together."""
    if isinstance(backend, TiledBackend):
        # each rank may have chosen other tiles meanwhile, and all have to choose alike
        old, whole = backend.tiling, shared(backend.whole, ranks)
        tiling = Tiling(old.shape, old.width, storable=old.storable)
        return TiledBackend(whole, backend.kind, tiling, ranks)
    return _shared(backend, ranks)


def _make(
    entry: _BuiltIn, tiling: Tiling | None, arguments: Mapping[str, Any], ranks: Ranks | None
) -> Backend:
    """Make a backend, or its form that skips tiles."""
    kind = _load(entry.backend)
    if tiling is not None and entry.tiles is not None:
        return TiledBackend(_shared(kind(), ranks), _load(entry.tiles), tiling, ranks)
    return _shared(kind(**arguments), ranks)


def _shared(backend: Backend, ranks: Ranks | None) -> Backend:
    """Share the work of a backend among ranks, if there are any."""
    return backend if ranks is None else ShardedBackend(backend, ranks)


def _load(place: str) -> Any:
    """Import the object that a place ("module:name") names."""
    module, name = place.split(":")
    return getattr(import_module(module), name)


@cache
def _log_once(name: str, reason: str) -> None:
    """Say once why a backend is passed over."""
    logger.info("backend %s is passed over: %s", name, reason)
