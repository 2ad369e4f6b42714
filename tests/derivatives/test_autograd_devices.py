"""Each differentiable input by finite differences, on a CPU and on a GPU; memory over steps."""

from __future__ import annotations

import gc

import pytest
import torch
from problems import solve_by_name

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Sizes: with a GPU's kernels in their loops, and quick on a CPU.
SIZES = {"cpu": (9, 8), "cuda": (60, 50)}
# Fixed points so accurate that finite differences of 1e-4 see the derivative and not the solver.
TIGHT = {"tol": 1e-9, "inner_tol": 1e-10, "max_iter": 400, "n_init": 1}
STEP = 1e-4
# Of the loss, besides what is read off the plan: a backward that ignores it would be wrong.
UPSTREAM = -2.5

# What a solve is given, and its options.
CALLS = {
    "points, table": (("X", "Y", "a", "b", "M"), {"distances": "sqeuclidean", "epsilon": 4.0}),
    "points, features": (
        ("X", "Y", "a", "b", "F_X", "F_Y"),
        {"distances": "euclidean", "alpha": 0.4, "epsilon": 1.5},
    ),
    "points, features, streamed": (
        ("X", "Y", "a", "b", "F_X", "F_Y"),
        {"distances": "sqeuclidean", "alpha": 0.4, "epsilon": 2.5, "storage": "streamed",
         "skip_tiles": False},
    ),
    "distances, table": (("D_X", "D_Y", "a", "b", "M"), {"alpha": 0.7, "epsilon": 0.8}),
}  # fmt: skip


def make(names, device):
    """Inputs by name, float64, the same on every device."""
    n, m = SIZES[device]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, y = normal(n, 2), normal(m, 3)
    weights = [normal(size).abs() + 0.5 for size in (n, m)]
    known = {
        "X": x, "Y": y, "a": weights[0] / weights[0].sum(), "b": weights[1] / weights[1].sum(),
        "M": normal(n, m).abs(), "F_X": normal(n, 4), "F_Y": normal(m, 4),
        "D_X": torch.cdist(x, x) + 0.1, "D_Y": torch.cdist(y, y) + 0.1,
    }  # fmt: skip
    return {name: known[name].to(device) for name in names}


def total(given, mode, options):
    """A number that depends on the loss, and with "implicit" on the plan."""
    given = dict(given)
    for name in ("a", "b"):
        given[name] = given[name] / given[name].sum()
    if "F_X" in given:
        given["features"] = given.pop("F_X"), given.pop("F_Y")
    result = solve_by_name(**given, differentiable=mode, **TIGHT, **options)
    number = UPSTREAM * result.loss
    if mode == "value":
        return number
    n, m = result.lazy_plan.shape
    device, dtype = number.device, torch.float64
    there = torch.linspace(-1, 2, m, dtype=dtype, device=device)
    back = torch.linspace(0, 1, n, dtype=dtype, device=device)[:, None].expand(n, 2)
    plan = result.lazy_plan
    return number + 10 * (plan @ there).square().sum() + (plan.T @ back.cos()).pow(3).sum()


def direction_of(name, value, generator):
    """A direction in which the input may go: tables of distances stay symmetric."""
    step = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
    if name.startswith("D_"):
        return (step + step.T) / 2
    return value * step if name in "ab" else step


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["value", "implicit"])
@pytest.mark.parametrize("call", CALLS)
def test_every_input_against_finite_differences(device, mode, call):
    names, options = CALLS[call]
    given = make(names, device)
    leaves = {name: value.clone().requires_grad_() for name, value in given.items()}
    gradients = torch.autograd.grad(total(leaves, mode, options), list(leaves.values()))
    generator = torch.Generator().manual_seed(1)
    for (name, value), gradient in zip(given.items(), gradients, strict=True):
        assert gradient.device == value.device
        assert gradient.shape == value.shape
        step = direction_of(name, value, generator)
        ends = [
            float(total({**given, name: value + sign * STEP * step}, mode, options))
            for sign in (1, -1)
        ]
        slope = float((gradient * step).sum())
        # third derivatives times 1e-8, and 1e-9 of the solver over the step
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * STEP), rel=1e-3, abs=1e-5), name
        assert abs(slope) > 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["value", "implicit"])
@pytest.mark.parametrize("call", ["points, table", "points, features, streamed"])
def test_memory_is_flat_on_a_gpu(mode, call):
    """What is allocated after a few steps of training is what is after many."""
    names, options = CALLS[call]
    given = make(names, "cuda")
    x = given["X"].requires_grad_()
    optimiser = torch.optim.SGD([x], lr=1e-3)
    kept = []
    for step in range(30):
        optimiser.zero_grad()
        total(given, mode, options).backward()
        optimiser.step()
        if step in (9, 29):
            gc.collect()
            kept.append(torch.cuda.memory_allocated())
    assert kept[1] <= kept[0]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["value", "implicit"])
def test_gradients_of_a_gpu_are_those_of_a_cpu(mode):
    """At a size where a GPU takes kernels of its own; both in float64."""
    n, m = 300, 260
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in (n, m))
    options = {"distances": "sqeuclidean", "epsilon": 4.0, "precision": "float64"}
    gradients = []
    for device in ("cpu", "cuda"):
        points = [part.to(device).requires_grad_() for part in (x, y)]
        result = solve_by_name(*points, differentiable=mode, **TIGHT, **options)
        number = UPSTREAM * result.loss
        if mode == "implicit":
            number = number + (result.lazy_plan @ points[1].detach()).square().sum() * n
        gradients.append(torch.autograd.grad(number, points))
    for here, there in zip(*gradients, strict=True):
        assert there.device.type == "cuda"
        # the two solves end within their tolerances of each other
        assert (here - there.cpu()).norm() < 1e-4 * here.norm()
