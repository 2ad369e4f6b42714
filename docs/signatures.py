"""Lets the reference show what is known when the package is imported, and not from its source.

Functions of ``torchgw.pot.gromov`` have POT's signatures, written as one line in a decorator, and
``torchgw.explain`` has that of ``torchgw.solve``. Functions of fused problems and of values are
made of others; they have docstrings when they are imported, and so have options.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Replaces the one parameter that the source has, and says what a made function does.

    Types in docstrings are shown as they are written: read as Python, "array-like, shape (n,)" is
    a difference.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Put the types of docstrings that are prose back to what was written."""
        for item in _inside(pkg):
            if item.docstring is None:
                continue
            lines = [line.strip() for line in item.docstring.value.splitlines()]
            written = {_bare(line): line for line in lines}
            written |= {_bare(line.partition(" : ")[2]): line.partition(" : ")[2] for line in lines}
            for section in item.docstring.parsed:
                for part in section.value if isinstance(section.value, list) else ():
                    text = str(getattr(part, "annotation", None) or "")
                    if " - " in text or "shape" in text:
                        part.annotation = written.get(_bare(text), text)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Read the signature of a function that is decorated with ``takes`` or ``_taking``."""
        made = ("takes(", "_taking(")
        if not any(str(decorator.value).startswith(made) for decorator in func.decorators):
            return
        function = getattr(importlib.import_module(func.module.path), func.name)
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    item.name,
                    kind=griffe.ParameterKind(item.kind.description),
                    default=None if item.default is inspect.Parameter.empty else repr(item.default),
                )
                for item in inspect.signature(function).parameters.values()
            )
        )

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        """Read the docstring of the options, which has a row of their table for each."""
        if cls.path == "torchgw._problem.table.Options":
            text = inspect.getdoc(importlib.import_module(cls.module.path).Options) or ""
            cls.docstring = griffe.Docstring(text, parent=cls, parser=griffe.Parser.numpy)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Read the docstring and the signature of a function that ``fused`` or ``valued`` makes."""
        if not str(attr.value).startswith(("fused(", "valued(")):
            return
        function = getattr(importlib.import_module(attr.module.path), attr.name)
        text = f"``{attr.name}{inspect.signature(function)}``\n\n{inspect.getdoc(function)}"
        attr.docstring = griffe.Docstring(text, parent=attr, parser=griffe.Parser.numpy)


def _inside(item: griffe.Object) -> Iterator[griffe.Object]:
    """Find everything that a module or class has, itself included."""
    yield item
    for part in item.members.values():
        if not part.is_alias:
            yield from _inside(part)


def _bare(text: str) -> str:
    """Leave out what reading as Python changes."""
    return re.sub(r"[\s,()]|optional$", "", text)
