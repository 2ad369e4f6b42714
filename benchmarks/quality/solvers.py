"""The runners: how each solver is asked, with our epsilon and the same matrices."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import shlex
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

import torchgw
from benchmarks.harness.harness import ROOT
from benchmarks.quality import random_matrices
from benchmarks.quality.instances import Array, Index, Instance, permutation_plan
from benchmarks.sinkhorn.linear import Unsupported
from torchgw._boundary.arrays import to_numpy

__all__ = ["SOLVERS", "Request", "Solution", "Solver", "default_epsilon", "versions"]


@dataclass(frozen=True)
class Request:
    """What a runner is told besides the instance."""

    seed: int
    epsilon: float
    device: str
    peer_python: str | None


class Solution(NamedTuple):
    """A plan, the seconds it took, and what the solver says of it."""

    plan: Array
    seconds: float
    says: dict[str, Any]
    matching: Index | None = None  # of a network, if the solver makes one itself


@dataclass(frozen=True)
class Solver:
    """One way of solving an instance."""

    name: str
    run: Callable[[Instance, Request], Solution]
    distribution: str  # whose version its answers depend on
    entropic: bool = False  # minimises the entropic objective at our epsilon


def default_epsilon(instance: Instance, device: str = "cpu") -> float:
    """Return the epsilon of a problem: its own, or what torchgw.solve takes by default.

    Asked of the solver itself, stopped after its first iteration; the device is warm afterwards.
    """
    with warnings.catch_warnings():
        # stopping is what was asked for
        warnings.simplefilter("ignore", torchgw.ConvergenceWarning)
        result = torchgw.solve(
            D_X=instance.d_x, D_Y=instance.d_y, a=instance.marginals[0], b=instance.marginals[1],
            n_init=1, device=device, random_state=0,
            options=torchgw.Options(callback=lambda iteration: True),
        )  # fmt: skip
    return result.epsilon if instance.epsilon is None else instance.epsilon


def _ours(instance: Instance, request: Request, **options: Any) -> Solution:
    epsilon = "auto" if instance.epsilon is None else instance.epsilon
    begin = time.perf_counter()
    result = torchgw.solve(
        **instance.inputs,
        options=torchgw.Options(
            epsilon=epsilon, device=request.device, random_state=request.seed, **options
        ),
    )
    if request.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    says = {
        "status": result.status.name, "gradient": result.gradient, "iterations": result.n_iters,
        "value": result.value, "epsilon": result.epsilon, "doubt": bool(result.doubt),
    }  # fmt: skip
    matching = None
    if instance.network:
        begin = time.perf_counter()
        matching = to_numpy(result.matching().target)
        says["matching_s"] = time.perf_counter() - begin
    return Solution(torch.as_tensor(result.plan).double().cpu().numpy(), seconds, says, matching)


def _ours_with(**options: Any) -> Callable[[Instance, Request], Solution]:
    """Return a runner of ours with some options named; all others are defaults."""
    return lambda instance, request: _ours(instance, request, **options)


def _pot(name: str, step: float = 1.0, **options: Any) -> Callable[[Instance, Request], Solution]:
    """Return a runner of a solver of POT; its epsilon, if it has one, is ``step`` times ours."""

    def run(instance: Instance, request: Request) -> Solution:
        import ot

        solve = getattr(ot.gromov, name)
        arrays: list[Any] = [instance.d_x, instance.d_y, *instance.marginals]
        if request.device == "cuda":
            arrays = [torch.from_numpy(array).to(request.device) for array in arrays]
        mine = dict(options)
        if "epsilon" in inspect.signature(solve).parameters:
            mine["epsilon"] = step * request.epsilon
        begin = time.perf_counter()
        plan = solve(*arrays, loss_fun="square_loss", **mine)
        plan = torch.as_tensor(plan).double().cpu().numpy()
        seconds = time.perf_counter() - begin
        return Solution(plan, seconds, {"arguments": mine})

    return run


def _pot_from_many(instance: Instance, request: Request) -> Solution:
    """Run POT's entropic solver from the product and seven random plans; keep the best."""
    import ot

    a, b = instance.marginals
    rng = np.random.default_rng(request.seed)
    begin = time.perf_counter()
    found: list[tuple[float, Array]] = []
    for start in range(8):
        first = random_matrices.random_plan(a, b, rng) if start else np.outer(a, b)
        plan = ot.gromov.entropic_gromov_wasserstein(
            instance.d_x, instance.d_y, a, b, loss_fun="square_loss", epsilon=request.epsilon,
            G0=first, tol=_MANY_TOL,
        )  # fmt: skip
        found.append((random_matrices.objective(instance, plan, request.epsilon), plan))
    return Solution(min(found, key=lambda item: item[0])[1], time.perf_counter() - begin, {})


def _faq(*, convex: bool) -> Callable[[Instance, Request], Solution]:
    """Return SciPy's FAQ from the product plan, or from the minimiser of ||A P - P B||^2.

    J. Vogelstein et al., Fast approximate quadratic programming for graph matching, 2015; the
    convex start is that of V. Lyzinski et al., Graph matching: relax at your own risk, 2016.
    """

    def run(instance: Instance, request: Request) -> Solution:
        from scipy.optimize import quadratic_assignment

        if len(instance.d_x) != len(instance.d_y) or instance.weights is not None:
            raise Unsupported("FAQ matches as many points as there are, of equal weights")
        begin = time.perf_counter()
        start: Any = _convex_minimiser(instance) if convex else "barycenter"
        # nothing is drawn from these starts, but without a generator it looks for a global one
        options = {"maximize": True, "P0": start, "rng": np.random.default_rng(0)}
        found = quadratic_assignment(instance.d_x, instance.d_y, method="faq", options=options)
        seconds = time.perf_counter() - begin
        says = {"iterations": int(found.nit)}
        return Solution(permutation_plan(found.col_ind), seconds, says, found.col_ind)

    return run


def _convex_minimiser(instance: Instance, steps: int = 100) -> Array:
    """Minimise ||A P - P B||^2 over doubly stochastic P by conditional gradients."""
    left, right = instance.d_x, instance.d_y
    n = len(left)
    plan = np.full((n, n), 1 / n)
    rest = left @ plan - plan @ right
    for _ in range(steps):
        vertex = np.zeros((n, n))
        vertex[linear_sum_assignment(left.T @ rest - rest @ right.T)] = 1
        move = left @ vertex - vertex @ right - rest
        square = float((move * move).sum())
        step = min(1.0, -float((rest * move).sum()) / square) if square > 0 else 0.0
        if step <= 1e-6:
            break
        plan += step * (vertex - plan)
        rest += step * move
    return plan


def _peer(instance: Instance, request: Request) -> Solution:
    """Run torchgw 0.4.2, a black box, in its own interpreter, from points."""
    if instance.points is None:
        raise Unsupported("torchgw 0.4.2 is given points; this problem is given by distances")
    if request.peer_python is None:
        raise Unsupported("no --peer-python: an interpreter with torchgw 0.4.2")
    with tempfile.TemporaryDirectory(prefix="torchgw-quality-") as name:
        directory = Path(name)
        np.savez(directory / "input.npz", x=instance.points.x, y=instance.points.y)
        config = {
            "device": request.device,
            "repeat": 1,
            "budget_s": 0,
            "evaluations": 1,
            "arguments": {
                "distance_mode": "precomputed",
                "M": 80,
                "epsilon": 0.005,
                "k": instance.points.n_neighbors,
                "mixed_precision": True,
            },
        }
        (directory / "config.json").write_text(json.dumps(config))
        command = [*shlex.split(request.peer_python), str(ROOT / "benchmarks/peer_torchgw.py")]
        variables = dict(os.environ)
        if request.device == "cpu":
            # it must not find a GPU
            variables["CUDA_VISIBLE_DEVICES"] = ""
        done = subprocess.run(
            [*command, name], cwd=directory, env=variables, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
            raise ChildProcessError(f"exit {done.returncode}: {lines[-1][:300]}")
        report = json.loads((directory / "report.json").read_text())
        with np.load(directory / "plan-0.npz") as summary:
            return Solution(np.asarray(summary["plan"]), report["seconds"][0], {})


_ENTROPIC = "entropic_gromov_wasserstein"
# On three problems its value moved by 0.02%, 2.5% and 2.3% from here to 200; the default of 1,000
# takes a minute at 300 points.
_PPA_ITERATIONS = 50
# Enough for an objective of five digits; its default of 1e-9 takes ten times as long.
_MANY_TOL = 1e-6
# BAPG's epsilon is a step size. At 1 to 100 times ours it is NaN or stays at the product plan; at
# this, which is near the 0.1 of its default, it solves.
_BAPG_STEP = 1_000.0
_ALL = (
    Solver("ours", _ours, "torchgw", entropic=True),
    Solver("ours-fast", _ours_with(search="fast"), "torchgw", entropic=True),
    Solver("ours-64", _ours_with(n_init=64), "torchgw", entropic=True),
    Solver("ours-polish", _ours_with(polish=True), "torchgw"),
    Solver("ours-proximal", _ours_with(regularization="proximal"), "torchgw"),
    Solver("pot-pgd", _pot(_ENTROPIC, solver="PGD"), "POT", entropic=True),
    Solver("pot-pgd-8", _pot_from_many, "POT", entropic=True),
    Solver("pot-ppa", _pot(_ENTROPIC, solver="PPA", max_iter=_PPA_ITERATIONS), "POT"),
    Solver("pot-cg", _pot("gromov_wasserstein"), "POT"),
    Solver("pot-bapg", _pot("BAPG_gromov_wasserstein", _BAPG_STEP), "POT"),
    Solver("scipy-faq", _faq(convex=False), "scipy"),
    Solver("scipy-faq-convex", _faq(convex=True), "scipy"),
    Solver("torchgw042", _peer, "torchgw042"),
)
SOLVERS: dict[str, Solver] = {solver.name: solver for solver in _ALL}


def versions(solver: Solver) -> dict[str, str]:
    """Return the versions that the answers of a runner depend on."""
    if solver.distribution == "torchgw042":
        return {"torchgw-peer": "0.4.2"}
    if solver.distribution == "torchgw":
        return {"torchgw": torchgw.__version__, "torch": torch.__version__}
    return {solver.distribution: importlib.metadata.version(solver.distribution)}
