"""What is known of a match, in every call: it is kept to exactly, or refused with the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

import torchgw
from torchgw import TorchGWError
from torchgw.losses import GWLoss

N = 8
RNG = np.random.default_rng(0)
X, ORDER = RNG.normal(size=(N, 3)), RNG.permutation(N)
Y = X[ORDER] + 0.05 * RNG.normal(size=(N, 3))
KIND, PLACE = np.arange(N) % 2, np.arange(N)
SAME = KIND[:, None] == KIND[ORDER]
NEAR = abs(PLACE[:, None] - ORDER) <= 3
PAIRS = np.stack([ORDER[:2], PLACE[:2]], 1)
PAIRED = np.ones((N, N), dtype=bool)
PAIRED[PAIRS[:, 0]] = PAIRED[:, PAIRS[:, 1]] = False
PAIRED[PAIRS[:, 0], PAIRS[:, 1]] = True

# what is passed, and where mass may be then
KNOWN: dict[str, tuple[dict[str, Any], Any]] = {
    "pairs": ({"pairs": PAIRS}, PAIRED),
    "likely pairs": ({"pairs": np.column_stack([PAIRS, [1.0, 1.0]])}, np.ones((N, N), dtype=bool)),
    "table": ({"allowed": SAME}, SAME),
    "sparse": ({"allowed": scipy.sparse.csr_array(SAME)}, SAME),
    "lists": ({"allowed": [np.flatnonzero(row) for row in SAME]}, SAME),
    "function": ({"allowed": lambda i, j: KIND[i] == KIND[ORDER][j]}, SAME),
    "window": ({"allowed": lambda i, j: abs(i - ORDER[j]) <= 3}, NEAR),
    "groups": ({"groups": (KIND, KIND[ORDER])}, SAME),
    "infinite M": ({"M": np.where(SAME, 0.0, np.inf), "alpha": 0.5}, SAME),
}
QUICK: dict[str, Any] = {"random_state": 0, "n_init": 1, "epsilon": 0.05}


def solved(**known: Any) -> Any:
    return torchgw.solve(X, Y, distances="euclidean", **QUICK | known)


def tracked(mode: Any = "value", **known: Any) -> Any:
    points = torch.tensor(X, requires_grad=True)
    found = torchgw.solve(
        points, torch.tensor(Y), distances="sqeuclidean", differentiable=mode, **QUICK, **known
    )
    (found.loss if mode == "value" else (found.plan**2).sum()).backward()
    assert bool(points.grad.isfinite().all())
    return found


def matched(**known: Any) -> Any:
    match = solved(**known).matching()
    return np.eye(N)[match.target]


def fitted(**known: Any) -> Any:
    from torchgw.sklearn import GWAligner

    given = {name: known.pop(name) for name in list(known) if name != "alpha"}
    return GWAligner(**QUICK, **known).fit(X, Y, **given).result_


def along(**known: Any) -> Any:
    return torchgw.path(X, Y, epsilon=[0.1, 0.05], random_state=0, **known).results[1]


WORKS: dict[str, Callable[..., Any]] = {
    "solve": solved,
    "searched": lambda **known: solved(n_init=None, **known),
    "mass": lambda **known: solved(mass=0.5, **known),
    "unbalanced": lambda **known: solved(unbalanced=0.5, **known),
    "polished": lambda **known: solved(regularization="proximal", polish=True, **known),
    "derivatives": tracked,
    "implicit derivatives": lambda **known: tracked("implicit", **known),
    "unrolled derivatives": lambda **known: tracked("unrolled", **known),
    "matching": matched,
    "certify": lambda **known: solved(**known).certify(),
    "path": along,
    "GWAligner": fitted,
}
TABLES = [np.linalg.norm(part[:, None] - part, axis=2) for part in (X, Y)]


def stacked(**known: Any) -> Any:
    if "M" in known:
        known["M"] = known["M"][None]
    return torchgw.solve_batch(TABLES[0][None], TABLES[1][None], **known)


REFUSED: dict[str, Callable[..., Any]] = {
    "solve_many": lambda **known: torchgw.solve_many(
        [X], [Y], **known | ({"M": [known["M"]]} if "M" in known else {})
    ),
    "solve_batch": stacked,
    "pairwise": lambda **known: torchgw.pairwise([X, Y], **known),
    "solve_low_rank": lambda **known: torchgw.solve_low_rank(X, Y, rank=2, **known),
    "barycenter": lambda **known: torchgw.barycenter([X, Y], n=4, **known),
    "solve_all": lambda **known: torchgw.solve_all([X, Y], **known),
    "test": lambda **known: torchgw.test(X, Y, **known),
    "solve_rows": lambda **known: torchgw.solve_rows(X, Y, "nowhere", **known),
    "confidence": lambda **known: solved(**known).confidence(),
    "joint_embedding": lambda **known: torchgw.joint_embedding([X, Y], **known),
    "GWLoss": lambda **known: (
        GWLoss(alpha=0.5)(torch.tensor(X), torch.tensor(Y), torch.tensor(known["M"]))
        if "M" in known
        else GWLoss(**known)
    ),
    "distributed": lambda **known: solved(options=torchgw.Options(distributed=True), **known),
    "pot": lambda **known: (
        torchgw.pot.fused_gromov_wasserstein(known.pop("M"), *TABLES, **known)
        if "M" in known
        else torchgw.pot.gromov_wasserstein(*TABLES, **known)
    ),
}
# what a message says that names another way, or the arguments that there are
WAY_OUT = r"torchgw\.solve|Pass |Known: |Compare |must be places in lists|must be integers of shape"


@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
@pytest.mark.parametrize("call", WORKS)
@pytest.mark.parametrize("known", KNOWN)
def test_what_is_known_is_kept_to(call: str, known: str):
    given, allowed = KNOWN[known]
    elsewhere = {
        ("derivatives", "likely pairs"): "Pass known pairs",
        ("implicit derivatives", "likely pairs"): "Pass known pairs",
        ("unrolled derivatives", "likely pairs"): "Pass known pairs",
        ("GWAligner", "infinite M"): "Known: .*allowed",
        ("path", "groups"): "Pass `allowed`",
    }
    if (call, known) in elsewhere:
        with pytest.raises(TorchGWError, match=elsewhere[call, known]):
            WORKS[call](**given)
        return
    found = WORKS[call](**given)
    plan = found if isinstance(found, np.ndarray) else found.plan
    plan = plan.toarray() if scipy.sparse.issparse(plan) else torch.as_tensor(plan).detach().numpy()
    assert plan.shape == (N, N)
    assert plan.sum() > 0.2
    assert (plan[~allowed] == 0).all()


@pytest.mark.parametrize("call", REFUSED)
@pytest.mark.parametrize("known", KNOWN)
def test_what_is_not_taken_is_refused_with_the_way_out(call: str, known: str):
    if call == "pot":
        pytest.importorskip("ot")
    if (call, known) == ("confidence", "likely pairs"):
        return  # they are a linear cost, which resamples have
    with pytest.raises(TorchGWError, match=WAY_OUT):
        REFUSED[call](**KNOWN[known][0])


@pytest.mark.parametrize("known", ["pairs", "table", "groups", "infinite M"])
def test_what_is_read_of_a_plan_is_zero_elsewhere(known: str):
    given, allowed = KNOWN[known]
    result = solved(**given)
    plan, every = result.lazy_plan, np.arange(N)
    for read in (plan, plan.T):
        values, columns = read.topk(N)
        table = np.zeros((N, N))
        table[every[:, None], columns] = values
        assert (table[~(allowed if read is plan else allowed.T)] == 0).all()
    assert (plan.rows(every)[~allowed] == 0).all()
    assert (result.sparse_plan.toarray()[~allowed] == 0).all()
    drawn = plan.sample(500, torch.Generator().manual_seed(0))
    assert allowed[tuple(drawn)].all()


def test_plans_beside_known_pairs_are_not_shared():
    with pytest.raises(torchgw.UnsupportedError, match="leave `shared"):
        solved(pairs=PAIRS).shared()
