"""Distances in low rank, from those to a few landmarks by Nystrom's approximation; geodesics so."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from torchgw._boundary.arrays import resolve_device
from torchgw._boundary.checks import check_within
from torchgw._errors import GraphWarning, UnsupportedError, warn_user
from torchgw._tensors.operations import HOST_DRAWN, TINY, distinct, greater, lesser, power
from torchgw._tensors.ranks import Ranks
from torchgw.distances._graph.edges import VERTICES, components
from torchgw.distances.base import DistanceProvider, Factors
from torchgw.distances.factored import FactoredDistance
from torchgw.distances.geodesics import Geodesics
from torchgw.distances.graph import as_geodesics
from torchgw.distances.sampling import SPREAD

# Landmarks found as farthest points; those of a round that are drawn together, and further columns
# that the error is estimated from: a GPU finds 16 at a time. [L101, L103] [L539]
_EXTREMES, _PART = 3, 15
# Vertices of graphs that get so many rounds. The value of a plan is too high by as much as the
# errors of both sides: within 1% from 100 landmarks on. More factors cost every iteration more, but
# little where the cost is stored, as a GPU does at this size. [L100]
_FEW_VERTICES, _FEW_ROUNDS = 8_192, 8
# Vertices up to which all are landmarks, so that the distances are exact. [L100]
_ALL_VERTICES = 256
# Rounds of larger graphs at most, after each of which the error is estimated. They are enough if
# the error, relative to the distances, is at most this, or if the last step has reduced it by less
# than this share. [L170, L311]
_ROUNDS, _TOLERANCE = 5, 0.02
_LEAST_GAIN = 0.1
# A smaller rank may have this error, relative to the least. [L194]
_RANK_SLACK = 1.05


class NystromDistance(FactoredDistance):
    """Nystrom approximation of the distances of another provider.

    With the distances D_L, shape (n, L), to L landmarks and their block W = U diag(v) U.T,

        D ~ D_L W^+ D_L.T = A diag(sign v) A.T,    A = D_L U |v|^(-1/2).

    Columns, products and factors all come from this one approximation, whose diagonal is small, not
    zero. It reads 15 columns more than there are landmarks, and takes memory O(n L). Distances of
    negative type, such as those of hyperbolic spaces, spheres and trees, have one positive factor,
    and the others are negative; how fast they fall off, ``error`` says. Clouds like trees have slow
    spectra.

    Parameters
    ----------
    provider : DistanceProvider
        Whose distances are approximated.
    n_landmarks : int or None, optional
        Number of landmarks, at most n. ``None`` takes all of up to 256 points, which is exact, and
        123 of up to 8,192. Of more it begins with 18 and adds 15 at a time, until the error on
        held-out columns is 2% of their size, or a step takes off less than a tenth of it, or there
        are 78.
    generator : torch.Generator or None, optional
        Generator on the CPU that draws landmarks and held-out columns; ``None`` has a fixed seed.

    Attributes
    ----------
    landmarks : Tensor, shape (L,), int64
        Landmarks in the order found; fewer than asked for if all others duplicate one of them.
    rank : int
        Number of factors.
    error : float
        Frobenius error relative to the distances, estimated from 15 columns that are not
        landmarks'; 0 if all are landmarks.

    Raises
    ------
    InvalidInputError
        If ``n_landmarks`` is not between 1 and n.

    Notes
    -----
    The first three landmarks are farthest points, which gives the largest distance. The others are
    drawn in proportion to the fourth power of the distance to those before. Farthest points alone
    are as good on curves, but in a large cloud they are all outliers: 7.0% error against 2.5% for
    100,000 Gaussian points in 3 dimensions. Some are chosen at a time; how far one is from others
    that are chosen with it, the distances of both to known vertices tell.

    W^+ leaves out small eigenvalues, whose inverses amplify what the landmarks do not capture. No
    fixed tolerance suits both smooth and high-dimensional spaces: the rank is the smallest one
    whose error on the held-out columns is within 5% of the least.

    Examples
    --------
    >>> import torch
    >>> from torchgw.distances import CurvedDistance, NystromDistance
    >>> points = torch.rand(1_000, 2, generator=torch.Generator().manual_seed(0)) - 0.5
    >>> distance = NystromDistance(CurvedDistance(points, "poincare"))
    >>> distance.rank <= 123, distance.error < 0.01
    (True, True)
    """

    landmarks: Tensor
    error: float
    _largest: float

    def __init__(
        self,
        provider: DistanceProvider,
        n_landmarks: int | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        self.n, self.device, self.dtype = provider.n, provider.device, provider.dtype
        double = provider.to(provider.device, torch.float64)
        self._find(lambda index: double.columns(index).T, n_landmarks, 0, generator)
        # the largest distance from a landmark is a lower bound
        self._largest = max(self._largest, double.maximum())

    def _find(
        self,
        rows_of: Callable[[Tensor], Tensor],
        n_landmarks: int | None,
        start: int,
        generator: torch.Generator | None,
    ) -> None:
        """Find landmarks, by rows of distances, and the factors that they give."""
        if n_landmarks is not None:
            check_within("n_landmarks", n_landmarks, 1, self.n, ", the number of points")
        check_within("start", start, 0, self.n - 1)
        generator = generator or torch.Generator().manual_seed(0)
        held_out = distinct(self.n, min(_PART, self.n), generator).to(self.device)
        self.landmarks = torch.tensor([start], device=self.device)
        # a GPU takes as long for one source as for a few
        first = rows_of(torch.cat([self.landmarks, held_out]))
        # a copy: what the error is estimated from is let go before it
        rows, exact, before = [first[:1].clone()], first[1:], math.inf
        large = self.n > _FEW_VERTICES
        rounds = range(1, _ROUNDS + 1) if large else (_FEW_ROUNDS,)
        counts = [_EXTREMES + turn * _PART for turn in rounds]
        if n_landmarks is not None or self.n <= _ALL_VERTICES:
            counts = [n_landmarks or self.n]
        for count in counts:
            self.landmarks = _add_landmarks(rows_of, self.landmarks, rows, exact, count, generator)
            to_landmarks, signs, self.error = _approximate(rows, self.landmarks, held_out, exact)
            exhausted = len(self.landmarks) < count
            stuck = self.error > (1 - _LEAST_GAIN) * before
            if exhausted or stuck or self.error <= _TOLERANCE:
                break
            before = self.error
        self._largest = max(float(some.max()) for some in rows)
        # what finds paths takes as much as these
        del first, exact, rows_of
        matrix = torch.empty(self.n, len(signs), dtype=self.dtype, device=self.device)
        for some in _parts(self.n):
            matrix[some] = _columns(rows, some).T @ to_landmarks
        self._factors = Factors(matrix, signs.to(self.dtype))

    @property
    def rank(self) -> int:
        """Number of factors."""
        return self._factors.matrix.shape[1]

    def to(self, device: torch.device, dtype: torch.dtype) -> "NystromDistance":
        if self._lies_at(device, dtype):
            return self
        factors = Factors(*(part.to(device, dtype) for part in self._factors))
        return self._moved(device, dtype, landmarks=self.landmarks.to(device), _factors=factors)

    def maximum(self) -> float:
        """Find the largest distance; of a graph a lower bound, at least half and usually all."""
        return self._largest


def _add_landmarks(
    rows_of: Callable[[Tensor], Tensor],
    landmarks: Tensor,
    rows: list[Tensor],
    others: Tensor,
    count: int,
    generator: torch.Generator,
) -> Tensor:
    """Add landmarks (L,) until there are ``count``, or no more, and their distances to the rows."""
    while len(landmarks) < count:
        closest = reduce(lesser, (some.amin(dim=0) for some in rows))
        if closest.max() == 0:
            # all vertices that are left are duplicates of landmarks
            break
        farthest = min(_EXTREMES, count) - len(landmarks)
        fresh = _choose_round(closest, (*rows, others), farthest, count - len(landmarks), generator)
        landmarks = torch.cat([landmarks, fresh])
        rows.append(rows_of(fresh))
    return landmarks


def _choose_round(
    closest: Tensor, known: Sequence[Tensor], farthest: int, size: int, generator: torch.Generator
) -> Tensor:
    """Choose the landmarks of a round, first farthest points, then by draws away from these."""
    # The distances to landmarks chosen before in this round are not known yet. By the triangle
    # inequality they are at least as large as the difference of the distances to any vertex; on a
    # curve the largest of these differences is the distance.
    chosen = landmarks = torch.empty(0, dtype=torch.int64, device=closest.device)
    if len(closest) <= VERTICES:
        # small tables are read at once: launches take longer
        known = [torch.cat([*known])]
    while len(landmarks) < size and closest.max() > 0:
        for one in chosen:
            closest = lesser(closest, _least_apart(known, one))
        if len(landmarks):
            closest = closest.index_fill(0, landmarks, 0.0)
        part = min(size - len(landmarks), _PART)
        if len(landmarks) < farthest:
            chosen = closest.argmax()[None]
        else:
            chosen = _draw_spread(closest, part, generator)
        landmarks = torch.cat([landmarks, chosen])
    return landmarks


def _least_apart(known: Sequence[Tensor], one: Tensor) -> Tensor:
    """Bound the distances of all vertices to one, (n,), by those of both to known vertices."""
    bounds = (
        [(part - rows[:, one, None]).abs_().amax(dim=0) for part in rows.split(VERTICES, 1)]
        for rows in known
    )
    return reduce(greater, map(torch.cat, bounds))


def _draw_spread(closest: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw distinct vertices in proportion to a power of their distance to the landmarks."""
    # The largest of log(u) / weight are a draw without replacement (Efraimidis and Spirakis 2006).
    # Landmarks and their duplicates have weight zero and come last.
    device = torch.device("cpu")
    if len(closest) > HOST_DRAWN and closest.is_cuda:
        device = closest.device
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        generator = torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(len(closest), generator=generator, dtype=torch.float64, device=device)
    # the power of a small number would underflow
    weight = power(closest / closest.max(), SPREAD)
    keys = uniform.to(closest.device).log() / weight
    return keys.topk(min(size, int((weight > 0).sum()))).indices


def _nystrom(block: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what makes factors of distances to landmarks, (L, r) and signs (r,).

    ``block`` are the distances between landmarks. The largest eigenvalues come first.
    """
    # on the CPU: the problem is small, and the answer does not depend on the device
    values, vectors = torch.linalg.eigh(((block + block.T) / 2).cpu())
    order = values.abs().argsort(descending=True)
    values, vectors = values[order], vectors[:, order]
    kept = values.abs() > 1e-12 * values[0].abs()
    # all distances are zero where there is one point, or duplicates of one
    if not kept.any():
        return block.new_zeros(len(block), 1), block.new_ones(1)
    values, vectors = values[kept], vectors[:, kept]
    return (vectors / values.abs().sqrt()).to(block.device), values.sign().to(block.device)


def _approximate(
    rows: Sequence[Tensor], landmarks: Tensor, held_out: Tensor, exact: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Choose the smallest rank nearly as good as the best: what makes factors, relative error."""
    to_landmarks, signs = _nystrom(_columns(rows, landmarks))
    fresh = ~torch.isin(held_out.cpu(), landmarks.cpu())
    if not fresh.any():
        return to_landmarks, signs, 0.0
    if not fresh.all():
        held_out, exact = (part[fresh.to(part.device)] for part in (held_out, exact))
    # squared distances of the exact columns to the sums of the first r terms
    gram, cross, size = signs.new_zeros(()), signs.new_zeros(()), signs.new_zeros(())

    def read(some: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Compute with some vertices, and let their tables go before the next are made."""
        part, known = _columns(rows, some).T @ to_landmarks, exact[:, some].double()
        return part.T @ part, known @ part, (known * known).sum()

    for some in _parts(exact.shape[1]):
        first, second, third = read(some)
        gram, cross, size = gram + first, cross + second, size + third
    own, size = signs * (_columns(rows, held_out).T @ to_landmarks), size.clamp_min(TINY)
    products = ((own.T @ own) * gram).cumsum(0).cumsum(1).diagonal()
    square = products - 2 * (own * cross).sum(0).cumsum(0) + size
    # differences below rounding mean nothing
    errors = (square / size).clamp_min(torch.finfo(square.dtype).eps).sqrt()
    rank = int((errors <= _RANK_SLACK * errors.min()).nonzero()[0]) + 1
    return to_landmarks[:, :rank], signs[:rank], float(errors[rank - 1])


def _parts(n: int) -> Iterator[slice]:
    """Split vertices into those that are computed with in float64 at once."""
    return (slice(start, start + VERTICES) for start in range(0, n, VERTICES))


def _columns(rows: Sequence[Tensor], some: Tensor | slice) -> Tensor:
    """Take some columns of rows (L, n) in float64."""
    return torch.cat([part[:, some] for part in rows]).double()


# Vertices above which paths are kept in float32, in which a GPU adds up edges: those of 10,000,000
# points are then off by 3e-6 of the longest one, where landmarks leave 1e-2. [L920, L1502, L1730]
_ROUGH = 2**19


class LandmarkDistance(NystromDistance):
    """Nystrom approximation of the geodesic distances of a graph.

    :class:`~torchgw.distances.NystromDistance` says how. It takes 15 runs of Dijkstra more than
    there are landmarks, and memory O(n L).

    Parameters
    ----------
    graph : SciPy sparse array or matrix, or Geodesics
        Symmetric edge lengths. Components of a graph that is not connected are given a finite
        distance, with a warning; :func:`torchgw.distances.connect` has the choices.
    n_landmarks, generator : int or None, torch.Generator or None, optional
        As of :class:`~torchgw.distances.NystromDistance`.
    start : int, optional
        First landmark.
    device : torch.device or str, optional
        Device of everything that is returned.
    dtype : torch.dtype, optional
        Dtype of everything that is returned. The factors are computed in float64, from paths that
        are kept in float32 of more than 2^19 vertices, in which a GPU adds them up.

    Attributes
    ----------
    landmarks, rank, error : Tensor, int and float
        As of :class:`~torchgw.distances.NystromDistance`; the error is relative to exact geodesics.

    Raises
    ------
    InvalidInputError
        If the graph is not valid, or ``n_landmarks`` is not between 1 and n.

    Notes
    -----
    If there are fewer landmarks than components, some components cannot be told apart, and a
    warning says so.
    """

    geodesics: Geodesics | None

    def __init__(
        self,
        graph: Any,
        n_landmarks: int | None = None,
        *,
        start: int = 0,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self._begin(graph, resolve_device(device), dtype)
        self._find(self._reader(), n_landmarks, start, generator)
        self._warn_if_too_few(len(self.landmarks))

    def _begin(self, graph: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.geodesics = geodesics = as_geodesics(graph)
        self.n, self.device, self.dtype = geodesics.n, device, dtype

    def _reader(
        self, ranks: Ranks | None = None, *, last: bool = False
    ) -> Callable[[Tensor], Tensor]:
        """Make what finds paths, which ranks share out if there are any."""
        assert self.geodesics is not None
        dtype = torch.float32 if self.n > _ROUGH else torch.float64
        alone = self.geodesics.reader(self.device, dtype, last=last)
        if ranks is None:
            return alone
        empty = torch.empty(0, self.n, dtype=dtype, device=self.device)
        return lambda sources: ranks.at_once(len(sources), lambda one: alone(sources[one]), empty)

    @classmethod
    def prepared(
        cls,
        graph: Geodesics,
        n_landmarks: int | None,
        device: torch.device,
        ranks: Ranks | None,
        *,
        last: bool,
    ) -> "LandmarkDistance":
        """Make the provider by paths that ranks share out, if any; with the bits of one alone.

        With ``last`` a GPU lets go of the edges, of which nothing more will be asked.
        """
        provider = cls.__new__(cls)
        provider._begin(graph, device, torch.float64)
        # nothing else holds the reader, which is let go before the factors are made
        provider._find(provider._reader(ranks, last=last), n_landmarks, 0, None)
        provider._warn_if_too_few(len(provider.landmarks))
        return provider

    def state(self) -> dict[str, Any]:
        """Give what :meth:`restore` needs besides the graph."""
        return {
            "landmarks": self.landmarks, "error": self.error, "largest": self._largest,
            "factors": tuple(self._factors),
        }  # fmt: skip

    @classmethod
    def restore(cls, graph: Geodesics | None, state: dict[str, Any]) -> "LandmarkDistance":
        """Make the provider that had this state; without its graph it does not tell its error."""
        provider, factors = cls.__new__(cls), Factors(*state["factors"])
        provider.geodesics, provider.n = graph, len(factors.matrix)
        provider.device, provider.dtype = factors.matrix.device, factors.matrix.dtype
        provider.landmarks, provider.error = state["landmarks"], state["error"]
        provider._largest, provider._factors = state["largest"], factors
        return provider

    def _warn_if_too_few(self, n_landmarks: int) -> None:
        """Warn if there are more components than landmarks."""
        assert self.geodesics is not None
        if self.geodesics.unreachable is None:
            return
        n_components = components(self.geodesics.edges)[0]
        if n_components > n_landmarks:
            warn_user(
                "Too few landmarks to tell the components of the graph apart: "
                f"{n_landmarks} for {n_components}. Pass `n_landmarks={n_components}` or more, or "
                "join the components with `connect(graph, points)`.",
                GraphWarning,
            )

    def relative_error(
        self, sample: int = 64, *, generator: torch.Generator | None = None
    ) -> float:
        """Estimate the Frobenius error relative to exact geodesics from a sample of columns.

        Parameters
        ----------
        sample : int
            Columns to compare; each costs a run of Dijkstra.
        generator : torch.Generator or None
            Generator on the CPU that draws them; ``None`` has a fixed seed.

        Raises
        ------
        UnsupportedError
            If the graph was not kept, as by a solve of points.
        """
        if self.geodesics is None:
            raise UnsupportedError(
                "The graph of these distances was not kept: a solve needs their factors alone. "
                "Make a LandmarkDistance of the graph, and ask that."
            )
        generator = generator or torch.Generator().manual_seed(0)
        index = distinct(self.n, min(sample, self.n), generator)
        exact = self.geodesics.rows(index.numpy())
        error = self.columns(index.to(self.device)).T.cpu().double() - exact
        size = float(exact.norm())
        return float(error.norm()) / size if size else float(error.norm())
