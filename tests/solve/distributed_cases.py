"""Solves that several processes share, run as a script by each of them, and in one process."""

from __future__ import annotations

import hashlib
import os
import pickle
import resource
import signal
import sys
import time
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from problems import solve_by_name

import torchgw
from torchgw._problem import limits
from torchgw._solve import pipeline
from torchgw._tensors.ranks import join
from torchgw._variants import solve_rows
from torchgw.distances import knn_graph
from torchgw.distances._graph import neighbours


def points(seed, n, dimension):
    angle = np.sort(np.random.default_rng(seed).random(n)) * 6
    circle = np.stack([angle * np.cos(angle), np.sin(angle), angle], axis=1)
    return circle[:, :dimension]


X, Y = points(0, 101, 2), points(1, 93, 3)
M = np.random.default_rng(2).random((101, 93))
STREAMED = {"X": X, "Y": Y, "distances": "sqeuclidean", "gradient": "factored"}
STREAMED["storage"] = "streamed"
DENSE = {"X": X, "Y": Y, "distances": "euclidean", "gradient": "dense"}
CASES = {
    "tiles": STREAMED,
    "factored": {**STREAMED, "skip_tiles": False},
    "dense": DENSE,
    "stored": {**STREAMED, "storage": "stored"},
    "sampled": {**DENSE, "gradient": "sampled", "n_anchors": 32},
    "fused": {**DENSE, "M": M},
    "features": {**STREAMED, "features": (X, Y[:, :2])},
    "unbalanced": {**DENSE, "unbalanced": 0.5},
    "semi-relaxed": {**STREAMED, "unbalanced": (float("inf"), 0.0)},
    "partial": {**DENSE, "mass": 0.6},
    "partial streamed": {**STREAMED, "mass": 0.6, "epsilon": 0.02},
    "proximal": {**DENSE, "regularization": "proximal"},
    "absolute": {**DENSE, "loss": "absolute"},
    "compile": {**DENSE, "backend": "compile"},
}
# sides that ranks prepare, one each
CASES["landmark"] = {
    "X": X,
    "Y": Y,
    "distances": "landmark",
    "n_landmarks": 20,
    "gradient": "factored",
}
GRAPHS = {"X": knn_graph(X), "Y": knn_graph(Y, 6)}
CASES["graph"] = {**GRAPHS, "distances": "precomputed", "gradient": "dense"}
CASES["graph landmark"] = CASES["landmark"] | GRAPHS
CASES["graph dijkstra"] = {**GRAPHS, "distances": "dijkstra", "gradient": "sampled"}
# points of which each rank finds the neighbours of some, by a tree and by tiles
CASES["neighbours"] = CASES["landmark"] | {"X": points(2, 700, 3)}
CASES["wide neighbours"] = CASES["neighbours"] | {
    "X": np.random.default_rng(5).integers(0, 3, (700, 13)).astype(float)
}
CASES["geodesic"] = {"X": X, "Y": Y, "distances": "precomputed", "gradient": "dense"}
# what ranks but the first are not given, or get in shards
SCATTERED = {"one has it": {**DENSE, "features": (X, Y[:, :2]), "epsilon": 0.05}, "shards": DENSE}
CASES |= SCATTERED
CASES["cells"] = {**STREAMED, "resolution": 0.5, "epsilon": 0.05}
# in Triton's interpreter where there is no GPU
TRITON = {
    "triton tiles": {**STREAMED, "backend": "triton", "max_iter": 2, "inner_max_iter": 3},
}
CASES |= TRITON
LITTLE = {"epsilon": 0.005, "n_init": 1, "max_iter": 6, "random_state": 0, "scale": "max"}


def numbers(result):
    """All numbers of a result whose bits must not depend on the processes."""
    return {
        "f": np.asarray(result.potential_a),
        "g": np.asarray(result.potential_b),
        "a": np.asarray(result.marginal_a),
        "b": np.asarray(result.marginal_b),
        "values": np.array([result.value, result.report.objective, result.epsilon]),
        "topk": np.asarray(result.lazy_plan.topk(3)[1]),
        "errors": np.array([step.marginal_error for step in result.history]),
    }


def read_together(result):
    """What the processes read off a plan together, beside what this one reads off by itself."""
    alone = result.lazy_plan
    if dist.get_rank() == 0:
        # what one process reads by itself is nothing to the others
        alone.marginals()
    plan = alone.shared()
    values = np.random.default_rng(3).normal(size=(alone.shape[1], 5))
    read = {"product": plan @ values, "masses": np.concatenate(plan.marginals())}
    assert np.allclose(read["product"], alone @ values, rtol=1e-4, atol=1e-7)
    assert np.array_equal(plan.topk(2)[1], alone.topk(2)[1])
    return read


def scattered(name):
    """Give this rank its part of the input of a case."""
    options = dict(CASES[name])
    if name == "shards":
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for side in ("X", "Y"):
            points = torch.from_numpy(options[side])
            options[side] = distribute_tensor(points, mesh, [Shard(0)])
        assert len(options["X"].to_local()) < len(X) or dist.get_world_size() == 1
    elif dist.get_rank() > 0:
        options |= {"X": None, "Y": None, "features": None}
    return options


@contextmanager
def subsampled():
    """Small problems count as large ones."""
    few = limits.CPU._replace(subsample=100)
    with mock.patch.object(pipeline, "_COARSE_POINTS", 50), mock.patch.dict(limits.LIMITS, cpu=few):
        yield


def run(names):
    """Solve cases with the process group that there is."""
    found = {}
    for name in names:
        small = {
            "cells": subsampled(),
            # tiles of 46 points
            "wide neighbours": mock.patch.object(neighbours, "_WORK_BYTES", (2**20, 2**20)),
        }
        with small.get(name, nullcontext()):
            options = scattered(name) if name in SCATTERED else CASES[name]
            result = solve_by_name(**LITTLE | options, distributed=True)
        assert (result.report.resolution is not None) == (name == "cells")
        found[name] = numbers(result) | read_together(result)
    return found


def makers():
    """Make three things on some of the ranks: who made each, and what this rank was warned of."""

    def make(number):
        warnings.warn(f"{number} by {dist.get_rank()}", torchgw.GraphWarning, stacklevel=1)
        table = torch.full((3, number), number / 3, dtype=torch.float64)
        return {"by": dist.get_rank(), "tables": (table.T, table[:0]), "none": None}

    ranks = join(True, torch.device("cpu"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        things = ranks.divide([partial(make, number) for number in range(3)])
    words = [str(one.message) for one in told if one.category is torchgw.GraphWarning]
    return things, words


def cached(folder):
    """Solve twice with a cache, of which the first process alone knows at first."""
    found = {}
    for turn in ("made", "read"):
        for name in ("graph landmark", "graph"):
            options = LITTLE | CASES[name] | {"cache": folder / f"cache{dist.get_rank()}"}
            found[f"{name} {turn}"] = numbers(solve_by_name(**options, distributed=True))
    return found


def matrix(folder):
    """Values between seven clouds, by all processes together."""
    rng = np.random.default_rng(6)
    spaces = [rng.normal(size=(count, 2)) for count in (6, 9, 12, 7, 8, 11, 10)]
    options = {"epsilon": 0.05, "progress": False, "output": "objective"}
    found = torchgw.pairwise(spaces, distributed="auto", **options)
    assert np.array_equal(found, torchgw.pairwise(spaces, **options))
    few = torchgw.pairwise(spaces, pairs=[(2, 1)], distributed=True, **options)
    return {"all": {"f": found, "few": few}}


def batches():
    """Answers to several problems at once, by all processes together."""
    rng = np.random.default_rng(7)
    near, far = (
        [rng.normal(size=(n, 2)) for n in sizes] for sizes in ((6, 17, 9, 8), (7, 5, 9, 6))
    )
    costs = [rng.random((len(x), len(y))) for x, y in zip(near, far, strict=True)]
    mixed = {"M": costs, "alpha": [0.5, 0.3, 0.9, 0.6], "epsilon": [0.05, 0.1, 0.06, "auto"]}
    lists = {
        "plain": {"epsilon": 0.05, "n_init": 2},
        "mixed": mixed | {"unbalanced": [1.0, None, (2.0, np.inf), 0.5], "n_init": 1},
        "features": {"features": (near, far), "epsilon": 0.1, "mass": 0.8, "n_init": 1},
    }
    lists["features"]["plans"] = False
    made = {name: partial(torchgw.solve_many, near, far, **each) for name, each in lists.items()}
    # one problem leaves nothing to the second process
    made["one"] = partial(torchgw.solve_many, near[:1], far[:1], epsilon=0.05)
    made["none"] = partial(torchgw.solve_many, [], [])
    stack = rng.random((5, 8, 2))
    tables = np.linalg.norm(stack[:, :, None] - stack[:, None], axis=-1)
    padded = {"sizes_y": [8, 5, 6, 7, 8], "epsilon": 0.1, "M": rng.random((5, 8, 8)), "n_init": 1}
    made["stack"] = partial(torchgw.solve_batch, tables, tables[::-1].copy(), **padded)
    found = {}
    # the answers of this process alone are compared where there is no other
    first = dist.get_world_size() == 1
    for name, solve in made.items():
        shared = solve(distributed="auto")
        alone = solve() if first else shared
        names = ["value_quad", "value_linear", "objective", "marginal_error", "epsilon", "status"]
        names += ["n_iter", "shapes", "alpha"] + ["entries"] * (name != "features")
        found |= {f"{name} {key}": getattr(shared, key) for key in names}
        for key in names:
            assert np.array_equal(getattr(alone, key), getattr(shared, key)), (name, key)
    side = torch.from_numpy(tables).requires_grad_()
    torchgw.solve_batch(
        side, side, epsilon=0.1, n_init=1, differentiable=True, distributed=True
    ).loss.sum().backward()
    return {"all": {"f": found["plain entries"], "slopes": side.grad.numpy(), **found}}


def spoiled():
    """What each process is told where one of them cannot read its input, or has other input."""
    rng = np.random.default_rng(8)
    spaces = [rng.normal(size=(6, 2)) for _ in range(3)]
    told = []
    calls = (
        partial(torchgw.solve_many, Ys=spaces, epsilon=0.1),
        partial(torchgw.pairwise, epsilon=0.1, progress=False),
    )
    for call in calls:
        for value in (np.nan, 0.5):
            mine = [each.copy() for each in spaces]
            if dist.get_rank() == 1:
                mine[2][0] = value
            try:
                call(mine, distributed=True)
            except (torchgw.RankError, torchgw.InvalidInputError) as error:
                told.append(f"{type(error).__name__}: {error}")
            dist.barrier()
    return told


def files(folder):
    """Save a result by all processes together; what each reads, and maps new points to."""
    result = solve_by_name(**LITTLE | CASES["landmark"], distributed=True)
    if dist.get_rank() == 0:
        result.save(folder / "alone.npz")
    together = result.shared()
    together.save(folder / "together.npz")
    mapped = together.transform(X[:40] + 0.01)
    assert np.allclose(mapped, result.transform(X[:40] + 0.01), rtol=1e-6)
    again = torchgw.load(folder / "together.npz")
    share = dist.get_rank(), dist.get_world_size()
    part = again.shard(*share)
    alone = torchgw.load(folder / "together.npz", shard=share)
    assert alone.lazy_plan.cost.left.shape == part.lazy_plan.cost.left.shape
    assert np.array_equal(alone.lazy_plan @ Y, part.lazy_plan @ Y)
    for key, value in numbers(part).items():
        assert np.array_equal(numbers(alone)[key], value, equal_nan=True), key
    part.save(folder / f"part{dist.get_rank()}.npz")
    values = np.random.default_rng(3).normal(size=(len(Y), 5))
    return {"all": {"mapped": mapped, "product": again.lazy_plan @ values, **numbers(again)}}


def by_rows(folder, name="rows", distributed="auto", **given):
    """Match tables by rows, each process some of the blocks; digest the files."""
    near, far = (points(seed, n, 3) for seed, n in ((3, 700), (4, 650)))
    result = torchgw.solve_rows(
        given.pop("X", near), far, folder / name, epsilon=5e-3, block=100, device="cpu",
        distributed=distributed, **{"n_base": 64, **given},
    )  # fmt: skip
    digest = hashlib.sha256()
    for path in sorted((folder / name).glob("*-*.npz")):
        digest.update(path.name.encode() + path.read_bytes())
    told = np.array([result.value, result.marginal_error])
    bits = np.frombuffer(digest.digest(), np.uint8)
    return {"f": result.rows()["potential"], "told": told, "bits": bits}


def rows(folder):
    """Match arrays, and the rows of a DTensor where they are, by rows."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = distribute_tensor(torch.from_numpy(points(3, 700, 3)), mesh, [Shard(0)])
    found = {"rows": by_rows(folder)}
    with mock.patch.multiple(solve_rows, _FIRST=32, _ALLOWED=0.02, _MOST=256):
        found["chosen"] = by_rows(folder, "chosen", n_base="auto")
    of_shards = by_rows(folder, "shards", X=shards)
    assert np.allclose(of_shards["f"], found["rows"]["f"], atol=1e-12)
    assert np.allclose(of_shards["told"], found["rows"]["told"], rtol=1e-9)
    stopped = torchgw.solve_rows(
        points(3, 700, 3), points(4, 650, 3), folder / "stopped", epsilon=5e-3, n_base=64,
        block=100, device="cpu", distributed="auto", time_limit=0,
    )  # fmt: skip
    assert stopped.status == "STOPPED"
    assert len(list((folder / "stopped").glob("*-*.npz"))) == dist.get_world_size()
    # what is missing is cut into blocks anew where rows are dealt out otherwise
    dist.barrier()
    if dist.get_rank() == 0:
        for lost in sorted((folder / "shards").glob("X-*.npz"))[1:4]:
            lost.unlink()
    dist.barrier()
    again = by_rows(folder, "shards")
    assert np.allclose(again["f"], found["rows"]["f"], atol=1e-12)
    assert np.allclose(again["told"], found["rows"]["told"], rtol=1e-9)
    return found


def full(folder):
    """What each process is told where one of them cannot write any more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        by_rows(folder, "full")
    except (torchgw.RankError, torchgw.InvalidInputError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        dist.barrier()


def killed(folder):
    """What is told where the last process is killed before it writes its second block."""
    written, count = solve_rows.write_archive, []

    def write(path, tree, arrays):
        count.append(path)
        if dist.get_rank() == dist.get_world_size() - 1 and len(count) == 2:
            Path(folder, "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        written(path, tree, arrays)

    with mock.patch.object(solve_rows, "write_archive", write):
        try:
            by_rows(folder)
        except torchgw.RankError as error:
            sys.stdout.write(f"{error}; told at {time.time()}")
            sys.stdout.flush()
            os._exit(3)


def enter(rank, size, folder):
    """Join the process group."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rank, size, folder, *names = sys.argv[1:]
    enter(int(rank), int(size), folder)
    special = {"makers": makers, "batches": batches, "spoiled": spoiled}
    kept = cached, files, full, killed, matrix, rows
    special |= {each.__name__: partial(each, Path(folder)) for each in kept}
    # one task after the other, as starting a process takes seconds
    tasks = [task.split("; ") for task in names]
    found = [special[task[0]]() if task[0] in special else run(task) for task in tasks]
    Path(folder, f"found{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    os._exit(0)
