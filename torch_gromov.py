"""Another import name of the package torchgw: what is found there is found here, module by module.

In a checkout the code is in the folder ``torchgw``, and this file is ``torch_gromov``. A wheel has
them the other way round (``hatch_build.py``): the code in ``torch_gromov``, and this as
``torchgw.py``, which Python finds only where no other project has a folder of that name.
"""

import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

_CODE = "torchgw"


class _Alias(MetaPathFinder, Loader):
    """Finds ``torch_gromov.x`` as the module ``torchgw.x``, the same object."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Find a module below this name."""
        return spec_from_loader(name, self) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module by its own name."""
        module = importlib.import_module(_CODE + spec.name.removeprefix(__name__))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own specification back, which the import system has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


_package = importlib.import_module(_CODE)
_here = os.path.dirname(os.path.abspath(__file__))
if os.path.dirname(os.path.dirname(os.path.abspath(str(_package.__file__)))) != _here:
    raise ImportError(
        f"`import {_CODE}` finds {_package.__file__}, which is another project or another copy, "
        f"and not the code beside {__file__}. Uninstall that, or install this checkout as a wheel "
        "(pip install . rather than pip install -e .), where the two names do not meet."
    )
if __name__ == "__main__":
    sys.exit(importlib.import_module(f"{_CODE}.cli").main())
sys.meta_path.insert(0, _Alias())
sys.modules[__name__] = _package
