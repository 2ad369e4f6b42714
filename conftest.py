"""Leave out the doctests of modules whose optional package is absent."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [
    f"torchgw/{module}"
    for module, package in (("anndata/*.py", "anndata"), ("sklearn/*.py", "sklearn"))
    if find_spec(package) is None
]
