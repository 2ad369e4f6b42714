"""Solve a small problem of each kind; started with ``python -W error``, it must say nothing."""

from __future__ import annotations

import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import scipy.sparse
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torchgw
from torchgw._problem import losses


class EdgeIndex:
    """A graph as PyTorch Geometric has it."""

    def __init__(self, graph):
        pairs = torch.tensor(list(graph.edges)).T
        self.edge_index = torch.cat([pairs, pairs.flip(0)], 1)
        self.num_nodes = len(graph)
        self.edge_weight = self.edge_attr = None


def in_anndata(points):
    import anndata
    import pandas

    names = [f"cell {number}" for number in range(len(points))]
    held = anndata.AnnData(points.copy(), obs=pandas.DataFrame(index=names))
    held.obsm["X_pca"] = points
    return held


def in_a_file(result):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.npz"
        result.save(path)
        return torchgw.load(path)


def read(result):
    """Read a plan in each of the ways that make something sparse."""
    result.matching()
    for one in (result, in_a_file(result)):
        one.lazy_plan.to_sparse()
        one.lazy_plan.to_sparse(2)
        one.lazy_plan.T @ np.ones((one.lazy_plan.shape[0], 1))


def kinds():
    """Name what is done, and the function that does it."""
    with warnings.catch_warnings():
        # what others warn of while they are imported is theirs
        warnings.simplefilter("ignore")
        if find_spec("anndata"):
            import anndata  # noqa: F401
        import networkx
        import pandas
        import sklearn.utils.validation  # noqa: F401
    import torchgw.pot
    import torchgw.sklearn

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 2)), rng.normal(size=(14, 2))
    # a plan of few entries, which is not the identity of a copy
    many = rng.normal(size=(60, 2))
    copy = many[::-1] + 1e-4 * rng.normal(size=many.shape)
    tables = [np.linalg.norm(part[:, None] - part, axis=2) for part in (x, y)]
    as_tensors = [torch.from_numpy(table) for table in tables]
    graphs = [networkx.connected_watts_strogatz_graph(n, 4, 0.2, seed=n) for n in (16, 14)]
    arrays = [networkx.to_scipy_sparse_array(graph, format="csr") for graph in graphs]
    large = networkx.connected_watts_strogatz_graph(60, 4, 0.2, seed=0)
    array = networkx.to_scipy_sparse_array(large, format="csr")

    def solve(*sides, **options):
        return torchgw.solve(*sides, **{"n_init": 1, "random_state": 0} | options)

    sides = {
        "NumPy": (x, y),
        "tensors": (torch.from_numpy(x), torch.from_numpy(y).float()),
        "lists": (x.tolist(), y.tolist()),
        "pandas": (pandas.DataFrame(x), pandas.DataFrame(y)),
        "networkx": graphs,
        "SciPy arrays": arrays,
        "SciPy matrices": [scipy.sparse.csr_matrix(one) for one in arrays],
        "edge_index": [EdgeIndex(graph) for graph in graphs],
    }
    yield from ((name, lambda given=given: solve(*given)) for name, given in sides.items())
    yield "search", lambda: solve(x, y, n_init=4)
    yield "a sharp plan", lambda: read(solve(many, copy, epsilon=1e-3))
    yield "a copy", lambda: read(solve(many, many[::-1].copy()))
    yield "a large graph", lambda: read(solve(array, array[::-1][:, ::-1]))
    yield "its table", lambda: solve(D_X=array.toarray(), D_Y=array.toarray()[::-1, ::-1])
    yield "tables", lambda: solve(D_X=tables[0], D_Y=tables[1])
    yield "relaxed", lambda: solve(x, y, unbalanced=1.0, scale="max")
    yield "partial", lambda: solve(x, y, mass=0.7, scale="max")
    yield "fused", lambda: solve(x, y, M=rng.random((16, 14)), alpha=0.5)
    yield "solve_many", lambda: torchgw.solve_many([x, y], [y, x])
    yield "pairwise", lambda: torchgw.pairwise([x, y, x[:9]])
    yield "barycenter", lambda: torchgw.barycenter([x[:8], y[:7]], 5, random_state=0)
    one = {"n_init": 1, "random_state": 0}
    if find_spec("anndata"):
        import torchgw.anndata

        cells = in_anndata(x), in_anndata(y)
        yield "anndata", lambda: torchgw.anndata.align(*cells, solve_options=one)
    yield "sklearn", lambda: torchgw.sklearn.GWAligner(**one).fit(x, y).transform(x)
    pot = torchgw.pot.gromov
    yield "pot", lambda: pot.gromov_wasserstein(*as_tensors)
    yield "pot, entropic", lambda: pot.entropic_gromov_wasserstein(*tables)


def main():
    # otherwise PyTorch says most things once, to whoever comes first
    torch.set_warn_always(True)
    # small problems are multiplied as large ones are
    losses._LOOKED_AT = 0
    # small graphs without any labels are often symmetric, which is ours to say
    for said in (torchgw.AmbiguityWarning, torchgw.SearchWarning):
        warnings.filterwarnings("ignore", category=said)
    for name, run in kinds():
        try:
            run()
        except Warning as warning:
            raise RuntimeError(f"said by {name}") from warning


if __name__ == "__main__":
    main()
