"""The wheel has the code under an import name of its own, beside which PyPI's torchgw has room."""

import re
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # tests write the tree without building a wheel
    BuildHookInterface = object

_ROOT = Path(__file__).parent
# Imports of the package itself, and strings that name its modules.
_NAMES = (
    (re.compile(r"^(\s*from )torchgw\b", re.MULTILINE), r"\1torch_gromov"),
    (re.compile(r"^(\s*)import torchgw$", re.MULTILINE), r"\1import torch_gromov as torchgw"),
    (re.compile(r'"torchgw((?:\.\w+)+(?::\w+)?)"'), r'"torch_gromov\1"'),
)


def write_tree(folder: Path) -> dict[str, str]:
    """Write what a wheel holds below a folder; return the place of each file in the wheel."""
    places = {}
    for path in sorted((_ROOT / "torchgw").rglob("*")):
        if path.suffix in (".py", ".pyi"):
            text = path.read_text(encoding="utf-8")
            for pattern, name in _NAMES:
                text = pattern.sub(name, text)
            places[f"torch_gromov/{path.relative_to(_ROOT / 'torchgw')}"] = text
    swap = {"torchgw": "torch_gromov", "torch_gromov": "torchgw"}
    alias = (_ROOT / "torch_gromov.py").read_text(encoding="utf-8")
    places["torchgw.py"] = re.sub("torchgw|torch_gromov", lambda name: swap[name.group()], alias)
    for name, text in places.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return {str(folder / name): name for name in places}


class RenamedPackage(BuildHookInterface):  # type: ignore[misc, valid-type]
    """Puts the renamed code into a wheel; an editable installation has the checkout itself."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files."""
        if version != "editable":
            build_data["force_include"] |= write_tree(_ROOT / "build" / "renamed")
