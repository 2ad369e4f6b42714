"""Kernels that are compiled beside other work, before a solve launches them.

With an empty cache of compiled kernels most of a first solve is compiling, one kernel after the
other. Which kernels a solve will launch is known from its size; `kernels.jsonl` lists what solves
of a few sizes launched, as Triton specialises it. Threads compile those while the solve reads its
input, finds neighbours and imports what it needs. Where a launch needs a kernel that is being
compiled, it waits for that one; one that no thread has begun is compiled by the launch itself. What
only factors of another rank need is compiled once a solve is over.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from torchgw._tensors.machine import most_points, processors

logger = logging.getLogger(__name__)

# What solves of some sizes launched: one variant of a kernel a line, written by
# ``python -m benchmarks coldstart --record``.
LIST = Path(__file__).with_name("kernels.jsonl")
# Threads that compile; as many cores are left for the solve. [L461]
_THREADS = 8
# A thread whose own time exceeds this many seconds has compiled a kernel. Reading one from the
# cache takes less; only one thread reads, since several would take turns with the solve under
# Python's lock. [L1021]
COMPILING = 0.15
_DTYPES: Mapping[str, torch.dtype] = {
    "*fp64": torch.float64, "*fp32": torch.float32, "*fp16": torch.float16, "*bf16": torch.bfloat16,
    "*i64": torch.int64, "*i32": torch.int32, "*i16": torch.int16, "*i8": torch.int8,
    "*u8": torch.uint8, "*i1": torch.bool,
}  # fmt: skip


class Variant(NamedTuple):
    """A kernel as it is compiled for some arguments."""

    kernel: str  # "module:name"
    arguments: Mapping[str, str]  # type of each; ":16" behind it where it is a multiple of 16
    constants: Mapping[str, Any]  # by name
    options: Mapping[str, Any]  # of the launch, such as num_warps
    sizes: Sequence[int]  # points of the larger side of solves that launched it
    distances: Sequence[str] = ()  # names of the distances that need it; none if all do

    @property
    def rank(self) -> int:
        """Padded rank of the factors that it is for; zero if it is for all, or for stored costs."""
        return max(0, int(self.constants.get("RANK", 0)))

    def compile(self) -> None:
        """Compile it, and load it on the current device."""
        module, name = self.kernel.split(":")
        given = {name: _stand_in(kind) for name, kind in self.arguments.items()}
        kernel = getattr(import_module(module), name)
        _load(self.kernel, kernel.warmup(grid=(1,), **given, **self.constants, **self.options))

    def serves(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        """Whether a launch with these arguments may be of this variant."""
        known = {**self.constants, **self.options}
        # numbers that are no constants may be given by name too
        chosen = options.keys() - self.arguments.keys()
        if any(known.get(name) != options[name] for name in chosen):
            return False
        pointers = [kind.split(":")[0] for kind in self.arguments.values() if kind[0] == "*"]
        dtypes = [one.dtype for one in arguments if isinstance(one, torch.Tensor)]
        return dtypes == [_DTYPES.get(pointer) for pointer in pointers]


class _Launch(NamedTuple):
    """A launch that only compiles its kernel."""

    kernel: str
    function: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    def compile(self) -> None:
        """Compile it, and load it on the current device."""
        _load(self.kernel, self.function.warmup(*self.arguments, grid=(1,), **self.options))

    def serves(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        """Whether a launch with these arguments is of this variant."""
        mine, its = (
            [one.dtype for one in some if isinstance(one, torch.Tensor)]
            for some in (self.arguments, arguments)
        )
        return mine == its and self.options == options


def _load(kernel: str, compiled: Any) -> None:
    """Load a kernel on the current device, with the function that launches it."""
    # That function is compiled when it is first looked up, and serves all variants of a kernel.
    with _launchers[kernel]:
        compiled.run  # noqa: B018


class _Pointer:
    """A stand-in for a tensor: what Triton reads of one when it compiles."""

    def __init__(self, dtype: torch.dtype, *, aligned: bool) -> None:
        self.dtype = dtype
        self._address = 0 if aligned else 8

    def data_ptr(self) -> int:
        """Give an address that is a multiple of 16 or not."""
        return self._address


def _stand_in(kind: str) -> _Pointer | float:
    """Make an argument that Triton takes for one of this type."""
    name, _, multiple = kind.partition(":")
    if name in _DTYPES:
        return _Pointer(_DTYPES[name], aligned=bool(multiple))
    if name == "fp32":
        return 0.5
    # a number that is neither 1 nor, unless that is asked for, a multiple of 16, and as large as
    # the type needs
    small = {"i32": 16, "i64": 2**33, "u64": 2**63}[name]
    return small if multiple else small + 3


class _Task:
    """A variant that is to be compiled, once."""

    def __init__(self, variant: Variant | _Launch) -> None:
        self.variant = variant
        self.done = threading.Event()


_lock, _beginning = threading.Lock(), threading.Lock()
_launchers: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_waiting: list[_Task] = []  # in the order in which solves launch them
_begun: list[_Task] = []
_later: list[tuple[torch.device, Variant]] = []  # for factors of a rank that no solve has had
_compiled = threading.Event()  # whether a kernel was not in the cache
_asked: set[tuple[torch.device, int]] = set()  # by place in the list
_waited = threading.local()  # seconds of this thread
_collected = threading.local()  # launches that this thread collects and does not make


@cache
def variants() -> tuple[Variant, ...]:
    """Read the list."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return tuple(Variant(**json.loads(line)) for line in lines)


def compile_beside(device: torch.device, distances: Any, *given: Any) -> None:
    """Begin to compile, once, what a solve launches on a GPU by these distances and inputs."""
    if not _threads(device):
        return
    most = most_points(given)
    recorded = sorted({size for variant in variants() for size in variant.sizes})
    if not most or not recorded:
        return
    # the smallest recorded solve that is at least half as large, else the largest
    size = next((one for one in recorded if most <= 2 * one), recorded[-1])
    sides = distances if isinstance(distances, (tuple, list)) else (distances,)
    names = {name for name in sides if isinstance(name, str)}
    wanted = {
        place: variant
        for place, variant in enumerate(variants())
        if size in variant.sizes
        and (not variant.distances or not names.isdisjoint(variant.distances))
    }
    _compile_listed(device, wanted)


def has_compiled(device: torch.device) -> bool:
    """Whether nothing is compiled for a device, or has been before on this machine."""
    # a file that `_hash` writes as threads begin
    return not _threads(device) or (not _begun and any(_cache().glob("torchgw-*")))


def probe_beside(device: torch.device) -> None:
    """Start Triton, and begin to compile, once, the probe that tells whether it runs on a GPU."""
    if _threads(device):
        listed = enumerate(variants())
        probe = {place: each for place, each in listed if each.kernel.endswith(":_check_kernel")}
        _compile_listed(device, probe)


def _compile_listed(device: torch.device, wanted: Mapping[int, Variant]) -> None:
    """Begin to compile variants, by their places in the list, that have not been asked for."""
    with _lock:
        new = [variant for place, variant in wanted.items() if (device, place) not in _asked]
        _asked.update((device, place) for place in wanted)
        # kernels of distances come first, as in every solve
        new.sort(key=lambda one: not one.distances)
        # the list has kernels for two ranks, of which a solve needs one [L1215]
        _later.extend((device, variant) for variant in new if variant.rank)
    _begin_to_compile(device, [variant for variant in new if not variant.rank])


def compile_together(device: torch.device, work: Callable[[], object]) -> Sequence[threading.Event]:
    """Begin to compile the kernels that work launches, side by side; none of them is launched.

    Tells when each of them is compiled; nothing where none has to be.
    """
    if not _threads(device):
        return ()
    launches: list[_Launch] = []
    _collected.launches = launches
    try:
        work()
    finally:
        del _collected.launches
    told, new = list[threading.Event](), list[_Launch]()
    for one in launches:
        # those that this or other work launches twice are compiled once
        with _lock:
            begun = _tasks_of(one.kernel, one.arguments, one.options)
        told += [task.done for task in begun]
        if not begun and not any(
            one.kernel == other.kernel and other.serves(one.arguments, one.options) for other in new
        ):
            new.append(one)
    return [*told, *_begin_to_compile(device, new)]


def compile_for_rank(device: torch.device, rank: int) -> None:
    """Begin to compile, once, what is listed for costs in factors of this rank."""
    if not rank or not _later:
        return
    padded = min((one.rank for one in variants() if one.rank >= rank), default=0)
    with _lock:
        wanted = [one for one in _later if one[0] == device and one[1].rank == padded]
        _later[:] = [one for one in _later if one not in wanted]
    _begin_to_compile(device, [variant for _, variant in wanted])


def compile_rest(device: torch.device) -> None:
    """Begin to compile what the next solve may need, if its factors are of another rank."""
    # after a solve, which this would hold up; kernels that are in the cache are read when needed
    if not _later or not _compiled.is_set():
        return
    with _lock:
        rest = [variant for place, variant in _later if place == device]
        _later[:] = [one for one in _later if one[0] != device]
    _begin_to_compile(device, rest)


def wait_for_all() -> None:
    """Wait until all that was begun is compiled."""
    with _lock:
        tasks = [*_begun, *_waiting]
    for task in tasks:
        task.done.wait()


def _threads(device: torch.device) -> int:
    """Count the threads that compile for a device; none where nothing is compiled."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if device.type != "cuda" or interpreted or find_spec("triton") is None:
        return 0
    return min(_THREADS, processors() // 2)


def _begin_to_compile(
    device: torch.device, new: Sequence[Variant | _Launch]
) -> Sequence[threading.Event]:
    """Start threads that compile, in this order; they tell when each is compiled."""
    tasks = [*map(_Task, new)]
    with _lock:
        _waiting.extend(tasks)
    if new:
        _start(device, min(_threads(device), len(new)) - 1)
    return [task.done for task in tasks]


def ready(kernel: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Wait for a kernel that a thread is compiling; tell whether to launch it."""
    launches = getattr(_collected, "launches", None)
    if launches is None and not _waiting and not _begun:
        return True
    name = f"{kernel.__module__}:{kernel.__name__}"
    if launches is not None:
        launches.append(_Launch(name, kernel, arguments, options))
        return False
    with _lock:
        alike = _tasks_of(name, arguments, options)
        for task in alike:
            if task in _waiting:
                # the launch compiles it sooner than a thread that is still busy
                _waiting.remove(task)
                task.done.set()
    for task in alike:
        task.done.wait()
    return True


def _tasks_of(
    kernel: str, arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> Sequence[_Task]:
    """List what compiles a launch, or will."""
    return [
        task
        for task in (*_waiting, *_begun)
        if task.variant.kernel == kernel and task.variant.serves(arguments, options)
    ]


@cache
def _begin() -> bool:
    """Prepare Triton for its first kernel, once; tell whether it has run here before."""
    # It hashes its own files, a third of a second, and builds what loads kernels.
    runtime, files = import_module("triton.runtime"), import_module("triton.runtime.cache")
    seen: list[bool] = []
    hashing = threading.Thread(target=lambda: seen.append(_hash(files)), name="torchgw-hash")
    hashing.start()
    try:
        runtime.driver.active.get_current_target()
    finally:
        hashing.join()
    return seen == [True]


def _hash(files: Any) -> bool:
    """Hash Triton's own files; tell whether they have been seen before, as they are now."""
    # The hash is kept where Triton keeps kernels, under the sizes and times of those files.
    if not hasattr(files, "triton_key"):
        return False
    root = Path(files.__file__).parents[1]
    looked_at = sorted([*root.rglob("*.py"), *root.glob("_C/libtriton*")])
    seen = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in looked_at]
    name = hashlib.sha256(repr(seen).encode()).hexdigest()
    kept = _cache() / f"torchgw-{name}"
    try:
        known = kept.read_text(encoding="utf-8")
    except OSError:
        known = files.triton_key()
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            new = kept.with_suffix(f".{os.getpid()}")
            new.write_text(known, encoding="utf-8")
            new.replace(kept)
        return False
    files.triton_key = lambda: known
    return True


def _cache() -> Path:
    """Find where Triton keeps kernels."""
    return Path(import_module("triton.knobs").cache.dir)


def _start(device: torch.device, others: int) -> None:
    """Start a thread that compiles, and starts so many others."""
    threading.Thread(target=_work, args=(device, others), name="torchgw-compile").start()


def _work(device: torch.device, others: int) -> None:
    """Compile what waits, beside other threads, until nothing does or the program ends."""
    torch.cuda.set_device(device)
    spent = 0.0
    while True:
        with _lock:
            if not _waiting or not threading.main_thread().is_alive():
                for task in _waiting:
                    # nobody waits for what launches compile themselves
                    task.done.set()
                _waiting.clear()
                return
            task = _waiting.pop(0)
            _begun.append(task)
        try:
            with _beginning:
                seen = _begin()
            if others and (not seen or spent > COMPILING):
                # each thread starts the next one: to start all of them would hold the solve up
                _start(device, others - 1)
                others = 0
            spent = -time.thread_time()
            task.variant.compile()
            spent += time.thread_time()
            if spent > COMPILING:
                _compiled.set()
        except Exception as error:  # noqa: BLE001
            # the launch compiles it again, and raises the error
            logger.info("%s could not be compiled ahead: %s", task.variant.kernel, error)
        finally:
            with _lock:
                _begun.remove(task)
            task.done.set()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first argument, a tensor."""
    begun = perf_counter()
    if not ready(kernel, arguments, options):
        return
    told = logger.isEnabledFor(logging.INFO)
    before = _known(kernel) if told else 0
    # Triton itself launches on the current device, wherever the tensors are
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **options)
    seconds = perf_counter() - begun
    if seconds > COMPILING:
        _waited.seconds = waited() + seconds
    if told and _known(kernel) > before:
        logger.info(
            "a launch waited %.2f s for %s, which was compiled or read from the cache on disk",
            seconds, kernel.__name__,
        )  # fmt: skip


def waited() -> float:
    """Tell how many seconds this thread has waited for kernels that were compiled."""
    return getattr(_waited, "seconds", 0.0)


def _known(kernel: Any) -> int:
    """Count the variants of a kernel that this process has loaded; none where it is interpreted."""
    return sum(len(loaded) for loaded, *_ in getattr(kernel, "device_caches", {}).values())
