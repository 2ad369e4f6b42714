"""Arrays of a call of POT, whose kind goes out as it came in; and names that are its own."""

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import FORBIDDEN, make_generator, to_tensor
from torchgw._errors import InvalidInputError, UnsupportedError

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Places = NDArray[np.intp]

# Asymmetry of a table that POT takes for rounding, and negative entries, as a share of the largest.
# [L389]
ROUNDING = 1e-10


class Arrays:
    """The kind of arrays that a call was given: all is computed in NumPy float64 between."""

    # The first floating-point array decides the dtype of what is handed back, and any tensor among
    # them makes it a tensor, on the device of the first.

    def __init__(self, *given: Any, names: dict[str, str] | None = None) -> None:
        self.names = names or {}
        tensors = [value for value in given if isinstance(value, Tensor)]
        self.device = tensors[0].device if tensors else None
        self.dtype = torch.float64
        for value in given:
            if isinstance(value, (Tensor, np.ndarray)):
                dtype = _torch_dtype(value)
                if dtype.is_floating_point:
                    self.dtype = dtype
                    break

    def called(self, name: str) -> str:
        """Find what the caller calls an argument, for messages."""
        return self.names.get(name, name)

    def read(self, name: str, value: Any, shape: tuple[int, ...] | None = None) -> Array:
        """Convert to NumPy float64; refuse other shapes, and entries that are not finite."""
        name = self.called(name)
        # linear solvers take arrays without strides, and no subclasses such as matrices and masked
        # arrays
        plain = type(value) is np.ndarray and value.dtype == np.float64
        if plain and value.flags.writeable:
            array: Array = np.ascontiguousarray(value)
        else:
            array = to_tensor(name, value).to("cpu", torch.float64).contiguous().numpy()
        if shape is not None and array.shape != shape:
            raise InvalidInputError(f"`{name}` must have shape {shape}; got {array.shape}.")
        if not np.isfinite(array).all():
            advice = f" {FORBIDDEN}" if name == "M" and (array == np.inf).any() else ""
            raise InvalidInputError(f"`{name}` must be finite; got NaN or infinity.{advice}")
        return array

    def table(self, name: str, value: Any) -> Array:
        """Read the costs of one space, a square table."""
        array = self.read(name, value)
        if array.ndim != 2 or array.shape[0] != array.shape[1] or not array.size:
            raise InvalidInputError(
                f"`{self.called(name)}` must be a square matrix; got shape {array.shape}."
            )
        return array

    def weights(self, name: str, value: Any, n: int) -> Array:
        """Read weights of points, uniform by default; they need not sum to one."""
        if value is None:
            return uniform(n)
        array = self.read(name, value, (n,))
        if (array < 0).any() or not array.sum() > 0:
            raise InvalidInputError(
                f"`{self.called(name)}` must be nonnegative, and not zero throughout."
            )
        dtype = _torch_dtype(value) if isinstance(value, (Tensor, np.ndarray)) else torch.float64
        half = dtype.is_floating_point and dtype.itemsize == 2
        if half and abs(array.sum() - 1) <= torch.finfo(dtype).eps:
            # one but for rounding, by which `p` and `q` may have different sums
            return array / array.sum()
        return array

    def give(self, array: Any) -> Any:
        """Hand an array, or a number, back as the kind of array that came in."""
        if self.device is not None:
            # a bare number would lose digits to PyTorch's default dtype
            return torch.from_numpy(np.asarray(array)).to(self.device, self.dtype)
        return np.asarray(array).astype(_NUMPY[self.dtype], copy=False)[()]

    def give_all(self, log: dict[str, Any], *keep: str) -> dict[str, Any]:
        """Hand the arrays of a log back."""
        numbers = (np.ndarray, np.floating)
        return {
            key: self.give(value) if isinstance(value, numbers) and key not in keep else value
            for key, value in log.items()
        }

    def value(self, number: float, gradients: Iterable[tuple[Any, Any]]) -> Any:
        """Hand a number back with its derivatives by those inputs that require them."""
        result = self.give(np.float64(number))
        for given, gradient in gradients:
            if isinstance(given, Tensor) and given.requires_grad:
                slope = torch.as_tensor(gradient, device=given.device).to(given)
                moved = ((given - given.detach()) * slope).sum()
                result = result + moved.to(result.device, result.dtype)
        return result


_NUMPY = {
    torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16,
    torch.bfloat16: np.float32,
}  # fmt: skip


def _torch_dtype(array: Tensor | NDArray[Any]) -> torch.dtype:
    if isinstance(array, Tensor):
        return array.dtype
    names = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16}
    return names.get(array.dtype.name, torch.int64)


def uniform(n: int) -> Array:
    """Compute equal weights of sum one."""
    return np.full(n, 1 / n)


def generator(random_state: Any) -> Any:
    """Make the generator of POT, so that a seed means the same there and here."""
    if isinstance(random_state, np.random.RandomState):
        return random_state
    if isinstance(random_state, (np.random.Generator, torch.Generator)):
        random_state = make_generator(random_state, torch.device("cpu"))[1] % 2**32
    return np.random.RandomState(random_state)  # noqa: NPY002


def product(p: Array, q: Array, mass: float | None = None) -> Array:
    """Compute the product plan, scaled to a mass if one is given."""
    plan, whole = np.outer(p, q), p.sum() * q.sum()
    # if rounding alone tells the factor from one, it is left out: it would change the last bits
    return plan if mass is None or abs(mass - whole) < 1e-14 * whole else plan * mass / whole


def is_symmetric(*tables: Array) -> bool:
    """Say whether tables are symmetric, to the tolerance of POT."""
    return all(
        np.array_equal(table, table.T) or np.allclose(table, table.T, atol=ROUNDING)
        for table in tables
    )


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
