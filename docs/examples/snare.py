"""# Two measurements of the same cells: SNARE-seq

1,047 cells of four lines, each measured twice: gene expression and chromatin accessibility. The
alignment sees the two tables apart, in different order. It is scored by how close each cell is to
itself (FOSCTTM: 0 is perfect, 0.5 is chance) and by the labels carried over. Distances are hop
counts on graphs of neighbours by correlation, as in SCOT (Demetci et al. 2022), which reports a
FOSCTTM of 0.150 for its best settings.

The data are GEO GSE126074, preprocessed and published with SCOT (MIT licence). Set TORCHGW_SNARE to
a file with `rna`, `atac`, `rna_type` and `atac_type`; without it this page shows what it gave where
they were, kept with the commit that gave it.
"""

import os
from pathlib import Path

import numpy as np
from anndata import AnnData
from matplotlib import pyplot as plt
from sklearn.decomposition import PCA
from sklearn.neighbors import kneighbors_graph

import torchgw.anndata
from torchgw.metrics import foscttm, label_accuracy
from torchgw.plotting import plot_confusion

path = Path(os.environ.get("TORCHGW_SNARE", "snare.npz"))
# beside this file, or below the root of the repository
kept = Path("kept") if Path("kept").is_dir() else Path("docs/examples/kept")


def as_anndata(points, lines):
    """Return cells with their neighbour graph, as a pipeline would have left them."""
    points = points / np.linalg.norm(points, axis=1, keepdims=True)
    adata = AnnData(np.zeros((len(points), 0)), obsm={"X_pca": points})
    adata.obs["line"] = lines.astype(str)
    graph = kneighbors_graph(points, 110, metric="correlation", include_self=True)
    # unweighted: an edge is one hop
    adata.obsp["knn"] = graph.astype(bool)
    return adata


if path.is_file():
    data = np.load(path)
    order = np.random.default_rng(0).permutation(len(data["rna"]))
    rna = as_anndata(data["rna"], data["rna_type"])
    atac = as_anndata(data["atac"][order], data["atac_type"][order])

    result = torchgw.anndata.align(
        atac, rna, use_obsp="knn", labels="line", solve_options={"epsilon": 1e-3}
    )
    print(result)
    print(atac)
    projected = result.lazy_plan.barycentric(rna.obsm["X_pca"])
    own = rna.obsm["X_pca"][order]
    print(f"FOSCTTM {foscttm(projected, own):.4f}")
    lines = atac.obs["line"], rna.obs["line"]
    accuracy = label_accuracy(projected, lines[0], rna.obsm["X_pca"], lines[1])
    print(f"labels by nearest neighbours of the projection: {accuracy:.3f}")
    print(f"labels by mass: {(atac.obs['torchgw_line'] == lines[0]).mean():.3f}")

    plane = PCA(2).fit(rna.obsm["X_pca"])
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.5), layout="constrained")
    for ax, points, line, title in (
        (axes[0], rna.obsm["X_pca"], lines[1], "expression"),
        (axes[1], projected, lines[0], "chromatin, projected"),
    ):
        for name in sorted(set(line)):
            ax.scatter(*plane.transform(points[line == name]).T, s=4, label=f"line {name}")
        ax.set_title(title)
        ax.legend(markerscale=3, frameon=False)
    axes[1].set(xlim=axes[0].get_xlim(), ylim=axes[0].get_ylim())
    plot_confusion(result, *lines, ax=axes[2])
    if "TORCHGW_KEEP" in os.environ:
        figure.savefig(kept / "snare.png", dpi=80)
else:
    print((kept / "snare.txt").read_text())
    figure, ax = plt.subplots(figsize=(14, 4.5), layout="constrained")
    ax.imshow(plt.imread(kept / "snare.png"))
    ax.set_axis_off()
