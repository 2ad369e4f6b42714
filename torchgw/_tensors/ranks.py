"""Processes that share one solve: which rows each computes, and how all are gathered.

Every rank holds all inputs and the whole of each result. Rows are cut into pieces that do not
depend on how many ranks there are, and a piece is computed by one rank, alone: so a result has the
same bits for any number of them. Nothing is ever added up over ranks.
"""

import io
import os
import pickle
import platform
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchgw._errors import InvalidInputError, RankError, UnsupportedError, warn_user

Distributed = bool | Literal["auto"]

# Pieces that the rows of a problem are cut into, and rows of a piece at least. A choice: up to 256
# ranks have work, and one of eight has 3% more of it than another at most. [L417]
_PIECES = 256
_LEAST_ROWS = 32
# Seconds that a rank may take to answer when another one is missing, and between two checks for
# missing ranks. A choice. [L417]
_ROLL_CALL = 5.0
_LOOK = 0.5
# An exchange is polled so many times at once, and then with sleeps of so many seconds between. A
# choice. [L417]
_SPIN, _NAP = 200, 1e-4


def pieces(n: int, unit: int = 1) -> list[slice]:
    """Cut n rows into pieces of equal height, a multiple of ``unit``; the last may be shorter."""
    height = max(_LEAST_ROWS, -(-n // _PIECES))
    height = -(-height // unit) * unit
    return [slice(start, min(start + height, n)) for start in range(0, n, height)]


def check_distributed(value: object, **options: object) -> None:
    """Refuse what is neither True nor False nor "auto", and ``options`` that one process needs."""
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "auto"):
        raise InvalidInputError(f"`distributed` must be True, False or 'auto'; got {value!r}.")
    for name, given in options.items():
        if value is not False and given is not None and given is not False:
            raise UnsupportedError(
                f"`distributed={value!r}` cannot share out what `{name}={given!r}` asks for. Pass "
                f"distributed=False, or solve without `{name}` first and pass the result as `init` "
                "to a solve in one process."
            )


def share_inputs(distributed: Distributed, **inputs: Any) -> list[Any]:
    """Give every rank the whole of each input that is a DTensor or that rank 0 alone has."""
    known = {name: _whole(value) for name, value in inputs.items()}
    if distributed is False or not (dist.is_available() and dist.is_initialized()):
        return list(known.values())
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, [name for name, value in known.items() if value is not None])
    for rank, names in enumerate(given):
        more = [name for name in names if name not in given[0]]
        if more:
            raise InvalidInputError(
                f"Rank {rank} passes `{more[0]}`, and rank 0 does not. Pass every input on rank 0, "
                "and the same or None on the others."
            )
    lacking = [name for name in given[0] if any(name not in names for names in given)]
    if lacking:
        first = dist.get_rank() == 0
        box = [[_on_host(known[name]) for name in lacking] if first else None]
        dist.broadcast_object_list(box, 0)
        assert box[0] is not None
        for name, (value, kind) in zip(lacking, box[0], strict=True):
            if not first:
                known[name] = value.to(kind) if kind == "cuda" else value
    return list(known.values())


def _whole(value: Any) -> Any:
    """Gather a DTensor, alone or in a pair; leave all else as it is."""
    if type(value) in (tuple, list):
        return type(value)(map(_whole, value))
    # the module of DTensors is not loaded for others
    gather = getattr(value, "full_tensor", None) if isinstance(value, Tensor) else None
    return value if gather is None else gather()


def _on_host(value: Any) -> tuple[Any, str]:
    """Move a tensor to the host; say where it was."""
    return (value.cpu(), value.device.type) if isinstance(value, Tensor) else (value, "")


def join(distributed: Distributed, device: torch.device) -> "Ranks | None":
    """Find the ranks that share a solve on a device, or None where there is one process alone."""
    if distributed is False:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        if distributed is True:
            raise UnsupportedError(
                "`distributed=True` needs a process group in every process. Start the script with "
                "`torchrun --nproc-per-node N` and call torch.distributed.init_process_group() "
                "before the solve, or pass distributed='auto'."
            )
        return None
    world = dist.group.WORLD
    known = _joined.get(device)
    if known is None or known.world is not world:
        known = _joined[device] = Ranks(world, device)
    return known


class Ranks:
    """The processes of a solve, seen from one of them.

    Making it is a collective call: all processes of the group do so, for their own devices.

    Attributes
    ----------
    rank, size : int
        The number of this process, and of all.
    """

    def __init__(self, world: Any, device: torch.device) -> None:
        self.world = world
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._store = _open_store(self.rank, self.size)
        # small numbers on the host, on connections of their own
        self._control = dist.new_group(backend="gloo")
        self._data = self._control
        self._check_devices(device)
        if device.type == "cuda":
            self._data = dist.new_group(backend="nccl")

    def _check_devices(self, device: torch.device) -> None:
        """Refuse devices of different kinds, and one GPU for two ranks."""
        mine = (platform.node(), str(device)) if device.type == "cuda" else device.type
        places: list[Any] = [None] * self.size
        dist.all_gather_object(places, mine, group=self._control)
        kinds = {isinstance(place, str) for place in places}
        if len(kinds) > 1 or (device.type == "cuda" and len(set(places)) < self.size):
            raise InvalidInputError(
                f"Each rank needs a GPU of its own, or all compute on the CPU; got {places}. Call "
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) in each process, and start "
                "no more of them than there are GPUs."
            )

    def own(self, count: int, work: Sequence[int] | None = None) -> list[range]:
        """Share pieces among the ranks, in order, so that the most ``work`` of one is least."""
        done = [0, *accumulate([1] * count if work is None else work)]
        least, most = 0, done[-1]
        while least < most:
            middle = (least + most) // 2
            if self._fill(done, middle)[-1] < count:
                least = middle + 1
            else:
                most = middle
        ends = self._fill(done, most)
        return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def _fill(self, done: Sequence[int], most: int) -> list[int]:
        """Give each rank pieces of at most ``most`` work in all; return where each share ends."""
        ends = [0]
        for _ in range(self.size):
            ends.append(bisect_right(done, done[ends[-1]] + most) - 1)
        return ends[1:]

    def cut(self, n: int) -> tuple[list[slice], list[int]]:
        """Cut n rows into pieces: those of this rank, and the number of rows of each rank."""
        parts = pieces(n)
        owned = self.own(len(parts))
        counts = [sum(parts[k].stop - parts[k].start for k in own) for own in owned]
        return [parts[k] for k in owned[self.rank]], counts

    def in_pieces(self, n: int, compute: Callable[[slice], Tensor], empty: Tensor) -> Tensor:
        """Compute n rows, (n, ...), each rank its own pieces; ``empty`` is a result of no rows."""
        own, counts = self.cut(n)
        return self.gather(torch.cat([empty, *map(compute, own)]), counts)

    def at_once(self, n: int, compute: Callable[[slice], Tensor], empty: Tensor) -> Tensor:
        """Compute n rows, (n, ...), each rank a share, where rows depend on no others."""
        ends = [n * rank // self.size for rank in range(self.size + 1)]
        begin, end = ends[self.rank], ends[self.rank + 1]
        counts = [after - before for before, after in zip(ends, ends[1:], strict=False)]
        return self.gather(compute(slice(begin, end)) if end > begin else empty, counts)

    def dealt(self, count: int, compute: Callable[[Tensor], Tensor], empty: Tensor) -> Tensor:
        """Compute rows of ``count`` things, (count, ...), dealt out like cards."""
        hands = [torch.arange(count, device="cpu")[rank :: self.size] for rank in range(self.size)]
        own = compute(hands[self.rank]) if len(hands[self.rank]) else empty
        rows = self.gather(own, [len(hand) for hand in hands])
        return torch.empty_like(rows).index_copy_(0, torch.cat(hands).to(rows.device), rows)

    def divide(self, makers: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call makers, each on one rank, and give every rank all results and warnings."""
        made: dict[int, Any] = {}
        for number in range(self.rank, len(makers), self.size):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                thing = makers[number]()
            made[number] = thing, [(str(one.message), one.category) for one in told]
        results = []
        for number in range(len(makers)):
            thing, told = self._from(number % self.size, made.get(number))
            for text, category in told:
                warn_user(text, category)
            results.append(thing)
        return results

    def _from(self, owner: int, thing: Any) -> Any:
        """Give all ranks what the owner has; tensors are sent one by one, the rest as bytes."""
        if self.size == 1:
            return thing
        file, tensors = io.BytesIO(), list[Tensor]()
        if owner == self.rank:
            _Pickler(file, tensors).dump(thing)
        heads = [(part.shape, part.dtype, part.device.type) for part in tensors]
        words = self._words(owner, pickle.dumps((heads, file.getvalue())))
        heads, body = pickle.loads(words)  # noqa: S301 - from a process of the same program
        if owner != self.rank:
            places = {self.device.type: self.device}
            tensors = [
                torch.empty(shape, dtype=dtype, device=places.get(kind, kind))
                for shape, dtype, kind in heads
            ]
        for part in tensors:
            self._send(owner, part)
        return thing if owner == self.rank else _Unpickler(io.BytesIO(body), tensors).load()

    def _words(self, owner: int, words: bytes) -> bytes:
        """Give all ranks the bytes that the owner has."""
        count = torch.tensor([len(words)], device="cpu")
        self._send(owner, count)
        table = torch.empty(int(count), dtype=torch.uint8, device="cpu")
        if owner == self.rank:
            table.copy_(torch.frombuffer(bytearray(words), dtype=torch.uint8))
        self._send(owner, table)
        return table.numpy().tobytes()

    def _send(self, owner: int, part: Tensor) -> None:
        """Overwrite a tensor of the others by the owner's."""
        whole, group = part.contiguous(), self._data if part.is_cuda else self._control
        with self._watched():
            self._finish(dist.broadcast(whole, owner, group=group, async_op=True), part.device)

    def gather(self, own: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Join the rows of all ranks, (counts[rank], ...) each, in the order of the ranks."""
        if self.size == 1:
            return own
        counts = self.counts(len(own)) if counts is None else counts
        mine = own.new_zeros(max(counts), *own.shape[1:])
        mine[: len(own)] = own
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with self._watched():
            self._finish(dist.all_gather(parts, mine, group=self._data, async_op=True), own.device)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def counts(self, own: int) -> list[int]:
        """List what each rank counts."""
        return [int(count) for count in self._numbers([own])[:, 0]]

    def same_seed(self, seed: int) -> int:
        """Return the seed that the first rank has."""
        high, low = self._numbers(divmod(seed, 2**32))[0].tolist()
        return int(high) * 2**32 + int(low)

    def any(self, flag: bool = False) -> bool:
        """Wait for all, notice who is missed, and tell whether a flag is set on one of them."""
        return bool(self._numbers([flag]).any())

    def agree(self, what: str, numbers: Iterable[float]) -> None:
        """Raise on all ranks unless all have the same numbers, bit for bit."""
        table = self._numbers(numbers)
        bits = table.view(torch.int64)
        for rank in range(1, self.size):
            if not torch.equal(bits[rank], bits[0]):
                raise RankError(
                    f"The ranks have come apart: {what} is {table[0].tolist()} on rank 0 and "
                    f"{table[rank].tolist()} on rank {rank}. Every rank needs the same input, "
                    "options, `random_state`, number of threads and kind of machine; a solve of "
                    "its own in each process needs distributed=False."
                )

    def _numbers(self, numbers: Iterable[float]) -> Tensor:
        """Collect a few numbers of every rank, (size, count) float64."""
        mine = torch.tensor([*map(float, numbers)], dtype=torch.float64, device="cpu")
        if self.size == 1:
            return mine[None]
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with self._watched():
            work = dist.all_gather(parts, mine, group=self._control, async_op=True)
            self._finish(work, mine.device)
        return torch.stack(parts)

    def _finish(self, work: Any, device: torch.device) -> None:
        """Wait for an exchange; on the host, look now and then whether a rank is missed."""
        # NCCL is waited for on the device, and has a watchdog of its own
        looks, since = 0, time.monotonic()
        while device.type == "cpu" and not work.is_completed():
            time.sleep(0.0 if looks < _SPIN else _NAP)
            looks += 1
            if time.monotonic() - since > _LOOK:
                since = time.monotonic()
                if self._store.check(["missed"]):
                    raise self._missing()
        work.wait()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Turn the failure of an exchange into an error that names who is missing."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            raise self._missing() from error

    def leave(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""
        _joined.clear()
        try:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self._store.set(f"left/{self.rank}", reason)
            self._store.set("missed", "1")
            if self.rank == 0:
                # the others read the reason here
                time.sleep(3 * _LOOK)
        except RuntimeError:
            # nobody is left to be told
            return

    def _missing(self) -> RankError:
        """Call the roll; name the ranks that do not answer, or have said why they ended."""
        _joined.clear()
        try:
            self._store.set(f"here/{self.rank}", "1")
            self._store.set("missed", "1")
            end = time.monotonic() + _ROLL_CALL
            while not self._store.check(["verdict"]) and time.monotonic() < end:
                absent = [rank for rank in range(self.size) if not self._answered(rank)]
                if not absent:
                    break
                time.sleep(_LOOK / 5)
            if not self._store.check(["verdict"]):
                self._store.set("verdict", self._verdict())
            message = self._store.get("verdict").decode()
            if self.rank == 0:
                time.sleep(3 * _LOOK)
        except RuntimeError:
            # the store lives in the first process
            message = "rank 0 has died, or ended before the others"
        return RankError(
            f"A distributed solve has lost a process: {message}. Ranks are numbered as by "
            "torch.distributed.get_rank(). Start all of them again; with `checkpoint` the solve "
            "goes on from where it was last written."
        )

    def _answered(self, rank: int) -> bool:
        return bool(self._store.check([f"here/{rank}"]) or self._store.check([f"left/{rank}"]))

    def _verdict(self) -> str:
        """Say which ranks are missing, and why as far as they have told."""
        words = []
        for rank in range(self.size):
            if self._store.check([f"left/{rank}"]):
                words.append(f"rank {rank} ended with {self._store.get(f'left/{rank}').decode()}")
            elif not self._store.check([f"here/{rank}"]):
                words.append(f"rank {rank} does not answer (killed, or out of memory)")
        return "; ".join(words) or "an exchange failed, though all ranks answer"


class Alone(Ranks):
    """One process, as the only one of a group."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = 0, 1, device


class _Pickler(pickle.Pickler):
    """Puts tensors aside, into a list."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, thing: Any) -> int | None:
        """Name a tensor by its place in the list."""
        if not isinstance(thing, Tensor):
            return None
        self._tensors.append(thing)
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Takes tensors from a list."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        """Find a tensor by its place."""
        return self._tensors[place]


def _open_store(rank: int, size: int) -> Any:
    """Open a table of words that all ranks read and write, in the first process."""
    table: Any = dist.TCPStore  # type: ignore[attr-defined]
    host, wait = os.environ.get("MASTER_ADDR", "localhost"), timedelta(seconds=60)
    place: list[Any] = [None]
    if rank == 0:
        store = table(host, 0, size, True, wait, wait_for_workers=False)
        place = [store.port]
    dist.broadcast_object_list(place, 0)
    return store if rank == 0 else table(host, place[0], size, False, wait)


@contextmanager
def together(ranks: Ranks | None) -> Iterator[None]:
    """Let no rank wait for one that has left a block by an error of its own."""
    try:
        yield
    except RankError:
        raise
    except BaseException as error:
        if ranks is not None and ranks.size > 1:
            ranks.leave(error)
        raise


# What has been joined, by device: connections are made once.
_joined: dict[torch.device, Ranks] = {}
