"""Launch every kernel under compute-sanitizer: ``python tests/house/sanitize.py memcheck``.

Without a tool's name the small problems are solved without it, in Triton's interpreter where there
is no GPU, and kernels that none of them reaches are named. The exit code is 1 if there are some,
2 if there is no compute-sanitizer, and its own otherwise.
"""

from __future__ import annotations

import collections
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")


class Again:
    """What stands for a recorded graph: graphs cannot allocate without PyTorch's cache of memory.

    In that cache small arrays lie in one piece, beyond whose end alone an access would be noticed.
    """

    def __init__(self, function, *_, **__):
        self.replay = function


def count_launches():
    """Count the launches of each kernel from now on."""
    from torchgw._sinkhorn.kernels import sweeps
    from torchgw._tensors import ahead, cuda_graphs
    from torchgw.distances import geodesics

    launched = collections.Counter()
    ready = ahead.ready

    def counted(kernel, arguments, options):
        launched[kernel.__name__] += 1
        return ready(kernel, arguments, options)

    ahead.ready = counted
    for module in (cuda_graphs, geodesics, sweeps):
        module.capture = Again
    return launched


def solve_all(device):
    """Solve a small problem of each kind, and call what such problems do not come to."""
    import numpy as np
    import torch
    from problems import solve_by_name
    from scipy.sparse import random_array

    import torchgw
    from torchgw._batch import engine, product_triton
    from torchgw.distances import geodesics, profiles_triton
    from torchgw.distances._graph.edges import from_csr
    from torchgw.distances._graph.leaves import into_leaves
    from torchgw.distances._graph.neighbours import _nearest_by_one_launch
    from torchgw.distances._graph.neighbours_triton import nearest_candidates
    from torchgw.distances._paths import relaxation_triton
    from torchgw.distances._paths.min_plus_triton import close_

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(25, 3)), rng.normal(size=(21, 2))
    common = {
        "device": device, "backend": "triton", "random_state": 0, "max_iter": 2, "n_init": 1,
        "epsilon": 0.05, "inner_max_iter": 12, "distances": "sqeuclidean",
    }  # fmt: skip
    for options in (
        {"precision": "float64", "storage": "stored", "n_init": 4},
        {"precision": "float32", "storage": "streamed"},
        {"precision": "float64", "storage": "streamed"},
        {"storage": "streamed", "skip_tiles": True},
        {"gradient": "sampled", "n_anchors": 20, "storage": "streamed"},
        {"unbalanced": 1.0, "storage": "streamed"},
        {"mass": 0.6},
    ):
        plan = solve_by_name(x, y, **common | options).lazy_plan
        print(options, flush=True)
        plan.topk(2)
        plan.to_dense()
        plan @ np.ones((21, 3))
    # sums over many columns are shared by programs
    many = rng.normal(size=(600, 2))
    alone = {"precision": "float64", "storage": "streamed", "skip_tiles": False, "n_init": 1}
    solve_by_name(x, many, **common | alone)
    engine.on_chip = lambda *_: True
    for by_programs in (True, False):
        engine.may_begin = lambda *_, by_programs=by_programs: by_programs
        pairs = [x[:9], x[:12]], [y[:7], y[:8]]
        torchgw.solve_many(*pairs, distances="euclidean", device=device, n_init=1)
        options = {"distances": "euclidean", "device": device, "n_init": 1}
        torchgw.solve_many(*pairs, **options, unbalanced=1.0, max_iter=2)
    tables = torch.rand(2, 3, 9, 7, dtype=torch.float64, device=device)
    product_triton.batch_product(tables[0], tables[1].mT)
    half = random_array((150, 150), density=0.05, rng=rng)
    edges = from_csr((half + half.T).tocsr()).to(device)
    few = geodesics.EdgeRelaxation(edges)
    relaxation_triton.ROWS, geodesics._ROUNDS = 16, 2
    for rows in (0, 10**6):
        geodesics._ONE_LAUNCH_ROWS = rows
        few.columns(torch.arange(5, device=device))
    close_(torch.rand(150, 150, dtype=torch.float64, device=device))
    points = torch.rand(250, 40, dtype=torch.float64, device=device) / 40
    for products in (1, 3):
        nearest_candidates(points, points[:60], 16, products)
    table = torch.rand(70, 5, dtype=torch.float64, device=device)
    profiles_triton.sum_functions(table, points[:70, 0].contiguous(), 0.5)
    profiles_triton.sum_differences(table, table, points[:70, 0].contiguous(), (1.0, 1.0))
    leaves = into_leaves(points[:, :3].contiguous())
    _nearest_by_one_launch(leaves, leaves, 5)


def inside():
    """Launch all kernels here; return the names of those that nothing launched."""
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    warnings.simplefilter("ignore")
    launched = count_launches()
    solve_all("cuda" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.synchronize()
    from test_kernels import KERNELS

    print({name: launched[name] for name in KERNELS})
    return [name for name in KERNELS if not launched[name]]


def main():
    """Run the tool, or what it looks at."""
    if len(sys.argv) < 2:
        missed = inside()
        print(f"not launched: {missed}" if missed else "all kernels were launched")
        return int(bool(missed))
    tool = sys.argv[1]
    found = shutil.which("compute-sanitizer")
    if tool not in TOOLS or found is None:
        print("no compute-sanitizer" if found is None else f"the tools are {', '.join(TOOLS)}")
        return 2
    command = [found, "--tool", tool, "--error-exitcode", "3", sys.executable, __file__]
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, env=os.environ | apart, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
