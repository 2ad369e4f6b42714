"""Match two data sets by the distances inside each: Gromov-Wasserstein transport on PyTorch.

``result = torchgw.solve(X, Y)`` takes points, graphs or distance matrices (``D_X``, ``D_Y``);
``result.lazy_plan.argmax()`` gives the partner of every row of X.
"""

import os
from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def _refuse_mixture(place: str) -> None:
    """Refuse a folder into which PyPI's other project of this import name was installed as well."""
    # its files and ours lie in one folder then, and whoever came last has overwritten some; what is
    # installed says so without a look into them
    beside = os.listdir(place) if os.path.isdir(place) else []
    others = [
        name
        for name in beside
        if name.startswith("torchgw-") and name.endswith((".dist-info", ".egg-info"))
    ]
    if others:
        raise ImportError(
            f"The distribution `torchgw` ({others[0]}) is installed in the same folder as this "
            f"package, {place}. It is another project with the same import name, and each has "
            "overwritten files of the other. Uninstall both (pip uninstall torchgw torch-gromov), "
            "then install the one that you mean: this one is called torch-gromov, and is "
            "installed from a checkout (pip install .)."
        )


_refuse_mixture(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Where each name is, as the stub beside this file says; it is imported when it is first used.
_STUB = __loader__.get_data(os.path.join(__path__[0], "__init__.pyi")).decode()
_HOMES = {
    line.split()[3]: line.split()[1]
    for line in _STUB.splitlines()
    if line.startswith("from torchgw")
}


def __getattr__(name: str) -> Any:
    """Import a name, or a module for users such as `torchgw.pot`."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name] == __name__:
        return import_module(f"{__name__}.{name}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return ["__version__", *_HOMES]
