"""Alignment of AnnData in steps: several objects, modalities, batches; what is carried over."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hostile import ANYTHING
from problems import isometric_copy
from scipy.stats import special_ortho_group

anndata = pytest.importorskip("anndata", reason="needs anndata (pip install anndata)")

import pandas as pd  # noqa: E402

import torchgw  # noqa: E402
from torchgw import InvalidInputError, TorchGWError  # noqa: E402
from torchgw.anndata import TranslationProblem, align, read_plan  # noqa: E402

pytestmark = [
    # of anndata itself
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EXACT = {"distances": "euclidean", "epsilon": 1e-3, "random_state": 0}
KINDS = ["young", "grown", "old"]


def side(points, prefix, names=None):
    adata = anndata.AnnData(np.zeros((len(points), 0)), obsm={"X_pca": points})
    adata.obs_names = [f"{prefix}{i}" for i in range(len(points))] if names is None else names
    return adata


@pytest.fixture
def clouds():
    """A reference of 60 cells, two turned and shuffled copies of it, and who is who."""
    x, y, answer = isometric_copy(60)
    order = np.random.default_rng(3).permutation(60)
    other = y[order] @ special_ortho_group.rvs(3, random_state=0)
    reference = side(y, "t")
    age = y[:, 0] - y[:, 0].min()
    reference.obs["age"] = age
    kind = np.digitize(age, np.quantile(age, [0.3, 0.7]))
    reference.obs["stage"] = pd.Categorical.from_codes(kind, KINDS, ordered=True)
    reference.uns["stage_colors"] = ["#111111", "#222222", "#333333"]
    return {"one": side(x, "a"), "two": side(other, "b"), "ref": reference}, answer, order


def solved(data, **options):
    return TranslationProblem(data, **options).prepare().solve(solve_options=EXACT)


def test_labels_keep_their_kind(clouds, tmp_path):
    data, answer, _ = clouds
    source, target = data["one"], data["ref"]
    align(source, target, labels=["stage", "age"], sparse_topk=3, solve_options=EXACT)
    stage = source.obs["torchgw_stage"]
    assert list(stage.cat.categories) == KINDS
    assert stage.cat.ordered
    assert list(stage) == list(target.obs["stage"].iloc[answer])
    np.testing.assert_allclose(
        source.obs["torchgw_age"], target.obs["age"].to_numpy()[answer], atol=0.15
    )
    assert "torchgw_age_share" not in source.obs
    assert list(source.uns["torchgw_stage_colors"]) == list(target.uns["stage_colors"])
    about = source.uns["torchgw"]
    plan = source.obsm["torchgw_plan"]
    assert about["plan_mass_kept"] == pytest.approx(plan.sum())
    assert 0.5 < about["plan_mass_kept"] < 1
    assert about["mass"] == pytest.approx(1)
    source.write_h5ad(tmp_path / "out.h5ad")
    again = anndata.read_h5ad(tmp_path / "out.h5ad")
    assert again.obs["torchgw_stage"].cat.ordered
    assert again.uns["torchgw"]["doubt"] == about["doubt"]


def test_numbers_without_a_value_are_left_out(clouds):
    data, answer, _ = clouds
    source, target = data["one"], data["ref"]
    target.obs["constant"] = np.where(np.arange(60) % 2, 3.0, np.nan)
    target.obs["flag"] = target.obs["age"] > 1
    align(source, target, labels=("constant", "flag"), solve_options=EXACT)
    np.testing.assert_allclose(source.obs["torchgw_constant"].dropna(), 3)
    # true or false is no number
    assert list(source.obs["torchgw_flag"]) == list(target.obs["flag"].iloc[answer])


def test_copies_leave_the_objects_alone(clouds):
    data, _, _ = clouds
    before = set(data["one"].obsm), set(data["ref"].uns)
    result, source, target = align(data["one"], data["ref"], copy=True, solve_options=EXACT)
    assert isinstance(result, torchgw.GWResult)
    assert (set(data["one"].obsm), set(data["ref"].uns)) == before
    assert "X_torchgw" in source.obsm
    assert "torchgw" in target.uns


def test_a_plan_survives_subsetting(clouds):
    data, _, _ = clouds
    source, target = data["one"], data["ref"]
    align(source, target, solve_options=EXACT)
    whole = read_plan(source, target)
    np.testing.assert_array_equal(whole.toarray(), source.obsm["torchgw_plan"].toarray())
    rows, columns = np.arange(5, 25), np.array([40, 3, 17])
    part = read_plan(source[rows].copy(), target[columns].copy())
    np.testing.assert_array_equal(part.toarray(), whole.toarray()[np.ix_(rows, columns)])
    with pytest.raises(
        InvalidInputError, match="60 observations .* were not aligned, such as 'b0'"
    ):
        read_plan(source, data["two"])
    with pytest.raises(InvalidInputError, match="no plan 'other_plan'"):
        read_plan(source, target, "other")
    source.uns["torchgw"]["plan_columns"] = np.array(["t0"] * 60)
    with pytest.raises(InvalidInputError, match="occur twice"):
        read_plan(source, target)


def test_a_problem_is_about_the_cells_it_was_prepared_with(clouds):
    data, _, _ = clouds
    two = {name: data[name] for name in ("one", "ref")}
    problem = solved(two).write()
    kept = data["one"].obsm["torchgw_plan"][10:]
    data["one"]._inplace_subset_obs(np.arange(60) >= 10)
    calls = (problem.push, problem.pull, problem.translate, problem.write, problem.embed)
    for call in calls:
        with pytest.raises(
            InvalidInputError, match="has 50 cells that are not the 60 that were prepared"
        ):
            call()
    again = read_plan(data["one"], data["ref"])
    np.testing.assert_array_equal(again.toarray(), kept.toarray())
    assert problem.prepare().solve(solve_options=EXACT).push().shape == (60,)
    data["ref"]._inplace_subset_obs(data["ref"].obs_names[::-1])
    with pytest.raises(InvalidInputError, match="in another order"):
        problem.push()
    # what happened to the names is told
    with pytest.raises(InvalidInputError, match="was lost, as by anndata.concat"):
        read_plan(anndata.concat([data["one"][:5], data["one"][5:]]), data["ref"])


def test_batches_are_read_as_they_are_now(clouds):
    data, _, _ = clouds
    whole = anndata.concat({"one": data["one"], "ref": data["ref"]}, label="batch")
    whole.obs["stage"] = data["ref"].obs["stage"].reindex(whole.obs_names)
    problem = solved(whole, batch_key="batch").write(labels="stage")
    table = problem.cell_transition(
        source_groups="torchgw_stage", target_groups="stage", forward=True
    )
    assert (np.diag(table) > 0.8).all()
    sent = problem.push(key_added="arrived")
    np.testing.assert_allclose(problem.pull(data="arrived").sum(), sent.sum())
    with pytest.raises(InvalidInputError, match="in obsp.* follows it by itself"):
        read_plan(whole, whole)
    whole._inplace_subset_obs(np.arange(120) != 70)
    for call in (problem.push, problem.write, problem.embed):
        with pytest.raises(InvalidInputError, match="ref.*59 cells that are not the 60"):
            call()


def test_several_objects_against_a_reference(clouds):
    data, answer, order = clouds
    problem = solved(data, reference="ref").write(labels="stage")
    stage = data["ref"].obs["stage"]
    assert list(data["one"].obs["torchgw_stage"]) == list(stage.iloc[answer])
    assert list(data["two"].obs["torchgw_stage"]) == list(stage.iloc[order])
    assert set(data["ref"].uns["torchgw"]) == {"one", "two"}
    ref = data["ref"].obsm
    np.testing.assert_allclose(ref["X_torchgw"], ref["X_pca"], rtol=1e-11)
    there = problem.translate("two")
    np.testing.assert_array_equal(there, data["two"].obsm["X_torchgw"])
    back = problem.translate("ref", "two")
    assert np.linalg.norm(back[order] - data["two"].obsm["X_pca"], axis=1).max() < 0.5
    data["ref"].obsm["twice"] = 2 * data["ref"].obsm["X_pca"]
    np.testing.assert_allclose(problem.translate("two", use_rep="twice"), 2 * there)
    with pytest.raises(InvalidInputError, match="no solution from 'one' to 'two'"):
        problem.translate("one", "two")
    with pytest.raises(InvalidInputError, match="no column of the .obs of the reference, 'ref'"):
        problem.write(labels="odd")


def test_modalities_of_one_object(clouds):
    mudata = pytest.importorskip("mudata", reason="needs mudata, which no extra has")
    data, answer, _ = clouds
    with mudata.set_options(pull_on_update=False):
        both = mudata.MuData({"atac": data["one"], "rna": data["ref"]})
    problem = solved(both).write(labels="stage")
    assert list(problem.solutions) == [("atac", "rna")]
    assert list(both["atac"].obs["torchgw_stage"]) == list(data["ref"].obs["stage"].iloc[answer])


def test_batches_of_one_object(clouds, tmp_path):
    data, answer, order = clouds
    whole = anndata.concat(data, label="batch", uns_merge="unique")
    whole = whole[np.random.default_rng(5).permutation(180)].copy()
    for name in ("stage", "age"):
        whole.obs[name] = data["ref"].obs[name].reindex(whole.obs_names)
    problem = solved(whole, batch_key="batch", reference="ref").write(labels=["stage", "age"])
    separate = solved(data, reference="ref").write(labels=["stage", "age"])
    for (pair, result), other in zip(
        problem.solutions.items(), separate.solutions.values(), strict=True
    ):
        assert pair[1] == "ref"
        assert result.value == pytest.approx(other.value, rel=1e-3)
    for name in ("one", "two"):
        here = whole[data[name].obs_names]
        assert list(here.obs["torchgw_stage"]) == list(data[name].obs["torchgw_stage"])
        np.testing.assert_allclose(
            here.obs["torchgw_age"], data[name].obs["torchgw_age"], atol=1e-2
        )
        np.testing.assert_allclose(here.obsm["X_torchgw"], data[name].obsm["X_torchgw"], atol=1e-2)
    own = whole[data["ref"].obs_names]
    assert list(own.obs["torchgw_stage"]) == list(own.obs["stage"])
    assert (own.obs["torchgw_stage_share"] == 1).all()
    np.testing.assert_array_equal(own.obs["torchgw_age"], own.obs["age"])
    plan = whole[data["one"].obs_names].obsp["torchgw_plan"]
    assert plan.nnz == 0  # within a batch nothing moves
    both = whole[[*data["one"].obs_names, *data["ref"].obs_names]]
    block = both.obsp["torchgw_plan"][:60, 60:].toarray()
    np.testing.assert_array_equal(block.argmax(1), answer)
    assert list(whole.uns["torchgw_stage_colors"]) == list(data["ref"].uns["stage_colors"])
    whole.write_h5ad(tmp_path / "whole.h5ad")
    assert anndata.read_h5ad(tmp_path / "whole.h5ad").uns["torchgw"]["reference"] == "ref"


def test_all_objects_meet_in_one_space(clouds):
    data, answer, order = clouds
    problem = solved(data, reference="ref").embed(dimension=3, coupling=10.0)
    one, two, reference = (data[name].obsm["X_joint"] for name in ("one", "two", "ref"))
    spread = np.linalg.norm(reference - reference.mean(0), axis=1).mean()
    assert spread > 0
    # partners lie together, sources by way of the reference
    partner = reference[np.asarray(problem.solutions["one", "ref"].lazy_plan.argmax())]
    assert np.linalg.norm(one - partner, axis=1).mean() < 0.1 * spread
    other = two[np.argsort(order)[answer]]
    assert np.linalg.norm(one - other, axis=1).mean() < 0.1 * spread
    whole = anndata.concat(data, label="batch", index_unique="-")
    batches = solved(whole, batch_key="batch", reference="ref")
    batches.embed(key_added="X_all")
    assert whole.obsm["X_all"].shape == (180, 2)
    assert np.isfinite(whole.obsm["X_all"]).all()
    with pytest.raises(InvalidInputError, match="before `embed`"):
        TranslationProblem(data, reference="ref").prepare().embed()
    for adata in data.values():
        adata.obsp["distances"] = np.ones((60, 60)) - np.eye(60)
    given = TranslationProblem(data, reference="ref").prepare(use_obsp="distances")
    given.solutions = problem.solutions
    with pytest.raises(InvalidInputError, match="compared by distances"):
        given.embed()


def test_masses_move_both_ways(clouds):
    data, answer, _ = clouds
    data["one"].obs["half"] = np.where(np.arange(60) < 30, "a", "b")
    problem = solved({"one": data["one"], "ref": data["ref"]}).write(labels="stage")
    sent = problem.push(data="half", subset="a", key_added="mass of a")
    assert sent.sum() == pytest.approx(1)
    expected = np.zeros(60)
    expected[answer[:30]] = 1 / 30
    assert np.abs(sent - expected).sum() < 0.5
    np.testing.assert_array_equal(data["ref"].obs["mass of a"], sent)
    fetched = problem.pull(data="stage", subset=["old"])
    assert fetched[list(data["one"].obs["torchgw_stage"] == "old")].sum() > 0.8
    np.testing.assert_allclose(problem.push(data=np.ones((60, 2)) / 60), 1 / 60, rtol=1e-3)
    np.testing.assert_allclose(
        problem.push(data=np.eye(60), scale_by_marginals=False).sum(), 1, rtol=1e-6
    )
    table = problem.cell_transition("one", "ref", "half", "stage", forward=True)
    assert list(table.index) == ["a", "b"]
    assert list(table.columns) == KINDS
    np.testing.assert_allclose(table.sum(axis=1), 1)
    plan = np.asarray(problem.solutions["one", "ref"].plan)
    first = plan[:30].sum(0)
    old = (data["ref"].obs["stage"] == "old").to_numpy()
    assert table.loc["a", "old"] == pytest.approx(first[old].sum() / first.sum())
    backward = problem.cell_transition(None, None, "half", "stage")
    np.testing.assert_allclose(backward.sum(axis=0), 1)
    with pytest.raises(InvalidInputError, match="holds labels: choose some as `subset`"):
        problem.push(data="half")
    with pytest.raises(InvalidInputError, match="No cell of"):
        problem.push(data="half", subset="c")
    with pytest.raises(InvalidInputError, match="There is no 'none' in"):
        problem.cell_transition(None, None, "none", "stage")
    with pytest.raises(InvalidInputError, match=r"numbers of shape \(60,\)"):
        problem.push(data=np.ones(7))


def test_tau_is_the_factor_of_the_half_steps(clouds):
    data, _, _ = clouds
    options = {**EXACT, "epsilon": 0.01, "n_init": 1}
    relaxed = align(data["one"], data["ref"], tau_a=0.9, tau_b=1, solve_options=options)
    rho = 0.01 * 0.9 / (2 * 0.1)
    same = align(
        data["one"], data["ref"], solve_options={**options, "unbalanced": (rho, float("inf"))}
    )
    assert relaxed.value == pytest.approx(same.value, rel=1e-9)
    assert data["one"].uns["torchgw"]["mass"] == pytest.approx(float(same.marginal_a.sum()))
    strict = align(data["one"], data["ref"], tau_a=1, solve_options={"n_init": 1, **EXACT})
    assert strict.marginal_error < 1e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tau_a": 0}, "`tau_a` must be above 0"),
        ({"tau_b": 1.5}, "`tau_b` must be above 0"),
        ({"tau_a": 0.5}, "epsilon, which has to be a positive number"),
        ({"tau_a": 0.5, "solve_options": {"mass": 0.5}}, "or `mass`, not both"),
        ({"copy": 1}, "`copy` must be True or False"),
        ({"labels": [1]}, "a list of names"),
        ({"labels": ["stage", "odd"]}, "'odd'` is a column of neither .*has .*'stage'"),
    ],
)
def test_bad_arguments(clouds, arguments, message):
    data = clouds[0]
    with pytest.raises(TorchGWError, match=message):
        align(data["one"], data["ref"], **arguments)


def test_bad_problems(clouds):
    data = clouds[0]
    whole = anndata.concat(data, label="batch")
    for arguments, message in (
        (((data,), {}), "`reference` must be one of 'one', 'two', 'ref'; got None"),
        ((({"one": data["one"]},), {}), "at least two"),
        (((data["one"],), {}), "with a `target` or a `batch_key`"),
        (((whole,), {"batch_key": "odd"}), "is no column of .obs, which has"),
        (((data,), {"batch_key": "batch"}), "for one AnnData"),
        ((({"one": data["one"], "two": 3},), {}), r"`data\['two'\]` must be an AnnData; got int"),
    ):
        with pytest.raises(TorchGWError, match=message):
            TranslationProblem(*arguments[0], **arguments[1])
    problem = TranslationProblem(data, reference="ref")
    for call, message in (
        (problem.solve, "Call `prepare`"),
        (problem.write, "`solve` before `write`"),
        (problem.translate, "`prepare` and `solve` first"),
        (lambda: problem.prepare(use_rep=("a", "b")), "one name or a pair, or a dictionary"),
        (lambda: problem.prepare(use_rep={"one": "X_pca"}), "no entry for two, ref"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            call()


@pytest.mark.filterwarnings("ignore::torchgw._errors.SearchWarning")  # said too, of one start
def test_warnings_are_written_and_still_given(clouds):
    data, _, _ = clouds
    options = {**EXACT, "max_iter": 2, "n_init": 1}
    with pytest.warns(torchgw._errors.ConvergenceWarning) as caught:
        align(data["one"], data["ref"], solve_options=options)
    about = data["one"].uns["torchgw"]
    assert about["warnings"] == "\n".join(str(entry.message) for entry in caught)
    assert about["warnings"]
    assert caught[0].filename == __file__
    assert not about["converged"]


def test_optima_of_nearly_equal_cost_are_written(tmp_path):
    """A cloud that is its own mirror image."""
    x = np.random.default_rng(0).normal(size=(40, 2)) * [3, 1]
    x = np.concatenate([x, -x])
    source, target = side(x, "a"), side(x[::-1].copy(), "b")
    result = align(source, target, solve_options=EXACT)
    about = source.uns["torchgw"]
    assert about["ambiguity"] == result.ambiguity > 0.99
    assert about["alternative_values"].tolist() == [a.value for a in result.alternatives]
    assert len(about["alternative_values"]) > 1
    assert about["alternative_relations"][0] == ""
    assert about["alternative_relations"][1] in about["warnings"]
    source.write_h5ad(tmp_path / "out.h5ad")
    again = anndata.read_h5ad(tmp_path / "out.h5ad").uns["torchgw"]
    assert list(again["alternative_relations"]) == list(about["alternative_relations"])


def test_every_argument_takes_anything(clouds):
    """A right answer or an error of the package."""
    data = clouds[0]
    one, ref = data["one"], data["ref"]
    one.obs["half"] = np.where(np.arange(60) < 30, "a", "b")
    cheap = {"distances": "euclidean", "n_init": 1, "epsilon": 0.1}
    problem = TranslationProblem(one, ref).prepare().solve(solve_options=cheap).write()
    calls = [
        problem.push,
        lambda value: problem.push(data="half", subset=value),
        lambda value: problem.push(key_added=value),
        lambda value: problem.pull(None, value),
        lambda value: problem.translate(None, value),
        lambda value: problem.translate(use_rep=value),
        lambda value: problem.cell_transition(None, None, value, "stage"),
        lambda value: problem.cell_transition(None, None, "half", value),
        lambda value: problem.write(labels=value),
        lambda value: TranslationProblem(value),
        lambda value: TranslationProblem(one, value),
        lambda value: TranslationProblem(one, batch_key=value),
        lambda value: TranslationProblem(one, ref, reference=value),
        lambda value: TranslationProblem(one, ref).prepare(use_rep=value),
        lambda value: read_plan(value, ref),
        lambda value: read_plan(one, value),
        lambda value: read_plan(one, ref, value),
    ]
    for call in calls:
        for value in ANYTHING:
            with contextlib.suppress(TorchGWError):
                call(value)


def test_signatures_of_moscot(clouds):
    data, _, _ = clouds
    problem = TranslationProblem(data["one"], data["ref"])
    assert repr(problem) == ("TranslationProblem(src (60 cells) -> tgt (60 cells); not prepared)")
    problem.prepare(joint_rep="X_pca")
    assert "prepared, not solved" in repr(problem)
    problem.solve(0.5, 1e-3, 1.0, 1.0, solve_options={"distances": "euclidean"})
    result = problem.solutions["src", "tgt"]
    assert (result.alpha, result.epsilon) == (0.5, 1e-3)
    assert repr(problem).endswith(f"solved: {result.status.name})")
    np.testing.assert_array_equal(
        problem.translate("src", "tgt", False), problem.translate("tgt", "src")
    )
    with pytest.raises(InvalidInputError, match="`alpha` or solve_options"):
        problem.solve(alpha=0.5, solve_options={"alpha": 0.5})
