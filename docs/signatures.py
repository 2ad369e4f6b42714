"""Lets the reference show what is known when the package is imported, and not from its source.

Functions of ``torchgw.pot.gromov`` have POT's signatures, written as one line in a decorator, and
``torchgw.explain`` has that of ``torchgw.solve``. Functions of fused problems and of values are
made of others; they have docstrings when they are imported, and so have options.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Replaces the one parameter that the source has, and says what a made function does."""

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
        if cls.path == "torchgw._solve.table.Options":
            text = inspect.getdoc(importlib.import_module(cls.module.path).Options) or ""
            cls.docstring = griffe.Docstring(text, parent=cls)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Read the docstring and the signature of a function that ``fused`` or ``valued`` makes."""
        if not str(attr.value).startswith(("fused(", "valued(")):
            return
        function = getattr(importlib.import_module(attr.module.path), attr.name)
        text = f"``{attr.name}{inspect.signature(function)}``\n\n{inspect.getdoc(function)}"
        attr.docstring = griffe.Docstring(text, parent=attr)
