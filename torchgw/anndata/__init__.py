"""Alignment of AnnData objects. Needs anndata: ``pip install anndata scikit-learn``."""

from torchgw.anndata._align import align as align
from torchgw.anndata._problem import TranslationProblem as TranslationProblem
from torchgw.anndata._slices import align_slices as align_slices
from torchgw.anndata._store import read_plan as read_plan

__all__ = ["TranslationProblem", "align", "align_slices", "read_plan"]
