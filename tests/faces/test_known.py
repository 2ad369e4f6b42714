"""What is known of a match, given to the estimators, AnnData and the command line."""

from __future__ import annotations

import numpy as np
import pytest

import torchgw
from torchgw import InvalidInputError, InvalidTypeError
from torchgw.cli import main

RNG = np.random.default_rng(0)
X, ORDER = RNG.normal(size=(24, 3)), RNG.permutation(24)
Y = X[ORDER]
KIND = np.array(["B", "T", "NK"])[np.arange(24) % 3]
MIXED = KIND[:, None] != KIND[ORDER]


def test_an_estimator_takes_them():
    pytest.importorskip("sklearn")
    from torchgw.sklearn import GWAligner

    for known in (
        {"groups": (KIND, KIND[ORDER])}, {"allowed": ~MIXED},
        {"pairs": np.stack([ORDER, np.arange(24)], 1)},
    ):  # fmt: skip
        aligner = GWAligner(random_state=0, n_init=1).fit(X, Y, **known)
        assert (aligner.result_.plan[MIXED] == 0).all()
        assert aligner.transform(X[:2]).shape == (2, 3)


def test_types_of_cells_are_groups():
    anndata = pytest.importorskip("anndata")
    import pandas as pd

    import torchgw.anndata

    source, target = (
        anndata.AnnData(
            points,
            obs=pd.DataFrame({"type": pd.Categorical(kind)}, index=list(map(str, range(24)))),
        )
        for points, kind in ((X, KIND), (Y, KIND[ORDER]))
    )
    options = {"n_init": 1, "random_state": 0}
    found = torchgw.anndata.align(source, target, groups_key="type", solve_options=options)
    assert (found.plan[MIXED] == 0).all()
    with pytest.raises(InvalidInputError, match="has 'type'"):
        torchgw.anndata.align(source, target, groups_key="types", solve_options=options)
    with pytest.raises(InvalidInputError, match="not both"):
        torchgw.anndata.align(
            source, target, groups_key="type", solve_options={"groups": (KIND, KIND)}
        )


def test_a_column_names_matched_cells():
    anndata = pytest.importorskip("anndata")
    import pandas as pd

    import torchgw.anndata

    names = np.array([f"cell {place}" for place in range(24)], dtype=object)
    given = names.copy(), names[ORDER]
    given[0][5:15], given[1][:4] = None, ""
    source, target = (
        anndata.AnnData(
            points, obs=pd.DataFrame({"barcode": column, "one": "x"}, index=[*map(str, range(24))])
        )
        for points, column in ((X, given[0]), (Y, given[1]))
    )
    options = {"n_init": 1, "random_state": 0, "epsilon": 1.0}
    found = torchgw.anndata.align(source, target, pairs_key="barcode", solve_options=options)
    known = [j for j, i in enumerate(ORDER) if j >= 4 and not 5 <= i < 15]
    assert found.plan[ORDER[known], known] == pytest.approx(1 / 24)
    assert found.report.allowed["decided"] == len(known)
    for key, message in (("one", "several cells"), ("code", "has 'barcode'")):
        with pytest.raises(InvalidInputError, match=message):
            torchgw.anndata.align(source, target, pairs_key=key, solve_options=options)
    target.obs["barcode"] = "other " + target.obs_names
    with pytest.raises(InvalidInputError, match="no cell of"):
        torchgw.anndata.align(source, target, pairs_key="barcode", solve_options=options)
    with pytest.raises(InvalidInputError, match="not both"):
        torchgw.anndata.align(
            source, target, pairs_key="barcode", solve_options={"pairs": [(0, 0)]}
        )


def test_files_on_the_command_line(tmp_path, capsys):
    np.save(tmp_path / "allowed.npy", (~MIXED).astype(float))
    np.savetxt(tmp_path / "pairs.csv", np.stack([ORDER, np.arange(24)], 1), "%d", ",")
    for name, points, kind in (("X", X, KIND), ("Y", Y, KIND[ORDER])):
        lines = [",".join([*map(str, row), label]) for row, label in zip(points, kind, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["p,q,r,type", *lines]))
    files = [str(tmp_path / f"{name}.csv") for name in "XY"]
    labels, out = ["--label-column", "type"], ["-o", str(tmp_path / "out.npz"), "--plan", "-q"]
    for known in (
        ["--allowed", str(tmp_path / "allowed.npy")], ["--pairs", str(tmp_path / "pairs.csv")],
        ["--same-labels"],
    ):  # fmt: skip
        assert main(["align", *files, *labels, *known, *out, "--n-init", "1"]) == 0
        with np.load(tmp_path / "out.npz") as kept:
            assert (kept["plan"][MIXED] == 0).all()
    np.save(tmp_path / "X.npy", X)
    assert main(["align", str(tmp_path / "X.npy"), files[1], "--same-labels", *out]) == 2
    assert "--label-column" in capsys.readouterr().err


def test_calls_that_do_not_take_them_say_so():
    with pytest.raises(InvalidTypeError, match="no argument 'allowed'"):
        torchgw.solve_many([X], [Y], allowed=~MIXED)
    infinite = np.where(MIXED, np.inf, 0.0)
    with pytest.raises(InvalidInputError, match=r"torchgw\.solve alone"):
        torchgw.solve_many([X], [Y], M=[infinite])
    with pytest.raises(InvalidInputError, match=r"torchgw\.solve alone"):
        torchgw.solve_low_rank(X, Y, rank=2, M=infinite)
