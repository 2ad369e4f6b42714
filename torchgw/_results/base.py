"""What all results have in common: summaries, copies, files of one process or of several."""

from __future__ import annotations

import functools
import html
import importlib
import os
import secrets
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.archive import RESERVED, read_archive, read_parts, write_archive, write_part
from torchgw._boundary.arrays import in_numpy, resolve_device
from torchgw._boundary.checks import check_count, check_flag, check_within
from torchgw._boundary.trees import Decoder, encode
from torchgw._errors import InvalidInputError, InvalidTypeError, UnsupportedError
from torchgw._results.confidence import Confidence
from torchgw._results.maps import SurfaceMap
from torchgw._results.matching import Matching
from torchgw._results.parts import DATACLASSES, build, fields_of, stored, take_apart
from torchgw._starts.alternatives import Alternative
from torchgw._tensors.ranks import together

# Kinds of results whose modules are not imported with torchgw.
_ELSEWHERE = {
    "GWResult": "torchgw._results.result", "BatchResult": "torchgw._many.result",
    "AllResult": "torchgw._variants.several",
    "RepresentationMatch": "torchgw._variants.representations",
    "MatchTest": "torchgw._many.permutation", "PairwiseTest": "torchgw._many.permutation",
    "BarycenterResult": "torchgw._variants.barycenter",
    "JointEmbedding": "torchgw._variants.embedding", "PathResult": "torchgw._variants.path",
    "LowRankResult": "torchgw._variants.solve_low_rank", "OTResult": "torchgw.pot",
}  # fmt: skip
# The kind of a file that names others, each with some rows of all arrays.
_PARTS = "parts"
# Arrays of a result that have a row for each source point.
_OF_SOURCE = {
    "potential_a", "marginal_a",
    *(f"lazy_plan.cost.{part}" for part in ("matrix", "left", "row")),
    *(f"lazy_plan.{part}" for part in ("potentials.f", "marginals.a", "masses.a")),
}  # fmt: skip


def write_result(
    path: str | os.PathLike[str],
    result: Any,
    *,
    dense: bool = False,
    extra: dict[str, NDArray[Any]] | None = None,
) -> None:
    """Write a result of a :func:`stored` class; of a shared plan, some rows from each process."""
    check_flag("dense", dense)
    arrays = _extra_arrays(extra)
    ranks = getattr(getattr(result, "lazy_plan", None), "ranks", None)
    # only the numbers of a differentiable plan are written
    with torch.no_grad(), together(ranks):
        apart = functools.partial(take_apart, dense=dense)
        fields = {
            name: encode(value, name, apart, arrays) for name, value in fields_of(result).items()
        }
        tree = {"kind": type(result).__name__, "fields": fields}
        if ranks is None:
            write_archive(path, tree, arrays)
            return
        key = ranks.same_seed(secrets.randbits(62))
        write_part(path, ranks.rank, ranks.size, key, tree, arrays)
        # ranks meet here: all parts are written, and nobody reads them before
        ranks.any(False)
        if ranks.rank == 0:
            # a plan of its largest entries has no shares
            whole = fields["lazy_plan"]["type"] == "TransportPlan"
            rows = result.lazy_plan.shape[0] if whole else None
            write_archive(path, {"kind": _PARTS, "size": ranks.size, "key": key, "rows": rows}, {})
        ranks.any(False)


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    shard: tuple[int, int] | None = None,
) -> Any:
    """Read a result that its ``save`` or ``torchgw align`` wrote; whole if processes wrote parts.

    Parameters
    ----------
    path : str or path
    device : torch.device or str
        Where the result computes; not where it was solved, unless that is named.
    shard : pair of int, optional
        ``(rank, size)``: ``load(path).shard(rank, size)``, of which no more is in memory than one
        of the parts that processes wrote.

    Returns
    -------
    GWResult, BatchResult, MatchTest, PairwiseTest, PathResult, BarycenterResult, AllResult,
    RepresentationMatch, JointEmbedding, LowRankResult or torchgw.pot.OTResult
        Of the class that was saved, equal in every field. Plan operations and ``transform`` work as
        before, on the entries kept if the plan was stored by its largest entries.

    Raises
    ------
    InvalidInputError
        If the file does not exist, is damaged, or is no result. Nothing is ever unpickled, sizes
        are checked against the file before memory is taken, and the message names the part that is
        not what it has to be.
    """
    where = resolve_device(device)
    if shard is not None:
        if not isinstance(shard, (tuple, list)) or len(shard) != 2:
            raise InvalidInputError(f"`shard` must be a pair (rank, size); got {shard!r:.60}.")
        check_count("shard[1]", shard[1])
        check_within("shard[0]", shard[0], 0, shard[1] - 1)
    tree, arrays = read_archive(path)
    if isinstance(tree, dict) and tree.get("kind") == _PARTS:
        tree, arrays, shard = _joined(path, tree, shard)
    kind, parts = _kind_and_fields(path, tree)
    try:
        decoder = Decoder(arrays, where, build)
        fields = {name: decoder.decode(part, name) for name, part in parts.items()}
        made = decoder.built(kind, fields, kind)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error
    if shard is not None and not hasattr(made, "shard"):
        raise InvalidInputError(f"{path}: holds a {kind}, which has no shares. Leave `shard` out.")
    return made if shard is None else made.shard(*shard)


def _joined(
    path: str | os.PathLike[str], head: dict[str, Any], shard: tuple[int, int] | None
) -> tuple[Any, dict[str, NDArray[Any]], tuple[int, int] | None]:
    """Join the parts that a file names, of a share alone if it can be; and the share still due."""
    rows, n = None, head.get("rows")
    if shard is not None and isinstance(n, int):
        rows = slice(n * shard[0] // shard[1], n * (shard[0] + 1) // shard[1])
    tree, arrays = read_parts(
        path, head.get("size"), head.get("key"), functools.partial(_rows_of, rows)
    )
    if rows is not None and isinstance(tree, dict) and isinstance(tree.get("fields"), dict):
        tree["fields"] |= {"alternatives": {"tuple": []}, "extension": None}
        shard = None
    return tree, arrays, shard


def _kind_and_fields(path: str | os.PathLike[str], tree: Any) -> tuple[str, dict[str, Any]]:
    """Read of which class a result is, and its fields as JSON."""
    if not isinstance(tree, dict):
        raise InvalidInputError(f"{path}: `tree` must be a dictionary; got {str(tree)[:60]}.")
    kind = tree.get("kind")
    if kind is None:
        raise InvalidInputError(
            f"{path}: this is part of a result, which a `cache` keeps; it cannot be loaded alone. "
            "a solve with Options(cache=folder) reads it by itself."
        )
    if isinstance(kind, str) and kind in _ELSEWHERE:
        importlib.import_module(_ELSEWHERE[kind])
    if not isinstance(kind, str) or kind not in DATACLASSES:
        raise InvalidInputError(
            f"{path}: holds a {str(kind)[:60]}, a `kind` that this torchgw does not know."
        )
    fields = tree.get("fields")
    if not isinstance(fields, dict):
        raise InvalidInputError(f"{path}: `fields` must be a dictionary.")
    return kind, fields


def _rows_of(share: slice | None, name: str) -> slice:
    """Say which rows of an array of a result are those of a share of the source points."""
    label = name.partition(":")[2]
    if share is None or not label:
        return slice(None)
    if label.split(".")[0] in ("alternatives", "extension"):
        return slice(0, 0)
    return share if label in _OF_SOURCE else slice(None)


def _extra_arrays(extra: Any) -> dict[str, NDArray[Any]]:
    """Check arrays for other readers, none of which may have to be pickled."""
    known = isinstance(extra, dict) and all(isinstance(name, str) for name in extra)
    if extra is not None and not known:
        raise InvalidTypeError(
            f"`extra` must be a dictionary of arrays by name; got {type(extra).__name__}."
        )
    try:
        arrays = {name: np.asarray(value) for name, value in dict(extra or {}).items()}
    except ValueError as error:
        raise InvalidTypeError(f"`extra` must hold arrays: {error}") from error
    odd = [name for name, value in arrays.items() if value.dtype.hasobject or name in RESERVED]
    if odd:
        raise InvalidInputError(
            f"`extra` has {', '.join(odd)}: objects have no form in a file, and the names "
            f"{' and '.join(RESERVED)} are taken."
        )
    return arrays


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
            object.__setattr__(self, "lazy_plan", parts["lazy_plan"].giving(in_numpy=True))

    def in_numpy(self: Own) -> Own:
        """Return the same result with NumPy's arrays in place of tensors."""
        return as_numpy(self)

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
    if isinstance(value, (Result, Alternative, Confidence, Matching, SurfaceMap)):
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
