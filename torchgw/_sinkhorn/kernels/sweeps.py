"""Sweeps by Triton kernels: their buffers, the order of an iteration, and CUDA graphs."""

import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._sinkhorn.contract import Sweep, softmin_sweep
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.kernels.operands import BLOCK, KernelPlan, padded_size, scale_of
from torchgw._sinkhorn.kernels.softmin import KernelSide, Rule, half_step_
from torchgw._sinkhorn.kernels.stored import StoredKernel, SweepShape
from torchgw._sinkhorn.kernels.vectors import Vectors, begin_, finish_, prepare_
from torchgw._sinkhorn.problem import STRICT, DenseCost, EntropicPlan, LinearProblem
from torchgw._tensors.cuda_graphs import GraphMemory, Idle, Replayer, borrow_memory, capture
from torchgw._tensors.operations import clone
from torchgw._typing import Marginals, Potentials

# A function that updates both sides by the rules given for each; it gets the flag for trouble, and
# the number of the iteration.
Iteration = Callable[[KernelSide, KernelSide, tuple[Rule, Rule], Tensor, int], None]

# Bytes of a kernel up to which sweeps are replayed as graphs. Reading as much takes as long as the
# two launches of an iteration, 50 us, so that larger ones have nothing to gain. What waits for
# another sweeper of its shape holds no more than this altogether, until the process ends. [L59]
_GRAPH_BYTES = 2**28
# Bytes of a cost up to which its kernel is made by the graph of the first sweep, from a copy of the
# cost: to launch what makes it takes longer than to copy so much. [L1240]
_COPIED_BYTES = 2**22
# Powers of two by which potentials may be away from those of a kernel that is not stored: half as
# many as make a sweep fail. [L1608]
_FAR = 14.5


class Workspace:
    """Everything a sweep reads and writes on the device, so that a graph of it can be replayed."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        n, m = shape
        split = padded_size(n)
        length = split + padded_size(m)
        self.sides = slice(0, n), slice(split, split + m)
        # parts of the result: both sides and their padding, twice, and the check
        self.parts = [*2 * [n, split - n, m, length - split - m], 2]
        exact = partial(torch.zeros, dtype=torch.float64, device=device)
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        self.vectors = Vectors(
            scale=exact(1), given=exact(length), origin=exact(length), start=zeros(length),
            weight=zeros(length), feed=zeros(length), scalings=zeros(2, length),
            bad=torch.zeros(1, dtype=torch.int32, device=device), result=exact(2 * length + 2),
            partial=exact(length // BLOCK), split=split,
        )  # fmt: skip
        self.shift = zeros(length)
        # tau and relaxation of each side, relaxed and plain; rows of 16 bytes or more
        self.control = torch.ones(2, 2, 4, dtype=dtype, device=device)
        self._tau, self._relaxation = STRICT, 1.0
        self._factors = self.control[0, :, 1]
        whole = slice(0, split), slice(split, length)
        _, _, _, start, weight, feed, (_, after), *_ = self.vectors
        self.f, self.g = (
            KernelSide(start[both], weight[part], after[part], feed[both])
            for both, part in zip(whole, self.sides, strict=True)
        )
        self.relaxed, self.plain = (
            (Rule(self.shift[self.sides[0]], f[:2]), Rule(self.shift[self.sides[1]], g[:2]))
            for f, g in self.control
        )

    def read(self, potentials: Potentials) -> None:
        """Take the potentials to go on from."""
        for part, potential in zip(self.sides, potentials, strict=True):
            self.vectors.given[part].copy_(potential)

    def prepare(
        self,
        start: EntropicPlan | KernelPlan,
        tau: tuple[float, float],
        rest: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Set what all sweeps of a problem share, whose kernel is the density of ``start``."""
        self.vectors.scale.fill_(scale_of(start.epsilon))
        prepare_(self.vectors, start.marginals, start.potentials, rest)
        if tau != self._tau or tau != STRICT:
            self._tau = tau
            for index, (part, factor) in enumerate(zip(self.sides, tau, strict=True)):
                self.control[:, index, 0] = factor
                self.shift[part] = (factor - 1.0) * self.vectors.scale * self.vectors.origin[part]

    def is_strict(self, tau: tuple[float, float]) -> bool:
        """Whether both marginals of a problem are strict, as those of the last one were."""
        return tau == self._tau == STRICT

    def relax(self, relaxation: float) -> None:
        """Set how far the relaxed iterations move."""
        if relaxation != self._relaxation:
            self._relaxation = relaxation
            self._factors.fill_(relaxation)

    def iterate(self, step: Iteration, relaxed: int, plain: bool) -> None:
        """Run relaxed iterations and a plain one from ``given``; write ``result``."""
        # The next sweep goes on from what the last one led to if that one is plain too, or from
        # before it: it is only read off then.
        vectors = self.vectors
        begin_(vectors)
        for turn in range(relaxed):
            step(self.f, self.g, self.relaxed, vectors.bad, turn)
        before, after = vectors.scalings
        before.copy_(after)
        step(self.f, self.g, self.plain, vectors.bad, relaxed)
        finish_(vectors, plain)


class TritonSweeper:
    """Sweeps of one linear problem, on a workspace."""

    two_level = False

    def __init__(self, workspace: Workspace, step: Iteration, start: Potentials) -> None:
        self._workspace = workspace
        self._step = step
        self._state = start  # what ``given`` of the workspace holds

    def __call__(self, start: Potentials, count: int, relaxation: float = 1.0) -> Sweep:
        """Run ``count`` full iterations from ``start``."""
        work, plain = self._workspace, relaxation == 1
        # a sweep leaves its state in place, to more digits than it has in another dtype
        if start is not self._state or start.f.dtype != torch.float64:
            work.read(start)
        work.relax(relaxation)
        self._run(count - plain, plain)
        # one copy, as the next sweep writes there again
        f_old, _, g_old, _, f_new, _, g_new, _, check = torch.split_with_sizes(
            work.vectors.result.clone(), work.parts
        )
        if start.f.dtype != torch.float64:
            f_old, g_old, f_new, g_new = (
                part.to(start.f.dtype) for part in (f_old, g_old, f_new, g_new)
            )
        self._state = Potentials(f_new, g_new) if plain else Potentials(f_old, g_old)
        return Sweep(f_new, g_old, g_new, self._state, check)

    def _run(self, relaxed: int, plain: bool) -> None:
        self._workspace.iterate(self._step, relaxed, plain)


class StreamedSweeper(TritonSweeper):
    """Sweeps by two half-steps per iteration, for any cost, whose kernel is stored nowhere.

    Sums over a kernel are of no use once potentials are far from its own. It is then made anew, for
    which nothing but vectors is computed: before a sweep, or, from the first one that has failed
    on, before each iteration.
    """

    def __init__(self, start: KernelPlan, tau: tuple[float, float]) -> None:
        cost = start.cost
        super().__init__(
            Workspace(cost.shape, cost.dtype, cost.first.device), self._step, start.potentials
        )
        self._plan, self._tau, self._transposed = start, tau, cost.transpose()
        self._each = False  # whether iterations are looked at one by one
        self._make(start.potentials)

    def __call__(self, start: Potentials, count: int, relaxation: float = 1.0) -> Sweep:
        sweep = super().__call__(start, count, relaxation)
        if self._each or _recorded(start.f.device) or bool(sweep.check[0]):
            return sweep
        self._each = True
        # from where the one that failed began
        self._state = sweep.state
        return super().__call__(start, count, relaxation)

    def _make(self, potentials: Potentials) -> None:
        """Make the kernel at some potentials."""
        cost = self._plan.cost
        self._workspace.prepare(
            self._plan._replace(potentials=potentials),
            self._tau,
            None if cost.rank == 0 else (cost.row, cost.column),
        )

    def _step(
        self, f: KernelSide, g: KernelSide, rules: tuple[Rule, Rule], bad: Tensor, turn: int
    ) -> None:
        half_step_(self._plan.cost, f, g, rules[0], bad)
        half_step_(self._transposed, g, f, rules[1], bad)

    def _run(self, relaxed: int, plain: bool) -> None:
        work, vectors = self._workspace, self._workspace.vectors
        failed = torch.zeros_like(vectors.bad)
        for _ in range(relaxed if self._each else 0):
            self._follow()
            begin_(vectors)
            self._step(work.f, work.g, work.relaxed, vectors.bad, 0)
            failed |= vectors.bad
            vectors.given.copy_(vectors.scalings[1] / vectors.scale + vectors.origin)
        self._follow()
        super()._run(0 if self._each else relaxed, plain)
        vectors.result[-2].mul_((failed[0] == 0).to(vectors.result))

    def _follow(self) -> None:
        """Make the kernel anew where potentials are far from its own."""
        vectors, sides = self._workspace.vectors, self._workspace.sides
        moved = torch.where(vectors.weight > 0, vectors.given - vectors.origin, 0.0)
        if not _recorded(moved.device) and float(moved.abs().max() * vectors.scale) > _FAR:
            self._make(Potentials(*(vectors.given[part].clone() for part in sides)))


def _recorded(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded, when nothing can be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def dense_sweeper(
    start: EntropicPlan, tau: tuple[float, float], shape: SweepShape, *, graphs: bool = True
) -> TritonSweeper:
    """Make sweeps over a stored kernel, by CUDA graphs where launches would dominate."""
    cost, device = start.cost, start.device
    assert isinstance(cost, DenseCost)
    graphs = graphs and device.type == "cuda" and cost.matrix.nbytes <= _GRAPH_BYTES
    if not graphs or torch.cuda.is_current_stream_capturing():
        replay = _Replay(cost, shape)
        replay.prepare(start, tau)
        return TritonSweeper(replay.workspace, replay.kernel.iterate, start.potentials)
    stream = torch.cuda.current_stream(device).cuda_stream
    # buffers that were made in inference mode may not be written to outside
    key = (cost.shape, cost.dtype, shape, device, stream, torch.is_inference_mode_enabled())
    replay = _idle.take(key) or _Replay(cost, shape)
    replay.take(start, tau)
    return _GraphedSweeper(replay, key, start.potentials)


def records(problem: LinearProblem) -> bool:
    """Whether half-steps of a problem may be recorded: on a CUDA device, of strict marginals."""
    if problem.tau != STRICT or problem.cost.device.type != "cuda":
        return False
    return not torch.cuda.is_current_stream_capturing()


def recorded_sweep(problem: LinearProblem, start: Potentials, count: int) -> Sweep:
    """Run full iterations by half-steps of PyTorch operations, as a graph kept for later ones."""
    cost, marginals, epsilon, _ = problem
    assert isinstance(cost, DenseCost)
    call = Replayer(cost.device, ("half-steps", cost.shape, cost.dtype, start.f.dtype))
    units = 1 / epsilon
    given = DenseCost(cost.matrix * units), marginals, Potentials(*(part * units for part in start))
    found: Sweep = clone(call(f"{count}", partial(_half_steps, count), *given))
    *potentials, state, check = found
    f, g, g_next = (part * epsilon for part in potentials)
    return Sweep(f, g, g_next, Potentials(*(part * epsilon for part in state)), check)


def _half_steps(count: int, cost: DenseCost, marginals: Marginals, start: Potentials) -> Sweep:
    """Run full iterations in units of epsilon."""
    problem = LinearProblem(cost, marginals, 1.0)
    return softmin_sweep(EagerBackend().prepare(problem), start, count)


class _Given(NamedTuple):
    """Copies of what a kernel is made of, which graphs read."""

    cost: DenseCost
    vectors: Tensor  # (2 (n + m),) float64, the others one after another
    potentials: Potentials
    marginals: Marginals

    @classmethod
    def like(cls, cost: DenseCost) -> "_Given":
        """Make room for a problem of such a cost."""
        sizes = 2 * cost.shape
        vectors = torch.empty(sum(sizes), dtype=torch.float64, device=cost.device)
        f, g, a, b = vectors.split(sizes)
        matrix = torch.empty(cost.shape, dtype=cost.dtype, device=cost.device)
        return cls(DenseCost(matrix), vectors, Potentials(f, g), Marginals(a, b))

    def read(self, start: EntropicPlan, cost: DenseCost) -> None:
        """Copy those of a problem."""
        torch.cat([*start.potentials, *start.marginals], out=self.vectors)
        self.cost.matrix.copy_(cost.matrix)


class _Replay:
    """A workspace, its kernel, and graphs of sweeps on them."""

    def __init__(self, cost: DenseCost, shape: SweepShape) -> None:
        self.workspace = Workspace(cost.shape, cost.dtype, cost.device)
        self.kernel = StoredKernel(cost, shape)
        # by number of relaxed iterations, what comes next, and whether the kernel is made first;
        # None once one has run without
        self.graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph | None] = {}
        self.memory: GraphMemory | None = None
        # what the graphs make a kernel of, and whether they have yet to make it
        self._given: _Given | None = None
        self._waiting = False

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices."""
        copied = 0 if self._given is None else self._given.cost.matrix.nbytes
        return self.kernel.matrix.nbytes + copied

    def prepare(self, start: EntropicPlan, tau: tuple[float, float]) -> None:
        """Make the kernel of a problem."""
        cost = start.cost
        assert isinstance(cost, DenseCost)
        self.workspace.prepare(start, tau, None)
        self._store(cost)

    def take(self, start: EntropicPlan, tau: tuple[float, float]) -> None:
        """Take what the kernel of a problem is made of, by the first sweep if it is small."""
        cost = start.cost
        assert isinstance(cost, DenseCost)
        if cost.matrix.nbytes > _COPIED_BYTES or not self.workspace.is_strict(tau):
            self.prepare(start, tau)
            return
        if self._given is None:
            self._given = _Given.like(cost)
        self._given.read(start, cost)
        self.workspace.vectors.scale.fill_(scale_of(start.epsilon))
        self._waiting = True

    def iterate(self, relaxed: int, plain: bool) -> None:
        """Run a sweep by launches."""
        self._iterate(relaxed, plain, make=self._is_next_to_make())

    def run(self, relaxed: int, plain: bool) -> None:
        """Run a sweep; the second one of its kind is captured, and replayed from then on."""
        kind = relaxed, plain, self._is_next_to_make()
        if kind not in self.graphs:
            # this also compiles the kernels, which a capture must not
            self.graphs[kind] = None
            self._iterate(*kind)
            return
        graph = self.graphs[kind]
        if graph is None:
            if self.memory is None or self.memory.is_broken:
                self.memory = borrow_memory(self, self.workspace.shift.device)
            graph = self.graphs[kind] = capture(
                lambda: self._iterate(*kind), self.memory.stream, pool=self.memory.pool
            )
        if graph is None:
            self._iterate(*kind)
        else:
            graph.replay()

    def _is_next_to_make(self) -> bool:
        """Whether the kernel waits to be made, by whoever asks."""
        waiting, self._waiting = self._waiting, False
        return waiting

    def _iterate(self, relaxed: int, plain: bool, make: bool) -> None:
        if make:
            self._make()
        self.workspace.iterate(self.kernel.iterate, relaxed, plain)

    def _make(self) -> None:
        """Make the kernel from the copies."""
        given = self._given
        assert given is not None
        prepare_(self.workspace.vectors, given.marginals, given.potentials, None)
        self._store(given.cost)

    def _store(self, cost: DenseCost) -> None:
        work = self.workspace
        self.kernel.store(cost, work.f, work.g, work.vectors.scale)


# Workspaces between two sweepers, by shape, launch and stream.
_idle = Idle[_Replay](_GRAPH_BYTES)


class _GraphedSweeper(TritonSweeper):
    """Replays graphs; gives its workspace to the next sweeper of this shape when it is gone."""

    def __init__(self, replay: _Replay, key: Hashable, start: Potentials) -> None:
        super().__init__(replay.workspace, replay.kernel.iterate, start)
        self._replay = replay
        self._return = weakref.finalize(self, _idle.put, key, replay, replay.nbytes)
        self._return.atexit = False

    def _run(self, relaxed: int, plain: bool) -> None:
        if torch.cuda.is_current_stream_capturing():
            # the caller's graph will go on using the buffers
            self._return.detach()
            self._replay.iterate(relaxed, plain)
        else:
            self._replay.run(relaxed, plain)
