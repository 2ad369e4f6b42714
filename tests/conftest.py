"""Set up what must be known before the first import of the package or of Triton."""

from __future__ import annotations

import os

import torch

# Without a GPU our Triton kernels are tested in Triton's interpreter, which is chosen on import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests that poison uninitialised memory switch on deterministic algorithms, and cuBLAS wants this.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# POT imports JAX where it finds it, which warns of its float32.
os.environ.setdefault("POT_BACKEND_DISABLE_JAX", "1")
