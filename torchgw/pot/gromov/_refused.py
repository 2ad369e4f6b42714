"""The functions of ``ot.gromov`` whose problems torchgw does not have: they say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torchgw._errors import UnsupportedError

__all__ = ["REFUSED"]

_QUANTIZED = "torchgw.solve aligns large graphs and clouds without a partition."

# Names, and what there is instead.
_INSTEAD = {
    "quantized_fused_gromov_wasserstein_partitioned": _QUANTIZED,
    "get_graph_partition": _QUANTIZED,
    "get_graph_representants": _QUANTIZED,
    "format_partitioned_graph": _QUANTIZED,
    "quantized_fused_gromov_wasserstein": _QUANTIZED,
    "get_partition_and_representants_samples": _QUANTIZED,
    "format_partitioned_samples": _QUANTIZED,
    "quantized_fused_gromov_wasserstein_samples": _QUANTIZED,
}


def _refusal(name: str, instead: str) -> Callable[..., NoReturn]:
    def function(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"ot.gromov.{name} has no counterpart here. {instead} Or use POT's.")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Refuse: ``ot.gromov.{name}`` has no counterpart here. {instead}"
    return function


REFUSED = {name: _refusal(name, instead) for name, instead in _INSTEAD.items()}
