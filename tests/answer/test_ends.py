"""Where solves beside the one that is returned have ended is said of the answer."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

import torchgw
from torchgw._answer import passes
from torchgw._answer.passes import Rival
from torchgw._plans.given import StoredPlan
from torchgw._starts.alternatives import End, with_end

MIRRORED = [-1, 1]


def halves(n):
    """Points and their mirror images, a little apart from them: two matches cost the same."""
    g = np.random.default_rng(0)
    half = g.uniform(size=(n // 2, 2)) * [1, 3] + [0.2, 0]
    return np.concatenate([half, half * MIRRORED])


def _matching(partners):
    plan = np.eye(len(partners))[partners] / len(partners)
    return StoredPlan(torch.from_numpy(plan))


@pytest.mark.parametrize(
    ("n", "unbalanced"),
    [
        pytest.param(40, None, id="all points"),
        pytest.param(20, 1.0, id="relaxed"),
        pytest.param(240, None, id="few points"),
    ],
)
def test_an_end_of_equal_objective_is_an_alternative(monkeypatch, n, unbalanced):
    """It is listed and counted, though the search has found the first alone."""
    X, found = halves(n), []

    def follow_mirrored(incumbent):
        first = incumbent.lowest.search.alternatives[0]
        incumbent.say(alternatives=(first,), ambiguity=0.0)
        partners = incumbent.lowest.ending.plan.argmax().numpy()
        found.append(np.roll(np.arange(n), n // 2)[partners])
        rival = Rival(incumbent.asked.again(found[0]), "start", "mirrored")
        assert not incumbent.follow(rival)
        # were it lower it would be the first, beside the same others
        lowest, search = incumbent.lowest, incumbent.lowest.search
        ends = End(_matching(found[0]), 0.0, "lower"), End(lowest.ending.plan, lowest.value, "")
        swapped = with_end(search, incumbent.asked.problem, ends, new=0)
        assert [one.label for one in swapped.alternatives] == ["lower", ""]

    given = {"distances": "euclidean", "unbalanced": unbalanced, "random_state": 0}
    # values of relaxed problems have no common zero, and no ambiguity
    told = pytest.warns(torchgw.AmbiguityWarning, match="the first mirrored")
    with monkeypatch.context() as patch, nullcontext() if unbalanced else told:
        patch.setattr(passes, "MOVES", (follow_mirrored,))
        result = torchgw.solve(X, X, **given)
    assert unbalanced or result.ambiguity == pytest.approx(1, abs=1e-3)
    first, other = result.alternatives
    assert other.label == "mirrored"
    assert first.value == pytest.approx(other.value, rel=1e-3)
    # it leads to where it has come from
    again = torchgw.solve(X, X, init=other, **given)
    moved = X[np.asarray(again.plan.argmax(1))] - X[found[0]]
    assert np.square(moved).sum(1).mean() < 0.1 * X.var(0).sum()
