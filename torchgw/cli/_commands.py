"""Commands that read a result: info, score, plot, transform; and benchmark, demo, completion."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

import torchgw
from torchgw._boundary.archive import written_whole
from torchgw._boundary.arrays import to_numpy
from torchgw._boundary.console import progress
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._sinkhorn.choose import unavailable_backends
from torchgw.cli._arguments import add_columns, add_output_options, positive, spoken
from torchgw.cli._files import check_output, read_array, read_labels, write_array
from torchgw.metrics import foscttm, label_accuracy

if TYPE_CHECKING:
    from torchgw._results.result import GWResult
    from torchgw.distances.points import Space

_OPTIONAL = ("matplotlib", "scikit-learn", "anndata", "pandas", "pyarrow", "networkx")
_KINDS = ("plan", "clouds", "convergence", "confusion", "alternatives")
_SHELLS = ("bash", "zsh", "tcsh", "fish", "powershell")
# Arguments without a placeholder that are files.
_FILES = {"X", "Y", "result", "points"}


def add_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], whole: argparse.ArgumentParser
) -> None:
    """Add the commands of this module to the parser of the whole command line."""

    def add(run: Callable[[argparse.Namespace], int], about: str, more: str, *examples: str) -> Any:
        name = run.__name__.removeprefix("_")
        shown = "".join(f"  torchgw {name}{rest}\n" for rest in examples)
        parser = commands.add_parser(
            name, help=about, description=more, epilog=f"examples:\n{shown}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        parser.set_defaults(run=run)
        add_output_options(parser)
        return parser

    info = add(
        _info, "say what can run here, or what a result file holds",
        "Without a file: versions, devices and backends. With one: its result.",
        "", " out.npz",
    )  # fmt: skip
    score = add(
        _score, "score a result against known partners or labels",
        "Print the value and errors of a result, and scores where answers are given.",
        " out.npz --truth partners.txt", " out.npz --labels-x x.txt --labels-y y.txt --json",
    )  # fmt: skip
    plot = add(
        _plot, "draw a result", "Draw a result to a picture file.",
        " out.npz -o plan.png", " out.npz --kind clouds --lines 50 -o clouds.png",
    )  # fmt: skip
    transform = add(
        _transform, "map new points by a result",
        "Map new points of X to the space of Y, or back, without solving again.",
        " out.npz new.npy -o moved.npy", " out.npz new.csv -o moved.csv --inverse",
    )  # fmt: skip
    certify = add(
        _certify, "bound how much better another plan could be",
        "Compute a value that no plan goes below, with a proof, and write both into the result.",
        " out.npz", " out.npz --seconds 60 --kind one_to_one -o certified.npz",
    )  # fmt: skip
    benchmark = add(
        _benchmark, "time a solve on this machine",
        "Match a spiral with a Swiss roll of given sizes, and report time and quality.",
        "", " --n 2000 --m 2000 --device cpu --json",
    )  # fmt: skip
    demo = add(
        _demo, "match a spiral with a Swiss roll and draw it",
        "Match a spiral with a Swiss roll, print how well, and draw the match.",
        "", " --output demo.png --seed 3",
    )  # fmt: skip
    warmup = add(
        _warmup, "compile the kernels for this GPU",
        "Compile the kernels of default solves for this GPU into Triton's cache, and say where it "
        "lies. Copies of it serve machines with the same GPU and versions (TRITON_CACHE_DIR).",
        "", " --device cuda:0",
    )  # fmt: skip
    completion = add(
        _completion, "print a completion script for a shell",
        "Print a script that makes a shell complete commands, options and files.",
        " bash > torchgw.bash",
    )  # fmt: skip

    for parser, count in (
        (info, "?"), (score, None), (plot, None), (transform, None), (certify, None)
    ):  # fmt: skip
        parser.add_argument(
            "result", nargs=count, help="file written by torchgw align or result.save"
        )
    score.add_argument(
        "--truth", metavar="FILE", help="for each row of X the row of Y that is its partner, from 0"
    )
    for parser in (score, plot):
        parser.add_argument("--labels-x", metavar="FILE", help="a label for each row of X")
        parser.add_argument("--labels-y", metavar="FILE", help="a label for each row of Y")
    plot.add_argument("--kind", default="plan", choices=_KINDS, help="what (default: plan)")
    plot.add_argument(
        "--lines", type=int, default=0, metavar="N",
        help="lines between matched points, with --kind clouds (default: 0)",
    )  # fmt: skip
    certify.add_argument(
        "--seconds", type=float, default=10.0, help="time for it (default: %(default)s)"
    )
    certify.add_argument(
        "--gap", type=float, default=1e-3,
        help="share of the value at which it ends (default: %(default)s)",
    )  # fmt: skip
    certify.add_argument(
        "--kind", default="plan", choices=("plan", "one_to_one"),
        help="bound all plans, or matchings (default: %(default)s)",
    )  # fmt: skip
    certify.add_argument("-o", "--output", type=Path, help="result file to write, with the proof")
    transform.add_argument("points", help="new points, in the forms that align takes")
    transform.add_argument("--inverse", action="store_true", help="map points of Y to X")
    add_columns(transform)
    for parser, what in (
        (plot, "picture, such as plan.png"), (transform, ".npy, .csv or .tsv file to write")
    ):  # fmt: skip
        parser.add_argument("-o", "--output", required=True, type=Path, help=what)
    for parser, n, m in ((benchmark, 1000, 1200), (demo, 400, 500)):
        parser.add_argument(
            "--n", type=positive, default=n, help="points of the spiral (default: %(default)s)"
        )
        parser.add_argument(
            "--m", type=positive, default=m, help="points of the Swiss roll (default: %(default)s)"
        )
    benchmark.add_argument(
        "--repeat", type=positive, default=3,
        help="solves; the first one warms up (default: %(default)s)",
    )  # fmt: skip
    benchmark.add_argument("--device", help="torch device, such as cpu or cuda:0")
    for parser in (score, benchmark, certify):
        parser.add_argument("--json", action="store_true", help="print one JSON object")
    warmup.add_argument("--device", help="torch device, such as cuda:0")
    demo.add_argument(
        "--output", type=Path, default=Path("demo.png"),
        help="picture to write (default: %(default)s)",
    )  # fmt: skip
    demo.add_argument(
        "--seed", type=int, default=0,
        help="seed of the data and of the solve (default: %(default)s)",
    )  # fmt: skip
    completion.add_argument("shell", choices=_SHELLS)
    completion.set_defaults(whole=whole, commands=commands)


def _info(options: argparse.Namespace) -> int:
    """Describe the machine or a file."""
    if options.result is not None:
        result = torchgw.load(options.result)
        print(result)
        if not isinstance(result, torchgw.GWResult):
            return 0
        for name, space in zip("XY", _spaces(result), strict=False):
            if space.points is not None:
                print(f"  {name}: points of shape {tuple(space.points.shape)}")
        for place, item in enumerate(result.alternatives[1:], start=1):
            print(f"  alternative {place}: value {item.value:.6g}, {item.relation or item.label}")
        return 0
    print(f"torchgw       {torchgw.__version__}")
    print(f"python        {platform.python_version()} on {platform.platform()}")
    print(f"torch         {torch.__version__}, {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        print(f"cuda:{index}        {torch.cuda.get_device_name(index)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, reason in unavailable_backends(device).items():
        # the first line, as the messages of compilers are long
        why = "runs" if reason is None else reason.splitlines()[0][:110]
        print(f"{name:13s} {why}  ({device.type})")
    for name in _OPTIONAL:
        print(f"{name:13s} {_version(name)}")
    return 0


def _alignment(path: str) -> GWResult:
    """Read a result; refuse one that is not of an alignment."""
    result = torchgw.load(path)
    if not isinstance(result, torchgw.GWResult):
        raise InvalidInputError(
            f"{path}: holds a {type(result).__name__}, and this command reads a GWResult, which "
            "`torchgw align` and `solve(...).save` write. `torchgw info` reads all."
        )
    return result


def _spaces(result: GWResult) -> tuple[Space, ...]:
    """Look up what the source and the target were made from, if the result holds that."""
    return () if result.extension is None else result.extension.spaces


def _version(package: str) -> str:
    """Find the version of a package that may not be installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _score(options: argparse.Namespace) -> int:
    """Score a result."""
    result = _alignment(options.result)
    scores: dict[str, Any] = {
        "value": result.value, "marginal_error": result.marginal_error,
        "status": result.status.name, "ambiguity": result.ambiguity,
    }  # fmt: skip
    spaces = _spaces(result)
    target = spaces[1].points if spaces else None
    projected = None if target is None else result.lazy_plan.barycentric(target)
    n, m = result.lazy_plan.shape
    if options.truth is not None:
        truth = read_array(options.truth).reshape(-1)
        partners = truth.astype(np.int64)
        valid = (partners == truth) & (partners >= 0) & (partners < m)
        if len(truth) != n or not valid.all():
            raise InvalidInputError(
                f"{options.truth}: expected {n} row numbers of Y, each from 0 to {m - 1}."
            )
        scores["matched"] = float((to_numpy(result.lazy_plan.argmax()) == partners).mean())
        if projected is not None and target is not None:
            scores["foscttm"] = foscttm(projected, target[torch.from_numpy(partners)])
    labels = _labels(options, (n, m))
    if labels is not None:
        own, other = labels
        classes, place = np.unique(other, return_inverse=True)
        moved = to_numpy(result.lazy_plan @ np.eye(len(classes))[place])
        scores["mass_on_same_label"] = float(moved[own[:, None] == classes].sum() / moved.sum())
        if projected is not None and target is not None:
            scores["label_accuracy"] = label_accuracy(projected, own, target, other)
    _print_figures(scores, options.json, width=19, digits=6)
    return 0


def _print_figures(figures: dict[str, Any], as_json: bool, *, width: int, digits: int) -> None:
    """Print figures by name, one in a line or all as one JSON object."""
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:{width}s} {f'{value:.{digits}g}' if isinstance(value, float) else value}")


def _labels(options: argparse.Namespace, shape: tuple[int, int]) -> Any:
    """Read the labels of both sides, ``None`` without them."""
    if (options.labels_x is None) != (options.labels_y is None):
        raise InvalidInputError("--labels-x and --labels-y go together; only one was given.")
    if options.labels_x is None:
        return None
    both = read_labels(options.labels_x), read_labels(options.labels_y)
    for labels, count, name in zip(both, shape, (options.labels_x, options.labels_y), strict=True):
        if len(labels) != count:
            raise InvalidInputError(f"{name}: expected {count} labels, got {len(labels)}.")
    return both


def _plot(options: argparse.Namespace) -> int:
    """Draw a result."""
    written = _check_picture(options.output)
    _save_picture(_draw(_alignment(options.result), options), options.output, dpi=150)
    if not options.quiet:
        print(written)
    return 0


def _draw(result: GWResult, options: argparse.Namespace) -> Any:
    """Draw the kind of picture that was asked for, in a figure of its own."""
    from matplotlib.figure import Figure

    from torchgw import plotting

    figure = Figure(figsize=(9.0, 4.2) if options.kind == "clouds" else (6.0, 5.0))
    figure.set_layout_engine("constrained")
    labels = _labels(options, result.lazy_plan.shape)
    if options.kind == "clouds":
        points = [space.points for space in _spaces(result) if space.points is not None]
        if len(points) != 2:
            raise InvalidInputError("--kind clouds needs a result whose sides were points.")
        colour = None if labels is None else labels[0]
        source, target = (
            figure.add_subplot(1, 2, place, projection="3d" if side.shape[1] >= 3 else None)
            for place, side in enumerate(points, start=1)
        )
        plotting.plot_match(
            result, *points, colour=colour, lines=options.lines, ax=(source, target)
        )
        return figure
    ax = figure.add_subplot()
    if options.kind == "plan":
        plotting.plot_plan(result, order="structure" if labels is None else labels[0], ax=ax)
    elif options.kind == "convergence":
        plotting.plot_convergence(result, ax=ax)
    elif options.kind == "alternatives":
        plotting.plot_alternatives(result, ax=ax)
    elif labels is None:
        raise InvalidInputError("--kind confusion needs --labels-x and --labels-y.")
    else:
        plotting.plot_confusion(result, *labels, ax=ax)
    return figure


def _transform(options: argparse.Namespace) -> int:
    """Map new points."""
    written = check_output(options.output, (".npy", ".csv", ".tsv"), options.result, options.points)
    result = _alignment(options.result)
    points = read_array(options.points, options.id_column, options.label_column)
    mapped = result.inverse_transform(points) if options.inverse else result.transform(points)
    write_array(options.output, mapped)
    if not options.quiet:
        print(f"{written}, {mapped.shape[0]} points")
    return 0


def _certify(options: argparse.Namespace) -> int:
    """Certify a result."""
    if options.output is not None:
        check_output(options.output, (".npz",), options.result)
    result = _alignment(options.result)
    found = result.certify(options.seconds, gap=options.gap, kind=options.kind)
    if options.output is not None:
        result.save(options.output, dense=True)
    _print_figures(
        {"lower_bound": found.lower_bound, "gap": found.gap, "value": found.value,
         "best_value": found.best_value, "method": found.method},
        options.json, width=16, digits=6,
    )  # fmt: skip
    return 0


def _check_picture(path: Path) -> str:
    """Refuse a picture that could not be drawn or written, before the work; see check_output."""
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            "This draws with matplotlib, which is not installed: run `pip install matplotlib`."
        )
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise InvalidInputError(
            f"cannot write {path}: pictures are {', '.join(sorted(kinds))} files."
        )
    return check_output(path, tuple(f".{kind}" for kind in kinds))


def _benchmark(options: argparse.Namespace) -> int:
    """Time a solve on a problem with a known answer."""
    X, Y, angles = _curves(options, 0)
    seconds = []
    for _ in range(options.repeat):
        start = time.perf_counter()
        result = torchgw.solve(X, Y, device=options.device, random_state=0)
        partners = to_numpy(result.lazy_plan.argmax())
        seconds.append(time.perf_counter() - start)
    figures = {
        "n": options.n, "m": options.m, "seconds": float(np.median(seconds[1:] or seconds)),
        "abs_spearman": abs(_correlation(angles, partners)),
        "marginal_error": result.marginal_error, "value": result.value, "backend": result.backend,
        "status": result.status.name,
        "phases": {name: round(value, 4) for name, value in result.timings.items()},
    }  # fmt: skip
    _print_figures(figures, options.json, width=16, digits=5)
    return 0 if result.converged else 1


def _save_picture(figure: Any, path: Path, dpi: int) -> None:
    """Write a picture in the form that its name says."""
    with written_whole(path) as file:
        figure.savefig(file, dpi=dpi, format=path.suffix.removeprefix(".").lower())


def _warmup(options: argparse.Namespace) -> int:
    """Compile kernels."""
    folder = torchgw.warmup(options.device, verbose=not options.quiet)
    print(f"compiled kernels lie in {folder}")
    return 0


def _demo(options: argparse.Namespace) -> int:
    """Match a spiral with a Swiss roll, report and draw."""
    written = _check_picture(options.output)
    from torchgw.plotting import plot_demo

    X, Y, angles = _curves(options, options.seed)
    start = time.perf_counter()
    with progress(not options.quiet, spoken=spoken) as report:
        asked = torchgw.Options(random_state=options.seed, callback=report)
        result = torchgw.solve(X, Y, options=asked)
    seconds = time.perf_counter() - start
    correlation = _correlation(angles, to_numpy(result.lazy_plan.argmax()))
    _save_picture(plot_demo(result, X, Y, colour=angles[0]), options.output, dpi=130)
    if not options.quiet:
        print(f"spiral {options.n} -> Swiss roll {options.m}")
        print(f"Spearman         {correlation:+.4f}  (matched angle against true angle)")
        print(f"GW value         {result.value:.6g}")
        print(f"marginal error   {result.marginal_error:.2e}")
        print(f"time             {seconds:.2f} s")
        print(f"status           {result.status.name}: {spoken(result.status.advice)}")
        print(written)
    return 0 if result.converged else 1


def _curves(options: argparse.Namespace, seed: int) -> tuple[Any, Any, tuple[Any, Any]]:
    """Make a spiral and a Swiss roll, and the angle of each of their points."""
    from torchgw.datasets import spiral, swiss_roll

    (X, source), (Y, target) = (
        spiral(options.n, random_state=seed), swiss_roll(options.m, random_state=seed + 1)
    )  # fmt: skip
    return X, Y, (source, target)


def _correlation(angles: tuple[Any, Any], partners: NDArray[np.int64]) -> float:
    """Correlate the ranks of the angles of points and of their partners."""
    from scipy.stats import spearmanr

    source, target = angles
    return float(spearmanr(source, target[partners]).statistic)


def _completion(options: argparse.Namespace) -> int:
    """Print a completion script, which shtab makes."""
    if find_spec("shtab") is None:
        raise UnsupportedError(
            "`torchgw completion` needs shtab, which is not installed: run `pip install shtab`."
        )
    import shtab

    for command in options.commands.choices.values():
        for action in command._actions:
            if action.metavar == "DIR":
                action.complete = shtab.DIRECTORY
            elif action.type is Path or action.metavar == "FILE" or action.dest in _FILES:
                action.complete = shtab.FILE
    print(shtab.complete(options.whole, shell=options.shell))
    return 0
