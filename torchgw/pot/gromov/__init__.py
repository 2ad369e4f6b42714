"""The names of ``ot.gromov``, with its signatures, defaults, return values and logs.

Small dense problems: plans are stored, and computed in float64 on the CPU. Each function starts
where POT starts, at the given plan or at the product plan, without a search for better optima;
:func:`torchgw.solve` has that, points in place of matrices, large problems and GPUs.
"""

from __future__ import annotations

from torchgw.pot.gromov import _balanced as _balanced
from torchgw.pot.gromov import _barycenters as _barycenters
from torchgw.pot.gromov import _estimators as _estimators
from torchgw.pot.gromov import _lowrank as _lowrank
from torchgw.pot.gromov import _partial as _partial
from torchgw.pot.gromov import _pieces as _pieces
from torchgw.pot.gromov import _semirelaxed as _semirelaxed
from torchgw.pot.gromov import _unbalanced as _unbalanced
from torchgw.pot.gromov._balanced import *  # noqa: F403
from torchgw.pot.gromov._barycenters import *  # noqa: F403
from torchgw.pot.gromov._estimators import *  # noqa: F403
from torchgw.pot.gromov._lowrank import *  # noqa: F403
from torchgw.pot.gromov._partial import *  # noqa: F403
from torchgw.pot.gromov._pieces import *  # noqa: F403
from torchgw.pot.gromov._refused import REFUSED
from torchgw.pot.gromov._semirelaxed import *  # noqa: F403
from torchgw.pot.gromov._unbalanced import *  # noqa: F403

globals().update(REFUSED)

__all__ = [*REFUSED]
__all__ += _balanced.__all__ + _barycenters.__all__ + _estimators.__all__ + _lowrank.__all__
__all__ += _partial.__all__ + _pieces.__all__ + _semirelaxed.__all__ + _unbalanced.__all__
