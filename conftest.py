"""Leave out the doctests of modules whose optional package is absent."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [
    f"torchgw/{module}.py"
    for module, package in (("anndata", "anndata"), ("sklearn", "sklearn"))
    if find_spec(package) is None
]
