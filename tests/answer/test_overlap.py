"""``mass="auto"``: how much of two sides matches."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist

import torchgw
from benchmarks.quality.overlaps import slices
from torchgw._answer.overlap import SHARES, elbow

pytestmark = pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")


def halves(seed, n=12, m=13, common=8):
    """Two clouds in the plane that share some points, the second turned; who is whose partner."""
    rng = np.random.default_rng(seed)
    both = rng.normal(size=(common, 2))
    x = np.concatenate([both, rng.normal(size=(n - common, 2))])
    y = np.concatenate([both, rng.normal(size=(m - common, 2))])
    turn = np.linalg.qr(rng.normal(size=(2, 2)))[0]
    order = rng.permutation(m)
    partner = np.full(n, -1)
    partner[:common] = order.argsort()[:common]
    return cdist(x, x), cdist(y @ turn, y @ turn)[np.ix_(order, order)], partner


def test_what_is_shared_is_found():
    """Shares are steps of 5%; a point or two may lie by chance as one of the others does."""
    right, close = 0, 0
    for seed in range(5):
        x, y, partner = halves(seed)
        result = torchgw.solve(D_X=x, D_Y=y, mass="auto", random_state=0)
        masses = result.report.masses
        assert result.report.mass == pytest.approx(masses["chosen"], abs=1e-9)
        assert masses["shares"] == SHARES
        close += abs(masses["chosen"] - 8 / 13) <= 0.13
        found = np.asarray(result.plan).argmax(1)
        shared = partner >= 0
        right += (found == partner)[shared].mean() > 0.85 or bool(result.doubt)
    assert min(right, close) >= 4


def test_all_of_a_copy_matches():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(14, 3))
    other = points + 0.03 * rng.normal(size=points.shape)
    result = torchgw.solve(D_X=cdist(points, points), D_Y=cdist(other, other), mass="auto")
    assert result.report.masses["chosen"] == result.report.mass == 1
    assert not result.doubt
    assert (np.asarray(result.plan).argmax(1) == np.arange(14)).all()


def test_where_nothing_tells_it_says_so():
    """Clouds that have nothing to do with each other: 4 of 5 at least, as chance has its way."""
    said = 0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(14, 2)), rng.normal(size=(12, 2))
        result = torchgw.solve(D_X=cdist(x, x), D_Y=cdist(y, y), mass="auto", random_state=0)
        said += "how much of the two sides matches is open" in result.doubt
    assert said >= 4


@pytest.mark.parametrize("levels", [(0, 0), (0, 3), (0.5, 2)])
@pytest.mark.parametrize("place", [5, 12])
def test_a_break_between_two_lines_is_found(place, levels):
    shares = np.array(SHARES)
    slope, rise = levels
    logs = slope * shares + np.where(np.arange(len(shares)) > place, rise + 4 * shares, 0)
    found, step, contrast = elbow(shares, np.exp(logs))
    assert found == place
    assert step == pytest.approx(np.exp(rise + 4 * shares[place + 1]))
    assert contrast > 7.5
    assert elbow(shares, np.exp(slope * shares)) == (len(shares) - 1, 1.0, np.inf)


def test_costs_that_fall_are_no_break():
    """Beyond the overlap another part may match, whose pairs cost less than those before them."""
    shares = np.array(SHARES)
    added = np.where(shares < 0.5, 5e-4, 3e-3) * np.exp(shares)
    added[shares == 0.85] /= 20
    found, step, contrast = elbow(shares, added)
    assert shares[found] == 0.45
    assert step > 1
    assert contrast > 0
    assert elbow(shares, np.exp(-4 * shares))[2] < 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"differentiable": "value", "epsilon": 0.1, "scale": None}, "follows one"),
        ({"checkpoint": "kept.pt"}, "keeps one"),
        ({"init": np.eye(6) / 6}, "Leave `init` out"),
        ({"distributed": True}, "without `mass`"),
        ({"regularization": "proximal"}, "given marginals"),
    ],
)
def test_what_is_refused(options, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = cdist(*2 * [np.random.default_rng(0).normal(size=(6, 2))])
    data, given = {"D_X": table, "D_Y": table}, dict(options)
    for name in {"init"} & set(given):
        data[name] = given.pop(name)
    with pytest.raises(torchgw.UnsupportedError, match=why):
        torchgw.solve(**data, options=torchgw.Options(mass="auto", **given))


def test_batches_and_other_words_are_refused():
    table = cdist(*2 * [np.random.default_rng(0).normal(size=(6, 2))])
    with pytest.raises(torchgw.UnsupportedError, match=r"loop over torchgw\.solve"):
        torchgw.solve_many(D_X=[table], D_Y=[table], mass="auto")
    with pytest.raises(torchgw.InvalidInputError, match="or 'auto'"):
        torchgw.solve(D_X=table, D_Y=table, mass="all")


def test_a_linear_cost_a_picture_and_a_file(tmp_path):
    """Features of the shared points agree, those of others do not."""
    pytest.importorskip("matplotlib")
    from torchgw.plotting import plot_masses

    x, y, partner = halves(1)
    rng = np.random.default_rng(1)
    features = rng.normal(size=(12, 5)), rng.normal(size=(13, 5))
    shared = np.flatnonzero(partner >= 0)
    features[1][partner[shared]] = features[0][shared]
    result = torchgw.solve(D_X=x, D_Y=y, features=features, mass="auto", scale=None, random_state=0)
    assert abs(result.report.mass - 8 / 13) <= 0.1
    assert (np.asarray(result.plan).argmax(1) == partner)[shared].mean() > 0.85
    axes = plot_masses(result)
    assert axes.get_title().endswith("of the mass match")
    result.save(tmp_path / "kept.npz")
    assert torchgw.load(tmp_path / "kept.npz").report.masses == result.report.masses
    with pytest.raises(torchgw.InvalidInputError, match="mass='auto'"):
        plot_masses(torchgw.solve(D_X=x, D_Y=y, n_init=1))


def test_shares_that_do_not_fit_what_is_known_are_left_out():
    x, y, partner = halves(0)
    mask = np.ones((len(x), len(y)), dtype=bool)
    # points of which four have no partner
    mask[8:] = False
    found = torchgw.solve(D_X=x, D_Y=y, mass="auto", allowed=mask, random_state=0)
    shares = found.report.masses["shares"]
    assert shares == tuple(share for share in SHARES if share <= 8 / 12)
    assert (found.plan[~mask] == 0).all()
    nothing = np.zeros((len(x), len(y)), dtype=bool)
    nothing[0, 0] = True
    with pytest.raises(torchgw.InvalidInputError, match="of the mass can move"):
        torchgw.solve(D_X=x, D_Y=y, mass="auto", allowed=nothing)


@pytest.mark.slow
def test_what_is_known_leaves_no_more_mass_than_there_is_without():
    x, y, partner = halves(0)
    mask = np.ones((len(x), len(y)), dtype=bool)
    mask[8:] = False
    free = torchgw.solve(D_X=x, D_Y=y, mass="auto", random_state=0)
    found = torchgw.solve(D_X=x, D_Y=y, mass="auto", allowed=mask, random_state=0)
    assert found.report.mass <= free.report.mass + 0.15
    # all of the mass, where it fits
    mask = partner[:, None] < 0
    mask = mask | (partner[:, None] == np.arange(len(y)))
    whole = torchgw.solve(D_X=x, D_Y=y, mass="auto", allowed=mask, random_state=0)
    assert (whole.plan[~mask] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [501, 502])
def test_slices_that_share_less_than_half_are_found_with_genes(seed):
    """Half of the mass matches elsewhere too, and so it may be with all genes known."""
    one = slices(np.random.default_rng(seed), 300, 0.4)
    options = {"distances": "euclidean", "features": one.genes, "random_state": 0}
    result = torchgw.solve(one.x, one.y, mass="auto", **options)
    shared = one.partner >= 0
    assert (np.asarray(result.plan).argmax(1) == one.partner)[shared].mean() >= 0.95
    assert abs(result.report.mass - 0.4) <= 0.1


@pytest.mark.slow
def test_labels_know_a_linear_cost():
    """The weight is given, so that no solve without genes comes first."""
    one = slices(np.random.default_rng(501), 300, 0.4)
    options = {"distances": "euclidean", "features": one.genes, "alpha": 1 - 1.0746e-6, "mass": 0.4}
    found = torchgw.solve(one.x, one.y, random_state=0, **options)
    truth = (one.partner[:, None] == np.arange(300)) / 300
    known = torchgw.solve(one.x, one.y, init=truth, **options)
    assert found.report.objective <= known.report.objective * (1 + 1e-3)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_part_of_a_mirror_image_is_ambiguous(seed):
    """A strip and its mirror image; without an end it lies on the whole in two ways."""
    rng = np.random.default_rng(seed)
    half = rng.uniform(size=(200, 2)) * [4, 0.6]
    whole = rng.permutation(np.concatenate([half, half * [1, -1]]))
    part = whole[whole[:, 0] < 3.7] @ np.linalg.qr(rng.normal(size=(2, 2)))[0]
    options = {"distances": "euclidean", "unbalanced": (np.inf, 0), "random_state": 0}
    with pytest.warns(torchgw.AmbiguityWarning):
        result = torchgw.solve(part, whole, **options)
    assert any("mirrored" in one.relation for one in result.alternatives)
