"""Numbers of many pairs of spaces: in chunks, resumable, on all cores."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._batch.stopping import Rules
from torchgw._boundary.archive import read_archive, write_archive
from torchgw._boundary.cache import content_key
from torchgw._errors import InvalidInputError
from torchgw._many.questions import Questions, Relaxations, Sharpening
from torchgw._many.shelves import Shelves
from torchgw._many.solver import Numbers, solve_questions
from torchgw._many.spaces import Space
from torchgw._tensors.ranks import Ranks
from torchgw.distances.geodesics import progress_bar

# Seconds of a chunk, problems of the first chunk, and of any. A chunk is lost when the process is
# killed; in a short chunk the engine waits for the last problems. [L396]
_CHUNK_SECONDS = 15.0
_FIRST_CHUNK, _LARGEST_CHUNK = 256, 2**17
# Seconds between two writes of the file that a matrix is resumed from. [L396]
_WRITE_SECONDS = 20.0


class SharedOptions(NamedTuple):
    """Options that all pairs share."""

    alpha: float
    epsilon: float
    squared: bool
    n_init: int | None
    rules: Rules
    device: torch.device
    marginals: Relaxations  # of each pair, one for all
    sharpening: Sharpening  # likewise


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
    *plain, rules, device, marginals, sharpening = options
    limits = (None if part is None else tuple(part.flatten()) for part in (*marginals, *sharpening))
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
    bar = progress_bar(len(order), "torchgw", " pairs", shown=shown, done=done, leave=True)
    with _workers(n_jobs) as (together, run), bar as advance:
        size, at = _FIRST_CHUNK, 0
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
            if resume is not None and (now - written >= _WRITE_SECONDS or at == len(left)):
                write_archive(resume, {"pairwise": key}, {"numbers": table})
                written = now
            wanted = size * _CHUNK_SECONDS / max(now - started, 1e-3)
            size = int(min(max(16, wanted), 4 * size, _LARGEST_CHUNK))
    return Numbers.of_table(torch.from_numpy(table.T))


def compute_together(
    job: Job, i: Tensor, j: Tensor, n_jobs: int, ranks: Ranks, *, shown: bool
) -> Numbers:
    """Compute a share of the pairs, and receive those of the other processes."""
    ranks.agree("the start of a hash of spaces and options", [int(job.key[:12], 16)])

    def compute(mine: Tensor) -> Tensor:
        shown_here = shown and ranks.rank == 0
        found = compute_pairs(job, i[mine], j[mine], n_jobs, None, shown=shown_here)
        return found.table().to(ranks.device)

    empty = Numbers.empty(0, ranks.device).table()
    return Numbers.of_table(ranks.dealt(len(i), compute, empty).cpu())


def _solve_chunk(job: Job, i: NDArray[np.int64], j: NDArray[np.int64]) -> NDArray[np.float64]:
    """Solve some pairs; return their numbers, (9, k)."""
    kept = _shelves_of(job.key)
    if not kept:
        kept.append(Shelves(list(_spaces_of(job)), searched=job.options.n_init is None))
    alpha, epsilon, squared, n_init, rules, device, marginals, sharpening = job.options
    one = np.ones(len(i))
    asked = Questions(
        kept[0], i, j, alpha * one, epsilon * one, squared=squared, n_init=n_init, rules=rules,
        marginals=marginals.repeated(len(i)), sharpening=sharpening.repeated(len(i)),
    )  # fmt: skip
    found = solve_questions(asked, device)
    return found.table().T.cpu().numpy()


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
