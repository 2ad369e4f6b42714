"""Certificates: bounds below every plan, equal to the least where they can be, proofs that hold."""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import pytest
import torch
from problems import quick
from scipy.spatial.distance import cdist

import torchgw
from torchgw._certify import certificate
from torchgw._certify.certificate import Proof, digest_of
from torchgw._certify.cuts import CuttingPlanes
from torchgw._certify.question import Incumbent, Question
from torchgw._certify.semidefinite import squares
from torchgw._certify.tables import Lifting, eigenvalues, in_order
from torchgw._certify.verify import _least_vertex
from torchgw._certify.vertices import Polytope
from torchgw._sinkhorn.duals import ProductCost, Transport, largest_pairing, least
from torchgw.distances import DirectedDistance

pytestmark = pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")

# Rounding of values of order one in sums of some thousand terms.
ROUNDING = 1e-9


def problem(seed, *, clouds, equal, fused, confined=False):
    """A random problem of few points: clouds in the plane, or symmetric tables of any sign.

    Confined, mass is where it is allowed: at every other pair, and where some plan has it.
    """
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 7))
    m = n if equal else int(rng.integers(3, 7))
    if clouds:
        D_X, D_Y = (cdist(p, p, "sqeuclidean") for p in (rng.random((s, 2)) for s in (n, m)))
    else:
        D_X, D_Y = (part + part.T for part in (rng.normal(size=(s, s)) for s in (n, m)))
    a, b = (np.full(s, 1 / s) if equal else rng.dirichlet(np.ones(s)) for s in (n, m))
    M = rng.normal(size=(n, m)) if fused else None
    allowed = None
    if confined:
        allowed = (rng.random((n, m)) < 0.5) | (Transport(a, b)(rng.normal(size=(n, m)))[0] > 0)
    return Question(D_X, D_Y, a, b, 0.6 if fused else 1.0, M, allowed=allowed)


def plans(question, count, rng):
    """Random plans with the weights of a problem, some of them with few entries."""
    transport = Transport(question.a, question.b, question.allowed)
    for _ in range(count):
        cost, other = rng.normal(size=(2, *question.shape))
        yield transport(cost)[0]
        share = rng.random()
        inside = np.outer(question.a, question.b)
        if question.allowed is not None:
            inside = transport(other)[0]
        yield share * transport(-cost)[0] + (1 - share) * inside


def planes_of(question):
    """The cutting planes of a problem, with an exact solver."""
    transport = Transport(question.a, question.b, question.allowed)
    return CuttingPlanes(question, transport(np.zeros(question.shape))[0], 1e-7, transport)


def bounds(question, *, matchings, seconds=0.1):
    """Every bound that there is for a problem, improved for some seconds each."""
    yield in_order(question, matchings=matchings)
    yield eigenvalues(question, matchings=matchings)
    plan = next(plans(question, 1, np.random.default_rng(0)))
    best = Incumbent(question, plan, lambda found: found)
    device = torch.device("cpu")
    yield Lifting(question, device, matchings=matchings).run(seconds, 0.0, best)
    if question.is_assignment:
        # squares are not negative, whatever the plan
        found = squares(question, device, 2 * seconds)
        lifting = Lifting(question, device, matchings=matchings, squares=found)
        yield lifting.run(2 * seconds, 0.0, best)
    if not matchings:
        planes = planes_of(question)
        planes.run(seconds)
        yield planes.proof()


@pytest.mark.parametrize("confined", [False, True], ids=["all", "confined"])
@pytest.mark.parametrize("fused", [False, True], ids=["pure", "fused"])
@pytest.mark.parametrize("equal", [False, True], ids=["weights", "equal"])
@pytest.mark.parametrize("clouds", [False, True], ids=["tables", "clouds"])
def test_no_plan_goes_below(clouds, equal, fused, confined):
    for seed in range(2):
        question = problem(seed, clouds=clouds, equal=equal, fused=fused, confined=confined)
        check_that_none_is_below(question, seed)


def test_no_plan_goes_below_where_all_of_them_have_the_same_coordinates():
    # nothing is left to be cut but the cost itself
    question = problem(10195, clouds=False, equal=True, fused=True, confined=True)
    check_that_none_is_below(question, 10195)


def check_that_none_is_below(question, seed):
    rng = np.random.default_rng(seed)
    values = [question.value(plan) for plan in plans(question, 20, rng)]
    for bound in bounds(question, matchings=False, seconds=0.02):
        assert bound.value <= min(values) + ROUNDING, bound.method
        proof = sealed(
            Proof(
                bound.method, bound.value, False, question.alpha, (None, None), (1.0, 1.0),
                bound.arrays,
            )
        )  # fmt: skip
        torchgw.verify(
            proof, D_X=question.D_X, D_Y=question.D_Y, a=question.a, b=question.b, M=question.M,
            allowed=question.allowed,
        )  # fmt: skip


@pytest.mark.parametrize("fused", [False, True], ids=["pure", "fused"])
def test_no_matching_goes_below_and_clouds_are_solved(fused):
    for seed in range(4):
        question = problem(seed, clouds=seed % 2 == 0, equal=True, fused=fused)
        n = len(question.a)
        eye = np.eye(n) / n
        best = min(question.value(eye[list(p)]) for p in itertools.permutations(range(n)))
        found = list(bounds(question, matchings=True))
        assert max(bound.value for bound in found) <= best + ROUNDING
        if seed % 2 == 0:
            planes = planes_of(question)
            planes.run(5)
            # cuts are lowered by 1e-9 of the range of t
            assert planes.bound == pytest.approx(best, abs=1e-6)
            assert planes.value == pytest.approx(best, abs=1e-6)


def test_prices_prove_the_least_cost():
    rng = np.random.default_rng(0)
    for equal in (True, False):
        a, b = (np.full(8, 0.125) if equal else rng.dirichlet(np.ones(8)) for _ in range(2))
        transport = Transport(a, b)
        for _ in range(5):
            cost = rng.normal(size=(8, 8))
            plan, f = transport(cost)
            assert plan.sum(1) == pytest.approx(a)
            assert plan.sum(0) == pytest.approx(b)
            assert least(cost, f, a, b) == pytest.approx((cost * plan).sum())
    u, v = rng.normal(size=(2, 8))
    plan, _ = transport(-np.outer(u, v))
    assert largest_pairing(u, a, v, b) == pytest.approx(u @ plan @ v)


def test_prices_of_other_problems_prove_what_they_say():
    """Of many points: prices at hand, those of few entries, and at last the exact ones."""
    rng = np.random.default_rng(0)
    n, m = 150, 160
    a, b = (rng.dirichlet(np.ones(size)) for size in (n, m))
    x, y = rng.normal(size=(n, 2)), rng.normal(size=(m, 2))
    transport = Transport(a, b)
    transport.reach(ProductCost(-x, y), np.inf, np.inf)
    for turn in (0.0, 0.03, 0.1, 1.5, 3.0):
        turned = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        factors = ProductCost(-x @ turned, y)
        cost = factors.dense()
        exact, f = Transport(a, b)(cost)
        most = least(cost, f, a, b)
        for floor, enough in ((most - 1, most - 0.5), (most - 1, most), (np.inf, np.inf)):
            plan, f, proven = transport.reach(factors, floor, enough)
            assert proven == pytest.approx(transport.bound(cost, f))
            assert proven <= most + ROUNDING
            # of a plan that was seen, most of what it has above the floor
            assert proven >= (most - 0.5 if floor < np.inf else most) - ROUNDING
            if plan is None:
                assert proven >= enough
            else:
                assert plan.sum(1) == pytest.approx(a)
                assert plan.sum(0) == pytest.approx(b)
        assert proven == pytest.approx((cost * exact).sum())


def test_many_points_have_a_proof():
    """Cuts by the prices of others, above no plan, and verified."""
    X, Y, result = solved(0, n=160, polish=True)
    found = result.certify(60, gap=0.05)
    assert found.best_value - found.lower_bound <= 0.05 * found.best_value * (1 + 1e-9)
    torchgw.verify(found.proof, X, Y)


def corners(normals, heights):
    """Every choice of faces that meet in a point of the polytope, with that point."""
    dim = normals.shape[1]
    for faces in itertools.combinations(range(len(heights)), dim):
        if abs(np.linalg.det(normals[list(faces)])) > 1e-9:
            x = np.linalg.solve(normals[list(faces)], heights[list(faces)])
            if (normals @ x >= heights - 1e-9).all():
                yield faces, x


@pytest.mark.parametrize("seed", quick(1, range(4)))
@pytest.mark.parametrize("dim", [2, 3, 4])
def test_vertices_are_those_of_the_cuts_that_cost_less(dim, seed):
    rng = np.random.default_rng(seed)
    centre = rng.uniform(0.3, 0.7, dim)

    def cost(x):
        return -((x - centre) ** 2).sum(-1)

    for most in (1.0, -0.25 * dim / 3):
        polytope = Polytope(np.zeros(dim), np.ones(dim), cost, most)
        for _ in range(7):
            normal = rng.normal(size=dim)
            inside = normal @ rng.uniform(0.3, 0.7, dim)
            polytope.cut(normal, inside - 0.4 * np.linalg.norm(normal), most)
        expected = {faces for faces, x in corners(polytope.normals, polytope.heights)
                    if cost(x) < most}  # fmt: skip
        assert {tuple(sorted(faces)) for faces in polytope.faces.tolist()} == expected
        assert (cost(polytope.vertices) == polytope.costs).all()


def solved(seed=0, n=12, **settings):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    Y = X[rng.permutation(n)] + 0.1 * rng.normal(size=(n, 2))
    settings = {"distances": "sqeuclidean", "regularization": "proximal"} | settings
    return X, Y, torchgw.solve(X, Y, random_state=0, **settings)


def test_a_plane_is_solved_to_the_gap():
    for seed in range(3):
        X, Y, result = solved(seed, n=30)
        found = result.certify(30)
        assert found.best_value - found.lower_bound <= 1e-3 * found.best_value * (1 + 1e-9)
        assert found.gap == found.value - found.lower_bound
        assert found.value == pytest.approx(result.value, rel=1e-4)
        again = torchgw.verify(found.proof, X, Y)
        assert again.lower_bound == pytest.approx(found.lower_bound, abs=again.rounding)
        assert 0 < again.rounding < 1e-9
        # what it came by is a plan
        plan = found.plan.toarray()
        assert plan.sum(1) == pytest.approx(np.full(30, 1 / 30))
        assert torchgw.solve(X, Y, distances="sqeuclidean", init=plan, polish=True).value <= (
            found.best_value * (1 + 1e-6)
        )


def test_what_was_proven_is_not_lost():
    """Less time proves less: an earlier bound of the same plans, or of more, is kept."""
    X, Y, result = solved(0, n=20)
    known = result.certify(30)
    for kind in ("plan", "one_to_one"):
        again = result.certify(0, gap=0.0, kind=kind)
        assert again.lower_bound >= known.lower_bound
        assert again.gap == max(again.value - again.lower_bound, 0.0)
        torchgw.verify(again.proof, X, Y)
    # what is known of matchings says nothing of plans
    higher = (known.lower_bound + known.best_value) / 2
    proof = dataclasses.replace(known.proof, matchings=True, value=higher)
    vars(result)["certificate"] = dataclasses.replace(known, proof=proof)
    assert result.certify(0).lower_bound < higher


def moved_by(function, change):
    """A function that is wrong by a change of what it finds."""
    return lambda *given: change(function(*given))


@pytest.fixture(scope="module")
def certified():
    """A solve that is certified; tests read it."""
    _, _, result = solved(0, n=20, polish=True)
    result.certify(30)
    return result


@pytest.mark.parametrize("wrong", [-1e-6, -1.0, -1e87, np.nan])
def test_a_plan_below_what_is_proven_is_refused(wrong, certified, monkeypatch):
    """Whoever reads its value wrongly: no answer comes of it."""
    known = certified.certificate
    for value in ("value", "best_value"):
        with pytest.raises(torchgw.NumericalError, match="proven"):
            dataclasses.replace(known, **{value: known.lower_bound + wrong})
    for owner, name, change in (
        (Question, "value", lambda value: value + wrong),
        (CuttingPlanes, "_read", lambda found: (found[0] + wrong, found[1])),
        (CuttingPlanes, "_read", lambda found: (found[0], found[1] * (1 - wrong))),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, moved_by(getattr(owner, name), change))
            with pytest.raises(torchgw.NumericalError, match="proven"):
                certified.certify(30)
    # nothing of it was kept
    assert certified.certificate is known


@pytest.mark.parametrize("bound", ["in_order", "eigenvalues"])
def test_a_bound_above_a_plan_is_refused(bound, monkeypatch):
    right = getattr(certificate, bound)

    def wrong(question, *, matchings):
        found = right(question, matchings=matchings)
        return found._replace(value=question.constant)

    monkeypatch.setattr(certificate, bound, wrong)
    _, _, result = solved(0)
    with pytest.raises(torchgw.NumericalError, match="proven"):
        result.certify(30)


def each_proof():
    """A proof of each method, with the data that it is about."""
    X, Y, result = solved()
    known = result.extension.known
    question = Question(
        cdist(X, X, "sqeuclidean") * result.scale[0], cdist(Y, Y, "sqeuclidean") * result.scale[1],
        np.full(12, 1 / 12), np.full(12, 1 / 12), known.alpha, None,
    )  # fmt: skip
    proof = result.certify(20).proof
    yield proof, X, Y
    for bound in bounds(question, matchings=True):
        made = dataclasses.replace(
            proof, method=bound.method, value=bound.value, arrays=bound.arrays, matchings=True
        )
        yield sealed(made), X, Y


def sealed(proof):
    """Give a proof the digest of its numbers, as a forger would."""
    return dataclasses.replace(proof, digest=digest_of(proof))


# Another value of every field of a proof but its arrays and its digest.
OTHERWISE = {
    "method": lambda proof: "squares" if proof.method != "squares" else "eigenvalues",
    "value": lambda proof: np.nextafter(proof.value, 1),
    "matchings": lambda proof: not proof.matchings,
    "alpha": lambda proof: np.nextafter(proof.alpha, 0),
    "metrics": lambda proof: (proof.metrics[0], "euclidean"),
    "scale": lambda proof: (proof.scale[0], np.nextafter(proof.scale[1], 0)),
}


def test_what_a_notebook_shows_is_short():
    X = np.random.default_rng(0).normal(size=(12, 2))
    result = torchgw.solve(X, X + 0, distances="sqeuclidean", random_state=0)
    found = result.certify(seconds=1)
    assert repr(found) == f"Certificate({found})"
    assert len(repr(found)) < 200 > len(repr(found.proof))
    route = torchgw.explain(X, X)
    assert repr(route) == str(route)
    assert repr(route).startswith("12 x 12 points")


def test_a_result_is_no_proof():
    result = torchgw.solve(np.eye(4), np.eye(3), distances="sqeuclidean", random_state=0)
    with pytest.raises(torchgw.InvalidInputError, match="a GWResult. Pass `result.certify"):
        torchgw.verify(result, np.eye(4), np.eye(3))


def test_a_proof_with_one_number_changed_is_refused():
    fields = {item.name for item in dataclasses.fields(Proof)}
    assert set(OTHERWISE) == fields - {"arrays", "digest"}
    rng, methods = np.random.default_rng(0), set()
    for proof, X, Y in each_proof():
        methods.add(proof.method)
        assert torchgw.verify(proof, X, Y).lower_bound == pytest.approx(proof.value, abs=ROUNDING)
        odd = [
            dataclasses.replace(proof, **{name: change(proof)})
            for name, change in OTHERWISE.items()
        ]
        odd.append(dataclasses.replace(proof, digest=proof.digest[:-1] + "g"))
        for name, array in proof.arrays.items():
            for place in {0, array.size - 1, *rng.integers(array.size, size=8).tolist()}:
                changed = array.copy()
                number = changed.flat[place]
                changed.flat[place] = (
                    number + 1 if array.dtype.kind == "i" else np.nextafter(number, 2)
                )
                odd.append(dataclasses.replace(proof, arrays={**proof.arrays, name: changed}))
            left = {key: value for key, value in proof.arrays.items() if key != name}
            odd += [dataclasses.replace(proof, arrays=left)]
            odd += [dataclasses.replace(proof, arrays={**left, name: array[:-1]})]
            odd += [dataclasses.replace(proof, arrays={**left, name: array.astype("f4")})]
        for wrong in odd:
            with pytest.raises(torchgw.InvalidInputError, match="digest"):
                torchgw.verify(wrong, X, Y)
    assert len(methods) == 5


def test_no_forgery_proves_what_is_false():
    """Whatever numbers a proof has, and a digest of them: a claim above a plan does not follow."""
    rng = np.random.default_rng(0)
    for proof, X, Y in each_proof():
        order = torchgw.solve(X, Y, distances="sqeuclidean", random_state=0).matching().target
        tables = [cdist(p, p, "sqeuclidean") * s for p, s in zip((X, Y), proof.scale, strict=True)]
        there = np.ix_(order, order)
        # by more than claims may be higher where data have lost digits; one of the bounds is tight
        digits = 1e-10 * sum(map(len, tables)) * (tables[0].max() + tables[1].max()) ** 2
        false = ((tables[0] - tables[1][there]) ** 2).mean() + 1.01 * digits
        changes = [(name, kind) for name in proof.arrays for kind in range(6)]
        for name, kind in changes:
            array = proof.arrays[name].copy()
            place = rng.integers(array.size)
            if array.dtype.kind == "i":
                array.flat[place] = [0, 1, 2, 10**6, -1, array.flat[place] + 1][kind]
            else:
                size = np.abs(array).max() + 1
                array.flat[place] = [0, size, -size, np.inf, -np.inf, np.nan][kind]
            forged = {**proof.arrays, name: array}
            with pytest.raises(torchgw.InvalidInputError), np.errstate(all="ignore"):
                torchgw.verify(
                    sealed(dataclasses.replace(proof, value=float(false), arrays=forged)), X, Y
                )


def test_cuts_left_out_and_cuts_too_high_are_refused():
    X, Y, result = solved()
    planes = planes_of(
        Question(
            cdist(X, X, "sqeuclidean") * result.scale[0],
            cdist(Y, Y, "sqeuclidean") * result.scale[1],
            np.full(12, 1 / 12), np.full(12, 1 / 12), 1.0, None,
        )
    )  # fmt: skip
    planes.run(5)
    bound = planes.proof()
    proof = dataclasses.replace(
        result.certify(0).proof, method=bound.method, value=bound.value, matchings=False
    )
    torchgw.verify(sealed(dataclasses.replace(proof, arrays=bound.arrays)), X, Y)
    cuts = ("slopes", "heights", "potentials")
    without = bound.arrays | {name: bound.arrays[name][:5] for name in cuts}
    with pytest.raises(torchgw.InvalidInputError, match="claims"):
        torchgw.verify(sealed(dataclasses.replace(proof, arrays=without)), X, Y)
    higher = {**bound.arrays, "heights": bound.arrays["heights"] + 1.0}
    with pytest.raises(torchgw.InvalidInputError, match="does not hold"):
        torchgw.verify(sealed(dataclasses.replace(proof, arrays=higher)), X, Y)


@pytest.mark.parametrize("claim", [0.4, 5.0])
@pytest.mark.parametrize("kind", ["apart", "one point", "the same", "nearly the same", "edges"])
def test_cuts_that_meet_in_one_place_prove_what_follows(kind, claim):
    """Whatever cuts there are, the least of the objective where they hold, and no more."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        slopes, centre = rng.normal(size=(7, 2)), rng.uniform(-0.3, 0.3, 3)
        heights = slopes @ centre[:2] + centre[2] - 0.3
        if kind == "apart":
            heights -= rng.random(7)
        elif kind == "the same":
            slopes[4:], heights[4:] = slopes[3], heights[3]
        elif kind == "nearly the same":
            slopes[4:] = slopes[3] + 1e-13 * rng.normal(size=(3, 2))
        elif kind == "edges":
            # through corners of the box
            slopes = np.sign(slopes)
            heights = np.full(7, -2.0)
        arrays = {"slopes": np.vstack([np.zeros(2), slopes]), "heights": np.append(-2.0, heights)}
        c, cap = np.array([1.0, 2.0]), claim + 3
        normals = np.vstack([np.eye(3)[:2], -np.eye(3)[:2], np.eye(3)[2:], -np.eye(3)[2:],
                             np.column_stack([slopes, np.ones(7)])])  # fmt: skip
        faces = np.concatenate([-np.ones(4), [-2.0, -cap], heights])
        least = min(x[2] - c @ x[:2] ** 2 for _, x in corners(normals, faces))
        found, _ = _least_vertex(c, -np.ones(2), np.ones(2), claim, arrays)
        assert found == pytest.approx(min(least, claim), abs=1e-7)


@pytest.mark.parametrize(("dim", "near"), [(4, 1e-9), (5, 1e-7), (6, 1e-10)])
def test_cuts_whose_vertices_are_lost_in_rounding_are_left_out(dim, near):
    """Groups of cuts that rounding cannot tell apart were refused; one of each proves as much."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        z = rng.uniform(-1, 1, (400, dim))
        t = 0.7 * (z**2).sum(1) + 0.1 * rng.random(400)
        few = rng.normal(size=(6, dim))
        many = np.concatenate(
            [few, (few[:, None] + near * rng.normal(size=(6, 5, dim))).reshape(-1, dim)]
        )
        claim, box = float((t - (z**2).sum(1)).min()), np.ones(dim)
        found = {}
        for name, slopes in (("few", few), ("many", many)):
            heights = np.append(t.min(), (t + slopes @ z.T).min(1))
            arrays = {"slopes": np.vstack([np.zeros(dim), slopes]), "heights": heights}
            found[name] = _least_vertex(box, -box, box, claim, arrays)
        (least, lost), (most, short) = found["few"], found["many"]
        assert lost == 0
        assert most == pytest.approx(least, abs=1e-4)
        assert short < 1e-2


def test_what_is_no_number_proves_nothing():
    """Minima must not pass over it, wherever it is and however large the other numbers are."""
    for proof, X, Y in each_proof():
        raised = {"f": 1.0, "pairs_f": 1.0, "heights": 1.0}
        for name, array in proof.arrays.items():
            for odd in (np.nan, np.inf, -np.inf, 1e200):
                if array.dtype.kind == "i":
                    continue
                arrays = {key: part + raised.get(key, 0.0) for key, part in proof.arrays.items()}
                arrays[name] = np.full_like(array, odd)
                arrays = {key: part.astype(proof.arrays[key].dtype) for key, part in arrays.items()}
                forged = sealed(dataclasses.replace(proof, value=proof.value + 1, arrays=arrays))
                with pytest.raises(torchgw.InvalidInputError), np.errstate(all="ignore"):
                    torchgw.verify(forged, X, Y)


def test_other_data_are_refused():
    X, Y, result = solved()
    proof = result.certify(5).proof
    with pytest.raises(torchgw.InvalidInputError, match="does not hold"):
        torchgw.verify(proof, X, 0.9 * Y)
    with pytest.raises(torchgw.InvalidInputError, match="`Y` is needed"):
        torchgw.verify(proof, X)
    with pytest.raises(torchgw.InvalidInputError, match="shapes"):
        torchgw.verify(proof, X, Y, a=np.ones(3))


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "correlation"])
def test_metrics_weights_and_linear_costs(metric):
    rng = np.random.default_rng(0)
    X, Y, M = rng.normal(size=(9, 4)), rng.normal(size=(7, 4)), rng.random((9, 7))
    a, b = rng.dirichlet(np.ones(9)), rng.dirichlet(np.ones(7))
    result = torchgw.solve(X, Y, a=a, b=b, M=M, alpha=0.3, distances=metric, random_state=0)
    found = result.certify(1)
    assert found.lower_bound <= found.best_value <= found.value
    torchgw.verify(found.proof, X, Y, a=a, b=b, M=M)


def test_directed_tables_and_matchings():
    rng = np.random.default_rng(0)
    A, B = rng.random((2, 5, 5))
    result = torchgw.solve(D_X=DirectedDistance(A), D_Y=DirectedDistance(B), random_state=0)
    found = result.certify(2, gap=1e-6, kind="one_to_one")
    least_value = min(((A - B[np.ix_(p, p)]) ** 2).mean() for p in itertools.permutations(range(5)))
    assert found.lower_bound <= least_value + ROUNDING
    assert found.best_value >= least_value - ROUNDING
    torchgw.verify(found.proof, D_X=A, D_Y=B)


@pytest.mark.parametrize("kind", ["plan", "one_to_one"])
def test_only_pairs_that_are_allowed_count(kind, tmp_path):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        X, Y = rng.normal(size=(2, 6, 2))
        allowed = rng.random((6, 6)) < 0.4
        allowed[np.arange(6), rng.permutation(6)] = True
        result = torchgw.solve(X, Y, allowed=allowed, distances="sqeuclidean", random_state=0)
        found = result.certify(10, kind=kind, gap=1e-6)
        assert not found.plan.toarray()[~allowed].any()
        tables = [cdist(p, p, "sqeuclidean") * s for p, s in zip((X, Y), result.scale, strict=True)]
        question = Question(*tables, np.full(6, 1 / 6), np.full(6, 1 / 6), 1.0, None)
        eye = np.eye(6) / 6
        values = {order: question.value(eye[list(order)]) for order in
                  itertools.permutations(range(6))}  # fmt: skip
        best = min(v for order, v in values.items() if allowed[np.arange(6), list(order)].all())
        assert found.lower_bound <= best + ROUNDING
        assert found.best_value >= best - ROUNDING
        assert found.best_value - found.lower_bound <= 1e-6
        torchgw.verify(found.proof, X, Y, allowed=allowed)
        torchgw.verify(found.proof, X, Y, M=np.where(allowed, 0, np.inf))
        # of all plans it may not hold
        if found.lower_bound > min(values.values()) + ROUNDING:
            with pytest.raises(torchgw.InvalidInputError):
                torchgw.verify(found.proof, X, Y)
    result.save(tmp_path / "few.npz")
    with pytest.raises(torchgw.UnsupportedError, match="dense=True"):
        torchgw.load(tmp_path / "few.npz").certify(kind=kind)


def few(kind, seed):
    """Two spaces of 6 points: data of a solve, and the objective of a permutation."""
    rng = np.random.default_rng(seed)
    M = rng.random((6, 6)) if kind == "fused" else None
    if kind == "tables":
        D_X, D_Y = (part + part.T for part in rng.random((2, 6, 6)))
        data = {"D_X": D_X, "D_Y": D_Y}
    else:
        X, Y = rng.normal(size=(2, 6, 2))
        metric = "euclidean" if kind == "euclidean" else "sqeuclidean"
        D_X, D_Y = (cdist(p, p, metric) for p in (X, Y))
        data = {"X": X, "Y": Y, "distances": metric, "scale": None, "M": M}
    question = Question(D_X, D_Y, *np.full((2, 6), 1 / 6), 1.0 if M is None else 0.5, M)
    return data, lambda order: question.value(np.eye(6)[list(order)] / 6)


@pytest.mark.parametrize("kind", ["plane", "fused", "euclidean", "tables"])
def test_a_certified_solve_is_within_the_gap_of_the_best_or_says_so(kind):
    gap, met = 1e-3, 0
    for seed in range(4):
        data, value = few(kind, seed)
        best = min(map(value, itertools.permutations(range(6))))
        # from anywhere
        start = np.random.default_rng(seed).permutation(6)
        limit = 2 if kind == "tables" else 20
        result = torchgw.solve(**data, init=start, certify=gap, time_limit=limit)
        found = result.certificate
        assert found.value == pytest.approx(result.value, rel=1e-6)
        assert found.lower_bound <= best + ROUNDING
        assert found.meets(gap) == (result.doubt == "")
        if found.meets(gap):
            met += 1
            assert result.value <= best * (1 + gap) + ROUNDING
    assert met == 4 or kind == "tables"


@pytest.mark.parametrize("directed", [False, True], ids=["graphs", "directed"])
def test_whole_distances_have_values_between_which_there_is_none(directed):
    """The squares relaxation of random graphs, raised to what a number of edits costs."""
    rng = np.random.default_rng(0)
    for _ in range(3):
        A, B = (rng.random((2, 6, 6)) < 0.4).astype(float)
        if not directed:
            A, B = (np.triu(part, 1) + np.triu(part, 1).T for part in (A, B))
        given = [DirectedDistance(part) if directed else part for part in (A, B)]
        result = torchgw.solve(D_X=given[0], D_Y=given[1], random_state=0)
        found = result.certify(3, gap=0.0, kind="one_to_one")
        orders = itertools.permutations(range(6))
        least = min(((A - B[np.ix_(p, p)]) ** 2).mean() for p in orders)
        assert found.lower_bound <= least + ROUNDING
        # a whole number of edits
        edits = found.lower_bound * 36 / (1 if directed else 2)
        assert edits == pytest.approx(round(edits), abs=1e-6)
        # the relaxation with all signs is nearly exact here
        assert found.lower_bound >= least - 2 / 36 - ROUNDING
        assert torchgw.verify(found.proof, D_X=A, D_Y=B).lower_bound == pytest.approx(
            found.lower_bound, abs=ROUNDING
        )


def test_a_certified_solve_takes_the_time_that_it_has():
    X, Y = np.random.default_rng(0).normal(size=(2, 40, 6))
    start = time.monotonic()
    result = torchgw.solve(X, Y, distances="sqeuclidean", certify=True, time_limit=2)
    # a bound that is under way ends later, by seconds where others share the processor
    assert time.monotonic() - start < 30
    assert "time_limit" in result.doubt
    copy = torchgw.solve(X, X[::-1].copy(), distances="sqeuclidean", certify=True, time_limit=20)
    assert copy.doubt == ""
    assert copy.certificate.lower_bound == 0
    assert copy.value == pytest.approx(0, abs=copy.certificate.rounding)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "kl"}, "square"), ({"mass": 0.5}, "strict"), ({"unbalanced": 1.0}, "strict"),
        ({"differentiable": "value", "epsilon": 0.1}, "differentiable"),
        ({"options": torchgw.Options(reflections=False)}, "reflections"),
        ({"options": torchgw.Options(checkpoint="file.npz")}, "checkpoint"),
        ({"options": torchgw.Options(precision="float64"), "X": np.ones((4, 2), "f")}, "float64"),
    ],
)  # fmt: skip
def test_what_has_no_certificate_is_refused_before_the_solve(settings, message, monkeypatch):
    monkeypatch.setattr("torchgw._api.solve_problem", None)
    data = {"X": np.eye(4), "Y": np.eye(4), "distances": "euclidean"}
    with pytest.raises(torchgw.UnsupportedError, match=message):
        torchgw.solve(**data | settings, certify=True)


def test_a_copy_has_value_zero_and_says_so(tmp_path):
    A = np.random.default_rng(0).integers(0, 2, (10, 10)).astype(float)
    A = np.triu(A, 1) + np.triu(A, 1).T
    order = np.random.default_rng(1).permutation(10)
    result = torchgw.solve(D_X=A, D_Y=A[np.ix_(order, order)], random_state=0)
    assert "certificate" not in repr(result)
    found = result.certify(5, kind="one_to_one")
    assert (found.lower_bound, found.gap) == (0, pytest.approx(0, abs=1e-12))
    assert str(found) in repr(result)
    result.save(tmp_path / "result.npz", dense=True)
    again = torchgw.load(tmp_path / "result.npz")
    assert again.certificate.lower_bound == 0
    assert torchgw.verify(again.certificate.proof, D_X=A, D_Y=A[np.ix_(order, order)])


def test_what_is_not_covered_is_refused_before_any_work():
    rng = np.random.default_rng(0)
    X, Y = rng.random((2, 8, 2))
    for settings, message in (
        ({"loss": "kl"}, "square"),
        ({"mass": 0.5}, "strict marginals"),
        ({"unbalanced": 1.0}, "strict marginals"),
    ):
        result = torchgw.solve(X, Y, distances="euclidean", n_init=1, **settings)
        with pytest.raises(torchgw.UnsupportedError, match=message):
            result.certify()
    result = torchgw.solve(X.astype(np.float32), Y, distances="euclidean", n_init=1)
    with pytest.raises(torchgw.UnsupportedError, match="float64"):
        result.certify()
    result = torchgw.solve(X, Y[:6], distances="euclidean", n_init=1)
    with pytest.raises(torchgw.UnsupportedError, match="one_to_one"):
        result.certify(kind="one_to_one")
    for settings in ({"seconds": -1}, {"gap": np.nan}, {"kind": "all"}):
        with pytest.raises(torchgw.InvalidInputError):
            result.certify(**settings)
