"""``alpha="auto"``: distances and a linear cost count alike at the match."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

import torchgw

pytestmark = pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")


def slices(seed, n=60, share=0.7, told=1.0):
    """Two slices of a tissue that share a part, the second turned; genes, and who is who."""
    g = np.random.default_rng(seed)
    shared = round(share * n)
    total = 2 * n - shared
    places = g.uniform(size=(total, 2)) * [np.sqrt(2 * total), np.sqrt(total / 2)]
    places = places[places[:, 0].argsort()]
    waves, phases = g.normal(size=(12, 2)) / 2, g.uniform(0, 6, 12)
    genes = told * np.cos(places @ waves.T + phases)
    order = g.permutation(n)
    partner = np.full(n, -1)
    partner[n - shared :] = order.argsort()[:shared]
    turn = np.linalg.qr(g.normal(size=(2, 2)))[0]
    x, y = (part + 0.03 * g.normal(size=(n, 2)) for part in (places[:n], places[-n:][order]))
    seen = genes[:n], genes[-n:][order]
    features = tuple(part + 0.3 * g.normal(size=part.shape) for part in seen)
    return x, y @ turn, features, partner


def right(result, partner):
    shared = partner >= 0
    return (np.asarray(result.plan).argmax(1) == partner)[shared].mean()


def left(x, y, features, result):
    """Both costs where every point goes to its likeliest partner."""
    plan = np.asarray(result.plan)
    mass, to = plan.sum(1), plan.argmax(1)
    unlike = (cdist(x, x) - cdist(y, y)[np.ix_(to, to)]) ** 2
    linear = ((features[0] - features[1][to]) ** 2).sum(1)
    return mass @ unlike @ mass, mass @ linear


def test_slices_with_genes_by_defaults():
    found = []
    for seed in range(4):
        x, y, features, partner = slices(seed)
        result = torchgw.solve(x, y, features=features, mass=0.7, distances="euclidean")
        found.append(right(result, partner))
    assert np.mean(found) > 0.95


def test_both_count_alike_at_the_match():
    x, y, features, _ = slices(0, n=20)
    options = {"distances": "euclidean", "scale": None}
    result = torchgw.solve(x, y, features=features, mass=0.7, n_init=1, **options)
    quadratic, linear = left(x, y, features, result)
    # it has ended when another solve lowers the product by less than a twentieth
    again = torchgw.solve(
        x, y, features=features, mass=0.7, alpha=linear / (quadratic + linear), init=result.plan,
        **options,
    )  # fmt: skip
    assert np.prod(left(x, y, features, again)) >= 0.95 * quadratic * linear
    assert result.alpha * quadratic == pytest.approx((1 - result.alpha) * linear, rel=1)


@pytest.mark.parametrize("mass", [0.7, None])
def test_units_move_no_plan(mass):
    x, y, features, _ = slices(1, n=14)
    table = cdist(*features, "sqeuclidean")
    options = {"scale": None, "alpha": "auto", "n_init": 1, "mass": mass}
    plain = torchgw.solve(D_X=cdist(x, x), D_Y=cdist(y, y), M=table, **options)
    other = torchgw.solve(D_X=7 * cdist(x, x), D_Y=7 * cdist(y, y), M=40 * table, **options)
    np.testing.assert_allclose(other.plan, plain.plan, atol=1e-5)
    odds = [one.alpha / (1 - one.alpha) for one in (plain, other)]
    assert odds[0] / odds[1] == pytest.approx(49 / 40, rel=1e-3)


def test_with_a_given_mass_a_sum_moves_no_plan():
    x, y, features, _ = slices(1, n=14)
    table = -features[0] @ features[1].T
    results = [
        torchgw.solve(x, y, M=table - less, mass=0.7, distances="euclidean", n_init=1)
        for less in (0.0, 1e3)
    ]
    np.testing.assert_allclose(results[0].plan, results[1].plan, atol=1e-5)


def test_features_that_say_nothing_do_no_harm():
    found = []
    for seed in range(3):
        x, y, features, partner = slices(seed, told=0.0)
        result = torchgw.solve(x, y, features=features, mass=0.7, distances="euclidean")
        found.append(right(result, partner))
    assert np.mean(found) > 0.9


def test_a_share_that_is_not_known():
    x, y, features, partner = slices(2)
    result = torchgw.solve(x, y, features=features, mass="auto", distances="euclidean")
    assert abs(result.report.mass - 0.7) <= 0.1
    assert right(result, partner) > 0.9


def test_derivatives_take_the_weight_as_it_is():
    x, y, features, _ = slices(3, n=12)
    slopes = []
    given = {"n_init": 1}
    for _ in range(2):
        points = torch.tensor(x, requires_grad=True)
        result = torchgw.solve(
            points, torch.tensor(y), features=tuple(map(torch.tensor, features)), mass=0.7,
            distances="euclidean", scale=None, epsilon=0.05, differentiable="value", **given,
        )  # fmt: skip
        slopes.append(torch.autograd.grad(result.loss, points)[0])
        given = {"alpha": result.alpha, "init": result.plan.detach()}
    torch.testing.assert_close(slopes[0], slopes[1], atol=1e-5, rtol=1e-4)


def test_where_one_cost_is_nothing_both_halves_count():
    x, y, _, _ = slices(0, n=12)
    result = torchgw.solve(x, y, M=np.zeros((12, 12)), mass=0.7, distances="euclidean", n_init=1)
    assert result.alpha == 0.5


def test_the_route_has_the_weight_that_it_begins_with():
    x, y, features, _ = slices(0, n=12)
    route = torchgw.explain(x, y, features=features, mass=0.7, distances="euclidean")
    assert "alpha=" in str(route)
    assert "alpha=0.5," not in str(route)


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"alpha": "auto", "unbalanced": 1.0}, torchgw.UnsupportedError, "`unbalanced` is for one"),
        (
            {"mass": 0.5, "options": torchgw.Options(checkpoint="kept.pt")},
            torchgw.UnsupportedError,
            "Pass a number",
        ),
        ({"alpha": "both"}, torchgw.InvalidInputError, "`alpha` must be a number"),
        ({"alpha": "auto", "features": None}, torchgw.InvalidInputError, "none was given"),
    ],
)
def test_what_is_refused(options, error, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y, features, _ = slices(0, n=12)
    with pytest.raises(error, match=why):
        torchgw.solve(x, y, **{"features": features} | options)
