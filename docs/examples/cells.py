"""# Single cells, from raw counts

Two AnnData objects of raw counts, genes and peaks of the same tissue measured in different cells,
are reduced as usual, aligned, and drawn together with the labels carried over. The counts are
simulated, a stand-in for data such as SNARE-seq: 500 cells of four lines along a gradient of
maturity, of which one half has its expression and the other half its accessibility measured.
[The next page](snare.md) has real cells.

The joint embedding is drawn by scanpy's UMAP where scanpy is installed, by its first two principal
components otherwise.
"""

from importlib.util import find_spec

import anndata
import numpy as np
import scipy.sparse
from matplotlib import pyplot as plt
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.feature_extraction.text import TfidfTransformer

import torchgw.anndata
from torchgw.plotting import plot_confusion

# %%
# ## Raw counts
#
# Both modalities follow one hidden state of a cell; nothing says which cells are alike.

rng = np.random.default_rng(0)
lines = np.array(["BJ", "GM", "H1", "K562"])
line = rng.choice(4, 500, p=[0.4, 0.3, 0.2, 0.1])
maturity = rng.beta(1, 3, size=500)
state = rng.normal(size=(4, 8))[line] + np.outer(maturity, 1.5 * rng.normal(size=8))
state += 0.15 * rng.normal(size=state.shape)
expressed = np.exp(state @ rng.normal(size=(8, 600)) * 0.6 + rng.normal(size=600))
opened = 1 / (1 + np.exp(2 - state @ rng.normal(size=(8, 2500))))
half = np.arange(500) % 2 == 0

rna = anndata.AnnData(scipy.sparse.csr_matrix(rng.poisson(expressed[half]).astype("float32")))
atac = anndata.AnnData(scipy.sparse.csr_matrix(rng.binomial(1, opened[~half]).astype("float32")))
rna.obs_names = [f"rna-{i}" for i in range(rna.n_obs)]
atac.obs_names = [f"atac-{i}" for i in range(atac.n_obs)]
rna.obs["line"] = lines[line[half]]
rna.obs["maturity"] = maturity[half]
print(rna, atac, sep="\n")

# %%
# ## Reduce, align
#
# Logarithms of counts per cell and principal components for genes; for peaks TF-IDF and a singular
# value decomposition, whose first component is the depth of a cell. A column of words is carried
# over as labels, a column of numbers as numbers.

depth = rna.X.sum(1)
rna.obsm["X_pca"] = PCA(10, random_state=0).fit_transform(np.log1p(rna.X / depth * 1e4).toarray())
weighted = TfidfTransformer(sublinear_tf=True).fit_transform(atac.X)
atac.obsm["X_lsi"] = TruncatedSVD(11, random_state=0).fit_transform(weighted)[:, 1:]
known = lines[line[~half]]


def align(epsilon, **relaxation):
    """Align, and say how much of what was carried over is right."""
    result = torchgw.anndata.align(
        atac,
        rna,
        use_rep=("X_lsi", "X_pca"),
        labels=["line", "maturity"],
        # the two representations have units of their own
        solve_options={"epsilon": epsilon, "scale": "max", "random_state": 0},
        **relaxation,
    )
    correlation = np.corrcoef(atac.obs["torchgw_maturity"], maturity[~half])[0, 1]
    print(f"lines right: {(atac.obs['torchgw_line'] == known).mean():.3f}")
    print(f"maturity, correlation with the truth: {correlation:.3f}")
    print(f"mass that found a partner: {atac.uns['torchgw']['mass']:.3f}")
    return result


print(align("auto"))

# %%
# ## Other shares of the lines
#
# The two halves have not the same number of cells of each line, so strict masses send some to a
# wrong one. With `tau_a` and `tau_b` below 1 cells may keep some of their mass instead.

print(
    {
        name: (int((rna.obs["line"] == name).sum()), int((known == name).sum()))
        for name in lines.tolist()
    }
)
result = align(1e-3, tau_a=0.95, tau_b=0.95)
print(atac)

# %%
# ## Draw them together

atac.obs["line"] = atac.obs["torchgw_line"]
atac.obs["maturity"] = atac.obs["torchgw_maturity"]
both = anndata.concat({"expression": rna, "accessibility": atac}, label="modality", join="outer")
if find_spec("scanpy") is not None:
    import scanpy as sc

    sc.pp.neighbors(both, use_rep="X_torchgw", random_state=0)
    sc.tl.umap(both, random_state=0)
    plane, name = both.obsm["X_umap"], "UMAP"
else:
    plane, name = PCA(2).fit_transform(both.obsm["X_torchgw"]), "PCA"

figure, axes = plt.subplots(1, 4, figsize=(16, 4), layout="constrained")
for ax, column in zip(axes, ("modality", "line"), strict=False):
    for value in sorted(both.obs[column].unique()):
        ax.scatter(*plane[both.obs[column] == value].T, s=6, label=value)
    ax.legend(frameon=False, markerscale=2)
    ax.set_title(f"{name}, by {column}")
axes[2].scatter(*plane.T, s=6, c=both.obs["maturity"])
axes[2].set_title(f"{name}, by maturity")
for ax in axes[:3]:
    ax.set(xticks=[], yticks=[])
plot_confusion(result, known, rna.obs["line"], ax=axes[3])
