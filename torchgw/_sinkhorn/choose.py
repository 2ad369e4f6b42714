"""Which backend runs, and why the others cannot."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch

from torchgw._boundary.checks import check_choice
from torchgw._errors import BackendUnavailableError, InvalidInputError
from torchgw._sinkhorn.batch import BatchSolver, solve_batch
from torchgw._sinkhorn.compiled import CompiledBackend
from torchgw._sinkhorn.contract import Backend
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.tiles.eager import TiledEagerProblem
from torchgw._sinkhorn.tiles.prepared import TiledBackend
from torchgw._sinkhorn.tiles.tiling import Tiling

__all__ = ["BackendName", "batch_solver", "check_backend", "choose_backend", "unavailable_backends"]

logger = logging.getLogger(__name__)

BackendName = Literal["auto", "triton", "compile", "eager"]
# What makes an object a torchgw.backends.Backend.
_BACKEND_PARTS = ("name", "prepare")

# Order tried by backend="auto". On a CPU the eager sweep reuses one stored kernel, which beats a
# compiled softmin; compile is there when asked for by name.
_ORDER = {"cuda": ("triton", "compile", "eager"), "cpu": ("eager",)}

# Entries below which "auto" leaves one half-step over factors to PyTorch: Triton's takes 0.7 ms
# whatever the size, most of it to prepare operands that a sweep prepares once (PyTorch: 0.23 ms at
# 1,024 x 1,024 and rank 16, 0.5 at 4,096 x 4,096, 4.3 at 16,384 x 16,384). Sweeps, stored costs and
# everything read off a plan are faster by Triton from the smallest size on, or within 0.1 ms.
_KERNEL_ENTRIES = 2**25


def check_backend(backend: object) -> None:
    """Refuse an unknown name, and an object that is not all of a backend."""
    missing = [name for name in _BACKEND_PARTS if not hasattr(backend, name)]
    if isinstance(backend, str) or len(missing) == len(_BACKEND_PARTS):
        check_choice("backend", backend, get_args(BackendName))
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
) -> Backend:
    """Return the backend asked for, or for "auto" the first in order that can run.

    A backend that is given as an object is taken as it is.

    With a ``tiling`` it is the form of it that skips tiles, where there is one.

    Raises
    ------
    BackendUnavailableError
        If a backend was asked for by name and cannot run; the message gives the reason.
    """
    if not isinstance(name, str):
        return name
    if name != "auto":
        reason = _why_not(name, device, dtype)
        if reason is not None:
            raise BackendUnavailableError(
                f"`backend={name!r}` cannot run here: {reason} Pass backend='auto' to use what can."
            )
        return _make(name, tiling, asked=True)
    for candidate in _ORDER.get(device.type, ("eager",)):
        reason = _why_not(candidate, device, dtype)
        if reason is None:
            return _make(candidate, tiling, asked=False)
        _log_once(candidate, reason)
    return _make("eager", tiling, asked=False)


def batch_solver(backend: Backend) -> BatchSolver:
    """Choose what solves many small problems at once beside a backend."""
    if backend.name == "triton":
        from torchgw._sinkhorn.kernels import batch

        return batch.solve_batch
    return solve_batch


def unavailable_backends(device: torch.device) -> dict[str, str | None]:
    """Return every backend with the reason why it cannot run on a device, ``None`` if it can."""
    names = ("triton", "compile", "eager")
    return {name: _why_not(name, device, torch.float32) for name in names}


def _why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if name == "eager":
        return None
    if name == "compile":
        return CompiledBackend.why_not(device, dtype)
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)."
    from torchgw._triton_sinkhorn import TritonBackend

    return TritonBackend.why_not(device, dtype)


def _make(name: str, tiling: Tiling | None, *, asked: bool) -> Backend:
    if name == "triton":
        from torchgw._sinkhorn.tiles.triton import TiledTritonProblem
        from torchgw._triton_sinkhorn import TritonBackend

        if tiling is not None:
            return TiledBackend(TritonBackend(), TiledTritonProblem, tiling)
        return TritonBackend(least_entries=0 if asked else _KERNEL_ENTRIES)
    if name == "compile":
        return CompiledBackend()
    if tiling is not None:
        return TiledBackend(EagerBackend(), TiledEagerProblem, tiling)
    return EagerBackend()


@cache
def _log_once(name: str, reason: str) -> None:
    logger.info("backend %s is passed over: %s", name, reason)
