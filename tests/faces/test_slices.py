"""Sequences of slices: known maps, overlaps in part, and errors that add up."""

import numpy as np
import pytest

from torchgw import InvalidInputError

anndata = pytest.importorskip("anndata")
align_slices = pytest.importorskip("torchgw.anndata").align_slices


def sequence(seed, count, n, step, noise):
    """Cut slices of n spots out of one tissue, each further by some spots, turned and shuffled."""
    rng = np.random.default_rng(seed)
    total = n + step * (count - 1)
    cells = np.stack(np.meshgrid(np.arange(-(-total // 4)), np.arange(4), indexing="ij"), -1)
    tissue = cells.reshape(-1, 2)[:total] + 0.3 * rng.normal(size=(total, 2))
    tissue = tissue[tissue[:, 0].argsort()]
    slices, truth = [], []
    for first in (step * place for place in range(count)):
        spots = tissue[first : first + n][rng.permutation(n)]
        turn = np.linalg.qr(rng.normal(size=(2, 2)))[0]
        seen = spots + noise * rng.normal(size=spots.shape)
        places = seen @ turn + 5 * rng.normal(size=2)
        slices.append(anndata.AnnData(np.zeros((n, 1)), obsm={"spatial": places}))
        truth.append(spots)
    return slices, truth


def missed(slices, truth, reference):
    """Measure how far spots are from where they lie in the frame of the reference, a root mean."""
    true, seen = truth[reference], slices[reference].obsm["spatial"]
    left, _, right = np.linalg.svd((true - true.mean(0)).T @ (seen - seen.mean(0)))
    there = [(spots - true.mean(0)) @ left @ right + seen.mean(0) for spots in truth]
    return [
        float(np.sqrt(((one.obsm["spatial_aligned"] - where) ** 2).sum(1).mean()))
        for one, where in zip(slices, there, strict=True)
    ]


@pytest.mark.parametrize("kind", ["chain", "star"])
def test_slices_of_the_same_spots_lie_on_the_reference(kind):
    slices, truth = sequence(0, 3, 20, 0, 0.0)
    results = align_slices(
        slices, kind=kind, reference=2, spatial="rigid",
        solve_options={"distances": "euclidean", "random_state": 0},
    )  # fmt: skip
    assert len(results) == 2
    assert max(missed(slices, truth, 2)) < 1e-8
    np.testing.assert_array_equal(slices[2].obsm["spatial_aligned"], slices[2].obsm["spatial"])
    assert "torchgw_slices" not in slices[2].uns
    assert slices[0].uns["torchgw_slices"]["matched_with"] == (1 if kind == "chain" else 2)
    assert slices[0].uns["torchgw_slices"]["accumulated_error"] < 1e-8


@pytest.mark.parametrize("step", [0, 8])
def test_slices_in_a_chain_are_laid_on_each_other_and_errors_add_up(step):
    slices, truth = sequence(1, 4, 24, step, 0.01)
    options = {"mass": 1 - step / 24, "distances": "euclidean", "random_state": 0}
    align_slices(slices, solve_options=options)
    told = [one.uns["torchgw_slices"] for one in slices[1:]]
    # of 24 spots, moved on by 8, the last slice shares none with the first
    for error, one in zip(missed(slices, truth, 0)[1:], told, strict=True):
        assert error < 2 * one["accumulated_error"] < 0.2
    squares = np.cumsum([one["error"] ** 2 for one in told])
    np.testing.assert_allclose([one["accumulated_error"] ** 2 for one in told], squares)
    assert [one["mass"] for one in told] == pytest.approx([options["mass"]] * 3)


@pytest.mark.parametrize("spatial", ["affine", "thin_plate"])
def test_errors_that_add_up_have_the_unit_of_the_reference(spatial):
    """They were added as they were, of slices in millimetres and in tenths of these."""
    slices, truth = sequence(1, 4, 24, 0, 0.01)
    for place, one in enumerate(slices):
        one.obsm["spatial"] = one.obsm["spatial"] * 10.0**place
    options = {"scale": "max", "distances": "euclidean", "random_state": 0}
    align_slices(slices, spatial=spatial, solve_options=options)
    for error, one in zip(missed(slices, truth, 0)[1:], slices[1:], strict=True):
        assert error < 2 * one.uns["torchgw_slices"]["accumulated_error"] < 0.2


@pytest.mark.filterwarnings("ignore::torchgw.AmbiguityWarning")
def test_what_lies_on_a_slice_in_doubt_is_in_doubt():
    """The first is its own mirror image, the others are alike and are not."""
    rng = np.random.default_rng(0)
    half = rng.uniform(size=(15, 2)) * [4, 1]
    whole = np.concatenate([half, half * [1, -1]])
    moved = whole + 0.02 * rng.normal(size=whole.shape)
    slices = [anndata.AnnData(np.zeros((30, 1))) for _ in range(3)]
    for one, spots in zip(slices, (whole, moved, moved[::-1]), strict=True):
        one.obsm["spatial"] = spots
    _, own = align_slices(slices, solve_options={"distances": "euclidean", "random_state": 0})
    first, second = (one.uns["torchgw_slices"]["doubt"] for one in slices[1:])
    assert "mirrored" in first
    assert not own.doubt
    assert not own.is_ambiguous
    assert second == first


def test_what_is_no_sequence_of_slices_is_refused():
    slices, _ = sequence(0, 2, 6, 0, 0.0)
    with pytest.raises(InvalidInputError, match="at least two"):
        align_slices(slices[:1])
    with pytest.raises(InvalidInputError, match="`reference` must be an integer between 0 and 1"):
        align_slices(slices, reference=2)
    with pytest.raises(InvalidInputError, match="`kind` must be"):
        align_slices(slices, kind="ring")
    del slices[1].obsm["spatial"]
    with pytest.raises(InvalidInputError, match=r"`slices\[1\].obsm` has no 'spatial'"):
        align_slices(slices)


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda places: np.c_[places, places[:, 0]], "as many coordinates.*; got 2, 3. Pass"),
     (lambda places: np.where(places == places.max(), np.nan, places), "1 entries that are NaN")],
)  # fmt: skip
def test_places_that_cannot_be_laid_are_refused_before_any_match(change, message):
    """A match of other coordinates may take minutes, and slices are as they were."""
    slices, _ = sequence(0, 2, 20, 0, 0.0)
    for one in slices:
        one.obsm["other"] = one.obsm["spatial"]
    slices[1].obsm["spatial"] = change(slices[1].obsm["spatial"])
    with pytest.raises(InvalidInputError, match=message):
        align_slices(slices, use_rep="other")
    assert "spatial_aligned" not in slices[0].obsm
