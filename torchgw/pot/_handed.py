"""Names of POT that POT does as well as we would: its own, imported when they are asked for."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torchgw._errors import UnsupportedError


def handed(name: str, module: str = "ot.gromov") -> Any:
    """Find a public name of POT's; docs/migrating.md has the table of whose is which, and why."""
    missing = f"module {module.replace('ot', 'torchgw.pot')!r} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(missing)
    try:
        found = import_module(module)
    except ImportError:
        raise UnsupportedError(
            f"`{name}` is not solved by torchgw, but handed out of POT: pip install POT."
        ) from None
    if not hasattr(found, name) and find_spec(f"{module}.{name}") is None:
        raise AttributeError(f"{missing}, nor has {module}")
    # parts of POT that it imports only when they are asked for, such as `ot.plot`
    return getattr(found, name) if hasattr(found, name) else import_module(f"{module}.{name}")


def names(module: str = "ot.gromov") -> list[str]:
    """List the public names of POT's; none where it is not installed."""
    try:
        found = import_module(module)
    except ImportError:
        return []
    # `ot.__all__` names functions that are gone
    return [name for name in found.__all__ if hasattr(found, name)]
