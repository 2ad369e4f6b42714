"""Parts that have other shares in each of two spaces: strict marginals send some elsewhere."""

import numpy as np
import pytest

import torchgw

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """A device; on a GPU programs follow the parts, once they are compiled."""
    if request.param == "cuda":
        from torchgw._batch import programs_triton

        monkeypatch.setattr(programs_triton, "COMPILING", 100.0)
        monkeypatch.setattr(programs_triton, "_known", {})
    return request.param


def _said(device: str, *, equal: bool) -> list[tuple[bool, bool]]:
    """Tell whether a tenth more than there must be is in wrong clusters, and whether that is said.

    Six clusters of 20 dimensions are drawn twice, turned, of drawn sizes or of equal ones.
    """
    found = []
    for seed in range(20, 26):
        draw, n = np.random.default_rng(seed), 300
        centres = 4 * draw.normal(size=(6, 20))
        near, far = draw.integers(0, 6, (2, n)) if not equal else [np.arange(n) % 6] * 2
        x, y = (centres[side] + draw.normal(size=(n, 20)) for side in (near, far))
        y = y @ np.linalg.qr(draw.normal(size=(20, 20)))[0]
        result = torchgw.solve(x, y, distances="euclidean", random_state=0, device=device)
        right = float((np.asarray(result.plan) * np.equal.outer(near, far)).sum())
        most = np.minimum(np.bincount(near, minlength=6), np.bincount(far, minlength=6)).sum() / n
        found.append((right < most - 0.1, bool(result.doubt) or result.is_ambiguous))
    return found


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_clusters_of_other_shares_are_seldom_wrong_in_silence(device: str) -> None:
    found = _said(device, equal=False)
    assert any(wrong for wrong, _ in found), found
    assert sum(wrong and not said for wrong, said in found) <= 1, found


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_clusters_of_the_same_shares_are_matched_without_a_doubt(device: str) -> None:
    found = _said(device, equal=True)
    assert sum(wrong or said for wrong, said in found) <= 1, found
