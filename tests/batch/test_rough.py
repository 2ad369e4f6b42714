"""First iterations in Triton: in the interpreter here, compiled on a GPU."""

from __future__ import annotations

import dataclasses
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from problems import distance_matrices, random_weights, skip_unless_kernels_run

from torchgw import Status, solve_many
from torchgw._batch import engine, packing
from torchgw._batch.packing import ENDS, Packed, has_triton, pack
from torchgw._batch.worth import ENDINGS
from torchgw._sinkhorn import choose
from torchgw._tensors import ahead
from torchgw._tensors.deadline import within
from torchgw.distances import PrecomputedDistance

pytest.importorskip("triton")
from torchgw._batch import programs_triton  # noqa: E402
from torchgw._batch.programs_triton import Programs  # noqa: E402

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


def first_iterations(problems):
    """Return plans of the float32 program, and what the one that goes on is given."""
    from torchgw._batch.rough_triton import rough
    from torchgw._batch.tile_triton import padded

    numbers = torch.arange(len(problems), device=problems.device)
    linear, target, first, _ = packing.units(problems, numbers)
    rows, columns = (1 << (size - 1).bit_length() for size in problems.shape)
    sides = (problems.x, rows), (problems.y, columns)
    tables = (
        *(padded(stack.tables, size, size) for stack, size in sides),
        *(padded(stack.weights, size) for stack, size in sides),
    )
    single = tuple(part.float() for part in tables)
    noise = padded(packing.start_noise(problems.shape, problems.device), rows, columns)
    linear = None if linear is None else padded(linear, rows, columns)
    index = problems.i, problems.j
    limits = 100, engine.Rules().objective_tol
    warm = rough(single, index, problems.alpha, linear, None, (target, first), noise, limits)
    return warm, (tables, single, index, problems.alpha, linear, target, warm)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_rough_plans_are_near_the_fixed_point(device, fused):
    skip_unless_kernels_run(device)
    sizes = [(9, 18), (12, 20), (16, 17)]
    problems = packed_problems(device, sizes, fused)
    warm, _ = first_iterations(problems)
    assert int(warm.done.max()) < 60
    for k, (n, m) in enumerate(sizes):
        x, y = problems.x.tables[k].cpu().numpy(), problems.y.tables[k].cpu().numpy()
        a, b = problems.x.weights[k].cpu().numpy(), problems.y.weights[k].cpu().numpy()
        plan = warm.plan[k].double().cpu().numpy()
        # what has no weight is given next to none
        assert max(plan[n:].sum(), plan[:, m:].sum()) < 1e-25
        np.testing.assert_allclose(plan.sum(1), a, atol=2e-6)
        assert np.abs(plan.sum(0) - b).sum() < 5e-4
        alpha = float(problems.alpha[k])
        cost = 2 * alpha * reference.gw_cost(x, y, plan)[:n, :m]
        if fused:
            cost += (1 - alpha) * problems.linear(torch.tensor([k]))[0, :n, :m].cpu().numpy()
        f, g, _ = reference.sinkhorn(cost, a[:n], b[:m], 0.04, 300)
        again = reference.plan(cost, a[:n], b[:m], f, g, 0.04)
        assert np.abs(again - plan[:n, :m]).sum() < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_settled_plans_are_fixed_points_in_float64(device, fused):
    from torchgw._batch.settle_triton import settle

    skip_unless_kernels_run(device)
    sizes = [(9, 18), (12, 20)]
    problems = packed_problems(device, sizes, fused)
    warm, given = first_iterations(problems)
    settle(*given, (100, engine.Rules().tol, -np.inf))
    assert int(warm.done.max()) < 100
    for k, (n, m) in enumerate(sizes):
        x, y = problems.x.tables[k].cpu().numpy(), problems.y.tables[k].cpu().numpy()
        a, b = problems.x.weights[k].cpu().numpy(), problems.y.weights[k].cpu().numpy()
        plan, alpha = warm.plan[k].double().cpu().numpy(), float(problems.alpha[k])
        # what has no weight is given next to none
        assert max(plan[n:].sum(), plan[:, m:].sum()) < 1e-25
        np.testing.assert_allclose(plan.sum(1), a, atol=1e-7)
        assert np.abs(plan.sum(0) - b).sum() < 5e-6
        cost = 2 * alpha * reference.gw_cost(x, y, plan)[:n, :m]
        if fused:
            cost += (1 - alpha) * problems.linear(torch.tensor([k]))[0, :n, :m].cpu().numpy()
        f, g, _ = reference.sinkhorn(cost, a[:n], b[:m], 0.04, 2000)
        again = reference.plan(cost, a[:n], b[:m], f, g, 0.04)
        assert np.abs(again - plan[:n, :m]).sum() < 1e-4


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_second_derivatives_are_inverted(device, dtype):
    from torchgw._batch.inner_triton import invert
    from torchgw._batch.tile_triton import tiles_of

    skip_unless_kernels_run(device)
    n, m, used = 32, 16, 13
    generator = torch.Generator().manual_seed(0)
    plan = torch.zeros(n, m, dtype=dtype)
    plan[:, :used] = torch.rand(n, used, generator=generator, dtype=torch.float64).pow(8).to(dtype)
    plan = (plan / plan.sum()).to(device)
    a, columns = plan.sum(1), plan.sum(0)
    # the columns of a plan are not those that it should have
    b = torch.zeros(m, dtype=dtype, device=device)
    b[:used] = 1 / used
    lines = torch.full((4, m), torch.nan, device=device)
    lines[0] = 0
    lines[0, :used] = columns[:used] / b[:used]
    out = torch.full((m, m), torch.nan, device=device)
    tiles, warps = tiles_of(n, m, 64)
    square = {name: tiles[f"SQUARE_{name}"] for name in ("RI", "CI", "RT", "CT")}
    invert[1,](plan, a, b, out, lines, used, 0, n, m, 16, **square, num_warps=warps)
    root = b[:used].double().sqrt()
    part = plan[:, :used].double() / a[:, None].double().sqrt() / root
    system = torch.diag(columns[:used].double() / root**2 + 1e-6) - part.T @ part
    expected = -torch.linalg.inv(system + torch.outer(root, root))
    # float32 times the condition of the system, some hundreds
    torch.testing.assert_close(out[:used, :used].double(), expected, rtol=0, atol=1e-3)
    assert float(expected.abs().max()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_products_in_triton_have_the_same_bits_in_any_batch(device):
    from torchgw._batch.product_triton import batch_product

    skip_unless_kernels_run(device)
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.rand(5, *shape, generator=generator, dtype=torch.float64).to(device)
        for shape in ((40, 33), (17, 33))
    )
    whole = batch_product(left, right.mT)
    torch.testing.assert_close(whole, torch.matmul(left, right.mT), rtol=1e-13, atol=0)
    assert torch.equal(batch_product(left[3:4], right[3:4].mT), whole[3:4])


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
def test_programs_end_where_the_engine_does(device, fused, chosen, monkeypatch):
    skip_unless_kernels_run(device)
    # columns are padded to 48, and programs hold 64
    problems = packed_problems(device, [(9, 36), (12, 40)], fused)
    if chosen:
        generator = torch.Generator().manual_seed(1)
        costs = torch.rand(2, *problems.shape, generator=generator, dtype=torch.float64).to(device)
        begins = torch.tensor([True, False], device=device)
        begin = lambda numbers: (costs[numbers], begins[numbers])  # noqa: E731
        problems = dataclasses.replace(problems, begin=begin)
    rules = engine.Rules(objective_tol=0)
    monkeypatch.setattr(engine, "may_begin", lambda *args: False)
    kept = {}
    plain = engine.run(problems, rules, lambda ended: None)
    monkeypatch.setattr(engine, "may_begin", lambda *args: True)

    def keep(ended):
        for place, number in enumerate(ended.number.tolist()):
            kept[number] = ended.plan[place], ended.f[place], ended.g[place]

    with monkeypatch.context() as patch:
        # nothing is left to the engine
        patch.setattr(engine, "_run_queue", lambda *args: pytest.fail("left"))
        programs = engine.run(problems, rules, keep)
    # plans that have settled may change by 1e-5 once more
    torch.testing.assert_close(programs.objective, plain.objective, rtol=1e-6, atol=0)
    assert (programs.ending == plain.ending).all()
    assert float(programs.marginal_error.max()) < 5e-6
    for number, (plan, f, g) in kept.items():
        a, b = problems.x.weights[number], problems.y.weights[number]
        assert not plan[a == 0].any()
        assert not plan[:, b == 0].any()
        # potentials are those of the plan, but for what the last change of the plan, 1e-5, does
        x, y = problems.x.tables[number], problems.y.tables[number]
        cost = -4 * problems.alpha[number] * x @ plan @ y
        if fused:
            cost += 0.4 * problems.linear(torch.tensor([number], device=device))[0]
        again = a[:, None] * b * ((f[:, None] + g - cost) / 0.04).exp()
        assert float((again - plan).abs().sum()) < 1e-3
    # each one has the bits that it has among others
    monkeypatch.setattr(engine, "_TOGETHER", 1)
    for mine, its in zip(engine.run(problems, rules), programs, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.slow
def test_programs_of_a_kind_are_compiled_side_by_side_once(monkeypatch):
    skip_unless_kernels_run(torch.device("cpu"))
    problems = packed_problems(torch.device("cpu"), [(9, 16)], fused=False)
    begun = []
    monkeypatch.setattr(engine, "may_begin", lambda *args: True)
    monkeypatch.setattr("torchgw._batch.programs_triton._compiled", {})
    monkeypatch.setattr(ahead, "_threads", lambda device: 1)
    monkeypatch.setattr(ahead, "_begin_to_compile", lambda device, new: begun.append(new) or [])
    found = [engine.run(problems, engine.Rules()) for _ in range(2)]
    (launches,) = begun
    made = [launch.kernel.rsplit(":")[1].strip("_") for launch in launches]
    assert made == [
        "anneal_kernel", "rough_kernel", "settle_begin_kernel", "settle_kernel",
        "converge_kernel", "worth_kernel",
    ]  # fmt: skip
    # none of them was launched for that, and what is launched is what was compiled
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    assert [ENDINGS[code] for code in found[0].ending.tolist()] == ["CONVERGED"]


def test_programs_that_a_limit_of_time_cannot_wait_for_are_left_to_the_engine(monkeypatch):
    problems, done = packed_problems(torch.device("cpu"), [(9, 16)], fused=False), Event()
    plain = engine.run(problems, engine.Rules())
    monkeypatch.setattr(engine, "may_begin", lambda *args: True)
    monkeypatch.setattr(programs_triton, "_compiled", {})
    monkeypatch.setattr(programs_triton, "compile_together", lambda *args: [done])
    monkeypatch.setattr(Programs, "solve", lambda *args: (_ for _ in ()).throw(KeyError("solved")))
    with within(0.2):
        found = engine.run(problems, engine.Rules())
    # as many iterations as there was time for
    assert float(found.objective) < 1.5 * float(plain.objective)
    done.set()
    with within(0.2), pytest.raises(KeyError, match="solved"):
        engine.run(problems, engine.Rules())


def test_what_a_process_knows_of_programs_stays(monkeypatch):
    problems = packed_problems(torch.device("cpu"), [(9, 16)], fused=False)
    programs, done = Programs(problems, engine.Rules()), Event()
    monkeypatch.setattr(programs_triton, "compile_together", lambda *args: [done])
    monkeypatch.setattr(programs_triton, "COMPILING", 0.01)
    for name in ("_compiled", "_known"):
        monkeypatch.setattr(programs_triton, name, {})
    assert not programs.known()
    done.set()
    assert programs.compiled(0)
    assert not programs.known()
    programs_triton._known.clear()
    assert programs.known()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_what_settling_leaves_is_ended_in_float64(device, monkeypatch):
    from torchgw._batch import settle_triton

    skip_unless_kernels_run(device)
    problems = packed_problems(device, [(9, 16), (12, 10)], fused=True)
    rules = engine.Rules(objective_tol=0)
    monkeypatch.setattr(engine, "may_begin", lambda *args: False)
    plain = engine.run(problems, rules)
    monkeypatch.setattr(engine, "may_begin", lambda *args: True)
    monkeypatch.setattr(engine, "_run_queue", lambda *args: pytest.fail("left"))
    # any change is too large for it
    monkeypatch.setattr(settle_triton, "FAR", 0.0)
    programs = engine.run(problems, rules)
    torch.testing.assert_close(programs.objective, plain.objective, rtol=1e-6, atol=0)
    assert (programs.ending == plain.ending).all()
    assert float(programs.marginal_error.max()) <= rules.inner_tol


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_problems_in_which_a_number_is_lost_begin_anew(device, monkeypatch):
    from torchgw._batch import programs_triton

    skip_unless_kernels_run(device)
    problems = packed_problems(device, [(9, 16), (12, 10)], fused=False)
    monkeypatch.setattr(engine, "may_begin", lambda *args: False)
    plain = engine.run(problems, engine.Rules())
    monkeypatch.setattr(engine, "may_begin", lambda *args: True)
    programs = engine.run(problems, engine.Rules())
    real = programs_triton.rough

    def losing(*args):
        warm = real(*args)
        warm.plan[1], warm.ended[1] = torch.nan, ENDS.index("LOST")
        return warm

    monkeypatch.setattr(programs_triton, "rough", losing)
    lost = engine.run(problems, engine.Rules())
    for mine, its, alone in zip(lost, programs, plain, strict=True):
        assert torch.equal(mine[:1], its[:1])
        assert torch.equal(mine[1:], alone[1:])


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_plans_that_jump_to_and_fro_are_held_back_or_end_as_flat(device, monkeypatch):
    from torchgw._batch import rough_triton

    skip_unless_kernels_run(device)
    # which of them settle hangs on rounding, how many does not
    tables = []
    for seed in range(1, 2 if device.type == "cpu" else 33):
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(2, 14, 14, generator=generator, dtype=torch.float64)
        edges = (draws < 0.25).double().triu(1)
        tables += list((edges + edges.mT).to(device))
    stack = pack(tables, [torch.full_like(table[0], 1 / 14) for table in tables])
    index = torch.arange(0, len(tables), 2, device=device)
    one = torch.ones(len(index), device=device).double()
    problems = Packed(stack, stack, index, index + 1, one, one * torch.nan, one)
    monkeypatch.setattr(engine, "may_begin", lambda *args: True)
    monkeypatch.setattr(engine, "_run_queue", lambda *args: pytest.fail("left"))
    held = engine.run(problems, engine.Rules())
    for name, value in {"MOMENTUM": 0.0, "DAMPING": 0.0, "_DECAY": 0.5}.items():
        monkeypatch.setattr(rough_triton, name, value)
    found = engine.run(problems, engine.Rules())
    flat = ENDINGS.index("FLAT")
    for solved in (held, found):
        assert {ENDINGS[code] for code in solved.ending.tolist()} <= {"CONVERGED", "FLAT"}
        assert float(solved.marginal_error.max()) <= engine.Rules().inner_tol
    assert int(found.n_iter.max()) < 150
    if device.type == "cuda":
        assert int((held.ending == flat).sum()) < int((found.ending == flat).sum())
        assert float(held.objective.mean()) < float(found.objective.mean())
    else:
        # parts of a plan that are joined by next to nothing take Sinkhorn's iteration 1,893
        assert int(found.inner_iterations) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_linear_problems_on_chip_are_those_of_ticks(device, fused, monkeypatch):
    skip_unless_kernels_run(device)
    problems = packed_problems(device, [(9, 16), (12, 10)], fused)
    monkeypatch.setattr(engine, "may_begin", lambda *args: False)
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
    monkeypatch.setattr(engine, "POOL_ENTRIES", {"cpu": 1, "cuda": 1})
    for mine, its in zip(engine.run(problems, engine.Rules()), programs, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_single_linear_problems_on_chip_are_those_of_ticks(device, monkeypatch):
    skip_unless_kernels_run(device)
    problems = packed_problems(device, [(9, 16), (12, 10), (7, 7)], fused=False)
    monkeypatch.setattr(engine, "on_chip", lambda *args: False)
    ticks = engine.solve_linear(problems, 1e-9, 1024)
    monkeypatch.setattr(engine, "on_chip", lambda *args: True)
    programs = engine.solve_linear(problems, 1e-9, 1024)
    torch.testing.assert_close(programs.plan, ticks.plan, rtol=0, atol=1e-9)


@pytest.mark.gpu
def test_sizes_up_to_the_largest_compile_and_agree(monkeypatch):
    device = torch.device("cuda")
    for n, m in [(30, 30), (48, 64), (100, 100), (128, 17)]:
        problems = packed_problems(device, 4 * [(n, m)], fused=False)
        rough = engine.run(problems, engine.Rules(objective_tol=0))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "may_begin", lambda *args: False)
            plain = engine.run(problems, engine.Rules(objective_tol=0))
        torch.testing.assert_close(rough.objective, plain.objective, rtol=1e-4, atol=0)


def test_whether_triton_runs_is_asked_of_triton_alone(monkeypatch):
    """To ask torch.compile imports and compiles for ten seconds."""
    asked = []
    backend = SimpleNamespace(why_not=lambda device, dtype: None)
    monkeypatch.setattr(choose, "_load", lambda place: asked.append(place) or backend)
    assert has_triton.__wrapped__(torch.device("cuda"))
    assert asked == [choose._BUILT_IN["triton"].backend]


@pytest.mark.parametrize("device", DEVICES)
def test_spaces_whose_points_look_alike_leave_the_product_plan(device, monkeypatch):
    skip_unless_kernels_run(device)
    monkeypatch.setattr(engine, "may_begin", lambda *_: True)
    steps = torch.arange(6)
    ring = (steps[:, None] - steps).abs()
    spaces = [torch.minimum(ring, 6 - ring).double(), torch.ones(2, 2).double().fill_diagonal_(0)]
    spaces = [PrecomputedDistance(space.to(device)) for space in spaces]
    solved = solve_many(spaces, spaces, epsilon=0.05, n_init=1)
    assert float(solved.value.abs().max()) < 1e-9
    assert solved.statuses == [Status.CONVERGED] * 2


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
@pytest.mark.parametrize("kind", ["strict", "proximal", "partial", "fused"])
def test_all_that_a_search_launches_is_compiled_before(kind, monkeypatch):
    skip_unless_kernels_run(torch.device("cpu"))
    draw, compiled, run = np.random.default_rng(3), set(), set()
    X, Y, M = (draw.random((2, 6, size)) for size in (2, 3, 6))
    options = {"proximal": {"regularization": "proximal"}, "partial": {"mass": 0.8}}.get(kind, {})
    if kind == "fused":
        options = {"M": M, "alpha": 0.5}
    monkeypatch.setattr("torchgw._many.search.may_begin", lambda *args: True)
    monkeypatch.setattr(Programs, "compile", lambda programs: compiled.add(programs._kind))
    queue = engine._run_queue

    def run_queue(problems, rules, *args):
        # proximal steps have no programs
        if not problems.proximal:
            assert compiled
            run.add(Programs(problems, rules)._kind)
        queue(problems, rules, *args)

    monkeypatch.setattr(engine, "_run_queue", run_queue)
    solve_many(X, Y, **options)
    assert run <= compiled
