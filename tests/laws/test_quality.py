"""The quality suite: instances have the answer they claim, scores know it, failures are shown."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import __main__ as command_line
from benchmarks.harness.evaluate import gw_value, made_feasible
from benchmarks.harness.report import read_records
from benchmarks.quality import instances, random_matrices, real, sweep
from benchmarks.quality.instances import monotone_plan, permutation_plan
from benchmarks.quality.networks import (
    MissingDataError,
    edges_kept,
    geometric,
    rewired,
    scale_free,
)
from benchmarks.quality.problems import PROBLEMS
from benchmarks.quality.solvers import SOLVERS, Request, Solution, Solver, default_epsilon
from benchmarks.quality.tables import quality_table
from benchmarks.sinkhorn.linear import Unsupported

SMALL = [name for name, problem in PROBLEMS.items() if not problem.large]
# Here the true match has the lowest value, as the noise is small beside what tells points apart.
EXACT = ("tiny", "cloud-2d", "cloud-round", "tree", "cosine", "words")
SHARED = {"device": "cpu", "device_name": "some", "cores": 2, "commit": "none"}


def small(name, n=60):
    """An instance of a network problem that is small enough for a fast test."""
    draw = {"geometric": lambda rng: geometric(rng, n, 0.05, local=True),
            "scale-free": lambda rng: scale_free(rng, n, 0.05)}  # fmt: skip
    return draw[name](np.random.default_rng(0))


def swapped(match, rng):
    """The match with two of its targets exchanged."""
    pair = rng.choice(len(match), size=2, replace=False)
    other = match.copy()
    other[pair] = match[pair[::-1]]
    return other


@pytest.mark.parametrize("name", SMALL)
def test_an_instance_is_what_it_says(name):
    problem = PROBLEMS[name]
    first, again, other = (problem.instance(seed) for seed in (0, 0, 1))
    assert np.array_equal(first.d_y, again.d_y)
    assert not np.array_equal(first.d_y, other.d_y)
    for table, weight in zip((first.d_x, first.d_y), first.marginals, strict=True):
        assert np.abs(table - table.T).max() < 1e-12
        assert 0 <= table.min() <= table.max() <= 1 + 1e-12
        assert weight.sum() == pytest.approx(1)
    # nothing is scored by the order of its points
    n, m = len(first.d_x), len(first.d_y)
    index = np.zeros((n, m))
    index[np.arange(n), np.arange(n) * m // n] = 1 / n
    assert not problem.succeeds(first.judge(index))
    assert not problem.succeeds(first.judge(np.ones((n, m)) / (n * m)))
    if first.answer is not None:
        assert problem.succeeds(first.judge(first.answer))
        assert first.answer.sum(1) == pytest.approx(first.marginals[0])
        assert first.answer.sum(0) == pytest.approx(first.marginals[1])


@pytest.mark.parametrize("name", EXACT)
def test_the_answer_is_the_optimum(name):
    """No exchange of two points and no random match is better, nor what a solver finds."""
    instance = PROBLEMS[name].instance(0)
    tables = instance.d_x, instance.d_y
    best = gw_value(*tables, instance.answer)
    match, rng = instance.answer.argmax(1), np.random.default_rng(0)
    others = [swapped(match, rng) for _ in range(6)] + [rng.permutation(match)]
    assert best < min(gw_value(*tables, permutation_plan(other)) for other in others)
    import ot

    # conditional gradients never go up: from the answer they stay, from elsewhere they end above
    for start in (instance.answer, None):
        found = ot.gromov.gromov_wasserstein(*tables, *instance.marginals, G0=start)
        assert gw_value(*tables, found) >= best * (1 - 1e-9)


@pytest.mark.parametrize("name", ["geometric", "scale-free"])
def test_networks_are_connected_and_extra_edges_shorten(name):
    instance = small(name)
    back = instance.answer.argmax(1)
    copy = instance.d_y[np.ix_(back, back)]
    assert np.isfinite(instance.d_x).all()
    assert (copy <= instance.d_x).all()
    assert (copy < instance.d_x).any()
    # hop counts: whole multiples of the smallest
    hops = instance.d_x / instance.d_x[instance.d_x > 0].min()
    assert hops == pytest.approx(np.rint(hops), abs=1e-9)


@pytest.mark.parametrize(("name", "order"), [("square", 8), ("pentagon", 10), ("ellipse", 4)])
def test_every_symmetry_of_a_shape_is_right(name, order):
    instance = PROBLEMS[name].instance(0)
    n = len(instance.d_x)
    match = instance.answer.argmax(1)
    index, folds = np.arange(n), order // 2
    scores = []
    for turn in range(folds):
        for sign in (1, -1):
            symmetry = (n * turn // folds + sign * index) % n
            scores.append(instance.judge(permutation_plan(match[symmetry])))
    assert scores == [1.0] * order
    # a turn that is no symmetry, and half one symmetry and half another
    assert instance.judge(permutation_plan(match[(index + n // (2 * folds)) % n])) < 0.5
    mixed = np.where(index % 2, match, match[(-index) % n])
    plan = np.zeros((n, n))
    plan[index, mixed] = 1 / n
    assert instance.judge(plan) < 0.9


def test_a_mirrored_spiral_is_a_failure():
    problem = PROBLEMS["spiral"]
    instance = problem.instance(0)
    forward = instance.answer
    position = np.arange(len(instance.d_x)) / len(instance.d_x)
    best = forward.argmax(1)
    mirrored = forward[::-1]
    assert instance.judge(mirrored) < -0.99
    assert not problem.succeeds(float("nan"))
    assert monotone_plan(position, best) == pytest.approx(monotone_plan(position, 2.0 * best))


def test_feasible_plans_have_the_weights_asked_for():
    rng = np.random.default_rng(0)
    plan, a, b = rng.random((6, 7)), rng.random(6), rng.random(7)
    a, b = a / a.sum(), b / b.sum()
    feasible = made_feasible(plan / plan.sum(), a, b)
    assert feasible.min() >= 0
    # sums of a few dozen float64 entries
    assert feasible.sum(1) == pytest.approx(a, rel=1e-12)
    assert feasible.sum(0) == pytest.approx(b, rel=1e-12)


def test_records_of_ours_of_a_peer_and_of_failures(monkeypatch):
    """Equal epsilon; scores agree with what the solver says; what fails is recorded as such."""

    def broken(instance, request):
        raise FloatingPointError("as it was told")

    def empty(instance, request):
        return Solution(np.full((40, 40), np.nan), 0.1, {})

    for name, run in (("broken", broken), ("empty", empty)):
        monkeypatch.setitem(SOLVERS, name, Solver(name, run, "torchgw"))
    head, instance = sweep.prepare(("tiny", "ours", 0), SHARED)
    options = sweep.SweepOptions()
    found = {}
    for name in ("ours", "pot-cg", "torchgw042", "broken", "empty"):
        found[name] = sweep.attempt(("tiny", name, 0), instance, head["epsilon"], options)
    ours = found["ours"]
    assert ours["says"]["epsilon"] == head["epsilon"]
    # the plan is given its marginals before it is judged; it misses them by 1e-6
    assert ours["value"] == pytest.approx(ours["says"]["value"], rel=1e-2)
    assert ours["success"]
    assert ours["objective"] < head["answer"]["objective"] < head["product_value"]
    assert found["pot-cg"]["value"] == pytest.approx(head["answer"]["value"], rel=1e-6)
    assert found["torchgw042"]["status"] == "unsupported"
    assert found["broken"]["message"] == "FloatingPointError: as it was told"
    assert found["empty"]["message"] == "the plan is not finite"

    monkeypatch.delitem(SOLVERS, "empty")
    rows = [{**head, "runner": name, **item} for name, item in found.items() if name != "empty"]
    text = quality_table(rows)
    assert "| ours | 1/1 | 1.0000 |" in text
    assert "| broken | 0/1 |" in text
    # the overview: no value without a plan, and nothing of a runner that was never asked
    assert "| tiny | 1/1, " in text
    assert "| 0/1 |" in text
    assert "1 x FloatingPointError: as it was told" in text
    # the instance has changed since: only what was solved again is shown
    assert "broken" not in quality_table([*rows, {**rows[0], "fingerprint": "new"}])


def test_epsilon_is_asked_of_the_solver():
    instance = PROBLEMS["tiny"].instance(0)
    solution = SOLVERS["ours"].run(instance, Request(0, 1.0, "cpu", None))
    assert solution.says["epsilon"] == default_epsilon(instance)


def test_absent_data_are_no_failure(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHGW_SNARE", str(tmp_path / "none.npz"))
    with pytest.raises(MissingDataError, match="TORCHGW_SNARE"):
        PROBLEMS["snare-scot"].instance(0)
    record, instance = sweep.prepare(("snare-scot", "ours", 0), SHARED)
    assert record["status"] == "unsupported"
    assert instance is None


@pytest.mark.parametrize("name", ["words-2-6", "yeast-5", "yeast-20-degree"])
def test_absent_words_and_networks_are_no_failure(name, monkeypatch, tmp_path):
    monkeypatch.setenv(real.DATA_VARIABLE, str(tmp_path))
    with pytest.raises(MissingDataError, match=r"pass --data FOLDER"):
        PROBLEMS[name].instance(0)


def test_a_network_is_scored_by_its_matching():
    instance = rewired(np.random.default_rng(0), 60, 5, 0.1)
    truth = instance.answer.argmax(1)
    edges = int(instance.d_x.sum()) // 2
    assert int(instance.d_y.sum()) // 2 == edges
    kept = edges_kept(instance.d_x, instance.d_y, truth)
    assert kept == edges - round(0.1 * edges)
    # each row's largest entry is in one column, and the matching is right all the same
    plan = instance.answer + np.where(np.arange(60) == truth[0], 0.9 / 60, 0)
    plan[np.arange(60), truth] += 1 / 60
    found = sweep.score(instance, plan, 1e-3)
    assert (found["metric"], found["right"], found["edges_kept"]) == (1, 1, kept)
    wrong = sweep.score(instance, plan, 1e-3, np.roll(truth, 1))
    assert wrong["right"] == 0
    assert wrong["metric"] < 0.5


@pytest.mark.parametrize("convex", [False, True])
def test_faq_matches_a_network_with_its_copy(convex):
    instance = rewired(np.random.default_rng(1), 60, 8, 0.0)
    name = "scipy-faq-convex" if convex else "scipy-faq"
    solution = SOLVERS[name].run(instance, Request(0, 1e-3, "cpu", None))
    found = sweep.score(instance, solution.plan, 1e-3, solution.matching)
    # the convex start is right up to twins; a flat one keeps more than by chance
    assert found["metric"] > (0.99 if convex else 0.3)


def test_faq_is_refused_where_points_differ_in_number_or_weight():
    instance = PROBLEMS["sizes"].instance(0)
    with pytest.raises(Unsupported, match="as many points"):
        SOLVERS["scipy-faq"].run(instance, Request(0, 1e-3, "cpu", None))


# POT warns of a Sinkhorn solve that ends at its limit
@pytest.mark.filterwarnings("ignore:Sinkhorn did not converge")
def test_descents_on_random_matrices_end_below_those_of_pot():
    instance = random_matrices.independent(np.random.default_rng(0), 12, 15, 0.02)
    assert instance.judge(instance.answer) == pytest.approx(1)
    assert instance.answer.sum(1) == pytest.approx(1 / 12)
    assert instance.judge(np.outer(*instance.marginals)) > 1.5
    request = Request(0, 0.02, "cpu", None)
    assert 1 < instance.judge(SOLVERS["pot-pgd"].run(instance, request).plan) < 1.5


def test_pot_from_eight_starts_is_no_worse_than_from_one():
    instance = random_matrices.independent(np.random.default_rng(0), 12, 15, 0.1)
    request = Request(0, 0.1, "cpu", None)
    one, many = (
        instance.judge(SOLVERS[name].run(instance, request).plan)
        for name in ("pot-pgd", "pot-pgd-8")
    )
    # the first of the eight is the one, to a coarser tolerance
    assert many < one + 1e-6


def test_digits_are_views_of_the_same_images():
    instance = real.digits(np.random.default_rng(0), 60)
    assert instance.judge(instance.answer) == 1
    back = instance.answer.argmax(1)
    same = np.corrcoef(instance.d_x.ravel(), instance.d_y[np.ix_(back, back)].ravel())[0, 1]
    other = np.corrcoef(instance.d_x.ravel(), instance.d_y.ravel())[0, 1]
    assert same > 0.8 > 0.5 > other


def test_the_peer_is_refused_where_it_cannot_run():
    request = Request(0, 1e-3, "cpu", None)
    with pytest.raises(Unsupported, match="given by distances"):
        SOLVERS["torchgw042"].run(PROBLEMS["tiny"].instance(0), request)
    points = instances.Points(np.zeros((3, 2)), np.zeros((3, 2)), 2)
    table = np.zeros((3, 3))
    instance = instances.Instance(table, table, lambda plan: 0.0, {}, points=points)
    with pytest.raises(Unsupported, match="peer-python"):
        SOLVERS["torchgw042"].run(instance, request)


@pytest.mark.slow
def test_a_sweep_is_resumed_and_limited(tmp_path, capsys):
    output = tmp_path / "quality.jsonl"
    # a stamp, as a commit between two calls would make the second start again
    common = ["--seeds", "2", "--jobs", "2", "--commit", "now", "--out", str(output)]
    assert command_line.main(["quality", "tiny", "--runners", "ours,pot-cg", *common]) == 0
    assert command_line.main(["quality", "tiny", "--runners", "ours,pot-cg", *common]) == 0
    records = read_records(output)
    assert len(records) == 4
    assert {record["status"] for record in records} == {"ok"}
    assert command_line.main(["quality", "tiny", "--runners", "pot-ppa", "--limit", "0.01",
                              *common]) == 0  # fmt: skip
    assert [record["status"] for record in read_records(output)[4:]] == ["timeout"] * 2
    capsys.readouterr()
    assert command_line.main(["quality-table", str(output)]) == 0
    assert "| pot-ppa | 0/2 |" in capsys.readouterr().out
    assert json.loads(output.read_text().splitlines()[0])["limit_s"] == 120


def test_unknown_names_are_refused():
    with pytest.raises(SystemExit, match="unknown problem nope"):
        command_line.main(["quality", "nope"])
    with pytest.raises(SystemExit, match="unknown runner nope"):
        command_line.main(["quality", "tiny", "--runners", "nope"])
