"""Match two data sets by the distances inside each: Gromov-Wasserstein transport on PyTorch.

``result = torchgw.solve(X, Y)`` takes points, graphs or distance matrices (``D_X``, ``D_Y``);
``result.lazy_plan.argmax()`` gives the partner of every row of X.
"""

import gc
import os
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"


# Where each name is, as the stub beside this file says; it is imported when it is first used.
_STUB = __loader__.get_data(os.path.join(__path__[0], "__init__.pyi")).decode()
_HOMES = {
    line.split()[3]: line.split()[1]
    for line in _STUB.splitlines()
    if line.startswith(f"from {__name__}")
}


def __getattr__(name: str) -> Any:
    """Import a name, or a module for users such as `torchgw.pot`."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name] == __name__:
        return _imported(f"{__name__}.{name}")
    globals()[name] = value = getattr(_imported(_HOMES[name]), name)
    return value


def _imported(module: str) -> ModuleType:
    """Import a module without collecting what PyTorch keeps, in which there is no garbage."""
    # what is imported would begin a collection of all that PyTorch has made, of .2 s [L1810]
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return ["__version__", *_HOMES]
