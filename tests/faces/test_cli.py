"""The command line: files in, files out, exit codes, and nothing unpickled."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from scipy.spatial.distance import cdist

import torchgw
from torchgw._errors import InvalidInputError, PlanTooLargeError
from torchgw.cli import main
from torchgw.cli._files import read_array, read_weights

SOLVE = ["--distances", "euclidean", "--epsilon", "1e-2", "--device", "cpu", "--seed", "0"]


@pytest.fixture
def clouds():
    """30 points of a cloud without symmetry, and the same shuffled and turned."""
    generator = np.random.default_rng(4)
    X = generator.random((30, 3)) ** [2, 1, 1] * [4, 2, 1]
    order = generator.permutation(30)
    turn, _ = np.linalg.qr(generator.standard_normal((3, 3)))
    return X, X[order] @ turn + 5.0, np.argsort(order)


@pytest.fixture
def files(clouds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("X.npy", clouds[0])
    np.save("Y.npy", clouds[1])
    return tmp_path


def load(path="out.npz"):
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


def test_align_recovers_a_shuffled_copy(files, clouds, capsys):
    assert main(["align", "X.npy", "Y.npy", "-o", "out.npz", *SOLVE]) == 0
    stored = load()
    # The copy is isometric, so the best plan is the permutation itself.
    np.testing.assert_array_equal(stored["matching"], clouds[2])
    assert stored["status"] == "CONVERGED"
    assert stored["converged"]
    assert stored["f"].shape == stored["g"].shape == (30,)
    assert 0 <= stored["marginal_error"] < 1e-4
    printed = capsys.readouterr()
    assert "CONVERGED" in printed.out
    assert "marginal error" in printed.err


def test_stored_plan_is_a_coupling(files):
    options = ["--plan", "--sparse-topk", "3", "--quiet", *SOLVE]
    main(["align", "X.npy", "Y.npy", "-o", "out.npz", *options])
    stored = load()
    plan = stored["plan"]
    # Both marginals are met to the tolerance of a converged solve, 1e-6 relative; float32 plans
    # carry that much rounding. A zero plan would miss by 1 / 30.
    for axis, name in ((1, "marginal_a"), (0, "marginal_b")):
        np.testing.assert_allclose(plan.sum(axis), 1 / 30, rtol=1e-5)
        np.testing.assert_allclose(stored[name], plan.sum(axis), rtol=1e-5)
    np.testing.assert_array_equal(stored["matching"], plan.argmax(1))
    largest = -np.sort(-plan, axis=1)[:, :3]
    np.testing.assert_allclose(stored["topk_values"], largest, rtol=1e-5)
    taken = np.take_along_axis(plan, stored["topk_indices"], axis=1)
    np.testing.assert_allclose(taken, largest, rtol=1e-5)


def test_topk_is_limited_to_the_columns(files):
    main(["align", "X.npy", "Y.npy", "-o", "out.npz", "-q", "--sparse-topk", "1000", *SOLVE])
    assert load()["topk_indices"].shape == (30, 30)


def test_plan_is_not_stored_unless_asked_for(files):
    main(["align", "X.npy", "Y.npy", "-o", "out.npz", "-q", *SOLVE])
    assert not {"plan", "topk_values", "topk_indices"} & set(load())


def test_settings_are_stored(files):
    main(["align", "X.npy", "Y.npy", "-o", "out.npz", "-q", "--scale", "none", *SOLVE])
    settings = json.loads(str(load()["settings"]))
    assert (settings["epsilon"], settings["scale"]) == (1e-2, None)
    assert (settings["random_state"], settings["X"]) == (0, "X.npy")
    assert settings["torchgw"] == torchgw.__version__
    assert settings["gradient_used"] != "auto"


def test_momentum_is_the_former_name_of_redraw(files, capsys):
    command = ["align", "X.npy", "Y.npy", "-o", "out.npz", "--gradient", "sampled", *SOLVE]
    main([*command, "--redraw", "0.5"])
    assert "momentum" not in capsys.readouterr().err
    expected = load()
    main([*command, "--momentum", "0.5"])
    assert "torchgw: warning: `--momentum` is now `--redraw`" in capsys.readouterr().err
    assert load()["value"] == expected["value"]
    settings, former = (json.loads(str(out["settings"])) for out in (expected, load()))
    assert settings == former


def test_distance_matrices_give_the_same_match(files, clouds):
    for name, points in zip("XY", clouds, strict=False):
        distances = cdist(points, points)
        np.save(f"D{name}.npy", distances / distances.max())
    options = ["-q", "--distance-matrices", "--epsilon", "1e-2", "--device", "cpu"]
    assert main(["align", "DX.npy", "DY.npy", "-o", "out.npz", *options]) == 0
    np.testing.assert_array_equal(load()["matching"], clouds[2])


def test_weights_are_the_marginals(files, tmp_path):
    weights = np.linspace(1.0, 2.0, 30)
    np.save("a.npy", weights)
    np.savetxt("b.csv", weights[::-1])
    options = ["-q", "--a", "a.npy", "--b", "b.csv", "--epsilon", "1e-2"]
    main(["align", "X.npy", "Y.npy", "-o", "out.npz", *SOLVE, *options])
    stored = load()
    expected = weights / weights.sum()
    # Uniform marginals would be off by a third.
    np.testing.assert_allclose(stored["marginal_a"], expected, rtol=1e-4)
    np.testing.assert_allclose(stored["marginal_b"], expected[::-1], rtol=1e-4)


def test_relaxed_marginals(files, capsys):
    align = ["align", "X.npy", "Y.npy", "-o", "out.npz", "-q", *SOLVE]
    main([*align, "--mass", "0.4"])
    assert load()["marginal_a"].sum() == pytest.approx(0.4, abs=1e-6)
    main([*align, "--unbalanced", "inf,0"])
    stored = load()
    np.testing.assert_allclose(stored["marginal_a"], 1 / 30, rtol=1e-5)
    assert np.abs(stored["marginal_b"] - 1 / 30).max() > 1e-5
    assert json.loads(str(stored["settings"]))["unbalanced"] == "(inf, 0.0)"
    assert main([*align, "--unbalanced", "1,2,3"]) == 2
    assert "unbalanced" in capsys.readouterr().err


def test_not_converged_is_written_and_told(files, capsys):
    code = main(["align", "X.npy", "Y.npy", "-o", "out.npz", "--max-iter", "1", *SOLVE])
    assert code == 1
    stored = load()
    assert not stored["converged"]
    assert str(stored["advice"]) in capsys.readouterr().out


def test_too_large_plan_leaves_the_rest(files, capsys, monkeypatch):
    def refuse(self):
        raise PlanTooLargeError("needs 1 byte more than there is")

    # Not `to_dense`: the solver may build small plans for itself.
    monkeypatch.setattr(torchgw.GWResult, "plan", property(refuse))
    code = main(["align", "X.npy", "Y.npy", "-o", "out.npz", "--plan", *SOLVE])
    assert code == 1
    assert "plan" not in load()
    assert load()["matching"].shape == (30,)
    assert "1 byte more" in capsys.readouterr().err


def test_quiet_says_nothing(files, capfd):
    main(["align", "X.npy", "Y.npy", "-o", "out.npz", "--quiet", *SOLVE])
    assert capfd.readouterr() == ("", "")


def test_output_keeps_its_name(files):
    main(["align", "X.npy", "Y.npy", "-o", "match.result", "-q", *SOLVE])
    assert load("match.result")["matching"].shape == (30,)


def refused(capsys, *arguments):
    """Run a command that has to be refused, and return what it says."""
    assert main(["align", *arguments, "-o", "out.npz", *SOLVE]) == 2
    assert not Path("out.npz").exists(), "a refused solve must not write"
    message = capsys.readouterr().err
    assert message.startswith("torchgw: error: ")
    return message


def test_missing_file(files, capsys):
    assert "nowhere.npy" in refused(capsys, "nowhere.npy", "Y.npy")


def test_wrong_number_of_weights(files, capsys):
    np.save("a.npy", np.ones(7))
    assert "`a`" in refused(capsys, "X.npy", "Y.npy", "--a", "a.npy")


def test_unknown_gradient_is_refused_by_the_solver(files, capsys):
    assert "gradient" in refused(capsys, "X.npy", "Y.npy", "--gradient", "steepest")


@pytest.mark.parametrize("output", ["nowhere/out.npz", "."])
def test_output_is_checked_before_the_work(output, files, capsys, monkeypatch):
    monkeypatch.setattr(torchgw, "solve", None)
    assert main(["align", "X.npy", "Y.npy", "-o", output]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["align", "X.npy"],
        ["align", "X.npy", "Y.npy"],
        ["align", "X.npy", "Y.npy", "-o", "out.npz", "--sparse-topk", "0"],
        ["align", "X.npy", "Y.npy", "-o", "out.npz", "--epsilon", "small"],
        ["align", "X.npy", "Y.npy", "-o", "out.npz", "--distances", "a,b,c"],
        ["align", "X.npy", "Y.npy", "-o", "out.npz", "--colour", "red"],
        ["align", "X.npy", "Y.npy", "-o", "out.npz", "-q", "-v"],
    ],
    ids=" ".join,
)
def test_bad_usage(arguments, files, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: torchgw" in capsys.readouterr().err


def test_two_distances_are_a_pair(files):
    main(["align", "X.npy", "Y.npy", "-o", "out.npz", "-q", "--max-iter", "1", "--distances",
          "euclidean,cosine"])  # fmt: skip
    assert json.loads(str(load()["settings"]))["distances"] == ["euclidean", "cosine"]


class Canary:
    """Unpickling this writes a file."""

    def __reduce__(self):
        return Path.touch, (Path("unpickled"),)


def test_nothing_is_unpickled(files, capsys):
    objects = np.array([Canary(), Canary()], dtype=object)
    np.save("objects.npy", objects, allow_pickle=True)
    np.savez("objects.npz", good=np.ones((3, 2)), bad=objects)
    Path("pickle.npy").write_bytes(pickle.dumps(Canary()))
    for name in ("objects.npy", "objects.npz:bad", "pickle.npy"):
        assert "never unpickles" in refused(capsys, name, "Y.npy")
    assert not Path("unpickled").exists()
    # The same file's plain array is readable.
    assert read_array("objects.npz:good").shape == (3, 2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain.csv", "1,2\n3,4\n5,6.5\n"),
        ("header.csv", "x,y\n1,2\n3,4\n5,6.5\n"),
        ("quoted.csv", '"x","y"\n"1","2"\n"3","4"\n"5","6.5"\n'),
        ("bom.csv", "\ufeffx,y\r\n1,2\r\n3,4\r\n\r\n5,6.5\r\n"),
        ("comment.csv", "# made by hand\nx,y\n1,2\n3,4\n5,6.5\n"),
        ("tabs.tsv", "x of a, b\ty\n1\t2\n3\t4\n5\t6.5\n"),
        ("UPPER.TSV", "1\t2\n3\t4\n5\t6.5\n"),
    ],
)
def test_tables(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    np.testing.assert_array_equal(read_array(str(path)), [[1, 2], [3, 4], [5, 6.5]])


@pytest.mark.parametrize("name", ["table.csv.gz", "TABLE.TSV.GZ"])
def test_compressed_tables(name, tmp_path):
    text = "x,y\n1,2\n3,4\n5,6.5\n"
    packed = gzip.compress((text if "csv" in name else text.replace(",", "\t")).encode())
    path = tmp_path / name
    path.write_bytes(packed)
    np.testing.assert_array_equal(read_array(str(path)), [[1, 2], [3, 4], [5, 6.5]])
    # a header of something else, a file cut short, a byte changed inside, bytes after the end
    for damaged in (b"1,2\n", packed[:-9], packed[:14] + b"\xff" + packed[15:], packed + b"1,2"):
        path.write_bytes(damaged)
        with pytest.raises(InvalidInputError, match="not a readable gzip file"):
            read_array(str(path))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("text.csv", b"x,y\n1,2\n3,four\n", "four"),
        ("ragged.csv", b"1,2\n3\n", "columns"),
        ("hole.csv", b"1,2\n3,\n", "number"),
        ("index.csv", b",x,y\n0,1,2\n1,3,4\n", "index"),
        ("empty.csv", b"", "no rows"),
        ("header.csv", b"x,y\n", "no rows"),
        ("latin.csv", b"\xff\xfe1,2\n", "UTF-8"),
        ("table.xlsx", b"PK", "unknown kind"),
        ("table.txt.gz", b"", "unknown kind"),
        ("empty.npy", b"", "damaged"),
        ("broken.npz", b"PK\x03\x04nonsense", "damaged"),
    ],
)
def test_unreadable_files(name, content, reason, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=reason):
        read_array(str(path))


def test_npz_members(tmp_path):
    path = tmp_path / "both.npz"
    np.savez(path, first=np.zeros((2, 2)), second=np.arange(4))
    np.testing.assert_array_equal(read_array(f"{path}:second"), [0.0, 1.0, 2.0, 3.0])
    assert read_array(f"{path}:second").dtype == np.float64
    with pytest.raises(InvalidInputError, match="first, second"):
        read_array(str(path))
    with pytest.raises(InvalidInputError, match="third"):
        read_array(f"{path}:third")
    np.savez(path, only=np.ones(3, dtype=np.float32))
    assert read_array(str(path)).dtype == np.float32


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([1j]), np.zeros(2, [("x", "f8")])])
def test_only_real_numbers(array, tmp_path):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(InvalidInputError, match="real numbers"):
        read_array(str(tmp_path / "x.npy"))


def test_weights_are_one_dimensional(tmp_path):
    for shape in ((4,), (4, 1), (1, 4)):
        np.save(tmp_path / "w.npy", np.arange(4.0).reshape(shape))
        expected = np.arange(4) / 6
        np.testing.assert_array_equal(read_weights(str(tmp_path / "w.npy")), expected)
    np.save(tmp_path / "w.npy", np.ones((2, 2)))
    with pytest.raises(InvalidInputError, match="one number per point"):
        read_weights(str(tmp_path / "w.npy"))


@pytest.mark.parametrize("weights", [np.zeros(3), np.array([1.0, np.nan]), np.array([-1.0, 0.5])])
def test_weights_have_a_total(weights, tmp_path):
    np.save(tmp_path / "w.npy", weights)
    with pytest.raises(InvalidInputError, match="positive, finite total"):
        read_weights(str(tmp_path / "w.npy"))


def test_demo(tmp_path, capsys):
    picture = tmp_path / "demo.png"
    code = main(["demo", "--output", str(picture), "--n", "300", "--m", "400"])
    assert code in (0, 1)
    printed = capsys.readouterr().out
    correlation = float(printed.split("Spearman")[1].split()[0])
    # A plan that learnt nothing scores about 0; the sign is that of the direction found.
    assert 0.98 < abs(correlation) <= 1.0
    for word in ("GW value", "marginal error", "time", "status"):
        assert word in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_names_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torchgw.cli._commands.find_spec", lambda name: None)
    assert main(["demo", "--output", str(tmp_path / "demo.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_demo_refuses_a_picture_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torchgw, "solve", lambda *given, **options: pytest.fail("it was solved"))
    assert main(["demo", "--output", str(tmp_path / "demo.odd")]) == 2
    assert "demo.odd: pictures are" in capsys.readouterr().err


def test_version_of_the_module():
    done = subprocess.run(
        [sys.executable, "-m", "torchgw", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"torchgw {torchgw.__version__}\n"


def test_help_names_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["align", "--help"])
    assert stop.value.code == 0
    assert "exit codes" in capsys.readouterr().out


@pytest.mark.parametrize("output", ["X.npy", "Y.npy", "./X.npy", "both.npz", "a.npy", "out.csv"])
def test_inputs_are_not_overwritten(files, output, capsys):
    np.savez("both.npz", x=np.load("X.npy"), y=np.load("Y.npy"))
    np.save("a.npy", np.ones(30))
    before = {path: path.read_bytes() for path in files.iterdir()}
    sides = ["both.npz:x", "both.npz:y"] if output == "both.npz" else ["X.npy", "Y.npy"]
    assert main(["align", *sides, "-o", output, "--a", "a.npy", *SOLVE]) == 2
    assert f"cannot write {Path(output)}" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in files.iterdir()} == before


def test_errors_of_the_system_are_messages(files, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert main(["align", "X.npy", "Y.npy", "-o", "out.npz", *SOLVE]) == 2
    assert "torchgw: error: cannot write out.npz: No space left" in capsys.readouterr().err


def test_interrupt(files, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(torchgw, "solve", interrupted)
    assert main(["align", "X.npy", "Y.npy", "-o", "out.npz", *SOLVE]) == 130
    assert capsys.readouterr().err == "torchgw: interrupted\n"
    assert not Path("out.npz").exists()


def test_reader_that_has_enough(files):
    """As in `torchgw info | head -0`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "torchgw", "info"],
            stdout=closed, stderr=subprocess.PIPE, check=False, text=True,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1;2\n3;4\n", "separated by commas in a .csv file and by tabs in a .tsv file; row 1 is"),
        ("a;b\n1;2\n3;4\n", "row 1 is '1;2'"),
        ("1,5;2,5\n3,5;4,5\n5,5;6,5\n", "row 1 is '3,5;4,5'"),
        ("1 2\n3 4\n", "separated by commas"),
        ("1,2\n3,\n", "row 2, column 2 is '', and every cell must be a number"),
        ("x,y\n1,2\n3,4\n5,6,7\n", "row 3 has 3 columns, and those before it 2"),
        ("x,y\n1,2\n3,four\n", "row 2, column 2 is 'four'"),
    ],
)
def test_a_table_that_is_none_says_where(tmp_path, text, message):
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        read_array(str(tmp_path / "table.csv"))


def test_a_sparse_matrix_is_for_python(tmp_path):
    scipy.sparse.save_npz(tmp_path / "graph.npz", scipy.sparse.eye_array(3, format="csr"))
    with pytest.raises(InvalidInputError, match="SciPy sparse matrix. Align graphs in Python"):
        read_array(str(tmp_path / "graph.npz"))
