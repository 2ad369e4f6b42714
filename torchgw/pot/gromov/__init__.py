"""The names of ``ot.gromov``, with its signatures, defaults, return values and logs.

Small dense problems: plans are stored, and computed in float64 on the CPU. Each function starts
where POT starts, at the given plan or at the product plan, without a search for better optima;
:func:`torchgw.solve` has that, points in place of matrices, large problems and GPUs.

A function whose name ends in 2 returns the value of the plan that the one without the 2 finds: a
number, or a tensor of those inputs that it has gradients to. With ``log=True`` it also returns the
log of that one, with the plan ``T``, and of a fused problem ``lin_loss`` and ``quad_loss``.

Names that POT does as well as we would are POT's own functions, and need POT; the table of whose is
which, and why, is in ``migrating`` in the documentation.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # for readers of types; at run time they are imported when they are asked for
    from ot.gromov import *

from torchgw.pot import _arrays
from torchgw.pot.gromov._barycenters import *
from torchgw.pot.gromov._plans import *
from torchgw.pot.gromov._quantized import *

__all__ = [
    "entropic_fused_gromov_barycenters", "entropic_fused_gromov_wasserstein",
    "entropic_fused_gromov_wasserstein2", "entropic_gromov_barycenters",
    "entropic_gromov_wasserstein", "entropic_gromov_wasserstein2",
    "entropic_partial_fused_gromov_wasserstein", "entropic_partial_fused_gromov_wasserstein2",
    "entropic_partial_gromov_wasserstein", "entropic_partial_gromov_wasserstein2",
    "fused_gromov_wasserstein", "fused_gromov_wasserstein2", "gromov_wasserstein",
    "gromov_wasserstein2", "partial_fused_gromov_wasserstein",
    "partial_fused_gromov_wasserstein2", "partial_gromov_wasserstein",
    "partial_gromov_wasserstein2", "quantized_fused_gromov_wasserstein",
    "quantized_fused_gromov_wasserstein_samples", "semirelaxed_fused_gromov_wasserstein",
    "semirelaxed_fused_gromov_wasserstein2", "semirelaxed_gromov_wasserstein",
    "semirelaxed_gromov_wasserstein2",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return _arrays.handed(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_arrays.names()})
