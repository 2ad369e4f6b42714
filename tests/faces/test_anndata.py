"""AnnData in, AnnData out: what is written where, and that it survives a file."""

from __future__ import annotations

import contextlib
import inspect
import warnings

import numpy as np
import pytest
import scipy.sparse
from problems import SHARED, isometric_copy
from scipy.spatial.distance import cdist

anndata = pytest.importorskip("anndata", reason="needs anndata (pip install anndata)")

import h5py  # noqa: E402
from hostile import ANYTHING  # noqa: E402

import torchgw  # noqa: E402
from torchgw import InvalidInputError, TorchGWError  # noqa: E402
from torchgw.anndata import _spaces, align  # noqa: E402
from torchgw.distances import knn_graph  # noqa: E402
from torchgw.metrics import foscttm, label_accuracy  # noqa: E402

pytestmark = [
    # of anndata itself
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SNARE = SHARED / "snare.npz"
RIVALS = ("use_rep", "use_obsp")
EXACT = {"distances": "euclidean", "epsilon": 1e-3}


@pytest.fixture
def pair():
    """A cloud and its copy, turned and shuffled; labels on the target only."""
    x, y, answer = isometric_copy(60)
    source = anndata.AnnData(np.zeros((60, 0)), obsm={"X_lsi": x})
    target = anndata.AnnData(np.zeros((60, 0)), obsm={"X_pca": y})
    target.obs_names = [f"t{i}" for i in range(60)]
    target.obs["kind"] = np.where(x[np.argsort(answer), 0] > 0, "right", "left")
    return source, target, answer


def test_what_is_written(pair, tmp_path):
    source, target, answer = pair
    x, y = source.obsm["X_lsi"], target.obsm["X_pca"]
    result = align(
        source, target, use_rep=("X_lsi", "X_pca"), labels="kind", sparse_topk=3,
        solve_options=EXACT,
    )  # fmt: skip
    np.testing.assert_allclose(source.obsm["X_torchgw"], result.lazy_plan.barycentric(y))
    np.testing.assert_allclose(target.obsm["X_torchgw"], y, rtol=1e-11)
    assert not np.shares_memory(target.obsm["X_torchgw"], target.obsm["X_pca"])
    plan = source.obsm["torchgw_plan"]
    assert scipy.sparse.issparse(plan)
    assert plan.shape == (60, 60)
    np.testing.assert_array_equal(plan.toarray().argmax(1), answer)
    assert list(source.uns["torchgw"]["plan_columns"]) == list(target.obs_names)
    assert source.uns["torchgw"]["status"] == "CONVERGED"
    expected = np.where(x[:, 0] > 0, "right", "left")
    np.testing.assert_array_equal(source.obs["torchgw_kind"], expected)
    assert source.obs["torchgw_kind_share"].min() > 0.5
    assert "torchgw_kind" not in target.obs
    source.write_h5ad(tmp_path / "out.h5ad")
    again = anndata.read_h5ad(tmp_path / "out.h5ad")
    np.testing.assert_array_equal(again.obsm["torchgw_plan"].toarray(), plan.toarray())
    assert again.uns["torchgw"]["value"] == result.value
    assert again[:5].obsm["torchgw_plan"].shape == (5, 60)


def test_defaults_and_names(pair):
    source, target, _ = pair
    source.X = np.zeros((60, 0))
    small = anndata.AnnData(source.obsm["X_lsi"])
    align(small, target, key_added="gw", solve_options=EXACT)
    assert {"X_gw", "gw_plan"} <= set(small.obsm)
    assert "gw" in target.uns


def test_graphs_and_matrices(pair):
    source, target, answer = pair
    source.obsp["d"] = cdist(source.obsm["X_lsi"], source.obsm["X_lsi"])
    target.obsp["d"] = cdist(target.obsm["X_pca"], target.obsm["X_pca"])
    result = align(source, target, use_obsp="d", solve_options={"scale": "max", "epsilon": 1e-3})
    np.testing.assert_array_equal(result.lazy_plan.argmax(), answer)
    assert "X_torchgw" not in source.obsm
    # a directed neighbour graph, as scanpy keeps it
    graph = scipy.sparse.tril(knn_graph(source.obsm["X_lsi"], 8)).tocsr()
    source.obsp["distances"] = graph
    target.obsp["distances"] = knn_graph(target.obsm["X_pca"], 8)
    result = align(source, target, use_obsp="distances", solve_options={"epsilon": 1e-3})
    np.testing.assert_array_equal(result.lazy_plan.argmax(), answer)


def test_joint_coordinates_decide(pair):
    """A cloud and its mirror image: shared coordinates say which points are partners."""
    x = np.random.default_rng(0).normal(size=(40, 2))
    x = np.concatenate([x, -x])
    source = anndata.AnnData(x, obsm={"shared": x[:, :1]})
    target = anndata.AnnData(x, obsm={"common": x[:, :1]})
    result = align(source, target, joint_rep=("shared", "common"), solve_options=EXACT)
    assert result.alpha == 0.5
    # without them half of the points would find their mirror image
    assert (np.asarray(result.lazy_plan.argmax()) == np.arange(80)).mean() > 0.95


def test_labels_of_both_sides_and_missing_ones(pair):
    source, target, answer = pair
    source.obs["kind"] = target.obs["kind"].to_numpy()[answer]
    target.obs["kind"] = target.obs["kind"].where(np.arange(60) % 3 > 0)
    align(source, target, use_rep=("X_lsi", "X_pca"), labels="kind", solve_options=EXACT)
    expected = source.obs["kind"].to_numpy()[np.argsort(answer)]
    np.testing.assert_array_equal(target.obs["torchgw_kind"], expected)
    assert set(source.obs["torchgw_kind"].cat.categories) == {"left", "right"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_rep": "X_umap"}, "There is no 'X_umap' in `adata_src.obsm`, which has 'X_lsi'"),
        ({"use_obsp": "d"}, "There is no 'd' in `adata_src.obsp`, which has nothing"),
        ({"use_rep": "X_lsi", "use_obsp": "d"}, "not both"),
        ({"use_rep": ("X_lsi", "X_pca"), "labels": "odd"}, "column of neither"),
        ({"use_rep": ("a", "b", "c")}, "one name or a pair"),
        ({"use_rep": ("X_lsi", "X_pca"), "solve_options": {"M": 1}}, "`solve_options` has M"),
        ({"use_rep": ("X_lsi", "X_pca"), "sparse_topk": 0}, "at least 1"),
    ],
)
def test_bad_input(pair, arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        align(*pair[:2], **arguments)


@pytest.mark.parametrize("name", inspect.signature(align).parameters)
def test_every_argument_takes_anything(pair, name):
    usual = {"adata_src": pair[0], "adata_tgt": pair[1], "use_rep": ("X_lsi", "X_pca")}
    usual["solve_options"] = {"distances": "euclidean", "epsilon": 0.5, "n_init": 1}
    for value in ANYTHING:
        keywords = {key: kept for key, kept in usual.items() if (key, name) != RIVALS}
        # a right answer or a clear error
        with contextlib.suppress(TorchGWError):
            align(**{**keywords, name: value})


def test_solve_is_not_for_objects(pair):
    with pytest.raises(TorchGWError, match="`X` is an AnnData. Use torchgw.anndata.align"):
        torchgw.solve(*pair[:2])


def test_no_warnings_of_ours(pair):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="__array__")
        align(*pair[:2], use_rep=("X_lsi", "X_pca"), solve_options={**EXACT, "n_init": 1})


def test_options_of_a_solve_have_their_place(pair):
    with pytest.raises(TorchGWError, match=r"Pass it as solve_options=\{'epsilon': ...\}"):
        align(*pair[:2], use_rep=("X_lsi", "X_pca"), epsilon=1e-3)
    with pytest.raises(TorchGWError, match=r"Pass it as solve_options=\{'inner_tol': ...\}"):
        align(*pair[:2], use_rep=("X_lsi", "X_pca"), inner_tol=1e-9)
    named = {**EXACT, "n_init": 1, "precision": "float32"}
    first, second = (
        align(*pair[:2], use_rep=("X_lsi", "X_pca"), solve_options=options)
        for options in (named, torchgw.Options(**named))
    )
    assert first.precision == "float32"
    np.testing.assert_array_equal(first.plan, second.plan)


def test_sparse_counts_are_refused(pair):
    counts = anndata.AnnData(scipy.sparse.csr_matrix(np.eye(60)))
    with pytest.raises(InvalidInputError, match="Reduce it first"):
        align(counts, pair[1], use_rep=("X", "X_pca"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda points: np.where(points > 1, np.nan, points), "entries that are NaN or infinite"),
        (lambda points: points.astype(str), "array of real numbers"),
        (scipy.sparse.csr_matrix, r"is sparse. Make it dense: .*\.toarray\(\)"),
    ],
)
def test_unusable_points_are_named(pair, change, message):
    source, target, _ = pair
    source.obsm["X_lsi"] = change(source.obsm["X_lsi"])
    with pytest.raises(TorchGWError, match=rf"`adata_src.obsm\['X_lsi'\]` .*{message}"):
        align(source, target, use_rep=("X_lsi", "X_pca"))


def test_points_on_disk_are_read_in_blocks(pair, tmp_path, monkeypatch):
    source, target, answer = pair
    stored = anndata.AnnData(source.obsm["X_lsi"].astype(np.float32), obsm=dict(target.obsm))
    stored.write_h5ad(tmp_path / "points.h5ad")
    expected = align(stored, target, use_rep=("X", "X_pca"), solve_options=EXACT)
    backed = anndata.read_h5ad(tmp_path / "points.h5ad", backed="r")
    read, rows = h5py.Dataset.__getitem__, []

    def counted(dataset, index, *more):
        rows.append(index.stop - index.start)
        return read(dataset, index, *more)

    monkeypatch.setattr(_spaces, "BLOCK_ENTRIES", 50)
    monkeypatch.setattr(h5py.Dataset, "__getitem__", counted)
    result = align(backed, target, use_rep=("X", "X_pca"), solve_options=EXACT)
    columns = stored.shape[1]
    assert rows == [50 // columns] * (-(-60 // (50 // columns)))
    # within the tolerance of the solver: rounded points may end an iteration earlier
    np.testing.assert_allclose(result.potential_a, expected.potential_a, atol=1e-5)
    np.testing.assert_array_equal(result.lazy_plan.argmax(), answer)
    rows.clear()
    align(backed, target, use_rep="X_pca", solve_options=EXACT)
    assert not rows
    backed.file.close()


def test_counts_on_disk_are_refused(pair, tmp_path):
    anndata.AnnData(scipy.sparse.csr_matrix(np.eye(60))).write_h5ad(tmp_path / "counts.h5ad")
    counts = anndata.read_h5ad(tmp_path / "counts.h5ad", backed="r")
    with pytest.raises(InvalidInputError, match="Reduce it first"):
        align(pair[0], counts, use_rep=("X_lsi", "X"))
    counts.file.close()


def test_labels_that_are_all_missing(pair):
    pair[1].obs["kind"] = None
    with pytest.raises(InvalidInputError, match=r"`adata_tgt.obs\['kind'\]` has no labels"):
        align(*pair[:2], use_rep=("X_lsi", "X_pca"), labels="kind")


def test_matrices_in_different_units(pair):
    source, target, answer = pair
    source.obsp["d"] = cdist(source.obsm["X_lsi"], source.obsm["X_lsi"]) * 1e4
    target.obsp["d"] = cdist(target.obsm["X_pca"], target.obsm["X_pca"])
    result = align(source, target, use_obsp="d", solve_options={"epsilon": 1e-3})
    np.testing.assert_array_equal(result.lazy_plan.argmax(), answer)
    unscaled = align(source, target, use_obsp="d", solve_options={"scale": None, "n_init": 1})
    assert unscaled.scale == (1, 1)


def test_metric_of_a_recipe(pair):
    source, target, _ = pair
    source.obsm["long"], target.obsm["long"] = source.obsm["X_lsi"] * 3, target.obsm["X_pca"]
    names = {"use_rep": ("long", "long"), "recipe": "scot"}
    default = align(source, target, **names)
    same = align(source, target, **names, metric="correlation")
    other = align(source, target, **names, metric="euclidean")
    assert default.value == same.value != other.value
    with pytest.raises(InvalidInputError, match="that of a recipe.*'distances': 'euclidean'"):
        align(source, target, use_rep=("long", "long"), metric="euclidean")
    with pytest.raises(InvalidInputError, match="metric"):
        align(source, target, **names, metric="manhattan")


def test_nothing_is_left_of_an_earlier_alignment(pair):
    source, target, _ = pair
    align(source, target, use_rep=("X_lsi", "X_pca"), labels="kind", solve_options=EXACT)
    source.obs["torchgw_of_the_user"] = 1.0
    source.uns["torchgw_kind_colors"] = ["red", "blue"]
    source.obsp["d"] = cdist(source.obsm["X_lsi"], source.obsm["X_lsi"])
    target.obsp["d"] = cdist(target.obsm["X_pca"], target.obsm["X_pca"])
    align(source, target, use_obsp="d", solve_options={"epsilon": 1e-3})
    for side in (source, target):
        assert "X_torchgw" not in side.obsm
    assert list(source.obs) == ["torchgw_of_the_user"]
    assert "torchgw_kind_colors" not in source.uns
    align(target, source, use_obsp="d", solve_options={"epsilon": 1e-3})
    assert "torchgw_plan" not in source.obsm


def test_numbered_clusters_are_labels(pair):
    source, target, answer = pair
    target.obs["leiden"] = np.where(target.obs["kind"] == "left", 2, 5)
    target.obs["counts"] = np.arange(60) * 3
    options = {"use_rep": ("X_lsi", "X_pca"), "solve_options": EXACT}
    with pytest.warns(torchgw.TorchGWWarning, match=r"'leiden'.* 2 different ones.*category"):
        align(source, target, labels=["leiden", "counts"], **options)
    assert list(source.obs["torchgw_leiden"]) == list(target.obs["leiden"].to_numpy()[answer])
    assert source.obs["torchgw_counts"].dtype.kind == "f"
    for kind in ("category", float):
        target.obs["leiden"] = target.obs["leiden"].astype(kind)
        align(source, target, labels="leiden", **options)
        assert ("torchgw_leiden_share" in source.obs) == (kind == "category")


@pytest.mark.slow
@pytest.mark.skipif(not SNARE.is_file(), reason="needs ../shared/data/snare.npz")
def test_snare_seq():
    """Chromatin onto expression, from neighbour graphs as SCOT makes them."""
    from sklearn.neighbors import kneighbors_graph

    with np.load(SNARE) as data:
        order = np.random.default_rng(0).permutation(len(data["rna"]))
        sides = [(data["atac"][order], data["atac_type"][order]), (data["rna"], data["rna_type"])]
    adatas = []
    for points, kind in sides:
        points = points / np.linalg.norm(points, axis=1, keepdims=True)
        adata = anndata.AnnData(np.zeros((len(points), 0)), obsm={"X_pca": points})
        adata.obs["cell_line"] = kind.astype(str)
        adata.obsp["knn"] = kneighbors_graph(
            points, 110, metric="correlation", include_self=True
        ).astype(bool)
        adatas.append(adata)
    atac, rna = adatas
    result = align(atac, rna, use_obsp="knn", labels="cell_line", solve_options={"epsilon": 1e-3})
    assert result.converged
    projected = result.lazy_plan.barycentric(rna.obsm["X_pca"])
    # published: 0.1496; a plan that learnt nothing scores 0.25
    assert foscttm(projected, rna.obsm["X_pca"][order]) < 0.16
    kinds = atac.obs["cell_line"], rna.obs["cell_line"]
    assert label_accuracy(projected, kinds[0], rna.obsm["X_pca"], kinds[1]) > 0.93
    assert (atac.obs["torchgw_cell_line"] == kinds[0]).mean() > 0.9


def test_connectivities_are_steps(pair):
    source, target, answer = pair
    for adata, key in ((source, "X_lsi"), (target, "X_pca")):
        graph = knn_graph(adata.obsm[key], 6)
        adata.obsp["steps"] = graph.copy()
        adata.obsp["steps"].data[:] = 1
        graph.data = np.exp(-graph.data)
        adata.obsp["connectivities"] = graph
    with pytest.warns(torchgw.GraphWarning, match="one step"):
        result = align(source, target, use_obsp="connectivities", solve_options={"random_state": 0})
    expected = align(source, target, use_obsp="steps", solve_options={"random_state": 0})
    assert result.value == expected.value


def test_recipe(pair):
    source, target, answer = pair
    source.obsm["long"], target.obsm["long"] = source.obsm["X_lsi"] * 3, target.obsm["X_pca"]
    names = ("long", "long")
    result = align(source, target, use_rep=names, recipe="scot")
    assert result.epsilon == 1e-3
    np.testing.assert_allclose(np.linalg.norm(target.obsm["X_torchgw"], axis=1), 1)
    other = align(source, target, use_rep=names, recipe="scot", solve_options={"epsilon": 0.01})
    assert other.epsilon == 0.01
    with pytest.raises(InvalidInputError, match="scot"):
        align(source, target, use_rep=names, recipe="scots")
    with pytest.raises(InvalidInputError, match="use_obsp"):
        align(source, target, use_obsp="distances", recipe="scot")


@pytest.mark.slow
@pytest.mark.skipif(not SNARE.is_file(), reason="needs ../shared/data/snare.npz")
@pytest.mark.parametrize(
    ("options", "most"), [({}, 0.170), ({"recipe": "scot"}, 0.150)], ids=["auto", "scot"]
)
def test_snare_seq_from_a_representation(options, most):
    """As a newcomer calls it; geodesics had 6% of the labels right, FOSCTTM .605."""
    with np.load(SNARE) as data:
        order = np.random.default_rng(0).permutation(len(data["rna"]))
        sides = [(data["atac"][order], data["atac_type"][order]), (data["rna"], data["rna_type"])]
    adatas = []
    for points, kind in sides:
        adatas.append(anndata.AnnData(np.zeros((len(points), 0)), obsm={"X_pca": points}))
        adatas[-1].obs["cell_line"] = kind.astype(str)
    atac, rna = adatas
    align(atac, rna, use_rep="X_pca", labels="cell_line", **options)
    assert (atac.obs["torchgw_cell_line"] == atac.obs["cell_line"]).mean() >= 0.93
    assert foscttm(atac.obsm["X_torchgw"], rna.obsm["X_torchgw"][order]) <= most
    if not options:
        assert atac.uns["torchgw"]["distances"].startswith("cosine")


def test_slices_are_placed_beside_each_other(pair, tmp_path):
    source, target, answer = pair
    places = np.random.default_rng(1).normal(size=(60, 2)) * [3, 1]
    turn = np.array([[0.0, 1.0], [-1.0, 0.0]])
    source.obsm["spatial"] = places
    options = {"use_rep": ("X_lsi", "X_pca"), "solve_options": EXACT, "spatial": "rigid"}
    with pytest.raises(InvalidInputError, match=r"`adata_tgt.obsm` has no 'spatial'"):
        align(source, target, **options)
    there = np.empty_like(places)
    there[answer] = places @ turn + 7
    target.obsm["spatial"] = there
    align(source, target, **options)
    np.testing.assert_allclose(source.obsm["spatial_aligned"], places @ turn + 7, atol=1e-8)
    np.testing.assert_array_equal(target.obsm["spatial_aligned"], there)
    assert source.uns["torchgw"]["spatial"]["error"] < 1e-8
    source.write_h5ad(tmp_path / "slice.h5ad")
    again = anndata.read_h5ad(tmp_path / "slice.h5ad")
    assert not again.uns["torchgw"]["spatial"]["reflects"]
    with pytest.raises(InvalidInputError, match="`spatial` must be"):
        align(source, target, **{**options, "spatial": "elastic"})


def test_confidence_is_a_column_of_the_source(pair, tmp_path):
    source, target, _ = pair
    options = {"use_rep": ("X_lsi", "X_pca"), "solve_options": EXACT}
    result = align(source, target, confidence=True, **options)
    assert np.array_equal(source.obs["torchgw_confidence"], result.stability.partner)
    assert source.obs["torchgw_confidence"].mean() > 0.9
    source.write_h5ad(tmp_path / "out.h5ad")
    align(source, target, **options)
    assert "torchgw_confidence" not in source.obs
    # which relaxed plans do not have; the solve is not lost
    options["solve_options"] = {**EXACT, "unbalanced": 1.0}
    with pytest.warns(torchgw.TorchGWWarning, match="no effect.*relaxed marginals"):
        result = align(source, target, confidence=True, **options)
    assert "torchgw_confidence" not in source.obs
    assert result.report.mass < 1
