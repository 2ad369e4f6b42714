"""The command line: files in, files out, exit codes, and nothing unpickled."""

from __future__ import annotations

import csv
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
from scipy.spatial.distance import cdist

import torchgw
from torchgw._errors import InvalidInputError, PlanTooLargeError
from torchgw.cli import main
from torchgw.cli._arguments import spoken
from torchgw.cli._files import read_array, read_labels, read_side, read_weights
from torchgw.cli._main import _parser

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
    command += ["--n-init", "1"]
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
    align = ["align", "X.npy", "Y.npy", "-o", "out.npz", "-q", "--n-init", "1", *SOLVE]
    main([*align, "--mass", "0.4"])
    assert load()["marginal_a"].sum() == pytest.approx(0.4, abs=1e-6)
    main([*align, "--unbalanced", "inf,0"])
    stored = load()
    np.testing.assert_allclose(stored["marginal_a"], 1 / 30, rtol=1e-5)
    assert np.abs(stored["marginal_b"] - 1 / 30).max() > 1e-5
    assert json.loads(str(stored["settings"]))["unbalanced"] == "(inf, 0.0)"
    main([*align, "--unbalanced", "900", "--unbalanced-type", "l2"])
    squares = torchgw.load("out.npz").log["mass"]
    main([*align, "--unbalanced", "900"])
    assert squares < 0.999 < torchgw.load("out.npz").log["mass"]
    assert main([*align, "--unbalanced", "1,2,3"]) == 2
    assert "unbalanced" in capsys.readouterr().err


def test_not_converged_is_written_and_told(files, capsys):
    code = main(["align", "X.npy", "Y.npy", "-o", "out.npz", "--max-iter", "1", *SOLVE])
    assert code == 1
    stored = load()
    assert not stored["converged"]
    assert spoken(stored["advice"]) in capsys.readouterr().out


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


def test_a_picture_without_a_suffix_is_refused(files, capsys):
    main(["align", "X.npy", "Y.npy", "-o", "out.npz", "-q", *SOLVE])
    assert main(["plot", "out.npz", "-o", "plan"]) == 2
    assert "cannot write plan: pictures are" in capsys.readouterr().err
    assert not Path("plan").exists()


@pytest.mark.parametrize("output", ["match.result", "match", "match.csv", "match.npy"])
def test_the_suffix_of_an_output_has_to_be_its_form(files, output, capsys, monkeypatch):
    monkeypatch.setattr(torchgw, "solve", lambda **_: pytest.fail("it was solved"))
    assert main(["align", "X.npy", "Y.npy", "-o", output, *SOLVE]) == 2
    assert "what is written is .npz, so name it match.npz" in capsys.readouterr().err
    command = ["align", "X.npy", "Y.npy", "-o", "out.npz", "--partners", "pairs.txt", *SOLVE]
    assert main(command) == 2
    assert "what is written is .csv or .tsv" in capsys.readouterr().err


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
    said = refused(capsys, "X.npy", "Y.npy", "--a", "a.npy")
    assert "--a must have shape (30,)" in said
    assert "Pass no --a for uniform weights" in said


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
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"torchgw( align)?: error: .* \(see torchgw.* --help\)$", line)


def test_matrices_of_distances_are_not_measured(files, capsys):
    arguments = ["align", "X.npy", "Y.npy", "-o", "out.npz", "--distance-matrices"]
    assert main([*arguments, "--distances", "cosine"]) == 2
    assert "--distances measures points" in capsys.readouterr().err


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
        ("words.csv", b"x,kind\n1,a\n2,b\n", "--label-column kind"),
        ("spaces.csv", b"1 2\n3 4\n", "separated by commas"),
        ("semicolons.csv", b"x;y\n1;2\n", "separated by commas"),
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


def test_the_demo_warns_of_nothing(tmp_path, capsys):
    assert main(["demo", "--output", str(tmp_path / "demo.png")]) == 0
    assert "warning" not in capsys.readouterr().err


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
    printed = " ".join(capsys.readouterr().out.split())
    assert "exit codes" in printed
    for text in (
        "change of the plan at which to stop (default: 1e-05)",
        "(default: auto)",
        "examples:",
    ):
        assert text in printed


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--epsilon", "small", "argument --epsilon: must be a number, or auto; got 'small'"),
        ("--unbalanced", "1,b", "must be a number, or two joined by a comma; got 'b'"),
        ("--sparse-topk", "-1", "must be a whole number of at least 1; got '-1'"),
    ],
)
def test_what_is_no_number_is_named(files, option, value, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["align", "X.npy", "Y.npy", "-o", "out.npz", f"{option}={value}"])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_forecasts_and_routes_name_flags(files, capsys):
    sharp = "X.npy", "Y.npy", "--epsilon", "1e-9", "--max-iter", "1", "--n-init", "1"
    assert main(["align", *sharp, "-o", "out.npz"]) == 1
    assert main(["explain", *sharp]) == 0
    said = capsys.readouterr()
    for text in said:
        assert "all linear problems take --inner-max-iter" in text


def test_search_is_passed_on(files, capsys):
    assert main(["align", "X.npy", "Y.npy", "-o", "out.npz", "--search", "slow"]) == 2
    assert "--search must be one of auto, fast, thorough" in capsys.readouterr().err


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


@pytest.mark.slow
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
        ("x,y\n1,2\n3,four\n", "row 2, column 2 (y) is 'four'"),
        ('x,y\n"1,000",2\n"3,000",4\n', "row 1, column 1 (x) is '1,000'"),
        ("1,2,\n3,4,\n", "row 1, column 3 is ''"),
    ],
)
def test_a_table_that_is_none_says_where(tmp_path, text, message):
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        read_array(str(tmp_path / "table.csv"))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (",x,y\n0,1,2\n1,3,4\n", ["0", "1"]),
        ("cell,x,y\nc 1,1,2\nc 2,3,4\n", ["c 1", "c 2"]),
        ("c1,1,2\nc2,3,4\n", ["c1", "c2"]),
        ("x,name,y\n1,a,2\n3,b,4\n", None),
        ("x,y\n1,2\n3,4\n", None),
    ],
)
def test_names_of_rows(text, ids, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(text)
    if "name" in text:
        side = read_side(str(path), id_column="name")
        assert side.ids.tolist() == ["a", "b"]
    else:
        side = read_side(str(path))
        assert (None if side.ids is None else side.ids.tolist()) == ids
    np.testing.assert_array_equal(side.points, [[1, 2], [3, 4]])


def test_columns_of_tables(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("cell,kind,x,y\na,T cell,1,2\nb,B,3,4\n")
    side = read_side(str(path), label_column="kind")
    np.testing.assert_array_equal(side.points, [[1, 2], [3, 4]])
    assert side.ids.tolist() == ["a", "b"]
    assert side.labels.tolist() == ["T cell", "B"]
    np.testing.assert_array_equal(read_array(f"{path}:y,x"), [[2, 1], [4, 3]])
    assert read_labels(f"{path}:kind").tolist() == ["T cell", "B"]
    with pytest.raises(InvalidInputError, match="no column named 'z'; the file has: cell, kind"):
        read_array(f"{path}:z")


def test_partners_have_names(files, clouds, capsys):
    for name, points in (("x.csv", clouds[0]), ("y.csv", clouds[1])):
        rows = [
            f"{name[0]}{i},{'ab'[i % 2]}," + ",".join(map(str, p)) for i, p in enumerate(points)
        ]
        Path(name).write_text("\n".join(["id,kind,u,v,w", *rows]))
    command = ["align", "x.csv", "y.csv", "-o", "out.npz", "--partners", "pairs.csv", *SOLVE]
    assert main([*command, "--label-column", "kind"]) == 0
    assert "pairs.csv, 30 rows" in capsys.readouterr().out
    with open("pairs.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["X", "Y", "X_label", "Y_label", "share"]
    assert [row[:2] for row in rows] == [[f"x{i}", f"y{j}"] for i, j in enumerate(clouds[2])]
    assert [row[3] for row in rows] == ["ab"[j % 2] for j in clouds[2]]
    plan = np.asarray(torchgw.load("out.npz").plan)
    share = [float(row[4]) for row in rows]
    np.testing.assert_allclose(share, plan.max(1) / plan.sum(1), rtol=1e-5)
    assert main([*command, "--label-column", "sort"]) == 2
    assert "--label-column sort: neither x.csv nor y.csv has it" in capsys.readouterr().err


def test_partners_without_names_are_numbers(files, clouds):
    command = ["align", "X.npy", "Y.npy", "-o", "out.npz", "-q", "--partners", "p.tsv", *SOLVE]
    assert main(command) == 0
    table = np.loadtxt("p.tsv", delimiter="\t", skiprows=1)
    np.testing.assert_array_equal(table[:, :2], np.column_stack([np.arange(30), clouds[2]]))


def test_ambiguity_has_an_exit_code(files, capsys):
    angle = np.linspace(0, 2 * np.pi, 30, endpoint=False)
    np.save("ellipse.npy", np.column_stack([np.cos(angle), 2 * np.sin(angle)]))
    assert main(["align", "ellipse.npy", "ellipse.npy", "-o", "out.npz", *SOLVE]) == 3
    printed = capsys.readouterr()
    assert "torchgw: warning: Ambiguous: two matches cost nearly the same" in printed.err
    assert "alternative 1" in printed.out
    assert "the first mirrored" in printed.out
    stored = load()
    assert stored["ambiguity"] > 0.9
    assert stored["relations"][0] == ""
    main(["info", "out.npz"])
    assert "the first mirrored" in capsys.readouterr().out


def test_a_time_limit_stops_and_writes(files, capsys):
    command = ["align", "X.npy", "Y.npy", "-o", "out.npz", *SOLVE]
    assert main([*command, "--time-limit", "0.000001"]) == 1
    assert load()["status"] == "STOPPED"
    assert load()["matching"].shape == (30,)
    assert main([*command, "-q", "--time-limit", "10m"]) == 0
    for odd in ("0", "-3", "soon", "inf"):
        with pytest.raises(SystemExit):
            main([*command, "--time-limit", odd])
        said = capsys.readouterr().err
        assert f"--time-limit: must be seconds, such as 90, 10m or 2h; got {odd!r}" in said


def test_progress_has_a_total_and_an_end(files, capsys):
    main(["align", "X.npy", "Y.npy", "-o", "out.npz", "--max-iter", "77", *SOLVE])
    assert "iteration 1 of at most 77" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["info", "score", "plot", "transform", "benchmark", "demo", "warmup", "completion"],
)
def test_help_has_examples_that_are_understood(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert lines
    for line in lines:
        words = line.partition(">")[0].split()
        assert words[:2] == ["torchgw", command]
        _parser().parse_args(words[1:])
