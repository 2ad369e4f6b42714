"""The commands around a result file: info, score, plot, transform, benchmark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from scipy.sparse import csr_array

import torchgw
from torchgw._errors import InvalidInputError
from torchgw.cli import main
from torchgw.cli._arguments import spoken
from torchgw.cli._files import read_array, read_labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A cloud, its turned and shuffled copy, answers, and their alignment."""
    path = tmp_path_factory.mktemp("commands")
    rng = np.random.default_rng(4)
    X = rng.random((30, 3)) ** [2, 1, 1] * [4, 2, 1]
    order = rng.permutation(30)
    turn, _ = np.linalg.qr(rng.standard_normal((3, 3)))
    np.save(path / "X.npy", X)
    np.save(path / "Y.npy", X[order] @ turn + 5)
    np.save(path / "truth.npy", np.argsort(order))
    kinds = np.where(X[:, 0] > 1, "far", "near")
    (path / "x.txt").write_text("\n".join(kinds) + "\n")
    (path / "y.txt").write_text("\n".join(kinds[order]))
    options = ["--distances", "euclidean", "--epsilon", "1e-3", "--seed", "0", "-q"]
    files = [str(path / name) for name in ("X.npy", "Y.npy")]
    assert main(["align", *files, "-o", str(path / "out.npz"), *options]) == 0
    return path


@pytest.fixture(autouse=True)
def _there(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_align_writes_what_load_reads(folder):
    result = torchgw.load("out.npz")
    with np.load("out.npz") as stored:
        assert stored["value"] == result.value
        np.testing.assert_array_equal(stored["matching"], result.lazy_plan.argmax())
    np.testing.assert_array_equal(result.lazy_plan.argmax(), np.load("truth.npy"))


def test_explain_says_what_align_then_does(capsys, tmp_path):
    rng = np.random.default_rng(0)
    for name in "xy":
        np.save(tmp_path / f"{name}.npy", rng.normal(size=(20, 3)))
    given = [str(tmp_path / f"{name}.npy") for name in "xy"]
    options = ["--distances", "euclidean", "--mass", "0.5", "--seed", "0"]
    assert main(["explain", *given, *options]) == 0
    said = capsys.readouterr().out
    main(["align", *given, *options, "--quiet", "-o", str(tmp_path / "out.npz")])
    assert said.strip() == spoken(torchgw.load(tmp_path / "out.npz").report.route)
    assert "partial marginals" in said
    assert main(["explain", *given, "--gradient", "factored", "--distances", "cityblock"]) == 2


@pytest.mark.slow
def test_info(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert f"torchgw       {torchgw.__version__}" in printed
    assert "eager         runs" in printed
    assert main(["info", "out.npz"]) == 0
    printed = capsys.readouterr().out
    assert "GWResult(30 x 30" in printed
    assert "X: points of shape (30, 3)" in printed


def test_other_results(tmp_path, capsys):
    X, Y = np.load("X.npy"), np.load("Y.npy")
    torchgw.joint_embedding([X], Y, [torchgw.load("out.npz")]).save(tmp_path / "joint.npz")
    torchgw.solve_low_rank(X, Y, rank=3, tol=1e-2).save(tmp_path / "low.npz")
    torchgw.barycenter([X], 5, tol=0.1, epsilon=1.0).save(tmp_path / "mean.npz")
    for name, kind in (
        ("joint", "JointEmbedding(sources of 30 points"),
        ("low", "LowRankResult(30 x 30, rank=3"),
        ("mean", "BarycenterResult(5 points, 1 spaces"),
    ):
        path = str(tmp_path / f"{name}.npz")
        assert main(["info", path]) == 0
        assert capsys.readouterr().out.startswith(kind)
        assert main(["score", path]) == 2
        assert "this command reads a GWResult" in capsys.readouterr().err


def test_certify(capsys):
    command = ["certify", "out.npz", "--seconds", "2", "--json", "--kind", "one_to_one"]
    assert main([*command, "-o", "certified.npz"]) == 0
    figures = json.loads(capsys.readouterr().out)
    found = torchgw.load("certified.npz").certificate
    assert figures["lower_bound"] == found.lower_bound
    # a copy: the matching costs nothing
    assert figures["gap"] == pytest.approx(0, abs=1e-12)
    X, Y = np.load("X.npy"), np.load("Y.npy")
    assert torchgw.verify(found.proof, X, Y).lower_bound == pytest.approx(0, abs=1e-11)


def test_score(capsys):
    answers = ["--truth", "truth.npy", "--labels-x", "x.txt", "--labels-y", "y.txt"]
    assert main(["score", "out.npz", *answers, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["matched"] == 1
    assert scores["foscttm"] < 0.01
    assert scores["mass_on_same_label"] > 0.95
    assert scores["label_accuracy"] > 0.8
    assert scores["status"] == "CONVERGED"
    assert main(["score", "out.npz"]) == 0
    assert "marginal_error" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["plan", "clouds", "convergence", "confusion"])
def test_plot(kind, tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "picture.png"
    labels = ["--labels-x", "x.txt", "--labels-y", "y.txt"]
    assert main(["plot", "out.npz", "-o", str(output), "--kind", kind, *labels]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


def test_transform(tmp_path):
    output = tmp_path / "moved.npy"
    assert main(["transform", "out.npz", "X.npy", "-o", str(output)]) == 0
    np.testing.assert_allclose(
        np.load(output), torchgw.load("out.npz").lazy_plan.barycentric(np.load("Y.npy")), atol=1e-8
    )
    assert main(["transform", "out.npz", "Y.npy", "--inverse", "-q", "-o", str(output)]) == 0
    assert np.abs(np.load(output) - np.load("X.npy")[np.load("truth.npy").argsort()]).mean() < 0.1


def test_new_points_may_have_a_label(tmp_path):
    """The message about a column of words names an option that `transform` did not take."""
    rows = ["kind,x,y,z", *("a," + ",".join(map(str, row)) for row in np.load("X.npy"))]
    table, moved = tmp_path / "new.csv", str(tmp_path / "moved.npy")
    table.write_text("\n".join([*rows[:1], *rows[1:3], "b" + rows[3][1:]]), encoding="utf-8")
    labelled = ["--label-column", "kind"]
    assert main(["transform", "out.npz", str(table), *labelled, "-q", "-o", moved]) == 0
    assert np.load(moved).shape == (3, np.load("Y.npy").shape[1])


def test_benchmark(capsys):
    assert main(["benchmark", "--n", "150", "--m", "180", "--repeat", "1", "--json"]) in (0, 1)
    figures = json.loads(capsys.readouterr().out)
    assert figures["abs_spearman"] > 0.9
    assert figures["seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["info", "absent.npz"], "no such file"),
        (["score", "X.npy"], "not a torchgw result"),
        (["score", "out.npz", "--truth", "X.npy"], "expected 30 row numbers"),
        (["score", "out.npz", "--labels-x", "x.txt"], "go together"),
        (["score", "out.npz", "--labels-x", "x.txt", "--labels-y", "X.npy"], "one per point"),
        (["plot", "out.npz", "-o", "p.odd"], "cannot write p.odd"),
        (["plot", "out.npz", "-o", "p.png", "--kind", "confusion"], "needs --labels-x"),
        (["transform", "out.npz", "truth.npy", "-o", "a.npy"], "must have shape"),
        (["transform", "out.npz", "X.npy", "-o", "absent/a.npy"], "no directory"),
    ],
)
def test_refusals(arguments, reason, capsys):
    assert main(arguments) == 2
    assert reason in capsys.readouterr().err


def test_linear_cost_is_read(tmp_path):
    np.save(tmp_path / "M.npy", np.ones((30, 30)))
    arguments = ["--linear-cost", str(tmp_path / "M.npy"), "--alpha", "0.3", "-q"]
    main(["align", "X.npy", "Y.npy", "-o", str(tmp_path / "o.npz"), *arguments, "--epsilon", "0.1"])
    result = torchgw.load(tmp_path / "o.npz")
    assert result.value_linear == pytest.approx(0.7)


def test_parquet(tmp_path):
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    table = pandas.DataFrame({"a": [1.0, 2.0], "b": [3, 4], "kind": ["x", "y"]})
    table[["a", "b"]].to_parquet(tmp_path / "t.parquet")
    table.to_parquet(tmp_path / "k.parquet")
    np.testing.assert_array_equal(read_array(str(tmp_path / "t.parquet")), [[1, 3], [2, 4]])
    np.testing.assert_array_equal(read_array(f"{tmp_path}/t.parquet:b"), [[3], [4]])
    assert list(read_labels(f"{tmp_path}/k.parquet:kind")) == ["x", "y"]
    with pytest.raises(InvalidInputError, match="no column named 'c'; the file has: a, b"):
        read_array(f"{tmp_path}/t.parquet:c")
    (tmp_path / "bad.parquet").write_bytes(b"no")
    with pytest.raises(InvalidInputError, match="not a readable parquet file"):
        read_array(f"{tmp_path}/bad.parquet")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_h5ad(tmp_path, monkeypatch):
    anndata = pytest.importorskip("anndata", reason="needs anndata")
    points = np.arange(6.0).reshape(3, 2)
    data = anndata.AnnData(points, obsm={"X_pca": points * 2})
    data.obs["kind"] = ["a", "b", "a"]
    data.write_h5ad(tmp_path / "d.h5ad")
    np.testing.assert_array_equal(read_array(f"{tmp_path}/d.h5ad:X"), points)
    np.testing.assert_array_equal(read_array(f"{tmp_path}/d.h5ad:obsm/X_pca"), points * 2)
    assert list(read_labels(f"{tmp_path}/d.h5ad:obs/kind")) == ["a", "b", "a"]
    with pytest.raises(InvalidInputError, match="holds 3 arrays, name one"):
        read_array(f"{tmp_path}/d.h5ad")
    # X, which may be large, stays in its file where it is not asked for
    dataset = pytest.importorskip("h5py").Dataset
    monkeypatch.setattr(dataset, "__array__", lambda *given, **named: pytest.fail("X was read"))
    np.testing.assert_array_equal(read_array(f"{tmp_path}/d.h5ad:obsm/X_pca"), points * 2)
    monkeypatch.undo()
    anndata.AnnData(csr_array(points)).write_h5ad(tmp_path / "sparse.h5ad")
    with pytest.raises(InvalidInputError, match="X is sparse; reduce it first"):
        read_array(f"{tmp_path}/sparse.h5ad")
    (tmp_path / "bad.h5ad").write_bytes(b"no")
    with pytest.raises(InvalidInputError, match="not a readable h5ad file"):
        read_array(f"{tmp_path}/bad.h5ad:X")


def test_readers_that_are_absent(tmp_path, monkeypatch):
    monkeypatch.setattr("torchgw.cli._files.find_spec", lambda name: None)
    for suffix in ("parquet", "h5ad"):
        (tmp_path / f"t.{suffix}").write_bytes(b"")
        with pytest.raises(InvalidInputError, match=r"pip install (pandas pyarrow|anndata)$"):
            read_array(str(tmp_path / f"t.{suffix}"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh", "fish", "powershell"])
def test_completion(shell, capsys):
    pytest.importorskip("shtab", reason="needs shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("align", "transform", "n-neighbors", "convergence", "sqeuclidean"):
        assert word in script


def test_bash_completes(capsys, tmp_path):
    """What bash itself makes of the script: commands, options, choices and files."""
    pytest.importorskip("shtab", reason="needs shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    main(["completion", "bash"])
    (tmp_path / "script").write_text(capsys.readouterr().out)

    def complete(*words):
        line = " ".join(f"'{word}'" for word in words)
        code = (
            f"source '{tmp_path}/script'; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
            '_shtab_torchgw "" "${COMP_WORDS[COMP_CWORD]}"; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run([bash, "-c", code], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert complete("torchgw", "tra") == {"transform"}
    assert complete("torchgw", "align", "--ep") == {"--epsilon"}
    assert complete("torchgw", "plot", "out.npz", "--kind", "con") == {"convergence", "confusion"}
    assert complete("torchgw", "align", "X.npy", "Y.npy", "--storage", "str") == {"streamed"}
    assert complete("torchgw", "align", "X.npy", "--distances", "geo") == {"geodesic"}
    assert complete("torchgw", "align", "X.npy", "--epsilon", "a") == {"auto"}
    assert complete("torchgw", "info", "out") == {"out.npz"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("`mass` must be", "--mass must be"),
        ("`alpha=0.5` weighs", "--alpha 0.5 weighs"),
        ("a larger `n_init`, search='thorough', or", "a larger --n-init, --search thorough, or"),
        ("Pass `M`, or polish=True.", "Pass --linear-cost, or --polish."),
        ('`polish=False` and mass="auto"', "--no-polish and --mass auto"),
        (
            "`n_init` must be 1, or None; got 'x', not 'fast'",
            "--n-init must be 1; got 'x', not fast",
        ),
        # what is no option of the command line stays
        ("`callback` and `X.npy`, n=3, alpha of X", "`callback` and `X.npy`, n=3, alpha of X"),
    ],
)
def test_messages_name_flags(message, expected):
    assert spoken(message) == expected


@pytest.mark.parametrize(
    "given",
    [
        "--mass 2", "--loss foo", "--distances foo", "--epsilon=-1", "--n-init 0", "--alpha 2",
        "--n-neighbors 0", "--scale foo", "--gradient factored --loss kl", "--curvature 1",
        "--polish --gradient sampled", "--precision half", "--max-iter 0",
        "--regularization foo", "--unbalanced 1 --mass .5", "--certify --mass .5", "--tol=-1",
    ],
)  # fmt: skip
def test_messages_hold_no_python(given, capsys):
    """Nothing that cannot be typed there: no names of classes, None, quoted words or name=value."""
    assert main(["align", "X.npy", "Y.npy", "-o", "no.npz", *given.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("torchgw: error: --")
    assert not re.search(r"None|[a-z][A-Z]|\w=\w|`|'(auto|square|fast|dense|sampled)'", said), said


def test_completion_names_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr("torchgw.cli._commands.find_spec", lambda name: None)
    assert main(["completion", "zsh"]) == 2
    assert "pip install shtab" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["moved.csv", "moved.tsv", "moved.npy"])
def test_points_are_written_in_the_form_of_their_name(name):
    assert main(["transform", "out.npz", "X.npy", "-o", name, "-q"]) == 0
    expected = torchgw.load("out.npz").transform(np.load("X.npy"))
    np.testing.assert_array_equal(read_array(name), expected)


@pytest.mark.parametrize("name", ["moved.parquet", "moved.npz", "X.npy", "out.npz"])
def test_points_are_not_written_elsewhere(name, capsys):
    assert main(["transform", "out.npz", "X.npy", "-o", name, "-q"]) == 2
    assert f"cannot write {name}" in capsys.readouterr().err


def test_words_in_a_table_are_labels(tmp_path):
    (tmp_path / "labels.csv").write_text("label\nfar away\nnear\n")
    assert read_labels(str(tmp_path / "labels.csv")).tolist() == ["far away", "near"]
    (tmp_path / "cells.csv").write_text("x,label\n1,far\n2,near\n")
    assert read_labels(str(tmp_path / "cells.csv:label")).tolist() == ["far", "near"]
    with pytest.raises(InvalidInputError, match=r"2 columns; name that of the labels as .*:NAME"):
        read_labels(str(tmp_path / "cells.csv"))


@pytest.mark.parametrize("name", ["none.npy", "none.npz:x", "none.csv", "none.h5ad:obs/x"])
def test_labels_that_are_not_there(name):
    with pytest.raises(InvalidInputError, match="there is no such file"):
        read_labels(name)


def test_writing_over_a_file_is_said(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(12, 2)))
    given = [str(tmp_path / "x.npy")] * 2 + ["-o", str(tmp_path / "out.npz"), "--epsilon", "0.1"]
    for said in ("written          ", "written over     "):
        main(["align", *given, "--distances", "euclidean", "--n-init", "1"])
        assert f"{said}{tmp_path / 'out.npz'}" in capsys.readouterr().out


def test_the_version_imports_nothing(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torchgw {torchgw.__version__}\n"
    code = """
import sys
from torchgw.cli import main
main(["--version"])
assert not {"torch", "numpy", "scipy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
