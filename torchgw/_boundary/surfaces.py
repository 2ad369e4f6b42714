"""Surfaces of other packages become vertices and triangles here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchgw._boundary.arrays import check_points, to_numpy, to_tensor
from torchgw._errors import InvalidInputError, InvalidTypeError

# What surfaces are made of: an array of vertices (n, d) and one of triangles (k, 3).
Triangles = tuple[Any, NDArray[np.int64]]


def as_triangles(name: str, value: Any) -> Triangles | None:
    """Read a surface of trimesh, PyVista, PyTorch Geometric or a pair; ``None`` if it is none."""
    found = _parts(name, value)
    if found is None:
        return None
    vertices, faces = check_points(f"{name}.vertices", found[0]), to_numpy(found[1])
    if not 2 <= vertices.shape[1] <= 3:
        raise InvalidInputError(
            f"The vertices of the surface `{name}` must have shape (n, 3), or (n, 2) in the plane; "
            f"got {tuple(vertices.shape)}."
        )
    if faces.ndim != 2 or faces.shape[1] != 3 or not len(faces):
        raise InvalidInputError(
            f"The faces of the surface `{name}` must be triangles, integers of shape (k, 3); got "
            f"{faces.shape}. Triangulate others first: mesh.triangulate() of PyVista, "
            "trimesh.geometry.triangulate_quads(faces)."
        )
    if faces.dtype.kind not in "iu":
        raise InvalidTypeError(
            f"The faces of the surface `{name}` must be numbers of vertices, integers; got "
            f"{faces.dtype}. Pass (vertices, faces.astype(int)) if that is what they are."
        )
    if not 0 <= int(faces.min()) <= int(faces.max()) < len(vertices):
        raise InvalidInputError(
            f"The faces of the surface `{name}` must be within 0 and n - 1 = {len(vertices) - 1}; "
            f"got {faces.min()} to {faces.max()}. Files that count from 1 need faces - 1."
        )
    return vertices, faces.astype(np.int64)


def _parts(name: str, value: Any) -> tuple[Any, Any] | None:
    """Find the vertices and the faces of what may be a surface."""
    if isinstance(value, (tuple, list)):
        # points may come as a list of two rows, which have one axis each
        pair = len(value) == 2 and all(_axes(part) == 2 for part in value)
        return (value[0], value[1]) if pair else None
    if hasattr(value, "vertices") and hasattr(value, "faces"):
        return value.vertices, value.faces
    if hasattr(value, "geometry") and hasattr(value, "graph") and hasattr(value, "bounds"):
        raise InvalidTypeError(
            f"`{name}` must be one surface; got a {type(value).__name__} of several. Pass "
            f"{name}.to_mesh() of trimesh, which joins them, or one of {name}.geometry.values()."
        )
    if hasattr(value, "points") and hasattr(value, "n_points") and hasattr(value, "n_cells"):
        return value.points, _padded(name, value)
    if getattr(value, "face", None) is not None and getattr(value, "pos", None) is not None:
        return value.pos, to_tensor(f"{name}.face", value.face).T
    return None


def _axes(part: Any) -> int:
    """Count the axes of an array or of nested lists."""
    if hasattr(part, "ndim"):
        return int(part.ndim)
    count = 0
    while isinstance(part, (list, tuple)) and len(part):
        part, count = part[0], count + 1
    return count


def _padded(name: str, value: Any) -> NDArray[Any]:
    """Read the faces of a PyVista surface, each with its number of vertices before it."""
    flat = getattr(value, "faces", None)
    if flat is None:
        raise InvalidTypeError(
            f"`{name}` must be a surface; got {type(value).__name__}. Pass "
            f"{name}.extract_surface().triangulate(), or its points."
        )
    flat = np.asarray(flat)
    rows = flat.reshape(-1, 4) if len(flat) % 4 == 0 else flat[:, None]
    if not len(rows) or rows.shape[1] != 4 or (rows[:, 0] != 3).any():
        raise InvalidInputError(
            f"The faces of the surface `{name}` must be triangles. Pass {name}.triangulate(), or "
            f"{name}.points if it has no faces."
        )
    return rows[:, 1:]
