"""Bits and seconds of a solve that processes share: ``python -m benchmarks distributed``.

A spiral is aligned to a Swiss roll of as many points, as by ``python -m benchmarks scaling``. Each
row is a torchrun of its own; a first call compiles and is not counted. ``bits`` is a digest of
potentials, masses and value: rows of any number of processes must have the same. The row ``alone``
does not share (another order of sums, so other bits). Exit code 1 if bits differ.

``--simulate 8`` is for one device: the work of each of 8 ranks, one after another. Nothing is
exchanged: what they join is known. Efficiency is the time of one rank that has it all over 8 times
that of the slowest, and imbalance is the time of the slowest over the mean. Three kinds of work: a
half-step of the rows and one of the columns over tiles that are chosen; a sweep of 10 iterations
with the choice; a product of the plan with eight columns with the choice.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

# as in the scaling study
EPSILON = 5e-4
PHASES = ("graph", "geodesics", "landmarks", "multistart", "cost", "sinkhorn", "coupling")
PHASES += ("settle", "evaluation")
KINDS = ("half_steps", "sweep", "product")


def solve(n: int, device: str, repeat: int, *, shared: bool) -> dict[str, object] | None:
    """Time one rank's calls; the first rank tells."""
    import numpy as np
    import torch

    import torchgw
    from torchgw.datasets import spiral, swiss_roll

    warnings.simplefilter("ignore")
    rank = int(os.environ.get("RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if shared:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    x, y = spiral(n, random_state=0)[0], swiss_roll(n, random_state=1)[0]
    # one call alone is its own first
    calls = []
    for _ in range(repeat + 1):
        if shared:
            torch.distributed.barrier()
        begin = time.perf_counter()
        result = torchgw.solve(
            x, y, epsilon=EPSILON, device=device, random_state=0,
            options=torchgw.Options(distributed=shared),
        )  # fmt: skip
        calls.append((time.perf_counter() - begin, result.timings))
    digest = hashlib.sha256()
    parts = result.potential_a, result.potential_b, result.marginal_a, result.marginal_b
    for part in parts:
        digest.update(np.asarray(part).tobytes())
    digest.update(repr(result.value).encode())
    if shared:
        torch.distributed.destroy_process_group()
    if rank:
        return None
    seconds, timings = min(calls[1:] or calls, key=lambda call: call[0])
    return {
        "first_s": calls[0][0], "seconds": seconds,
        "phases": {name: timings.get(name, 0.0) for name in PHASES},
        "bits": digest.hexdigest()[:12], "value": result.value, "error": result.marginal_error,
        "status": result.status.name, "threads": torch.get_num_threads(),
    }  # fmt: skip


class Work(NamedTuple):
    """What ranks share, and is timed: ``run`` on what ``prepare`` has made of a backend."""

    prepare: Callable[[Any], Any]
    run: Callable[[Any], object]


def problem_of(n: int, device: str) -> Any:
    """Make the plan of a solve, whose work ranks share."""
    import torchgw
    from torchgw.datasets import spiral, swiss_roll

    warnings.simplefilter("ignore")
    x, y = spiral(n, random_state=0)[0], swiss_roll(n, random_state=1)[0]
    return torchgw.solve(
        x, y, epsilon=EPSILON, device=device, random_state=0, distances="landmark"
    ).lazy_plan


def simulate(
    found: Any, size: int, device: str, repeat: int, names: Sequence[str] = KINDS
) -> dict[str, object]:
    """Time what each rank would compute of the work on a plan, in seconds of its own."""
    import torch

    from torchgw._plans.transport import TransportPlan
    from torchgw._sinkhorn.choose import choose_backend
    from torchgw._sinkhorn.problem import LinearProblem
    from torchgw._sinkhorn.tiles.tiling import Tiling
    from torchgw._tensors.ranks import Ranks

    class Simulated(Ranks):
        """One of the ranks; a rank that had all to itself has told what they join."""

        def __init__(self, rank: int, size: int) -> None:
            self.rank, self.size = rank, size
            self.known: Iterator[torch.Tensor] | None = None
            self.joined: list[torch.Tensor] = []
            self.same, self.compares = True, False

        def gather(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
            if self.known is None:
                # what follows may write to it
                self.joined.append(own.clone())
                return own
            whole = next(self.known)
            if self.compares:
                mine = whole[sum(counts[: self.rank]) :][: len(own)]
                self.same &= torch.equal(own, mine)
            return whole.clone()

        def any(self, flag: bool) -> bool:
            return flag

    cost, place = found.cost.to(torch.float32), found.potentials.f.device
    n = cost.shape[0]
    tiling = Tiling.of((n, n), place, storable=False)
    values = torch.rand(n, 8, device=place)
    problem, start = LinearProblem(cost, found.weights, found.epsilon), found.potentials

    def begun(backend: Any) -> Any:
        engine = backend.prepare(problem)._engine(start)
        engine.begin(start)
        return engine

    kinds = {
        "half_steps": Work(begun, lambda engine: (engine.update_rows(), engine.update_columns())),
        "sweep": Work(
            lambda backend: backend.prepare(problem),
            lambda prepared: prepared.sweeper(start)(start, 10),
        ),
        "product": Work(
            lambda backend: TransportPlan(cost, start, found.weights, found.epsilon, backend),
            lambda plan: plan @ values,
        ),
    }

    def spend(work: Work, ranks: Simulated, told: Sequence[torch.Tensor]) -> float:
        backend = choose_backend("auto", place, torch.float32, tiling, ranks)
        times = []
        for turn in range(repeat + 1):
            ranks.joined, ranks.known = [], iter(told) if told else None
            # only a turn that is not counted waits for comparisons
            ranks.compares = turn == 0
            made = work.prepare(backend)
            if device == "cuda":
                torch.cuda.synchronize()
            clock, busy = time.perf_counter(), time.process_time()
            work.run(made)
            if device == "cuda":
                torch.cuda.synchronize()
            since = time.perf_counter() - clock
            times.append(since if device == "cuda" else time.process_time() - busy)
        return min(times[1:])

    others = [Simulated(rank, size) for rank in range(size)]
    row: dict[str, object] = {"n": n, "ranks": size}
    for name in names:
        one = Simulated(0, 1)
        alone = spend(kinds[name], one, ())
        shares = [spend(kinds[name], ranks, one.joined) for ranks in others]
        row[name] = {
            "alone_s": alone, "slowest_s": max(shares), "efficiency": alone / (size * max(shares)),
            "imbalance": max(shares) * size / sum(shares),
        }  # fmt: skip
    return {**row, "same_bits": all(ranks.same for ranks in others)}


def row(n: int, count: int, options: argparse.Namespace) -> dict[str, object]:
    """Run one row in processes of its own; ``count`` is 0 for one that does not share."""
    inside = ["-m", "benchmarks", "distributed", "--inside", str(count), "--sizes", str(n)]
    inside += ["--device", options.device, "--repeat", str(options.repeat)]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(max(count, 1))]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        [sys.executable, *launch, *inside], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not told:
        raise RuntimeError(f"{count} processes at n = {n} failed:\n{done.stderr[-3000:]}")
    found: dict[str, object] = json.loads(told[-1])
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks distributed", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--simulate", type=int, metavar="RANKS", help="on this device alone")
    parser.add_argument(
        "--work", choices=KINDS, nargs="+", default=KINDS, help="of simulated ranks"
    )
    options = parser.parse_args(arguments)
    if options.simulate:
        for n in options.sizes:
            how = options.simulate, options.device, options.repeat + 1, options.work
            print(json.dumps(simulate(problem_of(n, options.device), *how)), flush=True)
        return 0
    if options.inside is not None:
        told = solve(options.sizes[0], options.device, options.repeat, shared=options.inside > 0)
        if told is not None:
            print(json.dumps(told), flush=True)
        return 0
    print(f"| n = m | processes | s | first s | {' | '.join(PHASES)} | bits | value | status |")
    print("|---" * (7 + len(PHASES)) + "|", flush=True)
    same = True
    for n in options.sizes:
        bits = set()
        for count in [0, *options.processes]:
            found = row(n, count, options)
            phases = " | ".join(f"{spent:.2f}" for spent in found["phases"].values())
            if count:
                bits.add(found["bits"])
            print(
                f"| {n} | {count or 'alone'} | {found['seconds']:.2f} | {found['first_s']:.2f} | "
                f"{phases} | {found['bits']} | {found['value']:.9g} | {found['status']} |",
                flush=True,
            )
        same &= len(bits) <= 1
    print("the bits are the same" if same else "THE BITS DIFFER")
    return 0 if same else 1
