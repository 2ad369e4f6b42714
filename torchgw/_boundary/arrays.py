"""Arrays of users become tensors here, checked; graphs do in ``graphs``."""

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Iterable
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._errors import InvalidInputError, InvalidTypeError, TorchGWWarning, warn_user

# Two distances that differ by no more than this share of the largest may be the same, as rounding
# of single precision can explain that. [L264, L302, L391, L415, L589, L610]
SAME_DISTANCE = 1e-5
# Relative deviation of a total mass that rounding can explain. [L264, L265, L391]
MASS_TOLERANCE = 1e-4
# The same deviation for a starting plan, as solvers in float32 leave it. [L264]
_PLAN_TOLERANCE = 1e-3
# The largest entry of an input must lie between the inverse of this number and this number: squares
# beyond leave the range of float32. [L264]
_LARGEST_ENTRY = 1e15
# So many numbers are checked or compared at a time, as a copy of all may not fit. A choice. [L852]
BLOCK = 2**22
# Up to so many numbers on a GPU are copied to the host to be checked, as the code that would check
# them takes longer to load, or to be solved with: each iteration would take sixty launches.
# [L548, L930]
FEW_NUMBERS = 2**17
# Devices on which every path is tested. Others lack float64 or a random generator.
_DEVICE_TYPES = ("cpu", "cuda")


def to_tensor(name: str, value: Any) -> Tensor:
    """Convert anything array-like to a real tensor on its device, without copying if possible."""
    if isinstance(value, Tensor):
        tensor = value.detach()
    elif hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        tensor = torch.utils.dlpack.from_dlpack(value)
    else:
        array = _real_array(name, value)
        with warnings.catch_warnings():
            # a read-only map of a file is not copied; no input is written to anyway
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            tensor = torch.from_numpy(array)
    if tensor.dtype.is_complex or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        kind = "a nested tensor" if tensor.is_nested else f"{tensor.dtype} on {tensor.device}"
        raise InvalidTypeError(f"`{name}` must be a plain tensor of real numbers; got {kind}.")
    if tensor.layout != torch.strided:
        raise InvalidTypeError(
            f"`{name}` must be a dense tensor; got layout {tensor.layout}. Pass "
            f"`{name}.to_dense()`, whose zeros count like all entries, or a graph as a SciPy "
            "sparse matrix X or Y, whose points are as far apart as its shortest paths are long."
        )
    return tensor


def to_numpy(values: Any) -> NDArray[Any]:
    """Convert a tensor on any device, or an array-like, to NumPy."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def is_tensor(given: Any) -> bool:
    """Whether an argument is a tensor, of PyTorch or another package, or a graph of tensors."""
    foreign = hasattr(given, "__dlpack__") and not isinstance(given, np.ndarray)
    return foreign or hasattr(given, "edge_index")


def without_tensors(*given: Any) -> bool:
    """Whether no argument, nor any in lists, is a tensor or holds tensors."""
    for one in given:
        if isinstance(one, (list, tuple)):
            if not without_tensors(*one):
                return False
        elif is_tensor(one) or isinstance(getattr(one, "device", None), torch.device):
            return False
    return True


def in_kind(given: Any, value: Any) -> Any:
    """Return NumPy arrays, unless what was ``given`` is a tensor."""
    return value if is_tensor(given) else in_numpy(value)


def in_numpy(value: Any) -> Any:
    """Turn a tensor, or each tensor of a tuple, into a NumPy array; leave others as they are."""
    if isinstance(value, Tensor):
        return to_numpy(value)
    if isinstance(value, tuple):
        parts = map(in_numpy, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def as_labels(name: str, value: Any, count: int | None = None, each: str = "point") -> NDArray[Any]:
    """Convert labels, numbers or words, to a NumPy array, (count,); refuse missing ones."""
    try:
        array = to_numpy(value)
    except ValueError as error:
        raise InvalidInputError(f"`{name}` must be an array of labels: {error}") from error
    missing = np.zeros(array.size, dtype=bool)
    if array.dtype.kind == "f":
        missing = np.isnan(array)
    elif array.dtype.kind == "O":
        # None, NaN, and what pandas has for them; a word may be any of these
        names = ["" if isinstance(item, str) else str(item) for item in array.flat]
        missing = np.isin(names, ("None", "nan", "<NA>", "NaT"))
    if missing.any():
        raise InvalidInputError(
            f"`{name}` has {int(missing.sum())} missing labels, of {missing.size}. Drop their "
            "rows, or give them a label of their own."
        )
    if count is not None:
        check_shape(name, array, (count,), f"one label per {each}")
    return array


def check_tensor(name: str, value: object) -> None:
    """Refuse anything but a tensor of float32 or float64, for what is kept as given."""
    if not isinstance(value, Tensor):
        raise InvalidTypeError(
            f"`{name}` must be a torch.Tensor; got {type(value).__name__}. Pass "
            f"`torch.as_tensor({name})`."
        )
    if value.dtype not in (torch.float32, torch.float64):
        raise InvalidInputError(
            f"`{name}` must be float32 or float64; got {value.dtype}. Pass `{name}.float()`."
        )


def is_sparse(value: Any) -> bool:
    """Whether a value is one of SciPy's sparse arrays; none is before SciPy is imported."""
    known = sys.modules.get("scipy.sparse")
    return known is not None and bool(known.issparse(value))


def ends_among(names: Iterable[Any]) -> tuple[str, str] | None:
    """Find the columns of both ends of edges, as NetworkX and igraph name them."""
    known = set(names)
    return next((e for e in (("source", "target"), ("from", "to")) if known.issuperset(e)), None)


def _real_array(name: str, value: Any) -> NDArray[Any]:
    """Convert to a NumPy array of real numbers that PyTorch can take over."""
    if is_sparse(value):
        raise InvalidTypeError(
            f"`{name}` must be a dense array; got a {type(value).__name__}. Pass "
            f"`{name}.toarray()`, whose zeros count like all entries, or a graph as X or Y, whose "
            "points are as far apart as its shortest paths are long."
        )
    if hasattr(value, "obsm"):
        raise InvalidTypeError(
            f"`{name}` is an AnnData. Use torchgw.anndata.align, or pass its points, such as "
            "adata.obsm['X_pca']."
        )
    if isinstance(value, (str, os.PathLike)):
        raise InvalidTypeError(
            f"`{name}` must be an array of real numbers; got the text {str(value)!r}. If it names "
            "a file, read that first, for example by numpy.load."
        )
    if hasattr(value, "vertices") and hasattr(value, "faces"):
        raise InvalidTypeError(
            f"`{name}` must be an array of real numbers; got a surface, {type(value).__name__}. "
            f"Pass its points, {name}.vertices."
        )
    names = getattr(value, "columns", None)
    ends = ends_among(names) if isinstance(names, Iterable) else None
    if ends is not None:
        raise InvalidInputError(
            f"`{name}` has columns {ends[0]!r} and {ends[1]!r}, as a table of edges. Pass "
            f"networkx.from_pandas_edgelist({name}, {ends[0]!r}, {ends[1]!r}, edge_attr=True), or "
            f"{name}.to_numpy() if its rows are points."
        )
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise InvalidTypeError(
            f"`{name}` must be an array of real numbers; got {type(value).__name__}, which cannot "
            f"be converted, as where rows have different lengths: {error}"
        ) from error
    columns = getattr(value, "select_dtypes", None)
    if array.dtype.kind not in "fiub" and columns is not None:
        words = ", ".join(repr(column) for column in columns(exclude=["number", "bool"]).columns)
        if words:
            raise InvalidTypeError(
                f"`{name}` must be an array of real numbers; got a {type(value).__name__} "
                f"in which these columns are not numbers: {words}. Drop them: "
                f"{name}.select_dtypes(['number', 'bool']) has the others."
            )
        # columns of several kinds, or of those that have a value for a missing number
        with contextlib.suppress(TypeError, ValueError):
            array = value.to_numpy(dtype=float, na_value=np.nan)
    if array.dtype.kind not in "fiub":
        convert = f"numpy.asarray({name}, dtype=float)"
        if array.dtype.names is not None:
            convert = f"numpy.lib.recfunctions.structured_to_unstructured({name})"
        raise InvalidTypeError(
            f"`{name}` must be an array of real numbers; got {type(value).__name__} of dtype "
            f"{array.dtype}. Pass `{convert}` if that is what it holds."
        )
    # masks are of a module that is imported when a user first makes one
    masks = sys.modules.get("numpy.ma")
    if masks is not None and masks.is_masked(value):
        raise InvalidInputError(
            f"`{name}` has masked entries, {int(masks.getmaskarray(value).sum())} of {array.size}. "
            "Fill them, or drop their rows."
        )
    # a negative stride, a foreign byte order or an extended precision is legal in NumPy only; a
    # read-only array is copied unless it is that of a file, which memory may not hold
    mapped = _is_mapped(array)
    wide = array.dtype.kind == "f" and array.dtype.itemsize > 8
    dtype = np.dtype(np.float64) if wide else array.dtype.newbyteorder("=")
    return np.require(array, dtype, ["C", "ALIGNED"] if mapped else ["C", "ALIGNED", "WRITEABLE"])


def _is_mapped(array: Any) -> bool:
    """Whether an array is that of a file mapped into memory, or a part of it."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return False


def _floating(tensor: Tensor) -> Tensor:
    """Convert to float32 or float64, whichever holds every number of the dtype given."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.float64 if not tensor.dtype.is_floating_point else torch.float32)


def check_points(name: str, value: Any) -> Tensor:
    """Convert points to a floating tensor of shape (n, d), n and d at least one."""
    tensor = _floating(to_tensor(name, value))
    what = "one row per point, with n and d at least 1"
    column = f"One number per point is a column: numpy.asarray({name})[:, None]."
    check_shape(name, tensor, ("n", "d"), what, column if tensor.ndim == 1 else "")
    check_finite(name, tensor)
    check_magnitude(name, tensor)
    return tensor


def check_distances(name: str, value: Any, *, signed: bool = False) -> Tensor:
    """Convert a distance matrix to a floating tensor of shape (n, n)."""
    # Negative entries are refused unless `signed`; those that rounding explains become zero.
    tensor = _floating(to_tensor(name, value))
    if tensor.ndim != 2 or tensor.shape[0] != tensor.shape[1] or tensor.shape[0] == 0:
        raise InvalidInputError(
            f"`{name}` must be a square matrix of distances, shape (n, n); got "
            f"{tuple(tensor.shape)}. Pass points as X or Y."
        )
    check_finite(name, tensor, "Replace infinite entries (unreachable pairs) by a finite distance.")
    scale = check_magnitude(name, tensor)
    gap = float((tensor - tensor.T).abs().max())
    if gap > SAME_DISTANCE * scale:
        raise InvalidInputError(
            f"`{name}` must be symmetric; entries differ from their transposes by up to {gap:.3g} "
            f"(largest entry {scale:.3g}). {symmetric_advice(name, tensor)} Costs that differ with "
            f"the direction are torchgw.distances.DirectedDistance({name}), in place of points."
        )
    least = float(tensor.min())
    rounding = least >= -SAME_DISTANCE * scale
    if least >= 0 or (signed and not rounding):
        return tensor
    if not rounding:
        raise InvalidInputError(
            f"`{name}` must be non-negative here; its smallest entry is {least:.3g}. A similarity "
            "is turned into a distance by, for example, D = S.max() - S."
        )
    return tensor.clamp_min(0)


def symmetric_advice(name: str, matrix: Tensor) -> str:
    """Say how a matrix that is not symmetric becomes one."""
    if not bool(matrix.tril(-1).any()) or not bool(matrix.triu(1).any()):
        # a mean with the zeros of the other triangle would halve the distances
        return (
            "One of its triangles is empty: if the other holds the distances, pass "
            f"{name} + {name}.T, whose diagonal should be zero."
        )
    return f"Pass ({name} + {name}.T) / 2 if that is what you mean."


# What infinite linear costs say, where they are not taken.
FORBIDDEN = "Infinite costs, of pairs that are not allowed, are taken by torchgw.solve alone."


def check_linear_cost(value: Any, shape: tuple[int, int], name: str = "M") -> Tensor:
    """Convert a table over pairs (M, or a starting plan) to a floating tensor of shape (n, m)."""
    tensor = _floating(to_tensor(name, value))
    check_shape(name, tensor, shape, "one entry per pair of a row of X and a row of Y")
    forbids = name.startswith("M") and bool((tensor == math.inf).any())
    check_finite(name, tensor, FORBIDDEN if forbids else "")
    check_magnitude(name, tensor, smallest=0.0)
    return tensor


def check_plan(value: Any, shape: tuple[int, int], mass: float | None = 1.0) -> Tensor:
    """Convert a starting plan, non-negative, to float64 and a total mass of exactly one."""
    # Where plans move another `mass` it may have that instead, and any where this is `None`.
    tensor = check_linear_cost(value, shape, name="init").double()
    total, least = float(tensor.sum()), float(tensor.min())
    off = 0.0 if mass is None else min(abs(total - 1), abs(total / mass - 1))
    if least < 0 or total == 0 or off > _PLAN_TOLERANCE:
        allowed = "1" if mass == 1 else "a positive number" if mass is None else f"1 or {mass:g}"
        advice = "init / init.sum()" if least >= 0 < total else "such an array"
        raise InvalidInputError(
            f"`init` must be a plan: non-negative entries that sum to {allowed}; its smallest "
            f"entry is {least:.3g} and its sum {total:.6g}. Pass {advice}."
        )
    if off > MASS_TOLERANCE:
        warn_user(f"`init` sums to {total:.6g}; it was divided by that.", TorchGWWarning)
    return tensor / total


def as_weights(
    name: str, value: Any, n: int, device: torch.device, each: str | None = None
) -> Tensor:
    """Convert weights to shape (n,), float64, total mass exactly one; ``None`` is uniform."""
    # `each` says what has a weight: by default a row of X if they are `a`, else a row of Y.
    if value is None:
        return torch.full((n,), 1.0 / n, dtype=torch.float64, device=device)
    given = to_tensor(name, value)
    rounding = torch.finfo(given.dtype).eps if given.dtype.is_floating_point else 0.0
    weights = given.to(device=device, dtype=torch.float64)
    each = each or ("row of X" if name == "a" else "row of Y")
    advice = f"Pass `{name}=None` for uniform weights."
    check_shape(name, weights, (n,), f"one weight per {each}", advice)
    check_finite(name, weights)
    if float(weights.min()) < 0:
        raise InvalidInputError(
            f"`{name}` must be non-negative; its smallest entry is {float(weights.min()):.3g}."
        )
    total = float(weights.sum())
    if total == 0:
        raise InvalidInputError(f"`{name}` is all zero: no point has any mass. {advice}")
    # Balanced transport of different masses is not defined. A total of nearly one is rounding, in
    # half precision one unit of it.
    if abs(total - 1) > max(MASS_TOLERANCE, rounding):
        raise InvalidInputError(
            f"`{name}` must sum to 1; it sums to {total:.6g}. Pass `{name} / {name}.sum()`."
        )
    return weights / total


def check_shape(
    name: str, array: Any, shape: tuple[int | str, ...], what: str = "", advice: str = ""
) -> None:
    """Refuse an array of another shape; a letter is any size of at least 1."""
    found = tuple(array.shape)
    sizes = zip(shape, found, strict=False)
    if len(found) == len(shape) and all(
        size > 0 if isinstance(wanted, str) else size == wanted for wanted, size in sizes
    ):
        return
    wanted = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    what = f", {what}" if what else ""
    raise InvalidInputError(
        f"`{name}` must have shape ({wanted}){what}; got {found}. {advice}".rstrip()
    )


def check_finite(name: str, tensor: Tensor, advice: str = "") -> None:
    """Refuse NaN and infinity."""
    if math.isfinite(_largest(tensor)):
        return
    parts = tensor.reshape(-1).split(BLOCK)
    bad = sum(int((~torch.isfinite(part)).sum()) for part in parts)
    raise InvalidInputError(
        f"`{name}` has {bad} entries that are NaN or infinite, of {tensor.numel()}; "
        f"all must be finite. {advice}".rstrip()
    )


def check_magnitude(name: str, tensor: Tensor, smallest: float = 1 / _LARGEST_ENTRY) -> float:
    """Refuse numbers whose squares would over- or underflow; return the largest magnitude."""
    largest = _largest(tensor)
    if largest > _LARGEST_ENTRY or 0 < largest < smallest:
        raise InvalidInputError(
            f"The largest entry of `{name}` must be between {smallest:g} and {_LARGEST_ENTRY:g}, "
            f"so that squares can be computed; got {largest:.3g}. Choose another unit: multiply "
            "by a constant."
        )
    return largest


def _largest(tensor: Tensor) -> float:
    """Find the largest magnitude, NaN or infinite if an entry is, in one pass."""
    if not tensor.numel():
        return 0.0
    if tensor.numel() <= FEW_NUMBERS:
        tensor = tensor.cpu()
    low, high = torch.stack(torch.aminmax(tensor)).tolist()
    return float(max(-low, high))


def check_list(name: str, value: Any, what: str) -> list[Any]:
    """Convert to a list anything that has a length and items in an order."""
    listed = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    if not listed or isinstance(value, (str, bytes, dict)) or getattr(value, "ndim", 1) == 0:
        raise InvalidTypeError(f"`{name}` must be a list, {what}; got {type(value).__name__}.")
    return list(value)


def check_each(
    name: str, given: Any, count: int, what: str = "item", each: str = "spaces"
) -> list[Any]:
    """Convert to a list that has one item for each of some things; None for all if not given."""
    if given is None:
        return [None] * count
    items = check_list(name, given, f"of one {what} for each of the {count} {each}")
    if len(items) != count:
        raise InvalidInputError(
            f"`{name}` must have one {what} for each of the {count} {each}; got {len(items)}."
        )
    return items


# What a seed can be drawn from.
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState)


def named_device(device: Any) -> torch.device:
    """Find a device by its name; refuse one that is not here."""
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"`device` must name a PyTorch device, for example 'cuda'; got {device!r}."
        ) from error
    _check_device(named)
    return named


def resolve_device(device: Any, *values: Any) -> torch.device:
    """Choose the device asked for, or that of the inputs, which must agree."""
    if device is not None:
        resolved = named_device(device)
        if resolved.type == "cuda" and resolved.index is None:
            resolved = torch.device("cuda", torch.cuda.current_device())
        return resolved
    # PyTorch Geometric's data have no device of their own
    found = [getattr(getattr(value, "edge_index", value), "device", None) for value in values]
    devices = {item for item in found if isinstance(item, torch.device)}
    if len(devices) > 1:
        names = ", ".join(sorted(str(item) for item in devices))
        raise InvalidInputError(
            f"The inputs lie on different devices ({names}). Pass `device=` to choose one."
        )
    only = devices.pop() if devices else torch.device("cpu")
    _check_device(only)
    return only


def _check_device(device: torch.device) -> None:
    if device.type not in _DEVICE_TYPES:
        raise InvalidInputError(
            f"torchgw computes on 'cpu' and 'cuda' devices; got '{device}'. Pass `device='cpu'`."
        )
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= count:
        raise InvalidInputError(
            f"`device='{device}'` does not exist here: PyTorch sees {count} such devices."
        )


def check_seed(random_state: Any) -> None:
    """Refuse what is no seed, and no generator that one could be drawn from."""
    if isinstance(random_state, _GENERATORS) or random_state is None:
        return
    if not isinstance(random_state, Integral) or isinstance(random_state, bool):
        raise InvalidTypeError(
            "`random_state` must be an integer, a generator of torch or NumPy, or None; got "
            f"{type(random_state).__name__}."
        )
    if not 0 <= int(random_state) < 2**64:
        raise InvalidInputError(
            f"`random_state` must be within 0 and 2^64 - 1; got {random_state}."
        )


def make_generator(random_state: Any, device: torch.device) -> tuple[torch.Generator, int]:
    """Make a generator on a device, and the seed that reproduces it; ``None`` draws a new seed."""
    check_seed(random_state)
    generator = torch.Generator(device=device)
    if random_state is None:
        return generator, generator.seed()
    if isinstance(random_state, torch.Generator):
        seed = int(torch.randint(2**62, (1,), generator=random_state, device=random_state.device))
    elif isinstance(random_state, np.random.Generator):
        seed = int(random_state.integers(2**62))
    elif isinstance(random_state, np.random.RandomState):
        seed = int(random_state.randint(2**62, dtype=np.int64))
    else:
        seed = int(random_state)
    generator.manual_seed(seed)
    return generator, seed
