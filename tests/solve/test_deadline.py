"""A limit of time holds in every phase, and what comes back is valid and says so."""

from __future__ import annotations

import itertools
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from problems import solve_by_name
from scipy.sparse import diags_array, random_array

import torchgw
from torchgw._answer import passes
from torchgw._problem import limits
from torchgw._sinkhorn import loop as sinkhorn_loop
from torchgw._solve import loop, pipeline, step
from torchgw._tensors import deadline
from torchgw.distances import connect


def clouds(n, m, d=3):
    rng = np.random.default_rng(0)
    return {"X": rng.normal(size=(n, d)), "Y": rng.normal(size=(m, d)), "distances": "euclidean"}


def networks(n):
    rng = np.random.default_rng(1)
    tables = (random_array((n, n), density=0.06, rng=rng).toarray() > 0 for _ in range(2))
    return {f"D_{side}": np.float64(one | one.T) for side, one in zip("XY", tables, strict=True)}


CASES = {
    "few points": clouds(20, 24),
    "chains": clouds(100, 110, 10),
    "graphs": networks(110),
    "tabu": clouds(24, 24),
    "mass": clouds(20, 20) | {"mass": 0.7},
    "unbalanced": clouds(30, 25) | {"unbalanced": 0.1},
    "squares": clouds(20, 24) | {"unbalanced": 0.1, "unbalanced_type": "l2"},
    "polish": clouds(20, 20) | {"polish": True, "n_init": 1},
    "proximal": clouds(30, 40) | {"regularization": "proximal"},
    "sharp": clouds(60, 60) | {"epsilon": 1e-6, "n_init": 1},
    "sampled": clouds(80, 90) | {"gradient": "sampled", "n_init": 1},
    "absolute": clouds(15, 12) | {"loss": "absolute"},
    "thorough": clouds(100, 110, 10) | {"search": "thorough"},
    "mass of its own": clouds(12, 12) | {"mass": "auto"},
}
RELAXED = {"mass", "unbalanced", "squares", "mass of its own"}
# What a plan that is cut may miss its marginals by: ten times the error that one of few points is
# settled to, as that of any other.
MET = 1e-5
# A search is cut in many places: chains that nothing had judged yet ended in an error once.
DRAWN = [
    pytest.param(n, marks=pytest.mark.slow)
    for n in np.random.default_rng(5).integers(3, 400, size=12).tolist()
]


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("looks", [2, 50, *DRAWN])
@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
def test_each_phase_ends_once_the_time_is_up(name, looks, monkeypatch):
    """Time passes by looks at the clock, so that no processor is too slow for it.

    A solve without a limit looks hundreds of times; once the time is up each phase looks a few
    times more, and the plan that comes back has its numbers.
    """
    asked = []

    def now():
        asked.append(None)
        return float(len(asked))

    monkeypatch.setattr(deadline, "monotonic", now)
    result = solve_by_name(**CASES[name], time_limit=looks, random_state=0)
    # of a search, a loop, stages, settling and polishing; each of a few nested loops
    assert len(asked) < looks + 120
    told = result.status is torchgw.Status.STOPPED or result.doubt
    assert told or len(asked) <= looks
    assert np.isfinite(result.report.objective)
    assert np.isfinite(np.asarray(result.plan)).all()
    assert result.lazy_plan.shape == np.asarray(result.plan).shape
    if result.status is torchgw.Status.STOPPED and name not in RELAXED:
        assert result.marginal_error < MET


@pytest.mark.parametrize("name", ["few points", "graphs", "tabu"])
@pytest.mark.parametrize("looks", [20, 50, 100])
@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
def test_what_is_cut_is_no_higher_than_where_it_began(name, looks, monkeypatch):
    """A search had found .006, and the plan that came back, of a larger epsilon, cost .028."""
    passed = itertools.count(1.0)
    monkeypatch.setattr(deadline, "monotonic", lambda: next(passed))
    result = solve_by_name(**CASES[name], time_limit=looks, random_state=0)
    assert result.status is torchgw.Status.STOPPED
    best = result.alternatives[0]
    assert tuple(best.plan.shape) == best.shape
    assert result.value <= best.value * (1 + 1e-5)
    # new points are mapped as the plan that comes back maps the old ones
    if name == "tabu":
        X, Y = CASES[name]["X"], CASES[name]["Y"]
        np.testing.assert_allclose(result.transform(X), result.lazy_plan.barycentric(Y), rtol=1e-6)


@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
def test_what_is_cut_is_no_higher_than_few_points_say(monkeypatch):
    """The others go with the nearest; the plan of a larger epsilon was like a x b (.036)."""
    passed = itertools.count(1.0)
    monkeypatch.setattr(deadline, "monotonic", lambda: next(passed))
    result = solve_by_name(**CASES["chains"], time_limit=100, random_state=0)
    few = result.alternatives[0]
    assert max(few.plan.shape) < 100
    assert result.value < 1.5 * few.value


@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
def test_products_are_not_taken_for_sinkhorn_iterations(monkeypatch):
    """Forty of both were kept for what follows: with 9 s 3,000 points ended after 4."""
    seconds, linearise = [0.0], step.Step.linearise

    def slow(self, point):
        seconds[0] += 1
        return linearise(self, point)

    monkeypatch.setattr(deadline, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(loop, "perf_counter", lambda: seconds[0])
    monkeypatch.setattr(step.Step, "linearise", slow)
    result = solve_by_name(**clouds(60, 70), n_init=1, time_limit=5, random_state=0)
    # two of the five seconds are left to the numbers of the plan; four were, and one iteration
    assert result.n_iters >= 3


@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
def test_a_second_solve_may_end_before_its_first_iteration(monkeypatch):
    """Its trial was read off a history that had no entry, an IndexError."""
    seconds, follow = [0.0], passes.follow

    def late(*arguments):
        seconds[0] = 1e9
        return follow(*arguments)

    monkeypatch.setattr(deadline, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(passes, "follow", late)
    # more points than are all searched, of which few tell nothing
    few = limits.CPU._replace(all_points=100)
    monkeypatch.setitem(limits.LIMITS, "cpu", few)
    result = solve_by_name(**clouds(130, 140, 12), time_limit=1e6, random_state=0)
    assert seconds[0] > 0
    assert "time limit" in result.doubt
    assert len(result.trials) == 1


LARGE = {
    "points": (clouds(1000, 1000, 10), 1.5),
    "paths": ({"X": clouds(1000, 900)["X"], "Y": clouds(1000, 900)["Y"]}, 1.5),
    "networks": (networks(1000), 2.0),
    "mass": (clouds(1000, 1000) | {"mass": 0.7}, 1.0),
    "mass of its own": (clouds(400, 400) | {"mass": "auto"}, 1.0),
    "unbalanced": (clouds(1000, 1000) | {"unbalanced": 0.1}, 1.0),
    "absolute": (clouds(400, 400) | {"loss": "absolute"}, 1.0),
    "polish": (clouds(1000, 1000) | {"polish": True}, 1.0),
    "sharp": (clouds(400, 400) | {"epsilon": 1e-5}, 1.0),
    "thorough": (clouds(1000, 1000) | {"search": "thorough"}, 2.0),
    "sampled": (clouds(2500, 2500) | {"gradient": "sampled"}, 4.0),
    "large": ({"X": clouds(5000, 5000)["X"], "Y": clouds(5000, 5000)["Y"]}, 5.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LARGE))
@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
def test_a_limit_holds_within_two_seconds(name, monkeypatch):
    """Of CPU time, so that other work on the machine does not count."""
    monkeypatch.setattr(deadline, "monotonic", time.process_time)
    given, limit = LARGE[name]
    torchgw.solve(np.eye(5), np.eye(4), random_state=0)
    clock = time.process_time()
    result = solve_by_name(**given, time_limit=limit, random_state=0)
    assert time.process_time() - clock < limit + 2
    assert result.status is torchgw.Status.STOPPED or result.converged
    assert np.isfinite(result.report.objective)
    if name not in RELAXED | {"large"}:
        assert result.marginal_error < MET


@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
def test_a_plan_that_is_cut_meets_its_marginals_and_is_a_result_as_any(tmp_path):
    """At the epsilon that was reached, rounded; new points are mapped by what was rounded."""
    given = clouds(40, 50) | {"n_init": 1, "epsilon": 1e-5, "inner_max_iter": 1}
    whole = solve_by_name(**given, callback=lambda _: True)
    assert whole.status is torchgw.Status.STOPPED
    assert whole.marginal_error < MET
    assert np.abs(np.asarray(whole.plan).sum(0) - 1 / 50).sum() < MET
    assert np.asarray(whole.plan).min() >= 0
    whole.save(tmp_path / "cut.npz")
    loaded = torchgw.load(tmp_path / "cut.npz")
    new = np.random.default_rng(1).normal(size=(5, 3))
    assert np.isfinite(whole.transform(new)).all()
    assert np.allclose(whole.transform(new), loaded.transform(new))


@pytest.mark.parametrize("kind", ["groups", "allowed"])
def test_a_plan_that_is_cut_and_not_rounded_says_what_it_misses(kind):
    """What rounding spreads would leave a support."""
    labels = np.arange(40) % 2
    support = {
        "groups": {"groups": (labels, labels)},
        "allowed": {"allowed": labels[:, None] == labels},
    }
    given = clouds(40, 40) | {"epsilon": 1e-5, "inner_max_iter": 1, "n_init": 1}
    with pytest.warns(torchgw.ConvergenceWarning, match="Its marginals are missed by") as caught:
        cut = solve_by_name(**given, **support[kind], callback=lambda _: True)
    assert cut.marginal_error > MET
    assert any(f"{cut.marginal_error:.2g}" in str(one.message) for one in caught)


# What takes 100 to 800 thousand calls of functions without a limit, and 34 thousand at most if
# nothing but the plan of the start is made.
LONG = {
    "paths": {side: clouds(400, 380)[side] for side in "XY"},
    "graphs": networks(200),
    "sampled": clouds(200, 210) | {"gradient": "sampled", "n_init": 1},
    "relaxed": clouds(100, 110) | {"unbalanced": 0.1},
    "fused": clouds(60, 70) | {"M": np.random.default_rng(2).random((60, 70)), "alpha": 0.9},
    "groups": clouds(150, 150) | {"groups": (np.arange(150) % 3, np.arange(150) % 3)},
    "pairs": clouds(150, 150) | {"pairs": [(i, i) for i in range(10)]},
    "penalties, sharp": clouds(14, 21) | {"unbalanced": 0.01, "epsilon": 1e-9},
    "squares, sharp": clouds(14, 21)
    | {"unbalanced": 0.1, "unbalanced_type": "l2", "epsilon": 1e-9},
}


@pytest.mark.parametrize("name", list(LONG))
@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
def test_no_phase_goes_on_without_a_look_at_the_clock(name, monkeypatch):
    """Time passes by calls of functions, a thousand a second, in any phase."""
    made = [0]

    def count(frame, event, argument):
        made[0] += event in ("call", "c_call")

    for clock in ("monotonic", "process_time"):
        monkeypatch.setattr(deadline, clock, lambda: made[0] / 1000)
    # what is imported or made once is not counted
    solve_by_name(**LONG[name], time_limit=1e-3, random_state=0)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        made[0] = 0
        solve_by_name(**LONG[name], time_limit=30, random_state=0)
    finally:
        sys.setprofile(before)
    assert 20_000 < made[0] < 60_000


def test_what_is_left_of_the_time_says_how_many_steps_fit(monkeypatch):
    now = [0.0]
    for clock in ("monotonic", "process_time"):
        monkeypatch.setattr(deadline, clock, lambda: now[0])
    assert deadline.fitting(10, 5.0, 0.1) == 10
    with deadline.within(20.0):
        timed = [deadline.fitting(10, each, 100.0) for each in (1.0, 4.0, 50.0)]
        assert timed == [10, 5, 1]
        # before one was timed, by what they take at most
        assert [deadline.fitting(10, None, most) for most in (1.0, 4.0, 50.0)] == [10, 5, 1]
        now[0] = 6.0
        deadline.last_phase(4)
        # what follows takes as long as four steps
        deadline.step_took(2.0)
        assert deadline.fitting(10, 2.0, 0.1) == 3
        assert not deadline.is_over()
        now[0] = 12.5
        assert deadline.is_over()


@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
def test_the_first_iterations_are_timed_one_by_one_where_they_may_be_long(monkeypatch):
    """Of 10,000 points ten iterations at once took 12 of 20 s."""
    counts = []
    sweep = sinkhorn_loop._sweep

    def counted(prepared, start, count, relaxation, **how):
        counts.append(count)
        return sweep(prepared, start, count, relaxation, **how)

    monkeypatch.setattr(sinkhorn_loop, "_sweep", counted)
    given = clouds(60, 70) | {"n_init": 1}
    solve_by_name(**given, time_limit=1e3)
    assert counts[0] > 1
    counts.clear()
    # an iteration may take a second for each pair of points, as far as is known
    monkeypatch.setattr(sinkhorn_loop, "_SLOWEST", {"cpu": 1.0})
    solve_by_name(**given, time_limit=1e3)
    assert counts[0] == 1
    assert max(counts) > 1


def test_work_is_kept_time_for_by_the_load_of_the_processor(monkeypatch):
    clocks = {"monotonic": 0.0, "process_time": 5.0}
    for name in clocks:
        monkeypatch.setattr(deadline, name, lambda name=name: clocks[name])
    with deadline.within(20.0):
        clocks.update(monotonic=8.0, process_time=7.0)
        # two seconds of work took eight
        deadline.keep_least(1.0, 0.1)
        assert deadline._clock.get().least == pytest.approx(4.0, rel=0.05)
        assert deadline.leaves(1.9)
        assert not deadline.leaves(2.3)
        # what was kept too, if nothing follows
        assert deadline.leaves(2.9, last=True)
        assert not deadline.leaves(3.3, last=True)


@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
@pytest.mark.parametrize("late", [True, False])
def test_a_solve_that_is_late_does_not_end_in_float64(late, monkeypatch):
    """Of 10,000 points that took 46 s under a limit of 20, and the marginals were missed."""
    settled = []
    settle = pipeline.settle
    monkeypatch.setattr(
        pipeline, "settle", lambda *given: settled.append(given[-1]) or settle(*given)
    )
    monkeypatch.setattr(pipeline, "leaves", lambda *_, **__: not late)
    given = clouds(330, 330) | {"n_init": 1, "callback": lambda _: True}
    cut = solve_by_name(**given, time_limit=1e6, random_state=0)
    assert settled == [torch.float32 if late else torch.float64]
    assert cut.status is torchgw.Status.STOPPED
    assert np.isfinite(cut.report.objective)
    assert cut.marginal_error < MET


@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
def test_enough_time_changes_nothing():
    given = CASES["few points"]
    whole = torchgw.solve(**given, random_state=0)
    limited = torchgw.solve(**given, random_state=0, time_limit=1e6)
    assert np.array_equal(whole.plan, limited.plan)
    assert limited.status is whole.status


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), "1", True])
def test_odd_limits_are_refused(limit):
    with pytest.raises(torchgw.TorchGWError, match="time_limit"):
        torchgw.solve(**CASES["few points"], time_limit=limit)


def test_a_limit_ends_with_its_call():
    with pytest.raises(torchgw.InvalidInputError), deadline.within(1e-9):
        torchgw.solve(np.full((3, 2), np.nan), np.zeros((3, 2)), time_limit=1e-9)
    assert not deadline.is_over()
    with deadline.within(1e-9):
        time.sleep(1e-3)
        assert deadline.is_over()
        assert deadline.is_over(agreed=True)
    with deadline.within(1e-9, shared=True):
        time.sleep(1e-3)
        assert not deadline.is_over()
        assert deadline.is_over(agreed=True)


@pytest.mark.parametrize("compiled", [0.0, 1.0, 3.0])
def test_kernels_by_which_a_limit_is_passed_are_told(compiled, monkeypatch):
    """Two seconds late is as a limit may be; what kernels did not take is not theirs."""
    clock, seconds = [100.0], [7.0]
    monkeypatch.setattr(deadline, "monotonic", lambda: clock[0])
    monkeypatch.setattr(deadline, "waited", lambda: seconds[0])
    said = "passed by 4 s, as kernels were compiled for 3 s"
    told = warnings.catch_warnings() if compiled < 2 else pytest.warns(match=said)
    with told, deadline.within(1.0):
        clock[0] += 5
        seconds[0] += compiled
    with deadline.within(1.0):
        clock[0] += 2.9
        seconds[0] += compiled


def test_a_limit_that_paths_or_what_has_passed_exceed_is_announced_once(monkeypatch):
    """2,500 points by defaults took 5 s under a limit of one, of which nothing was said."""
    now = [0.0]
    for clock in ("monotonic", "process_time"):
        monkeypatch.setattr(deadline, clock, lambda: now[0])
    graph = connect(diags_array(np.ones((2, 50)), offsets=(-1, 1), shape=(50, 50)).tocsr())
    monkeypatch.setattr("torchgw.distances.geodesics._NODE", 2e-4)
    monkeypatch.setattr("torchgw.distances.geodesics.slowness", lambda: 1.0)
    with deadline.within(1.0):
        with pytest.warns(torchgw.PerformanceWarning, match=r"the paths from 2,000 nodes .* 20 s"):
            graph.rows(np.arange(50).repeat(40))
        # said once, and never where it holds
        deadline.foresee(1e6, "all")
    # .5 s more may be .7 s, and a limit may be late by two
    for passed, late in ((0.0, False), (2.0, False), (2.4, True), (4.0, True)):
        now[0] = 0.0
        with deadline.within(1.0), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            now[0] = passed
            deadline.foresee(0.5, "a plan")
        assert len(said) == late
        # .5 s would be late by 1.9
        assert not late or ("may not" in str(said[0].message)) == (passed == 2.4)
    with deadline.within(100.0):
        now[0] += 105
        deadline.foresee(0.5, "a tenth late, a plan")


def test_a_limit_that_cannot_be_held_is_announced_before_any_work(monkeypatch):
    monkeypatch.setattr("torchgw._solve.route.iteration_seconds", lambda *_, **__: 3.0)
    monkeypatch.setattr("torchgw._solve.route.slowness", lambda: 1.0)
    monkeypatch.setattr("torchgw._solve.forecast.LONG", float("inf"))
    with pytest.warns(torchgw.PerformanceWarning, match=r"^`time_limit` is too short.* 6 s on"):
        torchgw.solve(**clouds(20, 24), n_init=1, time_limit=1, random_state=0)
    # two iterations fit here, but for what a limit may be late
    torchgw.solve(**clouds(20, 24), n_init=1, time_limit=60, random_state=0)
    torchgw.solve(**clouds(20, 24), n_init=1, random_state=0)
