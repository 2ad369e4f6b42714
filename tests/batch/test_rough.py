"""First iterations in Triton: in the interpreter here, compiled on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from problems import distance_matrices, random_weights, skip_unless_kernels_run

from torchgw._batch import engine
from torchgw._batch.packing import Packed, pack

pytest.importorskip("triton")
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


def packed_problems(device, sizes, fused):
    tables, weights = [], []
    for seed, (n, m) in enumerate(sizes):
        tables += [torch.from_numpy(table).to(device) for table in distance_matrices(n, m, seed)]
        weights += [torch.from_numpy(random_weights(k, seed)).to(device) for k in (n, m)]
    weights[0][1] = 0
    weights[0] /= weights[0].sum()
    rows, columns = pack(tables[::2], weights[::2]), pack(tables[1::2], weights[1::2])
    count = len(sizes)
    index, ones = torch.arange(count, device=device), torch.ones(count, device=device).double()
    generator = torch.Generator().manual_seed(0)
    shape = rows.tables.shape[1], columns.tables.shape[1]
    costs = torch.rand(count, *shape, generator=generator, dtype=torch.float64).to(device)
    for cost, (n, m) in zip(costs, sizes, strict=True):
        cost[n:], cost[:, m:] = 0, 0
    linear = (lambda numbers: costs[numbers]) if fused else None
    alpha = (0.6 if fused else 1.0) * ones
    return Packed(rows, columns, index, index, alpha, 0.04 * ones, ones, linear)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_rough_plans_are_near_the_fixed_point(device, fused):
    skip_unless_kernels_run(device)
    sizes = [(9, 18), (12, 20), (16, 17)]
    problems = packed_problems(device, sizes, fused)
    numbers = torch.arange(3, device=device)
    warm = engine._begin_roughly(problems, numbers)
    assert int(warm.done.max()) < 60
    for k, (n, m) in enumerate(sizes):
        x, y = problems.x.tables[k].cpu().numpy(), problems.y.tables[k].cpu().numpy()
        a, b = problems.x.weights[k].cpu().numpy(), problems.y.weights[k].cpu().numpy()
        plan = warm.plan[k].double().cpu().numpy()
        assert plan[n:].sum() == plan[:, m:].sum() == 0
        np.testing.assert_allclose(plan.sum(1), a, atol=2e-6)
        assert np.abs(plan.sum(0) - b).sum() < 5e-4
        alpha = float(problems.alpha[k])
        cost = 2 * alpha * reference.gw_cost(x, y, plan)[:n, :m]
        if fused:
            cost += (1 - alpha) * problems.linear(numbers[k : k + 1])[0, :n, :m].cpu().numpy()
        f, g, _ = reference.sinkhorn(cost, a[:n], b[:m], 0.04, 300)
        again = reference.plan(cost, a[:n], b[:m], f, g, 0.04)
        assert np.abs(again - plan[:n, :m]).sum() < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_engine_goes_on_from_them_to_the_same_answers(device, monkeypatch):
    skip_unless_kernels_run(device)
    problems = packed_problems(device, [(9, 16), (12, 10)], fused=True)
    rules = engine.Rules(objective_tol=0)
    monkeypatch.setattr(engine, "may_begin", lambda *args, **kwargs: False)
    plain = engine.run(problems, rules)
    monkeypatch.setattr(engine, "may_begin", lambda *args, **kwargs: True)
    rough = engine.run(problems, rules)
    torch.testing.assert_close(rough.objective, plain.objective, rtol=1e-7, atol=0)
    assert (rough.ending == plain.ending).all()
    assert float(rough.marginal_error.max()) < 5e-6
    # each one has the bits that it has among others
    monkeypatch.setattr(engine, "_ROUGH_ENTRIES", 1)
    for mine, its in zip(engine.run(problems, rules), rough, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_linear_problems_on_chip_are_those_of_ticks(device, fused, monkeypatch):
    skip_unless_kernels_run(device)
    problems = packed_problems(device, [(9, 16), (12, 10)], fused)
    monkeypatch.setattr(engine, "may_begin", lambda *args, **kwargs: False)
    monkeypatch.setattr(engine, "on_chip", lambda *args: False)
    # programs iterate to the end, without Newton's steps between
    monkeypatch.setattr(engine, "_step", lambda *args: None)
    ticks = engine.run(problems, engine.Rules())
    monkeypatch.setattr(engine, "on_chip", lambda *args: True)
    programs = engine.run(problems, engine.Rules())
    torch.testing.assert_close(programs.objective, ticks.objective, rtol=1e-12, atol=0)
    torch.testing.assert_close(programs.marginal_error, ticks.marginal_error, rtol=1e-2, atol=0)
    assert (programs.ending == ticks.ending).all()
    assert (programs.n_iter == ticks.n_iter).all()
    # none waits for another: each one has the bits that it has in a pool of two
    monkeypatch.setattr(engine, "_POOL_ENTRIES", {"cpu": 1, "cuda": 1})
    for mine, its in zip(engine.run(problems, engine.Rules()), programs, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.gpu
def test_sizes_up_to_the_largest_compile_and_agree(monkeypatch):
    device = torch.device("cuda")
    for n, m in [(30, 30), (48, 64), (100, 100), (128, 17)]:
        problems = packed_problems(device, 4 * [(n, m)], fused=False)
        rough = engine.run(problems, engine.Rules(objective_tol=0))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "may_begin", lambda *args, **kwargs: False)
            plain = engine.run(problems, engine.Rules(objective_tol=0))
        torch.testing.assert_close(rough.objective, plain.objective, rtol=1e-4, atol=0)
