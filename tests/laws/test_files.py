"""Crafted files: whatever is in them, ``load`` gives a result or an error of ours that says why."""

from __future__ import annotations

import copy
import io
import warnings
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from problems import solve_by_name

import torchgw
from torchgw import InvalidInputError
from torchgw._boundary import archive
from torchgw._boundary.trees import encode
from torchgw._errors import CacheWarning

# What stands in the place of a part, and of an array.
ODD_PARTS = [
    None, True, -1, 0, 1e308, float("nan"), 10**40, "", "CONVERGED", [], [1], {}, {"tensor": "x"},
    {"tensor": []}, {"array": "metadata"}, {"dict": []}, {"dict": {"a": 1}}, {"tuple": [1, 2]},
    {"tuple": {}}, {"list": [[]]}, {"type": "Status", "parts": {"name": "LOST"}},
    {"type": "Status", "parts": {}}, {"type": [], "parts": {}}, {"type": "csr", "parts": []},
    {"type": "GWResult", "parts": {}}, {"type": "Loss", "parts": {"name": []}},
    {"type": "os.system", "parts": {"command": "true"}}, {"tensor": "x", "array": "y"},
]  # fmt: skip
ODD_ARRAYS = [
    np.zeros(0), np.zeros((0, 3)), np.float64(1), np.ones((2, 2, 2)), np.full(3, np.nan),
    np.arange(5) - 9, np.array(["a"]), np.ones(4, complex), np.array(["2020"], "datetime64[Y]"),
    np.ones(3, bool), np.ones(7, np.float16), np.zeros(2, [("a", "i4")]), np.full(9, 2**62),
]  # fmt: skip


def save_all(folder):
    """One file of each kind of result."""
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(7, 2)), rng.normal(size=(6, 2))
    options = {"epsilon": 0.1, "random_state": 0, "max_iter": 30, "n_init": 2}
    square = {"distances": "sqeuclidean", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        results = [
            torchgw.solve(X, Y, **square),
            torchgw.solve(X, Y, distances="euclidean", features=(X, Y), mass=0.5, **options),
            solve_by_name(X, Y, gradient="sampled", loss="absolute", n_anchors=40, **options),
            torchgw.solve_low_rank(X, Y, rank=2, distances="sqeuclidean", random_state=0),
            torchgw.barycenter([X, Y], 4, distances="sqeuclidean", epsilon=0.1, random_state=0),
        ]
    paths = []
    for number, (result, dense) in enumerate([(each, d) for each in results for d in (0, 1)]):
        if dense and not hasattr(result, "potential_a"):
            continue
        paths.append(folder / f"{number}.npz")
        result.save(paths[-1], **({"dense": True} if dense else {}))
    return paths


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return [archive.read_archive(path) for path in save_all(tmp_path_factory.mktemp("corpus"))]


def places(node, path=()):
    """Every place in a tree, as keys that lead there."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, part in list(items):
        yield (*path, key)
        if isinstance(part, (dict, list)):
            yield from places(part, (*path, key))


def mutate(tree, arrays, rng):
    """Change one to three things of a file."""
    tree, arrays = copy.deepcopy(tree), dict(arrays)
    for _ in range(rng.integers(1, 4)):
        known = list(places(tree))
        kind = rng.integers(6)
        if kind == 0 and arrays:
            name = list(arrays)[rng.integers(len(arrays))]
            arrays[name] = ODD_ARRAYS[rng.integers(len(ODD_ARRAYS))]
            continue
        if kind == 1 and arrays:
            arrays.pop(list(arrays)[rng.integers(len(arrays))])
            continue
        if kind == 2 and len(arrays) > 1:
            first, second = (list(arrays)[k] for k in rng.choice(len(arrays), 2, replace=False))
            arrays[first], arrays[second] = arrays[second], arrays[first]
            continue
        if not known:
            continue
        *path, last = known[rng.integers(len(known))]
        node = tree
        for key in path:
            node = node[key]
        if kind == 3:
            del node[last]
        elif kind == 4 and isinstance(node, dict):
            node[f"{last}_"] = copy.deepcopy(node[last])
        else:
            node[last] = copy.deepcopy(ODD_PARTS[rng.integers(len(ODD_PARTS))])
    return tree, arrays


def craft(corpus, path, seed):
    """Load a mutated file; return why it was refused, or nothing."""
    rng = np.random.default_rng([5, seed])
    archive.write_archive(path, *mutate(*corpus[seed % len(corpus)], rng))
    refusal = ""
    try:
        repr(torchgw.load(path))
    except InvalidInputError as error:
        refusal = str(error)
    assert not refusal or "`" in refusal, f"no part is named: {refusal}"
    return refusal


@cache
def own_corpus():
    folder = TemporaryDirectory()
    paths = save_all(Path(folder.name))
    return [archive.read_archive(path) for path in paths], folder


def attempt(number, device):
    """Try the file of a number, for ``fuzz_run.py``; files know no device."""
    corpus, folder = own_corpus()
    refusal = craft(corpus, Path(folder.name) / "crafted.npz", number)
    return {"ended": "refused" if refusal else "loaded", "wrong": [], "refusal": refusal}


def test_crafted_files_are_results_or_refused(corpus, tmp_path):
    count = 120
    refused = sum(bool(craft(corpus, tmp_path / "crafted.npz", seed)) for seed in range(count))
    # most mutations are noticed, and not by refusing everything
    assert 0.5 * count < refused < count
    for tree, arrays in corpus:
        archive.write_archive(tmp_path / "whole.npz", tree, arrays)
        torchgw.load(tmp_path / "whole.npz")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda f: f.pop("potential_a"), "potential_a"),
        (lambda f: f.update(potential_a={"tensor": "none"}), "potential_a"),
        (lambda f: f.update(status={"type": "Status", "parts": {"name": "LOST"}}), "status"),
        (lambda f: f.update(epsilon="small"), "epsilon"),
        (lambda f: f.update(epsilon=[1]), "epsilon"),
        (lambda f: f.update(timings={"dict": {"a": "soon"}}), "timings"),
        (lambda f: f["report"]["parts"].pop("kl"), "kl"),
        (lambda f: f["report"]["parts"].update(kl={"tensor": "x"}), "report.kl"),
        (
            lambda f: f["report"]["parts"].update(distances={"dict": {"why": "so"}}),
            "report.*distances",
        ),
        (lambda f: f["scale"]["tuple"].append(1), "scale"),
        (lambda f: f["lazy_plan"]["parts"].pop("potentials"), "lazy_plan"),
        (lambda f: f["lazy_plan"]["parts"].update(epsilon=None), "lazy_plan.*epsilon"),
        (lambda f: f["history"]["tuple"].insert(0, 3), "history"),
        (lambda f: f.update(potential_b=f["potential_a"]), "potential_b"),
        (lambda f: f.update(extension=f["status"]), "extension"),
    ],
)
def test_the_field_is_named(corpus, change, named, tmp_path):
    tree, arrays = copy.deepcopy(corpus[0])
    change(tree["fields"])
    archive.write_archive(tmp_path / "odd.npz", tree, arrays)
    with pytest.raises(InvalidInputError, match=rf"odd\.npz: .*{named}"):
        torchgw.load(tmp_path / "odd.npz")


@pytest.mark.parametrize(
    "parts",
    [
        {"indptr": np.array([0, 5, 2])},
        {"indices": np.array([0, 99, 1])},
        {"indices": np.array([-1, 0, 1])},
        {"indptr": np.array([0.0, 1.0, 3.0])},
        {"shape": [2]},
        {"shape": [10**12, 3]},
        {"shape": [-2, 3]},
        {"shape": [2, "3"]},
    ],
    ids=str,
)
def test_sparse_matrices_are_checked(parts, tmp_path):
    good = {
        "data": np.ones(3), "indices": np.array([0, 2, 1]), "indptr": np.array([0, 2, 3]),
        "shape": [2, 3],
    } | parts  # fmt: skip
    arrays: dict = {}
    coded = {
        name: {"list": part} if name == "shape" else encode(part, name, None, arrays)
        for name, part in good.items()
    }
    tree = {"kind": "GWResult", "fields": {"lazy_plan": {"type": "csr", "parts": coded}}}
    archive.write_archive(tmp_path / "odd.npz", tree, arrays)
    with pytest.raises(InvalidInputError, match="lazy_plan"):
        torchgw.load(tmp_path / "odd.npz")


def sealed(path, members, text):
    """Write a file whose checksum is right, with any JSON."""
    members = {**members, "metadata": np.frombuffer(text, np.uint8)}
    members["checksum"] = np.asarray(archive._digest(members))
    np.savez(path, **members)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe",
        b'{"format": "torchgw result"}',
        b'{"format": "torchgw result", "version": []}',
        b'{"format": "torchgw result", "version": 1}',
        b'{"format": "torchgw result", "version": 1, "tree": []}',
        b'{"format": "torchgw result", "version": 1, "tree": {"kind": []}}',
        b'{"format": "torchgw result", "version": 1, "tree": {"kind": "GWResult"}}',
        b'{"format": "torchgw result", "version": 1, "tree": {"kind": "GWResult", "fields": []}}',
        b'{"format": "torchgw result", "version": 1, "tree": {"kind": "GWResult", "kind": 1}}',
        b"[" * 200_000,
        b'{"format": "torchgw result", "version": 1, "tree": {"kind": "GWResult", "fields": {"a": '
        + b'{"list": [' * 200 + b"]}" * 200 + b"}}}",
        b'{"format": "torchgw result", "version": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda text: text[:40].decode(errors="replace"),
)  # fmt: skip
def test_odd_metadata(text, tmp_path):
    sealed(tmp_path / "odd.npz", {}, text)
    with pytest.raises(InvalidInputError):
        torchgw.load(tmp_path / "odd.npz")


def header(shape="(3,)", descr="'<f8'", order="False"):
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        header("(100000000000,)"),
        header("(100000000000,)") + bytes(24),
        header("(100000000000,)", "'<U0'"),
        header("(0, 1000000000000000000000000)"),
        header("(-3,)") + bytes(24),
        header("(3.0,)") + bytes(24),
        header("3") + bytes(24),
        header("(3,)") + bytes(23),
        header("(3,)") + bytes(25),
        header("(1,)", "'|O'") + bytes(8),
        header("(" * 900 + ")" * 900),
        header("(3,)", "'<f8'", "7") + bytes(24),
        b"\x93NUMPY\x09\x00" + bytes(50),
        b"",
    ],
    ids=lambda content: repr(content[10:80]),
)
def test_headers_that_claim_what_is_not_there(content, tmp_path):
    """Nothing is allocated by what a header says."""
    with zipfile.ZipFile(tmp_path / "odd.npz", "w") as file:
        for name, value in (("metadata", np.zeros(1, np.uint8)), ("checksum", np.asarray("x"))):
            stream = io.BytesIO()
            np.save(stream, value)
            file.writestr(f"{name}.npy", stream.getvalue())
        file.writestr("a.npy", content)
    with warnings.catch_warnings():
        # NumPy says that a header looks like one of Python 2
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(InvalidInputError, match="damaged"):
            torchgw.load(tmp_path / "odd.npz")


def test_members_that_come_twice_or_are_compressed(corpus, tmp_path):
    tree, arrays = corpus[0]
    archive.write_archive(tmp_path / "good.npz", tree, arrays)
    with zipfile.ZipFile(tmp_path / "good.npz") as good:
        members = {name: good.read(name) for name in good.namelist()}
    with zipfile.ZipFile(tmp_path / "twice.npz", "w") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name, content in [*members.items(), *list(members.items())[:1]]:
            file.writestr(name, content)
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
        file.writestr("a.npy", header("(100000000,)") + bytes(10**6))
    for name, reason in (("twice", "comes twice"), ("bomb", "compressed")):
        with pytest.raises(InvalidInputError, match=reason):
            torchgw.load(tmp_path / f"{name}.npz")


def test_an_odd_entry_of_a_cache_is_made_again(tmp_path):
    """With a warning, whatever it holds."""
    points = np.random.default_rng(0).normal(size=(12, 2))
    options = {"cache": tmp_path, "n_init": 1, "random_state": 0, "epsilon": 0.1}
    expected = solve_by_name(points, points, **options)
    for tree in ({"dict": 3}, 7, None, {"list": []}, {"type": "Status", "parts": {}}):
        for path in tmp_path.iterdir():
            archive.write_archive(path, tree, {})
        with pytest.warns(CacheWarning, match="computed again"):
            again = solve_by_name(points, points, **options)
        assert again.value == expected.value
