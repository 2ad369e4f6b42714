"""CUDA graphs: the launches of a function are recorded once, and repeated by a single call.

On a small problem Python and the driver take longer to launch a kernel than the device takes to
run it. A graph keeps the launches, the addresses that they read and write, and, if it is told of
the generator, the place in its random numbers: a replay draws what a call would have drawn.
"""

import gc
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchgw._tensors.operations import clone, copy, tensors_of

T = TypeVar("T")
logger = logging.getLogger(__name__)

# PyTorch can capture one graph at a time.
_capturing = threading.Lock()
# Pools that PyTorch still records into, as a capture has failed: it refuses their next one.
_broken = set[Any]()
# Captures of nothing that are tried. A choice.
_TRIES = 100
# Bytes of what a function reads up to which it is captured. Beyond, it takes as long as its
# launches, and graphs keep copies of their own; so do those that are kept from solve to solve.
# [L75] [L82] [L85]
CAPTURED_BYTES = 2**25
# Kinds of problems whose graphs are kept from solve to solve, in each memory. [L88]
_KEPT = 8


class GraphMemory(NamedTuple):
    """Memory and a stream that graphs of one solve share, and no other solve meanwhile."""

    # cuBLAS has a workspace for each stream: graphs that are replayed side by side must not have
    # been captured on the same one.

    stream: torch.cuda.Stream
    pool: Any  # from graph_pool_handle, whose type is private to torch
    keeper: torch.cuda.CUDAGraph  # an empty graph that keeps the pool alive
    kept: OrderedDict[Hashable, dict[str, Any]]  # by kind of problem, the latest last

    @classmethod
    def on(cls, device: torch.device) -> "GraphMemory":
        """Make memory of its own."""
        stream, keeper = torch.cuda.Stream(device), None
        while keeper is None:
            pool = torch.cuda.graph_pool_handle()
            keeper = capture(lambda: torch.zeros(1, device=device), stream, pool=pool)
        return cls(stream, pool, keeper, OrderedDict())

    @property
    def is_broken(self) -> bool:
        """Whether a capture in it has failed, so that there can be no other."""
        return self.pool in _broken

    def recall(self, kind: Hashable) -> dict[str, Any]:
        """Find what is kept for a kind of problem, to be added to; the oldest kinds go."""
        # tensors that were made in inference mode may not be written to outside
        kind = torch.is_inference_mode_enabled(), kind
        known = self.kept.setdefault(kind, {})
        self.kept.move_to_end(kind)
        while len(self.kept) > _KEPT:
            self.kept.popitem(last=False)
        return known


class _EndedError(RuntimeError):
    """The driver has ended a capture, as another thread did what no capture allows."""


def capture(
    function: Callable[[], object],
    stream: torch.cuda.Stream,
    *,
    pool: Any = None,
    generator: torch.Generator | None = None,
) -> torch.cuda.CUDAGraph | None:
    """Record what a function launches; nothing is run. ``None`` if other threads end it."""
    # The function must have run before, as compilers and libraries do on their first call what a
    # capture does not allow, and must read nothing back from the device. A capture ends too where
    # another thread waits for the whole device. [L1880]
    current = torch.cuda.current_stream(stream.device)
    # many memories share a stream, for which nothing may wait while it is recorded
    with _capturing, torch.cuda.stream(stream):
        # each thread has a handle of cuBLAS, which it may not make while it records
        torch.cuda.current_blas_handle()
        stream.wait_stream(current)
        # a collection in the midst of it may destroy other graphs, which the driver does not allow
        collecting = gc.isenabled()
        gc.disable()
        try:
            graph = _record(function, pool, generator)
        except _EndedError as error:
            logger.debug("a capture has ended early: %s", error)
            _broken.add(pool)
            _reset(generator)
            return None
        except BaseException:
            _broken.add(pool)
            raise
        finally:
            if collecting:
                gc.enable()
        # PyTorch has set the generator's seed and offset on the device back, there and not yet
        # here: a replay that sets them first would draw from the beginning
        current.wait_stream(stream)
    return graph


def _record(
    function: Callable[[], object], pool: Any, generator: torch.Generator | None
) -> torch.cuda.CUDAGraph:
    """Record what a function launches on the current stream."""
    # torch.cuda.graph would also synchronise and give all cached memory back
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        # it keeps seed and offset on the current device
        graph.register_generator_state(generator)
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        function()
    finally:
        try:
            graph.capture_end()
        except RuntimeError as error:
            raise _EndedError(str(error)) from error
    return graph


def _reset(generator: torch.Generator | None) -> None:
    """Let generators draw again, the user's too, which PyTorch takes to be recorded still."""
    # a capture of nothing takes so little time that few of them end early
    for _ in range(_TRIES):
        with suppress(_EndedError):
            _record(lambda: None, torch.cuda.graph_pool_handle(), generator)
            return


class Captured:
    """A function of tensors that is replayed from its second call on."""

    # It takes and returns tensors and named tuples of them, reads nothing back from the device and
    # changes nothing but the generator that it may draw from. The shapes are those of the second
    # call; with others the function is called. What it returns is overwritten by the next call. The
    # first in_place arguments are read where the second call finds them, such as the results of
    # another graph. The others are copied, and so are these if they lie elsewhere later.

    def __init__(
        self,
        function: Callable[..., Any],
        memory: GraphMemory,
        generator: torch.Generator | None = None,
        in_place: int = 0,
    ) -> None:
        self._function, self._memory, self._generator = function, memory, generator
        self._in_place = in_place
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._arguments: tuple[Any, ...] = ()
        self._read: tuple[Tensor, ...] = ()  # of the arguments
        self._result: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Compute function(*arguments)."""
        if not self._warm:
            self._warm = True
            return self._function(*arguments)
        if self._graph is None:
            count = self._in_place
            copies = (clone(argument) for argument in arguments[count:])
            self._arguments = (*arguments[:count], *copies)
            self._read = tensors_of(self._arguments)
            stream, pool, *_ = self._memory
            if not self._memory.is_broken:
                self._graph = capture(self._record, stream, pool=pool, generator=self._generator)
            if self._graph is None:
                return self._function(*arguments)
        else:
            pairs = list(zip(self._read, tensors_of(arguments), strict=True))
            if any(ours.shape != given.shape for ours, given in pairs):
                return self._function(*arguments)
            copy([pair for pair in pairs if pair[0] is not pair[1]])
        self._graph.replay()
        return self._result

    def _record(self) -> None:
        self._result = self._function(*self._arguments)


class Replayer:
    """Calls functions by name, and replays them in later solves of problems of the same kind."""

    # The kind is everything that the functions depend on besides their tensors. The functions of
    # one kind of problem share memory with no other solve while this lives. The first solve of a
    # kind calls them, the second records them. Graphs of the latest few kinds are kept. A function
    # may return tensors that lie in the memory of functions recorded before it. So a result may be
    # passed to functions that were recorded later, and is overwritten by any other call.

    def __init__(self, device: torch.device, kind: Hashable) -> None:
        self._memory = borrow_memory(self, device)
        self._functions = self._memory.recall(kind)

    def __call__(
        self, name: str, function: Callable[..., T], *arguments: Any, in_place: int = 0
    ) -> T:
        """Compute function(*arguments)."""
        if name not in self._functions:
            self._functions[name] = Captured(function, self._memory, in_place=in_place)
        return self._functions[name](*arguments)

    def hold(self, name: str, item: T) -> T:
        """Copy tensors to where those of earlier solves lay, to be passed in place."""
        if name in self._functions:
            copy(list(zip(*map(tensors_of, (self._functions[name], item)), strict=True)))
        else:
            self._functions[name] = clone(item)
        return self._functions[name]


class Idle(Generic[T]):
    """Keeps items that are not in use, by key, for the next user; the latest goes out first."""

    # Whoever uses an item owns it, so that users of one kind, also in other threads, do not mix.
    # The key says what the item is good for, and names the stream, on which use follows use. Beyond
    # ``most`` bytes altogether the longest unused items go.

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._entries: list[tuple[Hashable, T, int]] = []
        # re-entrant, as a garbage collection inside may put something back
        self._lock = threading.RLock()

    def take(self, key: Hashable) -> T | None:
        """Hand an item out, if one of this key waits."""
        with self._lock:
            for place, (known, item, _) in reversed(list(enumerate(self._entries))):
                if known == key:
                    del self._entries[place]
                    return item
        return None

    def put(self, key: Hashable, item: T, size: int = 0) -> None:
        """Take an item back, of so many bytes."""
        with self._lock:
            self._entries.append((key, item, size))
            while self._most is not None and sum(kept[2] for kept in self._entries) > self._most:
                del self._entries[0]


# As much memory as the largest solve needed, once for each thread, until the process ends.
_idle = Idle[GraphMemory]()


def borrow_memory(owner: object, device: torch.device) -> GraphMemory:
    """Lend memory that goes back once its owner, whose graphs use it, is gone."""
    key = device, torch.cuda.current_stream(device).cuda_stream
    memory = _idle.take(key) or GraphMemory.on(device)
    weakref.finalize(owner, _give_back, key, memory).atexit = False
    return memory


def _give_back(key: Hashable, memory: GraphMemory) -> None:
    """Keep memory for the next solve, unless a capture in it has failed."""
    if not memory.is_broken:
        _idle.put(key, memory)
