"""Kernels compiled beforehand."""

from __future__ import annotations

import pytest

import torchgw
from torchgw.cli import main


def test_there_is_nothing_to_compile_for_a_cpu(capsys):
    with pytest.raises(
        torchgw.UnsupportedError, match="CUDA devices, by Triton; the device is cpu"
    ):
        torchgw.warmup("cpu")
    assert main(["warmup", "--device", "cpu"]) == 2
    assert "need no warm-up" in capsys.readouterr().err


@pytest.mark.gpu
def test_kernels_lie_in_the_cache(monkeypatch, tmp_path, capsys):
    from torchgw._variants import warmup

    monkeypatch.setattr(warmup, "_SIZES", ((40, 50), (300, 400)))
    monkeypatch.setattr(warmup, "_SEEDS", 1)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert main(["warmup"]) == 0
    output = capsys.readouterr()
    assert str(tmp_path) in output.out
    assert "[##]" in output.err
