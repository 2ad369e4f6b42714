"""How each package is asked to solve a problem: one function a runner, all of one shape."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import torchgw
from benchmarks.harness.measure import dense_rows
from benchmarks.harness.registry import GWProblem, Problem, SinkhornProblem, make_clouds
from benchmarks.sinkhorn.linear import (
    Prepared,
    Rows,
    Unsupported,
    compiled,
    definition_rows,
    eager,
    flash,
    linear_problem,
    ours_linear,
)
from torchgw.distances import connect, geodesic_matrices, knn_graph

__all__ = ["RUNNERS", "Runner", "load_packages"]

# Points per side up to which all-pairs tables are handed to POT: a solve holds ten such tables, and
# takes hours beyond.
_POT_POINTS = {"cpu": 6_000, "cuda": 25_000}


@dataclass(frozen=True)
class Runner:
    """A package, or a way of using one."""

    name: str
    prepare: Callable[[Problem, torch.device], Prepared] | None  # None: runs in its own process
    kinds: tuple[str, ...]  # of problems
    packages: dict[str, str] = field(default_factory=dict)  # module: distribution


def _ours(problem: Problem, device: torch.device) -> Prepared:
    if isinstance(problem, GWProblem):
        clouds = make_clouds(problem)

        def solve(seed: int) -> torchgw.GWResult:
            return torchgw.solve(
                clouds.x, clouds.y, distances=problem.distances, n_neighbors=problem.n_neighbors,
                epsilon=problem.epsilon, device=device, random_state=seed,
            )  # fmt: skip

        return Prepared(solve, _result_rows, lambda result: _result_info(result, "whole solve"))
    return ours_linear(problem, device, "auto")


def _ours_given(problem: Problem, device: torch.device) -> Prepared:
    assert isinstance(problem, GWProblem)
    tables = distance_tables(problem, device)

    def solve(seed: int) -> torchgw.GWResult:
        return torchgw.solve(
            D_X=tables[0], D_Y=tables[1], epsilon=problem.epsilon, device=device, random_state=seed
        )

    return Prepared(solve, _result_rows, lambda result: _result_info(result, "distances given"))


def _result_rows(result: torchgw.GWResult) -> Rows:
    """Read a plan off its definition: potentials and cost, in float64, no backend."""
    plan = result.lazy_plan
    return definition_rows(plan.cost, plan.weights, plan.potentials, plan.epsilon)


def _result_info(result: torchgw.GWResult, timed: str) -> dict[str, Any]:
    return {
        "timed": timed, "status": result.status.name, "iterations": result.n_iters,
        "inner_iterations": result.log["inner_iterations"], "gradient": result.gradient,
        "backend": result.backend, "precision": result.precision, "epsilon": result.epsilon,
        "own_value": result.value, "own_value_standard_error": result.log["value_standard_error"],
        "phases_s": {name: round(seconds, 4) for name, seconds in result.timings.items()},
    }  # fmt: skip


def distance_tables(problem: GWProblem, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the all-pairs geodesics of both sides, each divided by its maximum, in float64."""
    clouds = make_clouds(problem)
    graphs = []
    for points in (clouds.x, clouds.y):
        tensor = torch.from_numpy(points)
        graphs.append(connect(knn_graph(tensor, problem.n_neighbors), tensor))
    source, target = (table / table.max() for table in geodesic_matrices(graphs))
    return source.to(device), target.to(device)


def _pot(problem: Problem, device: torch.device) -> Prepared:
    import ot

    if isinstance(problem, SinkhornProblem):
        cost, marginals, epsilon = linear_problem(problem, device)
        matrix = cost.dense().matrix

        def iterate(seed: int) -> Tensor:
            del seed
            return ot.bregman.sinkhorn_log(
                *marginals, matrix, epsilon, numItermax=problem.iterations, stopThr=0, warn=False
            )

        return Prepared(iterate, dense_rows, lambda plan: {"timed": "iterations, and the plan"})
    assert isinstance(problem, GWProblem)
    if problem.epsilon == "auto":
        raise Unsupported("POT chooses no epsilon, and the problem leaves it to the solver.")
    largest = max(problem.n, problem.m)
    if largest > _POT_POINTS[device.type]:
        raise Unsupported(
            f"POT needs all-pairs tables, here of {8 * largest**2 / 2**30:.0f} GiB, several times "
            f"over; the harness gives it at most {_POT_POINTS[device.type]} points on this device."
        )
    tables = distance_tables(problem, device)
    if device.type == "cpu":
        # POT's NumPy backend is its fastest on a CPU
        tables = tuple(table.numpy() for table in tables)

    def solve(seed: int) -> Any:
        del seed
        return ot.gromov.entropic_gromov_wasserstein(
            *tables, loss_fun="square_loss", epsilon=problem.epsilon
        )

    return Prepared(solve, dense_rows, lambda plan: {"timed": "distances given"})


_FLASH = {"flash_sinkhorn": "flash-sinkhorn"}
_LINEAR = ("sinkhorn", "half-step")
_ALL = (
    Runner("ours", _ours, ("gw", *_LINEAR), {"torchgw": "torchgw"}),
    Runner("ours-given", _ours_given, ("gw",), {"torchgw": "torchgw"}),
    Runner("pot", _pot, ("gw", "sinkhorn"), {"ot": "POT"}),
    Runner("torchgw042", None, ("gw",)),
    Runner("flash", lambda p, d: flash(p, d, tf32=False), _LINEAR, _FLASH),
    Runner("flash-tf32", lambda p, d: flash(p, d, tf32=True), _LINEAR, _FLASH),
    Runner("eager", eager, _LINEAR),
    Runner("compile", compiled, _LINEAR),
)
RUNNERS: dict[str, Runner] = {runner.name: runner for runner in _ALL}


def load_packages(runner: Runner) -> dict[str, str]:
    """Import the packages that a runner uses and that are installed; return their versions.

    Done before memory is measured: an import is no part of a solve.
    """
    present = {module: name for module, name in runner.packages.items() if find_spec(module)}
    for module in present:
        importlib.import_module(module)
    # ours may be a checkout that is not installed
    return {
        name: torchgw.__version__ if name == "torchgw" else importlib.metadata.version(name)
        for name in present.values()
    }
