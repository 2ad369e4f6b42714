"""Problems a second, beside POT's batch solvers and POT's loop: ``python -m benchmarks batch``.

Each work is a stack of random clouds. A way to solve it is called once to compile and warm up, and
then timed. Plans of a part of the stack, once they have their marginals, are evaluated in float64
without entropy: the mean, and the share in which it is at most POT's plus 1e-4 of it, stand beside
the rate. ``equal`` has n = m points, ``ragged`` 10 to 32. POT's batch has equal sizes only. With
``--mass`` or ``--unbalanced`` our own are timed alone. CAJAL is installed by hand, and has no
linear cost here. One JSON line for each, then a table.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import torchgw
from benchmarks.harness.evaluate import made_feasible
from benchmarks.harness.harness import tell
from benchmarks.harness.measure import MemoryProbe, synchronize
from torchgw._batch import engine

# Problems whose plans are compared, those that a loop solves, and those that processes share.
COMPARED, LOOPED, PARALLEL = 256, 8, 4096


class Work(NamedTuple):
    """A stack of problems, on its device."""

    name: str
    x: Tensor  # (B, n, n) float64
    y: Tensor  # (B, m, m)
    sizes_x: Tensor  # (B,)
    sizes_y: Tensor
    costs: Tensor | None  # (B, n, m) of fused problems
    alpha: float
    epsilon: float | str
    starts: int = 1
    mass: float | None = None
    unbalanced: float | None = None

    def part(self, count: int) -> Work:
        """Take the first problems."""
        return self._replace(
            x=self.x[:count], y=self.y[:count], sizes_x=self.sizes_x[:count],
            sizes_y=self.sizes_y[:count], costs=None if self.costs is None else self.costs[:count],
        )  # fmt: skip


def make(
    name: str,
    count: int,
    n: int,
    device: torch.device,
    *,
    fused: bool,
    epsilon: float | str,
    starts: int = 1,
) -> Work:
    """Draw clouds in three dimensions, their distances divided by the largest of each."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.full((2, count), n)
    if name == "ragged":
        sizes = torch.randint(10, n + 1, (2, count), generator=generator)

    def side(used: Tensor) -> Tensor:
        points = torch.randn(count, n, 3, generator=generator, dtype=torch.float64).to(device)
        table = torch.cdist(points, points)
        inside = torch.arange(n) < used[:, None]
        mask = (inside[:, :, None] & inside[:, None, :]).to(device)
        table = torch.where(mask, table, 0.0)
        return table / table.amax((1, 2), keepdim=True)

    costs = None
    if fused:
        costs = torch.rand(count, n, n, generator=generator, dtype=torch.float64).to(device)
    x, y, alpha = side(sizes[0]), side(sizes[1]), 0.5 if fused else 1.0
    return Work(name, x, y, *sizes, costs, alpha, epsilon, starts)


def ours(work: Work, *, plans: bool) -> tuple[list[Tensor] | None, dict[str, Any]]:
    """Solve by the package; plans and what is told of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.ConvergenceWarning)
        batch = torchgw.solve_batch(
            work.x, work.y, work.costs, sizes_x=work.sizes_x, sizes_y=work.sizes_y,
            alpha=work.alpha, epsilon=work.epsilon, n_init=work.starts, plans=plans,
            mass=work.mass, unbalanced=work.unbalanced,
        )  # fmt: skip
    told = {
        "converged": float(batch.converged.sum() / len(batch)),
        "iterations": float(batch.n_iter.sum() / len(batch)),
        "marginal_error": float(batch.marginal_error.max()),
        "objective": float(batch.objective.mean()),
    }
    return (batch.plans() if plans else None), told


def plain(work: Work, *, plans: bool) -> tuple[list[Tensor] | None, dict[str, Any]]:
    """Solve by the package without its Triton kernel."""
    before = engine.may_begin
    engine.may_begin = lambda *args, **kwargs: False
    try:
        return ours(work, plans=plans)
    finally:
        engine.may_begin = before


def pot_batch(work: Work, *, plans: bool) -> tuple[list[Tensor] | None, dict[str, Any]]:
    """Solve by POT's proximal batch solver, a thousand problems at once, at its own defaults."""
    from ot.batch import solve_gromov_batch

    found = []
    for begin in range(0, len(work.x), 1000):
        some = slice(begin, begin + 1000)
        result = solve_gromov_batch(
            work.x[some], work.y[some], reg=0.01,
            M=None if work.costs is None else work.costs[some],
            alpha=None if work.costs is None else work.alpha,
        )  # fmt: skip
        if plans:
            found += list(result.plan)
    return (found if plans else None), {}


def pot_loop(work: Work, *, plans: bool) -> tuple[list[Tensor] | None, dict[str, Any]]:
    """Solve a few problems one by one by POT's entropic solver, at our epsilon, on the CPU."""
    import ot

    epsilons = torchgw.solve_batch(
        work.x, work.y, work.costs, sizes_x=work.sizes_x, sizes_y=work.sizes_y, alpha=work.alpha,
        epsilon=work.epsilon, max_iter=1, plans=False, n_init=1,
    ).epsilon.tolist()  # fmt: skip
    found = []
    for k, epsilon in enumerate(epsilons):
        n, m = int(work.sizes_x[k]), int(work.sizes_y[k])
        tables = work.x[k, :n, :n].cpu().numpy(), work.y[k, :m, :m].cpu().numpy()
        weights = np.full(n, 1 / n), np.full(m, 1 / m)
        if work.costs is None:
            plan = ot.gromov.entropic_gromov_wasserstein(*tables, *weights, epsilon=epsilon)
        else:
            cost = work.costs[k, :n, :m].cpu().numpy()
            plan = ot.gromov.entropic_fused_gromov_wasserstein(
                cost, *tables, *weights, epsilon=epsilon, alpha=work.alpha
            )
        found.append(torch.from_numpy(plan))
    return (found if plans else None), {}


def pot_exact(work: Work, *, plans: bool) -> tuple[list[Tensor] | None, dict[str, Any]]:
    """Solve a few problems one by one by POT's conditional gradient, on the CPU."""
    import ot

    found = []
    for k in range(len(work.x)):
        n, m = int(work.sizes_x[k]), int(work.sizes_y[k])
        tables = work.x[k, :n, :n].cpu().numpy(), work.y[k, :m, :m].cpu().numpy()
        weights = np.full(n, 1 / n), np.full(m, 1 / m)
        if work.costs is None:
            plan = ot.gromov.gromov_wasserstein(*tables, *weights)
        else:
            cost = work.costs[k, :n, :m].cpu().numpy()
            plan = ot.gromov.fused_gromov_wasserstein(cost, *tables, *weights, alpha=work.alpha)
        found.append(torch.from_numpy(plan))
    return (found if plans else None), {}


def cajal(work: Work, *, plans: bool) -> tuple[list[Tensor] | None, dict[str, Any]]:
    """Solve problems without a linear cost by CAJAL's descent, in a process for each core."""
    from cajal.gw_cython import gw
    from joblib import Parallel, delayed

    def spaces(tables: Tensor, sizes: Tensor) -> list[tuple[Any, Any]]:
        used = zip(tables.cpu().numpy(), sizes.tolist(), strict=True)
        return [(table[:n, :n].copy(), np.full(n, 1 / n)) for table, n in used]

    pairs = zip(spaces(work.x, work.sizes_x), spaces(work.y, work.sizes_y), strict=True)
    found = Parallel(n_jobs=-1)(delayed(gw)(*x, *y) for x, y in pairs)
    return ([torch.from_numpy(plan) for plan, _ in found] if plans else None), {}


WAYS: dict[str, Callable[..., tuple[list[Tensor] | None, dict[str, Any]]]] = {
    "ours": ours, "ours without Triton": plain, "POT batch": pot_batch, "POT entropic": pot_loop,
    "POT exact": pot_exact, "CAJAL": cajal,
}  # fmt: skip
LOOPS = ("POT entropic", "POT exact")


def values_of(work: Work, plans: list[Tensor]) -> Tensor:
    """Evaluate plans without entropy, in float64, once they have their marginals."""
    values = []
    for k, plan in enumerate(plans):
        n, m = int(work.sizes_x[k]), int(work.sizes_y[k])
        plan = torch.from_numpy(made_feasible(plan.double().cpu().numpy()))
        x, y, plan = work.x[k, :n, :n], work.y[k, :m, :m], plan.to(work.x)
        p, q = plan.sum(1), plan.sum(0)
        value = p @ (x.square() @ p) + q @ (y.square() @ q) - 2 * ((x @ plan @ y) * plan).sum()
        if work.costs is not None:
            linear = (work.costs[k, :n, :m] * plan).sum()
            value = work.alpha * value + (1 - work.alpha) * linear
        values.append(value)
    return torch.stack(values).cpu()


def measure(work: Work, way: str, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Time one way on a work; return its record, and values of the problems compared."""
    solve = WAYS[way]
    few = work.part(LOOPED if way in LOOPS else COMPARED)
    balanced = work.mass is None and work.unbalanced is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plans, _ = solve(few, plans=True)
        timed = few if way in LOOPS else work.part(PARALLEL) if way == "CAJAL" else work
        probe = MemoryProbe(device)
        synchronize(device)
        begin = time.perf_counter()
        _, told = solve(timed, plans=False)
        synchronize(device)
        seconds = time.perf_counter() - begin
    assert plans is not None
    # a relaxed plan has no marginals of its own: its objective stands alone
    values = values_of(few, plans) if balanced else torch.tensor([told["objective"]])
    record = {
        "work": work.name, "way": way, "fused": work.costs is not None, "n": work.x.shape[1],
        "mass": work.mass, "unbalanced": work.unbalanced,
        "problems": len(timed.x), "seconds": seconds, "rate": len(timed.x) / seconds,
        "value": float(values.mean()), "device": str(device), **told, **probe.peak_mib(),
    }  # fmt: skip
    return record, values


def table(records: list[dict[str, Any]]) -> str:
    """Make a Markdown table."""
    lines = ["| work | way | problems/s | mean value | at most POT's batch | converged |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for record in records:
        kind = f"{record['work']} {record['n']}" + (" fused" if record["fused"] else "")
        kind += "".join(f" {name}" for name in ("mass", "unbalanced") if record[name] is not None)
        share, done = record.get("no_worse"), record.get("converged")
        cells = [
            kind, record["way"], f"{record['rate']:,.1f}", f"{record['value']:.6g}",
            "" if share is None else f"{share:.1%}", "" if done is None else f"{done:.2%}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure all ways on all works."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks batch", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--count", type=int, default=1000, help="problems of n = 100")
    parser.add_argument("--n", type=int, default=100, help="points of the equal works")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated")
    parser.add_argument("--works", default="equal,ragged", help="comma-separated")
    parser.add_argument("--fused", action="store_true", help="with a linear cost")
    parser.add_argument("--starts", type=int, default=1, help="starts of each of our problems")
    parser.add_argument("--mass", type=float, help="of partial problems")
    parser.add_argument("--unbalanced", type=float, help="weight of penalties of both marginals")
    parser.add_argument("--epsilon", default="auto", help="or a number")
    parser.add_argument("--output", type=Path, help="file that JSON lines are added to")
    options = parser.parse_args(arguments)
    epsilon = options.epsilon if options.epsilon == "auto" else float(options.epsilon)
    device, records = torch.device(options.device), []
    ways = options.ways.split(",")
    if "CAJAL" in ways and find_spec("cajal") is None:
        print("CAJAL is not installed: left out")
        ways.remove("CAJAL")
    if options.mass is not None or options.unbalanced is not None:
        ways = [way for way in ways if way.startswith("ours")]
    for name in options.works.split(","):
        n = 32 if name == "ragged" else options.n
        work = make(
            name, options.count, n, device,
            fused=options.fused, epsilon=epsilon, starts=options.starts,
        )._replace(mass=options.mass, unbalanced=options.unbalanced)  # fmt: skip
        reference = None
        # POT's batch comes first, as the others are compared with it
        for way in sorted(ways, key=lambda way: way != "POT batch"):
            if (way == "POT batch" and name == "ragged") or (way == "CAJAL" and options.fused):
                continue
            record, values = measure(work, way, device)
            if way == "POT batch":
                reference = values
            elif reference is not None:
                bound = reference[: len(values)]
                record["no_worse"] = float((values <= bound + 1e-4 * bound.abs()).double().mean())
            records.append(record)
            tell(record, options.output)
    print(table(records))
    return 0
