"""The first fifteen minutes of five users, from the README and the guides alone: nothing hidden.

Cells, graphs, shapes, names of POT, training. Every warning is an error but those that are asked
for: what is here must be as the pages say. All of it is slow.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import SHARED

import torchgw
from torchgw.datasets import spiral, swiss_roll

pytestmark = pytest.mark.slow


def turned(count, seed=0):
    """A cloud of clusters in space, and the same turned."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(6, 3)) * 1.5
    cloud = centres[rng.integers(6, size=count)] + rng.normal(size=(count, 3)) / 2
    turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    return cloud, cloud @ turn


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_cells(tmp_path):
    anndata = pytest.importorskip("anndata")
    from torchgw.anndata import TranslationProblem, align
    from torchgw.metrics import foscttm

    X, _ = spiral(150, random_state=0)
    Y, age = swiss_roll(200, random_state=1)
    atac, rna = anndata.AnnData(np.asarray(X)), anndata.AnnData(np.asarray(Y))
    rna.obs["age"] = np.asarray(age)
    rna.obs["leiden"] = np.digitize(rna.obs["age"], np.quantile(rna.obs["age"], (0.3, 0.6)))
    options = {"random_state": 0}
    # clusters that are numbers stay clusters, and that is said
    with pytest.warns(torchgw.TorchGWWarning, match="leiden.*labels of groups"):
        align(atac, rna, labels=["age", "leiden"], solve_options=options)
    assert set(atac.obs["torchgw_leiden"]) <= {0, 1, 2}
    atac.write_h5ad(tmp_path / "atac.h5ad")
    # another way to compare, under the same name, leaves nothing of the first
    for side in (atac, rna):
        points = torch.as_tensor(np.asarray(side.X))
        side.obsp["d"] = torch.cdist(points, points).numpy()
    align(atac, rna, use_obsp="d", solve_options={**options, "n_init": 1})
    assert "X_torchgw" not in atac.obsm
    assert "torchgw_leiden" not in atac.obs
    # with moscot's names and order
    problem = TranslationProblem(atac, rna).prepare(use_rep="X")
    problem.solve(1.0, 1e-3, solve_options=options)
    assert problem.translate("src", "tgt", forward=True).shape == (150, 3)
    assert problem.translate("src", "tgt", False).shape == (200, 2)
    assert "solved: CONVERGED" in repr(problem)
    with pytest.raises(torchgw.InvalidInputError, match="`adata_src.obsm`, which has"):
        align(atac, rna, use_rep="X_umap")
    again = TranslationProblem(rna, rna.copy()).prepare(use_rep="X").solve(solve_options=options)
    assert foscttm(again.translate(), np.asarray(rna.X)) < 0.05
    scot = TranslationProblem(rna, rna.copy())
    scot.prepare(use_rep="X", recipe="scot", metric="euclidean").solve()


@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning", "ignore::FutureWarning")
def test_the_default_is_no_worse_than_the_recipe_on_real_cells():
    """In either space: .167 of one beside .149 of the other were of two spaces."""
    anndata = pytest.importorskip("anndata")
    from torchgw.anndata import align
    from torchgw.metrics import foscttm

    path = SHARED / "snare.npz"
    if not path.exists():
        pytest.skip("needs snare.npz beside the checkout")
    with np.load(path) as data:
        atac, rna = (data[name].astype(float) for name in ("atac", "rna"))
    unit = rna / np.linalg.norm(rna, axis=1, keepdims=True)
    scores = []
    for recipe in (None, "scot"):
        sides = anndata.AnnData(atac), anndata.AnnData(rna)
        plan = np.asarray(align(*sides, recipe=recipe, solve_options={"random_state": 0}).plan)
        plan = plan / plan.sum(1, keepdims=True)
        scores.append([foscttm(plan @ space, space) for space in (rna, unit)])
    default, scot = scores
    assert default[0] < scot[0] < 0.18
    assert default[1] < scot[1] < 0.155


def test_graphs(tmp_path):
    networkx = pytest.importorskip("networkx")
    import matplotlib as mpl

    mpl.use("Agg")
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import Pipeline
    from sklearn.svm import SVC

    from torchgw.plotting import plot_match
    from torchgw.sklearn import GWKernel

    weighted = networkx.karate_club_graph()
    graph = networkx.create_empty_copy(weighted)
    graph.add_edges_from(weighted.edges)
    with pytest.warns(torchgw.GraphWarning, match="Every edge of `Y` has length 1"):
        torchgw.solve(weighted, graph, random_state=0)
    copy = networkx.relabel_nodes(graph, lambda node: f"person {node}")
    matching = torchgw.solve(graph, copy, random_state=0).matching()
    assert matching.edges_kept == graph.number_of_edges()
    named = matching.as_dict(graph, copy)
    assert all(copy.has_edge(named[u], named[v]) for u, v in graph.edges)
    result = torchgw.solve(graph, copy, distances="geodesic", features="degree", random_state=0)
    plot_match(result, graph, copy)[0].figure.savefig(tmp_path / "graphs.png")
    rng = np.random.default_rng(0)
    many = [
        networkx.cycle_graph(int(size)) if kind else networkx.star_graph(int(size) - 1)
        for kind, size in zip([0, 1] * 8, rng.integers(6, 10, 16), strict=True)
    ]
    pipeline = Pipeline(
        [("kernel", GWKernel(epsilon=0.02, n_init=1)), ("svm", SVC(kernel="precomputed"))]
    )
    spaces = {"kernel__gamma": [1.0, 10.0], "svm__C": [1.0, 10.0]}
    search = GridSearchCV(pipeline, spaces, cv=2).fit(many, [0, 1] * 8)
    assert search.best_score_ == 1


def test_shapes():
    X, Y = turned(300)
    # the whole, in space
    with warnings.catch_warnings():
        # clusters, whose neighbour graph is in pieces
        warnings.simplefilter("ignore", torchgw.GraphWarning)
        whole = torchgw.solve(X, Y, random_state=0)
    assert (np.asarray(whole.lazy_plan.argmax()) == np.arange(300)).mean() > 0.9
    # a part of it
    part = torchgw.solve(X[:180], Y, mass=0.6, random_state=0)
    assert part.log["distances"]["chosen"] == "euclidean"
    assert (np.asarray(part.lazy_plan.argmax()) == np.arange(180)).mean() > 0.9
    # along a curve, by name
    curve, roll = spiral(150, random_state=0)[0], swiss_roll(200, random_state=1)[0]
    along = torchgw.solve(curve, roll, distances="geodesic", random_state=0)
    assert along.transform(curve[:5]).shape == (5, 3)


def test_names_of_pot():
    ot = pytest.importorskip("ot")
    import torchgw.pot as ours

    X, Y = turned(40)
    C1, C2 = ours.dist(X, X), ours.dist(Y, Y)
    C1, C2 = C1 / C1.max(), C2 / C2.max()
    np.testing.assert_allclose(C1, ot.dist(X, X) / ot.dist(X, X).max())
    p = ours.unif(40)
    for solver in (ours.gromov.gromov_wasserstein, ours.gromov_wasserstein):
        plan = solver(C1, C2, p, p, "square_loss")
        np.testing.assert_allclose(plan.sum(1), p, atol=1e-6)
    entropic = ours.gromov.entropic_gromov_wasserstein(C1, C2, p, p, epsilon=5e-3)
    assert (np.asarray(entropic).argmax(1) == np.arange(40)).mean() > 0.9
    assert torchgw.pot is ours


def test_training():
    generator = torch.Generator().manual_seed(0)
    points = torch.nn.Parameter(torch.randn(40, 2, generator=generator))
    shape = torch.randn(50, 3, generator=generator)
    options = {"distances": "sqeuclidean", "epsilon": 0.5}
    with pytest.raises(torchgw.UnsupportedError, match="differentiable='value'"):
        torchgw.solve(points, shape, **options, n_init=1).loss.backward()
    optimiser = torch.optim.Adam([points], lr=0.05)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.AmbiguityWarning)
        last = torchgw.solve(points, shape, **options, random_state=0)
    for _ in range(10):
        result = torchgw.solve(points, shape, **options, differentiable="value", init=last)
        optimiser.zero_grad()
        result.loss.backward()
        optimiser.step()
        losses.append(float(result.loss.detach()))
        last = result
    assert losses[-1] < losses[0]


USER_CODE = """
import numpy as np
import torch
import torchgw
from torchgw.datasets import spiral, swiss_roll
from torchgw.metrics import foscttm
from torchgw.sklearn import GWAligner, GWKernel

X, _ = spiral(40, random_state=0)
Y, _ = swiss_roll(50, random_state=1)
result = torchgw.solve(X, Y, random_state=0)
moved = result.lazy_plan.barycentric(Y)
score: float = foscttm(moved, Y[:40])
named: dict[object, object] = result.matching().as_dict()
total = float(result.plan.sum())
trained = torchgw.solve(torch.randn(10, 2), Y, epsilon=0.5, differentiable="value", n_init=1)
loss: torch.Tensor = trained.loss
values = torchgw.pairwise([X, Y], progress=False)
aligner = GWAligner(random_state=0).fit(np.asarray(X), np.asarray(Y))
kernel = GWKernel(features="kind", alpha=0.5).fit_transform([X, Y])
"""


def test_user_code_passes_mypy_strict(tmp_path):
    (tmp_path / "user.py").write_text(USER_CODE)
    root = Path(torchgw.__file__).parents[1]
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "user.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"MYPYPATH": str(root), "PATH": ""},
    )
    assert done.returncode == 0, done.stdout
