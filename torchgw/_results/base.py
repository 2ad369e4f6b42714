"""What all results have in common: files, summaries, copies."""

import html
import os
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import in_numpy
from torchgw._errors import UnsupportedError
from torchgw._results.matching import Matching
from torchgw._results.parts import stored
from torchgw._results.storage import write_result
from torchgw._search.alternatives import Alternative

Own = TypeVar("Own", bound="Result")


@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """A frozen dataclass that has a summary, and goes into files under its name."""

    def __init_subclass__(cls) -> None:
        """Make the class known to files."""
        stored(cls)

    def __post_init__(self) -> None:
        """Let a plan give NumPy's arrays if those of the result are NumPy's."""
        parts = vars(self)
        if isinstance(parts.get("marginal_a"), np.ndarray):
            plan = parts["lazy_plan"].giving(in_numpy=True)
            object.__setattr__(self, "lazy_plan", plan)

    def in_numpy(self: Own) -> Own:
        """Return the same result with NumPy's arrays in place of tensors."""
        found: Own = as_numpy(self)
        return found

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        dense: bool = False,
        extra: dict[str, NDArray[Any]] | None = None,
    ) -> None:
        """Write the result to a file that :func:`torchgw.load` reads.

        The file is NumPy's ``.npz`` with JSON in it; nothing is pickled. Of an alignment it holds
        the factors of the plan, the potentials, and what ``transform`` needs. Where the cost was a
        stored matrix it holds the 256 largest entries of each row of the plan instead.

        Parameters
        ----------
        path : str or path
            The file to write; by convention it ends in ``.npz``.
        dense : bool
            Store (n, m) costs, and distances given as matrices, in full.
        extra : dict of str to ndarray, optional
            Further arrays of the file, for readers that do not know torchgw.

        Raises
        ------
        InvalidInputError
            If the path cannot be written.

        Warns
        -----
        TorchGWWarning
            If more than 1e-6 of the mass is outside the entries kept.

        Examples
        --------
        >>> import numpy as np, tempfile, torchgw
        >>> X = np.random.default_rng(0).normal(size=(60, 3))
        >>> result = torchgw.solve(X, X + 5, distances="sqeuclidean", random_state=0)
        >>> with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        ...     result.save(file.name)
        ...     again = torchgw.load(file.name)
        >>> again.value == result.value
        True
        """
        write_result(path, self._for_file(), dense=dense, extra=extra)

    def _for_file(self: Own) -> Own:
        """Leave out what has no form in a file."""
        return self

    def __copy__(self: Own) -> Own:
        """Share everything, graphs of derivatives too."""
        return replace(self)

    def __getstate__(self) -> dict[str, Any]:
        """Leave graphs behind, for pickle and deepcopy: they belong to this process and inputs."""
        return {
            name: part.detach() if isinstance(part, Tensor) and part.requires_grad else part
            for name, part in vars(self).items()
        }

    def _summary(self) -> tuple[str, dict[str, str], str]:
        """Say how large the result is, its figures by name, and how it ended."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Summarise in a line."""
        size, figures, ended = self._summary()
        parts = [size, *(f"{name}={text}" for name, text in figures.items()), ended]
        return f"{type(self).__name__}({', '.join(filter(None, parts))})"

    def _repr_html_(self) -> str:
        """Summarise as a table, for notebooks."""
        size, figures, ended = self._summary()
        rows = figures | ({"status": ended} if ended else {})
        left = "style='text-align:left'"
        cells = "".join(
            f"<tr><th {left}>{name.replace('_', ' ')}</th><td {left}>{_as_html(text)}</td></tr>"
            for name, text in rows.items()
        )
        mark = {True: " &#10003;", False: " &#9888;", None: ""}[getattr(self, "converged", None)]
        caption = f"{type(self).__name__} {_as_html(size)}{mark}"
        return f"<table><caption>{caption}</caption>{cells}</table>"


def as_numpy(value: Any) -> Any:
    """Turn the arrays of a result, and of what it is made of, into NumPy's."""
    if isinstance(value, (Result, Alternative, Matching)):
        parts = {item.name: as_numpy(getattr(value, item.name)) for item in fields(value)}
        return replace(value, **parts)
    if type(value) is tuple:
        return tuple(map(as_numpy, value))
    return in_numpy(value) if isinstance(value, Tensor) else value


def _as_html(text: str) -> str:
    """Escape a text, and set its signs."""
    return html.escape(text).replace(" x ", " &times; ").replace(" +- ", " &plusmn; ")


def tracked_loss(loss: Tensor | None, function: str, option: str) -> Tensor:
    """Give the loss of a differentiable solve; say how to get one where there is none."""
    if loss is None:
        raise UnsupportedError(
            f"`loss` carries gradients, and this result was computed without. Call torchgw."
            f"{function}(..., differentiable={option}) with inputs that require gradients; without "
            "gradients the same number is the objective: result.report.objective, or "
            "batch.objective."
        )
    return loss
