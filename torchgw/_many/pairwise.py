"""Matrices of values between many spaces."""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._batch.worth import Rules
from torchgw._boundary.archive import check_writable, read_archive, write_archive
from torchgw._boundary.arrays import resolve_device, to_numpy, to_tensor, without_tensors
from torchgw._boundary.cache import content_key
from torchgw._boundary.checks import check_choice, check_count, reject_unknown
from torchgw._boundary.console import counted
from torchgw._errors import InvalidInputError, PerformanceWarning, UnsupportedError, warn_user
from torchgw._many import questions
from torchgw._many.solver import Numbers, solve_questions, warn_of_failures
from torchgw._many.spaces import (
    Listed,
    Measure,
    Shelves,
    Space,
    check_columns,
    check_measure,
    read_spaces,
)
from torchgw._problem.limits import limits_of
from torchgw._problem.named import DistanceName, ScaleName
from torchgw._problem.problem import FeatureMetric, check_feature_metric
from torchgw._problem.signatures import features_of_all
from torchgw._problem.table import Options, Regularization, SearchName, check_options, takes_options
from torchgw._search.beliefs import LONG
from torchgw._tensors.ahead import probe_beside
from torchgw._tensors.ranks import Distributed, Ranks, check_distributed, join, together

# Problems of the first chunk, and of any. A chunk takes as long as counts as ``LONG``, after which
# the file is written: one or two are lost when the process is killed, and in a short one the engine
# waits for the last problems. [L396]
_FIRST_CHUNK, _LARGEST_CHUNK = 256, 2**17
# Problems of the first chunk where each is searched, which tell how long the others take. A choice.
_FIRST_SEARCHED = 32


class SharedOptions(NamedTuple):
    """Options that all pairs share."""

    alpha: float
    epsilon: float
    squared: bool
    n_init: int | None
    search: SearchName
    rules: Rules
    device: torch.device
    wanted: questions.Wanted  # of each pair, one for all


class Job(NamedTuple):
    """What a worker needs to know of all spaces, as arrays that can be mapped into memory."""

    key: str
    numbers: NDArray[np.float64]  # tables, weights and features, one space after the other
    shape: NDArray[np.int64]  # (S, 2) points and features of each space
    options: SharedOptions


def make_job(spaces: list[Space], options: SharedOptions) -> Job:
    """Put all spaces into one array, and name the job by what is in it."""
    parts, shape = [], []
    for table, weights, features in spaces:
        shape.append((len(table), -1 if features is None else features.shape[1]))
        parts += [table.flatten(), weights, *([] if features is None else [features.flatten()])]
    numbers, sizes = torch.cat([part.cpu() for part in parts]), torch.tensor(shape, device="cpu")
    *plain, rules, device, wanted = options
    limits = (None if part is None else tuple(part.flatten()) for part in wanted)
    key = content_key("pairwise", numbers, sizes, *plain, tuple(rules), device.type, *limits)
    return Job(key, numbers.numpy(), sizes.numpy(), options)


def compute_pairs(
    job: Job, i: Tensor, j: Tensor, n_jobs: int, resume: Any, *, shown: bool
) -> Numbers:
    """Compute all pairs chunk by chunk, beginning with what the file already has."""
    # problems of like size follow each other
    sizes = torch.as_tensor(job.shape, device="cpu")[:, 0]
    padded = torch.stack([sizes[i], sizes[j]]).sort(0).values.add(15).div(16, rounding_mode="floor")
    order = (padded[0] * (padded.max() + 1) + padded[1]).argsort(stable=True).numpy()
    first, second = i.numpy(), j.numpy()
    table = np.full((len(Numbers._fields), len(order)), np.nan)
    key = content_key(job.key, i, j)
    if resume is not None and Path(resume).exists():
        table = _read_table(resume, key, table.shape)
    left = order[np.isnan(table[0, order])]
    written = time.monotonic()
    done = len(order) - len(left)
    # entries of plans that are searched; where there are small ones these take nearly all of the
    # time
    entries = (sizes[i] * sizes[j]).numpy()
    small = entries <= limits_of(job.options.device).tiny
    every = job.options.search == "thorough" or not small.any()
    work, told = entries * ((job.options.n_init is None) & (small | every)), False
    bar = counted(len(order), "torchgw, pair", shown=shown, done=done)
    with _workers(n_jobs) as (together, run), bar as advance:
        size, at = _FIRST_SEARCHED if work.any() else _FIRST_CHUNK, 0
        while at < len(left):
            started = time.monotonic()
            chunks = [left[at + k * size : at + (k + 1) * size] for k in range(together)]
            chunks = [chunk for chunk in chunks if len(chunk)]
            tasks = [(job, first[chunk], second[chunk]) for chunk in chunks]
            for chunk, numbers in zip(chunks, run(tasks), strict=True):
                table[:, chunk] = numbers
                at += len(chunk)
                advance(len(chunk))
            now = time.monotonic()
            if resume is not None and (now - written >= LONG or at == len(left)):
                write_archive(resume, {"pairwise": key}, {"numbers": table})
                written = now
            rest, ended = work[left[at:]], work[np.concatenate(chunks)].sum()
            seconds = (now - started) * rest.sum() / max(ended, 1)
            if not told and ended and seconds > LONG:
                told = True
                _say_long(int(np.count_nonzero(rest)), seconds)
            wanted = size * LONG / max(now - started, 1e-3)
            size = int(min(max(16, wanted), 4 * size, _LARGEST_CHUNK))
    return Numbers.of_table(torch.from_numpy(table.T))


def _say_long(count: int, seconds: float) -> None:
    """Say that pairs take long, and what is quicker."""
    warn_user(
        f"These pairs take long, as each is searched: {count:,} more take about "
        f"{seconds:,.0f} s at the pace of the first. `n_init=1`, a single start each, "
        "takes a fiftieth of that for up to 32 x 32 points, a third for more; `n_jobs=-1` uses all "
        "cores.",
        PerformanceWarning,
    )


def compute_together(
    job: Job, i: Tensor, j: Tensor, n_jobs: int, ranks: Ranks, *, shown: bool
) -> Numbers:
    """Compute a share of the pairs, and receive those of the other processes."""
    ranks.agree("the start of a hash of spaces and options", [int(job.key[:12], 16)])

    def compute(mine: Tensor) -> Tensor:
        found = compute_pairs(job, i[mine], j[mine], n_jobs, None, shown=shown and ranks.rank == 0)
        return found.table().to(ranks.device)

    empty = Numbers.empty(0, ranks.device).table()
    return Numbers.of_table(ranks.dealt(len(i), compute, empty).cpu())


def _solve_chunk(job: Job, i: NDArray[np.int64], j: NDArray[np.int64]) -> NDArray[np.float64]:
    """Solve some pairs; return their numbers, (9, k)."""
    kept = _shelves_of(job.key)
    if not kept:
        kept.append(Shelves(list(_spaces_of(job)), searched=job.options.n_init is None))
    alpha, epsilon, squared, n_init, search, rules, device, wanted = job.options
    one = np.ones(len(i))
    asked = questions.Questions(
        kept[0], i, j, alpha * one, epsilon * one, squared=squared, n_init=n_init,
        search=search, rules=rules, wanted=wanted.repeated(len(i)),
    )  # fmt: skip
    return solve_questions(asked, device).table().T.cpu().numpy()


@functools.lru_cache(maxsize=1)
def _shelves_of(key: str) -> list[Shelves]:
    """Keep the shelves of the last job of this process, in a list that begins empty."""
    return []


def _spaces_of(job: Job) -> Iterator[Space]:
    """Read the spaces of a job."""
    # what is mapped is read-only, and PyTorch has no such tensors
    numbers, at = torch.from_numpy(np.array(job.numbers)).to(job.options.device), 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return numbers[at - size : at].view(*shape)

    for n, d in job.shape.tolist():
        yield Space(take(n, n), take(n), None if d < 0 else take(n, d))


def _read_table(resume: Any, key: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Read what an earlier call has computed; refuse a file of something else."""
    tree, arrays = read_archive(resume)
    if not isinstance(tree, dict) or tree.get("pairwise") != key or "numbers" not in arrays:
        raise InvalidInputError(
            f"{resume}: belongs to other spaces, pairs or options. Pass another `resume`, or "
            "remove the file."
        )
    table = arrays["numbers"]
    if table.shape != shape or table.dtype != np.float64:
        raise InvalidInputError(f"{resume}: `numbers` is not the table of these pairs.")
    return table


@contextmanager
def _workers(n_jobs: int) -> Iterator[tuple[int, Callable[[list[Any]], list[Any]]]]:
    """Open a pool of worker processes for chunks, or use this process if one is enough."""
    if n_jobs == 1:
        yield 1, lambda tasks: [_solve_chunk(*task) for task in tasks]
        return
    from joblib import Parallel, delayed

    # processes map the spaces into their memory
    with Parallel(n_jobs=n_jobs, max_nbytes=2**16, mmap_mode="r") as parallel:
        yield (
            parallel._effective_n_jobs(),
            lambda tasks: parallel(delayed(_solve_chunk)(*task) for task in tasks),
        )


Output = Literal["value", "value_quad", "value_linear", "objective"]


@reject_unknown
@takes_options
def pairwise(
    Xs: Any = None,
    Ys: Any = None,
    *,
    D_X: Any = None,
    D_Y: Any = None,
    pairs: Any = None,
    symmetric: bool | Literal["auto"] = "auto",
    output: Output = "value",
    a: Any = None,
    b: Any = None,
    distances: DistanceName | tuple[Any, Any] = "auto",
    features: Any = None,
    feature_metric: FeatureMetric = "sqeuclidean",
    alpha: float | None = None,
    n_neighbors: int | None = None,
    scale: ScaleName | None = "auto",
    epsilon: float | Literal["auto"] = "auto",
    n_init: int | None = None,
    search: SearchName = "auto",
    max_iter: int = 500,
    tol: float = 1e-5,
    objective_tol: float = 1e-4,
    inner_max_iter: int = 2000,
    inner_tol: float | None = None,
    unbalanced: Any = None,
    mass: Any = None,
    regularization: Regularization = "entropic",
    polish: bool | None = None,
    n_jobs: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
    distributed: Distributed = False,
    device: torch.device | str | int | None = None,
    options: Options | None = None,
) -> Any:
    """Compute the matrix of values between all spaces of two lists, or of one with itself.

    Each entry has the bits that :func:`torchgw.solve_many` gives it. Memory is that of the spaces,
    of the matrix, and of the problems under way: about 100 MB on a CPU and 5 GB on a GPU for each
    job, however many pairs there are.

    Parameters
    ----------
    Xs, Ys : list of spaces, N and M of them
        As in ``solve_many``; without ``Ys``, pairs are of Xs with itself.
    D_X, D_Y : list of array-like, shapes (n, n) and (m, m), optional
        Distance matrices, in place of Xs and Ys.
    pairs : array-like of int, shape (K, 2), optional
        Which pairs to compute; all by default.
    symmetric : bool or "auto"
        Whether entry (i, j) is also entry (j, i), which halves the work: by default where there is
        one list, and ``unbalanced`` is the same for both sides. The diagonal is computed too: with
        entropy it is not zero.
    output : {"value", "value_quad", "value_linear", "objective"}
        Which number of a problem the matrix holds; see :class:`torchgw.BatchResult`.
    a, b : list of array-like, optional
        Weights of the spaces of each list.
    features : list of array-like, or pair of lists where there are two lists, or str, optional
        Features of the points of all spaces, whose distances are the linear cost; or the name of an
        attribute of the nodes of all graphs, or of signatures, as in :func:`torchgw.solve`. Numbers
        are divided by their spread over all nodes of the call.
    distances, feature_metric, alpha, n_neighbors, scale, epsilon, n_init, search
        As in ``solve_many``, one value for all pairs.
    max_iter, tol, objective_tol, inner_max_iter, inner_tol, unbalanced, mass
        Likewise.
    regularization, polish
        Likewise, for all pairs.
    n_jobs : int, optional
        Processes on a CPU, by joblib, one by default; -1 for all cores. Inside
        ``joblib.parallel_config("dask")`` they are Dask's workers.
    resume : path, optional
        File in which finished entries are kept, written whole at least once a minute. If it exists,
        the call goes on from there, and ends with the same bits.
    progress : bool
        Whether to show progress on standard error, where it is a terminal.
    distributed : bool or "auto"
        Whether the processes of ``torch.distributed`` share the pairs, as in
        :func:`torchgw.solve`; each makes the same call and gets the whole. Not with ``resume``.
    device : torch.device or str, optional
        Where to compute; by default where the inputs are.
    options : Options, optional
        Any of these that are options of ``solve``, as one object: see :class:`torchgw.Options`.

    Returns
    -------
    Tensor or ndarray, shape (N, M), or (K,) with pairs, float64
        On the CPU.

    Raises
    ------
    InvalidInputError, InvalidTypeError
        For input that cannot be used, and for a ``resume`` file of other spaces or options.

    Warns
    -----
    ConvergenceWarning
        If pairs did not converge.
    SearchWarning
        If there may be better optima: of how many pairs.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> rng = np.random.default_rng(0)
    >>> Xs = [rng.normal(size=(n, 2)) for n in (9, 12, 20)]
    >>> values = torchgw.pairwise(Xs, epsilon=0.01, progress=False)
    >>> bool((values == values.T).all()), bool(values[0, 1] > values[0, 0])
    (True, True)
    """
    weights = questions.weights_of_terms(alpha, 1, fused=features is not None)
    wanted = questions.read_relaxed(unbalanced, mass, weights)
    check_choice("output", output, get_args(Output))
    check_feature_metric(features, feature_metric)
    # one value for all pairs
    questions.read_regularization(regularization), questions.read_polish(polish)
    rules = questions.check_rules(max_iter, tol, objective_tol, inner_max_iter, inner_tol, n_init)
    n_init = questions.starts_of(n_init, search)
    check_options(epsilon=epsilon)
    if n_jobs is not None and n_jobs != -1:
        check_count("n_jobs", n_jobs)
    if symmetric not in (True, False, "auto"):
        raise InvalidInputError(f"`symmetric` must be True, False or 'auto'; got {symmetric!r}.")
    check_distributed(distributed)
    if resume is not None:
        check_writable(resume)
    alone = Ys is None and D_Y is None
    if alone and b is not None:
        raise InvalidInputError("`b` are weights of a second list, and there is none. Pass `a`.")
    lists = _lists(("X", Xs, D_X)) if alone else _lists(("X", Xs, D_X), ("Y", Ys, D_Y))
    where = resolve_device(device, *(item for listed in lists for item in listed.items))
    mirrored = _is_mirrored(symmetric, wanted, alone=alone)
    probe_beside(where)
    measure = Measure(distances, scale, n_neighbors, feature_metric)
    check_measure(measure, *lists)
    ranks = join(distributed, where)
    if ranks is not None and resume is not None:
        raise UnsupportedError(
            "`resume` is a file of one process, and processes share the pairs. Leave it out, or "
            "pass distributed=False."
        )
    with together(ranks):
        parts = _by_name(features, lists) if isinstance(features, str) else features
        spaces = _read(lists, (a, b), parts, measure, where)
    sizes = len(lists[0].items), len(lists[-1].items)
    asked = _Pairs.all(*sizes, mirrored=mirrored)
    if pairs is not None:
        asked = _Pairs.some(pairs, *sizes, mirrored=mirrored)
    number = float("nan") if epsilon == "auto" else float(epsilon)
    squared = feature_metric != "euclidean"
    # spaces of the second list follow those of the first
    i, j = asked.i, asked.j if alone else asked.j + sizes[0]
    # one pair may be polished where another cannot be: all are, or none
    sharp = questions.read_sharpening(
        regularization, polish, wanted.repeated(len(i)), spaces, (i.numpy(), j.numpy())
    )
    shared = SharedOptions(
        float(weights[0]), number, squared, n_init, search, rules, where, sharp.alike()
    )
    job = make_job(spaces, shared)
    jobs = 1 if n_jobs is None else n_jobs
    if ranks is None:
        found = compute_pairs(job, i, j, jobs, resume, shown=progress)
    else:
        with together(ranks):
            found = compute_together(job, i, j, jobs, ranks, shown=progress)
    warn_of_failures(
        found, "pairs", lambda k: f"{int(i[k])} and {int(j[k]) - (0 if alone else sizes[0])}"
    )
    numbers = found.value_quad + found.value_linear
    values = asked.values(numbers if output == "value" else getattr(found, output))
    in_numpy = without_tensors(Xs, Ys, D_X, D_Y, a, b, features)
    return to_numpy(values) if in_numpy else values


class _Pairs(NamedTuple):
    """Pairs to compute, each once, and where their numbers go."""

    i: Tensor
    j: Tensor
    shape: tuple[int, int]  # of the matrix of all pairs
    mirrored: bool  # whether (i, j) is also (j, i)
    asked: Tensor | None = None  # where the pairs that were asked for are among these

    @classmethod
    def all(cls, rows: int, columns: int, *, mirrored: bool) -> "_Pairs":
        """List all pairs."""
        if mirrored:
            i, j = torch.triu_indices(rows, rows, device="cpu")
        else:
            i, j = (
                torch.cartesian_prod(
                    torch.arange(rows, device="cpu"), torch.arange(columns, device="cpu")
                )
                .view(-1, 2)
                .T
            )
        return cls(i, j, (rows, columns), mirrored)

    @classmethod
    def some(cls, pairs: Any, rows: int, columns: int, *, mirrored: bool) -> "_Pairs":
        """Read the pairs that were asked for."""
        table = to_tensor("pairs", pairs).cpu()
        not_places = table.dtype.is_floating_point or table.dtype == torch.bool
        if table.ndim != 2 or table.shape[1] != 2 or not_places:
            raise InvalidInputError(
                f"`pairs` must be integers of shape (K, 2); got {tuple(table.shape)}, "
                f"{table.dtype}."
            )
        table = table.long()
        most = torch.tensor([rows, columns], device="cpu")
        if bool(((table < 0) | (table >= most)).any()):
            raise InvalidInputError(
                f"`pairs` must be places in lists of {rows} and {columns} spaces; they reach from "
                f"{int(table.min())} to {int(table.max())}."
            )
        if mirrored:
            table = table.sort(1).values
        distinct, asked = table.unique(dim=0, return_inverse=True)
        return cls(distinct[:, 0], distinct[:, 1], (rows, columns), mirrored, asked)

    def values(self, numbers: Tensor) -> Tensor:
        """Arrange the numbers of the pairs as they were asked for."""
        if self.asked is not None:
            return numbers[self.asked]
        matrix = torch.empty(self.shape, dtype=torch.float64, device="cpu")
        matrix[self.i, self.j] = numbers
        if self.mirrored:
            matrix[self.j, self.i] = numbers
        return matrix


def _lists(*passed: tuple[str, Any, Any]) -> list[Listed]:
    """Read one or two lists of spaces, none of them empty."""
    lists = [Listed.of(*each) for each in passed]
    for (name, _, _), listed in zip(passed, lists, strict=True):
        if not listed.items:
            raise InvalidInputError(f"`{name}s` has no spaces.")
    return lists


def _is_mirrored(
    symmetric: bool | Literal["auto"], wanted: questions.Wanted, *, alone: bool
) -> bool:
    """Whether (i, j) is also (j, i); refuse to take it so where it is not."""
    if symmetric is True and not alone:
        raise InvalidInputError(
            "symmetric=True computes half of a matrix, and Ys is another list. Leave Ys out."
        )
    penalties = wanted.penalties
    alike = penalties is None or bool(penalties[0, 0] == penalties[0, 1])
    if symmetric is True and not alike:
        raise InvalidInputError(
            "symmetric=True needs the same `unbalanced` for both sides. Leave `symmetric` out."
        )
    return alone and symmetric is not False and alike


def _by_name(name: str, lists: list[Listed]) -> Any:
    """Compute features by name, those of the second list divided as those of the first."""
    spaces = [
        (f"{listed.name.removeprefix('D_')}[{place}]", *sides)
        for listed in lists
        for place, item in enumerate(listed.items)
        for sides in [(None, item) if listed.are_tables else (item, None)]
    ]
    found, _ = features_of_all(name, spaces, "lists of arrays")
    count = len(lists[0].items)
    return found if len(lists) == 1 else (found[:count], found[count:])


def _read(
    lists: list[Listed],
    weights: tuple[Any, Any],
    features: Any,
    measure: Measure,
    device: torch.device,
) -> list[Space]:
    """Read all spaces, those of the second list after those of the first."""
    paired = isinstance(features, (tuple, list)) and len(features) == 2
    if len(lists) == 2 and features is not None and not paired:
        raise InvalidInputError("`features` must be a pair of lists where there are Xs and Ys.")
    parts = (features, None) if len(lists) == 1 or features is None else tuple(features)
    spaces: list[Space] = []
    with torch.no_grad():
        for place, listed in enumerate(lists):
            spaces += read_spaces(listed, weights[place], parts[place], measure, place, device)
    check_columns(spaces)
    return spaces
