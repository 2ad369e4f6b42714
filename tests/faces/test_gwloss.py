"""The loss to train with: values and gradients of a solve, without a search at each step."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys

import pytest
import torch

import torchgw
from torchgw._batch.follow import Nearby, linearised, objective
from torchgw.losses import GWLoss, _Kept


def cloud(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tight(**options):
    return GWLoss(**({"epsilon": 0.2, "tol": 1e-8, "inner_tol": 1e-10, "max_iter": 500} | options))


@pytest.mark.parametrize("distances", ["euclidean", "sqeuclidean", "cosine", "precomputed"])
def test_value_and_gradient_are_those_of_a_solve(distances):
    X, Y = cloud(9, 2), cloud(11, 3, seed=1)
    if distances == "precomputed":
        X, Y = torch.cdist(X, X), torch.cdist(Y, Y)
    X.requires_grad_()
    M = cloud(9, 11, seed=2).square().requires_grad_()
    a = torch.linspace(1, 2, 9, dtype=torch.float64)
    a = (a / a.sum()).requires_grad_()
    value = tight(distances=distances)(X, Y, M, a=a)
    given = {"D_X": X, "D_Y": Y} if distances == "precomputed" else {"X": X, "Y": Y}
    metric = {} if distances == "precomputed" else {"distances": distances}
    expected = torchgw.solve(
        **given, **metric, M=M, a=a, alpha=0.5, epsilon=0.2, tol=1e-9, differentiable="value",
        options=torchgw.Options(inner_tol=1e-11), random_state=0,
    ).loss  # fmt: skip
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)
    for mine, its in zip(
        torch.autograd.grad(3 * value, [X, M, a]),
        torch.autograd.grad(3 * expected, [X, M, a]),
        strict=True,
    ):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_batches_are_problems_side_by_side():
    X, Y = cloud(3, 8, 2).requires_grad_(), cloud(3, 10, 2, seed=1)
    values = tight(reduction="none")(X, Y)
    single = torch.stack([tight()(x, y) for x, y in zip(X, Y, strict=True)])
    torch.testing.assert_close(values, single, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(tight()(X, Y), values.mean(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(tight(reduction="sum")(X, Y), values.sum(), rtol=1e-6, atol=1e-8)


def test_steps_go_on_without_a_search_and_never_cost_more_than_one():
    points, shape = torch.nn.Parameter(cloud(6, 2)), cloud(6, 3, seed=1)
    loss, optimiser = GWLoss(epsilon=0.1, search_every=5), torch.optim.Adam([points], lr=0.02)
    for step in range(11):
        value = loss(points, shape)
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        assert loss.searches == 1 + step // 5
    # what a search finds is kept only where it costs less
    before = loss(points, shape).detach()
    loss.search_every = 1
    assert loss(points, shape).detach() <= before * (1 + 1e-5)
    loss.reset()
    loss(points, shape)
    assert loss.searches == 5


def test_a_jump_is_searched_for():
    X, Y = cloud(5, 2), cloud(5, 2, seed=1)
    loss = GWLoss(epsilon=0.1, search_every=None)
    loss(X, X)
    assert loss.searches == 1
    loss(X, X)
    assert loss.searches == 1
    loss(X, 3 * Y)
    assert loss.searches == 2
    # batches with a name of their own have plans of their own
    loss(X, X, key="other")
    assert loss.searches == 3


def test_debiased_is_zero_between_equals():
    X = cloud(12, 3)
    value = tight(debiased=True)(X, X.flip(0))
    assert abs(float(value)) < 1e-6
    away = X[:, :2].clone().requires_grad_()
    value = tight(debiased=True)(away, X)
    (gradient,) = torch.autograd.grad(value, away)
    step = 1e-4 * gradient / gradient.norm()
    down, up = (float(tight(debiased=True)(away.detach() + side * step, X)) for side in (-1, 1))
    assert (up - down) / 2e-4 == pytest.approx(float(gradient.norm()), rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_precisions(dtype):
    X = cloud(6, 2).to(dtype).requires_grad_()
    value = GWLoss(epsilon=0.1)(X, cloud(7, 2, seed=1).to(dtype))
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    value.backward()
    assert X.grad.dtype == dtype
    assert bool(X.grad.isfinite().all())


def test_second_derivatives_are_refused():
    X = cloud(6, 2).requires_grad_()
    value = GWLoss(epsilon=0.1, distances="sqeuclidean")(X, cloud(6, 2, seed=1))
    with pytest.raises(torchgw.UnsupportedError, match="first derivatives"):
        torch.autograd.grad(value, X, create_graph=True)


def test_automatic_epsilon_is_chosen_once_and_kept_in_the_state():
    loss = GWLoss(distances="precomputed")
    table = torch.cdist(cloud(8, 2), cloud(8, 2))
    loss(table, table)
    chosen = loss.epsilon
    loss(10 * table, 10 * table)
    assert loss.epsilon == chosen > 0
    other = GWLoss(distances="precomputed")
    other.load_state_dict(loss.state_dict())
    assert other.epsilon == chosen
    assert pickle.loads(pickle.dumps(loss)).epsilon == chosen
    assert "precomputed" in repr(loss)


def test_steps_go_on_without_the_engine(monkeypatch):
    """Which takes the first step, and one that leads too far; values are those of fresh solves."""
    calls, own = [], GWLoss._go_on
    monkeypatch.setattr(GWLoss, "_go_on", lambda *given: calls.append(1) or own(*given))
    points, shape = torch.nn.Parameter(cloud(12, 2)), cloud(12, 3, seed=1)
    loss, optimiser = GWLoss(epsilon=0.1, search_every=None), torch.optim.Adam([points], lr=0.01)
    for _ in range(8):
        value = loss(points, shape)
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
    assert len(calls) == 1
    last = loss(points, shape).detach()
    ((kept, _),) = loss._kept.values()
    fresh = tight(epsilon=0.1)
    # as the points have not moved, it begins where the last step ended
    fresh._kept.update((name, (_Kept.anew(*it[:3]), n)) for name, (it, n) in loss._kept.items())
    torch.testing.assert_close(last, fresh(points, shape).detach(), rtol=1e-5, atol=1e-8)
    ((exact, _),) = fresh._kept.values()
    assert float((kept.plan - exact.plan).abs().sum()) < 5e-3
    monkeypatch.setattr("torchgw.losses.follow", lambda near, place: place)
    assert abs(float(loss(points, shape).detach()) - float(last)) < 1e-4
    assert len(calls) == 2


def test_a_first_value_at_a_small_epsilon_is_that_of_its_plan():
    """Plans that a search found were solved again from columns that no row preferred."""
    generator = torch.Generator().manual_seed(1)
    Y = torch.randn(2, 40, 3, generator=generator)
    X, epsilon = Y[..., :2].clone(), 0.005
    loss = GWLoss(epsilon=epsilon, n_init=1, reduction="none")
    values = loss(X, Y)
    ((kept, _),) = loss._kept.values()
    tables = [torch.cdist(part.double(), part.double()) for part in (X, Y)]
    even, one = torch.full((2, 40), 1 / 40, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    near = Nearby(*tables, None, even, even, one, epsilon * one)
    exact = objective(near, kept.plan, linearised(near, kept.plan))
    torch.testing.assert_close(values.double(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("distances", ["euclidean", "precomputed"])
def test_what_is_not_finite_is_refused_at_any_step(bad, distances):
    X, Y = cloud(7, 7).square(), cloud(7, 7, seed=1).square()
    loss = GWLoss(distances=distances, epsilon=0.2, search_every=None, n_init=1)
    before = loss(X, Y)
    wrong = X.clone()
    wrong[2, 3] = bad
    with pytest.raises(torchgw.InvalidInputError, match="`X` has entries that are NaN"):
        loss(wrong, Y)
    torch.testing.assert_close(loss(X, Y), before, rtol=1e-3, atol=1e-5)
    assert loss.searches == 1


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_steps_on_a_gpu_are_those_on_a_cpu(fused):
    """By graphs, which are recorded at the second step; what is not finite is refused by all."""
    X, Y, away = cloud(2, 9, 2), cloud(2, 11, 3, seed=1), cloud(2, 9, 2, seed=2)
    M = cloud(2, 9, 11, seed=3).square() if fused else None
    a = torch.linspace(0, 1, 9, dtype=torch.float64).expand(2, 9) / 4.5
    found = []
    for device in ("cpu", "cuda"):
        loss, steps = tight(search_every=None), []
        for step in range(6):
            parts = [(X + 0.01 * step * away), Y, M, a]
            parts = [None if part is None else part.to(device).requires_grad_() for part in parts]
            value = loss(*parts[:3], a=parts[3])
            slopes = torch.autograd.grad(value, [part for part in parts if part is not None])
            steps.append([value.detach().cpu(), *(slope.cpu() for slope in slopes)])
        assert loss.searches == 1
        with pytest.raises(torchgw.InvalidInputError, match="NaN"):
            loss(*(X.to(device) * torch.nan, Y.to(device), None if M is None else M.to(device)))
        found.append(steps)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("steps", [30, 1000])
def test_memory_is_flat(steps):
    points, shape = torch.nn.Parameter(cloud(6, 2)), cloud(6, 2, seed=1)
    loss = GWLoss(epsilon=0.2, search_every=None)

    def tensors():
        gc.collect()
        held = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
        return len(held), sum(item.numel() for item in held)

    counts = []
    for step in range(steps):
        loss(points, shape).backward()
        if step in (10, steps - 1):
            counts.append(tensors())
    assert counts[1][0] <= counts[0][0] + 2
    assert counts[1][1] <= counts[0][1] + 100
    loss.n_init = 1
    for name in range(70):
        loss(points, shape, key=name)
    assert len(loss._kept) <= 64


@pytest.mark.slow
def test_a_compiled_step_breaks_its_graph_once():
    import torch._dynamo as dynamo

    loss, shape = GWLoss(epsilon=0.2), cloud(6, 2, seed=1)

    def step(points):
        return loss(2 * points, shape) * 3

    explained = dynamo.explain(step)(cloud(6, 2))
    assert explained.graph_break_count <= 1


TRAINING = """
import sys, torch
from torch.nn.parallel import DistributedDataParallel
from torchgw.losses import GWLoss
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
X = torch.randn(4, 9, 3, generator=generator, dtype=torch.float64)
Y = torch.randn(4, 9, 2, generator=generator, dtype=torch.float64)
torch.manual_seed(1)
model = torch.nn.Linear(3, 2, dtype=torch.float64)
if size > 1:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size
    )
    model = DistributedDataParallel(model)
loss = GWLoss(epsilon=0.2, tol=1e-8, inner_tol=1e-10, max_iter=500)
optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(3):
    value = loss(model(X[rank::size]), Y[rank::size])
    optimiser.zero_grad(), value.backward(), optimiser.step()
torch.save([part.detach() for part in model.parameters()], f"{folder}/{size}-{rank}.pt")
"""


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    """By DistributedDataParallel, each with half of a batch, as the documentation shows."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    found = {}
    for size in (1, 2):
        started = [
            subprocess.Popen(
                [sys.executable, "-c", TRAINING, str(rank), str(size), str(tmp_path)],
                env=environment, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            errors = [process.communicate(timeout=120)[1] for process in started]
        finally:
            for process in started:
                process.kill()
        assert [process.returncode for process in started] == size * [0], errors
        for rank in range(size):
            found[size, rank] = torch.load(tmp_path / f"{size}-{rank}.pt")
    for alone, first, second in zip(found[1, 0], found[2, 0], found[2, 1], strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distances": "geodesic"}, "`distances`"),
        ({"epsilon": -1.0}, "`epsilon`"),
        ({"reduction": "max"}, "`reduction`"),
        ({"search_every": 0}, "`search_every`"),
        ({"jump": -1.0}, "`jump`"),
        ({"debiased": 1}, "`debiased`"),
        ({"max_iter": 0}, "`max_iter`"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(torchgw.TorchGWError, match=message):
        GWLoss(**options)


def test_bad_calls():
    loss, X = GWLoss(epsilon=0.2), cloud(6, 2)
    for given, message in (
        ((X.long(), X), "`X` must be a floating-point tensor"),
        ((X, X[0]), "`Y` must have shape"),
        ((X.expand(2, 6, 2), X), "as many problems"),
        ((X, X, cloud(5, 6)), "`M` must have shape"),
        ((X[:0], X), "`X` is empty"),
        ((X, X * torch.nan), "`Y` has entries that are NaN"),
    ):
        with pytest.raises(torchgw.TorchGWError, match=message):
            loss(*given)
    with pytest.raises(torchgw.InvalidInputError, match="`a` must be non-negative"):
        loss(X, X, a=-torch.ones(6))
    with pytest.raises(torchgw.InvalidInputError, match="precomputed|distances"):
        GWLoss(distances="precomputed")(X, X)
